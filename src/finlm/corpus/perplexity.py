"""Run the steps `language_model` and `perplexity`: how surprising each document is beside a set of clean text.

A character n-gram model, interpolated Kneser-Ney (Chen and Goodman 1999) with one discount an order, in arrays: counts
by sorting hashes, look-ups in open-addressed tables, all documents of a chunk at once; 9 MB/s per core. Digits count as
one character and letters as lower case, so that numbers and names of securities surprise nobody. n-grams of three and
more characters that the clean set has once only are left out, as KenLM's --prune 0 0 1 does.

Why not KenLM: its wheels answer queries only; the trainer lmplz needs a C++ build with Boost, which no package brings.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.base import files, units
from finlm.base.errors import UserError
from finlm.base.step_cache import NotPrepared, Step, bar
from finlm.corpus import clean, documents, ngrams
from finlm.corpus.documents import Documents
from finlm.corpus.read import parsing, readers, sources
from finlm.corpus.read.sources import Input
from finlm.corpus.workers import Arrays, ChunkTask, Context
from finlm.recipe.schema_data import Clean, Perplexity, Source

VERSION = 2
_UNIFORM = 1 / 20_000  # probability of a character that the clean set does not have, before discounting
_FIXED_POINT = 2**20
_EMPTY = np.uint64(2**64 - 1)

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Table:
    """A hash table from 64-bit hashes to numbers: linear probing over sorted hashes, so building needs no loop."""

    slots: Hashes  # [2^bits + spare], _EMPTY where free
    values: Floats
    bits: int

    @classmethod
    def of(cls, hashes: Hashes, values: npt.NDArray[np.floating]) -> Table:
        """Return the table that maps these hashes, which must differ, to the values."""
        order = np.argsort(hashes)
        bits = max(4, int(2 * len(hashes)).bit_length())
        home = (hashes[order] >> np.uint64(64 - bits)).astype(np.int64)
        step = np.arange(len(home))
        place = np.maximum.accumulate(home - step) + step  # the next free slot from home on
        size = max(1 << bits, int(place[-1]) + 1 if len(place) else 0) + 1
        slots, kept = np.full(size, _EMPTY), np.zeros(size, dtype=np.float32)
        slots[place], kept[place] = hashes[order], values[order]
        return cls(slots, kept, bits)

    def look_up(self, hashes: Hashes, missing: float) -> Floats:
        """Return the value of each hash as float32, `missing` for a hash that the table does not have."""
        values = np.full(len(hashes), missing, dtype=np.float32)
        place = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
        waiting: npt.NDArray[np.intp] | slice = slice(None)
        while True:
            slot = self.slots[place]
            hit = slot == hashes
            numbers = np.flatnonzero(hit) if isinstance(waiting, slice) else waiting[hit]
            values[numbers] = self.values[place[hit]]
            further = slot < hashes  # hashes stand in ascending order, so a larger one (or none) ends the search
            if not further.any():
                return values
            waiting = np.flatnonzero(further) if isinstance(waiting, slice) else waiting[further]
            hashes, place = hashes[further], place[further] + 1


@dataclass(frozen=True)
class Model:
    """A character n-gram model: p(c | h) = grams[c after h] + left[h] * p(c | shorter h), from single characters up."""

    order: int
    grams: list[Table]  # one an order, from 1
    left: list[Table]  # one an order, from 2

    def log_perplexity(self, text: ngrams.Characters) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return (mean -ln p per character, number of characters scored) of each document; folds the text first.

        The first order - 1 characters are not scored; the mean of none is 0.
        """
        text = fold_characters(text)
        whole = ngrams.starts(text, self.order)
        count = np.maximum(np.diff(text.starts) - self.order + 1, 0)
        hashes = [ngrams.windows(text.codes, size) for size in range(1, self.order + 1)]
        last = whole + self.order - 1
        # What the single characters' discount leaves is for characters that are not in the table.
        unknown = max(1e-6, 1 - float(self.grams[0].values.astype(np.float64).sum()))
        chance = self.grams[0].look_up(hashes[0][last], 0.0) + np.float32(_UNIFORM) * np.float32(unknown)
        for size in range(2, self.order + 1):
            first = last - size + 1
            chance *= self.left[size - 2].look_up(hashes[size - 2][first], 1.0)
            chance += self.grams[size - 1].look_up(hashes[size - 1][first], 0.0)
        # Whole numbers add up to the same sum whatever stands before a document in its chunk.
        surprise = np.rint(-np.log(chance.astype(np.float64)) * _FIXED_POINT).astype(np.int64)
        total = np.concatenate(([0], np.cumsum(surprise)))
        ends = np.cumsum(count)
        return (total[ends] - total[ends - count]) / np.maximum(count, 1) / _FIXED_POINT, count

    def save(self, path: Path) -> None:
        """Write order and tables to the file `path`, which ends in .npz."""
        tables = {f"grams{number}": table for number, table in enumerate(self.grams)}
        tables |= {f"left{number}": table for number, table in enumerate(self.left)}
        arrays: Arrays = {"order": np.array(self.order)}
        for name, table in tables.items():
            arrays |= {f"{name}.slots": table.slots, f"{name}.values": table.values}
            arrays[f"{name}.bits"] = np.array(table.bits)
        np.savez(path, **arrays)  # type: ignore[arg-type]  # of names that are no argument

    @classmethod
    def load(cls, path: Path) -> Model:
        """Read a model that save() wrote. Raises FileNotFoundError without the file."""
        with np.load(path) as arrays:
            order = int(arrays["order"])

            def table(name: str) -> Table:
                """Return the table of this name in the file."""
                return Table(arrays[f"{name}.slots"], arrays[f"{name}.values"], int(arrays[f"{name}.bits"]))

            return cls(order, [table(f"grams{n}") for n in range(order)], [table(f"left{n}") for n in range(order - 1)])


