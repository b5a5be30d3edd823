"""Every configuration the recipe allows, with its memory and time on this cluster, and the fastest that fits.

A few hundred candidates at most, so all are computed: ZeRO stage x offload x recompute x micro-batch (split.py).

"auto" leaves out what DeepSpeed 0.19.8 does badly: NVMe (the optimizer state does not survive a resume) and stage 0 (in
16 bits it takes a step on zero gradients before the first one, so AdamW decays the weights once and Adam's bias
correction is one step ahead; in fp32 it reports no gradient norm). Stage 1 costs the same on one GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from finlm.plan import gpus, host_memory, memory, speed, split, stages
from finlm.plan.memory import Layout
from finlm.plan.stages import is_quantized
from finlm.recipe import rules
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

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
    """One configuration with what it needs and how fast it is; memory figures of the host that is tightest.

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
        """True when hosts have different micro-batches."""
        return len(set(self.micro_batches)) > 1

    @property
    def over(self) -> float:
        """Factor by which it misses the tighter limit; <= 1 fits."""
        gpu = self.gpu_bytes / self.gpu_limit if self.gpu_limit else 0.0
        host = self.host_bytes / self.host_limit if self.host_limit else 0.0
        return max(gpu, host)

    @property
    def fits(self) -> bool:
        """True when device and host memory suffice, margins included."""
        return self.over <= 1.0

    @property
    def is_roomy(self) -> bool:
        """True when a GPU keeps a margin even beside what its allocator cannot give back."""
        if self.gpu_limit is None or self.layout.device == "cpu":
            return True
        least = memory.FRAGMENTATION * memory.allocated_bytes(self.gpu_items)
        return self.gpu_bytes - self.gpu_items["fragmentation"] + least <= (1 - MARGIN) * self.gpu_limit

    @property
    def worth(self) -> float:
        """Tokens/s; less with offload and ZeRO-3, whose speed depends most on the host, which the plan knows least."""
        is_offloaded = self.layout.offload_optimizer != "none" or self.layout.offload_param != "none"
        doubt = OFFLOAD_DOUBT * is_offloaded + ZERO3_DOUBT * (self.layout.zero_stage == 3)
        return (1 - doubt) * (self.tokens_per_second or 0.0)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Order of preference among equally fast candidates: fewer moving parts first, then larger micro-batches."""
        layout = self.layout
        offloads = (layout.offload_optimizer != "none") + (layout.offload_param != "none")
        recompute = RECOMPUTE.index(layout.recompute)
        return offloads, layout.zero_stage, recompute, self.is_unequal, -layout.micro_batch


@dataclass(frozen=True)
class Choices:
    """The values each decision may take."""

    stages: tuple[int, ...]
    offload_optimizer: tuple[str, ...]
    offload_param: tuple[str, ...]
    recompute: tuple[str, ...]


def allowed(recipe: Recipe) -> Choices:
    """What the recipe leaves open; an explicit value is the only choice."""
    zero = recipe.zero
    quantized = is_quantized(recipe)
    stages: tuple[int, ...] = (1, 2) if quantized else (1, 2, 3)
    params = ("none",) if quantized else ("none", "cpu")
    if zero.hpz_partition_size > 1 or zero.quantized_weights or zero.quantized_gradients:
        stages = (3,)
    return Choices(
        stages=stages if zero.stage == "auto" else (zero.stage,),
        offload_optimizer=("none", "stream", "cpu") if zero.offload_optimizer == "auto" else (zero.offload_optimizer,),
        offload_param=params if zero.offload_param == "auto" else (zero.offload_param,),
        recompute=RECOMPUTE if recipe.train.recompute == "auto" else (recipe.train.recompute,),
    )


def is_compiled(recipe: Recipe, cluster: Cluster) -> bool:
    """torch.compile pays on GPUs for rows of one length; on CPU its compiler takes longer than small models train."""
    is_worth = not cluster.is_cpu and not is_quantized(recipe) and recipe.stage in rules.ROWS_OF_ONE_LENGTH
    return is_worth if recipe.train.compile == "auto" else recipe.train.compile


def relaxed(recipe: Recipe) -> Recipe:
    """The recipe as if it said auto everywhere."""
    zero, train = recipe.zero.model_copy(update=AUTO), recipe.train.model_copy(update={"recompute": "auto"})
    batch = recipe.batch.model_copy(update={"micro_batch": "auto"})
    return recipe.model_copy(update={"zero": zero, "train": train, "batch": batch})


def candidates(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, precision: str, rows_per_step: int
) -> Iterator[Candidate]:
    """Every combination that the recipe allows and DeepSpeed accepts."""
    choices, fp32_gradients = allowed(recipe), recipe.train.grad_accum_dtype == "fp32" and precision != "fp32"
    for stage, optimizer, param, recompute in itertools.product(
        choices.stages, choices.offload_optimizer, choices.offload_param, choices.recompute
    ):
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
            **stages.layout(recipe, shape),
        )
        for micro_batches, accumulation in _micro_batches(recipe, cluster, shape, layout, rows_per_step):
            yield measure(recipe, cluster, shape, layout, micro_batches, accumulation)


def _micro_batches(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout, rows_per_step: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(micro-batch of each host, micro-steps): those given, else equal ones, and balanced ones where GPUs differ."""
    given = split.given(recipe, cluster)
    if given is not None:
        yield given, max(1, round(rows_per_step / split.rows(given, cluster)))
        return
    hosts, rows_per_rank = len(cluster.hosts), max(1, rows_per_step // cluster.world_size)
    for rows in range(1, min(rows_per_rank, MAX_MICRO_BATCH[layout.device]) + 1):
        if rows_per_rank % rows == 0:
            yield (rows,) * hosts, rows_per_rank // rows
    if recipe.stage in rules.ROWS_OF_ONE_LENGTH:  # the others weigh every rank alike
        yield from _unequal(cluster, shape, layout, rows_per_step)


def _unequal(
    cluster: Cluster, shape: ModelShape, layout: Layout, rows_per_step: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """As _micro_batches: for each number of micro-steps the rows with which unlike GPUs need about the same time."""
    ranks: dict[str, int] = {}
    for host in cluster.hosts:
        ranks[host.gpu or ""] = ranks.get(host.gpu or "", 0) + host.slots
    if len(ranks) == 1:
        return
    padded = dataclasses.replace(shape, vocab=shape.padded_vocab)
    layouts = [dataclasses.replace(layout, micro_batch=rows) for rows in range(1, MAX_MICRO_BATCH["cuda"] + 1)]
    sizes = [sum(memory.gpu_items(padded, one).values()) for one in layouts]  # rises with the rows
    seconds = []
    for kind in map(gpus.find, ranks):
        fitting = layouts[: bisect.bisect_right(sizes, kind.memory_bytes)]
        seconds.append([speed.compute_seconds(padded, one, kind) for one in fitting])
    for accumulation in range(1, rows_per_step // cluster.world_size + 1):
        if rows_per_step % accumulation == 0:
            found = split.balanced(list(ranks.values()), seconds, rows_per_step // accumulation)
            if found is not None and len(set(found)) > 1:
                of_kind = dict(zip(ranks, found, strict=True))
                yield tuple(of_kind[host.gpu or ""] for host in cluster.hosts), accumulation


def _need(shape: ModelShape, layout: Layout, kind: gpus.Gpu) -> int:
    return sum(memory.squeezed(memory.gpu_items(shape, layout), kind.memory_bytes).values())


def measure(
    recipe: Recipe,
    cluster: Cluster,
    shape: ModelShape,
    layout: Layout,
    micro_batches: tuple[int, ...],
    accumulation: int,
) -> Candidate:
    """Memory and speed of a layout on this cluster with these micro-batches of its hosts."""
    if layout.device == "cuda":
        shape = dataclasses.replace(shape, vocab=shape.padded_vocab)
    hosts = list(zip(cluster.hosts, micro_batches, strict=True))
    same = dataclasses.replace(layout, accumulates=accumulation > 1)
    layouts = {rows: dataclasses.replace(same, micro_batch=rows) for rows in dict.fromkeys(micro_batches)}
    kinds = {(one.slots, one.gpu, one.memory_bytes, rows): one for one, rows in hosts}  # each kind of host once
    needed = {rows: memory.gpu_items(shape, one) for rows, one in layouts.items()}
    items = {key: memory.squeezed(needed[key[-1]], device_memory(one)) for key, one in kinds.items()}
    sizes = {key: sum(each.values()) for key, each in items.items()}
    limits = {key: device_memory(one) for key, one in kinds.items()}
    tight = max(kinds, key=lambda key: sizes[key] / (limits[key] or float("inf")))
    has_snapshot = recipe.checkpoint.asynchronous and recipe.checkpoint.every_steps is not None
    rams = {key: host_memory.host_items(shape, layouts[key[-1]], key[0], has_snapshot) for key in kinds}
    known = {key: sum(rams[key].values()) / one.memory_bytes for key, one in kinds.items() if one.memory_bytes}
    fullest = max(known, key=lambda key: known[key]) if known else max(kinds, key=lambda key: sum(rams[key].values()))
    ram = kinds[fullest].memory_bytes
    step, tokens_per_second, seconds = None, None, {}
    if layout.device == "cuda":
        zero = recipe.zero
        seconds = {
            (gpu, rows): speed.compute_seconds(shape, layouts[rows], gpus.find(gpu or "")) for _, gpu, _, rows in kinds
        }
        step = speed.step_time(
            shape,
            layout,
            [speed.Rank(gpus.find(gpu or ""), slots, rows) for slots, gpu, _, rows in kinds],
            len(cluster.hosts),
            accumulation,
            cluster.network_gbit,
            quantized_weights=zero.quantized_weights,
            quantized_gradients=zero.quantized_gradients,
            threads=threads(recipe),
        )
        tokens = split.rows(micro_batches, cluster) * layout.sequence_length * accumulation
        tokens_per_second = tokens / step.seconds
    return Candidate(
        layout=layouts[max(micro_batches)],
        micro_batches=micro_batches,
        accumulation=accumulation,
        host_gpu_bytes=tuple(sizes[one.slots, one.gpu, one.memory_bytes, rows] for one, rows in hosts),
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


def threads(recipe: Recipe) -> int:
    """Threads of a rank on the host's cores: the recipe's OMP_NUM_THREADS, else what the launcher sets for offload."""
    wanted = recipe.env.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else speed.THREADS


def device_memory(host: Host) -> int | None:
    """Memory of one of the host's GPUs; on CPU a rank's share of it; None when unknown."""
    if host.gpu is not None:
        return gpus.find(host.gpu).memory_bytes
    return int(host.memory_bytes * HOST_SHARE) // host.slots if host.memory_bytes else None


def best(found: list[Candidate]) -> Candidate:
    """The fastest of those with a margin, if any has one; among those nearly as fast the simplest."""
    found = [one for one in found if one.is_roomy] or found
    fastest = max(one.worth for one in found)
    return min((one for one in found if one.worth >= (1 - NEARLY_EQUAL) * fastest), key=lambda one: one.complexity)


def on_more_hosts(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with every host `factor` times, for arithmetic only: names repeat."""
    return dataclasses.replace(cluster, hosts=cluster.hosts * factor)
