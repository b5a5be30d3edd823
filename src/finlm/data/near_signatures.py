"""MinHash signatures: 128 numbers a document, and two documents agree in the share of them that their 5-grams do.

One-permutation MinHash (Li, Owen and Zhang 2012) with densification by rotation (Shrivastava and Li 2014): each 5-gram
is hashed once, not 128 times; its first 7 bits name a bin and the smallest of the other bits is the bin's value; an
empty bin takes the value of the next full one before it. A band's bins lie far apart, so that they rarely share one.

A bin keeps 16 bits: two different values look equal once in 65,536. Documents with no 5-gram have no signature.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.data import documents, ngrams
from finlm.data.hashing import GOLDEN, mix

VERSION = 2
SHINGLE = 5
BINS = 128
# 21 bands of 6 bins find a pair of similarity 0.8 with probability 1 - (1 - 0.8^6)^21 = 0.998, one of 0.5 with 0.28;
# what is found is verified, so the cost of the second is work and not precision.
BANDS, ROWS = 21, 6

_EMPTY = np.uint32(2**32 - 1)
_BYTES_AT_ONCE = 2**21

Signatures = npt.NDArray[np.uint16]
Keys = npt.NDArray[np.uint32]


def of_chunk(path: Path) -> tuple[Signatures, Keys]:
    """of_block of a chunk of the documents step. Runs in a worker."""
    return of_block(path.read_bytes(), documents.read_index(path)["end"])


def of_block(data: bytes, ends: npt.NDArray[np.integer]) -> tuple[Signatures, Keys]:
    """(signatures uint16 [documents, BINS], band keys uint32 [BANDS, documents]) of UTF-8 documents end to end."""
    signatures = np.zeros((len(ends), BINS), dtype=np.uint16)
    limits = np.concatenate(([0], np.asarray(ends, dtype=np.int64)))
    first = 0
    while first < len(ends):  # a few thousand documents at a time stay in the processor's cache
        limit = max(first + 1, int(np.searchsorted(limits, limits[first] + _BYTES_AT_ONCE, side="right")) - 1)
        here = data[limits[first] : limits[limit]]
        minima = (
            _of_documents(here, limits[first + 1 : limit + 1] - limits[first]) if limit > first + 1 else _of_one(here)
        )
        signatures[first:limit] = _densified(minima)
        first = limit
    return signatures, band_keys(signatures)


def has_signature(signatures: Signatures) -> npt.NDArray[np.bool_]:
    """Which rows belong to a document with at least one 5-gram: bool [documents]."""
    signed: npt.NDArray[np.bool_] = (signatures != 0).any(axis=1)
    return signed


def band_keys(signatures: Signatures) -> Keys:
    """Bands of equal rows have equal keys: uint32 [BANDS, documents]."""
    total = np.zeros((len(signatures), BANDS), dtype=np.uint64)
    for row in range(ROWS):
        total *= GOLDEN
        total += signatures[:, row * BANDS : (row + 1) * BANDS]
    return np.ascontiguousarray((mix(total) >> np.uint64(32)).astype(np.uint32).T)


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float32]:
    """Estimated Jaccard similarity of rows: standard error 0.035 at 0.8, more for short documents."""
    share: npt.NDArray[np.float32] = np.count_nonzero(left == right, axis=1).astype(np.float32) / np.float32(BINS)
    return share


def _of_documents(data: bytes, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    grams = ngrams.grams(ngrams.words_only(ngrams.characters(data, ends)), SHINGLE)
    return _minima(grams.hashes, grams.document, len(ends))


def _of_one(data: bytes) -> npt.NDArray[np.uint32]:
    """The minima of one document, piece by piece: all at once one of 100 MB would take 2 GB."""
    minima = np.full((1, BINS), _EMPTY, dtype=np.uint32)
    before = np.empty(0, dtype=np.uint32)  # characters of 5-grams that end in the next piece
    start = 0
    while start < len(data):
        end = start + _BYTES_AT_ONCE
        while end < len(data) and data[end] & 0xC0 == 0x80:  # within a character
            end += 1
        piece = data[start:end]
        text = ngrams.words_only(ngrams.characters(piece, np.array([len(piece)])))
        codes = np.concatenate((before, text.codes))
        grams = ngrams.grams(ngrams.Characters(codes, np.array([0, len(codes)])), SHINGLE)
        minima = np.minimum(minima, _minima(grams.hashes, grams.document, 1))
        before, start = codes[1 - SHINGLE :], end
    return minima


def _minima(hashes: npt.NDArray[np.uint64], document: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.uint32]:
    """The smallest hash of each bin: uint32 [count, BINS], _EMPTY where there is none."""
    minima = np.full(count * BINS, _EMPTY, dtype=np.uint32)
    bins = (hashes >> np.uint64(57)).astype(np.int64)
    bins += document.astype(np.int64) * BINS
    np.minimum.at(minima, bins, hashes.astype(np.uint32) & np.uint32(2**31 - 1))
    return minima.reshape(count, BINS)


def _densified(minima: npt.NDArray[np.uint32]) -> Signatures:
    """Every bin's value in 16 bits, an empty bin's that of the next full one before it; 0 where all are empty."""
    full = minima != _EMPTY
    values = minima.astype(np.uint64)
    values += np.arange(1, BINS + 1, dtype=np.uint64) << np.uint64(32)  # equal minima of different bins differ
    signatures: Signatures = np.maximum(mix(values) >> np.uint64(48), 1).astype(np.uint16)
    signatures[~full] = 0
    before = np.maximum.accumulate(np.where(full, np.arange(BINS, dtype=np.int16), np.int16(-1)), axis=1)
    before = np.where(before < 0, before[:, -1:], before)  # round the end; -1 where there is none at all
    return np.take_along_axis(signatures, before.astype(np.intp), axis=1)
