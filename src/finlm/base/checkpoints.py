"""Write, check and remove checkpoints: shard files proved by size and sha256, complete once the manifest exists.

    checkpoints/.step-N.saving/   being written, aside; a kill at any byte leaves only this
    checkpoints/step-N/           renamed to it after manifest.json was written into it, last
    checkpoints/.step-N.removed/  superseded; what a kill leaves of it goes at the next start
    checkpoints/step-N.damaged/   failed its proof on resume: kept for a look, never used
    checkpoints/step-N ->         a link to one in this host's memory (train/zero/in_memory.py), while that is there

Every directory lists what it holds: without a shared disk each host has the shards of its own ranks. Names in a
manifest are relative paths inside its directory, anything else is refused: manifests come from other hosts and
strangers. 16 threads prove 10 GB/s and more, one 0.5 to 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError, reason

VERSION = 2
MANIFEST = "manifest.json"
MODEL_MANIFEST = "finlm.json"  # of a model directory, written last: its origin and its files' hashes
THREADS = 16
BLOCK_BYTES = 1 << 26  # hashed side by side; the sha256 of a whole file cannot be
_READ_BYTES = 1 << 20


class Unreadable(UserError):
    """Raised when a checkpoint's manifest is not JSON, so damaged; another version raises a plain UserError."""


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint: its bytes, the sha256 of its blocks' sha256, and the rank that wrote it."""

    bytes: int
    sha256: str
    rank: int


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint in one directory, and the layout that the shards were cut for.

    `identity` is a hash over the files of all ranks, another for each save of a step; empty in older manifests.
    """

    step: int
    world_size: int
    zero_stage: int
    offload_optimizer: str
    files: Mapping[str, Part]
    identity: str = ""

    @property
    def layout(self) -> tuple[int, int, str]:
        """(ranks, ZeRO stage, where the optimizer lives): the layout that the shards were cut for."""
        return self.world_size, self.zero_stage, self.offload_optimizer

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(part.bytes for part in self.files.values())

    @property
    def is_whole(self) -> bool:
        """Whether a run can resume from these files alone: they include those of every rank, or the ZeRO stage is 0."""
        return self.zero_stage == 0 or {part.rank for part in self.files.values()} >= set(range(self.world_size))

    def to_json(self) -> dict[str, object]:
        """Return the content of manifest.json."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(value: Any, where: str) -> Manifest:
        """Return the Manifest of manifest.json's parsed content, `value`; `where` is the path that errors name.

        Raises UserError if it is not of this version, and for a file name that leads outside the directory.
        """
        try:
            if value["version"] != VERSION:
                raise KeyError(f"version {value['version']}")
            parts = {
                name: Part(int(p["bytes"]), str(p["sha256"]), int(p["rank"])) for name, p in value["files"].items()
            }
            step, world_size, stage = (int(value[key]) for key in ("step", "world_size", "zero_stage"))
            offload, identity = str(value["offload_optimizer"]), str(value.get("identity", ""))
            manifest = Manifest(step, world_size, stage, offload, parts, identity)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{where} was written by another version of finlm, or is not a checkpoint's manifest",
                evidence=f"{type(error).__name__}: {error}",
                fix="use the code that the run directory carries: PYTHONPATH=RUN/code python -m finlm ...",
            ) from None
        outside = [name for name in parts if not is_inside(name)]
        if outside:
            raise UserError(
                f"{where} names files outside its directory",
                evidence=", ".join(repr(name) for name in outside[:5]),
                fix="finlm writes no such manifest: find out where this checkpoint comes from before you use it",
            )
        return manifest

    @staticmethod
    def read_if_readable(directory: Path) -> Manifest | None:
        """Return the manifest, None if it is missing or not JSON. Raises UserError as from_json() does."""
        try:
            return Manifest.read(directory)
        except (FileNotFoundError, Unreadable):
            return None

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Return the manifest of a complete checkpoint.

        Raises FileNotFoundError without manifest.json, Unreadable when it is not JSON, UserError as from_json() does.
        """
        path = directory / MANIFEST
        try:
            return Manifest.from_json(files.read_json(path), str(path))
        except files.NotJson as error:
            raise Unreadable(
                error.problem, evidence=error.evidence, fix=f"use another one; mv {directory} {directory}.damaged"
            ) from None


def common_steps(each: Sequence[Mapping[int, str]]) -> set[int]:
    """Return the steps for which every host has a checkpoint of the same save, from {step: identity} of each host.

    An identity "" is unknown and matches any other.
    """
    steps = set(each[0]).intersection(*each[1:])
    return {step for step in steps if len({identities[step] for identities in each} - {""}) <= 1}


def missing_error(
    where: Path, steps: Mapping[str, Iterable[int]], *, recorded: int = 0, damaged: str = ""
) -> UserError:
    """Return, without raising it, the UserError for a run at `where` that has no checkpoint common to all hosts.

    `steps` maps host names to the steps that they have. `recorded` is the newest step that events.jsonl says was saved,
    0 if none. `damaged` names damaged checkpoints, "" if none.
    """
    held = {host: ", ".join(map(str, sorted(each))) for host, each in steps.items()}
    evidence = "; ".join(f"{host}: {'steps ' + each if each else 'none'}" for host, each in held.items())
    evidence += f"; events.jsonl records one after step {recorded:,}" * (recorded > 0)
    evidence += f"\ndamaged and set aside: {damaged}" * bool(damaged)
    back = ", ".join(host for host, each in held.items() if not each) or "every host, of one step"
    return UserError(
        f"no checkpoint of {where} is on all hosts, so nothing was started",
        evidence=evidence,
        fix=f"bring {where}/checkpoints back to {back}; or start another run with --new",
    )


def whole_checkpoints(directories: Iterable[tuple[int, Path]]) -> dict[int, Path]:
    """Return {step: directory} of those of (step, directory) that have all ranks' files, oldest first.

    Leaves out checkpoints whose manifest is missing or cannot be read.
    """
    whole = {}
    for step, directory in sorted(directories):
        with contextlib.suppress(UserError, FileNotFoundError):
            if Manifest.read(directory).is_whole:
                whole[step] = directory
    return whole


def identities(directories: Iterable[tuple[int, Path]]) -> dict[int, str]:
    """Return {step: identity} of (step, directory) pairs with a manifest; "" for a manifest that cannot be read."""
    known = {}
    for step, directory in directories:
        try:
            known[step] = Manifest.read(directory).identity
        except FileNotFoundError:  # another rank of this host has just removed it (keep_last)
            continue
        except UserError:
            known[step] = ""
    return known


def is_inside(name: str) -> bool:
    """Return whether a manifest's file name stays inside its directory and is not the manifest's own name."""
    parts = name.split("/")
    safe = all(part not in ("", ".", "..") for part in parts) and not any(c in name for c in "\\\0")
    return safe and not PurePosixPath(name).is_absolute() and name != MANIFEST


def sha256(paths: Iterable[Path], threads: int, advance: Callable[[], None] | None = None) -> dict[Path, str]:
    """Return {path: hex sha256 over the sha256s of the file's 64 MiB blocks}, hashing `threads` blocks at a time.

    Calls `advance` after each block. Raises OSError when a file cannot be read.
    """
    blocks = [(path, start) for path in paths for start in range(0, max(1, path.stat().st_size), BLOCK_BYTES)]
    with ThreadPoolExecutor(max(1, min(threads, len(blocks)))) as pool:
        whole: dict[Path, Any] = {}
        for (path, _), digest in zip(blocks, pool.map(_block_digest, blocks), strict=True):
            whole.setdefault(path, hashlib.sha256()).update(digest)
            if advance is not None:
                advance()
    return {path: hashed.hexdigest() for path, hashed in whole.items()}


def _block_digest(block: tuple[Path, int]) -> bytes:
    """Return the raw sha256 of one block of a file, BLOCK_BYTES or less at its end; `block` is (path, first byte)."""
    path, start = block
    hashed, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = BLOCK_BYTES
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            hashed.update(buffer[:count])
            left -= count
    return hashed.digest()


def find_faults(
    directory: Path, parts: Mapping[str, Part], threads: int, advance: Callable[[], None] | None = None
) -> list[str]:
    """Return a sentence for each file that is missing, a link, or differs from its Part in size or sha256; [] if none.

    Calls `advance` after each hashed block. A read error does not raise: it ends the hashing and becomes a sentence.
    """
    problems, whole = [], {}
    for name, part in parts.items():
        path = directory / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name}: the file is {'a link' if path.is_symlink() else 'missing'}")
        elif path.stat().st_size != part.bytes:
            problems.append(f"{name}: expected {part.bytes} bytes, found {path.stat().st_size}")
        else:
            whole[path] = name
    try:
        hashes = sha256(whole, threads, advance)
    except OSError as error:  # a disk that cannot read it
        return [*problems, f"{error.filename or directory}: {reason(error)}"]
    problems += [f"{name}: sha256 differs" for path, name in whole.items() if hashes[path] != parts[name].sha256]
    return problems


def unlisted_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return the sorted relative paths of a checkpoint's files that its manifest does not list; nothing reads them."""
    present = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(name for name in present if name != MANIFEST and name not in manifest.files)


def temporary_path(directory: Path) -> Path:
    """Return the path of the hidden directory beside step-N where a checkpoint is written before it is published."""
    return directory.with_name(f".{directory.name}.saving")


def publish(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into step-N's temporary directory and rename this to `directory`, in place of a former one.

    The caller has written the files there and flushed them. Raises OSError.
    """
    saved = temporary_path(directory)
    files.write_json(saved / MANIFEST, manifest.to_json())
    sync_path(saved)
    remove(directory)  # left by a run that went back behind it
    saved.rename(directory)
    sync_path(directory.parent)


def publish_linked(directory: Path, link: Path, manifest: Manifest) -> None:
    """Publish step-N at `directory`, in a host's memory, then make `link`, in the run's checkpoints, a symlink to it.

    Removes the checkpoint that `link` was, or led to, before. The link appears last and whole. Raises OSError.
    """
    publish(directory, manifest)
    if not (link.is_symlink() and link.readlink() == directory):
        remove(link)
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(directory)
    fresh.replace(link)


def remove(directory: Path) -> None:
    """Remove a checkpoint, if it exists; of a symlink to one in memory, both.

    What cannot be deleted stays as .step-N.removed, without an error. Raises OSError if the renaming to that fails.
    """
    if directory.is_symlink():
        link, directory = directory, Path(os.path.realpath(directory))
        link.unlink(missing_ok=True)
    gone = directory.with_name(f".{directory.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(gone)  # first: a kill while files go leaves no incomplete checkpoint at this path
    shutil.rmtree(gone, ignore_errors=True)


def set_aside(directory: Path) -> Path:
    """Rename a damaged checkpoint to step-N.damaged, deleting an earlier one; return the new path. Raises OSError."""
    damaged = directory.with_name(f"{directory.name}.damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    return directory.rename(damaged)


def steps_to_remove(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Return the steps to delete, in order: all but the newest keep_last (1 or more) and multiples of keep_every."""
    ordered = sorted(steps)
    return [step for step in ordered[:-keep_last] if keep_every is None or step % keep_every]


def sync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
