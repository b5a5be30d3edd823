"""`finlm diff`: what two recipes, as they resolve, say differently, whichever way it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finlm.base.secrets import redact_key
from finlm.recipe import recipe as recipes
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Recipe

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One key. Origins are "file:line", "--set" or "default"; changes_loss is False for how a run is carried out."""

    key: str
    a: Any
    b: Any
    a_origin: str
    b_origin: str
    changes_loss: bool


def between(a: Loaded, b: Loaded) -> list[Difference]:
    """Every key whose value differs, in the order of the schema; what a recipe is called and promises is left out."""
    return [
        Difference(
            key,
            redact_key(key, first),
            redact_key(key, second),
            _origin(a, key),
            _origin(b, key),
            not recipes.is_within(key, recipes.SAME_LOSS),
        )
        for key, first, second in differing(a.recipe, b.recipe)
        if not recipes.is_within(key, recipes.WORDS)
    ]


def differing(a: Recipe, b: Recipe) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, other value) of every difference as it is, credentials too."""
    return _differing(a.model_dump(mode="json"), b.model_dump(mode="json"), "")


def _differing(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if a == b and type(a) is type(b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            inner = f"{key}.{name}" if key else str(name)
            yield from _differing(a.get(name, ABSENT), b.get(name, ABSENT), inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, Mapping) for x in a):
        for index, (first, second) in enumerate(zip(a, b, strict=True)):
            yield from _differing(first, second, f"{key}[{index}]")
    else:
        yield key, a, b


def _origin(loaded: Loaded, key: str) -> str:
    """Where the key's value was written: itself, what it is part of, or the first of its parts."""
    for known, where in loaded.origins.items():
        if known == key or _within(key, known) or _within(known, key):
            return where
    return "default"


def _within(inner: str, outer: str) -> bool:
    return inner.startswith((f"{outer}.", f"{outer}["))
