"""How long training waits for a checkpoint, how long the disk takes, and how long resuming takes, on one GPU.

Layers of XuanYuan-6B's size, as many as the disk and the memory hold (all 30 need 90 GB); the rates tell the rest.
Trains, lets a checkpoint be written while training goes on, kills the process with SIGKILL, and resumes.

    PYTHONPATH=src python3 benchmarks/gpu_checkpoint.py --where /tmp/checkpoints --out checkpoint.json
    PYTHONPATH=src python3 benchmarks/gpu_checkpoint.py --toy      # does it run? tiny layers, on a CPU without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm import pipeline
from finlm.base import processes
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.recipe import cluster, recipe

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes/quickstart/pretrain.yaml"
LAYER_PARAMETERS = 4 * 4096**2 + 3 * 4096 * 11008
EVERY = 40
SIXB = ("hidden_size=4096", "heads=32", "kv_heads=null", "ffn_size=11008")
TOY = ("hidden_size=64", "heads=2", "kv_heads=null", "ffn_size=128")


def make(where: Path, gpu: str | None, layers: int, width: Sequence[str]) -> RunDir:
    """A run directory of that many layers of a width on one GPU, or on one CPU rank."""
    sources = "data.sources=[{synthetic: {size: 2MB, held_out_size: 100KB, seed: 3}}]"
    length, steps = (2048, 3 * EVERY) if width == SIXB else (64, 10**6)  # a toy's steps would be over too soon
    overrides = (
        *(f"model.{key}" for key in (*width, f"layers={layers}")),
        *(sources, "tokenizer.vocab_size=4096", f"data.cache_dir={where / 'cache'}", "train.compile=false"),
        *(f"batch.sequence_length={length}", f"batch.tokens_per_step={4 * length}", "batch.micro_batch=4"),
        *(f"train.steps={steps}", "train.cpu_ranks=1"),
        *(
            f"checkpoint.every_steps={EVERY}",
            "checkpoint.keep_last=1",
            "eval.max_tokens_per_source=4096",
            "zero.stage=1",
        ),
        *("zero.offload_optimizer=none", "zero.offload_param=none", "optim.warmup_steps=4"),
    )
    loaded = recipe.load(QUICKSTART, overrides)
    hosts = cluster.Cluster((cluster.Host("localhost", 1, gpu, processes.available_bytes()),))
    training = pipeline.Training(loaded, hosts, where / "runs")
    pipeline.prepare_data(training)
    pipeline.plan_run(training)
    return pipeline.create_run(training)


def start(run: RunDir) -> subprocess.Popen[bytes]:
    """The one rank of the run."""
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "finlm.train", str(run.path)]
    return subprocess.Popen(command, env=env | {"MASTER_PORT": "29555"}, preexec_fn=processes.die_with_parent)


def wait_for(run: RunDir, rank: subprocess.Popen[bytes], kind: str, since: float, seconds: float) -> dict[str, Any]:
    """The first row of a kind after a moment; RuntimeError with the log when the rank ends or it takes too long."""
    until = time.monotonic() + seconds
    while rank.poll() is None and time.monotonic() < until:
        for row in run.read_events(kind):
            if row["time"] > since:
                return row
        time.sleep(0.05)
    rank.kill()
    logs = "\n".join(path.read_text()[-4000:] for path in run.logs.glob("*.log"))
    raise RuntimeError(f"no {kind} row; exit code {rank.poll()}\n{logs}")


def measure(run: RunDir, layers: int) -> dict[str, Any]:
    """The numbers of one run."""
    began = time.time()
    rank = start(run)
    saved = wait_for(run, rank, "checkpoint", began, 110)
    time.sleep(1.0)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    steps = list(run.read_events("step"))
    since, until = saved["time"] - saved["seconds"], saved["time"]
    before = [row["seconds"] for row in steps[10:EVERY]]
    during = [row["seconds"] for row in steps if since + saved["stall_seconds"] + row["seconds"] < row["time"] < until]
    again = time.time()
    rank = start(run)
    resumed = wait_for(run, rank, "step", again, 100)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    done = resumed["time"] - again
    starts = [row["time"] - again for row in run.read_events("start") if row["time"] > again]
    return {
        "layers": layers,
        "bytes": saved["bytes"],
        "stall_seconds": saved["stall_seconds"],
        "stall_gb_per_second": round(saved["bytes"] / 1e9 / saved["stall_seconds"], 1),
        "written_hashed_published_seconds": saved["seconds"],
        "incidents": list(run.read_events("incident")),
        "step_seconds_before": round(statistics.median(before), 4),
        "step_seconds_while_writing": round(statistics.median(during), 4) if during else None,
        "steps_while_writing": len(during),
        "resume_process_to_loaded_seconds": round(starts[0], 1),
        "resume_process_to_first_step_seconds": round(done, 1),
        "resumed_at_step": resumed["step"] - 1,
        "same_loss_as_before": [row["loss"] for row in steps if row["step"] == resumed["step"]][:1]
        == [resumed["loss"]],
    }


def main() -> None:
    """Measure and print; --out keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--where", type=Path, default=Path("/tmp/finlm-checkpoints"), help="a directory on the disk")
    parser.add_argument("--gpu", default="H200", help="kind of the GPU in plan/gpus.yaml")
    parser.add_argument("--layers", type=int, help="default: what fits the disk, at most 30")
    parser.add_argument("--toy", action="store_true", help="two tiny layers, to try the program, also without a GPU")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    options.where.mkdir(parents=True, exist_ok=True)
    free, ram = shutil.disk_usage(options.where).free, processes.available_bytes()
    room = min(0.85 * free, 0.4 * ram, 92e9)
    layers = options.layers or (2 if options.toy else max(1, int(room / 14 / LAYER_PARAMETERS)))
    print(f"{format_bytes(free)} free at {options.where}, {format_bytes(ram)} of RAM available: {layers} layers")
    print(subprocess.run(["df", "-h", options.where, "/dev/shm"], capture_output=True, text=True, check=False).stdout)
    gpu = options.gpu if cluster.visible_gpus() else None
    found = measure(make(options.where, gpu, layers, TOY if options.toy else SIXB), layers)
    shutil.rmtree(options.where / "runs")
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
