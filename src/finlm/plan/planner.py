"""Recipe x Cluster x shape -> Plan: precision, batch, length, then the fastest configuration that fits every host.

What the recipe states is a constraint and is never changed in silence: only tokens_per_step is rounded to whole
micro-batches, and the reasons say so. With DeepSpeed the shards are equal on all ranks, and all ranks share one
precision and one number of micro-steps; in a mixed cluster the GPU kinds differ in their micro-batch (split.py).

The memory and time are predictions (plan/memory.py, plan/speed.py state their errors); nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from finlm.base.units import format_count
from finlm.plan import gpus, host_memory, memory, search, split, why
from finlm.plan.plan import Plan, PlanError, PlannedHost
from finlm.plan.search import Candidate
from finlm.recipe import rules
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

CUDNN_CAPABILITIES = (9.0, 10.0)  # Hopper, data-centre Blackwell


def make(recipe: Recipe, cluster: Cluster, shape: ModelShape, train_tokens: int | None = None) -> Plan:
    """Decide everything. train_tokens: tokens of the prepared data, needed for train.epochs. Raises PlanError."""
    _check_devices(cluster)
    precision, reasons = _precision(recipe, cluster)
    rows_per_step = _rows_per_step(recipe, cluster)
    tokens_per_step = rows_per_step * recipe.batch.sequence_length
    if tokens_per_step != recipe.batch.tokens_per_step:
        reasons.append(
            f"tokens_per_step {recipe.batch.tokens_per_step:,} rounded to {tokens_per_step:,}: {rows_per_step} rows x"
            f" {recipe.batch.sequence_length} tokens, whole micro-batches on {cluster.world_size} ranks"
        )
    steps = _steps(recipe, tokens_per_step, train_tokens)
    for key, sentence in rules.warmup_problems(recipe.optim, steps):
        raise PlanError(f"{key}: {sentence}", fix="lower optim.warmup_steps or train longer")
    found = list(search.candidates(recipe, cluster, shape, precision, rows_per_step))
    fitting = [one for one in found if one.fits]
    if not fitting:
        raise why.nothing_fits(recipe, cluster, shape, precision, rows_per_step, found)
    chosen = search.best(fitting)
    reasons += why.choices(recipe, chosen, found)
    reasons += why.warnings(recipe, cluster, chosen)
    return _plan(recipe, cluster, shape, chosen, steps, tuple(reasons))


def weighed(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> list[Candidate]:
    """Every candidate of the recipe on this cluster; none where the hardware cannot run its precision."""
    try:
        precision, _ = _precision(recipe, cluster)
        return list(search.candidates(recipe, cluster, shape, precision, _rows_per_step(recipe, cluster)))
    except PlanError:
        return []


def fastest(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> Candidate | None:
    """The candidate that make would choose; None when nothing fits."""
    fitting = [one for one in weighed(recipe, cluster, shape) if one.fits]
    return search.best(fitting) if fitting else None


def _plan(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, chosen: Candidate, steps: int, reasons: tuple[str, ...]
) -> Plan:
    layout = chosen.layout
    rows = split.rows(chosen.micro_batches, cluster)
    tokens_per_step = rows * layout.sequence_length * chosen.accumulation
    speed = chosen.tokens_per_second
    kinds = [gpus.find(host.gpu) if host.gpu else None for host in cluster.hosts]
    hosts = list(zip(cluster.hosts, kinds, strict=True))
    # MFU is an average over unequal GPUs, so the peak is too.
    peak = sum(kind.peak_flops * host.slots for host, kind in hosts if kind) / cluster.world_size
    return Plan(
        recipe=recipe.name,
        hosts=tuple(
            PlannedHost(host.name, host.slots, kind.name if kind else None, rows, size)
            for (host, kind), rows, size in zip(hosts, chosen.micro_batches, chosen.host_gpu_bytes, strict=True)
        ),
        device=layout.device,
        world_size=layout.world_size,
        precision=layout.precision,
        zero_stage=layout.zero_stage,
        offload_optimizer=layout.offload_optimizer,
        offload_param=layout.offload_param,
        recompute=layout.recompute,
        compiled=layout.compiled,
        attention=_attention(cluster, layout.precision, recipe.train.deterministic),
        micro_batch=layout.micro_batch,
        gradient_accumulation_steps=chosen.accumulation,
        sequence_length=layout.sequence_length,
        tokens_per_step=tokens_per_step,
        steps=steps,
        vocab_size=shape.vocab,
        # GRPO samples from every row of the head.
        padded_vocab_size=shape.vocab if cluster.is_cpu or recipe.stage == "grpo" else shape.padded_vocab,
        parameters=shape.parameters,
        flops_per_token=shape.flops_per_token(layout.sequence_length),
        fits=chosen.fits,
        gpu_bytes=chosen.gpu_bytes,
        gpu_bytes_items=chosen.gpu_items,
        gpu_memory_bytes=chosen.gpu_limit or 0,
        host_bytes=chosen.host_bytes,
        peak_flops=peak or None,
        tokens_per_second=speed,
        days=None if speed is None else steps * tokens_per_step / speed / 86400,
        reasons=reasons,
        gpu_allocated_bytes=memory.allocated_bytes(chosen.gpu_items),
        host_bytes_items=chosen.host_items,
        nvme_bytes=host_memory.nvme_bytes(shape, layout, max(host.slots for host in cluster.hosts)),
        fp32_gradients=layout.fp32_gradients,
        step_seconds=dataclasses.asdict(chosen.step) if chosen.step else {},
    )


def _check_devices(cluster: Cluster) -> None:
    without = [host.name for host in cluster.hosts if host.gpu is None]
    if without and not cluster.is_cpu:
        raise PlanError(
            "some hosts have GPUs and some do not",
            evidence=f"no GPU kind for {', '.join(without)}",
            fix="leave those out (--exclude), give every host a gpu in hardware.hosts, or pass --gpu for all",
        )


def _attention(
    cluster: Cluster, precision: str, deterministic: bool
) -> Literal["default", "cudnn", "flash", "efficient"]:
    """The scaled_dot_product_attention backend that every GPU has and that is fastest on the oldest."""
    if cluster.is_cpu:
        return "default"
    capability = min(gpus.find(host.gpu or "").compute_capability for host in cluster.hosts)
    if capability < gpus.BF16_CAPABILITY or precision == "fp32":  # the others have no fp32, or need Ampere
        return "efficient"
    # XuanYuan-6B's on one H200, forward and backward: flash 3.22 ms, cuDNN 1.79. Slower than flash on Ampere and on
    # consumer Blackwell (transformers#48163).
    # Torch does not take cuDNN's where results must be deterministic.
    return "cudnn" if capability in CUDNN_CAPABILITIES and not deterministic else "flash"


def precision_problem(precision: str, cluster: Cluster) -> tuple[str, str] | None:
    """(problem, fix) when the hardware cannot run this precision."""
    if cluster.is_cpu:
        if precision == "fp16":
            return "fp16 does not run on CPU ranks (DeepSpeed: Type fp16 is not supported)", "use auto, fp32 or bf16"
        if precision == "fp8":
            return "fp8 does not run on CPU ranks", "use auto, fp32 or bf16"
        return None
    without = [host for host in cluster.hosts if host.gpu and not gpus.find(host.gpu).has_fp8]
    if precision == "fp8" and without:
        return f"fp8 needs float8 matrix units on every GPU: {_capability(without[0].name, without[0].gpu)}", "use auto"
    old = [host for host in cluster.hosts if host.gpu and not gpus.find(host.gpu).has_bf16]
    if precision == "bf16" and old:
        return f"bf16 needs compute capability 8.0 on every host: {_capability(old[0].name, old[0].gpu)}", "use fp16"
    return None


def _capability(host: str, gpu: str | None) -> str:
    kind = gpus.find(gpu or "")
    return f"host {host} has {kind.name}, compute capability {kind.compute_capability} < {gpus.BF16_CAPABILITY}"


def _precision(recipe: Recipe, cluster: Cluster) -> tuple[str, list[str]]:
    wanted = recipe.train.precision
    if wanted != "auto":
        problem = precision_problem(wanted, cluster)
        if problem:
            raise PlanError(f"train.precision: {problem[0]}", fix=f"{problem[1]}, or leave train.precision at auto")
        return wanted, [f"{wanted}: train.precision says so"]
    if cluster.is_cpu:
        return "fp32", ["fp32: CPU ranks"]
    for host in cluster.hosts:
        if host.gpu and not gpus.find(host.gpu).has_bf16:
            return "fp16", [f"fp16: {_capability(host.name, host.gpu)}"]
    return "bf16", ["bf16: every GPU has compute capability 8.0 or more"]


def _rows_per_step(recipe: Recipe, cluster: Cluster) -> int:
    """Rows of an optimizer step over all ranks: whole micro-steps and groups, nearest to what the recipe asks."""
    given = split.given(recipe, cluster)
    unit = split.rows(given, cluster) if given else cluster.world_size
    if recipe.grpo is not None:
        unit = math.lcm(unit, recipe.grpo.generations)
    wanted = recipe.batch.tokens_per_step / recipe.batch.sequence_length
    return max(1, round(wanted / unit)) * unit


def _steps(recipe: Recipe, tokens_per_step: int, train_tokens: int | None) -> int:
    train = recipe.train
    if train.steps is not None:
        return train.steps
    tokens = train.tokens
    if tokens is None:
        if train_tokens is None:
            raise PlanError(
                "train.epochs needs the number of tokens in the prepared data",
                fix="run `finlm prepare RECIPE` first, or give train.steps or train.tokens",
            )
        tokens = int(train_tokens * (train.epochs or 0.0))
    steps = tokens // tokens_per_step
    if steps < 1:
        raise PlanError(
            f"{format_count(tokens)} training tokens are less than one step of {tokens_per_step:,}",
            fix="lower batch.tokens_per_step or train longer",
        )
    return steps
