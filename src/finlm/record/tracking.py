"""Metrics of a run in TensorBoard, Weights & Biases or trackio: `record.tracking` of a recipe, and `finlm track`.

A process for each tracker reads events.jsonl beside the run. Training never waits for it, a tracker that fails or hangs
is named at the end and costs nothing else, and `finlm track RUN --to NAME` sends the whole run later. Steps that a
resume or a rollback repeats appear once, as they went on: the tracker is then filled again from its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, open_run
from finlm.plan.plan import Plan
from finlm.record import live, trackers

Row = dict[str, Any]
POLL_SECONDS = 1.0
END_SECONDS = 60.0  # a tracker's time to send the rest when its run has ended
KINDS = ("step", "eval", "checkpoint", "suite")


def current(rows: Iterator[Row]) -> list[Row]:
    """The rows with metrics that still count, in the order of their steps: those taken back are gone, none is twice."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        step = int(row.get("step") or 0)
        if row["kind"] in ("start", "rollback"):
            kept = {key: former for key, former in kept.items() if key[1] <= step}
        elif row["kind"] in KINDS:
            kept[(row["kind"], step, row.get("suite"), row.get("mode"))] = row
    return sorted(kept.values(), key=lambda row: int(row["step"]))


def follow(run: RunDir, name: str, is_over: Callable[[], bool]) -> int:
    """Send a run's metrics to a tracker until is_over; the steps it has then. UserError when another process does."""
    with _alone(run, name):
        is_last = False
        while True:
            events = live.follow(run, 0)
            rows = next(events)
            tracker = trackers.opened(run, name)
            try:
                sent = _send(tracker, current(iter(rows)), {})
                while not is_last:
                    is_last = is_over()  # asked before the last look, which then sees everything
                    rows = next(events)
                    if _takes_back(rows, sent):
                        break
                    sent = _send(tracker, [row for row in rows if row["kind"] in KINDS], sent)
                else:
                    return max(0, *sent.values()) if sent else 0
            finally:
                tracker.close()


@contextlib.contextmanager
def _alone(run: RunDir, name: str) -> Iterator[None]:
    """Two would remove each other's files."""
    run.tracking.mkdir(exist_ok=True)
    with (run.tracking / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process sends {run.path.name} to {name}", fix="wait until it has, or until the run ends"
            ) from None
        yield


def _takes_back(rows: Sequence[Row], sent: dict[str, int]) -> bool:
    reached = max(sent.values(), default=0)
    return any(row["kind"] in ("start", "rollback") and int(row.get("step") or 0) < reached for row in rows)


def _send(tracker: trackers.Tracker, rows: Sequence[Row], sent: dict[str, int]) -> dict[str, int]:
    """Log rows that are newer than what was sent of their kind; the newest step of each kind."""
    newest = dict(sent)
    for row in rows:
        kind, step = row["kind"], int(row.get("step") or 0)
        if (step <= newest.get(kind, -1) and kind != "suite") or step <= tracker.done:
            continue
        newest[kind] = step
        if found := trackers.metrics(row):
            tracker.log(step, float(row["time"]), found)
    return newest


def track(run: RunDir, names: Sequence[str], until_end: bool) -> None:
    """`finlm track`: a run's metrics to trackers, as they are or until it ends. UserError when one is not installed."""
    trackers.check(names)
    if until_end:
        state = live.State(Plan.read(run.plan))
        with beside(run, names):
            for rows in live.until_over(run, state):
                for row in rows:
                    state.feed(row)
        return
    for name in names:
        steps = follow(run, name, lambda: True)
        screen.say(f"{name}: {steps:,} steps of {run.path.name}; {seen(run, name)}")


def seen(run: RunDir, name: str) -> str:
    """How a tracker's pages are opened."""
    if name == "tensorboard":
        return f"tensorboard --logdir {run.path.parent}"
    if name == "wandb":
        offline = list((run.tracking / "wandb").glob("offline-run-*"))
        return f"wandb sync {offline[0]}" if offline else "sent"
    return "trackio show"


@contextlib.contextmanager
def beside(run: RunDir, names: Sequence[str]) -> Iterator[None]:
    """Track a run while the block runs it; what a tracker does wrong is said after it, and raised never."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in names:
        run.tracking.mkdir(exist_ok=True)
        with log(run, name).open("ab") as output:
            command = [sys.executable, "-m", "finlm.record.tracking", str(run.path), name]
            started[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
    try:
        yield
    finally:
        for process in started.values():
            if process.stdin:
                process.stdin.close()  # which says that the run is over, as does the end of this process
        deadline = time.monotonic() + END_SECONDS
        for name, process in started.items():
            _ended(run, name, process, deadline - time.monotonic())


def _ended(run: RunDir, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        code = process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        screen.say(f"{name} had not taken everything {END_SECONDS:.0f} s after the end and was stopped")
    else:
        if code == 0:
            screen.say(f"{name:<15} {seen(run, name)}")
            return
        lines = log(run, name).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        screen.say(f"{name} failed, the run did not notice: {last}  ({log(run, name)})")
    screen.say(f"  send it again: finlm track {run.path} --to {name}")


def log(run: RunDir, name: str) -> Path:
    """What a tracker printed."""
    return Path(run.tracking) / f"{name}.log"


def main(arguments: Sequence[str]) -> int:
    """The process beside a run: RUN NAME; ends when its standard input does."""
    run, name = open_run(arguments[0]), arguments[1]

    def parent_ended() -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        return bool(readable)

    try:
        follow(run, name, parent_ended)
    except UserError as error:
        screen.fail(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
