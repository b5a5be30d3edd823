"""Copy the other hosts' parts of each checkpoint to this machine while the ranks train (checkpoint.copies).

The checkpoint here then has the files of all ranks, so any other host may be lost with its disk. A thread at low
priority copies, and the ranks never wait for it. A failure is recorded as an incident, and the copy is tried again. The
ranks here keep the newest whole checkpoint until a newer checkpoint is whole (train/zero/checkpoint.py); keep_last
removes the others with their copies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

from finlm.base import checkpoints, screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import record_event
from finlm.hosts import checkpoint_parts, ssh
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.record import live

POLL_SECONDS = 1.0
RETRY_SECONDS = 60.0
NICE = 10


@contextlib.contextmanager
def copy_beside(run: RunDir, recipe: Recipe, hosts: Cluster, accept_new_keys: bool) -> Iterator[None]:
    """Copy the other hosts' parts of new checkpoints to this machine, in a thread, while the block runs.

    The checkpoint that the ranks start from counts as new. The end of the block kills a running copy; after an
    interruption it first gets launch.grace_seconds, and a line is printed if it takes longer. Does nothing without
    checkpoint.copies or with all ranks here. `accept_new_keys` stores unknown ssh host keys.
    """
    here, remote = ssh.split_local(hosts.hosts) if recipe.checkpoint.copies else ([], [])
    if not remote:
        yield
        return
    copier = Copier(run, recipe, hosts, accept_new_keys, has_ranks_here=bool(here))
    thread = threading.Thread(target=copier.work, name="copies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        rows = [row for row in run.read_events() if row["kind"] in ("start", "end")]
        if rows and rows[-1].get("status") == "interrupted":
            copier.no_more.set()
            thread.join(recipe.launch.grace_seconds)
            if thread.is_alive():
                screen.say(f"the last checkpoint has no copy here after {recipe.launch.grace_seconds:g} s")
        copier.cancel()
        thread.join()  # rsync is killed by now; what is left to do is to hash what has arrived


class Copier:
    """The work of the copying thread: copy the newest checkpoint that events.jsonl records."""

    def __init__(
        self, run: RunDir, recipe: Recipe, hosts: Cluster, accept_new_keys: bool, *, has_ranks_here: bool
    ) -> None:
        """Note where events.jsonl ends now: only later events count."""
        self.run, self.keep, self.hosts, self.accept_new_keys = run, recipe.checkpoint, hosts, accept_new_keys
        self.has_ranks_here = has_ranks_here
        self.no_more, self.cancelled = threading.Event(), threading.Event()
        self.running: list[subprocess.Popen[bytes]] = []
        self.seen_bytes = run.events.stat().st_size if run.events.exists() else 0

    def cancel(self) -> None:
        """Stop the copying thread, and kill the rsync processes that it waits for."""
        self.cancelled.set()
        for process in list(self.running):
            process.kill()

    def work(self) -> None:
        """Copy each new checkpoint that events.jsonl records, until cancel() is called; lowers its thread's priority.

        Once `no_more` is set, returns after it has read all events and tried the last copy. Retries a failed copy after
        60 s, and records each new reason as an incident. After a rollback, removes the copies of later steps.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # rsync and hashing threads inherit it
        events, due, not_before, reported = live.follow(self.run, self.seen_bytes), 0, 0.0, ""
        while not self.cancelled.is_set():
            is_last = self.no_more.is_set()  # asked first: no event comes after it
            for row in next(events):
                # One in memory, a link, needs no copy.
                begins_on_disk = row["kind"] == "start" and not self.run.checkpoint(row["step"]).is_symlink()
                if begins_on_disk or row["kind"] in ("checkpoint", "rollback"):
                    due, not_before = row["step"], 0.0
                if row["kind"] == "rollback" and not self.has_ranks_here:  # ranks here do it
                    for step, directory in self.run.complete_checkpoints():
                        if step > due:
                            checkpoints.remove(directory)
            if due and time.monotonic() >= not_before:
                try:
                    self._copy(due)
                    due, reported = 0, ""
                except (UserError, OSError) as error:
                    shutil.rmtree(self.run.checkpoints / f".step-{due}.copying", ignore_errors=True)
                    not_before = time.monotonic() + RETRY_SECONDS
                    if not self.cancelled.is_set() and str(error) != reported:
                        reported = str(error)
                        self._record_failure(due, error)
            if is_last:
                return
            self.cancelled.wait(POLL_SECONDS)

    def _copy(self, step: int) -> None:
        """Gather the checkpoint of a step on this machine, and append a `copied` event unless it was whole before.

        Leaves room on the disk for this machine's part of the next checkpoint. Without ranks here, also removes the
        checkpoints that keep_last leaves out. Raises UserError or OSError when it cannot be gathered.
        """
        self.running.clear()
        directory, began = self.run.checkpoint(step), time.monotonic()
        before = Manifest.read_if_readable(directory)
        own_bytes = before.bytes if before is not None else 0
        checkpoint_parts.gather_checkpoint(
            self.run, self.hosts, step, self.accept_new_keys, started=self._keep_process, spare_bytes=own_bytes + 1
        )
        if before is None or not before.is_whole:
            size, seconds = Manifest.read(directory).bytes - own_bytes, round(time.monotonic() - began, 3)
            self.run.append_event("copied", step=step, bytes=size, seconds=seconds)
        if not self.has_ranks_here:  # then no rank removes what keep_last leaves out
            steps = [step for step, _ in self.run.complete_checkpoints()]
            for former in checkpoints.steps_to_remove(steps, self.keep.keep_last, self.keep.keep_every_steps):
                checkpoints.remove(self.run.checkpoint(former))

    def _keep_process(self, process: subprocess.Popen[bytes]) -> None:
        """Remember an rsync process so that cancel() can kill it; kill it now if already cancelled."""
        self.running.append(process)
        if self.cancelled.is_set():
            process.kill()

    def _record_failure(self, step: int, error: UserError | OSError) -> None:
        """Append an `incident` event that says why the checkpoint of a step was not copied."""
        why = f"{error.problem}: {error.evidence}" if isinstance(error, UserError) else str(error)
        if self.has_ranks_here and not self.run.checkpoint(step).exists():
            why = "it was removed before its parts were here: raise checkpoint.every_steps or checkpoint.keep_last"
        detail = f"{why}; training goes on, it or the next one is tried again"
        record_event(self.run, "incident", step=step, what="checkpoint not copied", detail=detail)
