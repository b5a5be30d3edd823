"""Asks every host of a cluster for its facts, all at the same time: one ssh connection a host, none for this machine.

The probes travel with the question, so a host needs only some Python 3.8 and can never run an older version of them.
They are run by the interpreter that the ranks will use; where it is missing by the host's python3, which is said. Three
hosts answer in 2 to 4 s, and a host that is down costs 8 s (ssh's connection time-out) whatever the others do.

Judges nothing and writes nothing.
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
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError
from finlm.ops import places, probe, probe_carrier, probe_files, probe_gpu, probe_links, ssh
from finlm.ops.doctor_trees import Tree
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

PROGRAM_SECONDS = 40.0  # importing torch from a slow disk; everything else takes a second
MEETING_SECONDS = 6.0  # for all hosts to have called each other; ssh logins differ by a second or two
PATIENCE_SECONDS = 60.0
RANDOM_PORTS = range(20_000, 32_000)  # below the kernel's own choices for outgoing connections (32768 up)
_NO_PYTHON = 3
_FIND_PYTHON = 'cd / || exit; for p in "$@"; do command -v "$p" > /dev/null 2>&1 && exec "$p" -; done; exit 3'

Facts = dict[str, Any]
Programs = dict[str, tuple[str, list[str]]]  # source and arguments of what runs on a host


def gather(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster,
    runs: Path,
    *,
    trees: Sequence[Tree] = (),
    accept_new: bool = False,
) -> dict[str, Facts]:
    """The facts of every host by name; {"failed": {problem, evidence, fix}} of one that could not be asked."""
    names = [host.name for host in cluster.hosts]
    with ThreadPoolExecutor(len(cluster.hosts)) as pool:
        own = pool.map(ssh.is_this_machine, (host.destination for host in cluster.hosts))
        local = dict(zip(names, own, strict=True))
        needed = len(cluster.hosts) > 1 or recipe.launch.master_port != "auto"
        meeting = _Meeting(recipe, cluster, local) if needed else None

        def ask(host: Host) -> Facts:
            programs = _programs(recipe, plan, host, runs, trees, meeting)
            return _ask(recipe, host, programs, local[host.name], accept_new)

        return dict(zip(names, pool.map(ask, cluster.hosts), strict=True))


def hardware(recipe: Recipe, cluster: Cluster, accept_new: bool = False) -> dict[str, Facts]:
    """As gather, but only what a plan is made from: `memory` and `gpu` of every host."""
    programs: Programs = {"host": (_source(probe), ["--only=memory"]), "gpu": (_source(probe_gpu), [])}
    with ThreadPoolExecutor(len(cluster.hosts)) as pool:

        def ask(host: Host) -> Facts:
            return _ask(recipe, host, programs, ssh.is_this_machine(host.destination), accept_new)

        return dict(zip((host.name for host in cluster.hosts), pool.map(ask, cluster.hosts), strict=True))


class _Meeting:
    """Where the hosts call each other during the probe."""

    def __init__(self, recipe: Recipe, cluster: Cluster, local: Mapping[str, bool]) -> None:
        given = recipe.launch.master_port
        self.port = random.choice(RANDOM_PORTS) if given == "auto" else given
        self.token = secrets.token_hex(8)
        several = len(cluster.hosts) > 1
        self.peers = [_peer(host, local[host.name]) for host in cluster.hosts] if several else []

    def request(self, host: Host) -> str:
        """What probe_links shall do on the host."""
        fields = {"me": host.name, "port": self.port, "token": self.token, "seconds": MEETING_SECONDS}
        return json.dumps({**fields, "peers": self.peers})


def _peer(host: Host, local: bool) -> dict[str, Any]:
    """How the other hosts are to reach this one: by its name, else by the address that this machine knows."""
    ways = [host.access.address or host.name]
    known = host.name if local else ssh.address(host.destination)
    try:
        found = [str(item[4][0]) for item in socket.getaddrinfo(known, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    ways += [address for address in found if not address.startswith("127.") and address != "::1"]
    return {"name": host.name, "addresses": ways, "ssh": ssh.command(host.destination, ["true"])}


def _programs(
    recipe: Recipe, plan: Plan, host: Host, runs: Path, trees: Sequence[Tree], meeting: _Meeting | None
) -> Programs:
    """What runs on a host."""
    roles = {"run": runs} | ({"nvme": Path(recipe.zero.nvme_path)} if recipe.zero.nvme_path else {})
    disks = [f"--disk={role}={places.there(path, host.access)}" for role, path in roles.items()]
    programs: Programs = {
        "host": (_source(probe), disks),
        "gpu": (_source(probe_gpu), ["--torch"] if plan.device == "cuda" else []),
    }
    if meeting is not None:
        programs["links"] = (_source(probe_links), [meeting.request(host)])
    if trees:
        request = {tree.role: tree.request(places.there(tree.path, host.access)) for tree in trees}
        programs["trees"] = (f"{_source(probe_files)}\n\nanswer({json.dumps(request)!a})\n", [])
    return programs


def _source(module: Any) -> str:
    return Path(module.__file__).read_text(encoding="utf-8")


def _ask(recipe: Recipe, host: Host, programs: Programs, local: bool, accept_new: bool) -> Facts:
    wanted = places.python(host.access)
    env = {**recipe.env, **host.access.env}
    request = {"env": env, "seconds": PROGRAM_SECONDS, "programs": programs}
    script = f"{_source(probe_carrier)}\n\ncarry(json.loads({json.dumps(request)!a}))\n".encode()
    sent = time.time()
    try:
        output = _run_here(wanted, script) if local else _run_there(host, wanted, script, accept_new)
    except UserError as error:
        return {"failed": {"problem": error.problem, "evidence": error.evidence, "fix": error.fix}}
    received = time.time()
    _, mark, line = output.rpartition(probe_carrier.MARK)
    if not mark:
        return {
            "failed": {"problem": f"{wanted} on {host.name} printed no facts", "evidence": output[-200:], "fix": ""}
        }
    carried = json.loads(line)
    # The host began after it was asked and ended before it was heard: its clock's error lies between these two.
    offset = [carried["ended"] - received, carried["began"] - sent]
    facts = _merged(carried["answers"], wanted) | {"clock": offset, "is_here": local}
    if local:
        _leave_out(os.getpid(), facts)
    return facts


def _leave_out(pid: int, facts: Facts) -> None:
    """Not a stranger on the GPU: this process, which asked a model there the questions of the recipe before."""
    for device in (facts.get("gpu") or {}).get("devices", ()):
        device["processes"] = [one for one in device["processes"] if one["pid"] != pid]


def _run_here(python: str, script: bytes) -> str:
    try:
        done = subprocess.run([python, "-"], input=script, capture_output=True, timeout=PATIENCE_SECONDS, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} does not answer", evidence=str(error)) from None
    return done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace")


def _run_there(host: Host, python: str, script: bytes, accept_new: bool) -> str:
    argv = ["sh", "-c", _FIND_PYTHON, "sh", python, "python3"]
    found = ssh.run(
        host.destination, argv, stdin=script, timeout_seconds=PATIENCE_SECONDS, accept_new=accept_new, check=False
    )
    if found.code == _NO_PYTHON:
        nothing = f"neither {python} nor a python3 on the PATH of {host.name}"
        raise ssh.explain(host.destination, ssh.NOT_FOUND, nothing, "python3")
    return found.stdout or found.stderr


def _merged(answers: Mapping[str, Any], wanted: str) -> Facts:
    """One document: probe.py's sections, `gpu`, `torch`, `links`, `trees`; null for what failed, with its error."""
    facts: Facts = {}
    errors: dict[str, str] = {}
    for name, answer in answers.items():
        if "failed" in answer:
            errors[name] = answer["failed"]
            continue
        errors |= answer.pop("errors", {})
        if name in ("links", "trees"):
            facts[name] = answer
        else:
            facts |= answer
    if facts.get("python"):
        facts["python"]["wanted"] = wanted
    facts["errors"] = errors
    return facts
