"""When a failed run is started again, and what the reason not to says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finlm import prepare
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.diagnose import signatures
from finlm.launch import restart, start
from finlm.launch.restart import Failure, HostLost, reason_to_end
from finlm.recipe import cluster, recipe
from finlm.recipe.schema import HostAccess, Launch

from helpers import QUICKSTART


def at(step: int, host: str = "") -> Failure:
    return Failure(step, host, has_stepped=True)


@pytest.mark.parametrize(
    ("failures", "hosts", "words"),
    [
        ([at(7, "a")], 2, ""),
        ([at(7, "a"), at(9, "b")], 2, ""),
        ([at(7, "a"), at(9, "b"), at(7, "b")], 2, "step 7 failed twice; a bad step"),
        ([at(7, "a"), at(7, "a")], 2, "step 7 failed twice, both times on a; a bad step"),
        ([at(7, "a"), at(9, "a")], 2, "a failed in step 7 and in step 9; a bad host"),
        ([at(7, "a"), Failure(-2, "a", has_stepped=False)], 2, "a failed in step 7 and while it began; a bad host"),
        ([at(7, "a"), at(9, "a")], 1, ""),
        ([at(1), at(2), at(3), at(4)], 1, "launch.restarts is 3: used up"),
        ([Failure(1, "", has_stepped=False)], 1, "failed before its first step was finished"),
        ([Failure(n, "", True, checkpoint=n) for n in range(1, 9)], 1, ""),  # each got farther than the one before
    ],
)
def test_a_bad_step_and_a_bad_host_end_the_restarts(failures: list[Failure], hosts: int, words: str) -> None:
    reason = reason_to_end(failures, Launch(restarts=3), hosts)
    assert (words in reason) if words else not reason


TWO = cluster.Cluster((cluster.Host("a", 1), cluster.Host("b", 1)))


def attempts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *outcomes: tuple[int, Exception | None],
    saved: str = "checkpoint",
    two: cluster.Cluster = TWO,
) -> list[float]:
    """Launch a run whose launches get to these steps and end so; the waits between them."""
    run, waits, left = RunDir(tmp_path), [], list(outcomes)
    run.append_event(saved, step=3)  # of which a host has its part alone

    def launched(*_: Any, **__: Any) -> None:
        step, error = left.pop(0)
        if step >= 0:
            run.append_event("start", step=0)
        if step > 0:
            run.append_event("step", step=step)
            run.append_event(saved, step=3)
        if error:
            raise error

    monkeypatch.setattr(start, "launch_ranks", launched)
    monkeypatch.setattr(restart.time, "sleep", waits.append)
    wanted = recipe.load(QUICKSTART, ["launch.restarts=3", "launch.restart_wait_seconds=10"]).recipe
    restart.run_ranks(run, prepare.plan_with_data(wanted, two, None), wanted, two)
    return waits


def test_a_run_goes_on_after_failures_of_different_hosts_also_while_one_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart.ssh, "answers", lambda _: False)
    lost, gone = RunFailed("a does not answer any more", host="a"), UserError("a cannot be reached by ssh")
    waits = attempts(monkeypatch, tmp_path, (5, lost), (-1, gone), (9, RunFailed("killed", host="b")), (20, None))
    assert waits == [10, 20, 40]
    rows = list(RunDir(tmp_path).read_events("restart"))
    assert [(row["number"], row["host"]) for row in rows] == [(1, "a"), (2, "a"), (3, "b")]


def test_used_up_restarts_are_told_with_the_last_step_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart.ssh, "answers", lambda _: False)
    lost, gone = RunFailed("a does not answer any more", host="a"), UserError("a does not answer", fix="ping a")
    with pytest.raises(RunFailed, match="a does not answer") as caught:
        attempts(monkeypatch, tmp_path, (5, lost), (-1, gone), (-1, gone), (-1, gone))
    assert caught.value.exit_code == 1 and caught.value.fix == "ping a"
    assert "launch.restarts is 3: used up; last completed step 5" in caught.value.evidence


def test_the_same_step_twice_is_not_tried_a_third_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        attempts(monkeypatch, tmp_path, (5, RunFailed("x", host="a")), (5, RunFailed("x", host="b")), (9, None))
    assert "step 6 failed twice; a bad step" in caught.value.evidence


def test_a_restart_that_does_not_begin_is_not_taken_for_a_bad_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart.ssh, "answers", lambda _: False)
    began, not_begun = RunFailed("x", host="a"), RunFailed("no NCCL", host="b")
    assert attempts(monkeypatch, tmp_path, (5, began), (-1, not_begun), (-1, UserError("gone")), (20, None))
    assert [row["number"] for row in RunDir(tmp_path).read_events("restart")] == [1, 2, 3]
    with pytest.raises(RunFailed) as caught:  # the same command on the run that has rows of before
        attempts(monkeypatch, tmp_path, (-1, RunFailed("no model")), (20, None))
    assert "failed before its first step was finished" in caught.value.evidence


def test_a_run_that_ended_itself_is_not_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="ended itself"):
        attempts(monkeypatch, tmp_path, (5, RunFailed("the run ended itself", is_final=True)), (9, None))


OUT_OF_DISK = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(("cause", "again"), [("", True), ("nccl_peer_died", True), ("disk_full", False)])
def test_the_cause_in_the_logs_decides(cause: str, again: bool) -> None:
    assert (reason_to_end([at(7)], Launch(), 1, cause) == "") is again


def test_the_causes_that_may_pass_are_known_to_diagnose() -> None:
    known = {entry["id"] for entry in signatures.read_yaml(Path(signatures.__file__).with_name("signatures.yaml"))}
    assert known >= restart.PASSING


@pytest.mark.parametrize(("error", "cause"), [("KeyError: 'phase'", "unknown"), (OUT_OF_DISK, "disk_full")])
def test_a_cause_that_a_rule_guessed_forbids_no_other_launch(error: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    frame = 'Traceback (most recent call last):\n  File "/data/work/train.py", line 7, in main\n    go()\n'
    (tmp_path / "logs/localhost.0.log").write_text(frame + error + "\n")
    failure = start._add_diagnosis(RunDir(tmp_path), RunFailed("rank 0 ended"), {})
    assert failure.cause == cause and "diagnosis of the logs (localhost.0.log:4)" in failure.fix


@pytest.mark.parametrize(("copied", "lost"), [(True, True), (False, False)])
def test_a_host_that_is_gone_is_left_when_the_checkpoint_is_whole_without_it(
    copied: bool, lost: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = RunFailed("a does not answer any more", host="a")
    gone.is_gone = True
    monkeypatch.setattr(restart.checkpoint_parts, "whole_step", lambda _: 3 if copied else 0)
    monkeypatch.setattr(restart.ssh, "answers", lambda _: False)
    if lost:
        with pytest.raises(HostLost) as caught:
            attempts(monkeypatch, tmp_path, (5, gone), (20, None))
        assert caught.value.host == "a" and caught.value.is_gone
    else:
        assert attempts(monkeypatch, tmp_path, (5, gone), (20, None)) == [10]


def test_a_host_that_failed_twice_is_left_while_it_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restart.ssh, "answers", lambda _: True)
    with pytest.raises(HostLost) as caught:
        attempts(monkeypatch, tmp_path, (5, RunFailed("x", host="a")), (9, RunFailed("x", host="a")))
    assert not caught.value.is_gone


@pytest.mark.parametrize("held", [0, 3])
def test_a_host_whose_part_is_in_no_other_memory_is_waited_for_though_nothing_is_on_disk(
    held: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = RunFailed("a does not answer any more", host="a")
    gone.is_gone = True
    monkeypatch.setattr(restart.ssh, "answers", lambda _: False)
    monkeypatch.setattr(restart.checkpoint_parts, "list_holdings", lambda *_: [])
    monkeypatch.setattr(restart.checkpoint_parts, "whole_step_together", lambda _: held)
    if held:
        with pytest.raises(HostLost):
            attempts(monkeypatch, tmp_path, (5, gone), saved="in_memory")
    else:
        assert attempts(monkeypatch, tmp_path, (5, gone), (20, None), saved="in_memory") == [10]


def test_a_host_with_a_user_and_a_port_is_known_in_what_ssh_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launch after a failure finds the host gone: a spare, or the others, go on."""
    access = HostAccess(user="root", port=2222)
    two = cluster.Cluster((cluster.Host("a", 1, access=access), cluster.Host("b", 1)))
    monkeypatch.setattr(restart.ssh, "answers", lambda destination: destination != "root@a:2222")
    monkeypatch.setattr(restart.checkpoint_parts, "whole_step", lambda _: 3)
    gone = UserError("the host key of root@a:2222 has changed: another machine answers under this name")
    with pytest.raises(HostLost) as caught:
        attempts(monkeypatch, tmp_path, (5, RunFailed("killed", host="b")), (-1, gone), two=two)
    assert caught.value.host == "a" and caught.value.is_gone
