"""Run trl's trainers by a run directory's plan, with finlm's checkpoints, events and exit codes.

accelerate prepares trl's trainer with the DeepSpeed settings of the run directory. Every argument that both sides know
has one source: nothing is "auto", and transformers' comparison finds no difference. Replaced are checkpoints and
resuming (the position is a function of the step), the record (the loss averaged over all ranks), and the end after a
signal or a loss that is not finite.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DummyOptim
from torch import distributed
from transformers import TrainerCallback

from finlm.recipe.schema import Recipe
from finlm.train import batches, entry
from finlm.train.batches import Checksum
from finlm.train.entry import Rank, is_due, open_rank, versions
from finlm.train.incidents import RECENT_STEPS, Skipped
from finlm.train.model import kernels
from finlm.train.model.causal_lm import attention_kernel
from finlm.train.zero import engine
from finlm.train.zero.checkpoint import Checkpoints
from finlm.train.zero.storage import State


def train(run_path: Path, recipe: Recipe, make: Callable[[Rank[Recipe]], Any]) -> int:
    """Train the run to its last step with the trainer that make(rank) returns; return the process's exit code.

    Every rank calls it. The code is that of Recorded.run(). Raises UserError when the run directory, its plan, shards
    or start cannot be used, or when no whole checkpoint is left of those that the run had; RuntimeError when the plan
    has another number of ranks. Other errors of training pass through.
    """
    r = open_rank(run_path, recipe)
    # Around make() too: DPO scores its pairs with the start model while its trainer is made.
    with kernels.attention_backends(r.plan):
        return int(make(r).run())


def trl_arguments(kind: Any, r: Rank[Recipe], **more: Any) -> Any:
    """Return trl's arguments of the class `kind`, by plan and recipe; `more` overrides. TypeError for unknown ones."""
    plan, optim = r.plan, r.recipe.optim
    common = {
        "output_dir": str(r.run.path / "trainer"),  # nothing is written there
        "deepspeed": str(r.run.ds_config),
        "use_cpu": plan.device == "cpu",
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "max_steps": optim.decay_steps or plan.steps,  # the schedule's; the run ends at plan.steps
        "learning_rate": optim.lr,
        "lr_scheduler_type": "constant_with_warmup" if optim.schedule == "constant" else optim.schedule,
        "warmup_steps": optim.warmup_steps,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip,
        "seed": r.recipe.train.seed,
        # model/kernels.py recomputes what the plan says, never reentrantly.
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        # The filter would hide the loss that stops the run, and wait for the device at every step.
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
    }
    if "router_aux_loss_coef" in {field.name for field in dataclasses.fields(kind)}:
        # None would add the router's own loss, with the coefficient of the model's config; pretraining adds none.
        common["router_aux_loss_coef"] = 0.0
    return kind(**common | more)


