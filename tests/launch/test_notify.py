"""launch.notify: the user's command, and events for which there is no room."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.runs import record_event
from finlm.launch import start


def notify(command: str, tmp_path: Path) -> float:
    """Run the command as launch.notify does; the seconds it took."""
    began = time.monotonic()
    start._run_notify_command(command, "incident", tmp_path, "a host\n  is gone")
    return time.monotonic() - began


def test_the_command_gets_event_run_and_text(tmp_path: Path) -> None:
    notify(f'echo "$FINLM_EVENT $FINLM_RUN $FINLM_TEXT" > {tmp_path}/told', tmp_path)
    assert (tmp_path / "told").read_text() == f"incident {tmp_path} a host is gone\n"


def test_a_command_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "NOTIFY_SECONDS", 2.0)
    seconds = notify(f"sleep 300 & echo $! > {tmp_path}/pid; wait", tmp_path)
    assert seconds < 60 and "launch.notify did not end within 2 s and was killed" in capsys.readouterr().err
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_the_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    assert notify(f"sleep 40 & echo $! > {tmp_path}/pid", tmp_path) < 30
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_command_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notify("echo no route >&2; exit 7", tmp_path)
    assert "launch.notify ended with exit code 7: no route" in capsys.readouterr().err


def test_an_event_for_which_there_is_no_room_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append_json_line", refuse)
    record_event(RunDir(tmp_path), "incident", step=7, what="rank 1 was killed")
    said = capsys.readouterr().err
    assert "No space left on device" in said and "what: rank 1 was killed" in said
