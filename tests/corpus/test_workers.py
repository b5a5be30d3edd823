"""Worker processes: the limit that binds is said, results keep their order, nobody is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.corpus import workers

from helpers import double

SOURCE = Path(workers.__file__).parents[2]


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        (1024, {"2 cores": 2, "memory": 40, "files": 300}, (2, "1024 workers asked, 2 used: 2 cores")),
        (1024, {"2 cores": 200, "memory": 40, "files": 12}, (12, "1024 workers asked, 12 used: files")),
        (8, {"cores": 64, "0.5 GiB": -1}, (1, "8 workers asked, 1 used: 0.5 GiB")),
        (2, {"cores": 2, "memory": 40}, (2, "")),
        (1, {"cores": 2, "memory": 0}, (1, "")),
    ],
)
def test_the_binding_limit_is_named(asked: int, limits: dict[str, int], expected: tuple[int, str]) -> None:
    assert workers.limit_workers(asked, limits) == expected


def test_the_limits_of_this_machine_are_real_numbers() -> None:
    found = workers.limits(4)
    assert len(found) == 3 and min(found.values()) >= 1
    assert workers.available_cores() <= len(os.sched_getaffinity(0))
    assert 0 < processes.available_bytes() < 2**50


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_the_order_of_their_tasks_with_few_in_flight(count: int) -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for value in range(12):
            taken += 1
            yield value

    with workers.open_pool(count) as pool:
        for done, result in enumerate(workers.map_in_order(pool, count, double, tasks())):
            assert result == 2 * done and taken <= done + count + 4


def test_a_killed_worker_is_a_user_error() -> None:
    with pytest.raises(UserError, match="a worker process was killed"), workers.open_pool(2) as pool:
        list(workers.map_in_order(pool, 2, double, [99, 1]))


def test_a_worker_killed_while_others_start_is_a_user_error_and_the_tasks_own_errors_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_: object) -> None:
        raise OSError("handle is closed")

    def unreadable() -> Iterator[int]:
        raise OSError("the source is gone")
        yield 1

    with pytest.raises(OSError, match="the source is gone"), workers.open_pool(2) as pool:
        list(workers.map_in_order(pool, 2, double, unreadable()))
    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", closed)
    with pytest.raises(UserError, match="a worker process was killed") as caught, workers.open_pool(2) as pool:
        list(workers.map_in_order(pool, 2, double, [1, 2]))
    assert "handle is closed" in caught.value.evidence


def test_without_shared_memory_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")  # which would be taken for a full cache

    monkeypatch.setattr(workers, "ProcessPoolExecutor", full)
    with pytest.raises(UserError, match="/dev/shm is missing, full or read-only") as caught, workers.open_pool(2):
        pass
    assert "data.num_proc to 1" in caught.value.fix
    with workers.open_pool(1) as pool:
        assert list(workers.map_in_order(pool, 1, double, [1, 2])) == [2, 4]


SCRIPT = """
import os, resource, signal, sys, time
from finlm.corpus import workers

def work(number):
    return os.getpid()

if __name__ == "__main__":
    if sys.argv[1] == "files":
        found = workers.limits(1024)
        count, _ = workers.limit_workers(1024, {name: most for name, most in found.items() if "files" in name})
        with workers.open_pool(count) as pool:
            list(workers.map_in_order(pool, count, work, range(2 * count)))
        print(count)
    else:
        with workers.open_pool(2) as pool:
            print(*set(workers.map_in_order(pool, 2, work, range(50))), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def script(tmp_path: Path, what: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = ["bash", "-c", f"{prefix} exec {sys.executable} {path} {what}"]
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_as_many_workers_as_64_open_files_allow_do_run(tmp_path: Path) -> None:
    result = script(tmp_path, "files", "ulimit -n 64;")
    assert result.returncode == 0, result.stderr
    assert 2 <= int(result.stdout) <= 16


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    result = script(tmp_path, "orphans")
    assert result.returncode == -9
    deadline = time.monotonic() + 10
    while alive := [pid for pid in result.stdout.split() if running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
