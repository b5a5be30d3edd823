"""Bring code and data to the same absolute path on every host, and prove that what lies there is equal.

rsync over ssh, all hosts at once; then every host hashes what it has and the answer is compared with this machine's
hashes, so that equality never rests on sizes and times. The proof costs one read of all files at both ends (0.4 to
2 GB/s); a host that is already equal costs three ssh calls, under a second for code.

It removes only what an earlier sync put there, refuses a directory that sync did not write, installs nothing, and
leaves .venv, cache and runs of a host alone.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.ops import ssh, sync_remote, sync_trees
from finlm.ops.sync_host import HostResult, Job, sync_host

HOSTS_AT_ONCE = 16  # more only divide this machine's network link


def main(hostfile: Path, accept_new: bool, dry_run: bool) -> int:
    """`finlm sync`: the repository around the working directory to the hosts of the hostfile. The exit code."""
    from finlm.recipe import cluster  # brings pydantic: 0.3 s that a caller of sync() has no use for

    if hostfile.is_file() and not cluster.entries(hostfile):
        screen.say(f"{hostfile} names no host, so runs use this machine: nothing to sync")
        return 0
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
    names: Sequence[str] | None = None,
    data: Sequence[Path] = (),
    there: Mapping[str, Callable[[Path], Path]] | None = None,
    accept_new: bool = False,
    dry_run: bool = False,
) -> list[HostResult]:
    """Make root's code (or its files and directories `names`) and the data paths equal on every host.

    `there` maps a path here to the path on a host where it differs. One result a host in the order given.

    Raises UserError before anything is contacted when a host name or path is unusable, and after all hosts are done
    when some failed, naming each with its reason.
    """
    wanted = [ssh.check_host(host) for host in dict.fromkeys(hosts)]
    with ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:
        own = dict(zip(wanted, pool.map(ssh.is_this_machine, wanted), strict=True))
    results = {name: HostResult(name, "this machine") for name in wanted if own[name]}
    for result in results.values():
        screen.say(str(result))
    remote = [name for name in wanted if not own[name]]
    if not remote:
        screen.say("the hostfile names only this machine: nothing to sync")
        return list(results.values())
    if shutil.which("rsync") is None:
        raise UserError("rsync is not installed on this machine", fix="apt-get install rsync   (or dnf, brew)")
    root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links, and the path must stay the same
    with _only_one(root) as token:
        first = sync_trees.code(root) if names is None else sync_trees.named(root, list(names))
        trees = (first, *(sync_trees.data(path) for path in data))
        for tree in trees:
            size = format_bytes(tree.size_bytes)
            screen.say(f"{tree.path}: {len(tree.files):,} files, {size}, tree {tree.sha256[:12]}")
        jobs = {name: Job(root, trees, token, accept_new, dry_run) for name in remote}
        for name, place in (there or {}).items():
            if name in jobs:
                moved = tuple(dataclasses.replace(tree, there=place(tree.path)) for tree in trees)
                jobs[name] = dataclasses.replace(jobs[name], root=place(root), trees=moved)
        results |= _all_hosts(jobs)
    return [results[name] for name in wanted]


@contextmanager
def _only_one(root: Path) -> Iterator[str]:
    """Hold root's lock; its content tells a host that shares this disk from one with a copy."""
    path = root / sync_remote.LOCK
    try:
        lock = path.open("a+", encoding="ascii")
    except OSError:  # not writable here, so no target that can be written shares it
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


def _all_hosts(jobs: Mapping[str, Job]) -> dict[str, HostResult]:
    """Every host in parallel; a host that fails does not hold up the others."""
    total = sum(tree.size_bytes for job in jobs.values() for tree in job.trees)
    done: dict[str, HostResult] = {}
    failed: dict[str, UserError] = {}
    one_at_a_time = threading.Lock()
    with screen.progress("sync", total or None) as advance, ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:

        def arrived(amount: float) -> None:
            with one_at_a_time:
                advance(amount)

        running = {pool.submit(sync_host, host, job, arrived): host for host, job in jobs.items()}
        for future in as_completed(running):
            host = running[future]
            try:
                done[host] = future.result()
                screen.say(str(done[host]))
            except UserError as error:
                failed[host] = error
                screen.say(f"{host}: failed: {error.problem}")
    if failed:
        raise _failure([(host, failed[host]) for host in jobs if host in failed], len(jobs))
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
