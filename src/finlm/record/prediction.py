"""What the plan said against what the run measured: one row of events.jsonl, by which its constants improve.

The first steps, which compile and warm up, do not count for the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes

WARMUP = 2


def compare(plan: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Planned, measured and planned / measured - 1 of memory and speed; None before any step. plan: plan.json."""
    if not steps or not plan:
        return None
    on_gpu = plan.get("device") == "cuda"
    planned = plan.get("gpu_allocated_bytes" if on_gpu else "gpu_bytes") or None
    measured = max((step.get("memory_bytes") or 0 for step in steps), default=0) or None
    speeds = [step["tokens_per_second"] for step in steps[WARMUP:] or steps if step.get("tokens_per_second")]
    speed, planned_speed = statistics.median(speeds) if speeds else None, plan.get("tokens_per_second")
    return {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "bytes_error": _error(planned, measured),
        "planned_tokens_per_second": planned_speed,
        "measured_tokens_per_second": speed,
        "speed_error": _error(planned_speed, speed),
    }


def record(run: RunDir) -> None:
    """Append the row `prediction`; nothing when nothing was measured."""
    found = compare(files.read_json(run.plan), list(run.read_events("step")))
    if found is not None:
        run.append_event("prediction", **found)


def sentence(found: Mapping[str, Any]) -> str:
    """'memory 1.2 GiB planned, 1.3 GiB measured (-5.1 %), ...'."""
    parts = []
    if found["bytes_error"] is not None:
        planned, measured = format_bytes(found["planned_bytes"]), format_bytes(found["measured_bytes"])
        parts.append(f"memory {planned} planned, {measured} measured ({100 * found['bytes_error']:+.1f} %)")
    if found["speed_error"] is not None:
        planned = f"{found['planned_tokens_per_second']:,.0f}"
        measured = f"{found['measured_tokens_per_second']:,.0f}"
        parts.append(f"tokens/s {planned} planned, {measured} measured ({100 * found['speed_error']:+.1f} %)")
    return "; ".join(parts) or "nothing to compare"


def _error(planned: float | None, measured: float | None) -> float | None:
    return round(planned / measured - 1, 4) if planned and measured else None
