"""Run `finlm attempt RECIPE`: several answers to each prompt of a GRPO recipe: pass@k, maj@k, and the best as SFT data.

An attempt is right when the recipe's own rules say so, the first that applies to the prompt. pass@k is the unbiased
estimate of arXiv 2107.03374 from all attempts; maj@k is the answer that most of the first k name. Answers are stored as
they come, so that a killed command continues; what is drawn depends on (seed, prompt, attempt) alone, but for rounding.
Without a model on this machine the one behind self_qa.endpoint is asked: its chains of thought, checked, are data to
distil from. Of each prompt's right and whole attempts the one with the highest reward is written (rejection sampling).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from finlm.base import files, screen, step_cache
from finlm.base.errors import UserError
from finlm.corpus import steps
from finlm.corpus.read import parsing
from finlm.corpus.workers import Context
from finlm.dialogues import convert, encode, scoring
from finlm.dialogues.templates import LeftOut, Message, Refused
from finlm.evals.questions import Interval, bootstrap
from finlm.inference.open import Opened, open_model
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import SelfQA
from finlm.recipe.schema_train import Grpo, Sft
from finlm.rows import dialogues
from finlm.rows.shards import Shards, Split
from finlm.selfqa.ask import answer_prompts
from finlm.train.model.generation import Drawing, Limits, generate, row_keys

_CPU_ROWS, _GPU_ROWS = 32, 256  # answers drawn at once


@dataclass(frozen=True)
class Options:
    """The options of `finlm attempt`: `count` answers to each of at most `limit` prompts (None: all) of `split`.

    `split` is train or held_out; `best` is the file to write right answers to, None for none. `model` is a run or a
    model's directory; None asks the model behind self_qa.endpoint. `start` is then the directory of the recipe's start,
    whose tokenizer and template the prompts have.
    """

    model: Path | None
    count: int = 8
    split: str = "held_out"
    limit: int | None = None
    seed: int = 0
    best: Path | None = None
    start: Path | None = None


class Attempt(NamedTuple):
    """An answer's text and length in tokens; `fault` says why it cannot be data: cut off, empty, refused, no answer."""

    text: str
    tokens: int
    fault: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt as messages and as the model's token ids, with the text of its right answer."""

    messages: list[Message]
    ids: list[int]
    right: str


class Estimate(NamedTuple):
    """A mean over prompts with its 95 % interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Result:
    """The result of `finlm attempt`: pass@k and maj@k by k, and counts of prompts by outcome."""

    recipe: str
    model: str
    split: str
    prompts: int
    attempts: int
    seed: int
    passed: dict[int, Estimate]
    majority: dict[int, Estimate]
    best: Path | None
    counts: Counter[str]

    def to_json(self) -> dict[str, object]:
        """Return the document of --json."""
        names = ("recipe", "model", "split", "prompts", "attempts", "seed", "counts")
        row: dict[str, object] = {name: getattr(self, name) for name in names}
        for name, estimates in (("pass", self.passed), ("majority", self.majority)):
            row[name] = {k: estimate._asdict() for k, estimate in estimates.items()}
        return row if self.best is None else row | {"best": str(self.best)}


def run(recipe: Recipe, options: Options) -> Result:
    """Draw answers to the recipe's prompts and return counts, pass@k and maj@k; write the best answers to options.best.

    Prepares the recipe's data if needed and appends new answers to a ledger in runs/evals/. Raises UserError for a
    recipe or options that check() refuses, data that cannot be prepared, a split without prompts, a model that cannot
    be opened, an endpoint that fails five times in a row, and when self_qa.max_cost leaves no prompt answered.
    """
    grpo = check(recipe, options)
    opened = None if options.model is None else open_model(options.model)
    counts: Counter[str] = Counter()
    prompts = list(read_prompts(recipe, options, counts))
    if not prompts:
        raise UserError(
            f"{recipe.name} has no prompts of split {options.split}",
            evidence=_format_counts(counts),
            fix="choose another --split",
        )
    if opened is None:
        name, attempts = str(settings_of(recipe).model), ask_endpoint(recipe, grpo, prompts, options)
        whole = [place for place, texts in enumerate(attempts) if len(texts) == options.count]
        if len(whole) < len(prompts):
            counts["not asked, as self_qa.max_cost is reached"] = len(prompts) - len(whole)
            prompts, attempts = [prompts[place] for place in whole], [attempts[place] for place in whole]
        if not prompts:
            raise UserError("self_qa.max_cost is reached before a prompt is answered", fix="raise self_qa.max_cost")
    else:
        name, attempts = opened.name, draw(opened, grpo, prompts, options)
    graded = [[_grade(grpo, prompt, each) for each in row] for prompt, row in zip(prompts, attempts, strict=True)]
    if options.best is not None:
        counts += write_best(options.best, prompts, attempts, graded)
    about = recipe.name, name, options.split, len(prompts), options.count, options.seed
    return Result(*about, *score(graded), options.best, counts)


@dataclass(frozen=True)
class Graded:
    """An attempt: whether it is right, its reward, and the answer that it concludes with, None if none."""

    is_right: bool
    reward: float
    named: Hashable | None


def score(graded: Sequence[Sequence[Graded]]) -> tuple[dict[int, Estimate], dict[int, Estimate]]:
    """Return (pass@k, maj@k), {k: Estimate} for k of 1, 2, 4, ..., all; `graded` has equally many attempts a prompt."""
    count = len(graded[0])
    sizes = sorted({*(2**power for power in range(count.bit_length()) if 2**power <= count), count})
    right = [sum(attempt.is_right for attempt in attempts) for attempts in graded]

    def estimate(values: list[float]) -> Estimate:
        """Return the mean of the prompts' values with its interval."""
        return Estimate(float(np.mean(values)), bootstrap(values))

    passed = {k: estimate([pass_at(k, count, number) for number in right]) for k in sizes}
    return passed, {k: estimate([float(is_majority_right(each[:k])) for each in graded]) for k in sizes}


