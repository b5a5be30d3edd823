"""Name the files in a run directory: the only place where launch, training and reports meet.

runs/<name>-<time>/
    recipe.yaml  plan.json  ds_config.json  manifest.json   written before launch, never changed but for
    plan.1.json ...          the plans that ran out of memory, oldest first; plan.json is the one that trains now
    origins.json  doctor.json  data.json   where values came from, findings before launch, document and token counts
    code/                    the source that runs
    rewards/<sha256>.py      the user's functions of grpo.reward; absent without any
    code.diff                its uncommitted changes, to read; absent without any
    env/<host>.env           KEY=VALUE lines applied on that host before torch is imported; <host> as in the hostfile
    rollouts.jsonl           answers of each step with what they earned; of stages that generate
    events.jsonl             one object per step, evaluation, checkpoint or incident: the only source of numbers
    logs/<host>.<rank>.log
    checkpoints/step-N/      complete only when its manifest.json exists; a link for one in this host's memory
    continued/step-N/        the checkpoint of another run that this one goes on from; absent for most
    continued/events.jsonl   events.jsonl at the launch, for a first host that has none of its own
    export/                  Hugging Face format
    diagnosis.json           why it failed; absent while nothing did
    report.html
    finished.json            written last, with the outcome: `finlm train` did all of its steps
    tracking/                event files of TensorBoard, off-line runs of W&B, what trackers printed; absent without any
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError

HOST_VARIABLE = "FINLM_HOST"
STEP_VARIABLE = "FINLM_STEP"  # the finished steps that the launcher announced: ranks start after them or not at all


@dataclass(frozen=True)
class RunDir:
    """Paths and events of one run on disk. Properties are paths; nothing is cached."""

    path: Path

    recipe = property(lambda self: self.path / "recipe.yaml")
    plan = property(lambda self: self.path / "plan.json")
    ds_config = property(lambda self: self.path / "ds_config.json")
    manifest = property(lambda self: self.path / "manifest.json")
    origins = property(lambda self: self.path / "origins.json")
    doctor = property(lambda self: self.path / "doctor.json")
    data = property(lambda self: self.path / "data.json")
    diagnosis = property(lambda self: self.path / "diagnosis.json")
    code = property(lambda self: self.path / "code")
    code_diff = property(lambda self: self.path / "code.diff")
    env = property(lambda self: self.path / "env")
    events = property(lambda self: self.path / "events.jsonl")
    lent_events = property(lambda self: self.path / "continued" / "events.jsonl")
    logs = property(lambda self: self.path / "logs")
    checkpoints = property(lambda self: self.path / "checkpoints")
    export = property(lambda self: self.path / "export")
    report = property(lambda self: self.path / "report.html")
    finished = property(lambda self: self.path / "finished.json")
    tracking = property(lambda self: self.path / "tracking")
    rollouts = property(lambda self: self.path / "rollouts.jsonl")

    @property
    def former_plans(self) -> list[Path]:
        """Paths of plan.1.json and so on, the plans that ran out of memory, oldest first; empty for most runs."""
        plans = {path.name.split(".")[1]: path for path in self.path.glob("plan.*.json")}
        return [plans[number] for number in sorted((name for name in plans if name.isdigit()), key=int)]

    @property
    def shards(self) -> Path:
        """Directory of the prepared data: the symlink `shards`, else the path in manifest.json.

        Raises FileNotFoundError without either, NotJson for a damaged manifest.
        """
        link = self.path / "shards"
        return link if link.is_symlink() else Path(files.read_json(self.manifest)["shards"]["path"])

    def reward_file(self, sha256: str) -> Path:
        """Return the path of the run's copy of a reward function's file (grpo.reward) with this sha256."""
        return self.path / "rewards" / f"{sha256}.py"

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append {kind, time (Unix seconds), **fields} to events.jsonl; NaN, infinity become null. Raises OSError."""
        files.append_json_line(self.events, {"kind": kind, "time": round(time.time(), 3), **_without_nan(fields)})

    def read_events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the events of events.jsonl, or those of this kind, in order; skip lines that are not JSON."""
        for row in files.read_json_lines(self.events):
            if kind is None or row["kind"] == kind:
                yield row

    def is_trained(self) -> bool:
        """Return whether events.jsonl says that the ranks did the last step; export and later work may be missing."""
        return any(row["status"] == "finished" for row in self.read_events("end"))

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after `step` optimizer steps; it need not exist."""
        return Path(self.checkpoints) / f"step-{step}"

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Return (step, directory) of every checkpoint of this run whose manifest.json exists, oldest first."""
        return complete_checkpoints(self.checkpoints)

    def recorded_checkpoint(self) -> int:
        """Return the newest step for which events.jsonl records a checkpoint, on any host; 0 if there is none."""
        return max((row["step"] for row in self.read_events("checkpoint")), default=0)

    def newest_recorded(self) -> int:
        """Return the newest step of a checkpoint that events.jsonl records, on disk or in memory; 0 if none.

        Those in memory no longer count after a later start at, or rollback to, an earlier step.
        """
        return max(self.recorded_checkpoint(), self.recorded_in_memory())

    def recorded_in_memory(self) -> int:
        """Return the newest step for which events.jsonl records a checkpoint in memory; 0 if there is none.

        A later start at, or rollback to, an earlier step gives 0: the checkpoint was gone by then.
        """
        newest = 0
        for row in self.read_events():
            if row["kind"] == "in_memory":
                newest = row["step"]
            elif row["kind"] in ("start", "rollback") and row["step"] < newest:
                newest = 0
        return newest

    def count_failures(self) -> tuple[int, float]:
        """Return (number of launches that failed, seconds of all launches), from events.jsonl.

        Of each launch, counts the events `start`, `step` and `end`. It failed if the last of these is not an `end`, or
        an `end` with status failed. Its seconds run from the first of these to the last.
        """
        launches = list[tuple[float, float, bool]]()  # first and last row, whether it ended well
        for row in self.read_events():
            if row["kind"] == "start":
                launches.append((row["time"], row["time"], False))
            elif launches and row["kind"] in ("step", "end"):
                launches[-1] = launches[-1][0], row["time"], row["kind"] == "end" and row["status"] != "failed"
        return sum(not well for *_, well in launches), sum(last - first for first, last, _ in launches)

    def memory(self, directory: str) -> Path:
        """Return the path, not made here, of this run's checkpoints in a host's memory, below `directory`.

        That is checkpoint.memory_directory. The path has the user's id, the run's name and a hash of its place.
        """
        path = str(self.path.resolve())
        return Path(directory) / f"finlm-{os.getuid()}" / f"{self.path.name}-{files.sha256_json(path)[:8]}"

    def host_lock(self, host: str) -> Path:
        """Return the path of the lock file for a host's ranks; each host has one, because hosts may share a disk."""
        return self.path / f".lock-{host}"

    def continued_checkpoints(self) -> list[tuple[int, Path]]:
        """Return [(step, directory)] of another run's checkpoint that this run starts from; [] if there is none."""
        return complete_checkpoints(self.path / "continued")


