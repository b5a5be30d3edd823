"""A character n-gram model: how surprising a document is beside a set of clean text.

Interpolated Kneser-Ney (Chen and Goodman 1999) with one discount an order, in arrays: counts by sorting hashes,
look-ups in open-addressed tables, all documents of a chunk at once; 9 MB/s a core. Digits count as one character and
letters as lower case, so that numbers and names of securities surprise nobody. n-grams of three and more characters
that the clean set has once only are left out, as KenLM's --prune 0 0 1 does.

Why not KenLM: its wheels answer queries only; the trainer lmplz needs a C++ build with Boost, which no package brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import ngrams

VERSION = 2
_UNIFORM = 1 / 20_000  # probability of a character that the clean set does not have, before discounting
_FIXED_POINT = 2**20
_EMPTY = np.uint64(2**64 - 1)

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Table:
    """Numbers by hash; linear probing over sorted hashes, so that building needs no loop."""

    slots: Hashes  # [2^bits + spare], _EMPTY where free
    values: Floats
    bits: int

    @classmethod
    def of(cls, hashes: Hashes, values: npt.NDArray[np.floating]) -> Table:
        """The table of different hashes."""
        order = np.argsort(hashes)
        bits = max(4, int(2 * len(hashes)).bit_length())
        home = (hashes[order] >> np.uint64(64 - bits)).astype(np.int64)
        step = np.arange(len(home))
        place = np.maximum.accumulate(home - step) + step  # the next free slot from home on
        size = max(1 << bits, int(place[-1]) + 1 if len(place) else 0) + 1
        slots, kept = np.full(size, _EMPTY), np.zeros(size, dtype=np.float32)
        slots[place], kept[place] = hashes[order], values[order]
        return cls(slots, kept, bits)

    def look_up(self, hashes: Hashes, missing: float) -> Floats:
        """The value of each hash."""
        found = np.full(len(hashes), missing, dtype=np.float32)
        place = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
        waiting: npt.NDArray[np.intp] | slice = slice(None)
        while True:
            slot = self.slots[place]
            hit = slot == hashes
            numbers = np.flatnonzero(hit) if isinstance(waiting, slice) else waiting[hit]
            found[numbers] = self.values[place[hit]]
            further = slot < hashes  # hashes stand in ascending order, so a larger one (or none) ends the search
            if not further.any():
                return found
            waiting = np.flatnonzero(further) if isinstance(waiting, slice) else waiting[further]
            hashes, place = hashes[further], place[further] + 1


@dataclass(frozen=True)
class Model:
    """p(c | h) = grams[c after h] + left[h] * p(c | shorter h), from single characters up."""

    order: int
    grams: list[Table]  # one an order, from 1
    left: list[Table]  # one an order, from 2

    def log_perplexity(self, text: ngrams.Characters) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """(mean of -ln p a character, characters judged) of each document, those with a whole context before them."""
        text = folded(text)
        whole = ngrams.starts(text, self.order)
        count = np.maximum(np.diff(text.starts) - self.order + 1, 0)
        hashes = [ngrams.windows(text.codes, size) for size in range(1, self.order + 1)]
        last = whole + self.order - 1
        chance = self.grams[0].look_up(hashes[0][last], 0.0) + np.float32(_UNIFORM) * self._unknown
        for size in range(2, self.order + 1):
            first = last - size + 1
            chance *= self.left[size - 2].look_up(hashes[size - 2][first], 1.0)
            chance += self.grams[size - 1].look_up(hashes[size - 1][first], 0.0)
        # Whole numbers add up to the same sum whatever stands before a document in its chunk.
        surprise = np.rint(-np.log(chance.astype(np.float64)) * _FIXED_POINT).astype(np.int64)
        total = np.concatenate(([0], np.cumsum(surprise)))
        ends = np.cumsum(count)
        return (total[ends] - total[ends - count]) / np.maximum(count, 1) / _FIXED_POINT, count

    @property
    def _unknown(self) -> np.float32:
        """What the single characters' discount leaves for the uniform distribution."""
        return np.float32(max(1e-6, 1 - float(self.grams[0].values.astype(np.float64).sum())))

    def save(self, path: Path) -> None:
        """Keep the tables in one .npz file."""
        tables = {f"grams{number}": table for number, table in enumerate(self.grams)}
        tables |= {f"left{number}": table for number, table in enumerate(self.left)}
        arrays: dict[str, Any] = {"order": np.array(self.order)}
        for name, table in tables.items():
            arrays |= {
                f"{name}.slots": table.slots,
                f"{name}.values": table.values,
                f"{name}.bits": np.array(table.bits),
            }
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Model:
        """What save kept."""
        with np.load(path) as arrays:
            order = int(arrays["order"])

            def table(name: str) -> Table:
                return Table(arrays[f"{name}.slots"], arrays[f"{name}.values"], int(arrays[f"{name}.bits"]))

            return cls(order, [table(f"grams{n}") for n in range(order)], [table(f"left{n}") for n in range(order - 1)])


def train(text: ngrams.Characters, order: int) -> Model:
    """The model of these documents. Needs about 60 bytes of memory a character."""
    text = folded(text)
    grams, left = [], []
    for size, (count, hashes, contexts) in _counts(text, order):
        once, twice = int(np.count_nonzero(count == 1)), int(np.count_nonzero(count == 2))
        discount = min(0.95, max(0.1, once / max(1, once + 2 * twice)))
        kept = count > 1 if size > 2 else np.ones(len(count), dtype=np.bool_)
        context, place = np.unique(contexts, return_inverse=True)
        total = np.bincount(place, weights=count, minlength=len(context))
        share = (count - discount) / total[place] * kept
        grams.append(Table.of(hashes[kept], share[kept]))
        if size > 1:
            rest = 1.0 - np.bincount(place, weights=share, minlength=len(context)).astype(np.float64)
            left.append(Table.of(context, rest))
    return Model(order, grams[::-1], left[::-1])


def _counts(text: ngrams.Characters, order: int) -> Iterator[tuple[int, tuple[npt.NDArray[np.int64], Hashes, Hashes]]]:
    """(n, (count, hash, hash of all but the last character)) of every different n-gram, n from the order down to 1.

    The longest are counted as they occur, shorter ones by how many different characters stand before them.
    """
    place = ngrams.starts(text, order)
    for size in range(order, 0, -1):
        hashes = ngrams.windows(text.codes, size)[place]
        hashes, first, count = np.unique(hashes, return_index=True, return_counts=True)
        place = place[first]
        shorter = ngrams.windows(text.codes, size - 1)[place] if size > 1 else np.zeros(len(place), dtype=np.uint64)
        yield size, (count, hashes, shorter)
        place = place + 1


def folded(text: ngrams.Characters) -> ngrams.Characters:
    """Lower case, every digit 0, every blank a space."""
    codes = text.codes.copy()
    codes[(codes >= ord("0")) & (codes <= ord("9"))] = ord("0")
    codes[(codes >= ord("A")) & (codes <= ord("Z"))] += 32
    codes[(codes <= ord(" ")) | (codes == 0xA0)] = ord(" ")
    return ngrams.Characters(codes, text.starts)
