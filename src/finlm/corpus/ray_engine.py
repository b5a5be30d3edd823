"""Run the chunk tasks of `finlm prepare` as Ray tasks on other hosts: `data.engine: ray`.

The launching host reads the sources, sends blocks of rows to the workers and puts the results together, as with local
processes, so the shards have the same bytes. Workers import the launching host's finlm: Ray carries it to them. Before
work begins, every host is checked for the launching host's packages, and for the files outside the cache that tasks
read. A host that does not share data.cache_dir works in a directory of the same path, receives the files it lacks, and
sends back those it makes.

Ray runs a task again whose worker or host died, three times; a chunk is whole or absent, so running it twice changes
nothing. The launching host is never replaced: the next run continues with the chunks that were finished.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.corpus import workers
from finlm.corpus.workers import Mapper, Result, Task

RETRIES = 3
INSTALL = ".venv/bin/pip install -r requirements-ray.lock"
_DECIDING = ("numpy", "sentencepiece", "tokenizers", "gigatoken", "opencc", "pyarrow", "zstandard", "pyahocorasick")
_LOOK_SECONDS = 5.0  # between two looks at the hosts while a result is waited for


def check_installed() -> None:
    """Raise UserError if the package ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("data.engine ray needs the package ray, which is not installed", fix=INSTALL)


@dataclass(frozen=True)
class Expected:
    """What a host must have: `packages` as (name, version) and `files` as (path, sha256).

    `token` names a file that shows whether the cache is shared; `seen_from` is the launching host's name.
    """

    seen_from: str
    cache: Path
    token: str
    packages: tuple[tuple[str, str], ...]
    files: tuple[tuple[Path, str], ...]

    @property
    def token_file(self) -> Path:
        """The file by which a host sees that it shares the cache; .tmp is removed after a kill."""
        return self.cache / f".ray-{self.token}.tmp"


def list_packages() -> tuple[tuple[str, str], ...]:
    """Return (name, version) of Python and of each package that decides bytes; "missing" if it is not installed."""
    packages = [("python", platform.python_version())]
    for name in _DECIDING:
        try:
            packages.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            packages.append((name, "missing"))
    return tuple(packages)


def check_host(expected: Expected) -> bool:
    """Return whether this host shares the launching host's cache; make the cache's directory if it is missing.

    Raises UserError, naming the host, for other packages, for a file that is missing or different, and for a cache
    directory that cannot be written.
    """
    host = os.uname().nodename
    here = dict(list_packages())
    other = [f"{name}: {here[name]}, there {version}" for name, version in expected.packages if here[name] != version]
    if other:
        raise UserError(
            f"{host} has other packages than {expected.seen_from}, and could make other bytes",
            evidence="\n".join(other),
            fix=f"install the same on {host}: bash scripts/setup.sh, then {INSTALL}",
        )
    for path, sha256 in expected.files:
        if not path.is_file():
            raise UserError(f"{path} is missing on {host}", fix=f"copy it from {expected.seen_from} to the same path")
        if files.sha256_file(path) != sha256:
            raise UserError(f"{path} on {host} is not that of {expected.seen_from}", fix="copy it to the same path")
    is_shared = expected.token_file.is_file()
    try:
        expected.cache.mkdir(parents=True, exist_ok=True)
        probe = expected.cache / f".ray-{expected.token}-{host}-{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{host} cannot write to data.cache_dir {expected.cache}",
            evidence=str(error),
            fix="mount the same directory on every host, or let this user make it there",
        ) from None
    return is_shared


_check_once = lru_cache(maxsize=4)(check_host)  # per worker process; ray.remote() takes plain functions alone


class Answer(NamedTuple):
    """A task's result, the host that ran it, and the files it wrote there if the cache is not shared."""

    host: str
    value: Any
    made: dict[Path, bytes]


@dataclass(frozen=True)
class Order(Generic[Task]):
    """A call function(task) for a worker, with the cache files that it reads and those that it may write."""

    function: Callable[[Task], Any]
    task: Task
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]


def work(order: Order[Task], expected: Expected, store: Any) -> Answer:
    """Run an order in a Ray worker and return its Answer; the worker's first order checks the host (check_host).

    A host without the shared cache first fetches missing files from `store`, a handle of the launching host's Store.
    Raises UserError for a full disk, and what the function raises; each error names the host.
    """
    host, is_shared = os.uname().nodename, _check_once(expected)
    try:
        for path in order.reads if not is_shared else ():
            if not path.is_file():
                import ray

                files.write_bytes(path, ray.get(store.read.remote(path)))
        value = order.function(order.task)
        made = {path: path.read_bytes() for path in order.writes if path.is_file()} if not is_shared else {}
    except UserError as error:
        raise UserError(error.problem, evidence=f"{error.evidence}\non {host}".strip(), fix=error.fix) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {host} is full",
                evidence=f"{error.strerror} in {expected.cache}",
                fix="free space there, or set data.cache_dir to a larger disk; finished chunks are kept",
            ) from None
        error.add_note(f"on {host}")
        raise
    return Answer(host, value, made)


