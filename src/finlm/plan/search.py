"""Compute every configuration that the recipe allows, with its memory and time here, and choose the fastest that fits.

On unequal GPUs each kind gets its own micro-batch, so that all ranks end a micro-step at about the same time; the loss
is divided by the labels of all ranks, so who reads how many rows does not change the gradient.

"auto" leaves out what DeepSpeed 0.19.8 does badly: NVMe (its state does not survive a resume) and stage 0 (in 16 bits
it begins with a step on zero gradients, in fp32 it reports no gradient norm; stage 1 costs the same on one GPU).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finlm.plan import gpus, host_memory, memory, speed
from finlm.plan.gpus import PlanError
from finlm.plan.memory import Layout
from finlm.recipe import rules
from finlm.recipe import shape as shapes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape, is_quantized

HOST_SHARE = 0.9  # of a host's RAM; the rest is the system's and the page cache's
MAX_MICRO_BATCH = {"cuda": 64, "cpu": 8}  # two cores gain nothing from larger ones, and activations stay in cache
RECOMPUTE = ("none", "selective", "full")
AUTO = {"stage": "auto", "offload_optimizer": "auto", "offload_param": "auto"}
MARGIN = 0.02  # of a GPU's memory that a choice leaves free where it can; predictions err by as much
OFFLOAD_DOUBT = 0.1  # by which offload must be faster to be chosen where the states fit without
ZERO3_DOUBT = 0.05  # and ZeRO-3, whose hooks wait for the host: 2.4 s a step on a busy one, 1.8 planned
NEARLY_EQUAL = 0.02  # speeds closer than this are equal, and the simpler candidate wins


@dataclass(frozen=True)
class Candidate:
    """A configuration with what it needs and how fast it is; memory figures are of the tightest host.

    micro_batches are the hosts', in their order; the layout has the largest. host_gpu_bytes and micro_step_seconds (of
    arithmetic, empty on CPU) are the hosts' too.
    """

    layout: Layout
    micro_batches: tuple[int, ...]
    accumulation: int
    host_gpu_bytes: tuple[int, ...]
    micro_step_seconds: tuple[float, ...]
    gpu_items: dict[str, int]
    gpu_bytes: int
    gpu_limit: int | None
    host_items: dict[str, int]
    host_bytes: int
    host_limit: int | None
    step: speed.StepTime | None
    tokens_per_second: float | None

    @property
    def is_unequal(self) -> bool:
        """Whether hosts have different micro-batches."""
        return len(set(self.micro_batches)) > 1

    @property
    def over(self) -> float:
        """Needed over available memory, the larger of device's and host's; 0 counts where a limit is unknown."""
        gpu = self.gpu_bytes / self.gpu_limit if self.gpu_limit else 0.0
        host = self.host_bytes / self.host_limit if self.host_limit else 0.0
        return max(gpu, host)

    @property
    def fits(self) -> bool:
        """Whether device and host memory suffice, as far as they are known."""
        return self.over <= 1.0

    @property
    def is_roomy(self) -> bool:
        """Whether MARGIN of the GPU stays free, its spare cache not counted; True on CPU and for an unknown memory."""
        if self.gpu_limit is None or self.layout.device == "cpu":
            return True
        least = memory.FRAGMENTATION * memory.allocated_bytes(self.gpu_items)
        return self.gpu_bytes - self.gpu_items["fragmentation"] + least <= (1 - MARGIN) * self.gpu_limit

    @property
    def worth(self) -> float:
        """Tokens/s, lowered by a doubt for offload and ZeRO-3, whose speed depends most on the host."""
        is_offloaded = self.layout.offload_optimizer != "none" or self.layout.offload_param != "none"
        doubt = OFFLOAD_DOUBT * is_offloaded + ZERO3_DOUBT * (self.layout.zero_stage == 3)
        return (1 - doubt) * (self.tokens_per_second or 0.0)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key, smallest first: fewer offloads, lower stage, less recompute, equal micro-batches, larger ones."""
        layout = self.layout
        offloads = (layout.offload_optimizer != "none") + (layout.offload_param != "none")
        recompute = RECOMPUTE.index(layout.recompute)
        return offloads, layout.zero_stage, recompute, self.is_unequal, -layout.micro_batch


