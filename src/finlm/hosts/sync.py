"""Bring code and data to the same absolute path on every host, and prove that what lies there is equal.

rsync over ssh, all hosts at once, each in its own thread: ask it, claim the directory, copy, prove, repair once. Every
host hashes what it has and the answer is compared with this machine's hashes, so equality never rests on sizes and
times. The proof costs one read of all files at both ends (0.4 to 2 GB/s); a host that is already equal costs three ssh
calls, under a second for code. The far end (remote/receiver.py) is sent along every time, so a host needs only python3
and rsync.

It removes only what an earlier sync put there, refuses a directory that sync did not write, installs nothing, and
leaves .venv, cache and runs of a host alone.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.hosts import file_trees, ssh
from finlm.hosts.file_trees import Sent, SyncTree
from finlm.hosts.remote import receiver

HOSTS_AT_ONCE = 16  # more only divide this machine's network link


def repository_root() -> Path:
    """Return the nearest directory from the working one upwards with requirements.txt, or raise UserError."""
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / "requirements.txt").is_file():
            return directory
    raise UserError(
        "not inside the repository", evidence=f"no requirements.txt in {here} or above", fix="cd to the repository"
    )


def sync(
    root: Path,
    hosts: Mapping[str, Callable[[Path], Path]],
    *,
    names: Sequence[str] | None = None,
    data: Sequence[Path] = (),
    accept_new_keys: bool = False,
    dry_run: bool = False,
) -> list[HostResult]:
    """Make root's code (or only its files and directories `names`) and the data paths equal on every host.

    `hosts` maps each host to a function from a path here to its path there (Path: the same path). Prints the trees and
    each result, and returns a HostResult per host in the order given. `dry_run` only counts what would change.
    `accept_new_keys` stores unknown ssh host keys. Raises UserError before any host is contacted when a host name or
    data path is unusable, rsync is missing here, or another sync of root is running; and, after all hosts are done,
    when some of them failed, naming each with its reason.
    """
    for host in hosts:
        ssh.check_host(host)
    with ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:
        is_here = dict(zip(hosts, pool.map(ssh.is_this_machine, hosts), strict=True))
    results = {name: HostResult(name, "this machine") for name in hosts if is_here[name]}
    for result in results.values():
        screen.say(str(result))
    remote = [name for name in hosts if not is_here[name]]
    if not remote:
        screen.say("the hostfile names only this machine: nothing to sync")
        return list(results.values())
    if shutil.which("rsync") is None:
        raise UserError("rsync is not installed on this machine", fix="apt-get install rsync   (or dnf, brew)")
    root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links, and the path must stay the same
    with _lock_root(root) as token:
        first = file_trees.code_tree(root) if names is None else file_trees.named_tree(root, list(names))
        trees = (first, *(file_trees.data_tree(path) for path in data))
        for tree in trees:
            size = format_bytes(tree.size_bytes)
            screen.say(f"{tree.path}: {len(tree.files):,} files, {size}, tree {tree.sha256[:12]}")
        jobs = {}
        for name in remote:
            moved = tuple(dataclasses.replace(tree, path_there=hosts[name](tree.path)) for tree in trees)
            jobs[name] = Job(hosts[name](root), moved, token, accept_new_keys, dry_run)
        results |= _sync_all_hosts(jobs)
    return [results[name] for name in hosts]


@contextmanager
def _lock_root(root: Path) -> Iterator[str]:
    """Hold root's lock file while the block runs and yield the random token in it; yield "" if root is not writable.

    A host that reads the same token there shares this disk. Raises UserError when another sync of root is running.
    """
    path = root / receiver.LOCK
    while True:
        try:
            lock = path.open("a+", encoding="ascii")
        except OSError:  # not writable here, so no target that can be written shares it
            yield ""
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                break
            lock.close()  # a sync that has just ended removed the file: who opens the path now gets another
        except FileNotFoundError:
            lock.close()
        except BlockingIOError:
            lock.close()
            raise UserError(
                "another sync of this directory is running", evidence=f"{path} is locked", fix="wait until it has ended"
            ) from None
    with lock:
        try:
            token = secrets.token_hex(16)
            lock.truncate(0)
            lock.write(token)
            lock.flush()
            os.fsync(lock.fileno())
            yield token
        finally:
            path.unlink(missing_ok=True)


def _sync_all_hosts(jobs: Mapping[str, Job]) -> dict[str, HostResult]:
    """Sync all hosts in parallel, print each result, and return the results by host name. Shows a progress bar.

    A host that fails does not stop the others. Raises UserError, naming the hosts that failed, once all are done.
    """
    total = sum(tree.size_bytes for job in jobs.values() for tree in job.trees)
    done: dict[str, HostResult] = {}
    failed: dict[str, UserError] = {}
    one_at_a_time = threading.Lock()
    with screen.progress("sync", total or None) as advance, ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:

        def add_bytes(amount: float) -> None:
            """Advance the progress bar; the threads of all hosts call it."""
            with one_at_a_time:
                advance(amount)

        running = {pool.submit(sync_host, host, job, add_bytes): host for host, job in jobs.items()}
        for future in as_completed(running):
            host = running[future]
            try:
                done[host] = future.result()
                screen.say(str(done[host]))
            except UserError as error:
                failed[host] = error
                screen.say(f"{host}: failed: {error.problem}")
    if failed:
        raise _combine_errors([(host, failed[host]) for host in jobs if host in failed], len(jobs))
    return done


def _combine_errors(failed: list[tuple[str, UserError]], hosts: int) -> UserError:
    """Return, without raising it, one UserError for all `failed` of this many hosts; equal fixes appear once."""
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


SLOWEST_HASH = 20e6  # bytes per second below which a host's disk counts as stuck


@dataclass(frozen=True)
class HostResult:
    """The result of a sync on a host; `tree` is the hash of the first tree.

    `status` is "equal", "this machine", "shared" (the host sees this disk) or, after a dry run, "would change".
    """

    host: str
    status: str
    tree: str = ""
    sent_files: int = 0
    sent_bytes: int = 0
    removed_files: int = 0
    repaired: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return the line for the screen."""
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
class Job:
    """What to copy to a host. `root` is the code's path on that host; `token` is the content of the lock file here."""

    root: Path
    trees: tuple[SyncTree, ...]
    token: str
    accept_new_keys: bool
    dry_run: bool


