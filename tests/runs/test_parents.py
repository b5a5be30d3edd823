"""Which finished run a recipe starts from, on run directories made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from finlm import dry_run, pipeline
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import cluster, derive, parents, recipe, weights
from finlm.recipe.parents import Load
from finlm.runs import lineage

from helpers import NO_WEIGHTS, QUICKSTART

FAMILY = QUICKSTART.parent
SHAPE = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 512}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished(stage: str, number: int, *overrides: str, load: Load = recipe.load) -> RunDir:
    """A finished run of a quickstart recipe with overrides: what of its directory is looked at."""
    loaded = load(FAMILY / f"{stage}.yaml", overrides).recipe
    run = RunDir(Path(f"runs/{loaded.name}-2026-{number}"))
    files.write_text(run.recipe, recipe.dump(loaded))
    files.write_json(run.plan, {"recipe": loaded.name, "steps": loaded.train.steps or 77})
    files.write_json(run.manifest, {"start": None if (start := parents.start_of(loaded)) is None else start.to_json()})
    files.write_json(run.export / "config.json", SHAPE | {"model_type": "llama", "vocab_size": 4096})
    (run.export / "model.safetensors").write_bytes(NO_WEIGHTS)
    run.append_event("end", status="finished")
    return run


def found(stage: str) -> tuple[str | None, list[str]]:
    """The run that a recipe of this stage stands for, and the runs passed over."""
    path, passed = lineage.find_export(recipe.load(FAMILY / f"{stage}.yaml").recipe, Path("runs"), recipe.load)
    return path and path.parent.name, passed


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.steps=22", "train.steps 22, the recipe says 250"),
        ("train.tokens=220k", "train.steps None, the recipe says 250"),
        ("optim.lr=1e-3", "optim.lr 0.001, the recipe says 0.002"),
        ("train.seed=3", "train.seed 3, the recipe says 7"),
        ("train.precision=fp32", "train.precision fp32, the recipe says auto"),
        ("data.sources[0].synthetic.size=1MB", "data.sources[0].synthetic.size 1000000, the recipe says 12000000"),
        ("model.init_std=0.1", "model.init_std 0.1, the recipe says 0.02"),
        ("incidents.spike.then=skip", "incidents.spike.then skip, the recipe says record"),
        ("tokenizer.sample_bytes=1MB", "tokenizer.sample_bytes 1000000, the recipe says 8000000"),
    ],
)
def test_a_trial_is_not_what_the_recipe_stands_for(override: str, difference: str) -> None:
    whole, trial = finished("pretrain", 1), finished("pretrain", 2, override)
    assert found("pretrain") == (whole.path.name, [f"{trial.path}: {difference}"])
    shutil.rmtree(whole.path)
    assert found("pretrain") == (None, [f"{trial.path}: {difference}"])
    with pytest.raises(UserError) as caught:
        lineage.model_directory(recipe.load(FAMILY / "sft.yaml").recipe, Path("runs"))
    assert f"{trial.path}: {difference}" in caught.value.evidence and "init_from=runs/RUN" in caught.value.fix


def test_another_launcher_starts_a_toy_from_the_toy_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, whole = finished("pretrain", 1, load=derive.load_toy), finished("pretrain", 2)
    loaded, hosts = derive.load_toy(FAMILY / "sft.yaml"), cluster.local(1)
    training = pipeline.Training(loaded, hosts, Path("runs"), read=derive.load_toy)
    monkeypatch.setattr(weights, "check_model", lambda _: None)  # these directories hold no weights
    monkeypatch.setattr(pipeline, "prepare_data", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dry_run.adapt(training, "torchrun")
    assert training.recipe.model.init_from == str(toy.export) != str(whole.export)


@pytest.mark.parametrize(
    "override",
    ["eval.every_steps=25", "batch.micro_batch=2", "zero.stage=2", "checkpoint.every_steps=50", "data.cache_dir=c"],
)
def test_how_it_was_carried_out_does_not_matter(override: str) -> None:
    finished("pretrain", 1)
    newer = finished("pretrain", 2, override)
    assert found("pretrain") == (newer.path.name, [])


def test_a_run_that_did_not_finish_or_of_another_name_is_not_mentioned() -> None:
    whole, other = finished("pretrain", 1), finished("pretrain", 2)
    other.events.unlink()
    finished("sft", 3)
    assert found("pretrain") == (whole.path.name, [])


def test_the_parent_of_a_parent_counts_too() -> None:
    whole, trial = finished("pretrain", 1), finished("pretrain", 2, "train.steps=22")
    good = finished("sft", 1, f"model.init_from={whole.export.absolute()}")
    bad = finished("sft", 2, f"model.init_from={trial.path}")
    difference = f"{bad.path}: model.init_from.train.steps 22, the recipe says 250"
    assert found("sft") == (good.path.name, [difference])
    shutil.rmtree("runs/" + trial.path.name)
    shutil.rmtree(whole.path)  # their manifests know it still
    assert found("sft") == (good.path.name, [difference])
    foreign = finished("sft", 3, f"model.init_from={shutil.copytree(good.export, 'other')}")
    assert found("sft")[1][0] == f"{foreign.path}: model.init_from other, the recipe says quickstart"


def test_a_run_of_an_older_version_is_known_by_the_directory_it_started_from() -> None:
    whole = finished("pretrain", 1)
    old = finished("sft", 1, f"model.init_from={whole.export.absolute()}")
    files.write_json(old.manifest, {})
    assert found("sft") == (old.path.name, [])
    files.write_json(whole.export / "finlm.json", {"run": "quickstart-2026-1", "recipe": "quickstart", "step": 100})
    assert found("pretrain") == (None, [f"{whole.path}: its export is of step 100 of 250"])
    old.recipe.write_text(old.recipe.read_text() + "key_of_another_version: 1\n")
    assert found("sft")[0] is None and "it cannot be read: " in found("sft")[1][0]


def test_a_run_named_by_the_user_stands_for_its_export() -> None:
    trial = finished("pretrain", 2, "train.steps=22")
    loaded = recipe.load(FAMILY / "sft.yaml", (f"model.init_from={trial.path}",)).recipe
    assert loaded.model.init_from == str(trial.export)
    begin = parents.start_of(loaded)
    assert str(begin) == "step 22 of quickstart-2026-2 (recipe quickstart)"
    judged = recipe.load(FAMILY / "grpo.yaml", (f"grpo.reward={trial.path}",)).recipe
    assert judged.grpo is not None and judged.grpo.reward[0].path == str(trial.export)
    (trial.path / "checkpoints/step-22").mkdir(parents=True)
    shutil.rmtree(trial.export)
    for named, what in ((trial.path, "a run without an export"), (trial.checkpoint(22), "a checkpoint")):
        with pytest.raises(UserError, match=f"model.init_from: {named} is {what}") as caught:
            recipe.load(FAMILY / "sft.yaml", (f"model.init_from={named}",))
        assert f"finlm export {named} DIRECTORY" in caught.value.fix


def test_other_starts_are_told_by_name_and_never_by_place(directory: Path) -> None:
    loaded = recipe.load(QUICKSTART, ("model.init_from=owner/name", "model.revision=abc")).recipe
    assert str(parents.start_of(loaded)) == "owner/name at abc"
    loaded = recipe.load(QUICKSTART, (f"model.init_from={directory}/llama",)).recipe
    assert str(directory) not in str(parents.start_of(loaded))
    assert parents.start_of(recipe.load(QUICKSTART).recipe) is None
