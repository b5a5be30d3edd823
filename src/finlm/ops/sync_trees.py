"""Which files a sync carries: the code of a repository, and data paths; each with its sha256.

Code is what git would show a new clone plus the untracked files it does not ignore, so edits travel before they are
committed and .venv, caches and runs do not. Every file is read once to hash it (about 1 GB/s).

It does not follow submodules or nested repositories: it names them and leaves them out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.ops import ssh, sync_remote

_SYNC_OWN = ".finlm-"  # record, lock and cut transfers


@dataclass(frozen=True, eq=False)
class Tree:
    """A directory's files by relative name with their sha256; links are followed in data and kept in code."""

    path: Path
    files: dict[str, str]
    size_bytes: int
    follow_links: bool
    there: Path | None = None  # where it lies on the host; the same path when None

    @property
    def key(self) -> str:
        """The host's path as text that survives JSON."""
        return sync_remote.text(self.there or self.path)

    @cached_property
    def sha256(self) -> str:
        """The tree hash: sha256 over the sorted lines `path sha256`."""
        return sync_remote.tree_hash(dict(self.files))

    def to_json(self) -> dict[str, Any]:
        """What sync_remote needs to know."""
        return {"path": self.key, "files": self.files, "follow": self.follow_links}


def code(root: Path) -> Tree:
    """The tracked and the untracked, not ignored files of a git checkout; without git all but a host's own."""
    names = _listed_by_git(root) if (root / ".git").exists() else list(_listed_by_walk(root))
    nested = [name for name in names if _is_folder(root, name)]
    for name in nested:
        screen.say(f"{root / name}: a repository of its own, not copied")
    return _tree(root, [name for name in names if name not in set(nested)], follow_links=False)


def named(root: Path, names: list[str]) -> Tree:
    """These files below root, and all files of those that are directories; what does not exist is left out."""
    found = [name for name in names if (root / name).is_file()]
    for name in names:
        below = _files_below(root / name, skip=("__pycache__",)) if (root / name).is_dir() else ()
        found += [f"{name}/{file}" for file in below]
    return _tree(root, found, follow_links=False)


def data(path: Path) -> Tree:
    """All files of a data directory, or one data file. Raises UserError when there is none."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links, and the path must stay the same
    if path.is_file():
        return _tree(path.parent, [path.name], follow_links=True)
    if not path.is_dir():
        raise UserError(
            f"the data path {path} does not exist", fix="make it with `finlm prepare RECIPE`, or correct it"
        )
    return _tree(path, list(_files_below(path)), follow_links=True)


def _tree(path: Path, names: list[str], *, follow_links: bool) -> Tree:
    names = [name for name in names if not any(part.startswith(_SYNC_OWN) for part in name.split("/"))]
    try:
        found = sync_remote.digests(sync_remote.text(path), names, follow_links)
    except OSError as error:
        raise UserError(f"a file of {path} cannot be read", evidence=str(error)) from None
    files = {name: value for name, value in found.items() if value is not None}  # tracked, but deleted here
    size = sum((path / sync_remote.local(name)).stat(follow_symlinks=follow_links).st_size for name in files)
    return Tree(path, files, size, follow_links)


def _listed_by_git(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(
            f"{root} is a git checkout, and git is not installed",
            evidence="git knows which files are ignored and must not be copied",
            fix="apt-get install git",
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"git cannot list the files of {root}",
            evidence=ssh.last_lines(error.stderr.decode(errors="replace")),
            fix=f"make `git -C {root} status` work first",
        ) from None
    return list(dict.fromkeys(sync_remote.decode(name).rstrip("/") for name in listed.split(b"\0") if name))


def _listed_by_walk(root: Path) -> Iterator[str]:
    for name in _files_below(root, links_to_folders=False, skip=("__pycache__", ".git")):
        if name.split("/")[0] not in sync_remote.UNTOUCHED:
            yield name


def _files_below(root: Path, *, links_to_folders: bool = True, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Relative names of all files; a folder reached twice through links is listed once, so that loops end."""
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=links_to_folders):
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if name not in skip)
        links = [] if links_to_folders else [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted(names + links):
            yield sync_remote.text((Path(folder) / name).relative_to(root))


def _is_folder(root: Path, name: str) -> bool:
    path = root / sync_remote.local(name)
    return path.is_dir() and not path.is_symlink()
