"""`finlm verify-resume`: the proof that a killed run, resumed, is the run that was never killed.

Trains a recipe twice, once undisturbed, once with SIGKILL for its launcher and all ranks at random moments (every other
kill while a checkpoint is being written) and the same command after each. Then the rows that were fed, the losses and
the shards of the last checkpoint (weights, moments, loss scaler, generators) are compared: the rows must be equal
everywhere, losses and shards where arithmetic is reproducible (CPU; GPUs with train.deterministic).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, locked

PATIENCE_SECONDS = 3600.0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: what was going on, the last step before it, and what the next launch went on from."""

    moment: str
    after_step: int
    resumed_from: int


@dataclass(frozen=True)
class Verdict:
    """What was compared; differing steps are named by the first one."""

    steps: int
    kills: tuple[Kill, ...]
    first_other_rows: int | None
    first_other_loss: int | None
    other_files: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """True when nothing differs."""
        return self.first_other_rows is None and self.first_other_loss is None and not self.other_files

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"equal": self.is_equal, **asdict(self)}


def run(recipe: str, sets: Sequence[str], kills: int, runs: Path | None, seed: int) -> Verdict:
    """Train undisturbed and killed below runs (None: a scratch directory) and compare.

    Raises UserError when the undisturbed run fails, or when runs holds something already.
    """
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
            return _run(recipe, sets, kills, Path(scratch), seed)
    if runs.exists() and any(runs.iterdir()):
        raise UserError(f"{runs} is not empty", fix="give a new directory to --runs")
    return _run(recipe, sets, kills, runs, seed)


def _run(recipe: str, sets: Sequence[str], kills: int, scratch: Path, seed: int) -> Verdict:
    options = [part for one in sets for part in ("--set", one)]
    whole = _train(recipe, options, scratch / "undisturbed")
    reference = _only(scratch / "undisturbed")
    if whole:
        screen.say((scratch / "undisturbed.log").read_text(encoding="utf-8", errors="replace")[-4000:])
        raise UserError(
            "the undisturbed run failed, so there is nothing to compare with",
            evidence=f"`finlm train` ended with {whole}",
            fix="read its words above, or run `finlm train` on it",
        )
    assert reference is not None
    steps = _steps(reference)
    chance = random.Random(seed)
    found = []
    for number in range(kills):
        moment = _killed(recipe, options, scratch / "killed", chance, len(steps), while_saving=number % 2 == 1)
        if moment is None:
            break  # it finished first
        found.append(moment)
        screen.say(f"kill {number + 1} of {kills}: {moment[0]}, after step {moment[1]}")
    code = _train(recipe, options, scratch / "killed")
    other = _only(scratch / "killed")
    if code or other is None:
        raise UserError(
            "the killed run did not end", evidence=f"`finlm train` ended with {code}", fix=f"read {scratch}"
        )
    return _compared(reference, other, steps, found)


def _compared(reference: RunDir, other: RunDir, steps: dict[int, Any], found: list[tuple[str, int]]) -> Verdict:
    theirs = _steps(other)
    starts = [row["step"] for row in other.read_events("start")][1:]
    kills = tuple(Kill(*one, start) for one, start in zip(found, starts, strict=False))
    rows, losses = (
        next((step for step in steps if step not in theirs or steps[step][key] != theirs[step][key]), None)
        for key in ("rows_crc", "loss")
    )
    last = max(steps)
    ours, its = (Manifest.read(each.checkpoint(last)).files for each in (reference, other))
    files = sorted(name for name in {*ours, *its} if ours.get(name) != its.get(name))
    return Verdict(last, kills, rows, losses, tuple(files))


def _steps(run: RunDir) -> dict[int, dict[str, Any]]:
    """The step rows that count, by step: a repeated step's last one."""
    return {row["step"]: row for row in run.read_events("step")}


def _command(recipe: str, options: Sequence[str], runs: Path) -> list[str]:
    return [sys.executable, "-m", "finlm", "train", recipe, *options, "--runs", str(runs)]


def _train(recipe: str, options: Sequence[str], runs: Path) -> int:
    """Train to the end; the exit code. Its words go to a file."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs.with_suffix(".log")).open("ab") as log:
        return subprocess.run(_command(recipe, options, runs), stdout=log, stderr=log, check=False).returncode


def _killed(
    recipe: str, options: Sequence[str], runs: Path, chance: random.Random, steps: int, while_saving: bool
) -> tuple[str, int] | None:
    """Train until a random moment, then SIGKILL the launcher; (moment, last step), None when the run ended before.

    The ranks die with the launcher: each has asked the kernel for it. The moment is a random time after a random step,
    or after the appearance of a half-written checkpoint.
    """
    runs.mkdir(parents=True, exist_ok=True)
    former = _last_step(runs)
    wanted = min(steps - 1, former + chance.randint(1, max(1, steps // 4)))
    with (runs.with_suffix(".log")).open("ab") as log:
        process = subprocess.Popen(_command(recipe, options, runs), stdout=log, stderr=log, start_new_session=True)
    until, began = time.monotonic() + PATIENCE_SECONDS, time.time()
    try:
        while process.poll() is None and time.monotonic() < until:
            saving = next(runs.glob("*/checkpoints/.step-*.saving"), None)
            is_new = _last_step(runs, began) >= wanted
            if is_new and (saving is not None or not while_saving):
                moment = f"while {saving.name[1:].removesuffix('.saving')} was being written" if saving else "training"
                time.sleep(chance.uniform(0.0, 0.05 if saving else 0.3))
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _wait_for_the_end(runs)
                return moment, _last_step(runs)
            time.sleep(0.002)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_the_end(runs: Path) -> None:
    """Until the run's lock is free: its ranks have ended too."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            run = _only(runs)
            if run is None:
                return
            with locked(run):
                return
        except UserError:
            time.sleep(0.1)


def _last_step(runs: Path, since: float = 0.0) -> int:
    """The last step recorded since a moment; 0 without one."""
    run = _only(runs)
    if run is None or not run.events.exists():
        return 0
    return max((row["step"] for row in run.read_events("step") if row["time"] > since), default=0)


def _only(runs: Path) -> RunDir | None:
    """The run below runs/, without those that recipes were trained for that this one starts from."""
    found = sorted((path for path in runs.glob("*") if (path / "plan.json").exists()), key=lambda p: p.stat().st_mtime)
    return RunDir(found[-1]) if found else None


def show(verdict: Verdict) -> None:
    """The table for people."""
    for number, kill in enumerate(verdict.kills, 1):
        screen.say(
            f"kill {number:<3} {kill.moment:<44} after step {kill.after_step:>6}  resumed from {kill.resumed_from}"
        )
    rows = (
        ("rows fed, every step", verdict.first_other_rows),
        ("loss, every step", verdict.first_other_loss),
    )
    for what, step in rows:
        screen.say(f"{what:<52} {'equal' if step is None else f'differs first at step {step}'}")
    files = ", ".join(verdict.other_files)
    screen.say(
        f"{'shards after the last step: weights, moments, state':<52} {'equal' if not files else f'differ: {files}'}"
    )
