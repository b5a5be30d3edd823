"""The names of the files in a run directory: the only place where launch, training and reports meet.

runs/<name>-<time>/
    recipe.yaml  plan.json  ds_config.json  manifest.json   written before launch, never changed
    origins.json  doctor.json  data.json   where values came from, findings before launch, document and token counts
    code/                    the source that runs
    code.diff                its uncommitted changes, to read; absent without any
    env/<host>.env           KEY=VALUE lines applied on that host before torch is imported; <host> as in the hostfile
    events.jsonl             one object per step, evaluation, checkpoint or incident: the only source of numbers
    logs/<host>.<rank>.log
    checkpoints/step-N/      complete only when its manifest.json exists
    continued/step-N/        the checkpoint of another run that this one goes on from; absent for most
    continued/events.jsonl   events.jsonl at the launch, for a first host that has none of its own
    export/                  Hugging Face format
    diagnosis.json           why it failed, by ops.diagnose; absent while nothing did
    report.html
    tracking/                event files of TensorBoard, off-line runs of W&B, what trackers printed; absent without any
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError

HOST_VARIABLE = "FINLM_HOST"
_held: set[Path] = set()  # run directories that this process has locked


@dataclass(frozen=True)
class RunDir:
    """One run on disk. Properties are paths; nothing is cached."""

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
    tracking = property(lambda self: self.path / "tracking")

    @property
    def shards(self) -> Path:
        """The prepared data: the manifest's path, or a link on hosts where it lies elsewhere."""
        link = self.path / "shards"
        return link if link.is_symlink() else Path(files.read_json(self.manifest)["shards"]["path"])

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add one row {"kind": ..., "time": unix seconds, ...} to events.jsonl; NaN and infinity become null."""
        files.append_json_line(self.events, {"kind": kind, "time": round(time.time(), 3), **_finite(fields)})

    def read_events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Rows of events.jsonl in order, all or of one kind."""
        for row in files.read_json_lines(self.events):
            if kind is None or row["kind"] == kind:
                yield row

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step` optimizer steps."""
        return Path(self.checkpoints) / f"step-{step}"

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of every checkpoint whose manifest exists, oldest first."""
        return _complete(self.checkpoints)

    def host_lock(self, host: str) -> Path:
        """What the ranks of a host hold. A name for each: on a shared disk all of them lie in one directory."""
        return self.path / f".lock-{host}"

    def continued_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of what this run goes on from: the checkpoint of a run with another plan, or nothing."""
        return _complete(self.path / "continued")


def _finite(value: Any) -> Any:
    """The value, whose containers are JSON's, with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _complete(directory: Path) -> list[tuple[int, Path]]:
    numbered = (
        (path.parent.name.removeprefix("step-"), path.parent) for path in directory.glob("step-*/manifest.json")
    )
    return sorted((int(number), path) for number, path in numbered if number.isdigit())


@contextmanager
def reserved(runs: Path, stem: str) -> Iterator[Path]:
    """An empty directory runs/<stem>, or <stem>.2 and so on, that nobody else is given; gone when the block fails."""
    for count in itertools.count(1):
        path = runs / (stem if count == 1 else f"{stem}.{count}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def open_run(path: str | Path) -> RunDir:
    """The run directory at path. Raises UserError when it is not one."""
    run = RunDir(Path(path))
    missing = [p.name for p in (run.recipe, run.plan, run.ds_config) if not p.exists()]
    if missing:
        raise UserError(
            f"{path} is not a run directory",
            evidence=f"missing: {', '.join(missing)}",
            fix="give the directory that `finlm train` printed, runs/<name>-<time>",
        )
    return run


def newest_checkpoint(run: RunDir) -> Path:
    """Directory of the run's newest complete checkpoint. Raises UserError when it has none."""
    complete = run.complete_checkpoints()
    if not complete:
        raise UserError(
            f"{run.path} has no checkpoint yet", evidence=f"nothing complete in {run.checkpoints}", fix="train it first"
        )
    return complete[-1][1]


def complete_checkpoint(path: Path) -> Path:
    """The checkpoint at path, or the newest of the run there. Raises UserError when there is none that is complete."""
    if (path / "plan.json").is_file():
        return newest_checkpoint(RunDir(path))
    if (path / "manifest.json").is_file():
        return path
    found = sorted(beside.parent.name for beside in path.parent.glob("step-*/manifest.json"))
    raise UserError(
        f"{path} is not a complete checkpoint",
        evidence=f"no manifest.json in it; complete ones beside it: {', '.join(found) or 'none'}",
        fix="give runs/<run>/checkpoints/step-N, or a run that has one",
    )


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Hold the run for this process, again where it does already. Raises UserError when another one does, with its pid.

    Ranks hold .lock-<host> (hold, ops.launch_agent), so those of a killed `finlm train` are waited for too.
    """
    own = run.path.resolve()
    if own in _held:
        yield
        return
    with (run.path / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = holder(run)
            raise UserError(
                f"{run.path} is running now",
                evidence=f"process {pid} on {host} holds its lock",
                fix=f"wait for it, end it with `kill {pid}` on {host}, or start another run with --new",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {os.uname().nodename}\n")
        file.flush()
        _held.add(own)
        try:
            yield
        finally:
            _held.remove(own)


def holder(run: RunDir) -> tuple[str, str]:
    """(pid, system's name of the machine) of the process that holds the run, or held it last; empty without one."""
    try:
        pid, _, node = (run.path / ".lock").read_text(encoding="utf-8").strip().partition(" ")
    except FileNotFoundError:
        return "", ""
    return pid, node


def hold(run: RunDir) -> int | None:
    """Hold this host's part of the run for this rank, until it ends. None where the file system has no locks.

    Not inherited: DeepSpeed's launcher starts ranks without its descriptors.
    """
    try:
        lock = os.open(run.host_lock(host_name()), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return lock


def host_name() -> str:
    """This host's name in the run: the hostfile's, which the launcher tells its ranks, else the system's."""
    return os.environ.get(HOST_VARIABLE) or os.uname().nodename


def write_host_env(run: RunDir, host: str, env: Mapping[str, str]) -> None:
    """Write env/<host>.env. Values are single lines; nothing in them is special."""
    files.write_text(run.env / f"{host}.env", "".join(f"{name}={value}\n" for name, value in sorted(env.items())))


def apply_host_env(run_path: Path) -> None:
    """Apply env/<host>.env to os.environ. Called by the training entry before torch is imported."""
    file = run_path / "env" / f"{host_name()}.env"
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").split("\n"):
        name, separator, value = line.partition("=")
        if separator and not name.startswith("#"):
            os.environ[name.strip()] = value
