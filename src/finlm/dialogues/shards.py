"""Write prepared dialogues: .bin, .mask and .idx of every source and split, and the counts of what was left out.

The files are a pretraining shard's with a mask beside them (uint8 a token, 1 = learnt from), so everything that reads
shards reads these. A source and split is one file, in the order of the rows, so the bytes do not depend on the number
of workers. Which dialogues are used and which are held out is decided as among documents (corpus/selection.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.corpus import selection
from finlm.corpus.documents import InputRead
from finlm.corpus.read import parsing, readers
from finlm.corpus.read.sources import Input
from finlm.recipe.schema_data import Data
from finlm.rows.shards import SPLITS, ShardEntry, Split

_COUNTED = ("rows", "broken", "cleaned", "duplicate", "too_short", "equals_held_out", "reserved", "held_out", "kept")
# A stretch of tokens that stays together: a dialogue, a part of one, a document, an answer behind its prompt. Its
# dialogue is numbered within the block. What is alike is never both trained on and held out: equal tokens, or for
# preferences equal prompts.
PIECE = np.dtype([("tokens", "<u4"), ("text_bytes", "<u4"), ("dialogue", "<u4"), ("alike", "<u8")])


@dataclass
class Encoded:
    """The encoded rows of a block: tokens and masks end to end, the pieces that they belong to, and counts of rows."""

    number: int  # of the input
    ids: array[int] = field(default_factory=lambda: array("I"))  # crosses to the parent as bytes, which a list does not
    mask: bytearray = field(default_factory=bytearray)
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)  # as PIECE
    hashes: bytearray = field(default_factory=bytearray)  # 32 bytes a dialogue: of it, of what is alike
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[parsing.BrokenRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # whole rows, by reason
    unread: Counter[str] = field(default_factory=Counter)  # rows that are used, by what is asked about their keys


class Tally:
    """The running counts of an input while its blocks come back in order."""

    def __init__(self, item: Input) -> None:
        """Begin with counts of 0 for the input `item`."""
        self.item = item
        self.counts: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.is_cut = False

    def add(self, encoded: Encoded) -> None:
        """Add a block's counts to this tally; set is_cut if a broken row says that the rest of a file is not read."""
        self.counts.update(encoded.counts, broken=len(encoded.broken))
        self.broken.update(reason for _, _, reason, _ in encoded.broken)
        self.left_out.update(encoded.left_out)
        self.unread.update(encoded.unread)
        self.is_cut |= any(map(readers.is_cut, self.broken))

    @property
    def refused(self) -> Counter[str]:
        """Counts of rows that cannot be used and rows that are left out, by reason."""
        return self.broken + self.left_out


