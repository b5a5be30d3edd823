"""What the planner is held to on GPUs and models that nobody tuned it for: drawn configurations, planned and run.

    python benchmarks/gpu_plan_drawn.py --seed 3 --count 20 --out rows.jsonl --minutes 7     # on one GPU
    python benchmarks/gpu_plan_drawn.py --models --out rows.jsonl     # Qwen3-4B and others that people start from
    python benchmarks/gpu_plan_drawn.py --rollouts --out rows.jsonl     # GRPO and PPO of published shapes
    python benchmarks/gpu_plan_drawn.py --table rows.jsonl                                # planned against measured
    python benchmarks/gpu_plan_drawn.py --device cpu --seed 1 --count 2 --out rows.jsonl     # toys: the machinery

A case is a recipe of gpu_plan_draw.py whose open choices the planner makes. It runs as `finlm train` runs it, but that
its weights are drawn instead of read, and is ended after a few steps. First, all compiled layers are compiled in
parallel, by runs with one decoder layer, so that the measured runs find them in the compiler's cache. A row says what
was drawn, what the planner took, what it predicted and what was measured: memory as the driver reports it in use
(context included), what torch allocated, and the median step. --table plans every row again with the code as it is.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_plan_draw as draw
from gpu_plan import used_by_driver
from gpu_pretrain import ROOT

from finlm import config
from finlm.base import files, processes
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.launch.adapters import host_env
from finlm.plan import gpus, memory, planner
from finlm.plan.plan import Plan
from finlm.plan.search import Candidate
from finlm.recipe import recipe, shape
from finlm.recipe.cluster import Cluster, Host, visible_gpus
from finlm.recipe.schema import Recipe

LIMIT_SECONDS = 150  # of a run, from the word go
STEP_SECONDS = 4.5  # about so long a case steps
WARMUP = 2
WARMUP_GENERATING = 1  # of GRPO and PPO, whose steps take long
LANES = 7  # runs that compile beside each other
TOY = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 128, "vocab_size": 512}
GIB = 2**30


class Job:
    """A case as a run directory and, once started, a process that waits for its turn."""

    def __init__(self, values: draw.Values, cluster: Cluster, work: Path, layers: int | None = None) -> None:
        self.values, self.process = values, None
        self.run = RunDir(Path(tempfile.mkdtemp(dir=work, prefix=values["name"] + "-")))
        self.loaded, self.plan = planned(values, cluster, self.run.path)
        if layers is not None:  # the same choices for a model of so few layers
            model = values["model"] | {"layers": layers}
            self.loaded, self.plan = planned(fixed(values | {"model": model}, self.plan), cluster, self.run.path)
        step = self.plan.tokens_per_step / (self.plan.tokens_per_second or self.plan.tokens_per_step)
        self.warmup = WARMUP_GENERATING if values["stage"] == "grpo" else WARMUP
        self.steps = 2 if layers is not None else max(self.warmup + 2, min(7, int(STEP_SECONDS / step)))
        rows = self.plan.micro_batch * self.plan.gradient_accumulation_steps
        draw.write(self.run.path, values, self.steps + 1, rows)
        files.write_text(self.run.recipe, recipe.dump(self.loaded))
        files.write_json(self.run.plan, self.plan.to_json())
        files.write_json(self.run.ds_config, config.deepspeed_settings(self.loaded, self.plan))
        files.write_json(self.run.manifest, {"shards": {"path": str(self.run.path / "shards")}})

    def start(self) -> None:
        """Begin the imports; the run waits for go()."""
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
            **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(processes.free_port(0)),
            "HF_HUB_OFFLINE": "1",
            **host_env(self.loaded, self.plan, Host("localhost", 1)),
        }
        command = [sys.executable, str(ROOT / "benchmarks/gpu_plan_rank.py"), str(self.run.path), str(self.steps)]
        with (self.run.path / "rank.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--drawn"], env=env, stdout=log, stderr=log, start_new_session=True
            )

    def go(self) -> None:
        """Let it run."""
        self.began = time.monotonic()
        (self.run.path / "go").touch()

    def is_over(self) -> bool:
        """Whether it has measured, ended or used up its time."""
        measured = (self.run.path / "rank-0.json").exists()
        return measured or self.process.poll() is not None or time.monotonic() - self.began > LIMIT_SECONDS

    def end(self) -> None:
        """Kill it and wait until the driver has its memory back."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def row(self) -> dict[str, Any]:
        """Drawn, planned, measured; `error` instead of what was measured when the run did not get so far."""
        about = {"case": self.values["name"], "values": self.values, "gpu": self.plan.hosts[0].gpu}
        about |= {"plan": summary(self.plan), "wall_seconds": round(time.monotonic() - self.began, 1)}
        result = self.run.path / "rank-0.json"
        if not result.exists():
            logs = [path.read_text(errors="replace")[-6000:] for path in self.run.path.rglob("*.log")]
            return about | {"error": "\n".join([f"exit code {self.process.poll()}", *logs])[-6000:]}
        steps = list(self.run.read_events("step"))[: self.steps]
        seconds = [step["seconds"] for step in steps]
        measured = files.read_json(result)
        measured["step_seconds"] = statistics.median_low(seconds[self.warmup :])  # the upper one may have compiled
        if generations := measured.get("generation_seconds", ())[self.warmup : self.steps]:
            measured["generation_share"] = statistics.median_low(generations) / measured["step_seconds"]
        return about | {"measured": measured, "every_step_seconds": seconds, "losses": [step["loss"] for step in steps]}


