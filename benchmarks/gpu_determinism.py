"""Are two runs the same bits, and what does train.deterministic cost: on one GPU and on two.

Two layers of XuanYuan-6B's width with 32,000 words, 200 steps. One GPU each: a deterministic run beside
a default one, twice; then both GPUs together. Equal means every loss and gradient norm and the last weights' hash.

    PYTHONPATH=src python3 benchmarks/gpu_determinism.py --out determinism.json        (2 GPUs, 3 minutes)
    PYTHONPATH=src python3 benchmarks/gpu_determinism.py --toy                         (does it run? also without a GPU)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finlm import pipeline
from finlm.base import files, processes
from finlm.base.rundir import RunDir
from finlm.launch.adapters import host_env
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes/quickstart/pretrain.yaml"


SIXB = (
    *("model.hidden_size=4096", "model.layers=2", "model.heads=32", "model.ffn_size=11008"),
    "model.vocab_size=32000",
)
TOY = ("model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128", "tokenizer.vocab_size=2000")


def make(options: argparse.Namespace, gpus: int, stage: int, deterministic: bool) -> RunDir:
    """A run directory on so many GPUs of this host, or CPU ranks where it has none."""
    where, steps, length = options.where, options.steps, 64 if options.toy else 2048
    overrides = (
        *(TOY if options.toy else SIXB),
        "data.sources=[{synthetic: {size: 2MB, held_out_size: 100KB, seed: 3}}]",
        *(f"data.cache_dir={where / 'cache'}", f"batch.sequence_length={length}", "batch.micro_batch=4"),
        *(f"batch.tokens_per_step={4 * length * gpus}", f"train.steps={steps}", "train.recompute=none"),
        *(f"optim.warmup_steps={4 if steps > 4 else 2}", "optim.lr=3e-4"),
        *(f"zero.stage={stage}", f"train.deterministic={str(deterministic).lower()}", "checkpoint.every_steps=null"),
        *("eval.every_steps=null", "eval.max_tokens_per_source=4096"),
    )
    loaded = recipe.load(QUICKSTART, overrides)
    host = cluster.Host("localhost", gpus, options.gpu if cluster.visible_gpus() else None, 100 * 2**30)
    training = pipeline.Training(loaded, cluster.Cluster((host,)), where / "runs")
    pipeline.prepare_data(training)
    pipeline.plan_run(training)
    return pipeline.create_run(training)


def start(run: RunDir, devices: list[int]) -> list[subprocess.Popen[bytes]]:
    """The run's ranks on these GPUs, with the environment that the launcher gives them."""
    wanted, plan = recipe.load(run.recipe).recipe, Plan.read(run.plan)
    host = cluster.Host("localhost", len(devices), plan.hosts[0].gpu)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | host_env(wanted, plan, host) | {"WORLD_SIZE": str(len(devices)), "MASTER_ADDR": "127.0.0.1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    env |= {"MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ",".join(visible[device] for device in devices)}
    command = [sys.executable, "-m", "finlm.train", str(run.path)]
    ranks = range(len(devices))
    return [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, preexec_fn=processes.die_with_parent
        )
        for rank in ranks
    ]


def ended(run: RunDir, ranks: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """What a run gave; RuntimeError with its logs when it failed."""
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        logs = "\n".join(path.read_text()[-4000:] for path in sorted(run.logs.glob("*.log")))
        raise RuntimeError(f"exit codes {codes}\n{logs}")
    rows = list(run.read_events("step"))
    (_, checkpoint) = run.complete_checkpoints()[-1]
    weights = sorted(
        (name, one["sha256"]) for name, one in files.read_json(checkpoint / "manifest.json")["files"].items()
    )
    shutil.rmtree(run.checkpoints)
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "weights": [pair for pair in weights if "optim" in pair[0]],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows[len(rows) // 4 :]),
    }


def pair(name: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two runs of the same recipe against each other."""
    steps = zip(zip(first["losses"], first["norms"]), zip(second["losses"], second["norms"]))  # noqa: B905
    differing = [number for number, (one, other) in enumerate(steps, 1) if one != other]
    return {
        "runs": name,
        "steps": len(first["losses"]),
        "first_differing_step": differing[0] if differing else None,
        "same_master_weights_and_moments": first["weights"] == second["weights"],
        "tokens_per_second": [first["tokens_per_second"], second["tokens_per_second"]],
        "last_losses": [first["losses"][-1], second["losses"][-1]],
    }


def main() -> None:
    """Measure and print; --out keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--where", type=Path, default=Path("/tmp/finlm-determinism"), help="a directory on the disk")
    parser.add_argument("--gpu", default="H200", help="kind of the GPU in plan/gpus.yaml")
    parser.add_argument("--steps", type=int, default=200, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="only runs on that many (default: on one and on two)")
    parser.add_argument("--toy", action="store_true", help="tiny layers, 4 steps on one GPU or CPU rank")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.gpus = 4, 1
    began, both = time.monotonic(), torch.cuda.device_count() > 1 and options.gpus != 1
    found: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        found.append(row | {"seconds_until_now": round(time.monotonic() - began)})
        print(json.dumps(found[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=2) + "\n")

    modes = (True,) if options.toy else (True, False)
    results: dict[bool, list[dict[str, Any]]] = {is_on: [] for is_on in modes}
    for _ in range(2 if options.gpus != 2 else 0):
        runs = [(is_on, make(options, 1, 1, is_on)) for is_on in modes]
        if both:  # at the same time, one on each GPU
            started = [(is_on, run, start(run, [number])) for number, (is_on, run) in enumerate(runs)]
            for is_on, run, ranks in started:
                results[is_on].append(ended(run, ranks))
        else:
            for is_on, run in runs:
                results[is_on].append(ended(run, start(run, [0])))
    for is_on in modes if options.gpus != 2 else ():
        tell(
            pair(f"1 {'GPU' if cluster.visible_gpus() else 'CPU rank'}, ZeRO-1, deterministic {is_on}", *results[is_on])
        )
    for stage, is_on in ((1, True), (1, False), (3, True)) if both else ():
        done = []
        for _ in range(2):
            run = make(options, 2, stage, is_on)
            done.append(ended(run, start(run, [0, 1])))
        tell(pair(f"2 GPUs, ZeRO-{stage}, deterministic {is_on}", *done))


if __name__ == "__main__":
    main()