class Spool:
    """Stores all pieces in order until every row is read, because only then is it known which dialogues are held out.

    Tokens and masks are in two files in `directory`; memory takes 28 bytes a piece and 36 a dialogue.
    """

    def __init__(self, directory: Path, dtype: np.dtype[Any]) -> None:
        """Create spool.bin, of ids of type `dtype`, and spool.mask in `directory`."""
        self._directory, self._dtype = directory, dtype
        self._ids, self._mask = (directory / "spool.bin").open("wb"), (directory / "spool.mask").open("wb")
        self._pieces: list[npt.NDArray[Any]] = [np.empty(0, dtype=PIECE)]
        self._hashes, self._inputs = bytearray(), array("i")  # of each dialogue

    def add(self, encoded: Encoded) -> None:
        """Append a block's pieces, writing their tokens and masks to the spool's files; blocks come in order."""
        self._ids.write(np.array(encoded.ids, dtype=self._dtype).tobytes())
        self._mask.write(encoded.mask)
        pieces = np.array(encoded.pieces, dtype=PIECE)
        pieces["dialogue"] += len(self._inputs)
        self._pieces.append(pieces)
        self._inputs.extend([encoded.number] * (len(encoded.hashes) // 32))
        self._hashes += encoded.hashes

    def split(self, tallies: Sequence[Tally], data: Data) -> list[ShardEntry]:
        """Decide what is held out, write the shards of each split and source, and return the manifest's entries.

        `tallies` has one for each input, by number; adds the decisions to their counts. Deletes the spool's files. Call
        it once, after the last add().
        """
        self._ids.close()
        self._mask.close()
        pieces, inputs = np.concatenate(self._pieces), np.array(self._inputs, dtype=np.int32)
        hashes = np.frombuffer(self._hashes, dtype="<u8").reshape(-1, 4)
        sizes = np.zeros(len(inputs), dtype=np.int64)
        long = np.full(len(inputs), data.min_characters + 1, dtype=np.uint32)  # a short dialogue is one too
        table = selection.Table(inputs, long, sizes, hashes[:, :2])
        dialogues = selection.decide(table, [tally.item.split for tally in tallies], data, prompts=hashes[:, 2:])
        decision = dialogues[pieces["dialogue"]]
        apart = pieces["alike"][np.isin(decision, (selection.HELD_OUT, selection.RESERVED))]
        decision[(decision == selection.TRAIN) & np.isin(pieces["alike"], apart)] = selection.EQUALS_HELD_OUT
        kept = np.isin(np.arange(len(dialogues)), pieces["dialogue"][decision == selection.TRAIN])
        dialogues[(dialogues == selection.TRAIN) & ~kept] = selection.EQUALS_HELD_OUT
        codes = len(selection.NAMES)
        made = np.bincount(inputs * codes + dialogues, minlength=len(tallies) * codes).reshape(-1, codes)
        for tally, counts in zip(tallies, made.tolist(), strict=True):
            tally.counts.update({name: count for name, count in zip(selection.NAMES, counts, strict=True) if count})
        numbers = {name: number for number, name in enumerate(dict.fromkeys(t.item.source for t in tallies))}
        source = np.array([numbers[tally.item.source] for tally in tallies])[inputs[pieces["dialogue"]]]
        ends = np.cumsum(pieces["tokens"], dtype=np.int64)
        entries = []
        for split, code in zip(SPLITS, (selection.TRAIN, selection.HELD_OUT), strict=True):
            chosen = np.flatnonzero(decision == code)
            chosen = chosen[np.argsort(source[chosen], kind="stable")]
            groups = np.split(chosen, np.searchsorted(source[chosen], np.arange(1, len(numbers))))
            for name, group in zip(numbers, groups, strict=True):
                entries += [self._write(split, name, pieces[group], ends[group])] if len(group) else []
        (self._directory / "spool.bin").unlink()
        (self._directory / "spool.mask").unlink()
        return entries

    def _write(self, split: Split, source: str, pieces: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> ShardEntry:
        """Write .bin, .mask and .idx of a source and split; return their entry. `ends` are the pieces' in the spool."""
        name = f"{split}/{source}-00000.bin"
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        learnt = 0
        spool = np.memmap(self._directory / "spool.bin", dtype=self._dtype, mode="r")
        masks = np.memmap(self._directory / "spool.mask", dtype=np.uint8, mode="r")
        with path.open("wb") as ids, path.with_suffix(".mask").open("wb") as mask:
            for start, end in zip((ends - pieces["tokens"]).tolist(), ends.tolist(), strict=True):
                ids.write(spool[start:end].tobytes())
                mask.write(masks[start:end].tobytes())
                learnt += int(masks[start:end].sum())
        offsets = np.cumsum(np.concatenate(([0], pieces["tokens"])), dtype=np.int64)
        offsets.astype("<u8").tofile(path.with_suffix(".idx"))
        return ShardEntry(
            source=source,
            split=split,
            file=name,
            sha256=files.sha256_file(path),
            index_sha256=files.sha256_file(path.with_suffix(".idx")),
            mask_sha256=files.sha256_file(path.with_suffix(".mask")),
            tokens=int(pieces["tokens"].sum()),
            documents=len(pieces),
            text_bytes=int(pieces["text_bytes"].sum()),
            learnt=learnt,
        )


def sum_counts(manifest: Mapping[str, Any], name: str) -> Counter[str]:
    """Return the counts under this key of a manifest, summed over all sources; empty if the key is missing."""
    return sum((Counter(row) for row in manifest.get(name, {}).values()), Counter[str]())


def by_source(tallies: Sequence[Tally], name: str) -> selection.SourceCounts:
    """Return {source: counts} of the tallies' attribute `name`, as "refused", without sources that have no counts.

    Training and held-out files of a source are counted together.
    """
    return selection.sum_by_source((tally.item.source, getattr(tally, name)) for tally in tallies)


def write_description(directory: Path, tallies: Sequence[Tally], entries: Sequence[ShardEntry]) -> None:
    """Write documents.json, with counts and input files of every source, into a shards directory.

    `tallies` has one for each input. `entries` are those of the written shards, whose .idx files are read.
    """
    sources: selection.SourceCounts = {}
    for tally in tallies:
        row = sources.setdefault(tally.item.source, dict.fromkeys(_COUNTED, 0))
        for name in _COUNTED:
            row[name] += tally.left_out.total() if name == "cleaned" else tally.counts[name]
    inputs = [
        InputRead(each.item.source, files=each.item.file_entries(), pinned=each.item.expected, dropped=each.refused)
        for each in tallies
    ]
    selection.write_description(directory, entries, inputs, sources)
