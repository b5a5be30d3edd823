"""Bytes of a host's RAM and of its NVMe disk for what ZeRO keeps off the GPUs, and for checkpoints on their way out.

torch's allocator of pinned memory hands out powers of two and keeps what is freed, which is why a host needs more than
16 bytes a parameter: 123 GiB instead of 107 for XuanYuan-6B's optimizer on one H200 (measured; predicted 121).
"""

from __future__ import annotations

from collections.abc import Callable

from finlm.plan import stages
from finlm.plan.buckets import buckets
from finlm.plan.memory import GIB, NVME_PARAM_BUFFERS, Layout, gpu_items, share, trained
from finlm.recipe.shape import ModelShape

PROCESS_BYTES = 3 * GIB  # of a rank that drives a GPU; 2.0 to 3.1 GiB measured, 4 while it compiles
NVME_STATE_BYTES = 16  # fp32 master, both moments and the gradient of a parameter, in files


def host_items(shape: ModelShape, layout: Layout, slots: int, has_snapshot: bool = False) -> dict[str, int]:
    """Peak bytes of a host with `slots` ranks, item by item; on CPU ranks these are the ranks themselves.

    has_snapshot: checkpoints are written by a thread, from a copy of the rank's states in host memory.
    """
    snapshot = {"checkpoint on its way": snapshot_bytes(shape, layout, slots)} if has_snapshot else {}
    if layout.device == "cpu":
        rank = sum(gpu_items(shape, layout).values()) + sum(offloaded(shape, layout).values())
        return {"ranks": slots * rank} | snapshot
    items = {name: slots * size for name, size in offloaded(shape, layout).items()}
    return {"processes": slots * PROCESS_BYTES, **items} | snapshot


def snapshot_bytes(shape: ModelShape, layout: Layout, slots: int) -> int:
    """Bytes of the copy that an asynchronous checkpoint is written from: ranks' states, once a host the weights."""
    size = trained(shape, layout)
    frozen = stages.frozen(shape, layout.trainable is not None, layout.weight_bytes is not None)
    kept = share(frozen, layout, 3) * (slots if layout.zero_stage == 3 else 1)
    weights = layout.element_bytes * (kept + (0 if layout.zero_stage == 3 else size))
    return weights + slots * 12 * share(size, layout, 1)


def nvme_bytes(shape: ModelShape, layout: Layout, slots: int) -> int:
    """Bytes in files on a host's NVMe disk."""
    own = share(trained(shape, layout), layout, 1)
    states = NVME_STATE_BYTES * own if layout.offload_optimizer == "nvme" else 0
    weights = layout.element_bytes * share(shape.parameters, layout, 3) if layout.offload_param == "nvme" else 0
    return slots * (states + weights)


def offloaded(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Host bytes of one rank for what ZeRO keeps off the device."""
    e = layout.element_bytes
    own = share(trained(shape, layout), layout, 1)
    pin: Callable[[int], int] = pinned if layout.device == "cuda" else int
    items: dict[str, int] = {}
    if layout.offload_optimizer == "cpu":
        group = buckets(3, "cpu", shape).sub_group if layout.zero_stage == 3 else 4 * shape.layer_parameters
        masters = _in_groups(own, group, 4, pin)
        items = {"fp32 master": masters, "Adam states": 8 * own, "fp32 gradients": masters}
        # Stage 3 has one flat buffer; stages 1 and 2 pin a buffer for each parameter.
        each = _rounding(shape, layout, 1) if layout.device == "cuda" else 1.0
        items["sums of gradients"] = pin(layout.gradient_bytes * own) if layout.zero_stage == 3 else int(e * own * each)
    elif layout.offload_optimizer == "stream":
        items = {"fp32 master": 4 * own, "Adam states": 8 * own}
    elif layout.offload_optimizer == "nvme":
        # Master, both moments and the gradient of one sub-group in memory, read and written in turn.
        group = min(own, buckets(3, "nvme", shape).sub_group)
        items = {"fp32 gradients": 4 * own, "swap buffers": 4 * 4 * group}
    held = share(shape.parameters, layout, 1)
    if layout.offload_param == "cpu":
        # Pinned parameter by parameter when the model is built, then flat; the first copy stays in the allocator.
        items["weights"] = _in_groups(held, buckets(3, "cpu", shape).sub_group, e, pin)
        if layout.device == "cuda":
            items["weights, first copy"] = int(e * held * _rounding(shape, layout, layout.world_size))
    elif layout.offload_param == "nvme":
        kept = min(held, buckets(3, "none", shape).live)
        largest = max(shape.vocab, shape.ffn) * shape.hidden
        items["weight buffers"] = e * (kept + NVME_PARAM_BUFFERS * min(held, largest))
    return items


def pinned(size: int) -> int:
    """Bytes that the allocator of pinned memory takes for a request: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _in_groups(parameters: int, group: int, element_bytes: int, pin: Callable[[int], int]) -> int:
    """Bytes of parameters allocated in groups."""
    whole, rest = divmod(parameters, max(1, group))
    return whole * pin(element_bytes * group) + (pin(element_bytes * rest) if rest else 0)


def _rounding(shape: ModelShape, layout: Layout, ranks: int) -> float:
    """Pinned over requested bytes when every matrix is allocated by itself, in `ranks` parts."""
    e, width = layout.element_bytes, shape.hidden // shape.heads * shape.kv_heads
    hidden = shape.hidden
    matrices = [(2, hidden * hidden), (2, hidden * width), (3, hidden * shape.ffn)]
    counts = [(shape.layers * count, size) for count, size in matrices] + [(2 - shape.tied, hidden * shape.vocab)]
    requested = sum(count * e * size // ranks for count, size in counts)
    return sum(count * pinned(e * size // ranks) for count, size in counts) / requested
