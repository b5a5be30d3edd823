"""Read multiple-choice questions, how each suite puts them and how its answers are read: FinanceIQ, C-Eval, exam.

A set is identified by the sha256 of what it asks, because scores on other questions are no comparison: the rows of the
published FinanceIQ table mix two versions of the set, whose sizes differ by 18. Prompts are the published ones.
FinanceIQ (github.com/Duxiaoman-DI/XuanYuan, FinanceIQ/src) samples nothing, penalises repetition by 1.1 and stops after
512 tokens; C-Eval (github.com/hkust-nlp/ceval) has its README's prompts for answers without a chain of thought, and
FinEval (github.com/SUFE-AIFLM-Lab/FinEval, also the SUFE part of Fin-Eva) has taken them over. CFLUE
(github.com/aliyun/cflue, arXiv 2405.10542) asks assistants alone, has two to six options and several right ones to some
questions, of which all must be named and no other.

Accuracies come with 95 % intervals: Wilson's for a share, by the standard error for a mean of several.

The sets are licensed CC BY-NC-SA 4.0 (Fin-Eva: CC BY 4.0): none is part of this repository.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.corpus import contamination
from finlm.dialogues import scoring
from finlm.recipe import recipe as recipes
from finlm.recipe.schema_data import Synthetic
from finlm.world.companies import Dice, World
from finlm.world.exam import CLOSED_BOOK, LETTERS, exam
from finlm.world.facts import Archive
from finlm.world.writer import company_count


@dataclass(frozen=True)
class Style:
    """How a suite words a question: the texts around it, and how long and with what penalty an answer is written."""

    header: str  # before everything, with {subject}
    lead: str  # before the question's text
    cue: str  # what the answer's letter follows
    chat_cue: bool  # whether a chat turn ends with the cue
    shown_cue: str  # before the letter in an assistant's turn of an example
    repetition_penalty: float
    max_tokens: int  # of an answer in a chat

    several_header: str = ""  # instead of header, before a question with several right options

    def header_for(self, question: Question) -> str:
        """Return the header, with the question's subject, that stands before the first question."""
        header = self.several_header if question.kind == "several" else self.header
        return header.format(subject=question.subject)

    def format_question(self, text: str, options: tuple[str, ...]) -> str:
        """Return a question's text with its lettered options on lines of their own, without the cue."""
        lines = [self.lead + text, *(f"{letter}. {option}" for letter, option in zip(_NAMES, options, strict=False))]
        return "\n".join(lines)


_SUITES = tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))
STYLES = {name: Style(**row) for name, row in _SUITES["styles"].items()}
STYLES |= {"fineval": STYLES["ceval"], "recall": STYLES["exam"]}
CHINESE: dict[str, dict[str, str]] = _SUITES["subjects"]
FETCH: dict[str, str] = _SUITES["fetch"]
_NAMES = "ABCDEF"  # of options; the questions of all suites but cflue have four


Name = Literal["exam", "recall", "financeiq", "ceval", "fineval", "cflue", "cflue-tasks"]
EXAM_QUESTIONS = 1_000
EXAMPLES = 5  # a subject, as in the dev folders
CFLUE_FILE = "knowledge.json"
OF_WORLD: tuple[Name, ...] = ("exam", "recall")  # their questions are made
_COLUMNS = ("question", "a", "b", "c", "d", "answer")


@dataclass(frozen=True)
class Question:
    """A question with its options, four except in cflue; `answer` is a letter, in cflue one or more letters."""

    subject: str
    text: str
    options: tuple[str, ...]
    answer: str
    kind: Literal["one", "several"] = "one"  # right options, as the question says

    @property
    def sha256(self) -> str:
        """Hex sha256 of subject, text and options, without the answer."""
        return files.sha256_json([self.subject, self.text, self.options])


@dataclass(frozen=True)
class Suite:
    """Questions to ask, and solved questions by subject (`examples`) to show before them."""

    name: Name
    questions: tuple[Question, ...]
    examples: Mapping[str, tuple[Question, ...]]
    sha256: str
    is_released: bool | None  # None where no hash of the released set is known

    @property
    def letters(self) -> str:
        """Letters of the options that its questions may have: ABCDEF in cflue, else ABCD."""
        return _NAMES if self.name == "cflue" else LETTERS


