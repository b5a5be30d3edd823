"""The share of the time that trains, against the arithmetic of its expectation."""

from __future__ import annotations

import json

import pytest

from finlm.plan import failures
from finlm.plan.failures import Failing

from helpers import ROOT, finlm


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
    done = finlm("plan", recipe, "--failures", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert "failures a host and day: one in" in done.stdout + done.stderr
    assert 0.5 < json.loads(done.stdout.splitlines()[-1])["failures"]["share"] < 1
