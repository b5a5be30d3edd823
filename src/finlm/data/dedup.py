"""Which documents are used, and which are held out: one reason a document, decided after everything is read.

Exact duplicates are found over all sources by the 128-bit hash of the normalised text; the first in the sources' order
stays. Held out of a file source is a share of what is then left, chosen by hash, so that a growing corpus keeps its
held-out documents; the embedded corpus brings its own. No training document equals a held-out one, whatever the
settings. In memory: about 100 bytes a document, 1.2 GB for 12 million.

Near-duplicates are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.data import documents
from finlm.recipe.schema import Data

VERSION = 1

TRAIN, HELD_OUT, TOO_SHORT, DUPLICATE, EQUALS_HELD_OUT = range(5)
NAMES = ("kept", "held_out", "too_short", "duplicate", "equals_held_out")

Decisions = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Table:
    """All documents in order: arrays [documents]."""

    source: npt.NDArray[np.int32]  # number of the input, ascending
    characters: npt.NDArray[np.uint32]
    text_bytes: npt.NDArray[np.int64]
    hash: npt.NDArray[np.uint64]  # [documents, 2]

    @classmethod
    def read(cls, directory: Path, manifest: dict[str, Any]) -> Table:
        """The index of every chunk of a documents step."""
        chunks = list(documents.chunks(directory, manifest))
        indexes = [documents.read_index(chunk.path) for chunk in chunks] or [np.empty(0, dtype=documents.INDEX)]
        counts = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
        return cls(
            np.repeat(np.array([chunk.input for chunk in chunks], dtype=np.int32), counts),
            np.concatenate([index["characters"] for index in indexes]),
            np.concatenate([np.diff(index["end"].astype(np.int64), prepend=0) for index in indexes]),
            np.concatenate([index["hash"] for index in indexes]),
        )

    def rows_of(self, number: int) -> slice:
        """The documents of an input."""
        return slice(*np.searchsorted(self.source, [number, number + 1]).tolist())


def decide(table: Table, splits: Sequence[str], settings: Data) -> Decisions:
    """One of TRAIN, HELD_OUT, TOO_SHORT, DUPLICATE, EQUALS_HELD_OUT a document; `splits` is that of each input."""
    decision = np.full(len(table.source), TRAIN, dtype=np.uint8)
    is_world = np.array([split == "held_out" for split in splits], dtype=np.bool_)[table.source]
    decision[is_world] = HELD_OUT
    too_short = table.characters < max(1, settings.min_characters)
    decision[too_short] = TOO_SHORT
    group, first = _groups(table.hash, decision)
    if settings.dedup == "exact":
        decision[~first & ~too_short] = DUPLICATE
    decision[~is_world & ~too_short & _in_held_out_group(group, decision)] = EQUALS_HELD_OUT
    for number, split in enumerate(splits):
        if split == "share":
            here = np.flatnonzero(decision[table.rows_of(number)] == TRAIN) + table.rows_of(number).start
            decision[here[_held_out(table.hash[here, 0], settings)]] = HELD_OUT
    # Without dedup, one source's held-out document may stand in another source.
    decision[(decision == TRAIN) & _in_held_out_group(group, decision)] = EQUALS_HELD_OUT
    return decision


def write(directory: Path, decision: Decisions) -> None:
    """Keep the decisions: one byte a document, in the documents' order."""
    np.save(directory / "decisions.npy", decision)


def read(directory: Path) -> Decisions:
    """The decisions kept in a directory."""
    decision: Decisions = np.load(directory / "decisions.npy")
    return decision


def count(table: Table, decision: Decisions, inputs: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{source: {rows, broken, kept, held_out, too_short, duplicate, equals_held_out, bytes, held_out_bytes}}.

    Raises UserError for a source that has nothing left to train on.
    """
    counts: dict[str, dict[str, int]] = {}
    for number, item in enumerate(inputs):
        here = table.rows_of(number)
        row = counts.setdefault(item["source"], dict.fromkeys(("rows", "broken", *NAMES, "bytes", "held_out_bytes"), 0))
        row["rows"] += item["rows"]
        row["broken"] += item["broken"]
        for code, name in enumerate(NAMES):
            row[name] += int(np.count_nonzero(decision[here] == code))
        row["bytes"] += int(table.text_bytes[here][decision[here] == TRAIN].sum())
        row["held_out_bytes"] += int(table.text_bytes[here][decision[here] == HELD_OUT].sum())
    for source, row in counts.items():
        if row["kept"] == 0:
            found = ", ".join(f"{row[name]:,} {name.replace('_', ' ')}" for name in ("rows", "broken", *NAMES[1:]))
            raise UserError(
                f"source {source} has no document to train on",
                evidence=found,
                fix="take it out of data.sources, or look at data.min_characters and data.held_out_fraction",
            )
    return counts


def total(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """The counts over all sources."""
    rows = list(counts.values())
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def _groups(hashes: npt.NDArray[np.uint64], decision: Decisions) -> tuple[npt.NDArray[np.int64], Bools]:
    """(number of the group of equal texts, is the first of its group) of each document; held-out ones come first."""
    size = len(hashes)
    group, first = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    order = np.lexsort((np.arange(size), decision != HELD_OUT, hashes[:, 1], hashes[:, 0]))
    ordered = hashes[order]
    starts = np.ones(size, dtype=np.bool_)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group[order] = np.cumsum(starts)
    first[order] = starts
    return group, first


def _in_held_out_group(group: npt.NDArray[np.int64], decision: Decisions) -> Bools:
    return np.isin(group, group[decision == HELD_OUT])


def _held_out(hashes: npt.NDArray[np.uint64], settings: Data) -> Bools:
    """Which documents of a source are held out: bool [documents].

    Those whose hash is in the lowest held_out_fraction of all hashes, at most held_out_documents, at least one where
    two different documents are left, never all.
    """
    chosen = np.zeros(len(hashes), dtype=np.bool_)
    most = min(settings.held_out_documents, len(hashes) - 1)
    if most < 1 or settings.held_out_fraction == 0:
        return chosen
    lowest = np.sort(hashes)
    share = int(
        np.searchsorted(lowest, np.uint64(min(2**64 - 1, int(settings.held_out_fraction * 2**64))), side="right")
    )
    limit = lowest[min(most, max(1, share)) - 1]
    chosen[hashes <= limit] = True
    # Equal texts stay together (dedup: none), so the limit moves down until no more than `most` are chosen.
    if np.count_nonzero(chosen) > most:
        chosen[hashes == limit] = False
    return chosen
