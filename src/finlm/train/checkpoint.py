"""Checkpoints: DeepSpeed's sharded state plus the step, complete when manifest.json exists.

The manifest (sizes and sha256 of every file) is written last, so a kill during saving leaves a directory that resume
does not see. The data position needs no saving: it is a function of the step.

No shared disk is assumed: the first rank of every host lists and removes what its host holds, rank 0's manifest is the
last one, and ranks resume from the newest checkpoint that all of them have.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from torch import distributed

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir


def save(engine: Any, run: RunDir, step: int, keep_last: int) -> None:
    """Write checkpoints/step-N from all ranks, publish it, and remove older ones beyond keep_last."""
    started = time.monotonic()
    directory = run.checkpoint(step)
    rank, first_of_host = distributed.get_rank(), os.environ["LOCAL_RANK"] == "0"
    if first_of_host:
        shutil.rmtree(directory, ignore_errors=True)  # what a killed save left
        run.checkpoints.mkdir(exist_ok=True)
    distributed.barrier()
    engine.save_checkpoint(str(run.checkpoints), tag=directory.name, client_state={"step": step}, save_latest=False)
    distributed.barrier()
    manifest = _listed(directory, step) if first_of_host else {}
    distributed.barrier()
    if first_of_host and rank != 0:
        _publish(run, step, manifest, keep_last)
    distributed.barrier()
    if rank == 0:
        _publish(run, step, manifest, keep_last)
        total = sum(entry["bytes"] for entry in manifest["files"].values())
        run.append_event(
            "checkpoint", step=step, path=str(directory), bytes=total, seconds=round(time.monotonic() - started, 3)
        )
    distributed.barrier()


def _listed(directory: Path, step: int) -> dict[str, Any]:
    """The manifest of what this host holds of a checkpoint. Made before any is written: hosts may share a disk."""
    listed = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        listed[name] = {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
    return {"step": step, "files": listed}


def _publish(run: RunDir, step: int, manifest: dict[str, Any], keep_last: int) -> None:
    """Make this host's part of a checkpoint count, and remove the oldest ones."""
    files.write_json(run.checkpoint(step) / "manifest.json", manifest)
    for _, old in run.complete_checkpoints()[:-keep_last]:
        (old / "manifest.json").unlink(missing_ok=True)  # incomplete first, so that no half-removed one counts
        shutil.rmtree(old, ignore_errors=True)  # on a shared disk the first ranks of all hosts do this


def resume(engine: Any, run: RunDir) -> int:
    """Load the newest checkpoint that all ranks have into the engine; the step to go on from, 0 without one."""
    complete = dict(run.complete_checkpoints())
    every: list[list[int]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(every, sorted(complete))
    if not every[0]:  # rank 0's manifest is written last
        return 0
    common = set(every[0]).intersection(*every)
    if not common:
        without = min(rank for rank, steps in enumerate(every) if not set(steps) & set(every[0]))
        raise UserError(
            f"rank {without} has none of the checkpoints that rank 0 has",
            evidence=f"rank 0: steps {every[0]}; rank {without}: {every[without] or 'none'}",
            fix=f"bring {run.checkpoints} back to the host of rank {without}, or start another run with --new",
        )
    directory = complete[max(common)]
    for name, expected in files.read_json(directory / "manifest.json")["files"].items():
        part = directory / name
        if not part.exists() or part.stat().st_size != expected["bytes"]:
            raise UserError(
                f"checkpoint {directory} is damaged",
                evidence=f"{name}: expected {expected['bytes']} bytes, "
                + (f"found {part.stat().st_size}" if part.exists() else "the file is missing"),
                fix=f"remove {directory} to go on from the checkpoint before it",
            )
    loaded, state = engine.load_checkpoint(str(run.checkpoints), tag=directory.name)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed did not load {directory}")
    return int(state["step"])
