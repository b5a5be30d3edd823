"""Ask every host of a cluster for its facts, all at the same time: one ssh connection per host, none for this machine.

The probes (hosts/remote/) are sent along, so a host needs only some Python 3.8 and can never run an older version of
them. They are run by the interpreter that the ranks will use or, if that is missing, by the host's python3, which is
recorded. Three hosts answer in 2 to 4 s; a host that is down costs 8 s (ssh's connection time-out), and the others do
not wait for it.

HostFacts has what is known of a host; its fields are the dataclasses of the probes. Judges nothing and writes nothing.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from finlm.base.errors import UserError
from finlm.hosts import ssh
from finlm.hosts.file_trees import CheckedTree
from finlm.hosts.remote import carrier, gpu, links, probe, receiver
from finlm.hosts.remote.gpu import Device, Gpu, Torch
from finlm.hosts.remote.links import Infiniband, Links
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

PROGRAM_SECONDS = 40.0  # importing torch from a slow disk; everything else takes a second
MEETING_SECONDS = 15.0  # for all hosts to have called each other: a login may take 10 s (UseDNS, modules, NFS homes)
PATIENCE_SECONDS = 60.0
RANDOM_PORTS = range(20_000, 32_000)  # below the kernel's own choices for outgoing connections (32768 up)
_NO_PYTHON = 3
_FIND_PYTHON = 'cd / || exit; for p in "$@"; do command -v "$p" > /dev/null 2>&1 && exec "$p" -; done; exit 3'

Programs = dict[str, tuple[str, list[str]]]  # source and arguments of what runs on a host


@dataclass(frozen=True)
class Failed:
    """Why a host could not be asked, as problem, evidence and fix of a UserError."""

    problem: str = ""
    evidence: str = ""
    fix: str = ""


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host's probes reported. A fact that is None is unknown."""

    hostname: str | None = None
    machine: str | None = None
    python: probe.Python | None = None
    platform: str | None = None
    cpu: str | None = None
    cores: probe.Cores | None = None
    memory: probe.Memory | None = None
    disks: dict[str, probe.Disk] | None = None
    shm: probe.Space | None = None
    limits: dict[str, tuple[int | None, int | None]] | None = None
    tools: dict[str, probe.Tool | None] | None = None
    rsync: str | None = ""  # empty: unknown, None: not installed
    libaio: bool | None = None
    packages: dict[str, str | None] | None = None
    extensions: probe.Extensions | None = None
    gpu: Gpu | None = None
    torch: Torch | None = None
    links: Links | None = None
    trees: dict[str, dict[str, str | None]] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    clock: tuple[float, float] | None = None  # seconds that the host's clock is ahead: at least, at most
    is_here: bool = False
    printed: str = ""  # by login scripts, before the answer
    failed: Failed | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the HostFacts of the probes' JSON document. Raises pydantic's ValidationError for a wrong type."""
        return TypeAdapter(cls).validate_python(document)

    @property
    def has_python_of_ranks(self) -> bool:
        """True unless another interpreter than the ranks' answered, whose packages say nothing about the ranks."""
        return not self.python or self.python.executable == (self.python.wanted or self.python.executable)

    @property
    def devices(self) -> list[Device]:
        """The GPUs that nvidia-smi lists, [] when it was not asked."""
        return self.gpu.devices if self.gpu else []

    @property
    def infiniband(self) -> list[Infiniband]:
        """The ports of InfiniBand and RoCE adapters, [] when they are unknown."""
        return (self.links.infiniband if self.links else None) or []

    def for_manifest(self) -> dict[str, str | list[str] | dict[str, str | None]]:
        """Return the versions, GPUs, drivers and CPU that a run may depend on; leaves out unknown and empty values."""
        torch = self.torch
        seen: dict[str, str | list[str] | dict[str, str | None] | None] = {
            "python": self.python.version if self.python else None,
            "torch": torch.version if torch else None,
            "cuda": torch.cuda if torch else None,
            "nccl": torch.nccl if torch else None,
            "gpus": [device.name for device in self.devices],
            "drivers": sorted({device.driver for device in self.devices}),
            "platform": self.platform,
            "cpu": self.cpu,
            "packages": self.packages,
        }
        return {name: value for name, value in seen.items() if value}


AllFacts = Mapping[str, HostFacts]
"""By the name of the host."""


