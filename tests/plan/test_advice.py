"""What a plan means beyond one step, the other candidates, and what would make the run faster."""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.plan import advice, planner, show
from finlm.plan.plan import Plan, best_interval, seconds_between
from finlm.plan.show import Consulted
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MIXED = RECIPES / "llama2-7b-fincorpus/pretrain.yaml"
SIX_B = RECIPES / "xuanyuan-6b/pretrain.yaml"


def planned(path: Path, *overrides: str) -> tuple[Recipe, cluster.Cluster, Plan]:
    wanted = recipe.load(path, overrides).recipe
    hosts = cluster.from_hardware(wanted.hardware)
    return wanted, hosts, planner.make(wanted, hosts, shape.of(wanted))


def advised(path: Path, *overrides: str, **options: Any) -> tuple[advice.Advice, Plan]:
    wanted, _, plan = planned(path, *overrides)
    return advice.make_advice(wanted, shape.of(wanted), plan, **options), plan


def consulted(path: Path, *overrides: str) -> Consulted:
    return show.consult(*planned(path, *overrides))


def test_epochs_cost_and_end_follow_from_the_plan() -> None:
    found, plan = advised(SIX_B, epoch_tokens=2_500_000_000, price=2.0, now=datetime.datetime(2026, 1, 1))
    assert plan.days is not None
    assert found.epochs == pytest.approx(4.0, rel=1e-3)
    assert found.gpu_hours == pytest.approx(plan.days * 24 * 8)
    assert found.cost == pytest.approx(2 * plan.days * 24 * 8)
    assert found.finish == (datetime.datetime(2026, 1, 1) + datetime.timedelta(days=plan.days)).isoformat(
        sep=" ", timespec="minutes"
    )
    text = dict(advice.sentences(found, plan))
    assert "2.5B tokens = 0.39 tokens per parameter" in text["data"]
    from_recipe, _ = advised(SIX_B, "hardware.price_per_gpu_hour=2.0")
    assert from_recipe.cost == pytest.approx(found.cost)


def test_a_checkpoint_has_14_bytes_a_parameter_and_12_under_zero_3() -> None:
    found, plan = advised(SIX_B)
    assert found.checkpoint_bytes == 14 * plan.parameters
    # Two are kept, one is being written, and the export has 2 bytes a parameter.
    assert found.checkpoint_disk_bytes == (3 * 14 + 2) * plan.parameters
    mixed, plan = advised(MIXED)
    assert mixed.checkpoint_bytes == 12 * plan.parameters


def test_checkpoints_in_memory_are_planned_and_refused_where_they_do_not_fit() -> None:
    hosts = recipe.load(MIXED, ()).recipe.hardware.hosts
    each = [f"{{name: {one.name}, slots: {one.slots}, gpu: {one.gpu}, memory: 1TiB}}" for one in hosts]
    large = f"hardware.hosts=[{', '.join(each)}]"
    without, on_disk = advised(MIXED, large)
    assert (without.memory_interval_seconds, without.memory_bytes) == (None, 0)
    found, plan = advised(MIXED, large, "checkpoint.memory_minutes=auto")
    assert found.hosts_that_may_be_lost == 1 and found.memory_interval_seconds is not None
    stall, between = found.checkpoint_stall_seconds, seconds_between(plan.world_size)
    assert found.memory_interval_seconds >= math.sqrt(2 * stall * between) - stall
    own = 12 * plan.parameters * max(host.slots for host in plan.hosts) / plan.world_size
    assert found.memory_bytes == pytest.approx(4 * own, rel=0.01), "two of its own and two of its neighbour's part"
    assert plan.host_bytes == on_disk.host_bytes + found.memory_bytes
    assert "in memory" in dict(advice.sentences(found, plan))
    assert advised(MIXED, large, "checkpoint.memory_minutes=5")[0].memory_interval_seconds == 300
    with pytest.raises(UserError) as caught:
        advised(MIXED, "checkpoint.memory_minutes=5")
    assert "leave checkpoint.memory_minutes out" in caught.value.fix


