"""Trouble in a step: what the loop does about it, on two real ranks, and how the decisions are made."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finlm.base import checkpoints, files
from finlm.base.checkpoints import Manifest, Part
from finlm.base.rundir import RunDir
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.schema_train import Incidents, Spike, Straggler
from finlm.record import history
from finlm.rows import dialogues, packing
from finlm.rows.shards import Shards
from finlm.train.batches import Batches
from finlm.train.incidents import Stopwatch, Stragglers, Watch
from finlm.train.pretrain import Guard
from finlm.train.zero import engine, storage

from helpers import incidents, logs

BAD_STEP = 14  # whose data is noise in the runs below


@pytest.mark.slow
@pytest.mark.parametrize("stage, where", [(1, "none"), (1, "stream"), (3, "none")])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    make_run: Any, ranks: Any, tmp_path: Path, stage: int, where: str
) -> None:
    run = make_run(f"zero.stage={stage}", f"zero.offload_optimizer={where}", "batch.micro_batch=4", "train.steps=6")
    # The first of the two micro-steps of step 4, on rank 1 only.
    codes = ranks.codes(run, "nan_loss_and_fingerprints", 1, [6], str(tmp_path / "hash"))
    assert codes == [0, 0], logs(run)
    for rank in range(2):
        hashes = json.loads((tmp_path / f"hash.{rank}").read_text())
        assert hashes["4"] == hashes["3"] != hashes["5"]
    assert [row["loss"] for row in run.read_events("step")][3] is None
    (incident,) = incidents(run)
    assert incident["step"] == 4 and incident["what"] == "the loss is not finite on rank 1"
    assert "the weights were left alone; 1 of the last 100 steps, 5 are borne" in incident["detail"]


@pytest.mark.slow
def test_a_checkpoint_after_a_first_step_that_was_skipped_has_no_moments_and_later_ones_have(
    make_run: Any, ranks: Any, tmp_path: Path
) -> None:
    """DeepSpeed makes Adam's moments in the first step that is taken; what a save needs is known only then."""
    run = make_run("zero.stage=1", "train.steps=5", "checkpoint.every_steps=1", "checkpoint.keep_last=5", ranks=1)
    assert ranks.codes(run, "nan_loss_and_fingerprints", 0, [0], str(tmp_path / "hash")) == [0], logs(run)
    sizes = [Manifest.read(path).bytes for _, path in run.complete_checkpoints()]
    assert len(sizes) == 5 and sizes[0] < 0.7 * sizes[1] and sizes[1] == pytest.approx(sizes[4], rel=0.01)


@pytest.mark.slow
def test_too_many_steps_that_are_not_finite_end_the_run_and_name_the_gradient(make_run: Any, ranks: Any) -> None:
    run = make_run("incidents.stop_after=2", "train.steps=8")
    assert ranks.codes(run, "nan_loss", 0, [2, 3, 4, 5]) == [1, 1], logs(run)
    assert [row["step"] for row in incidents(run)] == [3, 4, 5]
    assert "it began in the gradient of lm_head.weight" in incidents(run)[1]["detail"]
    assert "3 of the last 100 steps is more than incidents.stop_after (2)" in incidents(run)[2]["detail"]
    (end,) = run.read_events("end")
    assert end["status"] == "failed" and end["step"] == 5


@pytest.fixture
def noisy(make_run: Any) -> Any:
    """noisy(*overrides): a run of ZeRO-1 with random tokens in BAD_STEP's rows, or in shares of the rows of steps."""

    def make(*overrides: str, shares: Mapping[int, float] = MappingProxyType({BAD_STEP: 1.0})) -> RunDir:
        watch = ("incidents.spike.window=10", "incidents.spike.z_score=3", "optim.lr=1e-2")
        run: RunDir = make_run("checkpoint.every_steps=5", "checkpoint.keep_last=9", *watch, *overrides)
        plan, recipe = Plan.read(run.plan), recipes.load(run.recipe).recipe
        copy = run.path.parent / "noise"
        shutil.copytree(run.shards, copy)
        shards = Shards(copy)
        rows = dialogues.prepare_rows(shards, plan.sequence_length, recipe.data.packing)
        count = plan.steps * plan.tokens_per_step // plan.sequence_length
        order = packing.order(rows.source_ranges(), recipe.data.mixture, count, plan.sequence_length, recipe.train.seed)
        noise, batches = np.random.default_rng(0), Batches(rows, order, plan, 0)
        of_steps = {step: batches.row_ids(step - 1).ravel().tolist() for step in shares}
        for row in [row for step, every in of_steps.items() for row in every[: round(shares[step] * len(every))]]:
            for shard, start, tokens in rows.pieces(row):
                ids = np.memmap(shard.path, dtype=shard.dtype, mode="r+")
                ids[start : start + tokens] = noise.integers(
                    shards.vocab_size - 400, shards.vocab_size, tokens
                )  # rare ones
        manifest = files.read_json(run.manifest)
        manifest["shards"]["path"] = str(copy)
        files.write_json(run.manifest, manifest)
        return run

    return make


