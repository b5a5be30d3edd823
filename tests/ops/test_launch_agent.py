"""The agent of a host at the other end of a line: what it takes over, sends home and starts.

Two directories stand for the run here and on the host; a program of a few lines stands for DeepSpeed's launcher.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finlm.base.rundir import RunDir
from finlm.ops.launch_session import Session
from finlm.recipe.cluster import Host

Greet = Callable[[], Session]


@pytest.fixture
def here(tmp_path: Path) -> RunDir:
    (tmp_path / "here" / "logs").mkdir(parents=True)
    return RunDir(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> RunDir:
    (tmp_path / "there" / "logs").mkdir(parents=True)
    return RunDir(tmp_path / "there")


@pytest.fixture
def greet(here: RunDir, there: RunDir) -> Iterator[Greet]:
    """Start an agent for the first host and hear its greeting."""
    sessions = []

    def start() -> Session:
        session = Session(Host("n1", 2), 0, range(2), local=True, stream=True, patience=20)
        sessions.append(session)
        session.start(here, there.path, sys.executable, None, False)
        session.wait_hello()
        return session

    yield start
    for session in sessions:
        session.end()
        session.release(time.monotonic() + 10)


def steps(run: RunDir) -> list[Any]:
    return [row["step"] for row in run.read_events()]


def test_a_first_host_without_the_runs_events_takes_the_heads_copy_and_does_not_send_it_back(
    here: RunDir, there: RunDir, greet: Greet
) -> None:
    there.lent_events.parent.mkdir()
    there.append_event("rollback", step=900, data_step=1001)
    here.events.write_bytes(there.events.read_bytes())
    there.events.rename(there.lent_events)
    session = greet()
    assert steps(there) == [900]
    session.end()
    assert session.release(time.monotonic() + 10)
    assert steps(here) == [900]
