"""Samples of what the selection leaves out: the first documents of each source and reason, for people to look at.

A near-duplicate is shown beside the document that stands for it. What cleaning drops is in the documents step's own
ledger, and which question a document contains in contaminated.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import dedup, documents

_SAMPLES = 20  # of each source and reason
_EXCERPT = 120  # characters


def write(
    path: Path,
    chunks: Sequence[documents.Chunk],
    decision: dedup.Decisions,
    components: npt.NDArray[np.uint32] | None,
) -> None:
    """JSON lines {source, reason, document, start}, of near-duplicates also {like, like_start}."""
    rows = list(_rows(chunks, decision, components))
    wanted = np.unique([row[name] for row in rows for name in ("document", "like") if name in row]).astype(np.int64)
    starts = dict(_starts(chunks, wanted))
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            row["start"] = starts[row["document"]]
            if "like" in row:
                row["like_start"] = starts[row["like"]]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _rows(
    chunks: Sequence[documents.Chunk], decision: dedup.Decisions, components: npt.NDArray[np.uint32] | None
) -> Iterator[dict[str, Any]]:
    taken: dict[tuple[str, int], int] = {}
    for chunk in chunks:
        here = decision[chunk.rows]
        for code in np.unique(here[here > dedup.HELD_OUT]).tolist():
            left = _SAMPLES - taken.get((chunk.source, code), 0)
            chosen = (np.flatnonzero(here == code)[:left] + chunk.rows.start).tolist()
            taken[chunk.source, code] = taken.get((chunk.source, code), 0) + len(chosen)
            for number in chosen:
                row = {"source": chunk.source, "reason": dedup.NAMES[code], "document": number}
                if code in (dedup.NEAR_DUPLICATE, dedup.NEAR_HELD_OUT) and components is not None:
                    row["like"] = int(components[number])
                yield row


def _starts(chunks: Sequence[documents.Chunk], numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    for chunk in chunks:
        here = numbers[slice(*np.searchsorted(numbers, [chunk.rows.start, chunk.rows.stop]))]
        if len(here):
            wanted = np.zeros(chunk.rows.stop - chunk.rows.start, dtype=np.bool_)
            wanted[here - chunk.rows.start] = True
            for number, text in zip(here.tolist(), documents.read_texts(chunk.path, wanted), strict=True):
                yield number, text[:_EXCERPT]
