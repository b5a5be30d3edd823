"""What the planner is held to: memory and step time of many small runs on this machine's GPUs, as JSON lines.

    python benchmarks/gpu_plan.py --out rows.jsonl --minutes 9          # what fits in nine minutes, most telling first
    python benchmarks/gpu_plan.py --out more.jsonl --done rows.jsonl    # the rest
    python benchmarks/gpu_plan.py --device cpu --out rows.jsonl         # toy models on CPU ranks, to try the machinery

Every run is what `finlm train` launches (recipe, plan, DeepSpeed JSON, finlm.train) on random tokens, ended after a few
optimizer steps. Runs on one GPU share the machine in lanes, then come pairs of GPUs, then all. A row has the plan and,
for every rank, what torch allocated and reserved at most, what the driver reports for the GPU, and the process's RSS
(gpu_plan_rank.py). --trace runs a few others and says which lines of code hold the bytes at the peak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gpu_plan_cases import CPU_CASES, GPU_CASES, SHAPES, TRACED_CASES, WORDS
from gpu_pretrain import ROOT, VOCABULARY, random_shards

from finlm import config
from finlm.base import files, processes
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.launch.adapters import host_env
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import recipe, shape
from finlm.recipe.cluster import Cluster, Host, visible_gpus
from finlm.recipe.schema import Recipe

WARMUP = 2
SHARE = {1: 0.4, 2: 0.6}  # of the time when the runs on so many GPUs stop starting
LIMIT_SECONDS = {False: 120, True: 240}  # of a run; with offload, when DeepSpeed's CPU Adam is built first


@dataclass(frozen=True)
class Case:
    """One line of gpu_plan_cases.py."""

    line: str
    shape: str
    gpus: int
    micro_batch: int
    micro_steps: int
    sequence_length: int
    overrides: tuple[str, ...]

    @property
    def is_offloaded(self) -> bool:
        """Whether the run uses the host's memory and cores, so that two of them would disturb each other."""
        return any("offload" in change for change in self.overrides)


def parse(line: str) -> Case:
    """`6b 2 4x8x2048 z3 full`: shape, GPUs, rows x micro-steps x length, then words."""
    name, gpus, sizes, *words = line.split()
    rows, micro_steps, length = map(int, sizes.split("x"))
    return Case(line, name, int(gpus), rows, micro_steps, length, tuple(part for w in words for part in WORDS[w]))


def written(case: Case, shards: Path) -> Recipe:
    """The recipe of a case; nothing is left to choose."""
    tokens = case.micro_batch * case.micro_steps * case.sequence_length * case.gpus
    overrides = (
        *("zero.stage=1", "zero.offload_optimizer=none", "zero.offload_param=none", "train.recompute=none"),
        *("train.tokens=null", "train.steps=10000", "train.fp16.loss_scale=64", f"data.prepared={shards}"),
        *SHAPES[case.shape],
        f"batch.micro_batch={case.micro_batch}",
        f"batch.sequence_length={case.sequence_length}",
        f"batch.tokens_per_step={tokens}",
        *case.overrides,
    )
    return recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml", overrides).recipe


def planned(case: Case, shards: Path, device: str) -> tuple[Recipe, Plan]:
    """The recipe of a case and its plan on this machine."""
    loaded = written(case, shards)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = None if device == "cpu" else next(iter(visible_gpus().values()))
    hosts = Cluster((Host("localhost", case.gpus, kind, memory),))
    return loaded, planner.make(loaded, hosts, shape.of(loaded, VOCABULARY))


