"""Measure what this machine's GPUs reach: `python -m finlm.train.calibrate` prints a JSON row for every kind of GPU.

Products of matrices as a 7B model has them (hidden 4096, 8,192 tokens), a copy within the GPU's memory, copies from
pinned host memory, and copies between two GPUs. `finlm plan --calibrate` runs it and keeps the rows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROWS, WIDTH, DEPTH = 8192, 4096, 11008
COPIED_BYTES = 1 << 29
SECONDS = 0.5


def main() -> None:
    """Print a JSON row for every kind of GPU in this machine; exit with a message when torch finds none."""
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    seen = set()
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        if name not in seen:
            seen.add(name)
            print(json.dumps(measure_gpu(torch.device("cuda", number))), flush=True)


def measure_gpu(device: torch.device) -> dict[str, Any]:
    """Measure one GPU and return its row: FLOP/s of products, bytes/s of copies, memory and names."""
    properties = torch.cuda.get_device_properties(device)
    others = [n for n in range(torch.cuda.device_count()) if n != device.index]
    return {
        "name": properties.name,
        "host": os.uname().nodename,
        "torch": torch.__version__,
        "memory_bytes": memory_bytes(device, properties.total_memory),
        "capability": properties.major + properties.minor / 10,
        "products": {
            "bf16": measure_products(device, torch.bfloat16) if properties.major >= 8 else None,
            "fp16": measure_products(device, torch.float16),
            "fp32": measure_products(device, torch.float32),
        },
        "copy_bytes_per_second": 2 * measure_copy_rate(device, device),  # read and written
        "pcie_bytes_per_second": measure_copy_rate(torch.device("cpu"), device),
        "link_bytes_per_second": measure_copy_rate(device, torch.device("cuda", others[0])) if others else None,
    }


def memory_bytes(device: torch.device, total: int) -> int:
    """Return the GPU's memory in bytes as nvidia-smi gives it, or `total`, a little less, without pynvml."""
    try:
        return int(torch.cuda.device_memory_used(device) + torch.cuda.mem_get_info(device)[0])
    except (RuntimeError, ModuleNotFoundError):  # without pynvml
        return total


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Measure and return the FLOP/s of [8192, 4096] x [4096, 11008]."""
    left = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    right = torch.randn(WIDTH, DEPTH, device=device, dtype=dtype)
    out = torch.empty(ROWS, DEPTH, device=device, dtype=dtype)
    return 2 * ROWS * WIDTH * DEPTH / time_work(device, lambda: torch.mm(left, right, out=out))


def measure_copy_rate(source: torch.device, target: torch.device) -> float:
    """Measure and return the bytes/s of a large copy; from pinned memory where the source is the host."""
    left = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    right = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=target)
    return COPIED_BYTES / time_work(target, lambda: right.copy_(left, non_blocking=True))


def time_work(device: torch.device, work: Callable[[], Any]) -> float:
    """Run `work` for twice SECONDS, at least 5 times, and return the median seconds of the second half of its runs."""
    times: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + 2 * SECONDS or len(times) < 5:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(times) // 2 :])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
