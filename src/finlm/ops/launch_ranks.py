"""The ranks below a launcher as the kernel shows them in /proc: which there are, what they do, how they ended.

A rank is a child of DeepSpeed's launcher with RANK in its environment. The launcher reaps a dead rank up to a second
later and does not say which one died first, so the exit status is read from /proc in that second.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MISSED = -1000  # reaped before it was seen: the launcher's own exit code says more


class Ranks:
    """The ranks of one launcher."""

    def __init__(self, launcher: int, count: int) -> None:
        self.launcher, self.count = launcher, count
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def look(self) -> list[tuple[int, int]]:
        """Find new ranks; (rank, exit code) of those that have ended since the last look, signals negative."""
        found = []
        for rank, pid in self.pids.items():
            status = None if rank in self.ended else _status(pid)
            if rank not in self.ended and (status is None or status[0] in "ZX"):
                self.ended[rank] = MISSED if status is None else status[2]
                found.append((rank, self.ended[rank]))
        known = set(self.pids.values())
        for pid in children(self.launcher) if len(known) < self.count else ():
            number = None if pid in known else _rank(pid)
            if number is not None:
                self.pids[number] = pid
        return found

    def states(self) -> dict[int, str]:
        """The kernel's letter for each living rank: R, S, D (waits for a device), T (stopped)."""
        found = {rank: _status(pid) for rank, pid in self.pids.items() if rank not in self.ended}
        return {rank: status[0] for rank, status in found.items() if status}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every living rank."""
        for rank in self.states():
            os.kill(self.pids[rank], number)

    def family(self) -> list[int]:
        """The launcher, everything below it, and what this subreaper inherited; zombies left out."""
        mine = [pid for pid in descendants(os.getpid()) if (_status(pid) or "Z")[0] not in "ZX"]
        return mine


def children(parent: int) -> list[int]:
    """Processes whose parent is `parent`."""
    return [pid for pid, above in _parents().items() if above == parent]


def descendants(top: int) -> list[int]:
    """Processes below `top`, nearest first."""
    parents, level, found = _parents(), [top], []
    while level:
        level = [pid for pid, above in parents.items() if above in level]
        found += level
    return found


def reap(launcher: int) -> None:
    """Collect dead processes that this subreaper inherited; the launcher is its Popen's to collect."""
    for pid in children(os.getpid()):
        status = _status(pid)
        if pid != launcher and status and status[0] == "Z":
            os.waitpid(pid, os.WNOHANG)


def oom_kills() -> int | None:
    """Processes the kernel has killed for memory since it booted, in cgroups too; None where it does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def as_signal(code: int) -> int:
    """The launcher exits with 256 - N when a rank died of signal N; -N again, as subprocess writes it."""
    return code - 256 if code > 128 + 64 else code


def _parents() -> dict[int, int]:
    found = {}
    for entry in os.listdir("/proc"):
        status = _status(int(entry)) if entry.isdigit() else None
        if status:
            found[int(entry)] = status[1]
    return found


def _status(pid: int) -> tuple[str, int, int] | None:
    """State, parent and exit code (signals negative) of a process; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    status = int(fields[-1])
    return fields[0], int(fields[1]), -(status & 127) if status & 127 else status >> 8


def _rank(pid: int) -> int | None:
    """RANK of a process's environment; None before it is set, or where it is another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"RANK=")]
    return int(found[0]) if found and found[0].isdigit() else None
