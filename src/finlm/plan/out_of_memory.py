"""Explain a GPU that ran out of memory: what the plan said, what it took, and the next plan that would have fitted.

It took more than was predicted, so every other prediction is taken to be too low by as much; a plan that runs out too
is followed by one that leaves twice the room, if there is one. A rank writes its figures into its log, where `finlm
train` finds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from finlm.base.errors import UserError
from finlm.base.units import format_bytes, format_items
from finlm.plan import memory, planner, search
from finlm.plan.plan import Plan, changed_keys
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import of as shape_of

MARK = "finlm: out of memory: "  # begins the line of a rank's log that has its figures
ROOM = 0.03  # by which the first next plan is smaller; the second by twice that, and so on
LEAST_ROOM = 0.005  # by which it is smaller in any case
MOST = 4  # plans that a run may replace


@dataclass(frozen=True)
class Taken:
    """Bytes at the failure: tensors' peak, torch's cache, use by all processes, the device's memory, the host's RAM."""

    allocated: int
    reserved: int
    used: int
    total: int
    ram: int

    @property
    def others(self) -> int:
        """Bytes that are not torch's: CUDA's context, NCCL, other processes."""
        return self.used - self.reserved

    def line(self) -> str:
        """Return the figures as the line of a rank's log that read() parses."""
        return MARK + json.dumps(dataclasses.asdict(self))


def read(log: str) -> Taken | None:
    """Return the last figures in a rank's log, or None. ValueError or TypeError for a line that was cut short."""
    lines = [line for line in log.splitlines() if line.startswith(MARK)]
    return Taken(**json.loads(lines[-1].removeprefix(MARK))) if lines else None


def explain_failure(recipe: Recipe, plan: Plan, taken: Mapping[str, Taken], error: BaseException) -> UserError:
    """Return, without raising it, the UserError of a rank that ran out of memory.

    `error` is torch's. `taken` is {host's name: figures} of the host that failed, one entry; its RAM stands for that of
    all. The fix is the next plan that fits; where that has the same settings, to end what else is on the GPU; and
    without any such plan, larger or more GPUs.
    """
    (figures,) = taken.values()
    device, largest = "GPU" if plan.device == "cuda" else "rank", format_items(plan.gpu_bytes_items, most=4)
    lines = [
        str(error).split(". GPU", 1)[0],
        f"planned {format_bytes(plan.gpu_bytes)} of {format_bytes(figures.total)}: {largest}",
        f"taken {format_bytes(figures.reserved)} by torch ({format_bytes(figures.allocated)} in tensors at the peak), "
        f"{format_bytes(figures.others)} by everything else on the {device}",
    ]
    # This host's RAM stands for all.
    cluster = Cluster(tuple(Host(host.name, host.slots, host.gpu, figures.ram) for host in plan.hosts))
    better = next_plan(search.relax_recipe(recipe), cluster, plan, taken)
    if better is None:
        fix = "a larger GPU, or more of them: no layout of this recipe fits"
    else:
        sets = " ".join(f"--set {key}={new}" for key, (_, new) in changed_keys(plan, better).items())
        needs = f"{format_bytes(better.gpu_bytes)} predicted"
        fix = f"the next plan that fits ({needs}): {sets}" if sets else "end what else is on the GPU"
    return UserError(f"a {device} ran out of memory", evidence="\n".join(lines), fix=fix)


def next_plan(recipe: Recipe, cluster: Cluster, plan: Plan, taken: Mapping[str, Taken], former: int = 0) -> Plan | None:
    """Return the fastest plan that fits if predictions are off as much as this plan's; None when there is none.

    `plan` ran out of memory; `taken` has the figures of the ranks that failed, by host. `former` is how many plans of
    this run ran out of memory before; with each the new plan leaves more room, if one can. The result's
    gpu_memory_bytes are those of the smallest device, not the limit that it was planned with. Raises UserError for an
    unknown model type.
    """
    shape = shape_of(recipe, plan.vocab_size)
    recipe = search.as_planned(recipe, plan.asynchronous_checkpoints)
    for room in (*(ROOM * 2**times for times in range(former, -1, -1)), LEAST_ROOM):
        smaller = _limit_devices(cluster, plan, taken, 1 - room)
        better = planner.plan_again(recipe, smaller, shape, plan.steps)
        if better is not None:
            there_is = min([plan.gpu_memory_bytes, *(figures.total for figures in taken.values())])
            return dataclasses.replace(better, gpu_memory_bytes=there_is)
    return None


def _limit_devices(cluster: Cluster, plan: Plan, taken: Mapping[str, Taken], share: float) -> Cluster:
    """Return the cluster with device memory of the failed GPU kinds limited; other kinds get no limit.

    A kind is limited to `share` of what the plan needs, or of what other processes left if that is less; the lowest
    limit of its hosts counts. `taken` is by host name and has the hosts that failed.
    """
    # The prediction without what the allocator would keep for itself if it could.
    items = plan.gpu_bytes_items
    fragmentation = 0 if "process" in items else items["fragmentation"]
    least = plan.gpu_bytes - fragmentation + bool(fragmentation) * memory.FRAGMENTATION * plan.gpu_allocated_bytes
    limits: dict[str | None, int] = {}
    for host in plan.hosts:
        if figures := taken.get(host.name):
            needed = host.gpu_bytes * min(1.0, least / plan.gpu_bytes)
            limit = int(share * min(figures.total - figures.others, needed))
            limits[host.gpu] = min(limit, limits.get(host.gpu, limit))
    kinds = {host.name: host.gpu for host in plan.hosts}
    return dataclasses.replace(
        cluster,
        hosts=tuple(dataclasses.replace(host, device_bytes=limits.get(kinds[host.name])) for host in cluster.hosts),
    )
