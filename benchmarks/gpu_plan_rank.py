"""A rank of gpu_plan.py: `python gpu_plan_rank.py RUN_DIR STEPS [--trace]` trains and writes rank-N.json after STEPS.

The trainer is finlm.train as it is; a thread beside it follows the memory. --drawn: imports come first, then it waits
for RUN_DIR/go, and weights are drawn where the recipe would read them.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.plan.plan import ON_HOST, Plan

GENERATIONS: list[float] = []  # seconds of each generation of GRPO and PPO


def main() -> None:
    """Train as `finlm train` does."""
    run_path, steps, trace = Path(sys.argv[1]), int(sys.argv[2]), "--trace" in sys.argv
    if "--drawn" in sys.argv:
        prepare(run_path)
    threading.Thread(target=watch, args=(run_path, steps, trace), daemon=True).start()
    sys.argv = ["finlm.train", str(run_path)]
    runpy.run_module("finlm.train", run_name="__main__")


def prepare(run_path: Path) -> None:
    """Import what the stage needs, replace the reading of weights, wait for the file `go`."""
    import importlib

    from finlm.recipe import recipe
    from finlm.train.__main__ import STAGES
    from finlm.train.model import causal_lm

    stage = recipe.load(run_path / "recipe.yaml").recipe.stage
    importlib.import_module(f"finlm.train.{STAGES[stage]}")
    if Plan.read(run_path / "plan.json").offload_optimizer in ON_HOST:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()  # compiled here: within the first step it would take the time of the case
    causal_lm._from_pretrained = lambda loaded, plan, settings, config, _: causal_lm._from_scratch(  # type: ignore[assignment]
        loaded, plan, settings, config
    )
    if stage == "grpo":
        time_generation()
    while not (run_path / "go").exists():
        time.sleep(0.05)


def time_generation() -> None:
    """Note the seconds of every generation from here on in GENERATIONS."""
    import torch

    from finlm.train.post.grpo import GroupTrainer

    generate = GroupTrainer._generate_single_turn

    def timed(*given: Any) -> Any:
        """Generate, and note the seconds."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the step before left to do
        begun = time.monotonic()
        answers = generate(*given)
        GENERATIONS.append(time.monotonic() - begun)
        return answers

    GroupTrainer._generate_single_turn = timed  # type: ignore[method-assign]


def watch(run_path: Path, steps: int, trace: bool) -> None:
    """Follow this process's memory until the steps are done."""
    run, growth, tracing, peak = RunDir(run_path), [], False, 0
    started, most_used = time.monotonic(), 0
    while True:
        time.sleep(0.2)
        torch = sys.modules.get("torch")
        cuda = torch.cuda if torch is not None and hasattr(torch, "cuda") else None
        on_gpu = cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized()
        if on_gpu and not growth:
            cuda.set_device(int(os.environ["LOCAL_RANK"]))  # a thread begins at device 0
            if trace:
                cuda.memory._record_memory_history(stacks="python", max_entries=2_000_000)
                tracing = True
        if on_gpu:
            free, total = cuda.mem_get_info()
            most_used = max(most_used, total - free)
        if on_gpu and (not growth or cuda.max_memory_allocated() > peak):
            peak = cuda.max_memory_allocated()
            growth.append([round(time.monotonic() - started, 1), cuda.memory_allocated(), peak])
        if run.events.exists() and len(list(run.read_events("step"))) >= steps:
            break
    found: dict[str, Any] = {"growth": growth, "rss": proc_status("VmHWM"), "locked": proc_status("VmLck")}
    found |= {"generation_seconds": GENERATIONS} if GENERATIONS else {}
    if on_gpu:
        found |= {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}
        found |= {
            "device_used": most_used,
            "device_total": total,
            "active": cuda.memory_stats()["active_bytes.all.peak"],
        }
        found |= {"retries": cuda.memory_stats()["num_alloc_retries"]}
    if tracing:
        try:
            found["at_peak"] = at_peak(cuda.memory._snapshot(), cuda.current_device())
        except (KeyError, IndexError, TypeError) as error:  # the snapshot's form is torch's own affair
            found["at_peak"] = repr(error)
    partial = run_path / f"rank-{os.environ['RANK']}.partial"
    files.write_json(partial, found)
    partial.rename(run_path / f"rank-{os.environ['RANK']}.json")


def proc_status(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def at_peak(snapshot: dict[str, Any], device: int, count: int = 30) -> list[tuple[int, int, str]]:
    """(bytes, allocations, innermost frames outside torch's own allocator) of what lived at the highest point."""
    alive: dict[int, tuple[int, str]] = {}
    now = highest = 0
    best: dict[int, tuple[int, str]] = {}
    events = snapshot["device_traces"][device]
    totals = []
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            now += event["size"]
        elif event["action"] == "free_requested":
            now -= event["size"]
        totals.append((now, number))
    if not totals:
        return []
    highest, last = max(totals)
    for event in events[: last + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], where(event.get("frames", [])))
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    best = alive
    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for size, frame in best.values():
        sizes[frame] += size
        numbers[frame] += 1
    rows = [(size, numbers[frame], frame) for frame, size in sizes.most_common(count)]
    return [(highest, len(best), f"peak at event {last} of {len(events)}"), *rows]


def where(frames: list[dict[str, Any]], depth: int = 5) -> str:
    """The innermost Python frames of an allocation, short."""
    named = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py")
    ]
    return " < ".join(named[:depth])


if __name__ == "__main__":
    main()
