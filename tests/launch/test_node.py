"""The launcher of a host's ranks: what they are given, and how it ends with them. A few lines stand for a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from finlm.base import processes

RANK = """
import os, signal, sys, time
if sys.orig_argv[-3:-1] == ["-m", "finlm.train"]:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
    words = [*(os.environ[name] for name in names.split()), str(os.getpid()), sys.orig_argv[-1]]
    os.write(1, (" ".join(words) + "\\n").encode())  # at once: two ranks write here
    {play}
    os._exit(0)
"""


def launch(tmp_path: Path, play: str) -> tuple[int, list[list[str]]]:
    """Launch two ranks of five, on the second of two hosts; the exit code and what each rank has printed."""
    (tmp_path / "sitecustomize.py").write_text(RANK.format(play=play))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "RANK": "7"}
    asked = {"world": {"n0": [0, 1, 2], "n1": ["4", "GPU-5f1c"]}, "node": 1, "address": "10.0.0.1", "port": 21000}
    command = [sys.executable, "-u", "-m", "finlm.launch.node", json.dumps(asked), "/runs/my run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    rows = [line.split(maxsplit=10) for line in done.stdout.splitlines() if line.endswith("/runs/my run")]
    return done.returncode, sorted(rows)


def test_ranks_get_what_deepspeeds_launcher_would_give_them(tmp_path: Path) -> None:
    code, rows = launch(tmp_path, "pass")
    shared = ["5", "2", "1", "2", "10.0.0.1", "21000", "4,GPU-5f1c"]
    assert code == 0 and [row[:9] for row in rows] == [["3", "0", *shared], ["4", "1", *shared]]


@pytest.mark.parametrize(("play", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 256 - signal.SIGKILL)])
def test_it_ends_with_the_first_rank_that_failed_and_ends_the_others(tmp_path: Path, play: str, code: int) -> None:
    ended, rows = launch(tmp_path, f"time.sleep(60) if os.environ['RANK'] == '3' else {play}")
    assert ended == code and len(rows) == 2
    assert not any(processes.is_alive(int(row[9])) for row in rows)


def test_of_ranks_that_ended_within_one_poll_the_killed_one_counts(tmp_path: Path) -> None:
    play = (
        "launcher = os.getppid()",
        "time.sleep(1)  # both have started",
        "if os.environ['RANK'] == '3':",
        "    os.kill(launcher, signal.SIGSTOP)  # it sees neither rank's end before the other's",
        "    os._exit(1)",
        "if os.fork() == 0:",
        "    time.sleep(2)",
        "    os.kill(launcher, signal.SIGCONT)",
        "    os._exit(0)",
        "time.sleep(1)",
        "os.kill(os.getpid(), 9)",
    )
    ended, _ = launch(tmp_path, "\n    ".join(play))
    assert ended == 256 - signal.SIGKILL