def pass_at(k: int, count: int, right: int) -> float:
    """Return the probability that k of `count` attempts, k <= count, include one of the `right` right ones."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def is_majority_right(attempts: Sequence[Graded]) -> bool:
    """Return whether the answer that most attempts name, at a tie the first, is right; False if none names any."""
    votes = Counter(attempt.named for attempt in attempts if attempt.named is not None)
    if not votes:
        return False
    chosen = max(votes, key=lambda named: votes[named])  # the first of those with most votes
    return next(attempt.is_right for attempt in attempts if attempt.named == chosen)


def check(recipe: Recipe, options: Options) -> Grpo:
    """Return the recipe's grpo section.

    Raises UserError when the stage is not grpo; when no reward checks a right answer, or one needs a model or function;
    when the file options.best exists; when neither options.model nor self_qa.endpoint is set.
    """
    grpo = recipe.grpo
    if grpo is None:
        raise UserError(
            f"{recipe.name} is of stage {recipe.stage}: nothing says what an answer is worth",
            fix="give a recipe of stage grpo",
        )
    if not grpo.checked:
        raise UserError(
            f"{recipe.name} checks no right answer",
            evidence=f"grpo.reward: {', '.join(term.rule for term in grpo.reward)}",
            fix="give grpo.reward a term of rule option, number or terms",
        )
    others = [term.rule for term in grpo.reward if term.rule in ("model", "function")]
    if others:
        raise UserError(
            f"an attempt is judged by its text: {' and '.join(others)} is no rule for it",
            fix="--set grpo.reward=[...] without it",
        )
    if options.best is not None and options.best.exists():
        raise UserError(f"{options.best} exists already", fix="name another file")
    if options.model is None:
        settings_of(recipe)
    return grpo


def settings_of(recipe: Recipe) -> SelfQA:
    """Return the recipe's self_qa section. Raises UserError when it names no endpoint."""
    if recipe.self_qa is None or recipe.self_qa.endpoint is None:
        raise UserError(
            "no model is named that could answer",
            fix="--model RUN for one on this machine, or the one behind an OpenAI-compatible endpoint: --set "
            "self_qa.endpoint=http://host:8000/v1 --set self_qa.model=NAME",
        )
    return recipe.self_qa


