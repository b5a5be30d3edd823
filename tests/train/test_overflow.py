"""Gradients that are not finite: their names, the end of fp16's loss scale, and what the guard makes of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.train import entry
from finlm.train.incidents import Gradients
from finlm.train.model.products import SummingLinear
from finlm.train.pretrain import Guard

from helpers import incidents, logs

NAME = "model.layers.1.mlp.down_proj.weight"


def use_fp16(run: RunDir) -> None:
    """By hand: the planner refuses it on CPU."""
    files.write_json(run.plan, files.read_json(run.plan) | {"precision": "fp16"})
    scaling = {"enabled": True, "loss_scale": 0, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}
    files.write_json(run.ds_config, files.read_json(run.ds_config) | {"fp16": scaling})


@pytest.mark.slow
def test_fp16_that_overflows_names_the_gradient_before_the_loss_scale_is_at_its_end_and_after_a_resume_too(
    make_run: Any, ranks: Any
) -> None:
    run = make_run("train.steps=9", "checkpoint.every_steps=2", ranks=1)
    use_fp16(run)
    assert ranks.codes(run, "fp16_overflow", NAME, 3) == [1], logs(run)
    first, second, third, last = incidents(run)
    assert first["detail"].startswith("gradient overflow; the loss scale is now 4, its minimum is 1")
    for row in (second, third):
        assert f"at the next overflow there the run ends; it began in the gradient of {NAME} (1 of" in row["detail"]
        assert "lower optim.lr (0.002, try 0.00067)" in row["detail"]
    assert last["what"] == "Current loss scale already at minimum" and NAME in last["detail"]
    assert [row["loss_scale"] for row in run.read_events("step")] == [8, 8, 4, 2, 1, 1]

    assert ranks.codes(run, "fp16_overflow", NAME, 5) == [1], logs(run)  # from the checkpoint of step 4, at scale 2
    lowered, ended = incidents(run)[4:]
    assert lowered["step"] == 5 and "the loss scale is now 1, its minimum is 1" in lowered["detail"]
    assert ended["step"] == 6 and ended["what"] == last["what"]


@pytest.mark.slow
def test_a_compiled_run_names_the_gradients_of_a_middle_micro_step_and_goes_on(make_run: Any, ranks: Any) -> None:
    # The shapes of test_training's compiled layers: they are compiled once.
    run = make_run("zero.stage=1", "train.compile=true", "batch.micro_batch=2", "train.steps=6", ranks=1)
    assert Plan.read(run.plan).gradient_accumulation_steps == 8
    # The second micro-step of steps 2 and 4; the first incident begins the watch.
    assert ranks.codes(run, "nan_loss", 0, [9, 25]) == [0], logs(run)
    assert [row["step"] for row in incidents(run)] == [2, 4]
    detail = incidents(run)[1]["detail"]
    assert "it began in the gradient of lm_head.weight (" in detail
    named, of = detail.split("lm_head.weight (")[1].split(")")[0].split(" of ")
    assert named == of, "those of the layers that add up their gradients, too"


def test_a_gradient_that_its_layer_has_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.__class__ = SummingLinear
    model: Any = torch.nn.Sequential(layer)
    gradients = Gradients(model, torch.device("cpu"))
    gradients.watch()
    for factors, told in (((1, 1), ""), ((1, math.nan), "; it began in the gradient of 0.weight (1 of 1)")):
        layer.weight.grad = model[0].total = None
        for factor in factors:
            (model(torch.ones(1, 2)).sum() * factor).backward()
            model[0].total = layer.weight.grad
        assert gradients.name_bad() == told


class Run:
    """A guard over an engine that does what a test says."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Guard, "_name_worst_documents", lambda *_: ([], ""))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda _: None)
        self.is_applied = True
        self.scaler = DynamicLossScaler(8.0, 1000, 1.0, 1, False)
        optimizer = SimpleNamespace(loss_scaler=self.scaler)
        self.engine: Any = SimpleNamespace(
            module=torch.nn.Linear(1, 1), optimizer=optimizer, was_step_applied=lambda: self.is_applied
        )
        self.rows: list[dict[str, Any]] = []
        batches: Any = SimpleNamespace(device=torch.device("cpu"))
        recipe, plan = recipes.load(run.recipe).recipe, Plan.read(run.plan)
        self.saved: dict[int, Any] = {}
        checkpoints: Any = SimpleNamespace(watch_loaded=None, roll_back=self._roll_back)
        self.checkpoints = checkpoints
        self.guard = Guard(
            SimpleNamespace(  # type: ignore[arg-type]
                **{"run": run, "recipe": recipe, "plan": plan, "engine": self.engine, "batches": batches, "rank": 0},
                **{"checkpoints": checkpoints, "events": SimpleNamespace(record=self._record)},
            )
        )

    def _roll_back(self, at_most: int) -> int:
        found = at_most // 10 * 10
        self.checkpoints.watch_loaded = self.saved.get(found)
        return found

    def _record(self, kind: str, **fields: Any) -> None:
        self.rows.append({"kind": kind, **fields})

    def judge(self, step: int, loss: float, is_applied: bool = True) -> str:
        """What the loop does after a step of this loss."""
        self.is_applied = is_applied
        measured = entry.Measured([loss], [0.1], memory_bytes=1, signal=0, rows_crc=0, seconds=0.1)
        then = self.guard.judge(step, step - 1, entry.Step(step, loss, 1e-3, 1, 1, measured))
        self.saved[step] = self.checkpoints.watch_state()
        return then


