"""Run stage grpo through trl's GRPOTrainer: the model answers, and the answers to a prompt are compared.

What is sampled depends on (seed, step, row of the step), so a resumed run samples what the unbroken one would,
with grpo.iterations above 1 from the next generation on.

Answers are generated with the training weights (model/generation.py), plan.generation_rows at a time: trl's generation
would need the keys and values of all answers of a step at once. How many at a time changes no answer, except where
products of other sizes round so that two tokens change places. Under ZeRO-3 each rank gathers the whole model once a
step, and the plan counts it: gathering it layer by layer would move all weights for every token.
"""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Grpo, Term
from finlm.recipe.shape import is_quantized
from finlm.rows.shards import Order
from finlm.train.batches import Numbers
from finlm.train.entry import Rank
from finlm.train.model import kernels
from finlm.train.model.generation import Drawing, Limits, generate, row_keys
from finlm.train.post import rollouts, start, trainers
from finlm.train.post.rollouts import Prompt, Rewards, read_prompts
from finlm.train.post.start import load_start, lora_config, padding_tokenizer
from finlm.train.post.trainers import Recorded, trl_arguments
from finlm.train.zero.storage import State

Answers = list[list[int]]
Rows = dict[str, torch.Tensor]  # of trl: what a micro-step learns from
LogProbs = list[list[float]]