def read_prompts(recipe: Recipe, options: Options, counts: Counter[str]) -> Iterator[Prompt]:
    """Yield the prompts of options.split in order, at most options.limit (0 or None: all); prepare data if needed.

    Counts in `counts` the "asked" prompts and the others by their reason. A split has the prompts that `finlm prepare`
    puts into it; no prompt is in both splits. One of options.model and options.start must be given. Raises UserError
    when the data cannot be prepared, such as by an unusable chat template or too many broken rows.
    """
    context = Context(recipe, step_cache.Cache(Path(recipe.data.cache_dir), build=True))
    assert recipe.chat is not None
    assert recipe.grpo is not None
    home = options.model or options.start
    assert home is not None
    directory = home / "export" if (home / "plan.json").is_file() else home
    limit = recipe.batch.sequence_length - recipe.grpo.max_new_tokens
    encoder = encode.Encoder(encode.Rules(directory, recipe.chat, Sft(), limit))
    with context.cache.lock_cache():
        prepared = Shards(convert.make_shards(context, directory).path)
        every = steps.list_inputs(context)
    split: Split = "held_out" if options.split == "held_out" else "train"
    left = Counter(row["prompt_ids"].tobytes() for row in dialogues.read_prompts(prepared.split(split)))
    mask = convert.make_mask(recipe.data.clean.mask)
    for item in every:
        if item.split == ("train" if split == "held_out" else "held_out"):
            continue
        for block in parsing.dialogue_blocks(item, step_cache.ignore_progress):
            for row in parsing.parse_dialogues(block):
                try:
                    preference = convert.read_preference(row.value, mask, needs_both=False)
                    (piece,) = encode.encode_preference(encoder, preference, "grpo", limit, recipe.grpo.checked)
                    length = piece.mask.count(0)
                    right = encoder.tokenizer.decode(piece.ids[length:]).strip()
                    if not any(scoring.is_right_answer(rule, right) for rule in recipe.grpo.checked):
                        raise Refused("a right answer that the tokenizer cannot spell")
                except (LeftOut, Refused) as error:
                    counts[str(error)] += 1
                    continue
                prompt = np.array(piece.ids[:length], dtype=np.int64).tobytes()
                if not left[prompt]:
                    counts[f"not of split {split}, or a repetition"] += 1
                    continue
                left[prompt] -= 1
                yield Prompt(preference.prompt, piece.ids[:length], right)
                counts["asked"] += 1
                if counts["asked"] == options.limit:
                    return


def draw(opened: Opened, grpo: Grpo, prompts: Sequence[Prompt], options: Options) -> list[list[Attempt]]:
    """Return options.count attempts at each prompt; draw those not in the ledger in runs/evals, and add them to it."""
    settings = [opened.fingerprint, grpo.temperature, grpo.top_p, grpo.max_new_tokens, options.seed]
    keys = _keys(settings, (prompt.ids for prompt in prompts), options.count)
    ledger, known = _read_ledger(opened.fingerprint)
    left = [(key, prompt.ids) for prompt, row in zip(prompts, keys, strict=True) for key in row if key not in known]
    left.sort(key=lambda each: -len(each[1]))
    size = _GPU_ROWS if opened.device.type == "cuda" else _CPU_ROWS
    with screen.progress("attempts", len(left), "drawn") as advance:
        for start in range(0, len(left), size):
            batch = left[start : start + size]
            for (key, _), ids in zip(batch, _generate(opened, grpo, batch), strict=True):
                is_cut = len(ids) == grpo.max_new_tokens and ids[-1] not in opened.eos_ids
                text = opened.tokenizer.decode(ids, skip_special_tokens=True)
                known[key] = {"key": key, "text": text, "tokens": len(ids), "fault": "cut off" if is_cut else ""}
                files.append_json_line(ledger, known[key])
            advance(len(batch))
    return _pick(known, keys)


def ask_endpoint(recipe: Recipe, grpo: Grpo, prompts: Sequence[Prompt], options: Options) -> list[list[Attempt]]:
    """Return options.count answers of the model behind self_qa.endpoint to each prompt; ask only for new ones.

    Appends new answers to a ledger in runs/evals/ as they come. A failed request is an Attempt with a `fault`, not in
    the ledger. Prompts that self_qa.max_cost left over have fewer answers. Raises UserError after five failures in a
    row, or when no request can succeed.
    """
    settings, system = settings_of(recipe), recipe.chat.system if recipe.chat else None
    about = [settings.model, grpo.temperature, grpo.max_new_tokens, options.seed, system]
    keys = _keys(about, (prompt.messages for prompt in prompts), options.count)
    ledger, known = _read_ledger(files.sha256_json(settings.model))
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    left = {
        key: prompt.messages if prompt.messages[0]["role"] == "system" else [*head, *prompt.messages]
        for prompt, row in zip(prompts, keys, strict=True)
        for key in row
        if key not in known
    }
    known |= answer_prompts(settings, left, (grpo.temperature, grpo.max_new_tokens), ledger, list(known.values()))
    return _pick(known, keys)


def _keys(settings: Sequence[Any], prompts: Iterable[Any], count: int) -> list[list[str]]:
    """Return `count` ledger keys for each prompt: 24 hex digits of the sha256 of settings, prompt and number."""
    return [[files.sha256_json([*settings, prompt, n])[:24] for n in range(count)] for prompt in prompts]


