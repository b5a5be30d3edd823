"""Bytes per GPU and per host of one training configuration, item by item, without torch.

tests/plan/test_memory.py holds it to allocated peaks of XuanYuan-6B on H200s (DeepSpeed 0.19.8): ZeRO-1 on one, two and
four GPUs within 1 %, float8 within 2 %, ZeRO-3 on four GPUs 3 % too low. ZeRO-3 with an offloaded optimizer and full
recompute needed 46 GiB where 26 are predicted: not understood. Context and fragmentation come on top.

Not modelled: tensors of the caller, temporary copies while a checkpoint is written or loaded, and a model that is first
built whole on the host.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from finlm.recipe.shape import ModelShape

GIB = 2**30
CUDA_CONTEXT_BYTES = int(1.5 * GIB)  # CUDA context, cuBLAS workspaces and NCCL's channels; assumed
CPU_PROCESS_BYTES = int(0.45 * GIB)  # a rank with torch and deepspeed loaded, measured on CPU
GPU_PROCESS_HOST_BYTES = 3 * GIB  # host memory of a rank that drives a GPU; assumed
FRAGMENTATION = 0.02  # share of the allocated bytes that the allocator holds without use; 1.3 % with 122 GiB in use
NVME_PARAM_BUFFERS = 5  # DeepSpeed's default
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # fp8: weights and activations stay bf16
LOGITS_SLICE_BYTES = {"cuda": 2**30, "cpu": 2**24}  # train/loss.py: logits that exist at once; on CPU they fit a cache
OPTIMIZER_GROUP = 500_000_000  # parameters of a group that DeepSpeed's stages 1 and 2 step at once

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class Layout:
    """What memory depends on besides the model's shape."""

    device: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp16", "fp32", "fp8"]
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Offload
    offload_param: Offload
    recompute: Literal["none", "selective", "full"]
    micro_batch: int
    sequence_length: int
    world_size: int
    hpz_partition_size: int = 1
    compiled: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequence_length


@dataclass(frozen=True)
class Buckets:
    """Element counts of DeepSpeed's buffers; config.py writes the same numbers into the JSON."""

    reduce: int
    allgather: int
    prefetch: int
    persistence: int
    live: int
    sub_group: int


def buckets(stage: int, offload_optimizer: Offload, shape: ModelShape) -> Buckets:
    """Large buckets where memory is not the point (stages 1, 2), DeepSpeed's defaults where it is; <= the model."""
    cap = max(shape.parameters, 1)
    reduce = 200_000_000 if stage == 3 or offload_optimizer != "none" else 500_000_000
    return Buckets(
        reduce=min(reduce, cap),
        allgather=min(500_000_000, cap),
        # A layer is gathered as a whole and the next must fit: DeepSpeed's 50 million are a quarter of XuanYuan-6B's.
        prefetch=min(max(50_000_000, int(1.1 * shape.layer_parameters)), cap),
        persistence=min(10 * shape.hidden, cap),  # norms stay whole, matrices are partitioned; the rule of transformers
        live=min(1_000_000_000, cap),
        sub_group=100_000_000 if offload_optimizer == "nvme" else 1_000_000_000,
    )


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


def activation_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of all layers' activations of one micro-batch, beside logits_bytes, at the peak of the backward pass."""
    whole = dataclasses.replace(layout, recompute="none")
    layer = layout.tokens * layer_activation_bytes(shape, whole)
    if layout.recompute == "none":
        return shape.layers * layer
    if layout.recompute == "selective":
        kept = shape.layers * layout.tokens * layer_activation_bytes(shape, layout)
        again = layer - layout.tokens * layer_activation_bytes(shape, layout)
    else:
        kept = shape.layers * layout.tokens * shape.hidden * layout.element_bytes
        again = layer
    # One layer at a time is recomputed, after the loss has given its memory back.
    return kept + max(0, again - logits_bytes(shape, layout))


def logits_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of a slice of logits with its gradient, and of the loss's gradients of the hidden states and the head."""
    whole = layout.tokens * shape.vocab * layout.element_bytes
    slice_bytes = min(whole, LOGITS_SLICE_BYTES[layout.device])
    kept = (layout.tokens + shape.vocab) * shape.hidden * layout.element_bytes
    # Uncompiled, log-probabilities, their exponentials and the masked gradient exist beside the logits.
    return kept + (2 if layout.compiled else 4) * slice_bytes


