"""Run `finlm eval CHECKPOINT --suite exam|financeiq|...`: questions, answers, scores, and an event in the run.

Base models continue text with a letter after five examples (--mode likelihood), assistants write an answer without
examples (--mode chat); --mode cloze weighs the options in full by their likelihood per character, for models too small
for letters. A question counts as contained in the training data when one document has at least 65 % of its 6-grams
(corpus/contamination.py).

--write-lm-eval writes the same prompts as tasks of lm-evaluation-harness 0.4, one a subject and a group over them:

    finlm eval MODEL --suite financeiq --data DIR --write-lm-eval tasks
    lm_eval --model hf --model_args pretrained=MODEL --include_path tasks --tasks finlm_financeiq
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from ruamel.yaml import YAML

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import complete_checkpoint, run_of_checkpoint
from finlm.corpus import contamination
from finlm.evals import answering, questions, tasks
from finlm.evals.answering import Mode
from finlm.evals.questions import Count, Interval, Name, Question, Scores
from finlm.inference.open import Opened, load_trained, open_model
from finlm.recipe import recipe as recipes
from finlm.rows import dialogues
from finlm.rows.shards import Rows, Shard, Shards
from finlm.tokens import pretrained
from finlm.train import batches
from finlm.train.model import kernels
from finlm.world.exam import LETTERS


@dataclass(frozen=True)
class Contained:
    """How many questions the training data contains, and the accuracy on these and on the others (None without any)."""

    training: str
    contained: int
    questions: int
    accuracy_contained: float | None
    accuracy_others: float | None


@dataclass(frozen=True)
class QuestionSet:
    """The whole set that the questions are from: number, hash, whether it is the released set (None: not known)."""

    questions: int
    sha256: str
    released: bool | None


@dataclass(frozen=True)
class Result:
    """The result of `finlm eval --suite`: which model was asked what and how, its scores and its letters."""

    event: ClassVar[str] = "suite"
    suite: Name
    model: str
    fingerprint: str
    mode: Mode
    shots: int
    fewer_shots: int  # questions with less: not that many there, or not all fitted
    scores: Scores
    unanswered: int
    drawn: int  # letters at random, in mode published
    letters: dict[str, int]
    set: QuestionSet
    answers: str  # the file they are kept in
    weighted_f1: float | None = None  # of CFLUE's table, beside its accuracy, which is scores.micro
    contamination: Contained | None = None

    @property
    def likelihood_per(self) -> str | None:
        """The unit that likelihoods are compared per, "answer" or "character"; None in modes that write answers."""
        return {"likelihood": "answer", "cloze": "character"}.get(self.mode)

    def to_json(self) -> dict[str, object]:
        """Return the document of --json, which is also the event `suite`; the scores are at the top level."""
        row = asdict(self)
        scores, contamination = row.pop("scores"), row.pop("contamination")
        row |= {"likelihood_per": self.likelihood_per, **scores}
        return row if contamination is None else row | {"contamination": contamination}


def find_contained(questions: Sequence[Question], training: Path) -> dict[int, float]:
    """Return {index of a question: largest share of its 6-grams in one training document} for shares from 65 % on.

    `training` is a run or a directory of shards. Shows the progress. Raises UserError if its tokenizer cannot be
    opened.
    """
    shards = Shards(RunDir(training).shards if (training / "plan.json").is_file() else training)
    asked = [{"question": q.text} | dict(zip("abcdef", q.options, strict=False)) for q in questions]
    index = contamination.Index.of(
        [contamination.question(q.subject, 0, row) for q, row in zip(questions, asked, strict=True)]
    )
    parts = shards.split("train")
    shares: dict[int, float] = {}
    with screen.progress("contamination", sum(part.tokens for part in parts), "read") as advance:
        for part in parts:
            for tokens, texts in _decode_documents(part, shards):
                encoded = [text.encode() for text in texts]
                ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
                for hit in index.find(b"".join(encoded), ends):
                    shares[hit.question] = max(hit.share, shares.get(hit.question, 0.0))
                advance(tokens)
    return shares


def contained_summary(shares_found: dict[int, float], is_right: Sequence[bool], training: Path) -> Contained:
    """Return the Contained of the questions whose indexes are in shares_found, given which answers are right."""
    contained = [right for place, right in enumerate(is_right) if place in shares_found]
    others = [right for place, right in enumerate(is_right) if place not in shares_found]
    shares = (sum(some) / len(some) if some else None for some in (contained, others))
    return Contained(str(training), len(contained), len(is_right), *shares)


def _decode_documents(part: Shard, shards: Shards) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of tokens, texts of documents), a million tokens or more at a time. UserError without tokenizer."""
    directory = shards.directory / "tokenizer"
    tokenizer = pretrained.open_tokenizer(directory if directory.is_dir() else shards.directory)
    around = shards.bos_id, shards.eos_id
    block, tokens = list[list[int]](), 0
    for start, end in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
        block.append([number for number in part.ids[start:end].tolist() if number not in around])
        tokens += end - start
        if tokens >= 1_000_000:
            yield tokens, [tokenizer.decode(ids) for ids in block]
            block, tokens = [], 0
    if block:
        yield tokens, [tokenizer.decode(ids) for ids in block]