def find_world(name: Name, run: RunDir | None, recipe: Path | None) -> Synthetic:
    """Return the fictional world that `recipe`, else the run's recipe, trains on. Raises UserError without one."""
    file = recipe or (run.recipe if run else None)
    sources = recipes.load(file).recipe.data.sources if file else []
    world = next((source.synthetic for source in sources if source.synthetic), None)
    if world is None:
        who = f"{recipe} trains on none" if recipe else "this model was not trained on one"
        raise UserError(
            f"--suite {name} asks about a fictional world, and {who}",
            fix="evaluate a run whose recipe has data.sources: [{synthetic: ...}], or name such a recipe: "
            "--world quickstart",
        )
    return world


def read_questions(name: Name, data: Path | None, world: Synthetic | None) -> Suite:
    """Return a suite's questions, read from the folder `data`, or for exam and recall made about `world`.

    exam and recall need `world`, the other suites `data`. Raises UserError when `data` is None or lacks a file, for a
    row that is no question of the suite, and for cflue-tasks when packages that score it are missing.
    """
    if name == "cflue-tasks":
        from finlm.evals import tasks

        return tasks.read_tasks(data)
    asked = "test" if name == "financeiq" else "val"
    if name in OF_WORLD:
        assert world is not None
        questions, examples = _make_questions(name, world)
    elif data is None:
        holds = CFLUE_FILE if name == "cflue" else f"dev/*.csv and {asked}/*.csv"
        raise UserError(
            f"--suite {name} needs its files",
            evidence="they are under licences of their own and not part of this repository",
            fix=f"give the folder with --data DIR: {holds} ({FETCH[name]})",
        )
    elif name == "cflue":
        questions, examples = tuple(_read_cflue(data / CFLUE_FILE)), {}
    else:
        questions, shown = tuple(_read_folder(data, asked, name)), list(_read_folder(data, "dev", name))
        subjects = dict.fromkeys(question.subject for question in shown)
        examples = {subject: tuple(q for q in shown if q.subject == subject) for subject in subjects}
    sha256 = digest(questions)
    return Suite(name, questions, examples, sha256, _is_released(name, questions, sha256))


def digest(questions: tuple[Question, ...]) -> str:
    """Return the hex sha256 of the questions, options and answers, independent of their order."""
    return files.sha256_json(sorted([q.subject, q.text, *q.options, q.answer] for q in questions))


def _is_released(name: str, questions: tuple[Question, ...], sha256: str) -> bool | None:
    """Return whether the questions are the released set, by number, then by hash; None if that hash is not known."""
    if name not in _SUITES["released"]:
        return None
    count, *known = _SUITES["released"][name]
    return False if len(questions) != count else sha256 == known[0] if known else None


def _read_folder(data: Path, part: str, name: str) -> Iterator[Question]:
    """Yield the questions of all CSV files in the folder data/part; a file's name is the subject.

    `name` is the suite, which may have Chinese names of subjects. Raises UserError if there are no files or a row is
    bad.
    """
    paths = sorted((data / part).glob("*.csv"))
    if not paths:
        raise UserError(
            f"{data / part} holds no CSV files",
            evidence="no such folder" if not (data / part).is_dir() else "none ends in .csv",
            fix=f"give the folder of {name} that has {part}/ in it with --data",
        )
    columns = "a file of questions has the columns question, A, B, C, D and answer"
    for path in paths:
        subject = path.stem.removesuffix(f"_{part}")
        subject = CHINESE.get(name, {}).get(subject, subject)
        for line, row in contamination.read_csv(path, _COLUMNS, columns):
            text, a, b, c, d, answer = (row.get(column, "").strip() for column in _COLUMNS)
            if answer.upper() not in LETTERS or not all((text, a, b, c, d, answer)):
                raise UserError(
                    f"{path}:{line}: not a question with four options and an answer from A to D",
                    evidence=f"answer {answer!r}, {sum(map(bool, (a, b, c, d)))} options",
                    fix="correct the row or take it out",
                )
            yield Question(subject, text, (a, b, c, d), answer.upper())


def _read_cflue(path: Path) -> Iterator[Question]:
    """Yield the questions of CFLUE's knowledge.json. UserError if it is missing, no JSON, has no rows, or a bad row."""
    fix = f"give the folder that holds {CFLUE_FILE} with --data ({FETCH['cflue']})"
    if not path.is_file():
        raise UserError(f"there is no {path}", fix=fix)
    rows = files.read_json(path)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} holds no questions", evidence="it is no list of rows", fix=fix)
    for number, row in enumerate(rows, 1):
        try:
            named = row["choices"] if isinstance(row["choices"], dict) else ast.literal_eval(row["choices"])
            text, answer, subject = row["question"].strip(), row["answer"].strip(), row["名称"].strip()
            options = tuple(str(named[letter]).strip() for letter in sorted(named))
            is_sound = "".join(sorted(named)) == _NAMES[: len(named)] and len(named) > 1 and text and all(options)
            right = "".join(letter for letter in sorted(named) if letter in answer)
            kind = row["task"]
        except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
            raise UserError(f"{path}: row {number} is no question of CFLUE", evidence=repr(error), fix=fix) from None
        if not is_sound or not right or sorted(answer) != list(right):
            raise UserError(
                f"{path}: row {number} is no question with two to six options and right ones among them",
                evidence=f"options {', '.join(sorted(named))}, answer {answer!r}",
                fix="correct the row or take it out",
            )
        yield Question(subject, text, options, right, "several" if kind == "多项选择题" else "one")


