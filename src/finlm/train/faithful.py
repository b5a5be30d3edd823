"""Mistakes of the released XuanYuan llm-code that are made while training; those of its data are in data.chat_encode.

Only for recipes that reproduce them (sft.hide_eos, sft.order: sampler).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from finlm.data.shards import Ids
from finlm.plan.plan import Plan


def hide(model: Any, eos_id: int) -> None:
    """Let no position see a </s>: the padding is </s>, and the mask is made by comparing ids (dataset.py)."""
    model.forward = partial(_summed_loss, model, eos_id)


def _summed_loss(
    model: Any, eos_id: int, input_ids: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None = None, **_: Any
) -> Any:
    hidden = model.model(input_ids=input_ids, attention_mask=input_ids.ne(eos_id), use_cache=False).last_hidden_state
    return model.lm_head(hidden, labels)


class Sampler:
    """The order of the released code's fine-tuning: torch's DistributedSampler, a permutation an epoch by its seed.

    As long as a step has the same number of rows over all ranks, it has the same rows at any number of ranks; only an
    epoch's end differs, which repeats the first rows until the ranks divide it. (The released pretraining shuffles with
    seed 42 before; two permutations are one, which needs both seeds to be had again.)
    """

    def __init__(self, count: int, seed: int, plan: Plan) -> None:
        self.seed, self.plan, self.count = seed, plan, count
        self.each = -(-count // plan.world_size)  # rows of a rank in an epoch
        self._epochs: dict[int, Ids] = {}

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids:
        """Row ids int64 of the positions, which are cut into micro-steps, then ranks."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        sizes = self.plan.rank_micro_batches
        ends = np.cumsum(sizes)
        micro_step, place = np.divmod(flat, int(ends[-1]))
        rank = np.searchsorted(ends, place, side="right")
        drawn = micro_step * np.array(sizes)[rank] + place - (ends - sizes)[rank]
        epoch, within = np.divmod(drawn, self.each)
        found = np.empty(len(flat), dtype=np.int64)
        for number in np.unique(epoch).tolist():
            here = epoch == number
            found[here] = self._epoch(number)[within[here] * self.plan.world_size + rank[here]]
        return found.reshape(np.shape(positions))

    def _epoch(self, number: int) -> Ids:
        if number not in self._epochs:
            generator = torch.Generator()
            generator.manual_seed(self.seed + number)
            order = torch.randperm(self.count, generator=generator).numpy()
            self._epochs[number] = np.resize(order, self.each * self.plan.world_size)
        return self._epochs[number]
