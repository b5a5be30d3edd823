"""Predict tokens per second and days of a plan: arithmetic of the GPU and its host, transfers, the optimizer.

A micro-batch takes matrix products and attention against the peak and everything else against the memory's bandwidth,
or the host's launches where those are slower. A step takes max(compute, overlapped transfers) + exposed transfers + the
optimizer. V = 2 N (w-1)/w bytes is one collective over all N weights (with adapters N is theirs); it crosses the
slowest of the GPU links and each host's network card once. Stage 0 moves 2 V a step, 1 and 2 reduce and gather V, stage
3 gathers twice and reduces once EVERY micro-step: 3 V over 10 Gb/s Ethernet is why a 7B model takes years.

The constants were fitted to runs on H200s (benchmarks/gpu_plan.py); tests/plan/test_measured.py holds what is left of
the error. Other kinds keep these proportions, scaled so that a 7B model reaches the kind's `mfu` of gpus.yaml. CPU
ranks have no prediction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from finlm.plan import memory
from finlm.plan.gpus import Gpu, kinds
from finlm.plan.memory import Layout
from finlm.recipe.shape import ModelShape

REFERENCE = "H200"
SEVEN_B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000, tied=False)
NARROWEST = 1024  # hidden size of the narrowest model these were fitted to; one of 768 reached 0.8 of the prediction
PRODUCTS = 0.729  # share of the peak that large matrix products reach
HALF_SPEED_WIDTH = 170  # hidden size at which they reach half of that
HALF_SPEED_TOKENS = 720  # tokens of a micro-batch at which they do
ATTENTION = 0.59  # share of the peak that causal attention reaches, forward and backward together
NARROW_HEAD = 0.76  # heads of fewer than 128 numbers over others: rows of 16,384 and 32,768, one H100
DOCUMENT_ATTENTION = 0.3  # where it ends at the end of documents of about 1,000 tokens: short tiles, many of them cut
MASKED_ATTENTION = 0.25  # by a mask of numbers, which hides the half that others do not compute: one model's windows
FLOAT8 = 1.96  # float8 products over bf16 ones, casts apart
DELTA_RULE = 0.15  # share of the peak that flash-linear-attention's rule reaches; assumed
COMPILED_BYTES = 0.9  # traffic of everything else over what its inputs and outputs amount to
EAGER_BYTES = 4.24  # one kernel an operation, fp32 copies in the norms
LOGIT_BYTES = 8  # read and written a logit by the loss, beside its three products
PAIR_LOGIT_BYTES = 60  # where it is not compiled, in fp32: read in train/model/kernels.py
DOCUMENT_TILE = 8e-9  # seconds of a tile of 128 queries: a document starts as many as its row has; one H100
DOCUMENT_TOKENS = 2000  # of the document of a token, on average: documents of 1,000 whose lengths are exponential
TOKEN_PRODUCTS = 0.52  # the same of products with 512 rows, while answers are generated
TOKEN_BANDWIDTH = 0.83  # share of the memory's bandwidth that attention of a token reaches
TOKEN_DRAWN = 15  # bytes an entry of the vocabulary for whose time a token is drawn
TOKEN_LAYER = 25e-6  # seconds of a layer's small kernels, whatever their size
TOKEN_ADAPTER = 9e-6  # and of an adapter's
TOKEN_FLOOR = 95e-6  # seconds that a layer's products take at least: 8 to 64 rows on an H100 and an H200
PROMPT_READ = 0.5  # of a prompt's keys and values: answers to it find them in the L2
NF4_MOVED = 48  # bytes a weight while 4 bits become a matrix
# Times an adapter's outputs and inputs are read or written: compiled, eager.
ADAPTER_MOVED = {True: (4, 3), False: (8, 4)}
DROPPED_MOVED = {True: 7, False: 5}  # times its inputs are for dropout
EXPERT_MOVED = 10  # times an expert's inputs are read or written to sort, weigh and join them: one model, one H200
BANDWIDTH = 0.75  # share of the memory's bandwidth that such kernels reach
LAYER_LAUNCH = {True: 0.52e-3, False: 1.6e-3}  # seconds of the host a layer, forward and backward: compiled, eager
MICRO_STEP_LAUNCH = 5.2e-3  # beside the layers: embedding, loss, engine, data


def micro_step_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Return the seconds of one micro-batch, forward and backward, without transfers: the slower of GPU and host."""
    return max(_raw_seconds(shape, layout, gpu) / _scale(gpu), host_seconds(shape, layout))


