"""Run stages dpo and reward through trl's trainers: batches of two sequences a pair, held-out accuracy and margin.

Pair p of the run is pair order[p] of the data, so resuming is a seek; a step takes the next pairs, cut into
micro-steps, then ranks. A batch is padded to its longest sequence. trl's metrics become fields of the `step` event.

DPO's reference is the start itself, run once before the first step and remembered as two numbers a pair, so no second
model is kept. After a resume it is run again, before the checkpoint is loaded. ORPO needs none. A reward model is the
start's body with a linear head that reads the end of the turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.models import prepare_deepspeed
from trl.trainer.dpo_trainer import DataCollatorForPreference

from finlm.recipe.schema import Recipe
from finlm.rows import dialogues
from finlm.rows.dialogues import Pair
from finlm.rows.shards import Order
from finlm.train.batches import Numbers
from finlm.train.entry import Rank
from finlm.train.model import causal_lm
from finlm.train.post import start
from finlm.train.post.start import RewardHead, forward_without_mask, load_start, padding_id, padding_tokenizer
from finlm.train.post.trainers import Recorded, compute_shared, drain_metrics, trl_arguments

IDS: tuple[Literal["prompt_ids", "chosen_ids", "rejected_ids"], ...] = ("prompt_ids", "chosen_ids", "rejected_ids")


class PairTrainer(Recorded):
    """Mixin, before trl's class, for a trainer whose rows are pairs; a subclass defines `names` and scores(batch).

    scores() returns the rewards of a batch() on this rank, [pairs, (chosen, rejected)]; callers set eval mode and
    no_grad.
    """

    rank: Rank[Recipe]
    names: dict[str, str]  # of trl's metrics, by their name in the row of a step

    def __init__(self, r: Rank[Recipe], model: torch.nn.Module, **given: Any) -> None:
        """Read the run's pairs into memory; make trl's trainer of `model`. Raises ValueError without training pairs."""
        # Before trl's constructor, in which DPO scores the pairs.
        self.pairs = list(dialogues.read_pairs(r.shards.split("train")))
        self.held_out = r.held_out(lambda parts: list(dialogues.read_pairs(parts)))  # by source
        self.order = Order(len(self.pairs), r.recipe.train.seed)  # endless: order[positions] are indices of pairs
        # Both sequences of a pair begin with the prompt.
        self.tokens = np.array([sum(len(pair[name]) for name in ("prompt_ids", *IDS)) for pair in self.pairs])
        self.pad_id = padding_id(r.shards)
        super().__init__(r, model=model, **given)

    def tokens_of_step(self, step: int) -> tuple[int, int]:
        """Return (tokens, tokens): all tokens of a step's pairs count as labels and as read. `step` is 0-based."""
        tokens = int(self.tokens[self._numbers(step)].sum())
        return tokens, tokens

    def metrics_of_step(self: Any) -> Numbers:
        """Return trl's metrics by the keys of `names`, each the mean over micro-steps. Remove all of trl's metrics."""
        return drain_metrics(self._metrics["train"], self.names)

    def evaluate_held_out(self: Any) -> Numbers | None:
        """Return reward_statistics() of held-out pairs, if any, with `sources`; end in train mode. Collective."""
        if not self.held_out:
            return None
        self.model.eval()
        rewards_of = {name: self._score_pairs(pairs, self.scores) for name, pairs in self.held_out.items()}
        self.model.train()
        sources = {name: reward_statistics(rewards) for name, rewards in rewards_of.items()}
        return reward_statistics(torch.cat(list(rewards_of.values()))) | {"sources": sources}

    def batch(self, pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
        """Return the pairs on the device in the form of collate_pairs(): chosen sequences first."""
        device: torch.device = self.rank.device
        return {name: tensor.to(device) for name, tensor in collate_pairs(pairs, self.pad_id).items()}

    def _score_pairs(self, pairs: Sequence[Pair], scores: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return scores(batch) of all pairs, which the ranks share: fp32 [pairs, (chosen, rejected)], on the CPU.

        Collective; without gradients; the caller sets eval mode. Raises RuntimeError when `pairs` is empty.
        """
        size = self.rank.plan.micro_batch
        return compute_shared(
            self.rank, len(pairs), size, lambda numbers: scores(self.batch([pairs[n] for n in numbers]))
        )

    def _numbers(self, step: int) -> Any:
        """Return the indices of a step's pairs: int64 [micro_steps, pairs of rank 0, of rank 1, ...]."""
        plan = self.rank.plan
        count = plan.gradient_accumulation_steps * sum(plan.rank_micro_batches)
        positions = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
        return self.order[positions].reshape(plan.gradient_accumulation_steps, -1)

    def _read(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches of a step, on the device; add their tokens to the checksum."""
        sizes = self.rank.plan.rank_micro_batches
        first = sum(sizes[: self.rank.rank])
        for numbers in self._numbers(step)[:, first : first + sizes[self.rank.rank]]:
            pairs = [self.pairs[number] for number in numbers.tolist()]
            self.checksum.add(np.concatenate([pair[name] for name in IDS]) for pair in pairs)
            yield self.batch(pairs)


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> dict[str, torch.Tensor]:
    """Return trl's tensors for the pairs: input_ids, attention_mask and completion_mask, int64 [2 * pairs, longest].

    The chosen sequences come first, then the rejected. Reference log-probabilities, if the pairs have them, are
    [pairs].
    """
    # Token ids are arrays, which trl's collator does not take; reference log-probabilities are floats.
    lists = [{name: getattr(value, "tolist", lambda v=value: v)() for name, value in pair.items()} for pair in pairs]
    batch: dict[str, torch.Tensor] = DataCollatorForPreference(pad_token_id=pad_id)(lists)
    return batch


def reward_statistics(rewards: torch.Tensor) -> dict[str, float]:
    """Return loss (-log sigmoid of the margin), accuracy, margin, reward_min, reward_mean, reward_max and pairs.

    `rewards` is [pairs, (chosen, rejected)]; loss, accuracy and margin are means over pairs, `pairs` is their number.
    """
    chosen, rejected = rewards.double().unbind(1)
    margin = chosen - rejected
    return {
        "loss": float(-torch.nn.functional.logsigmoid(margin).mean()),
        "accuracy": float((margin > 0).double().mean()),
        "margin": float(margin.mean()),
        "reward_min": float(rewards.min()),
        "reward_mean": float(rewards.double().mean()),
        "reward_max": float(rewards.max()),
        "pairs": len(rewards),
    }


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
        """Return implicit rewards, [pairs, (chosen, rejected)]; take the reference's logps out of the batch."""
        # beta times the log-ratio of the model to the reference (arXiv 2305.18290).
        references = torch.stack((batch.pop("ref_chosen_logps"), batch.pop("ref_rejected_logps")), dim=1)
        return float(self.beta) * (self._logps(self.model_wrapped, batch) - references)

    def proof(self, ids: list[int]) -> dict[str, float]:
        """Return {"loss": mean loss of at least two ids after the first}. Collective; the caller sets eval mode."""
        read = torch.tensor([ids], device=self.rank.device)
        batch = {"input_ids": read, "attention_mask": torch.ones_like(read), "completion_mask": torch.ones_like(read)}
        return {"loss": -float(self._logps(self.model_wrapped, batch).sum()) / (len(ids) - 1)}

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        """Return the data set as it is: rows are tokenised already."""
        return dataset

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Swap the head; add the start's log-probabilities to all pairs in place; return `dataset`. Collective."""
        # trl scores with an engine of its own and keeps the result in a file of the data set; finlm's runs keep none.
        start.swap_head(causal_lm.base_model(self.model), self.rank.plan.vocab_size)
        # There is no engine yet; only ZeRO-3's parts need one to be gathered.
        is_partitioned = self.rank.plan.zero_stage == 3
        model = prepare_deepspeed(self.model, self.accelerator) if is_partitioned else self.model
        model.eval()
        # Without its adapters the model is the start.
        with getattr(self.model, "disable_adapter", contextlib.nullcontext)():
            for pairs in (self.pairs, *self.held_out.values()):
                logps = self._score_pairs(pairs, partial(self._logps, model))
                for pair, (chosen, rejected) in zip(pairs, logps.tolist(), strict=True):
                    pair |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self.model.train()
        return dataset

    def _logps(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return each answer's summed log-probability, fp32 [pairs, (chosen, rejected)], by the head of swap_head."""
        ids, mask = batch["input_ids"], batch["completion_mask"]
        labels = ids.masked_fill(mask == 0, -100)
        asked = {"input_ids": ids, "attention_mask": batch["attention_mask"], "use_cache": False}
        with self.accelerator.autocast():
            logps = model(**asked, labels=labels, fused_lm_head=True).log_probs.sum(dim=1)
        return torch.stack(logps.chunk(2), dim=1)


class OrpoTrainer(PreferenceTrainer):
    """ORPO (arXiv 2403.07691): the answer's own loss and the odds of the chosen over the rejected answer, no reference.

    trl's ORPOTrainer learns the prompt too, and averages the loss over a micro-batch's tokens; here as in the paper.
    """

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-odds of the answers, [pairs, (chosen, rejected)]."""
        # With them as rewards, reward_statistics() gives equation 7 of the paper as the loss of held-out pairs.
        return log_odds(self._means(self.model_wrapped, batch))

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> torch.Tensor:
        """Return this rank's mean ORPO loss alone; append all ranks' mean rewards to trl's metrics. Collective."""
        means = self._means(model, inputs)
        odds = log_odds(means)
        chosen, rejected = self.accelerator.gather(odds.detach()).unbind(1)
        accuracies, margins = (chosen > rejected).float(), chosen - rejected
        noted = {"accuracies": accuracies, "margins": margins, "chosen": chosen, "rejected": rejected}
        for name, values in noted.items():
            self._metrics["train"][f"rewards/{name}"].append(values.mean().item())
        ratio = torch.nn.functional.logsigmoid(odds[:, 0] - odds[:, 1])
        return -(means[:, 0] + float(self.beta) * ratio).mean()

    def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
        """Put the head that is trained into the model and return the data set as it is: ORPO has no reference."""
        start.swap_head(causal_lm.base_model(self.model), self.rank.plan.vocab_size)
        return dataset

    def _means(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean log-probability of an answer's tokens: [pairs, (chosen, rejected)]."""
        return self._logps(model, batch) / torch.stack(batch["completion_mask"].sum(dim=1).chunk(2), dim=1)


def log_odds(means: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of the mean log-probabilities log p, which are cut at -1e-6 so that odds are finite."""
    means = means.clamp(max=-1e-6)
    return means - torch.log(-torch.expm1(means))


class RewardModelTrainer(PairTrainer, RewardTrainer):  # type: ignore[misc]
    """RewardTrainer over the run's pairs."""

    names = {  # noqa: RUF012
        "accuracy": "accuracy",
        "margin": "margin",
        "reward_min": "min_reward",
        "reward_mean": "mean_reward",
        "reward_max": "max_reward",
    }

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the model's rewards, [pairs, (chosen, rejected)]; remove `margin` from the batch."""
        batch.pop("margin", None)
        rewards = self.model_wrapped(**batch, use_cache=False).logits.squeeze(-1)
        return torch.stack(rewards.chunk(2), dim=1)

    def proof(self, ids: list[int]) -> dict[str, float]:
        """Return {"reward": reward at the end of the text `ids`}. Collective; the caller sets eval mode, no_grad."""
        read = torch.tensor([ids], device=self.rank.device)
        batch = {"input_ids": read, "attention_mask": torch.ones_like(read)}
        return {"reward": float(self.model_wrapped(**batch, use_cache=False).logits)}

    def batch(self, pairs: Any) -> dict[str, torch.Tensor]:
        """Return PairTrainer's batch without completion_mask; add `margin`, fp32 [pairs], if the recipe has one."""
        batch = super().batch(pairs)
        del batch["completion_mask"]
        settings = self.rank.recipe.reward
        if settings is not None and settings.margin:
            batch["margin"] = torch.full((len(pairs),), settings.margin, device=self.rank.device)
        return batch


def make_reward_model(model: Any, pad_id: int) -> Any:
    """Return a reward model: the body of the causal `model`, not a copy, and a drawn head; sets the padding id."""
    config = model.config.__class__(**model.config.to_dict() | {"num_labels": 1, "pad_token_id": pad_id})
    # On no device, because the body is replaced at once.
    with torch.device("meta"):
        reward_model = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config)
    weight = model.lm_head.weight
    reward_model.model = model.model
    reward_model.score = RewardHead(config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype)
    # As trl's scripts draw it: rewards of about one standard deviation on normed states.
    torch.nn.init.normal_(reward_model.score.weight, std=(config.hidden_size + 1) ** -0.5)
    reward_model.forward = partial(forward_without_mask, reward_model)
    return reward_model


def make(r: Rank[Recipe]) -> PairTrainer:
    """Return the trainer of a rank's run of stage dpo or reward, with its model loaded.

    Raises UserError if the start's weights cannot be loaded, StopIteration without a training pair.
    """
    first = next(dialogues.read_pairs(r.shards.split("train")))
    model: Any = load_start(r)
    if (dpo := r.recipe.dpo) is not None:
        settings = trl_arguments(
            DPOConfig,
            r,
            beta=dpo.beta,
            # trl's DPO does not know orpo, and OrpoTrainer does not read this.
            loss_type=["sigmoid" if dpo.loss == "orpo" else dpo.loss],
            label_smoothing=dpo.label_smoothing,
            precompute_ref_log_probs=True,
            max_length=None,
        )
    else:
        assert r.recipe.reward is not None
        model = make_reward_model(model, padding_id(r.shards))
        center = r.recipe.reward.center or None
        settings = trl_arguments(RewardConfig, r, center_rewards_coefficient=center, max_length=None)
    # Read only for the first row, by which trl tells the kind of data.
    rows = Dataset.from_list([{name: first[name].tolist() for name in IDS}])
    given = {"args": settings, "train_dataset": rows, "processing_class": padding_tokenizer(r)}
    if r.recipe.dpo is None:
        return RewardModelTrainer(r, model, **given)
    kind = OrpoTrainer if r.recipe.dpo.loss == "orpo" else PreferenceTrainer
    return kind(r, model, **given, peft_config=start.lora_config(r.recipe))
