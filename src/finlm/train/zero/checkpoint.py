"""Save a run's checkpoints while training goes on, and prove them before they are loaded, at any number of ranks.

A save copies the state of every rank to host memory (what training waits for), a thread writes and hashes it, and a
later step publishes it on all ranks at once: manifest last, rank 0's directory after all others. So a kill at any byte
leaves the checkpoints before it. A disk that is full, or fails, costs that checkpoint and not the run.

No shared disk is assumed: of the ranks that see the same directory the first, its leader, lists, publishes and removes
what lies there. Resuming takes the newest checkpoint that all directories have, every file proved by its hash. Those in
the hosts' memory (in_memory.py) are written, published and found in the same way.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finlm.base import checkpoints as disk
from finlm.base import files
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import UserError, reason
from finlm.base.processes import available_bytes
from finlm.base.rundir import STEP_VARIABLE, RunDir, host_name
from finlm.base.units import format_bytes
from finlm.plan.plan import ON_HOST, Plan
from finlm.recipe.settings import CheckpointSettings
from finlm.train import entry
from finlm.train.entry import Events, is_due
from finlm.train.model import causal_lm
from finlm.train.zero import storage
from finlm.train.zero.in_memory import InMemory
from finlm.train.zero.storage import Buffers, State, Store, sizes_of

MARGIN_BYTES = 1 << 28  # of disk and memory that stay free
RAM_SHARE = 0.9  # of the host memory that is available may become buffers
WAIT_SECONDS = 30.0  # for the checkpoint before; longer is an incident
THREADS = 16


@dataclass
class Saving:
    """A checkpoint being written to disk or to `memory`; `began` is monotonic; `parts` are this rank's once written."""

    step: int
    began: float
    stall_seconds: float
    parts: Future[dict[str, Part]]
    memory: InMemory | None = None


