"""A host is lost while nobody looks: the run goes on by itself, with a spare, with fewer hosts, and with it again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir

from .conftest import Unbroken
from .netcluster import Cluster
from .syncing import until
from .test_copies import starts
from .training import PATIENCE_SECONDS, Training, long_command, losses, the_run, write_hostfile

ALONE = ("checkpoint.copies=1", "launch.restarts=3", "launch.restart_wait_seconds=1")


def successor(cluster: Cluster, run: RunDir) -> RunDir:
    """Wait for the run that goes on from another one, and for its ranks."""
    until(lambda: the_run(cluster[0]).path != run.path, PATIENCE_SECONDS)
    later = the_run(cluster[0])
    until(lambda: len(starts(later)) > len(starts(run)), PATIENCE_SECONDS)
    return later


def test_the_run_goes_on_without_a_lost_host_and_with_it_once_it_answers(
    pair: Cluster, tiny: tuple[str, ...], unbroken: Unbroken
) -> None:
    write_hostfile(pair[0], "n0 slots=1", "n1 slots=1")
    notices = pair[0].work / "notices.txt"
    notice = f"launch.notify='echo \"$FINLM_EVENT $FINLM_TEXT\" >> {notices}'"
    training = Training(pair, long_command(pair, tiny, *ALONE, notice))
    training.row("copied")
    first = the_run(pair[0])
    pair[1].power_off()
    second = successor(pair, first)
    assert [row["action"] for row in second.read_events("restart")] == ["without n1"]
    assert starts(second)[-1] == max(row["step"] for row in first.read_events("copied"))
    pair.power_on(pair[1])  # with its disk
    third = successor(pair, second)
    training.reach(3)
    assert [row["action"] for row in third.read_events("restart")] == ["without n1", "with n1 again"]
    training.kill_all(signal.SIGTERM)
    said = training.over().said
    assert "the run goes on: without n1" in said and "n1 answers again" in said
    after = losses(third)
    expected = unbroken(max(after))
    assert max(after) > starts(third)[-1] and after == pytest.approx({step: expected[step] for step in after}, abs=1e-4)
    kinds = [line.split()[0] for line in notices.read_text().splitlines()]
    assert kinds[0] == "incident" and [kind for kind in kinds if kind != "incident"] == ["restart", "restart", "end"]


def test_a_spare_takes_the_place_of_a_lost_host_whose_part_a_neighbour_has_in_memory(
    trio: Cluster, tiny: tuple[str, ...], unbroken: Unbroken
) -> None:
    write_hostfile(trio[0], "n0 slots=1", "n1 slots=1", "n2 slots=1 spare")
    keep = "checkpoint.copies=0", "checkpoint.every_steps=20000", "checkpoint.memory_minutes=0.01"
    training = Training(trio, long_command(trio, tiny, *ALONE, *keep))  # nothing on any disk
    training.row("in_memory")
    first = the_run(trio[0])
    trio[1].power_off()
    second = successor(trio, first)
    training.reach(3)
    assert [row["action"] for row in second.read_events("restart")] == ["n2 in the place of n1"]
    assert starts(second)[-1] in {row["step"] for row in first.read_events("in_memory")}
    training.kill_all(signal.SIGTERM)
    training.over()
    left = trio[0].run("find", "/dev/shm", "-name", "step-*").stdout
    assert not left, "the run in its place and its last checkpoint on disk freed the memory"
    expected = unbroken(max(losses(second)))
    assert losses(second) == {step: expected[step] for step in losses(second)}, "two ranks as before: the same bits"


def test_of_two_hosts_lost_at_once_a_spare_takes_the_place_of_one(tmp_path: Path, tiny: tuple[str, ...]) -> None:
    with Cluster(4, tmp_path / "cluster") as cluster:
        write_hostfile(cluster[0], "n0 slots=1", "n1 slots=1", "n2 slots=1", "n3 slots=1 spare")
        training = Training(cluster, long_command(cluster, tiny, *ALONE, "batch.tokens_per_step=3072"))
        training.row("copied")
        first = the_run(cluster[0])
        cluster[1].power_off()
        cluster[2].power_off()
        second = successor(cluster, first)
        training.reach(3)
        # Hosts lost between a checkpoint and its copy are waited for first: "again".
        actions = [row["action"] for row in second.read_events("restart") if row["action"] != "again"]
        assert actions == ["n3 in the place of n1, without n2"]
        training.kill_all(signal.SIGTERM)
        training.over()
