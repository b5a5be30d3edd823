"""`finlm reproduce RUN`: the same run again, from the code, recipe and data it recorded, compared loss for loss.

The data comes first, in seconds: its source files are hashed as the run recorded them, and one that differs ends it
before anything is trained. The second run is an ordinary one, made by the code the first run carries, in the current
directory (where relative paths of the recipe must lead to the same files).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.record import compare
from finlm.record.compare import Comparison


def reproduce(run: RunDir, runs: Path, tolerance: float) -> Comparison:
    """Run it again below runs and compare. Raises UserError for a run that did not finish, or cannot run here."""
    if not any(row["status"] == "finished" for row in run.read_events("end")):
        raise UserError(f"{run.path} has not finished", fix="the command that started it finishes it")
    differing = _data_again(run)
    if differing is not None:
        return differing
    runs.mkdir(parents=True, exist_ok=True)
    before = set(runs.iterdir())
    # Numbers that are off (exit 1) are shown by the comparison; anything else that fails ends here.
    done = _finlm(run, "train", str(run.recipe.absolute()), "--new", "--runs", str(runs))
    made = sorted(path for path in set(runs.iterdir()) - before if (path / "events.jsonl").exists())
    again = RunDir(made[-1]) if made else None
    if again is None or not any(row["status"] == "finished" for row in again.read_events("end")):
        raise UserError(
            f"{run.path} could not be run again",
            evidence=f"`finlm train` ended with {done.returncode}; its words are above",
            fix="`finlm diagnose` the new run directory, or start in the directory that the run was started in",
        )
    screen.say(f"again in {again.path}")
    return compare.runs(run, again, tolerance)


def _data_again(run: RunDir) -> Comparison | None:
    """Prepare the data; the comparison of the sources when they are not those of the run, else None."""
    prepared = _finlm(run, "prepare", str(run.recipe.absolute()), capture=True)
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


def _finlm(run: RunDir, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """A command by the code that the run carries."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(run.code), os.environ.get("PYTHONPATH"))))}
    command: Sequence[str] = [sys.executable, "-m", "finlm", *arguments]
    output = subprocess.PIPE if capture else sys.stderr.fileno()
    errors = subprocess.PIPE if capture else None
    return subprocess.run(command, env=env, stdout=output, stderr=errors, text=True, check=False)
