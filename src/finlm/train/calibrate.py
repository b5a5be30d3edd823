"""What this machine's GPUs reach: `python -m finlm.train.calibrate` prints a JSON row for every kind it finds.

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
    """One row a kind of GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    seen = set()
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        if name not in seen:
            seen.add(name)
            print(json.dumps(measured(torch.device("cuda", number))), flush=True)


def measured(device: torch.device) -> dict[str, Any]:
    """Everything about one GPU."""
    properties = torch.cuda.get_device_properties(device)
    others = [n for n in range(torch.cuda.device_count()) if n != device.index]
    return {
        "name": properties.name,
        "host": os.uname().nodename,
        "torch": torch.__version__,
        "memory_bytes": memory_bytes(device, properties.total_memory),
        "capability": properties.major + properties.minor / 10,
        "products": {
            "bf16": products(device, torch.bfloat16) if properties.major >= 8 else None,
            "fp16": products(device, torch.float16),
            "fp32": products(device, torch.float32),
        },
        "copy_bytes_per_second": 2 * copied(device, device),  # read and written
        "pcie_bytes_per_second": copied(torch.device("cpu"), device),
        "link_bytes_per_second": copied(device, torch.device("cuda", others[0])) if others else None,
    }


def memory_bytes(device: torch.device, total: int) -> int:
    """What nvidia-smi calls the GPU's memory: a little more than torch may use."""
    try:
        return int(torch.cuda.device_memory_used(device) + torch.cuda.mem_get_info(device)[0])
    except (RuntimeError, ModuleNotFoundError):  # without pynvml
        return total


def products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of [8192, 4096] x [4096, 11008]."""
    left = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    right = torch.randn(WIDTH, DEPTH, device=device, dtype=dtype)
    out = torch.empty(ROWS, DEPTH, device=device, dtype=dtype)
    return 2 * ROWS * WIDTH * DEPTH / seconds(device, lambda: torch.mm(left, right, out=out))


def copied(source: torch.device, target: torch.device) -> float:
    """Bytes a second of a large copy; from pinned memory where the source is the host."""
    left = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    right = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=target)
    return COPIED_BYTES / seconds(target, lambda: right.copy_(left, non_blocking=True))


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Median seconds of the work, after a warm-up as long."""
    found: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + 2 * SECONDS or len(found) < 5:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[len(found) // 2 :])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
