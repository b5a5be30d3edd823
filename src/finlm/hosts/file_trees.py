"""List the files that a sync carries and that must be equal on every host, and send them by rsync.

Code is what git would show a new clone plus the untracked files it does not ignore, so edits travel before they are
committed and .venv, caches and runs do not. For a sync every file is read once to hash it (about 1 GB/s); doctor
compares fingerprints (remote/receiver.py), within a second also for large data. Submodules and nested repositories are
named and left out.

A file appears under its final name only when it is whole; what a cut transfer brought waits in .finlm-partial beside
it, and the next one sends only the rest. Nothing is deleted on the far side, and no owner or group is kept, as users
differ between hosts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.hosts import ssh
from finlm.hosts.remote import receiver
from finlm.recipe import parents
from finlm.recipe.schema import Recipe

_SYNC_OWN = ".finlm-"  # record, lock and cut transfers


@dataclass(frozen=True, eq=False)
class SyncTree:
    """The files below a directory: sha256 by relative name, and their total size.

    `follow_links` says that a link stands for the file it leads to, as in data; in code it is copied as a link.
    """

    path: Path
    files: dict[str, str]
    size_bytes: int
    follow_links: bool
    path_there: Path | None = None  # where it lies on the host; the same path when None

    @property
    def key(self) -> str:
        """The tree's path on the host, as text that survives JSON."""
        return receiver.text(self.path_there or self.path)

    @cached_property
    def sha256(self) -> str:
        """The tree hash: sha256 over the sorted lines `path sha256`."""
        return receiver.tree_hash(dict(self.files))


def code_tree(root: Path) -> SyncTree:
    """Return a SyncTree of a checkout's tracked files and its untracked files that git does not ignore.

    Without .git it has all but .venv, cache, runs and __pycache__. Prints nested repositories, which are left out.
    Raises UserError when git fails or is missing, or a file cannot be read.
    """
    if (root / ".git").exists():
        names = _list_by_git(root)
    else:
        below = _files_below(root, links_to_folders=False, skip=("__pycache__", ".git"))
        names = [name for name in below if name.split("/")[0] not in receiver.UNTOUCHED]
    nested = {name for name in names if (path := root / receiver.local(name)).is_dir() and not path.is_symlink()}
    for name in nested:
        screen.say(f"{root / name}: a repository of its own, not copied")
    return _hash_tree(root, [name for name in names if name not in nested], follow_links=False)


def named_tree(root: Path, names: list[str]) -> SyncTree:
    """Return a SyncTree of these files below root and of all files in those that are directories; skip missing names.

    Leaves out __pycache__. Raises UserError when a file cannot be read.
    """
    listed = [name for name in names if (root / name).is_file()]
    for name in names:
        below = _files_below(root / name, skip=("__pycache__",)) if (root / name).is_dir() else ()
        listed += [f"{name}/{file}" for file in below]
    return _hash_tree(root, listed, follow_links=False)