def _without_nan(value: Any) -> Any:
    """Return a copy of the JSON-able value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every step-N in the directory whose manifest.json exists, oldest first."""
    numbered = (
        (path.parent.name.removeprefix("step-"), path.parent) for path in directory.glob("step-*/manifest.json")
    )
    return sorted((int(number), path) for number, path in numbered if number.isdigit())


def open_run(path: str | Path) -> RunDir:
    """Return the RunDir at `path`. Raises UserError when its recipe.yaml, plan.json or ds_config.json is missing."""
    run = RunDir(Path(path))
    missing = [p.name for p in (run.recipe, run.plan, run.ds_config) if not p.exists()]
    if missing:
        raise UserError(
            f"{path} is not a run directory",
            evidence=f"missing: {', '.join(missing)}",
            fix="give the directory that `finlm train` printed, runs/<name>-<time>",
        )
    return run


def run_of(path: Path) -> RunDir | None:
    """Return the run directory that `path` is or lies in, at most two levels below it; None if there is none.

    It finds the run of its export and of a checkpoint of it. A run directory has plan.json and recipe.yaml.
    """
    for directory in (path, path.parent, path.parent.parent):
        if (directory / "plan.json").is_file() and (directory / "recipe.yaml").is_file():
            return RunDir(directory.resolve())
    return None


def host_name() -> str:
    """Return this host's name in the run: the hostfile's, which the launcher passes to ranks, else the system's."""
    return os.environ.get(HOST_VARIABLE) or os.uname().nodename
