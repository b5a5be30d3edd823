"""Break a run on purpose (`finlm drill`), on the user's hosts before the real run, and measure how it recovers.

A `finlm train` of the recipe runs in its own directory while faults are sent to its hosts, one at a time: each once the
run has saved a checkpoint since it recovered from the last fault. What happened is read from events.jsonl, as for any
run. Detection is the time from the fault to the first event about it. A fault costs the time without a finished step
and the steps that were done again.

`finlm plan --failures` simulates what launch/restart.py does when hosts fail at random (exponential times), at a rate
of all hosts together. Each failure costs the time until it is noticed, the time until the ranks train again, and the
steps since the newest checkpoint; a failure while the ranks start, also for the first time, costs another start.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import list_runs
from finlm.base.units import format_duration
from finlm.hosts import ssh
from finlm.hosts.remote import fault as faults
from finlm.launch import head
from finlm.plan.plan import HOURS_BETWEEN_FAILURES_OF_A_GPU, Plan
from finlm.recipe.cluster import Cluster, Host

# A drilled run has more faults in an hour than another in a month: no host is left for them, nothing is waited for.
SETTINGS = ("launch.host_failures=1000", "launch.restart_wait_seconds=1", "launch.stall_minutes=1")
NOT_DONE = "not done: "
POLL_SECONDS = 1.0
END_SECONDS = 180.0  # for the last checkpoint and report


@dataclass
class Injury:
    """A fault: where and when (unix seconds) it was caused, and its costs in seconds and steps; None while unknown."""

    fault: str
    host: str
    step: int
    time: float
    what: str
    detected_after: float | None = None
    training_after: float | None = None
    steps_lost: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the host could cause the fault."""
        return not self.what.startswith(NOT_DONE)


@dataclass
class Drill:
    """The settings of a drill; drill() adds the process that trains and the run directories that were there `before`.

    `train` is the command that trains, `name` the recipe's. `kinds` are names of faults. `seconds` is the length of the
    drill, `every` the seconds between two faults. With `seed` 0 the faults come in turn, else they are drawn at random.
    """

    train: Sequence[str]
    name: str
    hosts: Cluster
    runs: Path
    kinds: Sequence[str]
    seconds: float
    every: float
    seed: int = 0
    process: subprocess.Popen[bytes] = field(init=False)
    before: set[Path] = field(init=False)


def check_kinds(text: str) -> list[str]:
    """Return the fault names in a comma-separated list; of an empty one, all faults that need no request.

    Raises UserError for an unknown name.
    """
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    kinds = kinds or [kind for kind in faults.FAULTS if kind not in faults.ON_REQUEST]
    if unknown := [kind for kind in kinds if kind not in faults.FAULTS]:
        raise UserError(f"no fault is called {unknown[0]}", fix=f"--faults takes {', '.join(faults.FAULTS)}")
    return kinds


def drill(d: Drill, show: Callable[[list[Injury], float], None]) -> None:
    """Start the training, cause faults for d.seconds and end it; then call show(faults with costs, share that trained).

    Sets d.before and d.process, prints each fault. The share is of the time, 0 to 1. show() is also called, with what
    was seen so far, when the drill is interrupted or the run ends early. Raises UserError when no fault fits into the
    time or the run ends early, and KeyboardInterrupt or SystemExit when a signal interrupts it.
    """
    if d.every >= d.seconds:
        raise UserError(
            "no fault fits into the drill",
            evidence=f"the first comes after {d.every:g} s, and the drill ends after {d.seconds:g} s",
            fix="raise --minutes or lower --every",
        )
    d.before = {run.path for run in list_runs(d.runs, d.name)}
    injuries, began = list[Injury](), 0.0
    with (
        head.exit_on_signals("the drill ends its training"),  # else that goes on alone
        # A session of its own: Ctrl-C is for the drill, which then ends the training with a checkpoint.
        subprocess.Popen(d.train, stdin=subprocess.DEVNULL, start_new_session=True) as d.process,
    ):
        try:
            began = _wait_for_step(d, 0.0)
            _cause_faults(d, began, injuries)
        finally:
            stopped = time.time()
            try:
                _end_training(d.process)
            finally:
                if began:
                    show(injuries, _measure(_find_run(d), injuries, began, stopped))


def _cause_faults(d: Drill, began: float, injuries: list[Injury]) -> None:
    """Cause a fault every d.every seconds until d.seconds after `began`, print it, and append it to `injuries`.

    `began` is in unix seconds. Waits for a checkpoint before each fault, and for the run's recovery after it, also of
    the last fault. Raises UserError when the training ends.
    """
    chance, end, due = random.Random(d.seed), began + d.seconds, began
    while time.time() < end:
        due += d.every
        kind = d.kinds[len(injuries) % len(d.kinds)] if not d.seed else chance.choice(d.kinds)
        while time.time() < min(due, end):
            _check_alive(d.process)
            time.sleep(POLL_SECONDS)
        if time.time() >= end:
            break
        if not _wait_for_checkpoint(d, injuries[-1].time if injuries else began, end):
            break
        run = _find_run(d)
        injuries.append(_injure(run, chance.choice(_list_hosts(run, d.hosts)), kind))
        last = injuries[-1]
        screen.say(f"drill: step {last.step:,}: {kind} on {last.host}: {last.what}")
        _wait_for_step(d, injuries[-1].time)


