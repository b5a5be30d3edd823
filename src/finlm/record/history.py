"""Read events.jsonl as the history that counts after resumes, and reduce its curves for pages and terminals.

A resumed run repeats the steps after its checkpoint, and so does one that was rolled back; a `start` or `rollback`
event at step S therefore removes what was recorded after S. Lines that are not JSON (cut by a kill, then continued) are
counted and left out. 100,000 steps are read in 0.6 s and become at most 3,000 points a curve: the lowest and the
highest value of every bucket, so that no spike disappears.

Missing values stay missing: curves and medians leave them out, and they never become 0. Also lists all runs of a
directory, each with its state.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.rundir import RunDir
from finlm.base.runs import is_held, lock_holder
from finlm.base.units import format_count
from finlm.recipe import parents
from finlm.record.manifest import Manifest

Row = Mapping[str, Any]  # of events.jsonl; a row may lack what its version did not write
Points = list[tuple[float, float]]
_NUMBERS = (int, float)
_DECODE = json.JSONDecoder(parse_constant=lambda _: None).decode  # NaN and Infinity are missing values
STEP_KEYS = (
    *("step", "loss", "lr", "grad_norm", "loss_scale", "tokens", "rows_crc"),
    *("tokens_read", "tokens_per_second", "mfu", "memory_bytes"),
    *("accuracy", "margin", "reward"),  # of stages that learn from preferences
    *("answer_tokens", "entropy", "repetition", "unanswered", "mismatch"),  # of own answers
)


@dataclass
class Restart:
    """A new launch after a failure: its `restart` event, and the steps and seconds that it lost (None until known)."""

    row: Row
    steps_lost: float | None = None
    seconds_until_training: float | None = None


@dataclass
class History:
    """The events that count, by kind, each in order; step events as columns by key, because there may be 100,000."""

    starts: list[Row] = field(default_factory=list)
    steps: dict[str, list[float | None]] = field(default_factory=lambda: {key: [] for key in STEP_KEYS})
    trained: dict[str, Points] = field(default_factory=dict)  # (step, loss) by source, of stages that record it
    earned: dict[str, Points] = field(default_factory=dict)  # (step, mean) by term of the reward
    evals: list[Row] = field(default_factory=list)
    checkpoints: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    incidents: list[Row] = field(default_factory=list)
    exports: list[Row] = field(default_factory=list)
    suites: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    rollbacks: list[Row] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    expectations: list[Row] = field(default_factory=list)
    end: Row | None = None
    unreadable: int = 0
    wall_seconds: float | None = None
    last_time: float | None = None
    planned_from: int = 0  # row of steps from which on plan.json holds; before it another one ran out of memory

    @property
    def first_time(self) -> float | None:
        """Unix time of the first start; None without a start."""
        return self.starts[0].get("time") if self.starts else None

    def last(self, key: str) -> float | None:
        """Return the newest value of a key of STEP_KEYS in the step events; None when no step has a value."""
        return next((value for value in reversed(self.steps[key]) if value is not None), None)

    def values(self, key: str, start: int = 0) -> list[float]:
        """Return the values of a key of the step events, from index `start` on, without missing ones."""
        return [value for value in self.steps[key][start:] if value is not None]

    def median(self, key: str, start: int = 0) -> float | None:
        """Return the median of what values(key, start) returns; None if that is empty."""
        values = self.values(key, start)
        return statistics.median(values) if values else None

    def points(self, key: str) -> Points:
        """Return [(step, value)] of the step events that have a value for the key."""
        pairs = zip(self.steps["step"], self.steps[key], strict=True)
        return [(step, value) for step, value in pairs if value is not None and step is not None]

    def held_out(self) -> dict[str, Points]:
        """Return {source: [(step, held-out loss)]}, in the order of their first evaluation."""
        curves: dict[str, Points] = {}
        for row in self.evals:
            for name, source in (row.get("sources") or {}).items():
                if is_number(source.get("loss")):
                    curves.setdefault(name, []).append((row["step"], source["loss"]))
        return curves

    def held_out_rewards(self) -> dict[str, Points]:
        """Return {name: [(step, mean held-out reward)]} of likeliest and of drawn answers, without empty ones."""
        kinds = {"likeliest answers": "reward", "drawn as in training": "sampled"}
        curves = {
            name: [(row["step"], row[key]) for row in self.evals if is_number(row.get(key))]
            for name, key in kinds.items()
        }
        return {name: points for name, points in curves.items() if points}

    def held_out_total(self) -> Points:
        """Return [(step, held-out loss over all sources)] of the evaluations that have one."""
        return [(row["step"], row["loss"]) for row in self.evals if is_number(row.get("loss"))]


def format_rise(row: Row) -> str:
    """Return the mean reward of drawn answers, `sampled`, in an eval event as text, with its rise and 95 % interval."""
    words = f"{row['sampled']:.4f}" if is_number(row["sampled"]) else "not finite"
    if not (row.get("step") and is_number(row.get("rise"))):
        return words
    low, high = row.get("rise_interval") or (None, None)
    interval = f", 95 % {low:+.4f} to {high:+.4f}" if is_number(low) and is_number(high) else ""
    return f"{words} ({row['rise']:+.4f} since the first step{interval})"


def planned_speed(planned: float | None, tokens_per_step: int, read: float | None) -> float | None:
    """Return the planned tokens/s scaled to steps that read `read` tokens, not the plan's tokens_per_step (full rows).

    Returns `planned` as given if it is None, or if `read` is None: earlier versions do not record it.
    """
    return planned if planned is None or read is None else planned * read / tokens_per_step


def is_number(value: Any) -> bool:
    """Return whether the value is an int or float (not a bool); NaN and infinity became None when they were read."""
    return type(value) in _NUMBERS


def read_history(run: RunDir) -> History:
    """Return the History of a run's events.jsonl, empty without it, less what a later start or rollback takes back."""
    history = History()
    by_kind = {
        "eval": history.evals,
        "checkpoint": history.checkpoints,
        "sample": history.samples,
        "incident": history.incidents,
        "export": history.exports,
        "suite": history.suites,
        "tasks": history.tasks,
        "expect": history.expectations,
    }
    columns_of_steps = list(history.steps.items())
    attempts: list[list[float]] = []  # from a start to its end row, or to the last row before the next start
    is_open = False
    for row in _rows(run, history):
        kind, now = row.get("kind"), row.get("time")
        if kind == "start":
            history.starts.append(row)
            if history.restarts and history.restarts[-1].steps_lost is None:
                history.restarts[-1].steps_lost = (history.last("step") or 0) - (row.get("step") or 0)
            history.end = None
            _take_back(history, row.get("step") or 0)
            is_open = isinstance(now, _NUMBERS)
            attempts += [[now, now]] if isinstance(now, _NUMBERS) else []
        elif kind == "rollback":
            _take_back(history, row.get("step") or 0)
            history.rollbacks.append(row)
        elif kind == "step":
            restart = history.restarts[-1] if history.restarts else None
            if restart and restart.seconds_until_training is None and isinstance(now, _NUMBERS):
                restart.seconds_until_training = now - restart.row["time"]
            for key, column in columns_of_steps:
                value = row.get(key)
                column.append(value if type(value) in _NUMBERS else None)
            for name, source in (row.get("sources") or {}).items():
                if is_number(source.get("loss")):
                    history.trained.setdefault(name, []).append((row["step"], source["loss"]))
            for name, mean in (row.get("rewards") or {}).items():
                if is_number(mean):
                    history.earned.setdefault(name, []).append((row["step"], mean))
        elif kind in by_kind:
            by_kind[kind].append(row)
            if "former" in row:
                history.planned_from = len(history.steps["step"])
        if isinstance(now, _NUMBERS):
            history.last_time = now
            if is_open:
                attempts[-1][1] = now
        if kind == "restart":
            history.restarts.append(Restart(row))
            history.end = None  # the ranks ended, and the run goes on
        elif kind == "end":
            history.end = row
            is_open = False  # the export and samples come after it
    history.wall_seconds = sum(last - first for first, last in attempts) if attempts else None
    return history


