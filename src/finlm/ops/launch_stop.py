"""Signals to `finlm train`, noted for the ranks: they finish their step, write a checkpoint and exit.

SIGTERM, SIGINT, and SIGHUP of a terminal that is closed, which `nohup` keeps ignored; the ranks get that as SIGTERM.
The first signal is only noted, another one ends everything at once, unless it follows within a second: `timeout` sends
one twice. Schedulers send SIGTERM some time before they take the machines away; launch.grace_seconds must be less than
that time.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from finlm.base import screen
from finlm.ops.launch_session import Session

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ONE_REQUEST_SECONDS = 1.0
RESUMES = "the same command resumes from the last complete checkpoint"


@dataclass
class Stop:
    """What was asked of this process, since when, and since when its ranks know (time.monotonic())."""

    number: int = 0
    since: float = 0.0
    passed_on: float | None = None

    def look(self, sessions: Sequence[Session], has_stepped: bool, grace_seconds: float, now: float) -> None:
        """Pass a new signal on. Ends this process when there is nothing to save yet, or the ranks took too long."""
        if not self.number:
            return
        name = signal.Signals(self.number).name
        if not has_stepped:
            screen.say(f"{name}: ended before the first step; the same command goes on")
            sys.exit(128 + self.number)
        if self.passed_on is None:
            self.passed_on = now
            for session in sessions:  # first: words on a screen are not needed for a checkpoint
                session.say(do="stop", signal=signal.SIGTERM if self.number == signal.SIGHUP else self.number)
            screen.say(f"{name}: the ranks finish their step and write a checkpoint (again: end at once)")
        elif now - self.passed_on > grace_seconds:
            screen.say(f"{name}: no checkpoint within {grace_seconds:g} s (launch.grace_seconds); {RESUMES}")
            sys.exit(128 + self.number)

    def ended(self, step: int | None, exit_code: int) -> None:
        """The ranks have stopped with a checkpoint: end this process as they ended."""
        screen.say(f"stopped after step {step or 0:,} with a checkpoint; the same command resumes from it")
        sys.exit(128 + self.number if self.number else exit_code)


@contextmanager
def noted() -> Iterator[Stop]:
    """Note the signals in the block instead of ending; a later one raises SystemExit."""
    stop = Stop()

    def note(number: int, _: FrameType | None) -> None:
        if not stop.number:
            stop.number, stop.since = number, time.monotonic()
        elif time.monotonic() - stop.since > ONE_REQUEST_SECONDS:
            screen.say(f"ended at once; {RESUMES}")
            sys.exit(128 + number)

    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
