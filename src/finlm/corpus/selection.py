"""Decide which documents are used and which are held out: a reason per document, after everything is read.

Exact duplicates are found over all sources by the 128-bit hash of the normalised text, near-duplicates by near.py; the
first in the sources' order stays. Of what is then left of a file source, a share chosen by hash is held out; the
embedded corpus has a held-out split already. No training document equals a held-out one, whatever the settings; with
dedup near, none repeats a held-out one either.

The lowest hashes would move with the size of a source, and documents that were held out of a small one would be trained
on in a large one. So the whole share is kept out of training, and beyond held_out_documents it is only reserved.

Samples of dropped documents are kept for people to look at, and documents.json lists lengths, reasons and frequent
values of the prepared data. Memory: about 80 bytes a document, 1 GB for 12 million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Step
from finlm.corpus import documents
from finlm.recipe.schema_data import Data
from finlm.rows.shards import Split

VERSION = 4
SPLITS: tuple[Split, ...] = ("train", "held_out")

(
    TRAIN,
    HELD_OUT,
    TOO_SHORT,
    DUPLICATE,
    EQUALS_HELD_OUT,
    NEAR_DUPLICATE,
    NEAR_HELD_OUT,
    PERPLEXITY,
    CONTAMINATED,
    RESERVED,
) = range(10)
NAMES = (
    "kept",
    "held_out",
    "too_short",
    "duplicate",
    "equals_held_out",
    "near_duplicate",
    "near_held_out",
    "perplexity",
    "contaminated",
    "reserved",
)
LABELS_AT_ONCE = 2**20  # documents
_READ = ("rows", "broken", "cleaned")  # counted where rows are read

Decisions = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Table:
    """Per-document columns of all documents in order: arrays [documents]."""

    source: npt.NDArray[np.int32]  # number of the input, ascending
    characters: npt.NDArray[np.uint32]
    text_bytes: npt.NDArray[np.int64]
    hash: npt.NDArray[np.uint64]  # [documents, 2]
    group: npt.NDArray[np.uint64] | None = None  # of held_out_by, as in documents.SIDES; None: no field decides
    day: npt.NDArray[np.uint32] | None = None

    @classmethod
    def read(cls, chunks: Sequence[documents.Chunk]) -> Table:
        """Return the table of all documents of the chunks, read from their .npy files."""
        indexes = [documents.read_index(chunk.path) for chunk in chunks] or [np.empty(0, dtype=documents.INDEX)]
        counts = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
        is_sided = [index.dtype == documents.SIDES for index in indexes]
        sides = [
            np.concatenate(
                [
                    index[name] if has else np.zeros(len(index), kind)
                    for index, has in zip(indexes, is_sided, strict=True)
                ]
            )
            for name, kind in (("group", np.uint64), ("day", np.uint32))
            if any(is_sided)
        ]
        return cls(
            np.repeat(np.array([chunk.input for chunk in chunks], dtype=np.int32), counts),
            np.concatenate([index["characters"] for index in indexes]),
            np.concatenate([np.diff(index["end"].astype(np.int64), prepend=0) for index in indexes]),
            np.concatenate([index["hash"] for index in indexes]),
            *sides,
        )

    def rows_of(self, number: int) -> slice:
        """Return the slice of the documents of input `number`."""
        return slice(*np.searchsorted(self.source, [number, number + 1]).tolist())


def decide(
    table: Table, splits: Sequence[str], settings: Data, prompts: npt.NDArray[np.uint64] | None = None
) -> Decisions:
    """Return a decision code (TRAIN, HELD_OUT, ...) per document, without near-duplicates and the other filters.

    `splits` has the split of each input. `prompts` [documents, 2] are hashes of the part that training and held-out
    documents may not share; None means the whole text.
    """
    return hold_out(table, splits, settings, settle(table, splits, settings, prompts=prompts), prompts=prompts)


def settle(
    table: Table,
    splits: Sequence[str],
    settings: Data,
    dropped: Decisions | None = None,
    prompts: npt.NDArray[np.uint64] | None = None,
) -> Decisions:
    """Return the decision code of each document before near-duplicates are dropped, uint8 [documents].

    Documents that are still in use get TRAIN, or HELD_OUT in an input whose split is held_out. `dropped` [documents]
    holds PERPLEXITY or CONTAMINATED for documents that other steps drop, else TRAIN. `splits` and `prompts` are those
    of decide().
    """
    decision = np.full(len(table.source), TRAIN, dtype=np.uint8)
    is_world = np.array([split == "held_out" for split in splits], dtype=np.bool_)[table.source]
    decision[is_world] = HELD_OUT
    if dropped is not None:
        decision[dropped != TRAIN] = dropped[dropped != TRAIN]
    decision[table.characters < max(1, settings.min_characters)] = TOO_SHORT
    equal = equal_texts(table.hash)
    if settings.dedup.method != "none":
        decision[_find_repeats(equal, decision)] = DUPLICATE
    together = equal if prompts is None else equal_texts(prompts)
    of_world = _in_group_of(together, decision == HELD_OUT) & ~is_world
    decision[of_world & np.isin(decision, (TRAIN, DUPLICATE))] = EQUALS_HELD_OUT
    return decision


def hold_out(
    table: Table,
    splits: Sequence[str],
    settings: Data,
    settled: Decisions,
    like: npt.NDArray[Any] | None = None,
    prompts: npt.NDArray[np.uint64] | None = None,
) -> Decisions:
    """Return a copy of `settled` with near-duplicates dropped, and with documents of split "share" held out.

    `like` [documents] has the index of the document that a near-duplicate repeats, else its own index
    (near.find_likes); None skips near-duplicates. A training document that shares its text or prompt with a held-out or
    reserved one becomes EQUALS_HELD_OUT.
    """
    decision, equal = settled.copy(), equal_texts(table.hash)
    together, hashes = (equal, table.hash) if prompts is None else (equal_texts(prompts), prompts)
    if like is not None:
        for repeats, repeated in list_repeats(like):
            of_world = (settled[repeated] == HELD_OUT) & (settled[repeats] != HELD_OUT)
            decision[repeats] = np.where(of_world, NEAR_HELD_OUT, NEAR_DUPLICATE)
    apart = _find_apart(table, splits, settings)
    for number, split in enumerate(splits):
        if split == "share":
            here = np.flatnonzero(decision[table.rows_of(number)] == TRAIN) + table.rows_of(number).start
            if apart is None:
                decision[here] = _split_source(equal[here], hashes[here, 0], settings)
                continue
            here = here[apart[here]]
            decision[here] = RESERVED
            decision[here[np.argsort(hashes[here, 0], kind="stable")][: settings.held_out_documents]] = HELD_OUT
    # Without dedup, one source's held-out document may stand in another source; a prompt may in any case.
    alike = _in_group_of(together, np.isin(decision, (HELD_OUT, RESERVED)))
    decision[(decision == TRAIN) & alike] = EQUALS_HELD_OUT
    return decision


def _find_apart(table: Table, splits: Sequence[str], settings: Data) -> Bools | None:
    """Return which documents a field keeps out of training, bool [documents]; None if the table has no such field.

    With held_out_by, these are documents whose field value hashes into the lowest held_out_fraction. Among the values
    in sources of split "share" that is at least one, but never all; none if there is a single value. With
    held_out_from, these are documents of that day or later. `splits` has the split of each source.
    """
    if table.group is None or table.day is None:
        return None
    apart = np.zeros(len(table.source), dtype=np.bool_)
    if settings.held_out_from:
        apart = table.day >= int(settings.held_out_from.replace("-", ""))
    values = np.unique(table.group[np.array([split == "share" for split in splits])[table.source]])
    if settings.held_out_by and settings.held_out_fraction and len(values) > 1:
        limit = np.uint64(min(2**64 - 1, int(settings.held_out_fraction * 2**64)))
        apart |= (table.group <= max(limit, values[0])) & (table.group < values[-1])
    return apart


def list_repeats(like: npt.NDArray[Any]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (documents that repeat another, the document that each repeats), for blocks of LABELS_AT_ONCE documents.

    `like` [documents] has the index of what a document repeats, else its own. A block may have no such documents.
    """
    for first in range(0, len(like), LABELS_AT_ONCE):
        here = np.array(like[first : first + LABELS_AT_ONCE], dtype=np.int64)
        repeats = np.flatnonzero(here != np.arange(first, first + len(here)))
        yield repeats + first, here[repeats]