def _end_training(process: subprocess.Popen[bytes]) -> None:
    """End the training by SIGTERM, so with a checkpoint; kill it after 180 s or when the drill is interrupted.

    An interruption is raised again.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except BaseException as error:
            process.kill()  # its agents end the ranks
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


def _find_run(d: Drill) -> RunDir:
    """Return the newest run directory of the drill that was not there before. Raises UserError when there is none."""
    runs = [run for run in list_runs(d.runs, d.name) if run.path not in d.before and run.events.exists()]
    if not runs:
        raise UserError("the drill's run did not begin", fix="`finlm train` with the same options says why")
    return runs[0]


def _check_alive(process: subprocess.Popen[bytes], has_begun: bool = True) -> None:
    """Raise UserError when the training process has ended; `has_begun` says whether it finished a step."""
    if process.poll() is not None:
        is_short, read = process.returncode == 0, "read its last words above"
        raise UserError(
            "the run ended before the drill did" if has_begun or is_short else "the drill's run did not begin",
            evidence=f"`finlm train` ended with exit code {process.returncode}",
            fix="train more steps than fit into --minutes: --set train.steps=N" if is_short else read,
        )


def _wait_for_step(d: Drill, since: float) -> float:
    """Wait for a step that is finished after the fault at `since`, and return its time; all times are unix seconds.

    The step must come after the ranks' restart or, when the fault causes no restart, d.every seconds after the fault.
    With since=0 any step counts. Raises UserError when the training ends before.
    """
    while True:
        _check_alive(d.process, has_begun=bool(since))
        try:
            rows = list(_find_run(d).read_events())
        except UserError:
            rows = []
        starts = [row["time"] for row in rows if row["kind"] == "start" and row["time"] > since]
        again = starts[0] if starts else since + d.every  # a fault that costs no restart shows no start
        steps = [row["time"] for row in rows if row["kind"] == "step" and row["time"] > (again if since else 0.0)]
        if steps:
            return float(steps[0])
        time.sleep(POLL_SECONDS)


def _wait_for_checkpoint(d: Drill, since: float, end: float) -> bool:
    """Wait for a checkpoint after `since` from which the run can resume; return whether there is one before `end`.

    Both are unix seconds. It is a checkpoint in memory, or on disk; if the run copies checkpoints to this machine, only
    a copied one. Raises UserError when the training ends before.
    """
    hosts = _list_hosts(_find_run(d), d.hosts)
    is_copied = not all(ssh.is_this_machine(host.destination) for host in hosts)  # if the recipe says so
    while time.time() < end:
        rows = list(_find_run(d).read_events())
        on_disk = "copied" if is_copied and any(row["kind"] == "copied" for row in rows) else "checkpoint"
        if any(row["time"] > since and row["kind"] in ("in_memory", on_disk) for row in rows):
            return True
        _check_alive(d.process)
        time.sleep(POLL_SECONDS)
    return False


def _list_hosts(run: RunDir, hosts: Cluster) -> list[Host]:
    """Return the hosts or spares of `hosts` that the run's plan has ranks on now. Raises the errors of Plan.read()."""
    names = set(Plan.read(run.plan).rank_hosts)
    return [host for host in (*hosts.hosts, *hosts.spares) if host.name in names]


def _injure(run: RunDir, host: Host, kind: str) -> Injury:
    """Cause the fault `kind` on a host of the run by fault.py, over ssh unless it is this machine, and return it.

    If it could not be caused, does not raise: `what` begins with NOT_DONE and gives the reason, such as a silent host.
    """
    step = max((row["step"] for row in run.read_events("step")), default=0)
    path = ssh.path_on_host(run.path.absolute(), host.access)
    source = Path(faults.__file__).read_bytes()
    moment = time.time()
    if ssh.is_this_machine(host.destination):
        argv = [sys.executable, "-", str(path), kind]
        output = ""
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(argv, input=source, capture_output=True, timeout=60, check=False)
            output = done.stdout.decode(errors="replace")
    else:
        argv = [ssh.python_on_host(host.access), "-", str(path), kind]
        try:
            output = ssh.run(host.destination, argv, stdin=source).stdout
        except UserError as error:  # the drill goes on: a host that is lost is what it is about
            return Injury(kind, host.name, step, moment, f"{NOT_DONE}{error.problem}")
    _, is_marked, line = output.rpartition(faults.MARK)  # login scripts may print too
    answer = json.loads(line) if is_marked else {"failed": "no answer"}
    what = str(answer.get("done") or f"{NOT_DONE}{answer['failed']}")
    return Injury(kind, host.name, step, moment, what)


