"""TensorBoard, Weights & Biases and trackio behind two calls: log the metrics of a step, close.

Opening one removes what it holds of this run, so that it can be filled again when steps were taken back: no tracker
keeps a history that the run no longer has. W&B on line is the exception, as its server's history only grows: `done`
says up to where it has the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import recipe
from finlm.recipe.published import published
from finlm.recipe.schema import Recipe

PINS = {"wandb": "wandb==0.31.0", "trackio": "trackio==0.43.0"}  # as in requirements-tracking.txt
# Graphs of this machine and its name, user, command line and directories, which W&B takes by itself.
_UNASKED: dict[str, Any] = {"x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True}


class Tracker(Protocol):
    """Where metrics go. done: the last step that it had before and cannot take again."""

    done: int

    def log(self, step: int, when: float, metrics: Mapping[str, float]) -> None:
        """The metrics after a step; when: unix seconds."""

    def close(self) -> None:
        """Write what is buffered."""


class TensorBoard:
    """Event files below <run>/tracking/tensorboard: `tensorboard --logdir runs` shows all runs."""

    done = -1

    def __init__(self, run: RunDir, _: Recipe) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory = run.tracking / "tensorboard"
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = EventFileWriter(str(directory), flush_secs=5)

    def log(self, step: int, when: float, metrics: Mapping[str, float]) -> None:
        """One event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=when, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class Wandb:
    """Off line below <run>/tracking/wandb, for `wandb sync`; on line with record.online."""

    def __init__(self, run: RunDir, wanted: Recipe) -> None:
        import wandb

        directory = run.tracking
        if not wanted.record.online:
            shutil.rmtree(directory / "wandb", ignore_errors=True)
        directory.mkdir(exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=wanted.record.project,
                name=run.path.name,
                id=run.path.name,
                dir=str(directory),
                mode="online" if wanted.record.online else "offline",
                resume="allow" if wanted.record.online else None,
                config=_config(run, wanted),
                settings=wandb.Settings(silent=True, console="off", host="", disable_git=True, **_UNASKED),
            )
        except wandb.Error as error:
            raise UserError(
                "W&B cannot be reached", evidence=str(error), fix="wandb login, or leave record.online at false"
            ) from None
        self._teardown = wandb.teardown
        self.done = int(self._run.step) - 1 if wanted.record.online else -1

    def log(self, step: int, when: float, metrics: Mapping[str, float]) -> None:
        """Metrics of one step that come apart are one row in W&B."""
        self._run.log({**metrics, "_timestamp": when}, step=step)

    def close(self) -> None:
        """Wait until everything is written, or sent; the service that writes the file outlives finish()."""
        self._run.finish()
        self._teardown()


class Trackio:
    """The user's local trackio store (TRACKIO_DIR): `trackio show --project finlm`."""

    done = -1

    def __init__(self, run: RunDir, wanted: Recipe) -> None:
        import trackio

        project, name = wanted.record.project, run.path.name
        with contextlib.suppress(ValueError):  # no such project yet
            for former in list(trackio.Api().runs(project)):
                if former.name == name:
                    former.delete()
        settings: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # where results go
            self._run: Any = trackio.init(project, name=name, config=_config(run, wanted), **settings)
        self._finish = trackio.finish

    def log(self, step: int, when: float, metrics: Mapping[str, float]) -> None:
        """One row; trackio takes no time, it stamps its own."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is queued."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def check(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not installed here."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        fixes = [f".venv/bin/pip install {PINS[name]}" if name in PINS else "bash scripts/setup.sh" for name in missing]
        raise UserError(
            f"{' and '.join(missing)} cannot be imported",
            evidence="named in record.tracking or after --to, and not installed in this environment",
            fix="; ".join([*dict.fromkeys(fixes), "or leave it out, and send the run later"]),
        )


def metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of events.jsonl under the names that every tracker shows: train/loss, eval/<source>/loss."""
    return {name: float(value) for name, value in _numbers(row) if type(value) in (int, float)}


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = row["kind"]
    skip = ("kind", "time", "step", "rows_crc")
    if kind == "step":
        yield from ((f"train/{key}", value) for key, value in row.items() if key not in skip)
    elif kind == "eval":
        yield from ((f"eval/{key}", value) for key, value in row.items() if key not in skip)
        for source, values in (row.get("sources") or {}).items():
            yield from ((f"eval/{source}/{key}", value) for key, value in values.items())
    elif kind == "checkpoint":
        yield from ((f"checkpoint/{key}", row.get(key)) for key in ("bytes", "seconds", "stall_seconds"))
    elif kind == "suite":
        yield from ((f"suite/{row.get('suite')}/{row.get('mode')}/{key}", row.get(key)) for key in ("macro", "micro"))


def _config(run: RunDir, wanted: Recipe) -> dict[str, Any]:
    """Recipe and plan, without what may hold credentials or names of machines."""
    plan = {key: value for key, value in files.read_json(run.plan).items() if key not in ("hosts", "reasons")}
    return {"recipe": published(wanted).model_dump(mode="json"), "plan": plan, "run": run.path.name}


def opened(run: RunDir, name: str) -> Tracker:
    """The tracker of this name, without anything of this run."""
    return TRACKERS[name](run, recipe.load(run.recipe).recipe)
