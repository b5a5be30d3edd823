"""`finlm eval CHECKPOINT --suite exam|recall|financeiq|ceval`: questions, answers, scores, and a row in the run.

Base models continue text with a letter after five examples (--mode likelihood), assistants write an answer without any
(--mode chat); --mode cloze weighs the options in full by their likelihood per character, for models too small for
letters. What stands in events.jsonl,
on screen and under --json is the same result.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.data.synthetic_exam import LETTERS
from finlm.evals import choice, contaminated, questions, scores
from finlm.evals.choice import Answer, Mode
from finlm.evals.questions import Name, Question, Suite
from finlm.evals.scores import Count
from finlm.recipe import recipe as recipes
from finlm.recipe.schema_data import Synthetic
from finlm.train.opened import Opened, open_model

DEFAULT_ANSWERS = Path("runs") / "evals"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    suite: Name
    mode: Mode | None = None  # chat for models with a template
    shots: int | None = None  # 5 for likelihood, 0 for chat
    data: Path | None = None
    world: Path | None = None  # recipe whose fictional world is asked about
    limit: int | None = None
    answers: Path | None = None
    contamination: Path | None = None


def evaluate(checkpoint: Path, options: Options) -> dict[str, Any]:
    """The result of a suite, also appended to the run's events where they can be written. Raises UserError."""
    opened = open_model(checkpoint)
    result = _asked(opened, options)
    if opened.run is not None:
        try:
            opened.run.append_event("suite", step=opened.step, **result)
        except OSError as error:  # somebody else's run
            screen.say(f"not recorded in the run: {error}")
    return result


def after_training(run: RunDir, suites: Sequence[Name], mode: Mode | None, start: Path | None) -> None:
    """Rows of the suites in the run's events: of the model it started from as step 0, then of what came of it.

    Both are asked about the world of the run's recipe. Answers that the start gave before, in its own run, are kept
    there and not asked again.
    """
    if start is not None:
        _record(run, suites, mode, start, 0)
        gc.collect()  # two models may not fit one GPU
        torch.cuda.empty_cache()
    _record(run, suites, mode, run.path, None)


def _record(run: RunDir, suites: Sequence[Name], mode: Mode | None, checkpoint: Path, step: int | None) -> None:
    opened = open_model(checkpoint)
    for name in suites:
        result = _asked(opened, Options(name, mode, world=run.recipe))
        run.append_event("suite", step=opened.step if step is None else step, **result)


def _asked(opened: Opened, options: Options) -> dict[str, Any]:
    suite = questions.read(options.suite, options.data, world(opened, options.world))
    mode: Mode = options.mode or ("chat" if opened.tokenizer.chat_template else "likelihood")
    shots = examples(options, mode)
    selected = chosen(suite.questions, options.limit)
    in_run = opened.run is not None and os.access(opened.run.path, os.W_OK)
    directory = options.answers or (opened.run.path / "evals" if opened.run and in_run else DEFAULT_ANSWERS)
    ledger = directory / f"{suite.name}-{mode}-{opened.fingerprint[:12]}.jsonl"
    answers = choice.answers(opened, suite, selected, mode, shots, ledger)
    result = _result(opened, suite, selected, answers, mode, shots) | {"answers": str(ledger)}
    if options.contamination is not None:
        right = [answer.letter == question.answer for answer, question in zip(answers, selected, strict=True)]
        found = contaminated.find(selected, options.contamination)
        result["contamination"] = contaminated.summary(found, right, options.contamination)
    return result


def examples(options: Options, mode: Mode) -> int:
    """How many solved questions stand before each. Raises UserError for a number that this mode cannot have."""
    if options.shots is None:
        return questions.EXAMPLES if mode == "likelihood" else 0
    if options.shots and mode == "cloze":
        raise UserError("--mode cloze shows no examples", fix="leave out --shots, or choose another mode")
    return options.shots


