"""Lint the labels of prepared dialogues before a run: a wrong label gives no error message. Print findings and rows.

Errors are the mistakes that the released XuanYuan llm-code made (their numbers in recipes/xuanyuan-6b/README.md) and
similar ones: with them a model trains without complaint, to a lower loss even, and then never stops, or answers to a
prompt it never sees. Reads the prepared rows and the prepare step's counts, not the source files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finlm.base import screen
from finlm.dialogues import scoring
from finlm.dialogues.encode import LEFT_OUT
from finlm.dialogues.shards import sum_counts
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Term
from finlm.rows import dialogues
from finlm.rows.shards import IGNORED, Shards
from finlm.tokens import pretrained

ROWS = 512  # looked at, spread over the data
TRY_SECONDS = 60  # of a function of grpo.reward
Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A mistake in the labels, with the keys that doctor's findings have; `host` is always "data"."""

    check: str
    level: Level
    evidence: str
    fix: str
    host: str = "data"


_TEXTS = tomllib.loads(Path(__file__).with_name("lint.toml").read_text(encoding="utf-8"))


def _finding(check: str, level: Level | None = None, **counted: object) -> Finding:
    """Return the Finding `check` of lint.toml with these counts in its text; `level` replaces lint.toml's if not None.

    Raises KeyError for a check or count that lint.toml does not agree with.
    """
    row = _TEXTS[check]
    return Finding(check, level or row["level"], row["evidence"].format(**counted), row["fix"])


@dataclass(frozen=True)
class Seen:
    """Counts over the sampled rows: dialogues, tokens and labels, and those that look wrong."""

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
    """Return every finding about the labels of prepared dialogues and about rows that were left out, errors first.

    Prompts (grpo) have no labels: only the counts of their rows are checked, and the reward's functions are tried on
    the first prompt. Otherwise a missing index of rows is built. With sft.profile faithful all findings are warnings.
    Raises UserError when a function fails, and when the index cannot be written.
    """
    counts = prepared_counts(shards)
    problems = [*_check_rows(shards.manifest, counts)]
    if functions := [term for term in recipe.grpo.reward if term.rule == "function"] if recipe.grpo else []:
        tokenizer = pretrained.open_tokenizer(Path(shards.directory) / "tokenizer", "auto")
        row = next(dialogues.read_prompts(shards.split("train")))
        prompt, right = (tokenizer.decode([*map(int, row[name])]) for name in ("prompt_ids", "answer_ids"))
        for term in functions:
            try_function(term, prompt, right.strip())
    if recipe.stage != "grpo":
        problems += _check_labels(recipe, count_labels(recipe, shards), counts)
    is_faithful = recipe.sft is not None and recipe.sft.profile == "faithful"
    findings = [Finding(f.check, "warning" if is_faithful else f.level, f.evidence, f.fix) for f in problems]
    return sorted(findings, key=lambda finding: finding.level)


def try_function(term: Term, prompt: str, right: str) -> None:
    """Call a reward term's function, in a process of its own, on `right`, the answer to `prompt`, and on an empty one.

    Raises UserError when it fails or returns anything but a finite number, or None, for each. If it takes more than
    TRY_SECONDS, it is stopped, a line is printed, and nothing raised.
    """
    asked = {"file": term.file, "name": term.name, "prompt": prompt, "right": right}
    command = [sys.executable, "-c", "from finlm.dialogues import scoring; scoring.check_function()"]
    try:
        done = subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=TRY_SECONDS)
    except subprocess.TimeoutExpired:
        screen.say(f"the function {term.name} of grpo.reward took more than {TRY_SECONDS} s, so it was not tried")
        return
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    if evidence := said if done.returncode else json.loads(done.stdout)["evidence"]:
        raise scoring.broken_function(term.name, evidence)


def prepared_counts(shards: Shards) -> Counter[str]:
    """Return the prepare step's counts of dialogues by name, summed over all sources."""
    return sum_counts(shards.manifest, "dialogues")


def rows_left_out(shards: Shards) -> Counter[str]:
    """Return {reason: rows} of the rows that are not trained on: unusable, too long, duplicates, reserved."""
    counts = prepared_counts(shards)
    names = {
        "duplicate": "duplicate",
        "equals_held_out": "equals a held-out one",
        "reserved": "reserved with those held out",
    }
    return sum_counts(shards.manifest, "refused") + Counter({reason: counts[name] for name, reason in names.items()})