def planned(values: draw.Values, cluster: Cluster, directory: Path) -> tuple[Recipe, Plan]:
    """The recipe of these values and its plan. Raises UserError when nothing fits."""
    path = directory / "drawn.yaml"
    about = values | {"data": values["data"] | {"prepared": str(directory / "shards")}}
    if values["stage"] != "pretrain":
        about |= {"model": values["model"] | {"init_from": str(draw.write_start(directory / "start", values["model"]))}}
    files.write_json(path, about)
    loaded = recipe.load(path).recipe
    return loaded, planner.make(loaded, cluster, shape.of(loaded))


def fixed(values: draw.Values, plan: Any) -> draw.Values:
    """The same values with the plan's choices written down."""
    found = plan if isinstance(plan, dict) else summary(plan)
    names = ("offload_optimizer", "offload_param")
    return values | {
        "zero": {"stage": found["zero_stage"]} | {name: found[name] for name in names},
        "train": values["train"] | {"recompute": found["recompute"]},
        "batch": values["batch"] | {"micro_batch": found["micro_batch"]},
    }


def summary(plan: Plan) -> dict[str, Any]:
    """What a row repeats of a plan."""
    names = ("zero_stage", "offload_optimizer", "offload_param", "recompute", "micro_batch", "precision", "compiled")
    names += ("gradient_accumulation_steps", "tokens_per_step", "tokens_per_second", "gpu_bytes", "gpu_bytes_items")
    names += ("gpu_allocated_bytes", "host_bytes", "attention", "parameters", "step_seconds")
    return {name: getattr(plan, name) for name in names}


def compile_all(jobs: Sequence[Job], cluster: Cluster, work: Path, until: float) -> None:
    """Run the compiled cases with one layer, several at once, so that the compiler's cache knows their kernels."""
    waiting = [Job(job.values, cluster, work, layers=1) for job in jobs if job.plan.compiled]
    for job in waiting[: 2 * LANES]:
        job.start()
    running: list[Job] = []
    room = 0.8 * (gpus.find(cluster.hosts[0].gpu).memory_bytes if cluster.hosts[0].gpu else 64 * GIB)
    while (waiting or running) and time.monotonic() < until:
        for job in [job for job in running if job.is_over()]:
            if not (job.run.path / "rank-0.json").exists():
                print(f"not compiled: {job.values['name']}: {job.row()['error'][-2500:]}", flush=True)
            job.end()
            running.remove(job)
        taken = sum(job.plan.gpu_bytes for job in running)
        for job in list(waiting):
            if len(running) < LANES and taken + job.plan.gpu_bytes < room:
                waiting.remove(job)
                if job.process is None:
                    job.start()
                job.go()
                running.append(job)
                taken += job.plan.gpu_bytes
        time.sleep(0.1)
    for job in (*running, *waiting):
        job.end()


def measure_all(jobs: Sequence[Job], until: float, out: Path) -> None:
    """Every case alone on the GPU; the next one's imports meanwhile."""
    for number, job in enumerate(jobs):
        if time.monotonic() > until - 20:
            break
        for following in jobs[number : number + 2]:
            if following.process is None:
                following.start()
        wait_for_room()
        job.go()
        while not job.is_over() and time.monotonic() < until:
            time.sleep(0.05)
        row = job.row()
        job.end()
        files.append_json_line(out, row)
        print(line(row, row["plan"]), flush=True)
    for job in jobs:
        job.end()


def wait_for_room() -> None:
    """Until the driver has the memory of the case before back."""
    patience = time.monotonic() + 10
    while time.monotonic() < patience and any(size > 1.5 * GIB for size in used_by_driver().values()):
        time.sleep(0.2)


