"""What would make a run faster: single changes of recipe or cluster, each planned anew, the best first.

Every number is the planner's own for the changed recipe or cluster; nothing is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from finlm.base.units import format_count
from finlm.plan import gpus, search, speed
from finlm.plan.search import Candidate
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe

FASTER_NETWORKS = (25.0, 100.0, 400.0)  # Gb/s
LARGER_STEP = 8
WORTH_SAYING = 1.05
MOST = 5
RECIPE_KEYS = {
    "zero_stage": "zero.stage",
    "offload_optimizer": "zero.offload_optimizer",
    "offload_param": "zero.offload_param",
    "recompute": "train.recompute",
    "micro_batch": "batch.micro_batch",
}

Fastest = Callable[[Recipe, Cluster], Candidate | None]


@dataclass(frozen=True)
class Change:
    """One change and the speed with it."""

    what: str
    tokens_per_second: float
    times: float

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return dataclasses.asdict(self)


def find(recipe: Recipe, cluster: Cluster, chosen: Candidate, fastest: Fastest) -> list[Change]:
    """The changes that bring at least 5 %, best first. fastest: the best candidate of a recipe on a cluster."""
    now = chosen.tokens_per_second
    if now is None:
        return []
    found = []
    for what, other, hosts in _options(recipe, cluster):
        candidate = fastest(other, hosts)
        if candidate is None or candidate.tokens_per_second is None:
            continue
        times = candidate.tokens_per_second / now
        if times >= WORTH_SAYING:
            differing = settings(chosen, candidate)
            text = what.format(settings=differing or "the same settings")
            if "{settings}" not in what and differing:
                text += f" (then {differing})"
            found.append(Change(text, candidate.tokens_per_second, times))
    found.sort(key=lambda change: -change.times)
    # Of networks that bring the same the slowest is enough.
    distinct: dict[float, Change] = {}
    for change in found:
        distinct.setdefault(round(change.times, 2), change)
    return list(distinct.values())[:MOST]


def settings(before: Candidate, after: Candidate) -> str:
    """The recipe keys in which two candidates differ, with the values of the second."""
    names = [name for name in RECIPE_KEYS if getattr(before.layout, name) != getattr(after.layout, name)]
    values = {name: getattr(after.layout, name) for name in names} | (
        {"micro_batch": "auto"} if after.is_unequal else {}
    )
    return ", ".join(f"{RECIPE_KEYS[name]}: {value}" for name, value in values.items())


def _options(recipe: Recipe, cluster: Cluster) -> Iterator[tuple[str, Recipe, Cluster]]:
    """(what is changed, recipe, cluster). A cluster that changes is planned with the recipe's free choices."""
    free = search.relaxed(recipe)
    if free != recipe:
        yield "{settings}", free, cluster
    kinds = dict.fromkeys(host.gpu for host in cluster.hosts if host.gpu)
    is_open = recipe.stage == "pretrain" and recipe.train.precision in ("auto", "bf16")
    if is_open and kinds and all(gpus.find(kind).has_fp8 for kind in kinds):
        train = recipe.train.model_copy(update={"precision": "fp8"})
        yield "train.precision: fp8", recipe.model_copy(update={"train": train}), cluster
    larger = recipe.batch.model_copy(update={"tokens_per_step": LARGER_STEP * recipe.batch.tokens_per_step})
    yield (
        f"batch.tokens_per_step: {format_count(larger.tokens_per_step)}, {LARGER_STEP} times as many",
        recipe.model_copy(update={"batch": larger}),
        cluster,
    )
    if search.threads(recipe) < speed.THREADS:
        env = {name: value for name, value in recipe.env.items() if name != "OMP_NUM_THREADS"}
        few = recipe.env["OMP_NUM_THREADS"]
        yield f"OMP_NUM_THREADS: {speed.THREADS} instead of {few}", recipe.model_copy(update={"env": env}), cluster
    if len(cluster.hosts) > 1:
        for gbit in FASTER_NETWORKS:
            if gbit > cluster.network_gbit:
                faster = dataclasses.replace(cluster, network_gbit=gbit)
                yield f"{gbit:g} Gb/s between the hosts instead of {cluster.network_gbit:g}", recipe, faster
    if len(kinds) > 1:
        best = max(kinds, key=lambda kind: gpus.find(kind).peak_flops * gpus.find(kind).mfu)
        hosts = tuple(dataclasses.replace(host, gpu=best) for host in cluster.hosts)
        yield f"{best} in every host", recipe, dataclasses.replace(cluster, hosts=hosts)
        alone = tuple(host for host in cluster.hosts if host.gpu == best)
        yield f"the hosts with {best} alone", free, dataclasses.replace(cluster, hosts=alone)
    yield f"{2 * len(cluster.hosts)} such hosts instead of {len(cluster.hosts)}", free, search.on_more_hosts(cluster, 2)
