"""What breaks while or before several hosts train: named with host, rank and step, and nothing is left on any host.

The run of one test is resumed by the next: each fault leaves a run that the same command goes on with.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .netcluster import INTERFACES, WORK, Cluster
from .syncing import ENV, until
from .training import PATIENCE_SECONDS, Training, long_command, pids, processes, the_run, write_hostfile


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts for this file; whoever hurts one mends it."""
    with Cluster(2, tmp_path_factory.mktemp("cluster")) as cluster:
        write_hostfile(cluster[0], "n0 slots=1", "n1 slots=1")
        # On n1 a signal stands for a bug that keeps a rank from going on: where it would say how the step went.
        (cluster[1].work / "stuck").mkdir()
        (cluster[1].work / "stuck" / "sitecustomize.py").write_text(
            "import signal, sys, time\n"
            "stuck = lambda *_: time.sleep(600)\n"
            "at = lambda *_: setattr(sys.modules['finlm.train.pretrain'], 'log_step', stuck)\n"
            "signal.signal(signal.SIGUSR2, at)\n"
        )
        yield cluster


@pytest.fixture
def line(hosts: Cluster, tiny: tuple[str, ...]) -> list[str]:
    """The command of every test here: thousands of steps, a checkpoint every 10."""
    return long_command(hosts, tiny, f"hosts={{n1: {{env: {{PYTHONPATH: {WORK}/stuck}}}}}}")


def test_a_killed_rank_is_named_with_its_exit_code(hosts: Cluster, line: list[str]) -> None:
    training = Training(hosts, line).reach(15)
    training.kill(hosts[1], "finlm.train ")
    said = training.over().said
    assert training.process.returncode == 128 + signal.SIGKILL
    assert "error: rank 1 on n1 was killed by SIGKILL" in said and "last completed step" in said
    assert "n1.1.log" in said and "Traceback" not in said.partition("evidence")[0]
    assert "not for memory: the kernel of n1 counted no oom_kill" in said and "diagnosis of the logs" not in said
    ends = [row["what"] for row in the_run(hosts[0]).read_events("incident") if row["what"].startswith("rank ")]
    assert ends == ["rank 1 on n1 was killed by SIGKILL"]


def test_a_killed_agent_takes_its_ranks_along_and_the_run_resumes(hosts: Cluster, line: list[str]) -> None:
    training = Training(hosts, line).reach(5)
    training.kill(hosts[1], "finlm.launch.agent")
    said = training.over().said
    assert "resuming" in said and training.process.returncode == 1
    assert "error: finlm's agent on n1 (rank 1)" in said and "n1 itself answers" in said
    starts = [row["step"] for row in the_run(hosts[0]).read_events("start")]
    assert starts[0] == 0 and starts[1] >= 10 and starts[1] % 10 == 0


def test_a_rank_that_goes_nowhere_is_named_with_its_stack(hosts: Cluster, line: list[str]) -> None:
    training = Training(hosts, [*line, "--set", "launch.stall_minutes=0.1"]).reach(5)
    training.kill(hosts[1], "finlm.train ", signal.SIGUSR2)
    said = training.over().said
    assert training.process.returncode == 1
    assert "error: rank 1 on n1 made no progress for 6 s" in said and "last completed step" in said
    assert "sitecustomize.py:2 in <lambda>" in said
    assert re.search(r"the others wait at \w+\.py:\d+ in ", said), said
    assert "launch.stall_minutes" in said


def test_a_full_disk_of_one_host_costs_checkpoints_kill_9_leaves_no_rank_and_a_new_disk_has_no_checkpoint(
    hosts: Cluster, line: list[str]
) -> None:
    hosts[1].run("mkdir", "-p", f"{WORK}/runs")
    hosts[1].run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", f"{WORK}/runs")
    other = [*line, "--set", "train.seed=8"]
    training = Training(hosts, other).reach(15)
    hosts[1].run("sh", "-c", f"cat /dev/zero > {WORK}/runs/full 2> /dev/null || true")
    incident = training.row("incident", what="checkpoint not saved")
    assert incident["detail"].startswith("n1: ")
    assert "training goes on, the next checkpoint is tried in its turn" in incident["detail"]
    hosts[1].run("rm", f"{WORK}/runs/full")
    assert training.row("checkpoint", incident["step"] + 1)["step"] > incident["step"]
    training.kill(hosts[0], "-m finlm train")
    training.over()  # no process of the run is left on either host
    # A killed process loses its command line some time before its open files.
    until(lambda: not hosts[1].run("umount", f"{WORK}/runs", check=False).returncode)
    said = Training(hosts, other).over().said
    assert "is on all hosts, so nothing was started" in said and "n1: none" in said and "resuming" not in said


