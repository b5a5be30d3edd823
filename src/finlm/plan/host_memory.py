"""Predict bytes of a host's RAM and NVMe disk for what ZeRO keeps off the GPUs, and for checkpoints being written.

torch's allocator of pinned memory hands out powers of two and keeps what is freed, which is why a host needs more than
16 bytes a parameter: 123 GiB instead of 107 for XuanYuan-6B's optimizer on one H200 (measured; predicted 121).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from finlm.plan.memory import GIB, Layout, bucket_sizes, gpu_items, share, trained_parameters
from finlm.recipe import shape as shapes
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

PROCESS_BYTES = 3 * GIB  # of a rank that drives a GPU; 2.0 to 3.1 GiB measured, 4 while it compiles
IN_MEMORY = "checkpoints in memory"  # the item of checkpoint.memory_minutes
NVME_PARAM_BUFFERS = 5  # DeepSpeed's default
NVME_STATE_BYTES = 16  # fp32 master, both moments and the gradient of a parameter, in files


def has_snapshot(recipe: Recipe) -> bool:
    """Return whether checkpoints are written from a copy in host memory while training goes on.

    So it is with checkpoint.asynchronous if every_steps or memory_minutes is set; one at the end alone needs no copy.
    """
    keep = recipe.checkpoint
    return keep.asynchronous and (keep.every_steps is not None or keep.memory_minutes is not None)


def neighbour_ranks(recipe: Recipe, cluster: Cluster, layout: Layout) -> int | None:
    """Return how many ranks' checkpoints in memory a host may hold for another host, at most.

    0 = each host holds only its own ranks' (a single host, or ZeRO stage 0); None = there are no checkpoints in memory.
    """
    if recipe.checkpoint.memory_minutes is None:
        return None
    alone = len(cluster.hosts) == 1 or layout.zero_stage == 0
    return 0 if alone else max(host.slots for host in cluster.hosts)


def host_items(
    shape: ModelShape, layout: Layout, slots: int, has_snapshot: bool = False, neighbour: int | None = None
) -> dict[str, int]:
    """Return peak bytes of a host with `slots` ranks, item by item; on CPU ranks these are the ranks themselves.

    `has_snapshot` says that a thread writes checkpoints from a copy of the rank's states in host memory. `neighbour` is
    the number of another host's ranks whose checkpoints in memory are here too (neighbour_ranks); with 0 only those of
    this host's ranks are here, with None there are no checkpoints in memory.
    """
    snapshot = {"checkpoint on its way": snapshot_bytes(shape, layout, slots)} if has_snapshot else {}
    if neighbour is not None:  # the newest, and the one that is being written
        each = snapshot_bytes(shape, layout, slots) + (snapshot_bytes(shape, layout, neighbour) if neighbour else 0)
        snapshot[IN_MEMORY] = 2 * each
    if layout.device == "cpu":
        rank = sum(gpu_items(shape, layout).values()) + sum(offloaded_bytes(shape, layout).values())
        return {"ranks": slots * rank} | snapshot
    items = {name: slots * size for name, size in offloaded_bytes(shape, layout).items()}
    return {"processes": slots * PROCESS_BYTES, **items} | snapshot


def snapshot_bytes(shape: ModelShape, layout: Layout, slots: int) -> int:
    """Return the bytes of a host's copies of states from which it writes checkpoints while training goes on.

    Counts the states of `slots` ranks; weights that all ranks share count once.
    """
    size = trained_parameters(shape, layout)
    frozen = shapes.frozen_parameters(shape, layout.trainable is not None, layout.weight_bytes is not None)
    kept = share(frozen, layout, 3) * (slots if layout.zero_stage == 3 else 1)
    weights = layout.element_bytes * (kept + (0 if layout.zero_stage == 3 else size))
    return weights + slots * 12 * share(size, layout, 1)


def nvme_bytes(shape: ModelShape, layout: Layout, slots: int) -> int:
    """Return the bytes of files on the NVMe disk of a host with `slots` ranks; 0 without nvme offload."""
    part = share(trained_parameters(shape, layout), layout, 1)
    states = NVME_STATE_BYTES * part if layout.offload_optimizer == "nvme" else 0
    weights = layout.element_bytes * share(shape.parameters, layout, 3) if layout.offload_param == "nvme" else 0
    return slots * (states + weights)


def offloaded_bytes(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Return the bytes of host memory, by item, for what ZeRO keeps off one rank's device; {} without offload."""
    e = layout.element_bytes
    part = share(trained_parameters(shape, layout), layout, 1)
    pin: Callable[[int], int] = pinned_bytes if layout.device == "cuda" else int
    items: dict[str, int] = {}
    if layout.offload_optimizer == "cpu":
        group = bucket_sizes(3, "cpu", shape).sub_group if layout.zero_stage == 3 else 4 * shape.layer_parameters
        masters = _in_groups(part, group, 4, pin)
        items = {"fp32 master": masters, "Adam states": 8 * part, "fp32 gradients": masters}
        # Stage 3 has one flat buffer; stages 1 and 2 pin a buffer for each parameter.
        each = _pinned_per_requested(shape, layout, 1) if layout.device == "cuda" else 1.0
        sums = pin(layout.gradient_bytes * part) if layout.zero_stage == 3 else int(e * part * each)
        items["sums of gradients"] = sums
    elif layout.offload_optimizer == "stream":
        items = {"fp32 master": 4 * part, "Adam states": 8 * part}
    elif layout.offload_optimizer == "nvme":
        # Master, both moments and the gradient of one sub-group in memory, read and written in turn.
        group = min(part, bucket_sizes(3, "nvme", shape).sub_group)
        items = {"fp32 gradients": 4 * part, "swap buffers": 4 * 4 * group}
    held = share(shape.parameters, layout, 1)
    if layout.offload_param == "cpu":
        # Pinned parameter by parameter when the model is built, then flat; the first copy stays in the allocator.
        items["weights"] = _in_groups(held, bucket_sizes(3, "cpu", shape).sub_group, e, pin)
        if layout.device == "cuda":
            items["weights, first copy"] = int(e * held * _pinned_per_requested(shape, layout, layout.world_size))
    elif layout.offload_param == "nvme":
        kept = min(held, bucket_sizes(3, "none", shape).live)
        largest = max(shape.embedding_parameters, *shape.layer_sizes)
        items["weight buffers"] = e * (kept + NVME_PARAM_BUFFERS * min(held, largest))
    return items


def pinned_bytes(size: int) -> int:
    """Return the bytes that the allocator of pinned memory takes for a request: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _in_groups(parameters: int, group: int, element_bytes: int, pin: Callable[[int], int]) -> int:
    """Return the bytes of parameters allocated in groups of `group`; `pin` rounds the bytes of each group up."""
    whole, rest = divmod(parameters, max(1, group))
    return whole * pin(element_bytes * group) + (pin(element_bytes * rest) if rest else 0)


def _pinned_per_requested(shape: ModelShape, layout: Layout, ranks: int) -> float:
    """Return the ratio, at least 1, of allocated to requested bytes when a rank pins its part of each matrix by itself.

    A part is 1 / `ranks` of a matrix.
    """
    e = layout.element_bytes
    matrices = [math.prod(sizes) for _, sizes in shape.tensors if len(sizes) > 1]
    counts = [(shape.layers, size) for size in matrices] + [(2 - shape.tied, shape.hidden * shape.vocab)]
    requested = sum(count * e * size // ranks for count, size in counts)
    return sum(count * pinned_bytes(e * size // ranks) for count, size in counts) / requested
