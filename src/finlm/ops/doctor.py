"""Preflight: what would make this run fail or crawl, told from the hosts' facts before anything starts.

`check` is pure: recipe, plan, cluster and facts (of probe.py) in, findings out. An "error" stops `finlm train`, a
"warning" does not. Every finding carries the numbers it was made from and a way to mend it. A fact the probe could not
get is unknown, not wrong: a healthy machine gives no finding. About half a second, all of it the probe.

Does not look into the data, does not measure speed, and does not see faults that only show under load.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import finlm
from finlm.base import screen
from finlm.base.units import format_bytes
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

MIN_PYTHON = (3, 11)
TORCH_VERSIONS = ("2.11", "2.12", "2.13")  # the range the trainer was run with
MIN_SHM_BYTES = 64 * 2**20  # Docker's default, which NCCL's segments (9.6 MB a channel) of a few GPUs fill
MIN_OPEN_FILES = 1024
SHARED_LOCK_SECONDS = 600  # on a network disk another host may be building: the slowest op took 165 s
_PRETRAIN = ("torch", "deepspeed", "transformers", "sentencepiece", "tokenizers", "protobuf", "numpy", "pydantic")
NEEDED = {"pretrain": (*_PRETRAIN, "ruamel.yaml")}
ALL_STAGES = (*NEEDED["pretrain"], "accelerate", "trl", "datasets")

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on one host."""

    check: str
    host: str
    level: Level
    evidence: str
    fix: str

    def to_json(self) -> dict[str, str]:
        """The finding as the command line prints it."""
        return dataclasses.asdict(self)


Fault = tuple[str, Level, str, str]
"""Check, level, evidence and fix of a finding, before it is known where."""


