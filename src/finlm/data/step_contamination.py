"""The step `contamination`: documents that contain benchmark questions (contamination.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.data import contamination, documents, sources
from finlm.data.context import Context
from finlm.data.steps import NotPrepared, Step

_SAMPLES = 50  # hits a source kept in contaminated.jsonl


def check(context: Context) -> None:
    """Raises UserError for a benchmark that there is not, where the cache may build."""
    if context.cache.build:
        _files(context, context.data.decontaminate)


def run(context: Context, read: Step) -> Step | None:
    """The contaminated documents, in documents.npy; None where the recipe names no benchmark. Raises UserError."""
    patterns = context.data.decontaminate
    if not patterns:
        return None
    paths = _files(context, patterns)

    def make(directory: Path) -> dict[str, Any]:
        questions = list(contamination.read(paths))
        index = directory / "questions.npz"
        contamination.Index.of(questions).save(index)
        chunks = list(documents.chunks(read.path, read.manifest))
        tasks = [contamination.Task(chunk.path, index) for chunk in chunks]
        found: list[int] = []
        by_source: Counter[str] = Counter()
        asked: set[int] = set()
        with (directory / "contaminated.jsonl").open("w", encoding="utf-8") as ledger:
            for chunk, hits in zip(chunks, context.map(contamination.of_chunk, tasks), strict=True):
                for hit in hits:
                    question = questions[hit["question"]]
                    asked.add(hit["question"])
                    by_source[chunk.source] += 1
                    if by_source[chunk.source] <= _SAMPLES:
                        about = {"source": chunk.source, "file": question.file, "line": question.line}
                        row = about | {"stem": question.stem, "share": hit["share"], "start": hit["start"]}
                        ledger.write(json.dumps(row, ensure_ascii=False) + "\n")
                found += sorted({chunk.rows.start + hit["document"] for hit in hits})
        np.save(directory / "documents.npy", np.array(found, dtype=np.int64))
        return {"questions": len(questions), "documents": len(found), "found": len(asked)}

    hashes = context.cache.fingerprints(paths)
    depends_on = {
        "version": contamination.VERSION,
        "documents": read.key,
        "questions": [[path.name, hashes[path]] for path in paths],
    }
    step = context.cache.step("contamination", depends_on, make, 64 * 2**20)
    context.say(
        step,
        f"{step.manifest['documents']:,} documents contain {step.manifest['found']:,} of "
        f"{step.manifest['questions']:,} benchmark questions",
    )
    return step


def found(step: Step | None) -> npt.NDArray[np.int64]:
    """The numbers of the contaminated documents, ascending."""
    return np.empty(0, dtype=np.int64) if step is None else np.load(step.path / "documents.npy")


def _files(context: Context, patterns: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for pattern in patterns:
        matching = sources.expand(pattern)
        if not matching and not context.cache.build:
            raise NotPrepared("contamination")
        if not matching:
            raise UserError(
                f"data.decontaminate: no file matches {pattern}",
                evidence=f"looked from {Path.cwd()}",
                fix="correct the path, or take it out of data.decontaminate",
            )
        paths += matching
    return list(dict.fromkeys(paths))
