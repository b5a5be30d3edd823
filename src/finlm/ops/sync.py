"""Bring code and data to the same absolute path on every host, and prove that what lies there is equal.

rsync over ssh, all hosts at once; then every host hashes what it has and the answer is compared with this machine's
hashes, so that equality never rests on sizes and times. The proof costs one read of all files at both ends (0.4 to
2 GB/s); a host that is already equal costs three ssh calls, under a second for code.

It removes only what an earlier sync put there, refuses a directory that sync did not write, installs nothing, and
leaves .venv, cache and runs of a host alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.ops import ssh, sync_remote, sync_trees
from finlm.ops.sync_trees import Tree
from finlm.recipe import cluster

HOSTS_AT_ONCE = 16  # more only divide this machine's network link
SLOWEST_HASH = 20e6  # bytes per second below which a host's disk counts as stuck
RSYNC_SILENCE_SECONDS = 300


@dataclass(frozen=True)
class HostResult:
    """What sync did on one host; status is "equal", "this machine", "shared" or, after a dry run, "would change"."""

    host: str
    status: str
    tree: str = ""
    sent_files: int = 0
    sent_bytes: int = 0
    removed_files: int = 0
    repaired: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.status == "this machine":
            return f"{self.host}: this machine, nothing to copy"
        if self.status == "would change":
            return f"{self.host}: {self.sent_files:,} files would be copied, {self.removed_files:,} removed"
        if self.status == "shared":
            return f"{self.host}: sees the same directory (shared file system), equal, tree {self.tree[:12]}"
        done = f"{self.sent_files:,} files sent ({format_bytes(self.sent_bytes)}), {self.removed_files:,} removed"
        mended = f", repaired {', '.join(self.repaired[:3])}{' ...' * (len(self.repaired) > 3)}" * bool(self.repaired)
        return f"{self.host}: equal, tree {self.tree[:12]}, {done}{mended}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class _Job:
    """What is the same for every host."""

    root: Path
    trees: tuple[Tree, ...]
    token: str
    accept_new: bool
    dry_run: bool
    arrived: Callable[[float], None]  # bytes since the last call

    @property
    def size_bytes(self) -> int:
        return sum(tree.size_bytes for tree in self.trees)


def main(hostfile: Path, accept_new: bool, dry_run: bool) -> int:
    """`finlm sync`: the repository around the working directory to the hosts of the hostfile. The exit code."""
    hosts = [host.name for host in cluster.load(hostfile).hosts]
    sync(repository_root(), hosts, accept_new=accept_new, dry_run=dry_run)
    return 0


def repository_root() -> Path:
    """The nearest directory from the working directory upwards that holds requirements.txt."""
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / "requirements.txt").is_file():
            return directory
    raise UserError(
        "not inside the repository", evidence=f"no requirements.txt in {here} or above", fix="cd to the repository"
    )


def sync(
    root: Path,
    hosts: Sequence[str],
    *,
    data: Sequence[Path] = (),
    accept_new: bool = False,
    dry_run: bool = False,
) -> list[HostResult]:
    """Make root's code and the data paths equal on every host, one result a host in the order given.

    Raises UserError before anything is contacted when a host name or path is unusable, and after all hosts are done
    when some failed, naming each with its reason.
    """
    names = [ssh.check_host(host) for host in dict.fromkeys(hosts)]
    with ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:
        own = dict(zip(names, pool.map(ssh.is_this_machine, names), strict=True))
    results = {name: HostResult(name, "this machine") for name in names if own[name]}
    for result in results.values():
        screen.say(str(result))
    remote = [name for name in names if not own[name]]
    if not remote:
        screen.say("the hostfile names only this machine: nothing to sync")
        return list(results.values())
    if shutil.which("rsync") is None:
        raise UserError("rsync is not installed on this machine", fix="apt-get install rsync   (or dnf, brew)")
    root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links, and the path must stay the same
    with _only_one(root) as token:
        trees = (sync_trees.code(root), *(sync_trees.data(path) for path in data))
        for tree in trees:
            size = format_bytes(tree.size_bytes)
            screen.say(f"{tree.path}: {len(tree.files):,} files, {size}, tree {tree.sha256[:12]}")
        results |= _all_hosts(remote, root, trees, token, accept_new, dry_run)
    return [results[name] for name in names]


@contextmanager
def _only_one(root: Path) -> Iterator[str]:
    """Hold root's lock; its content tells a host that shares this disk from one with a copy."""
    path = root / sync_remote.LOCK
    try:
        lock = path.open("a+", encoding="ascii")
    except PermissionError:  # a source that cannot be written cannot be shared with a target that is
        yield ""
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another sync of this directory is running", evidence=f"{path} is locked", fix="wait until it has ended"
            ) from None
        try:
            token = secrets.token_hex(16)
            lock.truncate(0)
            lock.write(token)
            lock.flush()
            os.fsync(lock.fileno())
            yield token
        finally:
            path.unlink(missing_ok=True)


