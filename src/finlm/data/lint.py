"""Label lint: what is learnt from, looked at before a run, because a wrong label costs no error message.

Every check names what it counted. Errors are the mistakes that the released XuanYuan llm-code made (their numbers in
recipes/xuanyuan-6b/README.md) and their kin: with them a model trains without complaint, to a lower loss even, and then
never stops, or answers to a prompt it never sees. A recipe whose sft.profile is faithful is told, not refused.

It reads the prepared rows and the prepare step's own counts, not the source files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from finlm.data import dialogue_rows
from finlm.data.chat_encode import LEFT_OUT
from finlm.data.shards import IGNORED, Shards
from finlm.recipe.schema import Recipe

ROWS = 512  # looked at, spread over the data
Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the labels; keys as doctor's findings, whose host is this data."""

    check: str
    level: Level
    evidence: str
    fix: str
    host: str = "data"

    def to_json(self) -> dict[str, str]:
        """As the command line prints it."""
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """What the sampled rows hold, per dialogue: numbers of tokens and of labels."""

    dialogues: int = 0
    learnt: int = 0  # labels that count
    tokens: int = 0
    ended: int = 0  # dialogues whose last label that counts is the end of turn
    unlearnt: int = 0  # dialogues without any label that counts
    bos_inside: int = 0  # dialogues with <s> where the answer begins, or twice at the start
    eos_before: int = 0  # dialogues with </s> between question and answer
    padded: int = 0  # labels on padding
    padding: int = 0
    rows: int = 0


def check(recipe: Recipe, shards: Shards) -> list[Finding]:
    """Everything wrong with the labels of prepared dialogues, errors first."""
    seen = look(recipe, shards)
    counts = sum((Counter(row) for row in shards.manifest.get("dialogues", {}).values()), Counter[str]())
    found = [*_ends(recipe, seen), *_prompt(seen, counts), *_shares(recipe, seen, counts), *_run(recipe)]
    is_faithful = recipe.sft is not None and recipe.sft.profile == "faithful"
    told = [Finding(f.check, "warning" if is_faithful else f.level, f.evidence, f.fix) for f in found]
    return sorted(told, key=lambda finding: finding.level)


def look(recipe: Recipe, shards: Shards) -> Seen:
    """Count over at most ROWS rows."""
    rows = dialogue_rows.train_rows(shards, recipe)
    ids = np.unique(np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64))
    inputs, labels = rows.read(ids)
    documents = rows.documents(ids)
    bos, eos = shards.bos_id, shards.eos_id
    ends = {eos, shards.manifest.get("end_of_turn_id", eos)}
    total: Counter[str] = Counter(rows=len(ids))
    for row_inputs, row_labels, row_documents in zip(inputs, labels, documents, strict=True):
        outside = row_documents < 0
        total["padding"] += int(outside.sum())
        total["padded"] += int((row_labels[outside] != IGNORED).sum())
        for number in range(int(row_documents.max()) + 1):
            here = np.flatnonzero(row_documents == number)
            total.update(_of_dialogue(row_inputs[here], row_labels[here], bos, eos, ends))
    return Seen(**total)


def _of_dialogue(inputs: Any, labels: Any, bos: int, eos: int, ends: set[int]) -> dict[str, int]:
    counted = np.flatnonzero(labels != IGNORED)
    first = int(counted[0]) if len(counted) else -1  # the place before the first token that is learnt
    answer = {int(inputs[first]), int(labels[first])} if len(counted) else set()
    doubled = len(inputs) > 1 and int(inputs[0]) == int(inputs[1]) == bos
    return {
        "dialogues": 1,
        "tokens": len(inputs),
        "learnt": len(counted),
        "unlearnt": int(not len(counted)),
        "ended": int(len(counted) > 0 and int(labels[counted[-1]]) in ends),
        "bos_inside": int(doubled or (bos >= 0 and first > 0 and bos in answer)),
        "eos_before": int(first > 0 and (int(inputs[first]) == eos or eos in inputs[max(0, first - 1) : first])),
    }


