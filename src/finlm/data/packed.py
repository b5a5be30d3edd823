"""Rows of pieces of documents, as packing.py chose them: the counterpart of shards.Rows for `blocks` and `best_fit`.

The index is memory-mapped and a row is a few slices of the shards, so opening is instant and memory does not grow with
the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import packing
from finlm.data.shards import IGNORED, Ids, Rows, Shard, Shards


class PackedRows:
    """Rows of sequence_length tokens, each the pieces of an index. The methods are those of shards.Rows."""

    def __init__(self, shards: Sequence[Shard], index: Path | tuple[packing.Pieces, dict[str, Any]]) -> None:
        pieces, about = index if isinstance(index, tuple) else packing.read(index)
        self.shards = list(shards)
        self.sequence_length: int = about["sequence_length"]
        self.sources: dict[str, int] = {item["source"]: item["rows"] for item in about["sources"]}
        # A block's last token has no label within the block; best_fit's rows have room for one token more than T.
        self._pieces = pieces
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])

    def __len__(self) -> int:
        return len(self._pieces.first) - 1

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """How many labels of these rows count (are not -100); reads no tokens."""
        ids = self._checked(rows)
        first, last = self._pieces.first[ids], self._pieces.first[ids + 1]
        return sum(int((self._pieces.length[a:b] - 1).sum()) for a, b in zip(first, last, strict=True))

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Inputs and next-token labels, each int64 [len(rows), T]; -100 where the next token is another document's.

        What is left of a row is input 0 and label -100.
        """
        inputs = np.zeros((len(rows), self.sequence_length), dtype=np.int64)
        labels = np.full((len(rows), self.sequence_length), IGNORED, dtype=np.int64)
        for place, pieces in enumerate(map(self._row, self._checked(rows).tolist())):
            at = 0
            for start, length in pieces:
                tokens = self._tokens(start, length)
                kept = tokens[: self.sequence_length - at]
                inputs[place, at : at + len(kept)] = kept
                labels[place, at : at + length - 1] = tokens[1:]
                at += length
        return inputs, labels

    def documents(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Which document of its row an input belongs to: int32 [len(rows), T], 0, 1, ..., and -1 past the last."""
        found = np.full((len(rows), self.sequence_length), -1, dtype=np.int32)
        for place, pieces in enumerate(map(self._row, self._checked(rows).tolist())):
            at, number = 0, -1
            for start, length in pieces:
                inside = self._document_starts(start, length)
                for begin, end in zip(inside, [*inside[1:], length], strict=True):
                    number += 1
                    found[place, at + begin : at + end] = number
                at += length
        return found

    def pieces(self, row: int) -> list[tuple[Shard, int, int]]:
        """(shard, first token, tokens) of what fills a row."""
        found = []
        for start, length in self._row(int(self._checked(np.array([row]))[0])):
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            while length > 0:
                inner = start - int(self._starts[number])
                count = min(length, self.shards[number].tokens - inner)
                found.append((self.shards[number], inner, count))
                start, length, number = start + count, length - count, number + 1
        return found

    def source_ranges(self) -> dict[str, range]:
        """Row ids of each source."""
        ends = np.cumsum(list(self.sources.values())).tolist()
        return {name: range(end - rows, end) for (name, rows), end in zip(self.sources.items(), ends, strict=True)}

    def _row(self, row: int) -> list[tuple[int, int]]:
        """(first token over all shards, tokens) of each piece."""
        part = slice(int(self._pieces.first[row]), int(self._pieces.first[row + 1]))
        return list(zip(self._pieces.start[part].tolist(), self._pieces.length[part].tolist(), strict=True))

    def _tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """A stretch of the stream; under `blocks` it may run from one shard into the next."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        found: list[npt.NDArray[Any]] = []
        while length > 0:
            inner = start - int(self._starts[number])
            part = self.shards[number].ids[inner : inner + length]
            found.append(part)
            start, length, number = start + len(part), length - len(part), number + 1
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _document_starts(self, start: int, length: int) -> list[int]:
        """Where documents begin in a stretch, from 0, which is the first one's or its continuation's."""
        found = [0]
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while number < len(self.shards) and (base := int(self._starts[number])) < start + length:
            offsets = self.shards[number].offsets
            inside = np.searchsorted(offsets, [max(0, start + 1 - base), start + length - base])
            found += [int(offset) + base - start for offset in offsets[inside[0] : inside[1]]]
            number += 1
        return sorted(set(found) - {length})

    def _checked(self, rows: npt.NDArray[Any]) -> Ids:
        ids = np.asarray(rows).astype(np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(f"row ids {ids.min()}..{ids.max()} of {len(self)} rows")
        return ids


def rows(shards: Shards, sequence_length: int, how: str) -> Rows | PackedRows:
    """The training rows of prepared shards; `how` is data.packing, whose index is built where it is missing."""
    train = shards.split("train")
    if how == "concat":
        return Rows(train, sequence_length)
    kind: packing.Packing = "blocks" if how == "blocks" else "best_fit"
    return PackedRows(train, packing.index(shards.directory, train, kind, sequence_length))
