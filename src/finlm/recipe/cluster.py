"""Read hosts and slots from a DeepSpeed hostfile, from a recipe's `hardware:`, or from this machine.

The hostfile keeps DeepSpeed's own format (`name slots=N`, # comments), and so do include and exclude (`a@b:0,2`). A
line may end in `spare`: such a host takes the place of a lost one (DeepSpeed reads it as any other). What kind of GPU a
host has comes from the recipe's `hardware:` entry of the same name or from --gpu; how it is reached comes from the
recipe's `hosts:`; this machine is asked through nvidia-smi, never torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.recipe.schema import Hardware, HostAccess
from finlm.recipe.schema_data import MOST

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Of mpirun (name:2), a name alone, `name gpus=2`, `name slots = 2`, a full-width equals sign.
_NEARLY = re.compile(rf"({_NAME.pattern})(?:\s*[:,]\s*|\s+|$)(?:[A-Za-z]+\s*[=＝:]?\s*)?(\d*)")
_FIX = "write one line a host: `name slots=N`"
_SHOWN = 10  # lines of a hostfile's mistakes


@dataclass(frozen=True)
class Host:
    """One host with `slots` ranks; gpu is the GPU kind, None for CPU ranks; memory_bytes is its RAM, None if unknown.

    devices are the GPU indices to use, empty for the first `slots`. access is what the recipe's `hosts:` says about it.
    device_bytes, if set, limits the bytes that a GPU, or a rank on CPU, may take.
    """

    name: str
    slots: int
    gpu: str | None = None
    memory_bytes: int | None = None
    devices: tuple[int, ...] = ()
    access: HostAccess = dataclasses.field(default_factory=HostAccess)
    device_bytes: int | None = None

    @property
    def destination(self) -> str:
        """The host's ssh address as [user@]name[:port], as hosts/ssh.py takes it."""
        user = f"{self.access.user}@" if self.access.user else ""
        port = f":{self.access.port}" if self.access.port else ""
        return f"{user}{self.name}{port}"


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run, in hostfile order; the first is the master.

    spares are hosts that may replace a lost one. away are lost hosts that rejoin once they answer again.
    """

    hosts: tuple[Host, ...]
    network_gbit: float = 10.0
    spares: tuple[Host, ...] = ()
    away: tuple[Host, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts; spares and hosts that are away do not count."""
        return sum(host.slots for host in self.hosts)

    def leave(self, lost: Mapping[str, bool], spares: Iterable[Host]) -> tuple[Cluster, str]:
        """Return (the cluster with `spares` in the places of lost hosts, or without them if spares run out; in words).

        `lost` maps the name of each lost host to whether it may come back: then it becomes a spare, or goes to `away`.
        """
        hosts, kept, away, words = self.hosts, self.spares, self.away, list[str]()
        coming = iter(spares)
        for name, may_return in lost.items():
            gone = tuple(host for host in hosts if host.name == name and may_return)
            if spare := next(coming, None):
                hosts = tuple(spare if host.name == name else host for host in hosts)
                kept = (*(host for host in kept if host.name != spare.name), *gone)
                words.append(f"{spare.name} in the place of {name}")
            else:
                hosts, away = tuple(host for host in hosts if host.name != name), (*away, *gone)
                words.append(f"without {name}")
        return dataclasses.replace(self, hosts=hosts, spares=kept, away=away), ", ".join(words)

    def with_back(self, names: Iterable[str]) -> Cluster:
        """Return the cluster with the hosts of these names moved from `away` to the end of `hosts`."""
        back = tuple(host for host in self.away if host.name in set(names))
        left = tuple(host for host in self.away if host not in back)
        return dataclasses.replace(self, hosts=(*self.hosts, *back), away=left)

    @property
    def is_cpu(self) -> bool:
        """Whether all ranks run on CPU."""
        return all(host.gpu is None for host in self.hosts)

    @property
    def unequal_slots(self) -> str:
        """A sentence about the consequences of unequal numbers of ranks on the hosts; "" when the numbers are equal."""
        if len({host.slots for host in self.hosts}) == 1:
            return ""
        counts = ", ".join(f"{host.name} {host.slots}" for host in self.hosts)
        return (
            f"unequal slots ({counts}): every rank has the same share of the ZeRO shards, and of the rows unless "
            "micro-batches differ, so a host's part of the work follows from its ranks"
        )


