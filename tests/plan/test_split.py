"""Micro-batches of unequal GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from finlm.plan import search


def best_of_all(ranks: Sequence[int], seconds: Sequence[Sequence[float]], wanted: int) -> float | None:
    """Seconds of the slowest kind, by trying everything."""
    every = itertools.product(*(range(1, len(kind) + 1) for kind in seconds))
    found = [
        max(kind[rows - 1] for kind, rows in zip(seconds, one, strict=True))
        for one in every
        if sum(count * rows for count, rows in zip(ranks, one, strict=True)) == wanted
    ]
    return min(found, default=None)


@pytest.mark.parametrize("ranks", [(2, 2), (3, 2), (1, 8), (8, 4, 3)], ids=str)
def test_no_other_division_is_faster(ranks: tuple[int, ...]) -> None:
    speeds, fitting = (0.31, 1.0, 2.2), (12, 5, 9)
    seconds = [[0.1 + speed * rows for rows in range(1, most + 1)] for speed, most in zip(speeds, fitting, strict=True)]
    seconds = seconds[: len(ranks)]
    for wanted in range(sum(ranks), 60):
        expected = best_of_all(ranks, seconds, wanted)
        found = search.balance(ranks, seconds, wanted)
        if expected is None:
            assert found is None
            continue
        assert found is not None and sum(count * rows for count, rows in zip(ranks, found, strict=True)) == wanted
        assert max(kind[rows - 1] for kind, rows in zip(seconds, found, strict=True)) == expected


def test_a_kind_that_holds_no_row_has_no_division() -> None:
    assert search.balance((2, 2), [[1.0, 2.0], []], 8) is None
