"""Every pretraining recipe, and the quickstart's stages after it, give at toy scale the curve that they promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finlm import config, export, pipeline
from finlm.base.rundir import RunDir
from finlm.data import prepare
from finlm.plan import planner
from finlm.recipe import cluster, parents, recipe, shape, toy
from finlm.record import expectations

from helpers import QUICKSTART, ROOT

PATHS = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if recipe.load(path).recipe.stage == "pretrain"]
PATHS += [ROOT / f"recipes/quickstart/{stage}.yaml" for stage in ("sft", "hybrid", "dpo")]
Trained = Callable[[Path], RunDir]


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a recipe's toy, after that of its parent; each once."""
    runs, cache = tmp_path_factory.mktemp("runs"), f"data.cache_dir={tmp_path_factory.mktemp('toy')}"
    made: dict[Path, RunDir] = {}

    def train(path: Path) -> RunDir:
        if path not in made:
            loaded = toy.load(str(path), [cache])
            init_from = loaded.recipe.model.init_from
            if parents.is_recipe(init_from):
                start = train(ROOT / str(init_from))
                if not start.export.exists():
                    export.export(start.path, start.export)
                model = loaded.recipe.model.model_copy(update={"init_from": str(start.export)})
                loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))
            shards = prepare.run(loaded.recipe)
            hosts = cluster.Cluster((cluster.Host("localhost", 1, None, 8 * 2**30),))
            plan = planner.make(loaded.recipe, hosts, shape.of(loaded.recipe, prepare.sizes(shards, loaded.recipe)[0]))
            made[path] = pipeline.create_run(loaded, plan, config.deepspeed(loaded.recipe, plan), shards, runs)
            ranks.train(made[path])
        return made[path]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_toy_gives_the_losses_it_promises(path: Path, trained: Trained) -> None:
    promised = toy.load(str(path)).recipe.expect
    assert promised is not None, "give it expect.toy: the losses that `finlm train RECIPE --toy` shows"
    outcome = expectations.check(trained(path), promised)
    assert outcome.checked and outcome.ok, "\n".join(outcome.lines())


def test_a_toy_keeps_what_makes_the_recipe_and_drops_its_size() -> None:
    path = ROOT / "recipes/xuanyuan-6b/pretrain.yaml"
    full, small = recipe.load(path).recipe, toy.load(str(path)).recipe
    assert (small.optim.lr, small.optim.betas, small.train.seed) == (full.optim.lr, full.optim.betas, full.train.seed)
    assert small.data.clean == full.data.clean and small.zero.stage == full.zero.stage
    assert small.model.hidden_size == 64 and small.train.steps == toy.STEPS
    assert toy.load(str(QUICKSTART), ["optim.lr=1e-3"]).recipe.expect is None, "another toy than the promised one"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: path.parent.name)
def test_every_recipe_has_a_toy(path: Path) -> None:
    full, small = recipe.load(path).recipe, toy.load(str(path)).recipe
    assert (small.stage, small.optim.lr, small.model.hidden_size) == (full.stage, full.optim.lr, 64)
    if full.stage != "pretrain":
        assert toy.load(str(small.model.init_from)).recipe.model.layers == small.model.layers