def test_failures_of_the_run_itself_count_beside_the_assumed_rate(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rows = [
        ("start", 0, {}),
        ("step", 100, {}),
        ("start", 200, {}),
        ("step", 290, {}),
        ("end", 300, {"status": "interrupted"}),
    ]
    for kind, time, more in rows:
        files.append_json_line(run.events, {"kind": kind, "time": time, **more})
    assert run.count_failures() == (1, 200.0)
    assumed = seconds_between(8)
    assert seconds_between(8, *run.count_failures()) == (assumed + 200.0) / 2
    assert best_interval(1.0, 20000.0, 1.0) == 199.0 and best_interval(1.0, 20.0, 100.0) == 150.0


def test_how_many_hosts_may_be_lost_and_what_that_costs() -> None:
    alone, _ = advised(SIX_B, "checkpoint.copies=1")
    assert (alone.hosts_that_may_be_lost, alone.checkpoint_copy_bytes) == (0, 0)
    found, plan = advised(MIXED)
    assert len(plan.hosts) == 2 and plan.zero_stage == 3
    assert (found.hosts_that_may_be_lost, found.checkpoint_copy_bytes) == (0, 0)
    copied, plan = advised(MIXED, "checkpoint.copies=1")
    share = plan.hosts[1].slots / plan.world_size
    assert copied.hosts_that_may_be_lost == 1
    assert copied.checkpoint_copy_bytes == pytest.approx(12 * plan.parameters * share)
    kept = 2 + 1 + 1  # keep_last, the one that is written, and the whole one that stays until the next is whole
    assert copied.checkpoint_copy_disk_bytes == kept * copied.checkpoint_copy_bytes
    assert copied.checkpoint_disk_bytes == found.checkpoint_disk_bytes + copied.checkpoint_copy_disk_bytes


def test_the_interval_is_youngs() -> None:
    found, plan = advised(SIX_B)
    assert found.checkpoint_advised_steps is not None
    assert plan.tokens_per_second is not None
    between = seconds_between(8)
    stall = found.checkpoint_stall_seconds
    steps = math.sqrt(2 * stall * between) * plan.tokens_per_second / plan.tokens_per_step
    assert found.checkpoint_advised_steps == pytest.approx(steps, rel=0.05)
    waiting, _ = advised(SIX_B, "checkpoint.asynchronous=false")
    assert (waiting.checkpoint_advised_steps or 0) > found.checkpoint_advised_steps


def test_the_mixed_cluster_learns_what_would_help_most() -> None:
    changes = consulted(MIXED).changes
    assert [change.times for change in changes] == sorted((change.times for change in changes), reverse=True)
    text = "\n".join(change.what for change in changes)
    assert "Gb/s between the hosts instead of 10" in text
    assert "A100-40G alone" in text
    assert changes[0].times > 2


def test_a_change_names_the_settings_that_come_with_it() -> None:
    change = next(one for one in consulted(MIXED).changes if one.what.startswith("zero.stage"))
    keys = [part.split(": ") for part in change.what.split(", ")]
    _, _, plan = planned(MIXED, *(f"{key}={value}" for key, value in keys))
    assert plan.tokens_per_second == pytest.approx(change.tokens_per_second)


def test_the_candidates_beside_the_chosen_one_say_why_they_were_not_taken() -> None:
    chosen, *others = consulted(SIX_B, "zero.stage=auto", "train.recompute=auto").options
    assert chosen.verdict == "taken"
    assert 1 <= len(others) <= 4
    for one in others:
        assert one.fits != one.verdict.startswith("does not fit")
        if "slower" in one.verdict:
            assert (one.tokens_per_second or 0) < (chosen.tokens_per_second or 0)


def test_fewer_threads_make_the_cpus_adam_the_bottleneck() -> None:
    _, _, few = planned(MIXED)
    _, _, many = planned(MIXED, "env={}")
    assert few.step_seconds["optimizer"] > 2 * many.step_seconds["optimizer"]


def test_a_host_needs_ram_for_a_checkpoint_on_its_way() -> None:
    _, _, plan = planned(SIX_B)
    _, _, waiting = planned(SIX_B, "checkpoint.asynchronous=false")
    assert plan.host_bytes - waiting.host_bytes == plan.host_bytes_items["checkpoint on its way"]
    assert dataclasses.replace(plan, host_bytes=0) != plan