def equal_texts(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Return for each document the index of the first document with the same hash, uint32 [documents].

    `hashes` is [documents, 2]. Above 2**20 documents, sorts them in 64 parts to save memory.
    """
    first = np.empty(len(hashes), dtype=np.uint32)
    part = (hashes[:, 0] >> np.uint64(58)).astype(np.uint8)
    for number in range(64 if len(hashes) > 2**20 else 1):
        here = np.flatnonzero(part == number) if len(hashes) > 2**20 else np.arange(len(hashes))
        here = here[np.lexsort((hashes[here, 1], hashes[here, 0]))]  # stable: equal texts stay in order
        starts = np.ones(len(here), dtype=np.bool_)
        starts[1:] = (hashes[here[1:]] != hashes[here[:-1]]).any(axis=1)
        first[here] = here[starts][np.cumsum(starts) - 1]
    return first


def write_decisions(directory: Path, decision: Decisions) -> None:
    """Write decisions.npy into directory: one byte per document, in the documents' order."""
    np.save(directory / "decisions.npy", decision)


SourceCounts = dict[str, dict[str, int]]  # {source: {reason or what: number}}


@dataclass(frozen=True)
class Counts:
    """The manifest of the selection step: counts by source and in all."""

    sources: SourceCounts
    total: dict[str, int]


class Selection:
    """A finished selection step."""

    def __init__(self, step: Step) -> None:
        self.path, self.key = step.path, step.key
        self.counts = Counts(step.manifest["sources"], step.manifest["total"])
        self.leak: dict[str, int] = step.manifest.get("leak", {})  # near.count_leak
        self.total = self.counts.total

    def decisions(self) -> Decisions:
        """Return the code of each document, from decisions.npy."""
        decision: Decisions = np.load(self.path / "decisions.npy")
        return decision


def count_decisions(table: Table, decision: Decisions, inputs: Sequence[documents.InputRead]) -> SourceCounts:
    """Return {source: {rows, broken, cleaned, a count for each of NAMES, bytes, held_out_bytes}}.

    `cleaned` counts rows dropped by cleaning, `bytes` the text of the training documents.
    """
    counts: dict[str, dict[str, int]] = {}
    for number, item in enumerate(inputs):
        here = table.rows_of(number)
        row = counts.setdefault(item.source, dict.fromkeys((*_READ, *NAMES, "bytes", "held_out_bytes"), 0))
        row["rows"] += item.rows
        row["broken"] += item.broken
        row["cleaned"] += sum(item.dropped.values())
        for code, name in enumerate(NAMES):
            row[name] += int(np.count_nonzero(decision[here] == code))
        row["bytes"] += int(table.text_bytes[here][decision[here] == TRAIN].sum())
        row["held_out_bytes"] += int(table.text_bytes[here][decision[here] == HELD_OUT].sum())
    return counts


def find_empty_sources(counts: Mapping[str, Mapping[str, int]], entries: Mapping[str, str]) -> list[str]:
    """Return the sources that have no document to train on; `entries` maps each source to its recipe key.

    Some sources of an entry may be empty. Raises UserError for an entry whose sources are all empty.
    """
    empty = [source for source, row in counts.items() if row["kept"] == 0]
    used = {entries[source] for source, row in counts.items() if row["kept"]}
    for source in empty:
        if entries[source] not in used:
            reasons = ", ".join(f"{counts[source][name]:,} {name.replace('_', ' ')}" for name in (*_READ, *NAMES[1:]))
            raise UserError(
                f"source {source} has no document to train on",
                evidence=reasons,
                fix=f"take {entries[source]} out, or look at data.clean, data.dedup, data.decontaminate, "
                "data.min_characters and data.held_out_fraction",
            )
    return empty


def total_counts(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return {name: sum over all sources} of the counts; there must be at least one source."""
    rows = list(counts.values())
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def _find_repeats(group: npt.NDArray[np.uint32], decision: Decisions) -> Bools:
    """Return which documents still in use repeat another of their group: bool [documents].

    `group` [documents] is what equal_texts returns; `decision` [documents] holds codes, those in use being at most
    HELD_OUT. In each group the first held-out document stays, or the first of those in use when none is held out.
    """
    number = np.arange(len(group), dtype=np.uint64)
    order = number + (np.uint64(2**32) * (decision != HELD_OUT))
    in_use = decision <= HELD_OUT
    first = np.full(len(group), 2**64 - 1, dtype=np.uint64)
    np.minimum.at(first, group[in_use], order[in_use])
    repeats: Bools = in_use & (first[group] != order)
    return repeats


def _in_group_of(group: npt.NDArray[np.uint32], chosen: Bools) -> Bools:
    """Return bool [documents]: whether a document of the same group is `chosen`."""
    groups = np.zeros(len(group), dtype=np.bool_)
    groups[group[chosen]] = True
    return groups[group]


def _split_source(texts: npt.NDArray[np.uint32], hashes: npt.NDArray[np.uint64], settings: Data) -> Decisions:
    """Return TRAIN, HELD_OUT or RESERVED for each document of a source, in order.

    `texts` is equal for equal documents. `hashes` [documents] is of the part (text or prompt) that held-out and
    training documents may not share. Documents with hashes in the lowest held_out_fraction are kept out of training; if
    there are two different hashes, at least one and never all. Of these, at most held_out_documents with the lowest
    hashes are HELD_OUT, the others RESERVED. Of equal documents the first is HELD_OUT and the others stay TRAIN.
    """
    decision = np.full(len(hashes), TRAIN, dtype=np.uint8)
    lowest, place = np.unique(hashes, return_inverse=True)
    if len(lowest) < 2 or settings.held_out_fraction == 0 or settings.held_out_documents < 1:
        return decision
    limit = np.uint64(min(2**64 - 1, int(settings.held_out_fraction * 2**64)))
    # The lowest of the first two, three, ... hashes: each was held out when the source ended there.
    second = int(np.argmax(hashes != hashes[0]))
    apart = (hashes <= limit) | np.isin(hashes, np.minimum.accumulate(hashes)[second:])
    apart &= hashes < lowest[-1]
    decision[apart] = RESERVED
    _, first = np.unique(texts, return_index=True)
    order = first[np.argsort(place[first], kind="stable")]
    chosen = order[apart[order] & (hashes[order] <= max(limit, lowest[0]))][: settings.held_out_documents]
    decision[np.isin(hashes, hashes[chosen])] = TRAIN  # what equals a held-out one gets that reason
    decision[chosen] = HELD_OUT
    return decision


EDGES = (0, *(2**power for power in range(5, 18)))  # tokens; the last class is open


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard in the manifest of a shards directory."""

    source: str
    split: Split
    file: str
    sha256: str
    index_sha256: str
    mask_sha256: str | None = None  # of dialogues
    tokens: int
    documents: int
    text_bytes: int
    learnt: int | None = None  # tokens of dialogues that are learnt from

    def to_json(self) -> dict[str, str | int]:
        """Return the entry as manifest.json has it, without fields that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def totals(entries: Sequence[ShardEntry]) -> dict[str, SourceCounts]:
    """Return the sums over shards as {split: {source: {tokens, documents, text_bytes, learnt}}}.

    `learnt`, the tokens that are learnt from, is there only for dialogues.
    """
    sums: dict[str, SourceCounts] = {split: {} for split in SPLITS}
    for entry in entries:
        counts = {name: getattr(entry, name) for name in ("tokens", "documents", "text_bytes", "learnt")}
        row = sums[entry.split].setdefault(entry.source, {})
        for name, count in counts.items():
            if count is not None:
                row[name] = row.get(name, 0) + count
    return sums


def write_description(
    directory: Path, entries: Sequence[ShardEntry], inputs: Sequence[documents.InputRead], counts: Counts
) -> None:
    """Write documents.json into a shards directory: counts by source and in all, files, lengths, reasons, values."""
    about = {
        **asdict(counts),
        "files": [file for item in inputs for file in item.files],
        "pinned": {item.source: item.pinned for item in inputs if item.pinned},
        "lengths": {source: asdict(lengths) for source, lengths in _measure_lengths(directory, entries)},
        "cleaned": sum_by_source((item.source, item.dropped) for item in inputs),
        "values": {item.source: item.values for item in inputs if item.values},
    }
    files.write_json(directory / "documents.json", about)


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the training documents of a source."""

    documents: int
    tokens: int
    median: int
    longest: int
    histogram: list[list[int]]  # [from tokens, documents, tokens]


def _measure_lengths(directory: Path, entries: Sequence[ShardEntry]) -> Iterator[tuple[str, Lengths]]:
    """Yield (source, lengths of its training documents) from the .idx files, for each source with train shards."""
    by_source: dict[str, list[Path]] = {}
    for entry in entries:
        if entry.split == "train":
            by_source.setdefault(entry.source, []).append((directory / entry.file).with_suffix(".idx"))
    for source, paths in by_source.items():
        lengths = np.concatenate([np.diff(np.fromfile(path, dtype="<u8").astype(np.int64)) for path in paths])
        kind = np.searchsorted(EDGES, lengths, side="right") - 1
        numbers = np.bincount(kind, minlength=len(EDGES)).tolist()
        tokens = np.bincount(kind, weights=lengths, minlength=len(EDGES)).astype(np.int64).tolist()
        classes = [list(each) for each in zip(EDGES, numbers, tokens, strict=True) if each[1]]
        median, longest = int(np.median(lengths)), int(lengths.max())
        yield source, Lengths(len(lengths), int(lengths.sum()), median, longest, classes)


def sum_by_source(counted: Iterable[tuple[str, Mapping[str, int]]]) -> SourceCounts:
    """Return {source: summed counts} of (source, counts) pairs, without sources whose counts are empty."""
    sums: dict[str, Counter[str]] = {}
    for source, counts in counted:
        sums.setdefault(source, Counter()).update(counts)
    return {source: dict(counts) for source, counts in sums.items() if counts}
