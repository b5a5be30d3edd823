"""What DPO and the reward model share: pairs of a step, batches of two sequences a pair, held-out accuracy and margin.

Pair p of the run is pair Order[p] of the data, so resuming is a seek; a step takes the next pairs, cut into
micro-steps, then ranks. A batch is padded to its longest sequence. trl's metrics become keys of the step's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed
from transformers import LlamaForCausalLM
from trl.trainer.dpo_trainer import DataCollatorForPreference

from finlm.data import pair_rows
from finlm.data.shards import Order, Shard
from finlm.train import encoding
from finlm.train.loss import linear_log_probs
from finlm.train.model import build, llama_config, padding_id
from finlm.train.trainers import Rank, Recorded, Steps

Pair = dict[str, Any]
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


class PairTrainer(Recorded):
    """A trainer whose rows are pairs. Mixed in before trl's class, with `scores` for the held-out ones."""

    rank: Rank
    pairs: Sequence[Pair]
    names: dict[str, str]  # of trl's metrics, by their name in the row of a step

    def __init__(self, r: Rank, model: torch.nn.Module, **given: Any) -> None:
        self.rank = r
        self.pairs = list(pair_rows.pairs(r.shards.split("train")))
        super().__init__(model=model, **given)  # type: ignore[call-arg]  # trl's, which is next in line
        self.watch(r)

    @cached_property
    def order(self) -> Order:
        """Which pair a position of the run reads."""
        return Order(len(self.pairs), self.rank.recipe.train.seed)

    @cached_property
    def tokens(self) -> Any:
        """Tokens of each pair's two sequences: int64 [pairs]."""
        return np.array([_tokens(pair) for pair in self.pairs])

    def get_train_dataloader(self: Any) -> Steps:
        """This rank's micro-batches from the step the run has reached."""
        plan = self.rank.plan
        return Steps(self._read, lambda: self.state, plan.gradient_accumulation_steps, plan.steps)

    def tokens_of_step(self, step: int) -> int:
        """Tokens of all sequences of a step, over all ranks."""
        return int(self.tokens[self._numbers(step)].sum())

    def metrics_of_step(self: Any) -> dict[str, float]:
        """trl's metrics, each the mean over micro-steps of what it gathered from all ranks."""
        return drained(self._metrics["train"], self.names)

    def evaluate_held_out(self: Any) -> dict[str, Any] | None:
        """Loss, accuracy, margin and range of rewards on the held-out pairs, by source and in all."""
        if not self.held_out:
            return None
        self.model.eval()
        found = {name: self._scored(pairs) for name, pairs in self.held_out.items()}
        self.model.train()
        sources = {name: summary(rewards) for name, rewards in found.items()}
        return summary(torch.cat(list(found.values()))) | {"sources": sources}

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Rewards of a batch on this rank: [pairs, (chosen, rejected)]."""
        raise NotImplementedError

    def batch(self, pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
        """The pairs as trl's collator lays them out, chosen sequences first, on the device."""
        device: torch.device = self.rank.device
        return {name: tensor.to(device) for name, tensor in collated(pairs, self.pad_id).items()}

    @cached_property
    def held_out(self) -> dict[str, list[Pair]]:
        """The held-out pairs of each source, at most eval.max_tokens_per_source of each."""
        r = self.rank
        most = max(1, r.recipe.eval.max_tokens_per_source // r.plan.sequence_length)
        by_source: dict[str, list[Shard]] = {}
        for shard in r.shards.split("held_out"):
            by_source.setdefault(shard.source, []).append(shard)
        return {name: list(pair_rows.pairs(parts))[:most] for name, parts in sorted(by_source.items())}

    @cached_property
    def pad_id(self) -> int:
        """The token that fills batches up."""
        return padding_id(self.rank.shards)

    def _scored(self, pairs: list[Pair]) -> torch.Tensor:
        return spread(
            self.rank,
            len(pairs),
            self.rank.plan.micro_batch,
            lambda numbers: self.scores(self.batch([pairs[number] for number in numbers])),
        )

    def _numbers(self, step: int) -> Any:
        """Pairs of a step: [micro_steps, pairs of rank 0, of rank 1, ...]."""
        plan = self.rank.plan
        count = plan.gradient_accumulation_steps * sum(plan.rank_micro_batches)
        positions = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
        return self.order[positions].reshape(plan.gradient_accumulation_steps, -1)

    def _read(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        sizes = self.rank.plan.rank_micro_batches
        first = sum(sizes[: self.rank.rank])
        for numbers in self._numbers(step)[:, first : first + sizes[self.rank.rank]]:
            pairs = [self.pairs[number] for number in numbers.tolist()]
            self.checksum.add(np.concatenate([pair[name] for name in IDS]) for pair in pairs)
            yield self.batch(pairs)


def spread(r: Rank, count: int, size: int, one: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    """one(numbers) -> [size, ...] for numbers 0 to count - 1, shared over ranks and gathered: [count, ...].

    size: numbers of a call. Every rank makes as many calls, because ZeRO-3 gathers parameters in each of them.
    """
    ranks, found = r.plan.world_size, []
    for first in range(r.rank * size, -(-count // (ranks * size)) * ranks * size, ranks * size):
        with torch.no_grad():
            found.append(one([min(number, count - 1) for number in range(first, first + size)]).float())
    mine = torch.stack(found)
    every = [torch.empty_like(mine) for _ in range(ranks)]
    distributed.all_gather(every, mine)
    return torch.stack(every, dim=1).flatten(0, 2)[:count].cpu()  # of [calls, ranks, size, ...]


def collated(pairs: Sequence[Pair], pad_id: int) -> dict[str, torch.Tensor]:
    """Pairs as trl's collator lays them out: int64 [2 * pairs, longest], chosen sequences first."""
    lists = [{name: getattr(value, "tolist", lambda v=value: v)() for name, value in pair.items()} for pair in pairs]
    batch: dict[str, torch.Tensor] = DataCollatorForPreference(pad_token_id=pad_id)(lists)
    return batch


def summary(rewards: torch.Tensor) -> dict[str, float]:
    """What [pairs, (chosen, rejected)] rewards come to. loss: Bradley-Terry's, -log sigmoid of the margin."""
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


def drained(metrics: dict[str, list[float]], names: dict[str, str]) -> dict[str, float]:
    """The means of trl's metrics under our names; trl's lists are emptied."""
    found = {ours: sum(metrics[theirs]) / len(metrics[theirs]) for ours, theirs in names.items() if metrics[theirs]}
    metrics.clear()
    return found


class RewardHead(torch.nn.Linear):
    """A reward model's head, whose rewards are fp32: bf16 has 8 bits, two answers often get the same then."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., hidden_size]."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


def swap_head(model: LlamaForCausalLM, vocab_size: int) -> None:
    """Let model(...).log_probs be those of the labels, as trl's own head gives them; after trl has put that in place.

    On CPUs trl's head scores every position, prompts too, in slices of 32,768 tokens: ten times the work here.
    """
    model.lm_head.forward = partial(_head, model.lm_head, vocab_size)
    model.forward = partial(_answers, model)


def _answers(model: LlamaForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor, **given: Any) -> SimpleNamespace:
    """log_probs fp32 [batch, sequence - 1]. What else trl looks at is 0, and recorded nowhere."""
    hidden = model.model(input_ids=input_ids, attention_mask=given["attention_mask"], use_cache=False).last_hidden_state
    log_probs: torch.Tensor = model.lm_head(hidden[:, :-1], labels[:, 1:])  # a module's call: ZeRO-3 gathers its weight
    nothing = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def _head(head: torch.nn.Linear, vocab_size: int, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_log_probs(hidden, head.weight, labels, vocab_size)


def start(r: Rank) -> LlamaForCausalLM:
    """The model that the recipe starts from, with transformers' own forward: trl puts its head there."""
    config = llama_config(r.recipe, r.plan, r.shards.bos_id, r.shards.eos_id)
    model = build(r.recipe, r.plan, r.ds_config, config, r.shards.tokenizer)
    for module in (model, model.lm_head):
        module.__dict__.pop("forward", None)  # train.kernels' loss
    return model.to(r.device)


def tokenizer(r: Rank) -> Any:
    """The tokenizer of the run's data, padding with model.padding_id."""
    found = encoding.of_dialogues(r.shards)
    found.pad_token = found.convert_ids_to_tokens(padding_id(r.shards))
    return found


def _tokens(pair: Pair) -> int:
    return 2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"])
