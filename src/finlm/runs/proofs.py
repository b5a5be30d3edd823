"""Prove that a run can be repeated (`finlm reproduce`) and that a killed run resumes exactly (`finlm verify-resume`).

reproduce trains the same run again, from the code, recipe and data it recorded, and compares loss for loss. The source
files are hashed first, in seconds; if a file or the plan differs, it ends before anything is trained. The second run
uses the hosts and slots of the first run's plan and the current directory; the GPUs of a host that --include chose are
not kept.

verify-resume trains a recipe twice: once undisturbed, and once with SIGKILL for `finlm train` and all its processes at
random moments (every other kill while a checkpoint is being written) and the same command after each kill. The rows
that each step read must be equal; losses and the shards of the last checkpoint must be equal where arithmetic is
reproducible (CPU, or GPUs with train.deterministic).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from finlm.base import files, processes, screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import list_runs, lock_holder
from finlm.plan.plan import decided_keys
from finlm.recipe import cluster, parents
from finlm.recipe import recipe as recipes
from finlm.record import compare
from finlm.record.compare import Comparison
from finlm.runs import lineage

POLL_SECONDS = 0.2


def reproduce(run: RunDir, runs: Path, tolerance: float) -> Comparison:
    """Train the run again in a new directory below `runs`, with the same data and code, and compare the two runs.

    If the data prepared again differ, returns the differences without training. If the new plan differs, stops the new
    training and returns those. `tolerance` applies to the losses, in nats. Prints the new directory. Raises UserError
    when the run is not finished, its data cannot be prepared, or the new training fails.
    """
    if not run.is_trained():
        raise UserError(f"{run.path} has not finished", fix="the command that started it finishes it")
    differing = _compare_data(run)
    if differing is not None:
        return differing
    runs.mkdir(parents=True, exist_ok=True)
    former = set(runs.iterdir())
    with tempfile.TemporaryDirectory(prefix="finlm-reproduce-") as scratch:
        command = ["train", str(run.recipe.absolute()), "--new", "--runs", str(runs), *_host_args(run, Path(scratch))]
        if run.former_plans:  # those ran out of memory, and would again
            values = decided_keys(files.read_json(run.plan))
            command += [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        # Its stdout goes to stderr: ours carries the comparison, as JSON perhaps.
        with subprocess.Popen(_finlm_command(command), env=_code_env(run), stdout=sys.stderr.fileno()) as train:
            again = _wait_for_run(train, runs, former)
            other_plan = tuple(compare.plan_differences(run, again)) if again else ()
            if other_plan:
                train.terminate()
            elif again and (reason := compare.other_bits(run, compare.list_differences(run, again))):
                screen.say(f"the same bits are not promised: {reason}")
    if again is not None:
        screen.say(f"again in {again.path}")
    if other_plan:
        return Comparison(other_plan, None, ([], []))
    # Numbers that are off (exit 1) are shown by the comparison; anything else that fails ends here.
    if again is None or not again.is_trained():
        raise UserError(
            f"{run.path} could not be run again",
            evidence=f"`finlm train` ended with {train.returncode}; its words are above",
            fix="`finlm diagnose` the new run directory, or start in the directory that the run was started in",
        )
    return compare.compare(run, again, tolerance)


def _host_args(run: RunDir, scratch: Path) -> list[str]:
    """Return the command-line options for the hosts and slots of the run's plan.

    Returns [] if it ran on this machine alone and no hostfile.txt is here. Else writes a hostfile into `scratch`.
    Raises UserError if hostfile.txt cannot be read.
    """
    slots = {host["name"]: host["slots"] for host in files.read_json(run.plan)["hosts"]}
    if list(slots) == ["localhost"] and cluster.default_hostfile() is None:
        return []
    try:
        described = recipes.load(run.recipe).recipe.hosts
    except UserError:  # written by a version with other keys
        described = {}
    hostfile = scratch / "hostfile.txt"
    # The recipe may describe hosts that were left out: the hostfile must name them too. The first one is the master.
    every = slots | {name: 1 for name in described if name not in slots}
    hostfile.write_text("".join(f"{name} slots={count}\n" for name, count in every.items()), encoding="utf-8")
    return ["--hostfile", str(hostfile), "--include", "@".join(slots)]


def _wait_for_run(train: subprocess.Popen[bytes], runs: Path, former: Set[Path]) -> RunDir | None:
    """Wait until the process `train` has locked a run directory below `runs`, and return it; None when it ends before.

    `former` has the paths that existed before. Other processes may make runs there too: the lock file names its holder.
    """
    this_training = str(train.pid), os.uname().nodename
    while True:
        is_over = train.poll() is not None  # asked before the last look, which then sees everything
        for run in list_runs(runs):
            if run.path not in former and lock_holder(run) == this_training:
                return run
        if is_over:
            return None
        time.sleep(POLL_SECONDS)


def _compare_data(run: RunDir) -> Comparison | None:
    """Run `finlm prepare` again; return a Comparison if data or tokenizer differ, else None.

    Raises UserError when that fails.
    """
    command = _finlm_command(["prepare", str(run.recipe.absolute())])
    prepared = subprocess.run(command, env=_code_env(run), capture_output=True, text=True, check=False)
    if prepared.returncode != 0:
        raise UserError(
            f"the data of {run.path} cannot be prepared again",
            evidence=prepared.stderr.strip()[-2000:],
            fix="start in the directory that the run was started in, with the files of its recipe's data.sources",
        )
    shards = Path(prepared.stdout.strip().splitlines()[-1])
    counts, manifest = shards / "documents.json", files.read_json(shards / "manifest.json")
    now = {"files": files.read_json(counts).get("files") if counts.exists() else None}
    now |= {key: manifest.get(key) for key in ("tokenizer_sha256", "vocab_size", "dtype", "key")}
    recorded = {key: value for key, value in files.read_json(run.data).items() if key in now}
    differing = tuple(compare.data_differences(recorded, now))
    return Comparison(differing, None, ([], [])) if differing else None


def _finlm_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of finlm with these arguments and this interpreter."""
    return [sys.executable, "-m", "finlm", *arguments]


