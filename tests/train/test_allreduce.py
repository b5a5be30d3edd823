"""The schedule of the link measurement; tests/cluster/test_doctor.py runs it."""

from __future__ import annotations

import itertools

import pytest

from finlm.train import measure_hardware


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_is_drawn_once_and_nobody_twice_in_a_round(count: int) -> None:
    drawn = list(measure_hardware.rounds(range(count)))
    for pairs in drawn:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))
    assert sorted(itertools.chain(*drawn)) == list(itertools.combinations(range(count), 2))
    assert len(drawn) <= max(1, count - 1 + count % 2)
