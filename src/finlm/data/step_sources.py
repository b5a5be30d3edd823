"""The first step: the files of a recipe with their hashes; the embedded corpus is generated before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finlm.base import files, units
from finlm.data import sources
from finlm.data.context import Context
from finlm.data.sources import Input, Split
from finlm.data.steps import NotPrepared, Step
from finlm.recipe import parents
from finlm.recipe.schema_data import Synthetic

SYNTHETIC_SPLITS: tuple[Split, ...] = ("train", "held_out")


def inputs(context: Context) -> list[Input]:
    """Every file of every source in the recipe's order. Raises UserError, or NotPrepared where files are missing."""
    found: list[Input] = []
    for number, source in enumerate(context.data.sources):
        if source.synthetic is None:
            if not context.cache.build and source.path is not None and not sources.expand(source.path, source.split):
                raise NotPrepared("sources")
            found += sources.of_source(source, f"data.sources[{number}]")
            continue
        step = synthetic(context, source.synthetic)
        prefix = f"{source.name}-" if source.name else ""
        for name in step.manifest["files"]["train"]:
            for split in SYNTHETIC_SPLITS:
                path = step.path / split / step.manifest["files"][split][name]
                found.append(Input(sources.safe(f"{prefix}{name}"), (path,), split))
    hashes = context.cache.fingerprints([path for item in sources.checked(found) for path in item.paths])
    return [sources.verified(item, [hashes[path] for path in item.paths]) for item in found]


def synthetic(context: Context, settings: Synthetic) -> Step:
    """The embedded corpus on disk: documents, dialogues, or for the stages that learn from preferences pairs."""
    kind = "dialogues" if settings.dialogues else "documents"
    if context.recipe.stage in parents.PREFERENCE:
        kind = "pairs"

    def make(directory: Path) -> dict[str, Any]:
        from finlm.data import synthetic, synthetic_dialogues, synthetic_pairs  # only recipes without own files do

        writers = {"documents": synthetic.write, "dialogues": synthetic_dialogues.write, "pairs": synthetic_pairs.write}
        write = writers[kind]
        written = {
            "train": write(directory / "train", settings.size, settings.seed, "train"),
            "held_out": write(directory / "held_out", settings.held_out_size, settings.seed, "held_out"),
        }
        return {"files": {split: {name: p.name for name, p in paths.items()} for split, paths in written.items()}}

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
