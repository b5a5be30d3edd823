"""The first step: the files of a recipe with their hashes; the embedded corpus is generated before."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finlm.base import files, units
from finlm.data import mixture, sources
from finlm.data.context import Context
from finlm.data.sources import Input, Split
from finlm.data.steps import NotPrepared, Step
from finlm.recipe import parents
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import Synthetic

SYNTHETIC_SPLITS: tuple[Split, ...] = ("train", "held_out")
_GENERATORS = {  # loaded only for recipes without files of their own
    "documents": "finlm.data.synthetic",
    "dialogues": "finlm.data.synthetic_dialogues",
    "pairs": "finlm.data.synthetic_pairs",
}
_ALONE_BYTES = 30_000_000


class _Part(NamedTuple):
    """A file of the embedded corpus."""

    kind: str
    source: str
    directory: Path
    size_bytes: int
    seed: int
    split: str
    part: int


def inputs(context: Context) -> list[Input]:
    """Every file of every source in the recipe's order. Raises UserError, also for weights of what is no source, and
    NotPrepared where files are missing.
    """
    found: list[Input] = []
    for number, source in enumerate(context.data.sources):
        key = f"data.sources[{number}]"
        if source.synthetic is None:
            if not context.cache.build and source.path is not None and not sources.expand(source.path, source.split):
                raise NotPrepared("sources")
            found += sources.of_source(source, key, fetch=context.cache.build)
            continue
        step = synthetic(context, source.synthetic)
        prefix = f"{source.name}-" if source.name else ""
        for name in step.manifest["files"]["train"]:
            for split in SYNTHETIC_SPLITS:
                paths = tuple(step.path / split / file for file in step.manifest["files"][split][name])
                found.append(Input(sources.safe(f"{prefix}{name}"), paths, split, entry=key))
    _check_weights(context.recipe, [item.source for item in sources.checked(found) if item.split != "held_out"])
    hashes = context.cache.fingerprints([path for item in found for path in item.paths])
    return [sources.verified(item, [hashes[path] for path in item.paths]) for item in found]


def _check_weights(recipe: Recipe, names: Sequence[str]) -> None:
    """Raises UserError for a weight of no source; which sources have no text is known only when they are read."""
    weights = {"tokenizer.sample_weights": recipe.tokenizer.sample_weights}
    for number, stage in enumerate(recipe.data.mixture):
        weights |= {f"data.mixture[{number}].{name}": getattr(stage, name) for name in ("weights", "to", "tokens")}
    for key, given in weights.items():
        mixture.of_each(given or {}, dict.fromkeys(names, 1), key)


def synthetic(context: Context, settings: Synthetic) -> Step:
    """The embedded corpus on disk: documents, dialogues, or for the stages that learn from preferences pairs."""
    kind = "dialogues" if settings.dialogues else "documents"
    if context.recipe.stage in parents.PREFERENCE:
        kind = "pairs"

    def make(directory: Path) -> dict[str, Any]:
        sizes = {"train": settings.size, "held_out": settings.held_out_size}
        generator = importlib.import_module(_GENERATORS[kind])
        tasks = [
            _Part(kind, source, directory / split, size, settings.seed, split, part)
            for split, size in sizes.items()
            for source in generator.SOURCES
            for part in range(generator.parts_of(source, size))
        ]
        # Starting workers takes as long as one process needs for a small corpus.
        names = map(_write, tasks) if settings.size < _ALONE_BYTES else context.map(_write, tasks)
        found: dict[str, dict[str, list[str]]] = {
            split: {source: [] for source in generator.SOURCES} for split in sizes
        }
        for task, name in zip(tasks, names, strict=True):
            found[task.split][task.source].append(name)
        return {"files": found}

    code = sorted(Path(__file__).parent.glob("synthetic*.py"))
    depends_on = {
        "generator": [files.sha256_file(path) for path in code],
        "size": settings.size,
        "held_out_size": settings.held_out_size,
        "seed": settings.seed,
    } | ({} if kind == "documents" else {"kind": kind})
    step = context.cache.step("synthetic", depends_on, make, settings.size + settings.held_out_size)
    context.say(step, f"{units.format_bytes(settings.size)} about fictional companies, seed {settings.seed}")
    return step


def _write(part: _Part) -> str:
    """Generate one file; its name. Runs in a worker."""
    generator = importlib.import_module(_GENERATORS[part.kind])
    path: Path = generator.write_part(part.source, part.directory, part.size_bytes, part.seed, part.split, part.part)
    return path.name
