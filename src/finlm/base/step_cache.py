"""Cache prepared data: one directory a step, named after the hash of everything its result depends on.

<cache_dir>/<step>-<first 16 digits of the key>/ appears whole, its manifest.json written last, or not at all; a rerun
finds it and goes on with the next step, and a changed setting changes only the keys that follow from it. A lock lets
one process at a time build; the kernel frees it when that process is killed, so whatever temporary directory is then
found is left over and is removed. A step's files are flushed before its manifest, which holds their lengths; a step
that does not have them is built again.

Chunks of a step lie in <cache_dir>/chunks under keys of their own, each whole or absent as well: a step that is made
again, after a kill or for one more source, takes those that are there.

Old steps and chunks are never removed: delete what no recipe needs any more to win the space back.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from finlm.base import files, screen, units
from finlm.base.errors import UserError, reason

_HASH_BLOCK = 2**20
_AT_ONCE = 8  # files of a store, or groups of local ones: waiting for each is what takes time
_GROUP = 64  # local files: handing one to a thread takes as long as hashing a small one
_SPACE_TO_SPARE = 16 * 2**20


class StoreFile(Protocol):
    """A file of an object store (corpus/read/remote.py), used like a Path for reading; str() gives its URL."""

    @property
    def name(self) -> str:
        """The last part of its URL."""

    @property
    def suffix(self) -> str:
        """The last suffix of its name."""

    def with_name(self, name: str) -> Self:
        """Return the file of another name in the same directory."""

    def stat(self) -> Any:
        """Return an object whose st_size is the file's size in bytes when it was listed."""

    def open(self, mode: Literal["rb"], /) -> BufferedReader:
        """Open the file for reading; reads it in ranges."""

    def open_exactly(self) -> RawIOBase:
        """Open the file for reading; fetches just the ranges that are asked for."""

    def state(self) -> list[Any]:
        """Return [size, version] when it was listed, which change with its content; "" for a version not known."""

    def state_now(self) -> list[Any] | None:
        """Return [size, version] of the file that the store holds under this name now; None if it is gone."""


File = Path | StoreFile


class NotPrepared(Exception):
    """Raised when a step or a file's hash is missing from a cache that was opened with build=False."""


@dataclass(frozen=True)
class Step:
    """A complete step: its directory, full key and manifest, and whether it was already in the cache."""

    path: Path
    key: str
    manifest: dict[str, Any]
    reused: bool


class Fingerprint(NamedTuple):
    """What a file holds."""

    sha256: str  # hex
    size_bytes: int


