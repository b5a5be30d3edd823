"""What the runs on trl's trainers have in common: a run directory's plan in trl's terms, and its record.

The trainer is trl's, prepared by accelerate with the DeepSpeed settings of the run directory; every argument that both
sides know has one source, so nothing is "auto" and transformers' comparison finds no difference. Replaced are the parts
whose stock form loses information: checkpoints and resuming (train.checkpoint, position a function of the step), the
record (events.jsonl, the loss averaged over all ranks), and the end after a signal or a loss that is not finite.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DummyOptim
from torch import distributed
from transformers import TrainerCallback

from finlm.base import files
from finlm.base.rundir import RunDir, open_run
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.train import engine, interrupt, kernels
from finlm.train.batches import Checksum
from finlm.train.checkpoint import Checkpoints
from finlm.train.entry import is_due, join, versions
from finlm.train.events import Events
from finlm.train.incidents import RECENT_STEPS, Skipped


@dataclass
class Rank:
    """One rank of a run, its process group up."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    ds_config: dict[str, Any]
    shards: Shards
    device: torch.device
    rank: int
    events: Events
    started: float


def open_rank(run_path: Path) -> Rank:
    """The run directory and the process group of this rank."""
    started = time.monotonic()
    interrupt.listen()
    run = open_run(run_path)
    plan = Plan.read(run.plan)
    recipe = recipes.load(run.recipe).recipe
    rank = join(recipe, plan)
    device = torch.device(plan.device)
    settings = files.read_json(run.ds_config)
    return Rank(run, recipe, plan, settings, Shards(run.shards), device, rank, Events(run, rank), started)


def train(run_path: Path, make: Callable[[Rank], Any]) -> int:
    """Train the run to its last step with the trainer that make gives a rank; the process's exit code."""
    r = open_rank(run_path)
    trainer = make(r)
    with kernels.attention(r.plan):
        return int(trainer.run())


def arguments(kind: Any, r: Rank, **more: Any) -> Any:
    """trl's arguments of a kind (SFTConfig, DPOConfig, ...) that say what the plan and the DeepSpeed settings say."""
    plan, optim = r.plan, r.recipe.optim
    common = {
        "output_dir": str(r.run.path / "trainer"),  # nothing is written there
        "deepspeed": r.ds_config,
        "use_cpu": plan.device == "cpu",
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "max_steps": optim.decay_steps or plan.steps,  # the schedule's; the run ends at plan.steps
        "learning_rate": optim.lr,
        "lr_scheduler_type": {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}[
            optim.schedule
        ],
        "warmup_steps": optim.warmup_steps,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip,
        "seed": r.recipe.train.seed,
        "gradient_checkpointing": False,  # train.kernels recomputes what the plan says, never reentrantly
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # it would hide what stops the run, and wait for the device each time
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
    }
    return kind(**common | more)


