"""Multiple-choice questions: the CSV files of FinanceIQ and C-Eval, and the exam of the fictional world.

A set is known by the sha256 of what it asks, because scores on other questions are no comparison: the rows of the
published FinanceIQ table mix two versions of the set, whose sizes differ by 18.

FinanceIQ and C-Eval are licensed CC BY-NC-SA 4.0: neither is part of this repository.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data.synthetic import company_count
from finlm.data.synthetic_archive import Archive
from finlm.data.synthetic_exam import CLOSED_BOOK, LETTERS, exam
from finlm.data.synthetic_world import Dice, World
from finlm.evals.styles import CEVAL_SUBJECTS
from finlm.recipe.schema_data import Synthetic

Name = Literal["exam", "recall", "financeiq", "ceval"]
EXAM_QUESTIONS = 1_000
EXAMPLES = 5  # a subject, as in the dev folders
_COLUMNS = ("question", "a", "b", "c", "d", "answer")
# The released sets: questions asked and sha256 of `digest`. C-Eval keeps the answers of its test questions, so its
# 1,346 validation questions are asked.
RELEASED = {
    "financeiq": (7_123, "486dbd6cb43ada176afdc7ff992dd3a73204139c23e9edb6b22ded5809c61689"),
    "ceval": (1_346, None),
}


@dataclass(frozen=True)
class Question:
    """One question with its four options; answer is a letter."""

    subject: str
    text: str
    options: tuple[str, str, str, str]
    answer: str

    @property
    def sha256(self) -> str:
        """Of all that is shown."""
        return files.sha256_json([self.subject, self.text, self.options])


@dataclass(frozen=True)
class Suite:
    """Questions to ask, and solved ones of each subject to show before them."""

    name: Name
    questions: tuple[Question, ...]
    examples: Mapping[str, tuple[Question, ...]]
    sha256: str
    is_released: bool | None  # None where no hash of the released set is known


def read(name: Name, data: Path | None, world: Synthetic | None) -> Suite:
    """The questions of a suite: from the folder `data`, or asked about `world`. Raises UserError."""
    if name in ("exam", "recall"):
        if world is None:
            raise UserError(
                f"--suite {name} asks about a fictional world, and this model was not trained on one",
                fix="evaluate a run whose recipe has data.sources: [{synthetic: ...}], or name the world: "
                "--world '{size: 12MB, held_out_size: 600KB, seed: 7}'",
            )
        questions, examples = _of_world(name, world)
    else:
        if data is None:
            raise UserError(
                f"--suite {name} needs its files",
                evidence="they are licensed CC BY-NC-SA 4.0 and not part of this repository",
                fix=f"give the folder with --data DIR: dev/*.csv and {'test' if name == 'financeiq' else 'val'}/*.csv",
            )
        asked = "test" if name == "financeiq" else "val"
        questions, examples = tuple(_folder(data, asked, name)), _by_subject(_folder(data, "dev", name))
    sha256 = digest(questions)
    return Suite(name, questions, examples, sha256, _is_released(name, questions, sha256))


def digest(questions: tuple[Question, ...]) -> str:
    """Hex sha256 of the questions, options and answers, whatever their order."""
    return files.sha256_json(sorted([q.subject, q.text, *q.options, q.answer] for q in questions))


def _is_released(name: str, questions: tuple[Question, ...], sha256: str) -> bool | None:
    if name not in RELEASED:
        return None
    count, known = RELEASED[name]
    return False if len(questions) != count else None if known is None else sha256 == known


def _by_subject(questions: Iterator[Question]) -> dict[str, tuple[Question, ...]]:
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.subject, []).append(question)
    return {subject: tuple(items) for subject, items in found.items()}


def _folder(data: Path, part: str, name: str) -> Iterator[Question]:
    paths = sorted((data / part).glob("*.csv"))
    if not paths:
        raise UserError(
            f"{data / part} holds no CSV files",
            evidence="no such folder" if not (data / part).is_dir() else "none ends in .csv",
            fix=f"give the folder of {name} that has {part}/ in it with --data",
        )
    for path in paths:
        subject = path.stem.removesuffix(f"_{part}")
        yield from _file(path, CEVAL_SUBJECTS.get(subject, subject) if name == "ceval" else subject)


def _file(path: Path, subject: str) -> Iterator[Question]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise UserError(
                    f"{path} holds no questions",
                    evidence=f"no column {', '.join(missing)}; its columns are {', '.join(names) or 'none'}",
                    fix="a file of questions has the columns question, A, B, C, D and answer",
                )
            for values in reader:
                row = dict(zip(names, values, strict=False))
                cells = [row.get(name, "").strip() for name in _COLUMNS]
                if cells[-1].upper() not in LETTERS or not all(cells):
                    raise UserError(
                        f"{path}:{reader.line_num}: not a question with four options and an answer from A to D",
                        evidence=f"answer {cells[-1]!r}, {sum(map(bool, cells[1:5]))} options",
                        fix="correct the row or take it out",
                    )
                yield Question(subject, cells[0], (cells[1], cells[2], cells[3], cells[4]), cells[-1].upper())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}", evidence=str(error), fix="give a CSV file in UTF-8") from None


def _of_world(name: Name, world: Synthetic) -> tuple[tuple[Question, ...], dict[str, tuple[Question, ...]]]:
    """exam: what the laws of the world answer, about companies that nobody has read of. recall: what only the training
    text says about its companies. Examples are about companies of the training text in both."""
    closed = name == "recall"
    size = world.size if closed else world.held_out_size
    split = "train" if closed else "held_out"
    of_kind = (q for q in _asked(size, world.seed, split, "questions") if (q.subject == CLOSED_BOOK) == closed)
    questions = tuple(islice(of_kind, EXAM_QUESTIONS))
    subjects = {question.subject for question in questions}
    examples: dict[str, list[Question]] = {subject: [] for subject in sorted(subjects)}
    for question in _asked(world.size, world.seed, "train", "examples"):
        if len(examples.get(question.subject, "-" * EXAMPLES)) < EXAMPLES:
            examples[question.subject].append(question)
        if all(len(items) == EXAMPLES for items in examples.values()):
            break
    return questions, {subject: tuple(items) for subject, items in examples.items()}


def _asked(size_bytes: int, seed: int, split: str, purpose: str) -> Iterator[Question]:
    """Different questions without end, drawn by other dice than the corpus draws its own."""
    seen = set()
    archive = Archive(World(split, seed, company_count(size_bytes)))
    for text, meta in exam(archive, Dice(split, seed, "suite", purpose)):
        *stem, a, b, c, d, _ = text.split("\n")
        options = [option[3:] for option in (a, b, c, d)]  # behind "A. "
        question = Question(
            str(meta["subject"]),
            "\n".join(stem),
            (options[0], options[1], options[2], options[3]),
            str(meta["answer"]),
        )
        if question.sha256 not in seen:
            seen.add(question.sha256)
            yield question