def from_the_other_host(hosts: Cluster, line: list[str]) -> str:
    """What n1 says to the command that was typed on n0: a mistake, and no advice that costs the run."""
    done = hosts[1].run(*line, env=ENV, timeout=PATIENCE_SECONDS, check=False)
    print(done.stderr)
    assert done.returncode == 2 and "resuming" not in done.stderr
    assert not any(word in done.stderr for word in ("rm -", "remove", "delete"))
    return done.stderr


def test_a_run_goes_on_where_it_was_started_and_from_the_step_announced(hosts: Cluster, line: list[str]) -> None:
    for host in hosts.hosts:  # rank 0 is not where the command is typed
        write_hostfile(host, "n1 slots=1", "n0 slots=1")
    other = [*line, "--set", "train.seed=9"]
    training = Training(hosts, other).reach(15)
    run, (launcher, *_) = the_run(hosts[0]), (pids(hosts[0], "-m finlm train"))
    inside = Path(f"/proc/{launcher}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
    said = from_the_other_host(hosts, other)
    assert f"{run.path.name} is running now, started on n0" in said and f"process {inside} on n0 holds its lock" in said
    assert training.process.poll() is None
    training.kill_all(signal.SIGTERM)
    assert "with a checkpoint" in training.over().said
    said = from_the_other_host(hosts, other)
    assert f"{run.path.name} was started on n0, not on this machine" in said
    assert f"it came from n0:{WORK}/runs/{run.path.name}" in said and "the same command on n0" in said
    assert len(list(run.read_events("start"))) == 1
    far = hosts[1].work / "runs" / run.path.name / "checkpoints"
    newest, former = (step for step, _ in reversed(run.complete_checkpoints()))
    far.rename(far.with_name("lost"))
    training = Training(hosts, other).over()
    assert training.process.returncode == 2 and "resuming" not in training.said
    assert f"n1: none; n0: steps {former}, {newest}" in training.said
    assert len(list(run.read_events("start"))) == 1 and next(step for step, _ in run.complete_checkpoints()) == former
    far.with_name("lost").rename(far)
    shutil.rmtree(far / f"step-{newest}")
    training = Training(hosts, other).reach(1)
    training.kill_all(signal.SIGTERM)
    said = training.over().said
    assert f"step {newest} cannot be used: n1 without it" in said and f"from step {former} (--new" in said
    assert [row["step"] for row in run.read_events("start")] == [0, former]
    write_hostfile(hosts[0], "n0 slots=1", "n1 slots=1")


def test_what_would_fail_is_refused_before_a_rank_starts(hosts: Cluster, line: list[str]) -> None:
    other = INTERFACES[0]  # n0 has it, n1 does not
    wrong = f"hosts={{n1: {{env: {{GLOO_SOCKET_IFNAME: {other}}}}}}}"
    with hosts[0].popen("python3", "-m", "http.server", "29511") as server:
        until(lambda: hosts[0].run("sh", "-c", "ss -ltn | grep -q 29511", check=False).returncode == 0)
        port = ["--set", "launch.master_port=29511", "--set", wrong]
        said = Training(hosts, [*line, *port]).over().said
        server.kill()
    assert "error: port on n0" in said and "29511" in said
    assert "error: nic on n1" in said and f"n1 has no {other}" in said
    write_hostfile(hosts[0], "n0 slots=1", "n1 slots=99")
    said = Training(hosts, [*line, "--set", "batch.tokens_per_step=6400"]).over().said
    assert "error: cores on n1" in said and "99 CPU ranks" in said
    write_hostfile(hosts[0], "n0 slots=1", "n1 slots=1")
    assert not processes(hosts[1], "finlm.train ")


def test_a_short_outage_passes_and_a_lasting_one_ends_the_run_on_both_sides(hosts: Cluster, line: list[str]) -> None:
    training = Training(hosts, [*line, "--set", "launch.outage_seconds=10"]).reach(5)
    hosts.black_hole(hosts[1])
    time.sleep(2.5)  # TCP's next try comes 3.0 s after the beginning, the one after it would at 6.2 s
    hosts.black_hole(hosts[1], on=False)
    training.reach(1)
    hosts.black_hole(hosts[1])
    said = training.over().said
    hosts.black_hole(hosts[1], on=False)
    assert training.process.returncode == 1
    assert "error: n1 (rank 1) does not answer any more" in said and "last completed step" in said
    assert "Stopped from outside" not in said  # it was finlm that ended n0's rank