class GroupTrainer(Recorded, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer over the run's prompts, with answers of model/generation.py, or of vLLM by grpo.engine."""

    names = {  # noqa: RUF012
        "reward": "reward",
        "reward_std": "reward_std",
        "equal_groups": "frac_reward_zero_std",  # share of prompts whose answers all earn the same: nothing is learnt
        "answer_tokens": "completions/mean_length",
        "cut_off": "completions/clipped_ratio",
        "entropy": "entropy",
        "kl": "kl",
    }

    drawn_first: Mapping[str, list[float]] = {}  # by source, what drawn answers earned at step 0
    learnt_from: Rows | None = None  # the rows of the loss that is being computed
    extra_outputs: tuple[torch.Tensor, ...] = ()  # what else a forward pass says of each token: [rows, tokens - 1]
    extra_values: Sequence[torch.Tensor] = ()  # the same of the tokens that the last call was about

    def __init__(self, r: Rank[Recipe], model: Any, terms: list[Rewards], tokenizer: Any, **given: Any) -> None:
        """Read the prompts and make trl's trainer, which rewards by `terms`. Raises ValueError without prompts."""
        self.prompts = read_prompts(r.shards, r.shards.split("train"), tokenizer)
        self.held_out = r.held_out(lambda parts: read_prompts(r.shards, parts, tokenizer))  # by source
        self.order = Order(len(self.prompts), r.recipe.train.seed)  # endless: order[positions] are indices of prompts
        self.is_generated = False  # whether answers came since the last step
        self.grpo = settings_of(r)
        self.mismatch = rollouts.Mismatch(self.grpo.importance_cap, r.device)
        self.tokens_learnt: list[torch.Tensor] = []  # of each micro-step of a step, on this rank
        super().__init__(r, model=model, reward_funcs=terms, processing_class=tokenizer, **given)
        self.reward_func_names = names_of(self.grpo.reward)  # trl keeps the rewards of equal names in one list

    def tokens_of_step(self, step: int) -> tuple[int, int]:
        """Return (answer tokens, answer and prompt tokens) of the last generation over all ranks, whatever `step`."""
        return self.generated

    def metrics_of_step(self) -> Numbers:
        """Return fields of the `step` event: trl's metrics, mismatch and, after a generation, its rewards and measures.

        Empties trl's metrics. Records incidents of answers, and after a generation some answers in rollouts.jsonl (rank
        0). Collective.
        """
        # The terms from a copy, and first: draining removes all of trl's metrics.
        terms = {name: f"rewards/{name}/mean" for name in self.reward_func_names}
        means = trainers.drain_metrics({key: self._metrics["train"][key] for key in terms.values()}, terms)
        tokens = self.accelerator.reduce(torch.stack(self.tokens_learnt)).tolist()
        self.tokens_learnt.clear()
        drained = trainers.drain_metrics(self._metrics["train"], self.names, tokens)
        metrics: dict[str, float | Numbers] = {**drained, **self.mismatch.take()}
        if self.is_generated:
            self.is_generated = False
            measured = rollouts.text_statistics(list(self._logs["completion"]), self.grpo.checked)
            metrics |= {"rewards": means, **measured}
            if self.rank.rank == 0:
                rollouts.write_answers(self.rank.run, self.state.global_step, list(self._recorded_answers()))
        for incident in self.gaming.judge(metrics):
            self.rank.events.record("incident", step=self.state.global_step, what=incident.what, detail=incident.detail)
        return metrics

    def _recorded_answers(self) -> Iterator[rollouts.Answer]:
        """Yield all ranks' answers of the last generation, from trl's logs; does not communicate."""
        logs, weights = self._logs, self.reward_weights.tolist()
        given = zip(logs["prompt"], logs["completion"], logs["advantages"], self.numbers, strict=True)
        for place, (prompt, text, advantage, number) in enumerate(given):
            values = [logs["rewards"][name][place] for name in self.reward_func_names]
            # A term that gave None is NaN in trl's logs, and counts as 0 in the weighted sum.
            known = [None if math.isnan(value) else value for value in values]
            reward = sum(weight * (value or 0.0) for weight, value in zip(weights, known, strict=True))
            earned = dict(zip(self.reward_func_names, known, strict=True))
            yield rollouts.Answer(prompt, self.prompts[number]["answer"], text, earned, reward, advantage)

    def state_for_checkpoint(self) -> State:
        """Return {skipped, rollouts, drawn_first}: skipped steps, the watch over answers, drawn rewards of step 0."""
        saved: State = super().state_for_checkpoint()
        return saved | {"rollouts": self.gaming.state(), "drawn_first": list(self.drawn_first.items())}

    def restore(self, saved: State) -> None:
        """Restore a value of state_for_checkpoint(), or {}; rank 0 cuts rollouts.jsonl back to the run's step."""
        super().restore(saved)
        self.gaming = rollouts.Watch(self.rank.recipe.incidents.rollouts, saved.get("rollouts"))
        self.drawn_first = dict(saved.get("drawn_first", ()))
        if self.rank.rank == 0:
            rollouts.drop_rows_after(self.rank.run, self.state.global_step)

    def evaluate_held_out(self) -> Numbers | None:
        """Return the mean rewards of answers to held-out prompts, in all and, as `sources`, of each source. Collective.

        `reward` is of the likeliest answers, `rewards` the mean of each term, `prompts` their number, `sampled` of
        grpo.held_out_answers drawn answers if any, `rise` and `rise_interval` its gain since step 0. Returns None when
        no prompts are held out. Puts the model into train mode.
        """
        if not self.held_out:
            return None
        self.model.eval()
        likeliest = {name: self._reward_answers(prompts) for name, prompts in self.held_out.items()}
        drawn = {name: self._mean_drawn_rewards(prompts) for name, prompts in self.held_out.items()}
        self.model.train()
        if not self.state.global_step:
            self.drawn_first = {name: values.tolist() for name, values in drawn.items()}
        sources = {name: self._means(values) | self._rise(drawn, [name]) for name, values in likeliest.items()}
        return self._means(torch.cat(list(likeliest.values()))) | self._rise(drawn, list(drawn)) | {"sources": sources}

    def _means(self, values: torch.Tensor) -> dict[str, float | Numbers]:
        """Return {reward, prompts, rewards by term}, means of values [prompts, terms]; NaN counts as 0 in `reward`."""
        rewards = (values * self.reward_weights).nansum(dim=1)
        terms = dict(zip(self.reward_func_names, values.nanmean(dim=0).tolist(), strict=True))
        return {"reward": float(rewards.mean()), "prompts": len(values), "rewards": terms}

    def _rise(self, drawn: dict[str, torch.Tensor], names: list[str]) -> dict[str, float | list[float]]:
        """Return {sampled}, the mean of drawn answers of these sources, with `rise` and `rise_interval` since step 0.

        `drawn` has each source's rewards [prompts]. Returns {} when nothing was drawn, only `sampled` without as many
        values from step 0.
        """
        now = torch.cat([drawn[name] for name in names])
        first = [value for name in names for value in self.drawn_first.get(name, ())]
        if not len(now) or len(first) != len(now):
            return {"sampled": float(now.mean())} if len(now) else {}
        return {"sampled": float(now.mean()), **rollouts.mean_rise((now - torch.tensor(first)).tolist())}

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return (log-probabilities, entropies or None, None) of the last tokens: fp32 [rows, logits_to_keep].

        Runs `batch_size` rows at a time, all if None. Sets extra_values to these tokens' extra_outputs, which a hook of
        the model sets. While a loss is computed, corrects its advantages (Mismatch.correct).
        """
        # Prompts are padded on their left. The padding moves behind the answers, where no token that counts looks:
        # attention then needs no mask, and flash attention takes none.
        order = attention_mask.argsort(dim=1, descending=True, stable=True)
        ids, real = input_ids.gather(1, order), attention_mask.gather(1, order)
        labels = ids.masked_fill((real == 0) | (order < input_ids.shape[1] - logits_to_keep), -100)
        before = order.argsort(dim=1)[:, -logits_to_keep:] - 1  # where a kept token's log-probability stands
        size, parts_of_rows = batch_size or len(ids), []
        for rows in (slice(first, first + size) for first in range(0, len(ids), size)):
            given = {"input_ids": ids[rows], "position_ids": kernels.plain_positions(ids), "labels": labels[rows]}
            with self.accelerator.autocast():
                out = model(**given, fused_lm_head=True)
            kept = (out.log_probs, *([out.entropy] if compute_entropy else []), *self.extra_outputs)
            self.extra_outputs = ()
            parts_of_rows.append([each.gather(1, before[rows]) for each in kept])
        logps, *rest = (torch.cat(parts) for parts in zip(*parts_of_rows, strict=True))
        self.extra_values = rest[1:] if compute_entropy else rest
        if self.learnt_from is not None:
            self.mismatch.correct(self.learnt_from, logps.detach())
        return logps, rest[0] if compute_entropy else None, None

    def _compute_loss(self, model: Any, inputs: Rows) -> torch.Tensor:
        """Return trl's loss with Mismatch's advantages; add the answers' tokens to tokens_learnt. Keeps `inputs`."""
        # A copy: Mismatch replaces its advantages, and with grpo.iterations above 1 the same rows come again.
        self.learnt_from = dict(inputs)
        self.tokens_learnt.append(inputs["completion_mask"].sum())
        try:
            loss: torch.Tensor = super()._compute_loss(model, self.learnt_from)
        finally:
            self.learnt_from = None
        return loss

    def _generate_single_turn(self, prompt_ids: list[list[int]], *more: Any) -> tuple[Answers, LogProbs]:
        """Return (ids, log-probabilities) of an answer to each prompt. `more` goes to trl with vLLM. Collective.

        Records the event `generated`; sets is_generated, and self.generated to the tokens over all ranks.
        """
        self.is_generated, begun = True, time.monotonic()
        if self.use_vllm:
            answers, log_probs = super()._generate_single_turn(prompt_ids, *more)
        else:
            answers, log_probs = self._generate_answers(prompt_ids, self.keys, self.longest)
        counts = [sum(map(len, answers)), sum(map(len, prompt_ids))]
        answered, asked = self.accelerator.reduce(torch.tensor(counts, device=self.rank.device)).tolist()
        self.generated = answered, asked + answered
        fields = {"tokens": answered, "seconds": round(time.monotonic() - begun, 3)}
        self.rank.events.record("generated", step=self.state.global_step + 1, **fields)
        return answers, log_probs

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        """Return (ids of the prompts that _read() yielded last, None, {}); several ids may have the same text."""
        return self.asked, None, {}

    def _read(self, step: int) -> Iterator[list[Prompt]]:
        """Yield this rank's prompts of a step (0-based), a prompt per answer: the same list at each micro-step.

        Seeds torch, adds the prompts to the checksum, and sets trl's count of micro-steps (_step) and what generating
        reads (numbers, keys, asked, longest).
        """
        grpo, plan = self.grpo, self.rank.plan
        self._step = step * plan.gradient_accumulation_steps
        answers = plan.micro_batch * plan.gradient_accumulation_steps
        count = answers * plan.world_size // grpo.generations
        first = step // grpo.iterations * count
        order = self.order[np.arange(first, first + count, dtype=np.uint64)]
        self.numbers = np.repeat(order, grpo.generations).tolist()
        mine = [self.prompts[number] for number in self.numbers[self.rank.rank * answers :][:answers]]
        self.checksum.add(np.array(prompt["prompt_ids"]) for prompt in mine)
        seed = f"{self.rank.recipe.train.seed}/{step // grpo.iterations}"
        # trl shuffles the answers with torch's generator, and dropout draws from it: a resumed step must do the same.
        torch.manual_seed(zlib.crc32(f"{seed}/{self.rank.rank}".encode()))
        self.keys = row_keys(seed, range(self.rank.rank * answers, (self.rank.rank + 1) * answers))
        self.asked = [prompt["prompt_ids"] for prompt in mine]
        self.longest = max(len(self.prompts[number]["prompt_ids"]) for number in self.numbers)
        for _ in range(plan.gradient_accumulation_steps):
            yield mine

    def _generate_answers(
        self, prompts: list[list[int]], keys: torch.Tensor | None, longest: int
    ) -> tuple[Answers, LogProbs]:
        """Return (ids with the end token, log-probabilities) of an answer to each prompt, in eval mode. Collective.

        `keys` has a key of row_keys() for each prompt; without it the answers are the likeliest. `longest` is the
        tokens of the longest prompt of any rank. Restores the model's mode.
        """
        plan, grpo, gathers = self.rank.plan, self.grpo, self.args.ds3_gather_for_generation
        limits = Limits(
            most=grpo.max_new_tokens,
            ends=self.eos_token_ids,
            rows=plan.generation_rows or len(prompts),
            room=longest + grpo.max_new_tokens,
            vocab_size=plan.vocab_size,
        )
        drawing = Drawing() if keys is None else Drawing(grpo.temperature, grpo.top_p)
        compiled = self.rank.recipe.train.compile is not False and not is_quantized(self.rank.recipe)
        # cuDNN would prepare itself anew for every length of prompts.
        if plan.attention == "cudnn":
            plan = dataclasses.replace(plan, attention="flash")
        whole = unwrap_model_for_generation(self.model_wrapped, self.accelerator, gather_deepspeed3_params=gathers)
        with kernels.attention_backends(plan), whole as model:
            was_training = model.training
            # Dropout would draw other numbers when other rows are generated together.
            model.eval()
            answers = generate(model, prompts, limits, keys, drawing, compiled)
            model.train(was_training)
        if plan.device == "cuda":
            # Training needs none of the memory that keys and values had, and allocates other sizes.
            torch.cuda.empty_cache()
        return [answer.ids for answer in answers], [answer.log_probs for answer in answers]

    def _mean_drawn_rewards(self, prompts: list[Prompt]) -> torch.Tensor:
        """Return the mean reward of grpo.held_out_answers drawn answers to each prompt: [prompts]. Collective.

        The noise that draws them is the same every time. Empty when that number is 0.
        """
        count = self.grpo.held_out_answers
        if not count:
            return torch.empty(0)
        repeated = [prompt for prompt in prompts for _ in range(count)]
        keys = row_keys(f"{self.rank.recipe.train.seed}/held out", range(len(repeated)))
        values = self._reward_answers(repeated, keys)
        earned: torch.Tensor = (values * self.reward_weights).nansum(dim=1).view(len(prompts), count).mean(dim=1)
        return earned

    def _reward_answers(self, prompts: list[Prompt], keys: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rewards of an answer to each prompt: fp32 [prompts, terms] on the CPU, NaN for None. Collective.

        Answers are the likeliest, or drawn by `keys`, row_keys() of the prompts. Every rank passes the same prompts and
        answers a part of them. Raises ValueError without prompts.
        """
        longest = max(len(prompt["prompt_ids"]) for prompt in prompts)

        def reward(numbers: list[int]) -> torch.Tensor:
            """Answer the prompts with these indices; return rewards [indices, terms] on the device, NaN for None."""
            batch = [prompts[number] for number in numbers]
            noise = None if keys is None else keys[numbers]
            ids, _ = self._generate_answers([prompt["prompt_ids"] for prompt in batch], noise, longest)
            given = {
                "prompts": [prompt["prompt"] for prompt in batch],
                "asked": [prompt["asked"] for prompt in batch],
                "completions": self.processing_class.batch_decode(ids, skip_special_tokens=True),
                "completion_ids": ids,
                "prompt_ids": [prompt["prompt_ids"] for prompt in batch],
                "answer": [prompt["answer"] for prompt in batch],
            }
            values = [[math.nan if value is None else value for value in term(**given)] for term in self.reward_funcs]
            return torch.tensor(values, device=self.rank.device).T

        return trainers.compute_shared(self.rank, len(prompts), -(-len(prompts) // self.rank.plan.world_size), reward)


def make(r: Rank[Recipe]) -> GroupTrainer:
    """Return the trainer of a rank's run, PpoTrainer for grpo.form ppo. Patches trl for the process.

    Raises UserError if the start or a reward model cannot be loaded, or a reward function is not as it was.
    """
    grpo, trainer = settings_of(r), GroupTrainer
    if grpo.form == "ppo":
        from finlm.train.post.ppo import PpoTrainer  # builds on this module

        trainer = PpoTrainer
    start.score_answers_alone()
    start.refer_to_text(r.recipe.model)
    tokenizer = padding_tokenizer(r)
    model = load_start(r)
    # trl loads the reference from this path when beta is above 0.
    model.config._name_or_path = start.start_path(r.recipe.model)
    # An answer ends with the template's token, not the text's </s>. trl takes both settings as ends (1.16).
    model.generation_config.eos_token_id = r.shards.manifest["end_of_turn_id"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(r.shards.manifest["end_of_turn_id"])
    # Before trl's arguments, which let transformers partition by ZeRO-3 every model that is loaded after them.
    rewards = rollouts.make_rewards(r)
    settings = trl_arguments(
        GRPOConfig,
        r,
        num_generations=grpo.generations,
        max_completion_length=grpo.max_new_tokens,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        reward_weights=[term.weight for term in grpo.reward],
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        **FORMS[grpo.form],
        **ENGINES[grpo.engine],
        vllm_server_base_url=grpo.server,
        vllm_importance_sampling_correction=False,  # rollouts.Mismatch corrects, whatever generates
        num_iterations=grpo.iterations,
        log_completions=False,
        shuffle_dataset=False,
    )
    return trainer(
        r,
        model,
        rewards,
        tokenizer,
        args=settings,
        # Read only for the first row, by which trl tells the kind of data.
        train_dataset=Dataset.from_list([{"prompt": "-", "answer": "A"}]),
        peft_config=lora_config(r.recipe),
    )


FORMS = {  # of trl's losses
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "ppo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


ENGINES: dict[str, dict[str, str | bool]] = {  # of trl
    "transformers": {"use_vllm": False},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate"},
    "vllm-server": {"use_vllm": True, "vllm_mode": "server"},
}


def settings_of(r: Rank[Recipe]) -> Grpo:
    """Return the section grpo of the run's recipe. AssertionError without it."""
    assert r.recipe.grpo is not None
    return r.recipe.grpo


def names_of(terms: Sequence[Term]) -> list[str]:
    """Return a name for each reward term in events; equal names are numbered: format, format-2."""
    names = [term.name for term in terms]
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]
