"""The steps `language_model` and `perplexity`: how surprising each document is beside the clean set."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Sequence
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
from finlm.data.steps import NotPrepared, Step, bar
from finlm.recipe.schema_clean import Clean, Perplexity
from finlm.recipe.schema_data import Source

_ENOUGH = 50  # characters; the perplexity of fewer says little
_HELD_OUT = 10  # every tenth document of the clean set measures what is usual
_LEAST_HELD_OUT = 20


def check(context: Context) -> None:
    """Raises UserError for a clean set that there is not, where the cache may build."""
    if context.cache.build and context.data.clean.perplexity is not None:
        _files(context, context.data.clean.perplexity)


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
        return _train(directory, _chosen(inputs, rules, settings.clean_bytes), settings.order)

    depends_on = {
        "version": language_model.VERSION,
        "clean": clean.depends_on(rules),
        "clean_set": sorted((item.identity() for item in inputs), key=repr),
        "order": settings.order,
        "clean_bytes": settings.clean_bytes,
    }
    step = context.cache.step("language_model", depends_on, make, 24 * settings.clean_bytes)
    about = step.manifest
    used = [f"{source} {units.format_bytes(size)}" for source, size in about["used"].items()]
    context.say(
        step,
        f"{settings.order}-grams of {', '.join(used[:8])}{', ...' * (len(used) > 8)}; perplexity "
        f"{math.exp(about['mean']):,.0f} on {about['held_out']:,} clean documents held out",
    )
    return step


def _inputs(context: Context, settings: Perplexity) -> list[Input]:
    found = _files(context, settings)
    hashes = context.cache.fingerprints([path for item in found for path in item.paths])
    return [sources.verified(item, [hashes[path] for path in item.paths]) for item in found]


def _files(context: Context, settings: Perplexity) -> list[Input]:
    key = "data.clean.perplexity.clean_set"
    found: list[Input] = []
    for pattern in settings.clean_set:
        if not context.cache.build and not sources.expand(pattern):
            raise NotPrepared("language_model")
        found += sources.of_source(Source(path=pattern, text_field=settings.text_field), key)
    return found


def _chosen(inputs: Sequence[Input], rules: Clean, wanted_bytes: int) -> list[tuple[str, bytes]]:
    """(source, text) of different documents of the clean set, spelled as the corpus is: about so many bytes.

    Those of the lowest hashes, in their order: every document is as likely as the other, so each file gives in
    proportion to its text, wherever it stands. Only what may still be among them is cleaned.
    """
    cleaner, total = clean.Cleaner(rules), 0
    found: list[tuple[int, str, bytes]] = []  # a heap, the highest hash first
    seen = set[int]()
    size = sum(path.stat().st_size for item in inputs for path in item.paths)
    with bar("language model", size, fast_bytes=20_000_000) as advance:
        rows = (
            (item.source, row)
            for item in inputs
            for block in readers.blocks(item, advance)
            for row in parsing.rows(block, item)
        )
        for source, row in rows:
            number = int.from_bytes(hashlib.blake2b(row.text.encode("utf-8", "replace"), digest_size=8).digest())
            if row.broken or number in seen or (total >= wanted_bytes and number > -found[0][0]):
                continue
            text, reason = cleaner(row.text)
            if reason or not text:
                continue
            encoded = text.encode()
            heapq.heappush(found, (-number, source, encoded))
            seen.add(number)
            total += len(encoded)
            while total - len(found[0][2]) >= wanted_bytes:
                total -= len(heapq.heappop(found)[2])
    return [(source, text) for _, source, text in sorted(found, reverse=True)]


def _train(directory: Path, chosen: Sequence[tuple[str, bytes]], order: int) -> dict[str, Any]:
    """The model of nine tenths of the texts, and what is usual in the other tenth. Raises UserError for too few."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    used = Counter[str]()
    for number, (source, text) in enumerate(chosen):
        parts[number % _HELD_OUT == 0].append(text)
        used[source] += len(text)
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
        "used": dict(sorted(used.items())),
        "held_out": len(usual),
        "mean": float(usual.mean()),
        "deviation": float(usual.std()),
    }
