"""Bytes on a GPU (or a CPU rank) of one training configuration, item by item, without torch.

tests/plan/test_measured.py holds it to allocated peaks of runs on H200s (benchmarks/gpu_plan.py; DeepSpeed 0.19.8).
Context and fragmentation come on top; host_memory.py says what the host needs. Not modelled: copies while a checkpoint
is loaded, a model that is first built whole on the host.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from finlm.plan.buckets import (
    ON_HOST,
    STREAM_SETS,
    Offload,
    OffloadParam,
    buckets,
    is_contiguous,
    most_reduced,
    optimizer_group,
)
from finlm.recipe.shape import ModelShape

GIB = 2**30
CONTEXT_BYTES = {False: int(1.67 * GIB), True: int(2.05 * GIB)}  # CUDA's; with NCCL's channels. Measured on H200
CPU_PROCESS_BYTES = int(0.5 * GIB)  # a rank with torch, transformers and deepspeed loaded, measured on CPU
CPU_ZERO3_BYTES = int(0.25 * GIB)  # more with ZeRO-3, measured on CPU
CPU_FRAGMENTATION = 0.8  # of what comes and goes: glibc keeps freed blocks, eager fp32 attention copies; measured
CACHE = {False: 0.03, True: 0.083}  # share the allocator keeps beside what is allocated: on one GPU, on several
FRAGMENTATION = 0.015  # the part of it that it cannot give back when memory runs short
WORKSPACE_BYTES = 64 << 20  # cuBLAS's on Hopper, and small tensors
UNPACKED = 16  # bytes a weight while 4 bits become a matrix: 8-byte indices, copies (read in torchao 0.18)
NVME_PARAM_BUFFERS = 5  # DeepSpeed's default
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # fp8: weights and activations stay bf16
LOGITS_SLICE_BYTES = {"cuda": 2**30, "cpu": 2**24}  # train/loss.py: logits that exist at once; on CPU they fit a cache


@dataclass(frozen=True)
class Layout:
    """What memory depends on besides the model's shape."""

    device: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp16", "fp32", "fp8"]
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Offload
    offload_param: OffloadParam
    recompute: Literal["none", "selective", "full"]
    micro_batch: int
    sequence_length: int
    world_size: int
    hpz_partition_size: int = 1
    compiled: bool = False
    fp32_gradients: bool = False  # sums of gradients, where the weights have 16 bits
    accumulates: bool = True  # more than one micro-step: gradients of the earlier ones live during the forward pass
    trainable: int | None = None  # parameters of adapters; None = all of the model's are trained
    weight_bytes: float | None = None  # of a frozen weight, when it is quantized; None = as an activation's
    sequences: int = 1  # of a row: 2 where preferences are compared
    has_reference: bool = False  # a second, frozen model
    has_judge: bool = False  # a reward model of the same shape, whole on every rank
    has_vocabulary_head: bool = True

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that waits for the step."""
        return 4 if self.fp32_gradients else self.element_bytes

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequence_length * self.sequences


def layer_activation_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes a token keeps in one decoder layer for the backward pass, flash attention in any case.

    Compiled: inputs and outputs of both norms 8h, q and attention output 4h, k and v 4 kv, gate and up 4f (bf16 bytes;
    109.6 KB at h 4096, f 11008; measured 109.5). Eager norms keep an fp32 input beside (8h more), eager SwiGLU two more
    f. Selective recompute keeps nothing of the feed-forward block but its input.
    """
    kv = shape.hidden // shape.heads * shape.kv_heads
    attention, ffn = 12 * shape.hidden + 4 * kv, 4 * shape.ffn
    if not layout.compiled:
        attention, ffn = attention + 8 * shape.hidden, ffn + 4 * shape.ffn
    if layout.precision == "fp8":
        attention -= 4 * shape.hidden  # what the linear layers keep of their inputs has one byte
    kept = attention if layout.recompute == "selective" else attention + ffn
    return kept * layout.element_bytes // 2


def kept_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of activations that all layers keep of one micro-batch until the backward pass."""
    if layout.recompute == "full":
        # Measured with ZeRO-3 on one and two GPUs: something as wide as the feed-forward block stays too.
        width = shape.hidden + (shape.ffn if layout.zero_stage == 3 else 0)
        return shape.layers * layout.tokens * width * layout.element_bytes
    return shape.layers * layout.tokens * layer_activation_bytes(shape, layout)


def backward_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes that the backward pass of one layer needs beside what was kept: what it recomputes, and its temporaries.

    Temporaries are the gradients of gate, up and their product, and of three tensors of hidden size.
    """
    whole = layout.tokens * layer_activation_bytes(shape, dataclasses.replace(layout, recompute="none"))
    kept = layout.tokens * layer_activation_bytes(shape, layout) if layout.recompute == "selective" else whole
    recomputed = whole if layout.recompute == "full" else whole - kept
    return recomputed + 3 * layout.tokens * (shape.ffn + shape.hidden) * layout.element_bytes


