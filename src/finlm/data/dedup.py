"""Which documents are used, and which are held out: one reason a document, decided after everything is read.

Exact duplicates are found over all sources by the 128-bit hash of the normalised text, near-duplicates by near.py; the
first in the sources' order stays. Held out of a file source is a share of what is then left, chosen by hash, so that a
growing corpus keeps its held-out documents; the embedded corpus brings its own. No training document equals a held-out
one, whatever the settings, or is a near-duplicate of one where near-duplicates are looked for.

In memory: about 80 bytes a document, 1 GB for 12 million.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.data import documents
from finlm.recipe.schema_data import Data

VERSION = 3

(
    TRAIN,
    HELD_OUT,
    TOO_SHORT,
    DUPLICATE,
    EQUALS_HELD_OUT,
    NEAR_DUPLICATE,
    NEAR_HELD_OUT,
    PERPLEXITY,
    CONTAMINATED,
) = range(9)
NAMES = (
    "kept",
    "held_out",
    "too_short",
    "duplicate",
    "equals_held_out",
    "near_duplicate",
    "near_held_out",
    "perplexity",
    "contaminated",
)
_READ = ("rows", "broken", "cleaned")  # counted where rows are read

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


def decide(
    table: Table,
    splits: Sequence[str],
    settings: Data,
    components: npt.NDArray[np.uint32] | None = None,
    dropped: Decisions | None = None,
) -> Decisions:
    """One of the codes above a document.

    `splits` is that of each input; `components` [documents] numbers near-duplicates alike (step_near.py); `dropped`
    [documents] holds PERPLEXITY or CONTAMINATED for documents that other steps refuse, else TRAIN.
    """
    decision = np.full(len(table.source), TRAIN, dtype=np.uint8)
    is_world = np.array([split == "held_out" for split in splits], dtype=np.bool_)[table.source]
    decision[is_world] = HELD_OUT
    if dropped is not None:
        decision[dropped != TRAIN] = dropped[dropped != TRAIN]
    decision[table.characters < max(1, settings.min_characters)] = TOO_SHORT
    equal = equal_texts(table.hash)
    if settings.dedup.method != "none":
        decision[_repeats(equal, decision)] = DUPLICATE
    of_world = _in_group_of(equal, decision == HELD_OUT) & ~is_world
    decision[of_world & np.isin(decision, (TRAIN, DUPLICATE))] = EQUALS_HELD_OUT
    if components is not None:
        component = components[equal]
        repeats, of_world = _repeats(component, decision), _in_group_of(component, decision == HELD_OUT) & ~is_world
        decision[repeats] = np.where(of_world[repeats], NEAR_HELD_OUT, NEAR_DUPLICATE)
    for number, split in enumerate(splits):
        if split == "share":
            here = np.flatnonzero(decision[table.rows_of(number)] == TRAIN) + table.rows_of(number).start
            decision[here[_held_out(table.hash[here, 0], settings)]] = HELD_OUT
    # Without dedup, one source's held-out document may stand in another source.
    decision[(decision == TRAIN) & _in_group_of(equal, decision == HELD_OUT)] = EQUALS_HELD_OUT
    return decision


def equal_texts(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """The first document with the same text as each: [documents]. A 64th of the documents is sorted at a time."""
    first = np.empty(len(hashes), dtype=np.uint32)
    part = (hashes[:, 0] >> np.uint64(58)).astype(np.uint8)
    for number in range(64 if len(hashes) > 2**20 else 1):
        here = np.flatnonzero(part == number) if len(hashes) > 2**20 else np.arange(len(hashes))
        here = here[np.lexsort((hashes[here, 1], hashes[here, 0]))]  # stable: equal texts stay in order
        starts = np.ones(len(here), dtype=np.bool_)
        starts[1:] = (hashes[here[1:]] != hashes[here[:-1]]).any(axis=1)
        first[here] = here[starts][np.cumsum(starts) - 1]
    return first


def write(directory: Path, decision: Decisions) -> None:
    """Keep the decisions: one byte a document, in the documents' order."""
    np.save(directory / "decisions.npy", decision)


def read(directory: Path) -> Decisions:
    """The decisions kept in a directory."""
    decision: Decisions = np.load(directory / "decisions.npy")
    return decision


def count(table: Table, decision: Decisions, inputs: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{source: {rows, broken, cleaned, one count for each of NAMES, bytes, held_out_bytes}}."""
    counts: dict[str, dict[str, int]] = {}
    for number, item in enumerate(inputs):
        here = table.rows_of(number)
        row = counts.setdefault(item["source"], dict.fromkeys((*_READ, *NAMES, "bytes", "held_out_bytes"), 0))
        row["rows"] += item["rows"]
        row["broken"] += item["broken"]
        row["cleaned"] += sum(item["dropped"].values())
        for code, name in enumerate(NAMES):
            row[name] += int(np.count_nonzero(decision[here] == code))
        row["bytes"] += int(table.text_bytes[here][decision[here] == TRAIN].sum())
        row["held_out_bytes"] += int(table.text_bytes[here][decision[here] == HELD_OUT].sum())
    return counts


def without_documents(counts: Mapping[str, Mapping[str, int]], entries: Mapping[str, str]) -> list[str]:
    """The sources that have nothing left to train on; `entries` is {source: its place in the recipe}.

    One of several files may be empty, or repeat the others. Raises UserError for an entry with nothing in any of them.
    """
    empty = [source for source, row in counts.items() if row["kept"] == 0]
    used = {entries[source] for source in counts if source not in empty}
    for source in empty:
        if entries[source] not in used:
            found = ", ".join(f"{counts[source][name]:,} {name.replace('_', ' ')}" for name in (*_READ, *NAMES[1:]))
            raise UserError(
                f"source {source} has no document to train on",
                evidence=found,
                fix=f"take {entries[source]} out, or look at data.clean, data.dedup, data.decontaminate, "
                "data.min_characters and data.held_out_fraction",
            )
    return empty


def total(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """The counts over all sources."""
    rows = list(counts.values())
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def _repeats(group: npt.NDArray[np.uint32], decision: Decisions) -> Bools:
    """Which documents still in use are not the first of their group; held-out ones come first."""
    number = np.arange(len(group), dtype=np.uint64)
    order = number + (np.uint64(2**32) * (decision != HELD_OUT))
    in_use = decision <= HELD_OUT
    first = np.full(len(group), 2**64 - 1, dtype=np.uint64)
    np.minimum.at(first, group[in_use], order[in_use])
    repeats: Bools = in_use & (first[group] != order)
    return repeats


def _in_group_of(group: npt.NDArray[np.uint32], chosen: Bools) -> Bools:
    """Which documents share a group with a chosen one."""
    groups = np.zeros(len(group), dtype=np.bool_)
    groups[group[chosen]] = True
    return groups[group]


def _held_out(hashes: npt.NDArray[np.uint64], settings: Data) -> Bools:
    """Which documents of a source are held out: bool [documents].

    Of the different ones those whose hash is in the lowest held_out_fraction of all hashes, at most
    held_out_documents, at least one where two are left, never all. Of equal ones (dedup: none) the first; its copies
    are then no training text either.
    """
    chosen = np.zeros(len(hashes), dtype=np.bool_)
    lowest, first = np.unique(hashes, return_index=True)
    most = min(settings.held_out_documents, len(lowest) - 1)
    if most < 1 or settings.held_out_fraction == 0:
        return chosen
    share = int(
        np.searchsorted(lowest, np.uint64(min(2**64 - 1, int(settings.held_out_fraction * 2**64))), side="right")
    )
    chosen[first[: min(most, max(1, share))]] = True
    return chosen
