"""Hashes of character n-grams of many documents at once, for near-duplicates, decontamination and perplexity.

A block of documents becomes one array of code points, and every window of n gets a 64-bit hash by n multiplications
over whole arrays: 20 to 30 million windows a core-second. Where only the words matter (near-duplicates, benchmark
questions) letters and digits alone are kept, in lower case, so that layout and punctuation make no difference.

Hashes of different n-grams collide with probability 2^-64 each; nothing here is cryptographic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from finlm.data.hashing import GOLDEN, mix

_BMP = 1 << 16


@dataclass(frozen=True)
class Characters:
    """Documents end to end."""

    codes: npt.NDArray[np.uint32]  # [characters]
    starts: npt.NDArray[np.int64]  # [documents + 1]


def characters(data: bytes, ends: npt.NDArray[np.integer]) -> Characters:
    """The documents of UTF-8 data, which end at these bytes."""
    codes = np.frombuffer(data.decode("utf-8").encode("utf-32-le"), dtype="<u4")
    # A byte of the form 10xxxxxx continues a character.
    first = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
    count = np.concatenate(([0], np.cumsum(first, dtype=np.int64)))
    return Characters(codes, count[np.concatenate(([0], np.asarray(ends, dtype=np.int64)))])


def words_only(text: Characters) -> Characters:
    """The same documents with letters and digits alone, in lower case."""
    table = _letters()
    folded = table[np.minimum(text.codes, _BMP - 1)].astype(np.uint32)
    rare = text.codes >= _BMP  # rare Chinese characters stay, emoji with them
    folded[rare] = text.codes[rare]
    kept = folded > 0
    count = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))
    return Characters(folded[kept], count[text.starts])


@dataclass(frozen=True)
class Grams:
    """Every n-gram of every document; documents shorter than n have none."""

    hashes: npt.NDArray[np.uint64]  # [grams]
    document: npt.NDArray[np.int32]  # [grams], ascending
    count: npt.NDArray[np.int64]  # [documents], grams of each


def grams(text: Characters, n: int) -> Grams:
    """The hashes of all windows of n characters that lie inside one document."""
    count = np.maximum(np.diff(text.starts) - n + 1, 0)
    document = np.repeat(np.arange(len(count), dtype=np.int32), count)
    return Grams(windows(text.codes, n)[starts(text, n)], document, count)


def starts(text: Characters, n: int) -> npt.NDArray[np.int64]:
    """Where the windows of n characters begin that lie inside one document."""
    lengths = np.diff(text.starts)
    inside = np.ones(len(text.codes), dtype=np.bool_)
    for back in range(1, n):  # the last n - 1 characters of a document begin none
        inside[text.starts[1:][lengths >= back] - back] = False
    return np.flatnonzero(inside)


def windows(codes: npt.NDArray[np.uint32], n: int) -> npt.NDArray[np.uint64]:
    """The hash of every n characters in a row, across documents: uint64 [characters - n + 1]."""
    size = max(0, len(codes) - n + 1)
    total = np.zeros(size, dtype=np.uint64)
    wide = codes.astype(np.uint64)
    for place in range(n):
        total *= GOLDEN
        total += wide[place : place + size]
    return mix(total)


@cache
def _letters() -> npt.NDArray[np.uint16]:
    """[65536]: the lower case of each letter and digit, 0 for everything else."""
    table = np.zeros(_BMP, dtype=np.uint16)
    for code in range(_BMP):
        character = chr(code)
        if character.isalnum():
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    return table
