"""Every pretraining recipe, and the quickstart's stages after it, give at toy scale the curve that they promise."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.inference import export
from finlm.recipe import cluster, derive, parents, recipe, weights
from finlm.record import expectations

from helpers import QUICKSTART, ROOT, new_run

PATHS = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if recipe.load(path).recipe.stage == "pretrain"]
PATHS += [ROOT / f"recipes/quickstart/{stage}.yaml" for stage in ("sft", "hybrid", "dpo")]
PATHS += [ROOT / f"recipes/{name}/sft.yaml" for name in ("fin-r1-7b", "r1-distill-qwen-32b")]
Trained = Callable[[Path], RunDir]


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a recipe's toy, after that of its parent; each once."""
    runs, cache = tmp_path_factory.mktemp("runs"), f"data.cache_dir={tmp_path_factory.mktemp('toy')}"
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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_pretraining_and_fine_tuning_meet_their_promises_with_other_vector_instructions(
    capability: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script trains the toy of sft.yaml's parent first, then its own; each is held to its expect.toy."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    command = ["bash", "scripts/sft_run.sh", "--toy", "--runs", tmp_path]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("all 4 numbers of the recipe's expect: are met") == 2
    capabilities = {
        row.get("cpu_capability") for run in tmp_path.glob("quickstart*") for row in RunDir(run).read_events("start")
    }
    assert capabilities == {capability.upper()}
