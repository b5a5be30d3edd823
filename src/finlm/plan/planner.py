"""Decide the Plan of (Recipe, Cluster, shape): precision, batch, length, then the fastest configuration that fits.

What the recipe states is a constraint: only tokens_per_step is rounded to whole micro-batches, and the reasons say so.
With DeepSpeed all ranks have equal shards, one precision and one number of micro-steps; in a mixed cluster the GPU
kinds differ in their micro-batch. The sentences of a plan are made here too: why this configuration, what to beware of,
and what would fit when nothing does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from finlm.base.units import format_bytes, format_count, format_items
from finlm.plan import advice, gpus, host_memory, memory, search, speed
from finlm.plan.gpus import PlanError
from finlm.plan.memory import Layout
from finlm.plan.plan import Plan, PlannedHost
from finlm.plan.search import Candidate
from finlm.recipe import rules
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

FP16_SAFE_LR = 3e-4


def explain_choices(recipe: Recipe, chosen: Candidate, candidates: list[Candidate]) -> Iterator[str]:
    """Yield the reasons for stage, offload, recompute and micro-batch where the recipe leaves them to auto.

    `candidates` are all, fitting or not; `chosen` is one of them. Also yields a sentence on GRPO's answers.
    """
    layout, zero = chosen.layout, recipe.zero
    if zero.stage == "auto":
        yield f"ZeRO stage {layout.zero_stage}: {_why_stage(chosen, candidates)}"
    if "auto" in (zero.offload_optimizer, zero.offload_param):
        kept = [
            each
            for each in candidates
            if each.layout.offload_optimizer == "none" and each.layout.offload_param == "none"
        ]
        if layout.offload_optimizer == "none" and layout.offload_param == "none":
            yield "no offload: the states fit"
        elif kept and not any(each.fits for each in kept):
            yield f"offload: without it {_describe_need(min(kept, key=lambda each: each.over))} at least"
        elif kept:
            speeds = [each.tokens_per_second or 0.0 for each in kept if each.fits]
            yield f"offload: {chosen.tokens_per_second or 0.0:,.0f} tokens/s, at most {max(speeds):,.0f} without it"
    if recipe.train.recompute == "auto":
        others = [each for each in candidates if each.layout.recompute == "none" and (each.is_roomy or not each.fits)]
        if layout.recompute == "none":
            yield "no recompute: the activations fit"
        elif speeds := [each.tokens_per_second for each in others if each.fits and each.tokens_per_second]:
            mine = chosen.tokens_per_second or 0.0
            yield f"recompute: {mine:,.0f} tokens/s, at most {max(speeds):,.0f} without it"
        elif others:
            yield f"recompute: without it {_describe_need(min(others, key=lambda each: each.over))} at least"
    if recipe.batch.micro_batch == "auto":
        yield f"micro-batch {_format_micro_batches(chosen)}: {_why_rows(chosen, candidates)}"
    if layout.generation_rows:
        answers = layout.micro_batch * chosen.accumulation
        said = f"answers: all {answers} of a rank are generated at once"
        if layout.generation_rows < answers:
            said = f"answers: {layout.generation_rows} of a rank's {answers} are generated at once"
        assumed = f"; their time is that of answers of {layout.answer_tokens} tokens in full rows"
        yield said + (assumed if chosen.step is not None else "")


def _why_stage(chosen: Candidate, candidates: list[Candidate]) -> str:
    """Return why this ZeRO stage: lower ones do not fit, or the others are not faster."""
    lower = [each for each in candidates if each.layout.zero_stage < chosen.layout.zero_stage]
    if lower and not any(each.fits for each in lower):
        return f"lower stages need {_describe_need(min(lower, key=lambda each: each.over))} at least"
    if chosen.tokens_per_second is None:
        return "the simplest that fits; DeepSpeed reports no gradient norm at stage 0 in fp32"
    mine = chosen.layout.zero_stage
    others = [each for each in candidates if each.layout.zero_stage != mine and each.fits and each.tokens_per_second]
    if not others:
        return "the only one that fits"
    best = max(others, key=lambda each: each.tokens_per_second or 0.0)
    if (best.tokens_per_second or 0.0) >= (1 - search.NEARLY_EQUAL) * chosen.tokens_per_second:
        return f"as fast as stage {best.layout.zero_stage} and simpler"
    speeds = f"{chosen.tokens_per_second:,.0f} tokens/s, at most {best.tokens_per_second:,.0f} at stage"
    return f"{speeds} {best.layout.zero_stage}"


def _why_rows(chosen: Candidate, candidates: list[Candidate]) -> str:
    """Return why this micro-batch: larger ones do not fit, are hardly faster, or divide no rank's rows.

    Compares `chosen` with those of `candidates` that differ in nothing else.
    """
    mine = _without_rows(chosen.layout)
    same = [each for each in candidates if _without_rows(each.layout) == mine and not each.is_unequal]
    if chosen.is_unequal:
        speeds = [each.tokens_per_second for each in same if each.fits and each.tokens_per_second]
        equal = f"at most {max(speeds):,.0f} with equal ones" if speeds else "equal ones do not fit"
        return f"{chosen.tokens_per_second or 0.0:,.0f} tokens/s, {equal}"
    larger = [each for each in same if each.layout.micro_batch > chosen.layout.micro_batch]
    if not larger:
        return f"the most up to {search.MAX_MICRO_BATCH[chosen.layout.device]} that divides a rank's rows"
    following = min(larger, key=lambda each: each.layout.micro_batch)
    if following.fits:
        return f"larger ones are less than {search.NEARLY_EQUAL:.0%} faster"
    return f"{following.layout.micro_batch} rows would need {_describe_need(following)}"


def _without_rows(layout: Layout) -> Layout:
    """Return the layout without its micro-batch: the same for candidates that differ in that alone."""
    return dataclasses.replace(layout, micro_batch=0, accumulates=True, generation_rows=0)


def _describe_need(candidate: Candidate) -> str:
    """Return in words how much of its device or host memory a candidate needs, whichever is tighter."""
    what = "GPU" if candidate.layout.device == "cuda" else "rank"
    device = f"{format_bytes(candidate.gpu_bytes)} of {format_bytes(candidate.gpu_limit or 0)} a {what}"
    if (
        candidate.host_limit is None
        or candidate.gpu_bytes / (candidate.gpu_limit or candidate.gpu_bytes)
        >= candidate.host_bytes / candidate.host_limit
    ):
        return device
    return f"{format_bytes(candidate.host_bytes)} of {format_bytes(candidate.host_limit)} usable host memory"


def warnings(recipe: Recipe, cluster: Cluster, chosen: Candidate) -> Iterator[str]:
    """Yield sentences about what the plan allows but the user should know. Raises PlanError for an unknown GPU kind."""
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
    for host in cluster.hosts:
        if host.gpu and host.memory_bytes and host.memory_bytes < gpus.find(host.gpu).memory_bytes:
            yield (
                f"warning: {host.name} has {format_bytes(host.memory_bytes)} of host memory, less than one of its GPUs;"
                " if it grows when it is used, as some virtual machines' does, give hardware.hosts[].memory"
            )
    if len({gpus.find(host.gpu).name for host in cluster.hosts if host.gpu}) > 1:
        yield f"mixed GPUs, rows of a rank and seconds of arithmetic in a micro-step: {_micro_step(cluster, chosen)}"
    if chosen.tokens_per_second and recipe.model.hidden_size < speed.NARROWEST:
        yield (
            f"warning: the predicted speed was fitted to hidden sizes from {speed.NARROWEST:,} on; one of 768 reached"
            " 0.8 of it on an H200"
        )
    hpz = recipe.zero.hpz_partition_size
    if hpz > 1 and any(host.slots % hpz for host in cluster.hosts):
        yield f"warning: hpZ groups of {hpz} ranks span hosts, so their gathers cross the network"


def _micro_step(cluster: Cluster, chosen: Candidate) -> str:
    """Return in words each kind of rank's rows and seconds, and the slowest kind. PlanError for an unknown GPU kind."""
    each = {
        (gpus.find(host.gpu or "").name, rows): seconds
        for host, rows, seconds in zip(cluster.hosts, chosen.micro_batches, chosen.micro_step_seconds, strict=True)
    }
    parts = [f"{kind} {rows} in {seconds:.2g} s" for (kind, rows), seconds in each.items()]
    slowest = max(each, key=lambda kind: each[kind])[0]
    return f"{', '.join(parts)}; {slowest} sets the speed of all"