class Cache:
    """The steps in a cache directory. With build=False nothing is built, and a missing step raises NotPrepared."""

    def __init__(self, directory: Path, *, build: bool) -> None:
        """Take the cache in `directory`, which need not exist; touch nothing yet."""
        self.directory = directory
        self.build = build
        self._fingerprints = directory / "fingerprints.json"
        self._is_swept = False
        self.used: list[Path] = []  # the steps that were in the cache already, in the order they were asked for

    @contextmanager
    def lock_cache(self) -> Iterator[None]:
        """Lock the cache directory in the block, waiting for another process.

        Makes the directory if it is missing, and first removes what a killed process left there. Prints that it waits.
        Raises UserError when the directory cannot be written, or when the disk is full during the block.
        """
        with ExitStack() as held:
            try:
                held.enter_context(lock_directory(self.directory))
            except OSError as error:
                raise UserError(
                    f"cannot write to data.cache_dir {self.directory}",
                    evidence=str(error),
                    fix="set data.cache_dir to a directory that you may write to",
                ) from None
            with full_disk_is_a_user_error(self.directory, "prepare"):
                for unfinished in self.directory.glob(".*.tmp"):
                    shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
                yield

    def step(
        self,
        name: str,
        depends_on: Mapping[str, Any],
        make: Callable[[Path], Mapping[str, object]],
        needed_bytes: int | Callable[[], int],
    ) -> Step:
        """Return the step of this name and these inputs from the cache, or build it with make(directory) -> manifest.

        `depends_on` holds the inputs as JSON-able values. To build, the caller holds lock_cache(). `make` writes into
        an empty temporary directory; its manifest is stored with step, key and file lengths added. A step with a file
        of another length is built again, with a notice on stderr. `needed_bytes` of disk, or what that function
        returns, must be free to build. Raises UserError when they are not or a stored manifest is not JSON, and
        NotPrepared when the step is missing or damaged and build is False.
        """
        key = files.sha256_json({"step": name, **depends_on})
        path = self.directory / f"{name}-{key[:16]}"
        if (path / "manifest.json").is_file():
            manifest = files.read_json(path / "manifest.json")
            damage = _damage(path, manifest.get("file_bytes", {}))
            damage = damage or _damage(self.directory, manifest.get("kept_bytes", {}))
            if not damage:
                self.used.append(path)
                return Step(path, key, manifest, reused=True)
            if self.build:
                screen.say(f"{name}: {damage}; made again")
        if not self.build:
            raise NotPrepared(name)
        if not self._is_swept:  # once: there may be a million chunks
            for unfinished in self.directory.glob("chunks/*/*/.*.tmp"):
                unfinished.unlink()
            self._is_swept = True
        if path.exists():  # damaged, or without a manifest: not ours to trust
            shutil.rmtree(path)
        require_space(self.directory, needed_bytes if isinstance(needed_bytes, int) else needed_bytes(), name)
        with full_disk_is_a_user_error(self.directory, name), files.new_directory(path) as temporary:
            manifest = {"step": name, "key": key, **make(temporary), "file_bytes": _flush_files(temporary)}
            files.write_json(temporary / "manifest.json", manifest)
        return Step(path, key, manifest, reused=False)

    def chunk(self, name: str, key: str) -> Path:
        """Return the path, without a suffix, where the step `name` keeps the chunk with this key; it need not exist."""
        return self.directory / "chunks" / name / key[:2] / key

    def fingerprints(self, paths: Sequence[File]) -> list[Fingerprint]:
        """Return the Fingerprint of each file; files with path, inode, size and times known from before are not read.

        Of a store's file, size and version must be known instead. Shows a bar for more than 2 GB. Stores new hashes in
        fingerprints.json. Raises UserError for a file that cannot be read or changes meanwhile, NotPrepared for a file
        with no known hash when build is False, and OSError for a missing local file.
        """
        known = files.read_json(self._fingerprints) if self._fingerprints.is_file() else {}
        states = [_state(path) for path in paths]
        names = [str(path.absolute() if isinstance(path, Path) else path) for path in paths]
        new = [
            (path, name, state)
            for path, name, state in zip(paths, names, states, strict=True)
            if known.get(name, [])[:-1] != state or "" in state  # "": a store without versions, so read it every time
        ]
        if new and not self.build:
            raise NotPrepared("fingerprints")
        with bar("fingerprints", sum(_size(state) for _, _, state in new), fast_bytes=2_000_000_000) as advance:
            hashes = _hash_all([path for path, _, _ in new], advance)
            for (path, name, state), digest in zip(new, hashes, strict=True):
                known[name] = [*state, digest]
                check_unchanged(path, state)
        if new:
            files.write_json(self._fingerprints, known)
        return [Fingerprint(known[name][-1], _size(state)) for name, state in zip(names, states, strict=True)]


def require_space(directory: Path, needed_bytes: int, step: str) -> None:
    """Raise UserError, naming the step, when the directory's disk has less than needed_bytes + 16 MiB free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes + _SPACE_TO_SPARE:
        raise UserError(
            f"not enough disk space for the step {step}",
            evidence=f"{units.format_bytes(needed_bytes + _SPACE_TO_SPARE)} needed in {directory.resolve()} "
            f"(an upper estimate), {units.format_bytes(free)} free",
            fix="free space there, or set data.cache_dir to a larger disk",
        )


@contextmanager
def full_disk_is_a_user_error(directory: Path, step: str) -> Iterator[None]:
    """Turn an OSError of the block that says full disk or quota (ENOSPC, EDQUOT) into a UserError that names the step.

    Passes on any other error. Its message says that unfinished files were removed, which the caller must do.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk is full: {step} was given up and its unfinished files removed",
            evidence=f"{reason(error)} in {directory.resolve()}",
            fix="free space there, or set data.cache_dir to a larger disk; finished steps are kept",
        ) from None