def _allowed_choices(recipe: Recipe) -> Iterator[tuple[int, str, str, str]]:
    """Yield (ZeRO stage, optimizer offload, parameter offload, recompute), all combinations of the values to try.

    A value that the recipe fixes is the only one; auto means all but stage 0 and NVMe. 4-bit weights leave out stage 3
    and offloaded parameters; hpZ and quantized collectives leave only stage 3.
    """
    zero = recipe.zero
    quantized = is_quantized(recipe)
    stages: tuple[int, ...] = (1, 2) if quantized else (1, 2, 3)
    params = ("none",) if quantized else ("none", "cpu")
    if zero.hpz_partition_size > 1 or zero.quantized_weights or zero.quantized_gradients:
        stages = (3,)
    return itertools.product(
        stages if zero.stage == "auto" else (zero.stage,),
        ("none", "stream", "cpu") if zero.offload_optimizer == "auto" else (zero.offload_optimizer,),
        params if zero.offload_param == "auto" else (zero.offload_param,),
        RECOMPUTE if recipe.train.recompute == "auto" else (recipe.train.recompute,),
    )


def is_compiled(recipe: Recipe, cluster: Cluster) -> bool:
    """Return whether torch.compile is used; auto means on GPUs, for pretraining and SFT, without 4-bit weights."""
    is_worth = not cluster.is_cpu and not is_quantized(recipe) and recipe.stage in rules.ROWS_OF_ONE_LENGTH
    return is_worth if recipe.train.compile == "auto" else recipe.train.compile


def relax_recipe(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe with auto for everything that the planner may choose."""
    zero, train = recipe.zero.model_copy(update=AUTO), recipe.train.model_copy(update={"recompute": "auto"})
    batch = recipe.batch.model_copy(update={"micro_batch": "auto"})
    grpo = recipe.grpo and recipe.grpo.model_copy(update={"generation_rows": "auto"})
    return recipe.model_copy(update={"zero": zero, "train": train, "batch": batch, "grpo": grpo})


def candidates_or_waiting(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> tuple[Recipe, list[Candidate]]:
    """Return (recipe, its candidates), fitting or not. Raises PlanError as candidates() does.

    If none fits and the recipe does not set checkpoint.asynchronous, returns both for false if one fits with that.
    """
    computed = list(candidates(recipe, cluster, shape))
    if any(each.fits for each in computed) or "asynchronous" in recipe.checkpoint.model_fields_set:
        return recipe, computed
    patient = with_waiting_checkpoints(recipe)
    others = list(candidates(patient, cluster, shape))
    return (patient, others) if any(each.fits for each in others) else (recipe, computed)


def with_waiting_checkpoints(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe with checkpoint.asynchronous: false, which needs no copy in host memory."""
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"asynchronous": False})})


def as_planned(recipe: Recipe, asynchronous: bool) -> Recipe:
    """Return the recipe unchanged if `asynchronous`, as its plan says; else with checkpoint.asynchronous: false."""
    return recipe if asynchronous else with_waiting_checkpoints(recipe)


def forward_seconds(cluster: Cluster, shape: ModelShape, chosen: Candidate) -> float:
    """Return the seconds of a forward pass of a micro-batch on the slowest GPU. PlanError without a known GPU kind."""
    padded = dataclasses.replace(shape, vocab=shape.padded_vocab)
    return max(
        speed.forward_seconds(padded, dataclasses.replace(chosen.layout, micro_batch=rows), gpus.find(host.gpu or ""))
        for host, rows in zip(cluster.hosts, chosen.micro_batches, strict=True)
    )


def count_rows_per_step(recipe: Recipe, cluster: Cluster) -> int:
    """Return the rows of a step, in whole micro-steps and GRPO groups, as near to the recipe's as possible.

    Raises PlanError if batch.micro_batch does not match the hosts.
    """
    given = _given_micro_batches(recipe, cluster)
    unit = rows_per_micro_step(given, cluster) if given else cluster.world_size
    if recipe.grpo is not None:
        unit = math.lcm(unit, recipe.grpo.generations)
    return max(1, round(recipe.batch.tokens_per_step / recipe.batch.sequence_length / unit)) * unit


