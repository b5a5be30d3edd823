"""Use this host: processes, families of them that end together, the memory left, ports, requests over HTTP.

Families end by Linux's prctl(2), with no handler or thread of ours; on other systems these functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from finlm.base.errors import UserError

# Below the kernel's ephemeral range (32768 to 60999): from that, any connection may take a port between its choice here
# and its use by the ranks.
PORTS = range(20_000, 32_000)
TRIES = 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Loaded at import: between fork and exec nothing may take the loader's lock.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; survives exec, not fork.

    `parent` is the parent's pid, if the caller learnt it earlier; default: the parent now. If that process is no longer
    the parent, kills this process at once. Does nothing outside Linux.
    """
    if _libc is None:
        return
    parent = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # whose end sends no signal any more
        os.kill(os.getpid(), signal.SIGKILL)


def block_stop_signals() -> None:
    """Block SIGTERM and SIGINT in this process and in those it starts, until they unblock them.

    A scheduler sends them to every process of a job, and not all handle them: a launcher would end with its ranks, ssh
    would cut the connection to an agent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent dies (child subreaper; Linux only)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Status(NamedTuple):
    """A process in /proc: state letter, parent's pid, exit code (-N for signal N), start in clock ticks since boot."""

    state: str
    parent: int
    code: int
    born: str


def read_status(pid: int) -> Status | None:
    """Return the Status of a process from /proc; None when there is no such process or no /proc.

    The code is 0 while the process runs.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    code = int(fields[-1])
    return Status(fields[0], int(fields[1]), -(code & 127) if code & 127 else code >> 8, fields[19])


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended; False for a zombie, whose exit code nobody has collected."""
    status = read_status(pid)
    return status is not None and status.state not in "ZX"


def children(parent: int) -> list[int]:
    """Return the pids of the direct children of the process `parent`. Raises FileNotFoundError without /proc."""
    return [pid for pid, above in _read_parents().items() if above == parent]


def descendants(top: int) -> list[int]:
    """Return the pids of all descendants of the process `top`, children first. FileNotFoundError without /proc."""
    parents, level, below = _read_parents(), [top], []
    while level:
        level = [pid for pid, above in parents.items() if above in level]
        below += level
    return below


def _read_parents() -> dict[int, int]:
    """Return {pid: parent's pid} of all processes on this machine. Raises FileNotFoundError without /proc."""
    parents = {}
    for entry in os.listdir("/proc"):
        status = read_status(int(entry)) if entry.isdigit() else None
        if status:
            parents[int(entry)] = status.parent
    return parents


def send_signal(pid: int, number: int) -> None:
    """Send signal `number` to a process, or do nothing if it has ended. Raises PermissionError if not allowed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def python_path(code: Path, env: Mapping[str, str]) -> str:
    """Return the value of PYTHONPATH that has `code` before the directories of env's own PYTHONPATH, if it has any."""
    return os.pathsep.join(filter(None, (str(code), env.get("PYTHONPATH"))))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of memory this process can still use: MemAvailable, or less where a cgroup limits it.

    Page cache counts as free. `proc` and `cgroup` are where these file systems are mounted. Raises OSError without
    /proc/meminfo.
    """
    rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    least = int(rows["MemAvailable"].split()[0]) * 1024
    groups = proc / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, name = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        root = cgroup / "memory" if is_v1 else cgroup
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        group = root / name.lstrip("/")
        for directory in (group, *group.parents):  # the limit of every group above holds too
            if directory.is_relative_to(root):
                least = min(least, _bytes_left(directory, limit, used, least))
    return max(0, least)


def _bytes_left(directory: Path, limit: str, used: str, otherwise: int) -> int:
    """Return the bytes that a cgroup's limit leaves, inactive page cache included; `otherwise` if it has no limit.

    `limit` and `used` are the names of the files in the cgroup's directory to read. Returns `otherwise` too if they
    cannot be read. Less than 0 is possible.
    """
    try:
        most, now = (directory / limit).read_text().strip(), int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return otherwise
    if most == "max":
        return otherwise
    # In version 1 the use counts those below, and so must what of it is page cache.
    return int(most) - now + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def free_port(port: int) -> int | str:
    """Return `port` if it can be listened on, or for 0 a random free port of PORTS; else the system's reason as text.

    For 0, tries 100 ports. The port is free again when this returns, so another process may take it.
    """
    reason = ""
    # Not random's own state: two launches that seed it alike would choose the same port.
    for candidate in random.SystemRandom().sample(PORTS, TRIES) if port == 0 else (port,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store sets it too
            try:
                probe.bind(("", candidate))
                probe.listen()  # two sockets with SO_REUSEADDR may be bound to a port, but only one listens
                return candidate
            except OSError as error:
                reason = str(error.strerror)
    return reason


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at this address; port 0 takes any free port. Raises UserError if it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except (OSError, OverflowError) as error:
        fix = "give another --port or --host"
        raise UserError(f"cannot listen at {host}:{port}", evidence=str(error), fix=fix) from None
    return listening


def send(url: str, body: bytes | None, key: str | None, timeout: float) -> bytes:
    """POST the JSON `body` to the URL, or GET it for None; return at most 16 MiB of the answer.

    Sends the key, unless empty, as a bearer token. Each wait for the server ends after `timeout` seconds. Raises
    OSError (HTTPError for the status of an error or a redirect), HTTPException or ValueError.
    """
    from urllib.request import Request  # here, since it takes 30 ms to import

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with _opener().open(Request(url, body, headers), timeout=timeout) as response:
        return bytes(response.read(16 * 2**20))


@cache
def _opener() -> Any:
    """Return the opener, one a process, that follows no redirect: it would carry the key to another host."""
    from urllib import request as http

    opener = http.OpenerDirector()
    handlers: tuple[type[http.BaseHandler], ...] = (
        *(http.ProxyHandler, http.UnknownHandler, http.HTTPHandler, http.HTTPSHandler),
        *(http.HTTPDefaultErrorHandler, http.HTTPErrorProcessor),
    )
    for handler in handlers:
        opener.add_handler(handler())
    return opener
