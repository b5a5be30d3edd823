"""Every pretraining recipe, and the quickstart's stages after it, give at toy scale the curve that they promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.inference import export
from finlm.recipe import cluster, derive, parents, recipe, weights
from finlm.record import expectations

from helpers import QUICKSTART, ROOT, new_run
from ranks import Ranks

PATHS = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if recipe.load(path).recipe.stage == "pretrain"]
PATHS += [ROOT / f"recipes/quickstart/{stage}.yaml" for stage in ("sft", "hybrid", "dpo")]
PATHS += [ROOT / f"recipes/{name}/sft.yaml" for name in ("fin-r1-7b", "r1-distill-qwen-32b")]
Trained = Callable[[Path], RunDir]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that names where the toys' data are prepared."""
    return f"data.cache_dir={tmp_path_factory.mktemp('toy')}"


@pytest.fixture(scope="module")
def trained(ranks: Ranks, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a recipe's toy, after that of its parent; each once."""
    return trainer(ranks, cache, tmp_path_factory.mktemp("runs"))


def trainer(ranks: Ranks, cache: str, runs: Path) -> Trained:
    """A function that trains a recipe's toy on these ranks, after that of its parent; each once."""
    made: dict[Path, RunDir] = {}

    def exported(named: str) -> str:
        run = train(ROOT / named)
        if not run.export.exists():
            export.export(run.path, run.export)
        return str(run.export)

    def train(path: Path) -> RunDir:
        if path not in made:
            loaded = derive.load_toy(str(path), [cache])
            init_from = loaded.recipe.model.init_from
            if parents.is_recipe(init_from):
                model = loaded.recipe.model.model_copy(update={"init_from": exported(str(init_from))})
                loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))
            for place, named in weights.reward_recipes(loaded.recipe):
                judged = weights.with_reward_model(loaded.recipe, place, exported(named))
                loaded = dataclasses.replace(loaded, recipe=judged)
            hosts = cluster.Cluster((cluster.Host("localhost", 1, None, 8 * 2**30),))
            made[path] = new_run(loaded, hosts, runs)
            ranks.train(made[path])
        return made[path]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_toy_gives_the_losses_it_promises(path: Path, trained: Trained) -> None:
    promised = derive.load_toy(str(path)).recipe.expect
    assert promised is not None, "give it expect.toy: the losses that `finlm train RECIPE --toy` shows"
    outcome = expectations.check_expectations(trained(path), promised)
    assert outcome.checked and outcome.ok, "\n".join(outcome.lines())


@pytest.mark.slow
def test_the_chain_to_a_model_that_calculates_runs_as_toys(trained: Trained) -> None:
    run = trained(ROOT / "recipes/synthetic-world-100m/grpo.yaml")
    rows = list(run.read_events("step"))
    assert len(rows) == derive.STEPS and all(set(row["rewards"]) == {"number", "format"} for row in rows)
    shown = list(files.read_json_lines(run.rollouts))
    assert {row["step"] for row in shown} == set(range(1, derive.STEPS + 1))
    assert all("百万元" in row["prompt"] or "债券" in row["prompt"] for row in shown)
    evals = list(run.read_events("eval"))
    assert all(set(row["sources"]["figures"]["rewards"]) == {"number", "format"} for row in evals)


@pytest.mark.slow
def test_ppo_by_the_reward_model_of_a_recipe_runs_as_toys(trained: Trained) -> None:
    run = trained(ROOT / "recipes/xuanyuan-6b/ppo.yaml")
    rows = list(run.read_events("step"))
    assert len(rows) == derive.STEPS and all(set(row["rewards"]) == {"model"} for row in rows)
    assert len({row["rewards"]["model"] for row in rows}) > 1, "the reward model tells answers apart"


def test_a_toy_keeps_what_makes_the_recipe_and_drops_its_size() -> None:
    path = ROOT / "recipes/xuanyuan-6b/pretrain.yaml"
    full, small = recipe.load(path).recipe, derive.load_toy(str(path)).recipe
    assert (small.optim.lr, small.optim.betas, small.train.seed) == (full.optim.lr, full.optim.betas, full.train.seed)
    assert small.data.clean == full.data.clean and small.zero.stage == full.zero.stage
    assert small.model.hidden_size == 64 and small.train.steps == derive.STEPS
    assert derive.load_toy(str(QUICKSTART), ["optim.lr=1e-3"]).recipe.expect is None, (
        "another toy than the promised one"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: path.parent.name)
def test_every_recipe_has_a_toy(path: Path) -> None:
    full, small = recipe.load(path).recipe, derive.load_toy(str(path)).recipe
    assert (small.stage, small.optim.lr, small.model.hidden_size) == (full.stage, full.optim.lr, 64)
    if full.stage != "pretrain":
        assert derive.load_toy(str(small.model.init_from)).recipe.model.layers == small.model.layers


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_pretraining_and_fine_tuning_meet_their_promises_with_other_vector_instructions(
    capability: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    with Ranks() as ranks:  # torch reads the variable once
        train = trainer(ranks, cache, tmp_path)
        for path in (QUICKSTART, QUICKSTART.with_name("sft.yaml")):
            run, promised = train(path), derive.load_toy(str(path)).recipe.expect
            assert promised is not None
            outcome = expectations.check_expectations(run, promised)
            assert len(outcome.checked) == 4 and outcome.ok, "\n".join(outcome.lines())
            assert [row["cpu_capability"] for row in run.read_events("start")] == [capability.upper()]