def count_labels(recipe: Recipe, shards: Shards) -> Seen:
    """Return the counts of tokens and labels in at most ROWS rows, spread over the training data.

    Builds a missing index of rows in the shards' directory; raises UserError when it cannot be written.
    """
    rows = dialogues.train_rows(shards, recipe)
    ids = np.unique(np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64))
    inputs, labels = rows.read(ids)
    documents = rows.documents(ids)
    bos, eos = shards.bos_id, shards.eos_id
    ends = {eos, shards.manifest.get("end_of_turn_id", eos)}
    total = Counter(rows=len(ids))
    for row_inputs, row_labels, row_documents in zip(inputs, labels, documents, strict=True):
        outside = row_documents < 0
        total["padding"] += int(outside.sum())
        total["padded"] += int((row_labels[outside] != IGNORED).sum())
        for number in range(int(row_documents.max()) + 1):
            here = np.flatnonzero(row_documents == number)
            total.update(_count_dialogue(row_inputs[here], row_labels[here], bos, eos, ends))
    return Seen(**total)


def _count_dialogue(inputs: Any, labels: Any, bos: int, eos: int, ends: set[int]) -> dict[str, int]:
    """Return the counts of a dialogue, by the fields of Seen, from its inputs and labels, int64 [tokens].

    `bos`, `eos` and `ends` (of turns) are token ids, bos -1 if there is none.
    """
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


def _check_rows(manifest: Mapping[str, Any], counts: Mapping[str, int]) -> Iterator[Finding]:
    """Yield findings about broken rows, rows left out, keys not read, and rows longer than the start model's context.

    The first three are by source; rows left out count only above 1 % of a source's. `manifest` is the shards', `counts`
    is prepared_counts().
    """
    for source, reasons in manifest.get("broken", {}).items():
        rows, total = sum(reasons.values()), manifest["dialogues"][source]["rows"]
        yield _finding("rows-broken", rows=rows, total=total, source=source, reasons=_list_reasons(reasons))
    for source, reasons in manifest.get("refused", {}).items():
        given = Counter(reasons) - Counter(manifest.get("broken", {}).get(source, {}))
        rows, total = given.total(), manifest["dialogues"][source]["rows"]
        if rows > 0.01 * total:
            yield _finding("rows-left-out", rows=rows, total=total, source=source, reasons=_list_reasons(given))
    for source, questions in manifest.get("unread", {}).items():
        yield _finding("key-not-read", rows=sum(questions.values()), source=source, reasons=_list_reasons(questions))
    if beyond := counts.get("beyond_context", 0):
        yield _finding("beyond-context", rows=beyond, total=counts["rows"], context=manifest["context_tokens"])


def beyond_context(rows: int, total: int, context: int) -> str:
    """Return the text of the finding that `rows` of `total` rows are longer than the start model's context."""
    return _finding("beyond-context", rows=rows, total=total, context=context).evidence


def _list_reasons(reasons: Mapping[str, int]) -> str:
    """Return the three most frequent reasons with their counts as text."""
    return "; ".join(f"{count:,} x {reason}" for reason, count in Counter(reasons).most_common(3))


def _check_labels(recipe: Recipe, seen: Seen, counts: Mapping[str, int]) -> Iterator[Finding]:
    """Yield findings about what is learnt: ends, padding, what stands before answers, cut dialogues, and the settings.

    Everything may be learnt without assistant_only_loss, or where documents are among the rows. `counts` is
    prepared_counts().
    """
    learnt, only = seen.dialogues - seen.unlearnt, recipe.sft is None or recipe.sft.assistant_only_loss
    if seen.ended < 0.5 * learnt:
        yield _finding("eos-not-learnt", ended=seen.ended, learnt=learnt)
    if seen.padded:
        yield _finding("padding-learnt", padded=seen.padded, share=seen.padded / (seen.padded + seen.learnt))
    if recipe.sft is not None and recipe.sft.hide_eos:
        yield _finding("eos-hidden")
    if seen.bos_inside or seen.eos_before:
        yield _finding("answer-apart", total=seen.dialogues, bos=seen.bos_inside, eos=seen.eos_before)
    checked, dialogues = counts.get("checked", 0), counts.get("dialogues", 0)
    if differs := counts.get("prompt differs", 0):
        level: Level = "warning" if differs < 0.05 * checked else "error"
        yield _finding("prompt-differs", level, differs=differs, checked=checked)
    if differs := counts.get("text differs", 0):
        yield _finding("text-differs", differs=differs, checked=checked)
    if seen.unlearnt:
        level = "error" if seen.unlearnt > 0.01 * seen.dialogues else "warning"
        yield _finding("nothing-learnt", level, unlearnt=seen.unlearnt, total=seen.dialogues)
    if only and seen.tokens and seen.learnt >= seen.tokens - seen.dialogues and not counts.get("documents"):
        yield _finding("everything-learnt", learnt=seen.learnt, tokens=seen.tokens)
    if cut := counts.get("truncated", 0):
        yield _finding("answers-cut", "error" if cut > 0.01 * dialogues else "warning", cut=cut, total=dialogues)
    if (left := counts.get(LEFT_OUT, 0)) > 0.01 * dialogues:
        yield _finding("exchanges-left-out", left=left, total=dialogues, why=LEFT_OUT.removeprefix("exchanges "))
    if recipe.optim.decay_steps is not None:
        yield _finding("schedule-of-another-run", steps=recipe.optim.decay_steps)
    if recipe.sft is not None and recipe.sft.order == "sampler":
        yield _finding("rows-repeated")