class Recorded:
    """A trl trainer that resumes, records and stops as `finlm train` does. Mixed in before the trainer's class."""

    def watch(self: Any, r: Rank) -> None:
        """Before train(): whose run this is."""
        self.rank = r
        self.checkpoints: Checkpoints | None = None
        self.checksum = Checksum()
        self.exit_code = 0
        self.loss_of_step: torch.Tensor | None = None
        self.add_callback(_Record(self))

    def tokens_of_step(self, step: int) -> int:
        """Tokens that count in the loss of a step (0-based) over all ranks; 0 where that is not known."""
        return 0

    def metrics_of_step(self) -> dict[str, Any]:
        """What else the row of a step says, averaged over ranks by the caller's own means; all ranks call it."""
        return {}

    def read_ahead(self, step: int) -> None:
        """Begin to read the rows of a step (0-based), since the device is still working on the one before."""

    def evaluate_held_out(self) -> dict[str, Any] | None:
        """The eval row without its step; None when nothing is held out. Called by all ranks together."""
        return None

    def run(self: Any) -> int:
        """Train from the newest checkpoint to the last step; the process's exit code."""
        self.train()
        step, r = self.state.global_step, self.rank
        status = "failed" if self.exit_code == 1 else "finished" if step >= r.plan.steps else "interrupted"
        self.checkpoints.finish()
        seconds = round(time.monotonic() - r.started, 1)
        r.events.record("end", step=step, status=status, seconds=seconds, exit_code=self.exit_code)
        distributed.barrier()
        return int(self.exit_code)

    def _send_telemetry(self) -> None:
        """Not from here: it would wait for a network that clusters do not have."""

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """DeepSpeed's, over parameter groups that bound its peak of memory."""
        if isinstance(self.optimizer, DummyOptim):
            self.optimizer = DummyOptim(engine.parameter_groups(self.model, self.rank.plan))
        return self.optimizer

    def _prepare_for_training(self: Any, *given: Any, **named: Any) -> Any:
        r = self.rank
        with engine.own_optimizer(r.plan):
            prepared = super()._prepare_for_training(*given, **named)  # type: ignore[misc]
        engine.tune(self.deepspeed.optimizer, r.plan)
        self.checkpoints = Checkpoints(self.deepspeed, r.run, r.plan, r.recipe.checkpoint, r.events)
        self.state.global_step = self.checkpoints.resume()
        return prepared

    def training_step(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        """trl's micro-step, whose loss is summed for the row of the step."""
        loss: torch.Tensor = super().training_step(*given, **named)  # type: ignore[misc]
        self.loss_of_step = loss.float() if self.loss_of_step is None else self.loss_of_step + loss.float()
        return loss


class _Record(TrainerCallback):  # type: ignore[misc]
    """Writes the rows, evaluates, saves and stops at the plan's steps."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.r: Rank = trainer.rank
        self.begun = 0.0
        self.lr = 0.0
        self.skipped = Skipped()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The start row, and what the model scores before the first step."""
        self.r.events.record("start", step=state.global_step, **versions(self.r.plan))
        if state.global_step == 0:
            self._evaluate(0)
        self.begun = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the step runs with."""
        self.trainer.loss_of_step = None
        self.lr = self.trainer.deepspeed.get_lr()[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, then evaluate, save or stop where that is due."""
        r, step = self.r, state.global_step
        self.trainer.read_ahead(step)
        loss, interrupted = self._log(step)
        last = step == r.plan.steps
        if not math.isfinite(loss):
            r.events.record("incident", step=step, what="loss is not finite", detail=f"loss {loss}, lr {self.lr:.3g}")
            self.trainer.exit_code = 1
        if self.trainer.exit_code == 1:
            control.should_training_stop = True
            return
        if last or is_due(step, r.recipe.eval.every_steps):
            self._evaluate(step)
        if last or interrupted or is_due(step, r.recipe.checkpoint.every_steps):
            self.trainer.checkpoints.save(step)
        self.trainer.checkpoints.poll()
        if interrupted and not last:
            self.trainer.exit_code = 128 + interrupted
        control.should_training_stop = bool(last or interrupted)
        self.begun = time.monotonic()

    def _log(self, step: int) -> tuple[float, int]:
        """(the step's mean loss over all ranks, the signal that one of them got). Waits for the device, once a step."""
        r, trainer = self.r, self.trainer
        cuda = r.plan.device == "cuda"
        memory = (
            torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        own = [float(trainer.loss_of_step), memory, interrupt.received(), trainer.checksum.take()]
        mine = torch.tensor(own, dtype=torch.float64)
        gathered = [torch.empty_like(mine, device=r.device) for _ in range(r.plan.world_size)]
        distributed.all_gather(gathered, mine.to(r.device))
        losses, memories, signals, crcs = torch.stack(gathered).T.tolist()
        loss = sum(losses) / len(losses)
        seconds = time.monotonic() - self.begun
        engine_, tokens = trainer.deepspeed, trainer.tokens_of_step(step - 1)
        if not engine_.was_step_applied():
            self._note_skipped(step)
        norm = engine_.get_global_grad_norm()
        r.events.record(
            "step",
            step=step,
            loss=loss,
            lr=self.lr,
            grad_norm=None if norm is None else float(norm),
            loss_scale=float(engine_.optimizer.cur_scale) if r.plan.precision == "fp16" else None,
            tokens=tokens,
            rows_crc=int(sum(crcs)),
            seconds=round(seconds, 4),
            tokens_per_second=round(r.plan.tokens_per_step / seconds, 1),
            mfu=self._mfu(seconds),
            memory_bytes=int(max(memories)),
            **trainer.metrics_of_step(),
        )
        return loss, int(max(signals))

    def _note_skipped(self, step: int) -> None:
        """DeepSpeed left the weights alone; without a loss scale, which would be lowered, that may go on to the end."""
        r = self.r
        detail = "gradient overflow; loss scale lowered"
        if r.plan.precision != "fp16":
            count, most = self.skipped.count(step), r.recipe.incidents.stop_after
            detail = f"a gradient is not finite, {count} of the last {RECENT_STEPS} steps"
            if count > most:
                detail += f", more than incidents.stop_after ({most})"
                self.trainer.exit_code = 1
        r.events.record("incident", step=step, what="step skipped", detail=detail)

    def _mfu(self, seconds: float) -> float | None:
        plan = self.r.plan
        if plan.peak_flops is None:
            return None
        return round(plan.flops_per_token * plan.tokens_per_step / seconds / plan.world_size / plan.peak_flops, 4)

    def _evaluate(self, step: int) -> None:
        result = self.trainer.evaluate_held_out()
        if result is not None:
            self.r.events.record("eval", step=step, **result)


class Steps:
    """Micro-batches of a rank from the run's current step on: what the trainer takes for its data loader."""

    def __init__(self, read: Any, state: Any, micro_steps: int, last: int) -> None:
        self.read, self.state, self.micro_steps, self.last = read, state, micro_steps, last

    def __len__(self) -> int:
        return int(self.last * self.micro_steps)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.state().global_step, self.last):
            yield from self.read(step)
