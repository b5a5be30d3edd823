"""Say how often ranks fail, how far apart checkpoints should be, and simulate a run whose hosts fail at random.

`finlm plan --failures` simulates what launch/restart.py does when hosts fail at random (exponential times), at a rate
of all hosts together. Each failure costs the time until it is noticed, the time until the ranks train again, and the
steps since the newest checkpoint; one while the ranks come up, the first time too, costs another start. `finlm drill`
measures both times.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from dataclasses import dataclass

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.units import format_duration

# 419 unexpected interruptions in 54 days on 16,384 GPUs: Llama 3's training (arXiv 2407.21783, section 3.3.4).
HOURS_BETWEEN_FAILURES_OF_A_GPU = 54 * 24 * 16384 / 419


def seconds_between(ranks: int, failures: int = 0, seconds: float = 0.0) -> float:
    """Return the seconds between two failures of so many ranks.

    The assumed rate counts as one failure in its time; `failures` that a run had in its `seconds` are added to it.
    """
    return (HOURS_BETWEEN_FAILURES_OF_A_GPU * 3600 / ranks + seconds) / (1 + failures)


def of_run(run: RunDir) -> tuple[int, float]:
    """Return (failures, seconds) of a run: its launches that ended without a word or failed, and the time of all."""
    launches = list[tuple[float, float, bool]]()  # first and last row, whether it ended well
    for row in run.read_events():
        if row["kind"] == "start":
            launches.append((row["time"], row["time"], False))
        elif launches and row["kind"] in ("step", "end"):
            launches[-1] = launches[-1][0], row["time"], row["kind"] == "end" and row["status"] != "failed"
    return sum(not well for *_, well in launches), sum(last - first for first, last, _ in launches)


def best_interval(stall: float, between: float, write: float) -> float:
    """Return the seconds between checkpoints that lose the least time; not below 1.5 times what a write takes.

    stall: seconds that training waits for one. between: seconds between failures. Young's sqrt(2 x stall x between)
    (CACM 17(9), 1974; Daly's refinement differs by the stall itself).
    """
    return max(math.sqrt(2 * stall * between) - stall, 1.5 * write)


DAY = 86400.0
RUNS = 200
MOST_FAILURES = 500  # of a simulated run; the mean of more is no surer


@dataclass(frozen=True)
class Failing:
    """What is simulated, in seconds; rate: failures a host and day."""

    hosts: int
    rate: float
    interval: float  # of training between two checkpoints
    stall: float  # that training waits for a checkpoint
    detection: float
    restart: float

    @property
    def between(self) -> float:
        """Mean seconds between failures of all hosts together."""
        return DAY / (self.rate * self.hosts)


@dataclass(frozen=True)
class Forecast:
    """The share of the time that trains, the bounds of 90 % of the simulated runs, and seconds between failures."""

    share: float
    low: float
    high: float
    between: float

    def to_json(self) -> dict[str, float]:
        """Return the forecast as `finlm plan --json` prints it."""
        return dataclasses.asdict(self)


def forecast(failing: Failing, seconds: float, seed: int = 0) -> Forecast:
    """Simulate 200 runs of so many seconds of wall time and return the shares of it that train.

    Raises UserError for hosts that fail sooner than their ranks come up.
    """
    between = failing.between
    if between < failing.detection + failing.restart:
        pause = f"{format_duration(failing.detection)} until one is noticed and {format_duration(failing.restart)}"
        raise UserError(
            f"{failing.rate:g} failures a host and day leave no time to train",
            evidence=f"one in {format_duration(between)}, {pause} until the ranks train again",
            fix=f"a rate of 8 GPUs, by Llama 3's training: --failures {8 * 24 / HOURS_BETWEEN_FAILURES_OF_A_GPU:.2g}",
        )
    seconds = min(seconds, MOST_FAILURES * between)
    shares = sorted(simulate(failing, seconds, random.Random(f"{seed} {number}")) for number in range(RUNS))
    low, high = shares[RUNS // 20], shares[-1 - RUNS // 20]
    return Forecast(statistics.fmean(shares), low, high, between)


def simulate(failing: Failing, seconds: float, chance: random.Random) -> float:
    """Return the share of one run's wall time whose training was not lost. chance: draws the failures.

    Every launch, the first too, takes failing.restart seconds before it trains, and may fail in them.
    """
    now = trained = 0.0
    while now < seconds:
        life = min(chance.expovariate(1 / failing.between), seconds - now)
        cycles, rest = divmod(max(0.0, life - failing.restart), failing.interval + failing.stall)
        is_end = now + life >= seconds
        trained += cycles * failing.interval + (min(rest, failing.interval) if is_end else 0.0)
        now += life if is_end else life + failing.detection
    return trained / now if now else 1.0


def sentence(failing: Failing, result: Forecast) -> str:
    """Return the forecast in words."""
    hosts = f"{failing.hosts} host{'s' * (failing.hosts > 1)}"
    return (
        f"{hosts}, {failing.rate:g} failures a host and day: one in {format_duration(result.between)}; "
        f"{result.share:.1%} of the time trains ({result.low:.1%} to {result.high:.1%}), with checkpoints every "
        f"{format_duration(failing.interval)}, {format_duration(failing.detection)} until a failure is noticed and "
        f"{format_duration(failing.restart)} until the ranks train again"
    )