def train_model(text: ngrams.Characters, order: int) -> Model:
    """Return a model of n-grams of 1 to `order` characters of the folded text; takes 60 bytes of memory each."""
    text = fold_characters(text)
    grams, left = [], []
    for size, (count, hashes, contexts) in _counts(text, order):
        once, twice = int(np.count_nonzero(count == 1)), int(np.count_nonzero(count == 2))
        discount = min(0.95, max(0.1, once / max(1, once + 2 * twice)))
        kept = count > 1 if size > 2 else np.ones(len(count), dtype=np.bool_)
        context, place = np.unique(contexts, return_inverse=True)
        total = np.bincount(place, weights=count, minlength=len(context))
        share = (count - discount) / total[place] * kept
        grams.append(Table.of(hashes[kept], share[kept]))
        if size > 1:
            rest = 1.0 - np.bincount(place, weights=share, minlength=len(context)).astype(np.float64)
            left.append(Table.of(context, rest))
    return Model(order, grams[::-1], left[::-1])


def _counts(text: ngrams.Characters, order: int) -> Iterator[tuple[int, tuple[npt.NDArray[np.int64], Hashes, Hashes]]]:
    """Yield (n, (counts, hashes, context hashes)), arrays over the distinct n-grams, for n from `order` down to 1.

    The context is all but the last character. The longest n-grams are counted as they occur, shorter ones by how many
    different characters stand before them.
    """
    place = ngrams.starts(text, order)
    for size in range(order, 0, -1):
        hashes = ngrams.windows(text.codes, size)[place]
        hashes, first, count = np.unique(hashes, return_index=True, return_counts=True)
        place = place[first]
        shorter = ngrams.windows(text.codes, size - 1)[place] if size > 1 else np.zeros(len(place), dtype=np.uint64)
        yield size, (count, hashes, shorter)
        place = place + 1


def fold_characters(text: ngrams.Characters) -> ngrams.Characters:
    """Return a copy with ASCII letters in lower case, digits as 0, blanks and control characters as spaces."""
    codes = text.codes.copy()
    codes[(codes >= ord("0")) & (codes <= ord("9"))] = ord("0")
    codes[(codes >= ord("A")) & (codes <= ord("Z"))] += 32
    codes[(codes <= ord(" ")) | (codes == 0xA0)] = ord(" ")
    return ngrams.Characters(codes, text.starts)