def data_tree(path: Path) -> SyncTree:
    """Return a SyncTree, with links followed, of a data directory, or of a single file in its directory.

    Raises UserError if it does not exist or a file cannot be read.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links, and the path must stay the same
    if path.is_file():
        return _hash_tree(path.parent, [path.name], follow_links=True)
    if not path.is_dir():
        raise UserError(
            f"the data path {path} does not exist", fix="make it with `finlm prepare RECIPE`, or correct it"
        )
    return _hash_tree(path, list(_files_below(path)), follow_links=True)


def _hash_tree(path: Path, names: list[str], *, follow_links: bool) -> SyncTree:
    """Return a SyncTree of these files of a directory, without missing files and without sync's own (.finlm-*).

    If `follow_links`, hashes the file that a link leads to, otherwise the target path of the link. Raises UserError
    when a file cannot be read.
    """
    names = [name for name in names if not any(part.startswith(_SYNC_OWN) for part in name.split("/"))]
    try:
        digests = receiver.digests(receiver.text(path), names, follow_links)
    except OSError as error:
        raise UserError(f"a file of {path} cannot be read", evidence=str(error)) from None
    files = {name: value for name, value in digests.items() if value is not None}  # tracked, but deleted here
    size = sum((path / receiver.local(name)).stat(follow_symlinks=follow_links).st_size for name in files)
    return SyncTree(path, files, size, follow_links)


def _list_by_git(root: Path) -> list[str]:
    """Return the names below root that git tracks or does not ignore. Raises UserError when git fails or is missing.

    They include tracked files deleted here, and nested repositories as directories.
    """
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
    return list(dict.fromkeys(receiver.decode(name).rstrip("/") for name in listed.split(b"\0") if name))


def _files_below(root: Path, *, links_to_folders: bool = True, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the relative names of all files below `root`, sorted within each folder.

    If `links_to_folders`, follows links to folders, but visits no folder twice; otherwise yields such a link as a file.
    `skip` names folders to leave out.
    """
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=links_to_folders):
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if name not in skip)
        links = [] if links_to_folders else [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted(names + links):
            yield receiver.text((Path(folder) / name).relative_to(root))


Role = Literal["code", "data", "model"]
RUNS = ("src/", "requirements")  # what ranks run; an edited recipe or hostfile takes effect from this machine alone
ANY = "any"  # instead of a fingerprint: the file must be there, and is not here to compare with


@dataclass(frozen=True)
class CheckedTree:
    """Files below `path`, as relative name to fingerprint on this machine, for doctor to compare with other hosts.

    A fingerprint is None for a missing file, or ANY. `follow` says that links are followed.
    """

    role: Role
    path: Path
    files: Mapping[str, str | None]
    follow: bool


def trees_to_check(recipe: Recipe, root: Path | None, shards: Path | None) -> list[CheckedTree]:
    """Return the trees to compare on the hosts: code below `root`, the shards, and the weights in model.init_from.

    Without `root` or `shards` there is no such tree. Of the code only src/ and requirements* count, of a model
    directory that is not on this machine only the presence of config.json. Raises UserError when git fails.
    """
    trees = []
    if root is not None:
        names = [name for name in code_tree(root).files if name.startswith(RUNS)]
        trees.append(_fingerprint_tree("code", root, names, follow=False))
    if shards is not None:
        trees.append(_fingerprint_tree("data", shards, _list_below(shards), follow=True))
    model, named = model_path(recipe), recipe.model.init_from
    if model is not None:
        trees.append(_fingerprint_tree("model", model, _list_below(model), follow=True))
    elif named is not None and not parents.is_recipe(named) and parents.is_directory(named):
        trees.append(CheckedTree("model", Path(named).absolute(), {"config.json": ANY}, follow=True))
    return trees


def model_path(recipe: Recipe) -> Path | None:
    """Return the absolute path of model.init_from if that is a directory; None for a Hub id, a recipe, or unset."""
    named = recipe.model.init_from
    return Path(named).absolute() if named is not None and Path(named).is_dir() else None


def _list_below(path: Path) -> list[str]:
    """Return the sorted relative paths of all files below a directory, except paths that begin with a dot."""
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if not name.startswith("."))


def _fingerprint_tree(role: Role, path: Path, names: list[str], *, follow: bool) -> CheckedTree:
    """Return a CheckedTree of these files below `path` with their fingerprints on this machine."""
    return CheckedTree(role, path.absolute(), receiver.fingerprints(str(path.absolute()), names, follow), follow)


def differences(tree: CheckedTree, fingerprints: Mapping[str, str | None]) -> Iterator[str]:
    """Yield `name: why` for every file that is missing on the host, or whose fingerprint there is another than here.

    `fingerprints` are the host's, by name. A file whose fingerprint here is ANY only has to exist there.
    """
    for name, expected in tree.files.items():
        seen = fingerprints.get(name)
        if seen is None or expected not in (seen, ANY):
            yield f"{name}: " + ("missing" if seen is None else f"{_short(seen)}, here {_short(expected)}")


def _short(fingerprint: str | None) -> str:
    """Return a fingerprint cut to 12 hex digits after "sha256 "; "missing" for None."""
    return "missing" if fingerprint is None else fingerprint[: len("sha256 ") + 12]


Started = Callable[["subprocess.Popen[bytes]"], None]
SILENCE_SECONDS = 300  # ssh notices a dead host in 20 s; this is for a far disk that hangs
_BROKEN = (10, 12, 30, ssh.FAILED)  # socket, stream, timeout: what rsync says when ssh below it has ended


@dataclass(frozen=True)
class Sent:
    """What a transfer sent: the number of files that differed, and bytes of content that the host did not have."""

    files: int = 0
    content_bytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        """Return the sums of both."""
        return Sent(self.files + other.files, self.content_bytes + other.content_bytes)