def gather(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster,
    runs: Path,
    *,
    trees: Sequence[CheckedTree] = (),
    accept_new_keys: bool = False,
) -> dict[str, HostFacts]:
    """Return {host: facts} of all hosts, asked at the same time; a host that could not be asked has only `failed`.

    Torch is probed if the plan has GPUs. Measures the disks of `runs`, the directory of runs, and of NVMe offload and
    checkpoints in memory if the recipe has them. `trees` are files to fingerprint on the hosts. `accept_new_keys`
    stores unknown ssh host keys. Several hosts also call each other at launch.master_port, or a random port; a single
    host only tries a fixed port.
    """
    here, _ = ssh.split_local(cluster.hosts)
    meetings = _plan_meeting(recipe, cluster, here)

    def ask(host: Host) -> HostFacts:
        """Return the facts of a host: choose its programs and run them there."""
        programs = _choose_programs(recipe, plan, host, runs, trees)
        if host.name in meetings:
            programs["links"] = (_read_source(links), [meetings[host.name]])
        return _ask_host(recipe, host, programs, host in here, accept_new_keys)

    with ThreadPoolExecutor(len(cluster.hosts)) as pool:
        return {host.name: facts for host, facts in zip(cluster.hosts, pool.map(ask, cluster.hosts), strict=True)}


def gather_hardware(recipe: Recipe, cluster: Cluster, accept_new_keys: bool = False) -> dict[str, HostFacts]:
    """Ask hosts for memory and GPUs; return {host: facts}, with `errors` of a failed probe, `failed` if unreachable.

    `accept_new_keys` stores unknown ssh host keys.
    """
    programs: Programs = {"host": (_read_source(probe), ["--only=memory"]), "gpu": (_read_source(gpu), [])}

    def ask(host: Host) -> HostFacts:
        """Return a host's facts from the two probes."""
        return _ask_host(recipe, host, programs, ssh.is_this_machine(host.destination), accept_new_keys)

    with ThreadPoolExecutor(len(cluster.hosts)) as pool:
        return {host.name: facts for host, facts in zip(cluster.hosts, pool.map(ask, cluster.hosts), strict=True)}


def _plan_meeting(recipe: Recipe, cluster: Cluster, here: Sequence[Host]) -> dict[str, str]:
    """Return {host: request of hosts/remote/links.py as JSON}, with which the hosts call each other while probed.

    {} for a single host without a fixed port, which has nothing to try. `here` are the hosts that are this machine.
    """
    given, several = recipe.launch.master_port, len(cluster.hosts) > 1
    if not several and given == "auto":
        return {}
    port, token = random.choice(RANDOM_PORTS) if given == "auto" else given, secrets.token_hex(8)
    peers = [_describe_peer(host, host in here) for host in cluster.hosts] if several else []
    requests = [links.Request(host.name, port, token, MEETING_SECONDS, peers) for host in cluster.hosts]
    return {request.me: json.dumps(asdict(request)) for request in requests}


def _describe_peer(host: Host, is_here: bool) -> links.Peer:
    """Return a host's name, the addresses (no loopback) at which others try it in order, and an ssh login to it.

    Looks its name up in DNS; a name that cannot be resolved adds no address. Raises UserError if it is no host name.
    """
    ways = [host.access.address or host.name]
    known = host.name if is_here else ssh.address(host.destination)
    try:
        addresses = [str(item[4][0]) for item in socket.getaddrinfo(known, None, type=socket.SOCK_STREAM)]
    except OSError:
        addresses = []
    ways += [address for address in addresses if not address.startswith("127.") and address != "::1"]
    return links.Peer(host.name, ways, ssh.command(host.destination, ["true"]))


def _choose_programs(recipe: Recipe, plan: Plan, host: Host, runs: Path, trees: Sequence[CheckedTree]) -> Programs:
    """Return the programs to run on a host, but links.py. Probes torch only for GPUs."""
    roles = {"run": runs} | ({"nvme": Path(recipe.zero.nvme_path)} if recipe.zero.nvme_path else {})
    roles |= {"memory": Path(recipe.checkpoint.memory_directory)} if recipe.checkpoint.memory_minutes else {}
    disks = [f"--disk={role}={ssh.path_on_host(path, host.access)}" for role, path in roles.items()]
    programs: Programs = {
        "host": (_read_source(probe), disks),
        "gpu": (_read_source(gpu), ["--torch"] if plan.device == "cuda" else []),
    }
    if trees:
        request = {}
        for tree in trees:
            there = ssh.path_on_host(tree.path, host.access)
            request[tree.role] = {"path": str(there), "names": list(tree.files), "follow": tree.follow}
        programs["trees"] = (f"{_read_source(receiver)}\n\nanswer_fingerprints({json.dumps(request)!a})\n", [])
    return programs


