"""`finlm verify-resume`: the proof that a killed run, resumed, is the run that was never killed.

Trains a recipe twice, once undisturbed, once with SIGKILL for `finlm train` and all its processes on this machine at
random moments (every other kill while a checkpoint is being written) and the same command after each. Then the rows
that were fed (pretraining records them), the losses and the shards of the last checkpoint (weights, moments, loss
scaler, generators) are compared: the rows must be equal everywhere, losses and shards where arithmetic is reproducible
(CPU; GPUs with train.deterministic). A recipe that it starts from is trained before, once and undisturbed.
"""

from __future__ import annotations

import contextlib
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

from finlm import lineage
from finlm.base import screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.ops import launch_ranks
from finlm.recipe import parents
from finlm.recipe import recipe as recipes

PATIENCE_SECONDS = 3600.0
END_SECONDS = 60.0


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

    Raises UserError when a run does not get to its end, or when runs holds something already.
    """
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
            return _run(recipe, sets, kills, Path(scratch), seed)
    if runs.exists() and any(runs.iterdir()):
        raise UserError(f"{runs} is not empty", fix="give a new directory to --runs")
    return _run(recipe, sets, kills, runs, seed)


def _run(recipe: str, sets: Sequence[str], kills: int, scratch: Path, seed: int) -> Verdict:
    options = [part for one in [*sets, *_start(recipe, sets, scratch / "start")] for part in ("--set", one)]
    reference = _trained(recipe, options, scratch / "undisturbed")
    steps = len(_steps(reference))
    chance = random.Random(seed)
    found = []
    for number in range(kills):
        moment = _killed(recipe, options, scratch / "killed", chance, steps, while_saving=number % 2 == 1)
        if moment is None:
            break  # it finished first
        found.append(moment)
        screen.say(f"kill {number + 1} of {kills}: {moment[0]}, after step {moment[1]}")
    other = _only(scratch / "killed")
    if other is None or not lineage.is_trained(other):
        other = _trained(recipe, options, scratch / "killed")
    return compared(reference, other, found)


def _start(recipe: str, sets: Sequence[str], runs: Path) -> list[str]:
    """Train the recipe that this one starts from, if it names one; what must be set to start from that."""
    parent = recipes.load(recipe, sets).recipe.model.init_from
    if parent is None or not parents.is_recipe(parent):
        return []
    screen.say(f"{recipe} starts from {parent}: that is trained first, once")
    code = _train(parent, [], runs)
    found = parents.find(recipes.load(parent).recipe, runs)
    if found is None:
        raise _failure(parent, code, runs)
    return [f"model.init_from={found.absolute()}"]


def _trained(recipe: str, options: Sequence[str], runs: Path) -> RunDir:
    """Train to the end, whatever numbers come out: missing the recipe's expect: is exit code 1 too."""
    code, run = _train(recipe, options, runs), _only(runs)
    if run is None or not lineage.is_trained(run):
        raise _failure(recipe, code, runs)
    return run


def _failure(recipe: str, code: int, runs: Path) -> UserError:
    screen.say(runs.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-4000:])
    return UserError(
        f"{recipe} was not trained to its end in {runs}, so there is nothing to compare",
        evidence=f"`finlm train` ended with {code}; its last words are above",
        fix="run `finlm train` on it",
    )


def compared(reference: RunDir, other: RunDir, found: Sequence[tuple[str, int]] = ()) -> Verdict:
    """What differs between two finished runs. found: moment and last step of each kill of the other one."""
    steps, theirs = _steps(reference), _steps(other)
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
    """Train until a random moment, then SIGKILL; (moment, last step), None when the run ended before.

    The moment is a random time after a random step, or after the appearance of a half-written checkpoint.
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
                _kill(process)
                return moment, _last_step(runs)
            time.sleep(0.002)
        return None
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and all below it, whatever their sessions: none may end another in good order."""
    every = [*launch_ranks.descendants(process.pid), process.pid]
    for pid in every:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + END_SECONDS
    while any(map(_is_alive, every)) and time.monotonic() < until:
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    """Not when only its exit code is left, which somebody else may never ask for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _last_step(runs: Path, since: float = 0.0) -> int:
    """The last step recorded since a moment; 0 without one."""
    run = _only(runs)
    if run is None or not run.events.exists():
        return 0
    return max((row["step"] for row in run.read_events("step") if row["time"] > since), default=0)


def _only(runs: Path) -> RunDir | None:
    """The run below runs."""
    return next((RunDir(path.parent) for path in runs.glob("*/plan.json")), None)


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
