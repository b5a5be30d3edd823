"""How often a signal must come before `finlm train` ends without a checkpoint."""

from __future__ import annotations

import signal

import pytest

from finlm.ops import launch_stop


def test_a_signal_sent_twice_at_once_is_one_request_and_a_later_one_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with launch_stop.noted() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        monkeypatch.setattr(launch_stop, "ONE_REQUEST_SECONDS", 0)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) == before
