"""Which rank is slower than the others, and stays so.

Every rank waits for the slowest in the collectives of backward, so whole steps take all of them the same time. What
differs is a rank's own work: reading its rows, and forward, which has no collective at ZeRO stages 0 to 2. At stage 3
forward waits for weights too, and only slow reading is told. Cost: two CUDA events a micro-step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from finlm.plan.plan import Plan
from finlm.recipe.schema_incidents import Straggler
from finlm.train.incidents import Incident

LEAST_SECONDS = 0.005  # a step; what costs less than that is not worth a word

T = TypeVar("T")


class Stopwatch:
    """Seconds of own work of this rank in a step."""

    def __init__(self, plan: Plan) -> None:
        self._counts_forward = plan.zero_stage < 3
        self._on_device = plan.device == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until the first counts, when the rows of all of them have been read.

        The host may be a whole step ahead of the device: then the copies of later ones wait until it takes more.
        """
        begun = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == 0:
                self._seconds += time.perf_counter() - begun
            yield batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block's time counts, the device's where there is one."""
        if not self._counts_forward:
            yield
        elif self._on_device:
            pair = _event(), _event()
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Seconds since the last call. The device has finished what was asked of it."""
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stragglers:
    """Judges the ranks' own seconds, step by step. Every rank sees the same numbers."""

    def __init__(self, settings: Straggler, plan: Plan) -> None:
        self.settings = settings
        self._where = [f"rank {rank} on {name}" for rank, name in enumerate(rank_hosts(plan))]
        self._recent: deque[Sequence[float]] = deque(maxlen=settings.steps)
        self._told: int | None = None

    def judge(self, seconds: Sequence[float]) -> Incident | None:
        """The slowest rank, when it has been slow for settings.steps; told once, and again when it is another."""
        self._recent.append(seconds)
        if len(seconds) < 2 or len(self._recent) < self.settings.steps:
            return None
        own = [statistics.median(column) for column in zip(*self._recent, strict=True)]
        slowest = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(value for rank, value in enumerate(own) if rank != slowest)
        if own[slowest] < self.settings.ratio * others or own[slowest] - others < LEAST_SECONDS:
            return None
        self._recent.clear()  # look again after as many steps
        if self._told == slowest:
            return None
        self._told = slowest
        return Incident(
            f"{self._where[slowest]} is slow",
            f"its own work takes {1000 * own[slowest]:,.0f} ms a step, the others' {1000 * others:,.0f} ms (medians of "
            f"{self.settings.steps} steps); all wait for it. `finlm doctor --allreduce`, and look at its clocks, "
            "temperature and other users (nvidia-smi -q -d PERFORMANCE)",
        )


def rank_hosts(plan: Plan) -> list[str]:
    """Each rank's host name."""
    return [host.name for host in plan.hosts for _ in range(host.slots)]