class Checkpoints:
    """The checkpoints of a run as one rank sees them; all ranks call its public methods together."""

    def __init__(self, engine: Any, run: RunDir, plan: Plan, keep: CheckpointSettings, events: Events) -> None:
        """Remove half-written checkpoints, set up those in memory, replace the engine's save and load. Collective."""
        self.engine, self.run, self.plan, self.keep, self.events = engine, run, plan, keep, events
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.layout = self.world_size, plan.zero_stage, plan.offload_optimizer
        self.members = entry.ranks_sharing(run.checkpoints)
        self.leads = self.rank == self.members[0]
        self._clean()
        self.memory = InMemory(run, plan, keep) if keep.memory_minutes is not None else None
        share = (os.cpu_count() or 1) // entry.gather_values(host_name()).count(host_name())
        self.threads = max(1, min(THREADS, share))
        self.store = Store()
        self.store.mmap = plan.device == "cuda" and plan.offload_optimizer not in ON_HOST
        engine.checkpoint_engine = self.store
        engine._copy_recovery_script = lambda *_: None  # it unpickles without weights_only; `finlm export` does its job
        # One rank a directory writes the model states: with DeepSpeed's use_node_local_storage one of every host would,
        # into one file when hosts share a disk. And it looks for model states by pattern and reads them twice: under
        # this name it is given them.
        leads_memory = self.memory is not None and self.memory.leads
        engine.save_non_zero_checkpoint = self.leads or leads_memory or plan.zero_stage == 3
        engine._get_all_ckpt_names = lambda folder, tag: [str(Path(folder) / tag / disk.MANIFEST)]
        self.buffers = Buffers(torch.device(plan.device))
        is_repeated = keep.every_steps is not None or self.memory is not None
        self.asynchronous = keep.asynchronous and plan.asynchronous_checkpoints and is_repeated
        self.bytes_here: int | None = None  # of a checkpoint in this directory; None until a step was taken
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.saving: Saving | None = None
        self.watch_state: Callable[[], State] = dict  # plain values, alike on all ranks, for every checkpoint
        self.watch_loaded: State | None = None  # of the checkpoint loaded last; None where it has none
        self.rolls_back = False  # then one that a signal asked for does not count among those that are kept
        if self.memory is not None and self.memory.problem:
            self._record_failure(0, [self.memory.problem], self.memory)

    def _clean(self) -> None:
        """Remove what killed runs left half-written, before anything is saved or loaded. All ranks must call it."""
        if self.leads:
            for path in (*self.run.checkpoints.glob(".rank-*"), *self.run.checkpoints.glob(".step-*")):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        distributed.barrier()

    def save_if_due(self, step: int, at_once: bool) -> None:
        """Save after `step` steps: to disk if due or `at_once`, else to memory if due and no save runs. Collective."""
        self._measure_once()
        if at_once or is_due(step, self.keep.every_steps):
            self.save(step)
        elif self.memory is not None and self.memory.is_due(step) and self.saving is None:
            self.save(step, self.memory)

    def save(self, step: int, memory: InMemory | None = None) -> None:
        """Start a checkpoint of the state after `step` steps; return when it is copied (asynchronous) or saved.

        Finishes the last save first, and records an incident if that takes over WAIT_SECONDS. Saves to `memory` if
        given, else to disk. Without room, only records and prints why. Collective.
        """
        called, previous = time.monotonic(), self.saving
        self.finish()
        began = time.monotonic()
        if previous is not None and began - called > WAIT_SECONDS:
            detail = f"{began - called:.0f} s until the checkpoint of step {previous.step} was written"
            self.note(step, "training waited for the disk", f"{detail}: raise checkpoint.every_steps, or a faster disk")
        self._measure_once()
        asynchronous = self.asynchronous and self.bytes_here is not None
        if problems := self.gather_problems(memory.find_problem() if memory else self._make_room(step)):
            self._record_failure(step, problems, memory)
            return
        self.buffers.begin()
        self.store.place = self.buffers.place if asynchronous else torch.Tensor.detach
        states = self._collect_states(step)
        if asynchronous and self.plan.device == "cuda":
            torch.cuda.synchronize()  # the copies into pinned memory: the next step changes what they read
        write = functools.partial(storage.write_files, states=states, rank=self.rank, threads=self.threads)
        if memory is not None:
            names = Counter(name for names in entry.gather_values(list(states)) for name in names)
            mine = [name for name in states if names[name] == 1]  # each host has the others
            parts = self.pool.submit(memory.write, step, write, mine)
        else:
            if not self.leads and self.plan.zero_stage < 3:
                states.pop(Path(self.engine._get_ckpt_name("", "")).name, None)
            parts = self.pool.submit(write, disk.temporary_path(self.run.checkpoint(step)))
        self.saving = Saving(step, began, time.monotonic() - called, parts, memory)
        if not asynchronous:
            self.finish()

    def resume(self) -> int:
        """Load the newest whole checkpoint and return its step, 0 without any. Collective.

        Raises UserError when the run had checkpoints and none is whole on all hosts, or one has a manifest of another
        version of finlm, and when the launcher announced another step (FINLM_STEP).
        """
        checkpoint = self._find_newest()
        step = checkpoint[1].step if checkpoint else 0
        announced = os.environ.get(STEP_VARIABLE) or str(step)
        if announced != str(step):
            raise UserError(
                f"step {announced} was announced, and the newest whole checkpoint is of step {step}",
                evidence=f"{self.run.checkpoints} on {host_name()}, rank {self.rank}",
                fix="the same command goes on from what is whole, and says the step",
            )
        if checkpoint:
            self._load(*checkpoint)
        return step

    def roll_back(self, at_most: int) -> int | None:
        """Load the newest whole scheduled checkpoint of step `at_most` or before; return its step, None without any.

        Finishes the last save, and then removes checkpoints of later steps. Collective. Raises UserError when ranks
        have some but none in common, or one has a manifest of another version of finlm.
        """
        self.finish()
        checkpoint = self._find_newest(at_most)
        if checkpoint is None:
            return None
        self._load(*checkpoint)
        if self.leads:
            for step, directory in self.run.complete_checkpoints():
                if step > checkpoint[1].step:
                    disk.remove(directory)
        distributed.barrier()
        return checkpoint[1].step

    def _find_newest(self, at_most: int | None = None) -> tuple[Path, Manifest] | None:
        """Return the newest checkpoint that is whole on all ranks' disks, None without any.

        Renames damaged ones, with an incident for each. With `at_most` only scheduled ones of that step or before
        count. Raises UserError as resume() and roll_back() say, on all ranks.
        """
        while candidates := self._find_common(at_most):
            step = max(candidates)
            directory = candidates[step]
            manifest, problem = self._prove(directory)
            problems = self.gather_problems(problem)
            if manifest and not problems:
                return directory, manifest
            kept = disk.set_aside(directory).name if self.leads else ""
            names = ", ".join(dict.fromkeys(name for name in entry.gather_values(kept) if name))
            self.note(step, "damaged checkpoint", f"{'; '.join(problems[:5])}; set aside as {names}, not used")
        if at_most is not None:
            return None
        folders = self.run.checkpoints, self.run.path / "continued"
        damaged = [str(path) for folder in folders for path in sorted(folder.glob("step-*.damaged"))]
        if every := [name for names in entry.gather_values(damaged) for name in names]:
            fix = "restore one of them from a copy, or start another run with --new"
            evidence = "damaged: " + ", ".join(dict.fromkeys(every))
            raise UserError("no whole checkpoint is left", evidence=evidence, fix=fix)
        if recorded := entry.gather_values(self.run.recorded_checkpoint())[0]:
            hosts = dict.fromkeys(entry.gather_values(host_name()), ())
            raise disk.missing_error(self.run.path, hosts, recorded=recorded)
        return None

    def _find_common(self, at_most: int | None) -> dict[int, Path]:
        """Return {step: directory} for _find_newest(at_most). UserError if ranks have some, but none in common."""
        # Of one step both are there when another plan cuts the shards anew: only the first has the parts of all hosts.
        here = dict((*self.run.complete_checkpoints(), *self.run.continued_checkpoints()))
        every = entry.gather_values((host_name(), disk.identities(here.items())))
        common = disk.common_steps([steps for _, steps in every])
        if not common and any(steps for _, steps in every):
            raise disk.missing_error(self.run.path, dict(every))
        if at_most is not None:  # not those that signals asked for: a run must end as one without signals
            folder, due = self.run.checkpoints, self.keep.every_steps
            common = {step for step in common if step <= at_most and (here[step].parent != folder or is_due(step, due))}
        return {step: here[step] for step in common}

    def _prove(self, directory: Path) -> tuple[Manifest | None, str | Exception]:
        """Read a checkpoint's manifest and check this rank's share of its files; return (manifest, the problem or "").

        Returns (None, problem) if the manifest is unreadable, (None, error) if it is out of reach or of another version
        of finlm. The leader prints which files are not in the manifest.
        """
        try:
            manifest = Manifest.read(directory)
        except disk.Unreadable as error:
            return None, error.problem
        except (UserError, OSError) as error:
            return None, error
        owners = {part.rank for part in manifest.files.values()} & set(self.members)
        has_copies = directory.parent == self.run.checkpoints and manifest.layout == self.layout  # hosts prove theirs
        mine = {}  # this rank's share: its own files, and some of absent ranks
        for number, (name, part) in enumerate(manifest.files.items()):
            owner = part.rank if part.rank in owners else self.members[number % len(self.members)]
            if owner == self.rank and (part.rank in owners or not has_copies):
                mine[name] = part
        if self.leads and (unknown := disk.unlisted_files(directory, manifest)):
            print(f"{directory}: not in its manifest, ignored: {', '.join(unknown)}", flush=True)
        return manifest, "; ".join(disk.find_faults(directory, mine, self.threads))

    def _load(self, directory: Path, manifest: Manifest) -> None:
        """Load a proved checkpoint into the engine and set watch_loaded. Collective.

        If layout or groups differ, reshards it and records `resharded`. Restores this rank's random generators if the
        number of ranks is the same. Raises RuntimeError when DeepSpeed does not load it.
        """
        engine, folder, tag = self.engine, str(directory.parent), directory.name
        name = engine._get_ckpt_name(folder, tag)
        is_whole = manifest.zero_stage == self.plan.zero_stage == 0
        if is_whole or (manifest.layout == self.layout and storage.has_groups(engine, Path(name))):
            self.store.given = {disk.MANIFEST: self.store.load(name)}
        else:
            shard = Path(engine._get_zero_ckpt_name(folder, tag)).name
            states = storage.reshard(engine, storage.Shards(directory, manifest), self.rank, self.world_size)
            self.store.given = dict(zip((disk.MANIFEST, shard), states, strict=True))
            self.events.record("resharded", step=manifest.step, saved=list(manifest.layout), loaded=list(self.layout))
        if self.plan.offload_optimizer == "none":
            storage.free_moments(engine.module, engine.basic_optimizer)
        path, _ = engine.load_checkpoint(folder, tag=tag)
        self.store.given = {}
        if path is None:
            raise RuntimeError(f"DeepSpeed did not load {directory}")
        if self.plan.offload_optimizer == "cpu":
            storage.replay_powers(engine.basic_optimizer)
        names = sorted(name for name in manifest.files if name.startswith("loop_rank_") and (directory / name).exists())
        mine = f"loop_rank_{self.rank}.pt"
        loop = self.store.load(str(directory / (mine if mine in names else names[0]))) if names else {}
        if mine in names and manifest.world_size == self.world_size:
            entry.restore_generators(loop["generators"])
        self.watch_loaded = entry.gather_values(loop.get("watch"))[0]

    def poll(self) -> None:
        """Publish the checkpoint being written, if all ranks have written it. Collective: call it after every step."""
        self._measure_once()
        if self.saving is not None:
            done = torch.tensor(float(self.saving.parts.done()), device=self.engine.device)
            distributed.all_reduce(done, distributed.ReduceOp.MIN)
            if done.item():
                self._publish_written()

    def finish(self) -> None:
        """Wait until the checkpoint under way is published, or its failure recorded; remove old ones. Collective."""
        if self.saving is not None:
            self._publish_written()
        self.pool.submit(lambda: None).result()  # and for the removal of old ones

    def close(self) -> None:
        """Finish, then free the memory that a checkpoint on disk made useless; call it at the end. Collective."""
        self.finish()
        if self.memory is not None:
            self.memory.close()

    def gather_problems(self, problem: str | Exception) -> list[str]:
        """Return all ranks' problems that are not empty, or []. Raises the first that is an exception. Collective."""
        problems = [each for each in entry.gather_values(problem) if each]
        if error := next((each for each in problems if isinstance(each, Exception)), None):
            raise error
        return problems

    def _collect_states(self, step: int) -> dict[str, State]:
        """Return {file name: state} that this rank saves after `step` steps; store.place copies tensors. Collective."""
        directory = self.run.checkpoint(step)
        self.engine.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)
        loop: State = {
            "step": step,
            "tokens": step * self.plan.tokens_per_step,
            "generators": entry.generator_state(),
            "config": causal_lm.base_model(self.engine.module).config.to_dict(),  # what an export computes with
            "watch": self.watch_state(),
        }
        loop["next_row_of_the_order"] = loop["tokens"] // self.plan.sequence_length
        collected, self.store.collected = self.store.collected, {}
        return collected | {f"loop_rank_{self.rank}.pt": loop}

    def _steps_on_disk(self) -> list[int]:
        """Return the steps of the complete checkpoints in this directory, without those that are in memory."""
        return [step for step, directory in self.run.complete_checkpoints() if not directory.is_symlink()]

    def _unscheduled_steps(self) -> list[int]:
        """Return steps saved outside the schedule; [] unless the run may roll back and has scheduled ones."""
        steps = self._steps_on_disk() if self.rolls_back else []
        extra = [step for step in steps if not is_due(step, self.keep.every_steps) and step != self.plan.steps]
        return extra if len(extra) < len(steps) else []

    def _measure_once(self) -> None:
        """Measure the bytes of a save, once a step was applied: there are no moments before. Collective.

        If saves are asynchronous, starts to reserve buffers for copies, or says that they do not fit a host.
        """
        if self.bytes_here is not None or not self.engine.was_step_applied():
            return
        self.store.place = torch.Tensor.detach
        large, total = sizes_of(self._collect_states(0))
        sizes = entry.gather_values((host_name(), total, available_bytes(), self.rank in self.members))
        self.bytes_here = sum(sizes[rank][1] for rank in self.members)
        if self.memory is not None:
            self.memory.measure([total for _, total, _, _ in sizes])
        if not self.asynchronous:
            return
        for host in dict.fromkeys(name for name, *_ in sizes):
            needed = sum(size for name, size, *_ in sizes if name == host)
            free = int(RAM_SHARE * min(available for name, _, available, _ in sizes if name == host))
            if needed + MARGIN_BYTES > free:
                self.asynchronous = False
                detail = f"{host}: a copy of the state takes {format_bytes(needed)}, {format_bytes(free)} can be used; "
                self.note(0, "checkpoints are saved while training waits", detail + "training waits for the disk")
        if self.asynchronous:
            self.buffers.reserve(large)

    def _make_room(self, step: int) -> str:
        """On the leader, remove unscheduled ones if the disk lacks room; return why it still does. Else return ""."""
        if not self.leads:
            return ""
        shutil.rmtree(disk.temporary_path(self.run.checkpoint(step)), ignore_errors=True)
        needed = (self.bytes_here or 0) + MARGIN_BYTES // 64
        if shutil.disk_usage(self.run.checkpoints).free < needed:
            for extra in self._unscheduled_steps():  # kept only as long as there is room
                disk.remove(self.run.checkpoint(extra))
        if (free := shutil.disk_usage(self.run.checkpoints).free) >= needed:
            return ""
        return f"{host_name()}: {format_bytes(needed)} needed at {self.run.checkpoints}, {format_bytes(free)} free"

    def _publish_written(self) -> None:
        """Wait until the checkpoint is written, publish and record it, and start to remove old ones. Collective.

        On a rank's OSError, removes it instead and records an incident. Raises other errors.
        """
        saving, self.saving = self.saving, None
        assert saving is not None
        try:
            mine = "", saving.parts.result()
        except OSError as error:
            mine = reason(error), {}
        every = entry.gather_values(mine)
        problems = [problem for problem, _ in every if problem]
        directory, memory = self.run.checkpoint(saving.step), saving.memory
        members, leads = (memory or self).members, (memory or self).leads
        parts = {name: part for rank in members for name, part in every[rank][1].items()}
        identity = files.sha256_json([[name, part.sha256] for _, each in every for name, part in sorted(each.items())])
        manifest = Manifest(saving.step, *self.layout, dict(sorted(parts.items())), identity)
        for first in (False, True):  # rank 0's directory is the last one that counts
            in_turn = leads and (self.rank == 0) == first
            problems = problems or self.gather_problems(_publish(directory, manifest, memory) if in_turn else "")
        if problems:
            if leads and memory is not None:
                memory.discard(directory.name)
            elif leads:
                shutil.rmtree(disk.temporary_path(directory), ignore_errors=True)
                disk.remove(directory)
            self._record_failure(saving.step, problems, memory)
            return
        if leads and memory is not None:
            self.pool.submit(memory.keep_only, saving.step)
        elif leads:
            self._remove_superseded(saving.step)
        seconds, stall = round(time.monotonic() - saving.began, 3), round(saving.stall_seconds, 3)
        row = {"path": str(directory), "bytes": manifest.bytes, "seconds": seconds, "stall_seconds": stall}
        if memory is None:
            self.events.record("checkpoint", step=saving.step, **row)
            return
        memory.schedule(saving.step, saving.stall_seconds, seconds)
        self.events.record("in_memory", step=saving.step, **row, next_seconds=round(memory.every_seconds, 1))

    def _remove_superseded(self, saved: int) -> None:
        """Start to remove those up to `saved` that keep_last and keep_every_steps leave out, and unscheduled others."""
        extra = self._unscheduled_steps()  # later steps do not count: the run went back from there to a whole one
        steps = [step for step in self._steps_on_disk() if step <= saved and step not in extra]
        superseded = disk.steps_to_remove(steps, self.keep.keep_last, self.keep.keep_every_steps)
        if self.keep.copies:  # the one whose other parts are here already stays until a newer one has them
            newest_whole = max(disk.whole_checkpoints(self.run.complete_checkpoints()), default=0)
            superseded = [step for step in superseded if step != newest_whole]
        for step in (*superseded, *(step for step in extra if step != saved)):
            self.pool.submit(disk.remove, self.run.checkpoint(step))

    def _record_failure(self, step: int, problems: list[str], memory: InMemory | None = None) -> None:
        """Record and print why a checkpoint was not saved; one in memory is not tried again before the next start."""
        detail = "; ".join(dict.fromkeys(problems))
        if memory is None:
            after = "training goes on, the next checkpoint is tried in its turn"
            self.note(step, "checkpoint not saved", f"{detail}; {after}")
        else:
            memory.problem = detail
            self.note(step, "checkpoint not in memory", f"{detail}; training goes on, with those on disk alone")

    def note(self, step: int, what: str, detail: str) -> None:
        """On rank 0, record an incident in events.jsonl and print it."""
        if self.rank == 0:
            print(f"step {step}: {what}: {detail}", flush=True)
        self.events.record("incident", step=step, what=what, detail=detail)


def _publish(directory: Path, manifest: Manifest, memory: InMemory | None) -> str:
    """Publish the checkpoint on disk or in memory; return the host and the system's error, or ""."""
    try:
        if memory is None:
            disk.publish(directory, manifest)
        else:
            memory.publish(manifest)
    except OSError as error:
        return f"{host_name()}: {reason(error)}"
    return ""