def _read_ledger(fingerprint: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return (path of a model's ledger, its rows by key, {} without a file); make its directory runs/evals."""
    ledger = Path("runs") / "evals" / f"attempts-{fingerprint[:12]}.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    return ledger, {row["key"]: row for row in files.read_json_lines(ledger)}


def _pick(known: Mapping[str, Mapping[str, Any]], keys: Sequence[Sequence[str]]) -> list[list[Attempt]]:
    """Return the known attempts at each prompt, in the order of its keys; keys that `known` lacks are left out."""
    return [
        [Attempt(known[key]["text"], known[key]["tokens"], known[key].get("fault", "")) for key in row if key in known]
        for row in keys
    ]


def _generate(opened: Opened, grpo: Grpo, batch: Sequence[tuple[str, list[int]]]) -> list[list[int]]:
    """Return the drawn token ids of each (key, prompt), with their end token; the key seeds the drawing."""
    prompts = [ids for _, ids in batch]
    limits = Limits(
        most=grpo.max_new_tokens,
        ends=opened.eos_ids,
        rows=len(batch),
        room=max(map(len, prompts)) + grpo.max_new_tokens,
        vocab_size=opened.model.config.vocab_size,
    )
    keys = torch.cat([row_keys(key, range(1)) for key, _ in batch])
    drawing = Drawing(grpo.temperature, grpo.top_p)
    return [answer.ids for answer in generate(opened.model, prompts, limits, keys, drawing)]


def _grade(grpo: Grpo, prompt: Prompt, attempt: Attempt) -> Graded:
    """Return whether an attempt is right, its reward (the weighted sum, None as 0) and its conclusion.

    Raises StopIteration when no rule of grpo.checked applies to the prompt.
    """
    question, right, (answer, tokens, _) = prompt.messages[-1]["content"], prompt.right, attempt
    values = [scoring.score(term, question, answer, right, tokens, grpo.max_new_tokens) for term in grpo.reward]
    # It is right when the first rule that applies to the prompt gives 1.
    rule, value = next(
        (term.rule, value)
        for term, value in zip(grpo.reward, values, strict=True)
        if term.rule in grpo.checked and value is not None
    )
    reward = sum(term.weight * (value or 0.0) for term, value in zip(grpo.reward, values, strict=True))
    return Graded(value == 1.0, reward, _read_conclusion(rule, question, answer))


def _read_conclusion(rule: str, question: str, answer: str) -> Hashable | None:
    """Return the letter, option, set of items or (number, unit) that `answer` concludes with by the rule; else None."""
    if rule == "option":
        return scoring.find_letter(answer)
    if rule == "words":
        return scoring.find_quoted_option(question, answer)
    if rule == "terms":
        return frozenset(scoring.list_items(answer)) or None
    number = scoring.find_number(answer)
    return None if number is None else (number.value, number.unit)


def write_best(
    path: Path, prompts: Sequence[Prompt], attempts: Sequence[Sequence[Attempt]], graded: Sequence[Sequence[Graded]]
) -> Counter[str]:
    """Write each prompt's right attempt of highest reward as a row of messages to `path`; return counts by outcome."""
    counts: Counter[str] = Counter()
    lines = []
    for prompt, tries, grades in zip(prompts, attempts, graded, strict=True):
        counts.update(f"attempts {each.fault}" for each in tries if each.fault)
        places = [place for place, grade in enumerate(grades) if grade.is_right and not tries[place].fault]
        if not places:
            counts["no right attempt"] += 1
            continue
        best = max(places, key=lambda place: grades[place].reward)  # the first of those that earn most
        counts["written"] += 1
        counts["written, every attempt right"] += len(places) == len(grades)
        answer = {"role": "assistant", "content": tries[best].text.strip()}
        lines.append(json.dumps({"messages": [*prompt.messages, answer]}, ensure_ascii=False) + "\n")
    files.write_text(path, "".join(lines))
    return counts


def _format_counts(counts: Counter[str]) -> str:
    """Return "COUNT REASON; ..." with the highest counts first; "no rows" without counts."""
    return "; ".join(f"{count:,} {reason}" for reason, count in counts.most_common()) or "no rows"


def show(result: Result) -> None:
    """Print pass@k and maj@k with their intervals, and how many prompts and attempts had which outcome."""
    screen.heading(f"{result.recipe}, {result.prompts:,} prompts of {result.split}: {result.model}")
    rows = [
        (f"{name}@{k}", f"{100 * value:.1f} %", f"{100 * low:.1f} to {100 * high:.1f}")
        for name, part in (("pass", result.passed), ("maj", result.majority))
        for k, (value, (low, high)) in part.items()
    ]
    screen.table(("", "share", "95 % interval"), rows)
    screen.show(_format_counts(result.counts))
