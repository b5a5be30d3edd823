"""Predict bytes on a GPU (or a CPU rank) of one training configuration, item by item, without torch.

tests/plan/test_measured.py holds the sum to allocated peaks on H200s (benchmarks/gpu_plan.py; DeepSpeed 0.19.8).
Context and fragmentation come on top; host_memory.py says what the host needs. Not modelled: copies while a checkpoint
is loaded, a model that is first built whole on the host.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from finlm.plan.plan import (
    LOGITS_SLICE_BYTES,
    ON_HOST,
    STREAM_GROUP,
    STREAM_SETS,
    Offload,
    OffloadParam,
    group_members,
    is_contiguous,
    optimizer_group,
)
from finlm.recipe.shape import IN_PROJ, ModelShape

GIB = 2**30
CONTEXT_BYTES = {False: int(1.67 * GIB), True: int(2.05 * GIB)}  # CUDA's; with NCCL's channels. Measured on H200
CPU_PROCESS_BYTES = int(0.5 * GIB)  # a rank with torch, transformers and deepspeed loaded, measured on CPU
CPU_ZERO3_BYTES = int(0.25 * GIB)  # more with ZeRO-3, measured on CPU
CPU_FRAGMENTATION = 0.8  # of what comes and goes: glibc keeps freed blocks, eager fp32 attention copies; measured
CACHE = {False: 0.04, True: 0.083}  # share the allocator keeps beside what is allocated: on one GPU, on several
CACHE_OFFLOADED = 0.08  # the same on one GPU where the optimizer of all weights is on the host: 2 to 14 % there
FRAGMENTATION = 0.015  # the part of it that it cannot give back when memory runs short
WORKSPACE_BYTES = 64 << 20  # cuBLAS's on Hopper, and small tensors
UNPACKED = 16  # bytes a weight while 4 bits become a matrix: 8-byte indices, copies (read in torchao 0.18)
DRAWN = {True: 8, False: 48}  # bytes an entry of the vocabulary while a token is drawn: compiled; hashes and noise too
PROMPT_TOKENS = 16_384  # of prompts that are computed at once (train/model/generation.py)
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # fp8: weights and activations stay bf16

# Bytes a score where a soft cap keeps transformers' own attention: capped, fp32 and 16 bits; compiled masked as well.
SCORES_KEPT = {False: 8, True: 12}
READ_A_NORM = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", *IN_PROJ)
OF_ATTENTION = (*READ_A_NORM, "q_b_proj", "kv_b_proj", "o_proj", "out_proj")
READ_THE_OTHER = ("gate_proj", "up_proj", "gate_up_proj", "c_fc")


@dataclass(frozen=True)
class Layout:
    """A training configuration: all that memory depends on besides the model's shape."""

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
    sequences: int = 1  # of a row, which share its tokens: 2 where preferences are compared
    adapted: tuple[str, ...] = ()  # the matrices of a layer that have adapters
    rank: int = 0  # of the adapters
    has_dropout: bool = False  # before the adapters
    has_documents: bool = False  # attention ends at a document's end
    has_full_masks: bool = False  # where torch's varlen_attn does not run, documents are kept apart by masks of T x T
    repeats_keys: bool = False  # attention that knows no groups gets keys and values repeated to as many as queries
    has_reference: bool = False  # a second, frozen model
    has_judge: bool = False  # a reward model of the same shape, whole on every rank
    has_vocabulary_head: bool = True
    answer_tokens: int = 0  # of a row, at most, that the model writes itself (GRPO)
    answers_a_prompt: int = 1
    generation_rows: int = 0  # answers that a rank generates at once; 0: none
    updates: int = 1  # steps that learn from the same answers
    scorings: int = 0  # forward passes over all answers by the reward model and others before them

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return ELEMENT_BYTES[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients that wait for the step."""
        return 4 if self.fp32_gradients else self.element_bytes

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequences * self.attended

    @property
    def attended(self) -> int:
        """Tokens of one sequence, which attention goes over."""
        return self.sequence_length // self.sequences


@dataclass(frozen=True)
class Buckets:
    """Element counts of DeepSpeed's buffers; config.py writes the same numbers into the JSON."""

    reduce: int
    allgather: int
    prefetch: int
    persistence: int
    live: int
    sub_group: int


def bucket_sizes(stage: int, offload_optimizer: Offload, shape: ModelShape) -> Buckets:
    """Return DeepSpeed's buffer sizes in elements for a ZeRO stage; only sub_group may exceed the parameters."""
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


@cache
def most_reduced(shape: ModelShape, group: int, world_size: int) -> int:
    """Return the number of gradient elements that the fullest rank keeps after reduction at stages 1 and 2. Cached.

    Groups of matrices, `group` elements at most, are cut into equal shares; a rank keeps whole what its share touches.
    """
    kept = [0] * world_size
    for members in group_members(shape.sizes, group, lambda size: size):
        part, start = -(-sum(members) // world_size), 0
        for size in members:
            for rank in range(start // part, (start + size - 1) // part + 1):
                kept[rank] += size
            start += size
    return max(kept)


def layer_activation_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes that one decoder layer keeps per token for the backward pass.

    Selective recompute keeps nothing of the feed-forward block but its input. Beside layers of linear attention,
    returns the larger number of both kinds.
    """
    # With 16-bit elements, compiled: inputs and outputs of both norms 8h, q and attention's output 4h, k and v 4 kv,
    # gate and up 4f (109.6 KB at h 4096, f 11008; measured 109.5). Eager: fp32 copies instead of the norms' inputs, and
    # what they are before the scale (8h more), and silu(gate) and its product with up (4f more). Norms of queries and
    # keys keep these before and after, norms behind a block its output.
    if shape.linear:
        return max(layer_activation_bytes(kind, layout) for _, kind in shape.kinds)
    hidden, ffn = shape.hidden, 4 * shape.ffn
    attention = (2 if shape.is_parallel else 4) * hidden + _mixer_bytes(shape, layout)
    attention += (2 if layout.compiled else shape.norm_bytes) * (hidden * shape.norms + shape.inner_normed)
    if not layout.compiled:
        ffn = int(shape.ffn_bytes * shape.ffn)
    elif shape.is_gated and not shape.is_lean:
        ffn += 2 * shape.ffn
    # Each expert's input is gathered and its output weighed; the router keeps its scores.
    ffn += shape.experts[1] * (4 * hidden + 40) + 4 * shape.experts[0] + shape.router_bytes * hidden
    if layout.precision == "fp8":
        attention -= 4 * hidden  # what the linear layers keep of their inputs has one byte
    if layout.trainable is not None:
        of_attention, of_block = _adapter_bytes(shape, layout)
        attention, ffn = attention + of_attention, ffn + of_block
    kept = attention if layout.recompute == "selective" else attention + ffn
    return kept * layout.element_bytes // 2


def _mixer_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes that attention, or what takes its place, keeps per token of a layer beside its input."""
    if shape.delta:
        return shape.delta.kept_bytes(layout.compiled, layout.has_documents)
    q, kv = shape.q_width, shape.kv_width
    # Two products read a norm's output, or what it reads; queries and keys are views of one product in some models.
    kept = shape.latent.kept_bytes(shape.heads, q) if shape.latent else 4 * q + 4 * kv
    copied = 2 * shape.output_width * (shape.copies_output and not shape.pads_values and not layout.compiled)
    return kept + copied + 4 * q * shape.gates_attention + _attention_bytes(shape, layout)


def _attention_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes attention keeps per token beside q, k, v, output: repeated keys, masks, scores, fp32 sums."""
    keeps = shape.keeps_scores or (shape.has_sinks and layout.repeats_keys and layout.device == "cuda")
    scores = SCORES_KEPT[layout.compiled] * shape.heads * layout.attended * keeps
    # Windows that varlen_attn does not cut are masks, under which no kernel shares keys; products of scores never do.
    by_mask = sum(window < layout.attended for window in shape.windows) / shape.layers
    has_bounds = shape.has_sinks or (layout.has_documents and not layout.has_full_masks)
    copied = 1 if scores or layout.repeats_keys or has_bounds else by_mask
    copied *= shape.kv_heads not in ((shape.heads,) if scores else (1, shape.heads))  # all heads may view a single key
    repeated = 4 * (shape.q_width - shape.kv_width) * copied
    repeated += 2 * (shape.q_width + shape.kv_width) * (1 - copied) * ("qkv_proj" in shape.matrices)  # values view it
    masks = 0 if scores or has_bounds else 1 if layout.has_full_masks else by_mask  # of every layer
    return int(repeated + 2 * layout.attended * masks + scores) + 4 * shape.heads


def _adapter_bytes(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Return what adapters add to the bytes kept per token: (in attention and norms, in the feed-forward block)."""
    # A frozen matrix keeps no input, and a frozen norm, eager, nothing before its scale. An adapter keeps its input and
    # what its matrix A makes of it; with dropout also its own input and a mask of one byte. Uncompiled layers under
    # ZeRO-3 use DeepSpeed's linear function, which keeps the input of a frozen matrix too.
    keeps_all = layout.zero_stage == 3 and not layout.compiled
    hidden, ffn, sides = shape.hidden, shape.ffn, shape.matrices
    adapted = [name for name in sides if name in layout.adapted]
    shared = [READ_A_NORM + READ_THE_OTHER] if shape.is_parallel else [READ_A_NORM, READ_THE_OTHER]
    here, block = (0, 0) if layout.compiled else (-4 * hidden, 0)
    unread = [names for names in shared if not keeps_all and (layout.has_dropout or not set(names) & set(adapted))]
    if layout.recompute == "selective":  # keeps the block's input in any case
        unread = [names for names in unread if names != shared[-1]]
    here -= 2 * hidden * len(unread)
    if not layout.compiled and not keeps_all and (layout.has_dropout or "down_proj" not in adapted):
        block -= 2 * ffn
    for name in adapted:
        is_recomputed = layout.compiled and name == "down_proj"  # by train/model/kernels.py's LeanMlp
        more = 0 if is_recomputed else 2 * layout.rank + 3 * sides[name][0] * layout.has_dropout
        here, block = (here + more, block) if name in OF_ATTENTION else (here, block + more)
    return here, block


def kept_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes of activations that all layers keep for one micro-batch until the backward pass."""
    if layout.recompute == "full":
        # Measured with ZeRO-3 on one and two GPUs: something as wide as the feed-forward block stays too.
        width = shape.hidden + (shape.ffn if layout.zero_stage == 3 else 0)
        return shape.layers * layout.tokens * width * layout.element_bytes
    return sum(layers * layout.tokens * layer_activation_bytes(kind, layout) for layers, kind in shape.kinds)


def backward_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes that one layer's backward pass needs beside kept activations: recomputed, and temporaries."""
    # Temporaries are the gradients of gate, up and their product, and of hidden states; uncompiled the product itself
    # is gone by then, and with dropout also what the adapter kept of it.
    whole = layout.tokens * layer_activation_bytes(shape, dataclasses.replace(layout, recompute="none"))
    kept = layout.tokens * layer_activation_bytes(shape, layout) if layout.recompute == "selective" else whole
    recomputed = whole if layout.recompute == "full" else whole - kept
    ffn, hidden = (3, 3) if layout.compiled else (1.5 if "down_proj" in layout.adapted and layout.has_dropout else 2, 2)
    return recomputed + int((ffn * shape.ffn + hidden * shape.hidden) * layout.tokens * layout.element_bytes)


def logits_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes needed at the loss (train/model/kernels.py): slices of logits, and gradients that it forms."""
    # One slice is logits and their gradient; from the second on the gradient of the slice before still exists, and so
    # does the head's. Uncompiled, on CPU and where log-probabilities are asked for (preferences), fp32 numbers and
    # their exponentials exist beside the logits.
    e = layout.element_bytes
    hidden = 4 * layout.tokens * shape.hidden * e  # the last layer's output, its norm twice, and its gradient
    if not layout.has_vocabulary_head:
        return hidden
    whole = layout.tokens // layout.sequences * shape.vocab * e  # of a pair the answers, taken to be half of it
    count = -(-whole // LOGITS_SLICE_BYTES[layout.device])
    head = 0 if layout.trainable is not None and layout.sequences == 1 else shape.vocab * shape.hidden * e
    if layout.device == "cpu":
        return hidden + head + 4 * whole // count
    if layout.sequences > 1:  # the answers' states are copied out, and have gradients of their own
        return hidden + 3 * layout.tokens * shape.hidden * e + head + (4 + (count > 1)) * whole // count
    return hidden + (2 * whole if count == 1 else head + 3 * whole // count)


def forward_bytes(shape: ModelShape, layout: Layout, rows: int, length: int) -> int:
    """Return the bytes of the widest layer, with masks, in a gradient-free forward pass of rows x length tokens."""
    return rows * length * (layout.element_bytes * (6 * shape.hidden + 3 * shape.ffn) + 3 * length)


def generation_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Return the bytes, by item, that a rank needs to generate answers, beside its states; {} if it generates none."""
    rows, length, e = layout.generation_rows, layout.sequence_length, layout.element_bytes
    if not rows:
        return {}
    prompt = length - layout.answer_tokens
    reading = forward_bytes(shape, layout, max(1, min(rows, PROMPT_TOKENS // max(1, prompt))), prompt)
    copied = e * rows * prompt * shape.cached_width  # a layer's, to the rows of all answers
    # A token of latent attention makes the keys and values of all tokens of a layer, as one product, then keys alone.
    made = e * rows * length * (2 * shape.q_width + shape.output_width) if shape.latent else 0
    is_compiled = layout.device == "cuda" and not shape.experts[0] and not shape.linear
    items = {  # of prompts PROMPT_TOKENS tokens are read at once, or all rows' next token is made
        "keys and values": (shape.layers - shape.linear) * e * rows * length * shape.cached_width,
        "generation of a token": max(reading + copied, made, DRAWN[is_compiled] * rows * shape.vocab),
    }
    if shape.delta:
        items["states of linear attention"] = rows * shape.linear * shape.delta.state_bytes
    if layout.zero_stage == 3 and (layout.world_size > 1 or layout.offload_param != "none"):
        items["gathered weights for generation"] = e * shape.parameters
    return items


def gpu_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Return the peak bytes of one rank on its device, item by item; the sum is the peak.

    The peak is at the loss, in the backward pass of the last or of the first layer, while answers are generated or
    scored, or in the optimizer step, when activations are gone but gradients exist flat and in fp32 as well. The items
    are those of the phase that needs most; what the step needs beyond the others is one item.
    """
    items = _state_items(shape, layout)
    phases = [*_phases(shape, layout), generation_items(shape, layout)]
    if layout.has_judge:
        scoring = forward_bytes(shape, layout, layout.micro_batch, layout.sequence_length)
        phases.append({"reward model's activations": scoring})
    items |= max(phases, key=lambda phase: sum(phase.values()))  # type: ignore[attr-defined]
    working = max(sum(phase.values()) for phase in phases)
    items["optimizer step"] = max(0, _step_bytes(shape, layout) - working)
    if layout.device == "cpu":
        comes_and_goes = ("activations", "logits and loss", "backward of a layer", "generation of a token")
        passing = sum(items.get(name, 0) for name in comes_and_goes)
        process = CPU_PROCESS_BYTES + (CPU_ZERO3_BYTES if layout.zero_stage == 3 else 0)
        return items | {"fragmentation": int(CPU_FRAGMENTATION * passing), "process": process}
    items["workspace"] = WORKSPACE_BYTES
    is_offloaded = layout.offload_optimizer != "none" and layout.zero_stage < 3 and layout.trainable is None
    cache = CACHE_OFFLOADED if is_offloaded and layout.world_size == 1 else CACHE[layout.world_size > 1]
    cache += 0.22 if layout.offload_param != "none" and layout.world_size > 1 else 0
    kept = int(cache * sum(items.values()))
    return items | {"context": CONTEXT_BYTES[layout.world_size > 1], "fragmentation": kept}


def allocated_bytes(items: dict[str, int]) -> int:
    """Return the bytes of gpu_items() that torch reports as allocated: all but context, process and fragmentation."""
    return sum(size for name, size in items.items() if name not in ("context", "process", "fragmentation"))


def trained_parameters(shape: ModelShape, layout: Layout) -> int:
    """Return the number of parameters that have gradients and optimizer states."""
    return shape.parameters if layout.trainable is None else layout.trainable


def share(parameters: int, layout: Layout, from_stage: int) -> int:
    """Return how many of `parameters` a rank holds, rounded up, if ZeRO partitions them from `from_stage` on."""
    return -(-parameters // (layout.world_size if layout.zero_stage >= from_stage else 1))


def _state_items(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """Return the bytes of weights and optimizer states on a rank's device, by item."""
    e, on_device = layout.element_bytes, layout.offload_param == "none"
    part = share(trained_parameters(shape, layout), layout, 1)
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
        sizes = bucket_sizes(3, layout.offload_optimizer, shape)
        if layout.world_size > 1 or not on_device:
            items["gathered weights"] = e * min(shape.parameters, max(sizes.live, shape.layer_parameters))
        if layout.hpz_partition_size > 1:
            items["hpZ copy"] = e * shape.parameters // layout.hpz_partition_size
    if layout.offload_optimizer == "none":
        # Stages 1-3 keep an fp32 copy even when the model is fp32 (stage_1_and_2.py: clone().float()).
        has_master = layout.zero_stage > 0 or e == 2
        items["fp32 master"] = 4 * part if has_master else 0
        items["Adam states"] = 8 * part
    return items


def _phases(shape: ModelShape, layout: Layout) -> list[dict[str, int]]:
    """Return bytes beside the states by item: at the loss, last layer's backward, first full bucket, first layer's."""
    e, size = layout.element_bytes, trained_parameters(shape, layout)
    # With offload, stages 2 and 3 send gradients to the host as soon as they are reduced.
    sent = layout.offload_optimizer in ON_HOST and layout.zero_stage >= 2
    gradients = 0 if sent else layout.gradient_bytes * share(size, layout, 2)
    before = gradients if layout.accumulates else 0
    kept = kept_bytes(shape, layout)
    bucket, reduced, filled = _bucket_bytes(shape, layout)
    layer = backward_bytes(shape, layout)
    if layout.zero_stage == 3 and layout.world_size > 1 and layout.recompute != "full":
        kept += layout.tokens * layer_activation_bytes(shape, dataclasses.replace(layout, recompute="none"))  # measured
    has_head_gradient = layout.trainable is None and layout.has_vocabulary_head
    head = (has_head_gradient * shape.vocab + layout.tokens) * shape.hidden * e
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
    """Return (bytes of gradient buckets, bytes copied out, share of the backward pass that fills the first bucket).

    Zeros without contiguous gradients. Room to copy to is allocated as a whole when the first bucket is full; the
    layers whose gradients fill it have freed their activations by then.
    """
    if not is_contiguous(layout.zero_stage, layout.world_size, layout.offload_optimizer):
        return 0, 0, 0.0
    e, size = layout.element_bytes, bucket_sizes(layout.zero_stage, layout.offload_optimizer, shape).reduce
    # Two buckets where one fills while the other is reduced (overlap_comm).
    overlaps = layout.world_size > 1 and layout.zero_stage < 3
    stays = layout.zero_stage == 1 or (layout.zero_stage == 2 and layout.offload_optimizer not in ON_HOST)
    group = optimizer_group(layout.offload_optimizer, layout.world_size)
    trained = layout.trainable
    most = most_reduced(shape, group, layout.world_size) if trained is None else share(trained, layout, 1)
    reduced = e * most if stays else 0
    layers = math.ceil(max(0, size - shape.embedding_parameters) / shape.layer_parameters)
    return (1 + overlaps) * e * size, reduced, min(1.0, layers / shape.layers)


def _step_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return the bytes of gradients in all their forms during the optimizer step."""
    # DeepSpeed 0.19.8 step(): the gradients of a group, their flat copy and its fp32 copy exist together: 8 bytes a
    # parameter of the group's partition. In one group that is, with 14 of states, 22 N on one GPU.
    e, part = layout.element_bytes, share(trained_parameters(shape, layout), layout, 1)
    is_one_pass = layout.compiled and layout.zero_stage in (1, 2)  # train/zero/engine.py reads gradients as they are
    to_fp32 = 4 if e == 2 and not is_one_pass else 0
    if layout.offload_optimizer in ON_HOST:
        return 0
    if layout.zero_stage == 0:
        return (e + to_fp32) * part
    if layout.zero_stage == 3:
        checked = 3 * part if layout.precision == "fp16" else 0  # isinf of all gradients: their absolute values, a mask
        return layout.gradient_bytes * part + checked + to_fp32 * min(part, bucket_sizes(3, "none", shape).sub_group)
    # The embedding is one parameter, whatever the size of a group.
    largest = shape.embedding_parameters if layout.trainable is None else 0
    group = min(part, max(optimizer_group(layout.offload_optimizer, layout.world_size), largest) // layout.world_size)
    passing = 12 * STREAM_SETS * min(group, STREAM_GROUP) if layout.offload_optimizer == "stream" else 0
    if layout.fp32_gradients:
        return 4 * part + passing  # added up flat
    return e * part + (e + to_fp32) * group + passing
