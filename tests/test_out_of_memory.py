"""Runs whose ranks run out of memory: the next plan where the recipe left it open, today's words where it did not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conftest import ForkedLaunch, RunMaker
from finlm.base import files
from finlm.base.checkpoints import MANIFEST, Manifest
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.hosts import checkpoint_parts
from finlm.launch import restart, start
from finlm.plan import out_of_memory
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host
from finlm.record import history
from finlm.record.report import run_page

from helpers import QUICKSTART, finlm_here, incidents, logs, sets, with_fault
from ranks import Ranks

pytestmark = pytest.mark.slow
FIXED = ("batch.micro_batch=8", "train.recompute=none", "zero={stage: 1, offload_optimizer: none, offload_param: none}")


def losses(run: RunDir) -> list[float]:
    """Of the steps that count."""
    return history.read_history(run).values("loss")


def launch(run: RunDir) -> None:
    """Launch the ranks of a run as `finlm train` does, again when memory runs out."""
    plan = Plan.read(run.plan)
    hosts = Cluster(tuple(Host(host.name, host.slots) for host in plan.hosts))
    restart.run_ranks(run, plan, recipe.load(run.recipe).recipe, hosts)


def test_a_run_goes_on_with_a_smaller_plan_to_the_losses_of_one_planned_so_from_the_start(
    tiny: tuple[str, ...], make_run: RunMaker, forked_launch: ForkedLaunch, ranks: Ranks, tmp_path: Path
) -> None:
    forked_launch("out_of_memory", 4, 3)
    done = finlm_here("train", QUICKSTART, *sets(tiny), "--runs", tmp_path / "train")
    (path,) = (tmp_path / "train").iterdir()
    run = RunDir(path)
    assert done.returncode == 0, done.stderr + logs(run)
    assert "step 3: out of memory, planned again" in done.stderr
    assert "with batch.micro_batch: 4 instead of 8" in done.stderr
    assert [Plan.read(each).micro_batch for each in (*run.former_plans, run.plan)] == [8, 4]
    whole = make_run("batch.micro_batch=4")
    ranks.train(whole)
    assert losses(run) == losses(whole), "the same rows in the same order, and nothing left of the plans before"
    rows = [row for row in incidents(run) if row["what"] == "out of memory, planned again"]
    assert [(row["step"], row["former"]) for row in rows] == [(3, "plan.1.json")]
    (prediction,) = run.read_events("prediction")
    assert prediction["planned_bytes"] == Plan.read(run.plan).gpu_bytes
    assert "batch.micro_batch: 4 instead of 8" in run_page.build(run).read_text()


def test_a_run_goes_on_from_its_last_checkpoint_on_one_rank_without_restarts(
    make_run: RunMaker, forked_launch: ForkedLaunch, ranks: Ranks
) -> None:
    # In the background the save of step 10 may not have ended in step 13, on a busy machine.
    run, whole = make_run("checkpoint.asynchronous=false", ranks=1), make_run(ranks=1)
    forked_launch("out_of_memory", 4, 25)  # 2 micro-steps of 8 rows a step: it happens in step 13
    launch(run)
    assert recipe.load(run.recipe).recipe.launch.restarts == 0 and not list(run.read_events("restart"))
    assert [row["step"] for row in run.read_events("start")] == [0, 10]
    assert [row["step"] for row in incidents(run) if "former" in row] == [12]
    rows = ranks.train(whole)
    assert losses(run)[:10] == [row["loss"] for row in rows[:10]]
    assert losses(run) == pytest.approx([row["loss"] for row in rows], abs=1e-4)
    assert files.read_json(run.ds_config)["train_micro_batch_size_per_gpu"] == Plan.read(run.plan).micro_batch == 4


def test_a_recipe_that_fixes_the_keys_ends_with_the_plan_that_would_fit(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(*FIXED, ranks=1)
    before = run.plan.read_bytes()
    monkeypatch.setenv("PYTHONPATH", with_fault(run.path.parent / "site", "out_of_memory(4, 3)"))
    with pytest.raises(RunFailed) as failed:
        launch(run)
    assert "a rank ran out of memory" in failed.value.evidence
    assert "--set batch.micro_batch=4" in failed.value.evidence
    assert run.plan.read_bytes() == before and not run.former_plans and len(list(run.read_events("start"))) == 1


def test_a_run_is_planned_again_so_often_only(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    run, launches = make_run(ranks=1), []
    taken = out_of_memory.Taken(1, 1, 1, 1 << 40, 1 << 40)

    def full(*_: object, **__: object) -> None:
        launches.append(Plan.read(run.plan))
        run.logs.mkdir(exist_ok=True)
        with (run.logs / "localhost.0.log").open("a") as log:
            log.write(f"{taken.line()}\n")
        raise RunFailed("rank 0 on localhost ended with exit code 1")

    monkeypatch.setattr(start, "launch_ranks", full)
    monkeypatch.setattr(out_of_memory, "next_plan", lambda _, __, plan, *___: plan)
    with pytest.raises(RunFailed) as failed:
        launch(run)
    assert len(launches) == 1 + out_of_memory.MOST == 1 + len(run.former_plans)
    assert "planned again 4 times before" in failed.value.evidence
    with pytest.raises(RunFailed):  # the same command, later
        launch(run)
    assert len(launches) == 2 + out_of_memory.MOST


def test_shards_that_are_cut_anew_are_brought_to_hosts_that_have_their_own_only(
    make_run: RunMaker, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = make_run("zero.stage=auto"), make_run("zero.stage=2")
    assert ranks.codes(run, "stopped", 12) == [-9, -9]
    hosts = Cluster((Host("a", 1), Host("b", 1)))
    monkeypatch.setattr(restart.ssh, "is_this_machine", lambda name: name == "a")
    own = Manifest.read(run.checkpoint(10))
    monkeypatch.setattr(
        checkpoint_parts, "_ask_host", lambda _, host, __: checkpoint_parts.Holding(host, {"checkpoints/step-10": own})
    )
    monkeypatch.setattr(restart.checkpoint_parts, "gather_checkpoint", lambda run, *_: run.checkpoint(10))
    plan, smaller = Plan.read(run.plan), Plan.read(other.plan)
    restart._bring_checkpoint(run, plan, plan, hosts, accept_new_keys=False)
    assert not (run.path / "continued").exists(), "each host can go on with what it has"
    restart._bring_checkpoint(run, plan, smaller, hosts, accept_new_keys=False)
    restart._replace_plan(run, plan, smaller, recipe.load(run.recipe).recipe, 12)
    left = {name: part for name, part in own.files.items() if part.rank == 0}
    for name in own.files.keys() - left.keys():
        (run.checkpoint(10) / name).unlink()
    files.write_json(run.checkpoint(10) / MANIFEST, dataclasses.replace(own, files=left).to_json())
    ranks.train(run)
    assert [(row["step"], row["saved"][1], row["loaded"][1]) for row in run.read_events("resharded")] == [(10, 1, 2)]


def test_the_same_command_resumes_a_run_by_the_plan_it_was_given(tiny: tuple[str, ...], tmp_path: Path) -> None:
    # --print makes the run directory and the files that start what training would start.
    command = ("train", QUICKSTART, *sets(tiny), "--runs", tmp_path, "--print", "torchrun")
    made = finlm_here(*command)
    assert made.returncode == 0, made.stderr
    (path,) = tmp_path.iterdir()
    run = RunDir(path)
    planned = files.read_json(run.plan)
    files.write_json(run.path / "plan.1.json", planned)
    smaller = {"micro_batch": 4, "gradient_accumulation_steps": 2, "reasons": ["out of memory, planned again: so"]}
    files.write_json(run.plan, planned | smaller)
    done = finlm_here(*command)
    assert done.returncode == 0, done.stderr
    assert f"{run.path} goes on by its plan.json: out of memory" in done.stderr
    assert str(run.path) in done.stdout and list(tmp_path.iterdir()) == [run.path]
