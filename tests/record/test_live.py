"""The live view says what the rows say, starts over where they do, and leaves the run alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.record import live

from helpers import QUICKSTART


@pytest.fixture(scope="module")
def plan() -> Plan:
    """200 steps on two hosts that hold 12 and 4 rows."""
    hosts = tuple(cluster.Host(name, 2, None, 8 * 2**30) for name in ("left", "right"))
    loaded = recipe.load(QUICKSTART, ("train.steps=200",)).recipe
    return planner.make(loaded, cluster.Cluster(hosts), shape.of(loaded))


def step(number: int, **more: Any) -> live.Row:
    row = {"kind": "step", "time": 1000.0 + number, "step": number, "loss": 8.0 - number / 100, "lr": 1e-3}
    return row | {"tokens_per_second": 4000.0, "mfu": None, "memory_bytes": 2**30} | more


def test_the_line_has_everything_that_is_known_and_nothing_else(plan: Plan) -> None:
    state = live.State(plan)
    for number in range(1, 101):
        state.feed(step(number))
    line = state.line(now=1100.0)
    assert line.startswith("step 100/200  loss 7.0000  lr 1.00e-03  tokens/s 4,000  memory 1.0 GiB  ends ")
    assert line.endswith("(in 100 seconds)") and "MFU" not in line
    state.feed(step(101, mfu=0.5, loss=None))
    assert "MFU 50.0 %" in state.line(1101.0) and "loss –" in state.line(1101.0)


def test_the_board_names_hosts_checkpoint_incidents_and_silence(plan: Plan) -> None:
    state = live.State(plan)
    for number in range(1, 5):
        state.feed(step(number))
    assert state.feed({"kind": "eval", "time": 1004.0, "step": 4, "loss": 7.5}) == "step 4: held-out loss 7.5000"
    earned = {"kind": "eval", "time": 1004.0, "step": 4, "reward": 0.7, "sampled": 0.6}
    assert state.feed(earned) == "step 4: held-out reward 0.7000, of drawn answers 0.6000"
    rise = {"rise": 0.1, "rise_interval": [0.05, 0.15]}
    rose = "0.6000 (+0.1000 since the first step, 95 % +0.0500 to +0.1500)"
    assert state.feed(earned | rise) == f"step 4: held-out reward 0.7000, of drawn answers {rose}"
    state.feed({"kind": "checkpoint", "time": 1004.0, "step": 4, "bytes": 1, "seconds": 1.0})
    said = state.feed({"kind": "incident", "time": 1004.0, "step": 4, "what": "loss spike", "detail": "9.0"})
    assert said == "step 4: loss spike: 9.0"
    board = dict(state.board(now=1064.0))
    assert board["hosts"] == "left 2,000, right 2,000"
    assert board["held-out"] == f"reward 0.7000, of drawn answers {rose} at step 4"
    assert board["saved"] == "step 4, 60 seconds ago"
    assert board["incident"] == "step 4: loss spike"
    assert board["quiet"] == "no word for 60 seconds"


def test_a_resume_takes_back_the_steps_after_it(plan: Plan) -> None:
    state = live.State(plan)
    for number in range(1, 21):
        state.feed(step(number))
    state.feed({"kind": "end", "time": 1020.0, "step": 20, "status": "interrupted"})
    state.feed({"kind": "start", "time": 1030.0, "step": 10})
    assert state.end is None and state.step == 10 and state.left is None
    assert [number for number, _ in state.losses] == list(range(1, 11))
    said = state.feed({"kind": "rollback", "time": 1031.0, "step": 5, "origin": 10})
    assert said == "step 10: back to step 5, without the data since"


def test_watch_of_a_finished_run_says_how_it_ended(
    finished: tuple[RunDir, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["watch", str(finished[0].path)]) == 0
    out = capsys.readouterr().out
    assert "step 20/20  loss" in out and f"finished at step 20; {finished[0].report}" in out


def test_watch_of_a_run_that_nobody_runs_ends_and_says_so(
    finished: tuple[RunDir, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "left-behind")
    run.path.mkdir()
    for file in (finished[0].recipe, finished[0].plan, finished[0].ds_config):
        shutil.copy(file, run.path)
    (run.path / ".lock").write_text(f"1 {os.uname().nodename}\n")
    rows = finished[0].events.read_text(encoding="utf-8").splitlines(keepends=True)
    run.events.write_text("".join(row for row in rows if '"step":' in row and '"kind":"end"' not in row)[:-40])
    long_ago = [line.replace('"time":17', '"time":16') for line in run.events.read_text().splitlines(keepends=True)]
    run.events.write_text("".join(long_ago))
    assert main.main(["watch", str(run.path)]) == 1
    assert "nothing runs it any more; the last word was at step" in capsys.readouterr().out


def test_a_run_on_any_hosts_is_over_when_the_machine_that_started_it_runs_it_no_more(
    plan: Plan, tmp_path: Path
) -> None:
    run, state = RunDir(tmp_path), live.State(plan, last_time=0.0)
    assert [host.name for host in plan.hosts] != ["localhost"] and not live._is_over(run, state)
    with (tmp_path / ".lock").open("w") as lock:
        lock.write(f"1 {os.uname().nodename}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not live._is_over(run, state)
    assert live._is_over(run, state)
    (tmp_path / ".lock").write_text("1 elsewhere\n")
    assert not live._is_over(run, state)


def test_watch_and_track_stay_with_a_run_that_starts_again(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "again")
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART).recipe))
    files.write_json(run.plan, plan.to_json())
    files.write_json(run.ds_config, {})
    looks = 0

    def launcher(_: float) -> None:
        """Time goes on: the lock outlives the failure's row, is let go, then comes the restart."""
        nonlocal looks
        looks += 1
        if looks == 3:
            lock.close()
        elif looks == 4:
            run.append_event("restart", number=1, after="n1 went away", host="n1", seconds=600.0)
        elif looks == 8:
            run.append_event("start", step=10)
            run.append_event("step", step=20, loss=4.0, tokens_per_second=1.0)
            run.append_event("end", step=20, status="finished")
        assert looks <= 8

    monkeypatch.setattr(live, "time", SimpleNamespace(**vars(time) | {"sleep": launcher}))
    for command in (["watch"], ["track", "--to", "tensorboard", "--follow"]):
        looks = 0
        run.events.unlink(missing_ok=True)
        run.append_event("start", step=0)
        run.append_event("step", step=12, loss=5.0, tokens_per_second=1.0)
        run.append_event("end", step=12, status="failed")
        with (run.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert main.main([command[0], str(run.path), *command[1:]]) == 0
        assert looks == 8
    said = capsys.readouterr().out
    assert "starts again: n1 went away\n" in said and "\nfinished at step 20\n" in said


def test_watch_of_something_else_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["watch", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_line_names_what_the_first_step_waits_for(plan: Plan) -> None:
    state = live.State(plan)
    assert state.line(0.0) == f"step 0/{plan.steps:,}  the ranks start: libraries, weights, optimizer"
    assert (
        state.feed({"kind": "start", "time": 1.0, "step": 0}) == "the ranks are up: held-out text, then the first step"
    )
    assert "held-out text" in state.line(2.0) and "held-out text" in dict(state.board(2.0))["step"]
    state.feed(step(1))
    assert state.phase == "" and state.line(3.0).startswith(f"step 1/{plan.steps:,}  loss")