_ENOUGH = 50  # characters; the perplexity of fewer says little
_HELD_OUT = 10  # every tenth document of the clean set measures what is usual
_LEAST_HELD_OUT = 20


def check_clean_set(context: Context) -> None:
    """Raise UserError if files of the clean set do not exist; do nothing without one, or if the cache may not build."""
    if context.cache.build and context.data.clean.perplexity is not None:
        _find_files(context, context.data.clean.perplexity)


def measure_perplexity(context: Context, read: Documents) -> Step | None:
    """Run the step `perplexity` unless cached; it writes the ln perplexity of each document to log.npy.

    Returns None if the recipe has no data.clean.perplexity. Else also runs the step `language_model`, and prints the
    limit; log.npy is float32 [documents]. Raises UserError for a clean set that cannot be used, NotPrepared if a step
    or a file of the clean set is missing and the cache may not build.
    """
    settings = context.data.clean.perplexity
    if settings is None:
        return None
    model = _make_model(context, settings)

    def make(directory: Path) -> dict[str, float]:
        """Write log.npy into directory; return mean and deviation of the clean set's ln perplexity."""
        beside, key = (model.path / "model.npz",), [VERSION, model.key]
        tasks = [(files.sha256_json([*key, each.key]), ChunkTask(each.path, beside)) for each in read.chunks]
        made = context.map_kept("perplexity", _measure_chunk, tasks)
        parts = [*(arrays["log"] for arrays in made), np.empty(0, dtype=np.float32)]
        np.save(directory / "log.npy", np.concatenate(parts))
        return {"mean": model.manifest["mean"], "deviation": model.manifest["deviation"]}

    depends_on = {"version": VERSION, "documents": read.content, "model": model.key}
    step = context.cache.step("perplexity", depends_on, make, 4 * read.count)
    context.say(step, f"documents above {math.exp(limit(context.data.clean, step)):,.0f} are dropped")
    return step


def limit(settings: Clean, step: Step) -> float:
    """Return the ln perplexity above which documents are dropped: max_perplexity's; auto: mean + sigmas * deviation."""
    assert settings.perplexity is not None  # else there is no step
    if settings.perplexity.max_perplexity != "auto":
        return math.log(settings.perplexity.max_perplexity)
    return float(step.manifest["mean"] + settings.perplexity.sigmas * step.manifest["deviation"])


def surprising_documents(step: Step, settings: Clean) -> npt.NDArray[np.bool_]:
    """Return bool [documents]: whether the document's ln perplexity is above limit(), so that it is dropped."""
    log: npt.NDArray[np.float32] = np.load(step.path / "log.npy")
    return log > np.float32(limit(settings, step))


def _measure_chunk(task: ChunkTask) -> Arrays:
    """Return {"log": ln perplexity of each document, 0 if fewer than 50 characters are scored}. Runs in a worker."""
    text = ngrams.characters(task.chunk.read_bytes(), documents.read_index(task.chunk)["end"])
    log, count = _load_model(*task.beside).log_perplexity(text)
    return {"log": np.where(count >= _ENOUGH, log, 0).astype(np.float32)}


_load_model = lru_cache(maxsize=1)(Model.load)  # a worker has many chunks for one model


def _make_model(context: Context, settings: Perplexity) -> Step:
    """Run the step `language_model` unless cached; it writes model.npz. Print its size and perplexity.

    Raises UserError for a clean set that cannot be used, NotPrepared if something is missing and may not be built.
    """
    rules = context.data.clean.model_copy(update={"perplexity": None})
    inputs = sources.hash_files(_find_files(context, settings), context.cache)

    def make(directory: Path) -> dict[str, object]:
        """Write model.npz into directory; return the manifest."""
        return _train(directory, _choose_clean_texts(inputs, rules, settings.clean_bytes), settings.order)

    depends_on = {
        "version": VERSION,
        "clean": clean.depends_on(rules),
        "clean_set": sorted((item.identity() for item in inputs), key=repr),
        "order": settings.order,
        "clean_bytes": settings.clean_bytes,
    }
    step = context.cache.step("language_model", depends_on, make, 24 * settings.clean_bytes)
    about = step.manifest
    used = [f"{source} {units.format_bytes(size)}" for source, size in about["used"].items()]
    context.say(
        step,
        f"{settings.order}-grams of {', '.join(used[:8])}{', ...' * (len(used) > 8)}; perplexity "
        f"{math.exp(about['mean']):,.0f} on {about['held_out']:,} clean documents held out",
    )
    return step


