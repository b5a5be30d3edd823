"""Find trouble in a step and decide what to do; ranks decide alike, because all look at the same gathered numbers.

A step whose loss or gradient is not finite never reaches the weights: DeepSpeed's ZeRO optimizers leave weights,
moments and schedule alone when the gradient norm over all ranks is not finite (zero/engine.py does so where there is no
ZeRO), and `weight` turns a loss that is not finite, or a spike to be skipped, into such a gradient without a wait of
the host. A rollback leaves out the data of a spike, as for PaLM (arXiv 2204.02311, 5.1).

A GPU that computes wrongly and raises no error spoils the weights of all (six interruptions in 54 days of Llama 3,
arXiv 2407.21783). So ranks with GPUs of one kind form a ring; now and then each computes the gradients of its
micro-batch and of the previous rank's, compared bit for bit, or by norms where kernels vary. Not compared: ZeRO-3,
other stages, GPUs alone of a kind.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import distributed

from finlm.plan.plan import Plan
from finlm.recipe.settings import IncidentSettings, Settings, StragglerSettings
from finlm.train.batches import Batches

RECENT_STEPS = 100  # of which incidents.stop_after may be skipped
FEWEST = 10  # losses without which no spike is told
LEAST_DEVIATION = 0.01  # of the median: where all losses are nearly equal, noise would be a spike
NEAR = 4.0  # times the minimum of the loss scale
LEAST_SECONDS = 0.005  # a step; what costs less than that is not worth a word
BITS = {2: torch.int16, 4: torch.int32}
# Where kernels vary, norms may differ by a share of the larger and one of the largest of all weights': gradients next
# to zero are rounding. A hundred times what two H100s differed by: 9.3e-5 of a norm, 9.4e-7 of the largest.
RELATIVE, ABSOLUTE = 0.01, 1e-4

Then = Literal["go_on", "stop", "roll_back"]
T = TypeVar("T")


@dataclass(frozen=True)
class Incident:
    """An event for events.jsonl and what the loop does `then`. With `blame`, the event names the batch's documents."""

    what: str
    detail: str
    then: Then = "go_on"
    blame: bool = False


class Skipped:
    """The numbers of recent steps that left the weights alone, oldest first."""

    def __init__(self, steps: Iterable[int] = ()) -> None:
        """Begin with the steps that were skipped before, oldest first."""
        self.steps = deque(steps)

    def count(self, step: int) -> int:
        """Add the skipped step `step`; return how many of the last RECENT_STEPS steps were skipped."""
        self.steps.append(step)
        while self.steps[0] <= step - RECENT_STEPS:
            self.steps.popleft()
        return len(self.steps)


