"""Is a candidate pair really a near-duplicate: the exact Jaccard similarity of its two texts' 5-grams.

The signatures' estimate goes first and spares most texts that are clearly different; what it lets pass is read and
compared exactly, so a pair that is joined has the similarity that the recipe asks for. Texts are read chunk by chunk,
a few thousand pairs at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from finlm.data import documents, near, near_signatures, ngrams
from finlm.data.stretches import within

# An estimate lies this far below the truth once in a million pairs of long documents; of short ones, whose empty bins
# repeat others, no pair of the real text was lost by it.
_MARGIN = 0.2
_PAIRS_AT_ONCE = 8192
_BYTES_AT_ONCE = 16 * 2**20
_HUGE = 4 * 2**20  # bytes; the estimate of so long a text needs no second look


class Verifier:
    """Answers for arrays of pairs, in any number and order."""

    def __init__(
        self,
        table: near.Table,
        chunks: Sequence[documents.Chunk],
        text_bytes: npt.NDArray[np.integer],
        threshold: float,
    ) -> None:
        self._table = table
        self._chunks = chunks
        self._first = np.array([chunk.rows.start for chunk in chunks])
        self._bytes = text_bytes
        self._start = np.concatenate(([0], np.cumsum(text_bytes, dtype=np.int64)))  # as if the chunks were one file
        self._threshold = threshold

    def __call__(self, left: near.Ids, right: near.Ids) -> npt.NDArray[np.bool_]:
        """Whether each pair is at least as similar as the threshold: bool [pairs]."""
        same = np.zeros(len(left), dtype=np.bool_)
        for first in range(0, len(left), _PAIRS_AT_ONCE):
            here = slice(first, first + _PAIRS_AT_ONCE)
            estimate = self._table.similarity(left[here], right[here])
            longer = np.maximum(self._bytes[left[here]], self._bytes[right[here]])
            same[here] = (longer > _HUGE) & (estimate >= self._threshold)
            close = estimate >= self._threshold - _MARGIN
            likely = first + np.flatnonzero(close & (longer <= _HUGE))
            for some in self._batches(likely, left, right):
                same[some] = self._similarity(left[some], right[some]) >= self._threshold
        return same

    def _batches(self, pairs: near.Ids, left: near.Ids, right: near.Ids) -> Iterator[near.Ids]:
        """The pairs, so many at a time that their texts fit in memory."""
        total = np.cumsum(self._bytes[left[pairs]].astype(np.int64) + self._bytes[right[pairs]])
        batch = total // _BYTES_AT_ONCE
        yield from np.split(pairs, np.flatnonzero(np.diff(batch)) + 1) if len(pairs) else ()

    def _similarity(self, left: near.Ids, right: near.Ids) -> npt.NDArray[np.float64]:
        ids, place = np.unique(np.concatenate((left, right)), return_inverse=True)
        data, ends = self._read(ids)
        grams = ngrams.grams(ngrams.words_only(ngrams.characters(data, ends)), near_signatures.SHINGLE)
        return jaccard(grams, place[: len(left)], place[len(left) :])

    def _read(self, ids: near.Ids) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The texts of documents in ascending order, end to end."""
        parts: list[bytes] = []
        numbers = np.searchsorted(self._first, ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            chunk, here = self._chunks[number], ids[numbers == number]
            first = self._start[chunk.rows.start]
            with chunk.path.open("rb") as file:
                for start, size in zip((self._start[here] - first).tolist(), self._bytes[here].tolist(), strict=True):
                    parts.append(os.pread(file.fileno(), size, start))
        return b"".join(parts), np.cumsum([len(part) for part in parts])


def jaccard(grams: ngrams.Grams, left: near.Ids, right: near.Ids) -> npt.NDArray[np.float64]:
    """Exact Jaccard similarity of the sets of n-grams of pairs of documents: [pairs]; 0 where both have none."""
    # A document's number in the upper 24 bits and 40 bits of the hash: one sort of integers groups and orders both.
    packed = (grams.document.astype(np.uint64) << np.uint64(40)) | (grams.hashes >> np.uint64(24))
    packed.sort()
    packed = packed[np.concatenate(([True], packed[1:] != packed[:-1]))] if len(packed) else packed
    hashes = packed & np.uint64(2**40 - 1)
    size = np.bincount((packed >> np.uint64(40)).astype(np.int64), minlength=len(grams.count))
    start = np.concatenate(([0], np.cumsum(size)))
    common = np.zeros(len(left), dtype=np.int64)
    total = np.cumsum(size[left] + size[right])
    first = 0
    while first < len(left):  # a few million hashes at a time
        limit = max(first + 1, int(np.searchsorted(total, (total[first - 1] if first else 0) + _BYTES_AT_ONCE // 8)))
        pair = np.arange(limit - first, dtype=np.uint64)
        packed = np.concatenate(
            [_packed(hashes, start, size, side[first:limit], pair) for side in (left, right)], dtype=np.uint64
        )
        packed.sort()
        twice = packed[1:][packed[1:] == packed[:-1]] >> np.uint64(40)
        common[first:limit] = np.bincount(twice.astype(np.int64), minlength=limit - first)
        first = limit
    union = size[left] + size[right] - common
    similar: npt.NDArray[np.float64] = common / np.maximum(union, 1)
    return similar


def _packed(
    hashes: npt.NDArray[np.uint64],
    start: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    side: near.Ids,
    pair: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """The hashes of each pair's document with the pair's number in the upper 24 bits."""
    lengths = size[side]
    chosen = hashes[np.repeat(start[side], lengths) + within(lengths)]
    packed: npt.NDArray[np.uint64] = (np.repeat(pair, lengths) << np.uint64(40)) | chosen
    return packed
