"""Pretraining speed on this machine's GPUs, ours and its peers one after the other, in one table.

    python benchmarks/gpu_pretrain.py                       # XuanYuan-6B's shape on one GPU, all contenders
    python benchmarks/gpu_pretrain.py --gpus 4 --only ours,ours-zero3
    python benchmarks/gpu_pretrain.py --shape 300m --only ours,hf-tuned
    python benchmarks/gpu_pretrain.py --shape qwen3-4b --tokens 32768 --only hf-tuned,ours,ours-fp8
    python benchmarks/gpu_pretrain.py --toy                 # does it run? on CPU ranks where there is no GPU

Every contender trains the same shape with the same tokens per optimizer step on random tokens, in its own processes,
for a few steps; the median step after the first two counts. "ours" is what `finlm train` launches: recipe, plan,
DeepSpeed JSON, finlm.train. The peers are in gpu_peers.py. MFU counts 6 (N - embedding) + 12 layers hidden sequence
FLOPs a token against the GPU's dense bf16 peak, for float8 as well. --json FILE appends one JSON line a contender.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_plan_draw
import numpy as np

from finlm import config
from finlm.base import files, processes
from finlm.base.rundir import RunDir
from finlm.launch.adapters import host_env
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.settings import config_of

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "6b": (),
    "1.3b": ("model.hidden_size=2048", "model.layers=24", "model.heads=16", "model.ffn_size=5504"),
    "toy": (
        *("model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128"),
        *("batch.sequence_length=64", "train.compile=false"),
    ),
    "300m": ("model.hidden_size=1024", "model.layers=20", "model.heads=8", "model.ffn_size=2816"),
    **gpu_plan_draw.published_overrides(),
}
OURS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours-fp8": ("train.precision=fp8",),
    "ours-selective": ("train.recompute=selective",),
    "ours-full": ("train.recompute=full",),
    "ours-eager": ("train.compile=false",),
    "ours-zero2": ("zero.stage=2",),
    "ours-zero3": ("zero.stage=3",),
    "ours-documents": ("data.document_masks=true",),
    "ours-stream": ("zero.offload_optimizer=stream", "train.recompute=none"),
    "ours-offload": ("zero.stage=3", "zero.offload_optimizer=cpu", "train.recompute=full"),
}
PEERS = ("reference", "hf-tuned", "pytorch")
TOY = {"shape": "toy", "tokens": 768, "steps": 3}  # what --toy sets: every contender in seconds, also on a CPU
VOCABULARY = 39438
DOCUMENT_TOKENS = 1000  # on average: FinCorpus has 60 GB in 12 M documents, 5 KB each
WARMUP = 2
LIMIT_SECONDS = 240


def random_shards(directory: Path, vocabulary: int = VOCABULARY, tokens: int = 4_000_000) -> Path:
    """Write prepared shards of uniformly random ids: only document masks make speed depend on lengths."""
    (directory / "train").mkdir(parents=True)
    dice = np.random.default_rng(0)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    dice.integers(3, vocabulary, tokens).astype(dtype).tofile(directory / "train/random-00000.bin")
    starts = np.unique(np.cumsum(1 + dice.exponential(DOCUMENT_TOKENS, tokens // DOCUMENT_TOKENS).astype(int)))
    offsets = np.concatenate([[0], starts[starts < tokens], [tokens]]).astype("<u8")
    offsets.tofile(directory / "train/random-00000.idx")
    size = {"tokens": tokens, "documents": len(offsets) - 1}
    shard = {"source": "random", "split": "train", "file": "train/random-00000.bin"} | size
    totals = {"random": size | {"text_bytes": 3 * tokens}}
    facts = {"dtype": dtype, "vocab_size": vocabulary, "bos_id": 1, "eos_id": 2, "add_bos": True}
    shards = [shard | {"text_bytes": 3 * tokens}]
    files.write_json(directory / "manifest.json", facts | {"totals": {"train": totals}, "shards": shards})
    return directory


def planned(overrides: tuple[str, ...], gpus: int) -> tuple[Any, Plan]:
    """XuanYuan-6B's recipe with these changes, and its plan on this machine."""
    free = ("zero.stage=auto", "zero.offload_optimizer=auto", "zero.offload_param=auto", "batch.micro_batch=auto")
    length = ("train.tokens=null", "train.steps=10000")
    loaded = recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml", (*free, *length, *overrides)).recipe
    return loaded, planner.make(loaded, cluster.local(gpus), shape.of(loaded, VOCABULARY))