class Watch:
    """Judges each step's loss and update, and remembers recent losses and skipped steps."""

    def __init__(self, settings: IncidentSettings, scales_loss: bool) -> None:
        """Begin without losses. With `scales_loss` (dynamic fp16 scale), gradient overflows do not count as skips."""
        self.settings, self.scales_loss = settings, scales_loss
        self.restore(())

    def state(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint; its items are the arguments of restore()."""
        return {"losses": list(self._losses), "skipped": list(self._skipped.steps), "is_high": self._is_high}

    def restore(self, losses: Iterable[float], skipped: Iterable[int] = (), is_high: bool = False) -> None:
        """Replace the state: losses of applied steps, numbers of skipped steps, whether the last loss was a spike."""
        self._losses: deque[float] = deque(losses, maxlen=self.settings.spike.window)
        self._skipped, self._is_high = Skipped(skipped), is_high
        self.limit = self._limit()  # the loss above which the next step is a spike

    def weight(
        self, summed: torch.Tensor, loss: torch.Tensor, scale: float, supervised: int, last: bool
    ) -> torch.Tensor:
        """Return the factor of a micro-step's loss: `scale` as a scalar tensor, or NaN to have the step skipped.

        It is NaN if `summed`, this micro-step's loss, is not finite, or, if `last` (of the step), when the step's loss
        is a spike to be skipped. `loss` is this rank's sum so far, `supervised` the step's labels on all ranks.
        Collective if `last`.
        """
        fine = summed.detach().isfinite()
        if last and self.settings.spike.then == "skip" and self.limit < math.inf:
            total = loss.clone()
            distributed.all_reduce(total)
            fine &= total <= self.limit * supervised
        return torch.where(fine, scale, math.nan)  # on the device: a Python `if` would wait for it

    def judge(self, step: int, loss: float, is_applied: bool, rank_losses: Iterable[float] = ()) -> Incident | None:
        """Return the incident of a finished step, or None; update recent losses, skipped steps and the spike limit.

        `loss` is the mean over all ranks; `rank_losses` has each rank's sum, to name ranks with NaN.
        """
        if not math.isfinite(loss):
            bad = [str(rank) for rank, total in enumerate(rank_losses) if not math.isfinite(total)]
            where = f" on rank {', '.join(bad[:8])}" if bad else ""
            return self._skip(step, f"the loss is not finite{where}", f"loss {loss}")
        is_spike = loss > self.limit
        if is_spike and not is_applied and self.settings.spike.then == "skip":
            return self._skip(step, "loss spike, step skipped", self._height(loss))
        if not is_applied:
            if self.scales_loss:
                return Incident("step skipped", "gradient overflow; the loss scale was lowered")
            return self._skip(step, "the gradient is not finite", f"loss {loss:.4f}")
        spike, then = None, self.settings.spike.then
        if is_spike and then in ("stop", "roll_back"):
            spike = Incident("loss spike", self._height(loss), then, blame=True)
        elif is_spike and not self._is_high:  # of several in a row the first is recorded
            spike = Incident("loss spike", self._height(loss), blame=True)
        self._is_high = is_spike
        if spike is None or spike.then == "go_on":  # else a rollback takes the step back
            self._losses.append(loss)
            self.limit = self._limit()
        return spike

    def _skip(self, step: int, what: str, detail: str) -> Incident:
        """Count a skipped step; return its incident, whose `then` is stop above incidents.stop_after skipped steps."""
        count, most = self._skipped.count(step), self.settings.stop_after
        detail += f"; the weights were left alone; {count} of the last {RECENT_STEPS} steps"
        if count > most:
            return Incident(what, f"{detail} is more than incidents.stop_after ({most})", "stop", blame=True)
        return Incident(what, f"{detail}, {most} are borne", blame=True)

    def _height(self, loss: float) -> str:
        """Return text that says how many deviations a loss is above the median of the recent ones."""
        middle, deviation = _median_and_deviation(self._losses)
        above = f"{(loss - middle) / deviation:.1f} deviations above {middle:.4f}"
        return f"loss {loss:.4f} is {above}, the median of the last {len(self._losses)} steps"

    def _limit(self) -> float:
        """Return the loss above which a step is a spike; infinity with less than FEWEST or spike.window losses."""
        if len(self._losses) < min(FEWEST, self.settings.spike.window):
            return math.inf
        middle, deviation = _median_and_deviation(self._losses)
        return middle + self.settings.spike.z_score * deviation


def _median_and_deviation(losses: Iterable[float]) -> tuple[float, float]:
    """Return (median, robust standard deviation: 1.4826 MAD, at least LEAST_DEVIATION of the median)."""
    values = list(losses)
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(deviation, LEAST_DEVIATION * abs(middle))


class Gradients:
    """Notes which parameters had a gradient that was not finite, from watch() on, at the cost of a reduction each."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Keep the model's parameters and a flag for each on `device`; nothing is watched yet."""
        self._parameters = dict(model.named_parameters())
        self._flags = torch.zeros(len(self._parameters), dtype=torch.uint8, device=device)
        self.is_watching = False

    def watch(self) -> None:
        """Register a hook on every parameter that checks its gradients from now on; do nothing when called again."""
        if not self.is_watching:
            self.is_watching = True
            for number, parameter in enumerate(self._parameters.values()):
                parameter.register_hook(partial(self._look, number, parameter))  # type: ignore[no-untyped-call]

    def _look(self, number: int, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Set the flag of parameter `number` if its gradient is not finite; the hook that watch() registers."""
        # SummingLinear has no gradient of its own in the middle micro-steps: it is in the sum already.
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            self._flags[number] |= ~gradient.isfinite().all()

    def name_bad(self) -> str:
        """Return a clause on the gradients of all ranks that were not finite since the last call; "" without any.

        It names the first and counts all. If nothing is watched yet, begins to watch and returns "". Collective.
        """
        if not self.is_watching:
            self.watch()
            return ""
        distributed.all_reduce(self._flags, op=distributed.ReduceOp.MAX)
        names = [name for name, flag in zip(self._parameters, self._flags.tolist(), strict=True) if flag]
        self._flags.zero_()
        # Backward runs from the loss to the embedding: the last in the model's order is where it began.
        return f"; it began in the gradient of {names[-1]} ({len(names)} of {len(self._parameters)})" if names else ""


class LossScale:
    """Watches fp16's dynamic loss scale; does nothing for other precisions or a fixed scale."""

    def __init__(self, engine: Any, recipe: Settings, gradients: Gradients) -> None:
        """Keep DeepSpeed's engine, and the Gradients of its module, and note its loss scale (remember)."""
        self._engine, self._recipe, self._gradients = engine, recipe, gradients
        self._is_last = False
        self.remember()

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's dynamic scaler or None; read anew each time, because loading a checkpoint replaces it."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def judge(self, is_applied: bool) -> Incident | None:
        """Return an incident if fp16's scaler skipped the step, to stop if the scale cannot fall, else None."""
        scaler = self._scaler
        if scaler is None:
            return None
        was_last, scale, least = self._is_last, scaler.cur_scale, scaler.min_scale
        self.remember()
        if is_applied:
            return None
        if was_last:
            return Incident(
                "Current loss scale already at minimum",
                f"fp16 overflows at scale {scale:g}{self._gradients.name_bad()}; {self._advice()}",
                "stop",
                blame=True,
            )
        detail = f"gradient overflow; the loss scale is now {scale:g}"
        if scale > NEAR * least:
            return Incident("step skipped", detail)
        near = f", its minimum is {least:g}: at the next overflow there the run ends{self._gradients.name_bad()}"
        return Incident("step skipped", f"{detail}{near}; {self._advice()}")

    def remember(self) -> None:
        """Note whether the next overflow ends the run; watch gradients near the smallest scale. Call after a load."""
        scaler = self._scaler
        if scaler is None:
            return
        scaler.raise_error_at_min_scale = False  # judge() ends the run instead
        is_spent = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
        self._is_last = is_spent and scaler.cur_scale == scaler.min_scale
        if scaler.cur_scale <= NEAR * scaler.min_scale:
            self._gradients.watch()

    def _advice(self) -> str:
        """Return text that says which keys of the recipe to change."""
        optim, batch = self._recipe.optim, self._recipe.batch
        return (
            f"lower optim.lr ({optim.lr:g}, try {optim.lr / 3:.2g}), lengthen optim.warmup_steps "
            f"({optim.warmup_steps}) or raise batch.tokens_per_step ({batch.tokens_per_step:,}); bf16 needs none"
        )


class Stopwatch:
    """Measures this rank's seconds of work in a step: reading rows and, below ZeRO-3, the forward passes."""

    def __init__(self, plan: Plan) -> None:
        """Begin at 0 seconds; the plan's ZeRO stage and device say how forward() measures."""
        # Whole steps take all ranks the same time, and so do ZeRO-3's forward passes, which wait for others' weights.
        self._counts_forward, self._on_device = plan.zero_stage < 3, plan.device == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and count the seconds until the first. Later waits are for the device, not for rows."""
        begun = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == 0:
                self._seconds += time.perf_counter() - begun
            yield batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Add the time of the block, on a GPU as the device measures it; add nothing at ZeRO-3."""
        if not self._counts_forward:
            yield
        elif self._on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds of work since the last call and begin again. The device must have finished its work."""
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


class Stragglers:
    """Finds a rank whose work takes settings.ratio times the others' and 5 ms more, by medians of settings.steps."""

    def __init__(self, settings: StragglerSettings, plan: Plan) -> None:
        """Begin without steps; the plan names the ranks' hosts."""
        self.settings = settings
        self._where = [f"rank {rank} on {name}" for rank, name in enumerate(plan.rank_hosts)]
        self._recent: deque[Sequence[float]] = deque(maxlen=settings.steps)
        self._told: int | None = None

    def judge(self, seconds: Sequence[float]) -> Incident | None:
        """Store each rank's seconds of work in a step; return an incident for a slow rank, unless the last named it."""
        self._recent.append(seconds)
        if len(seconds) < 2 or len(self._recent) < self.settings.steps:
            return None
        busy = [statistics.median(column) for column in zip(*self._recent, strict=True)]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        others = statistics.median(value for rank, value in enumerate(busy) if rank != slowest)
        if busy[slowest] < self.settings.ratio * others or busy[slowest] - others < LEAST_SECONDS:
            return None
        self._recent.clear()  # look again after as many steps
        if self._told == slowest:
            return None
        self._told = slowest
        return Incident(
            f"{self._where[slowest]} is slow",
            f"its own work takes {1000 * busy[slowest]:,.0f} ms a step, the others' {1000 * others:,.0f} ms (medians "
            f"of {self.settings.steps} steps); all wait for it. `finlm doctor --allreduce`, and look at its clocks, "
            "temperature and other users (nvidia-smi -q -d PERFORMANCE)",
        )


class Twins:
    """Compares the gradients of ranks with equal GPUs; every rank calls the same methods in the same steps."""

    def __init__(
        self, every_steps: int | None, plan: Plan, rank: int, module: torch.nn.Module, batches: Batches
    ) -> None:
        """Form the rings; check() does nothing at ZeRO-3, without a ring, or when every_steps is None."""
        self._every, self._plan, self._rank = every_steps, plan, rank
        self._module, self._batches = module, batches
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self._names, self._weights = [name for name, _ in named], [weight for _, weight in named]
        self._rings = rings(plan)
        self._is_exact = self._weights[0].device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        self._is_proven = not self._is_exact  # that these kernels give the same bits twice, where they promise it
        if plan.zero_stage == 3 or not self._rings:
            self._every = None

    def check(self, step: int, data_step: int) -> Incident | None:
        """Every every_steps steps, compare neighbours' gradients of the step's first micro-batches. Collective.

        Returns an incident if they differ, else None. Where bits are compared the first check also computes each rank's
        gradients twice: if these differ, that is the incident, and checks end.
        """
        if self._every is None or step % self._every:
            return None
        ring = next((ring for ring in self._rings if self._rank in ring), (self._rank,))
        before = ring[ring.index(self._rank) - 1]
        measured = self._measure(data_step, self._rank)
        again = measured if self._is_proven else self._measure(data_step, self._rank)
        seen = torch.stack((measured, again, self._measure(data_step, before)))
        every = [torch.empty_like(seen) for _ in range(self._plan.world_size)]
        distributed.all_gather(every, seen)
        return self._judge(torch.stack(every).cpu())

    def _judge(self, seen: torch.Tensor) -> Incident | None:
        """Return the incident of check(), or None.

        `seen` is [ranks, 3, weights]: what _measure() returned for each rank's micro-batch, for it once more, and for
        the previous rank's.
        """
        where = self._plan.rank_hosts
        if not self._is_proven:
            unlike = [rank for rank in range(len(seen)) if self._differ(seen[rank, 0], seen[rank, 1]).any()]
            if unlike:
                self._every = None
                detail = (
                    f"rank {unlike[0]} on {where[unlike[0]]} gives other bits for the same micro-batch, though its "
                    "kernels are deterministic: test it; ranks are not compared in this run"
                )
                return Incident("gradients differ from one computation to the next", detail)
            self._is_proven = True
        for ring in self._rings:
            differing = {rank: self._differ(seen[rank, 2], seen[ring[place - 1], 0]) for place, rank in enumerate(ring)}
            odd = odd_ranks(ring, [bool(mask.any()) for mask in differing.values()])
            if odd:
                mask = torch.stack(list(differing.values())).any(dim=0)
                first = self._names[int(mask.nonzero()[0])]
                names = " and ".join(f"rank {rank} on {where[rank]}" for rank in odd)
                detail = (
                    f"{int(mask.sum())} of {len(mask)} gradients of the same micro-batch differ on its neighbours, "
                    f"{first} first. Weights since the last good comparison may be spoilt: test the GPU "
                    "(`dcgmi diag -r 3`), leave the host out, and go on from a checkpoint before"
                )
                if len(odd) == 1:
                    return Incident(f"{names} computes wrongly", detail)
                return Incident(f"{names} compute different gradients", f"{detail}; no third rank tells which is wrong")
        return None

    def _measure(self, data_step: int, rank: int) -> torch.Tensor:
        """Return each weight's sum of gradient bits (int64), or norm (float64), of the first micro-batch of `rank`."""
        summed = self._module(*self._batches.read_first(data_step, rank))
        # Not backward(): the engine's hooks, which would add to its gradients, do not run.
        gradients = torch.autograd.grad(summed, self._weights)
        if self._is_exact:
            return torch.stack([each.view(BITS[each.element_size()]).sum(dtype=torch.int64) for each in gradients])
        return torch.stack([each.norm(dtype=torch.float32).double() for each in gradients])

    def _differ(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return for each weight whether two measures differ, bool [weights]: in a bit, or by more than kernels may."""
        if self._is_exact:
            return a != b
        larger = torch.maximum(a, b).nan_to_num(0.0, posinf=0.0)
        is_near = (a - b).abs() <= RELATIVE * larger + ABSOLUTE * larger.max()
        return ~is_near & (a.isfinite() | b.isfinite())  # an overflow of both is no difference


def rings(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each ring: at least two, with the same GPU kind (None = CPU) and equal micro-batches."""
    kinds: dict[tuple[str | None, int], list[int]] = {}
    gpus = [host.gpu for host in plan.hosts for _ in range(host.slots)]
    for rank, kind in enumerate(zip(gpus, plan.rank_micro_batches, strict=True)):
        kinds.setdefault(kind, []).append(rank)
    return [tuple(ranks) for ranks in kinds.values() if len(ranks) > 1]


def odd_ranks(ring: Sequence[int], disagrees: Sequence[bool]) -> list[int]:
    """Return the ranks that disagree with both neighbours, else all that disagree with either; [] if none do.

    disagrees[i] tells whether rank ring[i] got other gradients for the previous rank's micro-batch than that rank.
    """
    behind = [*disagrees[1:], disagrees[0]]
    both = [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left and right]
    return both or [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left or right]