class Store:
    """An actor on the launching host that returns files of its cache."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def read(self, path: Path) -> bytes:
        """Return a file's bytes. Raises ValueError if it is not in the cache."""
        return files.within(self._cache, path.relative_to(self._cache).as_posix()).read_bytes()


class RayEngine:
    """Ray workers on all hosts of a cluster, at most `num_proc` per host; see Engine.

    They start at the first use and end with the block. open_cluster() yields the address of a cluster, which it starts
    or, with `joins`, the user has started. `reads` lists files outside `cache` that tasks read on every host.
    """

    def __init__(
        self,
        cache: Path,
        num_proc: int,
        open_cluster: Callable[[], AbstractContextManager[str]],
        reads: Iterable[Path] = (),
        joins: bool = False,
    ) -> None:
        self._open_cluster = open_cluster
        self._connect_to = partial(_connect, cache=cache, num_proc=num_proc, reads=tuple(reads), joins=joins)
        self._held = ExitStack()
        self._run: _Connection | None = None

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the cluster, and end it if it was started for this engine."""
        self._held.__exit__(*error)  # not close(), which hides the error from _connect

    @contextmanager
    def start(self, at_most: int) -> Iterator[Mapper]:
        """Yield the Mapper of all the cluster's workers, whatever at_most is, or of this process if it is 1 or less.

        Connects at the first call, until the engine's block ends. Raises UserError for an unusable cluster or host.
        """
        if at_most <= 1:
            yield partial(workers.map_in_order, None, 1)
            return
        yield self._connect().map_in_order

    def shares_cache(self) -> bool:
        """Return whether all hosts share data.cache_dir; connects first, with the UserErrors of _connect()."""
        return self._connect().shares_cache

    def _connect(self) -> _Connection:
        """Return the connection to the cluster, open until the engine's block ends; the first call opens it.

        Raises UserError if the cluster or a host cannot be used.
        """
        if self._run is None:
            address = self._held.enter_context(self._open_cluster())
            self._run = self._held.enter_context(self._connect_to(address))
        return self._run


@contextmanager
def _connect(address: str, cache: Path, num_proc: int, reads: tuple[Path, ...], joins: bool) -> Iterator[_Connection]:
    """Yield a connection to the Ray cluster after checking its hosts; print at the end what each host did.

    Inside the block stdout is dropped, but for Ray's retries, which go to stderr. Sets RAY_task_oom_retries in the
    environment, if it is unset, for good. The other arguments are RayEngine's. Raises UserError for a cluster or a host
    that cannot be used, FileNotFoundError for one of `reads` not here.
    """
    import ray

    import finlm

    hashes = tuple((path, files.sha256_file(path)) for path in reads)
    expected = Expected(os.uname().nodename, cache, secrets.token_hex(8), list_packages(), hashes)
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # Ray's own default is without end
    try:
        ray.init(
            address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"py_modules": [str(Path(finlm.__file__).parent)]},
            **({} if address == "auto" else {"_node_ip_address": os.environ.get("RAY_NODE_IP_ADDRESS") or None}),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "this machine has to be a node of it (`ray start --address`), with the same Python and Ray"
        raise UserError(
            f"the Ray cluster at {address} cannot be used from this machine",
            evidence=str(error)[:600],
            fix=fix if joins else "run again; if Ray ends again, /tmp/ray/session_latest/logs on this machine says why",
        ) from None
    connection = _Connection(expected, num_proc)
    try:
        with redirect_stdout(_RaysWords()):
            try:
                files.write_text(expected.token_file, "")
                connection.check_hosts()
                yield connection
                with suppress(UserError, ray.exceptions.RayError):  # the work is done, whatever is left of the cluster
                    connection.find_nodes()  # names a host that was lost while no result took long
            finally:
                ray.shutdown()
    finally:
        expected.token_file.unlink(missing_ok=True)
        if connection.done:
            screen.say(f"chunks by host: {', '.join(f'{host} {n:,}' for host, n in sorted(connection.done.items()))}")


class _RaysWords(io.TextIOBase):
    """A stream in place of stdout, to which Ray prints pages about a lost worker; prints a line on stderr instead."""

    def write(self, text: str, /) -> int:
        """Print a line on stderr for each task that Ray does again, and nothing else; return the length of the text."""
        for left in re.findall(r"There are (\d+) retries remaining", text):
            screen.say(f"a worker was lost; its chunk is done again ({left} more times at most)")
        return len(text)


class _Connection:
    """The workers of the Ray cluster to which this process is connected, at most `num_proc` per host."""

    def __init__(self, expected: Expected, num_proc: int) -> None:
        import ray

        self._expected, self._num_proc = expected, num_proc
        self._lost: set[str] | None = None  # ids of dead nodes; None before the first look
        self.done: Counter[str] = Counter()  # tasks by host
        self._store: Any = None  # where a host does not share the cache
        self._work = ray.remote(num_cpus=1, max_retries=RETRIES)(work)

    def check_hosts(self) -> None:
        """Check every host, print the workers, and start the Store if a host does not share the cache."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = self.find_nodes()
        asked = [
            ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))(check_host)
            for node in nodes
        ]
        answers = [ask.remote(self._expected) for ask in asked]
        names = [name for name, _ in nodes.values()]
        shared = [_get(answer, "checking it", name) for answer, name in zip(answers, names, strict=True)]
        if not all(shared):
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._store = ray.remote(num_cpus=0, scheduling_strategy=here)(Store).remote(self._expected.cache)
        apart = [name for name, is_shared in zip(names, shared, strict=True) if not is_shared]
        screen.say(
            f"Ray: {self.count} workers on {', '.join(names)}"
            + (f"; chunks of {', '.join(apart)}, which do not share data.cache_dir, are sent here" if apart else "")
        )

    @property
    def shares_cache(self) -> bool:
        """Whether all hosts share data.cache_dir; known after check_hosts()."""
        return self._store is None

    @property
    def count(self) -> int:
        """The number of workers now: one per CPU, at most data.num_proc per host. Fails as find_nodes()."""
        return sum(min(self._num_proc, cores) for _, cores in self.find_nodes().values())

    def find_nodes(self) -> dict[str, tuple[str, int]]:
        """Return {id: (name, CPUs)} of the hosts with workers that are alive.

        Prints the hosts that were lost since the last call. Raises UserError when none is left.
        """
        import ray

        alive, dead = dict[str, tuple[str, int]](), dict[str, str]()
        for node in ray.nodes():
            name, cores = node["NodeManagerHostname"], int(node["Resources"].get("CPU", 0))
            if not node["Alive"]:
                dead[node["NodeID"]] = name
            elif cores:
                alive[node["NodeID"]] = name, cores
        # A cluster that was joined lists nodes that died long ago, too; they had no chunk of ours.
        for number in dead.keys() - (dead if self._lost is None else self._lost):
            screen.say(f"{dead[number]} is lost; its chunks are done again by the others")
        self._lost = set(dead)
        if not alive:
            raise UserError(
                "no host of the Ray cluster is left", fix="see to the hosts and run again; finished chunks are kept"
            )
        return alive

    def map_in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield function(task) for every task, in order, with about twice as many in flight as there are workers.

        Raises what a task raises, and UserError when no host is left or a chunk's worker is lost too often.
        """
        return workers.map_in_order(self._submit, 2 * self.count, function, tasks)

    def _submit(self, function: Callable[[Any], Any], task: Any) -> Callable[[], Any]:
        """Have a worker call function(task), with the cache files that it needs; return what waits for the result."""
        order = Order(function, task, workers.files_read(task), workers.files_written(task))
        return partial(self._receive, self._work.remote(order, self._expected, self._store), task)

    def _receive(self, reference: Any, task: object) -> Any:
        """Wait for a task, save the files that it sent, count it in `done`, and return its function's result.

        Prints lost hosts. Raises what the task raised, and UserError, naming `task`, when workers are lost too often.
        """
        import ray

        while not ray.wait([reference], timeout=_LOOK_SECONDS)[0]:
            self.find_nodes()
        answer = _get(reference, str(task))
        for path, data in answer.made.items():
            files.write_bytes(path, data)
        self.done[answer.host] += 1
        return answer.value


def _get(reference: Any, place: str, host: str = "") -> Any:
    """Return a task's result. Raises what it raised, or UserError when Ray could not run it; both name the `place`.

    `host` is the only host that may run it, "" for any. For a given host, an ImportError there is a UserError too.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise UserError(cause.problem, evidence=f"{cause.evidence}\nat {place}".strip(), fix=cause.fix) from None
        if host and isinstance(cause, ImportError):
            raise _unfit_error(host, cause) from None
        (cause or error).add_note(f"at {place}" + f" on {host}" * bool(host))
        raise cause or error from None
    except ray.exceptions.RayError as error:
        if host:
            raise _unfit_error(host, error) from None
        raise UserError(
            f"a worker was lost {RETRIES + 1} times on the same chunk, or its host has no memory",
            evidence=f"at {place}\n{type(error).__name__}: {str(error).strip()[:400]}",
            fix="take the rows from there out and run again; if the kernel log says out of memory, lower data.num_proc",
        ) from None


def _unfit_error(host: str, error: Exception) -> UserError:
    """Return the UserError for a host on which no worker can start."""
    return UserError(
        f"{host} belongs to the Ray cluster and cannot run finlm's workers",
        evidence=f"{type(error).__name__}: {str(error).strip()[:400]}",
        fix=f"install the same on {host}: bash scripts/setup.sh, then {INSTALL}; or take it out of the cluster",
    )
