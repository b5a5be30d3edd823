"""Pretrain the model of a run directory with a plain DeepSpeed loop, as its plan says; record events.jsonl.

The loss of a step is the sum over all ranks and micro-steps divided by their supervised tokens, so micro-batch,
accumulation and world size change memory and speed but not the gradient.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finlm.base.rundir import RunDir
from finlm.recipe.settings import Settings
from finlm.rows import packing
from finlm.rows.packing import NamedDocument
from finlm.train import batches, entry
from finlm.train.batches import Batches
from finlm.train.entry import Rank, is_due, open_rank, versions
from finlm.train.incidents import Gradients, Incident, LossScale, Stopwatch, Stragglers, Then, Twins, Watch
from finlm.train.model import kernels
from finlm.train.model.causal_lm import attention_kernel, load, model_config
from finlm.train.zero.checkpoint import Checkpoints
from finlm.train.zero.engine import initialize
from finlm.train.zero.storage import State


@dataclass
class Setup(Rank[Settings]):
    """A Rank with the objects of its training loop: DeepSpeed engine, batches, checkpoints, and a Guard as `guard`."""

    engine: Any
    batches: Batches
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        """Make the Guard, which needs all other fields."""
        self.guard = Guard(self)

    def end(self, step: int, status: str, exit_code: int) -> int:
        """Finish the checkpoint being written, record the event `end`, wait for all ranks, and return `exit_code`."""
        self.checkpoints.close()
        return super().end(step, status, exit_code)


def main(run_path: Path, recipe: Settings) -> int:
    """Train the run in `run_path`, whose recipe is `recipe`, by prepare() and loop(); return the exit code. Collective.

    Raises UserError when the run directory, its data, first weights or checkpoints cannot be used.
    """
    s = prepare(run_path, recipe)
    with kernels.attention_backends(s.plan):
        return loop(s)


def loop(s: Setup) -> int:
    """Train from the newest checkpoint, or from step 0 without any, to the plan's last step; return the exit code.

    The code is 0, 1 when an incident ends the run, or 128 + signal after a signal, which saves a checkpoint first.
    Records events, evaluates and saves when due, and rolls back as the guard says. Collective. Freezes the objects that
    exist now out of garbage collection. Raises UserError as Checkpoints.resume() does.
    """
    step = s.checkpoints.resume()
    s.guard.resume(step)
    attention = attention_kernel(s.recipe, s.plan, s.engine.module.config)
    s.events.record("start", step=step, attention=attention, **versions(s.plan))
    if step == 0:
        evaluate(s, step)
    gc.collect()
    gc.freeze()  # the long-lived objects of set-up never need scanning again
    while step < s.plan.steps:
        begun = time.monotonic()
        lr = s.engine.get_lr()[0]
        data_step = s.guard.data_step(step)
        supervised = s.batches.supervised(data_step)
        scale = s.plan.world_size * s.plan.gradient_accumulation_steps / supervised
        loss = torch.zeros((), device=s.batches.device)
        for batch in s.guard.read(data_step):
            with s.guard.stopwatch.forward():
                summed = s.engine(*batch)  # the sum over labels: kernels.swap_loss replaced the model's forward
            loss += summed.detach()  # stays on the device: an .item() here would make the host wait in each micro-step
            weight = s.guard.weight(summed, loss, scale, supervised)
            s.engine.backward(summed * weight)  # DeepSpeed divides by micro-steps and averages over ranks
            s.engine.step()
        step += 1
        s.batches.read_ahead(s.guard.data_step(step))  # before log_step, which waits for the device
        done = log_step(s, step, data_step, loss, lr, begun)
        interrupted = done.measured.signal
        then = s.guard.judge(step, data_step, done)
        if then == "stop":
            return s.end(step, "failed", 1)
        if then == "roll_back" and (restored := s.guard.roll_back(step, data_step)) is not None:
            step = restored
            continue
        s.checkpoints.poll()
        last = step == s.plan.steps
        if last or is_due(step, s.recipe.eval.every_steps):
            evaluate(s, step)
        if last:
            record_proof(s, step)
        # After the evaluation and the proof: a run that resumes from this checkpoint does not repeat them.
        s.checkpoints.save_if_due(step, at_once=last or bool(interrupted))
        if interrupted and not last:
            return s.end(step, "interrupted", 128 + interrupted)
    return s.end(step, "finished", 0)


def prepare(run_path: Path, recipe: Settings) -> Setup:
    """Join the process group and build this rank's model, engine, batches and checkpoints from the run directory.

    Installs signal handlers and removes half-written checkpoints. Raises UserError when run_path is no run directory,
    or its plan, shards or first weights cannot be used; RuntimeError when the plan has another number of ranks.
    """
    r = open_rank(run_path, recipe)
    plan, shards = r.plan, r.shards
    config = model_config(recipe, plan, shards.bos_id, shards.eos_id)
    model = load(recipe, plan, r.run.ds_config, config, shards.tokenizer)
    kernels.swap(model, plan)  # first: ZeRO-3 reads the leaf modules that it marks
    engine = initialize(model, plan, r.run.ds_config)
    rows = packing.open_rows(shards, plan.sequence_length, recipe.data.packing)
    run_rows = plan.steps * plan.tokens_per_step // plan.sequence_length
    order = packing.order(rows.source_ranges(), recipe.data.mixture, run_rows, plan.sequence_length, recipe.train.seed)
    batches = Batches(rows, order, plan, r.rank, recipe.data.document_masks)
    checkpoints = Checkpoints(engine, r.run, plan, recipe.checkpoint, r.events)
    return Setup(**vars(r), engine=engine, batches=batches, checkpoints=checkpoints)


def log_step(s: Setup, step: int, data_step: int, loss: torch.Tensor, lr: float, begun: float) -> entry.Step:
    """Gather the finished step `step` (from 1) from all ranks, record the event `step`, and return it. Collective.

    `data_step` is the 0-based step whose rows were read, `loss` this rank's loss summed over its labels, on the device,
    and `begun` time.monotonic() at the start of the step. Resets checksum and stopwatch. Waits for the device.
    """
    supervised, read = s.batches.supervised(data_step), s.batches.tokens_read(data_step)
    # In this order: the stopwatch is read when the device is done.
    waited, crc = loss.item(), s.batches.checksum.take()
    measured = entry.measure_step(s.plan, waited, crc, begun, s.guard.stopwatch.take())
    done = entry.Step(step, sum(measured.losses) / supervised, lr, supervised, read, measured)
    s.events.record("step", **done.row(s.plan, s.engine))
    return done


def evaluate(s: Setup, step: int) -> None:
    """Record the event `eval` of the held-out rows, if there are any; leave the engine in train mode. Collective."""
    if not s.shards.split("held_out"):
        return
    s.engine.eval()
    result = batches.evaluate(s.engine, s.shards, s.recipe, s.plan.rank_micro_batches, s.batches.device)
    s.engine.train()
    s.events.record("eval", step=step, **result)


def record_proof(s: Setup, step: int) -> None:
    """Record the event `proof`: ids and the model's mean loss on them, which its export must reproduce. Collective."""
    ids = batches.proof_ids(s.shards, s.recipe)
    s.engine.eval()
    shape = s.plan.rank_micro_batches[s.rank], s.plan.sequence_length
    loss = batches.loss_of(ids, s.engine, shape, s.recipe, s.batches.device)
    s.engine.train()
    s.events.record("proof", step=step, ids=ids, loss=loss)


