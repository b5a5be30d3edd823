"""A GPU that ran out of memory: what the plan said, what it took, and the next plan that would have fitted.

The planner's prediction of every other layout is scaled by what this one took over what it was predicted to take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from finlm.base import memory
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.plan import calibration, planner, search
from finlm.plan.plan import Plan
from finlm.plan.search import Candidate
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import of as shape_of

ROOM = 0.97  # of what there is, for a plan to count as one that fits


@dataclass(frozen=True)
class Taken:
    """Bytes on the device at the failure: tensors at their peak, torch's cache, everybody's, what there is; the RAM."""

    allocated: int
    reserved: int
    used: int
    total: int
    ram: int

    @property
    def others(self) -> int:
        """What is not torch's: CUDA's context, NCCL, other processes."""
        return self.used - self.reserved


def report(run_path: Path, error: Exception) -> str:
    """What a rank of a run that has just run out of memory says of it."""
    run = RunDir(run_path)
    return str(explained(recipes.load(run.recipe).recipe, Plan.read(run.plan), now(), error))


def now() -> Taken:
    """This rank's device."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return Taken(allocated, reserved, total - free, total, memory.total_bytes())


def explained(recipe: Recipe, plan: Plan, taken: Taken, error: Exception) -> UserError:
    """The failure as problem, evidence and fix."""
    lines = [
        str(error).split(". GPU", 1)[0],
        f"planned {format_bytes(plan.gpu_bytes)} of {format_bytes(taken.total)}: {_items(plan.gpu_bytes_items)}",
        f"taken {format_bytes(taken.reserved)} by torch ({format_bytes(taken.allocated)} in tensors at the peak), "
        f"{format_bytes(taken.others)} by everything else on the GPU",
    ]
    better = next_plan(recipe, plan, taken)
    changes = _changes(plan, better) if better else ["a larger GPU, or more of them: no layout of this recipe fits"]
    return UserError("a GPU ran out of memory", evidence="\n".join(lines), fix="; ".join(changes))


def next_plan(recipe: Recipe, plan: Plan, taken: Taken) -> Candidate | None:
    """The fastest layout of the recipe, its own choices left open, that fits if predictions are off as much as here."""
    calibration.read()  # the kind may be known by measurement only
    # This host's RAM stands for all.
    cluster = Cluster(tuple(Host(host.name, host.slots, host.gpu, taken.ram) for host in plan.hosts))
    there_is = taken.total - taken.others
    off_by = max(1.0, there_is / plan.gpu_bytes)  # it needed more than there is
    found = planner.weighed(search.relaxed(recipe), cluster, shape_of(recipe, plan.vocab_size))
    fitting = [one for one in found if one.fits and one.gpu_bytes * off_by <= ROOM * there_is]
    return search.best(fitting) if fitting else None


def _items(items: Mapping[str, int]) -> str:
    largest = sorted(items.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)


def _changes(plan: Plan, better: Candidate) -> list[str]:
    """The recipe keys in which the better layout is another."""
    layout = better.layout
    pairs = [
        ("batch.micro_batch", plan.micro_batch, layout.micro_batch),
        ("train.recompute", plan.recompute, layout.recompute),
        ("zero.stage", plan.zero_stage, layout.zero_stage),
        ("zero.offload_optimizer", plan.offload_optimizer, layout.offload_optimizer),
        ("zero.offload_param", plan.offload_param, layout.offload_param),
    ]
    changed = [f"--set {key}={new}" for key, old, new in pairs if new != old]
    needs = f"{format_bytes(better.gpu_bytes)} predicted"
    return [f"the next plan that fits ({needs}): {' '.join(changed)}"] if changed else ["end what else is on the GPU"]