def _measure(run: RunDir, injuries: Sequence[Injury], began: float, stopped: float) -> float:
    """Set what each fault cost in `injuries`, and return the share of the time (0 to 1) that trained steps that count.

    A fault after which the ranks started again loses the time until the next finished step, plus the steps done again
    at the median time of a step. Other faults lose nothing. `began` and `stopped` are unix seconds.
    """
    rows = list(run.read_events())
    steps = [row for row in rows if row["kind"] == "step"]
    times = [row["time"] for row in steps]
    usual = statistics.median([later - former for former, later in itertools.pairwise(times)] or [0.0])
    lost = 0.0
    for number, injury in enumerate(injuries):
        until = injuries[number + 1].time if number + 1 < len(injuries) else stopped
        mine = [row for row in rows if injury.time < row["time"] <= until]
        report = next((row for row in mine if row["kind"] in ("incident", "restart")), None)
        start = next((row for row in mine if row["kind"] == "start"), None)
        if report is not None:
            injury.detected_after = round(report["time"] - injury.time, 1)
        if start is None:
            continue
        reached = max((row["step"] for row in steps if row["time"] <= start["time"]), default=0)
        injury.steps_lost = max(0, reached - start["step"])
        first = next((row["time"] for row in steps if row["time"] > start["time"]), None)
        if first is not None:
            injury.training_after = round(first - injury.time, 1)
            lost += first - injury.time + injury.steps_lost * usual
    return 1 - lost / max(stopped - began, 1e-9)


def show(injuries: Sequence[Injury], share: float) -> None:
    """Print a table of the faults with what each cost, and the share of effective training time."""

    def seconds(value: float | None) -> str:
        """Return a time in whole seconds as text, "-" if unknown."""
        return "-" if value is None else f"{value:.0f} s"

    rows = []
    for each in injuries:
        costs = seconds(each.detected_after), f"{each.steps_lost:,}", seconds(each.training_after)
        fault = each.fault if each.is_done else f"{each.fault} (not done)"
        rows.append([fault, each.host, f"{each.step:,}", *costs])
    screen.table(["fault", "host", "step", "detected after", "steps lost", "training after"], rows)
    screen.show(f"effective training time {100 * share:.1f} %, {sum(each.is_done for each in injuries)} faults")


def to_json(injuries: Sequence[Injury], share: float) -> dict[str, object]:
    """Return the result as `finlm drill --json` prints it: {effective_time: `share`, faults: a dict per fault}."""
    return {"effective_time": round(share, 4), "faults": [dataclasses.asdict(each) for each in injuries]}


DAY = 86400.0
RUNS = 200
MOST_FAILURES = 500  # of a simulated run; the mean of more is no surer


@dataclass(frozen=True)
class Failing:
    """The parameters of a simulation, times in seconds; `rate` is failures per host and day.

    `interval` is the training between two checkpoints, `stall` the wait for a checkpoint, `detection` the time until a
    failure is noticed, `restart` the time until the ranks train again.
    """

    hosts: int
    rate: float
    interval: float
    stall: float
    detection: float
    restart: float

    @property
    def between(self) -> float:
        """Mean seconds between failures of all hosts together."""
        return DAY / (self.rate * self.hosts)


@dataclass(frozen=True)
class Forecast:
    """Shares of the time that trains, 0 to 1: the mean, and the bounds of 90 % of the simulated runs, `low` and `high`.

    `between` is the mean number of seconds between failures.
    """

    share: float
    low: float
    high: float
    between: float


def forecast(failing: Failing, seconds: float) -> Forecast:
    """Simulate 200 runs of `seconds` of wall time, or of 500 failures if that is less, and return a Forecast.

    The same arguments give the same Forecast. Raises UserError when failures come sooner, on average, than they are
    noticed and the ranks start again.
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
    shares = sorted(simulate(failing, seconds, random.Random(f"0 {number}")) for number in range(RUNS))
    low, high = shares[RUNS // 20], shares[-1 - RUNS // 20]
    return Forecast(statistics.fmean(shares), low, high, between)


def simulate(failing: Failing, seconds: float, chance: random.Random) -> float:
    """Return the share of a run's wall time, 0 to 1, that trained steps that count.

    Starts, steps lost by a failure, and waits for checkpoints do not count. `chance` draws the times of the failures.
    Every launch, also the first, takes failing.restart seconds before it trains, and may fail during them.
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
    """Return one line of text: how often a host fails, and what share of the time is spent training, with a range."""
    hosts = f"{failing.hosts} host{'s' * (failing.hosts > 1)}"
    return (
        f"{hosts}, {failing.rate:g} failures a host and day: one in {format_duration(result.between)}; "
        f"{result.share:.1%} of the time trains ({result.low:.1%} to {result.high:.1%}), with checkpoints every "
        f"{format_duration(failing.interval)}, {format_duration(failing.detection)} until a failure is noticed and "
        f"{format_duration(failing.restart)} until the ranks train again"
    )