def from_hardware(hardware: Hardware, gpu: str | None = None) -> Cluster:
    """Return the cluster of a recipe's `hardware:`; `gpu`, if given, is the GPU kind of every host.

    A host with a count above 1 becomes name-1, name-2, ...
    """
    hosts = [
        Host(host.name if host.count == 1 else f"{host.name}-{number}", host.slots, gpu or host.gpu, host.memory)
        for host in hardware.hosts
        for number in range(1, host.count + 1)
    ]
    return Cluster(tuple(hosts), hardware.network_gbit)


def load(
    hostfile: str | Path,
    hardware: Hardware | None = None,
    gpu: str | None = None,
    access: Mapping[str, HostAccess] | None = None,
    include: str = "",
    exclude: str = "",
) -> Cluster:
    """Return the cluster of a hostfile; its hosts marked `spare` become the spares.

    A host's GPU kind is `gpu`, else that of the host of the same name in `hardware`, else None (CPU ranks). Memory and
    network speed (else 10 Gbit/s) also come from `hardware`. `access` is the recipe's `hosts:`. `include` and `exclude`
    are DeepSpeed's filters. Raises UserError that lists bad lines as file:line, and for an unreadable file, a wrong
    filter, a host of `access` that the file lacks, or when only spares are left.
    """
    path = Path(hostfile)
    slots, spare = _read(path)
    unknown = [name for name in access or {} if name not in slots]
    if unknown:
        close = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(unknown[0], slots, n=1))
        raise UserError(
            f"hosts.{unknown[0]}: the hostfile {path} has no such host{close}",
            evidence=f"it names {', '.join(slots)}",
            fix="use the hostfile's name in the recipe's hosts: section, or add the host to the hostfile",
        )
    known = {host.name: host for host in from_hardware(hardware).hosts} if hardware else {}
    hosts = []
    for name, devices in _filter_slots(slots, include, exclude).items():
        like = known.get(name)
        kind = gpu or (like.gpu if like else None)
        chosen = () if devices == tuple(range(slots[name])) else devices
        how = (access or {}).get(name, HostAccess())
        hosts.append(Host(name, len(devices), kind, like.memory_bytes if like else None, chosen, how))
    training = tuple(host for host in hosts if host.name not in spare)
    if not training:
        raise UserError(f"all hosts of {path} that are left are spares", fix="leave `spare` out of one of its lines")
    spares = tuple(host for host in hosts if host.name in spare)
    return Cluster(training, hardware.network_gbit if hardware else 10.0, spares)


def check_hardware(hosts: Cluster, hardware: Hardware) -> Cluster:
    """Return `hosts` unchanged. Raises UserError if `hardware` has GPUs but no entry for a host of unknown GPU kind.

    For callers that do not ask the hosts themselves: such a host would be planned with CPU ranks.
    """
    known = {host.name: host.gpu for host in from_hardware(hardware).hosts}
    unknown = [host.name for host in hosts.hosts if host.gpu is None and host.name not in known]
    if unknown and any(known.values()):
        close = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(unknown[0], known, n=1))
        raise UserError(
            f"the recipe's hardware: does not say which GPUs {', '.join(unknown)} has{close}",
            evidence=f"hardware.hosts: {', '.join(known)}; the hosts themselves are not asked",
            fix="name the hosts alike in the hostfile and in hardware.hosts, or give --gpu NAME if all have the same",
        )
    return hosts


