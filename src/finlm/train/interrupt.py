"""SIGTERM and SIGINT as a number that the loop looks at between two steps; the second signal ends the process at once.

Schedulers send one of them before they take a machine away. All ranks must agree on the step after which they stop, so
the number is gathered with the loss, and a signal to one rank is enough.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received = 0


def listen() -> None:
    """Note the signals from now on instead of ending."""
    for number in SIGNALS:
        signal.signal(number, _note)


def received() -> int:
    """The signal this process got; 0 = none."""
    return _received


def _note(number: int, _: FrameType | None) -> None:
    global _received
    _received = number
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
