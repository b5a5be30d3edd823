"""The host's cores beside a rank's GPU, for ranks whose optimizer or weights are in host memory.

On a host of two sockets half of the memory and of the cores are behind another link than the GPU. A rank that stays on
its GPU's side touches its memory there first, so that transfers and DeepSpeed's CPU Adam take the short way; DeepSpeed
measured 1.16 times the speed with bound cores (ZenFlow report, Qwen2.5-3B on A100s).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from finlm.base import nvidia
from finlm.plan.plan import Plan

DEVICES = Path("/sys/bus/pci/devices")


def bind(plan: Plan) -> None:
    """Keep this rank and the threads it will start on the cores near its GPU, where that is known and states are moved.

    Cores that the process may not use anyway (taskset, a container's limits) stay out; where too few for its threads
    are left, it stays free.
    """
    if plan.device != "cuda" or plan.offload_optimizer == plan.offload_param == "none":
        return
    near = near_cores(bus_address(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    usable = near & os.sched_getaffinity(0)
    if len(usable) >= torch.get_num_threads():
        os.sched_setaffinity(0, usable)


def bus_address(uuid: object) -> str | None:
    """Where a GPU is on the PCI bus, as Linux names it (0000:1b:00.0); None when nvidia-smi does not say."""
    found = {row["uuid"]: row["pci.bus_id"] for row in nvidia.gpus("uuid", "pci.bus_id")}.get(f"GPU-{uuid}")
    return None if found is None else found.lower()[-len("0000:1b:00.0") :]


def near_cores(address: str | None) -> set[int]:
    """Numbers of the cores on a PCI device's side of the host; empty when it has no side, or none is known."""
    try:
        if address is None or int((DEVICES / address / "numa_node").read_text()) < 0:
            return set()
        ranges = (DEVICES / address / "local_cpulist").read_text().strip().split(",")
    except (OSError, ValueError):
        return set()
    found: set[int] = set()
    for first, _, last in (part.partition("-") for part in ranges if part):
        found.update(range(int(first), int(last or first) + 1))
    return found
