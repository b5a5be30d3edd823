"""The step `tokenizer`: an existing model, one extended by Chinese pieces, or one trained on a sample of the documents.

Both of the latter depend on the selection; how well they compress each source is measured once, kept in the manifest
and printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import screen, units
from finlm.data import dedup, documents, vocab, vocab_compression, vocab_extend, vocab_sample
from finlm.data.context import Context
from finlm.data.steps import NotPrepared, Step


def check(context: Context) -> None:
    """Raises UserError for a tokenizer.path that cannot be used, where the cache may build."""
    settings = context.recipe.tokenizer
    if context.cache.build and settings.path is not None:
        (vocab.load if settings.extend_to is None else vocab_extend.load)(Path(settings.path).expanduser())


def run(context: Context, read: Step, chosen: Step) -> Step:
    """The recipe's tokenizer as tokenizer.model of a step. Raises UserError when it cannot be used or made."""
    settings = context.recipe.tokenizer
    if settings.path is None:
        step = _trained(context, read, chosen)
    else:
        path = Path(settings.path).expanduser()
        if not context.cache.build and not path.is_file():
            raise NotPrepared("tokenizer")
        step = _given(context, path) if settings.extend_to is None else _extended(context, read, chosen, path)
    made = step.manifest
    about = f"{made['vocab_size']:,} pieces, sha256 {made['sha256'][:16]}"
    if "old_pieces" in made:
        unseen = f" ({made['not_in_sample']:,} of them not in the sample)" if made["not_in_sample"] else ""
        about += (
            f"; {made['old_pieces']:,} old, {made['new_characters']:,} new characters{unseen}, "
            f"{made['new_longer_pieces']:,} longer new pieces"
        )
    context.say(step, about)
    if not step.reused and "compression" in made:
        for line in vocab_compression.table(made["compression"]):
            screen.say(f"  {line}")
    return step


def _given(context: Context, path: Path) -> Step:
    vocab.load(path)
    depends_on = {"version": vocab.VERSION, "sha256": vocab.fingerprint(path)}
    return context.cache.step("tokenizer", depends_on, lambda directory: vocab.copy(path, directory), 0)


def _trained(context: Context, read: Step, chosen: Step) -> Step:
    settings = context.recipe.tokenizer
    assert settings.vocab_size is not None  # recipe.rules asks for a path or a size
    vocab_size = settings.vocab_size

    def make(directory: Path) -> dict[str, Any]:
        lines = _sampled_lines(context, read, chosen)
        manifest = vocab.train(lines, directory, vocab_size, settings.character_coverage)
        measured = vocab_compression.measure(
            {"trained": vocab.load(directory / "tokenizer.model")}, _held_out(read, chosen)
        )
        return manifest | {"compression": measured}

    return context.cache.step("tokenizer", _depends_on(context, chosen), make, 64 * vocab_size)


def _extended(context: Context, read: Step, chosen: Step, path: Path) -> Step:
    settings = context.recipe.tokenizer
    assert settings.extend_to is not None
    size, base = settings.extend_to, vocab_extend.load(path)

    def make(directory: Path) -> dict[str, Any]:
        lines = _sampled_lines(context, read, chosen)
        manifest = vocab_extend.extend(
            base, lines, directory, size, settings.extend_longest, settings.character_coverage
        )
        before, after = vocab.load(path), vocab.load(directory / "tokenizer.model")
        checked = vocab_extend.check_unchanged(before, after, (text for _, text in _held_out(read, chosen)))
        measured = vocab_compression.measure({"before": before, "after": after}, _held_out(read, chosen))
        return manifest | {"texts_encoded_as_before": checked, "compression": measured}

    depends_on = _depends_on(context, chosen) | {
        "base": vocab.fingerprint(path),
        "extend_to": size,
        "extend_longest": settings.extend_longest,
    }
    return context.cache.step("tokenizer", depends_on, make, 64 * size)


def _depends_on(context: Context, chosen: Step) -> dict[str, Any]:
    settings = context.recipe.tokenizer
    return {
        "version": vocab.VERSION,
        "selection": chosen.key,
        "vocab_size": settings.vocab_size,
        "sample": vocab_sample.VERSION,
        "sample_bytes": settings.sample_bytes,
        "sample_weights": settings.sample_weights,
        "character_coverage": settings.character_coverage,
        "sentencepiece": vocab.LIBRARY,
    }


def _sampled_lines(context: Context, read: Step, chosen: Step) -> Iterator[str]:
    settings = context.recipe.tokenizer
    table = dedup.Table.read(read.path, read.manifest)
    sources = [item["source"] for item in read.manifest["inputs"]]
    wanted = vocab_sample.choose(
        table, dedup.read(chosen.path), sources, settings.sample_bytes, settings.sample_weights
    )
    size = units.format_bytes(int(np.minimum(table.text_bytes[wanted].astype(np.int64), settings.sample_bytes).sum()))
    screen.say(
        f"tokenizer: {'extending to' if settings.extend_to else 'training'} {settings.pieces:,} pieces on {size}"
    )
    chunks = documents.chunks(read.path, read.manifest)
    texts = (text for chunk in chunks for text in documents.read_texts(chunk.path, wanted[chunk.rows]))
    return vocab_sample.lines(texts, settings.sample_bytes)


def _held_out(read: Step, chosen: Step) -> Iterator[tuple[str, str]]:
    return vocab_compression.texts(read.path, read.manifest, dedup.read(chosen.path))
