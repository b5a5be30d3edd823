"""Files that are whole or absent: atomic writes, hashes, JSON.

A reader that finds a file under its final name may trust it. Nothing here locks: two writers of one name race, and the
last rename wins with a whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write text under path in one step: a temporary neighbour, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")  # hosts may share a disk
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write value as indented JSON with a stable key order, atomically."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


class NotJson(UserError, ValueError):
    """A file that should be a JSON document and is none: a power cut emptied it, or somebody edited it."""


def read_json(path: Path) -> Any:
    """The JSON document in path. Raises NotJson."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "it may have been cut short: put a whole copy in its place"
        raise NotJson(f"{path} is not JSON", evidence=str(error), fix=fix) from None


def append_json_line(path: Path, value: Any) -> None:
    """Append one JSON object as a line of its own, also after a line that a kill cut short."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        file.write(line)


def read_json_lines(path: Path) -> Iterator[Any]:
    """The objects of a JSON-lines file; lines that a kill cut short are left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parse_json_lines(file)


def parse_json_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """The objects of those lines that are whole."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def within(root: Path, name: str) -> Path:
    """root / name, for a name that came from elsewhere. Raises ValueError when it leads out of root."""
    path = root / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{name!r} leads out of {root}")
    return path


def tree_hash(root: Path, paths: Iterable[Path]) -> str:
    """Hex sha256 over (relative path, sha256) of the files, independent of their order."""
    lines = sorted(f"{path.relative_to(root).as_posix()} {sha256_file(path)}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary neighbour of path that becomes path when the block ends well and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