def test_roll_backs_to_one_checkpoint_are_counted(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run("incidents.spike.then=roll_back", "incidents.stop_after=3", ranks=1)
    run = Run(path, monkeypatch)
    for step in range(1, 15):
        assert run.judge(step, 3.0) == "go_on"
    for _ in range(3):  # step 15 has a spike whatever the data
        assert run.judge(15, 9.0) == "roll_back"
        assert run.guard.roll_back(15, run.guard.data_step(14)) == 10
    assert run.judge(15, 9.0) == "stop"
    assert "rolled back 3 times already" in run.rows[-1]["detail"]
    backs = [row for row in run.rows if row["kind"] == "rollback"]
    assert [row["data_step"] for row in backs] == [15, 20, 25]


def test_a_skipped_spike_under_fp16_is_told_as_one_and_counted(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run("incidents.spike.then=skip", "incidents.stop_after=2", ranks=1)
    use_fp16(path)
    run = Run(path, monkeypatch)
    monkeypatch.setattr(run.guard.gradients, "name_bad", lambda: "")
    for step in range(1, 15):
        run.judge(step, 3.0)
    assert run.judge(15, 3.0, is_applied=False) == "go_on"
    assert [run.judge(step, 9.0, is_applied=False) for step in (16, 17, 18)] == ["go_on", "go_on", "stop"]
    assert [row["what"] for row in run.rows] == ["step skipped"] + ["loss spike, step skipped"] * 3
    assert run.rows[0]["detail"] == "gradient overflow; the loss scale is now 8"


def test_the_loss_scale_of_a_checkpoint_that_was_gone_back_to_ends_the_run(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(ranks=1)
    use_fp16(path)
    run = Run(path, monkeypatch)
    monkeypatch.setattr(run.guard.gradients, "name_bad", lambda: "")
    run.engine.optimizer.loss_scaler = DynamicLossScaler(1.0, 1000, 1.0, 1, False)
    assert run.guard.roll_back(15, 14) == 10
    assert not run.engine.optimizer.loss_scaler.raise_error_at_min_scale
    assert run.judge(11, 3.0, is_applied=False) == "stop"
    assert run.rows[-1]["what"] == "Current loss scale already at minimum"
