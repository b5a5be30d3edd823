"""Run proximal policy optimization (arXiv 1707.06347) on GRPO's trainer: a value head judges each token of an answer.

trl 1.16 has no PPO. Sampling, rewards and the clipped loss are those of GRPO, which takes an advantage for each token;
here that is the generalized advantage estimate (arXiv 1506.02438) of rewards at the end and of the divergence from the
start at every token (grpo.beta), whitened over the step. The head reads the policy's own last states, so there is no
second model as XuanYuan-6B had it, and its loss trains the body too. It stays in checkpoints and is left out of
exports.
"""

from __future__ import annotations

from typing import Any

import torch

from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Ppo
from finlm.train.entry import Rank
from finlm.train.model import causal_lm
from finlm.train.post.grpo import GroupTrainer, Rows, settings_of
from finlm.train.post.start import RewardHead

HEAD = "value_head"  # in the names of weights


class PpoTrainer(GroupTrainer):
    """GroupTrainer whose advantages come from a value head."""

    beta: float  # trl's
    names = GroupTrainer.names | {"value_loss": "value_loss", "value_explained": "value_explained"}

    def __init__(self, r: Rank[Recipe], model: Any, *given: Any, **named: Any) -> None:
        """Add a value head of zeros to the model, register the hook that computes values, and make GroupTrainer."""
        self.ppo = settings_of(r).ppo
        weight = model.lm_head.weight
        head = RewardHead(model.config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype)
        # With values of 0 the first answers are judged by what they earn alone.
        torch.nn.init.zeros_(head.weight)
        model.add_module(HEAD, head)
        self.is_scoring = False
        super().__init__(r, model, *given, **named)
        body = causal_lm.base_model(self.model)
        # Within the model's own forward, where ZeRO-3 gathers the head.
        body.model.register_forward_hook(self._compute_values)

    def _compute_values(self, body: Any, given: Any, out: Any) -> None:
        """If is_scoring, set extra_outputs to (values of all tokens but the last,). A forward hook of the body."""
        if self.is_scoring:
            self.extra_outputs = (getattr(causal_lm.base_model(self.model), HEAD)(out.last_hidden_state)[:, :-1, 0],)

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        """Return what GroupTrainer's returns; set extra_values to (the values of these tokens,)."""
        self.is_scoring = True
        try:
            return super()._get_per_token_logps_and_entropies(*given, **named)
        finally:
            self.is_scoring = False

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        """Return trl's rows for the prompts, with `advantages`, `returns`, `old_values` and `old_per_token_logps`.

        All four are [answers, tokens]. Appends the mean divergence from the start to trl's metric kl if grpo.beta is
        set. Collective.
        """
        rows: Rows = super()._generate_and_score_completions(inputs)
        mask = rows["completion_mask"]
        ids, seen = (torch.cat([rows[f"prompt_{name}"], rows[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
        with torch.no_grad():
            logps, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, seen, mask.shape[1], self.args.per_device_train_batch_size
            )
        (values,) = self.extra_values
        apart = (logps - rows["ref_per_token_logps"]) * mask if self.beta else torch.zeros_like(logps)
        # trl's logs have the answers of all ranks. A term that gave None is NaN there and counts as 0.
        mine = slice(self.accelerator.process_index * len(ids), (self.accelerator.process_index + 1) * len(ids))
        terms = [torch.tensor(list(self._logs["rewards"][name])[mine]) for name in self.reward_func_names]
        rewards = (torch.stack(terms, dim=1) * self.reward_weights).nansum(dim=1).to(logps.device)
        earned = place_rewards(rewards, mask) - self.beta * apart
        advantages, returns = estimate(earned, values, mask, self.ppo)
        rows |= {"advantages": self._whiten(advantages, mask), "returns": returns, "old_values": values}
        if self.beta:
            total = self.accelerator.reduce(torch.stack((apart.sum(), mask.sum())))
            self._metrics["train"]["kl"].append(float(total[0] / total[1]))
        return rows | {"old_per_token_logps": logps}

    def _compute_loss(self, model: Any, inputs: Rows) -> torch.Tensor:
        """Return trl's loss plus the weighted loss of the values; append their measures to the metrics. Collective."""
        # Without trl's divergence term: the divergence is in the rewards.
        beta, self.beta = self.beta, 0.0
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        (values,), mask = self.extra_values, inputs["completion_mask"]
        missed = value_losses(values, inputs["old_values"], inputs["returns"], self.ppo.value_clip) * mask
        # The tokens of all ranks, as trl divides its loss; the mean over ranks, which comes later, is taken back here.
        value_loss = missed.sum() / (inputs["num_items_in_batch"] / self.accelerator.num_processes)
        self._record(values.detach(), missed.detach(), inputs["returns"], mask)
        total: torch.Tensor = loss + self.ppo.value_weight * value_loss
        return total

    def _whiten(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the values with mean 0 and deviation 1 over all ranks' tokens; 0 where `mask` is 0. Collective."""
        wide = values.double() * mask
        total, squares, count = self.accelerator.reduce(torch.stack((wide.sum(), wide.square().sum(), mask.sum())))
        mean = total / count
        deviation = (squares / count - mean**2).clamp(min=0).sqrt()
        whitened: torch.Tensor = (wide - mean) / (deviation + 1e-8) * mask
        return whitened.float()

    def _record(self, values: torch.Tensor, missed: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Append to trl's metrics the mean value_loss of a token and value_explained, a share of the returns' variance.

        `values`, `missed` (the losses), `returns` and `mask` are [answers, tokens]. Without variance, leaves
        value_explained out. Collective.
        """
        wide = returns.double() * mask
        sums = torch.stack((missed.double().sum(), (values - returns).double().square().mul(mask).sum(), mask.sum()))
        sums = self.accelerator.reduce(torch.cat((sums, torch.stack((wide.sum(), wide.square().sum())))))
        loss, residual, count, total, squares = sums.tolist()
        variance = squares - total**2 / count
        self._metrics["train"]["value_loss"].append(loss / count)
        if variance > 0:
            self._metrics["train"]["value_explained"].append(1 - residual / variance)


def place_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the rewards [answers] at the last token of each answer, 0 elsewhere: [answers, tokens], as `mask`."""
    # The reward of an empty answer stands at the first token.
    last = mask.sum(dim=1, keepdim=True).long() - 1
    return torch.zeros(mask.shape, device=mask.device).scatter(1, last.clamp(min=0), rewards[:, None])


def estimate(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, ppo: Ppo
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) of every token, each [answers, tokens], 0 where `mask` is 0.

    Advantages are the generalized advantage estimates for `rewards` and `values`, both [answers, tokens], with gamma
    and gae_lambda of `ppo`. Returns are advantages plus values.
    """
    values, advantage = values * mask, torch.zeros_like(values[:, 0])
    # The value after an answer's last token is 0: nothing more can be earned.
    following, backwards = torch.zeros_like(values[:, 0]), []
    for token in reversed(range(values.shape[1])):
        surprise = rewards[:, token] + ppo.gamma * following - values[:, token]
        advantage = (surprise + ppo.gamma * ppo.gae_lambda * advantage) * mask[:, token]
        following = values[:, token]
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, (advantages + values) * mask


def value_losses(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Return each token's loss: half the larger squared error against `returns` of the value and of the clipped value.

    The clipped value stays within `clip` of `before`, the value at generation. All tensors have the same shape.
    """
    near = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
