"""What is known about prepared data beyond its counts: lengths, drops by reason, the most frequent origins.

Computed once from the shards' document indexes and the manifests of the steps before, kept as documents.json in the
shards directory, and shown by `prepare`, in a run's data.json and in the report. It reads no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EDGES = (0, *(2**power for power in range(5, 18)))  # tokens; the last class is open


def of(
    directory: Path,
    entries: Sequence[Mapping[str, Any]],
    inputs: Sequence[Mapping[str, Any]],
    counts: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of documents.json: counts by source and in all, files, lengths, reasons, values.

    entries are the shards' manifest entries, inputs those of the documents step, counts {"sources", "total"} of the
    selection.
    """
    return {
        "sources": counts["sources"],
        "total": counts["total"],
        "files": [file for item in inputs for file in item["files"]],
        "pinned": {item["source"]: item["pinned"] for item in inputs if item["pinned"]},
        "lengths": _lengths(directory, entries),
        "cleaned": _by_source(inputs, "dropped"),
        "values": {item["source"]: item["values"] for item in inputs if item["values"]},
    }


def _lengths(directory: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{source: {documents, tokens, median, longest, histogram: [[from tokens, documents, tokens]]}} for training."""
    found: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(entry["source"] for entry in entries):
        parts = [
            np.diff(np.fromfile((directory / entry["file"]).with_suffix(".idx"), dtype="<u8").astype(np.int64))
            for entry in entries
            if entry["source"] == source and entry["split"] == "train"
        ]
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if not len(lengths):
            continue
        kind = np.searchsorted(EDGES, lengths, side="right") - 1
        documents = np.bincount(kind, minlength=len(EDGES))
        tokens = np.bincount(kind, weights=lengths, minlength=len(EDGES))
        found[source] = {
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
            "histogram": [
                [edge, int(documents[number]), int(tokens[number])]
                for number, edge in enumerate(EDGES)
                if documents[number]
            ],
        }
    return found


def _by_source(inputs: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, int]]:
    sums: dict[str, Counter[str]] = {}
    for item in inputs:
        sums.setdefault(item["source"], Counter()).update(item[name])
    return {source: dict(counts) for source, counts in sums.items() if counts}