def gpu_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Peak bytes of one rank on its device, item by item; the sum is the peak.

    The peak is either late in the forward / early in the backward pass, or in the optimizer step, when activations are
    gone but gradients exist flat and in fp32 as well; what the step needs beyond the backward pass is one item.
    """
    states = _state_items(shape, layout)
    working = _backward_items(shape, layout)
    step = _step_bytes(shape, layout)
    items = states | working | {"optimizer step": max(0, step - sum(working.values()))}
    allocated = sum(items.values())
    overhead = CUDA_CONTEXT_BYTES if layout.device == "cuda" else CPU_PROCESS_BYTES
    items["context" if layout.device == "cuda" else "process"] = overhead
    items["fragmentation"] = int(FRAGMENTATION * allocated)
    return items


def allocated_bytes(items: dict[str, int]) -> int:
    """The part of gpu_items that torch.cuda.max_memory_allocated reports."""
    return sum(size for name, size in items.items() if name not in ("context", "process", "fragmentation"))


def host_items(shape: ModelShape, layout: Layout, slots: int) -> dict[str, int]:
    """Peak bytes of a host with `slots` ranks, item by item; on CPU ranks these are the ranks themselves."""
    if layout.device == "cpu":
        rank = sum(gpu_items(shape, layout).values()) + sum(_offloaded(shape, layout).values())
        return {"ranks": slots * rank}
    items = {name: slots * size for name, size in _offloaded(shape, layout).items()}
    return {"processes": slots * GPU_PROCESS_HOST_BYTES, **items}


def _share(shape: ModelShape, layout: Layout, from_stage: int) -> int:
    """Parameters a rank holds of something that is partitioned from a stage on."""
    ranks = layout.world_size if layout.zero_stage >= from_stage else 1
    return -(-shape.parameters // ranks)


def _state_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    e = layout.element_bytes
    on_device = layout.offload_param == "none"
    items = {"weights": e * _share(shape, layout, 3) if on_device else 0}
    if layout.zero_stage == 3:
        sizes = buckets(3, layout.offload_optimizer, shape)
        items["gathered weights"] = e * min(shape.parameters, max(sizes.live, shape.layer_parameters))
        if layout.hpz_partition_size > 1:
            items["hpZ copy"] = e * shape.parameters // layout.hpz_partition_size
    if layout.offload_optimizer == "none":
        # Stages 1-3 keep an fp32 copy even when the model is fp32 (stage_1_and_2.py: clone().float()).
        has_master = layout.zero_stage > 0 or e == 2
        items["fp32 master"] = 4 * _share(shape, layout, 1) if has_master else 0
        items["Adam states"] = 8 * _share(shape, layout, 1)
    return items


def _backward_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    e = layout.element_bytes
    # With offload, stages 2 and 3 send gradients to the host as soon as they are reduced.
    sent = layout.offload_optimizer != "none" and layout.zero_stage >= 2
    items = {"gradients": 0 if sent else e * _share(shape, layout, 2)}
    items["activations"] = activation_bytes(shape, layout)
    items["logits and loss"] = logits_bytes(shape, layout)
    if is_contiguous(layout.zero_stage, layout.world_size, layout.offload_optimizer):
        # Two buckets: one fills while the other is reduced (overlap_comm). At stage 1 a rank's part is copied out.
        bucket = buckets(layout.zero_stage, layout.offload_optimizer, shape).reduce
        items["buckets"] = 2 * e * bucket
        if layout.zero_stage == 1 and not sent:
            # Allocated when the first bucket is full; the layers whose gradients fill it have freed their activations.
            layers = max(0.0, (bucket - shape.embedding_parameters) / shape.layer_parameters)
            freed = items["logits and loss"] + int(items["activations"] * min(1.0, layers / shape.layers))
            items["reduced gradients"] = max(0, e * _share(shape, layout, 1) - freed)
    return items


def is_contiguous(stage: int, world_size: int, offload_optimizer: Offload) -> bool:
    """Whether DeepSpeed copies gradients into buckets while the backward pass runs (contiguous_gradients).

    On one GPU at stage 1 there is nothing to reduce, and the copy of all gradients would be made while activations
    still live: 12 GiB of XuanYuan-6B.
    """
    return stage > 1 or (stage == 1 and (world_size > 1 or offload_optimizer != "none"))


def _step_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of gradients in all their forms during the optimizer step.

    DeepSpeed 0.19.8 step(): the gradients of a group, their flat copy and its fp32 copy exist together: 8 bytes a
    parameter of the group's partition. In one group that is, with 14 of states, 22 N on one GPU.
    """
    e = layout.element_bytes
    own = _share(shape, layout, 1)
    to_fp32 = 4 if e == 2 else 0
    if layout.offload_optimizer != "none":
        return 0
    if layout.zero_stage == 0:
        return (e + to_fp32) * own
    if layout.zero_stage == 3:
        return e * own + to_fp32 * min(own, buckets(3, "none", shape).sub_group)
    # The embedding is one parameter, whatever the size of a group.
    group = max(OPTIMIZER_GROUP, shape.embedding_parameters) // layout.world_size
    return e * own + (e + to_fp32) * min(own, group)


def _offloaded(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Host bytes of one rank for what ZeRO keeps off the device."""
    items: dict[str, int] = {}
    own = _share(shape, layout, 1)
    if layout.offload_optimizer == "cpu":
        items = {"fp32 master": 4 * own, "Adam states": 8 * own, "fp32 gradients": 4 * own}
        items["16-bit staging"] = layout.element_bytes * own
    elif layout.offload_optimizer == "nvme":
        # Master, both moments and the gradient of one sub-group in memory, read and written in turn.
        group = min(own, buckets(3, "nvme", shape).sub_group)
        items = {"fp32 gradients": 4 * own, "swap buffers": 4 * 4 * group}
    if layout.offload_param == "cpu":
        items["weights"] = layout.element_bytes * own
    elif layout.offload_param == "nvme":
        kept = min(own, buckets(3, "none", shape).live)
        largest = max(shape.vocab, shape.ffn) * shape.hidden
        items["weight buffers"] = layout.element_bytes * (kept + NVME_PARAM_BUFFERS * min(own, largest))
    return items
