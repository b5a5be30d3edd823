"""What every step of a recipe's chain is given: the recipe, the cache, how many workers, where to speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from finlm.base import screen
from finlm.data import workers
from finlm.data.steps import Cache, Step
from finlm.recipe.schema import Recipe

Task = TypeVar("Task")
Result = TypeVar("Result")


class Context:
    """One recipe and the cache that its steps are kept in."""

    def __init__(self, recipe: Recipe, cache: Cache) -> None:
        self.recipe = recipe
        self.data = recipe.data
        self.cache = cache

    @cached_property
    def processes(self) -> int:
        """How many workers to use; says once what binds."""
        count, sentence = workers.bounded(self.data.num_proc, workers.limits(self.data.num_proc))
        if sentence and self.cache.build:
            screen.say(sentence)
        return count

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """function of every task in the tasks' order, by the workers; they end with the iteration."""
        used = min(self.processes, max(1, len(tasks)))
        with workers.pool(used) as pool:
            yield from workers.in_order(pool, used, function, tasks)

    def say(self, step: Step, text: str) -> None:
        """One line about a step; nothing when only looking for it."""
        if self.cache.build:
            screen.say(f"{step.manifest['step']}: {text}{' (reused)' if step.reused else ''}")