@pytest.mark.slow
def test_a_skipped_spike_never_reaches_the_weights(noisy: Any, ranks: Any, tmp_path: Path) -> None:
    run = noisy("incidents.spike.then=skip")
    assert ranks.codes(run, "fingerprints", str(tmp_path / "hash")) == [0, 0], logs(run)
    (spike,) = incidents(run)
    assert spike["what"] == "loss spike, step skipped" and spike["step"] == BAD_STEP
    for rank in range(2):
        hashes = json.loads((tmp_path / f"hash.{rank}").read_text())
        assert hashes[str(BAD_STEP)] == hashes[str(BAD_STEP - 1)] != hashes[str(BAD_STEP + 1)]


@pytest.mark.slow
def test_a_spike_names_its_documents_and_a_roll_back_goes_to_a_checkpoint_before_and_leaves_out_the_data(
    noisy: Any, ranks: Any
) -> None:
    run = noisy("incidents.spike.then=roll_back", "incidents.spike.roll_back_steps=5", "zero.stage=3")
    assert ranks.codes(run, "sigterm", 1, 9) == [143, 143], logs(run)
    assert [row["status"] for row in run.read_events("end")] == ["interrupted"]
    assert ranks.codes(run) == [0, 0], logs(run)
    (spike,) = incidents(run)
    assert spike["what"] == "loss spike" and spike["step"] == BAD_STEP
    assert "deviations above" in spike["detail"] and "highest in micro-step 0 of rank" in spike["detail"]
    sources = {shard.source: shard for shard in Shards(run.shards).split("train")}
    for document in spike["documents"]:
        assert document["document"] < sources[document["source"]].documents
        assert document["shard"] == sources[document["source"]].path.name and document["tokens"] > 0
    (back,) = run.read_events("rollback")
    assert (back["origin"], back["step"], back["data_step"]) == (BAD_STEP, 5, BAD_STEP)
    assert [step for step, _ in run.complete_checkpoints()] == [5, 10, 15, 20]
    read = history.read_history(run)
    assert read.steps["step"] == list(range(1, 21))
    assert max(read.values("loss")[5:]) < max(read.values("loss")[:5]) + 0.2, "no spike is left"


KILLS = [("sigterm", 1, 12), ("stopped", 22), ("sigterm", 0, 37)]  # with a checkpoint of that step, and without


@pytest.mark.slow
@pytest.mark.parametrize("then", ["skip", "roll_back"])
def test_spikes_are_judged_alike_in_a_run_that_was_killed_and_resumed(noisy: Any, ranks: Any, then: str) -> None:
    """So many steps have too high a loss that another window would take another decision."""
    chance = np.random.default_rng(3)
    shares = {step: float(chance.uniform(0.1, 0.9)) for step in range(6, 60) if chance.random() < 0.5}
    if then == "skip":  # two of three: a window with them in it has no spike
        shares = {step: 0.5 for step in range(25, 41) if step % 3}
    settings = (f"incidents.spike.then={then}", "incidents.spike.z_score=1", "incidents.stop_after=30")
    fresh = noisy("train.steps=40", *settings, "checkpoint.keep_last=2", "eval.every_steps=null", shares=shares)
    run = RunDir(Path(shutil.copytree(fresh.path, f"{fresh.path}.killed")))
    ranks.train(fresh)
    acted = [row for row in fresh.read_events() if row["kind"] == "rollback" or row.get("what", "").endswith("skipped")]
    assert len(acted) >= 5, "the test tests something"
    for kill in KILLS:
        assert set(ranks.codes(run, *kill)) == {-9 if kill[0] == "stopped" else 143}, logs(run)
    ranks.train(run)
    ours, theirs = ({row["step"]: row["loss"] for row in each.read_events("step")} for each in (run, fresh))
    assert ours == theirs
    assert Manifest.read(run.checkpoint(40)).files == Manifest.read(fresh.checkpoint(40)).files
    told = [{(row["step"], row["what"]) for row in incidents(each)} for each in (run, fresh)]
    assert told[0] >= told[1] if then == "roll_back" else told[0] == told[1]