NAMED_DOCUMENTS = 20


class Guard:
    """Judges each finished step, records its incidents, and skips, stops or rolls back as recipe.incidents says.

    Every rank calls the same methods with the same gathered numbers, so all of them act alike.
    """

    def __init__(self, s: Setup) -> None:
        """Create the judges of a run; set its Checkpoints' watch_state and rolls_back."""
        self.s, self.settings = s, s.recipe.incidents
        s.checkpoints.watch_state, s.checkpoints.rolls_back = self.state, self.settings.spike.then == "roll_back"
        scales_loss = s.plan.precision == "fp16" and s.recipe.train.fp16.loss_scale == 0
        self.watch = Watch(self.settings, scales_loss)
        self.gradients = Gradients(s.engine.module, s.batches.device)
        self.loss_scale = LossScale(s.engine, s.recipe, self.gradients)
        self.stopwatch = Stopwatch(s.plan)
        self.stragglers = Stragglers(self.settings.straggler, s.plan)
        self.twins = Twins(self.settings.corruption.every_steps, s.plan, s.rank, s.engine.module, s.batches)
        self.rollbacks: list[tuple[int, int]] = []  # (step, data step that it reads) of each, oldest first
        self._micro_losses: list[torch.Tensor] = []

    def state(self) -> State:
        """Return the state to save in a checkpoint: that of the watch, and whether gradients are watched."""
        # Without the speeds of ranks: they depend on hosts and hours, and would change the bytes of an equal training.
        return {**self.watch.state(), "names_gradients": self.gradients.is_watching}

    def resume(self, step: int) -> None:
        """Restore the watch after the checkpoints' resume() to `step`, and read the run's rollbacks. Collective."""
        self.rollbacks = self._restore(step)

    def _restore(self, step: int) -> list[tuple[int, int]]:
        """Restore the watch from the loaded checkpoint of `step`; return (step, data step) of all recorded rollbacks.

        If the checkpoint has no watch (step 0, an earlier version), the losses up to `step` come from events.jsonl.
        Watches gradients if the checkpoint did, and remembers the engine's loss scale. Collective.
        """
        history: list[Any] = [_read_history(self.s.run, step) if distributed.get_rank() == 0 else None]
        distributed.broadcast_object_list(history)  # without a shared disk only rank 0's host has the events
        rollbacks, losses = history[0]
        saved = dict(self.s.checkpoints.watch_loaded or {"losses": losses})
        if saved.pop("names_gradients", False):
            self.gradients.watch()
        self.watch.restore(**saved)
        self.loss_scale.remember()
        return list(rollbacks)

    def data_step(self, step: int) -> int:
        """Return the 0-based index of the step whose data `step` reads; they differ once a rollback left data out."""
        for begin, data in reversed(self.rollbacks):  # the newest first: it voids earlier ones at its step or later
            if step >= begin:
                return data + step - begin
        return step

    def read(self, data_step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return an iterator over this rank's micro-batches of a data step; forget the last step's losses."""
        self._micro_losses.clear()
        return self.stopwatch.reading(self.s.batches.read(data_step))

    def weight(self, summed: torch.Tensor, loss: torch.Tensor, scale: float, supervised: int) -> torch.Tensor:
        """Return Watch.weight() of the micro-step; keep `summed`, to name the worst documents later. Collective."""
        self._micro_losses.append(summed.detach())
        last = len(self._micro_losses) == self.s.plan.gradient_accumulation_steps
        return self.watch.weight(summed, loss, scale, supervised, last)

    def judge(self, step: int, data_step: int, done: entry.Step) -> Then:
        """Judge the finished step, record its incidents, and return what the loop does next. Collective.

        A slow rank or differing gradients are recorded and change nothing. Once the run was rolled back
        incidents.stop_after times, records a further incident and returns stop in place of roll_back.
        """
        is_applied = bool(self.s.engine.was_step_applied())
        scale = self.loss_scale.judge(is_applied)
        trouble = self.watch.judge(step, done.loss, is_applied, done.measured.losses)
        # A spike is skipped by a NaN, which is no overflow though the loss scale takes it for one.
        is_skipped_spike = trouble is not None and trouble.what == "loss spike, step skipped"
        if scale is not None and not is_skipped_spike and (scale.then == "stop" or math.isfinite(done.loss)):
            trouble = scale
        for incident in (trouble, self.stragglers.judge(done.measured.work_seconds), self.twins.check(step, data_step)):
            if incident is not None:
                self._record_incident(step, data_step, incident, is_applied)
        if trouble is None:
            return "go_on"
        if trouble.then == "roll_back" and len(self.rollbacks) >= self.settings.stop_after:
            detail = f"the run was rolled back {len(self.rollbacks)} times already (incidents.stop_after)"
            self.s.events.record("incident", step=step, what="too many loss spikes", detail=detail)
            return "stop"
        return trouble.then

    def roll_back(self, step: int, data_step: int) -> int | None:
        """Load the newest scheduled checkpoint at least spike.roll_back_steps + 1 steps before `step`; return its step.

        Training then skips the data after that checkpoint up to and including data_step. Restores the watch, removes
        later checkpoints, and records the event `rollback`. If there is no such checkpoint, records an incident and
        returns None. Collective. Raises UserError as Checkpoints.roll_back() does.
        """
        at_most = step - 1 - self.settings.spike.roll_back_steps
        restored = self.s.checkpoints.roll_back(at_most)
        if restored is None:
            detail = f"no checkpoint of step {max(0, at_most):,} or before to go back to; the run goes on"
            self.s.events.record("incident", step=step, what="not rolled back", detail=detail)
            return None
        self._restore(restored)
        self.rollbacks.append((restored, data_step + 1))
        self.s.events.record("rollback", step=restored, origin=step, data_step=data_step + 1)
        return restored

    def _record_incident(self, step: int, data_step: int, incident: Incident, is_applied: bool) -> None:
        """Record an incident in events.jsonl; with incident.blame, also the documents of the highest loss. Collective.

        If the step was skipped (not `is_applied`), the detail also names the first gradient that was not finite, unless
        it is the first skipped step, which only begins to watch gradients.
        """
        names = "" if is_applied or "began in" in incident.detail else self.gradients.name_bad()
        documents, where = self._name_worst_documents(data_step) if incident.blame else ([], "")
        detail = f"{incident.detail}{names}{where}"
        more = {"documents": [vars(document) for document in documents]} if documents else {}
        self.s.events.record("incident", step=step, what=incident.what, detail=detail, **more)

    def _name_worst_documents(self, data_step: int) -> tuple[list[NamedDocument], str]:
        """Return (at most NAMED_DOCUMENTS of the micro-batch with the highest mean loss, clause about it). Collective.

        Looks at the micro-batches of all ranks. A loss that is not finite is the highest. Ranks other than 0 return
        ([], "").
        """
        losses = torch.stack(self._micro_losses)
        every = [torch.empty_like(losses) for _ in range(self.s.plan.world_size)]
        distributed.all_gather(every, losses)
        if distributed.get_rank() != 0:
            return [], ""
        ids = self.s.batches.row_ids(data_step)
        worst, at, rank, rows = -math.inf, 0, 0, ids[0][:0]
        for number, place in enumerate(self.s.batches.of_rank):
            for micro, total in enumerate(every[number].tolist()):
                part = ids[micro, place]
                mean = total / max(1, self.s.batches.rows.supervised(part))
                mean = mean if math.isfinite(mean) else math.inf
                if mean > worst:
                    worst, at, rank, rows = mean, micro, number, part
        documents = list(packing.name_documents(self.s.batches.rows, self.s.shards, rows.tolist()))
        start = documents[0]
        shown = f"loss {worst:.2f}" if math.isfinite(worst) else "not finite"
        where = (
            f"; highest in micro-step {at} of rank {rank} on {self.s.plan.rank_hosts[rank]} ({shown}), "
            f"{len(documents)} documents, {start.source} {start.shard} #{start.document} "
            f"“{start.text[:24]}” the first"
        )
        return documents[:NAMED_DOCUMENTS], where


def _read_history(run: RunDir, step: int) -> tuple[list[tuple[int, int]], list[float]]:
    """Return ((step, data step) of every rollback, losses of the steps up to `step` in order) from events.jsonl.

    Leaves out losses that are null, and those of steps that a later start or rollback took back.
    """
    rollbacks, losses = list[tuple[int, int]](), dict[int, float]()
    for row in run.read_events():
        if row["kind"] == "rollback":
            rollbacks.append((row["step"], row["data_step"]))
        if row["kind"] in ("start", "rollback"):
            losses = {number: loss for number, loss in losses.items() if number <= row["step"]}
        elif row["kind"] == "step" and row["loss"] is not None and row["step"] <= step:
            losses[row["step"]] = row["loss"]
    return rollbacks, list(losses.values())