class Recorded:
    """Mixin, before trl's class, for a trainer that resumes, records and stops as `finlm train` does.

    A subclass defines, with 0-based steps:

    - _read(step): yield this rank's micro-batches of a step, and add their rows to self.checksum;
    - tokens_of_step(step): return (labels that count in the loss, tokens read) over all ranks;
    - metrics_of_step(): return further fields of the last step's event `step`, over all ranks; collective;
    - evaluate_held_out(): return the fields of event `eval` but the step, None if nothing is held out; collective.
    """

    def __init__(self: Any, r: Rank[Recipe], *, model: Any, **given: Any) -> None:
        """Make trl's trainer of `model` and `given`, and add the callback that records the run of `r`."""
        self.rank = r
        self.checksum = Checksum()
        self.exit_code = 0
        self.loss_of_step: torch.Tensor | None = None
        self.skipped = Skipped()
        # SFTTrainer (trl 1.16) sets these in the model's config, so an export had them and no stage could follow it.
        config = model.config.get_text_config()
        keys = ("output_router_logits", "router_aux_loss_coef")
        before = {key: getattr(config, key) for key in keys if hasattr(config, key)}
        super().__init__(model=model, **given)  # type: ignore[call-arg]  # trl's, which is next in line
        for key, value in before.items():
            setattr(config, key, value)
        self.add_callback(_Record(self))

    def state_for_checkpoint(self: Any) -> State:
        """Return plain values to save in a checkpoint: the numbers of recent skipped steps; subclasses add to them."""
        return {"skipped": list(self.skipped.steps)}

    def restore(self: Any, saved: State) -> None:
        """Restore the count of skipped steps from a value of state_for_checkpoint(); {} at the first step."""
        self.skipped = Skipped(saved.get("skipped", ()))

    def get_train_dataloader(self: Any) -> Steps:
        """Return an iterable over what the trainer's _read(step) yields, from the step that the run has reached."""
        return Steps(self)

    def read_ahead(self, step: int) -> None:
        """Do nothing; a subclass may start to read the rows of a step (0-based) while the device is busy."""

    def proof(self: Any, ids: list[int]) -> dict[str, float]:
        """Return {"loss": mean loss of the ids after the first}. Collective; the caller sets eval mode, no_grad."""
        read = torch.tensor([ids], device=self.rank.device)
        logits = self.model_wrapped(input_ids=read, use_cache=False).logits[0, :-1].float()
        return {"loss": float(torch.nn.functional.cross_entropy(logits, read[0, 1:]))}

    def run(self: Any) -> int:
        """Train from the newest checkpoint to the last step, close the checkpoints, record `end`, return the exit code.

        Collective. The code is 0 at the end, 1 after a loss or too many gradients that are not finite, 128 + signal
        after a signal.
        """
        self.train()
        step, r = self.state.global_step, self.rank
        status = "failed" if self.exit_code == 1 else "finished" if step >= r.plan.steps else "interrupted"
        self.checkpoints.close()
        return int(r.end(step, status, self.exit_code))

    def _send_telemetry(self) -> None:
        """Send nothing: it would wait for a network that clusters do not have."""

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """Set self.optimizer to a placeholder for DeepSpeed's, in parameter groups of bounded memory, and return it.

        Returns self.optimizer as it is, if that is no placeholder. `model` is not read.
        """
        if isinstance(self.optimizer, DummyOptim):
            self.optimizer = DummyOptim(engine.parameter_groups(self.model, self.rank.plan))
        return self.optimizer

    def _prepare_for_training(self: Any, *given: Any, **named: Any) -> Any:
        """Prepare the engine with our optimizer, make self.checkpoints, and resume from the newest checkpoint, if any.

        Returns what trl returns. Raises UserError when no whole checkpoint is left of those that the run had.
        """
        r = self.rank
        with engine.use_optimizer(r.plan):
            prepared = super()._prepare_for_training(*given, **named)  # type: ignore[misc]
        engine.tune(self.deepspeed.optimizer, r.plan)
        self.checkpoints = Checkpoints(self.deepspeed, r.run, r.plan, r.recipe.checkpoint, r.events)
        self.checkpoints.watch_state = self.state_for_checkpoint
        self.state.global_step = self.checkpoints.resume()
        self.restore(self.checkpoints.watch_loaded or {})
        return prepared

    def training_step(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        """Run trl's micro-step and return its loss; add the loss to loss_of_step."""
        loss: torch.Tensor = super().training_step(*given, **named)  # type: ignore[misc]
        # On the device: reading the number here would make the host wait in every micro-step.
        self.loss_of_step = loss.float() if self.loss_of_step is None else self.loss_of_step + loss.float()
        return loss


class _Record(TrainerCallback):  # type: ignore[misc]
    """The callback that records events, evaluates, saves checkpoints, and stops at the plan's last step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.r: Rank[Recipe] = trainer.rank
        self.begun = 0.0
        self.lr = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the event `start` and, before step 1, the held-out evaluation; begin to time the first step."""
        attention = attention_kernel(self.r.recipe, self.r.plan, self.trainer.model.config)
        self.r.events.record("start", step=state.global_step, attention=attention, **versions(self.r.plan))
        if state.global_step == 0:
            self._evaluate(0)
        self.begun = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reset the step's loss and note its learning rate."""
        self.trainer.loss_of_step = None
        self.lr = self.trainer.deepspeed.get_lr()[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, then evaluate, record the proof, save or stop where that is due. All ranks call it.

        Sets the trainer's exit_code (1 for a loss that is not finite or too many skipped steps, 128 + signal after a
        signal) and control.should_training_stop.
        """
        r, step = self.r, state.global_step
        # Before anything that waits for the device: a thread reads the next rows meanwhile.
        self.trainer.read_ahead(step)
        loss, interrupted = self._log(step)
        last = step == r.plan.steps
        # A failed step is not saved: the run resumes from the checkpoint before it.
        if not math.isfinite(loss):
            r.events.record("incident", step=step, what="loss is not finite", detail=f"loss {loss}, lr {self.lr:.3g}")
            self.trainer.exit_code = 1
        if self.trainer.exit_code == 1:
            control.should_training_stop = True
            return
        if last or is_due(step, r.recipe.eval.every_steps):
            self._evaluate(step)
        if last:
            self._prove(step)
        self.trainer.checkpoints.save_if_due(step, at_once=last or bool(interrupted))
        self.trainer.checkpoints.poll()
        if interrupted and not last:
            self.trainer.exit_code = 128 + interrupted
        control.should_training_stop = bool(last or interrupted)
        self.begun = time.monotonic()

    def _log(self, step: int) -> tuple[float, int]:
        """Record the event `step`, and an incident if the step was skipped; return (mean loss, signal number or 0).

        The loss is the mean over all ranks, the signal any that a rank received. Collective; waits for the device.
        """
        r, trainer = self.r, self.trainer
        measured = entry.measure_step(r.plan, float(trainer.loss_of_step), trainer.checksum.take(), self.begun)
        loss = sum(measured.losses) / len(measured.losses)
        tokens, read = trainer.tokens_of_step(step - 1)
        done = entry.Step(step, loss, self.lr, tokens, read, measured)
        if not trainer.deepspeed.was_step_applied():
            self._note_skipped(step)
        r.events.record("step", **done.row(r.plan, trainer.deepspeed), **trainer.metrics_of_step())
        return loss, measured.signal

    def _note_skipped(self, step: int) -> None:
        """Record the incident of a skipped step; set exit_code 1 after more than incidents.stop_after of 100 steps."""
        r = self.r
        # Under a dynamic loss scale (fp16) skipped steps are how the scale is found.
        detail = "gradient overflow; loss scale lowered"
        if r.plan.precision != "fp16" or r.recipe.train.fp16.loss_scale:
            count, most = self.trainer.skipped.count(step), r.recipe.incidents.stop_after
            detail = f"a gradient is not finite, {count} of the last {RECENT_STEPS} steps"
            if count > most:
                detail += f", more than incidents.stop_after ({most})"
                self.trainer.exit_code = 1
        r.events.record("incident", step=step, what="step skipped", detail=detail)

    def _prove(self, step: int) -> None:
        """Record the event `proof`: token ids and the trained model's loss or reward on them. Collective."""
        ids = batches.proof_ids(self.r.shards, self.r.recipe)
        self.trainer.model.eval()
        with torch.no_grad():
            values = self.trainer.proof(ids)
        self.trainer.model.train()
        self.r.events.record("proof", step=step, ids=ids, **values)

    def _evaluate(self, step: int) -> None:
        """Record the event `eval` of the held-out rows; do nothing when nothing is held out. All ranks must call it."""
        result = self.trainer.evaluate_held_out()
        if result is not None:
            self.r.events.record("eval", step=step, **result)


class Steps:
    """A trainer's data loader: this rank's micro-batches from the run's current step to the last."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.plan = trainer, trainer.rank.plan

    def __len__(self) -> int:
        """Return the number of micro-steps of the whole run."""
        return int(self.plan.steps * self.plan.gradient_accumulation_steps)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the micro-batches of this rank from the run's current step to its last."""
        for step in range(self.trainer.state.global_step, self.plan.steps):
            yield from self.trainer._read(step)


def compute_shared(
    r: Rank[Recipe], count: int, size: int, compute: Callable[[list[int]], torch.Tensor]
) -> torch.Tensor:
    """Return compute(indices) for the indices 0 to count - 1, shared among the ranks: fp32 [count, ...], on the CPU.

    compute gets `size` indices a call, the last index repeated to fill calls up, and returns a tensor [size, ...].
    Collective; without gradients. Raises RuntimeError if `count` is 0.
    """
    # Every rank makes as many calls, because ZeRO-3 gathers parameters in each of them.
    ranks, results = r.plan.world_size, []
    for first in range(r.rank * size, -(-count // (ranks * size)) * ranks * size, ranks * size):
        with torch.no_grad():
            results.append(compute([min(number, count - 1) for number in range(first, first + size)]).float())
    mine = torch.stack(results)
    every = [torch.empty_like(mine) for _ in range(ranks)]
    distributed.all_gather(every, mine)
    return torch.stack(every, dim=1).flatten(0, 2)[:count].cpu()  # of [calls, ranks, size, ...]


def drain_metrics(
    metrics: dict[str, list[float]], names: dict[str, str], tokens: Sequence[float] = ()
) -> dict[str, float]:
    """Return the means of trl's metrics by our names, without those that have no values; empty `metrics`.

    `names` maps our names to trl's. `tokens` has the number of tokens of each micro-step: metrics with as many values
    are weighted by it. Raises KeyError for a name that `metrics` lacks, unless it is a defaultdict, as trl's is.
    """
    means = {}
    for ours, theirs in names.items():
        if values := metrics[theirs]:
            weights = tokens if len(tokens) == len(values) and any(tokens) else None
            means[ours] = statistics.fmean(values, weights)
    metrics.clear()
    return means
