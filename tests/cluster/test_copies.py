"""A host is lost for good while it trains: what is said, and how the run goes on, with and without copies."""

from __future__ import annotations

import signal

import pytest

from finlm.base.checkpoints import Manifest
from finlm.base.rundir import RunDir

from .conftest import Unbroken
from .netcluster import Cluster
from .training import Training, long_command, losses, the_run, write_hostfile


def starts(run: RunDir) -> list[int]:
    return [row["step"] for row in run.read_events("start")]


def stop(training: Training) -> str:
    training.kill_all(signal.SIGTERM)
    return training.over().said


def test_without_copies_a_lost_host_is_not_to_be_left_out(pair: Cluster, tiny: tuple[str, ...]) -> None:
    write_hostfile(pair[0], "n0 slots=1", "n1 slots=1")
    line = long_command(pair, tiny)
    training = Training(pair, line)
    step = training.row("checkpoint", 10)["step"]
    pair[1].power_off()
    said = training.over().said
    assert "may fail   none: each host alone has its part" in said
    assert "error: n1 (rank 1) does not answer any more" in said
    nowhere = f"bring it back with its disk: the part of step {step} that n1 holds exists nowhere else"
    assert nowhere in said and "--new" in said and "--exclude" not in said
    said = Training(pair, line).over().said
    assert "cannot be asked: n1" in said and nowhere in said and "--exclude" not in said
    training = Training(pair, [*line, "--exclude", "n1"]).over()
    assert training.process.returncode == 2 and "resuming" not in training.said
    assert f"error: n1's part of step-{step} exists nowhere else, and n1 does not give it" in training.said
    assert nowhere in training.said and "--exclude" not in training.said


def test_with_copies_a_lost_host_is_replaced_or_left_out_and_the_losses_are_those_of_an_unbroken_run(
    pair: Cluster, tiny: tuple[str, ...], unbroken: Unbroken
) -> None:
    write_hostfile(pair[0], "n0 slots=1", "n1 slots=1")
    line = long_command(pair, tiny, "checkpoint.copies=1")

    training = Training(pair, line)
    copied = training.row("copied")["step"]
    run = the_run(pair[0])
    assert Manifest.read(run.checkpoint(copied)).is_whole
    blocks = [run.checkpoints / f".step-{step}.copying" for step in range(copied + 10, copied + 500, 10)]
    for block in blocks:  # where the parts would arrive: as on a disk that takes no more
        block.touch()
    training.row("incident", copied + 1, what="checkpoint not copied")
    kept = training.row("checkpoint", copied + 40)["step"]
    complete = [step for step, _ in run.complete_checkpoints()]
    assert copied in complete and kept in complete and len(complete) <= 4, "the ranks keep the newest whole one"
    for block in blocks:
        block.unlink(missing_ok=True)
    copied = training.row("copied", copied + 1)["step"]
    pair[1].power_off()
    said = training.over().said
    assert "may fail   any but the one that `train` runs on, 1 of 2 hosts" in said
    assert "without it: --exclude n1" in said and training.process.returncode == 1
    copied = max(row["step"] for row in run.read_events("copied"))

    pair.replace(pair[1])  # a new machine with its name and an empty disk
    training = Training(pair, line).reach(3)
    said = stop(training)
    assert f"n1 gets step {copied} from this machine" in said and starts(run) == [0, copied]
    last = list(run.read_events("checkpoint"))[-1]["step"]  # a later one may lie there from before the loss
    assert Manifest.read(run.checkpoint(last)).is_whole, "the one of the end was copied too"
    kept_steps = [step for step, _ in run.complete_checkpoints() if step <= last]
    assert len(kept_steps) <= 3, "old ones go with their copies"
    own = losses(run)

    pair[1].power_off()
    training = Training(pair, [*line, "--exclude", "n1"]).reach(3)
    said = stop(training)
    assert f"from step {last} in a new run directory" in said
    later = the_run(pair[0])
    assert later.path != run.path and starts(later)[-1] == last
    after = {step: loss for step, loss in losses(later).items() if step > last}
    expected = unbroken(max(*own, *after))
    assert own == {step: expected[step] for step in own}
    assert len(after) >= 3 and after == pytest.approx({step: expected[step] for step in after}, abs=1e-4)
