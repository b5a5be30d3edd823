"""Bring a checkpoint's parts from the hosts that wrote them to this machine, for export and evaluation.

Without a shared file system every host keeps the shards of its own ranks, which is enough to resume. A whole model
needs all of them: rsync pulls what the hosts' own manifests list, every file is proved by its sha256, and the manifest
here then lists them all. The hosts' copies stay.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from finlm.base import files, screen
from finlm.base.checkpoints import MANIFEST, Manifest, Part, faults
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.ops import rsync, ssh
from finlm.ops.places import there
from finlm.recipe.cluster import Cluster, Host

THREADS = 8


def checkpoint(run: RunDir, hosts: Cluster, step: int, accept_new: bool = False) -> Path:
    """The checkpoint of a step with the parts of all hosts. Raises UserError when a part is missing or damaged."""
    directory = run.checkpoint(step)
    remote = [host for host in hosts.hosts if not ssh.is_this_machine(host.destination)]
    if not remote:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(lambda host: _pull(directory, host, accept_new), remote))
    own = [Manifest.read(directory)] if (directory / MANIFEST).exists() else []
    layouts = {part.layout for part in (*own, *parts)}
    if len(layouts) > 1:
        raise UserError(
            f"the hosts' parts of {directory.name} are of different runs or plans",
            evidence=", ".join(sorted(map(str, layouts))),
            fix="remove it on the host whose part is old",
        )
    listed = {name: part for each in (*own, *parts) for name, part in each.files.items()}
    whole = dataclasses.replace(parts[0], files=dict(sorted(listed.items())))
    files.write_json(directory / MANIFEST, whole.to_json())
    size = sum(part.bytes for part in parts)
    screen.say(f"step {step}: {format_bytes(size)} of checkpoint gathered from {', '.join(h.name for h in remote)}")
    return directory


def _pull(directory: Path, host: Host, accept_new: bool) -> Manifest:
    """The host's manifest after the files it lists were pulled and proved. It may name no file outside."""
    far = there(directory, host.access)
    read = ssh.run(host.destination, ["cat", str(far / MANIFEST)], accept_new=accept_new, check=False)
    if read.code:
        raise UserError(
            f"{host.name} has no complete part of the checkpoint {directory.name}",
            evidence=ssh.last_lines(read.stderr),
            fix="run the same command again: it goes on from the last checkpoint that all hosts have",
        )
    manifest = Manifest.from_json(json.loads(read.stdout), f"{host.name}:{far / MANIFEST}")
    wanted = _differing(directory, manifest.files)
    for name in wanted:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
    rsync.fetch(host.destination, far, directory, wanted, accept_new=accept_new)
    wrong = _differing(directory, {name: manifest.files[name] for name in wanted})
    if wrong:
        raise UserError(
            f"{len(wrong)} files of {directory.name} differ from what {host.name} wrote",
            evidence="\n".join(wrong[:10]),
            fix=f"run the same command again; the same files again mean a failing disk or memory on {host.name}",
        )
    return manifest


def _differing(directory: Path, parts: Mapping[str, Part]) -> list[str]:
    return [name for name, part in parts.items() if faults(directory, {name: part}, THREADS)]
