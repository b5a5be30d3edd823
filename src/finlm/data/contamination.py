"""Documents that contain a benchmark's questions: by the share of a question's 6-grams that stand in the document.

A question counts as contained when the document holds at least 65 % of its 6-grams, of letters and digits only. In
47,493 real finance documents no question of FinanceIQ (7,173, many of them about the laws in the corpus) reaches more
than 53 %; one printed as an exam does reaches 100 %, with two characters changed three in four are still found. The
usual test, any 13-gram in common, would drop 289 of these documents, for phrases of law.

A stem that is mostly wording shared with other questions ("下列说法正确的是") says little: there the options, with
their letters, belong to the question. Rewordings and translations are not found.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.data import clean_text, documents, ngrams
from finlm.data.stretches import within

VERSION = 1
GRAM = 6
SHARE = 0.65
_WORDING = 3  # an n-gram of more questions than this is wording: "以下哪一项是正确的"
_ENOUGH_OWN = 9  # n-grams of its own that make a stem say what it asks
_OPTIONS = ("a", "b", "c", "d", "e", "f")
_TABLE_BITS = 24


@dataclass(frozen=True)
class Question:
    """One row of a benchmark's CSV file."""

    file: str
    line: int
    stem: str
    options: str


@dataclass(frozen=True)
class Hit:
    """A question that a document contains."""

    document: int  # in its chunk
    question: int
    share: float  # of the question's n-grams


def read(paths: Sequence[Path]) -> Iterator[Question]:
    """The questions of CSV files with a column `question` and options A to F. Raises UserError."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file)
                names = [name.strip().lower() for name in next(reader, [])]
                if "question" not in names:
                    raise UserError(
                        f"{path} holds no benchmark questions",
                        evidence=f"its columns are {', '.join(names) or 'none'}",
                        fix="data.decontaminate takes CSV files with a column question (and A, B, C, D)",
                    )
                for values in reader:
                    row = dict(zip(names, values, strict=False))
                    yield question(path.name, reader.line_num, row)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"cannot read {path}", evidence=str(error), fix="give a CSV file in UTF-8") from None


def question(file: str, line: int, row: dict[str, str]) -> Question:
    """A question from its columns: question, a, b, c, d."""
    options = " ".join(f"{name} {_spelled(row[name])}" for name in _OPTIONS if row.get(name))
    return Question(file, line, _spelled(row.get("question", "")), options)


def _spelled(text: str) -> str:
    return clean_text.simplify(clean_text.normalise(clean_text.strip_html(text)))


class Index:
    """The n-grams of all questions, for finding them in many documents at once."""

    def __init__(self, hashes: npt.NDArray[np.uint64], question: npt.NDArray[np.int32], total: npt.NDArray[np.int64]):
        self.hashes = hashes  # [entries], ascending; a gram of two questions is there twice
        self.question = question  # [entries]
        self.total = total  # [questions], different grams of each
        self.unique, first = np.unique(hashes, return_index=True)
        self._first = np.append(first, len(hashes))
        self._maybe = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        self._maybe[self.unique >> np.uint64(64 - _TABLE_BITS)] = True

    @classmethod
    def of(cls, questions: Sequence[Question]) -> Index:
        """The index of these questions; one shorter than an n-gram is not looked for."""
        stems = _pairs([question.stem for question in questions])
        _, of_gram, askers = np.unique(stems["hash"], return_inverse=True, return_counts=True)
        own = np.bincount(stems["question"][askers[of_gram] <= _WORDING], minlength=len(questions))
        texts = [
            question.stem if count >= _ENOUGH_OWN else f"{question.stem} {question.options}"
            for question, count in zip(questions, own, strict=True)
        ]
        pairs = _pairs(texts)
        return cls(pairs["hash"], pairs["question"], np.bincount(pairs["question"], minlength=len(questions)))

    def save(self, path: Path) -> None:
        """Keep the arrays."""
        np.savez(path, hashes=self.hashes, question=self.question, total=self.total)

    @classmethod
    def load(cls, path: Path) -> Index:
        """What save kept."""
        with np.load(path) as arrays:
            return cls(arrays["hashes"], arrays["question"], arrays["total"])

    def find(self, data: bytes, ends: npt.NDArray[np.integer]) -> list[Hit]:
        """The questions contained in each of the documents that end at these bytes of UTF-8 data, by document."""
        grams = ngrams.grams(ngrams.words_only(ngrams.characters(data, ends)), GRAM)
        maybe = np.flatnonzero(self._maybe[grams.hashes >> np.uint64(64 - _TABLE_BITS)])
        hashes = grams.hashes[maybe]
        place = np.minimum(np.searchsorted(self.unique, hashes), max(0, len(self.unique) - 1))
        known = self.unique[place] == hashes if len(self.unique) else np.zeros(0, dtype=np.bool_)
        # Each gram once a document, then once for each question that has it.
        seen = np.unique(grams.document[maybe[known]].astype(np.int64) * len(self.unique) + place[known])
        document, place = seen // max(1, len(self.unique)), seen % max(1, len(self.unique))
        times = self._first[place + 1] - self._first[place]
        question = self.question[np.repeat(self._first[place], times) + within(times)]
        pair, count = np.unique(np.repeat(document, times) * len(self.total) + question, return_counts=True)
        share = count / self.total[pair % len(self.total)]
        return [
            Hit(int(found) // len(self.total), int(found) % len(self.total), float(part))
            for found, part in zip(pair[share >= SHARE], share[share >= SHARE], strict=True)
        ]


def _pairs(texts: Sequence[str]) -> npt.NDArray[Any]:
    """Records (hash, question) of the different n-grams of each text, by hash."""
    encoded = [text.encode() for text in texts]
    text = ngrams.characters(b"".join(encoded), np.cumsum([len(item) for item in encoded], dtype=np.int64))
    grams = ngrams.grams(ngrams.words_only(text), GRAM)
    pairs = np.empty(len(grams.hashes), dtype=[("hash", np.uint64), ("question", np.int32)])
    pairs["hash"], pairs["question"] = grams.hashes, grams.document
    return np.unique(pairs)


@dataclass(frozen=True)
class Task:
    """A chunk of documents and where the questions are."""

    chunk: Path
    index: Path


def of_chunk(task: Task) -> list[dict[str, Any]]:
    """The hits in a chunk with the start of the document. Runs in a worker."""
    data, ends = task.chunk.read_bytes(), documents.read_index(task.chunk)["end"]
    bounds = [0, *ends.tolist()]
    found = []
    for hit in _index(task.index).find(data, ends):
        start, end = bounds[hit.document : hit.document + 2]
        begins = data[start : min(end, start + 600)].decode("utf-8", errors="ignore")[:120]
        about = {"document": hit.document, "question": hit.question, "share": round(hit.share, 3), "start": begins}
        found.append(about)
    return found


@lru_cache(maxsize=1)
def _index(path: Path) -> Index:
    return Index.load(path)