def _code_env(run: RunDir) -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH set so that finlm is the code in the run directory."""
    return os.environ | {"PYTHONPATH": processes.python_path(run.code, os.environ)}


PATIENCE_SECONDS = 3600.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: what the run was doing, its last step before it, and the step from which the next launch resumed."""

    moment: str
    after_step: int
    resumed_from: int


@dataclass(frozen=True)
class Verdict:
    """What differs between two runs: the first step with other rows and that with another loss, and files.

    A step is None where all are equal. `steps` is the last step, `other_files` names files of its checkpoint.
    """

    steps: int
    kills: tuple[Kill, ...]
    first_other_rows: int | None
    first_other_loss: int | None
    other_files: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.first_other_rows is None and self.first_other_loss is None and not self.other_files

    def to_json(self) -> dict[str, object]:
        """Return the verdict as `--json` prints it."""
        return {"equal": self.is_equal, **asdict(self)}


def verify_resume(recipe: str, sets: Sequence[str], kills: int, runs: Path | None, seed: int) -> Verdict:
    """Train a recipe undisturbed, and again with up to `kills` kills, below `runs`, and return how they compare.

    `runs` None means a scratch directory, removed afterwards. `sets` are --set options, `seed` draws the moments. First
    trains, once, the recipe that it starts from, if any. Raises UserError when a run does not get to its end, or when
    `runs` is not empty. Prints each kill, and the end of the log when a training fails.
    """
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
            return verify_resume(recipe, sets, kills, Path(scratch), seed)
    if runs.exists() and any(runs.iterdir()):
        raise UserError(f"{runs} is not empty", fix="give a new directory to --runs")
    options = [part for setting in [*sets, *_train_parent(recipe, sets, runs / "start")] for part in ("--set", setting)]
    reference = _train_to_end(recipe, options, runs / "undisturbed")
    steps = len(_steps(reference))
    chance = random.Random(seed)
    killed = []
    for number in range(kills):
        moment = _train_and_kill(recipe, options, runs / "killed", chance, steps, while_saving=number % 2 == 1)
        if moment is None:
            break  # it was trained to its end first
        killed.append(moment)
        screen.say(f"kill {number + 1} of {kills}: {moment[0]}, after step {moment[1]}")
    other = _find_run(runs / "killed")
    if other is None or not other.is_trained():
        other = _train_to_end(recipe, options, runs / "killed")
    return compare_finished(reference, other, killed)


def _train_parent(recipe: str, sets: Sequence[str], runs: Path) -> list[str]:
    """Train the recipe that model.init_from names, if any, and return ["model.init_from=<its export>"] for --set.

    Returns [] when it names no recipe. Raises UserError when that training fails. Prints that it trains it.
    """
    parent = recipes.load(recipe, sets).recipe.model.init_from
    if parent is None or not parents.is_recipe(parent):
        return []
    screen.say(f"{recipe} starts from {parent}: that is trained first, once")
    code = _train(parent, [], runs)
    export, _ = lineage.find_export(recipes.load(parent).recipe, runs, recipes.load)
    if export is None:
        raise _training_failure(parent, code, runs)
    return [f"model.init_from={export.absolute()}"]


def _train_to_end(recipe: str, options: Sequence[str], runs: Path) -> RunDir:
    """Train to the end and return the run; exit code 1, numbers that miss the recipe's expect:, is accepted.

    Raises UserError when the run does not get to its end, and then prints the end of the log.
    """
    code, run = _train(recipe, options, runs), _find_run(runs)
    if run is None or not run.is_trained():
        raise _training_failure(recipe, code, runs)
    return run


def _training_failure(recipe: str, code: int, runs: Path) -> UserError:
    """Print the end of the training log, <runs>.log, and return a UserError for `finlm train`'s exit code."""
    screen.say(runs.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-4000:])
    return UserError(
        f"{recipe} was not trained to its end in {runs}, so there is nothing to compare",
        evidence=f"`finlm train` ended with {code}; its last words are above",
        fix="run `finlm train` on it",
    )


