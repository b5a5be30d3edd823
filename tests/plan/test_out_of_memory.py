"""The words of a GPU that ran out of memory, from figures as torch gives them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from finlm import pipeline
from finlm.base.rundir import RunDir
from finlm.plan import out_of_memory, planner
from finlm.plan.gpus import PlanError
from finlm.plan.out_of_memory import Taken, explain_failure, next_plan
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe

from helpers import ROOT

GIB = 2**30
WORDS = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.33 GiB of which 0.2 GiB is free."
)


LLAMA_3_8B = (
    "model={hidden_size: 4096, layers: 32, heads: 32, kv_heads: 8, ffn_size: 14336, vocab_size: 128256}",
    *("batch.sequence_length=8192", "batch.tokens_per_step=131072", "batch.micro_batch=auto"),
    *("zero={stage: auto, offload_optimizer: auto, offload_param: auto}", "checkpoint.asynchronous=false"),
    "hardware={hosts: [{name: localhost, slots: 1, gpu: H200, memory: 200GiB}]}",
)


def planned(*overrides: str) -> tuple[Recipe, cluster.Cluster, Plan]:
    """A recipe on its own hardware, and its plan."""
    wanted = recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml", overrides).recipe
    hosts = cluster.from_hardware(wanted.hardware)
    return wanted, hosts, planner.make(wanted, hosts, shape.of(wanted))


def full(plan: Plan, others: int = GIB) -> dict[str, Taken]:
    """What ranks of the plan's first host say when all is taken."""
    total = plan.gpu_memory_bytes
    return {plan.hosts[0].name: Taken(total - 3 * GIB - others, total - others, total, total, 1024 * GIB)}


def test_it_says_what_was_planned_what_it_took_and_the_next_plan_that_fits() -> None:
    wanted, hosts, plan = planned()
    (host,) = hosts.hosts
    taken = {host.name: Taken(allocated=76 * GIB, reserved=78 * GIB, used=79 * GIB, total=79 * GIB, ram=1024 * GIB)}
    error = explain_failure(wanted, plan, taken, RuntimeError(WORDS))
    assert "Tried to allocate 1.50 GiB" in error.evidence
    assert "taken 78.0 GiB by torch (76.0 GiB in tensors at the peak), 1.0 GiB by everything else" in error.evidence
    better = next_plan(wanted, hosts, plan, taken)
    assert better is not None and better.gpu_bytes < plan.gpu_bytes
    assert "the next plan that fits" in error.fix and "--set " in error.fix
    poor = dataclasses.replace(hosts, hosts=(dataclasses.replace(host, memory_bytes=64 * GIB),))
    little = next_plan(wanted, poor, plan, taken)  # no room for the optimizer's states
    assert little is None or little.offload_optimizer == "none"


def test_another_process_on_the_gpu_is_seen() -> None:
    wanted, _, plan = planned()
    taken = {plan.hosts[0].name: Taken(5 * GIB, 5 * GIB, 79 * GIB, 79 * GIB, 1024 * GIB)}
    error = explain_failure(wanted, plan, taken, RuntimeError(WORDS))
    assert "74.0 GiB by everything else" in error.evidence and "no layout of this recipe fits" in error.fix


def test_each_next_plan_is_smaller_than_the_one_before_and_trains_the_same() -> None:
    wanted, hosts, plan = planned(*LLAMA_3_8B)
    sizes = [plan.gpu_bytes]
    for former in range(out_of_memory.MOST):
        better = next_plan(wanted, hosts, plan, full(plan), former)
        assert better is not None
        for name in ("tokens_per_step", "steps", "precision", "world_size", "vocab_size", "gpu_memory_bytes"):
            assert getattr(better, name) == getattr(plan, name)
        plan = better
        sizes.append(plan.gpu_bytes)
    assert all(b < (1 - out_of_memory.LEAST_ROOM) * a for a, b in itertools.pairwise(sizes))
    assert sizes[2] < 0.94 * sizes[1]


