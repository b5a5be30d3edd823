"""Direct preference optimization through trl's DPOTrainer.

The reference is the start itself, asked once before the first step and remembered as two numbers a pair, so no second
model is held. After a resume it is asked again, before the checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.models import prepare_deepspeed

from finlm.data import pair_rows
from finlm.train import lora, preferences
from finlm.train.preferences import PairTrainer
from finlm.train.trainers import Rank, arguments, train


class PreferenceTrainer(PairTrainer, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer over the run's pairs."""

    names = {  # noqa: RUF012
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "logp_chosen": "logps/chosen",
        "logp_rejected": "logps/rejected",
    }

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The implicit rewards: beta times by how much more likely an answer is than it was to the reference."""
        references = torch.stack((batch.pop("ref_chosen_logps"), batch.pop("ref_rejected_logps")), dim=1)
        return float(self.beta) * (self._logps(self.model_wrapped, batch) - references)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        """Rows come tokenised."""
        return dataset

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Log-probabilities of every pair by the start: kept in the pairs, in no file that hosts would share."""
        preferences.swap_head(lora.base(self.model), self.rank.plan.vocab_size)
        is_partitioned = self.rank.plan.zero_stage == 3
        model = prepare_deepspeed(self.model, self.accelerator) if is_partitioned else self.model
        model.eval()
        adapters = getattr(self.model, "disable_adapter", contextlib.nullcontext)
        with adapters():
            for pairs in (self.pairs, *self.held_out.values()):
                logps = preferences.spread(
                    self.rank,
                    len(pairs),
                    self.rank.plan.micro_batch,
                    lambda numbers, of=pairs: self._logps(model, self.batch([of[n] for n in numbers])),  # type: ignore[misc]
                )
                for pair, (chosen, rejected) in zip(pairs, logps.tolist(), strict=True):
                    pair |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self.model.train()
        return dataset

    def _logps(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probability of the answers: [pairs, (chosen, rejected)]."""
        ids, mask = batch["input_ids"], batch["completion_mask"]
        labels = ids.masked_fill(mask == 0, -100)
        asked = {"input_ids": ids, "attention_mask": batch["attention_mask"], "use_cache": False}
        with self.accelerator.autocast():
            logps = model(**asked, labels=labels, fused_lm_head=True).log_probs.sum(dim=1)
        return torch.stack(logps.chunk(2), dim=1)


def main(run_path: Path) -> int:
    """Train the run to its last step; the process's exit code."""
    return train(run_path, make)


def make(r: Rank) -> PreferenceTrainer:
    """The trainer of a rank's run."""
    model = preferences.start(r)
    first = next(pair_rows.pairs(r.shards.split("train")))
    return PreferenceTrainer(
        r,
        model,
        args=settings(r),
        # Read only for the first row, by which trl tells the kind of data.
        train_dataset=Dataset.from_list([{name: ids.tolist() for name, ids in first.items()}]),
        processing_class=preferences.tokenizer(r),
        peft_config=lora.config(r.recipe),
    )


def settings(r: Rank) -> DPOConfig:
    """trl's arguments."""
    dpo = r.recipe.dpo
    assert dpo is not None
    return arguments(
        DPOConfig,
        r,
        beta=dpo.beta,
        loss_type=[dpo.loss],
        label_smoothing=dpo.label_smoothing,
        precompute_ref_log_probs=True,
        max_length=None,
    )
