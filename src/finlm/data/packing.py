"""Rows that are not windows of the stream: which pieces of documents each holds, as an index beside the shards.

blocks: what the released XuanYuan llm-code trains on. Each group of 1,000 documents of a source is concatenated and
cut into blocks of T tokens; the remainder is dropped, and a block's last token is an input without a label.

best_fit: no document that fits is cut (Ding et al., "Fewer Truncations Improve Language Modeling", 2024). A row has
room for T + 1 tokens, T inputs and their labels. Longer documents are cut into whole rows that overlap by the one token
which is the label of one and an input of the next; what is left of them is placed like a document. Best-fit-decreasing
over counts of lengths and of room: half a second and 100 MB a million documents.

A row holds pieces of one source, in the stream's order. No label crosses from one document to the next under best_fit.
The index belongs to (shards, packing, T) and is kept inside the shards directory, where it is built once.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import steps
from finlm.data.shards import Shard
from finlm.data.stretches import within

VERSION = 1
BLOCK_DOCUMENTS = 1000  # documents that the released code concatenates at once

Packing = Literal["blocks", "best_fit", "single"]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Stretches of the streams of all shards laid end to end; row r has the pieces first[r] to first[r + 1]."""

    start: Longs  # [pieces] first token, counted over all shards
    length: npt.NDArray[np.int32]  # [pieces] tokens
    first: Longs  # [rows + 1]

    @classmethod
    def read(cls, directory: Path) -> Pieces:
        """A finished index, memory-mapped."""
        names = ("start", "length", "first")
        return cls(*(np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r")) for name in names))

    def write(self, directory: Path) -> None:
        """Write the three arrays."""
        for name in ("start", "length", "first"):
            np.save(directory / f"{name}.npy", getattr(self, name))


def index(shards_directory: Path, shards: Sequence[Shard], packing: Packing, sequence_length: int) -> Path:
    """The directory of the index of these training shards, built where it is not there yet, by one run at a time."""
    path = shards_directory / "rows" / f"{packing}-{sequence_length}-v{VERSION}"
    if (path / "manifest.json").is_file():
        return path
    try:
        with steps.alone(path.parent):
            if not (path / "manifest.json").is_file():  # while this process waited
                _build(path, *in_memory(shards, packing, sequence_length))
    except OSError as error:
        raise UserError(
            f"cannot write the index of {packing} rows of {sequence_length} tokens",
            evidence=str(error),
            fix="copy the prepared data to where you may write, or set data.packing to concat, which needs no index",
        ) from None
    return path


def _build(path: Path, rows: Pieces, about: dict[str, Any]) -> None:
    """Write the index in place of what a killed run left."""
    for left_over in (path, *path.parent.glob(f".{path.name}.*.tmp")):
        shutil.rmtree(left_over, ignore_errors=True)
    with files.new_directory(path) as temporary:
        rows.write(temporary)
        files.write_json(temporary / "manifest.json", about)


def read(path: Path) -> tuple[Pieces, dict[str, Any]]:
    """(the rows, the manifest) of a finished index."""
    return Pieces.read(path), files.read_json(path / "manifest.json")


def in_memory(shards: Sequence[Shard], packing: Packing, sequence_length: int) -> tuple[Pieces, dict[str, Any]]:
    """(the rows of these shards, the manifest of their index)."""
    parts, sources = [], []
    offset = 0  # of the source's first token over all shards
    for name in dict.fromkeys(shard.source for shard in shards):
        members = [shard for shard in shards if shard.source == name]
        starts = document_bounds(members) + offset
        parts.append(pieces(packing, starts, sequence_length))
        sources.append({"source": name, "rows": len(parts[-1].first) - 1, "tokens": int(parts[-1].length.sum())})
        offset = int(starts[-1])
    about = {"packing": packing, "sequence_length": sequence_length, "version": VERSION, "sources": sources}
    return joined(parts), about


def pieces(packing: Packing, bounds: Longs, sequence_length: int) -> Pieces:
    """The rows of one source whose documents start at bounds [documents + 1]; `single` = one document a row."""
    if packing == "blocks":
        return blocks(bounds, sequence_length)
    return best_fit(bounds, sequence_length, together=packing == "best_fit")


def blocks(bounds: Longs, sequence_length: int) -> Pieces:
    """Groups of BLOCK_DOCUMENTS documents cut into whole blocks; bounds [documents + 1] are where documents start."""
    edges = np.unique(np.append(np.arange(0, len(bounds) - 1, BLOCK_DOCUMENTS), len(bounds) - 1))
    starts = bounds[edges[:-1]]
    counts = np.diff(bounds[edges]) // sequence_length
    start = np.repeat(starts, counts) + sequence_length * within(counts)
    return Pieces(start, np.full(len(start), sequence_length, dtype=np.int32), np.arange(len(start) + 1))


def best_fit(bounds: Longs, sequence_length: int, together: bool = True) -> Pieces:
    """No document of at most T + 1 tokens is cut; bounds [documents + 1] are where documents start.

    With together=False no two documents share a row.
    """
    lengths = np.diff(bounds)
    # A document of n tokens has n - 1 labels; every full row takes T of them, the last takes the rest.
    full = np.where(lengths > sequence_length + 1, (lengths - 1) // sequence_length, 0)
    whole_start = np.repeat(bounds[:-1], full) + sequence_length * within(full)
    rest_start = bounds[:-1] + full * sequence_length
    rest = lengths - full * sequence_length
    placed = np.flatnonzero(rest > 1)  # one token alone has no label
    if together:
        row, count = assign(rest[placed].astype(np.int32), sequence_length + 1)
    else:
        row, count = np.arange(len(placed), dtype=np.int32), len(placed)
    order = np.lexsort((rest_start[placed], row))
    packed = Pieces(
        rest_start[placed][order],
        rest[placed][order].astype(np.int32),
        np.concatenate(([0], np.cumsum(np.bincount(row, minlength=count)))),
    )
    whole = Pieces(
        whole_start,
        np.full(len(whole_start), sequence_length + 1, dtype=np.int32),
        np.arange(len(whole_start) + 1),
    )
    return joined([whole, packed])


def assign(lengths: npt.NDArray[np.int32], room: int) -> tuple[npt.NDArray[np.int32], int]:
    """(row of each length, rows): best-fit-decreasing into rows of `room`, all lengths at most that.

    Equal lengths are placed together into the rows with the least room that takes them, so the work is over different
    lengths and rooms, not over documents.
    """
    row = np.empty(len(lengths), dtype=np.int32)
    order = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order], prepend=-1, append=-1))
    free: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(room + 1)]  # rows by the room left in them
    has_rows = 0  # bit r: free[r] is not empty
    count = 0

    def give(left: int, rows: npt.NDArray[np.int32]) -> None:
        nonlocal has_rows
        if left and len(rows):
            free[left].append(rows)
            has_rows |= 1 << left

    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        length = int(lengths[order[first]])
        while first < last and (fitting := has_rows >> length):
            left = length + (fitting & -fitting).bit_length() - 1
            rows = free[left].pop()
            if not free[left]:
                has_rows ^= 1 << left
            taken, kept = rows[: last - first], rows[last - first :]
            row[order[first : first + len(taken)]] = taken
            first += len(taken)
            give(left, kept)
            give(left - length, taken)
        each = room // length
        needed = -(-(last - first) // each)
        if needed:
            new = np.arange(count, count + needed, dtype=np.int32)
            row[order[first:last]] = np.repeat(new, each)[: last - first]
            count += needed
            in_last = last - first - each * (needed - 1)
            give(room - each * length, new[:-1])
            give(room - in_last * length, new[-1:])
    return row, count


def joined(parts: Sequence[Pieces]) -> Pieces:
    """The rows of all parts, one after the other."""
    offsets = np.cumsum([0, *(len(part.start) for part in parts)])
    return Pieces(
        np.concatenate([np.empty(0, dtype=np.int64), *(part.start for part in parts)]),
        np.concatenate([np.empty(0, dtype=np.int32), *(part.length for part in parts)]),
        np.concatenate([[0], *(part.first[1:] + offset for part, offset in zip(parts, offsets, strict=False))]),
    )


def document_bounds(shards: Sequence[Shard]) -> Longs:
    """Where each document starts, and the end, counted from the first shard: [documents + 1]."""
    found, offset = [np.zeros(1, dtype=np.int64)], 0
    for shard in shards:
        found.append(np.asarray(shard.offsets[1:], dtype=np.int64) + offset)
        offset += shard.tokens
    return np.concatenate(found)