def test_what_the_recipe_fixes_is_never_changed() -> None:
    wanted, hosts, plan = planned(*LLAMA_3_8B, "batch.micro_batch=1", "train.recompute=full", "zero.stage=1")
    better = next_plan(wanted, hosts, plan, full(plan))
    assert better is not None and better.offload_optimizer != "none"
    assert (better.micro_batch, better.recompute, better.zero_stage) == (1, "full", 1)
    fixed = ("zero.offload_optimizer=none", "zero.offload_param=none")
    wanted, hosts, plan = planned(*LLAMA_3_8B, "batch.micro_batch=1", "train.recompute=full", "zero.stage=1", *fixed)
    assert next_plan(wanted, hosts, plan, full(plan)) is None
    assert "--set zero.offload_optimizer=" in explain_failure(wanted, plan, full(plan), RuntimeError(WORDS)).fix


def test_only_the_kind_of_gpu_that_failed_gets_less_and_more_memory_was_stated_than_there_is() -> None:
    two = "hardware={hosts: [{name: a, slots: 8, gpu: A100-80G}, {name: b, slots: 8, gpu: A100-40G}]}"
    wanted, hosts, plan = planned(two, "batch.micro_batch=auto")
    taken = {"b": Taken(34 * GIB, 35 * GIB, 36 * GIB, 36 * GIB, 1024 * GIB)}
    better = next_plan(wanted, hosts, plan, taken)
    assert better is not None and better.hosts[1].gpu_bytes < 0.97 * 35 * GIB
    a, b = out_of_memory._limit_devices(hosts, plan, taken, 1.0).hosts
    assert a.device_bytes is None and b.device_bytes and b.device_bytes <= 35 * GIB


def test_little_host_memory_is_said_with_the_key_that_states_more() -> None:
    little = LLAMA_3_8B[-1].replace("200GiB", "31GiB")
    with pytest.raises(PlanError, match="does not fit") as failed:
        planned(*LLAMA_3_8B[:-1], little, "checkpoint.asynchronous=true")
    assert "if localhost has more than 31.0 GiB of memory, say so: hardware.hosts[].memory" in failed.value.fix
    _, _, plan = planned(*LLAMA_3_8B[:-1], little)
    assert any("localhost has 31.0 GiB of host memory, less than one of its GPUs" in one for one in plan.reasons)


def test_a_run_that_waits_for_its_checkpoints_waits_under_its_next_plan_too() -> None:
    open_ = tuple(one for one in LLAMA_3_8B if "asynchronous" not in one)
    wanted, hosts, plan = planned(*open_[:-1], open_[-1].replace("200GiB", "31GiB"))
    assert not plan.asynchronous_checkpoints and "asynchronous" not in wanted.checkpoint.model_fields_set
    better = next_plan(wanted, hosts, plan, full(plan))
    assert better is not None and not better.asynchronous_checkpoints
    plenty = dataclasses.replace(hosts, hosts=(dataclasses.replace(hosts.hosts[0], memory_bytes=1024 * GIB),))
    assert planner.make(wanted, plenty, shape.of(wanted)).asynchronous_checkpoints
    better = next_plan(wanted, plenty, plan, full(plan))
    assert better is not None and not better.asynchronous_checkpoints
    training = pipeline.Training(recipe.Loaded(wanted, {}, ""), hosts, Path("runs"))
    training.plan, training.run, training.shards = plan, RunDir(Path("runs/llama")), None  # type: ignore[assignment]
    assert not training.with_hosts(plenty).recipe.checkpoint.asynchronous
    again = planner.plan_again(wanted, hosts, shape.of(wanted), plan.steps)
    assert again is not None and not again.asynchronous_checkpoints


def test_the_last_figures_of_a_log_count() -> None:
    taken = Taken(1, 2, 3, 4, 5)
    log = f"{Taken(0, 0, 0, 0, 0).line()}\nTraceback\n{taken.line()}\na GPU ran out of memory\n"
    assert out_of_memory.read(log) == taken and out_of_memory.read("nothing of it") is None
