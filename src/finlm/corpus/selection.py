"""Decide which documents are used and which are held out: a reason per document, after everything is read.

Exact duplicates are found over all sources by the 128-bit hash of the normalised text, near-duplicates by near.py; the
first in the sources' order stays. Of what is then left of a file source, a share chosen by hash is held out; the
embedded corpus has a held-out split already. No training document equals a held-out one, whatever the settings; with
dedup near, none repeats a held-out one either.

The lowest hashes would move with the size of a source, and documents that were held out of a small one would be trained
on in a large one. So the whole share is kept out of training, and beyond held_out_documents it is only reserved.

documents.json lists lengths, reasons and frequent values of the prepared data. Memory: 0.2 GB and about 8 bytes a
document. More lies in mapped files, which are worked on in blocks. Dialogues, and fields that hold out (64-bit values,
sorted at once), take more.
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
from finlm.rows.shards import ShardEntry, measure_lengths

VERSION = 4

TRAIN, HELD_OUT, TOO_SHORT, DUPLICATE, EQUALS_HELD_OUT = range(5)
NEAR_DUPLICATE, NEAR_HELD_OUT, PERPLEXITY, CONTAMINATED, RESERVED = range(5, 10)
NAMES = (  # of the codes
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
_READ = ("rows", "broken", "cleaned")  # counted where rows are read

Decisions = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

BLOCK = 2**20  # documents whose values are worked on together, to save memory
BYTES_A_DOCUMENT = 44 + 2 * 8 + 24  # on disk meanwhile: the columns, two labels, and the hashes in parts
_COLUMNS = (("source", "<i4"), ("characters", "<u4"), ("text_bytes", "<i8"), ("hash", "<u8", 2))


def new_array(directory: Path | None, name: str, shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
    """Return an array of zeros: mapped from a new file <name>.column in the directory, or in memory without one."""
    if directory is None or not shape[0]:
        return np.zeros(shape, dtype=kind)
    return np.memmap(directory / f"{name}.column", dtype=kind, mode="w+", shape=shape)


def slices(count: int, start: int = 0) -> list[slice]:
    """Return slices of BLOCK indexes, in order, from start to count."""
    return [slice(first, min(first + BLOCK, count)) for first in range(start, count, BLOCK)]


def label_type(count: int) -> np.dtype[Any]:
    """Return the type of the indexes of `count` documents: uint32 as long as it has all of them, then uint64."""
    return np.dtype("<u4") if count <= 2**32 else np.dtype("<u8")


def list_repeats(like: npt.NDArray[Any]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (documents that repeat another, the document that each repeats), for blocks of BLOCK documents.

    `like` [documents] has the index of what a document repeats, else its own. A block may have no such documents.
    """
    for block in slices(len(like)):
        here = np.array(like[block], dtype=np.int64)
        repeats = np.flatnonzero(here != np.arange(block.start, block.stop))
        yield repeats + block.start, here[repeats]


@dataclass(frozen=True)
class Table:
    """Per-document columns of all documents in order: arrays [documents]."""

    source: npt.NDArray[np.int32]  # number of the input, ascending
    characters: npt.NDArray[np.uint32]
    text_bytes: npt.NDArray[np.int64]
    hash: npt.NDArray[np.uint64]  # [documents, 2]
    group: npt.NDArray[np.uint64] | None = None  # of held_out_by, as in documents.SIDES; None: no field decides
    day: npt.NDArray[np.uint32] | None = None
    directory: Path | None = None  # of the columns' files; None: they are in memory

    @classmethod
    def read(cls, chunks: Sequence[documents.Chunk], directory: Path | None = None) -> Table:
        """Return the table of all documents of the chunks, read from their .npy files.

        With a directory, its columns are written to files there and mapped into memory; remove() deletes them.
        """
        count = chunks[-1].rows.stop if chunks else 0
        indexes = (documents.read_index(chunk.path) for chunk in chunks)
        columns = {name: new_array(directory, name, (count, *shape), kind) for name, kind, *shape in _COLUMNS}
        for chunk, index in zip(chunks, indexes, strict=True):
            columns["source"][chunk.rows] = chunk.input
            columns["characters"][chunk.rows] = index["characters"]
            columns["text_bytes"][chunk.rows] = np.diff(index["end"].astype(np.int64), prepend=0)
            columns["hash"][chunk.rows] = index["hash"]
            for name, kind in (("group", "<u8"), ("day", "<u4")):
                if name in (index.dtype.names or ()):
                    if name not in columns:
                        columns[name] = new_array(directory, name, (count,), kind)
                    columns[name][chunk.rows] = index[name]
        return cls(**columns, directory=directory)

    def remove(self) -> None:
        """Delete all .column files in the table's directory; do nothing without one."""
        for path in self.directory.glob("*.column") if self.directory else ():
            path.unlink()

    def rows_of(self, number: int) -> slice:
        """Return the slice of the documents of input `number`."""
        return slice(*np.searchsorted(self.source, [number, number + 1]).tolist())


