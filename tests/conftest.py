"""One prepared corpus and one finished tiny run, shared by every end-to-end test of the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finlm import config, pipeline
from finlm.base.rundir import RunDir
from finlm.data import prepare
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape

from helpers import QUICKSTART, TINY, finlm, sets


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
        return pipeline.create_run(loaded, plan, config.deepspeed(loaded.recipe, plan), shards, tmp_path / "runs")

    return make
