"""The cluster itself: hosts are apart, reach each other, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .netcluster import Cluster


def alive(pid: int) -> bool:
    """A zombie is dead; when it is reaped is its new parent's affair."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_hosts_are_apart_and_reach_each_other(trio: Cluster) -> None:
    (trio[1].work / "only on n1").touch()
    seen = trio[0].run("ssh", "n1", "hostname; ls /srv/job; ls /sys/class/net; echo $HOME; touch /dev/shm/x").stdout
    assert seen.splitlines() == ["n1", "only on n1", "ens5", "lo", "/srv/home"]
    assert trio[2].run("sh", "-c", "ls /srv/job /dev/shm/x", check=False).stdout == "/srv/job:\n"
    assert trio[0].pids("sshd") and not set(trio[0].pids("sshd")) & set(trio[1].pids("sshd"))


def test_nothing_is_left_after_kill_9_of_the_test_run(tmp_path: Path) -> None:
    hold = "import pathlib, sys, time, netcluster\nwith netcluster.Cluster(2, pathlib.Path(sys.argv[1])) as c:\n"
    hold += " print(*(h.pid for h in c.hosts), flush=True)\n time.sleep(60)\n"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", hold, str(tmp_path / "cluster")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(holder.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert str(tmp_path) not in mounts