def line(row: dict[str, Any], plan: dict[str, Any]) -> str:
    """A row for people."""
    how = f"z{plan['zero_stage']} {plan['offload_optimizer']} {plan['recompute']} {plan['micro_batch']}x"
    how += f"{plan['gradient_accumulation_steps']} {'compiled' if plan['compiled'] else 'eager'}"
    if "error" in row:
        return f"{row['case']:<50} {how}: FAILED\n{row['error'][-1500:]}"
    memory_error, time_error = errors(row, plan)
    measured = row["measured"]
    share = f"  {measured['generation_share']:.0%} generation" if "generation_share" in measured else ""
    used, allocated = (measured.get(name, measured["rss"]) for name in ("device_used", "allocated"))
    return (
        f"{row['case']:<50} {how:<34} {used / GIB:6.2f} GiB {memory_error:+6.1%}"
        f"  allocated {allocated / GIB:6.2f} {plan['gpu_allocated_bytes'] / allocated - 1:+6.1%}  "
        f"{measured['step_seconds']:6.3f} s {time_error:+6.1%}  {row['wall_seconds']:.0f} s{share}"
    )


def errors(row: dict[str, Any], plan: dict[str, Any]) -> tuple[float, float]:
    """(predicted / measured - 1) of the memory in use and of the step's seconds; CPU ranks have no prediction of it."""
    measured, speed = row["measured"], plan["tokens_per_second"]
    seconds = plan["tokens_per_step"] / speed if speed else measured["step_seconds"]
    used = measured.get("device_used", measured["rss"])
    return plan["gpu_bytes"] / used - 1, seconds / measured["step_seconds"] - 1


def again(row: dict[str, Any], directory: Path) -> Candidate:
    """What the planner predicts now for a row's recipe and choices."""
    cluster = Cluster((Host("localhost", 1, row["gpu"], 128 * GIB),))
    loaded, _ = planned(fixed(row["values"], row["plan"]), cluster, directory)
    (candidate,) = planner.list_candidates(loaded, cluster, shape.of(loaded))
    return candidate


def table(paths: Sequence[Path]) -> str:
    """Every row's errors with the code as it is, and what they come to."""
    lines, memories, times = [], [], []
    with tempfile.TemporaryDirectory() as work:
        for row in (row for path in paths for row in files.read_json_lines(path)):
            plan = row["plan"]
            try:
                now = again(row, Path(work))
            except UserError as refused:
                lines.append(f"{row['case']:<50} refused now: {refused.problem}")
                continue
            fields = {"gpu_bytes": now.gpu_bytes, "tokens_per_second": now.tokens_per_second}
            plan |= fields | {"gpu_allocated_bytes": memory.allocated_bytes(now.gpu_items)}
            lines.append(line(row, plan))
            if "measured" in row:
                memory_error, time_error = errors(row, plan)
                memories.append(memory_error)
                times.append(time_error)
    for name, found in (("memory", memories), ("time", times)):
        if found:
            middle = statistics.median(map(abs, found))
            lines.append(f"{name}: {len(found)} runs, median {middle:.1%}, {min(found):+.1%} to {max(found):+.1%}")
    return "\n".join(lines)


def toy(values: draw.Values) -> draw.Values:
    """The same stage and kind of adapters at a size for CPUs."""
    found = {name: value for name, value in values.items() if name != "lora"}
    if lora := values.get("lora"):
        found["lora"] = lora | {"quantize": "none", "rank": 4}
    batch, train = {"sequence_length": 128, "tokens_per_step": 1024}, {"steps": 10_000, "cpu_ranks": 1}
    if grpo := values.get("grpo"):
        found["grpo"] = grpo | {"max_new_tokens": 16}
    shape_ = TOY | {key: values["model"][key] for key in ("tie_embeddings", "config") if key in values["model"]}
    return found | {"model": shape_, "batch": batch, "train": train, "zero": {"stage": 1, "offload_optimizer": "none"}}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--models", action="store_true", help="models that people start from instead of drawn ones")
    parser.add_argument(
        "--rollouts", action="store_true", help="GRPO and PPO of published shapes instead of drawn ones"
    )
    parser.add_argument("--only", default="", help="only the cases whose name contains this, or one of these (a,b)")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs for longer than this")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--host-memory", type=float, default=120.0, help="GiB of the host, which may grow as it is used"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="print these rows against today's predictions")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    until = time.monotonic() + 60 * arguments.minutes
    kind = None if arguments.device == "cpu" else next(iter(visible_gpus().values()))
    cluster = Cluster((Host("localhost", 1, kind, int(arguments.host_memory * GIB)),))
    cases = draw.drawn(arguments.seed, arguments.count)
    if arguments.models or arguments.rollouts:
        cases = draw.of_models() if arguments.models else draw.of_rollouts()
    values = [case for case in cases if any(part in case["name"] for part in arguments.only.split(","))]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
        jobs = []
        for one in values:
            try:
                jobs.append(Job(toy(one) if kind is None else one, cluster, work))
            except UserError as refused:
                row = {"case": one["name"], "values": one, "gpu": kind, "refused": str(refused)}
                files.append_json_line(arguments.out, row)
                print(f"{one['name']}: {refused}", flush=True)
        begun = time.monotonic()
        compile_all(jobs, cluster, work, until - 120)
        print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
        measure_all(jobs, until, arguments.out)


if __name__ == "__main__":
    main()
