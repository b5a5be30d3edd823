"""How often a signal must come before `finlm train` ends without a checkpoint."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from finlm.base import screen
from finlm.launch import head, messages


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
    session = cast(Any, SimpleNamespace(say=told.append))
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
