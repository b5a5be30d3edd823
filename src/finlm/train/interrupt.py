"""SIGTERM and SIGINT as a number that the loop looks at between two steps; one that comes later ends the process.

Schedulers send one of them before they take a machine away. All ranks must agree on the step after which they stop, so
the number is gathered with the loss, and a signal to one rank is enough. One request may reach a rank several times:
from the scheduler, which sends it to every process, and from finlm, which passes its own on.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_SECONDS = 5.0
_received = 0
_since = 0.0


def listen() -> None:
    """Note the signals from now on instead of ending; also one that was held back while this process began."""
    for number in SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by launch_agent


def received() -> int:
    """The signal this process got; 0 = none."""
    return _received


def _note(number: int, _: FrameType | None) -> None:
    global _received, _since
    if not _received:
        _received, _since = number, time.monotonic()
    elif time.monotonic() - _since > ONE_REQUEST_SECONDS:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