def forward_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Return the seconds of the forward pass of one micro-batch without gradients: the slower of GPU and host."""
    once = dataclasses.replace(layout, recompute="none")
    return max(_raw_seconds(shape, once, gpu, only_forward=True) / _scale(gpu), host_seconds(shape, once) / 3)


def generation_seconds(shape: ModelShape, layout: Layout, gpu: Gpu, rows: int) -> float:
    """Return the seconds in which a GPU generates `rows` answers, layout.generation_rows (at least 1) at a time.

    Assumes answers as long as they may be, after prompts that fill the rest of a row. A token of a chunk takes the
    longest of three times (matrix products, reading the weights, small kernels), plus the time to read keys and values,
    to draw from the vocabulary, and for a layer's other kernels.
    """
    # Measured on one H100 with 512 answers of a 1.5B shape after 256 tokens, and with 8 to 64 rows of four shapes there
    # and on an H200 (LOGBOOK.md, 2026-11-26). Before compute capability 8.0 every row is read to its end.
    chunks = -(-rows // layout.generation_rows)
    rows, prompt = -(-rows // chunks), layout.sequence_length - layout.answer_tokens
    weights = shape.parameters * (layout.element_bytes if layout.weight_bytes is None else NF4_MOVED)
    read = prompt * PROMPT_READ + layout.answer_tokens / 2 if gpu.has_bf16 else layout.sequence_length
    cache = (shape.layers - shape.linear) * shape.cached_width * layout.element_bytes * rows * read
    cache += 2 * rows * shape.linear * shape.delta.state_bytes if shape.delta else 0
    products = 2 * shape.active_parameters * rows / (TOKEN_PRODUCTS * gpu.peak_flops)
    token = max(weights / (BANDWIDTH * gpu.memory_bandwidth), products, TOKEN_FLOOR * shape.layers)
    token += (cache / TOKEN_BANDWIDTH + TOKEN_DRAWN * rows * shape.vocab) / gpu.memory_bandwidth
    token += TOKEN_LAYER * shape.layers + TOKEN_ADAPTER * shape.count_matrices(layout.adapted)
    asked = dataclasses.replace(layout, micro_batch=rows, sequence_length=prompt, has_vocabulary_head=False)
    return chunks * (layout.answer_tokens * token + forward_seconds(shape, asked, gpu) / layout.answers_a_prompt)


def host_seconds(shape: ModelShape, layout: Layout) -> float:
    """Return the seconds that the host needs to launch the kernels of one micro-batch."""
    passes = 1.3 if layout.recompute == "full" else 1.0
    return MICRO_STEP_LAUNCH + passes * shape.layers * LAYER_LAUNCH[layout.compiled]


@functools.cache
def _scale(gpu: Gpu) -> float:
    """Return the factor by which a GPU kind beats the constants, so that a 7B model reaches its mfu; cached."""
    reference = kinds()[REFERENCE]
    return (gpu.mfu / _predicted_mfu(gpu)) / (reference.mfu / _predicted_mfu(reference))


def _predicted_mfu(gpu: Gpu) -> float:
    """Return the MFU of a compiled 7B model with large micro-batches by the constants alone."""
    precision: Literal["bf16", "fp16"] = "bf16" if gpu.has_bf16 else "fp16"
    layout = Layout("cuda", precision, 1, "none", "none", "none", 8, 2048, 1, compiled=True)
    flops = SEVEN_B.flops_per_token(layout.sequence_length) * layout.tokens
    return flops / _raw_seconds(SEVEN_B, layout, gpu) / gpu.peak_flops


def _raw_seconds(shape: ModelShape, layout: Layout, gpu: Gpu, only_forward: bool = False) -> float:
    """Return the GPU's seconds for one micro-batch, or its forward pass, by the constants alone, before _scale."""
    tokens, hidden, ffn = layout.tokens, shape.hidden, shape.ffn
    peak = gpu.fp32_flops if layout.precision == "fp32" else gpu.peak_flops
    rate = PRODUCTS * peak * hidden / (hidden + HALF_SPEED_WIDTH) * tokens / (tokens + HALF_SPEED_TOKENS)
    # Forward counts 1, backward 2 (under adapters 1: no weight's gradient), recomputation what it repeats: nobody needs
    # the block's output again.
    passes = 1 if only_forward else 3 if layout.trainable is None else 2
    layer = 3 * ffn + 2 * shape.q_width + 2 * shape.kv_width
    again = {"none": 0.0, "selective": 2 * ffn / layer, "full": 1 - ffn / layer}[layout.recompute]
    products = 2 * shape.active_matrices * tokens * (passes + again)
    float8 = FLOAT8 if layout.precision == "fp8" else 1.0
    # The loss of pairs multiplies the head once more, and twice more beside adapters.
    more = 0 if layout.sequences == 1 or only_forward else 1 + (layout.trainable is not None)
    head = 2 * (passes + more) * _scored_tokens(layout) * shape.vocab * hidden
    # 2 h S / 2 each for scores and values forward, two and a half times that backward.
    times = 1.0 if only_forward else 3.5 + (layout.recompute == "full")
    seconds = (shape.layers * products / float8 + head) / rate
    seconds += 2 * shape.layers * _met_tokens(shape, layout) * shape.q_width * tokens * times / peak
    if layout.has_documents:
        tiles = 2 * layout.tokens / DOCUMENT_TOKENS * layout.attended / 128  # of a head, that attention starts
        seconds += DOCUMENT_TILE * shape.layers * shape.heads * tiles * times / 3.5
    if shape.delta:
        seconds += shape.linear * shape.delta.flops * tokens * times / (DELTA_RULE * peak)
    moved = _moved_bytes(shape, layout) / (3 if only_forward else 1)
    return seconds + moved / (BANDWIDTH * gpu.memory_bandwidth)


