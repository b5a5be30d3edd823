"""Send a run's metrics to TensorBoard, Weights & Biases or trackio: `record.tracking`, and `finlm track`.

Each tracker has a process that reads events.jsonl beside the run. Training never waits for it; a tracker that fails or
hangs is named at the end and costs nothing else, and `finlm track RUN --to NAME` sends the whole run later.

Opening a tracker removes what it has of this run, so that steps which a resume or a rollback repeats appear once, with
their last values. W&B on line is the exception, because its server's history only grows: `done` is the last step there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, open_run
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.recipe.derive import for_publication
from finlm.recipe.schema import Recipe
from finlm.record import live
from finlm.record.history import Row

PINS = {"wandb": "wandb==0.31.0", "trackio": "trackio==0.43.0"}  # as in requirements-tracking.txt
# Graphs of this machine and its name, user, command line and directories, which W&B takes by itself.
_UNASKED: Any = {"x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True}


@dataclass(frozen=True)
class Tracker:
    """An open tracker: log(step, Unix seconds, metrics) sends, close() writes what is buffered.

    `done` is the last step that the tracker had before and cannot take again; -1 if none.
    """

    log: Callable[[int, float, Mapping[str, float]], object]
    close: Callable[[], object]
    done: int = -1


def open_tensorboard(run: RunDir, _: Recipe) -> Tracker:
    """Open event files in <run>/tracking/tensorboard, removing older ones, and return the Tracker; reads no recipe."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory = run.tracking / "tensorboard"
    shutil.rmtree(directory, ignore_errors=True)
    writer = EventFileWriter(str(directory), flush_secs=5)

    def log(step: int, when: float, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step to the event file, with their time in Unix seconds."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=when, step=step, summary=Summary(value=values)))

    return Tracker(log, writer.close)


def open_wandb(run: RunDir, wanted: Recipe) -> Tracker:
    """Open W&B on line with record.online, else off line in <run>/tracking/wandb for `wandb sync`; return the Tracker.

    Off line, removes old files of this run. On line, Tracker.done is the last step that the server has. Raises
    UserError when W&B cannot be reached.
    """
    import wandb

    is_online = wanted.record.online
    if not is_online:
        shutil.rmtree(run.tracking / "wandb", ignore_errors=True)
    run.tracking.mkdir(exist_ok=True)
    try:
        opened: Any = wandb.init(
            project=wanted.record.project,
            name=run.path.name,
            id=run.path.name,
            dir=str(run.tracking),
            mode="online" if is_online else "offline",
            resume="allow" if is_online else None,
            config=_config(run, wanted),
            settings=wandb.Settings(silent=True, console="off", host="", disable_git=True, **_UNASKED),
        )
    except wandb.Error as error:
        raise UserError(
            "W&B cannot be reached", evidence=str(error), fix="wandb login, or leave record.online at false"
        ) from None

    def log(step: int, when: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to W&B, with their time in Unix seconds."""
        opened.log({**metrics, "_timestamp": when}, step=step)  # metrics of a step that come apart are one row in W&B

    def close() -> None:
        """End the W&B run and its service."""
        opened.finish()
        wandb.teardown()  # the service that writes the file outlives finish()

    return Tracker(log, close, int(opened.step) - 1 if is_online else -1)


def open_trackio(run: RunDir, wanted: Recipe) -> Tracker:
    """Open the local trackio store (TRACKIO_DIR) and return the Tracker of this run.

    First deletes a former run of this name in the project record.project. `trackio show --project PROJECT` shows it.
    Raises NotJson for a damaged plan.json.
    """
    import trackio

    project, name = wanted.record.project, run.path.name
    with contextlib.suppress(ValueError):  # no such project yet
        for former in list(trackio.Api().runs(project)):
            if former.name == name:
                former.delete()
    settings: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    with contextlib.redirect_stdout(io.StringIO()):  # where results go
        opened: Any = trackio.init(project, name=name, config=_config(run, wanted), **settings)

    def log(step: int, _: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to trackio; the time is ignored."""
        opened.log(dict(metrics), step=step)  # trackio takes no time, it stamps its own

    def close() -> None:
        """End the trackio run without printing what it says."""
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()

    return Tracker(log, close)


TRACKERS: dict[str, Callable[[RunDir, Recipe], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError if the package of one of these trackers is not installed here."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        fixes = [f".venv/bin/pip install {PINS[name]}" if name in PINS else "bash scripts/setup.sh" for name in missing]
        raise UserError(
            f"{' and '.join(missing)} cannot be imported",
            evidence="named in record.tracking or after --to, and not installed in this environment",
            fix="; ".join([*dict.fromkeys(fixes), "or leave it out, and send the run later"]),
        )


def metrics(row: Row) -> dict[str, float]:
    """Return the metrics of an events.jsonl row by the names trackers show, such as train/loss or eval/<source>/loss.

    Covers events of KINDS; empty for others. Values that are not numbers are left out.
    """
    kind = row["kind"]
    values = {key: value for key, value in row.items() if key not in ("kind", "time", "step", "rows_crc")}
    groups: dict[str, Mapping[str, Any]] = {}
    if kind in ("step", "eval"):
        groups["train" if kind == "step" else "eval"] = values
    if kind == "eval":
        groups |= {f"eval/{source}": numbers for source, numbers in (row.get("sources") or {}).items()}
    elif kind == "checkpoint":
        groups["checkpoint"] = {key: row.get(key) for key in ("bytes", "seconds", "stall_seconds")}
    elif kind == "tasks":
        scores = {name: score["value"] for name, score in (row.get("scores") or {}).items()}
        groups[f"suite/{row.get('suite')}/{row.get('mode')}"] = scores
    elif kind == "suite":
        groups[f"suite/{row.get('suite')}/{row.get('mode')}"] = {key: row.get(key) for key in ("macro", "micro")}
    named = ((f"{group}/{key}", value) for group, numbers in groups.items() for key, value in numbers.items())
    return {name: float(value) for name, value in named if type(value) in (int, float)}


def _config(run: RunDir, wanted: Recipe) -> dict[str, object]:
    """Return recipe and plan as a dict for a tracker, without credentials, names of machines and the plan's reasons.

    Raises NotJson for a damaged plan.json.
    """
    plan = {key: value for key, value in files.read_json(run.plan).items() if key not in ("hosts", "reasons")}
    return {"recipe": for_publication(wanted).model_dump(mode="json"), "plan": plan, "run": run.path.name}


POLL_SECONDS = 1.0
END_SECONDS = 60.0  # a tracker's time to send the rest when its run has ended
KINDS = ("step", "eval", "checkpoint", "suite", "tasks")


def rows_that_stand(rows: Iterable[Row]) -> list[Row]:
    """Return the event rows with metrics in step order, without those that a later start or rollback takes back.

    Keeps only the last event of a kind and step (and suite and mode).
    """
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        step = int(row.get("step") or 0)
        if row["kind"] in ("start", "rollback"):
            kept = {key: former for key, former in kept.items() if key[1] <= step}
        elif row["kind"] in KINDS:
            kept[(row["kind"], step, row.get("suite"), row.get("mode"))] = row
    return sorted(kept.values(), key=lambda row: int(row["step"]))


def follow(run: RunDir, name: str, is_over: Callable[[], bool]) -> int:
    """Send a run's metrics to the tracker `name` until is_over() is true; return the newest step sent, 0 if none.

    Sends what is there first, and looks once more after is_over() was true. Opens the tracker again when a resume or
    rollback repeats sent steps. Waits only in is_over(), which it calls between looks. Raises UserError when another
    process sends the run to the same tracker, or the tracker cannot be opened.
    """
    run.tracking.mkdir(exist_ok=True)
    problem, fix = f"another process sends {run.path.name} to {name}", "wait until it has, or until the run ends"
    with files.lock(run.tracking / f".{name}.lock", UserError(problem, fix=fix)):
        is_last = False
        while True:
            events = live.follow(run, 0)
            rows = next(events)
            tracker = TRACKERS[name](run, recipe.load(run.recipe).recipe)
            try:
                sent = _send(tracker, rows_that_stand(rows), {})
                while not is_last:
                    is_last = is_over()  # asked before the last look, which then sees everything
                    rows = next(events)
                    newest = max(sent.values(), default=0)
                    back_to = (row.get("step") for row in rows if row["kind"] in ("start", "rollback"))
                    if any(int(step or 0) < newest for step in back_to):
                        break  # no tracker takes a step back: it is opened again, which removes what it has of this run
                    sent = _send(tracker, [row for row in rows if row["kind"] in KINDS], sent)
                else:
                    return max(sent.values(), default=0)
            finally:
                tracker.close()


def _send(tracker: Tracker, rows: Sequence[Row], sent: dict[str, int]) -> dict[str, int]:
    """Log the events with steps above those in `sent`, {kind: newest step}, and above tracker.done.

    Returns `sent` with the new steps. Events of suites and tasks count as new whenever they are given.
    """
    newest = dict(sent)
    for row in rows:
        kind, step = row["kind"], int(row.get("step") or 0)
        if (step <= newest.get(kind, -1) and kind not in ("suite", "tasks")) or step <= tracker.done:
            continue
        newest[kind] = step
        if numbers := metrics(row):
            tracker.log(step, float(row["time"]), numbers)
    return newest


def track(run: RunDir, names: Sequence[str], until_end: bool) -> None:
    """Send a run's metrics so far to these trackers, or until the run ends; print to stderr how to open them.

    With `until_end` each tracker gets a process of its own, whose failure is printed only. Raises UserError if a
    tracker is not installed. Without `until_end` also raises it if one is busy or not reachable.
    """
    check_installed(names)
    if until_end:
        state = live.State(Plan.read(run.plan))
        with track_beside(run, names):
            for rows in live.until_over(run, state):
                for row in rows:
                    state.feed(row)
        return
    for name in names:
        steps = follow(run, name, lambda: True)
        screen.say(f"{name}: {steps:,} steps of {run.path.name}; {how_to_open(run, name)}")


def how_to_open(run: RunDir, name: str) -> str:
    """Return the command that opens or uploads the data that tracker `name` has of the run.

    Returns "sent" for W&B without off-line files of the run.
    """
    if name == "tensorboard":
        return f"tensorboard --logdir {run.path.parent}"
    if name == "wandb":
        offline = list((run.tracking / "wandb").glob("offline-run-*"))
        return f"wandb sync {offline[0]}" if offline else "sent"
    return "trackio show"


@contextlib.contextmanager
def track_beside(run: RunDir, names: Sequence[str]) -> Iterator[None]:
    """Send a run's metrics during the block, with a process for each tracker, whose output goes to tracking/<name>.log.

    After the block, even if it raised, waits up to 60 s in all for these processes, then kills them. Prints to stderr
    how to open each tracker, or why it failed; a tracker's failure raises nothing.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in names:
        run.tracking.mkdir(exist_ok=True)
        with log_file(run, name).open("ab") as output:
            command = [sys.executable, "-m", "finlm.record.trackers", str(run.path), name]
            started[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )  # a session of its own: Ctrl-C is for the run, whose last steps are still to be sent
    try:
        yield
    finally:
        for process in started.values():
            if process.stdin:
                process.stdin.close()  # which says that the run is over, as does the end of this process
        deadline = time.monotonic() + END_SECONDS
        for name, process in started.items():
            _wait_for_tracker(run, name, process, deadline - time.monotonic())


def _wait_for_tracker(run: RunDir, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a tracker's process, or kill it after `seconds`; print to stderr how to open it or why it failed."""
    try:
        code = process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        screen.say(f"{name} had not taken everything {END_SECONDS:.0f} s after the end and was stopped")
    else:
        if code == 0:
            screen.say(f"{name:<15} {how_to_open(run, name)}")
            return
        lines = log_file(run, name).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        screen.say(f"{name} failed, the run did not notice: {last}  ({log_file(run, name)})")
    screen.say(f"  send it again: finlm track {run.path} --to {name}")


def log_file(run: RunDir, name: str) -> Path:
    """Return the path of the file, tracking/<name>.log, for what a tracker's process prints; makes no file."""
    return Path(run.tracking) / f"{name}.log"


def main(arguments: Sequence[str]) -> int:
    """Send a run's metrics to a tracker until standard input is closed; return the exit code.

    `arguments` are the run's directory and the tracker's name. Prints a UserError to stderr instead of raising it,
    except when the directory is no run.
    """
    run, name = open_run(arguments[0]), arguments[1]

    def parent_ended() -> bool:
        """Wait up to POLL_SECONDS and return whether the pipe on stdin was closed, as at the parent's end."""
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        return bool(readable)

    try:
        follow(run, name, parent_ended)
    except UserError as error:
        screen.print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
