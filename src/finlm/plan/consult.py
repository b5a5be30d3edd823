"""What `finlm plan` says beyond the plan itself: advice, the other candidates, and what would make the run faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finlm.plan import advice, changes, options, planner, search
from finlm.plan.plan import Plan
from finlm.recipe import shape as shapes
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe


@dataclass(frozen=True)
class Consulted:
    """All of it."""

    advice: advice.Advice
    options: list[options.Option]
    changes: list[changes.Change]

    def to_json(self) -> dict[str, Any]:
        """The keys that `plan --json` has beside the plan's."""
        return {
            "advice": self.advice.to_json(),
            "options": [option.to_json() for option in self.options],
            "changes": [change.to_json() for change in self.changes],
        }


def of(
    recipe: Recipe, cluster: Cluster, plan: Plan, epoch_tokens: int | None = None, price: float | None = None
) -> Consulted:
    """epoch_tokens: of the prepared data, when known. price: of a GPU-hour, over the recipe's."""
    shape = shapes.of(recipe, plan.vocab_size)
    chosen = planner.fastest(recipe, cluster, shape)
    said = advice.of(recipe, shape, plan, epoch_tokens, price)
    if chosen is None or cluster.is_cpu:
        return Consulted(said, [], [])
    free = planner.weighed(search.relaxed(recipe), cluster, shape)
    return Consulted(
        said,
        options.best(free, chosen),
        changes.find(recipe, cluster, chosen, lambda other, hosts: planner.fastest(other, hosts, shape)),
    )