def _ends(recipe: Recipe, seen: Seen) -> Iterator[Finding]:
    learnt = seen.dialogues - seen.unlearnt
    if seen.ended < 0.5 * learnt:
        yield Finding(
            "eos-not-learnt",
            "error",
            f"{seen.ended:,} of {learnt:,} dialogues end with a learnt end of turn: the model will not stop",
            "set sft.mask_eos to false, or give the template an end of turn inside {% generation %}",
        )
    if seen.padded:
        share = seen.padded / (seen.padded + seen.learnt)
        yield Finding(
            "padding-learnt",
            "error",
            f"{seen.padded:,} labels of padding count: {share:.1%} of all labels",
            "set sft.pad_labels to false",
        )
    if recipe.sft is not None and recipe.sft.hide_eos:
        yield Finding(
            "eos-hidden",
            "error",
            "the attention mask hides every </s>, also those within a dialogue: its turns run into each other",
            "set sft.hide_eos to false",
        )


def _prompt(seen: Seen, counts: Mapping[str, int]) -> Iterator[Finding]:
    if seen.bos_inside or seen.eos_before:
        yield Finding(
            "answer-apart",
            "error",
            f"of {seen.dialogues:,} dialogues {seen.bos_inside:,} have <s> where the answer begins or twice at first, "
            f"{seen.eos_before:,} have </s> before the answer: no prompt looks like that when the model is used",
            "set sft.answer_apart to false; a template writes <s> itself, once",
        )
    checked = counts.get("checked", 0)
    if differs := counts.get("prompt differs", 0):
        yield Finding(
            "prompt-differs",
            "warning" if differs < 0.05 * checked else "error",
            f"{differs:,} of {checked:,} dialogues begin with other tokens than their prompt alone has in use",
            "let the prompt end in a token of its own, not in a space: chat.template xuanyuan instead of llm-code",
        )
    if differs := counts.get("text differs", 0):
        yield Finding(
            "text-differs",
            "warning",
            f"{differs:,} of {checked:,} dialogues do not come back from their tokens as they were",
            "the tokenizer has no bytes for some characters; take another model",
        )


def _shares(recipe: Recipe, seen: Seen, counts: Mapping[str, int]) -> Iterator[Finding]:
    only = recipe.sft is None or recipe.sft.assistant_only_loss
    if seen.unlearnt:
        yield Finding(
            "nothing-learnt",
            "error" if seen.unlearnt > 0.01 * seen.dialogues else "warning",
            f"{seen.unlearnt:,} of {seen.dialogues:,} dialogues have no label that counts",
            "look at them: finlm lint RECIPE --rows 8",
        )
    if only and seen.tokens and seen.learnt >= seen.tokens - seen.dialogues and not counts.get("documents"):
        yield Finding(
            "everything-learnt",
            "error",
            f"{seen.learnt:,} labels of {seen.tokens:,} tokens: questions are learnt like answers",
            "the template must mark the assistant's words with {% generation %}",
        )
    if cut := counts.get("truncated", 0):
        dialogues = counts.get("dialogues", 0)
        yield Finding(
            "answers-cut",
            "error" if cut > 0.01 * dialogues else "warning",
            f"{cut:,} of {dialogues:,} dialogues are cut: their answers have no end",
            "set chat.overlong to split or drop, or raise batch.sequence_length",
        )
    if (left := counts.get(LEFT_OUT, 0)) > 0.01 * counts.get("dialogues", 0):
        yield Finding(
            "exchanges-left-out",
            "warning",
            f"{left:,} exchanges of {counts['dialogues']:,} dialogues are {LEFT_OUT.removeprefix('exchanges ')}: "
            "the rest of their dialogues is learnt without them",
            "raise batch.sequence_length, or set chat.overlong to drop",
        )


def _run(recipe: Recipe) -> Iterator[Finding]:
    optim = recipe.optim
    if optim.decay_steps is not None:
        yield Finding(
            "schedule-of-another-run",
            "error",
            f"optim.decay_steps is {optim.decay_steps:,}: the learning rate follows a run of that length, not this one",
            "leave optim.decay_steps out",
        )
    if recipe.sft is not None and recipe.sft.order == "sampler":
        yield Finding(
            "rows-repeated",
            "warning",
            "sft.order is sampler: at the end of an epoch rows are read again until the ranks divide it",
            "set sft.order to stateless, whose epochs hold every row once at any number of ranks",
        )
