"""One host's part of a sync: ask it, claim the directory, copy, prove, repair once.

Three ssh calls and one rsync for each tree. The far end (sync_remote) is sent along every time, so a host needs only
python3 and rsync, and can never run an older version of it.

It runs in a thread of its own and knows nothing of the other hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.ops import rsync, ssh, sync_remote
from finlm.ops.rsync import Sent
from finlm.ops.sync_trees import Tree

SLOWEST_HASH = 20e6  # bytes per second below which a host's disk counts as stuck


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
class Job:
    """What a host shall get. `root` is the first tree's path there."""

    root: Path
    trees: tuple[Tree, ...]
    token: str
    accept_new: bool
    dry_run: bool


def sync_host(host: str, job: Job, arrived: Callable[[float], None]) -> HostResult:
    """Claim, copy, prove; what the proof finds different is compared by content and sent again, once.

    Calls arrived(bytes since the last call) as it goes.
    """
    started = time.monotonic()
    reply = _ask(host, job, "prepare")
    shared, removed = reply["state"] == "shared", reply.get("removed", 0)
    if reply["state"] in ("foreign", "taken"):
        raise _refusal(host, job.root, reply)
    if not shared and not reply["rsync"]:
        raise ssh.explain(host, ssh.NOT_FOUND, f"no `rsync` on the PATH of {host}", "rsync")
    if job.dry_run:
        status = "shared" if shared else "would change"
        return HostResult(host, status, job.trees[0].sha256, reply.get("changed", 0), 0, removed)
    sent = Sent()
    if not shared:
        for tree in job.trees:
            sent += _copy(host, job, tree, list(tree.files), arrived)
    differing = _differing(host, job)
    repaired: list[str] = []
    for tree, names in differing.items():
        if names and not shared:
            sent += _copy(host, job, tree, names, None)
            repaired += names
    if repaired:
        differing = _differing(host, job)
    still = [str(tree.path / name) for tree, names in differing.items() for name in names]
    if still:
        raise _unequal(host, job.root, still, shared)
    status, seconds = "shared" if shared else "equal", time.monotonic() - started
    tree_hash = job.trees[0].sha256
    return HostResult(host, status, tree_hash, sent.files, sent.content_bytes, removed, tuple(repaired), seconds)


def _copy(host: str, job: Job, tree: Tree, names: list[str], arrived: Callable[[float], None] | None) -> Sent:
    """rsync names of tree; the first pass moves the progress bar by the tree's size, a repair (None) does not."""
    shown = 0

    def percent(now: int) -> None:
        nonlocal shown
        if now > shown and arrived:
            arrived((now - shown) / 100 * tree.size_bytes)
            shown = now

    sent = rsync.send(
        host,
        tree.path,
        names,
        there=tree.there,
        follow_links=tree.follow_links,
        whole=arrived is None,
        accept_new=job.accept_new,
        percent=percent,
    )
    percent(100)
    return sent


def _unequal(host: str, root: Path, names: list[str], shared: bool) -> UserError:
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


def _refusal(host: str, root: Path, reply: dict[str, Any]) -> UserError:
    names = ", ".join(reply["names"]) + (f" and {reply['count'] - 5} more" if reply["count"] > 5 else "")
    if reply["state"] == "foreign":
        return UserError(
            f"{root} on {host} is not empty and was not written by finlm sync",
            evidence=f"it has {names}, and no {sync_remote.RECORD}",
            fix=f"look at it, then remove it: ssh {ssh.typed(host)} rm -r {shlex.quote(shlex.quote(str(root)))}\n"
            "or keep it and work in another directory on this machine: sync uses the same path on every host",
        )
    return UserError(
        f"files on {host} that finlm sync did not put there are in the way",
        evidence=f"they differ from this machine's: {names}",
        fix=f"rename or remove them on {host}; nothing has been changed there",
    )


def _ask(host: str, job: Job, what: str) -> dict[str, Any]:
    """Run sync_remote on host with one request ("prepare" or "verify") and return its reply."""
    request = {
        "do": what,
        "root": job.trees[0].key,
        "source": f"{os.uname().nodename}:{job.trees[0].key}",
        "token": job.token,
        "dry_run": job.dry_run,
        "trees": [tree.to_json() for tree in job.trees],
    }
    source = Path(sync_remote.__file__).read_text(encoding="utf-8")
    script = f"{source}\n\nanswer({json.dumps(request)!a})\n".encode()
    patience = 120 + sum(tree.size_bytes for tree in job.trees) / SLOWEST_HASH
    result = ssh.run(
        host, ["python3", "-I", "-S", "-"], stdin=script, timeout_seconds=patience, accept_new=job.accept_new
    )
    _, mark, line = result.stdout.rpartition(sync_remote.MARK)
    reply: dict[str, Any] = json.loads(line) if mark else {"error": f"its python3 printed {result.stdout[-200:]!r}"}
    if "error" in reply:
        raise UserError(
            f"{host} cannot {what} {job.root}", evidence=reply["error"], fix=f"mend it on {host}, then run sync again"
        )
    return reply


def _differing(host: str, job: Job) -> dict[Tree, list[str]]:
    """Names in each tree that are not equal on host; the host's tree hash has the last word."""
    found = _ask(host, job, "verify")["trees"]
    for tree in job.trees:
        reply = found[tree.key]
        if not reply["differing"] and reply["tree"] != tree.sha256:
            raise AssertionError(f"{host}: equal files but tree hash {reply['tree']} instead of {tree.sha256}")
    return {tree: found[tree.key]["differing"] for tree in job.trees}
