"""The steps `language_model` and `perplexity`: how surprising each document is beside the clean set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import units
from finlm.base.errors import UserError
from finlm.data import clean, documents, language_model, ngrams, parsing, readers, sources
from finlm.data.context import Context
from finlm.data.sources import Input
from finlm.data.steps import NotPrepared, Step
from finlm.recipe.schema_clean import Clean, Perplexity
from finlm.recipe.schema_data import Source

_ENOUGH = 50  # characters; the perplexity of fewer says little
_HELD_OUT = 10  # every tenth document of the clean set measures what is usual
_LEAST_HELD_OUT = 20


def run(context: Context, read: Step) -> Step | None:
    """ln perplexity of each document, in log.npy; None where the recipe does not ask for it. Raises UserError."""
    settings = context.data.clean.perplexity
    if settings is None:
        return None
    model = _model(context, settings)

    def make(directory: Path) -> dict[str, Any]:
        tasks = [Task(chunk.path, model.path / "model.npz") for chunk in documents.chunks(read.path, read.manifest)]
        parts = [*context.map(of_chunk, tasks), np.empty(0, dtype=np.float32)]
        np.save(directory / "log.npy", np.concatenate(parts))
        return {"mean": model.manifest["mean"], "deviation": model.manifest["deviation"]}

    depends_on = {"version": language_model.VERSION, "documents": read.key, "model": model.key}
    size = 4 * sum(item["documents"] for item in read.manifest["inputs"])
    step = context.cache.step("perplexity", depends_on, make, size)
    context.say(step, f"documents above {math.exp(limit(context.data.clean, step)):,.0f} are dropped")
    return step


def limit(settings: Clean, step: Step) -> float:
    """The log perplexity above which a document is dropped."""
    assert settings.perplexity is not None  # else there is no step
    if settings.perplexity.max_perplexity != "auto":
        return math.log(settings.perplexity.max_perplexity)
    return float(step.manifest["mean"] + settings.perplexity.sigmas * step.manifest["deviation"])


def surprising(step: Step, settings: Clean) -> npt.NDArray[np.bool_]:
    """The documents to drop: bool [documents]."""
    log: npt.NDArray[np.float32] = np.load(step.path / "log.npy")
    return log > np.float32(limit(settings, step))


@dataclass(frozen=True)
class Task:
    """A chunk of documents and the model that judges them."""

    chunk: Path
    model: Path


def of_chunk(task: Task) -> npt.NDArray[np.float32]:
    """ln perplexity of each document of a chunk. Runs in a worker."""
    text = ngrams.characters(task.chunk.read_bytes(), documents.read_index(task.chunk)["end"])
    log, count = _load(task.model).log_perplexity(text)
    return np.where(count >= _ENOUGH, log, 0).astype(np.float32)


@lru_cache(maxsize=1)
def _load(path: Path) -> language_model.Model:
    return language_model.Model.load(path)


def _model(context: Context, settings: Perplexity) -> Step:
    rules = context.data.clean.model_copy(update={"perplexity": None})
    inputs = _inputs(context, settings)

    def make(directory: Path) -> dict[str, Any]:
        return _train(directory, _texts(inputs, rules, settings.clean_bytes), settings.order)

    depends_on = {
        "version": language_model.VERSION,
        "clean": clean.depends_on(rules),
        "clean_set": [item.identity() for item in inputs],
        "order": settings.order,
        "clean_bytes": settings.clean_bytes,
    }
    step = context.cache.step("language_model", depends_on, make, 24 * settings.clean_bytes)
    about = step.manifest
    context.say(
        step,
        f"{settings.order}-grams of {units.format_bytes(about['bytes'])} of clean text; perplexity "
        f"{math.exp(about['mean']):,.0f} on {about['held_out']:,} clean documents held out",
    )
    return step


def _inputs(context: Context, settings: Perplexity) -> list[Input]:
    key = "data.clean.perplexity.clean_set"
    found: list[Input] = []
    for pattern in settings.clean_set:
        if not context.cache.build and not sources.expand(pattern):
            raise NotPrepared("language_model")
        found += sources.of_source(Source(path=pattern, text_field=settings.text_field), key)
    hashes = context.cache.fingerprints([path for item in found for path in item.paths])
    return [sources.verified(item, [hashes[path] for path in item.paths]) for item in found]


def _texts(inputs: Sequence[Input], rules: Clean, most_bytes: int) -> Iterator[bytes]:
    """The clean set's documents, spelled as the corpus is, up to so many bytes."""
    cleaner, total = clean.Cleaner(rules), 0
    for item in inputs:
        for block in readers.blocks(item, lambda amount, description=None: None):
            for row in parsing.rows(block, item):
                text, reason = ("", "broken") if row.broken else cleaner(row.text)
                if reason is None and text:
                    encoded = text.encode()
                    total += len(encoded)
                    if total > most_bytes:
                        return
                    yield encoded


def _train(directory: Path, texts: Iterator[bytes], order: int) -> dict[str, Any]:
    """The model of nine tenths of the texts, and what is usual in the other tenth. Raises UserError for too few."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, text in enumerate(texts):
        parts[number % _HELD_OUT == 0].append(text)
    train, held_out = (
        ngrams.characters(b"".join(part), np.cumsum([len(text) for text in part], dtype=np.int64)) for part in parts
    )
    model = language_model.train(train, order)
    log, count = model.log_perplexity(held_out)
    usual = log[count >= _ENOUGH]
    if len(usual) < _LEAST_HELD_OUT:
        raise UserError(
            "data.clean.perplexity.clean_set is too small to say what is usual",
            evidence=f"{len(parts[0]) + len(parts[1]):,} documents, every tenth held out, of those "
            f"{len(usual):,} with {_ENOUGH} characters or more",
            fix=f"name files with at least {_HELD_OUT * _LEAST_HELD_OUT:,} such documents",
        )
    model.save(directory / "model.npz")
    return {
        "bytes": sum(map(len, parts[0])),
        "held_out": len(usual),
        "mean": float(usual.mean()),
        "deviation": float(usual.std()),
    }
