"""Run work in worker processes, as many as this machine can hold, and return results in the order of their tasks.

The number asked for is bounded by the cores this process may use (affinity and cgroup), memory (1 GiB stays free, half
a GiB per worker) and open files; the limit that binds is printed. Two workers took 454 MiB in all on 1 GB of text; a
document of 100 MB takes a worker up to 3.8 GB, which no limit knows. Starting a worker costs 0.2 s, so one worker means
none: the work runs in this process.

A Context gives every step of `finlm prepare` the recipe, the cache and an Engine: these processes, or Ray's on other
hosts (ray_engine.py). Tasks are taken one by one with a few in flight, so memory does not grow with their number. Here
nothing is retried: a worker that dies ends the step, and the next run takes up the chunks that were finished.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from finlm.base import files, processes, screen, units
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache, Step
from finlm.recipe.schema import Recipe

Arrays = dict[str, npt.NDArray[Any]]
Task = TypeVar("Task")
Result = TypeVar("Result")
# Hands a worker the call function(task), and returns what to call to wait for its result.
Submit = Callable[[Callable[[Any], Any], Any], Callable[[], Any]]

_GIB = 2**30
_FILES_PER_WORKER = 4  # its pipes and sentinel; the parent holds three of them, and a spawn opens two more for a moment
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_FILES_IN_RESERVE = 24  # queues, the step's own files, modules being imported


def limit_workers(asked: int, limits: Mapping[str, int]) -> tuple[int, str]:
    """Return (workers to use, at least 1; which of the limits {reason: most workers} binds, "" for none)."""
    reason, limit = min(limits.items(), key=lambda item: item[1])
    used = max(1, min(asked, limit))
    return used, "" if used == asked else f"{asked} workers asked, {used} used: {reason}"


def limits(asked: int) -> dict[str, int]:
    """Return {reason: largest number of workers} for this process now, by cores, memory and open files.

    A number may be 0 or less. Lifts this process's soft limit of open files as far as the `asked` workers need.
    """
    cores = available_cores()
    free = processes.available_bytes()
    used = _FILES_IN_RESERVE + len(os.listdir("/proc/self/fd"))
    allowed = _allow_open_files(used + _FILES_PER_WORKER * min(asked, cores))
    return {
        f"this process may use {cores} core{'s' * (cores != 1)}": cores,
        f"{units.format_bytes(free)} of memory are available": int((free - _GIB) // (_GIB // 2)),
        f"this process may open {allowed:,} files": (allowed - used) // _FILES_PER_WORKER,
    }


def available_cores() -> int:
    """Return how many cores this process may use: its affinity and the cgroup's CPU quota, rounded down, at least 1."""
    cores, root = float(len(os.sched_getaffinity(0))), Path("/sys/fs/cgroup")
    directories = [root]
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        top = root / controllers
        group = top / path.lstrip("/")
        directories += [group, *[parent for parent in group.parents if parent.is_relative_to(top)]]
    for directory in directories:
        version_1 = [_read_text(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota = (_read_text(directory / "cpu.max") or " ".join(version_1)).split()
        if len(quota) == 2 and quota[0].isdigit():  # "max" or -1 = no quota
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, int(cores))


@contextmanager
def open_pool(count: int) -> Iterator[Submit | None]:
    """Start `count` processes for the block and yield the function that gives them tasks; yield None for 1.

    With 1, starts no process and lets this one keep memory that it frees. Raises UserError if workers cannot be started
    or one is killed.
    """
    if count == 1:
        _keep_freed_memory()
        yield None
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    try:
        executor = ProcessPoolExecutor(count, mp_context=context, initializer=_prepare_worker)
    except OSError as error:  # its semaphores are files there
        raise UserError(
            "worker processes cannot be started: /dev/shm is missing, full or read-only",
            evidence=str(error),
            fix="mount it (docker run --shm-size=1g), or set data.num_proc to 1, which needs none",
        ) from None

    def submit(function: Callable[[Any], Any], task: Any) -> Callable[[], Any]:
        """Give a process the call function(task); BrokenProcessPool if one died, even while others started."""
        try:
            return executor.submit(function, task).result
        except OSError as error:  # its pipe is closed
            raise BrokenProcessPool(str(error)) from None

    try:
        yield submit
    except BrokenProcessPool as error:
        free = units.format_bytes(processes.available_bytes())
        raise UserError(
            "a worker process was killed",
            evidence=f"{error}\n{count} workers, {free} of memory available now",
            fix="if the kernel log says out of memory, lower data.num_proc; finished steps are kept",
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def map_in_order(
    submit: Submit | None, count: int, function: Callable[[Task], Result], tasks: Iterable[Task]
) -> Iterator[Result]:
    """Yield function(task) for every task in order, at most count + 2 in flight; in this process if submit is None.

    Raises what a task raises, and BrokenProcessPool when a worker dies.
    """
    if submit is None:
        yield from map(function, tasks)
        return
    rest = iter(tasks)
    waiting = deque(submit(function, task) for task in itertools.islice(rest, count + 2))
    while waiting:
        result = waiting.popleft()()
        waiting.extend(submit(function, task) for task in itertools.islice(rest, 1))
        yield result


def _prepare_worker() -> None:
    """Set up a worker: ignore Ctrl-C, which the parent handles, keep freed memory, exit when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _keep_freed_memory()
    parent = multiprocessing.parent_process()

    def follow() -> None:
        """Exit the process when its parent has ended."""
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _keep_freed_memory() -> None:
    """Let this process keep up to 128 MiB that it frees; does nothing where the C library is not glibc.

    Every chunk takes and frees some 50 MiB, which the kernel would clear again each time: 4 ms a MB of text.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 128 * 2**20)


def _allow_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, at most to the hard limit; return it, 2**20 if unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _read_text(path: Path) -> str:
    """Return a UTF-8 file's text; "" on OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Mapper(Protocol):
    """Workers that are running."""

    def __call__(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield function(task) for every task, in order."""


class Engine(Protocol):
    """Where workers run; which one it is changes no result.

    A task lists the cache files that it reads and writes by reads() and writes(), for workers that have another disk.
    """

    def start(self, at_most: int) -> AbstractContextManager[Mapper]:
        """Start at most `at_most` workers and yield their Mapper; they end with the block."""

    def shares_cache(self) -> bool:
        """Return whether every worker sees all files of the cache; may connect to the workers' hosts."""


class LocalEngine:
    """Worker processes of this machine, at most `asked`."""

    def __init__(self, asked: int, *, is_shown: bool = False) -> None:
        """Keep them; start nothing. `is_shown`: print which limit allows fewer workers than `asked`."""
        self._asked, self._is_shown = asked, is_shown

    @cached_property
    def count(self) -> int:
        """The largest number of workers; computed, and with is_shown its limit printed, on first use."""
        count, sentence = limit_workers(self._asked, limits(self._asked))
        if sentence and self._is_shown:
            screen.say(sentence)
        return count

    @contextmanager
    def start(self, at_most: int) -> Iterator[Mapper]:
        """Start at most `at_most` workers, at least 1 (which is this process), and yield their Mapper for the block.

        Raises UserError when workers cannot be started, and when one is killed while the block runs.
        """
        used = max(1, min(self.count, at_most))
        with open_pool(used) as pool:
            yield partial(map_in_order, pool, used)

    def shares_cache(self) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Kept(Generic[Task]):
    """A task whose arrays are stored in the file `path` of the cache."""

    function: Callable[[Task], Arrays]
    task: Task
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def reads(self) -> tuple[Path, ...]:
        """Return the cache files that the task reads."""
        return files_read(self.task)

    def writes(self) -> tuple[Path, ...]:
        """Return the .npz file that the task writes, as a tuple."""
        return (self.path,)


@dataclass(frozen=True)
class ChunkTask:
    """Work on the documents of a chunk (its .txt), which also needs the cache files `beside`."""

    chunk: Path
    beside: tuple[Path, ...] = ()

    def reads(self) -> tuple[Path, ...]:
        """Return the cache files that the work reads: the chunk's .txt and .npy, and those in `beside`."""
        return self.chunk, self.chunk.with_suffix(".npy"), *self.beside


def files_read(task: object) -> tuple[Path, ...]:
    """Return task.reads(), the cache files that it reads; empty if the task has no such method."""
    return tuple(task.reads()) if hasattr(task, "reads") else ()


def files_written(task: object) -> tuple[Path, ...]:
    """Return task.writes(), the cache files that it may write; empty if the task has no such method."""
    return tuple(task.writes()) if hasattr(task, "writes") else ()


def _compute_and_save(work: Kept[Task]) -> None:
    """Compute a task's arrays and write them to its path as .npz, whole or not at all. Runs in a worker."""
    packed = io.BytesIO()
    np.savez(packed, **work.function(work.task))  # type: ignore[arg-type]  # of names that are no argument
    files.write_bytes(work.path, packed.getbuffer())


def load_kept(work: Kept[Task]) -> Arrays:
    """Return the arrays in a task's file; compute and save them first if the file is damaged or gone."""
    try:
        with np.load(work.path) as arrays:
            return dict(arrays)
    except (BadZipFile, ValueError, OSError):
        _compute_and_save(work)
    with np.load(work.path) as arrays:
        return dict(arrays)


def make_missing(name: str, work: Sequence[Kept[Task]], missing: Sequence[bool], run: Mapper) -> Iterator[Kept[Task]]:
    """Yield each of `work` in order, once its file is there; have the workers of `run` compute the `missing` ones.

    Prints how many are left under this name if some are there. Raises what a task raises.
    """
    if any(missing) and not all(missing):
        screen.say(f"{name}: {sum(missing):,} of {len(work):,} chunks to do, the others are kept")
    made = run(_compute_and_save, list(itertools.compress(work, missing)))
    for each, is_new in zip(work, missing, strict=True):
        if is_new:
            next(made)
        yield each


class Context:
    """A recipe, the cache, and the engine whose workers its steps use; `local` has those of this machine."""

    def __init__(self, recipe: Recipe, cache: Cache, engine: Engine | None = None) -> None:
        """Keep them; without an engine, make one of data.num_proc local workers. Start no worker."""
        self.recipe = recipe
        self.data = recipe.data
        self.cache = cache
        self.local = LocalEngine(recipe.data.num_proc, is_shown=cache.build)
        self.engine = engine or self.local

    def list_kept(
        self, name: str, function: Callable[[Task], Arrays], tasks: Sequence[tuple[str, Task]]
    ) -> list[Kept[Task]]:
        """Return a Kept for every (key, task): its file lies in the cache under `name` and the key."""
        return [Kept(function, task, self.cache.chunk(name, key).with_suffix(".npz")) for key, task in tasks]

    def make_kept(
        self,
        name: str,
        function: Callable[[Task], Arrays],
        tasks: Sequence[tuple[str, Task]],
        at_most: int | None = None,
    ) -> Iterator[Kept[Task]]:
        """Yield a Kept for every (key, task) in order, once its file is there; compute what the cache lacks.

        Prints how many are missing if some are there. Raises what tasks raise, and UserError when workers fail.
        """
        work = self.list_kept(name, function, tasks)
        missing = [not each.path.is_file() for each in work]
        with self.engine.start(min(sum(missing), at_most or sum(missing))) as run:
            yield from make_missing(name, work, missing, run)

    def map_kept(
        self,
        name: str,
        function: Callable[[Task], Arrays],
        tasks: Sequence[tuple[str, Task]],
        at_most: int | None = None,
    ) -> Iterator[Arrays]:
        """Yield the arrays of every (key, task) in order, as make_kept() keeps them; mend damaged files."""
        return map(load_kept, self.make_kept(name, function, tasks, at_most))

    def say(self, step: Step, text: str) -> None:
        """Print `text` with the step's name on stderr; print nothing if the cache may not build."""
        if self.cache.build:
            screen.say(f"{step.manifest['step']}: {text}{' (reused)' if step.reused else ''}")
