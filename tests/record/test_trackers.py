"""Trackers show the run as it went on, and no trouble of theirs reaches it. W&B and trackio only where installed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape
from finlm.record import trackers

from helpers import QUICKSTART, ROOT, TINY

Curve = list[tuple[int, float]]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory of the tiny recipe; its events are to be written."""
    run = RunDir(tmp_path / "runs" / "tiny-1")
    run.path.mkdir(parents=True)
    loaded = recipe.load(QUICKSTART, TINY).recipe
    plan = planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))
    run.recipe.write_text(recipe.dump(loaded), encoding="utf-8")
    files.write_json(run.plan, plan.to_json())
    files.write_json(run.ds_config, {})
    return run


def shown(run: RunDir) -> dict[str, Curve]:
    """The curves as TensorBoard reads them."""
    reader = EventAccumulator(str(run.tracking / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(point.step, point.value) for point in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def steps(run: RunDir, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        run.append_event("step", step=step, loss=loss, lr=1e-3, mfu=None, rows_crc=7)


def test_tensorboard_shows_every_number_of_a_finished_run(
    finished: tuple[RunDir, str], run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(finished[0].events, run.events)
    for _ in range(2):  # sending it again changes nothing
        assert main.main(["track", str(run.path), "--to", "tensorboard"]) == 0
    assert f"20 steps of tiny-1; tensorboard --logdir {run.path.parent}" in capsys.readouterr().err
    curves = shown(run)
    rows = list(run.read_events("step"))
    for key in ("loss", "lr", "grad_norm", "tokens_per_second"):
        assert curves[f"train/{key}"] == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]
    assert "train/mfu" not in curves, "a CPU has none; missing is not zero"
    evals = list(run.read_events("eval"))
    assert curves["eval/loss"] == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in evals]
    for source in evals[-1]["sources"]:
        assert curves[f"eval/{source}/loss"][-1][0] == 20


def test_two_modes_of_a_suite_at_one_step_are_two_curves(run: RunDir) -> None:
    for mode, right in (("cloze", 0.5), ("chat", 0.25)):
        run.append_event(
            "suite", step=20, suite="exam", mode=mode, macro=right, micro=right, loose={"x": [float("nan")]}
        )
    run.append_event("tasks", step=20, suite="cflue-tasks", mode="chat", scores={"Fin_TC": {"value": 0.75, "rows": 8}})
    assert [row["loose"] for row in run.read_events("suite")] == [{"x": [None]}] * 2, "NaN is no JSON"
    assert "NaN" not in run.events.read_text()
    trackers.follow(run, "tensorboard", lambda: True)
    curves = shown(run)
    assert curves["suite/exam/cloze/micro"] == [(20, 0.5)] and curves["suite/exam/chat/micro"] == [(20, 0.25)]
    assert curves["suite/cflue-tasks/chat/Fin_TC"] == [(20, 0.75)]


def test_resumed_and_rolled_back_steps_appear_once_as_they_went_on(run: RunDir) -> None:
    run.append_event("start", step=0)
    steps(run, 1, 15, loss=5.0)

    def later() -> Iterator[bool]:
        run.append_event("start", step=10)  # resumed from a checkpoint, while the tracker looks on
        steps(run, 11, 20, loss=4.0)
        run.append_event("eval", step=20, loss=3.5, sources={})
        yield False
        run.append_event("rollback", step=18, origin=20, data_step=22)
        yield False
        steps(run, 19, 25, loss=3.0)
        run.append_event("end", step=25, status="finished")
        yield True

    looks = later()
    assert trackers.follow(run, "tensorboard", lambda: next(looks, True)) == 25
    curves = shown(run)
    loss = curves["train/loss"]
    assert [step for step, _ in loss] == list(range(1, 26))
    assert [value for _, value in loss] == [5.0] * 10 + [4.0] * 8 + [3.0] * 7
    assert "eval/loss" not in curves, "taken back"


def test_a_hanging_and_a_failing_tracker_leave_the_run_alone(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("tensorboard", "import time; time.sleep(1000)"), ("wandb", "raise OSError('no server')")):
        (tmp_path / "fake" / name).mkdir(parents=True)
        (tmp_path / "fake" / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "fake"), str(ROOT / "src"))))
    monkeypatch.setattr(trackers, "END_SECONDS", 2.0)
    run.append_event("start", step=0)
    with trackers.track_beside(run, ("tensorboard", "wandb")):
        steps(run, 1, 3, loss=5.0)
        while "no server" not in trackers.log_file(run, "wandb").read_text():
            time.sleep(0.05)
    err = capsys.readouterr().err
    assert "tensorboard had not taken everything 2 s after the end and was stopped" in err
    assert "wandb failed, the run did not notice: OSError: no server" in err
    assert f"finlm track {run.path} --to wandb" in err


