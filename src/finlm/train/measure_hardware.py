"""Measure what GPUs and the links between them reach, with torch and nothing else of ours.

`finlm plan --calibrate` runs measure_gpus: products of matrices as a 7B model has them (hidden 4096, 8,192 tokens), a
copy within the GPU's memory, copies from pinned host memory, and copies between two GPUs.

`finlm doctor --allreduce` pipes this file and a call of time_links to `python -` on every host at once. It times every
link with real collectives: each pair of hosts by itself, then all ranks together. A pair gets a process group of its
own with a short timeout, so that a dead link fails alone and is named; the pairs of a round are disjoint and do not
slow each other. On one host the pairs are its GPUs.

Each line of output is MARK and a JSON object: {"kind": "begun" | "measured" | "failed", "ranks": [...], ...}. Bandwidth
is NCCL's bus bandwidth, 2 (n - 1) / n * bytes / seconds: what a link carries, whatever the number of ranks n
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). It does not judge; doctor/speed.py does.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARK = "finlm-link:"
MIB = 1 << 20
LARGEST_BYTES = {"nccl": 512 * MIB, "gloo": 16 * MIB}
ENOUGH_SECONDS = 0.05  # a message that takes so long is large enough to time
REPEATS = 5


def time_links(request: dict[str, Any]) -> int:
    """Fork this host's ranks, which print results; wait for them; return 0 when all of them ended well, else 1.

    `request` has `backend` (nccl or gloo), `address` and `port` of the first rank, `first_rank` (of this host), `slots`
    (its ranks), `world_size`, `points` (the ranks that are paired), `env` (set in os.environ), `seconds` (after which a
    rank is killed) and `group_seconds` (the timeout of a process group).
    """
    os.environ.update(request["env"])
    children = []
    for local_rank in range(request["slots"]):
        child = os.fork()  # before torch is imported: its threads would not survive
        if child == 0:
            signal.alarm(int(request["seconds"]))  # whatever hangs, nothing stays behind
            code = 1
            try:
                code = Rank(request, local_rank).run()
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def rounds(points: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, until every pair of points was in one (round-robin tournament, circle method).

    The smaller point of a pair comes first. Of an odd number one point rests in each round.
    """
    circle: list[int | None] = [*points, *([None] if len(points) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        drawn = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in drawn if a is not None and b is not None]
        circle.insert(1, circle.pop())


class Rank:
    """A process of time_links(): it takes part in the groups that contain it, in the same order as all others."""

    def __init__(self, request: dict[str, Any], local_rank: int) -> None:
        """Take the request of time_links() and the index among this host's ranks; connect nothing yet."""
        self.request, self.local_rank = request, local_rank
        self.rank = request["first_rank"] + local_rank
        self.patience = timedelta(seconds=request["group_seconds"])
        self.longest = 6 * self.patience  # gloo tries five times to connect, each time for the group's timeout

    def run(self) -> int:
        """Meet the other ranks, measure the pairs, then all ranks together; return 0, or 1 when meeting them failed.

        All ranks together are measured when they are more than two and no pair failed. Prints a line for each start,
        result and failure; with NCCL a failed group ends the process with code 1.
        """
        # With it a collective that times out raises; without it torch ends the process.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        cuda = self.request["backend"] == "nccl"
        if cuda:
            torch.cuda.set_device(self.local_rank)
        self.device = torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")
        everyone = list(range(self.request["world_size"]))
        try:
            address, port = self.request["address"], self.request["port"]
            self.store = TCPStore(address, port, is_master=self.rank == 0, timeout=self.longest, wait_for_workers=False)
            self.meet("start")
            for number, pairs in enumerate(rounds(self.request["points"])):
                for pair in pairs:
                    if self.rank in pair:
                        self.measure(pair)
                self.meet(f"round {number}")
            if not self.store.check(["failed"]) and len(everyone) > 2:
                self.measure(everyone)
                self.meet("end")
        except (RuntimeError, distributed.DistError) as error:
            self.print_line("failed", everyone, error=_first_line(error))
            return 1
        return 0

    def meet(self, where: str) -> None:
        """Wait until all ranks have called meet(where), each time a new name; DistError after self.longest."""
        # Through the store on rank 0, not a barrier: works also when a link between two others is dead.
        self.store.set(f"{where}/{self.rank}", "here")
        self.store.wait([f"{where}/{rank}" for rank in range(self.request["world_size"])], self.longest)

    def measure(self, ranks: Sequence[int]) -> None:
        """Make a process group of `ranks`, time it, destroy it; print a line at the start and its result or error.

        An error is also noted in the store; with NCCL it ends this process with code 1.
        """
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.print_line("begun", ranks)
        name = "-".join(map(str, ranks))
        try:
            distributed.init_process_group(
                self.request["backend"],
                store=PrefixStore(name, self.store),
                rank=list(ranks).index(self.rank),
                world_size=len(ranks),
                timeout=self.patience,
            )
            result = self.time_all_reduce(len(ranks))
            distributed.destroy_process_group()
        except (RuntimeError, distributed.DistError) as error:
            self.store.set("failed", name)
            self.print_line("failed", ranks, error=_first_line(error))
            if self.request["backend"] == "nccl":
                os._exit(1)  # a communicator that failed cannot be left in order
            if distributed.is_initialized():
                distributed.destroy_process_group()
            # torch names a group by the number of attempts, and the next peer may have made fewer.
            distributed.distributed_c10d._world.group_count = 0
            return
        self.print_line("measured", ranks, **result)

    def time_all_reduce(self, members: int) -> dict[str, object]:
        """Return {latency, bytes, seconds, bus_bytes_per_second} of all-reduces in the current group. Collective.

        latency is the median seconds for a single number; the rest is of the largest message. `members` is the group's
        size. Raises RuntimeError when a sum is wrong, and what torch raises when a collective fails.
        """
        import torch

        small = torch.ones(1, device=self.device)
        self.seconds_of(small, 1)  # connects
        latency = statistics.median(self.seconds_of(small, 1) for _ in range(4 * REPEATS))
        size = MIB
        while True:  # messages grow fourfold until they are large enough to time
            values = torch.ones(size // 4, device=self.device)
            self.seconds_of(values, 1)
            if not bool((values == members).all()):
                raise RuntimeError(f"wrong result: {members} ones were added to {values.min()} .. {values.max()}")
            seconds = min(self.seconds_of(values.zero_(), REPEATS) for _ in range(2))
            if seconds > ENOUGH_SECONDS or size >= LARGEST_BYTES[self.request["backend"]]:
                break
            size *= 4
        bandwidth = 2 * (members - 1) / members * size / seconds
        return {"latency": latency, "bytes": size, "seconds": seconds, "bus_bytes_per_second": bandwidth}

    def seconds_of(self, values: Any, repeats: int) -> float:
        """Return the seconds of an all-reduce of `values`, in place: mean of `repeats`, maximum of the group."""
        import torch
        from torch import distributed

        begun = time.perf_counter()
        for _ in range(repeats):
            distributed.all_reduce(values)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor([(time.perf_counter() - begun) / repeats], device=self.device)
        distributed.all_reduce(taken, distributed.ReduceOp.MAX)
        return float(taken.item())

    def print_line(self, kind: str, ranks: Sequence[int], **fields: Any) -> None:
        """Write a line to stdout: MARK and a JSON object of kind, rank, ranks and `fields`."""
        line = {"kind": kind, "rank": self.rank, "ranks": list(ranks), **fields}
        # In a single write: the ranks of a host share the pipe.
        os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


def _first_line(error: BaseException) -> str:
    """Return the first line of the error's message, at most 300 characters; its class without any."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


ROWS, WIDTH, DEPTH = 8192, 4096, 11008
COPIED_BYTES = 1 << 29
SECONDS = 1.0


def measure_gpus() -> None:
    """Print measure_gpu()'s JSON row of the first GPU of every kind in this machine; SystemExit without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    seen = set()
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        if name not in seen:
            seen.add(name)
            print(json.dumps(measure_gpu(torch.device("cuda", number))), flush=True)


def measure_gpu(device: torch.device) -> dict[str, object]:
    """Measure a GPU and return its row: names, bytes of memory, FLOP/s of products, bytes/s of copies. Takes seconds.

    The bf16 product is None below compute capability 8.0, link_bytes_per_second without another GPU.
    """
    import torch

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
    """Return the GPU's memory in bytes as nvidia-smi gives it; without pynvml return `total`, a little less."""
    import torch

    try:
        return int(torch.cuda.device_memory_used(device) + torch.cuda.mem_get_info(device)[0])
    except (RuntimeError, ModuleNotFoundError):  # without pynvml
        return total


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Measure and return the FLOP/s of the product [8192, 4096] x [4096, 11008] in `dtype`."""
    import torch

    left = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    right = torch.randn(WIDTH, DEPTH, device=device, dtype=dtype)
    out = torch.empty(ROWS, DEPTH, device=device, dtype=dtype)
    return 2 * ROWS * WIDTH * DEPTH / time_work(device, lambda: torch.mm(left, right, out=out))


def measure_copy_rate(source: torch.device, target: torch.device) -> float:
    """Measure and return the bytes/s of copying 512 MiB between two devices, from pinned memory on a CPU."""
    import torch

    left = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    right = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=target)
    return COPIED_BYTES / time_work(target, lambda: right.copy_(left, non_blocking=True))


def time_work(device: torch.device, work: Callable[[], Any]) -> float:
    """Run `work` on `device` for SECONDS, at least 5 times; return the median seconds of the later half of the runs."""
    times: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + SECONDS or len(times) < 5:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(times) // 2 :])


def _wait(device: torch.device) -> None:
    """Wait until the device has done its work; do nothing for a CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