def _why_waiting(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> str:
    """Return the sentence on why checkpoints are synchronous: a copy in host memory does not fit.

    `recipe` asks for asynchronous checkpoints. Raises ValueError if it has no candidates.
    """
    kept = search.candidates(recipe, cluster, shape)
    need = _describe_need(min(kept, key=lambda each: (each.gpu_bytes > (each.gpu_limit or each.gpu_bytes), each.over)))
    return (
        f"training waits for checkpoints (checkpoint.asynchronous: false): with a copy in host memory {need} at least"
    )


def _nothing_fits_error(recipe: Recipe, cluster: Cluster, shape: ModelShape, candidates: list[Candidate]) -> PlanError:
    """Return, without raising it, the PlanError for a recipe, none of whose `candidates` fits.

    It gives the smallest candidate's memory and the nearest change that would fit. If `candidates` is empty, it says
    that DeepSpeed accepts no configuration of the recipe's zero: section. Plans again to find what would fit.
    """

    def fitting(other: Recipe, hosts: Cluster) -> list[Candidate]:
        """Return the candidates of another recipe that fit these hosts, or []; PlanError as search.candidates()."""
        return [each for each in search.candidates(other, hosts, shape) if each.fits]

    others = fitting(search.relax_recipe(recipe), cluster)
    settings = f"set {advice.nearest_settings(recipe, others)[0]}" if others else ""
    if not candidates:
        return PlanError(
            "the recipe's zero: section leaves no configuration that DeepSpeed accepts",
            evidence="offload_param needs stage 3, offload_optimizer stage 1 or more, its stream 1 or 2, "
            "train.grad_accum_dtype: fp32 stage 2 or 3",
            fix=settings or "set zero.stage, zero.offload_optimizer and zero.offload_param to auto",
        )
    nearest = min(candidates, key=lambda each: each.over)
    layout = nearest.layout
    evidence = (
        f"the smallest of {len(candidates)} configurations needs {_describe_need(nearest)}: ZeRO stage"
        f" {layout.zero_stage}, offload optimizer {layout.offload_optimizer} and parameters {layout.offload_param},"
        f" recompute {layout.recompute}, micro-batch {_format_micro_batches(nearest)}"
    )
    evidence += "\n" + format_items(nearest.gpu_items)
    if lighter := advice.fix_checkpoints(recipe, cluster, fitting):
        fix = lighter
    elif others:
        fix = f"{settings} (needs {_describe_need(advice.nearest_settings(recipe, others)[1])})"
    else:
        fix = advice.other_hosts(recipe, cluster, fitting)
    return PlanError(
        f"{recipe.name} does not fit this cluster", evidence=evidence, fix=fix + _hint_at_memory(cluster, candidates)
    )


def _hint_at_memory(cluster: Cluster, candidates: list[Candidate]) -> str:
    """Return a clause that hardware.hosts[].memory can state more memory; "" unless host memory alone lacks."""
    short = [each for each in candidates if not each.fits and each.gpu_bytes <= (each.gpu_limit or each.gpu_bytes)]
    if cluster.is_cpu or not short:
        return ""
    least = min(short, key=lambda each: each.over)
    sizes = {host.name: host.memory_bytes for host in cluster.hosts if host.memory_bytes}
    name = next(name for name, size in sizes.items() if int(size * search.HOST_SHARE) == least.host_limit)
    shown = format_bytes(sizes[name])
    return f"; or, if {name} has more than {shown} of memory, say so: hardware.hosts[].memory, by the host's name"


def _format_micro_batches(candidate: Candidate) -> str:
    """Return the micro-batch, or unequal ones in the order of the hosts, as text."""
    return " and ".join(map(str, dict.fromkeys(candidate.micro_batches)))


def make(recipe: Recipe, cluster: Cluster, shape: ModelShape, train_tokens: int | None = None) -> Plan:
    """Return the plan of a recipe on a cluster; `train_tokens` are the tokens of one epoch, which train.epochs needs.

    `shape` is the model's, with its vocabulary. The days of DPO contain its reference's scoring of all pairs. Raises
    PlanError when nothing fits, a GPU kind is unknown, only some hosts have GPUs, they cannot run the precision, or the
    micro-batches, the number of steps or the warmup do not work out.
    """
    gpus.check_devices(cluster)
    _, reasons = gpus.precision(recipe, cluster)
    rows_per_step = search.count_rows_per_step(recipe, cluster)
    tokens_per_step = rows_per_step * recipe.batch.sequence_length
    if tokens_per_step != recipe.batch.tokens_per_step:
        reasons.append(
            f"tokens_per_step {recipe.batch.tokens_per_step:,} rounded to {tokens_per_step:,}: {rows_per_step} rows x"
            f" {recipe.batch.sequence_length} tokens, whole micro-batches on {cluster.world_size} ranks"
        )
    steps = _count_steps(recipe, tokens_per_step, train_tokens)
    for key, sentence in rules.warmup_problems(recipe.optim, steps):
        raise PlanError(f"{key}: {sentence}", fix="lower optim.warmup_steps or train longer")
    said = recipe
    recipe, candidates = search.candidates_or_waiting(recipe, cluster, shape)
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        raise _nothing_fits_error(recipe, cluster, shape, candidates)
    chosen = search.best(fitting)
    reasons += explain_choices(recipe, chosen, candidates)
    measured = {gpus.find(host.gpu).calibrated: None for host in cluster.hosts if host.gpu}
    reasons += [sentence for sentence in measured if sentence]
    if recipe is not said:
        reasons.append(_why_waiting(said, cluster, shape))
    reasons += [*shape.left_to_transformers, *warnings(recipe, cluster, chosen)]
    made = _plan(recipe, cluster, shape, chosen, steps, tuple(reasons))
    if recipe.dpo is None or recipe.dpo.loss == "orpo" or made.days is None:
        return made
    pairs = steps * rows_per_step if train_tokens is None else train_tokens // recipe.batch.sequence_length
    seconds = math.ceil(pairs / sum(made.rank_micro_batches)) * search.forward_seconds(cluster, shape, chosen)
    reason = f"reference: {pairs:,} pairs are asked once before the first step, {seconds / 60:.1f} minutes"
    return dataclasses.replace(made, days=made.days + seconds / 86400, reasons=(*made.reasons, reason))


def plan_again(recipe: Recipe, cluster: Cluster, shape: ModelShape, steps: int) -> Plan | None:
    """Return the plan of a run of `steps` steps on this cluster; None when nothing fits or planning raises PlanError.

    Unlike make() it counts no time for DPO's reference, and gives no reason for rounded tokens or waiting checkpoints.
    """
    try:
        recipe, candidates = search.candidates_or_waiting(recipe, cluster, shape)
    except PlanError:
        return None
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        return None
    chosen = search.best(fitting)
    reasons = [*gpus.precision(recipe, cluster)[1], *explain_choices(recipe, chosen, candidates)]
    return _plan(recipe, cluster, shape, chosen, steps, (*reasons, *warnings(recipe, cluster, chosen)))


def list_candidates(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> list[Candidate]:
    """Return every candidate of the recipe on this cluster, fitting or not; [] when planning raises PlanError."""
    try:
        return search.candidates_or_waiting(recipe, cluster, shape)[1]
    except PlanError:
        return []


def fastest(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> Candidate | None:
    """Return the candidate that make() would choose; None when nothing fits or planning raises PlanError."""
    fitting = [each for each in list_candidates(recipe, cluster, shape) if each.fits]
    return search.best(fitting) if fitting else None


def _plan(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, chosen: Candidate, steps: int, reasons: tuple[str, ...]
) -> Plan:
    """Return the Plan of a candidate; `reasons` are its sentences. Raises PlanError for an unknown GPU kind."""
    layout = chosen.layout
    rows = search.rows_per_micro_step(chosen.micro_batches, cluster)
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
        attention=gpus.attention(cluster, layout.precision, recipe.train.deterministic),
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
        asynchronous_checkpoints=recipe.checkpoint.asynchronous,
        generation_rows=layout.generation_rows,
        generation_bytes_items=memory.generation_items(shape, layout),
        gpu_mfu=kinds[0].mfu if kinds[0] and len(set(kinds)) == 1 else None,
    )


def _count_steps(recipe: Recipe, tokens_per_step: int, train_tokens: int | None) -> int:
    """Return the optimizer steps by train.steps, tokens or epochs. Raises PlanError when 0 or epochs without tokens."""
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
