"""What stands between a step and the next: judge it, name what was in it, and act on what the recipe says.

The decisions are in incidents.py, overflow.py and straggler.py; this is where they meet the engine, the data and
events.jsonl. Every rank calls the same methods with the same gathered numbers, so all of them act alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from finlm.base.rundir import RunDir
from finlm.data import naming
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.train.batches import Batches
from finlm.train.incidents import Incident, Jumps, Then, Watch
from finlm.train.overflow import Gradients, LossScale
from finlm.train.straggler import Stopwatch, Stragglers, rank_hosts

NAMED_DOCUMENTS = 20


@dataclass(frozen=True)
class Seen:
    """What all ranks know of a step after its gather: the mean loss, and by rank its sum and seconds of own work."""

    loss: float
    rank_losses: Sequence[float]
    own_seconds: Sequence[float]


class Guard:
    """The watch over a run."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        plan: Plan,
        engine: Any,
        batches: Batches,
        shards: Shards,
        record: Callable[..., None],
        load_former: Callable[[int], int | None],
    ) -> None:
        """record(kind, **fields) writes a row. load_former(n) loads the newest checkpoint of a step <= n; its step."""
        self.run, self.plan, self.engine, self.batches, self.shards = run, plan, engine, batches, shards
        self.settings, self.record, self.load_former = recipe.incidents, record, load_former
        scales_loss = plan.precision == "fp16" and recipe.train.fp16.loss_scale == 0
        self.watch = Watch(recipe.incidents, scales_loss)
        self.gradients = Gradients(engine.module, batches.device)
        self.loss_scale = LossScale(engine, recipe, self.gradients)
        self.stopwatch = Stopwatch(plan)
        self.stragglers = Stragglers(recipe.incidents.straggler, plan)
        self.jumps = Jumps()
        self._micro_losses: list[torch.Tensor] = []

    def resume(self, step: int) -> None:
        """Take up what former launches of the run left: data that roll backs left out, and the losses until step."""
        told: list[Any] = [_former(self.run, step) if distributed.get_rank() == 0 else None]
        distributed.broadcast_object_list(told)
        rollbacks, losses = told[0]
        self.jumps = Jumps(rollbacks)
        self.watch.recall(losses)
        self.loss_scale.remember()

    def data_step(self, step: int) -> int:
        """Which step's data this step reads."""
        return self.jumps.data_step(step)

    def read(self, data_step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The micro-batches of this rank."""
        self._micro_losses.clear()
        return self.stopwatch.reading(self.batches.read(data_step))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the model's forward pass, for the time it takes."""
        with self.stopwatch.forward():
            yield

    def weight(self, summed: torch.Tensor, loss: torch.Tensor, scale: float, supervised: int) -> torch.Tensor:
        """Factor of a micro-step's summed loss; NaN makes the step one that is skipped. See Watch.weight."""
        self._micro_losses.append(summed.detach())
        last = len(self._micro_losses) == self.plan.gradient_accumulation_steps
        return self.watch.weight(summed, loss, scale, supervised, last)

    def judge(self, step: int, data_step: int, seen: Seen) -> Then:
        """What the loop does after this step; incidents are recorded."""
        is_applied = bool(self.engine.was_step_applied())
        scale = self.loss_scale.judge(is_applied)
        found = self.watch.judge(step, seen.loss, is_applied, seen.rank_losses)
        # A spike is skipped by a NaN, which is no overflow though the loss scale takes it for one.
        is_skipped_spike = found is not None and found.what == "loss spike, step skipped"
        if scale is not None and not is_skipped_spike and (scale.then == "stop" or math.isfinite(seen.loss)):
            found = scale
        slow = self.stragglers.judge(seen.own_seconds)
        for incident in (found, slow):
            if incident is not None:
                self._tell(step, data_step, incident, is_applied)
        if found is not None and found.then == "roll_back" and self.jumps.count >= self.settings.stop_after:
            detail = f"the run was rolled back {self.jumps.count} times already (incidents.stop_after)"
            self.record("incident", step=step, what="too many loss spikes", detail=detail)
            return "stop"
        return found.then if found is not None else "go_on"

    def roll_back(self, step: int, data_step: int) -> int | None:
        """Go back to a checkpoint before this step and leave out the data since; the step to go on from, if any."""
        at_most = step - 1 - self.settings.spike.roll_back_steps
        found = self.load_former(at_most)
        if found is None:
            detail = f"no checkpoint of step {max(0, at_most):,} or before to go back to; the run goes on"
            self.record("incident", step=step, what="not rolled back", detail=detail)
            return None
        self.loss_scale.remember()
        self.jumps.add(found, data_step + 1)
        self.record("rollback", step=found, origin=step, data_step=data_step + 1)
        return found

    def _tell(self, step: int, data_step: int, incident: Incident, is_applied: bool) -> None:
        names = "" if is_applied or "began in" in incident.detail else self.gradients.words()
        documents, where = self._blamed(data_step) if incident.blame else ([], "")
        detail = f"{incident.detail}{names}{where}"
        more = {"documents": documents} if documents else {}
        self.record("incident", step=step, what=incident.what, detail=detail, **more)

    def _blamed(self, data_step: int) -> tuple[list[dict[str, Any]], str]:
        """The documents of the micro-batch with the highest loss, on rank 0, and a clause that names them."""
        own = torch.stack(self._micro_losses)
        every = [torch.empty_like(own) for _ in range(self.plan.world_size)]
        distributed.all_gather(every, own)
        if distributed.get_rank() != 0:
            return [], ""
        ids = self.batches.row_ids(data_step)
        worst, at, rank, first = -math.inf, 0, 0, 0
        rows = ids[0][:0]
        for number, size in enumerate(self.plan.rank_micro_batches):
            for micro, total in enumerate(every[number].tolist()):
                part = ids[micro, first : first + size]
                mean = total / max(1, self.batches.rows.supervised(part))
                mean = mean if math.isfinite(mean) else math.inf
                if mean > worst:
                    worst, at, rank, rows = mean, micro, number, part
            first += size
        documents = list(naming.documents(self.batches.rows, self.shards, rows.tolist()))
        start = documents[0]
        shown = f"loss {worst:.2f}" if math.isfinite(worst) else "not finite"
        where = (
            f"; highest in micro-step {at} of rank {rank} on {rank_hosts(self.plan)[rank]} ({shown}), "
            f"{len(documents)} documents, {start['source']} {start['shard']} #{start['document']} "
            f"“{start['text'][:24]}” the first"
        )
        return documents[:NAMED_DOCUMENTS], where


def _former(run: RunDir, step: int) -> tuple[list[dict[str, Any]], list[float]]:
    """(rollback rows, losses in order until step) of events.jsonl."""
    rollbacks, losses = [], dict[int, float]()
    for row in run.read_events():
        if row["kind"] == "rollback":
            rollbacks.append(row)
        if row["kind"] in ("start", "rollback"):
            losses = {number: loss for number, loss in losses.items() if number <= row["step"]}
        elif row["kind"] == "step" and row["loss"] is not None and row["step"] <= step:
            losses[row["step"]] = row["loss"]
    return rollbacks, list(losses.values())