def check(recipe: Recipe, plan: Plan, cluster: Cluster, facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Everything wrong on the cluster's hosts, errors first. `facts` maps a host's name to the probe's document."""
    findings = []
    for host in cluster.hosts:
        found = facts.get(host.name)
        if found is None:
            fault: Fault = ("probe", "error", "no facts of this host were gathered", f"try `ssh {host.name} python3 -V`")
            findings.append(Finding(fault[0], host.name, fault[1], fault[2], fault[3]))
            continue
        faults = _host(recipe, plan, host, found, alone=len(cluster.hosts) == 1)
        findings += [Finding(name, host.name, level, evidence, fix) for name, level, evidence, fix in faults]
    findings += _nccl_between_hosts(plan, cluster, facts)
    return sorted(findings, key=lambda finding: finding.level)


def check_local(recipe: Recipe, plan: Plan, runs: Path = Path("runs"), port: int | None = None) -> list[Finding]:
    """Findings of this machine, as the plan's host of its name, else as the plan's first one."""
    names = ("localhost", "127.0.0.1", os.uname().nodename)
    planned = next((host for host in plan.hosts if host.name in names), plan.hosts[0])
    host = Host("localhost" if planned.name not in names else planned.name, planned.slots, planned.gpu)
    disks = {"run": runs} | ({"nvme": Path(recipe.zero.nvme_path)} if recipe.zero.nvme_path else {})
    return check(recipe, plan, Cluster((host,)), {host.name: local_facts(disks, port, recipe.env)})


def local_facts(
    disks: Mapping[str, Path] | None = None, port: int | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The probe's document of this machine. `disks` maps a role (run, nvme) to a directory that may not exist yet.

    The environment is the one ranks get: the interpreter's directory is on PATH, where ninja lies.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, str(Path(__file__).with_name("probe.py"))]
    command += [f"--disk={role}={directory}" for role, directory in (disks or {}).items()]
    command += [] if port is None else [f"--port={port}"]
    environment = {**os.environ, "PATH": path, **(env or {})}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    facts: dict[str, Any] = json.loads(output)
    return facts


def show(findings: Sequence[Finding]) -> None:
    """Findings for a person, on stderr."""
    for finding in findings:
        screen.say(f"{finding.level}: {finding.check} on {finding.host}")
        screen.say("  evidence: " + finding.evidence.replace("\n", "\n            "))
        screen.say("  fix:      " + finding.fix.replace("\n", "\n            "))
    errors = sum(finding.level == "error" for finding in findings)
    if findings:
        screen.say(f"doctor: {errors} error(s), {len(findings) - errors} warning(s)")
    else:
        screen.say("doctor: nothing wrong")


def pins() -> dict[str, str]:
    """Exact versions of requirements.txt, of the checkout or of the installed package's metadata."""
    file = Path(finlm.__file__).resolve().parents[2] / "requirements.txt"
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
    else:
        try:
            lines = importlib.metadata.requires("finlm") or []
        except importlib.metadata.PackageNotFoundError:
            return {}
    matches = (re.match(r"([A-Za-z0-9._-]+)\s*==\s*([^\s;#]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in matches if match}


def _host(recipe: Recipe, plan: Plan, host: Host, facts: Mapping[str, Any], alone: bool) -> Iterator[Fault]:
    yield from _python(facts)
    yield from _packages(recipe, plan, facts)
    if facts["gpu"] is not None:
        yield from _driver(plan, host, facts["gpu"])
        if plan.device == "cuda":
            yield from _devices(plan, host, facts["gpu"])
    yield from _memory(plan, facts)
    yield from _disks(recipe, plan, host, facts["disks"] or {}, alone)
    yield from _shm(plan, host, facts["shm"])
    yield from _open_files(facts["limits"])
    yield from _compilers(plan, facts)
    yield from _locks(plan, facts["extensions"])
    if facts["port"] is not None and not facts["port"]["free"]:
        port = facts["port"]["port"]
        evidence = f"cannot listen on port {port}: {facts['port']['error']}"
        yield "port", "error", evidence, f"`ss -ltnp 'sport = :{port}'` names the process; end it or use another port"


def _python(facts: Mapping[str, Any]) -> Iterator[Fault]:
    python = facts["python"]
    if python and tuple(map(int, re.findall(r"\d+", python["version"])[:2])) < MIN_PYTHON:
        evidence = f"{python['executable']} is Python {python['version']}; 3.11 or newer is needed"
        yield "python", "error", evidence, "`scripts/setup.sh` makes .venv with a newer Python"


def _packages(recipe: Recipe, plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    installed, wanted = facts["packages"], pins()
    if installed is None:
        return
    install = "`pip install -r requirements.txt` with the interpreter of .venv"
    needed = [name for name in NEEDED.get(recipe.stage, ALL_STAGES) if name in wanted]
    missing = [f"{name}=={wanted[name]}" for name in needed if not installed.get(name)]
    if missing:
        yield "packages", "error", f"not installed: {', '.join(missing)}", install
    other = [f"{name} {installed[name]} (pinned: {wanted[name]})" for name in needed if _differs(name, installed, wanted)]
    if other:
        yield "packages", "warning", f"other versions than tested: {', '.join(other)}", install
    if plan.device == "cuda" and (installed.get("torch") or "").endswith("+cpu"):
        evidence = f"torch {installed['torch']} has no CUDA, the plan is for GPUs"
        yield "torch", "error", evidence, "`pip install --force-reinstall torch` from the CUDA index"
    nccl = {name: version for name, version in installed.items() if name.startswith("nvidia-nccl") and version}
    if plan.device == "cuda" and len(nccl) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in nccl.items())
        evidence = f"{listed} install the same libnccl.so.2; the last one installed wins"
        yield "nccl", "warning", evidence, "uninstall the one torch does not need, then reinstall the other"


def _differs(name: str, installed: Mapping[str, str | None], wanted: Mapping[str, str]) -> bool:
    version = (installed.get(name) or "").partition("+")[0]
    if not version:
        return False
    return ".".join(version.split(".")[:2]) not in TORCH_VERSIONS if name == "torch" else version != wanted[name]


def _nccl_between_hosts(plan: Plan, cluster: Cluster, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts whose NCCL differs from the first one's: NCCL refuses or hangs at the first collective."""
    versions = {}
    for host in cluster.hosts:
        installed = (facts.get(host.name) or {}).get("packages") or {}
        wheels = sorted(f"{name} {installed[name]}" for name in installed if name.startswith("nvidia-nccl"))
        if wheels:
            versions[host.name] = ", ".join(wheels)
    if plan.device == "cpu" or not versions:
        return
    first = next(iter(versions))
    for name, listed in versions.items():
        if listed != versions[first]:
            evidence = f"{name} has {listed}, {first} has {versions[first]}"
            yield Finding("nccl", name, "error", evidence, "install the same requirements.txt on every host")


def _driver(plan: Plan, host: Host, gpu: Mapping[str, Any]) -> Iterator[Fault]:
    mend = "`nvidia-smi` must list the GPUs: after a driver update reboot, or reload the nvidia modules"
    if gpu["error"] and plan.device == "cuda":
        yield "driver", "error", f"nvidia-smi: {gpu['error']}", mend
    elif gpu["error"] and gpu["pci"]:
        evidence = f"{gpu['pci']} NVIDIA GPU(s) on the PCI bus, but nvidia-smi: {gpu['error']}; the plan uses CPU ranks"
        yield "driver", "warning", evidence, mend
    elif plan.device == "cuda":
        chosen = visible(gpu)
        if chosen is not None and len(chosen) < host.slots:
            limit = "" if gpu["visible"] is None else f", CUDA_VISIBLE_DEVICES={gpu['visible']}"
            smi = f"nvidia-smi lists {len(gpu['devices'])}" if gpu["nvidia_smi"] else "nvidia-smi is not installed"
            evidence = f"{len(chosen)} visible GPU(s), the plan uses {host.slots} ({smi}{limit})"
            yield "gpus", "error", evidence, "lower slots in the hostfile, or make the GPUs visible"


def visible(gpu: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The devices CUDA_VISIBLE_DEVICES leaves, in its order, by CUDA's rule; None with MIG, which is not understood."""
    devices: list[Mapping[str, Any]] = gpu["devices"]
    if gpu["visible"] is None:
        return devices
    chosen: list[Mapping[str, Any]] = []
    for item in (part.strip() for part in gpu["visible"].split(",")):
        if item.startswith("MIG-"):
            return None
        match = [one for one in devices if item == str(one["index"]) or (item[:4] == "GPU-" and item in one["uuid"])]
        if not match:  # the first invalid entry ends the list
            break
        chosen += match[:1]
    return chosen


def _devices(plan: Plan, host: Host, gpu: Mapping[str, Any]) -> Iterator[Fault]:
    used = (visible(gpu) or [])[: host.slots]
    full = [one for one in used if one["memory_free"] is not None and one["memory_free"] < plan.gpu_bytes]
    if full:
        lines = [
            f"GPU {one['index']} ({one['name']}): {format_bytes(one['memory_free'])} free of "
            f"{format_bytes(one['memory_total'])}, the plan needs {format_bytes(plan.gpu_bytes)}{_holders(one)}"
            for one in full
        ]
        fix = "end those processes, choose other GPUs with CUDA_VISIBLE_DEVICES, or plan for less memory with --gpu"
        yield "gpu-memory", "error", "\n".join(lines), fix
    old = [one for one in used if one["compute_capability"] and float(one["compute_capability"]) < 8.0]
    if old and plan.precision == "bf16":
        named = ", ".join(f"GPU {one['index']} ({one['name']}) {one['compute_capability']}" for one in old)
        evidence = f"bf16 needs compute capability 8.0: {named}"
        yield "precision", "error", evidence, "set train.precision to fp16"


def _holders(device: Mapping[str, Any]) -> str:
    held = [
        f"{one['name']} (pid {one['pid']}{', ' + format_bytes(one['bytes']) if one['bytes'] is not None else ''})"
        for one in device["processes"]
    ]
    return f"; held by {', '.join(held)}" if held else ""


def _memory(plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    memory = facts["memory"]
    if memory and memory["available"] < plan.host_bytes:
        limit = f", cgroup limit {format_bytes(memory['cgroup_limit'])}" if memory["cgroup_limit"] else ""
        total = format_bytes(memory["total"])
        evidence = f"{format_bytes(memory['available'])} RAM available of {total}{limit}, the plan needs "
        evidence += format_bytes(plan.host_bytes)
        yield "memory", "error", evidence, "end other processes, raise the container's limit, or use fewer ranks a host"