class Job:
    """A case while it runs: a process a rank, a run directory, the GPUs it holds."""

    def __init__(self, case: Case, gpus: list[int], steps: int, work: Path, device: str, trace: bool) -> None:
        self.case, self.gpus, self.steps = case, gpus, steps
        self.started = time.monotonic()
        self.available = available_memory()
        loaded, self.plan = planned(case, work / "shards", device)
        self.run = RunDir(Path(tempfile.mkdtemp(dir=work)))
        files.write_text(self.run.recipe, recipe.dump(loaded))
        files.write_json(self.run.plan, self.plan.to_json())
        files.write_json(self.run.ds_config, config.deepspeed_settings(loaded, self.plan))
        files.write_json(self.run.manifest, {"shards": {"path": str(work / "shards")}})
        self.env = host_env(loaded, self.plan, Host("localhost", case.gpus))
        port = processes.free_port(0)
        self.ranks = [self._rank(rank, port, trace) for rank in range(case.gpus)]
        self.used_by_driver = [0] * len(gpus)

    def _rank(self, rank: int, port: int | str, trace: bool) -> subprocess.Popen[bytes]:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.case.gpus),
            "LOCAL_WORLD_SIZE": str(self.case.gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **self.env,
        }
        command = [sys.executable, str(ROOT / "benchmarks/gpu_plan_rank.py"), str(self.run.path), str(self.steps)]
        command += ["--trace"] if trace else []
        with (self.run.path / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def is_over(self) -> bool:
        """Whether every rank has measured, one has ended, or time is up."""
        measured = all((self.run.path / f"rank-{rank}.json").exists() for rank in range(self.case.gpus))
        ended = any(process.poll() is not None for process in self.ranks)
        return measured or ended or time.monotonic() - self.started > LIMIT_SECONDS[self.case.is_offloaded]

    def row(self) -> dict[str, Any]:
        """What was measured beside what was planned; `error` instead when a rank did not get so far."""
        found = {"case": self.case.line, "plan": wanted(self.plan), "wall_seconds": time.monotonic() - self.started}
        results = [self.run.path / f"rank-{rank}.json" for rank in range(self.case.gpus)]
        if not all(path.exists() for path in results):
            return found | {"error": self._complaint()}
        rows = list(self.run.read_events("step"))[: self.steps]
        seconds = [row["seconds"] for row in rows[WARMUP:]]
        return found | {
            "step_seconds": statistics.median(seconds),
            "tokens_per_second": self.plan.tokens_per_step / statistics.median(seconds),
            "every_step_seconds": [row["seconds"] for row in rows],
            "losses": [row["loss"] for row in rows],
            "driver_bytes": self.used_by_driver,
            "host_bytes_taken": max(0, self.available - available_memory()),  # of all lanes together
            "ranks": [files.read_json(path) for path in results],
        }

    def _complaint(self) -> str:
        """The end of every log with a traceback, else of every log; and how the ranks ended."""
        logs = [path.read_text(errors="replace")[-3000:] for path in self.run.path.rglob("*.log")]
        telling = [text[text.find("Traceback") :] for text in logs if "Traceback" in text]
        codes = ", ".join(str(process.poll()) for process in self.ranks)
        return "\n".join([f"exit codes {codes}", *(telling or [text[-800:] for text in logs])])

    def end(self) -> None:
        """Kill every rank and wait until the driver has their memory back."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.ranks:
            process.wait()
        patience = time.monotonic() + 15
        while self.plan.device == "cuda" and time.monotonic() < patience:
            used = used_by_driver()
            if all(used.get(gpu, 0) < 2**30 for gpu in self.gpus):
                break
            time.sleep(0.3)


def wanted(plan: Plan) -> dict[str, Any]:
    """The plan without what a row need not repeat."""
    return {name: value for name, value in plan.to_json().items() if name not in ("recipe", "reasons", "hosts")}


def available_memory() -> int:
    """Bytes of host memory that could be taken now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def used_by_driver() -> dict[int, int]:
    """Bytes in use on every GPU, as nvidia-smi says."""
    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in output.splitlines() if line.strip())
    return {int(number): int(mib) * 2**20 for number, mib in rows}


