"""Checkpoints: DeepSpeed's sharded state plus the step, complete when manifest.json exists.

The manifest (sizes and sha256 of every file) is written last, so a kill during saving leaves a directory that resume
does not see. The data position needs no saving: it is a function of the step.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

from torch import distributed

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir


def save(engine: Any, run: RunDir, step: int, keep_last: int) -> None:
    """Write checkpoints/step-N from all ranks, publish it, and remove older ones beyond keep_last."""
    started = time.monotonic()
    directory = run.checkpoint(step)
    if distributed.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)  # what a killed save left
        run.checkpoints.mkdir(exist_ok=True)
    distributed.barrier()
    engine.save_checkpoint(str(run.checkpoints), tag=directory.name, client_state={"step": step}, save_latest=False)
    distributed.barrier()
    if distributed.get_rank() == 0:
        parts = sorted(path for path in directory.rglob("*") if path.is_file())
        listed = {p.relative_to(directory).as_posix(): (p.stat().st_size, files.sha256_file(p)) for p in parts}
        manifest = {
            "step": step,
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in listed.items()},
        }
        files.write_json(directory / "manifest.json", manifest)
        for _, old in run.complete_checkpoints()[:-keep_last]:
            (old / "manifest.json").unlink()  # incomplete first, so that no half-removed one counts
            shutil.rmtree(old)
        total = sum(size for size, _ in listed.values())
        run.append_event(
            "checkpoint", step=step, path=str(directory), bytes=total, seconds=round(time.monotonic() - started, 3)
        )
    distributed.barrier()


def resume(engine: Any, run: RunDir) -> int:
    """Load the newest complete checkpoint into the engine; the step to go on from, 0 without one."""
    complete = run.complete_checkpoints()
    if not complete:
        return 0
    _, directory = complete[-1]
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
