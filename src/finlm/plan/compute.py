"""Seconds a GPU and its host need for one micro-batch, forward and backward, before any transfer between GPUs.

Three kinds of work are added up: matrix products against the peak, attention against the peak, and everything else
against the memory's bandwidth. The host, which launches every kernel, works beside them; the slower of the two counts,
so small models are bound by it. The constants were fitted to runs on H200s (benchmarks/gpu_plan.py; what is left of the
error is in tests/plan/test_measured.py). Other kinds keep these proportions and are scaled as a whole, so that a 7B
model reaches the kind's `mfu` of gpus.yaml.
"""

from __future__ import annotations

import functools
from typing import Literal

from finlm.plan.gpus import Gpu, kinds
from finlm.plan.memory import UNPACKED, Layout
from finlm.recipe.shape import ModelShape

REFERENCE = "H200"
SEVEN_B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000, tied=False)
NARROWEST = 1024  # hidden size of the narrowest model these were fitted to; one of 768 reached 0.8 of the prediction
PRODUCTS = 0.729  # share of the peak that large matrix products reach
HALF_SPEED_WIDTH = 170  # hidden size at which they reach half of that
HALF_SPEED_TOKENS = 720  # tokens of a micro-batch at which they do
ATTENTION = 0.59  # share of the peak that causal attention reaches, forward and backward together
FLOAT8 = 1.96  # float8 products over bf16 ones, casts apart
COMPILED_BYTES = 0.9  # traffic of everything else over what its inputs and outputs amount to
EAGER_BYTES = 4.24  # one kernel an operation, fp32 copies in the norms
LOGIT_BYTES = 8  # read and written a logit by the loss, beside its three products
BANDWIDTH = 0.75  # share of the memory's bandwidth that such kernels reach
LAYER_LAUNCH = {True: 0.52e-3, False: 1.6e-3}  # seconds of the host a layer, forward and backward: compiled, eager
MICRO_STEP_LAUNCH = 5.2e-3  # beside the layers: embedding, loss, engine, data


def micro_step_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """The slower of the GPU's and the host's work on one micro-batch."""
    return max(gpu_seconds(shape, layout, gpu), host_seconds(shape, layout))


def gpu_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Seconds of the GPU alone."""
    return _raw_seconds(shape, layout, gpu) / _scale(gpu)


def host_seconds(shape: ModelShape, layout: Layout) -> float:
    """Seconds the host needs to launch one micro-batch's kernels."""
    passes = 1.3 if layout.recompute == "full" else 1.0
    return MICRO_STEP_LAUNCH + passes * shape.layers * LAYER_LAUNCH[layout.compiled]


@functools.cache
def _scale(gpu: Gpu) -> float:
    """What turns the reference kind's proportions into this kind's mfu at 7B."""
    reference = kinds()[REFERENCE]
    return (gpu.mfu / _reached(gpu)) / (reference.mfu / _reached(reference))


def _reached(gpu: Gpu) -> float:
    """MFU of a compiled 7B model with large micro-batches by the proportions alone."""
    precision: Literal["bf16", "fp16"] = "bf16" if gpu.has_bf16 else "fp16"
    layout = Layout("cuda", precision, 1, "none", "none", "none", 8, 2048, 1, compiled=True)
    flops = SEVEN_B.flops_per_token(layout.sequence_length) * layout.tokens
    return flops / _raw_seconds(SEVEN_B, layout, gpu) / gpu.peak_flops


def _raw_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    tokens, hidden, ffn = layout.tokens, shape.hidden, shape.ffn
    width = hidden // shape.heads * shape.kv_heads
    peak = gpu.fp32_flops if layout.precision == "fp32" else gpu.peak_flops
    rate = PRODUCTS * peak * hidden / (hidden + HALF_SPEED_WIDTH) * tokens / (tokens + HALF_SPEED_TOKENS)
    # Forward counts 1, backward 2 (under adapters 1: no weight's gradient), recomputation what it repeats: nobody needs
    # the block's output again.
    passes = 3 if layout.trainable is None else 2
    layer = 3 * ffn + 2 * hidden + 2 * width
    again = {"none": 0.0, "selective": 2 * ffn / layer, "full": 1 - ffn / layer}[layout.recompute]
    products = 2 * (shape.layer_parameters - 2 * hidden) * tokens * (passes + again)
    float8 = FLOAT8 if layout.precision == "fp8" else 1.0
    head = 2 * passes * shape.vocab * hidden * tokens
    # 2 h S / 2 each for scores and values forward, two and a half times that backward.
    attended = 2 * layout.sequence_length * hidden * tokens * (3.5 + (layout.recompute == "full"))
    seconds = (shape.layers * products / float8 + head) / rate + shape.layers * attended / (ATTENTION * peak)
    return seconds + _moved_bytes(shape, layout) / (BANDWIDTH * gpu.memory_bandwidth)


def _moved_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes that everything but matrix products and attention reads and writes."""
    tokens, e = layout.tokens, layout.element_bytes
    width = shape.hidden // shape.heads * shape.kv_heads
    # Norms, residuals and rotations read and write 12 h forward; SwiGLU 3 f; backward twice as much.
    forward = 12 * shape.hidden + 4 * width + 3 * shape.ffn
    again = {"none": 0.0, "selective": 3 * shape.ffn / forward, "full": 1.0}[layout.recompute]
    factor = COMPILED_BYTES if layout.compiled else EAGER_BYTES
    moved = shape.layers * tokens * e * forward * (3 + again) * factor
    if layout.weight_bytes is not None:  # forward, backward, recomputation: 4 bits to a matrix; read, not measured
        moved += shape.layers * 2 * UNPACKED * shape.layer_parameters * (2 + (layout.recompute != "none"))
    if layout.precision == "fp8":
        # Amax and cast of inputs, weights and gradients: read twice, written once in one byte.
        per_token = 3 * (5 * shape.hidden + 2 * width + 3 * shape.ffn)
        moved += shape.layers * 5 * (per_token * tokens + 2 * shape.layer_parameters)
    return moved + LOGIT_BYTES / 2 * e * shape.vocab * tokens
