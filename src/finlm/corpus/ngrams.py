"""Hash the character n-grams of many documents at once, and make MinHash signatures of them.

A block of documents becomes one array of code points, and every window of n gets a 64-bit hash by multiplications over
whole arrays: 20 to 30 million windows a core-second. Where only the words matter (near-duplicates, benchmark questions)
letters and digits alone are kept, in lower case. Different n-grams collide once in 2^64; nothing is cryptographic.

A signature is 128 numbers a document; two agree in the share of them that their 5-grams do. One-permutation MinHash
(Li, Owen and Zhang 2012) with densification by rotation (Shrivastava and Li 2014): each 5-gram is hashed once, its
first 7 bits name a bin, the smallest of the other bits is the bin's value, and an empty bin takes the value of the
next full one before it. A bin keeps 16 bits: two different values look equal once in 65,536.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from finlm.corpus import documents
from finlm.rows.shards import GOLDEN, mix

Numbers = npt.NDArray[np.integer]
_BMP = 1 << 16
_BYTES_AT_ONCE = 2**18  # their arrays stay in the processor's cache


@dataclass(frozen=True)
class Characters:
    """The code points of documents end to end."""

    codes: npt.NDArray[np.uint32]  # [characters]
    starts: npt.NDArray[np.int64]  # [documents + 1]


def characters(data: bytes, ends: Numbers, sizes: Numbers | None = None) -> Characters:
    """Return the code points of UTF-8 documents laid end to end, and where each document starts among them.

    `ends` [documents] has the byte offset of each document's end; `sizes` the characters of each, where the caller need
    not have them counted. Raises UnicodeDecodeError if it is not UTF-8.
    """
    text = data.decode("utf-8")
    codes = np.array([text]).view(np.uint32)[: len(text)]  # copied by NumPy in half of the time that encoding takes
    if sizes is not None:
        return Characters(codes, np.append(0, np.cumsum(sizes, dtype=np.int64)))
    # A byte of the form 10xxxxxx, -128 to -65, continues a character. Searching takes a tenth of summing up.
    first = np.flatnonzero(np.frombuffer(data, dtype=np.int8) >= -64)
    return Characters(codes, np.searchsorted(first, np.concatenate(([0], np.asarray(ends, dtype=np.int64)))))


def words_only(text: Characters) -> Characters:
    """Return the documents with only letters and digits, in lower case, and all characters above U+FFFF."""
    folded = np.take(_letters(), text.codes, mode="clip")  # uint16, the code points beyond as the last
    if len(text.codes) and text.codes.max() >= _BMP:
        folded = folded.astype(np.uint32)
        rare = text.codes >= _BMP  # rare Chinese characters stay, emoji with them
        folded[rare] = text.codes[rare]
    kept = np.flatnonzero(folded != 0)  # a test first: five times as fast
    return Characters(folded[kept].astype(np.uint32), np.searchsorted(kept, text.starts))


@dataclass(frozen=True)
class Grams:
    """Every n-gram of every document; documents shorter than n have none."""

    hashes: npt.NDArray[np.uint64]  # [grams]
    document: npt.NDArray[np.int32]  # [grams], ascending
    count: npt.NDArray[np.int64]  # [documents], grams of each


def hash_grams(text: Characters, n: int) -> Grams:
    """Return the hashes of all windows of n characters that lie inside a single document."""
    count = np.maximum(np.diff(text.starts) - n + 1, 0)
    document = np.repeat(np.arange(len(count), dtype=np.int32), count)
    return Grams(windows(text.codes, n)[starts(text, n)], document, count)


def starts(text: Characters, n: int) -> npt.NDArray[np.int64]:
    """Return the ascending start positions of all windows of n characters that lie inside a single document."""
    inside = np.ones(len(text.codes), dtype=np.bool_)
    inside[_crossing(text, n)] = False
    return np.flatnonzero(inside)


def _crossing(text: Characters, n: int) -> npt.NDArray[np.int64]:
    """Return the positions, some twice, at which a window of n characters would reach over a document's end."""
    places = (text.starts[1:, None] - np.arange(1, n)).ravel()
    return places[places >= 0]


def windows(codes: npt.NDArray[np.uint32], n: int) -> npt.NDArray[np.uint64]:
    """Return the hash of every n consecutive code points, also across documents: uint64 [codes - n + 1]."""
    return mix(sums(codes.astype(np.uint64), n))