def _all_hosts(
    hosts: list[str], root: Path, trees: tuple[Tree, ...], token: str, accept_new: bool, dry_run: bool
) -> dict[str, HostResult]:
    """Every host in parallel; a host that fails does not hold up the others."""
    total = sum(tree.size_bytes for tree in trees) * len(hosts)
    done: dict[str, HostResult] = {}
    failed: dict[str, UserError] = {}
    one_at_a_time = threading.Lock()
    with screen.progress("sync", total or None) as advance, ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:

        def arrived(amount: float) -> None:
            with one_at_a_time:
                advance(amount)

        job = _Job(root, trees, token, accept_new, dry_run, arrived)
        running = {pool.submit(_one_host, host, job): host for host in hosts}
        for future in as_completed(running):
            host = running[future]
            try:
                done[host] = future.result()
                screen.say(str(done[host]))
            except UserError as error:
                failed[host] = error
                screen.say(f"{host}: failed: {error.problem}")
    if failed:
        raise _failure([(host, failed[host]) for host in hosts if host in failed], len(hosts))
    return done


def _failure(failed: list[tuple[str, UserError]], hosts: int) -> UserError:
    if len(failed) == hosts == 1:
        return failed[0][1]
    fixes: dict[str, list[str]] = {}
    for host, error in failed:
        fixes.setdefault(error.fix, []).append(host)
    return UserError(
        f"{len(failed)} of {hosts} hosts are not in sync: {', '.join(host for host, _ in failed)}",
        evidence="\n".join(f"{host}: {error.problem}\n{error.evidence}".rstrip() for host, error in failed),
        fix="\n".join(f"{', '.join(names)}: {fix}" for fix, names in fixes.items() if fix),
    )


def _one_host(host: str, job: _Job) -> HostResult:
    """Claim, copy, prove; what the proof finds different is sent again whole, once."""
    started = time.monotonic()
    reply = _ask(host, job, "prepare", job.trees)
    if reply["state"] in ("foreign", "taken"):
        raise _refusal(host, job.root, reply)
    if reply["state"] == "ready" and not reply["rsync"]:
        raise ssh.explain(host, 127, f"no `rsync` on the PATH of {host}", "rsync")
    if job.dry_run:
        state = reply["state"] if reply["state"] == "shared" else "would change"
        return HostResult(host, state, job.trees[0].sha256, reply.get("changed", 0), 0, reply.get("removed", 0))
    files = size = 0
    if reply["state"] == "ready":
        for tree in job.trees:
            sent = _copy(host, job, tree, list(tree.files))
            files, size = files + sent[0], size + sent[1]
    differing = _differing(host, job, job.trees)
    repaired = []
    for tree in job.trees if reply["state"] == "ready" else ():
        if differing[tree]:
            sent = _copy(host, job, tree, differing[tree], whole=True)
            files, size = files + sent[0], size + sent[1]
            repaired += differing[tree]
    if repaired:
        differing = _differing(host, job, job.trees)
    still = [str(tree.path / name) for tree, names in differing.items() for name in names]
    if still:
        raise UserError(
            f"{len(still)} files on {host} differ from this machine's after copying",
            evidence="\n".join(still[:10]),
            fix="were they edited meanwhile? run finlm sync again; the same files again mean a failing disk or memory",
        )
    status = "shared" if reply["state"] == "shared" else "equal"
    seconds = time.monotonic() - started
    removed = reply.get("removed", 0)
    return HostResult(host, status, job.trees[0].sha256, files, size, removed, tuple(repaired), seconds)


def _refusal(host: str, root: Path, reply: dict[str, Any]) -> UserError:
    names = ", ".join(reply["names"]) + (f" and {reply['count'] - 5} more" if reply["count"] > 5 else "")
    if reply["state"] == "foreign":
        return UserError(
            f"{root} on {host} is not empty and was not written by finlm sync",
            evidence=f"it has {names}, and no {sync_remote.RECORD}",
            fix=f"look at it, then remove it: ssh {host} rm -r {shlex.quote(shlex.quote(str(root)))}\n"
            "or keep it and work in another directory on this machine: sync uses the same path on every host",
        )
    return UserError(
        f"files on {host} that finlm sync did not put there are in the way",
        evidence=f"they differ from this machine's: {names}",
        fix=f"rename or remove them on {host}; nothing has been changed there",
    )


def _ask(host: str, job: _Job, what: str, trees: Sequence[Tree]) -> dict[str, Any]:
    """Run sync_remote on host with one request and return its reply."""
    request = {
        "do": what,
        "root": sync_remote.decode(os.fsencode(job.root)),
        "source": f"{os.uname().nodename}:{job.root}",
        "token": job.token,
        "dry_run": job.dry_run,
        "trees": [tree.to_json() for tree in trees],
    }
    source = Path(sync_remote.__file__).read_text(encoding="utf-8")
    script = f"{source}\n\nanswer({ascii(json.dumps(request))})\n".encode()
    patience = 120 + job.size_bytes / SLOWEST_HASH
    result = ssh.run(host, ["python3", "-"], stdin=script, timeout_seconds=patience, accept_new=job.accept_new)
    _, mark, line = result.stdout.rpartition(sync_remote.MARK)
    reply: dict[str, Any] = json.loads(line) if mark else {"error": "no answer in its output"}
    if "error" in reply:
        raise UserError(
            f"{host} cannot {what} {job.root}", evidence=reply["error"], fix=f"mend it on {host}, then run sync again"
        )
    return reply


def _differing(host: str, job: _Job, trees: Sequence[Tree]) -> dict[Tree, list[str]]:
    """Names in each tree that are not equal on host."""
    found = _ask(host, job, "verify", trees)["trees"]
    result = {}
    for tree in trees:
        reply = found[tree.key]
        if not reply["differing"] and reply["tree"] != tree.sha256:
            raise AssertionError(f"{host}: equal files but tree hash {reply['tree']} instead of {tree.sha256}")
        result[tree] = reply["differing"]
    return result
