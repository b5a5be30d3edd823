"""Rows of pieces of documents, as packing.py chose them: the counterpart of shards.Rows for `blocks` and `best_fit`.

The index is memory-mapped and a row is a few slices of the shards, so opening is instant and memory does not grow with
the corpus. A step of dialogues has hundreds of pieces, and small models would wait for them: they are counted and
numbered by arrays over all of them, and only copied one by one, a microsecond each (benchmarks/data_rows.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import packing
from finlm.data.packing import Longs
from finlm.data.shards import IGNORED, Ids, Rows, Shard, Shards
from finlm.data.stretches import within


@dataclass(frozen=True)
class Batch:
    """The pieces of some rows, row by row; each array is int64 [pieces]."""

    row: Longs  # within the batch
    start: Longs  # first token, counted over all shards
    length: Longs  # tokens, those past the row's last label left out
    column: Longs  # of the first token
    filled: npt.NDArray[np.bool_]  # [rows, T + 1], where the row has a token


class PackedRows:
    """Rows of sequence_length tokens, each the pieces of an index. The methods are those of shards.Rows."""

    def __init__(self, shards: Sequence[Shard], index: Path | tuple[packing.Pieces, dict[str, Any]]) -> None:
        pieces, about = index if isinstance(index, tuple) else packing.read(index)
        self.shards = list(shards)
        self.sequence_length: int = about["sequence_length"]
        self.sources: dict[str, int] = {item["source"]: item["rows"] for item in about["sources"]}
        # A block's last token has no label within the block; best_fit's rows have room for one token more than T.
        self._pieces = pieces
        self._holds_many = about.get("packing") == "blocks"  # a piece may hold several documents
        self._begins: list[int] = np.cumsum([0, *(shard.tokens for shard in self.shards)]).tolist()

    def __len__(self) -> int:
        return len(self._pieces.first) - 1

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """How many labels of these rows count (are not -100); reads no tokens."""
        batch = self._batch(rows)
        return int(batch.length.sum()) - len(batch.length)

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Inputs and next-token labels, each int64 [len(rows), T]; -100 where the next token is another document's.

        What is left of a row is input 0 and label -100.
        """
        batch = self._batch(rows)
        tokens = self._tokens(batch)
        return tokens[:, :-1].copy(), np.where(followed(batch), tokens[:, 1:], IGNORED)

    def documents(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Which document of its row an input belongs to: int32 [len(rows), T], 0, 1, ..., and -1 past the last."""
        batch = self._batch(rows)
        begins = np.zeros(batch.filled.shape, dtype=np.int32)
        begins[batch.row, batch.column] = 1
        if self._holds_many:
            pieces = np.stack((batch.row, batch.column, batch.start, batch.length), axis=1)
            for row, column, start, length in pieces.tolist():
                begins[row, [column + begin for begin in self._document_starts(start, length)]] = 1
        return np.where(batch.filled, np.cumsum(begins, axis=1, dtype=np.int32) - 1, np.int32(-1))[:, :-1]

    def pieces(self, row: int) -> list[tuple[Shard, int, int]]:
        """(shard, first token, tokens) of what fills a row."""
        (row,) = self._checked(np.array([row])).tolist()
        part = slice(int(self._pieces.first[row]), int(self._pieces.first[row + 1]))
        found = []
        for start, length in zip(self._pieces.start[part].tolist(), self._pieces.length[part].tolist(), strict=True):
            found += [(self.shards[number], inner, count) for number, inner, count in self._within(start, length)]
        return found

    def source_ranges(self) -> dict[str, range]:
        """Row ids of each source."""
        ends = np.cumsum(list(self.sources.values())).tolist()
        return {name: range(end - rows, end) for (name, rows), end in zip(self.sources.items(), ends, strict=True)}

    def _batch(self, rows: npt.NDArray[Any]) -> Batch:
        """The pieces of these rows."""
        ids, room = self._checked(rows), self.sequence_length + 1
        first = self._pieces.first[ids]
        counts = self._pieces.first[ids + 1] - first
        row = np.repeat(np.arange(len(ids)), counts)
        place = within(counts)  # of a piece in its row
        numbers = first[row] + place
        length = self._pieces.length[numbers].astype(np.int64)
        laid = np.cumsum(length) - length  # tokens of the pieces above
        column = laid - laid[np.arange(len(row)) - place]
        inside = column < room
        row, column, numbers = row[inside], column[inside], numbers[inside]
        length = np.minimum(length[inside], room - column)
        tokens = np.bincount(row, weights=length, minlength=len(ids))
        filled = np.arange(room) < tokens[:, None]
        return Batch(row, self._pieces.start[numbers], length, column, filled)

    def _tokens(self, batch: Batch) -> Ids:
        """int64 [rows, T + 1], 0 where a row has none."""
        found = np.zeros(batch.filled.shape, dtype=np.int64)
        found[batch.filled] = self._copied(batch, lambda shard: shard.ids)
        return found

    def _copied(self, batch: Batch, stream: Callable[[Shard], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The pieces end to end, of a shard's stream of tokens or of what lies beside it."""
        of = cache(lambda number: stream(self.shards[number]))
        parts = [
            of(number)[inner : inner + count]
            for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True)
            for number, inner, count in self._within(start, length)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    def _within(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first token, tokens) of a stretch; under `blocks` it may run from one shard into the next."""
        number = bisect_right(self._begins, start) - 1
        while length > 0:
            inner = start - self._begins[number]
            count = min(length, self.shards[number].tokens - inner)
            yield number, inner, count
            start, length, number = start + count, length - count, number + 1

    def _document_starts(self, start: int, length: int) -> list[int]:
        """Where documents begin in a stretch, from 0, which is the first one's or its continuation's."""
        found = [0]
        number = bisect_right(self._begins, start) - 1
        while number < len(self.shards) and (base := self._begins[number]) < start + length:
            shard = self.shards[number]
            first, last = shard.documents_before([max(0, start + 1 - base), start + length - base])
            found += [int(offset) + base - start for offset in shard.offsets[first:last]]
            number += 1
        return sorted(set(found) - {length})

    def _checked(self, rows: npt.NDArray[Any]) -> Ids:
        ids = np.asarray(rows).astype(np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(f"row ids {ids.min()}..{ids.max()} of {len(self)} rows")
        return ids


def followed(batch: Batch) -> npt.NDArray[np.bool_]:
    """[rows, T]: where the next token is of the same piece."""
    followed = batch.filled.copy()
    followed[batch.row, batch.column + batch.length - 1] = False
    return followed[:, :-1]


def rows(shards: Shards, sequence_length: int, how: str) -> Rows | PackedRows:
    """The training rows of prepared shards; `how` is data.packing, whose index is built where it is missing."""
    train = shards.split("train")
    if how == "concat":
        return Rows(train, sequence_length)
    kind: packing.Packing = "blocks" if how == "blocks" else "best_fit"
    return PackedRows(train, packing.index(shards.directory, train, kind, sequence_length))