LEARNT, CONTEXT, MARK = "bold green", "", "cyan"


def print_summary(shards: Shards, seen: Seen) -> None:
    """Print a table: dialogues used, what is learnt (`seen`), and why rows were left out (five reasons per source)."""
    counts = prepared_counts(shards)
    rows = [
        [
            "dialogues kept",
            f"{counts['kept']:,} of {counts['rows']:,} rows; {counts['held_out']:,} held out, "
            f"{counts['reserved']:,} reserved",
        ],
        ["duplicates", f"{counts['duplicate']:,}; {counts['equals_held_out']:,} equal a held-out one"],
        ["longer than a row", f"{counts['split']:,} split, {counts['truncated']:,} cut"],
        ["exchanges left out", f"{counts[LEFT_OUT]:,} longer than a row"],
        ["learnt from", f"{seen.learnt / max(1, seen.tokens):.1%} of the tokens of {seen.rows:,} rows"],
        ["end of turn learnt", f"{seen.ended:,} of {seen.dialogues - seen.unlearnt:,} dialogues"],
        ["dialogues a row", f"{seen.dialogues / max(1, seen.rows):.2f}"],
        ["padding", f"{seen.padding / max(1, seen.padding + seen.tokens):.1%}, {seen.padded:,} labels on it"],
    ]
    for source, reasons in shards.manifest.get("refused", {}).items():
        rows += [[f"left out of {source}", f"{count:,}: {reason}"] for reason, count in Counter(reasons).most_common(5)]
    screen.heading("labels")
    screen.table(["", ""], rows)


def print_findings(findings: Sequence[Finding], shards: Shards) -> None:
    """Print each finding with its numbers and its fix; if there are none, print how many rows were left out."""
    if not findings:
        reasons = rows_left_out(shards)
        more = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
        rows = f"; {reasons.total():,} of {prepared_counts(shards)['rows']:,} rows left out ({more})" if reasons else ""
        screen.show(f"lint: nothing wrong{rows}")
    for finding in findings:
        screen.show(f"{finding.level}: {finding.check}: {finding.evidence}")
        screen.show(f"  fix: {finding.fix}")


def print_label_rows(recipe: Recipe, shards: Shards, count: int) -> None:
    """Print the first `count` training rows; what is learnt stands between ⟦ ⟧, green on a terminal.

    Builds a missing index of rows. Raises UserError when that cannot be written, or the tokenizer not be read.
    """
    library = recipe.sft.tokenizer if recipe.sft else "auto"
    tokenizer = pretrained.open_tokenizer(Path(shards.directory) / "tokenizer", library)
    data = dialogues.train_rows(shards, recipe)
    ids = np.arange(min(count, len(data)))
    for row, inputs, labels, documents in zip(ids, *data.read(ids), data.documents(ids), strict=True):
        used = int((documents >= 0).sum())
        screen.show(
            f"\n-- row {row}: {documents.max() + 1} dialogues, {used:,} tokens, "
            f"{int((labels != IGNORED).sum()):,} learnt, {len(inputs) - used:,} padding"
        )
        for number in range(int(documents.max()) + 1):
            here = np.flatnonzero(documents == number)
            screen.print_styled(_style_tokens(tokenizer, inputs[here], labels[here]))
        if (outside := documents < 0).any() and (labels[outside] != IGNORED).any():
            filler = tokenizer.decode([int(inputs[-1])])
            screen.print_styled([("padding: ", MARK), (f"⟦{filler}⟧ x {outside.sum():,}", LEARNT)])


def _style_tokens(
    tokenizer: pretrained.Tokenizer, inputs: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> list[tuple[str, str]]:
    """Return [(text, style)] of a dialogue: its length in tokens, then its text, with what is learnt within ⟦ ⟧.

    `inputs` and `labels` [tokens] are its part of a row; the last label's token, if learnt, is shown too.
    """
    ids = [*map(int, inputs)]
    learnt = [False, *(int(label) != IGNORED for label in labels[:-1])]
    if int(labels[-1]) != IGNORED:  # the last label's token, which is no input
        ids.append(int(labels[-1]))
        learnt.append(True)
    parts, start = [(f"[{len(ids):,} tokens] ", MARK)], 0
    while start < len(ids):
        stop = next((n for n in range(start, len(ids)) if learnt[n] != learnt[start]), len(ids))
        text = tokenizer.decode(ids[start:stop])
        parts.append((f"⟦{text}⟧", LEARNT) if learnt[start] else (text, CONTEXT))
        start = stop
    return parts