def run_all(arguments: argparse.Namespace, work: Path, out: TextIO) -> None:
    """Start cases while GPUs and time are left, one number of GPUs after the other, and write rows as they come."""
    begun = time.monotonic()
    lanes = list(range(2)) if arguments.device == "cpu" else sorted(visible_gpus())
    for gpus in sorted({case.gpus for case in arguments.cases}):
        waiting = [case for case in arguments.cases if case.gpus == gpus and gpus <= len(lanes)]
        free, running = list(lanes), list[Job]()
        share = SHARE.get(gpus, 1.0) if len(lanes) > gpus else 1.0
        last_start = begun + 60 * arguments.minutes * share - (25 if share == 1.0 else 0)
        while running or (waiting and time.monotonic() < last_start):
            while len(free) >= gpus and time.monotonic() < last_start:
                case = following(waiting, running)
                if case is None:
                    break
                waiting.remove(case)
                mine, free = free[:gpus], free[gpus:]
                try:
                    running.append(Job(case, mine, arguments.steps, work, arguments.device, arguments.trace))
                except UserError as refused:
                    write(out, {"case": case.line, "refused": str(refused)})
                    free = mine + free
            used = used_by_driver() if arguments.device == "cuda" else {}
            for job in running:
                seen = zip(job.used_by_driver, job.gpus, strict=True)
                job.used_by_driver = [max(before, used.get(gpu, 0)) for before, gpu in seen]
            over_time = time.monotonic() > begun + 60 * arguments.minutes
            for job in [job for job in running if over_time or job.is_over()]:
                row = job.row()
                job.end()
                running.remove(job)
                free = sorted(free + job.gpus)
                write(out, row)
            time.sleep(0.2)


def following(waiting: list[Case], running: list[Job]) -> Case | None:
    """The next case that may run beside the others."""
    busy = any(job.case.is_offloaded for job in running)
    return next((case for case in waiting if not (busy and case.is_offloaded)), None)


def write(out: TextIO, row: dict[str, Any]) -> None:
    """One row to the file and a line for people."""
    out.write(json.dumps(row) + "\n")
    out.flush()
    if "ranks" not in row:
        print(f"{row['case']:<32} {row.get('refused') or row.get('error')}"[:1500], flush=True)
        return
    peak = max(rank.get("allocated", rank["rss"]) for rank in row["ranks"])
    items = row["plan"]["gpu_bytes_items"]
    planned_bytes = sum(size for name, size in items.items() if name not in ("context", "fragmentation"))
    speed = row["plan"]["tokens_per_second"] or 0.0
    off, slow = planned_bytes / peak - 1, speed / row["tokens_per_second"] - 1
    print(
        f"{row['case']:<36}{peak / 2**30:>7.2f} GiB, planned {planned_bytes / 2**30:>7.2f} ({off:+.1%})"
        f"{row['tokens_per_second']:>12,.0f} tok/s, planned {speed:>10,.0f} ({slow:+.0%})"
        f"  {row['wall_seconds']:.0f} s",
        flush=True,
    )


def chosen(arguments: argparse.Namespace) -> Iterator[Case]:
    """The cases asked for that are not done yet."""
    done = {row["case"] for path in arguments.done for row in files.read_json_lines(path) if "ranks" in row}
    lines = TRACED_CASES if arguments.trace else GPU_CASES
    for line in CPU_CASES if arguments.device == "cpu" else lines:
        case = parse(line)
        if line not in done and str(case.gpus) in arguments.gpus.split(",") and arguments.only in line:
            yield case


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--done", type=Path, action="append", default=[], help="rows of an earlier call, not repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs for longer than this")
    parser.add_argument("--gpus", default="1,2,4", help="only the cases on so many GPUs")
    parser.add_argument("--only", default="", help="only the cases whose line contains this")
    parser.add_argument(
        "--steps", type=int, default=5, help=f"optimizer steps; the median after the first {WARMUP} counts"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trace", action="store_true", help="which lines hold the bytes at the peak")
    arguments = parser.parse_args()
    arguments.cases = list(chosen(arguments))
    print(f"{len(arguments.cases)} cases, at most {arguments.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as directory, arguments.out.open("a") as out:
        random_shards(Path(directory) / "shards")
        run_all(arguments, Path(directory), out)


if __name__ == "__main__":
    main()