def _make_questions(name: Name, world: Synthetic) -> tuple[tuple[Question, ...], dict[str, tuple[Question, ...]]]:
    """Return (at most 1,000 questions, up to five examples of each subject) about the fictional world.

    `exam` asks what follows from the world's laws, about companies that are in no training text; `recall` what only the
    training text says.
    """
    closed = name == "recall"
    size = world.size if closed else world.held_out_size
    split = "train" if closed else "held_out"
    of_kind = (q for q in _draw_questions(size, world.seed, split, "questions") if (q.subject == CLOSED_BOOK) == closed)
    questions = tuple(islice(of_kind, EXAM_QUESTIONS))
    subjects = {question.subject for question in questions}
    examples: dict[str, list[Question]] = {subject: [] for subject in sorted(subjects)}
    for question in _draw_questions(world.size, world.seed, "train", "examples"):
        if len(examples.get(question.subject, "-" * EXAMPLES)) < EXAMPLES:
            examples[question.subject].append(question)
        if all(len(items) == EXAMPLES for items in examples.values()):
            break
    return questions, {subject: tuple(items) for subject, items in examples.items()}


def _draw_questions(size_bytes: int, seed: int, split: str, purpose: str) -> Iterator[Question]:
    """Yield different questions without end about a split's world of `size_bytes`; `purpose` names their draws."""
    seen = set()
    archive = Archive(World(split, seed, company_count(size_bytes)))
    for text, meta in exam(archive, Dice(split, seed, "suite", purpose)):
        *stem, a, b, c, d, _ = text.split("\n")
        options = tuple(option[3:] for option in (a, b, c, d))  # behind "A. "
        question = Question(str(meta["subject"]), "\n".join(stem), options, str(meta["answer"]))
        if question.sha256 not in seen:
            seen.add(question.sha256)
            yield question


_L = "([A-D])"
_SAID = [  # in this order, each anywhere in the text; then the last letter before 当选 or 正确, then these two
    *(rf"答案(?:选项)?[是为]：? ?{_L}", rf"答案[是为]选项 ?{_L}", rf"选择?：? ?{_L}", rf"{_L} ?选?项[是为]?正确"),
    *(rf"正确的?选项[是为] ?{_L}", rf"答案(?:应该)?[是为]{_L}", rf"选项 ?{_L} ?[是为]?正确", rf"选择答案 ?{_L}"),
    *(rf"答案?：?{_L}", rf"{_L}(?:选?项)?是?符合题意", rf"答案选项：? ?{_L}", rf"答案(?:选项)?为.*?{_L}"),
]
_BEFORE = [r"([A-D].*?)当选", r"([A-D].*?)正确"]
_AT_LAST = [rf"[^不]是：? ?{_L}", rf"^[^A-D]*{_L}[^A-D]*$"]


def decided_letter(text: str) -> str | None:
    """Return the letter of an unfinished answer that no further text can change; None while it can still change."""
    return scoring.find_decided_letter(text, LETTERS)


def extract_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that a whole answer names, or of the only one of four options that it quotes; else None."""
    letter = scoring.find_named_letter(text, LETTERS)
    if letter:
        return letter
    quoted = [name for name, option in zip(LETTERS, options, strict=True) if option in text]
    return quoted[0] if len(quoted) == 1 else None


def read_published(text: str) -> str | None:
    """Return the letter that FinanceIQ's code reads from an answer; None where that code draws a random letter."""
    text = text.replace("\n", "")
    if text[:1] in LETTERS:
        return text[:1] or None
    said = next((match[1] for match in (re.search(pattern, text) for pattern in _SAID) if match), None)
    before = next((match[1] for match in (re.search(pattern, text) for pattern in _BEFORE) if match), "")
    return (
        said
        or next((letter for letter in reversed(before) if letter in LETTERS), None)
        or next((match[1] for match in (re.search(pattern, text) for pattern in _AT_LAST) if match), None)
    )


