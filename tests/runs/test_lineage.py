"""Which unfinished run another launch of a recipe goes on with, on run directories made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import COMPLETION, is_finished
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe
from finlm.runs import lineage

from helpers import QUICKSTART, TINY


def earlier(tmp_path: Path, *overrides: str) -> lineage.Earlier | None:
    """What the recipe with overrides would go on from, beside a run of the recipe that was stopped after step 10."""
    run, shards = RunDir(tmp_path / "runs/quickstart-1"), tmp_path / "shards"
    wanted, former = (recipe.load(QUICKSTART, (*TINY, *changed)).recipe for changed in (overrides, ()))
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    files.write_text(run.recipe, recipe.dump(former))
    files.write_json(run.plan, plan.to_json())
    files.write_json(run.manifest, {"shards": {"path": str(shards)}})
    files.write_json(run.checkpoint(10) / "manifest.json", Manifest(10, 2, 1, "none", {}).to_json())
    assert not overrides or lineage.find_unfinished(wanted, plan, shards, run.path.parent) is None
    return lineage.find_earlier(wanted, plan, shards, run.path.parent)


@pytest.mark.parametrize(
    "override",
    [
        *("record.tracking=[tensorboard]", "record.online=true", "data.num_proc=8", "forked_from=a@b"),
        *("self_qa={model: m}", "checkpoint.every_steps=5", "eval.every_steps=5", "batch.micro_batch=2", "env={A: b}"),
        "train.precision=fp32",  # what auto stood for
    ],
)
def test_a_run_goes_on_when_only_how_it_is_carried_out_was_changed(
    tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = earlier(tmp_path, override)
    assert found is not None and found.step == 10
    assert override.partition("=")[0] in capsys.readouterr().err


def test_a_checkpoint_that_only_other_hosts_have_is_brought_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier(tmp_path)
    run = RunDir(tmp_path / "runs/quickstart-1")
    shutil.rmtree(run.checkpoints)
    for step in (10, 20):
        run.append_event("checkpoint", step=step)

    def gathered(run: RunDir, hosts: cluster.Cluster, step: int, accept_new_keys: bool) -> None:
        files.write_json(run.checkpoint(step) / "manifest.json", Manifest(step, 2, 1, "none", {}).to_json())

    monkeypatch.setattr(lineage.checkpoint_parts, "gather_checkpoint", gathered)
    wanted = recipe.load(QUICKSTART, (*TINY, "batch.micro_batch=2")).recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    found = lineage.find_earlier(wanted, plan, tmp_path / "shards", tmp_path / "runs")
    assert found is not None and found.step == 20


def test_a_run_is_finished_when_its_last_file_is_there_or_by_its_last_row_before_that_file_existed(
    tmp_path: Path,
) -> None:
    earlier(tmp_path)
    run = RunDir(tmp_path / "runs/quickstart-1")
    wanted, plan = recipe.load(run.recipe).recipe, Plan.read(run.plan)
    search = wanted, tmp_path / "shards", run.path.parent
    run.append_event("end", status="finished")
    run.append_event("prediction")
    assert lineage.find_unfinished(wanted, plan, *search[1:]) is None and lineage.find_finished(*search) == run
    files.write_json(run.manifest, files.read_json(run.manifest) | {COMPLETION: "finished.json"})
    assert run.is_trained() and not is_finished(run)  # ended between its last row and its last file
    assert lineage.find_unfinished(wanted, plan, *search[1:]) == run and lineage.find_finished(*search) is None
    files.write_json(run.finished, {})
    assert lineage.find_unfinished(wanted, plan, *search[1:]) is None and lineage.find_finished(*search) == run


def test_a_run_that_is_not_continued_says_which_keys_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert earlier(tmp_path, "optim.lr=1e-3", "record.tracking=[wandb]", "train.seed=3") is None
    assert "quickstart-1 is not continued: optim.lr, train.seed differ\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "--set batch.tokens_per_step=960 goes on with it; --new"),
        (2, "number of ranks divides 15 rows; --new"),
    ],
)
def test_hosts_that_round_the_batch_otherwise_do_not_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, said: str
) -> None:
    """Three ranks made 960 tokens a step of 1,024; one of their hosts is left out, or two."""
    earlier(tmp_path)
    run, shards = RunDir(tmp_path / "runs/quickstart-1"), tmp_path / "shards"
    monkeypatch.setattr(lineage.checkpoint_parts, "gather_checkpoint", lambda *_: None)

    def planned(count: int, *overrides: str) -> tuple[Recipe, Plan]:
        wanted = recipe.load(QUICKSTART, (*TINY, *overrides)).recipe
        hosts = cluster.Cluster(tuple(cluster.Host(f"n{number}", 1, None, 8 * 2**30) for number in range(count)))
        return wanted, planner.make(wanted, hosts, shape.of(wanted, 4096))

    files.write_json(run.plan, planned(3)[1].to_json())
    wanted, plan = planned(ranks)
    assert lineage.find_earlier(wanted, plan, shards, run.path.parent) is None, "no checkpoint was recorded"
    run.append_event("checkpoint", step=10)
    assert not lineage.can_go_on(run, wanted, plan, shards)
    with pytest.raises(UserError, match=r"so nothing was started: tokens_per_step 960 -> 1024") as caught:
        lineage.find_earlier(wanted, plan, shards, run.path.parent)
    assert said in caught.value.fix and "after step 10, on 3 ranks" in caught.value.evidence
    if ranks == 1:
        found = lineage.find_earlier(*planned(ranks, "batch.tokens_per_step=960"), shards, run.path.parent)
        assert found is not None and found.step == 10


def test_gpus_of_another_precision_do_not_start_over(tmp_path: Path) -> None:
    earlier(tmp_path)
    run = RunDir(tmp_path / "runs/quickstart-1")
    run.append_event("checkpoint", step=10)
    files.write_json(run.plan, files.read_json(run.plan) | {"precision": "fp16"})
    wanted = recipe.load(QUICKSTART, TINY).recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    with pytest.raises(UserError, match=r"so nothing was started: precision fp16 -> fp32") as caught:
        lineage.find_earlier(wanted, plan, tmp_path / "shards", run.path.parent)
    assert caught.value.fix == "--set train.precision=fp16 goes on with it; --new starts another run at step 0"


def test_a_recipe_whose_name_begins_like_anothers_does_not_take_its_run(tmp_path: Path) -> None:
    other = RunDir(tmp_path / "runs/quickstart-sft-1")
    earlier(tmp_path)
    (tmp_path / "runs/quickstart-1").rename(other.path)
    files.write_text(other.recipe, other.recipe.read_text().replace("name: quickstart", "name: quickstart-sft"))
    wanted = recipe.load(QUICKSTART, TINY).recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    assert lineage.find_earlier(wanted, plan, tmp_path / "shards", tmp_path / "runs") is None


@pytest.mark.parametrize("name, content", [("manifest.json", ""), ("plan.json", None), ("plan.json", "\0" * 9)])
def test_a_damaged_run_is_named_and_left_out(
    name: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier(tmp_path)
    damaged = tmp_path / "runs/quickstart-2"
    shutil.copytree(tmp_path / "runs/quickstart-1", damaged)
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_text(content)
    found = earlier(tmp_path, "batch.micro_batch=2")
    assert found is not None and found.run.path.name == "quickstart-1"
    assert "quickstart-2 is left out: its manifest.json or plan.json is missing or damaged" in capsys.readouterr().err


def test_a_checkpoint_without_a_readable_manifest_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs/quickstart-1")
    files.write_text(run.checkpoint(20) / "manifest.json", "")
    found = earlier(tmp_path, "batch.micro_batch=2")
    assert found is not None and found.step == 10
    assert "step-20 is damaged and not used: manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("is_gone", [False, True], ids=["damaged", "gone"])
def test_a_run_without_a_whole_checkpoint_does_not_start_over_under_another_plan(tmp_path: Path, is_gone: bool) -> None:
    earlier(tmp_path)
    run = RunDir(tmp_path / "runs/quickstart-1")
    run.append_event("checkpoint", step=10)
    files.write_text(run.checkpoint(10) / "manifest.json", "")
    if is_gone:
        shutil.rmtree(run.checkpoints)
    wanted = recipe.load(QUICKSTART, (*TINY, "batch.micro_batch=2")).recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    with pytest.raises(UserError, match=r"no whole checkpoint of .*quickstart-1 is left, so nothing was started"):
        lineage.find_earlier(wanted, plan, tmp_path / "shards", tmp_path / "runs")


def test_the_parent_of_a_continued_run_is_known_by_another_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier(tmp_path)
    parent, child = (RunDir(tmp_path / f"runs/quickstart-{number}") for number in (1, 2))
    shutil.copytree(parent.path, child.path)
    shards = {"shards": {"path": str(tmp_path / "shards")}}
    files.write_json(child.manifest, shards | {"continues": {"run": str(parent.path)}})
    child.append_event("prediction")  # it was ended
    monkeypatch.chdir(tmp_path)
    wanted = recipe.load(QUICKSTART, TINY).recipe
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 4096))
    assert lineage.find_unfinished(wanted, plan, tmp_path / "shards", Path("runs")) is None
    assert lineage.find_unfinished(wanted, plan, tmp_path / "shards", tmp_path / "runs") is None
