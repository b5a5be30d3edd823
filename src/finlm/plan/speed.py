"""Tokens per second and days of a plan: arithmetic (compute.py), transfers between GPUs and hosts, the optimizer.

One optimizer step takes max(compute, overlapped transfers) + exposed transfers + the optimizer itself. V = 2 N (w-1)/w
bytes is one collective over all N weights; it crosses the slowest of the GPU links and each host's network card once.
With adapters N is theirs; only stage 3 gathers all weights then.
Stage 0 moves 2 V a step, 1 and 2 reduce and gather V, stage 3 gathers twice and reduces once EVERY micro-step: 3 V over
10 Gb/s Ethernet is why a 7B model takes years. An offloaded optimizer steps on the host's cores, where the
recipe's OMP_NUM_THREADS counts, or passes through the GPU, where PCIe does.

tests/plan/test_measured.py holds it to runs on H200s. CPU ranks have no prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from finlm.plan import compute, memory
from finlm.plan.gpus import Gpu
from finlm.plan.memory import Layout
from finlm.recipe.shape import ModelShape

NETWORK_EFFICIENCY = 0.8  # share of line rate NCCL reaches over TCP or RDMA; assumed
LINK_EFFICIENCY = 0.75  # share of a GPU link's rate that collectives reach
REDUCE_BYTES_PER_SECOND = 155e9  # copies into buckets and what of a reduction hides behind nothing: two and four H200
ZERO3_ARITHMETIC = {True: 0.074, False: 0.17}  # of the arithmetic, added by ZeRO-3: compiled, eager
ZERO3_LAYER = 0.6e-3  # and seconds of hooks a layer and micro-step
STEP_BYTES_PER_PARAMETER = 43  # fused AdamW 28 + flatten, upcast, clip, copy; the norm reads 2
STEP_BANDWIDTH_SHARE = 0.5  # 275 GB take 0.115 s on one H200
STEP_LAUNCH = 5.7e-3  # seconds of the host a step: clipping, groups, the loss read back, the record
THREADS = 16  # of a rank whose optimizer is offloaded (ops/launch_env.py)
ADAM_PER_THREAD = 0.25e9  # parameters a second of Adam on a server's core; 0.62e9 on one of Zen 5
ADAM_PER_RANK = 3.3e9  # where memory binds, beside H200s
ADAM_PER_HOST = 6.5e9
ZERO3_PASSES = 1.65  # ZeRO-3's unscaling, overflow check and flat copies, in times of Adam itself
NEW_HOST_PCIE = 50e9  # a host is taken to be as old as its GPUs' PCIe; older ones are as much slower
NVME_BYTES_PER_SECOND = 5e9  # a host's read + write average; assumed


@dataclass(frozen=True)
class Rank:
    """The GPU kind, the ranks of a host and their micro-batch; identical hosts need to be named once."""

    gpu: Gpu
    slots: int
    micro_batch: int


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


def compute_seconds(shape: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Seconds of forward and backward of one micro-batch, without transfers."""
    return compute.micro_step_seconds(shape, layout, gpu)


def step_time(
    shape: ModelShape,
    layout: Layout,
    kinds: Sequence[Rank],
    hosts: int,
    accumulation: int,
    network_gbit: float,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    threads: int = THREADS,
) -> StepTime:
    """Seconds of one optimizer step on `hosts` hosts of these kinds; the slowest GPU, link and host bind.

    Micro-batches are the kinds' own; the layout's does not count. threads: OMP_NUM_THREADS of a rank.
    """
    arithmetic = accumulation * max(
        compute_seconds(shape, dataclasses.replace(layout, micro_batch=kind.micro_batch), kind.gpu) for kind in kinds
    )
    link = LINK_EFFICIENCY * min(kind.gpu.link_bytes_per_second for kind in kinds)
    bandwidth = min(link, network_gbit * 1e9 / 8 * NETWORK_EFFICIENCY) if hosts > 1 else link
    trained = memory.trained(shape, layout)
    sent = layout.element_bytes * (layout.world_size - 1) / layout.world_size  # bytes a parameter
    reduce = sent * trained / bandwidth
    gather = second_gather = sent * (shape.parameters if layout.zero_stage == 3 else trained) / bandwidth
    if layout.zero_stage == 3:
        if layout.hpz_partition_size > 1:
            second_gather = sent * shape.parameters / link
        if quantized_weights:
            gather, second_gather = gather / 2, second_gather / 2
        if quantized_gradients:
            reduce = reduce / 4
        overlapped = accumulation * (gather + second_gather + reduce)
        exposed = ZERO3_ARITHMETIC[layout.compiled] * arithmetic + accumulation * shape.layers * ZERO3_LAYER
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
    return StepTime(arithmetic, max(overlapped, pcie), exposed, optimizer + STEP_LAUNCH)


def _offload_seconds(
    shape: ModelShape, layout: Layout, kinds: Sequence[Rank], accumulation: int, threads: int
) -> tuple[float, float]:
    """(seconds on PCIe that overlap with compute, seconds of the optimizer step)."""
    ranks = layout.world_size if layout.zero_stage > 0 else 1
    own = memory.trained(shape, layout) / ranks
    pcie = min(kind.gpu.pcie_bytes_per_second for kind in kinds)
    moved = 0.0
    if layout.offload_param != "none":  # weights twice, gradients once
        moved = accumulation * layout.element_bytes * (2 * shape.parameters / ranks + own)
    if layout.offload_optimizer == "none":
        bandwidth = STEP_BANDWIDTH_SHARE * min(kind.gpu.memory_bandwidth for kind in kinds)
        return moved / pcie, STEP_BYTES_PER_PARAMETER * own / bandwidth
    if layout.offload_optimizer == "stream":  # master and moments, 12 bytes down while 12 go up
        memory_binds = max(own * kind.slots / (_age(kind) * ADAM_PER_HOST) for kind in kinds)
        return moved / pcie, max(12 * own / pcie, memory_binds)
    moved += 2 * layout.element_bytes * own
    # New weights come back in fp32, before anything else can go on; weights that live on the host stay there.
    back = 4 * own / pcie if layout.offload_param == "none" else 0.0
    seconds = back + max(host_adam_seconds(own, layout.zero_stage, kind, threads) for kind in kinds)
    if layout.offload_optimizer == "nvme":
        on_host = own * max(kind.slots for kind in kinds)
        seconds += 24 * on_host / NVME_BYTES_PER_SECOND  # master and both moments, read and written
    return moved / pcie, seconds


def host_adam_seconds(parameters: float, stage: int, kind: Rank, threads: int) -> float:
    """Seconds of Adam on a host's cores: `parameters` of each of its ranks, which share its memory."""
    rate = min(ADAM_PER_THREAD * threads, _age(kind) * ADAM_PER_RANK, _age(kind) * ADAM_PER_HOST / kind.slots)
    return (ZERO3_PASSES if stage == 3 else 1.0) * parameters / rate


def _age(kind: Rank) -> float:
    """Memory bandwidth of a host over that of one beside H200s."""
    return min(1.0, kind.gpu.pcie_bytes_per_second / NEW_HOST_PCIE)