def _rows(run: RunDir, history: History) -> Iterator[Row]:
    """Yield the JSON objects in events.jsonl; add the number of lines that are not JSON to history.unreadable."""
    if not run.events.exists():
        return
    with run.events.open(encoding="utf-8", errors="replace") as file:
        while lines := list(itertools.islice(file, 1000)):  # in half the time of a call for each line
            try:
                rows = _DECODE(f"[{','.join(lines)}]")
            except ValueError:
                rows = [_decode_row(line) for line in lines]
                history.unreadable += rows.count(None)
            yield from (row for row in rows if isinstance(row, dict))


def _decode_row(line: str) -> Any:
    """Return the JSON value of a line; None if it is not JSON."""
    try:
        return _DECODE(line)
    except ValueError:
        return None


def _take_back(history: History, step: float) -> None:
    """Remove from `history` steps, points, evaluations, checkpoints and results after `step`; lower planned_from."""
    for rows in (history.evals, history.checkpoints, history.suites, history.tasks):
        while rows and (rows[-1].get("step") or 0) > step:
            rows.pop()
    done = history.steps["step"]
    while done and (done[-1] or 0) > step:
        for column in history.steps.values():
            column.pop()
    history.planned_from = min(history.planned_from, len(done))
    for points in (*history.trained.values(), *history.earned.values()):
        while points and points[-1][0] > step:
            points.pop()