def sync_host(host: str, job: Job, add_bytes: Callable[[float], None]) -> HostResult:
    """Claim the job's directories on a host, copy the files, compare all hashes, and send differing files once more.

    Returns what was done. With job.dry_run, only counts what would change; on a shared file system, only compares.
    Calls add_bytes(bytes since the last call) during the first copy. Raises UserError when the host's directory is not
    sync's, other files are in the way, rsync is missing there, files still differ, or ssh or rsync fails.
    """
    started = time.monotonic()
    reply = receiver.Prepared(**_ask_about_job(host, job, "prepare"))
    is_shared = reply.state == "shared"
    if reply.state in ("foreign", "taken"):
        raise _refusal(host, job.root, reply)
    if not is_shared and not reply.rsync:
        raise ssh.explain(host, ssh.NOT_FOUND, f"no `rsync` on the PATH of {host}", "rsync")
    if job.dry_run:
        status = "shared" if is_shared else "would change"
        return HostResult(host, status, job.trees[0].sha256, reply.changed, 0, reply.removed)
    sent = Sent()
    if not is_shared:
        for tree in job.trees:
            sent += file_trees.send(host, tree, list(tree.files), job.accept_new_keys, add_bytes)
    differing = _list_differing(host, job)
    repaired: list[str] = []
    for tree, names in differing.items():
        if names and not is_shared:
            sent += file_trees.send(host, tree, names, job.accept_new_keys, None)
            repaired += names
    if repaired:
        differing = _list_differing(host, job)
    still = [str(tree.path / name) for tree, names in differing.items() for name in names]
    if still:
        raise _unequal(host, job.root, still, is_shared)
    status, seconds = "shared" if is_shared else "equal", time.monotonic() - started
    tree_hash = job.trees[0].sha256
    return HostResult(host, status, tree_hash, sent.files, sent.content_bytes, reply.removed, tuple(repaired), seconds)


def _unequal(host: str, root: Path, names: list[str], shared: bool) -> UserError:
    """Return, without raising it, the UserError for files that differ on a host after copying, or on a shared disk."""
    shown = "\n".join(names[:10]) + (f"\nand {len(names) - 10} more" if len(names) > 10 else "")
    if shared:
        return UserError(
            f"{host} shares {root} with this machine, but not all of the data: {len(names)} files differ there",
            evidence=shown,
            fix=f"put the data on the shared file system too, for example below {root / 'cache'}",
        )
    return UserError(
        f"{len(names)} files on {host} differ from this machine's after copying",
        evidence=shown,
        fix="were they edited meanwhile? run finlm sync again; the same files again mean a failing disk or memory",
    )


