"""Writing prepared dialogues: .bin, .mask and .idx of every source and split, and the counts of what was left out.

The files are a pretraining shard's with a mask beside them (uint8 a token, 1 = learnt from), so everything that reads
shards reads these. A source and split is one file. Which pieces are written is decided by the caller, in the order of
the files, so the bytes do not depend on the number of workers.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import cut_files, stats
from finlm.data.shards import Split
from finlm.data.sources import Input
from finlm.recipe.schema_data import Data

SPLITS: tuple[Split, ...] = ("train", "held_out")
_HASHES = 2**32
_COUNTED = ("rows", "broken", "cleaned", "duplicate", "too_short", "equals_held_out", "held_out", "kept")


@dataclass(frozen=True)
class Piece:
    """A stretch of a block's tokens that stays together: a dialogue, a part of one, or a document."""

    tokens: int
    text_bytes: int
    dialogue: int  # its number within the block


@dataclass
class Encoded:
    """What became of a block of rows: tokens and masks end to end, the pieces they belong to, counts."""

    number: int  # of the input
    ids: array[int] = field(default_factory=lambda: array("I"))  # crosses to the parent as bytes, which a list does not
    mask: bytearray = field(default_factory=bytearray)
    pieces: list[Piece] = field(default_factory=list)
    dialogues: list[int] = field(default_factory=list)  # 64-bit hash of each dialogue
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    cut: tuple[str, int, str] | None = None  # file, row and why, where the file ends too early


class Tally:
    """One input's counts as its blocks come back in order, and which of its pieces are kept."""

    def __init__(self, item: Input, data: Data) -> None:
        self.item, self.data = item, data
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.cut: list[tuple[str, int, str]] = []

    def chosen(self, encoded: Encoded, seen: set[int] | None) -> Iterator[tuple[Split, int, Piece]]:
        """(split, first token, piece) of what is kept of a block; `seen` are hashes of the dialogues before it."""
        self.counts.update(encoded.counts)
        self.refused.update(encoded.refused)
        self.cut += [encoded.cut] if encoded.cut else []
        at, former = 0, -1
        split: Split | None = None
        for piece in encoded.pieces:
            if piece.dialogue != former:
                former = piece.dialogue
                split = self._split(encoded.dialogues[former], seen)
            if split is not None:
                yield split, at, piece
            at += piece.tokens

    def _split(self, number: int, seen: set[int] | None) -> Split | None:
        if seen is not None:
            if number in seen:
                self.counts["duplicate"] += 1
                return None
            seen.add(number)
        is_out = self.item.split == "held_out"
        if self.item.split == "share":  # by content, so that adding rows moves none
            below = number % _HASHES < self.data.held_out_fraction * _HASHES
            is_out = below and self.counts["held_out"] < self.data.held_out_documents
        self.counts["held_out" if is_out else "kept"] += 1
        return "held_out" if is_out else "train"

    def check(self) -> None:
        """Raises UserError when more rows than allowed cannot be read; a cut archive counts as among documents."""
        broken, rows, allowed = self.counts["broken"], self.counts["rows"], self.data.max_broken_fraction
        cut_files.refuse(self.item.source, self.cut, rows, broken, allowed)
        if broken > allowed * rows:
            raise UserError(
                f"source {self.item.source}: {broken:,} of {rows:,} rows cannot be read ({broken / rows:.2%}); "
                f"data.max_broken_fraction allows {allowed:.2%}",
                evidence="\n".join([", ".join(map(str, self.item.paths)), *(reason for _, _, reason in self.cut[:3])]),
                fix="mend the file or fetch it again, or raise data.max_broken_fraction",
            )


class Writer:
    """.bin, .mask and .idx of one source and split."""

    def __init__(self, directory: Path, split: Split, source: str, dtype: np.dtype[Any]) -> None:
        self.source, self.split, self.dtype = source, split, dtype
        self.name = f"{split}/{source}-00000.bin"
        self._path = directory / self.name
        self._path.parent.mkdir(exist_ok=True)
        self._ids, self._mask = self._path.open("wb"), self._path.with_suffix(".mask").open("wb")
        self._lengths: list[int] = []
        self._text_bytes = self._learnt = 0

    def add(self, ids: array[int], mask: bytes, text_bytes: int) -> None:
        """Append a piece."""
        self._ids.write(np.array(ids, dtype=self.dtype).tobytes())
        self._mask.write(mask)
        self._lengths.append(len(ids))
        self._text_bytes += text_bytes
        self._learnt += mask.count(1)

    def close(self) -> dict[str, Any]:
        """The manifest's entry."""
        self._ids.close()
        self._mask.close()
        index = np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64))).astype("<u8")
        index.tofile(self._path.with_suffix(".idx"))
        hashes = {suffix: files.sha256_file(self._path.with_suffix(suffix)) for suffix in (".bin", ".idx", ".mask")}
        return {
            "source": self.source,
            "split": self.split,
            "file": self.name,
            "sha256": hashes[".bin"],
            "index_sha256": hashes[".idx"],
            "mask_sha256": hashes[".mask"],
            "tokens": int(index[-1]),
            "documents": len(self._lengths),
            "text_bytes": self._text_bytes,
            "learnt": self._learnt,
        }


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """{split: {source: {tokens, documents, text_bytes, learnt}}}."""
    names = ("tokens", "documents", "text_bytes", "learnt")
    return {
        split: {entry["source"]: {name: entry[name] for name in names} for entry in entries if entry["split"] == split}
        for split in SPLITS
    }


def by_source(tallies: Sequence[Tally], name: str) -> dict[str, dict[str, int]]:
    """The counts ("counts" or "refused") of each source, training and held-out files together."""
    found: dict[str, Counter[str]] = {}
    for tally in tallies:
        found.setdefault(tally.item.source, Counter()).update(getattr(tally, name))
    return {source: dict(counts) for source, counts in found.items() if counts}


def about(directory: Path, tallies: Sequence[Tally], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """documents.json, under the names that reports know."""
    sources: dict[str, dict[str, int]] = {}
    for tally in tallies:
        row = sources.setdefault(tally.item.source, dict.fromkeys(_COUNTED, 0))
        for name in ("rows", "broken", "duplicate", "held_out", "kept"):
            row[name] += tally.counts[name]
        row["cleaned"] += tally.refused.total() - tally.counts["broken"]
    described = [
        {
            "files": tally.item.described(),
            "source": tally.item.source,
            "pinned": tally.item.expected,
            "values": {},
            "dropped": tally.refused,
        }
        for tally in tallies
    ]
    total = {name: sum(row[name] for row in sources.values()) for name in _COUNTED}
    return stats.of(directory, entries, described, {"sources": sources, "total": total})
