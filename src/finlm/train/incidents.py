"""Find trouble in a step and decide what to do; ranks decide alike, because all look at the same gathered numbers.

A step whose loss or gradient is not finite never reaches the weights: DeepSpeed's ZeRO optimizers leave weights,
moments and schedule alone when the gradient norm over all ranks is not finite (zero/engine.py does so where there is no
ZeRO), and `weight` turns a loss that is not finite, or a spike to be skipped, into such a gradient without a wait of
the host. Names of such gradients cost a reduction a parameter: they are watched only after a first incident or near
fp16's smallest loss scale. Going back from a spike and leaving out its data is PaLM's remedy (arXiv 2204.02311, 5.1).

A slow rank is known by its own work, reading and forward, as whole steps take all ranks the same time; at ZeRO stage 3
forward waits for weights too, and only slow reading is found. A GPU that computes wrongly and raises no error spoils
the weights of all (six interruptions in 54 days of Llama 3, arXiv 2407.21783): ranks of one kind form a ring, and now
and then each computes the gradients of its own micro-batch and of the one of the rank before it, compared bit for bit.
Not compared: ZeRO-3, whose weights only the engine's passes gather, other stages, a rank without a second of its kind.
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
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import distributed

from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Incidents, Straggler
from finlm.train.batches import Batches

RECENT_STEPS = 100  # of which incidents.stop_after may be skipped
FEWEST = 10  # losses without which no spike is told
LEAST_DEVIATION = 0.01  # of the median: where all losses are nearly equal, noise would be a spike

Then = Literal["go_on", "stop", "roll_back"]


@dataclass(frozen=True)
class Incident:
    """A row for events.jsonl and what the loop does next. With `blame`, the batch's documents are named."""

    what: str
    detail: str
    then: Then = "go_on"
    blame: bool = False


class Skipped:
    """The recent steps that left the weights alone."""

    def __init__(self, steps: Iterable[int] = ()) -> None:
        self.steps = deque(steps)

    def count(self, step: int) -> int:
        """Add a skipped step and return how many there were in the last RECENT_STEPS."""
        self.steps.append(step)
        while self.steps[0] <= step - RECENT_STEPS:
            self.steps.popleft()
        return len(self.steps)


class WatchState(TypedDict, total=False):
    """State of a Watch: losses of applied steps, skipped steps, whether the last loss was a spike."""

    losses: list[float]
    skipped: list[int]
    is_high: bool
    names_gradients: bool


class Watch:
    """Judges the steps of a run, one after the other."""

    def __init__(self, settings: Incidents, scales_loss: bool) -> None:
        """Begin without losses. scales_loss: a gradient that is not finite only means a too high fp16 loss scale."""
        self.settings, self.scales_loss = settings, scales_loss
        self.restore(())

    def state(self) -> WatchState:
        """Return the state as plain values for a checkpoint; restore() takes it."""
        return {"losses": list(self._losses), "skipped": list(self._skipped.steps), "is_high": self._is_high}

    def restore(self, losses: Iterable[float], skipped: Iterable[int] = (), is_high: bool = False) -> None:
        """Replace the state: losses of applied steps, numbers of skipped steps, whether the last loss was a spike."""
        self._losses: deque[float] = deque(losses, maxlen=self.settings.spike.window)
        self._skipped, self._is_high = Skipped(skipped), is_high
        self.limit = self._limit()  # the loss above which the next step is a spike

    def weight(
        self, summed: torch.Tensor, loss: torch.Tensor, scale: float, supervised: int, last: bool
    ) -> torch.Tensor:
        """Return the factor of a micro-step's summed loss: scale, or NaN where the step must be skipped; fp32 scalar.

        summed: this micro-step's loss; loss: this rank's sum over the step so far; last: whether it is the step's
        last micro-step, in which all ranks must call this.
        """
        fine = summed.detach().isfinite()
        if last and self.settings.spike.then == "skip" and self.limit < math.inf:
            total = loss.clone()
            distributed.all_reduce(total)
            fine &= total <= self.limit * supervised
        return torch.where(fine, scale, math.nan)

    def judge(self, step: int, loss: float, is_applied: bool, rank_losses: Iterable[float] = ()) -> Incident | None:
        """Return the incident of a finished step, or None; remember the step for the judgement of later ones.

        rank_losses: each rank's sum, to name those not finite.
        """
        if not math.isfinite(loss):
            bad = [str(rank) for rank, total in enumerate(rank_losses) if not math.isfinite(total)]
            where = f" on rank {', '.join(bad[:8])}" if bad else ""
            return self._skip(step, f"the loss is not finite{where}", f"loss {loss}", blame=True)
        is_spike = loss > self.limit
        if is_spike and not is_applied and self.settings.spike.then == "skip":
            return self._skip(step, "loss spike, step skipped", self._height(loss), blame=True)
        if not is_applied:
            if self.scales_loss:
                return Incident("step skipped", "gradient overflow; the loss scale was lowered")
            return self._skip(step, "the gradient is not finite", f"loss {loss:.4f}", blame=True)
        spike = self._spike(loss) if is_spike else None
        self._is_high = is_spike
        if spike is None or spike.then == "go_on":
            self._losses.append(loss)
            self.limit = self._limit()
        return spike

    def _skip(self, step: int, what: str, detail: str, blame: bool) -> Incident:
        """Count a skipped step; return its incident, which ends the run above incidents.stop_after."""
        count, most = self._skipped.count(step), self.settings.stop_after
        detail += f"; the weights were left alone; {count} of the last {RECENT_STEPS} steps"
        if count > most:
            return Incident(what, f"{detail} is more than incidents.stop_after ({most})", "stop", blame)
        return Incident(what, f"{detail}, {most} are borne", blame=blame)

    def _spike(self, loss: float) -> Incident | None:
        """Return the incident of a spike that changed the weights; None for a later one of the same stretch."""
        then = self.settings.spike.then
        if then in ("stop", "roll_back"):
            return Incident("loss spike", self._height(loss), then, blame=True)
        return None if self._is_high else Incident("loss spike", self._height(loss), blame=True)

    def _height(self, loss: float) -> str:
        """Return in words how far a loss is above the recent ones."""
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
    """Return (median, robust standard deviation)."""
    values = list(losses)
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(deviation, LEAST_DEVIATION * abs(middle))


