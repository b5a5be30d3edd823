"""One prepared corpus and one finished tiny run, shared by every end-to-end test of the session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from finlm import config, pipeline
from finlm.base.rundir import RunDir
from finlm.data import prepare
from finlm.ops import launch
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes/quickstart/pretrain.yaml"
TINY = (
    "model.hidden_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.ffn_size=128",
    "tokenizer.vocab_size=1024",
    "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
    "batch.sequence_length=64",
    "batch.tokens_per_step=1024",
    "train.steps=20",
    "optim.warmup_steps=4",
    "checkpoint.every_steps=10",
    "eval.every_steps=10",
    "eval.max_tokens_per_source=2000",
)


def finlm(*arguments: str | Path, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`python -m finlm ...` as a user runs it."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "finlm", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def sets(overrides: Sequence[str]) -> list[str]:
    """The --set options of overrides."""
    return [part for override in overrides for part in ("--set", override)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that make the quickstart a run of seconds, with the session's own cache."""
    cache = tmp_path_factory.mktemp("cache")
    overrides = (*TINY, f"data.cache_dir={cache}")
    prepare.run(recipe.load(QUICKSTART, overrides).recipe)
    return overrides


@pytest.fixture(scope="session")
def finished(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """A tiny run that went through `finlm train`, and what it printed."""
    runs = tmp_path_factory.mktemp("runs")
    result = finlm("train", QUICKSTART, *sets(tiny), "--runs", runs)
    assert result.returncode == 0, result.stderr
    (path,) = runs.iterdir()
    return RunDir(path), result.stderr


RunMaker = Callable[..., RunDir]


@pytest.fixture
def make_run(tiny: tuple[str, ...], tmp_path: Path) -> RunMaker:
    """Create a run directory of the tiny recipe; make_run(*overrides, ranks=2) does not start it."""

    def make(*overrides: str, ranks: int = 2) -> RunDir:
        loaded = recipe.load(QUICKSTART, (*tiny, f"train.cpu_ranks={ranks}", *overrides))
        shards = prepare.run(loaded.recipe)
        hosts = cluster.Cluster((cluster.Host("localhost", ranks, None, 8 * 2**30),))
        plan = planner.make(loaded.recipe, hosts, shape.of(loaded.recipe, prepare.sizes(shards)[0]))
        run = pipeline.create_run(loaded, plan, config.deepspeed(loaded.recipe, plan), shards, tmp_path / "runs")
        launch.write_host_env(run, launch.host_env(loaded.recipe, plan))
        return run

    return make
