"""The share of the time that trains, against the arithmetic of its expectation."""

from __future__ import annotations

import json
import random

import pytest

from finlm.base.errors import UserError
from finlm.plan import failures
from finlm.plan.failures import Failing

from helpers import ROOT, finlm_here


@pytest.mark.parametrize(
    ("hosts", "rate", "interval"), [(16, 1 / 16, 720.0), (1200, 0.02, 300.0), (1, 0.5, 1800.0)], ids=str
)
def test_the_simulation_agrees_with_the_expectation(hosts: int, rate: float, interval: float) -> None:
    failing = Failing(hosts, rate, interval, stall=2.0, detection=60.0, restart=120.0)
    found = failures.forecast(failing, 90 * failures.DAY)
    lost = 60.0 + 120.0 + interval / 2  # of a failure, where they are rare beside checkpoints
    expected = interval / (interval + 2.0) * failing.between / (failing.between + lost)
    assert found.share == pytest.approx(expected, abs=0.006)
    assert found.low < found.share < found.high


def test_one_failure_a_day_of_16_hosts_leaves_97_percent() -> None:
    failing = Failing(16, 1 / 16, interval=600.0, stall=1.0, detection=60.0, restart=120.0)
    assert failures.forecast(failing, 30 * failures.DAY).share > 0.97


def test_plan_prints_it() -> None:
    recipe = ROOT / "recipes/xuanyuan-6b/pretrain.yaml"
    done = finlm_here("plan", recipe, "--failures", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert "failures a host and day: one in" in done.stdout + done.stderr
    assert 0.5 < json.loads(done.stdout.splitlines()[-1])["failures"]["share"] < 1


def test_ranks_may_fail_while_they_come_up_the_first_time_too() -> None:
    failing = Failing(1, 1.0, interval=600.0, stall=0.0, detection=60.0, restart=3600.0)
    early = random.Random()
    early.expovariate = lambda _: 1800.0  # type: ignore[method-assign] - each launch ends before it trains
    assert failures.simulate(failing, failures.DAY, early) == 0.0
    never = random.Random()
    never.expovariate = lambda _: 1e9  # type: ignore[method-assign]
    assert failures.simulate(failing, failures.DAY, never) == pytest.approx(23 / 24, abs=0.01)


def test_a_rate_that_leaves_no_time_to_train_is_refused_at_once() -> None:
    failing = Failing(2, 1e9, interval=600.0, stall=1.0, detection=60.0, restart=120.0)
    with pytest.raises(UserError, match=r"1e\+09 failures a host and day leave no time to train") as caught:
        failures.forecast(failing, 30 * failures.DAY)
    assert "60 seconds until one is noticed" in caught.value.evidence and "--failures 0.0038" in caught.value.fix


def test_a_long_run_with_many_failures_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = list[float]()
    monkeypatch.setattr(failures, "simulate", lambda failing, wanted, chance: seconds.append(wanted) or 0.5)
    failures.forecast(Failing(1, 100.0, interval=600.0, stall=1.0, detection=60.0, restart=120.0), 1e9)
    assert set(seconds) == {failures.MOST_FAILURES * 864.0}