_CFLUE_SAID = re.compile(r"答案[是：:]+([A-F]+)")
_CFLUE_OPENS = re.compile(r"^[A-F]+")


def read_cflue(text: str) -> str | None:
    """Return the letters that CFLUE's code reads, in the answer's order: of two lines the first; None without any."""
    lines = text.split("\n")
    read = re.sub("[、,， ]", "", (lines[0] if len(lines) == 2 else text).strip())
    said = _CFLUE_SAID.search(read)
    opens = _CFLUE_OPENS.search(read)
    return said[1] if said else opens[0] if opens else None


def decided_by_cflue(text: str) -> str | None:
    """Return the letters in a finished first line, which no further text can change; None if there are none yet."""
    first, line_end, _ = text.lstrip().partition("\n")
    said = _CFLUE_SAID.search(re.sub("[、,， ]", "", first))
    return said[1] if said and line_end else None


def opens_with_letter(text: str) -> str | None:
    """Return the letter A to D that a text begins with, which the published extraction takes; None without it."""
    return next((letter for letter in text.replace("\n", "")[:1] if letter in LETTERS), None)


class Way(NamedTuple):
    """How a written answer is read: `decided` from an unfinished text, `read` from the whole text."""

    decided: Callable[[str], str | None]
    read: Callable[[str, Sequence[str]], str | None]  # of the text and the options


WAYS = {
    "chat": Way(decided_letter, extract_letter),
    "published": Way(opens_with_letter, lambda text, _: read_published(text)),
    "cflue": Way(decided_by_cflue, lambda text, _: read_cflue(text)),
    "cflue-tasks": Way(lambda _: None, lambda *_: None),
}

_Z = 1.959964  # 95 % of a normal distribution lies within so many standard deviations
_DRAWS, _SEED = 10_000, 0
Interval = tuple[float, float]


class Count(NamedTuple):
    """The number of right answers among all."""

    correct: int
    total: int


def wilson(count: Count) -> Interval:
    """Return the 95 % Wilson interval of the share of right answers. Raises ZeroDivisionError for a total of 0."""
    share, n = count.correct / count.total, count.total
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def macro_interval(subjects: Mapping[str, Count]) -> Interval:
    """Return the 95 % interval of the mean of the subjects' accuracies; wilson() of a single subject."""
    if len(subjects) == 1:
        return wilson(*subjects.values())
    # The standard error with one right and one wrong answer added (Agresti and Coull): all right is no certainty.
    right, total = np.array(list(subjects.values())).T
    share, middle = (right + 1) / (total + 2), float((right / total).mean())
    half = _Z * math.sqrt((share * (1 - share) / total).sum()) / len(total)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Share:
    """The accuracy on the questions of a subject, with its counts and 95 % interval."""

    correct: int
    total: int
    accuracy: float
    interval: Interval


@dataclass(frozen=True)
class Scores:
    """Accuracy over all questions (micro), as mean over subjects (macro), and of each subject."""

    questions: int
    micro: float
    micro_interval: Interval
    macro: float
    macro_interval: Interval
    subjects: dict[str, Share]

    @classmethod
    def of(cls, subjects: Mapping[str, Count]) -> Scores:
        """Return the Scores of counts by subject. Raises ZeroDivisionError for a subject without questions."""
        whole = Count(*map(sum, zip(*subjects.values(), strict=True)))
        shares = {name: Share(*count, count.correct / count.total, wilson(count)) for name, count in subjects.items()}
        macro = sum(share.accuracy for share in shares.values()) / len(shares)
        micro = whole.correct / whole.total
        return cls(whole.total, micro, wilson(whole), macro, macro_interval(subjects), shares)


def weighted_f1(right: Sequence[str], given: Sequence[str | None]) -> float:
    """Return the mean F1, 0 to 1, of the right answers as classes, weighted by their questions (as in scikit-learn)."""
    total = 0.0
    for label, support in Counter(right).items():
        hits = sum(r == g == label for r, g in zip(right, given, strict=True))
        total += support * 2 * hits / (support + given.count(label))
    return total / len(right)


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of values in [0, 1], by a Bayesian bootstrap (Rubin, 1981) of fixed seed."""
    # Half a 0 and half a 1 more (Jeffreys' prior of a share): equal values would give an interval of length 0.
    drawn, weights = np.random.default_rng(_SEED), np.array([0.5, 0.5, *[1.0] * len(values)])
    array, means = np.array([0.0, 1.0, *values]), np.empty(_DRAWS)
    for number in range(_DRAWS):
        drawn_weights = drawn.standard_gamma(weights)
        means[number] = drawn_weights @ array / drawn_weights.sum()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