def rsync_command(host: str, path: Path, *, follow_links: bool, whole: bool, accept_new_keys: bool) -> list[str]:
    """Return the rsync command line that copies files from the current directory to `path` on the host.

    rsync reads the names of the files from stdin, each ended by NUL. `follow_links` sends the files that links lead to,
    `whole` compares contents instead of sizes and times. Raises UserError if the host's name is invalid.
    """
    # `cd` before the far rsync: rsync's own quoting and wildcards in paths changed between versions.
    return [
        *("rsync", "--copy-links" if follow_links else "--links", "--perms", "--times"),
        *(("--ignore-times",) if whole else ()),
        *("--files-from=-", "--from0", f"--partial-dir={receiver.PARTIAL}", f"--timeout={SILENCE_SECONDS}"),
        *("--info=progress2", "--stats", "--no-human-readable"),
        *("-e", shlex.join(["ssh", *ssh.options(accept_new_keys), *ssh.port_option(host)])),
        *("--rsync-path", f"cd {shlex.quote(str(path))} && rsync"),
        *("--", "./", f"{ssh.login(host)}:./"),
    ]


def send(
    host: str, tree: SyncTree, names: list[str], accept_new_keys: bool, add_bytes: Callable[[float], None] | None
) -> Sent:
    """Copy the files `names` of the tree to the host with rsync, and return what was sent; do nothing without names.

    Calls add_bytes(bytes since the last call) while it runs. None means a repair: rsync then compares contents instead
    of sizes and times. Raises UserError with ssh's or rsync's reason when rsync fails, FileNotFoundError when it is not
    installed here.
    """
    shown = 0

    def percent(now: int) -> None:
        """Report the bytes since the last call, by rsync's percentage of the tree."""
        nonlocal shown
        if add_bytes and now > shown:
            add_bytes((now - shown) / 100 * tree.size_bytes)
            shown = now

    sent = Sent()
    if names:
        there, whole = tree.path_there or tree.path, add_bytes is None
        line = rsync_command(host, there, follow_links=tree.follow_links, whole=whole, accept_new_keys=accept_new_keys)
        output = _run(line, host, tree.path, names, percent=percent)
        sent = Sent(_parse_number(rb"regular files transferred", output), _parse_number(rb"Literal data", output))
    percent(100)
    return sent


def fetch(
    host: str, source: Path, target: Path, names: list[str], *, accept_new_keys: bool, started: Started = lambda _: None
) -> None:
    """Copy the files `names` below `source` on the host to `target` here with rsync, following links.

    Does nothing without names. `started` is called with the rsync process, so that the caller can kill it. Raises as
    send() does.
    """
    if not names:
        return
    *settings, here, far = rsync_command(host, source, follow_links=True, whole=False, accept_new_keys=accept_new_keys)
    _run([*settings, far, here], host, target, names, started=started)


def _run(
    line: list[str],
    host: str,
    path: Path,
    names: list[str],
    *,
    started: Started = lambda _: None,
    percent: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Run the rsync command `line` in the directory `path` and return the last 64 KiB of its stdout.

    `names` are written to its stdin. `started` is called with the process, `percent` with the percentages that rsync
    prints. Raises as send() does.
    """
    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
        listed.write(b"".join(receiver.encode(name) + b"\0" for name in names))
        listed.seek(0)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            line, cwd=path, stdin=listed, stdout=pipe, stderr=errors, env=ssh.environment()
        ) as process:
            started(process)
            assert process.stdout is not None
            output = b""
            while block := os.read(process.stdout.fileno(), 1 << 16):
                output = (output + block)[-(1 << 16) :]
                if shown := re.findall(rb"(\d+)%", block):
                    percent(int(shown[-1]))
        errors.seek(0)
        if process.returncode:
            raise _explain(host, path, process.returncode, errors.read().decode(errors="replace"))
    return output


def _parse_number(label: bytes, output: bytes) -> int:
    """Return the number that rsync --stats printed after `label`. Raises AssertionError when there is none."""
    match = re.search(label + rb": (\d+)", output)
    if match is None:
        raise AssertionError(f"rsync --stats printed no {label.decode()!r}: {output[-500:]!r}")
    return int(match[1])


def _explain(host: str, path: Path, code: int, stderr: str) -> UserError:
    """Return, without raising it, the UserError for an rsync of `path` that ended with `code`, -N for signal N.

    It gives ssh's reason if `stderr` has one that is known.
    """
    if "your shell clean" in stderr:
        return UserError(
            f"login scripts on {host} print text where rsync expects none",
            evidence=ssh.last_lines(stderr),
            fix=f"this must print nothing: ssh {host} true   (guard echo in ~/.bashrc: [[ $- == *i* ]] || return)",
        )
    if code in _BROKEN and (reason := ssh.reason(host, stderr)):
        return reason
    if code in _BROKEN:
        problem = f"the connection to {host} broke off during rsync (code {code})"
    else:
        problem = f"rsync to {host} " + (f"was killed by signal {-code}" if code < 0 else f"failed with code {code}")
    return UserError(
        problem,
        evidence=ssh.last_lines(stderr) or f"no message; it was copying {path}",
        fix="run the same command again: it goes on where it stopped",
    )