@dataclass(frozen=True)
class Options:
    """The options of `finlm eval --suite`; None leaves a choice to the suite and the model."""

    suite: Name
    mode: Mode | None = None  # chat for models with a template
    shots: int | None = None  # 5 for likelihood, 0 for chat
    data: Path | None = None
    world: Path | None = None  # recipe whose fictional world is asked about
    limit: int | None = None
    answers: Path | None = None
    contamination: Path | None = None

    def ledger(self, opened: Opened, mode: Mode) -> Path:
        """Return the path of the model's answers: in `answers`, else in its run if writable, else in runs/evals."""
        of_run = opened.run is not None and os.access(opened.run.path, os.W_OK)
        directory = self.answers or (opened.run.path / "evals" if opened.run and of_run else Path("runs/evals"))
        return directory / f"{self.suite}-{mode}-{opened.fingerprint[:12]}.jsonl"


def evaluate(checkpoint: Path, options: Options) -> Result | tasks.Result:
    """Ask a suite, return its Result; keep answers in a ledger, append the event `suite` or `tasks` to the model's run.

    Raises UserError for options that do not fit the suite or the model, a model that cannot be opened, missing or bad
    files of questions, and a ledger that cannot be written.
    """
    check_options(options)
    opened = open_model(checkpoint)
    result = tasks.ask(opened, options) if options.suite == "cflue-tasks" else _ask_suite(opened, options)
    if opened.run is not None:
        try:
            opened.run.append_event(result.event, step=opened.step, **result.to_json())
        except OSError as error:  # somebody else's run
            screen.say(f"not recorded in the run: {error}")
    return result


def check_options(options: Options) -> None:
    """Raise UserError for options that do not fit the suite or each other, before a model is loaded."""
    of_world = options.suite in questions.OF_WORLD
    useless = "--data" if of_world and options.data else "--world" if options.world and not of_world else None
    if useless:
        raise UserError(
            f"{useless} has no meaning for --suite {options.suite}",
            fix="--world goes with exam and recall, --data with the other suites",
        )
    if options.suite in ("cflue", "cflue-tasks") and (options.mode not in (None, "chat") or options.shots):
        raise UserError("CFLUE asks assistants, without examples", fix="ask with --mode chat and without --shots")
    if options.mode == "published" and options.suite != "financeiq":
        raise UserError(
            f"--mode published is the way of FinanceIQ's own code, and {options.suite} is another suite",
            fix="ask with --mode likelihood, chat or cloze",
        )
    if options.shots and options.mode == "cloze":
        raise UserError("--mode cloze shows no examples", fix="leave out --shots, or choose another mode")


def evaluate_run(run: RunDir, suites: Sequence[Name], mode: Mode | None, start: Path | None) -> None:
    """Append the suites' results to the run's events: of model `start`, if any, as step 0, then of the trained model.

    Both are asked about the world of the run's recipe; answers of the start model are read from its own run. Raises
    UserError when a model cannot be opened, the recipe has no fictional world for exam or recall, a suite needs other
    files, or the answers cannot be written.
    """
    for checkpoint in (run.path,) if start is None else (start, run.path):
        opened = open_model(checkpoint)
        step = 0 if checkpoint is start else opened.step
        for name in suites:
            result = _ask_suite(opened, Options(name, mode, world=run.recipe))
            run.append_event("suite", step=step, **result.to_json())
        del opened  # two models may not fit one GPU
        gc.collect()
        torch.cuda.empty_cache()