def entries(path: Path) -> list[tuple[int, str]]:
    """Return (line number from 1, text) of a hostfile's lines, without comments and empty lines.

    Comments may be in any encoding, and a byte-order mark is skipped. Raises UserError when the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the hostfile {path}", evidence=str(error), fix=_FIX) from None
    said = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    return [(number, text) for number, text in said if text]


def _read(path: Path) -> tuple[dict[str, int], set[str]]:
    """Return (slots by host in the file's order, names of the spares) of a hostfile.

    Raises UserError that lists the first bad lines as file:line, and for a file that is unreadable or names no host.
    """
    slots, first, spares = dict[str, int](), dict[str, int](), set[str]()
    mistakes = []
    for number, line in entries(path):
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)(?:\s+max_slots=\d+)?(\s+spare)?", line)
        if match is None:
            other = _NEARLY.fullmatch(line)  # another program's form
            meant = f"; did you mean {other[1]} slots={other[2] or 'N'}?" if other else ""
            mistakes.append(f"{path}:{number}: expected `name slots=N` or `name slots=N spare`, got {line!r}{meant}")
        elif _NAME.fullmatch(match[1]) is None:
            mistakes.append(f"{path}:{number}: {match[1]!r} is not a host name{_advise_access(match[1])}")
        elif match[1] in slots:
            mistakes.append(f"{path}:{number}: {match[1]} appears twice (line {first[match[1]]}); one line a host")
        elif int(match[2]) == 0:
            mistakes.append(f"{path}:{number}: {match[1]} has 0 slots; remove the line or give it 1 or more")
        elif len(match[2]) > 4 or int(match[2]) > MOST:
            mistakes.append(f"{path}:{number}: {match[1]} has {match[2]} slots; a host has at most {MOST:,}")
        else:
            slots[match[1]], first[match[1]] = int(match[2]), number
            if match[3]:
                spares.add(match[1])
    if mistakes:
        count = f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}"
        raise UserError(f"{count} in the hostfile {path}", evidence="\n".join(mistakes[:_SHOWN]), fix=_FIX)
    if not slots:
        raise UserError(f"the hostfile {path} names no host", fix=_FIX)
    return slots, spares


def _advise_access(text: str) -> str:
    """Return a hint how to write `user@name:port` into hosts:, or to list Slurm's nodes; "" for other text."""
    if re.fullmatch(r"[A-Za-z0-9.,-]*\[[0-9,-]+\]\S*", text):
        return f": `scontrol show hostnames '{text}'` lists the names, one a line"
    match = re.fullmatch(rf"(?:(\w+)@)?({_NAME.pattern})(?::(\d+))?", text)
    if match is None:
        return ""
    access = ", ".join(f"{key}: {value}" for key, value in (("user", match[1]), ("port", match[3])) if value)
    return f": write {match[2]} here, and in the recipe `hosts: {{{match[2]}: {{{access}}}}}`"


def _filter_slots(slots: Mapping[str, int], include: str, exclude: str) -> dict[str, tuple[int, ...]]:
    """Return {host: GPU indices} left by DeepSpeed's filters, in hostfile order; empty filters keep all.

    Raises UserError for both filters at once, an unknown host or slot, and when no host is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude exclude each other", fix="give one of them")
    every = {name: tuple(range(count)) for name, count in slots.items()}
    wanted = _parse_filter(include, every) if include else every
    dropped = _parse_filter(exclude, every) if exclude else {}
    kept = {name: set(numbers) - {*dropped.get(name, ())} for name, numbers in wanted.items()}
    if not any(kept.values()):
        raise UserError(f"--exclude {exclude} leaves no host", evidence=f"the hostfile names {', '.join(slots)}")
    return {name: tuple(sorted(kept[name])) for name in slots if kept.get(name)}


def _parse_filter(text: str, every: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Parse `a@b:0,2` -> {a: all its slots in `every`, b: (0, 2)}. UserError for other text, hosts and slots."""
    devices = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in every:
            raise UserError(f"{part!r}: the hostfile has no host {name!r}", evidence=f"it names {', '.join(every)}")
        if colon and re.fullmatch(r"\d+(,\d+)*", numbers) is None:
            raise UserError(f"{part!r} is not a filter", fix="DeepSpeed's form is host@host:0,2")
        devices[name] = tuple(map(int, numbers.split(","))) if colon else every[name]
        if not set(devices[name]) <= set(every[name]):
            raise UserError(f"{part!r}: {name} has slots 0 to {len(every[name]) - 1} in the hostfile")
    return devices


def is_local(name: str) -> bool:
    """Return whether a hostfile's name is localhost, 127.0.0.1 or this machine's node name; resolves no address."""
    return name in ("localhost", "127.0.0.1", os.uname().nodename)


def default_hostfile() -> Path | None:
    """Return hostfile.txt of the current directory if it names a host, else None. Raises UserError if unreadable."""
    path = Path("hostfile.txt")
    return path if path.is_file() and entries(path) else None


def local(cpu_ranks: int, hardware: Hardware | None = None) -> Cluster:
    """Return this machine as a cluster: its visible GPUs, or else `cpu_ranks` CPU ranks. Asks nvidia-smi.

    GPUs of several kinds all count as the kind with the least memory, and this is printed to stderr. With GPUs, the RAM
    that `hardware` gives for this machine replaces the measured one.
    """
    gpus = visible_gpus()
    ram = total_bytes()
    if not gpus:
        return Cluster((Host("localhost", cpu_ranks, None, ram),))
    stated = (host.memory for host in (hardware.hosts if hardware else ()) if host.gpu and is_local(host.name))
    ram = next(filter(None, stated), ram)
    # The launcher counts the GPUs of the machine, so a choice by CUDA_VISIBLE_DEVICES must be told to it.
    devices = () if list(gpus) == list(range(len(gpus))) else tuple(gpus)
    kinds = list(dict.fromkeys(gpus.values()))
    if len(kinds) > 1:
        sizes = {row["name"]: row["memory.total"].split()[0] for row in ask_gpus("name", "memory.total")}  # MiB
        kinds.sort(key=lambda name: int(size) if (size := sizes.get(name, "")).isdigit() else 0)
        screen.say(f"this machine has {' and '.join(kinds)}: planned for {kinds[0]}, the one with less memory")
    return Cluster((Host("localhost", len(gpus), kinds[0], ram, devices),))


def visible_gpus() -> dict[int, str]:
    """Return {GPU index: name} by nvidia-smi, limited to and ordered by CUDA_VISIBLE_DEVICES; {} if it fails."""
    rows = {int(row["index"]): row for row in ask_gpus("index", "name", "uuid")}
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    uuids = {number: row["uuid"] for number, row in rows.items()}
    return {number: rows[number]["name"] for number in (rows if chosen is None else visible_devices(uuids, chosen))}


def visible_devices(uuids: Mapping[int, str], visible: str) -> Iterable[int]:
    """Yield the GPU indices that CUDA_VISIBLE_DEVICES=`visible` names, in its order, up to the first invalid item.

    `uuids` is {index: UUID}. An item is an index or the beginning of a UUID, from "GPU-" on. If several UUIDs begin so,
    it means the first, where CUDA sees an invalid item. A GPU named twice is yielded twice.
    """
    for item in (part.strip() for part in visible.split(",")):
        if item.isdigit() and int(item) in uuids:
            yield int(item)
            continue
        matching = [number for number, uuid in uuids.items() if item.startswith("GPU-") and uuid.startswith(item)]
        if not matching:
            return
        yield matching[0]


def ask_gpus(*keys: str) -> list[dict[str, str]]:
    """Return {key: value} of each GPU by nvidia-smi --query-gpu, in its order; [] if that fails or takes over 30 s.

    `keys` are nvidia-smi's. Lines that are not such a row, for example warnings, are left out.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def total_bytes() -> int:
    """Return the bytes of this host's RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