def _read_source(module: Any) -> str:
    """Return the source text of a module, from its file."""
    return Path(module.__file__).read_text(encoding="utf-8")


def _ask_host(recipe: Recipe, host: Host, programs: Programs, is_here: bool, accept_new_keys: bool) -> HostFacts:
    """Run the programs on a host, here as a child process, and return its facts; a UserError is kept as `failed`.

    `is_here` says that the host is this machine. Raises pydantic's ValidationError for facts of a wrong type.
    """
    python = ssh.python_on_host(host.access)
    request = {"env": {**recipe.env, **host.access.env}, "seconds": PROGRAM_SECONDS, "programs": programs}
    script = f"{_read_source(carrier)}\n\ncarry(**json.loads({json.dumps(request)!a}))\n".encode()
    sent = time.time()
    try:
        output = _run_here(python, script) if is_here else _run_there(host, python, script, accept_new_keys)
    except UserError as error:
        return HostFacts(failed=Failed(error.problem, error.evidence, error.fix))
    received = time.time()
    printed, mark, line = output.rpartition(carrier.MARK)
    if not mark:
        by_hand = f"{python} -V" if is_here else f"ssh {ssh.ssh_name(host.destination)} {python} -V"
        return HostFacts(failed=Failed(f"{python} on {host.name} printed no facts", output[-200:], f"try `{by_hand}`"))
    carried = json.loads(line)
    document = _merge_answers(carried["answers"], python)
    # The host began after it was asked and ended before it was heard: its clock's error lies between these two.
    document["clock"] = [carried["ended"] - received, carried["began"] - sent]
    document |= {"is_here": is_here, "printed": "" if is_here else printed.strip()[-200:]}
    facts = HostFacts.from_json(document)
    for device in facts.devices if is_here else ():
        # Not a stranger on the GPU: this process, which asked a model there the questions of the recipe before.
        device.processes = [process for process in device.processes if process.pid != os.getpid()]
    return facts


def _run_here(python: str, script: bytes) -> str:
    """Run a script here with the interpreter `python`; return its stdout, else its stderr.

    Raises UserError if the interpreter cannot be started or does not end within 60 s.
    """
    try:
        done = subprocess.run([python, "-"], input=script, capture_output=True, timeout=PATIENCE_SECONDS, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} does not answer", evidence=str(error), fix=f"try `{python} -V`") from None
    return done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace")


def _run_there(host: Host, python: str, script: bytes, accept_new_keys: bool) -> str:
    """Run a script on a host over ssh with `python`, else python3; return its stdout, else its stderr.

    Raises UserError when the login fails, the host has no Python, or there is no answer within 60 s.
    """
    argv = ["sh", "-c", _FIND_PYTHON, "sh", python, "python3"]
    result = ssh.run(
        host.destination,
        argv,
        stdin=script,
        timeout_seconds=PATIENCE_SECONDS,
        accept_new_keys=accept_new_keys,
        check=False,
    )
    if result.code == _NO_PYTHON:
        nothing = f"neither {python} nor a python3 on the PATH of {host.name}"
        raise ssh.explain(host.destination, ssh.NOT_FOUND, nothing, "python3")
    return result.stdout or result.stderr


def _merge_answers(answers: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """Merge the programs' answers into a document with all sections; the reason of a failed program goes into `errors`.

    `wanted` is the path of the ranks' interpreter, for the `python` section. Changes the answers.
    """
    document: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, answer in answers.items():
        if "failed" in answer:
            errors[name] = answer["failed"]
            continue
        errors |= answer.pop("errors", {})
        if name == "trees" or (name == "links" and answer):
            document[name] = answer
        elif name != "links":
            document |= answer
    if document.get("python"):
        document["python"]["wanted"] = wanted
    return document | {"errors": errors}
