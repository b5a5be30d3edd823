"""Every pretraining recipe is trained at toy scale and gives the curve that it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finlm import config, pipeline
from finlm.base.errors import UserError
from finlm.data import prepare
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape, toy
from finlm.record import expectations

from helpers import QUICKSTART, ROOT

PATHS = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if recipe.load(path).recipe.stage == "pretrain"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shared by the recipes: most of them clean the toy corpus alike."""
    return f"data.cache_dir={tmp_path_factory.mktemp('toy')}"


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_toy_gives_the_losses_it_promises(path: Path, cache: str, ranks: Any, tmp_path: Path) -> None:
    loaded = toy.load(str(path), [cache])
    assert loaded.recipe.expect is not None, "give it expect.toy: the losses that `finlm train RECIPE --toy` shows"
    shards = prepare.run(loaded.recipe)
    hosts = cluster.Cluster((cluster.Host("localhost", 1, None, 8 * 2**30),))
    plan = planner.make(loaded.recipe, hosts, shape.of(loaded.recipe, prepare.sizes(shards)[0]))
    run = pipeline.create_run(loaded, plan, config.deepspeed(loaded.recipe, plan), shards, tmp_path)
    ranks.train(run)
    outcome = expectations.check(run, loaded.recipe.expect)
    assert outcome.checked and outcome.ok, "\n".join(outcome.lines())


def test_a_toy_keeps_what_makes_the_recipe_and_drops_its_size() -> None:
    path = ROOT / "recipes/xuanyuan-6b/pretrain.yaml"
    full, small = recipe.load(path).recipe, toy.load(str(path)).recipe
    assert (small.optim.lr, small.optim.betas, small.train.seed) == (full.optim.lr, full.optim.betas, full.train.seed)
    assert small.data.clean == full.data.clean and small.zero.stage == full.zero.stage
    assert small.model.hidden_size == 64 and small.train.steps == toy.STEPS
    assert toy.load(str(QUICKSTART), ["optim.lr=1e-3"]).recipe.expect is None, "another toy than the promised one"


def test_stages_after_pretraining_have_no_toy() -> None:
    with pytest.raises(UserError, match="--toy is for pretraining"):
        toy.load(str(ROOT / "recipes/quickstart/sft.yaml"))
