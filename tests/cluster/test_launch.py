"""Training on several hosts, from the command a user types: the same losses as on one, and everything comes home."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir

from .netcluster import WORK, Cluster, Host
from .training import ONE_THREAD, PATIENCE_SECONDS, Training, command, the_run, write_hostfile
from helpers import ROOT, sets, with_fault
from ranks import Ranks


def losses(run: RunDir) -> list[float]:
    return [event["loss"] for event in run.read_events("step")]


def checkout(host: Host) -> None:
    """A clone of this repository as a user has it: the files git lists, and an environment that is set up."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            target = host.work / "repo" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    (host.work / "repo" / ".venv").symlink_to(ROOT / ".venv")
    (host.work / "repo" / "scripts" / "setup.sh").write_text("")  # there is no package index in here


def test_two_hosts_from_the_script_equal_one_host(
    pair: Cluster, finished: tuple[RunDir, str], tiny: tuple[str, ...]
) -> None:
    checkout(pair[0])
    repo = pair[0].work / "repo"
    (repo / "hostfile.txt").write_text("n0 slots=1\nn1 slots=1\n")
    (pair[1].work / "of n1" / ".venv").parent.mkdir()
    (pair[1].work / "of n1" / ".venv").symlink_to(ROOT / ".venv")
    # n1 keeps everything elsewhere, and one of its values would run something if any shell read it.
    bait = f"'; touch {WORK}/bitten; $(touch {WORK}/bitten) \" "
    access = "hosts={n1: {work_dir: '/srv/job/of n1', user: root, port: 22, env: {BAIT: \"%s\"}}}"
    overrides = [*tiny, ONE_THREAD, access % bait.replace('"', '\\"'), "data.cache_dir=cache"]
    done = pair[0].run(
        "bash", f"{WORK}/repo/scripts/pretrain_run.sh", *sets(overrides), timeout=PATIENCE_SECONDS, check=False
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    run = RunDir(next((repo / "runs").iterdir()))
    assert losses(run) == pytest.approx(losses(finished[0]), abs=1e-3)
    assert run.export.is_dir() and run.report.exists()
    assert {path.name for path in run.logs.glob("*.[0-9].log")} == {"n0.0.log", "n1.1.log"}
    env = [(run.env / f"{host.name}.env").read_text() for host in pair.hosts]
    assert "GLOO_SOCKET_IFNAME=eno1\n" in env[0] and "GLOO_SOCKET_IFNAME=ens5\n" in env[1]
    assert f"BAIT={bait}\n" in env[1] and not any((host.work / "bitten").exists() for host in pair.hosts)
    there = pair[1].work / "of n1" / "runs" / run.path.name
    assert not (there / "shards").resolve().is_relative_to(WORK + "/repo") and (there / "shards").is_symlink()
    assert (there / "logs" / "n1.1.log").read_bytes() == (run.logs / "n1.1.log").read_bytes()
    step = run.checkpoint(20)
    own = set(files.read_json(there / "checkpoints" / "step-20" / "manifest.json")["files"])
    assert own < set(files.read_json(step / "manifest.json")["files"])  # gathered for the export


def test_three_hosts_with_zero_3_continue_two_with_zero_1_and_all_steps_equal_one_host(
    trio: Cluster, make_run: Callable[..., RunDir], tiny: tuple[str, ...], ranks: Ranks
) -> None:
    checkout(trio[0])
    script = ["bash", f"{WORK}/repo/scripts/pretrain_run.sh", "--runs", f"{WORK}/runs"]
    # 15 rows a step: equal for one rank, for two with 1 + 2 rows at once and for three with 1 + 2 + 2.
    short = ("batch.tokens_per_step=960", "train.steps=40", "checkpoint.every_steps=4", "eval.every_steps=null")
    alone = make_run(*short, ONE_THREAD, ranks=1)
    ranks.train(alone)
    for host in trio.hosts[1:]:
        (host.work / "repo").mkdir()
        (host.work / "repo" / ".venv").symlink_to(ROOT / ".venv")
    (trio[0].work / "repo" / "hostfile.txt").write_text("n0 slots=1\nn1 slots=1\n")
    two = (*tiny, *short, ONE_THREAD, "batch.micro_batch={n0: 1, n1: 2}")
    training = Training(trio, [*script, *sets(two)])
    training.row("checkpoint")
    training.kill_all(signal.SIGTERM)  # as a scheduler does
    assert training.over().process.returncode == 128 + signal.SIGTERM, training.said
    assert "with a checkpoint; the same command resumes from it" in training.said
    first = the_run(trio[0])
    (trio[0].work / "repo" / "hostfile.txt").write_text("n1 slots=1\nn2 slots=1\nn0 slots=1\n")
    three = (*tiny, *short, ONE_THREAD, "batch.micro_batch={n0: 1, n1: 2, n2: 2}", "zero.stage=3")
    training = Training(trio, [*script, *sets(three)]).over()
    assert training.process.returncode == 0, training.said
    run = the_run(trio[0])
    assert f"continuing {first.path.name}" in training.said.replace(f"{WORK}/runs/", "")
    assert "of checkpoint gathered from n1" in training.said
    assert "world_size 2 -> 3; zero_stage 1 -> 3" in training.said
    assert run.path != first.path and losses(run) == pytest.approx(losses(alone), abs=1e-3)
    assert {path.name for path in run.logs.glob("*.[0-9].log")} == {"n1.0.log", "n2.1.log", "n0.2.log"}
    assert list(run.read_events("end"))[-1]["status"] == "finished"
    on_n1 = RunDir(trio[1].work / "runs" / run.path.name)  # rank 0 knows what was before it came to n1
    assert losses(on_n1) == losses(run) and len(list(on_n1.read_events("start"))) == 2


def test_a_host_that_runs_out_of_memory_gives_all_of_them_the_next_plan(pair: Cluster, tiny: tuple[str, ...]) -> None:
    write_hostfile(pair[0], "n0 slots=1", "n1 slots=1")
    faulty = with_fault(pair[1].work / "site", "out_of_memory(4, 13)").replace(str(pair[1].work), WORK)
    access = f"hosts={{n1: {{env: {{PYTHONPATH: '{faulty}'}}}}}}"
    training = Training(pair, command([*tiny, "checkpoint.every_steps=5", access])).over()
    assert training.process.returncode == 0, training.said
    run, there = the_run(pair[0]), RunDir(pair[1].work / "runs" / the_run(pair[0]).path.name)
    assert "with batch.micro_batch: 4 instead of 8" in training.said
    assert f"resuming {WORK}/runs/{run.path.name} from step 10" in training.said
    assert [row["step"] for row in run.read_events("start")] == [0, 10]
    assert files.read_json(there.plan) == files.read_json(run.plan) != files.read_json(run.path / "plan.1.json")
    assert [event["status"] for event in run.read_events("end")] == ["finished"]


def test_hosts_that_share_a_disk_get_no_second_copy(pair: Cluster, tiny: tuple[str, ...], tmp_path: Path) -> None:
    write_hostfile(pair[0], "n0 slots=1", "n1 slots=1")  # /tmp is one directory for both
    training = Training(pair, command([*tiny, "train.steps=6"], "--runs", str(tmp_path / "runs"))).over()
    assert training.process.returncode == 0, training.said
    assert "n1: sees the same directory (shared file system)" in training.said
    run = RunDir(next((tmp_path / "runs").iterdir()))
    assert (run.logs / "n1.1.log").read_text().count("Setting accelerator to CPU") == 1
    assert len(losses(run)) == 6