def logits_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes at the peak of the loss (train/loss.py): slices of logits, and the gradients that it forms at once.

    One slice is logits and their gradient; from the second on the gradient of the slice before still exists, and so
    does the head's. Uncompiled, on CPU, log-probabilities and their exponentials exist beside the logits.
    """
    e = layout.element_bytes
    hidden = 4 * layout.tokens * shape.hidden * e  # the last layer's output, its norm twice, and its gradient
    if not layout.has_vocabulary_head:
        return hidden
    whole = layout.tokens * shape.vocab * e
    count = -(-whole // LOGITS_SLICE_BYTES[layout.device])
    head = shape.vocab * shape.hidden * e
    if layout.device == "cpu":
        return hidden + head + 4 * whole // count
    return hidden + (2 * whole if count == 1 else head + 3 * whole // count)


def gpu_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Peak bytes of one rank on its device, item by item; the sum is the peak.

    The peak is at the loss, in the backward pass of the last or of the first layer, or in the optimizer step, when
    activations are gone but gradients exist flat and in fp32 as well. The items are those of the phase that needs most;
    what the step needs beyond the others is one item.
    """
    items = _state_items(shape, layout)
    phases = _phases(shape, layout)
    items |= max(phases, key=lambda phase: sum(phase.values()))  # type: ignore[attr-defined]
    working = max(sum(phase.values()) for phase in phases)
    items["optimizer step"] = max(0, _step_bytes(shape, layout) - working)
    if layout.device == "cpu":
        passing = items["activations"] + items.get("logits and loss", 0) + items.get("backward of a layer", 0)
        process = CPU_PROCESS_BYTES + (CPU_ZERO3_BYTES if layout.zero_stage == 3 else 0)
        return items | {"fragmentation": int(CPU_FRAGMENTATION * passing), "process": process}
    items["workspace"] = WORKSPACE_BYTES
    cache = CACHE[layout.world_size > 1] + (0.22 if layout.offload_param != "none" and layout.world_size > 1 else 0)
    fragmentation = int(cache * sum(items.values()))
    return items | {"context": CONTEXT_BYTES[layout.world_size > 1], "fragmentation": fragmentation}


def squeezed(items: dict[str, int], limit: int | None) -> dict[str, int]:
    """The items on a GPU of `limit` bytes: the allocator's cache takes what is left, but cannot fall below a share."""
    if limit is None or "process" in items:
        return items
    spare = limit - sum(size for name, size in items.items() if name != "fragmentation")
    least = int(FRAGMENTATION * allocated_bytes(items))
    return items | {"fragmentation": max(least, min(items["fragmentation"], spare))}


def allocated_bytes(items: dict[str, int]) -> int:
    """The part of gpu_items that torch.cuda.max_memory_allocated reports."""
    return sum(size for name, size in items.items() if name not in ("context", "process", "fragmentation"))


def trained(shape: ModelShape, layout: Layout) -> int:
    """Parameters that have gradients and optimizer states."""
    return shape.parameters if layout.trainable is None else layout.trainable


