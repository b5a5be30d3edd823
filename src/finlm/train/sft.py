"""Supervised fine-tuning: trl's SFTTrainer over prepared dialogues.

The rows come tokenised, packed and masked (data.dialogue_rows), so trl prepares nothing; the model runs the swapped
kernels as pretraining (train.kernels) instead of trl's own head. The loss of a step is the sum over all ranks and
micro-steps divided by the supervised tokens of all of them: how rows are dealt out never changes the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from trl import SFTConfig, SFTTrainer

from finlm.data import dialogue_rows, mixture
from finlm.train import accumulate, encoding, faithful, heldout, kernels, lora
from finlm.train.batches import Batches
from finlm.train.by_source import BySource
from finlm.train.model import build, llama_config
from finlm.train.trainers import Rank, Recorded, Steps, arguments, train


class DialogueTrainer(Recorded, SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose batches are rows of the run and whose loss is normalised over all ranks."""

    loss_is_scaled_for_ga = True

    def __init__(self, r: Rank, batches: Batches, model: torch.nn.Module, **given: Any) -> None:
        self.batches = batches
        self.by_source = BySource(batches.rows.source_ranges(), r.device)
        super().__init__(model=model, **given)
        # trl has put its own head's loss in place; ours keeps no logits, and runs the compiled layers.
        kernels.swap_loss(lora.base(self.model), r.plan.vocab_size, by_row=True)
        if r.recipe.sft is not None and r.recipe.sft.hide_eos:
            faithful.hide(lora.base(self.model), r.shards.eos_id)
        self.watch(r)
        self.checksum = batches.checksum

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        prepared = super()._prepare_for_training(*given, **named)
        # DeepSpeed is told in the backward pass which micro-step is the last; accelerate knows before.
        layers = lora.base(self.model).model.layers
        accumulate.swap(self.model, layers, self.rank.plan, lambda: self.accelerator.sync_gradients)
        return prepared

    def get_train_dataloader(self) -> Steps:
        """This rank's micro-batches from the step the run has reached."""
        plan = self.rank.plan
        return Steps(self._read, lambda: self.state, plan.gradient_accumulation_steps, plan.steps)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """The micro-batch's summed loss as its part of the step's mean over all ranks."""
        scale, sources = inputs.pop("scale"), inputs.pop("sources")
        loss, rows = model(**inputs)
        self.by_source.add(sources, rows, inputs["labels"])
        return loss * scale  # type: ignore[no-any-return]

    def tokens_of_step(self, step: int) -> int:
        """Supervised tokens of a step over all ranks."""
        return self.batches.supervised(step)

    def read_ahead(self, step: int) -> None:
        """Rows, in a thread."""
        self.batches.read_ahead(step)

    def metrics_of_step(self) -> dict[str, Any]:
        """The loss of each source."""
        return {"sources": self.by_source.take()}

    def evaluate_held_out(self) -> dict[str, Any] | None:
        """Held-out loss of each source's dialogues."""
        r = self.rank
        if not r.shards.split("held_out"):
            return None
        self.model.eval()
        result = heldout.evaluate(
            lambda inputs, labels, bounds=None: self.model_wrapped(input_ids=inputs, labels=labels, bounds=bounds)[0],
            r.shards,
            r.plan.sequence_length,
            r.plan.rank_micro_batches,
            r.recipe.eval.max_tokens_per_source,
            r.device,
            document_masks=r.recipe.data.document_masks,
            rows_of=dialogue_rows.held_out(r.recipe),
        )
        self.model.train()
        return result

    def _read(self, step: int) -> Iterator[dict[str, Any]]:
        # The mean over ranks is DeepSpeed's: times their number, it is a sum.
        scale = self.rank.plan.world_size / self.batches.supervised(step)
        own = self.batches.row_ids(step)[:, self.batches.own]
        for ids, (inputs, labels, *bounds) in zip(own, self.batches.read(step), strict=True):
            batch = {"input_ids": inputs, "labels": labels, "bounds": bounds[0] if bounds else None}
            yield batch | {"scale": scale, "sources": self.by_source.numbers(ids)}


def main(run_path: Path) -> int:
    """Train the run to its last step; the process's exit code."""
    return train(run_path, make)


def make(r: Rank) -> DialogueTrainer:
    """The trainer of a rank's run."""
    recipe, plan = r.recipe, r.plan
    assert recipe.sft is not None
    rows = dialogue_rows.train_rows(r.shards, recipe)
    run_rows = plan.steps * plan.tokens_per_step // plan.sequence_length
    if recipe.sft.order == "sampler":
        order: Any = faithful.Sampler(len(rows), recipe.train.seed, plan)
    else:
        seed = recipe.train.seed
        order = mixture.order(rows.source_ranges(), recipe.data.mixture, run_rows, plan.sequence_length, seed)
    batches = Batches(rows, order, plan, r.rank, recipe.data.document_masks)
    config = llama_config(recipe, plan, r.shards.bos_id, r.shards.eos_id)
    model = build(recipe, plan, r.ds_config, config, r.shards.tokenizer)
    inputs, labels = rows.read(np.zeros(1, dtype=np.int64))
    first = {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}
    return DialogueTrainer(
        r,
        batches,
        model,
        args=arguments(SFTConfig, r, dataset_kwargs={"skip_prepare_dataset": True}, packing=False, max_length=None),
        # Read only for the first row, by which trl tells the kind of data.
        train_dataset=IterableDataset.from_generator(_first, gen_kwargs={"row": first}),
        processing_class=encoding.of_dialogues(r.shards),
        data_collator=_no_collator,
        peft_config=lora.config(recipe),
    )


def _first(row: dict[str, list[int]]) -> Iterator[dict[str, list[int]]]:
    yield row


def _no_collator(rows: Any) -> Any:
    """Batches are made by train.batches."""
    raise RuntimeError("the trainer asked for a batch of its own")
