"""Rows of events.jsonl from a training process: rank 0 writes, and a full disk ends no run.

On ENOSPC rows wait in memory and are written, in order, when there is room again.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, field
from typing import Any

from finlm.base.rundir import RunDir

FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Events:
    """The rows of one rank; all but rank 0's go nowhere."""

    run: RunDir
    rank: int
    waiting: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def record(self, kind: str, **fields: Any) -> None:
        """Add a row."""
        if self.rank != 0:
            return
        self.waiting.append((kind, fields))
        try:
            while self.waiting:
                waits, values = self.waiting[0]
                self.run.append_event(waits, **values)
                del self.waiting[0]
        except OSError as error:
            if error.errno not in FULL:
                raise
            if len(self.waiting) == 1:
                print("the disk is full: rows of events.jsonl wait until there is room", flush=True)
            self.waiting[-1][1].setdefault("time", round(time.time(), 3))  # when it happened, not when it is written