def _refusal(host: str, root: Path, reply: receiver.Prepared) -> UserError:
    """Return, without raising it, the UserError for a host with a directory that is not sync's, or files in the way."""
    names = ", ".join(reply.names) + (f" and {reply.count - 5} more" if reply.count > 5 else "")
    if reply.state == "foreign" and reply.is_run:
        return started_elsewhere(str(root), host, reply.holder, reply.is_held)
    if reply.state == "foreign":
        here, aside = (shlex.quote(shlex.quote(path)) for path in (str(root), f"{root}.before"))
        return UserError(
            f"{root} on {host} is not empty and was not written by finlm sync",
            evidence=f"it has {names}, and no {receiver.RECORD}",
            fix=f"look at it, then put it aside: ssh {ssh.ssh_name(host)} mv {here} {aside}\n"
            "or keep it and work in another directory on this machine: sync uses the same path on every host",
        )
    return UserError(
        f"files on {host} that finlm sync did not put there are in the way",
        evidence=f"they differ from this machine's: {names}",
        fix=f"rename them on {host}; nothing has been changed there",
    )


def started_elsewhere(run: str, host: str, holder: str, is_held: bool, source: str = "") -> UserError:
    """Return, without raising it, the UserError for a run directory whose run was started on another host, `host`.

    `holder` is "pid machine" of the process that runs the run, or ran it last, or "". `is_held` says that it runs now.
    `source` is where sync copied the directory on this machine from, or "".
    """
    pid, _, node = holder.partition(" ")
    if is_held:
        return UserError(
            f"{run} is running now, started on {host}",
            evidence=f"process {pid} on {node} holds its lock",
            fix=f"wait for it, or end it with `kill {pid}` on {node}; --new starts another run here",
        )
    came = f"{receiver.RECORD} here: it came from {source}" if source else f"no {receiver.RECORD} on {host}"
    return UserError(
        f"{run} was started on {host}, not on this machine",
        evidence=f"{came}; process {pid} on {node} ran it last" if pid else came,
        fix=f"go on there, with the same command on {host}; --new starts another run here",
    )


def _ask_about_job(host: str, job: Job, action: str) -> Any:
    """Send the host the request `action`, "prepare" or "verify", for the job's trees; return the reply's JSON value.

    Raises UserError as ask() does.
    """
    request = receiver.Request(
        action,
        job.trees[0].key,
        source=f"{os.uname().nodename}:{receiver.text(job.trees[0].path)}",
        token=job.token,
        dry_run=job.dry_run,
        trees=[receiver.Tree(tree.key, tree.files, tree.follow_links) for tree in job.trees],
    )
    patience = 120 + sum(tree.size_bytes for tree in job.trees) / SLOWEST_HASH
    return ask(host, request, patience, job.accept_new_keys)


def ask(host: str, request: receiver.Request, patience: float, accept_new_keys: bool) -> Any:
    """Run receiver.py with a request on the host's python3 over ssh, and return the JSON value of its reply.

    `patience` is the time limit in seconds. Raises UserError when ssh fails, or the reply is an error or missing.
    """
    source = Path(receiver.__file__).read_text(encoding="utf-8")
    script = f"{source}\n\nanswer({json.dumps(dataclasses.asdict(request))!a})\n".encode()
    result = ssh.run(
        host, ["python3", "-I", "-S", "-"], stdin=script, timeout_seconds=patience, accept_new_keys=accept_new_keys
    )
    _, mark, line = result.stdout.rpartition(receiver.MARK)
    reply = json.loads(line) if mark else {"error": f"its python3 printed {result.stdout[-200:]!r}"}
    if "error" in reply:
        raise UserError(
            f"{host} cannot {request.do} {request.root}",
            evidence=reply["error"],
            fix=f"mend it on {host}, then run the same command again",
        )
    return reply


def _list_differing(host: str, job: Job) -> dict[SyncTree, list[str]]:
    """Have the host hash all files of the job, and return {tree: names that differ there}. UserError as ask() raises.

    Raises AssertionError when no name differs but the tree's hash does.
    """
    proofs = {path: receiver.Proof(**proof) for path, proof in _ask_about_job(host, job, "verify")["trees"].items()}
    for tree in job.trees:
        proof = proofs[tree.key]
        if not proof.differing and proof.tree != tree.sha256:
            raise AssertionError(f"{host}: equal files but tree hash {proof.tree} instead of {tree.sha256}")
    return {tree: proofs[tree.key].differing for tree in job.trees}
