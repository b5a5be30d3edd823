"""Tokens per second and days of a plan: arithmetic first, then transfers.

One optimizer step takes max(compute, overlapped transfers) + exposed transfers + the optimizer itself:
compute = tokens FLOPs / (peak x MFU), MFU = the kind's share with compiled layers x 0.78 if not compiled x 0.75 if
recomputed (one more forward) x t / (t + 256) for t tokens a micro-batch. V = 2 N (w-1)/w bytes is one collective over
all weights; it crosses the slowest of the GPU links and each host's network card once. Stage 0 moves 2 V a step, 1 and
2 reduce and gather V, stage 3 gathers twice and reduces once EVERY micro-step: 3 V over 10 Gb/s Ethernet is why a 7B
model takes years.

The measured H200 rows are met within 4 %, but H200's mfu and the shares below were fitted to them; the mixed cluster of
llama2-7b-fincorpus comes out within a factor of 4. CPU ranks have no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finlm.plan.gpus import Gpu
from finlm.plan.memory import Layout
from finlm.recipe.shape import ModelShape

EAGER_SHARE = 0.78  # uncompiled layers; 1 / 1.27 on one H200, of which compile 1.16 (torchtitan, Llama-3.1-8B)
FP8_GAIN = 1.39  # float8 tensorwise over bf16, XuanYuan-6B on one H200
# Of 4 executed forward-equivalents 3 count as model FLOPs; selective runs gate and up again: 0.87 by arithmetic.
RECOMPUTE_SHARE = {"none": 1.0, "selective": 0.878, "full": 0.75}
ZERO3_SHARE = 0.83  # hooks, and gathers that hide behind nothing: two and four H200
HALF_SPEED_TOKENS = 256  # micro-batch at which kernels reach half their speed; fits micro-batches of 2 to 8 x 2048
NETWORK_EFFICIENCY = 0.8  # share of line rate NCCL reaches over TCP or RDMA; assumed
STEP_BYTES_PER_PARAMETER = 43  # fused AdamW 28 + flatten, upcast, clip, copy; the norm reads 2
STEP_BANDWIDTH_SHARE = 0.5  # 275 GB take 0.115 s on one H200
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
    share *= 1.0 if layout.compiled else EAGER_SHARE
    share *= FP8_GAIN if layout.precision == "fp8" else 1.0
    share *= RECOMPUTE_SHARE[layout.recompute]
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
