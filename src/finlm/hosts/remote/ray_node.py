"""Be a node of a Ray cluster for as long as stdin is open: this file and a call are sent to the host's interpreter.

The interpreter reads `length of the source`, the source, then lines of JSON: a Greeting's environment, answered by what
this host has, and the arguments of `ray start`, answered by "started" or by the log's end. When the line closes, as the
other end is done or dead, or this program is killed, every process that was started here is ended. Python 3.8, standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MARK = "finlm-ray:"
STARTED = b"Ray runtime started"
SLOW = b"timed out during startup"  # Ray gives a node 30 s to come up, too few where other programs take the cores
_ATTEMPTS = 3
_GIB = 2**30
_END_SECONDS = 8.0
_libc = ctypes.CDLL(None)


def serve() -> None:
    """Send this host's facts, start Ray as asked, and end it when stdin closes.

    Reads the environment and then the request from stdin, a line of JSON each. Starts Ray up to three times when it was
    only too slow. When Ray ends by itself, sends the end of its log.
    """
    os.environ.update(json.loads(sys.stdin.readline() or "{}"))
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    send_message(describe_host())
    line = sys.stdin.readline()
    if not line:
        return
    request = json.loads(line)
    os.environ.update(request["env"])
    closed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closed.set())
    fork_keeper()

    def follow() -> None:
        """Set `closed` when stdin has closed."""
        sys.stdin.read()
        closed.set()

    threading.Thread(target=follow, daemon=True).start()
    for left in reversed(range(_ATTEMPTS)):
        log = start_and_wait(request["arguments"], closed)
        end_all()
        if not (left and SLOW in log) or closed.is_set():
            break
    if not closed.is_set():
        send_message({"ended": log[-2000:].decode("utf-8", "replace")})


def fork_keeper() -> None:
    """Fork, and return in the child only. The parent waits for the child, ends all processes it has left, and exits.

    Both are subreapers: what Ray leaves behind becomes a child of the process that still lives. When the parent is
    killed, the child gets SIGTERM; a SIGTERM to the parent is passed on.
    """
    keeper = os.getpid()
    _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, not inherited
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: send_signal(child, signal.SIGTERM))
        os.waitpid(child, 0)
        end_all()
        os._exit(0)
    _libc.prctl(36, 1, 0, 0, 0)
    die_with_parent(keeper, signal.SIGTERM)


def start_and_wait(arguments: list[str], closed: threading.Event) -> bytes:
    """Start Ray with `arguments` of `ray start`, wait until it ends or `closed` is set, and return what it has printed.

    Sends {"started": true} as soon as Ray runs. When `closed` is set, Ray still runs: end_all() ends it.
    """
    parent, is_started = os.getpid(), False
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(parent)
        )
        while child.poll() is None and not closed.wait(0.2):
            if not is_started and STARTED in read_log(log):
                is_started = True
                send_message({"started": True})
        return read_log(log)


def send_message(message: dict[str, Any]) -> None:
    """Print a message as JSON on a line that begins with MARK."""
    print(MARK + json.dumps(message), flush=True)


def describe_host() -> dict[str, Any]:
    """Return {ray, python, workers, from, at} of this host.

    `ray` is the version of Ray, "" if it is not installed, and `python` that of Python. `workers` is how many its cores
    and free memory allow. `from` and `at` are the addresses of the ssh connection's ends, "" without ssh.
    """
    try:
        from importlib import metadata

        version = metadata.version("ray")
    except Exception:
        version = ""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    ends = (connection[0], connection[2]) if len(connection) == 4 else ("", "")
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    workers = max(1, min(count_cores(), (memory - _GIB) // (_GIB // 2)))
    return {"ray": version, "python": platform.python_version(), "workers": workers, "from": ends[0], "at": ends[1]}


def count_cores() -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota (v2); at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # "max"
        return cores


def read_log(log: Any) -> bytes:
    """Return all bytes of an open log file; its position does not move."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `number` when its parent ends (PR_SET_PDEATHSIG).

    `parent` is the parent's pid; if it is the parent no more, sends the signal now.
    """
    _libc.prctl(1, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_all() -> None:
    """End every process below this process: SIGTERM, and after 8 s SIGKILL for at most 2 s more."""
    for number, patience in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience
        left = find_descendants()
        for pid in left:
            send_signal(pid, number)
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            reap()
            left = find_descendants()
            if number == signal.SIGKILL:
                for pid in left:
                    send_signal(pid, number)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; do nothing when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap() -> None:
    """Collect the children that have ended, so that no zombies stay."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def find_descendants() -> list[int]:
    """Return the pids of all processes below this process, nearest first."""
    parents = {}
    for name in os.listdir("/proc"):
        try:
            text = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
            parents[int(name)] = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    level, below = [os.getpid()], []
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        below += level
    return below
