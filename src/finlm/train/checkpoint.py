"""Checkpoints of a run: saved while training goes on, proved before they are loaded, at any number of ranks.

A save copies the state of every rank to host memory (what training waits for), a thread writes and hashes it, and a
later step publishes it on all ranks at once: manifest last, rank 0's directory after all others. So a kill at any byte
leaves the checkpoints before it. A disk that is full, or fails, costs that checkpoint and not the run.

No shared disk is assumed: ranks find out which of them see the same directory; the first of them, its leader, lists,
publishes and removes what lies there. Resuming takes the newest checkpoint that all directories have, every file proved
by its hash, in parallel; a damaged one is set aside, said aloud, and the one before it is used.

Saved beside DeepSpeed's shards (master weights, moments, loss scaler, scheduler): step, tokens and data position, and
every rank's generators. The position is for people: rows are a function of the step.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finlm.base import checkpoints as disk
from finlm.base import memory
from finlm.base.checkpoints import Manifest, Part
from finlm.base.rundir import RunDir, host_name
from finlm.base.units import format_bytes
from finlm.plan.buckets import ON_HOST
from finlm.plan.plan import Plan
from finlm.recipe.schema import Checkpoint
from finlm.train import checkpoint_load, generators, groups
from finlm.train.checkpoint_store import Buffers, State, Store, sizes_of, write
from finlm.train.events import Events

MARGIN_BYTES = 1 << 28  # of disk and memory that stay free
FULL_BYTES = 1 << 20  # free on a disk that is full
RAM_SHARE = 0.9  # of the host memory that is available may become buffers
WAIT_SECONDS = 30.0  # for the checkpoint before; longer is an incident
THREADS = 16


@dataclass
class Saving:
    """A save on its way to the disk."""

    step: int
    began: float
    stall_seconds: float
    parts: Future[dict[str, Part]]


class Checkpoints:
    """The checkpoints of a run as one rank sees them; every method is called by all ranks together."""

    def __init__(self, engine: Any, run: RunDir, plan: Plan, keep: Checkpoint, events: Events) -> None:
        self.engine, self.run, self.plan, self.keep, self.events = engine, run, plan, keep, events
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.members = groups.sharing(run.checkpoints)
        self.leads = self.rank == self.members[0]
        self._clean()
        self.threads = max(1, min(THREADS, (os.cpu_count() or 1) // groups.gathered(host_name()).count(host_name())))
        self.store = Store()
        self.store.mmap = plan.device == "cuda" and plan.offload_optimizer not in ON_HOST
        engine.checkpoint_engine = self.store
        engine._copy_recovery_script = lambda *_: None  # it unpickles without weights_only; `finlm export` does its job
        # One rank a directory writes the model states: with DeepSpeed's use_node_local_storage one of every host would,
        # into one file when hosts share a disk. And it looks for model states by pattern and reads them twice: under
        # this name it is given them.
        engine.save_non_zero_checkpoint = self.leads or plan.zero_stage == 3
        engine._get_all_ckpt_names = lambda folder, tag: [str(Path(folder) / tag / disk.MANIFEST)]
        self.buffers = Buffers(torch.device(plan.device))
        self.asynchronous = keep.asynchronous and keep.every_steps is not None
        self.bytes_here: int | None = None  # of a checkpoint in this directory; None until a step was taken
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.saving: Saving | None = None

    def _clean(self) -> None:
        """Remove what killed runs left half-written, before anything is saved or loaded."""
        if self.leads:
            for path in (*self.run.checkpoints.glob(".rank-*"), *self.run.checkpoints.glob(".step-*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        distributed.barrier()

    def save(self, step: int) -> None:
        """Start a checkpoint of the state after `step` steps; returns when the state is copied."""
        called, former = time.monotonic(), self.saving
        self.finish()
        began = time.monotonic()
        if former is not None and began - called > WAIT_SECONDS:
            detail = f"{began - called:.0f} s until the checkpoint of step {former.step} was written"
            self.tell(step, "training waited for the disk", f"{detail}: raise checkpoint.every_steps, or a faster disk")
        self._measure_once()
        asynchronous = self.asynchronous and self.bytes_here is not None
        if problems := self.told(self._room(step)):
            self._not_saved(step, problems)
            return
        self.buffers.begin()
        self.store.place = self.buffers.place if asynchronous else torch.Tensor.detach
        states = self._states(step)
        if asynchronous and self.plan.device == "cuda":
            torch.cuda.synchronize()
        parts = self.pool.submit(self._write, disk.aside(self.run.checkpoint(step)), states)
        self.saving = Saving(step, began, time.monotonic() - called, parts)
        if not asynchronous:
            self.finish()

    def resume(self) -> int:
        """Load the newest whole checkpoint; the step to go on from. Raises UserError as checkpoint_load.newest does."""
        found = checkpoint_load.newest(self)
        if found is None:
            return 0
        checkpoint_load.load(self, *found)
        return found[1].step

    def roll_back(self, at_most: int) -> int | None:
        """Load the newest whole checkpoint of this step or an earlier one; its step, None without one.

        Later ones are removed: they belong to the steps that are taken back.
        """
        self.finish()
        found = checkpoint_load.newest(self, at_most)
        if found is None:
            return None
        checkpoint_load.load(self, *found)
        if self.leads:
            for step, directory in self.run.complete_checkpoints():
                if step > found[1].step:
                    disk.remove(directory)
        distributed.barrier()
        return found[1].step

    def poll(self) -> None:
        """Publish what is written by now; to be called after every step."""
        self._measure_once()
        if self.saving is not None:
            done = torch.tensor(float(self.saving.parts.done()), device=self.engine.device)
            distributed.all_reduce(done, distributed.ReduceOp.MIN)
            if done.item():
                self._conclude()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written and publish it."""
        if self.saving is not None:
            self._conclude()
        self.pool.submit(lambda: None).result()  # and for the removal of old ones

    def told(self, problem: str) -> list[str]:
        """The problems that ranks have, on every rank."""
        return [each for each in groups.gathered(problem) if each]

    def _states(self, step: int) -> dict[str, State]:
        """What this rank saves, by file name; tensors by the store's `place`."""
        directory = self.run.checkpoint(step)
        self.engine.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)
        loop: dict[str, Any] = {
            "step": step,
            "tokens": step * self.plan.tokens_per_step,
            "generators": generators.state(),
        }
        loop["next_row_of_the_order"] = loop["tokens"] // self.plan.sequence_length
        return self.store.taken() | {f"loop_rank_{self.rank}.pt": loop}

    def _measure_once(self) -> None:
        """Sizes of a save; decides whether copies of it fit the host's memory.

        They are known once the optimizer has stepped: where the first steps are skipped there are no moments yet.
        """
        if self.bytes_here is not None or not self.engine.was_step_applied():
            return
        self.store.place = torch.Tensor.detach
        large, total = sizes_of(self._states(0))
        found = groups.gathered((host_name(), total, memory.available_bytes(), self.rank in self.members))
        self.bytes_here = sum(found[rank][1] for rank in self.members)
        if not self.asynchronous:
            return
        for host in dict.fromkeys(name for name, *_ in found):
            needed = sum(size for name, size, *_ in found if name == host)
            free = int(RAM_SHARE * min(available for name, _, available, _ in found if name == host))
            if needed + MARGIN_BYTES > free:
                self.asynchronous = False
                detail = f"{host}: a copy of the state takes {format_bytes(needed)}, {format_bytes(free)} can be used; "
                self.tell(0, "checkpoints are saved while training waits", detail + "training waits for the disk")
        if self.asynchronous:
            self.buffers.reserve(large)

    def _room(self, step: int) -> str:
        """Why a checkpoint has no room on this directory's disk; the leader asks, empty when it has."""
        if not self.leads:
            return ""
        shutil.rmtree(disk.aside(self.run.checkpoint(step)), ignore_errors=True)
        free, needed = shutil.disk_usage(self.run.checkpoints).free, (self.bytes_here or 0) + MARGIN_BYTES // 64
        if free >= needed:
            return ""
        return f"{host_name()}: {format_bytes(needed)} needed at {self.run.checkpoints}, {format_bytes(free)} free"

    def _write(self, directory: Path, states: dict[str, State]) -> dict[str, Part]:
        """Write and hash this rank's files, in the thread. Removes them and raises OSError when the disk fails."""
        paths = [directory / name for name in states]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path, state in zip(paths, states.values(), strict=True):
                write(state, path)
            hashes = disk.sha256(paths, self.threads)
            return {path.name: Part(path.stat().st_size, hashes[path], self.rank) for path in paths}
        except (OSError, RuntimeError) as error:  # torch's writer hides the number of the system's error
            free = shutil.disk_usage(self.run.checkpoints).free
            for path in paths:
                path.unlink(missing_ok=True)
            hidden = os.strerror(errno.ENOSPC) if free < FULL_BYTES else str(error).partition("\n")[0]
            why = error.strerror if isinstance(error, OSError) else hidden
            raise OSError(errno.EIO, f"{host_name()}: {why} ({format_bytes(free)} free)") from None

    def _conclude(self) -> None:
        """Publish the checkpoint when every rank wrote its part, else remove it and go on."""
        saving = self.saving
        assert saving is not None
        self.saving = None
        failure = saving.parts.exception()
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        found = groups.gathered((str(getattr(failure, "strerror", "") or ""), {} if failure else saving.parts.result()))
        problems = [problem for problem, _ in found if problem]
        directory = self.run.checkpoint(saving.step)
        parts = {name: part for rank in self.members for name, part in found[rank][1].items()}
        layout = self.world_size, self.plan.zero_stage, self.plan.offload_optimizer
        manifest = Manifest(saving.step, *layout, dict(sorted(parts.items())))
        for first in (False, True):  # rank 0's directory is the last one that counts
            mine = self.leads and (self.rank == 0) == first
            problems = problems or self.told(_attempt(directory, manifest) if mine else "")
        if problems:
            if self.leads:
                shutil.rmtree(disk.aside(directory), ignore_errors=True)
                disk.remove(directory)
            self._not_saved(saving.step, problems)
            return
        if self.leads:
            steps = [step for step, _ in self.run.complete_checkpoints()]
            for step in disk.superseded(steps, self.keep.keep_last, self.keep.keep_every_steps):
                self.pool.submit(disk.remove, self.run.checkpoint(step))
        self.events.record(
            "checkpoint",
            step=saving.step,
            path=str(directory),
            bytes=manifest.bytes,
            seconds=round(time.monotonic() - saving.began, 3),
            stall_seconds=round(saving.stall_seconds, 3),
        )

    def _not_saved(self, step: int, problems: list[str]) -> None:
        detail = f"{'; '.join(dict.fromkeys(problems))}; training goes on, the next checkpoint is tried in its turn"
        self.tell(step, "checkpoint not saved", detail)

    def tell(self, step: int, what: str, detail: str) -> None:
        """An incident: in the log and in events.jsonl."""
        if self.rank == 0:
            print(f"step {step}: {what}: {detail}", flush=True)
        self.events.record("incident", step=step, what=what, detail=detail)


def _attempt(directory: Path, manifest: Manifest) -> str:
    """Publish; what the disk has against it."""
    try:
        disk.publish(directory, manifest)
    except OSError as error:
        return f"{host_name()}: {error.strerror}"
    return ""