def sums(codes: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Return the polynomial in GOLDEN of every n consecutive codes, in their unsigned type: [codes - n + 1].

    Empty for fewer than n codes. A sum is made of two of half as many codes: three multiplications for n of 5 or 6.
    """
    if len(codes) < n:
        return codes[:0]
    total, length, modulus = codes, 1, 2 ** (8 * codes.itemsize)
    for digit in bin(n)[3:]:
        left = total[:-length] * codes.dtype.type(pow(int(GOLDEN), length, modulus))
        left += total[length:]
        total, length = left, 2 * length
        if digit == "1":
            left = total[:-1] * codes.dtype.type(int(GOLDEN) % modulus)
            left += codes[length:]
            total, length = left, length + 1
    return total


def hash_at(codes: npt.NDArray[np.uint32], places: Numbers, n: int) -> npt.NDArray[np.uint64]:
    """Return the hash of the n characters from each position on, uint64 [places], equal to that of windows()."""
    total = np.zeros(len(places), dtype=np.uint64)
    for back in range(n):
        total *= GOLDEN
        total += codes[places + back]
    return mix(total)


def blocks(data: bytes, ends: Numbers) -> Iterator[tuple[int, bytes, npt.NDArray[np.int64]]]:
    """Yield (first document, UTF-8 bytes, end of each document in them): up to 256 KiB or one document at a time."""
    limits = np.concatenate(([0], np.asarray(ends, dtype=np.int64)))
    first = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(limits, limits[first] + _BYTES_AT_ONCE, side="right")) - 1)
        yield first, data[limits[first] : limits[last]], limits[first + 1 : last + 1] - limits[first]
        first = last


@cache
def _letters() -> npt.NDArray[np.uint16]:
    """Return a table [65536] with the lower case of each letter and digit, and 0 for everything else."""
    table = np.zeros(_BMP, dtype=np.uint16)
    for code in range(_BMP):
        if (character := chr(code)).isalnum():
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    return table


SIGNATURE_VERSION = 3
SHINGLE = 5
BINS = 128
# 21 bands of 6 bins find a pair of similarity 0.8 with probability 1 - (1 - 0.8^6)^21 = 0.998, one of 0.5 with 0.28;
# what is found is verified, so the cost of the second is work and not precision.
BANDS, ROWS = 21, 6

_EMPTY = np.uint32(2**32 - 1)

Signatures = npt.NDArray[np.uint16]
Ids = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def sign_block(data: bytes, ends: Numbers, sizes: Numbers | None = None) -> Signatures:
    """Return the signatures of UTF-8 texts, uint16 [documents, BINS], zeros without a 5-gram; see characters()."""
    signatures = np.zeros((len(ends), BINS), dtype=np.uint16)
    for first, here, limits in blocks(data, ends):
        these = slice(first, first + len(limits))
        if len(limits) == 1:
            signatures[these] = _densify(_long_document_minima(here))
        else:
            text = characters(here, limits, None if sizes is None else sizes[these])
            signatures[these] = _densify(_minima(words_only(text)))
    return signatures


def band_keys(signatures: Signatures) -> Keys:
    """Return a key per band and document, uint64 [BANDS, documents]; equal values have equal keys."""
    total = np.zeros((len(signatures), BANDS), dtype=np.uint64)
    for row in range(ROWS):
        total *= GOLDEN
        total += signatures[:, row * BANDS : (row + 1) * BANDS]
    return np.ascontiguousarray(mix(total).T)


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float32]:
    """Return the estimated Jaccard similarity of each pair of rows; the standard error is 0.035 at 0.8."""
    share: npt.NDArray[np.float32] = np.count_nonzero(left == right, axis=1).astype(np.float32) / np.float32(BINS)
    return share


def _long_document_minima(data: bytes) -> npt.NDArray[np.uint32]:
    """Return what _minima() does for one document, piece by piece: 100 MB at once would take 2 GB of memory."""
    minima = np.full((1, BINS), _EMPTY, dtype=np.uint32)
    before = np.empty(0, dtype=np.uint32)  # characters of 5-grams that end in the next piece
    start = 0
    while start < len(data):
        end = start + _BYTES_AT_ONCE
        while end < len(data) and data[end] & 0xC0 == 0x80:  # within a character
            end += 1
        piece = data[start:end]
        codes = np.concatenate((before, words_only(characters(piece, np.array([len(piece)]))).codes))
        minima = np.minimum(minima, _minima(Characters(codes, np.array([0, len(codes)]))))
        before, start = codes[1 - SHINGLE :], end
    return minima


def _minima(text: Characters) -> npt.NDArray[np.uint32]:
    """Return the smallest 5-gram's hash of each bin, uint32 [documents, BINS]; _EMPTY for a bin without one."""
    lengths = np.diff(text.starts)
    minima = np.full(len(lengths) * BINS, _EMPTY, dtype=np.uint32)
    hashes = windows(text.codes, SHINGLE)
    values = hashes.astype(np.uint32) & np.uint32(2**31 - 1)
    crossing = _crossing(text, SHINGLE)
    values[crossing[crossing < len(values)]] = _EMPTY
    bins = (hashes >> np.uint64(57)).astype(np.int64)
    bins += np.repeat(np.arange(len(lengths)) * BINS, lengths)[: len(bins)]
    np.minimum.at(minima, bins, values)
    return minima.reshape(len(lengths), BINS)


def _densify(minima: npt.NDArray[np.uint32]) -> Signatures:
    """Return signatures of 16 bits per bin; an empty bin takes the value of the last full one, round the end."""
    full = minima != _EMPTY
    values = minima.astype(np.uint64)
    values += np.arange(1, BINS + 1, dtype=np.uint64) << np.uint64(32)  # equal minima of different bins differ
    signatures: Signatures = np.maximum(mix(values) >> np.uint64(48), 1).astype(np.uint16)
    signatures[~full] = 0
    before = np.maximum.accumulate(np.where(full, np.arange(BINS, dtype=np.int16), np.int16(-1)), axis=1)
    before = np.where(before < 0, before[:, -1:], before)  # round the end; -1 where there is none at all
    return np.take_along_axis(signatures, before.astype(np.intp), axis=1)


SEARCH_BYTES_A_DOCUMENT = 2 * BINS + BANDS * (8 + 4) + 1 + 4  # signatures, sorted keys, states and labels


@dataclass(frozen=True)
class SortedKeys:
    """The band keys of all documents, sorted, in a file per group of documents.

    They are cut into `parts` ranges of equal length, so that a worker reads the documents of one range alone.
    """

    directory: Path
    firsts: tuple[int, ...]  # the first document of each group
    parts: int

    def path(self, group: int) -> Path:
        """Return the file of a group, which need not exist."""
        return self.directory / f"keys-{group:06d}.bin"

    def write(self, group: int, keys: Keys, signed: npt.NDArray[np.uint32]) -> None:
        """Write the file of a group: the keys [BANDS, documents] of its documents with a signature.

        `signed` [documents] has the number of each within its group. Takes 20 bytes a document besides the arguments.
        """
        limits = np.array([part * 2**64 // self.parts for part in range(1, self.parts)], dtype=np.uint64)
        starts = np.zeros((BANDS, self.parts + 1), dtype="<i8")
        with self.path(group).open("wb") as file:
            file.seek(8 + starts.nbytes)
            for band in range(BANDS):
                order = np.argsort(keys[band])
                in_order = keys[band][order]
                starts[band] = 0, *np.searchsorted(in_order, limits), len(order)
                file.write(in_order.astype("<u8", copy=False).tobytes())
                file.write(signed[order].astype("<u4", copy=False).tobytes())
            file.seek(0)
            file.write(np.int64(len(signed)).astype("<i8").tobytes() + starts.tobytes())

    def read(self, band: int, part: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the keys of a band that lie in a range, and the document of each, group after group.

        Raises OSError for a missing or shortened file.
        """
        keys, numbers = [np.empty(0, dtype="<u8")], [np.empty(0, dtype=np.int64)]
        for group, first in enumerate(self.firsts):
            with self.path(group).open("rb", buffering=0) as file:
                count = int(_read_at(file.fileno(), "<i8", 0, 1)[0])
                start, end = _read_at(file.fileno(), "<i8", 8 + 8 * (band * (self.parts + 1) + part), 2).tolist()
                here = 8 + 8 * BANDS * (self.parts + 1) + 12 * band * count
                keys.append(_read_at(file.fileno(), "<u8", here + 8 * start, end - start))
                inside = _read_at(file.fileno(), "<u4", here + 8 * count + 4 * start, end - start)
            numbers.append(inside.astype(np.int64) + first)
        return np.concatenate(keys), np.concatenate(numbers)

    def remove(self) -> None:
        """Delete the table's files. Raises FileNotFoundError if one is gone already."""
        for group in range(len(self.firsts)):
            self.path(group).unlink()


def _read_at(file: int, kind: str, offset: int, count: int) -> npt.NDArray[Any]:
    """Read `count` values of a NumPy type at a byte offset of an open file. Raises OSError if the file is shorter."""
    size = np.dtype(kind).itemsize * count
    first = offset - offset % 2**18  # whole blocks of 256 KiB are read: the next ranges are in memory then
    os.posix_fadvise(file, first, offset + size - first + -(offset + size) % 2**18, os.POSIX_FADV_WILLNEED)
    data = os.pread(file, size, offset)
    if len(data) != size:
        raise OSError(f"{size:,} bytes wanted at {offset:,}, {len(data):,} read")
    return np.frombuffer(data, dtype=kind)


_CATALOG = ("firsts.npy", "texts.npy", "signatures.npy")


@dataclass(frozen=True)
class Catalog:
    """The files of all chunks in order, in arrays that are mapped into memory, as a million paths would be large."""

    firsts: Ids  # the first document of each
    texts: npt.NDArray[np.bytes_]
    signatures: npt.NDArray[np.bytes_]

    @staticmethod
    def write(directory: Path, chunks: Sequence[documents.Chunk], signatures: Sequence[Path]) -> None:
        """Write the catalog's files into a directory; `signatures` has the .npz of each chunk's signatures."""
        arrays = (
            np.array([chunk.rows.start for chunk in chunks], dtype=np.int64),
            np.array([bytes(chunk.path) for chunk in chunks], dtype=np.bytes_),
            np.array([bytes(path) for path in signatures], dtype=np.bytes_),
        )
        for name, array in zip(_CATALOG, arrays, strict=True):
            np.save(directory / name, array)

    @staticmethod
    def remove(directory: Path) -> None:
        """Delete the catalog's files. Raises FileNotFoundError if one is gone already."""
        for name in _CATALOG:
            (directory / name).unlink()

    @classmethod
    def read(cls, directory: Path) -> Catalog:
        """Return the catalog in a directory. Raises FileNotFoundError without one."""
        return cls(*(np.load(directory / name, mmap_mode="r") for name in _CATALOG))

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return (number of its chunk, number within the chunk) of each document."""
        numbers = np.searchsorted(self.firsts, ids, side="right") - 1
        return numbers, ids - self.firsts[numbers]

    def map_text(self, number: int) -> mmap.mmap | bytes:
        """Return the texts of a chunk, UTF-8 end to end, mapped into memory unless there are none."""
        with Path(os.fsdecode(self.texts[number])).open("rb") as file:
            is_empty = not os.fstat(file.fileno()).st_size
            return b"" if is_empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def read_ends(self, number: int) -> Ids:
        """Return 0 and the byte offset of the end of each text of a chunk: int64 [documents + 1]."""
        index = documents.read_index(Path(os.fsdecode(self.texts[number])))
        return np.concatenate(([0], index["end"].astype(np.int64)))

    def map_signatures(self, number: int) -> Signatures:
        """Return the signatures of a chunk, mapped into memory: [documents, BINS]. Its .npz must not be compressed."""
        path = Path(os.fsdecode(self.signatures[number]))
        with ZipFile(path) as archive, path.open("rb") as file:
            file.seek(archive.getinfo("signatures.npy").header_offset + 26)  # the lengths of its name and extra field
            file.seek(int(np.frombuffer(file.read(4), dtype="<u2").sum()), os.SEEK_CUR)
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)


_FEW = 4

Distinct = npt.NDArray[np.uint64]  # the different n-grams of one document, sorted


def distinct_grams(grams: Grams) -> list[Distinct]:
    """Return the distinct n-gram hashes of each document, sorted, cut to their upper 40 bits: uint64."""
    # A document's number in the upper 24 bits and 40 bits of the hash: one sort of integers groups and orders both.
    packed = (grams.document.astype(np.uint64) << np.uint64(40)) | (grams.hashes >> np.uint64(24))
    packed.sort()
    packed = packed[np.concatenate(([True], packed[1:] != packed[:-1]))] if len(packed) else packed
    size = np.bincount((packed >> np.uint64(40)).astype(np.int64), minlength=len(grams.count))
    # Copies: a view would keep the whole batch.
    return [part.copy() for part in split(packed & np.uint64(2**40 - 1), np.cumsum(size)[:-1])]


def split(values: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """Yield the parts of values before, between and behind the indexes `ends`; faster than np.split for small parts."""
    for first, last in pairwise((0, *ends.tolist(), len(values))):
        yield values[first:last]


def are_similar(first: Distinct, others: Sequence[Distinct], threshold: float) -> npt.NDArray[np.bool_]:
    """Return bool [others]: whether the Jaccard similarity of each set to `first` is at least `threshold`.

    Sets are sorted distinct hashes; an empty `first` is similar to none. With four others or more, a bound from the low
    bits of the hashes is tested first.
    """
    lengths = np.array([len(other) for other in others])
    same = np.ones(len(others), dtype=np.bool_)
    if len(others) >= _FEW:
        ends = np.uint64(2 ** (len(first).bit_length() + 6) - 1)
        seen = np.zeros(int(ends) + 1, dtype=np.bool_)
        seen[first & ends] = True
        member = np.repeat(np.arange(len(others)), lengths)
        at_most = np.bincount(member[seen[np.concatenate(others) & ends]], minlength=len(others))
        same = at_most / np.maximum(len(first) + lengths - at_most, 1) >= threshold
    likely = np.flatnonzero(same)
    if len(first) and len(likely):
        hashes = np.concatenate([others[number] for number in likely.tolist()])
        at = np.minimum(np.searchsorted(first, hashes), len(first) - 1)
        member = np.repeat(np.arange(len(likely)), lengths[likely])
        common = np.bincount(member[first[at] == hashes], minlength=len(likely))
        same[likely] = common / np.maximum(len(first) + lengths[likely] - common, 1) >= threshold
    else:
        same[likely] = False
    return same
