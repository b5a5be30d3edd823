"""Run the steps `sources`, `documents` and `selection`: hashed files, clean documents, a decision per document.

The embedded corpus is generated before its files are hashed. A setting is named in the first step that it changes, and
nowhere else; the next step depends on the key of the one before it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files, step_cache, units
from finlm.base.errors import UserError
from finlm.base.step_cache import NotPrepared, Step
from finlm.corpus import clean, contamination, documents, near, ngrams, perplexity, selection, vocabulary
from finlm.corpus.documents import Documents
from finlm.corpus.read import parsing, readers, sources
from finlm.corpus.read.sources import Input, Split
from finlm.corpus.selection import Selection
from finlm.corpus.workers import Context
from finlm.recipe import parents
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import Source, Synthetic
from finlm.rows import packing

SYNTHETIC_SPLITS: tuple[Split, ...] = ("train", "held_out")
_ALONE_BYTES = 30_000_000


class _Part(NamedTuple):
    """A file of the embedded corpus."""

    source: str
    directory: Path
    size_bytes: int
    seed: int
    split: str
    part: int


def list_inputs(context: Context) -> list[Input]:
    """Return the inputs of all sources with file hashes, in the recipe's order; generates a missing embedded corpus.

    Downloads missing files of Hub data sets, unless the cache may not build: then it raises NotPrepared for them, for
    other missing files, unknown hashes and a missing embedded corpus. Raises UserError for files that cannot be used,
    two sources of one name, and weights of an unknown source.
    """
    inputs: list[Input] = []
    for number, source in enumerate(context.data.sources):
        key = f"data.sources[{number}]"
        if source.synthetic is None:
            if not context.cache.build and source.path is not None and not _has_files(source):
                raise NotPrepared("sources")
            inputs += _with_sides(sources.find_inputs(source, key, fetch=context.cache.build), context.data.sides)
            continue
        step = make_synthetic(context, source.synthetic)
        prefix = f"{source.name}-" if source.name else ""
        for name in step.manifest["files"]["train"]:
            for split in SYNTHETIC_SPLITS:
                paths = tuple(step.path / split / file for file in step.manifest["files"][split][name])
                inputs.append(Input(sources.safe_name(f"{prefix}{name}"), paths, split, entry=key))
    _check_weights(context.recipe, [item.source for item in sources.check_names(inputs) if item.split != "held_out"])
    return sources.hash_files(inputs, context.cache)


def _with_sides(inputs: Sequence[Input], sides: Mapping[str, str]) -> list[Input]:
    """Return copies of the inputs with `sides` (Data.sides). Raises UserError for text files, which have no fields."""
    for item in inputs:
        if sides and item.format in ("txt", "lines"):
            raise UserError(
                f"data.{next(iter(sides))}: source {item.source} is text, whose documents have no field",
                evidence=str(item.paths[0]),
                fix="give JSON lines, parquet or Arrow, or take the key out",
            )
    return [replace(item, sides=sides) for item in inputs]


def _has_files(source: Source) -> bool:
    """Return whether files match the source's path on this machine; False if they cannot be listed."""
    try:
        return bool(sources.find_files(str(source.path), source.split))
    except UserError:  # a disk that is not mounted here
        return False