def relative_fall(start: float | None, end: float | None) -> float | None:
    """Return how much lower `end` is, as a share of `start` (0.1 = 10 %); None if either is missing or start is 0."""
    return None if not start or end is None else 1 - end / start


def first_and_last(rows: Sequence[Row]) -> tuple[Row, Row]:
    """Return the first and the newest evaluation; ({}, {}) when there is none."""
    return (rows[0], rows[-1]) if rows else ({}, {})


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float, width: int = 48) -> str:
    """Return a curve (not empty) as at most `width` block characters, each a mean.

    A mean of `low` has the lowest block, one of `high` the highest; none may lie beyond.
    """
    count = min(width, len(values))
    ends = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


@dataclass(frozen=True)
class Series:
    """A curve of a chart; `style` is a class of report.css, `points` is [steps, values]."""

    name: str
    style: str
    points: list[list[float]]


@dataclass(frozen=True)
class Chart:
    """The data of a chart for report.js. `zero`: the axis begins at zero. `marks`: the points are marked."""

    title: str
    series: list[Series]
    zero: bool
    marks: bool = False


def charts(history: History) -> Iterator[Chart]:
    """Yield the charts of a run that have points: losses, rewards, other measures of steps, noisy ones smoothed too."""
    loss = history.points("loss")
    if loss:
        yield Chart("Training loss", _with_average("loss", loss), zero=False)
    if len(history.trained) > 1:
        series = [as_series(name, smooth(points), "other") for name, points in history.trained.items()]
        yield Chart("Training loss by source, smoothed", series, zero=False)
    if len(history.earned) > 1:
        series = [as_series(name, smooth(points), "other") for name, points in history.earned.items()]
        yield Chart("Reward by term, smoothed", series, zero=True)
    if by_source := history.held_out():
        style = "other" if len(by_source) > 1 else "main"
        series = [as_series(name, points, style) for name, points in by_source.items()]
        if len(by_source) > 1:
            series.append(as_series("all sources", history.held_out_total(), "main"))
        yield Chart("Held-out loss", series, zero=False, marks=True)
    if rewards := history.held_out_rewards():
        series = [as_series(name, points, "other" if len(rewards) > 1 else "main") for name, points in rewards.items()]
        yield Chart("Held-out reward", series, zero=False, marks=True)
    for key, title, is_noisy in (
        ("accuracy", "Pairs in the right order", True),
        ("margin", "Margin between chosen and rejected", True),
        ("reward", "Reward of own answers", True),
        ("answer_tokens", "Tokens an answer", True),
        ("entropy", "Entropy, nats a token", True),
        ("repetition", "Share of repeated text", True),
        ("unanswered", "Share that names no answer", True),
        ("mismatch", "Rollout against trainer, nats a token", True),
        ("lr", "Learning rate", False),
        ("grad_norm", "Gradient norm", True),
        ("tokens_per_second", "Tokens a second", True),
        ("loss_scale", "Loss scale", False),
    ):
        if points := history.points(key):
            yield Chart(
                title, _with_average(key, points) if is_noisy else [as_series(title, points, "main")], zero=True
            )


