"""Near-duplicates from MinHash signatures: candidates of equal bands, verified, joined into connected components.

Documents that agree in a band stand in one run of its sorted keys. The first of a run is compared with the others;
those that are no duplicates of it make a new run with a leader of their own, and so on: work grows with the number of
different texts in a run, not with its square. Pairs that earlier bands joined are not compared again. The document
with the smallest number stands for its component, first within each source, then over all of them.

Memory is bounded by parts: keys lie on disk, a file a band, and are sorted a few million at a time. Beyond that a
document takes 40 bytes: 511 MiB in all for 12 million, and what near_verify.py keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.data import near_signatures
from finlm.data.hashing import mix

Ids = npt.NDArray[np.int64]
Labels = npt.NDArray[np.uint32]
Verify = Callable[[Ids, Ids], npt.NDArray[np.bool_]]

_SORTED_AT_ONCE = 4_000_000  # documents: about 100 MB
_READ_AT_ONCE = 2**20
_ROWS_AT_ONCE = 2**15
_SIGNATURES = "signatures.u16"
_LEADERS = 32  # leaders a run has at most; a run of more different texts is a frame (a date, a heading), no duplicate


@dataclass(frozen=True)
class Table:
    """The signatures of all documents on disk, in the documents' order."""

    directory: Path
    documents: int

    def signatures(self) -> npt.NDArray[np.uint16]:
        """[documents, BINS], mapped."""
        shape = (self.documents, near_signatures.BINS)
        return np.memmap(self.directory / _SIGNATURES, dtype="<u2", mode="r", shape=shape)

    def similarity(self, left: Ids, right: Ids) -> npt.NDArray[np.float32]:
        """The estimated Jaccard similarity of pairs of documents: [pairs]."""
        estimate = np.empty(len(left), dtype=np.float32)
        with (self.directory / _SIGNATURES).open("rb") as file:
            for first in range(0, len(left), _ROWS_AT_ONCE):
                here = slice(first, first + _ROWS_AT_ONCE)
                rows = (_rows(file.fileno(), side[here]) for side in (left, right))
                estimate[here] = near_signatures.similarity(*rows)
        return estimate

    def keys(self, band: int) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """(first document, keys) of a band, block by block."""
        path = self.directory / f"band-{band:02d}.u32"
        for first in range(0, self.documents, _READ_AT_ONCE):
            yield first, np.fromfile(path, dtype="<u4", count=_READ_AT_ONCE, offset=4 * first)


def _rows(file: int, ids: Ids) -> npt.NDArray[np.uint16]:
    """Signatures of single documents; reading beats a memory map here, which takes 64 KiB into memory for 256 bytes."""
    size = 2 * near_signatures.BINS
    parts = [os.pread(file, size, size * number) for number in ids.tolist()]
    return np.frombuffer(b"".join(parts), dtype="<u2").reshape(len(parts), near_signatures.BINS)


class Writer:
    """Appends blocks of signatures to the files of a Table."""

    def __init__(self, directory: Path) -> None:
        self._signatures = (directory / _SIGNATURES).open("wb")
        self._bands = [(directory / f"band-{band:02d}.u32").open("wb") for band in range(near_signatures.BANDS)]
        self.documents = 0

    def append(self, signatures: near_signatures.Signatures, keys: near_signatures.Keys) -> None:
        """The next block of documents."""
        self._signatures.write(signatures.astype("<u2", copy=False).tobytes())
        for file, band in zip(self._bands, keys, strict=True):
            file.write(band.astype("<u4", copy=False).tobytes())
        self.documents += len(signatures)

    def close(self) -> None:
        """Flush and close all files."""
        for file in (self._signatures, *self._bands):
            file.close()


def components(
    table: Table, source: npt.NDArray[np.integer], wanted: npt.NDArray[np.bool_], verify: Verify
) -> tuple[Labels, int]:
    """(smallest number of each document's component, pairs verified); a document without duplicates has its own.

    source and wanted are [documents]; documents that are not wanted take no part. The result depends on nothing else.
    """
    labels = np.arange(table.documents, dtype=np.uint32)
    compared = 0
    if len(np.unique(source[wanted])) > 1:
        for band in range(near_signatures.BANDS):
            for runs in _runs(table, band, wanted, source):
                compared += _join(runs, labels, verify)
        wanted = wanted & (labels == np.arange(table.documents, dtype=np.uint32))
    for band in range(near_signatures.BANDS):
        for runs in _runs(table, band, wanted, None):
            compared += _join(runs, labels, verify)
    return roots(labels, np.arange(table.documents)).astype(np.uint32), compared


def roots(labels: Labels, ids: Ids) -> Ids:
    """The smallest document that each of these is joined with so far."""
    found = labels[ids]
    while not np.array_equal(found, above := labels[found]):
        found = above
    return found.astype(np.int64)


def join(labels: Labels, left: Ids, right: Ids) -> None:
    """Join each pair's components; labels always point to a smaller document or to itself."""
    while len(left):
        left, right = roots(labels, left), roots(labels, right)
        apart = left != right
        left, right = np.minimum(left, right)[apart], np.maximum(left, right)[apart]
        np.minimum.at(labels, right, left.astype(np.uint32))


def _runs(
    table: Table, band: int, wanted: npt.NDArray[np.bool_], source: npt.NDArray[np.integer] | None
) -> Iterator[tuple[Ids, Ids]]:
    """(documents, start of each run) of the documents that share a key with another, a part of the key space a time."""
    parts = -(-int(np.count_nonzero(wanted)) // _SORTED_AT_ONCE)
    for part in range(parts):
        pieces = []
        for first, keys in table.keys(band):
            here = slice(first, first + len(keys))
            if source is not None:  # equal keys of different sources become different
                both = keys | (source[here].astype(np.uint64) << np.uint64(32))
                keys = (mix(both) >> np.uint64(32)).astype(np.uint32)
            chosen = np.flatnonzero(wanted[here] & (keys % np.uint32(parts) == part))
            pieces.append(keys[chosen].astype(np.uint64) << np.uint64(32) | (chosen + first).astype(np.uint64))
        packed = np.concatenate(pieces)
        packed.sort()
        equal = (packed[1:] >> np.uint64(32)) == (packed[:-1] >> np.uint64(32))
        member = np.concatenate((equal, [False])) | np.concatenate(([False], equal))
        start = np.concatenate(([True], ~equal))[member]
        documents = (packed[member] & np.uint64(2**32 - 1)).astype(np.int64)
        yield documents, np.flatnonzero(start)


def _join(runs: tuple[Ids, Ids], labels: Labels, verify: Verify) -> int:
    """Join the duplicates in each run; how many pairs were compared."""
    documents, starts = runs
    run = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(documents))))
    compared = 0
    for _ in range(_LEADERS):
        if not len(documents):
            break
        is_leader = np.concatenate(([True], run[1:] != run[:-1]))
        leader = documents[is_leader][np.cumsum(is_leader) - 1]
        leader, documents, run = leader[~is_leader], documents[~is_leader], run[~is_leader]
        open_pair = roots(labels, leader) != roots(labels, documents)
        leader, documents, run = leader[open_pair], documents[open_pair], run[open_pair]
        same = verify(leader, documents)
        compared += len(same)
        join(labels, leader[same], documents[same])
        documents, run = documents[~same], run[~same]
    return compared
