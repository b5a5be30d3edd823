"""Copies of checkpoints are made beside a launch, and what fails costs the copy alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.launch import copies
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host

from helpers import QUICKSTART

HOSTS = Cluster((Host("n0", 1), Host("n1", 1)))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def checkpoint(run: RunDir, step: int, *ranks: int) -> None:
    parts = {f"x{rank}": Part(1, "0", rank) for rank in ranks}
    files.write_json(run.checkpoint(step) / "manifest.json", Manifest(step, 2, 1, "none", parts).to_json())


def test_a_copy_that_fails_is_an_incident_and_tried_again_and_the_last_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failing, asked = RunDir(tmp_path), threading.Event(), []
    failing.set()

    def gather(run: RunDir, hosts: Cluster, step: int, *_: object, **__: object) -> None:
        asked.append(step)
        if failing.is_set():
            raise UserError("the connection to n1 broke off", evidence="timed out")
        checkpoint(run, step, 0, 1)

    monkeypatch.setattr(copies.checkpoint_parts, "gather_checkpoint", gather)
    monkeypatch.setattr(copies.ssh, "is_this_machine", lambda name: name == "n0")
    monkeypatch.setattr(copies, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(copies, "RETRY_SECONDS", 0.05)
    wanted = recipe.load(QUICKSTART, ["checkpoint.copies=1"]).recipe
    with copies.copy_beside(run, wanted, HOSTS, accept_new_keys=False):
        run.append_event("start", step=0)
        checkpoint(run, 10, 0)
        run.append_event("checkpoint", step=10)
        until(lambda: len(asked) > 3)
        (incident,) = run.read_events("incident")
        assert incident["what"] == "checkpoint not copied" and incident["step"] == 10
        assert incident["detail"].startswith("the connection to n1 broke off: timed out; training goes on")
        failing.clear()
        until(lambda: any(run.read_events("copied")))
        checkpoint(run, 20, 0)
        run.append_event("checkpoint", step=20)
        run.append_event("end", step=20, status="interrupted")
    assert [(row["step"], row["bytes"]) for row in run.read_events("copied")] == [(10, 1), (20, 1)]
    assert not [thread for thread in threading.enumerate() if thread.name == "copies"]


@pytest.mark.parametrize("override", ["checkpoint.copies=0", "checkpoint.copies=1"])
def test_nothing_is_copied_without_the_key_or_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setattr(copies.ssh, "is_this_machine", lambda _: override.endswith("1"))
    with copies.copy_beside(RunDir(tmp_path), recipe.load(QUICKSTART, [override]).recipe, HOSTS, accept_new_keys=False):
        assert not [thread for thread in threading.enumerate() if thread.name == "copies"]
