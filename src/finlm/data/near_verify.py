"""Is a candidate pair really a near-duplicate: the exact Jaccard similarity of its two texts' 5-grams.

The signatures' estimate goes first and spares most texts that are clearly different; what it lets pass is read and
compared exactly, so a pair that is joined has the similarity that the recipe asks for. Texts are read chunk by chunk,
a few thousand pairs at a time.

Texts that share a long frame and little else meet again and again, band after band, just below the threshold: their
n-grams and the pairs that were refused are kept, as far as 64 and 32 MB go. 3 microseconds a pair of 460 characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from finlm.data import documents, near, near_signatures, ngrams
from finlm.data.hashing import mix

# An estimate lies this far below the truth once in a million pairs of long documents; of short ones, whose empty bins
# repeat others, no pair of the real text was lost by it.
_MARGIN = 0.2
_PAIRS_AT_ONCE = 8192
_BYTES_AT_ONCE = 16 * 2**20
_HUGE = 4 * 2**20  # bytes; the estimate of so long a text needs no second look
_KEPT_GRAMS = 8 * 2**20
_KEPT_PAIRS = 2**22
_FEW = 4

Grams = npt.NDArray[np.uint64]  # the different n-grams of one document, sorted


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
        self._grams: dict[int, Grams] = {}
        self._refused = np.zeros(_KEPT_PAIRS, dtype=np.uint64)  # by the end of its hash; a later pair replaces one

    def __call__(self, left: near.Ids, right: near.Ids) -> npt.NDArray[np.bool_]:
        """Whether each pair is at least as similar as the threshold: bool [pairs]."""
        same = np.zeros(len(left), dtype=np.bool_)
        for first in range(0, len(left), _PAIRS_AT_ONCE):
            here = slice(first, first + _PAIRS_AT_ONCE)
            estimate = self._table.similarity(left[here], right[here])
            longer = np.maximum(self._bytes[left[here]], self._bytes[right[here]])
            same[here] = (longer > _HUGE) & (estimate >= self._threshold)
            pair = left[here].astype(np.uint64) << np.uint64(32) | right[here].astype(np.uint64)
            place = mix(pair) % np.uint64(_KEPT_PAIRS)
            close = (estimate >= self._threshold - _MARGIN) & (self._refused[place] != pair)
            likely = first + np.flatnonzero(close & (longer <= _HUGE))
            for some in self._batches(likely, left, right):
                same[some] = self._compared(left[some], right[some])
            refused = likely[~same[likely]] - first
            self._refused[place[refused]] = pair[refused]
        return same

    def _batches(self, pairs: near.Ids, left: near.Ids, right: near.Ids) -> Iterator[near.Ids]:
        """The pairs, so many at a time that their texts fit in memory."""
        total = np.cumsum(self._bytes[left[pairs]].astype(np.int64) + self._bytes[right[pairs]])
        batch = total // _BYTES_AT_ONCE
        yield from np.split(pairs, np.flatnonzero(np.diff(batch)) + 1) if len(pairs) else ()

    def _compared(self, left: near.Ids, right: near.Ids) -> npt.NDArray[np.bool_]:
        ids = np.unique(np.concatenate((left, right)))
        if sum(map(len, self._grams.values())) > _KEPT_GRAMS:
            self._grams.clear()
        missing = ids[[number not in self._grams for number in ids.tolist()]]
        if len(missing):
            data, ends = self._read(missing)
            found = ngrams.grams(ngrams.words_only(ngrams.characters(data, ends)), near_signatures.SHINGLE)
            self._grams.update(zip(missing.tolist(), different(found), strict=True))
        same = np.zeros(len(left), dtype=np.bool_)
        order = np.argsort(left, kind="stable")
        for pairs in np.split(order, np.flatnonzero(np.diff(left[order])) + 1):
            others = [self._grams[number] for number in right[pairs].tolist()]
            same[pairs] = similar(self._grams[int(left[pairs[0]])], others, self._threshold)
        return same

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


def different(grams: ngrams.Grams) -> list[Grams]:
    """The different n-grams of each document, sorted."""
    # A document's number in the upper 24 bits and 40 bits of the hash: one sort of integers groups and orders both.
    packed = (grams.document.astype(np.uint64) << np.uint64(40)) | (grams.hashes >> np.uint64(24))
    packed.sort()
    packed = packed[np.concatenate(([True], packed[1:] != packed[:-1]))] if len(packed) else packed
    size = np.bincount((packed >> np.uint64(40)).astype(np.int64), minlength=len(grams.count))
    # Copies: a view would keep the whole batch.
    return [part.copy() for part in np.split(packed & np.uint64(2**40 - 1), np.cumsum(size)[:-1])]


def similar(own: Grams, others: Sequence[Grams], threshold: float) -> npt.NDArray[np.bool_]:
    """Whether each of the other sets has at least this exact Jaccard similarity to the first: bool [others].

    Where there are many, the ends of the hashes say first how many n-grams are common at most.
    """
    lengths = np.array([len(other) for other in others])
    same = np.ones(len(others), dtype=np.bool_)
    if len(others) >= _FEW:
        ends = np.uint64(2 ** (len(own).bit_length() + 6) - 1)
        seen = np.zeros(int(ends) + 1, dtype=np.bool_)
        seen[own & ends] = True
        member = np.repeat(np.arange(len(others)), lengths)
        at_most = np.bincount(member[seen[np.concatenate(others) & ends]], minlength=len(others))
        same = at_most / np.maximum(len(own) + lengths - at_most, 1) >= threshold
    for number in np.flatnonzero(same).tolist():
        common = len(np.intersect1d(own, others[number], assume_unique=True))
        same[number] = common / max(1, len(own) + int(lengths[number]) - common) >= threshold
    return same
