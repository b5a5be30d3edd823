"""Run supervised fine-tuning: trl's SFTTrainer over prepared dialogues.

The rows come tokenised, packed and masked (rows/dialogues.py), so trl prepares nothing; the model runs the kernels of
pretraining. The loss of a step is the sum over all ranks and micro-steps divided by the supervised tokens of all of
them: how rows are distributed never changes the gradient.

sft.hide_eos and sft.order: sampler repeat mistakes of the released XuanYuan llm-code, for recipes that reproduce them;
the mistakes of its data are in dialogues/encode.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import distributed
from trl import SFTConfig, SFTTrainer

from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.rows import dialogues, packing
from finlm.rows.shards import IGNORED, Ids
from finlm.train import batches
from finlm.train.batches import Batches, Numbers
from finlm.train.entry import Rank
from finlm.train.model import causal_lm, kernels, products
from finlm.train.post import start
from finlm.train.post.trainers import Recorded, trl_arguments


class DialogueTrainer(Recorded, SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose batches are rows of the run and whose loss is normalised over all ranks."""

    loss_is_scaled_for_ga = True

    def __init__(self, r: Rank[Recipe], batches: Batches, model: torch.nn.Module, **given: Any) -> None:
        """Make trl's trainer, then replace its model's loss by kernels.swap_loss, which also gives each row's loss.

        Hides every </s> from attention with sft.hide_eos. Raises UserError if the user's file of model types is
        damaged.
        """
        self.batches = batches
        self.by_source = BySource(batches.rows.source_ranges(), r.device)
        super().__init__(r, model=model, **given)
        # trl has put its own head's loss in place; ours keeps no logits, and runs the compiled layers.
        kernels.swap_loss(causal_lm.base_model(self.model), r.plan.vocab_size, by_row=True)
        if r.recipe.sft is not None and r.recipe.sft.hide_eos:
            hide_end_tokens(causal_lm.base_model(self.model), r.shards.eos_id)
        self.checksum = batches.checksum

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        """Prepare and resume as Recorded, with its UserError; then let linear layers sum gradients over micro-steps."""
        prepared = super()._prepare_for_training(*given, **named)
        # DeepSpeed is told in the backward pass which micro-step is the last; accelerate knows before.
        layers = causal_lm.base_model(self.model).model.layers
        products.swap_summing(self.model, layers, self.rank.plan, lambda: self.accelerator.sync_gradients)
        return prepared

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the summed loss of a micro-batch of _read() times its `scale`: its part of the step's mean.

        Adds the rows' losses to the sums by source. Removes `scale` and `sources` from `inputs`.
        """
        scale, sources = inputs.pop("scale"), inputs.pop("sources")
        loss, rows = model(**inputs)
        self.by_source.add(sources, rows, inputs["labels"])
        return loss * scale  # type: ignore[no-any-return]

    def tokens_of_step(self, step: int) -> tuple[int, int]:
        """Return (labels that count, tokens read) of a step over all ranks. `step` is 0-based."""
        return self.batches.supervised(step), self.batches.tokens_read(step)

    def read_ahead(self, step: int) -> None:
        """Start to read the rows of a step in a thread, and return at once."""
        self.batches.read_ahead(step)

    def metrics_of_step(self) -> Numbers:
        """Return {"sources": {name: {loss, tokens}}} of the step's labels, and set the sums to 0. Collective."""
        return {"sources": self.by_source.take()}

    def evaluate_held_out(self) -> Numbers | None:
        """Return loss and perplexity of held-out dialogues, in all and as `sources`; None without any. Collective."""
        r = self.rank
        if not r.shards.split("held_out"):
            return None
        self.model.eval()
        rows_of = dialogues.held_out(r.recipe)
        result = batches.evaluate(self._sum_loss, r.shards, r.recipe, r.plan.rank_micro_batches, r.device, rows_of)
        self.model.train()
        return result

    def proof(self, ids: list[int]) -> dict[str, float]:
        """Return {"loss": mean loss of the ids after the first}. Collective; the caller sets eval mode."""
        plan = self.rank.plan
        shape = plan.rank_micro_batches[self.rank.rank], plan.sequence_length
        return {"loss": batches.loss_of(ids, self._sum_loss, shape, self.rank.recipe, self.rank.device)}

    def _sum_loss(self, inputs: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
        """Return the summed loss of a batch's labels, by the model that DeepSpeed wraps, in its present mode."""
        loss: torch.Tensor = self.model_wrapped(input_ids=inputs, labels=labels, bounds=bounds)[0]
        return loss

    def _read(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield this rank's micro-batches of a step, on the device, and add their rows to the checksum.

        Each has the model's arguments, the factor `scale` of its loss and the rows' source indices, `sources`.
        """
        # The mean over ranks is DeepSpeed's: times their number, it is a sum.
        scale = self.rank.plan.world_size / self.batches.supervised(step)
        row_ids = self.batches.row_ids(step)[:, self.batches.of_this_rank]
        for ids, (inputs, labels, *bounds) in zip(row_ids, self.batches.read(step), strict=True):
            yield {
                "input_ids": inputs,
                "labels": labels,
                "bounds": bounds[0] if bounds else None,
                "scale": scale,
                "sources": self.by_source.numbers(ids),
            }


def make(r: Rank[Recipe]) -> DialogueTrainer:
    """Return the trainer of a rank's run of stage sft, with rows and model loaded. Writes the rows' index if missing.

    Raises UserError if the start's weights cannot be loaded, or data.mixture names a source without rows.
    """
    recipe, plan = r.recipe, r.plan
    assert recipe.sft is not None
    rows = dialogues.train_rows(r.shards, recipe)
    run_rows = plan.steps * plan.tokens_per_step // plan.sequence_length
    if recipe.sft.order == "sampler":
        order: Any = Sampler(len(rows), recipe.train.seed, plan)
    else:
        seed = recipe.train.seed
        order = packing.order(rows.source_ranges(), recipe.data.mixture, run_rows, plan.sequence_length, seed)
    batches = Batches(rows, order, plan, r.rank, recipe.data.document_masks)
    # trl reads the first row, to tell the kind of data, and no other.
    inputs, labels = rows.read(np.zeros(1, dtype=np.int64))
    first = {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}
    return DialogueTrainer(
        r,
        batches,
        start.load_start(r),
        args=trl_arguments(SFTConfig, r, dataset_kwargs={"skip_prepare_dataset": True}, packing=False, max_length=None),
        train_dataset=Dataset.from_list([first]),
        processing_class=start.dialogue_tokenizer(r.shards),
        data_collator=_refuse_collator,
        peft_config=start.lora_config(recipe),
    )


def _refuse_collator(rows: Any) -> Any:
    """Raise RuntimeError: train.batches makes the batches, and trl must ask for none."""
    raise RuntimeError("the trainer asked for a batch of its own")


class BySource:
    """Sums the losses and labels of each source over a step's micro-batches; leaves out sources without rows."""

    def __init__(self, ranges: Mapping[str, range], device: torch.device) -> None:
        """Begin with sums of 0 on `device` for each source of `ranges`, {source: its row ids}, that has rows."""
        self.names = [name for name, rows in ranges.items() if rows]
        self._ends = np.array([ranges[name].stop for name in self.names])
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)  # losses, labels

    def numbers(self, row_ids: npt.NDArray[Any]) -> torch.Tensor:
        """Return each row's index in self.names, the source it is of: int64 [rows], on the CPU."""
        return torch.from_numpy(np.searchsorted(self._ends, row_ids, side="right"))

    def add(self, numbers: torch.Tensor, losses: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a micro-batch of this rank: source indices [rows], losses [rows], labels [rows, sequence]."""
        where = numbers.to(self._sums.device)
        self._sums[0].index_add_(0, where, losses.double())
        self._sums[1].index_add_(0, where, (labels != IGNORED).sum(1).double())

    def take(self) -> dict[str, dict[str, float]]:
        """Return {source: {loss, tokens}} of the step's labels over all ranks, and set the sums to 0. Collective."""
        if distributed.is_initialized():
            distributed.all_reduce(self._sums)
        losses, tokens = self._sums.tolist()
        self._sums.zero_()
        return {
            name: {"loss": loss / count, "tokens": int(count)}
            for name, loss, count in zip(self.names, losses, tokens, strict=True)
            if count
        }


def hide_end_tokens(model: Any, eos_id: int) -> None:
    """Replace the model's forward so that no position attends to an `eos_id`, as in the released code (dataset.py).

    The new forward returns what the head returns, (summed loss, losses of the rows), and ignores `bounds`.
    """

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        """Return (summed loss, losses of the rows)."""
        seen = input_ids.ne(eos_id)
        hidden = model.model(input_ids=input_ids, attention_mask=seen, use_cache=False).last_hidden_state
        return model.lm_head(hidden, labels)

    model.forward = forward


class Sampler:
    """The order of the released code's fine-tuning: torch's DistributedSampler, a permutation an epoch by the seed.

    A step reads the same rows at any number of ranks, if it has as many rows over all of them. Only an epoch's end
    differs: it repeats the epoch's first rows until the ranks divide it.
    """

    def __init__(self, count: int, seed: int, plan: Plan) -> None:
        """Take the number of rows, the seed and the plan's ranks; draw nothing yet."""
        self.seed, self.plan, self.count = seed, plan, count
        self.each = -(-count // plan.world_size)  # rows of a rank in an epoch
        self._epochs: dict[int, Ids] = {}

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids:
        """Return the row ids, int64, at these positions of the run, which is cut into micro-steps, then ranks."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        sizes = self.plan.rank_micro_batches
        ends = np.cumsum(sizes)
        micro_step, place = np.divmod(flat, int(ends[-1]))
        rank = np.searchsorted(ends, place, side="right")
        drawn = micro_step * np.array(sizes)[rank] + place - (ends - sizes)[rank]
        epoch, within = np.divmod(drawn, self.each)
        row_ids = np.empty(len(flat), dtype=np.int64)
        # The released pretraining shuffles with seed 42 before: to get its order again takes both seeds.
        for number in np.unique(epoch).tolist():
            here = epoch == number
            row_ids[here] = self._epoch(number)[within[here] * self.plan.world_size + rank[here]]
        return row_ids.reshape(np.shape(positions))

    def _epoch(self, number: int) -> Ids:
        """Return the row ids of an epoch and the first ones again until the ranks divide them; cached."""
        if number not in self._epochs:
            generator = torch.Generator()
            generator.manual_seed(self.seed + number)
            order = torch.randperm(self.count, generator=generator).numpy()
            self._epochs[number] = np.resize(order, self.each * self.plan.world_size)
        return self._epochs[number]