NEAR = 4.0  # times the minimum


class Gradients:
    """Notes which parameters had a gradient that was not finite, from watch() on, since the last name_bad()."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._parameters = dict(model.named_parameters())
        self._flags = torch.zeros(len(self._parameters), dtype=torch.uint8, device=device)
        self.is_watching = False

    def watch(self) -> None:
        """Hook every parameter, so that its gradients are looked at from now on."""
        if not self.is_watching:
            self.is_watching = True
            for number, parameter in enumerate(self._parameters.values()):
                parameter.register_hook(partial(self._look, number, parameter))  # type: ignore[no-untyped-call]

    def _look(self, number: int, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        # SummingLinear has no gradient of its own in the middle micro-steps: it is in the sum already.
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            self._flags[number] |= ~gradient.isfinite().all()

    def name_bad(self) -> str:
        """Return a clause on the gradients that were not finite on any rank, and clear what was noted; "" for none.

        The first call only begins to watch. Collective.
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

    def __init__(self, engine: Any, recipe: Recipe, gradients: Gradients) -> None:
        self._engine, self._recipe, self._gradients = engine, recipe, gradients
        self._is_last = False
        self.remember()

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's dynamic scaler or None; read anew each time, because loading a checkpoint replaces it."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def judge(self, is_applied: bool) -> Incident | None:
        """Return the incident of a step that DeepSpeed skipped; None if applied or of a fixed scale. Collective."""
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
        """Note whether the next overflow is the last, and watch gradients near the smallest scale; also after a load.

        Keeps DeepSpeed from raising an error at that scale: judge() ends the run instead.
        """
        scaler = self._scaler
        if scaler is None:
            return
        scaler.raise_error_at_min_scale = False  # judge() ends the run instead
        is_spent = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
        self._is_last = is_spent and scaler.cur_scale == scaler.min_scale
        if scaler.cur_scale <= NEAR * scaler.min_scale:
            self._gradients.watch()

    def _advice(self) -> str:
        """Return in words which keys of the recipe to change."""
        optim, batch = self._recipe.optim, self._recipe.batch
        return (
            f"lower optim.lr ({optim.lr:g}, try {optim.lr / 3:.2g}), lengthen optim.warmup_steps "
            f"({optim.warmup_steps}) or raise batch.tokens_per_step ({batch.tokens_per_step:,}); bf16 needs none"
        )


LEAST_SECONDS = 0.005  # a step; what costs less than that is not worth a word

T = TypeVar("T")


class Stopwatch:
    """Measures the seconds of a step in which this rank worked itself: reading rows and, below ZeRO-3, forward."""

    def __init__(self, plan: Plan) -> None:
        self._counts_forward = plan.zero_stage < 3
        self._on_device = plan.device == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the time until the first counts, when the rows of all of them have been read.

        The host may be a whole step ahead of the device: then the copies of later ones wait until it takes more.
        """
        begun = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == 0:
                self._seconds += time.perf_counter() - begun
            yield batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Add the block's time, measured on the device where there is one; nothing at ZeRO-3."""
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
        """Return the seconds since the last call and begin again. The device must have finished its work."""
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stragglers:
    """Judges the seconds of work of all ranks, step by step. Every rank sees the same numbers."""

    def __init__(self, settings: Straggler, plan: Plan) -> None:
        self.settings = settings
        self._where = [f"rank {rank} on {name}" for rank, name in enumerate(rank_hosts(plan))]
        self._recent: deque[Sequence[float]] = deque(maxlen=settings.steps)
        self._told: int | None = None

    def judge(self, seconds: Sequence[float]) -> Incident | None:
        """Note all seconds; return an incident when a rank was slow for settings.steps, unless it was named last."""
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


