"""What a drill breaks, and what it reads from the run's events about the cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.hosts.remote import fault
from finlm.runs import drill
from finlm.runs.drill import Injury


def test_costs_are_read_from_the_events(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": step, "time": 100.0 + step} for step in range(1, 11)]
    rows += [
        {"kind": "incident", "step": 10, "time": 114.0},
        {"kind": "restart", "time": 115.0},
        {"kind": "start", "step": 8, "time": 120.0},
        *({"kind": "step", "step": step, "time": 115.0 + step} for step in range(9, 20)),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    injury = Injury("rank-killed", "n1", 10, 111.0, "killed")
    share = drill._measure(RunDir(tmp_path), [injury], began=101.0, stopped=134.0)
    assert (injury.detected_after, injury.training_after, injury.steps_lost) == (3.0, 13.0, 2)
    assert share == pytest.approx(1 - (13.0 + 2 * 1.0) / 33.0)  # 13 s without a step, two steps of 1 s done again


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="no fault is called earthquake") as caught:
        drill.check_kinds("rank-killed,earthquake")
    assert "connection-cut" in caught.value.fix
    assert drill.check_kinds("") == list(fault.FAULTS)


@pytest.mark.parametrize("kind", ["rank-killed", "agent-killed"])
def test_only_processes_of_the_run_are_killed(kind: str, tmp_path: Path) -> None:
    word = fault.RANK if kind == "rank-killed" else fault.AGENT
    code = "import time; time.sleep(60)"
    mine, other = (
        subprocess.Popen([sys.executable, "-c", code, "-m", word, str(tmp_path / name)]) for name in ("run", "other")
    )
    try:
        assert str(mine.pid) in fault.FAULTS[kind](tmp_path / "run")
        assert mine.wait(10) == -9 and other.poll() is None
        with pytest.raises(LookupError):
            fault.FAULTS[kind](tmp_path / "run")
    finally:
        mine.kill()
        other.kill()


def test_a_byte_of_the_newest_checkpoint_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "checkpoints" / "step-10" / "a.pt"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(100))
    monkeypatch.setattr(fault, "send_signal", lambda *_: "killed")
    assert "a.pt of step-10; killed" in fault.damage_checkpoint(tmp_path)
    assert part.read_bytes().count(1) == 1
