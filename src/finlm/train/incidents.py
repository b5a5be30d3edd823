"""Trouble in a step, seen and decided alike on every rank, because all look at the same gathered numbers.

A step whose loss or gradient is not finite never reaches the weights: DeepSpeed's ZeRO optimizers leave weights,
moments and schedule alone when the gradient norm over all ranks is not finite (engine.py does so where there is no
ZeRO), and `weight` turns a loss that is not finite, or a spike that the recipe wants skipped, into such a gradient. It
is a device operation: the host does not wait.

A spike is a loss whose distance from the median of the recent ones is more than z robust deviations (1.4826 MAD). The
remedy of going back and leaving out the data is that of PaLM (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed

from finlm.recipe.schema_incidents import Incidents

RECENT_STEPS = 100  # of which incidents.stop_after may be skipped
FEWEST = 10  # losses without which no spike is told
LEAST_DEVIATION = 0.01  # of the median: where all losses are nearly equal, noise would be a spike

Then = Literal["go_on", "stop", "roll_back"]


@dataclass(frozen=True)
class Incident:
    """What an events.jsonl row says, and what the loop does about it. With `blame`, the batch's documents are named."""

    what: str
    detail: str
    then: Then = "go_on"
    blame: bool = False


class Skipped:
    """The steps of late that left the weights alone."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque()

    def count(self, step: int) -> int:
        """One more: how many of the last RECENT_STEPS they are now."""
        self._steps.append(step)
        while self._steps[0] <= step - RECENT_STEPS:
            self._steps.popleft()
        return len(self._steps)


class Watch:
    """Judges the steps of a run, one after the other."""

    def __init__(self, settings: Incidents, scales_loss: bool) -> None:
        """scales_loss: a gradient that is not finite only means that fp16's dynamic loss scale is too high."""
        self.settings, self.scales_loss = settings, scales_loss
        self._losses: deque[float] = deque(maxlen=settings.spike.window)
        self._skipped = Skipped()
        self._is_high = False
        self.limit = math.inf  # the loss above which the next step is a spike

    def recall(self, losses: Iterable[float]) -> None:
        """Take up the losses of steps before this launch."""
        self._losses.extend(losses)
        self.limit = self._limit()

    def weight(
        self, summed: torch.Tensor, loss: torch.Tensor, scale: float, supervised: int, last: bool
    ) -> torch.Tensor:
        """Factor of a micro-step's summed loss: scale, or NaN where the step must be skipped; fp32 scalar.

        summed: this micro-step's loss; loss: this rank's sum over the step so far; last: no micro-step follows.
        """
        fine = summed.detach().isfinite()
        if last and self.settings.spike.then == "skip" and self.limit < math.inf:
            total = loss.clone()
            distributed.all_reduce(total)
            fine &= total <= self.limit * supervised
        return torch.where(fine, scale, math.nan)

    def judge(self, step: int, loss: float, is_applied: bool, rank_losses: Iterable[float] = ()) -> Incident | None:
        """What is wrong with a finished step. rank_losses: the ranks' own sums, for naming them."""
        if not math.isfinite(loss):
            bad = [str(rank) for rank, own in enumerate(rank_losses) if not math.isfinite(own)]
            where = f" on rank {', '.join(bad[:8])}" if bad else ""
            return self._skip(step, f"the loss is not finite{where}", f"loss {loss}", blame=True)
        is_spike = loss > self.limit
        if is_spike and not is_applied and self.settings.spike.then == "skip":
            return self._skip(step, "loss spike, step skipped", self._height(loss), blame=True)
        if not is_applied:
            if self.scales_loss:
                return Incident("step skipped", "gradient overflow; the loss scale was lowered")
            return self._skip(step, "the gradient is not finite", f"loss {loss:.4f}", blame=True)
        found = self._spike(loss) if is_spike else None
        self._is_high = is_spike
        if found is None or found.then == "go_on":
            self._losses.append(loss)
            self.limit = self._limit()
        return found

    def _skip(self, step: int, what: str, detail: str, blame: bool) -> Incident:
        """The weights stayed as they were; too many of these end the run."""
        count, most = self._skipped.count(step), self.settings.stop_after
        detail += f"; the weights were left alone; {count} of the last {RECENT_STEPS} steps"
        if count > most:
            return Incident(what, f"{detail} is more than incidents.stop_after ({most})", "stop", blame)
        return Incident(what, f"{detail}, {most} are borne", blame=blame)

    def _spike(self, loss: float) -> Incident | None:
        """A spike that has changed the weights; of a stretch of high losses the first is told."""
        then: Then = "go_on"
        if self.settings.spike.then in ("stop", "roll_back"):
            then = "stop" if self.settings.spike.then == "stop" else "roll_back"
        elif self._is_high:
            return None
        return Incident("loss spike", self._height(loss), then, blame=True)

    def _height(self, loss: float) -> str:
        middle, deviation = _spread(self._losses)
        return (
            f"loss {loss:.4f} is {(loss - middle) / deviation:.1f} deviations above {middle:.4f}, "
            f"the median of the last {len(self._losses)} steps"
        )

    def _limit(self) -> float:
        if len(self._losses) < min(FEWEST, self.settings.spike.window):
            return math.inf
        middle, deviation = _spread(self._losses)
        return middle + self.settings.spike.z_score * deviation


def _spread(losses: Iterable[float]) -> tuple[float, float]:
    """(median, robust standard deviation)."""
    values = list(losses)
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(deviation, LEAST_DEVIATION * abs(middle))


class Jumps:
    """Which step's data a step reads: its own, until a roll back left some out. From the rollback rows of the run."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._jumps: list[tuple[int, int]] = []
        self.count = 0  # roll backs of the run, those too whose jump is void by now
        for row in rows:
            self.add(row["step"], row["data_step"])

    def add(self, step: int, data_step: int) -> None:
        """From `step` on, data is read from `data_step` on; what an earlier jump said of later steps is void."""
        self.count += 1
        self._jumps = [jump for jump in self._jumps if jump[0] < step] + [(step, data_step)]

    def data_step(self, step: int) -> int:
        """The data position, in steps."""
        for begin, data in reversed(self._jumps):
            if step >= begin:
                return data + step - begin
        return step
