"""Keep a run's newest checkpoint in the hosts' memory, and each host's part in a neighbour's too.

A checkpoint in memory is an ordinary one, written to a tmpfs (checkpoint.memory_directory) and linked into the run's
checkpoints, so all that lists, proves and loads checkpoints knows it. No byte goes to a disk. It outlives the processes
of its host and not the host: so after it is written, in the same thread, every rank sends its files to a rank of the
next host over TCP (gloo) and gets those of the host before. One host may be lost then: the others have all parts.

    <memory_directory>/finlm-<user id>/<run>/step-N/     the newest, and beside it the one that is being written
    <memory_directory>/finlm-<user id>/<run>/run         the path of the run directory

What fails costs the checkpoints in memory until the next start, never the run: those on disk go on.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed

from finlm.base import checkpoints as disk
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import reason
from finlm.base.processes import available_bytes
from finlm.base.rundir import RunDir, host_name
from finlm.base.units import format_bytes
from finlm.plan.plan import Plan, best_interval, seconds_between
from finlm.recipe.settings import CheckpointSettings
from finlm.train import entry

FIRST_STEPS = 10  # of a launch before the first one, whose stall is measured
BLOCK_BYTES = 1 << 26
SECONDS = 600  # for a neighbour to write its part
RUN = "run"


class InMemory:
    """The checkpoints in memory as one rank sees them; unless said otherwise a method is called by all ranks together.

    `members` are the ranks that see this host's directory; the first of them, its leader, publishes and removes there.
    """

    def __init__(self, run: RunDir, plan: Plan, keep: CheckpointSettings) -> None:
        """Make this host's directory, remove useless leftovers of former launches, and connect to the neighbours.

        If a rank cannot use its directory, sets self.problem on all ranks, and nothing is kept in memory. Collective.
        """
        self.run, self.minutes, self.ranks = run, keep.memory_minutes, plan.world_size
        self.directory = run.memory(keep.memory_directory)
        self.problem = _make_directory(self.directory, run)
        self.members, self.sources, self.target = [distributed.get_rank()], list[int](), -1
        self.group: distributed.ProcessGroup | None = None
        self.bytes_here: int | None = None
        self.next_step: int | None = None
        self.every_seconds = 0.0
        self._since: tuple[int, float] | None = None  # step and time.monotonic() of the last one
        self._history = entry.gather_values(run.count_failures() if distributed.get_rank() == 0 else None)[0]
        if problems := [each for each in entry.gather_values(self.problem) if each]:
            self.problem = problems[0]
            return
        self.members = entry.ranks_sharing(self.directory)
        if self.leads:
            self._clean()
        leaders = entry.gather_values(self.members[0])
        groups = [[rank for rank, leader in enumerate(leaders) if leader == first] for first in dict.fromkeys(leaders)]
        if len(groups) > 1 and plan.zero_stage > 0:  # under stage 0 each host has the whole
            self.sources, self.target = neighbours(groups, distributed.get_rank())
            self.group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=SECONDS))

    @property
    def leads(self) -> bool:
        """Whether this rank publishes and removes in this host's directory."""
        return distributed.get_rank() == self.members[0]

    def _clean(self) -> None:
        """Remove half-written or unlinked checkpoints, dead links, and those of ended runs of the same recipe."""
        for path in self.directory.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob("step-*"):
            link = self.run.checkpoints / path.name
            if not (link.is_symlink() and link.readlink() == path):
                disk.remove(path)
        for link in self.run.checkpoints.glob("step-*"):
            if link.is_symlink() and not (link / disk.MANIFEST).exists():
                link.unlink(missing_ok=True)
        with _lock(self.directory.parent):
            for path in self.directory.parent.iterdir():
                if path != self.directory and _is_superseded(path, self.run):
                    shutil.rmtree(path, ignore_errors=True)

    def measure(self, sizes: Sequence[int]) -> None:
        """Set bytes_here, the bytes of a checkpoint in this host's memory, by the bytes of each rank's files."""
        here = [*self.members]
        for member, sources in enumerate(entry.gather_values(self.sources)):
            here += sources if member in self.members else []
        self.bytes_here = sum(sizes[rank] for rank in here)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is to be kept after `step`, the same on all ranks. To be called after every step.

        False before measure() and after a problem. The first call schedules the first checkpoint FIRST_STEPS later.
        """
        if self.problem or self.bytes_here is None:
            return False
        if self.next_step is None:
            self.next_step, self._since = step + FIRST_STEPS, (step, time.monotonic())
        return step >= self.next_step

    def find_problem(self) -> str:
        """Return why this host's memory has no room for a checkpoint; "" if it has or this rank does not lead."""
        free = min(shutil.disk_usage(self.directory).free, available_bytes())
        needed = (self.bytes_here or 0) + (1 << 22)
        if not self.leads or free >= needed:
            return ""
        return f"{host_name()}: {format_bytes(needed)} needed at {self.directory}, {format_bytes(free)} free"

    def schedule(self, step: int, stall: float, seconds: float) -> None:
        """Set the step of the next checkpoint, and every_seconds, the seconds between two.

        `stall` is the seconds that training waited for the last checkpoint, `seconds` those until it was published. The
        distance is the recipe's minutes, or with auto the interval that loses the least time at the rate of failures.
        """
        now, (since, began) = time.monotonic(), self._since or (step - 1, time.monotonic())
        measured = entry.gather_values((stall, seconds, (now - began) / max(1, step - since)))
        # Medians of the ranks, so that all of them schedule the same step.
        stall, seconds, step_seconds = (statistics.median(each) for each in zip(*measured, strict=True))
        if self.minutes == "auto":
            between = seconds_between(self.ranks, *self._history)
            self.every_seconds = best_interval(stall, between, seconds)
        else:
            self.every_seconds = 60.0 * float(self.minutes or 0)
        self.next_step = step + max(1, round(self.every_seconds / max(step_seconds, 1e-6)))
        self._since = step, now

    def write(self, step: int, write: Callable[[Path], dict[str, Part]], names: Sequence[str]) -> dict[str, Part]:
        """Write this rank's files of a step's checkpoint, exchange them with the neighbours; return all Parts by name.

        write(directory) writes the files and returns their Parts; those in `names`, which no other rank writes, are
        sent. Raises OSError when either fails; after a failed write, the neighbours receive no files.
        """
        target = disk.temporary_path(self.directory / f"step-{step}")
        failure: OSError | None = None
        parts: dict[str, Part] = {}
        try:
            parts = write(target)
        except OSError as error:
            failure = error
        if self.group is not None:  # also after a failure: the neighbours wait for a list of files, if an empty one
            mine = {name: parts[name] for name in names if name in parts}
            try:
                parts |= self._exchange(target, mine)
            except RuntimeError as error:
                failure = failure or OSError(None, f"{host_name()}: {str(error).splitlines()[0]}")
            except OSError as error:
                failure = failure or OSError(None, f"{host_name()}: {reason(error)}")
        if failure is not None:
            raise failure
        return parts

    def _exchange(self, directory: Path, mine: Mapping[str, Part]) -> dict[str, Part]:
        """Send these files to the next host, write those of the previous host into `directory`, and return their Parts.

        `mine` has the Parts of the files to send, which lie in `directory`. Raises RuntimeError when the connection
        fails, OSError when a file cannot be written or is not what was sent.
        """
        listed = json.dumps({name: asdict(part) for name, part in mine.items()}).encode()
        header = torch.frombuffer(bytearray(listed), dtype=torch.uint8)
        outgoing = [torch.tensor([len(header)]), header]
        for name, part in mine.items():
            if part.bytes:
                whole = torch.from_file(str(directory / name), shared=True, size=part.bytes, dtype=torch.uint8)
                outgoing += torch.split(whole, BLOCK_BYTES)
        # Begun before anything is waited for: no order of hosts can block.
        sent = [distributed.isend(tensor, self.target, group=self.group) for tensor in outgoing]
        received: dict[str, Part] = {}
        problems: list[str] = []
        for source in self.sources:
            length = self._receive(source, torch.empty(1, dtype=torch.int64))
            listed = self._receive(source, torch.empty(int(length), dtype=torch.uint8)).numpy().tobytes()
            for name, fields in json.loads(listed).items():
                received[name] = Part(**fields)
                problems += self._receive_file(source, directory / name, received[name].bytes)
        for work in sent:
            if work is not None:
                work.wait()
        problems += disk.find_faults(directory, received, 2) if not problems else []
        if problems:
            raise OSError(None, f"a neighbour's part: {problems[0]}")
        return received

    def _receive(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        """Fill the tensor with the next message of rank `source`, return it. RuntimeError if the connection fails."""
        distributed.recv(tensor, source, group=self.group)
        return tensor

    def _receive_file(self, source: int, path: Path, size: int) -> list[str]:
        """Write a file of `size` bytes from rank `source` to `path`; return the reasons why it could not, or []."""
        problems = list[str]()
        buffer = torch.empty(min(size, BLOCK_BYTES), dtype=torch.uint8)
        try:
            file = path.open("wb")
        except OSError as error:
            problems.append(f"{path.name}: {reason(error)}")
            file = Path(os.devnull).open("wb")  # noqa: SIM115  # closed below
        with file:  # receives all of it even after an error: the message after it is the next file's
            while size:
                block = self._receive(source, buffer[: min(size, BLOCK_BYTES)])
                size -= len(block)
                try:
                    if not problems:
                        file.write(block.numpy().data)
                except OSError as error:
                    problems.append(f"{path.name}: {reason(error)}")
        return problems

    def publish(self, manifest: Manifest) -> None:
        """Publish this host's checkpoint and link it into the run's checkpoints. For the leader. Raises OSError."""
        directory = self.directory / f"step-{manifest.step}"
        disk.publish_linked(directory, self.run.checkpoint(manifest.step), manifest)

    def discard(self, name: str) -> None:
        """Remove this host's checkpoint `name` (step-N), whole or half-written, and the link to it. For the leader."""
        link = self.run.checkpoints / name
        if link.is_symlink():
            link.unlink(missing_ok=True)
        disk.remove(self.directory / name)
        shutil.rmtree(disk.temporary_path(self.directory / name), ignore_errors=True)

    def keep_only(self, step: int) -> None:
        """Remove all checkpoints in memory but that of `step`. For the leader."""
        for path in self.directory.glob("step-*"):
            if path.name != f"step-{step}":
                self.discard(path.name)

    def close(self) -> None:
        """Remove this host's checkpoints in memory if the newest checkpoint is on disk; to be called at the end."""
        steps = {step: path.is_symlink() for step, path in self.run.complete_checkpoints()}
        if self.leads and steps and not steps[max(steps)]:  # no link: the newest is on disk, so all here may go
            self.keep_only(max(steps))
            shutil.rmtree(self.directory, ignore_errors=True)


def neighbours(groups: Sequence[Sequence[int]], rank: int) -> tuple[list[int], int]:
    """Return (the ranks that send to `rank`, the rank that it sends to). `groups` has the ranks of each host, in order.

    The k-th rank of a host sends to the k-th of the next host, the last to the first; where that has fewer ranks, the
    count begins again.
    """
    target = dict[int, int]()
    for number, group in enumerate(groups):
        after = groups[(number + 1) % len(groups)]
        target |= {each: after[place % len(after)] for place, each in enumerate(group)}
    return [each for each, to in target.items() if to == rank], target[rank]


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Wait for an existing directory's lock (flock) and hold it in the block, against other ranks and runs."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_directory(directory: Path, run: RunDir) -> str:
    """Make the run's directory, in a parent for this user alone, with the file RUN; return why that fails, or ""."""
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        if directory.parent.lstat().st_uid != os.getuid():  # anybody may make a name in /dev/shm first
            return f"{host_name()}: {directory.parent} belongs to somebody else"
        with _lock(directory.parent):
            directory.mkdir(exist_ok=True)
            (directory / RUN).write_text(str(run.path.resolve()), encoding="utf-8")
    except OSError as error:
        return f"{host_name()}: {directory}: {reason(error)}"
    return ""


def _is_superseded(path: Path, run: RunDir) -> bool:
    """Return whether the checkpoints in memory below `path`, of another run, can be removed; False if it is not known.

    They can if its run directory is gone, or if it is a run of this recipe beside `run` and no rank of it is here.
    """
    try:
        other = RunDir(Path((path / RUN).read_text(encoding="utf-8")))
        if not other.path.exists():
            return True
        if other.path.parent != run.path.resolve().parent or _recipe_name(other) != _recipe_name(run):
            return False
        with other.host_lock(host_name()).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # no rank ever held it here, or another leader removes it now
        return True
    except OSError:
        return False
    return True


def _recipe_name(run: RunDir) -> str:
    """Return the recipe's name from the name of a run directory, <name>-<day>-<time>."""
    return run.path.name.rsplit("-", 2)[0]
