"""A run that does nothing for long says so, and says when it goes on."""

from __future__ import annotations

from pathlib import Path

from finlm.base.rundir import RunDir
from finlm.launch import watch
from finlm.launch.head import Session
from finlm.launch.watch import Progress
from finlm.recipe.cluster import Host
from finlm.recipe.schema import Launch


def sessions(now: float, *silences: float) -> list[Session]:
    """Hosts that were last heard of so many seconds ago."""
    made = []
    for node, silence in enumerate(silences):
        made.append(Session(Host(f"n{node}", 1), node, range(node, node + 1), local=False, stream=True, patience=150))
        made[-1].heard = now - silence
    return made


def test_a_silence_is_told_after_a_minute_and_again_after_twice_the_time() -> None:
    progress = Progress(0.0, step=12, at=100.0, stepped=True, longest=0.3)

    def said(now: float) -> str:
        return watch.describe_silence(sessions(now, 1.0, now - 100), progress, Launch(), now)

    assert said(159.0) == ""
    expected = "last completed step 12, 61 s ago; n1 last heard of 61 s ago: given up after 150 s"
    assert said(161.0) == f"{expected} (launch.outage_seconds)"
    assert said(200.0) == said(221.0) == ""
    assert "122 s ago" in said(222.0)
    assert round(progress.note_finished(232.0)) == 132 and progress.longest == 0.3
    assert progress.note_finished(233.0) == 0.0 and progress.longest == 1.0


def test_what_is_left_of_a_step_whose_answers_are_there_is_told() -> None:
    progress = Progress(0.0, step=3, at=50.0, stepped=True, generated=True)
    assert progress.words(60.0) == "last completed step 3; answers for the next came 10 s ago"


def test_long_steps_and_a_long_start_are_measured_by_their_own_limits() -> None:
    steps = Progress(0.0, step=3, at=0.0, stepped=True, longest=50.0)
    assert not watch.describe_silence(sessions(149.0, 1.0), steps, Launch(), 149.0)
    assert "; every host answers; given up after 30 minutes (launch.stall_minutes)" in watch.describe_silence(
        sessions(151.0, 1.0), steps, Launch(), 151.0
    )
    start = Progress(0.0)
    assert "no step was completed in 60 s" in watch.describe_silence(sessions(60.0, 1.0), start, Launch(), 60.0)


def test_a_machine_that_is_too_busy_to_look_waits_for_a_silent_host_no_longer() -> None:
    progress, (silent, alive) = Progress(0.0), sessions(0.0, 0.0, 0.0)
    for now in range(6, 400, 6):  # every look of this machine comes 6 s after the last
        alive.heard = float(now)
        watch.note_sleep([silent, alive], progress, 6.0, now)
    assert silent.heard == 6.0 and watch.in_trouble([silent, alive], 160.0)
    silent.heard = 500.0  # it answers again: the next sleep is given back too
    watch.note_sleep([silent, alive], progress, 3600.0, 4100.0)
    assert not watch.in_trouble([silent], 4200.0)


def test_a_launcher_that_fails_though_its_ranks_ended_well_is_named(tmp_path: Path) -> None:
    (session,) = sessions(0.0, 0.0)
    session.exits, session.code, session.closed = [(1.0, 0, 0)], 3, 1.0
    failure = watch.find_first_failure(RunDir(tmp_path), [session], Progress(0.0), 2.0)
    assert failure.problem == "the launcher on n0 ended with 3"
