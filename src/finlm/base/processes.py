"""Control processes of this host: families that end together, blocked signals, ports.

Families end by Linux's prctl(2), with no handler or thread of ours; on other systems these functions do nothing.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Loaded at import: between fork and exec nothing may take the loader's lock.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; survives exec, not fork.

    parent: its pid, where the caller knows it from before; when that process has ended since, this process kills itself
    now.
    """
    if _libc is None:
        return
    parent = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # whose end sends no signal any more
        os.kill(os.getpid(), signal.SIGKILL)


def shield() -> None:
    """Block SIGTERM and SIGINT in this process and in those it starts, until they unblock them.

    A scheduler sends them to every process of a job, where only some know what to do: DeepSpeed's launcher would kill
    its ranks 30 s later, ssh would cut the connection to an agent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent dies (child subreaper)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def free_port(port: int) -> int | str:
    """Return `port` when it can be listened on, or some free port for 0; else the reason as text."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store sets it too
        try:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
        except OSError as error:
            return str(error.strerror)
