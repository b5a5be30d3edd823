"""Write files and directories that are whole or absent; read and hash files, as JSON too.

A reader that finds a file under its final name may trust it. Two writers of one name race unless they lock its
directory: the last rename wins with a whole file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError

_READABLE = 1_000_000  # characters


def write_text(path: Path, text: str) -> None:
    """Write text to path in UTF-8, whole or not at all, making missing parents. Raises OSError."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts to path atomically (temporary file, fsync, rename), making missing parents. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")  # hosts may share a disk
    try:
        with temporary.open("wb", buffering=2**20) as file:  # a call of the kernel for 8 KiB takes as long as the copy
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a new temporary directory beside `path`; rename it to `path` at the end, or remove it after an error.

    Raises OSError if `path` exists by then, unless it is an empty directory.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write value to path atomically as JSON, with its keys in their own order; indented below a million characters.

    Makes missing parent directories. Raises TypeError for a value that JSON cannot hold, and OSError.
    """
    text = json.dumps(value, ensure_ascii=False)
    if len(text) < _READABLE:  # indenting takes ten times as long
        text = json.dumps(value, ensure_ascii=False, indent=2)
    write_text(path, text + "\n")


class NotJson(UserError, ValueError):
    """Raised when a file that should hold JSON does not: a power cut emptied it, or somebody edited it."""


def read_json(path: Path) -> Any:
    """Return the JSON value in path. Raises NotJson if it is not JSON in UTF-8, and OSError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "it may have been cut short: put a whole copy in its place"
        raise NotJson(f"{path} is not JSON", evidence=str(error), fix=fix) from None


def read_from(path: Path, offset: int) -> str:
    """Return a file's text from the byte `offset` on, with U+FFFD for what is not UTF-8; "" if there is no file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def append_json_line(path: Path, value: Any) -> None:
    """Append value to path as a line of JSON, making the file; first end a last line that a kill cut short. OSError."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    with path.open("ab+") as file:  # appending, so tell() is the file's size
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            error.filename = str(path)  # a full disk names no file
            raise


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield each value of a JSON-lines file; skip lines that are not JSON. Yields nothing for a missing file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parse_json_lines(file)


def parse_json_lines(lines: Iterable[bytes]) -> Iterator[Any]:
    """Yield the value of each line that is valid JSON; skip the others."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hex sha256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@contextmanager
def lock(path: Path, busy: UserError) -> Iterator[None]:
    """Hold an exclusive lock (flock) on a file in the block; raise `busy` at once if another process has it.

    Makes the file, or empties it; the kernel frees the lock when the process ends. Raises OSError if it cannot be made.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield


def within(root: Path, name: str) -> Path:
    """Return root / name for an untrusted name. Raises ValueError if it is absolute or leads out of root."""
    path = root / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{name!r} leads out of {root}")
    return path
