"""The cache of prepared data: one directory a step, named after the hash of everything its result depends on.

<cache_dir>/<step>-<first 16 digits of the key>/ appears whole, its manifest.json written last, or not at all; a rerun
finds it and goes on with the next step, and a changed setting changes only the keys that follow from it. A lock lets
one process at a time build; the kernel frees it when that process is killed, so whatever temporary directory is then
found is left over and is removed. A step's files are flushed before its manifest, which holds their lengths; a step
that does not have them is built again.

Old steps are never removed: delete what no recipe needs any more to win the space back.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import files, screen, units
from finlm.base.errors import UserError

_HASH_BLOCK = 16 * 2**20
_SPACE_TO_SPARE = 16 * 2**20


class NotPrepared(Exception):
    """A step is missing and this cache may not build it."""


@dataclass(frozen=True)
class Step:
    """A complete step."""

    path: Path
    key: str
    manifest: dict[str, Any]
    reused: bool


class Cache:
    """The steps below a directory. With build=False nothing is written and a missing step raises NotPrepared."""

    def __init__(self, directory: Path, *, build: bool) -> None:
        self.directory = directory
        self.build = build
        self._fingerprints = directory / "fingerprints.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cache alone."""
        with ExitStack() as held:
            try:
                held.enter_context(alone(self.directory))
            except OSError as error:
                raise UserError(
                    f"cannot write to data.cache_dir {self.directory}",
                    evidence=str(error),
                    fix="set data.cache_dir to a directory that you may write to",
                ) from None
            with full_disk_is_a_user_error(self.directory, "prepare"):
                yield

    def step(
        self, name: str, depends_on: Mapping[str, Any], make: Callable[[Path], dict[str, Any]], needed_bytes: int
    ) -> Step:
        """The step that depends on these values, made by make(directory) -> manifest unless it exists."""
        key = files.sha256_json({"step": name, **depends_on})
        path = self.directory / f"{name}-{key[:16]}"
        if (path / "manifest.json").is_file():
            manifest = files.read_json(path / "manifest.json")
            damage = _damage(path, manifest.get("file_bytes", {}))
            if not damage:
                return Step(path, key, manifest, reused=True)
            if self.build:
                screen.say(f"{name}: {damage}; made again")
        if not self.build:
            raise NotPrepared(name)
        for left_over in self.directory.glob(f".{name}-*.tmp"):
            shutil.rmtree(left_over)
        if path.exists():  # damaged, or without a manifest: not ours to trust
            shutil.rmtree(path)
        require_space(self.directory, needed_bytes, name)
        with full_disk_is_a_user_error(self.directory, name), files.new_directory(path) as temporary:
            manifest = {"step": name, "key": key, **make(temporary), "file_bytes": _flushed(temporary)}
            files.write_json(temporary / "manifest.json", manifest)
        return Step(path, key, manifest, reused=False)

    def fingerprints(self, paths: list[Path]) -> dict[Path, str]:
        """sha256 of each file; a file whose path, size and mtime are known is not read again."""
        known = files.read_json(self._fingerprints) if self._fingerprints.is_file() else {}
        states = {path: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
        new = [path for path in paths if known.get(str(path.resolve()), [])[:2] != states[path]]
        if new and not self.build:
            raise NotPrepared("fingerprints")
        with bar("fingerprints", sum(states[path][0] for path in new), fast_bytes=2_000_000_000) as advance:
            for path in new:
                known[str(path.resolve())] = [*states[path], _sha256(path, advance)]
        if new:
            files.write_json(self._fingerprints, known)
        return {path: known[str(path.resolve())][2] for path in paths}


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a directory, made where it is missing, for this process; waits for another. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            screen.say(f"waiting for another process that writes in {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_space(directory: Path, needed_bytes: int, step: str) -> None:
    """Raises UserError when the disk cannot hold what a step will write."""
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
    """Turn ENOSPC and EDQUOT into a UserError; what was written so far is gone by then."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk is full: {step} was given up and its unfinished files removed",
            evidence=f"{error.strerror} in {directory.resolve()}",
            fix="free space there, or set data.cache_dir to a larger disk; finished steps are kept",
        ) from None


@contextmanager
def bar(description: str, total: int, fast_bytes: int) -> Iterator[screen.Advance]:
    """A progress bar over bytes; none for a total that is done in about two seconds."""
    shown = screen.progress(description, total) if total > fast_bytes else nullcontext(unseen)
    with shown as advance:
        yield advance


def _flushed(directory: Path) -> dict[str, int]:
    """The length of every file below a directory, all of them on disk: a crash of the host leaves no empty ones."""
    lengths = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            lengths[path.relative_to(directory).as_posix()] = os.fstat(file.fileno()).st_size
    return lengths


def _damage(directory: Path, lengths: Mapping[str, int]) -> str:
    """What is wrong with the first file that is not as long as it was written, "" where all are."""
    for name, wanted in lengths.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != wanted:
            return f"{path} {'is gone' if found is None else f'has {found:,} bytes instead of {wanted:,}'}"
    return ""


def unseen(amount: float, description: str | None = None) -> None:
    """What advances no bar."""


def _sha256(path: Path, advance: screen.Advance) -> str:
    digest = hashlib.sha256()
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}", evidence=str(error), fix="correct its permissions") from None
    with file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