def ours(overrides: tuple[str, ...], gpus: int, steps: int, work: Path) -> dict[str, Any]:
    """Launch the trainer on a run directory, end it after `steps` optimizer steps, and read its events."""
    loaded, plan = planned(overrides, gpus)
    run = RunDir(Path(tempfile.mkdtemp(dir=work)))
    files.write_text(run.recipe, recipe.dump(loaded))
    files.write_json(run.plan, plan.to_json())
    files.write_json(run.ds_config, config.deepspeed_settings(loaded, plan))
    files.write_json(run.manifest, {"shards": {"path": str(work / "shards")}})
    started = time.monotonic()
    env = host_env(loaded, plan, cluster.local(gpus).hosts[0])
    process = ranks(run.path, env)
    first = None
    rows: list[dict[str, Any]] = []
    while process.poll() is None and len(rows) < steps and time.monotonic() - started < LIMIT_SECONDS:
        time.sleep(0.1)
        rows = list(run.read_events("step")) if run.events.exists() else []
        first = first or (time.monotonic() - started if rows else None)
    end(process)
    if len(rows) <= WARMUP:
        return {"error": f"{len(rows)} steps in {time.monotonic() - started:.0f} s\n{last_lines(run.path)}"}
    seconds = statistics.median(row["seconds"] for row in rows[WARMUP:])
    return {
        "tokens_per_second": plan.tokens_per_step / seconds,
        "step_seconds": seconds,
        "memory_bytes": max(row["memory_bytes"] for row in rows),
        "planned_bytes": plan.gpu_bytes,
        "planned_tokens_per_second": plan.tokens_per_second,
        "first_step_seconds": first,
        "losses": [row["loss"] for row in rows],
        "setting": f"ZeRO-{plan.zero_stage}, micro-batch {plan.micro_batch} x {plan.gradient_accumulation_steps}, "
        f"recompute {plan.recompute}" + (f", optimizer {where}" if (where := plan.offload_optimizer) != "none" else ""),
    }


def peer(name: str, overrides: tuple[str, ...], gpus: int, steps: int, work: Path) -> dict[str, Any]:
    """Run a peer's script to its end and read the JSON it wrote."""
    _, plan = planned((*overrides, "batch.micro_batch=2", "train.recompute=full"), gpus)
    loaded, _ = planned(overrides, gpus)
    directory = Path(tempfile.mkdtemp(dir=work))
    vocabulary = VOCABULARY if loaded.model.vocab_size == "auto" else loaded.model.vocab_size
    task = {
        "peer": name,
        "config": config_of(loaded.model) | {"vocab_size": vocabulary},
        "sequence_length": plan.sequence_length,
        "tokens_per_step": plan.tokens_per_step,
        "gpus": gpus,
        "steps": steps,
        "out": str(directory / "result.json"),
    }
    files.write_json(directory / "task.json", task)
    process = peer_ranks([str(ROOT / "benchmarks/gpu_peers.py"), str(directory / "task.json")], directory)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_SECONDS)
    end(process)
    if not (directory / "result.json").exists():
        return {"error": last_lines(directory)}
    found: dict[str, Any] = files.read_json(directory / "result.json")
    seconds = statistics.median(found.pop("seconds")[WARMUP:])
    return found | {"tokens_per_second": plan.tokens_per_step / seconds, "step_seconds": seconds}