def compare_finished(reference: RunDir, other: RunDir, killed: Sequence[tuple[str, int]] = ()) -> Verdict:
    """Return what differs between two finished runs. `killed` has (moment, last step) of each kill of `other`.

    Raises UserError or FileNotFoundError for a manifest of the last checkpoint that cannot be read.
    """
    steps, theirs = _steps(reference), _steps(other)
    starts = [row["step"] for row in other.read_events("start")][1:]
    kills = tuple(Kill(*kill, start) for kill, start in zip(killed, starts, strict=False))
    rows, losses = (
        next((step for step in steps if step not in theirs or steps[step][at] != theirs[step][at]), None)
        for at in range(2)
    )
    last = max(steps)
    ours, its = (Manifest.read(each.checkpoint(last)).files for each in (reference, other))
    files = sorted(name for name in {*ours, *its} if ours.get(name) != its.get(name))
    return Verdict(last, kills, rows, losses, tuple(files))


def _steps(run: RunDir) -> dict[int, tuple[int, float]]:
    """Return {step: (CRC of its rows, loss)}; of a repeated step, those recorded last."""
    return {row["step"]: (row["rows_crc"], row["loss"]) for row in run.read_events("step")}


def _train(recipe: str, options: Sequence[str], runs: Path) -> int:
    """Run `finlm train` with these options to its end and return the exit code. Appends its output to <runs>.log."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs.with_suffix(".log")).open("ab") as log:
        command = _finlm_command(["train", recipe, *options, "--runs", str(runs)])
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


def _train_and_kill(
    recipe: str, options: Sequence[str], runs: Path, chance: random.Random, steps: int, while_saving: bool
) -> tuple[str, int] | None:
    """Train until a random moment, then kill all processes; return (moment in words, last step).

    Returns None when the run was trained to its end before. The moment is a random time after a random step, of a run
    of `steps` steps; with `while_saving`, it also waits until a half-written checkpoint appears. Output is appended to
    <runs>.log. Raises UserError when the training fails, or records no step for an hour and is killed.
    """
    runs.mkdir(parents=True, exist_ok=True)
    former = _last_step(runs)
    wanted = min(steps - 1, former + chance.randint(1, max(1, steps // 4)))
    command = _finlm_command(["train", recipe, *options, "--runs", str(runs)])
    with (runs.with_suffix(".log")).open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until, began, reached = time.monotonic() + PATIENCE_SECONDS, time.time(), 0
    try:
        while process.poll() is None:
            saving = next(runs.glob("*/checkpoints/.step-*.saving"), None)
            step = _last_step(runs, began)
            if step > reached:
                reached, until = step, time.monotonic() + PATIENCE_SECONDS
            if time.monotonic() > until:
                raise UserError(
                    f"{recipe} has not finished a step for {PATIENCE_SECONDS / 60:g} minutes, and was killed",
                    evidence=f"the last step is {max(reached, former):,}; {runs.with_suffix('.log')} has its words",
                    fix=f"`finlm diagnose {runs.with_suffix('.log')}` looks for the cause",
                )
            if step >= wanted and (saving is not None or not while_saving):
                moment = f"while {saving.name[1:].removesuffix('.saving')} was being written" if saving else "training"
                time.sleep(chance.uniform(0.0, 0.05 if saving else 0.3))
                _kill(process)
                return moment, _last_step(runs)
            time.sleep(0.002)  # a small checkpoint is half written for a few ms only
        run = _find_run(runs)
        if run is None or not run.is_trained():
            raise _training_failure(recipe, process.returncode, runs)
        return None
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and all below it, other sessions too, and wait up to 60 s for their end."""
    every = [*processes.descendants(process.pid), process.pid]
    for pid in every:
        processes.send_signal(pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + END_SECONDS
    while any(map(processes.is_alive, every)) and time.monotonic() < until:
        time.sleep(0.01)


def _last_step(runs: Path, since: float = 0.0) -> int:
    """Return the last step that the newest run below `runs` recorded after `since` (unix seconds), or 0."""
    run = _find_run(runs)
    if run is None or not run.events.exists():
        return 0
    return max((row["step"] for row in run.read_events("step") if row["time"] > since), default=0)


def _find_run(runs: Path) -> RunDir | None:
    """Return the newest run below `runs`, or None if there is none."""
    return next(iter(list_runs(runs)), None)


def show_verdict(verdict: Verdict) -> None:
    """Print the kills, and a table of what is equal and what differs."""
    for number, kill in enumerate(verdict.kills, 1):
        screen.show(
            f"kill {number:<3} {kill.moment:<44} after step {kill.after_step:>6}  resumed from {kill.resumed_from}"
        )
    rows = (("rows fed, every step", verdict.first_other_rows), ("loss, every step", verdict.first_other_loss))
    for what, step in rows:
        screen.show(f"{what:<52} {'equal' if step is None else f'differs first at step {step}'}")
    files = ", ".join(verdict.other_files)
    screen.show(
        f"{'shards after the last step: weights, moments, state':<52} {'equal' if not files else f'differ: {files}'}"
    )
