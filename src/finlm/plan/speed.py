"""Tokens per second and days of a plan: arithmetic first, then transfers.

One optimizer step takes max(compute, overlapped transfers) + exposed transfers + the optimizer itself:
compute = tokens FLOPs / (peak x MFU), MFU = the kind's eager share x 1.16 if compiled x 0.75 if recomputed (one more
forward) x t / (t + 256) for t tokens a micro-batch. V = 2 N (w-1)/w bytes is one collective over all weights; it
crosses the slowest of the GPU links and each host's network card once. Stage 0 moves 2 V a step, 1 and 2 reduce and
gather V, stage 3 gathers twice and reduces once EVERY micro-step: 3 V over 10 Gb/s Ethernet is why a 7B model takes
years.

The measured H200 rows are met within 6 %, but H200's mfu and ZERO3_SHARE were fitted to them; the mixed cluster of
llama2-7b-fincorpus comes out within a factor of 4, XuanYuan-70B's 340 tok/s/GPU 28 % low (eager here, fused there).
CPU ranks have no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finlm.plan.gpus import Gpu
from finlm.plan.memory import Layout
from finlm.recipe.shape import ModelShape

COMPILED_GAIN = 1.16  # torchtitan, Llama-3.1-8B: 5,762 -> 6,667 tok/s with per-layer compile
RECOMPUTE_SHARE = 0.75  # 3 of 4 executed forward-equivalents count as model FLOPs
ZERO3_SHARE = 0.94  # hooks, and gathers that hide behind nothing: our own row on 4 H200
HALF_SPEED_TOKENS = 256  # micro-batch at which kernels reach half their speed; fits micro-batches of 2 to 8 x 2048
NETWORK_EFFICIENCY = 0.8  # share of line rate NCCL reaches over TCP or RDMA; assumed
STEP_BYTES_PER_PARAMETER = 58  # fused AdamW 28 + flatten, upcast, norm, clip, copy 30
STEP_BANDWIDTH_SHARE = 0.5  # 370 GB take 0.17 s on one H200
CPU_ADAM_PARAMETERS_PER_SECOND = 1.83e9  # a host; 6.39e9 parameters in 3.5 s beside one H200
NVME_BYTES_PER_SECOND = 5e9  # a host's read + write average; assumed


@dataclass(frozen=True)
class Rank:
    """The GPU kind and the ranks of a host; identical hosts need to be named once."""

    gpu: Gpu
    slots: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by cause."""

    compute: float
    overlapped: float
    exposed: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max(self.compute, self.overlapped) + self.exposed + self.optimizer


def mfu(gpu: Gpu, layout: Layout) -> float:
    """Share of the peak during forward and backward, before transfers and the optimizer step."""
    share = gpu.mfu * layout.tokens / (layout.tokens + HALF_SPEED_TOKENS)
    share *= COMPILED_GAIN if layout.kernels == "fused" else 1.0
    share *= RECOMPUTE_SHARE if layout.recompute == "full" else 1.0
    share *= ZERO3_SHARE if layout.zero_stage == 3 else 1.0
    # fp32 runs outside the 16-bit matrix units (TF32 at best): an eighth of the peak.
    return share / 8 if layout.precision == "fp32" else share


def step_time(
    shape: ModelShape,
    layout: Layout,
    kinds: Sequence[Rank],
    hosts: int,
    accumulation: int,
    network_gbit: float,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
) -> StepTime:
    """Seconds of one optimizer step on `hosts` hosts of these kinds; the slowest GPU, link and host bind."""
    flops = shape.flops_per_token(layout.sequence_length) * layout.tokens * accumulation
    compute = max(flops / (kind.gpu.peak_flops * mfu(kind.gpu, layout)) for kind in kinds)
    link = min(kind.gpu.link_bytes_per_second for kind in kinds)
    bandwidth = min(link, network_gbit * 1e9 / 8 * NETWORK_EFFICIENCY) if hosts > 1 else link
    collective = layout.element_bytes * shape.parameters * (layout.world_size - 1) / layout.world_size
    gather, second_gather, reduce = collective / bandwidth, collective / bandwidth, collective / bandwidth
    if layout.zero_stage == 3:
        if layout.hpz_partition_size > 1:
            second_gather = collective / link
        if quantized_weights:
            gather, second_gather = gather / 2, second_gather / 2
        if quantized_gradients:
            reduce = reduce / 4
        overlapped, exposed = accumulation * (gather + second_gather + reduce), 0.0
    elif layout.zero_stage == 2:
        overlapped, exposed = accumulation * reduce, gather
    elif layout.zero_stage == 1:
        overlapped, exposed = reduce, gather
    else:
        overlapped, exposed = 2 * reduce, 0.0
    pcie, optimizer = _offload_seconds(shape, layout, kinds, accumulation)
    return StepTime(compute, max(overlapped, pcie), exposed, optimizer)


def _offload_seconds(
    shape: ModelShape, layout: Layout, kinds: Sequence[Rank], accumulation: int
) -> tuple[float, float]:
    """(seconds on PCIe that overlap with compute, seconds of the optimizer step)."""
    ranks = layout.world_size if layout.zero_stage > 0 else 1
    own = shape.parameters / ranks
    pcie = min(kind.gpu.pcie_bytes_per_second for kind in kinds)
    moved = 3 * accumulation * layout.element_bytes * own if layout.offload_param != "none" else 0.0
    if layout.offload_optimizer == "none":
        bandwidth = STEP_BANDWIDTH_SHARE * min(kind.gpu.memory_bandwidth for kind in kinds)
        return moved / pcie, STEP_BYTES_PER_PARAMETER * own / bandwidth
    moved += 2 * layout.element_bytes * own
    on_host = own * max(kind.slots for kind in kinds)
    seconds = on_host / CPU_ADAM_PARAMETERS_PER_SECOND
    if layout.offload_optimizer == "nvme":
        seconds += 24 * on_host / NVME_BYTES_PER_SECOND  # master and both moments, read and written
    return moved / pcie, seconds
