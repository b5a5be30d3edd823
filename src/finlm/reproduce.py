"""`finlm reproduce RUN`: the same run again, from the code, recipe and data it recorded, compared loss for loss.

The data comes first, in seconds: its source files are hashed as the run recorded them, and one that differs ends it
before anything is trained; so does another plan. The second run is an ordinary one, made by the code the first run
carries, on the hosts and slots of its plan, in the current directory (where relative paths of the recipe must lead to
the same files). Which GPUs of a host --include chose is not kept: it takes the first ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, holder
from finlm.recipe import cluster
from finlm.recipe import recipe as recipes
from finlm.record import compare
from finlm.record.compare import Comparison

POLL_SECONDS = 0.2


def reproduce(run: RunDir, runs: Path, tolerance: float) -> Comparison:
    """Run it again below runs and compare. Raises UserError for a run that did not finish, or cannot run here."""
    if not any(row["status"] == "finished" for row in run.read_events("end")):
        raise UserError(f"{run.path} has not finished", fix="the command that started it finishes it")
    differing = _data_again(run)
    if differing is not None:
        return differing
    runs.mkdir(parents=True, exist_ok=True)
    former = set(runs.iterdir())
    with tempfile.TemporaryDirectory(prefix="finlm-reproduce-") as scratch:
        command = ["train", str(run.recipe.absolute()), "--new", "--runs", str(runs), *_hosts(run, Path(scratch))]
        with subprocess.Popen(**_process(run, command), stdout=sys.stderr.fileno()) as train:
            again = _begun(train, runs, former)
            other_plan = tuple(compare.plans(run, again)) if again else ()
            if other_plan:
                train.terminate()
    if again is not None:
        screen.say(f"again in {again.path}")
    if other_plan:
        return Comparison(other_plan, None, ([], []))
    # Numbers that are off (exit 1) are shown by the comparison; anything else that fails ends here.
    if again is None or not any(row["status"] == "finished" for row in again.read_events("end")):
        raise UserError(
            f"{run.path} could not be run again",
            evidence=f"`finlm train` ended with {train.returncode}; its words are above",
            fix="`finlm diagnose` the new run directory, or start in the directory that the run was started in",
        )
    return compare.runs(run, again, tolerance)


def _hosts(run: RunDir, scratch: Path) -> list[str]:
    """The options that give a training the hosts and slots of the run's plan; none where it is this machine alone."""
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


def _begun(train: subprocess.Popen[bytes], runs: Path, former: Set[Path]) -> RunDir | None:
    """The run directory that a training holds, as soon as it does; None when it ends before. Others may make theirs."""
    own = str(train.pid), os.uname().nodename
    while True:
        is_over = train.poll() is not None  # asked before the last look, which then sees everything
        for lock in runs.glob("*/.lock"):
            run = RunDir(lock.parent)
            if run.path not in former and holder(run) == own:
                return run
        if is_over:
            return None
        time.sleep(POLL_SECONDS)


def _data_again(run: RunDir) -> Comparison | None:
    """Prepare the data; the comparison of the sources when they are not those of the run, else None."""
    command = _process(run, ["prepare", str(run.recipe.absolute())])
    prepared = subprocess.run(**command, capture_output=True, text=True, check=False)
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
    found = tuple(compare.data(recorded, now))
    return Comparison(found, None, ([], [])) if found else None


def _process(run: RunDir, arguments: Sequence[str]) -> dict[str, Any]:
    """A command of finlm by the code that the run carries, for subprocess."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(run.code), os.environ.get("PYTHONPATH"))))}
    return {"args": [sys.executable, "-m", "finlm", *arguments], "env": env}