def _met_tokens(shape: ModelShape, layout: Layout) -> float:
    """Return the tokens that a query meets, a mean of all layers, over the share of the peak attention reaches."""
    if layout.has_documents and layout.attended > DOCUMENT_TOKENS:
        return shape.attended(DOCUMENT_TOKENS) / DOCUMENT_ATTENTION
    # Windows without document bounds are masks, under which a kernel goes over the whole square.
    has_bounds = layout.has_documents or shape.has_sinks
    masks = [window for window in shape.windows if window < layout.attended and not has_bounds]
    others = shape.attended(layout.attended) - sum(min(layout.attended, 2 * window) for window in masks) / shape.layers
    share = ATTENTION * (NARROW_HEAD if shape.q_width < 128 * shape.heads else 1)
    return others / share + 2 * layout.attended * len(masks) / shape.layers / MASKED_ATTENTION


def _scored_tokens(layout: Layout) -> float:
    """Return the tokens of a micro-batch that pass through the output head: all, half for pairs, 0 for reward."""
    if not layout.has_vocabulary_head:
        return 0.0
    return layout.tokens / 2 if layout.sequences > 1 else layout.tokens


def _adapters_moved(shape: ModelShape, layout: Layout) -> float:
    """Return how many elements adapters read and write, per token and layer, beside their matrix products."""
    outputs, plain = ADAPTER_MOVED[layout.compiled]
    inputs = plain + DROPPED_MOVED[layout.compiled] * layout.has_dropout
    moved = (
        layers * (outputs * kind.matrices[name][1] + inputs * kind.matrices[name][0])
        for layers, kind in shape.kinds
        for name in layout.adapted
        if name in kind.matrices
    )
    return sum(moved) / shape.layers


