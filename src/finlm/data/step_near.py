"""The steps `signatures` and `near_duplicates`: which documents are nearly the same text (near.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import units
from finlm.data import dedup, documents, near, near_signatures, near_verify
from finlm.data.context import Context
from finlm.data.steps import Step

VERSION = 1


def run(context: Context, read: Step) -> Step | None:
    """The smallest number of each document's component, in labels.npy; None where the recipe does not ask for it."""
    settings = context.data.dedup
    if settings.method != "near":
        return None
    signed = _signatures(context, read)

    def make(directory: Path) -> dict[str, Any]:
        table = dedup.Table.read(read.path, read.manifest)
        signatures = near.Table(signed.path, len(table.source))
        chunks = list(documents.chunks(read.path, read.manifest))
        verify = near_verify.Verifier(signatures, chunks, table.text_bytes, settings.threshold)
        wanted = (dedup.equal_texts(table.hash) == np.arange(len(table.source))) & _signed(signatures)
        labels, compared = near.components(signatures, table.source, wanted, verify)
        np.save(directory / "labels.npy", labels)
        return {"compared": compared, "duplicates": int(np.count_nonzero(labels != np.arange(len(labels))))}

    depends_on = {
        "version": [VERSION, near_signatures.VERSION],
        "signatures": signed.key,
        "threshold": settings.threshold,
    }
    total = signed.manifest["documents"]
    step = context.cache.step("near_duplicates", depends_on, make, 5 * total)
    context.say(
        step,
        f"{step.manifest['duplicates']:,} of {total:,} documents have a near-duplicate before them "
        f"({step.manifest['compared']:,} pairs compared)",
    )
    return step


def labels(step: Step | None) -> npt.NDArray[np.uint32] | None:
    """What the step found: [documents]."""
    return None if step is None else np.load(step.path / "labels.npy")


def _signatures(context: Context, read: Step) -> Step:
    def make(directory: Path) -> dict[str, Any]:
        paths = [chunk.path for chunk in documents.chunks(read.path, read.manifest)]
        writer = near.Writer(directory)
        for signatures, keys in context.map(near_signatures.of_chunk, paths):
            writer.append(signatures, keys)
        writer.close()
        return {"documents": writer.documents}

    total = sum(item["documents"] for item in read.manifest["inputs"])
    size = total * (2 * near_signatures.BINS + 4 * near_signatures.BANDS)
    step = context.cache.step("signatures", {"version": near_signatures.VERSION, "documents": read.key}, make, size)
    context.say(step, f"MinHash of {total:,} documents, {units.format_bytes(size)}")
    return step


def _signed(table: near.Table) -> npt.NDArray[np.bool_]:
    """Which documents have a signature."""

    def blocks() -> Iterator[npt.NDArray[np.bool_]]:
        for first in range(0, table.documents, 2**18):
            yield near_signatures.has_signature(table.signatures()[first : first + 2**18])

    return np.concatenate([*blocks(), np.empty(0, dtype=np.bool_)])