def ranks(run: Path, more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """A rank of ours on every visible GPU, started as `finlm train` starts them."""
    devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    where = {"address": "127.0.0.1", "port": processes.free_port(0)}
    launch = {"world": {"localhost": devices}, "node": 0, **where}
    return launched(["-m", "finlm.launch.node", json.dumps(launch), str(run)], run, more)


def peer_ranks(script: list[str], directory: Path) -> subprocess.Popen[bytes]:
    """A rank of a peer on every visible GPU, started by DeepSpeed's launcher."""
    launcher = ["-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--no_local_rank"]
    launcher.append(f"--master_port={processes.free_port(0)}")
    return launched([*launcher, *script], directory)


def launched(arguments: list[str], directory: Path, more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start `python ARGUMENTS` in a session of its own, which its ranks share, with its output in launcher.log."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "DS_SKIP_CUDA_CHECK": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "16"),
        **more,
    }
    with (directory / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=env, stdout=log, stderr=log, start_new_session=True
        )
    atexit.register(kill, process)  # stopped by `timeout`, a benchmark must not leave its ranks on the GPUs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a contender and give the driver time to free its memory."""
    kill(process)
    process.wait()
    time.sleep(5)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The launcher and its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_lines(directory: Path, count: int = 15) -> str:
    """The end of a rank's log, or of the launcher's when no rank wrote one."""
    logs = sorted(
        (path for path in directory.rglob("*.log") if path.stat().st_size), key=lambda path: path.parent == directory
    )
    logs.reverse()
    return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-count:]) if logs else "no log"


def contenders(arguments: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Every contender's result, one after the other."""
    base = (*SHAPES[arguments.shape], f"batch.tokens_per_step={arguments.tokens}", *arguments.set)
    for name in arguments.only.split(","):
        if name in PEERS:
            result = peer(name, base, arguments.gpus, arguments.steps, work)
        else:
            result = ours(
                (f"data.prepared={work / 'shards'}", *base, *OURS[name]), arguments.gpus, arguments.steps, work
            )
        yield {"contender": name, "shape": arguments.shape, "gpus": arguments.gpus, "tokens": arguments.tokens} | result


def main() -> None:
    """Run, print the table, append to the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="6b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=98_304, help="tokens of an optimizer step over all GPUs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default=",".join((*PEERS, "ours", "ours-fp8")), help="comma-separated contenders")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes for our contenders")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a contender")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, to try the program, also without a GPU")
    arguments = parser.parse_args()
    if arguments.toy:
        vars(arguments).update(TOY)
    # Without --num_gpus DeepSpeed's launcher takes the visible ones; with it, always the first of the machine.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(arguments.gpus))))
    _, plan = planned((*SHAPES[arguments.shape], "train.recompute=full"), arguments.gpus)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        random_shards(work / "shards", plan.vocab_size)
        print(f"{'':<16}{'tok/s':>9}{'MFU':>8}{'peak GiB':>10}{'step s':>8}{'first step s':>14}  setting", flush=True)
        for row in contenders(arguments, work):
            if arguments.json is not None:
                with arguments.json.open("a") as out:
                    out.write(json.dumps(row) + "\n")
            if "error" in row:
                print(f"{row['contender']:<16} failed:\n{row['error']}", flush=True)
                continue
            flops = plan.flops_per_token * row["tokens_per_second"] / arguments.gpus
            mfu = f"{flops / plan.peak_flops:.1%}" if plan.peak_flops else "-"
            first = row.get("first_step_seconds")
            print(
                f"{row['contender']:<16}{row['tokens_per_second']:>9,.0f}{mfu:>8}"
                f"{row['memory_bytes'] / 2**30:>10.1f}{row['step_seconds']:>8.3f}"
                f"{'' if first is None else format(first, '.1f'):>14}  {row.get('setting', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