def share(parameters: int, layout: Layout, from_stage: int) -> int:
    """Parameters a rank holds of something that is partitioned from a stage on."""
    return -(-parameters // (layout.world_size if layout.zero_stage >= from_stage else 1))


def _state_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    e, own, on_device = layout.element_bytes, share(trained(shape, layout), layout, 1), layout.offload_param == "none"
    of_weight = e if layout.weight_bytes is None else layout.weight_bytes
    weights = int(of_weight * share(shape.parameters, layout, 3))
    if layout.trainable is not None:
        weights += e * share(layout.trainable, layout, 3)
    items = {"weights": weights if on_device else 0}
    items |= {"matrix made whole": UNPACKED * shape.hidden * shape.ffn} if layout.weight_bytes is not None else {}
    if layout.has_reference:
        items["reference model"] = e * share(shape.parameters, layout, 3) if on_device else 0
    items |= {"reward model": e * shape.parameters} if layout.has_judge else {}
    if layout.zero_stage == 3:
        sizes = buckets(3, layout.offload_optimizer, shape)
        if layout.world_size > 1 or not on_device:
            items["gathered weights"] = e * min(shape.parameters, max(sizes.live, shape.layer_parameters))
        if layout.hpz_partition_size > 1:
            items["hpZ copy"] = e * shape.parameters // layout.hpz_partition_size
    if layout.offload_optimizer == "none":
        # Stages 1-3 keep an fp32 copy even when the model is fp32 (stage_1_and_2.py: clone().float()).
        has_master = layout.zero_stage > 0 or e == 2
        items["fp32 master"] = 4 * own if has_master else 0
        items["Adam states"] = 8 * own
    return items


def _phases(shape: ModelShape, layout: Layout) -> list[dict[str, int]]:
    """What lives beside the states: at the loss; in the last layer's backward; a full bucket; the first layer's."""
    e, size = layout.element_bytes, trained(shape, layout)
    # With offload, stages 2 and 3 send gradients to the host as soon as they are reduced.
    sent = layout.offload_optimizer in ON_HOST and layout.zero_stage >= 2
    gradients = 0 if sent else layout.gradient_bytes * share(size, layout, 2)
    before = gradients if layout.accumulates else 0
    kept = kept_bytes(shape, layout)
    bucket, reduced, filled = _bucket_bytes(shape, layout)
    layer = backward_bytes(shape, layout)
    if layout.zero_stage == 3 and layout.world_size > 1 and layout.recompute != "full":
        kept += layout.tokens * layer_activation_bytes(shape, dataclasses.replace(layout, recompute="none"))  # measured
    head = (shape.vocab + layout.tokens) * shape.hidden * e
    coming = e * share(shape.embedding_parameters + shape.layer_parameters, layout, 2)  # embedding, layer at work
    # Stage 2 has them among the reduced ones. Sums in fp32 are counted beside those, though DeepSpeed's source adds
    # each bucket to them at once: not measured.
    late = 0 if layout.zero_stage == 2 and not layout.fp32_gradients else max(0, gradients - coming)
    return [
        {"gradients": before, "activations": kept, "logits and loss": logits_bytes(shape, layout), "buckets": bucket},
        {"gradients": before, "activations": kept, "backward of a layer": layer + head, "buckets": bucket},
        {
            "gradients": before,
            "activations": int(kept * (1 - filled)),
            "backward of a layer": layer,
            "buckets": bucket,
            "reduced gradients": reduced,
        },
        {
            "gradients": max(before, late),
            "activations": kept // shape.layers,
            "backward of a layer": layer,
            "buckets": bucket,
            "reduced gradients": reduced,
        },
    ]


def _bucket_bytes(shape: ModelShape, layout: Layout) -> tuple[int, int, float]:
    """(bytes of the buckets, bytes copied out of them, share of the backward pass that fills the first).

    What is copied out is allocated as a whole when the first bucket is full; the layers whose gradients fill it have
    freed their activations by then.
    """
    if not is_contiguous(layout.zero_stage, layout.world_size, layout.offload_optimizer):
        return 0, 0, 0.0
    e, size = layout.element_bytes, buckets(layout.zero_stage, layout.offload_optimizer, shape).reduce
    # Two buckets where one fills while the other is reduced (overlap_comm).
    overlaps = layout.world_size > 1 and layout.zero_stage < 3
    stays = layout.zero_stage == 1 or (layout.zero_stage == 2 and layout.offload_optimizer not in ON_HOST)
    reduced = e * _most_reduced(shape, layout) if stays else 0
    layers = math.ceil(max(0, size - shape.embedding_parameters) / shape.layer_parameters)
    return (1 + overlaps) * e * size, reduced, min(1.0, layers / shape.layers)


def _most_reduced(shape: ModelShape, layout: Layout) -> int:
    if layout.trainable is not None:
        return share(layout.trainable, layout, 1)
    return most_reduced(shape, optimizer_group(layout.offload_optimizer, layout.world_size), layout.world_size)


def _step_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of gradients in all their forms during the optimizer step.

    DeepSpeed 0.19.8 step(): the gradients of a group, their flat copy and its fp32 copy exist together: 8 bytes a
    parameter of the group's partition. In one group that is, with 14 of states, 22 N on one GPU.
    """
    e, own = layout.element_bytes, share(trained(shape, layout), layout, 1)
    to_fp32 = 4 if e == 2 else 0
    if layout.offload_optimizer in ON_HOST:
        return 0
    if layout.zero_stage == 0:
        return (e + to_fp32) * own
    if layout.zero_stage == 3:
        checked = 3 * own if layout.precision == "fp16" else 0  # isinf of all gradients: their absolute values, a mask
        return layout.gradient_bytes * own + checked + to_fp32 * min(own, buckets(3, "none", shape).sub_group)
    # The embedding is one parameter, whatever the size of a group.
    largest = shape.embedding_parameters if layout.trainable is None else 0
    group = min(own, max(optimizer_group(layout.offload_optimizer, layout.world_size), largest) // layout.world_size)
    passing = 12 * STREAM_SETS * group if layout.offload_optimizer == "stream" else 0
    if layout.fp32_gradients:
        return 4 * own + passing  # added up flat
    return e * own + (e + to_fp32) * group + passing
