"""The step `documents`: rows to normalised, hashed documents (documents.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm.base import units
from finlm.data import broken_rows, clean, cut_files, documents, steps, vocab_sample
from finlm.data.context import Context
from finlm.data.sources import Input
from finlm.data.steps import NotPrepared, Step


def run(context: Context, inputs: Sequence[Input]) -> Step:
    """All inputs read. Raises UserError when too many rows of a source are broken."""
    allowed, keep = context.data.max_broken_fraction, context.cache.directory

    def make(directory: Path) -> dict[str, Any]:
        _check_all_steps(context, inputs)
        return documents.write(directory, inputs, context.data.clean, context.processes, allowed, keep)

    words = context.data.clean.bad_keywords
    if words is not None and not context.cache.build and not Path(words).expanduser().is_file():
        raise NotPrepared("documents")
    depends_on = {
        "version": documents.VERSION,
        "clean": clean.depends_on(context.data.clean),
        "inputs": [item.identity() for item in inputs],
    }
    step = context.cache.step("documents", depends_on, make, documents.estimate_bytes(inputs))
    if context.cache.build:
        broken_rows.check(step.path, step.manifest, allowed, keep)
    rows = step.manifest["inputs"]
    dropped = sum(sum(row["dropped"].values()) for row in rows)
    context.say(
        step,
        f"{sum(row['rows'] for row in rows):,} rows of {len({row['source'] for row in rows})} sources, "
        f"{sum(row['broken'] for row in rows):,} broken, {dropped:,} dropped, "
        f"{units.format_bytes(sum(row['bytes'] for row in rows))}"
        f"{cut_files.accepted(documents.cut(step.path, step.manifest))}",
    )
    return step


def _check_all_steps(context: Context, inputs: Sequence[Input]) -> None:
    """Raises UserError for a disk or a memory that a later step would find too small, after hours of reading."""
    settings, text_bytes = context.recipe.tokenizer, documents.estimate_bytes(inputs, packed=3)
    token_bytes = 4 if context.data.token_dtype == "uint32" or (settings.pieces or 0) > 65536 else 2
    steps.require_space(context.cache.directory, text_bytes + text_bytes * token_bytes // 4, "documents to shards")
    if settings.path is None or settings.extend_to is not None:
        vocab_sample.check(min(settings.sample_bytes, text_bytes))