def _find_files(context: Context, settings: Perplexity) -> list[Input]:
    """Return the inputs of the clean set, without hashes. Raises UserError for a store that does not answer.

    A pattern that matches no file raises UserError, or NotPrepared if the cache may not build.
    """
    key = "data.clean.perplexity.clean_set"
    inputs: list[Input] = []
    for pattern in settings.clean_set:
        if not context.cache.build and not sources.find_files(pattern):
            raise NotPrepared("language_model")
        inputs += sources.find_inputs(Source(path=pattern, text_field=settings.text_field), key)
    return inputs


def _choose_clean_texts(inputs: Sequence[Input], rules: Clean, wanted_bytes: int) -> list[tuple[str, bytes]]:
    """Return about wanted_bytes of distinct cleaned documents of the clean set, as (source, UTF-8 text).

    Takes those with the lowest hashes, in that order, so each file gives in proportion to its text. Documents that the
    rules drop are skipped. Shows a progress bar. Raises UserError for a table without the text's column and a file that
    changed since it was hashed.
    """
    cleaner, total = clean.Cleaner(rules), 0
    chosen: list[tuple[int, str, bytes]] = []  # a heap, the highest hash first
    seen = set[int]()
    size = sum(path.stat().st_size for item in inputs for path in item.paths)
    with bar("language model", size, fast_bytes=20_000_000) as advance:
        rows = (
            (item.source, row)
            for item in inputs
            for block in readers.blocks(item, advance)
            for row in parsing.parse_block(block, item)
        )
        for source, row in rows:
            number = int.from_bytes(hashlib.blake2b(row.text.encode("utf-8", "replace"), digest_size=8).digest())
            if row.broken or number in seen or (total >= wanted_bytes and number > -chosen[0][0]):
                continue  # before cleaning, which takes most of the time
            text, reason = cleaner(row.text)
            if reason or not text:
                continue
            encoded = text.encode()
            heapq.heappush(chosen, (-number, source, encoded))
            seen.add(number)
            total += len(encoded)
            while total - len(chosen[0][2]) >= wanted_bytes:
                total -= len(heapq.heappop(chosen)[2])
    return [(source, text) for _, source, text in sorted(chosen, reverse=True)]


def _train(directory: Path, chosen: Sequence[tuple[str, bytes]], order: int) -> dict[str, object]:
    """Train the model on nine tenths of the texts, of `chosen` (source, text), and write model.npz into `directory`.

    Returns {used: bytes by source, held_out: number of the other texts that count, mean and deviation: of their ln
    perplexity}. Raises UserError when fewer than 20 of the held-out texts are long enough.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    used = Counter[str]()
    for number, (source, text) in enumerate(chosen):
        parts[number % _HELD_OUT == 0].append(text)
        used[source] += len(text)
    train, held_out = (
        ngrams.characters(b"".join(part), np.cumsum([len(text) for text in part], dtype=np.int64)) for part in parts
    )
    model = train_model(train, order)
    log, count = model.log_perplexity(held_out)
    usual = log[count >= _ENOUGH]
    if len(usual) < _LEAST_HELD_OUT:
        raise UserError(
            "data.clean.perplexity.clean_set is too small to say what is usual",
            evidence=f"{len(parts[0]) + len(parts[1]):,} documents, every tenth held out, of those "
            f"{len(usual):,} with {_ENOUGH} characters or more",
            fix=f"name files with at least {_HELD_OUT * _LEAST_HELD_OUT:,} such documents",
        )
    model.save(directory / "model.npz")
    about = {"used": dict(sorted(used.items())), "held_out": len(usual)}
    return about | {"mean": float(usual.mean()), "deviation": float(usual.std())}
