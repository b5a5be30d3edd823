"""Read prompts, reward the answers of a step, record some of them, and watch their measures.

The terms of grpo.reward are functions that trl calls. Each returns a value for an answer, or None where the row has no
right answer of its kind: trl leaves those out of means. The user's function is read from the copy in the run directory,
so a resumed run rewards by the code it began with.

A reward that rises while answers grow long, repeat themselves, lose their variety or name no answer is not the skill
that was meant. Incidents are measured against the first steps of the run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import distributed
from transformers import AutoModelForSequenceClassification

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.dialogues import scoring
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Rollouts, Term
from finlm.rows import dialogues
from finlm.rows.shards import Shard, Shards
from finlm.train.entry import Rank
from finlm.train.incidents import Incident
from finlm.train.model import causal_lm
from finlm.train.post import start
from finlm.train.post.start import forward_without_mask
from finlm.train.zero.storage import State

SHOWN = 10  # answers of a step that can be read
STEPS = 5  # whose median is the measure, and whose median is judged
WORSE = 0.1  # by which a share must exceed that of the first steps


@dataclass(frozen=True)
class Answer:
    """An answer of a step as rollouts.jsonl has it: its text `said`, the `right` answer, rewards by term and in all.

    A term's reward is None where it gave none; `advantage` is what training multiplied the answer by.
    """

    prompt: str
    right: str
    said: str
    rewards: Mapping[str, float | None]
    reward: float
    advantage: float


class Prompt(TypedDict):
    """A prompt for trl's rewards: text, ids, right answer or ""; `asked` lacks what the template writes behind it."""

    prompt: str
    asked: str
    prompt_ids: list[int]
    answer: str


def read_prompts(shards: Shards, parts: list[Shard], tokenizer: Any) -> list[Prompt]:
    """Return a Prompt for every document of these shards, in order; their chat_template.jinja must exist."""
    turn = [{"role": "user", "content": "?"}]
    template = (shards.directory / "chat_template.jinja").read_text(encoding="utf-8")
    rendered = tokenizer.apply_chat_template(turn, chat_template=template, tokenize=False, add_generation_prompt=True)
    behind = rendered.rpartition("?")[2].strip()
    prompts: list[Prompt] = []
    # Rules read the options from `asked`; the last one would end with what the template writes behind the question.
    for row in dialogues.read_prompts(parts):
        prompt, answer = (tokenizer.decode(row[name]) for name in ("prompt_ids", "answer_ids"))
        asked = prompt.rstrip().removesuffix(behind).rstrip()
        ids = row["prompt_ids"].tolist()
        prompts.append({"prompt": prompt, "asked": asked, "prompt_ids": ids, "answer": answer.strip()})
    return prompts


def text_statistics(texts: Sequence[str], checked: Sequence[str]) -> dict[str, float]:
    """Return {"repetition": mean share of repeated text in `texts`} and, if `checked` names rules, `unanswered`.

    `unanswered` is the share of texts in which no rule of `checked` finds an answer. Raises StatisticsError for no
    texts.
    """
    shares = {"repetition": statistics.fmean(map(scoring.repetition, texts))}
    if checked:
        silent = [not any(scoring.names_answer(rule, text) for rule in checked) for text in texts]
        shares["unanswered"] = statistics.fmean(silent)
    return shares


