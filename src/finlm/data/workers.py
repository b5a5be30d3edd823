"""Worker processes: how many this machine can really hold, and results in the order of their tasks.

The number asked for is bounded by the cores this process may use (affinity and cgroup), memory (1 GiB stays free, half
a GiB a worker) and open files; the limit that binds is said. Of that memory two workers took 454 MiB in all on 1 GB of
text; one document of 100 MB takes a worker up to 3.8 GB, which no limit knows. Spawned, never forked: a fork copies
locks that other threads hold. Starting a worker costs 0.2 s, so one worker means none: the work runs in this process.

Tasks are taken one by one with a few in flight, so memory does not grow with their number. It does not retry: a worker
that dies ends the step.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from finlm.base import memory, units
from finlm.base.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_GIB = 2**30
_FILES_PER_WORKER = 4  # its pipes and sentinel; the parent holds three of them, and a spawn opens two more for a moment
_FILES_IN_RESERVE = 24  # queues, the step's own files, modules being imported


def bounded(asked: int, limits: Mapping[str, int]) -> tuple[int, str]:
    """The workers to use, and a sentence naming the binding limit ("" when all that were asked for are used)."""
    reason, limit = min(limits.items(), key=lambda item: item[1])
    used = max(1, min(asked, limit))
    return used, "" if used == asked else f"{asked} workers asked, {used} used: {reason}"


def limits(asked: int) -> dict[str, int]:
    """{reason: workers at most} of this process, here and now."""
    cores = available_cores()
    free = memory.available_bytes()
    open_files = _allow_open_files(_FILES_IN_RESERVE + _open_now() + _FILES_PER_WORKER * min(asked, cores))
    return {
        f"this process may use {cores} core{'s' * (cores != 1)}": cores,
        f"{units.format_bytes(free)} of memory are available": int((free - _GIB) // (_GIB // 2)),
        f"this process may open {open_files:,} files": (open_files - _FILES_IN_RESERVE - _open_now())
        // _FILES_PER_WORKER,
    }


def available_cores() -> int:
    """Cores this process may use: its affinity, and the cgroup's CPU quota rounded down, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for directory in _cgroups():
        quota = _words(directory / "cpu.max") or [
            *_words(directory / "cpu.cfs_quota_us"),
            *_words(directory / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # "max" or -1 = no quota
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, int(cores))


@contextmanager
def pool(count: int) -> Iterator[Executor | None]:
    """count spawned workers, or None for one: the work is then done in this process."""
    if count == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    try:
        executor = ProcessPoolExecutor(count, mp_context=context, initializer=_prepare_worker)
    except OSError as error:  # its semaphores are files there
        raise UserError(
            "worker processes cannot be started: /dev/shm is missing, full or read-only",
            evidence=str(error),
            fix="mount it (docker run --shm-size=1g), or set data.num_proc to 1, which needs none",
        ) from None
    try:
        yield executor
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed",
            evidence=f"{error}\n"
            f"{count} workers, {units.format_bytes(memory.available_bytes())} of memory available now",
            fix="if the kernel log says out of memory, lower data.num_proc; finished steps are kept",
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def in_order(
    executor: Executor | None, count: int, function: Callable[[Task], Result], tasks: Iterable[Task]
) -> Iterator[Result]:
    """function of every task in the tasks' order, with at most count + 2 tasks in flight."""
    if executor is None:
        yield from map(function, tasks)
        return
    rest = iter(tasks)
    waiting = deque(_submitted(executor, function, task) for task in itertools.islice(rest, count + 2))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(_submitted(executor, function, task) for task in itertools.islice(rest, 1))
        yield result


def _submitted(executor: Executor, function: Callable[[Task], Result], task: Task) -> Future[Result]:
    """The task's result to come. Raises BrokenProcessPool also when a worker was killed while others still started."""
    try:
        return executor.submit(function, task)
    except OSError as error:  # its pipe is closed
        raise BrokenProcessPool(str(error)) from None


def _prepare_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent was killed ends instead of waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _allow_open_files(wanted: int) -> int:
    """Raise the soft limit of open files towards the hard one as far as wanted; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


def _cgroups() -> list[Path]:
    """Every directory of cgroup v1 and v2 that may hold a limit on this process, from its own up to the root."""
    root = Path("/sys/fs/cgroup")
    found = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / controllers if controllers else root
        own = top / path.lstrip("/")
        found += [own, *[parent for parent in own.parents if parent.is_relative_to(top)]]
    return [directory for directory in dict.fromkeys([*found, root]) if directory.is_dir()]


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
