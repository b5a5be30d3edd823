"""The steps of one recipe in order: sources -> documents -> selection -> tokenizer -> shards.

Each step is a module step_*.py: what it depends on, and which function makes it. A setting is named in the first step
that it changes, and nowhere else; the next step depends on the key of the one before it. For fine-tuning the steps are
sources -> dialogues: the tokenizer is that of the model it starts from.
"""

from __future__ import annotations

from pathlib import Path

from finlm.data import (
    start,
    step_contamination,
    step_dialogues,
    step_documents,
    step_perplexity,
    step_selection,
    step_shards,
    step_sources,
    step_tokenizer,
)
from finlm.data.context import Context
from finlm.data.steps import Cache
from finlm.recipe.schema import Recipe

RUNS = Path("runs")  # where `finlm prepare` looks for the run of a recipe in model.init_from


def shards(recipe: Recipe, cache: Cache) -> Path:
    """The directory of the last step. Raises UserError, and NotPrepared where the cache may not build."""
    context = Context(recipe, cache)
    if recipe.stage != "pretrain":
        return step_dialogues.run(context, start.directory(recipe, RUNS, must_exist=cache.build)).path
    for step in (step_tokenizer, step_contamination, step_perplexity):
        step.check(context)  # before hours of reading
    inputs = step_sources.inputs(context)
    read = step_documents.run(context, inputs)
    chosen = step_selection.run(context, read, inputs)
    tokenizer = step_tokenizer.run(context, read, chosen)
    return step_shards.run(context, read, chosen, tokenizer).path