def _check_weights(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise UserError if tokenizer.sample_weights or data.mixture has a weight for a source that is not in `names`."""
    weights = {"tokenizer.sample_weights": recipe.tokenizer.sample_weights}
    for number, stage in enumerate(recipe.data.mixture):
        weights |= {f"data.mixture[{number}].{name}": getattr(stage, name) for name in ("weights", "to", "tokens")}
    for key, given in weights.items():
        packing.weights_by_source(given or {}, dict.fromkeys(names, 1), key)


def make_synthetic(context: Context, settings: Synthetic) -> Step:
    """Run the step `synthetic` unless cached; it writes the embedded corpus. Print its size and seed.

    The stage and `settings` choose documents, dialogues, pairs or questions. NotPrepared if it may not be built.
    """
    kind = "dialogues" if settings.dialogues else "documents"
    if context.recipe.stage in parents.PREFERENCE:
        kind = "pairs"
    if settings.about != "exam":
        kind = settings.about

    def make(directory: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
        """Write the corpus's files below directory; return their names by split and source."""
        from finlm.world import post, writer  # only recipes without files of their own need them

        sizes = {"train": settings.size, "held_out": settings.held_out_size}
        sources = writer.SOURCES if kind == "documents" else post.SOURCES[kind]
        count_parts = writer.count_parts if kind == "documents" else post.count_parts
        tasks = [
            _Part(source, directory / split, size, settings.seed, split, part)
            for split, size in sizes.items()
            for source in sources
            for part in range(count_parts(source, size))
        ]
        # Starting workers takes as long as one process needs for a small corpus.
        with context.local.start(1 if settings.size < _ALONE_BYTES else len(tasks)) as run:
            names = list(run(_generate_file, tasks))
        names_by_split: dict[str, dict[str, list[str]]] = {split: {source: [] for source in sources} for split in sizes}
        for task, name in zip(tasks, names, strict=True):
            names_by_split[task.split][task.source].append(name)
        return {"files": names_by_split}

    depends_on = {
        "generator": [files.sha256_file(path) for path in generator_files()],
        "size": settings.size,
        "held_out_size": settings.held_out_size,
        "seed": settings.seed,
    } | ({} if kind == "documents" else {"kind": kind})
    step = context.cache.step("synthetic", depends_on, make, settings.size + settings.held_out_size)
    context.say(step, f"{units.format_bytes(settings.size)} about fictional companies, seed {settings.seed}")
    return step


def generator_files() -> list[Path]:
    """Return the sorted files in finlm/world that the embedded corpus depends on: code, phrases and names."""
    world = Path(__file__).parents[1] / "world"
    return sorted(path for path in world.rglob("*") if path.suffix in (".py", ".txt", ".toml"))


def _generate_file(part: _Part) -> str:
    """Write a file of the embedded corpus and return its name. Runs in a worker."""
    from finlm.world import post, writer

    write_part = writer.write_part if part.source in writer.SOURCES else post.write_part
    return write_part(*part).name


def read_documents(context: Context, inputs: Sequence[Input]) -> Documents:
    """Run the step `documents` unless cached; it cleans all inputs. Print its counts.

    Raises UserError when too many rows of a source are broken and, before any is read, when disk or memory will not
    suffice for all steps. Raises NotPrepared if the step or the keyword list is missing and the cache may not build.
    """
    allowed, keep = context.data.max_broken_fraction, context.cache.directory

    rules = context.data.clean
    words = rules.bad_keywords
    if words is not None:  # a worker may have another working directory
        rules = rules.model_copy(update={"bad_keywords": str(Path(words).expanduser().absolute())})

    def make(directory: Path) -> Documents:
        """Write the chunks to the cache, broken.jsonl and dropped.jsonl into directory; return their record."""
        _check_all_steps(context, inputs)
        return documents.write(directory, inputs, rules, context.engine, allowed, keep)

    if words is not None and not context.cache.build and not Path(words).expanduser().is_file():
        raise NotPrepared("documents")
    depends_on = {
        "version": documents.VERSION,
        "clean": clean.depends_on(context.data.clean),
        "inputs": [item.identity() for item in inputs],
    }
    # The disk is looked at before any row is read.
    step = context.cache.step("documents", depends_on, lambda directory: make(directory).to_json(), 0)
    read = Documents.of(step)
    if context.cache.build:
        parsing.check_broken_rows(step.path, read.inputs, allowed, keep)
    dropped = sum(sum(item.dropped.values()) for item in read.inputs)
    context.say(
        step,
        f"{sum(item.rows for item in read.inputs):,} rows of {len({item.source for item in read.inputs})} sources, "
        f"{sum(item.broken for item in read.inputs):,} broken, {dropped:,} dropped, "
        f"{units.format_bytes(sum(item.bytes for item in read.inputs))}"
        f"{readers.describe_cut(list_cut_files(step.path, read.inputs))}",
    )
    return read


def list_cut_files(directory: Path, inputs: Sequence[documents.InputRead]) -> list[str]:
    """Return the names of files that are cut short or damaged, from the broken.jsonl in `directory`."""
    if not any(item.cut for item in inputs):
        return []
    return [row["file"] for row in files.read_json_lines(directory / "broken.jsonl") if readers.is_cut(row["reason"])]


def _sample_rows(inputs: Sequence[Input]) -> tuple[float, float]:
    """Return (share of text in the unpacked bytes, bytes of a document) in the first 200 rows of up to 31 inputs.

    Without any text, assumes a share of 1 and documents of 100 bytes. Raises UserError for a table without the text's
    column, a file that changed since it was hashed, and an archive of a kind that is not read.
    """
    raw = text = rows = 0
    for item in inputs[:: max(1, len(inputs) // 16)]:
        block = next(readers.blocks(item, step_cache.ignore_progress), None)
        for row in itertools.islice(parsing.parse_block(block, item), 200) if block else ():
            raw, text, rows = raw + len(row.raw), text + len(row.text.encode("utf-8", "replace")), rows + 1
    return (min(1.0, text / raw), max(1.0, text / rows)) if text else (1.0, 100.0)


def _check_all_steps(context: Context, inputs: Sequence[Input]) -> None:
    """Raise UserError if disk or memory will not suffice for the steps up to the shards, by sizes and sample rows."""
    settings, (text_share, document_bytes) = context.recipe.tokenizer, _sample_rows(inputs)
    text_bytes = int(readers.estimate_bytes(inputs, packed=3) * text_share)
    count = int(text_bytes / document_bytes)
    rows = 0 if context.recipe.model.vocab_size == "auto" else context.recipe.model.vocab_size
    token_bytes = 4 if context.data.token_dtype == "uint32" or (settings.pieces or rows) > 65536 else 2
    # A Chinese tokenizer has 4 bytes of text a token, kept in chunks and in shards; each document has an index of 28
    # bytes, and 24 with its tokens.
    needed = text_bytes + 2 * text_bytes * token_bytes // 4 + count * (28 + 2 * 24)
    if context.data.dedup.method == "near":
        needed += count * ngrams.SEARCH_BYTES_A_DOCUMENT
    step_cache.require_space(context.cache.directory, needed, "documents to shards")
    if settings.pieces is not None:
        vocabulary.check_memory(min(settings.sample_bytes, text_bytes))


def find_near_duplicates(
    context: Context,
    read: Documents,
    others: Mapping[str, Any],
    settle: Callable[[selection.Table], selection.Decisions],
) -> Step | None:
    """Run the step `near_duplicates` unless cached; it writes like.npy (see near.find_likes).

    None unless data.dedup.method is near. settle(table) returns what selection.settle does; it is called only if the
    step is not in the cache. `others` is everything that its result depends on, for the step's key. Prints the counts.
    Raises NotPrepared if the step is missing and the cache may not build.
    """
    settings = context.data.dedup
    if settings.method != "near":
        return None

    def make(directory: Path) -> dict[str, int]:
        """Write like.npy into directory; return the counts of the manifest."""
        table = selection.Table.read(read.chunks, directory)
        states = near.first_states(settle(table))
        table.remove()
        compared = near.write_likes(context, directory, read.chunks, states)
        like = np.load(directory / "like.npy", mmap_mode="r")
        return {"compared": compared, "duplicates": sum(len(repeats) for repeats, _ in selection.list_repeats(like))}

    depends_on = {
        "version": [near.VERSION, contamination.FACTS_VERSION, ngrams.SIGNATURE_VERSION],
        "threshold": settings.threshold,
        **others,
    }
    step = context.cache.step("near_duplicates", depends_on, make, read.count * ngrams.SEARCH_BYTES_A_DOCUMENT)
    context.say(
        step,
        f"{step.manifest['duplicates']:,} of {read.count:,} documents are near-duplicates of one that is kept "
        f"({step.manifest['compared']:,} pairs compared)",
    )
    return step


def select_documents(context: Context, read: Documents, inputs: Sequence[Input]) -> Selection:
    """Run the step `selection` and those that it needs unless cached. Print the counts.

    The step's decisions.npy has a code per document. If the cache may build, raises UserError for an entry of
    data.sources that has nothing left to train on, or a field that holds out nothing. If it may not, raises NotPrepared
    for a missing step.
    """
    contamination_step = contamination.find_contaminated(context, read)
    perplexity_step = perplexity.measure_perplexity(context, read)
    splits = [item.split for item in read.inputs]

    def settle(table: selection.Table) -> selection.Decisions:
        """Return selection.settle()'s codes, with what the two steps above drop; writes files as it does."""
        dropped = np.full(len(table.source), selection.TRAIN, dtype=np.uint8)
        if perplexity_step is not None:
            dropped[perplexity.surprising_documents(perplexity_step, context.data.clean)] = selection.PERPLEXITY
        if contamination_step is not None:
            dropped[np.load(contamination_step.path / "documents.npy")] = selection.CONTAMINATED
        return selection.settle(table, splits, context.data, dropped)

    others = {
        "documents": read.content,
        "contamination": contamination_step and contamination_step.key,
        "perplexity": perplexity_step and [perplexity_step.key, perplexity.limit(context.data.clean, perplexity_step)],
        "dedup": context.data.dedup.method,
        "min_characters": context.data.min_characters,
    }
    near_step = find_near_duplicates(context, read, others, settle)

    sides = {key: (field, getattr(context.data, key)) for key, field in context.data.sides.items()}

    def make(directory: Path) -> dict[str, object]:
        """Write decisions.npy and dropped.jsonl into directory; return the counts."""
        table = selection.Table.read(read.chunks, directory)
        like = None if near_step is None else np.load(near_step.path / "like.npy", mmap_mode="r")
        decision = selection.hold_out(table, splits, context.data, settle(table), like)
        counts = selection.count_decisions(table, decision, read.inputs)
        table.remove()
        np.save(directory / "decisions.npy", decision)
        _write_samples(directory / "dropped.jsonl", read.chunks, decision, like)
        leak = {"leak": near.count_leak(context, directory, read.chunks, decision)} if sides else {}
        return {"sources": counts, "total": selection.total_counts(counts), **leak}

    depends_on = {
        "version": selection.VERSION,
        "read": read.key,
        "near_duplicates": near_step and near_step.key,
        "held_out_fraction": context.data.held_out_fraction,
        "held_out_documents": context.data.held_out_documents,
        **others,
    } | ({"sides": [sides, context.data.dedup.threshold]} if sides else {})
    space = read.count * (1 + selection.BYTES_A_DOCUMENT + bool(sides) * ngrams.SEARCH_BYTES_A_DOCUMENT)
    step = context.cache.step("selection", depends_on, make, space)
    chosen = Selection(step)
    _say_selection(context, step, chosen, sides)
    if context.cache.build:
        empty = selection.find_empty_sources(chosen.sources, {item.source: item.entry for item in inputs})
        if empty:
            context.say(step, f"nothing to train on in {', '.join(empty[:5])}{', ...' * (len(empty) > 5)}")
    return chosen


def _say_selection(context: Context, step: Step, chosen: Selection, sides: Mapping[str, tuple[str, Any]]) -> None:
    """Print what is dropped, held out and kept, and the leak if a field decides what is held out.

    `sides`: {key of Data.sides: (field, setting)}. UserError if these hold out nothing, unless nothing may be built.
    """
    total = chosen.total
    dropped = ", ".join(f"{total[name]:,} {name.replace('_', ' ')}" for name in selection.NAMES[2:] if total[name])
    context.say(
        step,
        f"{dropped or 'nothing'} dropped; {total['held_out']:,} held out, kept {total['kept']:,} "
        f"({units.format_bytes(total['bytes'])})",
    )
    if sides:
        if context.cache.build and not total["held_out"]:
            raise UserError(
                f"data.{next(iter(sides))} holds out no document",
                evidence=", ".join(f"{key}: field {field}, {value}" for key, (field, value) in sides.items()),
                fix="correct the field or the date, raise data.held_out_fraction, or take the key out",
            )
        context.say(
            step,
            f"leak: {chosen.leak['documents']:,} training documents resemble {chosen.leak['held_out']:,} held-out ones "
            f"(5-grams, {context.data.dedup.threshold:g} or more)",
        )


_SAMPLES = 20  # of each source and reason
_EXCERPT = 120  # characters


def _write_samples(
    path: Path,
    chunks: Sequence[documents.Chunk],
    decision: selection.Decisions,
    like: npt.NDArray[Any] | None,
) -> None:
    """Write the first 20 dropped documents of each source and reason as JSON lines {source, reason, document, start}.

    Near-duplicates also have {like, like_start}: the document they were dropped for, and its first 120 characters.
    """
    samples = list(_samples(chunks, decision, like))
    wanted = np.unique([row[key] for row in samples for key in ("document", "like") if key in row])
    starts = dict(_read_starts(chunks, wanted.astype(np.int64)))
    with path.open("w", encoding="utf-8") as file:
        for row in samples:
            row["start"] = starts[row["document"]]
            if "like" in row:
                row["like_start"] = starts[row["like"]]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _samples(
    chunks: Sequence[documents.Chunk], decision: selection.Decisions, like: npt.NDArray[Any] | None
) -> Iterator[dict[str, Any]]:
    """Yield {source, reason, document} of the first 20 dropped documents of each source and reason.

    Near-duplicates also have `like`, the index of the document that they repeat, from the array `like`.
    """
    taken: dict[tuple[str, int], int] = {}
    for chunk in chunks:
        here = decision[chunk.rows]
        for code in np.unique(here[here > selection.HELD_OUT]).tolist():
            left = _SAMPLES - taken.get((chunk.source, code), 0)
            chosen = (np.flatnonzero(here == code)[:left] + chunk.rows.start).tolist()
            taken[chunk.source, code] = taken.get((chunk.source, code), 0) + len(chosen)
            kept = like if code in (selection.NEAR_DUPLICATE, selection.NEAR_HELD_OUT) else None
            for number in chosen:
                row = {"source": chunk.source, "reason": selection.NAMES[code], "document": number}
                yield row if kept is None else row | {"like": int(kept[number])}


def _read_starts(chunks: Sequence[documents.Chunk], numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    """Yield (index, first 120 characters) of the documents with these indexes, which must ascend."""
    for chunk in chunks:
        here = numbers[slice(*np.searchsorted(numbers, [chunk.rows.start, chunk.rows.stop]))]
        if len(here):
            wanted = np.zeros(chunk.rows.stop - chunk.rows.start, dtype=np.bool_)
            wanted[here - chunk.rows.start] = True
            for number, text in zip(here.tolist(), documents.read_texts(chunk.path, wanted), strict=True):
                yield number, text[:_EXCERPT]
