"""Preference pairs about the synthetic world: an open-book exam question, its right answer and a wrong one.

Questions and answers have the form of synthetic_dialogues, drawn anew, so that preference training goes on where
fine-tuning ended. The wrong answer is any of the other three choices with equal chance: a pair teaches which choice is
right, and nothing about length or style. `answer` is the right letter, by which an answer of the model's own is judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from finlm.data import synthetic
from finlm.data.synthetic_dialogues import answer_with
from finlm.data.synthetic_exam import CLOSED_BOOK, LETTERS, exam
from finlm.data.synthetic_world import Dice

SOURCES = ("exam_pairs",)


def parts_of(source: str, size_bytes: int) -> int:
    """One: pairs are needed by the megabyte."""
    return 1


def write_part(source: str, directory: Path, size_bytes: int, seed: int, split: str, part: int) -> Path:
    """Write exam_pairs.jsonl into directory. size_bytes: the text of prompts and answers."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{source}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in pairs(size_bytes, seed, split):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def pairs(size_bytes: int, seed: int, split: str) -> Iterator[dict[str, str]]:
    """Rows {prompt, chosen, rejected, answer} of about size_bytes. Raises UserError for a size below 100 KB."""
    dice = Dice(split, seed, SOURCES[0])
    left = size_bytes
    for text, meta in exam(synthetic.archive(size_bytes, seed, split), dice):
        if meta["subject"] == CLOSED_BOOK:
            continue
        question = text.rpartition("\n")[0]
        right = str(meta["answer"])
        wrong = dice.pick([letter for letter in LETTERS if letter != right])
        chosen, rejected = answer_with(question, right), answer_with(question, wrong)
        left -= sum(len(part.encode()) for part in (question, chosen, rejected))
        if left < 0:
            return
        yield {"prompt": question, "chosen": chosen, "rejected": rejected, "answer": right}