def world(opened: Opened, path: Path | None) -> Synthetic | None:
    """The fictional world that a recipe, by default the run's own, was trained on."""
    file = path or (opened.run.recipe if opened.run else None)
    if file is None:
        return None
    return next((source.synthetic for source in recipes.load(file).recipe.data.sources if source.synthetic), None)


def chosen(asked: Sequence[Question], limit: int | None) -> list[Question]:
    """All, or a random `limit` of them, the same every time."""
    if limit is None or limit >= len(asked):
        return list(asked)
    places = np.random.default_rng(0).choice(len(asked), size=limit, replace=False)
    return [asked[place] for place in sorted(places.tolist())]


def _result(
    opened: Opened, suite: Suite, asked: list[Question], answers: list[Answer], mode: Mode, shots: int
) -> dict[str, Any]:
    counts: dict[str, Count] = {}
    for question, answer in zip(asked, answers, strict=True):
        correct, total = counts.get(question.subject, (0, 0))
        counts[question.subject] = Count(correct + (answer.letter == question.answer), total + 1)
    letters = [answer.letter for answer in answers]
    return {
        "suite": suite.name,
        "model": opened.name,
        "fingerprint": opened.fingerprint,
        "mode": mode,
        "shots": shots,
        "likelihood_per": {"likelihood": "answer", "cloze": "character"}.get(mode),
        "fewer_shots": sum(answer.shots < shots for answer in answers),  # not that many there, or not all fitted
        **scores.summary(dict(sorted(counts.items()))),
        "unanswered": letters.count(None),
        "letters": {letter: letters.count(letter) for letter in LETTERS},
        "set": {"questions": len(suite.questions), "sha256": suite.sha256, "released": suite.is_released},
    }


def show(result: dict[str, Any]) -> None:
    """A table by subject, the two averages and what to know about them, on stderr."""
    rows = [
        (name, f"{row['total']:,}", f"{100 * row['accuracy']:.1f} %", _interval(row["interval"]))
        for name, row in result["subjects"].items()
    ]
    rows.append(("macro (mean of subjects)", "", f"{100 * result['macro']:.2f} %", _interval(result["macro_interval"])))
    total = f"{result['questions']:,}"
    rows.append(("micro (all questions)", total, f"{100 * result['micro']:.2f} %", _interval(result["micro_interval"])))
    screen.heading(f"{result['suite']}, {result['mode']}, {result['shots']} examples: {result['model']}")
    screen.table(("subject", "questions", "accuracy", "95 % interval"), rows)
    screen.say("chosen: " + ", ".join(f"{letter} {count:,}" for letter, count in result["letters"].items()))
    if result["likelihood_per"] == "character":
        screen.say(
            "the likeliest option per character, as acc_norm: no comparison with sums, which favour short options"
        )
    if result["unanswered"]:
        screen.say(f"{result['unanswered']:,} answers name no letter and count as wrong")
    if result["fewer_shots"]:
        screen.say(
            f"{result['fewer_shots']:,} questions had fewer than {result['shots']} examples before them: "
            "the set has no more of their subject, or they did not fit the model's context"
        )
    about = result["set"]
    if result["questions"] < about["questions"]:
        screen.say(f"a random {result['questions']:,} of {about['questions']:,} questions (--limit)")
    if about["released"] is False:
        screen.say("this is NOT the released set of questions: do not compare with published scores")
    elif about["released"] is None and result["suite"] == "ceval":
        screen.say(f"the number of questions is the released set's; its hash is not known here: {about['sha256'][:16]}")
    if "contamination" in result:
        _show_contamination(result["contamination"])


def _show_contamination(found: dict[str, Any]) -> None:
    screen.say(f"{found['contained']:,} of {found['questions']:,} questions stand in the training data")
    if found["accuracy_contained"] is not None and found["accuracy_others"] is not None:
        inside, others = 100 * found["accuracy_contained"], 100 * found["accuracy_others"]
        screen.say(f"accuracy on these {inside:.1f} %, on the others {others:.1f} %")


def _interval(bounds: Sequence[float]) -> str:
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"