@contextmanager
def bar(description: str, total: int, fast_bytes: int) -> Iterator[screen.Advance]:
    """Show a progress bar of `total` bytes in the block, none for at most fast_bytes; yield what moves it."""
    shown = screen.progress(description, total) if total > fast_bytes else nullcontext(ignore_progress)
    with shown as advance:
        yield advance


def _flush_files(directory: Path) -> dict[str, int]:
    """Flush every file below a directory to disk and return {relative path: length in bytes}."""
    lengths = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            lengths[path.relative_to(directory).as_posix()] = os.fstat(file.fileno()).st_size
    return lengths


def _damage(directory: Path, lengths: Mapping[str, int]) -> str:
    """Return a sentence about the first file whose length is not the given one, or "" when all match."""
    for name, wanted in lengths.items():
        path = directory / name
        length = path.stat().st_size if path.is_file() else None
        if length != wanted:
            return f"{path} {'is gone' if length is None else f'has {length:,} bytes instead of {wanted:,}'}"
    return ""


def ignore_progress(amount: float) -> None:
    """Do nothing; used as the Advance where no bar is shown."""


def _state(path: File) -> list[Any]:
    """Return values that change when a file does: [inode, bytes, mtime, ctime], or a store's [size, version].

    Times are in ns. A store's file has these values as they were when it was listed. ctime is included because rsync -t
    and cp -p restore mtime. Raises FileNotFoundError for a missing local file.
    """
    if not isinstance(path, Path):
        return path.state()
    about = path.stat()
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _size(state: list[Any]) -> int:
    """Return the size in bytes that a _state() holds."""
    return int(state[1] if len(state) == 4 else state[0])


def check_unchanged(path: File, state: list[Any]) -> None:
    """Raise UserError when a file is gone or no longer has this state (_state, or state_now for a store's file)."""
    is_gone = isinstance(path, Path) and not path.exists()
    if is_gone or (_state(path) if isinstance(path, Path) else path.state_now()) != state:
        raise file_changed(path)


def file_changed(path: File) -> UserError:
    """Return, without raising it, the UserError for a file whose bytes changed while, or after, they were hashed."""
    if isinstance(path, Path):
        size: Any = path.stat().st_size if path.exists() else None
    else:
        state = path.state_now()
        size = state and state[0]
    return UserError(
        f"{path} changed while it was read",
        evidence="it is gone" if size is None else f"it has {size:,} bytes now, and other ones than were hashed",
        fix="run again when nothing writes to it any more; finished work is kept",
    )


def _hash_all(paths: Sequence[File], advance: screen.Advance) -> Iterator[str]:
    """Yield the hex sha256 of each file in order; reads up to _AT_ONCE files of a store, or groups of others, at once.

    Raises UserError when a file cannot be opened, OSError when reading fails later.
    """
    size = _GROUP if all(isinstance(path, Path) for path in paths) else 1
    groups = [paths[first : first + size] for first in range(0, len(paths), size)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for hashes in pool.map(lambda group: [sha256(path, advance) for path in group], groups):
                yield from hashes
        finally:
            pool.shutdown(cancel_futures=True)


def sha256(path: File, advance: screen.Advance = ignore_progress) -> str:
    """Return a file's hex sha256; calls advance(bytes) for each block.

    Raises UserError when the file cannot be opened, OSError when reading fails later.
    """
    digest = hashlib.sha256()
    try:
        file = path.open("rb", buffering=0) if isinstance(path, Path) else path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}", evidence=str(error), fix="correct its permissions") from None
    with file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory in the block; make the directory if it is missing. Raises OSError.

    Waits without a limit while another process holds the lock, and says so on stderr.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            screen.say(f"waiting for another process that writes in {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