def test_tracking_beside_a_run_sees_its_last_row(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with trackers.track_beside(run, ("tensorboard",)):
        run.append_event("start", step=0)
        steps(run, 1, 30, loss=5.0)
    assert f"tensorboard --logdir {run.path.parent}" in capsys.readouterr().err
    assert len(shown(run)["train/loss"]) == 30


def test_two_processes_never_fill_the_same_tracker(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    said = []

    def meanwhile() -> bool:
        said.append(main.main(["track", str(run.path), "--to", "tensorboard"]))
        return True

    steps(run, 1, 3, loss=5.0)
    assert trackers.follow(run, "tensorboard", meanwhile) == 3
    assert said == [2] and "another process sends tiny-1 to tensorboard" in capsys.readouterr().err
    assert len(shown(run)["train/loss"]) == 3


def test_a_tracker_that_is_not_installed_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    arguments = [
        "train",
        str(QUICKSTART),
        "--set",
        "record.tracking=[wandb, trackio]",
        "--runs",
        str(tmp_path / "runs"),
    ]
    assert main.main([*arguments, "--set", f"data.cache_dir={tmp_path / 'cache'}"]) == 2
    err = capsys.readouterr().err
    assert ".venv/bin/pip install wandb==0.31.0; .venv/bin/pip install trackio==0.43.0" in err
    assert not list(tmp_path.iterdir())


def test_the_optional_pins_are_those_of_the_requirements() -> None:
    text = (ROOT / "requirements-tracking.txt").read_text(encoding="utf-8")
    assert [line.split()[0] for line in text.splitlines() if line[0] != "#"] == list(trackers.PINS.values())


def test_offline_wandb_gets_the_same_names_and_only_going_up(run: RunDir) -> None:
    pytest.importorskip("wandb")
    run.append_event("start", step=0)
    steps(run, 1, 15, loss=5.0)
    run.append_event("start", step=10)
    steps(run, 11, 20, loss=4.0)
    run.append_event("eval", step=20, loss=3.5, sources={"news": {"loss": 3.25}})
    assert trackers.follow(run, "wandb", lambda: True) == 20
    rows = list(wandb_rows(next((run.tracking / "wandb").glob("offline-run-*/*.wandb"))))
    assert [row["_step"] for row in rows] == list(range(1, 21))
    assert all(later["_timestamp"] >= former["_timestamp"] for former, later in pairwise(rows))
    assert [row["train/loss"] for row in rows] == [5.0] * 10 + [4.0] * 10
    assert rows[-1]["eval/news/loss"] == 3.25 and rows[-1]["eval/loss"] == 3.5


def wandb_rows(file: Path) -> Iterator[dict[str, float]]:
    """The history of an off-line run: records of a LevelDB log, in blocks of 32 KiB after a header of 7 bytes."""
    import json
    import struct

    from wandb.proto import wandb_internal_pb2

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_trackio_holds_the_run_once(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run.append_event("start", step=0)
    steps(run, 1, 5, loss=5.0)
    for _ in range(2):
        assert trackers.follow(run, "trackio", lambda: True) == 5
    rows = sqlite3.connect(tmp_path / "trackio" / "finlm.db").execute("select run_name, step, metrics from metrics")
    assert [(name, step) for name, step, _ in rows] == [("tiny-1", step) for step in range(1, 6)]
