"""Which row a position of the run reads when sources have weights that change over the run.

The run's rows are cut into stages, each with a whole number of rows of every source; within a stage the sources are
interleaved by a permutation, and each source is read in its own endless order, epoch after epoch, going on from stage
to stage. Every number is computed from (seed, position): no state, no table, the same at any world size.

A row counts as T tokens, whichever source it is of. It does not look at losses; change the weights and start a stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.data.shards import Ids, Order
from finlm.recipe.schema_data import Stage

_RAMP = 16  # equal steps of a stage whose weights change


class Sequencing(Protocol):
    """Row ids by position: shards.Order, or a Mixture."""

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids: ...


@dataclass(frozen=True)
class Part:
    """Positions start to end of the run; rows of each source, in the order of the sources."""

    start: int
    end: int
    rows: tuple[int, ...]


def order(ranges: Mapping[str, range], stages: Sequence[Stage], run_rows: int, sequence_length: int, seed: int) -> Any:
    """The order in which a run of run_rows rows reads them; ranges are the row ids of each source.

    Without stages every row once an epoch (shards.Order). Raises UserError for a source that there is not.
    """
    if not stages:
        return Order(sum(map(len, ranges.values())), seed)
    return Mixture(ranges, parts(ranges, stages, run_rows, sequence_length), seed)


class Mixture:
    """An endless order of row ids; past the run's end the last part is repeated with other rows."""

    def __init__(self, ranges: Mapping[str, range], parts: Sequence[Part], seed: int) -> None:
        self.parts = list(parts)
        self._first = np.array([rows.start for rows in ranges.values()], dtype=np.int64)
        self._orders = [
            Order(len(rows), seed * 2**32 + zlib.crc32(name.encode())) if rows else None
            for name, rows in ranges.items()
        ]
        self._inner = [Order(part.end - part.start, seed * 2**32 + number) for number, part in enumerate(self.parts)]
        self._starts = np.array([part.start for part in self.parts], dtype=np.int64)
        self._rows = np.array([part.rows for part in self.parts], dtype=np.int64)  # [parts, sources]
        self._before = np.concatenate((np.zeros_like(self._rows[:1]), np.cumsum(self._rows, axis=0)[:-1]))

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids:
        """Row ids int64 of the positions (any shape, any integer type)."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        found = np.empty(len(flat), dtype=np.int64)
        where = np.searchsorted(self._starts, flat, side="right") - 1
        for number in np.unique(where).tolist():
            here = np.flatnonzero(where == number)
            part, rows = self.parts[number], self._rows[number]
            within = flat[here] - part.start
            place = self._inner[number][within]
            ends = np.cumsum(rows)
            source = np.searchsorted(ends, place, side="right")
            # Which reading of its source this is: after the earlier parts, and after repeats of the last one.
            repeats = within // (part.end - part.start)
            drawn = place - (ends - rows)[source] + self._before[number][source] + repeats * rows[source]
            for kind in np.unique(source).tolist():
                of_kind = source == kind
                found[here[of_kind]] = self._first[kind] + self._orders[kind][drawn[of_kind]]
        return found.reshape(np.shape(positions))


def parts(ranges: Mapping[str, range], stages: Sequence[Stage], run_rows: int, sequence_length: int) -> list[Part]:
    """The run as parts with whole numbers of rows. Raises UserError for a source that there is not or has no row."""
    shares = _shares(stages, run_rows * sequence_length)
    slices: list[tuple[int, float, npt.NDArray[np.float64]]] = []
    for number, (stage, share) in enumerate(zip(stages, shares, strict=True)):
        first = _normed(stage.weights or dict(stage.tokens or {}), ranges)
        last = first if stage.to is None else _normed(stage.to, ranges)
        steps = 1 if stage.to is None else _RAMP
        for step in range(steps):
            along = step / max(1, steps - 1)
            slices.append((number, share / steps, first * (1 - along) + last * along))
    ends = np.rint(np.cumsum([share for _, share, _ in slices]) * run_rows).astype(np.int64)
    ends = np.minimum(ends, run_rows)
    ends[-1] = run_rows  # budgets may be less than the run: the last stage goes on
    found, start, own = list[Part](), 0, -1
    owed = np.zeros(len(ranges))
    for end, (number, _, weights) in zip(ends.tolist(), slices, strict=True):
        if number != own:
            own, owed = number, np.zeros(len(ranges))
        if end > start:
            rows = _apportioned(weights, end - start, owed)
            owed += weights * (end - start) - rows
            found.append(Part(start, end, rows))
            start = end
    return found


def check(stages: Sequence[Stage], run_tokens: int) -> None:
    """Raises UserError for stages that are longer than the run together: the last would be cut short or left out."""
    budgets = sum(sum(stage.tokens.values()) for stage in stages if stage.tokens)
    left = run_tokens * (1 - sum(stage.share or 0.0 for stage in stages)) - budgets
    rounding = 1e-9 * run_tokens
    if left < -rounding or (left <= rounding and any(stage.tokens is None and stage.share is None for stage in stages)):
        raise UserError(
            "data.mixture: the stages are longer than the run, so the last would be cut short or left out",
            evidence=f"their tokens are {budgets:,}, those of the run {run_tokens:,}, and with the shares given "
            f"{round(max(left, 0)):,} are left",
            fix="lower data.mixture[i].tokens or share, or train longer",
        )


def drawn(ranges: Mapping[str, range], parts: Sequence[Part], sequence_length: int) -> list[dict[str, Any]]:
    """What each source gives to the run: tokens, their share, and how often the source is read."""
    rows = np.sum([part.rows for part in parts], axis=0)
    return [
        {
            "source": name,
            "tokens": int(count) * sequence_length,
            "share": float(count / rows.sum()),
            "epochs": float(count / len(ranges[name])) if len(ranges[name]) else 0.0,
            "share_by_part": [part.rows[number] / (part.end - part.start) for part in parts],
        }
        for number, (name, count) in enumerate(zip(ranges, rows.tolist(), strict=True))
    ]


def _shares(stages: Sequence[Stage], run_tokens: int) -> list[float]:
    """The share of each stage in the run."""
    given = [sum(stage.tokens.values()) / run_tokens if stage.tokens else stage.share for stage in stages]
    missing = given.count(None)
    rest = max(0.0, 1 - sum(share for share in given if share is not None))
    return [rest / missing if share is None else share for share in given]


def _normed(weights: Mapping[str, float], ranges: Mapping[str, range]) -> npt.NDArray[np.float64]:
    """Weights [sources], sum 1."""
    sizes = {name: len(rows) for name, rows in ranges.items()}
    found = np.array([*of_each(weights, sizes, "data.mixture").values()], dtype=np.float64)
    return np.asarray(found / found.sum())


def of_each(weights: Mapping[str, float], sizes: Mapping[str, int], key: str) -> dict[str, float]:
    """The weight of each source; what a glob names shares its weight by size.

    Raises UserError, with the recipe's key of the weights, for a name or glob without text.
    """
    found = dict.fromkeys(sizes, 0.0)
    for pattern, weight in weights.items():
        members = [name for name in sizes if fnmatchcase(name, pattern)]
        total = sum(sizes[name] for name in members)
        if total == 0:
            raise UserError(
                f"{key}: {pattern} {'has nothing to train on' if members else 'is no source'}",
                evidence=f"the sources are {', '.join(sizes)}",
                fix=f"name a source or a glob of sources, or take it out; without {key} each is read by its size",
            )
        for name in members:
            found[name] += weight * sizes[name] / total
    return found


def _apportioned(weights: npt.NDArray[np.float64], rows: int, owed: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Whole numbers of rows in proportion to the weights, by largest remainder.

    `owed` [sources] is what the stage's earlier parts rounded away, so that a small weight is not lost in each of them.
    """
    exact = weights * rows + owed
    if exact.min() < 0:  # it has had more than it is due
        exact = np.maximum(exact, 0)
        exact *= rows / exact.sum()
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")[: rows - int(counts.sum())]
    counts[largest] += 1
    return tuple(counts.tolist())