def _moved_bytes(shape: ModelShape, layout: Layout) -> float:
    """Return the bytes that everything but matrix products and attention reads and writes for one micro-batch."""
    tokens, e = layout.tokens, layout.element_bytes
    width, queries = shape.kv_width, shape.q_width
    # Norms, residuals and rotations read and write 12 h forward; SwiGLU 3 f; backward twice as much.
    forward = 8 * shape.hidden + 4 * queries + 4 * width + 3 * shape.ffn
    forward += 2 * shape.hidden * (shape.norms - 2) + 2 * shape.inner_normed
    forward += 6 * shape.heads * layout.attended * shape.keeps_scores
    again = {"none": 0.0, "selective": 3 * shape.ffn / forward, "full": 1.0}[layout.recompute]
    factor = COMPILED_BYTES if layout.compiled else EAGER_BYTES
    moved = shape.layers * tokens * e * forward * (3 + again) * factor
    moved += shape.layers * tokens * e * _adapters_moved(shape, layout)
    routed = (shape.layers - shape.dense) * shape.experts[1] * shape.hidden
    moved += routed * tokens * e * EXPERT_MOVED * (3 + (layout.recompute == "full"))
    if layout.weight_bytes is not None:  # forward, backward, recomputation: 4 bits to a matrix
        moved += shape.layers * NF4_MOVED * shape.layer_parameters * (2 + (layout.recompute != "none"))
    if layout.precision == "fp8":
        # Amax and cast of inputs, weights and gradients: read twice, written once in one byte.
        per_token = 3 * (3 * shape.hidden + 2 * queries + 2 * width + 3 * shape.ffn)
        moved += shape.layers * 5 * (per_token * tokens + 2 * shape.layer_parameters)
    a_logit = LOGIT_BYTES if layout.sequences == 1 else PAIR_LOGIT_BYTES
    return moved + a_logit / 2 * e * shape.vocab * _scored_tokens(layout)


NETWORK_EFFICIENCY = 0.8  # share of line rate NCCL reaches over TCP or RDMA; assumed
LINK_EFFICIENCY = 0.75  # share of a GPU link's rate that collectives reach
REDUCE_BYTES_PER_SECOND = 155e9  # copies into buckets and what of a reduction hides behind nothing: two and four H200
ZERO3_ARITHMETIC = {True: 0.074, False: 0.17}  # of the arithmetic, added by ZeRO-3: compiled, eager
ZERO3_LAYER = 0.6e-3  # and seconds of hooks a layer and micro-step
ZERO3_ADAPTER = 3e-3  # of those of an adapter's modules a layer, pass and micro-step, uncompiled: three runs, two GPUs
STEP_BYTES_PER_PARAMETER = 43  # fused AdamW 28 + flatten, upcast, clip, copy; the norm reads 2
STEP_BANDWIDTH_SHARE = 0.5  # 275 GB take 0.115 s on one H200
ONE_PASS_BYTES, ONE_PASS_SHARE = 38, 0.78  # the same in one compiled pass (train/zero/engine.py)
STEP_LAUNCH = 5.7e-3  # seconds of the host a step: clipping, groups, the loss read back, the record
THREADS = 16  # of a rank whose optimizer is offloaded (launch/adapters.py)
ADAM_PER_THREAD = 0.25e9  # parameters a second of Adam on a server's core; 0.62e9 on one of Zen 5
ADAM_PER_RANK = 2.8e9  # where memory binds, beside H100s and H200s: 2.3e9 to 3.4e9 on five hosts
ADAM_PER_HOST = 6.5e9
HOST_TENSOR = 0.2e-3  # seconds of DeepSpeed's copies and norms for a trained tensor that steps on the host: 12 runs
ZERO3_PASSES = 1.4  # ZeRO-3's unscaling, overflow check and flat copies, in times of Adam itself
STREAMED = 0.92  # share of PCIe's rate that the streamed optimizer reaches: 0.81 to 1 on five hosts
NEW_HOST_PCIE = 50e9  # a host is taken to be as old as its GPUs' PCIe; older ones are as much slower
NVME_BYTES_PER_SECOND = 5e9  # a host's read + write average; assumed


