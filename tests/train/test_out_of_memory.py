"""The words of a GPU that ran out of memory, from figures as torch gives them."""

from __future__ import annotations

import dataclasses

from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape
from finlm.train.out_of_memory import Taken, explained, next_plan

from helpers import ROOT

GIB = 2**30
WORDS = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.33 GiB of which 0.2 GiB is free."
)


def test_it_says_what_was_planned_what_it_took_and_the_next_plan_that_fits() -> None:
    wanted = recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml").recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
    taken = Taken(allocated=76 * GIB, reserved=78 * GIB, used=79 * GIB, total=79 * GIB, ram=1024 * GIB)
    error = explained(wanted, plan, taken, RuntimeError(WORDS))
    assert "Tried to allocate 1.50 GiB" in error.evidence
    assert "taken 78.0 GiB by torch (76.0 GiB in tensors at the peak), 1.0 GiB by everything else" in error.evidence
    better = next_plan(wanted, plan, taken)
    assert better is not None and better.gpu_bytes < plan.gpu_bytes
    assert "the next plan that fits" in error.fix and "--set " in error.fix
    little = next_plan(wanted, plan, dataclasses.replace(taken, ram=64 * GIB))  # no room for the optimizer's states
    assert little is None or little.layout.offload_optimizer == "none"


def test_another_process_on_the_gpu_is_seen() -> None:
    wanted = recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml").recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
    full = Taken(5 * GIB, 5 * GIB, 79 * GIB, 79 * GIB, 1024 * GIB)
    error = explained(wanted, plan, full, RuntimeError(WORDS))
    assert "74.0 GiB by everything else" in error.evidence and "no layout of this recipe fits" in error.fix