def _with_average(name: str, points: Points) -> list[Series]:
    """Return two series: the values in a faint style, and their moving average."""
    return [as_series(name, points, "faint"), as_series("smoothed", smooth(points), "main")]


def as_series(name: str, points: Points, style: str) -> Series:
    """Return a Series of the points, at most as many as thin_out() keeps, with values rounded to six digits."""
    kept = thin_out(points)
    return Series(name, style, [[step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]])


def smooth(points: Points) -> Points:
    """Return the points' exponential moving average over a fiftieth of them (5 to 200 points), bias-corrected."""
    span = min(200, max(5, len(points) // 50))
    keep = 1 - 2 / (span + 1)
    average, weight, result = 0.0, 0.0, []
    for step, value in points:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append((step, average / weight))
    return result


def thin_out(points: Points, buckets: int = 1500) -> Points:
    """Return at most 2 * buckets points in order: the first, the last, and the lowest and highest of each bucket."""
    if len(points) <= 2 * buckets:
        return points
    values = [value for _, value in points]
    kept = [points[0]]
    size = (len(points) - 2) / (buckets - 1)
    for index in range(buckets - 1):
        begin, end = 1 + int(index * size), 1 + int((index + 1) * size)
        part = values[begin:end]
        kept += [points[begin + at] for at in sorted({part.index(min(part)), part.index(max(part))})]
    return [*kept, points[-1]]


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; {} when the file is missing, not JSON, or holds something else."""
    try:
        value = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


RUNNING_SECONDS = 900  # without an end row, and nothing known of its process, a run counts as running for so long


@dataclass(frozen=True)
class Listed:
    """A row of `finlm runs`: `steps` planned, median tokens_per_second, and in `start` what the run started from."""

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    tokens_per_second: float | None
    recipe: str
    start: str


def state(run: RunDir, history: History, *, ended: bool = False) -> str:
    """Return a run's state: running, finished, interrupted, failed, killed or not started.

    An end event gives its status. Without one: failed if the caller says that it `ended`; running while the lock is
    held; killed if it is free on this machine. Elsewhere running, 15 minutes after the last event failed; not started
    without any event (but here failed if diagnosis.json is there).
    """
    if history.end is not None:
        return str(history.end.get("status", "failed"))
    if ended:
        return "failed"
    held = is_held(run)
    if held:
        return "running"
    if held is False and lock_holder(run)[1] == os.uname().nodename:
        return "killed" if history.last_time else "failed" if run.diagnosis.is_file() else "not started"
    if history.last_time is None:
        return "not started"
    return "failed" if time.time() - history.last_time > RUNNING_SECONDS else "running"


def read_listed(run: RunDir) -> Listed:
    """Return the run's row of `finlm runs`, from its events, plan and manifest; damaged files count as absent."""
    history, plan, manifest = read_history(run), read_object(run.plan), Manifest.read(run) or Manifest()
    if manifest.continues:
        start = f"{Path(manifest.continues.run).name} at {manifest.continues.step:,}"
    else:
        start = str(parents.Start.from_json(manifest.start)) if manifest.start else ""
    return Listed(
        name=run.path.name,
        state=state(run, history),
        step=int(history.last("step") or 0),
        steps=plan.get("steps"),
        loss=history.last("loss"),
        tokens_per_second=history.median("tokens_per_second"),
        recipe=str(plan.get("recipe") or "-"),
        start=start,
    )


def show_runs(listed: list[Listed], runs: Path) -> None:
    """Print a table of the runs to stdout, or a hint on how to train if there are none; `runs` is their directory."""
    if not listed:
        screen.show(f"no runs in {runs}/; `{screen.program()} train quickstart` makes one")
        return
    rows = [
        (
            *(run.name, run.state, f"{run.step:,} of {run.steps:,}" if run.steps else f"{run.step:,}"),
            "-" if run.loss is None else f"{run.loss:.4f}",
            "-" if run.tokens_per_second is None else format_count(int(run.tokens_per_second)),
            *(run.recipe, run.start or "-"),
        )
        for run in listed
    ]
    screen.table(("run", "state", "step", "loss", "tokens/s", "recipe", "starts from"), rows)