def mean_rise(gains: Sequence[float]) -> dict[str, float | list[float]]:
    """Return {rise: mean gain} and, of two or more gains, rise_interval (95 %). Raises StatisticsError without any."""
    mean = statistics.fmean(gains)
    if len(gains) < 2:
        return {"rise": mean}
    apart = critical_t(len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
    return {"rise": mean, "rise_interval": [mean - apart, mean + apart]}


def critical_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: the standard errors to either side of a mean that hold 95 %.

    `freedom` is the degrees of freedom, at least 1. Within 1 % from 3 degrees on, a quarter short with 1.
    """
    # The expansion of Student's t around the normal value (Abramowitz and Stegun, 26.7.5).
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def write_answers(run: RunDir, step: int, answers: Sequence[Answer]) -> None:
    """Append at most SHOWN of a step's answers to rollouts.jsonl, evenly spaced, so that prompts differ."""
    count = min(SHOWN, len(answers))
    for answer in (answers[place * len(answers) // count] for place in range(count)):
        files.append_json_line(run.rollouts, {"step": step, **vars(answer)})


def drop_rows_after(run: RunDir, step: int) -> None:
    """Rewrite rollouts.jsonl, if it exists, without the rows after `step`: a resumed run writes them again."""
    if run.rollouts.exists():
        kept = (row for row in files.read_json_lines(run.rollouts) if row["step"] <= step)
        files.write_text(run.rollouts, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


ROUNDING = 0.001  # nats a token that products of other sizes may move a log-probability by


class Mismatch:
    """Compares the log-probabilities of the same tokens in generation and in training; sums the differences of a step.

    correct() multiplies a token's advantage by exp(training - generation), at most `cap` (truncated importance
    sampling). With `cap` 0 they are only compared. `device` is that of the sums.
    """

    def __init__(self, cap: float, device: torch.device) -> None:
        self.cap = cap
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of differences, of tokens
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def correct(self, rows: dict[str, torch.Tensor], log_probs: torch.Tensor) -> None:
        """Add a micro-step's differences; with a cap, replace rows["advantages"] by weighted ones, [rows, tokens].

        They were [rows] or [rows, tokens]. `log_probs` are training's, [rows, tokens]; old_per_token_logps of `rows`
        (of before they were learnt from) take their place. `rows` needs sampling_per_token_logps and completion_mask.
        """
        before = rows.get("old_per_token_logps")
        apart = (log_probs if before is None else before) - rows["sampling_per_token_logps"]
        apart = apart.double() * rows["completion_mask"]
        self._sums += torch.stack((apart.abs().sum(), rows["completion_mask"].sum().double()))
        self._largest = torch.maximum(self._largest, apart.abs().max())
        # Differences of rounding alone leave the advantages as they are, to the last bit.
        if self.cap:
            weights = torch.where(apart.abs() > ROUNDING, apart.exp().clamp(max=self.cap), 1.0)
            advantages = rows["advantages"]
            rows["advantages"] = (advantages if advantages.dim() == 2 else advantages[:, None]) * weights.float()

    def take(self) -> dict[str, float]:
        """Return {mismatch, mismatch_largest} of all ranks in nats a token, and set the sums to 0. Collective."""
        if distributed.is_initialized():
            distributed.all_reduce(self._sums)
            distributed.all_reduce(self._largest, op=distributed.ReduceOp.MAX)
        (total, tokens), largest = self._sums.tolist(), float(self._largest)
        self._sums.zero_()
        self._largest.zero_()
        return {"mismatch": total / max(1.0, tokens), "mismatch_largest": largest}


class Watch:
    """Judges the measures of each step against those of the first steps; every rank must pass the same values.

    An incident comes when the last steps pass its limit, and again only after they came back.
    """

    def __init__(self, settings: Rollouts, state: Mapping[str, Any] | None = None) -> None:
        """Begin with what state() returned at a checkpoint, or with nothing seen when `state` is None."""
        self.settings = settings
        self._first: dict[str, list[float]] = {key: list(values) for key, values in (state or {}).get("first", ())}
        self._last: dict[str, list[float]] = {key: list(values) for key, values in (state or {}).get("last", ())}
        self._told = set((state or {}).get("told", ()))

    def state(self) -> State:
        """Return the state as plain values for a checkpoint; the constructor takes it."""
        return {"first": list(self._first.items()), "last": list(self._last.items()), "told": sorted(self._told)}

    def judge(self, row: Mapping[str, Any]) -> Iterator[Incident]:
        """Remember the measures in `row`, the fields of a `step` event, and yield the incidents that begin with it.

        Read all that it yields: the later kinds of incident are judged only then. Absent measures are not judged.
        """
        for key in ("answer_tokens", "entropy", "repetition", "unanswered", "reward", "equal_groups"):
            if isinstance(row.get(key), (int, float)):
                if len(first := self._first.setdefault(key, [])) < STEPS:
                    first.append(float(row[key]))
                self._last[key] = [*self._last.get(key, ()), float(row[key])][-STEPS:]
        before, now = self._medians("answer_tokens")
        long = Incident("answers grow longer", self._words("answer_tokens", "tokens"))
        yield from self._tell(long, now > self.settings.length * before)
        before, now = self._medians("entropy")
        narrow = Incident("entropy collapses", self._words("entropy", "nats a token"))
        yield from self._tell(narrow, now < self.settings.entropy * before)
        repeats = self._exceeds("repetition", self.settings.repetition)
        yield from self._tell(Incident("answers repeat themselves", self._words("repetition", "of the text")), repeats)
        silent = self._exceeds("unanswered", self.settings.unanswered)
        yield from self._tell(Incident("answers name no answer", self._words("unanswered", "of the answers")), silent)
        last = self._last.get("equal_groups", ())
        equal = Incident("answers earn the same", self._words("equal_groups", "of the prompts have equal rewards"))
        yield from self._tell(equal, "value_loss" not in row and len(last) == STEPS and min(last) == 1.0)
        apart = float(row.get("mismatch") or 0.0)
        detail = f"{apart:.3g} nats a token apart, {row.get('mismatch_largest', apart):.3g} at most"
        yield from self._tell(Incident("rollout and trainer part", detail), apart > self.settings.mismatch)

    def _exceeds(self, key: str, limit: float) -> bool:
        """Return whether the last steps' median is above `limit` and more than WORSE above that of the first steps."""
        first, last = self._medians(key)
        return last > limit and last > first + WORSE

    def _tell(self, incident: Incident, is_bad: bool) -> Iterator[Incident]:
        """Yield the incident if `is_bad` and it was not so at the last step; remember `is_bad` for the next."""
        if is_bad and incident.what not in self._told:
            yield incident
        (self._told.add if is_bad else self._told.discard)(incident.what)

    def _medians(self, key: str) -> tuple[float, float]:
        """Return the medians of the first and of the last STEPS steps, equal while there are fewer; 0 without any."""
        begin, last = statistics.median(self._first.get(key, [0.0])), self._last.get(key, ())
        return begin, statistics.median(last) if len(last) == STEPS else begin

    def _words(self, key: str, unit: str) -> str:
        """Return text that says how a measure and the reward changed since the first steps."""
        (first, last), (was, reward) = self._medians(key), self._medians("reward")
        return (
            f"{last:.4g} {unit} in the last {STEPS} steps, {first:.4g} in the first; the reward went from {was:.4g} to "
            f"{reward:.4g}: read rollouts.jsonl"
        )


Rewards = Callable[..., list[float | None]]


def make_rewards(r: Rank[Recipe]) -> list[Rewards]:
    """Return trl's function for each term of grpo.reward. UserError for a model or file that cannot be used."""
    grpo = r.recipe.grpo
    assert grpo is not None
    made: list[Rewards] = []
    for term in grpo.reward:
        if term.rule == "model":
            made.append(load_reward_model(str(term.path), r))
        elif term.rule == "function":
            made.append(partial(score_by_function, read_function(r.run, term), term.name))
        else:
            made.append(partial(score_by_rule, term, grpo.max_new_tokens))
    return made


def score_by_rule(
    term: Term, most_tokens: int, asked: list[str], completions: list[str], answer: list[str], **more: Any
) -> list[float | None]:
    """Return each answer's value by the term's rule, None where no right answer fits; `more` has completion_ids."""
    given = zip(asked, completions, answer, more["completion_ids"], strict=True)
    return [
        scoring.score(term, text, completion, right, len(ids), most_tokens) for text, completion, right, ids in given
    ]


def read_function(run: RunDir, term: Term) -> scoring.Function:
    """Execute the run's copy of the term's file; return its function. UserError if missing, changed or broken."""
    path = run.reward_file(str(term.sha256))
    if not path.is_file() or files.sha256_file(path) != term.sha256:
        raise UserError(
            f"grpo.reward: {term.file} is not in {run.path} as it was",
            evidence=f"{path} {'has another hash' if path.is_file() else 'does not exist'}",
            fix="start a new run (--new)",
        )
    return scoring.read_function(path, term.name)


def score_by_function(
    function: scoring.Function, name: str, prompts: list[str], completions: list[str], answer: list[str], **_: Any
) -> list[float | None]:
    """Return the user's function's value, a float or None, of each answer. Raises UserError if it fails."""
    return scoring.call_function(function, name, prompts, completions, answer)


def load_reward_model(path: str, r: Rank[Recipe]) -> Rewards:
    """Load a trained reward model from the directory `path` onto the rank's device and return its reward function.

    Raises UserError when it cannot be loaded, has not exactly one output, or has another vocabulary size.
    """
    fix = "train it by a recipe of stage reward from the same start"
    # It only reads: half of the memory is enough on a GPU, and on a CPU it stays as saved.
    dtype = torch.bfloat16 if r.plan.device == "cuda" else None
    model = causal_lm.load_weights(AutoModelForSequenceClassification, path, fix, dtype=dtype)
    if model.config.num_labels != 1 or model.config.vocab_size != r.plan.vocab_size:
        raise UserError(
            f"grpo.reward: {path} cannot judge this model's answers",
            evidence=f"{model.config.num_labels} outputs and {model.config.vocab_size:,} tokens there; "
            f"1 and {r.plan.vocab_size:,} are needed",
            fix=fix,
        )
    # In bf16 many answers would get the same reward.
    model.score.__class__ = start.RewardHead
    model = model.to(r.device).eval().requires_grad_(False)
    pad = model.config.pad_token_id

    def reward(prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """Return the model's reward for each prompt with its answer; both are lists of ids."""
        rows = [torch.tensor([*asked, *answered]) for asked, answered in zip(prompt_ids, completion_ids, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad).to(r.device)
        with torch.no_grad():
            scores = torch.cat(
                [forward_without_mask(model, some).logits[:, 0] for some in torch.split(ids, r.plan.micro_batch)]
            )
        return [float(score) for score in scores]

    return reward
