"""The step `selection`: which documents are used and which are held out (dedup.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import units
from finlm.data import dedup, documents, ledger, step_contamination, step_near, step_perplexity
from finlm.data.context import Context
from finlm.data.sources import Input
from finlm.data.steps import Step


def run(context: Context, read: Step, inputs: Sequence[Input]) -> Step:
    """One decision a document. Raises UserError for an entry of data.sources that has nothing left to train on."""
    near = step_near.run(context, read)
    contamination = step_contamination.run(context, read)
    perplexity = step_perplexity.run(context, read)

    def make(directory: Path) -> dict[str, Any]:
        table = dedup.Table.read(read.path, read.manifest)
        splits = [item["split"] for item in read.manifest["inputs"]]
        components = step_near.labels(near)
        dropped = np.full(len(table.source), dedup.TRAIN, dtype=np.uint8)
        if perplexity is not None:
            dropped[step_perplexity.surprising(perplexity, context.data.clean)] = dedup.PERPLEXITY
        dropped[step_contamination.found(contamination)] = dedup.CONTAMINATED
        decision = dedup.decide(table, splits, context.data, components, dropped)
        counts = dedup.count(table, decision, read.manifest["inputs"])
        dedup.write(directory, decision)
        chunks = list(documents.chunks(read.path, read.manifest))
        ledger.write(directory / "dropped.jsonl", chunks, decision, components)
        return {"sources": counts, "total": dedup.total(counts)}

    depends_on = {
        "version": dedup.VERSION,
        "documents": read.key,
        "near_duplicates": near and near.key,
        "contamination": contamination and contamination.key,
        "perplexity": perplexity and [perplexity.key, step_perplexity.limit(context.data.clean, perplexity)],
        "dedup": context.data.dedup.method,
        "min_characters": context.data.min_characters,
        "held_out_fraction": context.data.held_out_fraction,
        "held_out_documents": context.data.held_out_documents,
    }
    step = context.cache.step("selection", depends_on, make, sum(i["documents"] for i in read.manifest["inputs"]))
    total = step.manifest["total"]
    dropped = ", ".join(f"{total[name]:,} {name.replace('_', ' ')}" for name in dedup.NAMES[2:] if total[name])
    context.say(
        step,
        f"{dropped or 'nothing'} dropped; {total['held_out']:,} held out, kept {total['kept']:,} "
        f"({units.format_bytes(total['bytes'])})",
    )
    if context.cache.build:
        empty = dedup.without_documents(step.manifest["sources"], {item.source: item.entry for item in inputs})
        if empty:
            context.say(step, f"nothing to train on in {', '.join(empty[:5])}{', ...' * (len(empty) > 5)}")
    return step
