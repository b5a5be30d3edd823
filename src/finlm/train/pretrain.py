"""Pretraining: the plan of a run directory, executed by a plain DeepSpeed loop.

Everything was decided before launch; here it is carried out and recorded in events.jsonl. The loss of a step is the sum
over all ranks and micro-steps divided by the supervised tokens of all ranks and micro-steps, so micro-batch,
accumulation and world size change memory and speed but not the gradient.
"""

from __future__ import annotations

import gc
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finlm.base import files
from finlm.base.rundir import RunDir, open_run
from finlm.data import mixture, packed
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.train import heldout, interrupt, kernels
from finlm.train.batches import Batches
from finlm.train.checkpoint import Checkpoints
from finlm.train.engine import initialize
from finlm.train.entry import is_due, join, versions
from finlm.train.events import Events
from finlm.train.guard import Guard, Seen
from finlm.train.model import build, llama_config


@dataclass
class Setup:
    """What the loop works with."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    shards: Shards
    engine: Any
    batches: Batches
    device: torch.device
    rank: int
    events: Events
    checkpoints: Checkpoints
    guard: Guard
    started: float


def main(run_path: Path) -> int:
    """Train the run to its last step; the process's exit code."""
    interrupt.listen()
    s = prepare(run_path)
    with kernels.attention(s.plan):
        return loop(s)


def loop(s: Setup) -> int:
    """Every optimizer step from the newest checkpoint to the last; the process's exit code."""
    step = s.checkpoints.resume()
    s.guard.resume(step)
    record(s, "start", step=step, **versions(s.plan))
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
        loss = torch.zeros((), device=s.device)
        for batch in s.guard.read(data_step):
            with s.guard.forward():
                summed = s.engine(*batch)
            loss += summed.detach()
            weight = s.guard.weight(summed, loss, scale, supervised)
            s.engine.backward(summed * weight)  # DeepSpeed divides by micro-steps and averages over ranks
            s.engine.step()
        step += 1
        s.batches.read_ahead(s.guard.data_step(step))
        seen, interrupted = log_step(s, step, loss, supervised, lr, begun)
        then = s.guard.judge(step, data_step, seen)
        if then == "stop":
            return end(s, step, "failed", 1)
        if then == "roll_back" and (former := s.guard.roll_back(step, data_step)) is not None:
            step = former
            continue
        s.checkpoints.poll()
        last = step == s.plan.steps
        if last or is_due(step, s.recipe.eval.every_steps):
            evaluate(s, step)
        # After the evaluation: what a checkpoint follows is recorded.
        if last or interrupted or is_due(step, s.recipe.checkpoint.every_steps):
            s.checkpoints.save(step)
        if interrupted and not last:
            return end(s, step, "interrupted", 128 + interrupted)
    return end(s, step, "finished", 0)


def end(s: Setup, step: int, status: str, exit_code: int) -> int:
    """Record that the run is over; the process's exit code."""
    s.checkpoints.finish()
    seconds = round(time.monotonic() - s.started, 1)
    record(s, "end", step=step, status=status, seconds=seconds, exit_code=exit_code)
    distributed.barrier()
    return exit_code


def prepare(run_path: Path) -> Setup:
    """Process group, model, engine and data of this rank."""
    started = time.monotonic()
    run = open_run(run_path)
    plan = Plan.read(run.plan)
    recipe = recipes.load(run.recipe).recipe
    ds_config = files.read_json(run.ds_config)
    rank = join(recipe, plan)
    shards = Shards(run.shards)
    config = llama_config(recipe, plan, shards.bos_id, shards.eos_id)
    model = build(recipe, plan, ds_config, config, shards.tokenizer)
    engine = initialize(model, plan, ds_config)
    rows = packed.rows(shards, plan.sequence_length, recipe.data.packing)
    run_rows = plan.steps * plan.tokens_per_step // plan.sequence_length
    order = mixture.order(rows.source_ranges(), recipe.data.mixture, run_rows, plan.sequence_length, recipe.train.seed)
    batches = Batches(rows, order, plan, rank, recipe.data.document_masks)
    events = Events(run, rank)
    checkpoints = Checkpoints(engine, run, plan, recipe.checkpoint, events)
    guard = Guard(run, recipe, plan, engine, batches, shards, events.record, checkpoints.roll_back)
    return Setup(run, recipe, plan, shards, engine, batches, batches.device, rank, events, checkpoints, guard, started)


def record(s: Setup, kind: str, **fields: Any) -> None:
    """One row in events.jsonl, from rank 0."""
    s.events.record(kind, **fields)


def log_step(s: Setup, step: int, loss: torch.Tensor, supervised: int, lr: float, begun: float) -> tuple[Seen, int]:
    """Record one optimizer step. What all ranks know of it, and the signal that one of them got, 0 = none.

    The host waits for the device here, and nowhere else. loss: this rank's sum over its labels. begun:
    time.monotonic() at the start of the step.
    """
    if s.plan.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    own = [loss.item(), memory, s.guard.stopwatch.take(), interrupt.received(), s.batches.checksum.take()]
    mine = torch.tensor(own, dtype=torch.float64, device=s.device)
    gathered = [torch.empty_like(mine) for _ in range(s.plan.world_size)]
    distributed.all_gather(gathered, mine)
    losses, memories, own_seconds, signals, crcs = torch.stack(gathered).T.tolist()
    seconds = time.monotonic() - begun
    seen = Seen(float(sum(losses) / supervised), losses, own_seconds)
    tokens_per_second = supervised / seconds
    norm = s.engine.get_global_grad_norm()
    flops = s.plan.flops_per_token * tokens_per_second
    record(
        s,
        "step",
        step=step,
        loss=seen.loss,
        lr=lr,
        grad_norm=None if norm is None else float(norm),
        loss_scale=float(s.engine.optimizer.cur_scale) if s.plan.precision == "fp16" else None,
        tokens=supervised,
        rows_crc=int(sum(crcs)),
        seconds=round(seconds, 4),
        tokens_per_second=round(tokens_per_second, 1),
        mfu=None if s.plan.peak_flops is None else round(flops / s.plan.world_size / s.plan.peak_flops, 4),
        memory_bytes=int(max(memories)),
    )
    return seen, int(max(signals))


def evaluate(s: Setup, step: int) -> None:
    """Held-out perplexity of each source, recorded; nothing when the recipe holds nothing out."""
    if not s.shards.split("held_out"):
        return
    s.engine.eval()
    result = heldout.evaluate(
        s.engine,
        s.shards,
        s.plan.sequence_length,
        s.plan.rank_micro_batches,
        s.recipe.eval.max_tokens_per_source,
        s.device,
        s.recipe.data.document_masks,
    )
    s.engine.train()
    record(s, "eval", step=step, **result)
