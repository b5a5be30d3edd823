"""A checkpoint on disk: shard files proved by size and sha256, complete once its manifest exists.

    checkpoints/.step-N.saving/   being written, aside; a kill at any byte leaves only this
    checkpoints/step-N/           renamed to it after manifest.json was written into it, last
    checkpoints/.step-N.removed/  superseded; what a kill leaves of it goes at the next start
    checkpoints/step-N.damaged/   failed its proof on resume: kept for a look, never used

Every directory lists what it holds: without a shared disk each host has the shards of its own ranks and its own
manifest. Names in a manifest are relative paths inside its directory, anything else is refused: manifests come from
other hosts and strangers. Hashes are taken block by block in threads (hashlib releases the interpreter lock): 16
threads prove 10 GB/s and more, one file in one thread 0.5 to 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError

VERSION = 2
MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 26
_READ_BYTES = 1 << 20


class Unreadable(UserError):
    """A manifest that is no JSON: damage, where other errors of a manifest are another version's or a stranger's."""


@dataclass(frozen=True)
class Part:
    """One file: its size, the sha256 of its blocks' sha256, and the rank that wrote it."""

    bytes: int
    sha256: str
    rank: int


@dataclass(frozen=True)
class Manifest:
    """What a directory holds of a checkpoint, and the layout its shards were cut for."""

    step: int
    world_size: int
    zero_stage: int
    offload_optimizer: str
    files: Mapping[str, Part]

    @property
    def layout(self) -> tuple[int, int, str]:
        """What the shards are cut for: ranks, ZeRO stage, where the optimizer lives."""
        return self.world_size, self.zero_stage, self.offload_optimizer

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(part.bytes for part in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(value: Any, where: str) -> Manifest:
        """The inverse of to_json; `where` names it in errors. Raises UserError for what we did not write."""
        try:
            if value["version"] != VERSION:
                raise KeyError(f"version {value['version']}")
            parts = {
                name: Part(int(p["bytes"]), str(p["sha256"]), int(p["rank"])) for name, p in value["files"].items()
            }
            step, world_size, stage = (int(value[key]) for key in ("step", "world_size", "zero_stage"))
            manifest = Manifest(step, world_size, stage, str(value["offload_optimizer"]), parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{where} was written by another version of finlm, or is not a checkpoint's manifest",
                evidence=f"{type(error).__name__}: {error}",
                fix="use the code that the run directory carries: PYTHONPATH=RUN/code python -m finlm ...",
            ) from None
        outside = [name for name in parts if not _is_inside(name)]
        if outside:
            raise UserError(
                f"{where} names files outside its directory",
                evidence=", ".join(repr(name) for name in outside[:5]),
                fix="finlm writes no such manifest: find out where this checkpoint comes from before you use it",
            )
        return manifest

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a complete checkpoint."""
        path = directory / MANIFEST
        try:
            return Manifest.from_json(files.read_json(path), str(path))
        except files.NotJson as error:
            raise Unreadable(error.problem, evidence=error.evidence, fix=f"remove {directory}") from None


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    safe = all(part not in ("", ".", "..") for part in parts) and not any(c in name for c in "\\\0")
    return safe and not PurePosixPath(name).is_absolute() and name != MANIFEST


def sha256(paths: Iterable[Path], threads: int) -> dict[Path, str]:
    """Hex sha256 over the sha256 of the blocks of every file, all blocks of all files in parallel."""
    blocks = [(path, start) for path in paths for start in range(0, max(1, path.stat().st_size), BLOCK_BYTES)]
    with ThreadPoolExecutor(max(1, min(threads, len(blocks)))) as pool:
        digests = list(pool.map(_block_digest, blocks))
    whole: dict[Path, Any] = {}
    for (path, _), digest in zip(blocks, digests, strict=True):
        whole.setdefault(path, hashlib.sha256()).update(digest)
    return {path: hashed.hexdigest() for path, hashed in whole.items()}


def _block_digest(block: tuple[Path, int]) -> bytes:
    path, start = block
    hashed, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = BLOCK_BYTES
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            hashed.update(buffer[:count])
            left -= count
    return hashed.digest()


def faults(directory: Path, parts: Mapping[str, Part], threads: int) -> list[str]:
    """One sentence for every file that is not what the manifest says; sizes first, then contents in parallel."""
    found, whole = [], {}
    for name, part in parts.items():
        path = directory / name
        if path.is_symlink() or not path.is_file():
            found.append(f"{name}: the file is {'a link' if path.is_symlink() else 'missing'}")
        elif path.stat().st_size != part.bytes:
            found.append(f"{name}: expected {part.bytes} bytes, found {path.stat().st_size}")
        else:
            whole[path] = name
    try:
        hashes = sha256(whole, threads)
    except OSError as error:  # a disk that cannot read it
        return [*found, f"{error.filename or directory}: {error.strerror}"]
    found += [f"{name}: sha256 differs" for path, name in whole.items() if hashes[path] != parts[name].sha256]
    return found


def strangers(directory: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that its manifest does not list. Nothing reads them."""
    present = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(name for name in present if name != MANIFEST and name not in manifest.files)


def aside(directory: Path) -> Path:
    """Where step-N is written before it counts."""
    return directory.with_name(f".{directory.name}.saving")


def publish(directory: Path, manifest: Manifest) -> None:
    """Make what lies aside count as step-N: manifest last, then one rename, all of it on the disk."""
    saved = aside(directory)
    files.write_json(saved / MANIFEST, manifest.to_json())
    sync_directory(saved)
    remove(directory)  # left by a run that went back behind it
    saved.rename(directory)
    sync_directory(directory.parent)


def remove(directory: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no half-removed one ever counts or stays after a kill."""
    gone = directory.with_name(f".{directory.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def set_aside(directory: Path) -> Path:
    """Take a damaged checkpoint out of the count but keep it; its new name."""
    damaged = directory.with_name(f"{directory.name}.damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    return directory.rename(damaged)


def superseded(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Steps whose checkpoints go: all but the newest keep_last and the multiples of keep_every."""
    ordered = sorted(steps)
    return [step for step in ordered[:-keep_last] if keep_every is None or step % keep_every]


def sync_directory(directory: Path) -> None:
    """Put a directory's entries on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