@dataclass(frozen=True)
class Rank:
    """A host's GPU kind, its number of ranks and their micro-batch; one entry for identical hosts is enough."""

    gpu: Gpu
    slots: int
    micro_batch: int


@dataclass(frozen=True)
class Network:
    """The number of hosts, the Gbit/s of their network cards, and what ZeRO++ sends in fewer bits."""

    hosts: int
    gbit: float
    quantized_weights: bool = False
    quantized_gradients: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by cause.

    `overlapped` are transfers during `compute`, of which the longer counts; `exposed` are transfers that all wait for.
    """

    compute: float
    overlapped: float
    exposed: float
    optimizer: float
    generation: float = 0.0  # of answers, a step's share where several learn from them
    scoring: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(self.compute, self.overlapped) + self.exposed + self.optimizer + self.generation + self.scoring


def step_time(
    shape: ModelShape,
    layout: Layout,
    kinds: Sequence[Rank],
    network: Network,
    accumulation: int,
    threads: int = THREADS,
) -> StepTime:
    """Return the seconds of one optimizer step on these kinds of hosts; the slowest GPU, link and host limit it.

    The micro-batches of `kinds` count, and not that of `layout`. `accumulation` is the number of micro-steps, `threads`
    OMP_NUM_THREADS of a rank.
    """
    arithmetic = accumulation * max(
        micro_step_seconds(shape, dataclasses.replace(layout, micro_batch=kind.micro_batch), kind.gpu) for kind in kinds
    )
    link = LINK_EFFICIENCY * min(kind.gpu.link_bytes_per_second for kind in kinds)
    bandwidth = min(link, network.gbit * 1e9 / 8 * NETWORK_EFFICIENCY) if network.hosts > 1 else link
    trained = memory.trained_parameters(shape, layout)
    sent = layout.element_bytes * (layout.world_size - 1) / layout.world_size  # bytes a parameter
    reduce = sent * trained / bandwidth
    gather = second_gather = sent * (shape.parameters if layout.zero_stage == 3 else trained) / bandwidth
    if layout.zero_stage == 3:
        if layout.hpz_partition_size > 1:
            second_gather = sent * shape.parameters / link
        if network.quantized_weights:
            gather, second_gather = gather / 2, second_gather / 2
        if network.quantized_gradients:
            reduce = reduce / 4
        overlapped = accumulation * (gather + second_gather + reduce)
        exposed = ZERO3_ARITHMETIC[layout.compiled] * arithmetic + accumulation * shape.layers * ZERO3_LAYER
        if not layout.compiled:  # of pairs a reference's pass beside forward and backward
            adapters = shape.count_matrices(layout.adapted)
            exposed += accumulation * adapters * (2 + (layout.sequences > 1)) * ZERO3_ADAPTER
    elif layout.zero_stage == 2:
        overlapped, exposed = accumulation * reduce, gather
    elif layout.zero_stage == 1:
        overlapped, exposed = reduce, gather
    else:
        overlapped, exposed = 2 * reduce, 0.0
    if layout.zero_stage < 3 and layout.world_size > 1:
        times = accumulation if layout.zero_stage == 2 else 1
        exposed += times * layout.element_bytes * trained / REDUCE_BYTES_PER_SECOND
    pcie, optimizer = _offload_seconds(shape, layout, kinds, accumulation, threads)
    answers = _answer_seconds(shape, layout, kinds, accumulation, gather)
    return StepTime(arithmetic, max(overlapped, pcie), exposed, optimizer + STEP_LAUNCH, *answers)


def _answer_seconds(
    shape: ModelShape, layout: Layout, kinds: Sequence[Rank], accumulation: int, gather: float
) -> tuple[float, float]:
    """Return (seconds of generating, seconds of scoring answers), a step's share; zeros if no answers are generated.

    `gather` is the seconds in which ZeRO-3 gathers all weights once.
    """
    if not layout.generation_rows:
        return 0.0, 0.0
    whole = 0.0
    if layout.zero_stage == 3:
        slowest = min(kind.gpu.pcie_bytes_per_second for kind in kinds)
        is_away = layout.offload_param != "none"
        whole = gather + is_away * layout.element_bytes * shape.parameters / layout.world_size / slowest
    generation = max(generation_seconds(shape, layout, kind.gpu, accumulation * kind.micro_batch) for kind in kinds)
    forward = max(
        forward_seconds(shape, dataclasses.replace(layout, micro_batch=kind.micro_batch), kind.gpu) for kind in kinds
    )
    return (whole + generation) / layout.updates, layout.scorings * accumulation * forward / layout.updates


def _offload_seconds(
    shape: ModelShape, layout: Layout, kinds: Sequence[Rank], accumulation: int, threads: int
) -> tuple[float, float]:
    """Return (seconds on PCIe that overlap with compute, seconds of the optimizer step) of the slowest of `kinds`."""
    ranks = layout.world_size if layout.zero_stage > 0 else 1
    share = memory.trained_parameters(shape, layout) / ranks  # of the parameters that a rank steps
    pcie = min(kind.gpu.pcie_bytes_per_second for kind in kinds)
    moved = 0.0
    if layout.offload_param != "none":  # weights twice, gradients once
        moved = accumulation * layout.element_bytes * (2 * shape.parameters / ranks + share)
    if layout.offload_optimizer == "none":
        is_one_pass = layout.compiled and layout.zero_stage in (1, 2)
        each, of = (ONE_PASS_BYTES, ONE_PASS_SHARE) if is_one_pass else (STEP_BYTES_PER_PARAMETER, STEP_BANDWIDTH_SHARE)
        return moved / pcie, each * share / (of * min(kind.gpu.memory_bandwidth for kind in kinds))
    if layout.offload_optimizer == "stream":  # master and moments, 12 bytes down while 12 go up
        memory_binds = max(share * kind.slots / (_host_speed(kind) * ADAM_PER_HOST) for kind in kinds)
        return moved / pcie, max(12 * share / (STREAMED * pcie), memory_binds)
    moved += 2 * layout.element_bytes * share
    # New weights come back in fp32, before anything else can go on; weights that live on the host stay there.
    back = 4 * share / pcie if layout.offload_param == "none" else 0.0
    tensors = len(shape.sizes) if layout.trainable is None else 2 * shape.count_matrices(layout.adapted)
    launched = HOST_TENSOR * tensors * (layout.zero_stage < 3)
    seconds = back + launched + max(_host_adam_seconds(share, layout.zero_stage, kind, threads) for kind in kinds)
    if layout.offload_optimizer == "nvme":
        on_host = share * max(kind.slots for kind in kinds)
        seconds += 24 * on_host / NVME_BYTES_PER_SECOND  # master and both moments, read and written
    return moved / pcie, seconds


def _host_adam_seconds(parameters: float, stage: int, kind: Rank, threads: int) -> float:
    """Return the seconds of Adam on a host's cores for `parameters` of each rank, with `threads` cores a rank.

    `stage` is ZeRO's; the ranks of `kind` share the host's memory.
    """
    host = _host_speed(kind)
    rate = min(ADAM_PER_THREAD * threads, host * ADAM_PER_RANK, host * ADAM_PER_HOST / kind.slots)
    return (ZERO3_PASSES if stage == 3 else 1.0) * parameters / rate


def _host_speed(kind: Rank) -> float:
    """Return a host's memory bandwidth relative to a host's with H200s, at most 1, by the PCIe rate of its GPUs."""
    return min(1.0, kind.gpu.pcie_bytes_per_second / NEW_HOST_PCIE)
