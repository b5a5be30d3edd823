"""Predictions against runs on H200s: benchmarks/results/*-h200-plan.jsonl, of gpu_plan.py and gpu_pretrain.py."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from finlm.plan import gpus, host_memory, memory, search, speed
from finlm.plan.memory import Layout
from finlm.recipe.shape import ModelShape

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


@cache
def rows() -> list[tuple[dict[str, Any], ModelShape, Layout]]:
    """Row, shape and layout of every case, each as it was measured last."""
    files = sorted(RESULTS.glob("*-h200-plan.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        (row, ModelShape(**row["shape"]), Layout(**row["layout"], accumulates=row["micro_steps"] > 1))
        for row in {row["case"]: row for row in found}.values()
    ]


def errors(what: str) -> dict[str, float]:
    """Predicted / measured - 1 by case; runs beside others on the same machine, or on a busy one, have no time."""
    found = {}
    for row, shape, layout in rows():
        if row[what] is None:
            continue
        items = memory.gpu_items(shape, layout)
        ranks = [speed.Rank(gpus.find(row["gpu"]), layout.world_size, layout.micro_batch)]
        predicted = {
            "allocated_bytes": memory.allocated_bytes(items),
            "used_bytes": sum(search.squeeze_cache(items, gpus.find(row["gpu"]).memory_bytes).values()),
            "step_seconds": speed.step_time(shape, layout, ranks, speed.Network(1, 10.0), row["micro_steps"]).seconds,
        }
        found[row["case"]] = predicted[what] / row[what] - 1
    return found


def held(found: dict[str, float], median: float, worst: float, low: float) -> None:
    off = {case: f"{error:+.1%}" for case, error in found.items() if not low <= error <= worst}
    assert off == {}
    assert statistics.median(map(abs, found.values())) <= median


def test_the_runs_cover_what_the_planner_chooses_from() -> None:
    layouts = [layout for _, _, layout in rows()]
    assert len(layouts) >= 24
    for name, wanted in {
        "zero_stage": {0, 1, 2, 3},
        "world_size": {1, 2, 4},
        "recompute": {"none", "selective", "full"},
        "precision": {"bf16", "fp16", "fp8"},
        "offload_optimizer": {"none", "cpu"},
        "sequence_length": {256, 1024, 2048, 4096, 8192},
        "compiled": {True, False},
    }.items():
        assert {getattr(layout, name) for layout in layouts} >= wanted, name
    assert {shape.parameters // 10**8 for _, shape, _ in rows()} >= {3, 11, 13, 29, 63}


FORMER_STEP = "300m 1 2x8x512"  # its peak were the fp32 gradients of the step, which AdamW in one pass does not make


def test_allocated_memory() -> None:
    found = errors("allocated_bytes")
    assert found.pop(FORMER_STEP) < -0.1
    held(found, median=0.03, worst=0.08, low=-0.02)


def test_memory_that_the_driver_reports() -> None:
    """What the allocator keeps beside is a matter of chance, so a little more may be missing than of what it needs."""
    found = errors("used_bytes")
    found.pop(FORMER_STEP)
    assert 0.08 < found.pop("1.3b 2 8x2x2048 z3 eager") < 0.10, "the one that is planned too large"
    held(found, median=0.03, worst=0.08, low=-0.05)


def test_step_time() -> None:
    held(errors("step_seconds"), median=0.07, worst=0.15, low=-0.15)


def test_host_memory_of_offload() -> None:
    offloaded = [one for one in rows() if one[2].offload_optimizer == "cpu"]
    assert offloaded
    for row, shape, layout in offloaded:
        # The later runs ended with a checkpoint, written from a copy in the host's memory.
        items = host_memory.host_items(shape, layout, layout.world_size, has_snapshot=row.get("saves", False))
        predicted = sum(items.values())
        assert -0.10 <= predicted / row["resident_bytes"] - 1 <= 0.10, row["case"]