def decide(
    table: Table, splits: Sequence[str], settings: Data, prompts: npt.NDArray[np.uint64] | None = None
) -> Decisions:
    """Return a decision code (TRAIN, HELD_OUT, ...) per document by length, equal texts and the held-out share alone.

    `splits` are the inputs'. `prompts` [documents, 2] hashes what both sides may not share; None: the whole text.
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

    Documents still in use get TRAIN, or HELD_OUT in an input whose split, in `splits`, is held_out. `dropped`
    [documents] holds PERPLEXITY or CONTAMINATED for documents that other steps drop, else TRAIN; `prompts` is as for
    decide(). Writes files into table.directory, if set, which table.remove() deletes.
    """
    decision = np.full(len(table.source), TRAIN, dtype=np.uint8) if dropped is None else dropped.copy()
    is_world = np.array([split == "held_out" for split in splits], dtype=np.bool_)
    for here in slices(len(decision)):
        decision[here][(decision[here] == TRAIN) & is_world[table.source[here]]] = HELD_OUT
        decision[here][table.characters[here] < max(1, settings.min_characters)] = TOO_SHORT
    equal = equal_texts(table.hash, table.directory)
    if settings.dedup.method != "none":
        _drop_repeats(equal, decision, table.directory)
    together = equal if prompts is None else equal_texts(prompts)
    of_world = _mark_groups(together, decision == HELD_OUT)
    for here in slices(len(decision)):
        alike = of_world[together[here]] & ~is_world[table.source[here]] & np.isin(decision[here], (TRAIN, DUPLICATE))
        decision[here][alike] = EQUALS_HELD_OUT
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
    (near.find_likes); None skips near-duplicates. A training document that shares its text, or prompt if given, with a
    held-out or reserved one becomes EQUALS_HELD_OUT. Writes a file into table.directory, if set, as settle() does.
    """
    decision, equal = settled.copy(), equal_texts(table.hash, table.directory)
    together, hashes = (equal, table.hash) if prompts is None else (equal_texts(prompts), prompts)
    for repeats, repeated in list_repeats(like) if like is not None else ():
        of_world = (settled[repeated] == HELD_OUT) & (settled[repeats] != HELD_OUT)
        decision[repeats] = np.where(of_world, NEAR_HELD_OUT, NEAR_DUPLICATE)
    apart = _find_apart(table, splits, settings)
    for number, split in enumerate(splits):
        if split == "share":
            rows = table.rows_of(number)
            if apart is None:
                here = _list_candidates(decision, hashes, rows, settings)
                decision[here] = _split_source(equal[here], hashes[here, 0], settings)
                continue
            here = np.flatnonzero((decision[rows] == TRAIN) & apart[rows]) + rows.start
            decision[here] = RESERVED
            decision[here[np.argsort(hashes[here, 0], kind="stable")][: settings.held_out_documents]] = HELD_OUT
    # Without dedup, one source's held-out document may stand in another source; a prompt may in any case.
    marked = _mark_groups(together, (decision == HELD_OUT) | (decision == RESERVED))
    for block in slices(len(decision)):
        decision[block][(decision[block] == TRAIN) & marked[together[block]]] = EQUALS_HELD_OUT
    return decision


def _find_apart(table: Table, splits: Sequence[str], settings: Data) -> Bools | None:
    """Return which documents a field keeps out of training, bool [documents]; None if the table has no such field.

    With held_out_by, these are documents whose field value hashes into the lowest held_out_fraction. Among the values
    in sources of split "share" that is at least one, but never all; none if there is a single value. With
    held_out_from, these are documents of that day or later. `splits` has the split of each input.
    """
    if table.group is None or table.day is None:  # both come from documents.SIDES
        return None
    apart = np.zeros(len(table.source), dtype=np.bool_)
    if settings.held_out_from:
        apart = table.day >= int(settings.held_out_from.replace("-", ""))
    values = np.unique(table.group[np.array([split == "share" for split in splits])[table.source]])
    if settings.held_out_by and settings.held_out_fraction and len(values) > 1:
        limit = _limit(settings)
        apart |= (table.group <= max(limit, values[0])) & (table.group < values[-1])
    return apart


def equal_texts(hashes: npt.NDArray[np.uint64], directory: Path | None = None) -> npt.NDArray[Any]:
    """Return for each document the index of the first document with the same hash: label_type [documents].

    `hashes` is [documents, 2]. They are sorted in parts of about 2**21. With a directory the result is mapped from a
    file there, and the parts are files meanwhile.
    """
    count = len(hashes)
    first = new_array(directory, "equal", (count,), label_type(count))
    parts = max(1, -(-count // (2 * BLOCK)))
    for number, at in _split_by_hash(hashes, parts, directory):
        order = np.lexsort((number, at[:, 1], at[:, 0]))
        number, at = number[order], at[order]
        starts = np.ones(len(number), dtype=np.bool_)
        starts[1:] = (at[1:] != at[:-1]).any(axis=1)
        first[number] = number[starts][np.cumsum(starts) - 1]
    return first


def _split_by_hash(
    hashes: npt.NDArray[np.uint64], parts: int, directory: Path | None
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]]:
    """Yield (indexes, hashes [documents, 2]) of the documents of each of `parts` ranges of the first hash.

    Writes a temporary file per range into `directory`; without one there are 64 ranges at most, all in memory.
    """
    if directory is None or parts == 1:
        part = (hashes[:, 0] >> np.uint64(58)).astype(np.uint8) if parts > 1 else np.zeros(len(hashes), dtype=np.uint8)
        for number in np.unique(part).tolist():
            here = np.flatnonzero(part == number)
            yield here, hashes[here]
        return
    paths = [directory / f"hashes-{part}.tmp" for part in range(parts)]
    limits = np.array([part * 2**64 // parts for part in range(1, parts)], dtype=np.uint64)
    for block in slices(len(hashes)):
        row = np.column_stack((hashes[block], np.arange(block.start, block.stop, dtype=np.uint64)))
        row = row[np.argsort(row[:, 0])]
        for path, piece in zip(paths, np.split(row, np.searchsorted(row[:, 0], limits)), strict=True):
            with path.open("ab") as file:
                file.write(piece.tobytes())
    for path in paths:
        row = np.fromfile(path, dtype=np.uint64).reshape(-1, 3)
        path.unlink()
        yield row[:, 2].astype(np.int64), row[:, :2]


SourceCounts = dict[str, dict[str, int]]  # {source: {reason or what: number}}


class Selection:
    """A finished selection step, with the counts of its manifest."""

    def __init__(self, step: Step) -> None:
        self.path, self.key = step.path, step.key
        self.sources: SourceCounts = step.manifest["sources"]
        self.total: dict[str, int] = step.manifest["total"]
        self.leak: dict[str, int] = step.manifest.get("leak", {})  # near.count_leak

    def decisions(self) -> Decisions:
        """Return the code of each document, uint8 [documents], from decisions.npy."""
        decision: Decisions = np.load(self.path / "decisions.npy")
        return decision


def count_decisions(table: Table, decision: Decisions, inputs: Sequence[documents.InputRead]) -> SourceCounts:
    """Return {source: {rows, broken, cleaned: dropped by cleaning, each of NAMES, bytes, held_out_bytes}}."""
    counts: SourceCounts = {}
    for number, item in enumerate(inputs):
        here = table.rows_of(number)
        row = counts.setdefault(item.source, dict.fromkeys((*_READ, *NAMES, "bytes", "held_out_bytes"), 0))
        row["rows"] += item.rows
        row["broken"] += item.broken
        row["cleaned"] += sum(item.dropped.values())
        for code, name in enumerate(NAMES):
            row[name] += int(np.count_nonzero(decision[here] == code))
        for block in slices(here.stop, here.start):
            row["bytes"] += int(table.text_bytes[block][decision[block] == TRAIN].sum())
            row["held_out_bytes"] += int(table.text_bytes[block][decision[block] == HELD_OUT].sum())
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


def total_counts(counts: SourceCounts) -> dict[str, int]:
    """Return {name: sum over all sources} of the counts; there must be at least one source."""
    rows = list(counts.values())
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def _drop_repeats(group: npt.NDArray[Any], decision: Decisions, directory: Path | None) -> None:
    """Set DUPLICATE in `decision` for documents in use that repeat another of their group.

    `group` [documents] is what equal_texts returns; codes of documents in use are at most HELD_OUT. In each group the
    first held-out document stays, or the first of those in use when none is held out.
    """
    stays = new_array(directory, "stays", group.shape, group.dtype)
    for wanted in (TRAIN, HELD_OUT):
        for here in reversed(slices(len(group))):  # the last one written is the first
            chosen = np.flatnonzero(decision[here] == wanted)[::-1] + here.start
            stays[group[chosen]] = chosen
    for here in slices(len(group)):
        repeats = stays[group[here]] != np.arange(here.start, here.stop)
        decision[here][repeats & (decision[here] <= HELD_OUT)] = DUPLICATE


def _mark_groups(group: npt.NDArray[Any], chosen: Bools) -> Bools:
    """Return for each group, at the index of its first document, whether a document of it is `chosen`."""
    groups = np.zeros(len(group), dtype=np.bool_)
    for here in slices(len(group)):
        groups[group[here][chosen[here]]] = True
    return groups


def _list_candidates(
    decision: Decisions, hashes: npt.NDArray[np.uint64], rows: slice, settings: Data
) -> npt.NDArray[np.int64]:
    """Return the TRAIN documents among `rows` on which _split_source decides the same as on all, in order.

    These are documents with hashes up to the limit or lower than all before, the first two different, and the highest.
    """
    minima, ends, first_hash, highest, place = set[int](), set[int](), None, -1, -1
    for number, at in _hashes_of(decision, hashes, rows):
        minima |= set(
            np.unique(np.minimum.accumulate(np.append(np.uint64(min(minima, default=2**64 - 1)), at))).tolist()
        )
        first_hash = int(at[0]) if first_hash is None else first_hash
        if not ends:
            ends |= set(number[at != first_hash][:1].tolist())
        if int(at.max()) > highest:
            highest, place = int(at.max()), int(number[at.argmax()])
    lowest = np.array(sorted(minima), dtype=np.uint64)
    parts = [
        number[(at <= _limit(settings)) | np.isin(at, lowest)] for number, at in _hashes_of(decision, hashes, rows)
    ]
    return np.unique(np.concatenate([*parts, np.array([*ends, place] if parts else [], dtype=np.int64)]))


def _hashes_of(
    decision: Decisions, hashes: npt.NDArray[np.uint64], rows: slice
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]]:
    """Yield (indexes, first hashes) of the TRAIN documents among `rows`, in blocks that have at least one."""
    for here in slices(rows.stop, rows.start):
        number = np.flatnonzero(decision[here] == TRAIN) + here.start
        if len(number):
            yield number, hashes[number, 0]


def _limit(settings: Data) -> np.uint64:
    """Return the highest hash of the lowest held_out_fraction of all 64-bit hashes."""
    return np.uint64(min(2**64 - 1, int(settings.held_out_fraction * 2**64)))


def _split_source(texts: npt.NDArray[np.uint32], hashes: npt.NDArray[np.uint64], settings: Data) -> Decisions:
    """Return TRAIN, HELD_OUT or RESERVED for each document of a source, in order.

    `texts` is equal for equal documents, `hashes` for those with the same text or prompt, which held-out and training
    documents may not share. The lowest held_out_fraction of hashes is kept out of training: of two different ones or
    more at least one and never all. Of these, at most held_out_documents with the lowest hashes are HELD_OUT, the
    others RESERVED. Of equal documents the first is HELD_OUT and the others stay TRAIN.
    """
    decision = np.full(len(hashes), TRAIN, dtype=np.uint8)
    lowest, place = np.unique(hashes, return_inverse=True)
    if len(lowest) < 2 or settings.held_out_fraction == 0 or settings.held_out_documents < 1:
        return decision
    limit = _limit(settings)
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


def write_description(
    directory: Path, entries: Sequence[ShardEntry], inputs: Sequence[documents.InputRead], sources: SourceCounts
) -> None:
    """Write documents.json into a shards directory: counts, hashes of input files, lengths, frequent values.

    `sources` are the counts. The lengths are read from the .idx files of the shards `entries` in the directory.
    """
    about = {
        "sources": sources,
        "total": total_counts(sources),
        "files": [file for item in inputs for file in item.files],
        "pinned": {item.source: item.pinned for item in inputs if item.pinned},
        "lengths": {source: asdict(lengths) for source, lengths in measure_lengths(directory, entries)},
        "cleaned": sum_by_source((item.source, item.dropped) for item in inputs),
        "values": {item.source: item.values for item in inputs if item.values},
    }
    files.write_json(directory / "documents.json", about)


def sum_by_source(counted: Iterable[tuple[str, Mapping[str, int]]]) -> SourceCounts:
    """Return {source: summed counts} of (source, counts) pairs, without sources whose counts are empty."""
    sums: dict[str, Counter[str]] = {}
    for source, counts in counted:
        sums.setdefault(source, Counter()).update(counts)
    return {source: dict(counts) for source, counts in sums.items() if counts}