def rank_hosts(plan: Plan) -> list[str]:
    """Return each rank's host name, in the order of the ranks."""
    return [host.name for host in plan.hosts for _ in range(host.slots)]


BITS = {2: torch.int16, 4: torch.int32}


class Twins:
    """Compares the gradients of neighbours; every rank calls the same methods in the same steps."""

    def __init__(
        self, every_steps: int | None, plan: Plan, rank: int, module: torch.nn.Module, batches: Batches
    ) -> None:
        """Form the rings; no check will run at ZeRO-3, without a ring or where every_steps is None."""
        self._every, self._plan, self._rank = every_steps, plan, rank
        self._module, self._batches = module, batches
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self._names, self._weights = [name for name, _ in named], [weight for _, weight in named]
        self._rings = rings(plan)
        self._is_proven = False  # that these kernels give the same bits twice
        if plan.zero_stage == 3 or not self._rings:
            self._every = None

    def check(self, step: int, data_step: int) -> Incident | None:
        """Compare neighbours' gradients of a step's first micro-batches, every every_steps steps; collective.

        Return an incident where they differ, or None. Kernels that give one rank other bits the second time are an
        incident too, and end the checks. data_step: the step whose data this step read.
        """
        if self._every is None or step % self._every:
            return None
        ring = next((ring for ring in self._rings if self._rank in ring), (self._rank,))
        before = ring[ring.index(self._rank) - 1]
        checksums = self._checksums(data_step, self._rank)
        again = checksums if self._is_proven else self._checksums(data_step, self._rank)
        seen = torch.stack((checksums, again, self._checksums(data_step, before)))
        every = [torch.empty_like(seen) for _ in range(self._plan.world_size)]
        distributed.all_gather(every, seen)
        return self._judge(torch.stack(every).cpu())

    def _judge(self, seen: torch.Tensor) -> Incident | None:
        """Return an incident that names the ranks whose gradients differ, or None; end the checks where kernels vary.

        seen: [ranks, 3, weights], checksums of each rank's micro-batch, of that repeated, of the rank before's.
        """
        where = rank_hosts(self._plan)
        if not self._is_proven:
            unlike = [rank for rank in range(len(seen)) if not torch.equal(seen[rank, 0], seen[rank, 1])]
            if unlike:
                self._every = None
                detail = (
                    f"rank {unlike[0]} on {where[unlike[0]]} gives other bits for the same micro-batch: its kernels "
                    "are not deterministic, or it computes wrongly; ranks are not compared in this run"
                )
                return Incident("gradients differ from one computation to the next", detail)
            self._is_proven = True
        for ring in self._rings:
            differing = {rank: seen[rank, 2] != seen[ring[place - 1], 0] for place, rank in enumerate(ring)}
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

    def _checksums(self, data_step: int, rank: int) -> torch.Tensor:
        """Return the sum of the bits of every gradient of a rank's first micro-batch: int64 [weights]."""
        summed = self._module(*self._batches.read_first(data_step, rank))
        # Not backward(): the engine's hooks, which would add to its gradients, do not run.
        gradients = torch.autograd.grad(summed, self._weights)
        return torch.stack([each.view(BITS[each.element_size()]).sum(dtype=torch.int64) for each in gradients])


def rings(plan: Plan) -> list[tuple[int, ...]]:
    """Return the rings of ranks that can be compared: of one kind of GPU and with equal micro-batches, two at least."""
    kinds: dict[tuple[str | None, int], list[int]] = {}
    gpus = [host.gpu for host in plan.hosts for _ in range(host.slots)]
    for rank, kind in enumerate(zip(gpus, plan.rank_micro_batches, strict=True)):
        kinds.setdefault(kind, []).append(rank)
    return [tuple(ranks) for ranks in kinds.values() if len(ranks) > 1]


def odd_ranks(ring: Sequence[int], disagrees: Sequence[bool]) -> list[int]:
    """Return the ranks that disagree with both neighbours; where there is none, all that disagree with one of them.

    disagrees: for each rank of the ring whether its gradients for the rank before are not that rank's.
    """
    behind = [*disagrees[1:], disagrees[0]]
    both = [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left and right]
    return both or [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left or right]
