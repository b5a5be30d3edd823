"""A rank that computes wrongly without an error is named, and looking for it changes nothing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from finlm.base.rundir import RunDir
from finlm.plan.plan import Plan
from finlm.train import incidents

NAME = "model.layers.0.mlp.up_proj.weight"


def recorded_incidents(run: RunDir) -> list[dict[str, Any]]:
    return list(run.read_events("incident"))


@pytest.mark.parametrize(
    "disagrees, odd",
    [
        ((False, False, False, False), []),
        ((False, False, True, True), [12]),  # it computes its neighbour's wrongly, and its neighbour's of it differs
        ((True, False, False, True), [13]),
        ((True, True), [10, 11]),
        ((True, True, True), [10, 11, 12]),  # two of three are wrong
    ],
)
def test_the_rank_that_disagrees_with_both_neighbours_is_the_odd_one(disagrees: Any, odd: list[int]) -> None:
    assert incidents.odd_ranks(range(10, 10 + len(disagrees)), disagrees) == odd


def test_only_ranks_of_one_kind_and_size_are_compared(make_run: Any) -> None:
    plan = Plan.read(make_run(ranks=4, names=("a", "b")).plan)
    assert incidents.rings(plan) == [(0, 1, 2, 3)]
    a, b = plan.hosts
    assert incidents.rings(dataclasses.replace(plan, hosts=(a, dataclasses.replace(b, gpu="V100-32G")))) == [
        (0, 1),
        (2, 3),
    ]
    assert incidents.rings(Plan.read(make_run(ranks=1).plan)) == []


def test_where_kernels_vary_norms_are_compared_and_gradients_next_to_zero_are_not(make_run: Any) -> None:
    plan = Plan.read(make_run(ranks=2).plan)
    model = torch.nn.Linear(2, 4)
    compared = incidents.Twins(1, plan, 0, model, None)  # type: ignore[arg-type]
    compared._is_exact, compared._is_proven = False, True
    norms = torch.tensor([3.0, 1e-5]).double()

    def judge(*of_rank_1: float) -> incidents.Incident | None:
        """Compare rank 1's norms of rank 0's gradients, and the same of rank 0, with what each says of itself."""
        healthy = torch.stack((norms, norms, norms))
        return compared._judge(torch.stack((healthy, torch.stack((norms, norms, torch.tensor(of_rank_1).double())))))

    assert judge(3.02, 2e-5) is None and judge(2.98, 0.0) is None
    assert (told := judge(3.04, 1e-5)) and told.what.endswith("compute different gradients") and "1 of 2" in told.detail
    assert judge(3.0, 0.02) and judge(math.inf, 1e-5) and judge(math.nan, 1e-5)
    norms[0] = math.inf  # fp16 overflows on both
    assert judge(math.inf, 1e-5) is None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_one_wrong_bit_of_one_gradient_names_its_rank(make_run: Any, ranks: Any, tmp_path: Path, stage: int) -> None:
    few = (f"zero.stage={stage}", "batch.micro_batch=2", "train.steps=8", "incidents.corruption.every_steps=2")
    run = make_run(*few, ranks=4, names=("n0", "n1"))
    assert ranks.codes(run, "flipped_bit", 2, 14, str(tmp_path / "hash")) == [0] * 4
    first, *_ = found = recorded_incidents(run)
    assert {row["what"] for row in found} == {"rank 2 on n1 computes wrongly"} and first["step"] in (4, 6)
    assert first["detail"].startswith("1 of ") and NAME in first["detail"]


@pytest.mark.slow
def test_comparing_changes_no_bit_and_finds_nothing_in_healthy_ranks(make_run: Any, ranks: Any, tmp_path: Path) -> None:
    hashes = []
    for every in ("2", "null"):
        run = make_run("zero.stage=1", "train.steps=6", f"incidents.corruption.every_steps={every}")
        assert ranks.codes(run, "fingerprints", str(tmp_path / every)) == [0, 0]
        assert recorded_incidents(run) == []
        hashes.append(json.loads((tmp_path / f"{every}.0").read_text()))
    assert hashes[0] == hashes[1] and len(hashes[0]) == 6
