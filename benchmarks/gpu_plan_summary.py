"""The rows of gpu_plan.py as the planner's test reads them: `python gpu_plan_summary.py ROWS... > results/FILE.jsonl`.

Left out: runs that failed, and fp32 rows from before fp32 had an attention kernel of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpu_plan import parse, written

LAYOUT = (
    *("device", "precision", "zero_stage", "offload_optimizer", "offload_param", "recompute", "compiled"),
    *("micro_batch", "sequence_length", "world_size"),
)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Shape, layout, and the largest of what the ranks measured."""
    plan, ranks = row["plan"], row["ranks"]
    model = written(parse(row["case"]), Path("shards")).model
    return {
        "case": row["case"],
        "gpu": "H200",
        "shape": {
            "hidden": model.hidden_size,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads or model.heads,
            "ffn": model.ffn_size,
            "vocab": plan["padded_vocab_size"],
            "tied": model.tie_embeddings,
        },
        "layout": {name: plan[name] for name in LAYOUT},
        "micro_steps": plan["gradient_accumulation_steps"],
        "allocated_bytes": max(rank["allocated"] for rank in ranks),
        "reserved_bytes": max(rank["reserved"] for rank in ranks),
        "used_bytes": max(rank["device_used"] for rank in ranks),
        "resident_bytes": sum(rank["rss"] for rank in ranks),
        "step_seconds": round(row["step_seconds"], 4),
    }


def main() -> None:
    """Every usable row of the files, each case once: the last."""
    found = {}
    for path in sys.argv[1:]:
        for row in map(json.loads, Path(path).read_text().splitlines()):
            is_quadratic = "fp32" in row["case"] and row.get("plan", {}).get("attention") != "efficient"
            if "ranks" in row and not is_quadratic:
                found[row["case"]] = json.dumps(summary(row))
    print("\n".join(found.values()))


if __name__ == "__main__":
    main()
