"""The sentences of a plan: why this configuration, what to beware of, and what would fit when nothing does.

Every sentence carries its numbers. Nothing is decided here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from finlm.base.units import format_bytes
from finlm.plan import compute, gpus, search
from finlm.plan.memory import Layout
from finlm.plan.plan import PlanError
from finlm.plan.search import Candidate
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

FP16_SAFE_LR = 3e-4
MORE_HOSTS = (2, 4, 8, 16, 32)
RECIPE_KEYS = {
    "zero_stage": "zero.stage",
    "offload_optimizer": "zero.offload_optimizer",
    "offload_param": "zero.offload_param",
    "recompute": "train.recompute",
    "micro_batch": "batch.micro_batch",
}


def choices(recipe: Recipe, chosen: Candidate, found: list[Candidate]) -> Iterator[str]:
    """Why this stage, offload, recompute and micro-batch, for what the recipe left open."""
    layout, zero = chosen.layout, recipe.zero
    if zero.stage == "auto":
        yield f"ZeRO stage {layout.zero_stage}: {_why_stage(chosen, found)}"
    if "auto" in (zero.offload_optimizer, zero.offload_param):
        kept = [one for one in found if one.layout.offload_optimizer == "none" and one.layout.offload_param == "none"]
        if layout.offload_optimizer == "none" and layout.offload_param == "none":
            yield "no offload: the states fit"
        elif kept and not any(one.fits for one in kept):
            yield f"offload: without it {_need(min(kept, key=lambda one: one.over))} at least"
        elif kept:
            speeds = [one.tokens_per_second or 0.0 for one in kept if one.fits]
            yield f"offload: {chosen.tokens_per_second or 0.0:,.0f} tokens/s, at most {max(speeds):,.0f} without it"
    if recipe.train.recompute == "auto":
        others = [one for one in found if one.layout.recompute == "none" and (one.is_roomy or not one.fits)]
        if layout.recompute == "none":
            yield "no recompute: the activations fit"
        elif speeds := [one.tokens_per_second for one in others if one.fits and one.tokens_per_second]:
            mine = chosen.tokens_per_second or 0.0
            yield f"recompute: {mine:,.0f} tokens/s, at most {max(speeds):,.0f} without it"
        elif others:
            yield f"recompute: without it {_need(min(others, key=lambda one: one.over))} at least"
    if recipe.batch.micro_batch == "auto":
        yield f"micro-batch {_rows(chosen)}: {_why_rows(chosen, found)}"


def _why_stage(chosen: Candidate, found: list[Candidate]) -> str:
    lower = [one for one in found if one.layout.zero_stage < chosen.layout.zero_stage]
    if lower and not any(one.fits for one in lower):
        return f"lower stages need {_need(min(lower, key=lambda one: one.over))} at least"
    if chosen.tokens_per_second is None:
        return "the simplest that fits; DeepSpeed reports no gradient norm at stage 0 in fp32"
    mine = chosen.layout.zero_stage
    others = [one for one in found if one.layout.zero_stage != mine and one.fits and one.tokens_per_second]
    if not others:
        return "the only one that fits"
    best = max(others, key=lambda one: one.tokens_per_second or 0.0)
    if (best.tokens_per_second or 0.0) >= (1 - search.NEARLY_EQUAL) * chosen.tokens_per_second:
        return f"as fast as stage {best.layout.zero_stage} and simpler"
    speeds = f"{chosen.tokens_per_second:,.0f} tokens/s, at most {best.tokens_per_second:,.0f} at stage"
    return f"{speeds} {best.layout.zero_stage}"


def _why_rows(chosen: Candidate, found: list[Candidate]) -> str:
    mine = _without_rows(chosen.layout)
    same = [one for one in found if _without_rows(one.layout) == mine and not one.is_unequal]
    if chosen.is_unequal:
        speeds = [one.tokens_per_second for one in same if one.fits and one.tokens_per_second]
        equal = f"at most {max(speeds):,.0f} with equal ones" if speeds else "equal ones do not fit"
        return f"{chosen.tokens_per_second or 0.0:,.0f} tokens/s, {equal}"
    larger = [one for one in same if one.layout.micro_batch > chosen.layout.micro_batch]
    if not larger:
        return f"the most up to {search.MAX_MICRO_BATCH[chosen.layout.device]} that divides a rank's rows"
    following = min(larger, key=lambda one: one.layout.micro_batch)
    if following.fits:
        return f"larger ones are less than {search.NEARLY_EQUAL:.0%} faster"
    return f"{following.layout.micro_batch} rows would need {_need(following)}"


def _without_rows(layout: Layout) -> Layout:
    return dataclasses.replace(layout, micro_batch=0, accumulates=True)


def _need(one: Candidate) -> str:
    """The tighter of device and host memory with its limit."""
    what = "GPU" if one.layout.device == "cuda" else "rank"
    device = f"{format_bytes(one.gpu_bytes)} of {format_bytes(one.gpu_limit or 0)} a {what}"
    if one.host_limit is None or one.gpu_bytes / (one.gpu_limit or one.gpu_bytes) >= one.host_bytes / one.host_limit:
        return device
    return f"{format_bytes(one.host_bytes)} of {format_bytes(one.host_limit)} usable host memory"


def warnings(recipe: Recipe, cluster: Cluster, chosen: Candidate) -> Iterator[str]:
    """What the plan allows but the user should know."""
    layout, lr = chosen.layout, recipe.optim.lr
    if layout.precision == "fp16" and lr > FP16_SAFE_LR:
        yield (
            f"warning: Adam at lr {lr:g} in fp16, above {FP16_SAFE_LR:g}: a known end of such runs is loss nan, then"
            " `Current loss scale already at minimum`; lower optim.lr"
        )
    if layout.zero_stage == 0 and layout.precision != "fp32":
        yield "warning: DeepSpeed 0.19.8 begins stage 0 in 16 bits with a step on zero gradients; stage 1 does not"
    if layout.offload_optimizer == "nvme":
        yield "warning: DeepSpeed 0.19.8 does not resume NVMe-offloaded optimizer state correctly; offload to cpu"
    if any(host.memory_bytes is None for host in cluster.hosts):
        yield "warning: the memory of some hosts is unknown and was not checked; give hardware.hosts[].memory"
    if len({gpus.find(host.gpu).name for host in cluster.hosts if host.gpu}) > 1:
        yield f"mixed GPUs, rows of a rank and seconds of arithmetic in a micro-step: {_micro_step(cluster, chosen)}"
    if chosen.tokens_per_second and recipe.model.hidden_size < compute.NARROWEST:
        yield (
            f"warning: the predicted speed was fitted to hidden sizes from {compute.NARROWEST:,} on; one of 768 reached"
            " 0.8 of it on an H200"
        )
    hpz = recipe.zero.hpz_partition_size
    if hpz > 1 and any(host.slots % hpz for host in cluster.hosts):
        yield f"warning: hpZ groups of {hpz} ranks span hosts, so their gathers cross the network"


def _micro_step(cluster: Cluster, chosen: Candidate) -> str:
    """Rows and seconds of each kind of rank, and which the others wait for."""
    each = {
        (gpus.find(host.gpu or "").name, rows): seconds
        for host, rows, seconds in zip(cluster.hosts, chosen.micro_batches, chosen.micro_step_seconds, strict=True)
    }
    parts = [f"{kind} {rows} in {seconds:.2g} s" for (kind, rows), seconds in each.items()]
    slowest = max(each, key=lambda one: each[one])[0]
    return f"{', '.join(parts)}; {slowest} sets the speed of all"


def nothing_fits(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, precision: str, rows_per_step: int, found: list[Candidate]
) -> PlanError:
    """The error that gives the numbers and the nearest change that would fit."""
    if not found:
        return PlanError(
            "the recipe's zero: section leaves no configuration that DeepSpeed accepts",
            fix="offload_param needs stage 3, offload_optimizer stage 1 or more, its stream 1 or 2, "
            "train.grad_accum_dtype: fp32 stage 2 or 3",
        )
    nearest = min(found, key=lambda one: one.over)
    layout = nearest.layout
    evidence = f"the smallest of {len(found)} configurations needs {_need(nearest)}: {_short(nearest)}"
    items = sorted(nearest.gpu_items.items(), key=lambda item: -item[1])
    evidence += "\n" + ", ".join(f"{name} {format_bytes(size)}" for name, size in items if size)
    free = search.relaxed(recipe)
    others = [one for one in search.candidates(free, cluster, shape, precision, rows_per_step) if one.fits]
    waiting = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"asynchronous": False})})
    if any(one.fits for one in search.candidates(waiting, cluster, shape, precision, rows_per_step)):
        fix = "set checkpoint.asynchronous: false, which needs no copy of the states in host memory"
    elif others:
        fix = "set " + _changes(layout, min(others, key=lambda one: (_distance(layout, one), one.complexity)))
    else:
        fix = _more_hosts(free, cluster, shape, precision, rows_per_step)
    return PlanError(f"{recipe.name} does not fit this cluster", evidence=evidence, fix=fix)


def _short(one: Candidate) -> str:
    layout = one.layout
    return (
        f"ZeRO stage {layout.zero_stage}, offload optimizer {layout.offload_optimizer} and parameters "
        f"{layout.offload_param}, recompute {layout.recompute}, micro-batch {_rows(one)}"
    )


def _rows(one: Candidate) -> str:
    """The micro-batch, or each of unequal ones in the order of the hosts."""
    return " and ".join(map(str, dict.fromkeys(one.micro_batches)))


def _distance(wanted: Layout, one: Candidate) -> int:
    return sum(getattr(wanted, name) != getattr(one.layout, name) for name in RECIPE_KEYS)


def _changes(wanted: Layout, one: Candidate) -> str:
    names = [name for name in RECIPE_KEYS if getattr(wanted, name) != getattr(one.layout, name)]
    values = {name: getattr(one.layout, name) for name in names} | ({"micro_batch": "auto"} if one.is_unequal else {})
    changes = ", ".join(f"{RECIPE_KEYS[name]}: {value}" for name, value in values.items())
    return f"{changes} (needs {_need(one)})"


def _more_hosts(recipe: Recipe, cluster: Cluster, shape: ModelShape, precision: str, rows_per_step: int) -> str:
    for factor in MORE_HOSTS:
        larger = search.on_more_hosts(cluster, factor)
        if any(one.fits for one in search.candidates(recipe, larger, shape, precision, rows_per_step)):
            hosts = len(cluster.hosts)
            return f"use {factor * hosts} such hosts instead of {hosts}, or shorten batch.sequence_length"
    return "no number of such hosts is enough: shorten batch.sequence_length, or use GPUs with more memory"
