"""Every configuration the recipe allows, with its memory and time on this cluster, and the fastest that fits.

A few hundred candidates at most, so all are computed: ZeRO stage x offload x recompute x micro-batch.

"auto" leaves out what DeepSpeed 0.19.8 does badly: NVMe (the optimizer state does not survive a resume) and stage 0 (in
16 bits it takes a step on zero gradients before the first one, so AdamW decays the weights once and Adam's bias
correction is one step ahead; in fp32 it reports no gradient norm). Stage 1 costs the same on one GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from finlm.plan import gpus, memory, speed
from finlm.plan.memory import Layout
from finlm.recipe import rules
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

HOST_SHARE = 0.9  # of a host's RAM; the rest is the system's and the page cache's
MAX_MICRO_BATCH = 64
CPU_MAX_MICRO_BATCH = 8
RECOMPUTE = ("none", "selective", "full")
NEARLY_EQUAL = 0.02  # speeds closer than this are equal, and the simpler candidate wins


@dataclass(frozen=True)
class Candidate:
    """One configuration with what it needs and how fast it is; memory figures of the host that is tightest."""

    layout: Layout
    accumulation: int
    gpu_items: dict[str, int]
    gpu_bytes: int
    gpu_limit: int | None
    host_bytes: int
    host_limit: int | None
    tokens_per_second: float | None

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
    def complexity(self) -> tuple[int, ...]:
        """Order of preference among equally fast candidates: fewer moving parts first, then larger micro-batches."""
        layout = self.layout
        offloads = (layout.offload_optimizer != "none") + (layout.offload_param != "none")
        return offloads, layout.zero_stage, RECOMPUTE.index(layout.recompute), -layout.micro_batch


@dataclass(frozen=True)
class Choices:
    """The values each decision may take."""

    stages: tuple[int, ...]
    offload_optimizer: tuple[str, ...]
    offload_param: tuple[str, ...]
    recompute: tuple[str, ...]
    micro_batches: tuple[int, ...]


def allowed(recipe: Recipe, cluster: Cluster, rows_per_rank: int) -> Choices:
    """What the recipe leaves open; an explicit value is the only choice."""
    zero = recipe.zero
    stages: tuple[int, ...] = (1, 2, 3)
    if zero.hpz_partition_size > 1 or zero.quantized_weights or zero.quantized_gradients:
        stages = (3,)
    return Choices(
        stages=stages if zero.stage == "auto" else (zero.stage,),
        offload_optimizer=("none", "cpu") if zero.offload_optimizer == "auto" else (zero.offload_optimizer,),
        offload_param=("none", "cpu") if zero.offload_param == "auto" else (zero.offload_param,),
        recompute=RECOMPUTE if recipe.train.recompute == "auto" else (recipe.train.recompute,),
        micro_batches=_micro_batches(recipe, cluster, rows_per_rank),
    )


def is_compiled(recipe: Recipe, cluster: Cluster) -> bool:
    """torch.compile pays on GPUs; on CPU its compiler takes longer than small models train."""
    return not cluster.is_cpu if recipe.train.compile == "auto" else recipe.train.compile


def relaxed(recipe: Recipe) -> Recipe:
    """The recipe as if it said auto everywhere."""
    return recipe.model_copy(
        update={
            "zero": recipe.zero.model_copy(
                update={"stage": "auto", "offload_optimizer": "auto", "offload_param": "auto"}
            ),
            "train": recipe.train.model_copy(update={"recompute": "auto"}),
            "batch": recipe.batch.model_copy(update={"micro_batch": "auto"}),
        }
    )


def _micro_batches(recipe: Recipe, cluster: Cluster, rows_per_rank: int) -> tuple[int, ...]:
    if recipe.batch.micro_batch != "auto":
        return (recipe.batch.micro_batch,)
    if cluster.is_cpu:
        # Two cores gain nothing from larger ones, and activations stay in cache.
        powers = [2**n for n in range(4) if rows_per_rank % 2**n == 0 and 2**n <= CPU_MAX_MICRO_BATCH]
        return (max(powers),)
    return tuple(n for n in range(1, min(rows_per_rank, MAX_MICRO_BATCH) + 1) if rows_per_rank % n == 0)


def candidates(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, precision: str, rows_per_rank: int
) -> Iterator[Candidate]:
    """Every combination that the recipe allows and DeepSpeed accepts."""
    choices = allowed(recipe, cluster, rows_per_rank)
    for stage, optimizer, param, recompute, rows in itertools.product(
        choices.stages,
        choices.offload_optimizer,
        choices.offload_param,
        choices.recompute,
        choices.micro_batches,
    ):
        is_refused = (param != "none" and stage < 3) or (optimizer != "none" and stage == 0)
        is_refused |= precision == "fp8" and stage not in rules.FP8_STAGES
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
            micro_batch=rows,
            sequence_length=recipe.batch.sequence_length,
            world_size=cluster.world_size,
            hpz_partition_size=recipe.zero.hpz_partition_size,
            compiled=is_compiled(recipe, cluster),
        )
        yield measure(recipe, cluster, shape, layout, max(1, round(rows_per_rank / rows)))


def measure(recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout, accumulation: int) -> Candidate:
    """Memory and speed of one layout on this cluster."""
    if layout.device == "cuda":
        shape = dataclasses.replace(shape, vocab=shape.padded_vocab)
    items = memory.gpu_items(shape, layout)
    kinds = dict.fromkeys((host.slots, host.gpu, host.memory_bytes) for host in cluster.hosts)  # each kind once
    hosts = [(sum(memory.host_items(shape, layout, slots).values()), limit) for slots, _, limit in kinds]
    known = [(needed / limit, needed, int(limit * HOST_SHARE)) for needed, limit in hosts if limit]
    host_bytes, host_limit = max(known)[1:] if known else (max(needed for needed, _ in hosts), None)
    tokens_per_second = None
    if layout.device == "cuda":
        zero = recipe.zero
        step = speed.step_time(
            shape,
            layout,
            [speed.Rank(gpus.find(gpu or ""), slots) for slots, gpu, _ in kinds],
            len(cluster.hosts),
            accumulation,
            cluster.network_gbit,
            quantized_weights=zero.quantized_weights,
            quantized_gradients=zero.quantized_gradients,
        )
        tokens_per_second = layout.tokens * layout.world_size * accumulation / step.seconds
    return Candidate(
        layout=layout,
        accumulation=accumulation,
        gpu_items=items,
        gpu_bytes=sum(items.values()),
        gpu_limit=device_memory(cluster),
        host_bytes=host_bytes,
        host_limit=host_limit,
        tokens_per_second=tokens_per_second,
    )


def device_memory(cluster: Cluster) -> int | None:
    """Memory of the smallest GPU; on CPU a rank's share of its host; None when unknown."""
    if not cluster.is_cpu:
        return min(gpus.find(host.gpu or "").memory_bytes for host in cluster.hosts)
    shares = [int(host.memory_bytes * HOST_SHARE) // host.slots for host in cluster.hosts if host.memory_bytes]
    return min(shares) if shares else None


def best(found: list[Candidate]) -> Candidate:
    """The fastest; among those nearly as fast the simplest."""
    speeds = [one.tokens_per_second for one in found if one.tokens_per_second is not None]
    if speeds:
        found = [one for one in found if (one.tokens_per_second or 0.0) >= (1 - NEARLY_EQUAL) * max(speeds)]
    return min(found, key=lambda one: one.complexity)


def on_more_hosts(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with every host `factor` times, for arithmetic only: names repeat."""
    return dataclasses.replace(cluster, hosts=cluster.hosts * factor)
