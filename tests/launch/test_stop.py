"""How often a signal must come before `finlm train` ends without a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from finlm.base import screen
from finlm.base.rundir import RunDir
from finlm.launch import head, messages, start
from finlm.launch.watch import Progress
from finlm.recipe.schema import Launch
from finlm.record import live


def test_a_signal_sent_twice_at_once_is_one_request_and_a_later_one_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with head.note_signals() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        monkeypatch.setattr(head, "ONE_REQUEST_SECONDS", 0)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_terminal_is_a_request_and_the_ranks_hear_of_it_before_the_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(screen, "say", lambda _: told.append("the screen"))
    session = cast(Any, SimpleNamespace(send=told.append))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by
    try:
        with head.note_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    stop.pass_on([session], has_stepped=True, grace_seconds=60, now=0.0)
    assert told == [messages.Stop(signal.SIGTERM), "the screen"]


def test_a_closed_terminal_is_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with head.note_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.number and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_that_stop_to_take_a_host_in_may_take_as_long_as_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []
    session = cast(Any, SimpleNamespace(send=told.append))
    stop = head.StopRequest()
    stop.stop_for_hosts(["n1"], 0.0)
    stop.pass_on([session], has_stepped=False, grace_seconds=60, now=0.0)
    assert told == [], "a checkpoint is due when a step is finished"
    for now in (1.0, 62.0, 3600.0):
        stop.pass_on([session], has_stepped=True, grace_seconds=60, now=now)
    assert told == [messages.Stop(signal.SIGTERM)]
    with pytest.raises(head.HostsBack, match="n1"):
        stop.finish(7)
    assert "n1 answers again" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["checkpoint", "in_memory"])
def test_a_host_that_is_back_is_taken_in_though_the_end_row_comes_long_after_the_exit_of_its_rank(
    kind: str, tmp_path: Path
) -> None:
    run, told = RunDir(tmp_path), list[Any]()
    session: Any = SimpleNamespace(code=None, closed=None, send=told.append)
    events, progress = live.follow(run, 0), Progress(0.0, step=7, stepped=True)
    f = start.Following(run, cast(Any, None), [session], Launch(), head.StopRequest(), lambda: ["n1"])
    run.append_event(kind, step=7)
    view: Any = SimpleNamespace(feed=lambda _: None)
    for event in next(events):
        start._show_event(f, event, view, progress)
    f.stop.pass_on([session], True, 60.0, 0.0)

    def end() -> None:
        time.sleep(0.4)
        run.append_event("end", step=8, status="interrupted")
        session.code = 143

    thread = threading.Thread(target=end)
    thread.start()
    assert start._wait_for_end_row(f, events, view, progress) == "interrupted"
    thread.join()
    with pytest.raises(head.HostsBack):
        f.stop.finish(8)
    assert told == [messages.Stop(signal.SIGTERM)]
