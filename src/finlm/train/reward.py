"""A reward model through trl's RewardTrainer: which of two answers is better, by the Bradley-Terry loss.

The start's body with a linear head that reads the end of the turn. XuanYuan-6B trained its reward at every token, to
steady the critic of PPO; sentences were more accurate there (report, section on RLHF), and GRPO has no critic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from finlm.data import pair_rows
from finlm.train import preferences
from finlm.train.model import padding_id
from finlm.train.preferences import PairTrainer, RewardHead
from finlm.train.trainers import Rank, arguments, train


class JudgeTrainer(PairTrainer, RewardTrainer):  # type: ignore[misc]
    """RewardTrainer over the run's pairs."""

    names = {  # noqa: RUF012
        "accuracy": "accuracy",
        "margin": "margin",
        "reward_min": "min_reward",
        "reward_mean": "mean_reward",
        "reward_max": "max_reward",
    }

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's rewards."""
        batch.pop("margin", None)
        rewards = self.model_wrapped(**batch, use_cache=False).logits.squeeze(-1)
        return torch.stack(rewards.chunk(2), dim=1)

    def batch(self, pairs: Any) -> dict[str, torch.Tensor]:
        """Whole sequences, chosen ones first, and the margin that the recipe asks for."""
        batch = super().batch(pairs)
        del batch["completion_mask"]
        settings = self.rank.recipe.reward
        if settings is not None and settings.margin:
            batch["margin"] = torch.full((len(pairs),), settings.margin, device=self.rank.device)
        return batch


def judge(model: Any, pad_id: int) -> LlamaForSequenceClassification:
    """The causal model's body, shared, with a head of one number; drawn from the run's seed."""
    config = model.config.__class__(**model.config.to_dict() | {"num_labels": 1, "pad_token_id": pad_id})
    with torch.device("meta"):
        found = LlamaForSequenceClassification(config)
    weight = model.lm_head.weight
    found.model = model.model
    found.score = RewardHead(config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype)
    # As trl's scripts draw it: rewards of about one standard deviation on normed states.
    torch.nn.init.normal_(found.score.weight, std=(config.hidden_size + 1) ** -0.5)
    return found


def main(run_path: Path) -> int:
    """Train the run to its last step; the process's exit code."""
    return train(run_path, make)


def make(r: Rank) -> JudgeTrainer:
    """The trainer of a rank's run."""
    first = next(pair_rows.pairs(r.shards.split("train")))
    return JudgeTrainer(
        r,
        judge(preferences.start(r), padding_id(r.shards)),
        args=settings(r),
        # Read only for the first row, by which trl tells the kind of data.
        train_dataset=Dataset.from_list([{name: ids.tolist() for name, ids in first.items()}]),
        processing_class=preferences.tokenizer(r),
    )


def settings(r: Rank) -> RewardConfig:
    """trl's arguments."""
    reward = r.recipe.reward
    assert reward is not None
    return arguments(RewardConfig, r, center_rewards_coefficient=reward.center or None, max_length=None)