def _ask_suite(opened: Opened, options: Options) -> Result:
    """Answer a suite's questions with the model, show the progress, append answers to the ledger, return the Result.

    Raises UserError for unusable questions, mode chat without a chat template, or a ledger that cannot be written.
    """
    suite = _read_questions(opened, options)
    mode: Mode = options.mode or ("chat" if opened.tokenizer.chat_template or suite.name == "cflue" else "likelihood")
    shots = count_examples(options, mode)
    selected = draw_questions(suite.questions, options.limit)
    ledger = options.ledger(opened, mode)
    answers = answering.answer_questions(opened, suite, selected, mode, shots, ledger)
    right = [answer.letter == question.answer for answer, question in zip(answers, selected, strict=True)]
    contained = None
    if options.contamination is not None:
        shares = find_contained(selected, options.contamination)
        contained = contained_summary(shares, right, options.contamination)
    counts = {subject: Count(0, 0) for subject in sorted({question.subject for question in selected})}
    for question, is_right in zip(selected, right, strict=True):
        correct, total = counts[question.subject]
        counts[question.subject] = Count(correct + is_right, total + 1)
    letters = [answer.letter for answer in answers]
    return Result(
        suite=suite.name,
        model=opened.name,
        fingerprint=opened.fingerprint,
        mode=mode,
        shots=shots,
        fewer_shots=sum(answer.shots < shots for answer in answers),
        scores=Scores.of(counts),
        unanswered=letters.count(None),
        drawn=sum(answer.drawn for answer in answers),
        letters={letter: sum(letter in (given or "") for given in letters) for letter in suite.letters},
        weighted_f1=questions.weighted_f1([q.answer for q in selected], letters) if suite.name == "cflue" else None,
        set=QuestionSet(len(suite.questions), suite.sha256, suite.is_released),
        answers=str(ledger),
        contamination=contained,
    )


def _read_questions(opened: Opened, options: Options) -> questions.Suite:
    """Return the suite's questions, about the world of --world or the run. UserError without world or good files."""
    asks_about_world = options.suite in questions.OF_WORLD
    world = questions.find_world(options.suite, opened.run, options.world) if asks_about_world else None
    return questions.read_questions(options.suite, options.data, world)


def count_examples(options: Options, mode: Mode) -> int:
    """Return how many solved questions to show: options.shots, else 5 for likelihood and published, 0 for others."""
    if options.shots is None:
        return questions.EXAMPLES if mode in ("likelihood", "published") else 0
    return options.shots


def draw_questions(asked: Sequence[Question], limit: int | None) -> list[Question]:
    """Return all questions, or a random `limit` of them in their order, the same every time."""
    if limit is None or limit >= len(asked):
        return list(asked)
    places = np.random.default_rng(0).choice(len(asked), size=limit, replace=False)
    return [asked[place] for place in sorted(places.tolist())]


def show(result: Result | tasks.Result) -> None:
    """Print a table of accuracies by subject, the two averages and notes on how to read them."""
    if isinstance(result, tasks.Result):
        return tasks.show(result)
    scores, about = result.scores, result.set
    rows = [
        (name, f"{share.total:,}", f"{100 * share.accuracy:.1f} %", _interval(share.interval))
        for name, share in scores.subjects.items()
    ]
    rows.append(("macro (mean of subjects)", "", f"{100 * scores.macro:.2f} %", _interval(scores.macro_interval)))
    total, micro = f"{scores.questions:,}", f"{100 * scores.micro:.2f} %"
    rows.append(("micro (all questions)", total, micro, _interval(scores.micro_interval)))
    screen.heading(f"{result.suite}, {result.mode}, {result.shots} examples: {result.model}")
    screen.table(("subject", "questions", "accuracy", "95 % interval"), rows)
    if result.weighted_f1 is not None:
        f1 = f"weighted F1 {100 * result.weighted_f1:.2f} %"
        screen.show(f"{f1}, over the answers as classes, as CFLUE's table has it")
    screen.show("chosen: " + ", ".join(f"{letter} {count:,}" for letter, count in result.letters.items()))
    if result.likelihood_per == "character":
        screen.show(
            "the likeliest option per character, as acc_norm: no comparison with sums, which favour short options"
        )
    if result.drawn:
        share = result.drawn / scores.questions
        screen.show(
            f"{result.drawn:,} answers ({share:.1%}) name no letter: one was drawn for each, as FinanceIQ's code "
            f"does, so about {share / 4:.1%} of all questions are right by chance"
        )
    if result.unanswered:
        screen.show(f"{result.unanswered:,} answers name no letter and count as wrong")
    if result.fewer_shots:
        screen.show(
            f"{result.fewer_shots:,} questions had fewer than {result.shots} examples before them: "
            "the set has no more of their subject, or they did not fit the model's context"
        )
    if scores.questions < about.questions:
        screen.show(f"a random {scores.questions:,} of {about.questions:,} questions (--limit)")
    if about.released is False:
        screen.show("this is NOT the released set of questions: do not compare with published scores")
    elif about.released is None and result.suite == "cflue":
        screen.show(f"what the released set is, is not known here; the hash of this one is {about.sha256[:16]}")
    elif about.released is None and result.suite in ("ceval", "fineval"):
        screen.show(f"the number of questions is the released set's; its hash is not known here: {about.sha256[:16]}")
    if (contained := result.contamination) is not None:
        screen.show(f"{contained.contained:,} of {contained.questions:,} questions stand in the training data")
        if contained.accuracy_contained is not None and contained.accuracy_others is not None:
            inside, others = 100 * contained.accuracy_contained, 100 * contained.accuracy_others
            screen.show(f"accuracy on these {inside:.1f} %, on the others {others:.1f} %")


