"""What several test modules share: the checkout, the tiny variant of the quickstart, the command line."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm import pipeline
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.recipe.cluster import Cluster
from finlm.recipe.recipe import Loaded

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes/quickstart/pretrain.yaml"
TINY = (
    "model.hidden_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.ffn_size=128",
    "tokenizer.vocab_size=2048",
    "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
    "batch.sequence_length=64",
    "batch.tokens_per_step=1024",
    "train.steps=20",
    "optim.warmup_steps=4",
    "checkpoint.every_steps=10",
    "eval.every_steps=10",
    "eval.max_tokens_per_source=300",
    "launch.restarts=0",  # a test's fault ends its run
    "incidents.straggler.ratio=1000",  # the machine may be busy: its slow ranks are no test's subject
)

NO_WEIGHTS = b"\2\0\0\0\0\0\0\0{}"  # a file of safetensors without a tensor


def finlm(*arguments: str | Path, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`python -m finlm ...` as a user runs it."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "finlm", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def finlm_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`finlm ...` in this process, which has imported torch: nine CPU seconds less where the command needs it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def sets(overrides: Sequence[str]) -> list[str]:
    """The --set options of overrides."""
    return [part for override in overrides for part in ("--set", override)]


def new_run(loaded: Loaded, hosts: Cluster, runs: Path) -> RunDir:
    """A run directory as `finlm train` makes it, not started."""
    t = pipeline.Training(loaded, hosts, runs)
    pipeline.prepare_data(t)
    pipeline.plan_run(t)
    return pipeline.create_run(t)


def with_fault(directory: Path, fault: str) -> str:
    """A PYTHONPATH with which launched ranks call a function of faults.py before they begin, for example "fp16()"."""
    directory.mkdir(parents=True, exist_ok=True)
    is_rank = 'sys.orig_argv[-3:-1] == ["-m", "finlm.train"]'
    hasten = "from finlm.base.imports import hasten_transformers\n    hasten_transformers()"  # as the rank does, later
    call = f"import sys\nif {is_rank}:\n    {hasten}\n    import faults\n    faults.{fault}\n"
    (directory / "sitecustomize.py").write_text(call)
    return os.pathsep.join(map(str, (directory, ROOT / "tests", ROOT / "src")))


def incidents(run: RunDir) -> list[dict[str, Any]]:
    """What a run recorded of them."""
    return list(run.read_events("incident"))


def logs(run: RunDir) -> str:
    """The ends of all ranks' logs, to be shown when a run failed."""
    return "\n".join(path.read_text()[-2000:] for path in run.logs.glob("*.log"))


def double(value: int) -> int:
    """Work for a spawned process, which must find it in an importable module; 99 kills the process."""
    if value == 99:
        os._exit(9)
    time.sleep(0.05 * (value % 2))
    return 2 * value
