"""Bring a checkpoint's parts from the hosts that wrote them to this machine, for export and evaluation.

Without a shared file system every host keeps the shards of its own ranks, which is enough to resume. A whole model
needs all of them: rsync pulls what the hosts' own manifests list, every file is proved by its sha256, and the manifest
here then lists them all. The hosts' copies stay.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.ops import rsync, ssh
from finlm.ops.places import there
from finlm.recipe.cluster import Cluster, Host


def checkpoint(run: RunDir, hosts: Cluster, step: int, accept_new: bool = False) -> Path:
    """The checkpoint of a step with the parts of all hosts. Raises UserError when a part is missing or damaged."""
    directory = run.checkpoint(step)
    remote = [host for host in hosts.hosts if not ssh.is_this_machine(host.destination)]
    if not remote:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(lambda host: _pull(directory, host, accept_new), remote))
    own = directory / "manifest.json"
    listed = files.read_json(own)["files"] if own.exists() else {}
    size = sum(entry["bytes"] for part in parts for entry in part.values())
    for part in parts:
        listed |= part
    files.write_json(own, {"step": step, "files": dict(sorted(listed.items()))})
    screen.say(f"step {step}: {format_bytes(size)} of checkpoint gathered from {', '.join(h.name for h in remote)}")
    return directory


def _pull(directory: Path, host: Host, accept_new: bool) -> dict[str, dict[str, Any]]:
    """Files that the host's manifest lists, pulled and proved; the manifest's entries."""
    far = there(directory, host.access)
    read = ssh.run(host.destination, ["cat", str(far / "manifest.json")], accept_new=accept_new, check=False)
    if read.code:
        raise UserError(
            f"{host.name} has no complete part of the checkpoint {directory.name}",
            evidence=ssh.last_lines(read.stderr),
            fix="run the same command again: it goes on from the last checkpoint that all hosts have",
        )
    listed: dict[str, dict[str, Any]] = json.loads(read.stdout)["files"]
    wanted = {name: entry for name, entry in listed.items() if not _is_equal(directory / name, entry)}
    rsync.fetch(host.destination, far, directory, list(wanted), accept_new=accept_new)
    wrong = [name for name, entry in wanted.items() if not _is_equal(directory / name, entry)]
    if wrong:
        raise UserError(
            f"{len(wrong)} files of {directory.name} differ from what {host.name} wrote",
            evidence="\n".join(wrong[:10]),
            fix=f"run the same command again; the same files again mean a failing disk or memory on {host.name}",
        )
    return listed


def _is_equal(path: Path, entry: dict[str, Any]) -> bool:
    equal_size = path.is_file() and path.stat().st_size == entry["bytes"]
    return equal_size and files.sha256_file(path) == entry["sha256"]
