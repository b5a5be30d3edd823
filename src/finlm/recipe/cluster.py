"""Hosts and slots: from a DeepSpeed hostfile, from a recipe's `hardware:`, or from this machine.

The hostfile keeps DeepSpeed's own format (`name slots=N`, # comments). What kind of GPU a host has comes from the
recipe's `hardware:` entry of the same name or from --gpu; this machine is asked through nvidia-smi, never torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finlm.base.errors import UserError
from finlm.recipe.schema import Hardware


@dataclass(frozen=True)
class Host:
    """One host: `slots` ranks; gpu None means CPU ranks; memory_bytes None means unknown."""

    name: str
    slots: int
    gpu: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run, in hostfile order; the first is the master."""

    hosts: tuple[Host, ...]
    network_gbit: float = 10.0

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_cpu(self) -> bool:
        """True when the ranks run on CPU."""
        return all(host.gpu is None for host in self.hosts)


def from_hardware(hardware: Hardware, gpu: str | None = None) -> Cluster:
    """The cluster a recipe was written for, or the same hosts with another kind of GPU."""
    return Cluster(tuple(_hosts(hardware, gpu)), hardware.network_gbit)


def _hosts(hardware: Hardware, gpu: str | None = None) -> Iterable[Host]:
    for host in hardware.hosts:
        for number in range(1, host.count + 1):
            name = host.name if host.count == 1 else f"{host.name}-{number}"
            yield Host(name, host.slots, gpu or host.gpu, host.memory)


def load(hostfile: str | Path, hardware: Hardware | None = None, gpu: str | None = None) -> Cluster:
    """Read a hostfile; GPU kinds from `gpu`, else from hardware's host of the same name, else CPU ranks.

    Raises UserError that lists every bad line as file:line.
    """
    path = Path(hostfile)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the hostfile {path}", evidence=str(error)) from None
    known = {host.name: host for host in _hosts(hardware)} if hardware else {}
    hosts: dict[str, Host] = {}
    mistakes = []
    for number, raw in enumerate(lines, 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            mistakes.append(f"{path}:{number}: expected `name slots=N`, got {line!r}")
        elif match[1] in hosts:
            mistakes.append(f"{path}:{number}: {match[1]} appears twice; one line a host")
        elif int(match[2]) == 0:
            mistakes.append(f"{path}:{number}: {match[1]} has 0 slots; remove the line or give it 1 or more")
        else:
            like = known.get(match[1])
            kind = gpu or (like.gpu if like else None)
            hosts[match[1]] = Host(match[1], int(match[2]), kind, like.memory_bytes if like else None)
    if mistakes:
        raise UserError(f"{len(mistakes)} mistake(s) in the hostfile {path}", evidence="\n".join(mistakes))
    if not hosts:
        raise UserError(f"the hostfile {path} names no host", fix="write one line a host: `name slots=N`")
    return Cluster(tuple(hosts.values()), hardware.network_gbit if hardware else 10.0)


def is_local(name: str) -> bool:
    """Whether a hostfile's name is this machine's own; addresses are not looked up."""
    return name in ("localhost", "127.0.0.1", os.uname().nodename)


def default_hostfile() -> Path | None:
    """hostfile.txt of the current directory, when any of its lines is more than a comment."""
    path = Path("hostfile.txt")
    if path.is_file() and any(line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()):
        return path
    return None


def local(cpu_ranks: int) -> Cluster:
    """This machine: all visible GPUs, else cpu_ranks CPU ranks."""
    names = visible_gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if names:
        return Cluster((Host("localhost", len(names), names[0], memory),))
    return Cluster((Host("localhost", cpu_ranks, None, memory),))


def visible_gpus() -> list[str]:
    """Names of the GPUs nvidia-smi lists, limited by CUDA_VISIBLE_DEVICES; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in output.splitlines() if line.strip()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if chosen is None else list(_chosen(names, chosen))


def _chosen(names: list[str], visible: str) -> Iterable[str]:
    """CUDA's rule: indices (or UUIDs) in order, the first invalid one ends the list."""
    for item in filter(None, (part.strip() for part in visible.split(","))):
        if item.startswith(("GPU-", "MIG-")):
            yield names[0]
        elif item.isdigit() and int(item) < len(names):
            yield names[int(item)]
        else:
            return
