"""The steps of one recipe in order: sources -> documents -> selection -> tokenizer -> shards.

Each step is a module step_*.py: what it depends on, and which function makes it. A setting is named in the first step
that it changes, and nowhere else; the next step depends on the key of the one before it.
"""

from __future__ import annotations

from pathlib import Path

from finlm.data import step_documents, step_selection, step_shards, step_sources, step_tokenizer
from finlm.data.context import Context
from finlm.data.steps import Cache
from finlm.recipe.schema import Recipe


def shards(recipe: Recipe, cache: Cache) -> Path:
    """The directory of the last step. Raises UserError, and NotPrepared where the cache may not build."""
    context = Context(recipe, cache)
    step_tokenizer.check(context)  # before hours of reading
    read = step_documents.run(context, step_sources.inputs(context))
    chosen = step_selection.run(context, read)
    tokenizer = step_tokenizer.run(context, read, chosen)
    return step_shards.run(context, read, chosen, tokenizer).path
