"""Process families that end together, by Linux's prctl(2): no handler or thread of ours has to be alive for it.

On other systems these do nothing, and a killed parent leaves its children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Loaded at import: between fork and exec nothing may take the loader's lock.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process as soon as the thread that started it ends; survives exec, not fork.

    parent: its pid, where the caller knows it from before: it may have ended since.
    """
    if _libc is None:
        return
    parent = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # whose end sends no signal any more
        os.kill(os.getpid(), signal.SIGKILL)


def shield() -> None:
    """Hold SIGTERM and SIGINT back from this process and those it starts, until they unblock them.

    A scheduler sends them to every process of a job, where only some know what to do: DeepSpeed's launcher would kill
    its ranks 30 s later, ssh would cut the line to an agent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