@pytest.mark.slow
def test_a_checkpoint_of_a_version_that_saved_no_watch_is_resumed_with_the_losses_of_the_events(
    make_run: Any, ranks: Any, finished: tuple[RunDir, str], tmp_path: Path
) -> None:
    run = make_run("incidents.spike.window=10", "incidents.spike.then=skip")
    assert set(ranks.codes(run, "stopped", 15)) == {-9}
    directory = run.checkpoint(10)
    parts = dict(Manifest.read(directory).files)
    for path in directory.glob("loop_rank_*.pt"):
        state = storage.load(path)
        assert len(state.pop("watch")["losses"]) == 10
        storage.write(state, path)
        parts[path.name] = Part(path.stat().st_size, checkpoints.sha256([path], 1)[path], parts[path.name].rank)
    manifest = dataclasses.replace(Manifest.read(directory), files=parts)
    files.write_json(directory / "manifest.json", manifest.to_json())
    ranks.train(run)
    ours, theirs = ({row["step"]: row["loss"] for row in each.read_events("step")} for each in (run, finished[0]))
    assert ours == theirs and not incidents(run)
    losses = storage.load(run.checkpoint(20) / "loop_rank_0.pt")["watch"]["losses"]
    assert losses == [theirs[step] for step in range(11, 21)]


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint_and_the_run_resumes_exactly(
    make_run: Any, ranks: Any, finished: tuple[RunDir, str]
) -> None:
    run = make_run()
    assert ranks.codes(run, "sigterm", 1, 7) == [128 + signal.SIGTERM] * 2, logs(run)
    assert [step for step, _ in run.complete_checkpoints()] == [8], "the step that was running is finished"
    rows = ranks.train(run)
    expected = {row["step"]: row["loss"] for row in finished[0].read_events("step")}
    assert {row["step"]: row["loss"] for row in rows} == expected


def test_a_plain_optimizer_leaves_the_weights_alone_when_a_gradient_is_not_finite() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    engine.skip_non_finite(optimizer)
    for gradient, changes in ((math.nan, False), (1.0, True), (math.inf, False)):
        before = weight.detach().clone()
        weight.grad = torch.tensor([0.0, gradient, 0.0])
        optimizer.step()
        assert optimizer.overflow is not changes  # type: ignore[attr-defined]
        assert torch.equal(weight.detach(), before) is not changes


def judged(watch: Watch, losses: list[float], first: int = 1) -> list[str]:
    """What a watch says of losses, one a step; all applied."""
    found = [watch.judge(step, loss, is_applied=True) for step, loss in enumerate(losses, first)]
    return [f"{step} {one.what} {one.then}" for step, one in enumerate(found, first) if one]


def test_a_falling_noisy_loss_has_no_spike_and_a_jump_is_told_once() -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, 400)
    falling = [2 + 6 * math.exp(-step / 60) + float(noise[step]) for step in range(400)]
    watch = Watch(Incidents(), scales_loss=False)
    assert judged(watch, falling) == []
    assert judged(watch, [3.5, 3.6, 3.4, 2.0, 3.5], first=401) == ["401 loss spike go_on", "405 loss spike go_on"]


def test_a_watch_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    noise = np.random.default_rng(5).normal(0, 0.3, 300)
    settings = Incidents(spike=Spike(then="skip", window=10, z_score=2), stop_after=40)
    watch = Watch(settings, scales_loss=False)
    for step in range(1, 301):
        other = Watch(settings, scales_loss=False)
        other.restore(**json.loads(json.dumps(watch.state())))
        loss = 3 + float(noise[step - 1])
        said = [each.judge(step, loss, is_applied=loss <= each.limit) for each in (watch, other)]
        assert said[0] == said[1] and watch.limit == other.limit and watch.state() == other.state()
    assert len(watch.state()["skipped"]) > 3


def test_a_spike_stops_where_the_recipe_says_so() -> None:
    watch = Watch(Incidents(spike=Spike(then="stop")), scales_loss=False)
    assert judged(watch, [3.0] * 20 + [9.0]) == ["21 loss spike stop"]


def test_data_positions_after_roll_backs() -> None:
    guard: Any = SimpleNamespace(rollbacks=[(10, 15)])
    data_step = partial(Guard.data_step, guard)
    assert [data_step(step) for step in (9, 10, 12)] == [9, 15, 17]
    guard.rollbacks.append((20, data_step(24) + 1))
    assert [data_step(step) for step in (19, 20)] == [24, 30]
    guard.rollbacks.append((5, data_step(22) + 1))  # further back than both: what they said of later steps is void
    assert [data_step(step) for step in (4, 5, 10, 20)] == [4, 33, 38, 48]


def test_reading_counts_until_the_first_micro_batch_and_not_while_the_device_is_behind(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def batches(*waits: float) -> Iterator[float]:
        nonlocal now
        for seconds in waits:
            now += seconds
            yield seconds

    stopwatch = Stopwatch(Plan.read(make_run().plan))
    assert list(stopwatch.reading(batches(2.0, 3.0, 4.0))) == [2.0, 3.0, 4.0]
    assert stopwatch.take() == 2.0


def test_a_rank_that_stays_slow_is_named_once(make_run: Any) -> None:
    plan = dataclasses.replace(Plan.read(make_run(names=("a", "b")).plan), world_size=2)
    watch = Stragglers(Straggler(steps=10), plan)
    even, slow = [0.100, 0.104], [0.100, 0.150]
    assert all(watch.judge(even) is None for _ in range(20))
    found = [watch.judge(slow) for _ in range(40)]
    (told,) = (one for one in found if one)
    assert told.what == "rank 1 on b is slow" and "150 ms a step, the others' 100 ms" in told.detail