def candidates(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> Iterator[Candidate]:
    """Yield a candidate for every combination that the recipe allows and DeepSpeed accepts, fitting or not.

    Left to auto, parameters are not offloaded alone. Raises PlanError for an unknown GPU kind, for a train.precision
    that the hosts cannot run, and when batch.micro_batch does not match them.
    """
    precision, rows_per_step = gpus.precision(recipe, cluster)[0], count_rows_per_step(recipe, cluster)
    fp32_gradients = recipe.train.grad_accum_dtype == "fp32" and precision != "fp32"
    has_varlen = cluster.is_cpu or (  # attention within documents by their bounds (train/batches.py)
        precision != "fp32" and all(gpus.find(host.gpu or "").has_bf16 for host in cluster.hosts)
    )
    for stage, optimizer, param, recompute in _allowed_choices(recipe):
        is_refused = (param != "none" and stage < 3) or (optimizer != "none" and stage == 0)
        is_refused |= optimizer == "stream" and stage == 3
        is_refused |= precision == "fp8" and stage not in rules.FP8_STAGES
        is_refused |= fp32_gradients and optimizer not in rules.FP32_GRADIENTS.get(stage, ())
        # Parameters alone on the host save the least and cost the most transfers.
        is_pointless = param == "cpu" and optimizer == "none" and recipe.zero.offload_param == "auto"
        if is_refused or is_pointless:
            continue
        layout = Layout(
            device="cpu" if cluster.is_cpu else "cuda",
            precision=precision,  # type: ignore[arg-type]
            zero_stage=stage,  # type: ignore[arg-type]
            offload_optimizer=optimizer,  # type: ignore[arg-type]
            offload_param=param,  # type: ignore[arg-type]
            recompute=recompute,  # type: ignore[arg-type]
            micro_batch=1,
            sequence_length=recipe.batch.sequence_length,
            world_size=cluster.world_size,
            hpz_partition_size=recipe.zero.hpz_partition_size,
            compiled=is_compiled(recipe, cluster),
            fp32_gradients=fp32_gradients,
            has_full_masks=recipe.data.document_masks and not has_varlen,
            repeats_keys=not has_varlen,  # the same GPUs: train/model/kernels.py's "efficient"
            **shapes.layout(recipe, shape),
        )
        for micro_batches, accumulation in _micro_batches(recipe, cluster, shape, layout, rows_per_step):
            yield predict(recipe, cluster, shape, layout, micro_batches, accumulation)


def _micro_batches(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout, rows_per_step: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (each host's micro-batch, micro-steps): given, else equal, balanced on mixed GPUs. May raise PlanError."""
    given = _given_micro_batches(recipe, cluster)
    if given is not None:
        yield given, max(1, round(rows_per_step / rows_per_micro_step(given, cluster)))
        return
    hosts, rows_per_rank = len(cluster.hosts), max(1, rows_per_step // cluster.world_size)
    for rows in range(1, min(rows_per_rank, MAX_MICRO_BATCH[layout.device]) + 1):
        if rows_per_rank % rows == 0:
            yield (rows,) * hosts, rows_per_rank // rows
    if recipe.stage in rules.ROWS_OF_ONE_LENGTH:  # the others weigh every rank alike
        yield from _balanced_micro_batches(cluster, shape, layout, rows_per_step)


def _balanced_micro_batches(
    cluster: Cluster, shape: ModelShape, layout: Layout, rows_per_step: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (micro-batch of each host, micro-steps) where unlike GPU kinds need about equal time; none for one kind."""
    ranks: dict[str, int] = {}
    for host in cluster.hosts:
        ranks[host.gpu or ""] = ranks.get(host.gpu or "", 0) + host.slots
    if len(ranks) == 1:
        return
    padded = dataclasses.replace(shape, vocab=shape.padded_vocab)
    layouts = [dataclasses.replace(layout, micro_batch=rows) for rows in range(1, MAX_MICRO_BATCH["cuda"] + 1)]
    sizes = [sum(memory.gpu_items(padded, each).values()) for each in layouts]  # rises with the rows
    seconds = []
    for kind in map(gpus.find, ranks):
        fitting = layouts[: bisect.bisect_right(sizes, kind.usable_bytes)]
        seconds.append([speed.micro_step_seconds(padded, each, kind) for each in fitting])
    for accumulation in range(1, rows_per_step // cluster.world_size + 1):
        if rows_per_step % accumulation == 0:
            balanced = balance(list(ranks.values()), seconds, rows_per_step // accumulation)
            if balanced is not None and len(set(balanced)) > 1:
                of_kind = dict(zip(ranks, balanced, strict=True))
                yield tuple(of_kind[host.gpu or ""] for host in cluster.hosts), accumulation


def predict(
    recipe: Recipe,
    cluster: Cluster,
    shape: ModelShape,
    layout: Layout,
    micro_batches: tuple[int, ...],
    accumulation: int,
) -> Candidate:
    """Return the Candidate of a layout, with predicted memory and speed on this cluster; micro_batches are the hosts'.

    The layout's own micro-batch does not count. Speed is None on CPU. Raises PlanError for an unknown GPU kind.
    """
    if layout.device == "cuda":
        shape = dataclasses.replace(shape, vocab=shape.padded_vocab)
    shape = shape if layout.has_vocabulary_head else dataclasses.replace(shape, tied=True)  # a reward's has one row
    hosts = list(zip(cluster.hosts, micro_batches, strict=True))
    same = _with_generation_rows(recipe, cluster, shape, layout, max(micro_batches), accumulation)
    layouts = {rows: dataclasses.replace(same, micro_batch=rows) for rows in dict.fromkeys(micro_batches)}
    kinds = {(host.slots, host.gpu, host.memory_bytes, rows): host for host, rows in hosts}  # each kind of host once
    needed = {rows: memory.gpu_items(shape, each) for rows, each in layouts.items()}
    limits = {key: device_memory(host) for key, host in kinds.items()}
    items = {key: squeeze_cache(needed[key[-1]], limit) for key, limit in limits.items()}
    sizes = {key: sum(each.values()) for key, each in items.items()}
    tight = max(kinds, key=lambda key: sizes[key] / (limits[key] or float("inf")))
    saving = host_memory.has_snapshot(recipe), host_memory.neighbour_ranks(recipe, cluster, layout)
    rams = {key: host_memory.host_items(shape, layouts[key[-1]], key[0], *saving) for key in kinds}
    known = {key: sum(rams[key].values()) / host.memory_bytes for key, host in kinds.items() if host.memory_bytes}
    fullest = max(known, key=lambda key: known[key]) if known else max(kinds, key=lambda key: sum(rams[key].values()))
    ram = kinds[fullest].memory_bytes
    step, tokens_per_second, seconds = None, None, {}
    if layout.device == "cuda":
        zero, seconds_of = recipe.zero, speed.micro_step_seconds
        seconds = {(gpu, rows): seconds_of(shape, layouts[rows], gpus.find(gpu or "")) for _, gpu, _, rows in kinds}
        step = speed.step_time(
            shape,
            same,
            [speed.Rank(gpus.find(gpu or ""), slots, rows) for slots, gpu, _, rows in kinds],
            speed.Network(len(cluster.hosts), cluster.network_gbit, zero.quantized_weights, zero.quantized_gradients),
            accumulation,
            threads(recipe),
        )
        tokens = rows_per_micro_step(micro_batches, cluster) * layout.sequence_length * accumulation
        tokens_per_second = tokens / step.seconds
    return Candidate(
        layout=layouts[max(micro_batches)],
        micro_batches=micro_batches,
        accumulation=accumulation,
        host_gpu_bytes=tuple(sizes[host.slots, host.gpu, host.memory_bytes, rows] for host, rows in hosts),
        micro_step_seconds=tuple(seconds[host.gpu, rows] for host, rows in hosts) if seconds else (),
        gpu_items=items[tight],
        gpu_bytes=sizes[tight],
        gpu_limit=limits[tight],
        host_items=rams[fullest],
        host_bytes=sum(rams[fullest].values()),
        host_limit=int(ram * HOST_SHARE) if ram else None,
        step=step,
        tokens_per_second=tokens_per_second,
    )


def squeeze_cache(items: dict[str, int], limit: int | None) -> dict[str, int]:
    """Return the items with the cache (`fragmentation`) shrunk to fit `limit` bytes, but not below the least it needs.

    Returns them unchanged on CPU and if `limit` is None.
    """
    if limit is None or "process" in items:
        return items
    spare = limit - sum(size for name, size in items.items() if name != "fragmentation")
    least = int(memory.FRAGMENTATION * memory.allocated_bytes(items))
    return items | {"fragmentation": max(least, min(items["fragmentation"], spare))}


def _with_generation_rows(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout, micro_batch: int, accumulation: int
) -> Layout:
    """Return the layout with its micro-batch and, for GRPO, how many answers a rank generates at once.

    A number in grpo.generation_rows is taken, up to all answers. auto: about equal chunks that fit in the smallest GPU
    less MARGIN, or in what training needs if more; all if no memory is known. PlanError for an unknown GPU.
    """
    layout = dataclasses.replace(layout, micro_batch=micro_batch, accumulates=accumulation > 1)
    answers = micro_batch * accumulation
    if recipe.grpo is None:
        return layout
    if recipe.grpo.generation_rows != "auto":
        return dataclasses.replace(layout, generation_rows=min(recipe.grpo.generation_rows, answers))

    def size(rows: int) -> int:
        """Return the bytes of a GPU when so many answers are generated at once, without a spare cache."""
        items = memory.gpu_items(shape, dataclasses.replace(layout, generation_rows=rows))
        return sum(squeeze_cache(items, 0).values())

    limits = [limit for host in cluster.hosts if (limit := device_memory(host)) is not None]
    room = max(int((1 - MARGIN) * min(limits)), size(0)) if limits else size(answers)
    most = max(1, bisect.bisect_right(range(1, answers + 1), room, key=size))
    return dataclasses.replace(layout, generation_rows=-(-answers // -(-answers // most)))


def threads(recipe: Recipe) -> int:
    """Return a rank's threads on the host's cores: OMP_NUM_THREADS of recipe.env if valid, else speed.THREADS."""
    wanted = recipe.env.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else speed.THREADS


def device_memory(host: Host) -> int | None:
    """Return Host.device_bytes, else a GPU's or CPU rank's usable bytes, or None. PlanError for an unknown GPU."""
    if host.device_bytes is not None:
        return host.device_bytes
    if host.gpu is not None:
        return gpus.find(host.gpu).usable_bytes
    return int(host.memory_bytes * HOST_SHARE) // host.slots if host.memory_bytes else None


def best(fitting: list[Candidate]) -> Candidate:
    """Return the simplest candidate with a worth within NEARLY_EQUAL of the highest; only roomy ones count, if any."""
    fitting = [each for each in fitting if each.is_roomy] or fitting
    most = max(each.worth for each in fitting)
    return min((each for each in fitting if each.worth >= (1 - NEARLY_EQUAL) * most), key=lambda each: each.complexity)


def _given_micro_batches(recipe: Recipe, cluster: Cluster) -> tuple[int, ...] | None:
    """Return the micro-batch of each host; None for auto. Raises PlanError if batch.micro_batch's keys do not match."""
    wanted = recipe.batch.micro_batch
    if wanted == "auto":
        return None
    if isinstance(wanted, int):
        return (wanted,) * len(cluster.hosts)
    keys = [_micro_batch_key(wanted, host) for host in cluster.hosts]
    named = zip(cluster.hosts, keys, strict=True)
    without = [f"{host.name} ({host.gpu or 'CPU ranks'})" for host, key in named if key is None]
    unused = [key for key in wanted if key not in keys]
    if without or unused:
        raise PlanError(
            "batch.micro_batch does not match the hosts",
            evidence="\n".join(
                [f"nothing for {', '.join(without)}"] * bool(without)
                + [f"no host is called, or has GPUs called, {', '.join(unused)}"] * bool(unused)
            ),
            fix="give rows for every host name or GPU kind of the cluster, one number for all, or auto",
        )
    return tuple(wanted[key] for key in keys if key)


def _micro_batch_key(wanted: dict[str, int], host: Host) -> str | None:
    """Return batch.micro_batch's key for a host: its name, else its GPU kind, or None. PlanError for unknown GPUs."""
    if host.name in wanted:
        return host.name
    kind = gpus.find(host.gpu).name if host.gpu else None
    return next((key for key in wanted if kind and key.casefold() == kind.casefold()), None)


def rows_per_micro_step(micro_batches: Sequence[int], cluster: Cluster) -> int:
    """Return the rows of a micro-step over all ranks."""
    return sum(rows * host.slots for rows, host in zip(micro_batches, cluster.hosts, strict=True))


def balance(ranks: Sequence[int], seconds: Sequence[Sequence[float]], wanted: int) -> tuple[int, ...] | None:
    """Return the micro-batch of each GPU kind with which `wanted` rows over all ranks take the least time.

    `ranks` are the numbers of ranks of each kind. `seconds[kind][m - 1]` is the time of a micro-batch of m rows,
    rising, for as many rows as fit its memory. Returns None when no micro-batches add up to `wanted`.
    """
    for limit in sorted(value for kind in seconds for value in kind):
        most = [bisect.bisect_right(kind, limit) for kind in seconds]
        total = sum(count * rows for count, rows in zip(ranks, most, strict=True))
        if total >= wanted and all(most) and (lowered := _lower_micro_batches(most, ranks, total - wanted)):
            return lowered
    return None


def _lower_micro_batches(most: Sequence[int], ranks: Sequence[int], excess: int) -> tuple[int, ...] | None:
    """Return `most` lowered by `excess` rows over all ranks, each at least 1; None if no such micro-batches exist."""
    if not most:
        return None if excess else ()
    for fewer in range(min(most[0] - 1, excess // ranks[0]) + 1):
        rest = _lower_micro_batches(most[1:], ranks[1:], excess - fewer * ranks[0])
        if rest is not None:
            return (most[0] - fewer, *rest)
    return None