def _interval(bounds: Interval) -> str:
    """Return "LOW to HIGH" in percent; the bounds are shares from 0 to 1."""
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def write_lm_eval_task(checkpoint: Path, options: Options, out: Path) -> Path:
    """Write lm-eval tasks with their questions into a new directory `out` and return it.

    Raises UserError when `out` exists, for a mode other than likelihood or options that do not fit the suite, for
    CFLUE's suites, a model that cannot be opened, and unusable questions.
    """
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    if options.mode not in (None, "likelihood") or options.suite in ("cflue", "cflue-tasks"):
        fix = "name another suite" if options.suite in ("cflue", "cflue-tasks") else f"leave out --mode {options.mode}"
        raise UserError("only likelihoods of letters are written as lm-eval tasks", fix=fix)
    check_options(options)
    shots = count_examples(options, "likelihood")
    opened = open_model(checkpoint)
    asked = _read_questions(opened, options)
    by_subject: dict[str, list[dict[str, object]]] = {}
    for prompt in answering.continuations(opened, asked, draw_questions(asked.questions, options.limit), shots):
        row = {"prompt": prompt.text, "answer": LETTERS.index(prompt.question.answer), "id": prompt.question.sha256}
        by_subject.setdefault(prompt.question.subject, []).append(row)
    group = f"finlm_{asked.name}"
    with files.new_directory(out) as directory:
        for number, (subject, rows) in enumerate(sorted(by_subject.items())):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            files.write_text(directory / f"{number:02}.jsonl", lines)
            place = (out / f"{number:02}.jsonl").absolute()
            _write_yaml(directory / f"{number:02}.yaml", _task(f"{group}_{number:02}", f"{group}: {subject}", place))
        names = [f"{group}_{number:02}" for number in range(len(by_subject))]
        mean = [{"metric": "acc", "weight_by_size": False}]  # over subjects, not questions
        whole: dict[str, object] = {"group": group, "task": names, "aggregate_metric_list": mean}
        _write_yaml(directory / f"{group}.yaml", whole | {"metadata": {"version": 1}})
    return out


def _task(name: str, alias: str, rows: Path) -> dict[str, object]:
    """Return lm-eval's settings for a subject's multiple-choice task, from JSON lines `rows` (`prompt`, `answer`)."""
    return {
        "task": name,
        "task_alias": alias,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "num_fewshot": 0,  # the examples stand in the prompt
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }


def _write_yaml(path: Path, value: dict[str, object]) -> None:
    """Write a value to path as YAML, over a file that is there."""
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(value, file)


STAGES = ("pretrain", "sft")  # whose held-out rows are text that the model learnt to write


def measure_perplexity(checkpoint: Path) -> dict[str, Any]:
    """Return {loss, perplexity, sources: {name: the same, tokens}} on the held-out data of the checkpoint's run.

    Loss is in nats a token; sources of pretraining have bits_per_byte too. Raises UserError for an incomplete
    checkpoint, a stage whose rows are pairs or prompts, and a run without held-out documents.
    """
    run = run_of_checkpoint(complete_checkpoint(checkpoint))
    stage = recipes.load(run.recipe).recipe.stage
    if stage not in STAGES:
        asked = "" if stage == "reward" else f"finlm eval {checkpoint} --suite exam; "
        raise UserError(
            f"{run.path.name} is of stage {stage}: its held-out rows have no perplexity",
            evidence="they are " + ("prompts to answer" if stage == "grpo" else "pairs of a better and a worse answer"),
            fix=f"{asked}its own evaluation is in {run.report}",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_trained(checkpoint)
    if not loaded.shards.split("held_out"):
        raise UserError(
            f"{loaded.shards.directory} has no held-out documents",
            evidence="data.held_out_fraction was 0",
            fix="set data.held_out_fraction, for example 0.01, and train again",
        )
    model = loaded.model.to(device)
    kernels.swap_loss(model, loaded.plan.vocab_size)
    rows_of = dialogues.held_out(loaded.recipe) if dialogues.is_dialogues(loaded.shards) else Rows
    return dict(batches.evaluate(model, loaded.shards, loaded.recipe, (loaded.plan.micro_batch,), device, rows_of))


def show_perplexity(result: dict[str, Any]) -> None:
    """Print the result of measure_perplexity: a line per source, and one over all sources."""
    for name, source in result["sources"].items():
        per_byte = f"bits/byte {source['bits_per_byte']:.4f}  " if "bits_per_byte" in source else ""
        screen.show(
            f"{name:<24} loss {source['loss']:.4f}  perplexity {source['perplexity']:,.2f}  "
            f"{per_byte}({source['tokens']:,} tokens)"
        )
    screen.show(f"{'all':<24} loss {result['loss']:.4f}  perplexity {result['perplexity']:,.2f}")
