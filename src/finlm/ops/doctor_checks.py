"""The checks of doctor.py: pure functions from plan and facts of probe.py to faults, one per cause.

Each threshold names where it comes from. A fact that is None could not be gathered and gives no fault.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import finlm
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
Fault = tuple[str, Level, str, str]
"""Check, level, evidence and fix."""


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


def of_host(recipe: Recipe, plan: Plan, host: Host, facts: Mapping[str, Any], alone: bool) -> Iterator[Fault]:
    """Everything wrong on one host; `alone` = it is the only one of the run."""
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
    other = [
        f"{name} {installed[name]} (pinned: {wanted[name]})" for name in needed if _differs(name, installed, wanted)
    ]
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


def between_hosts(plan: Plan, cluster: Cluster, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Fault]]:
    """(host, fault) for hosts whose NCCL differs from the first one's: the first collective fails or hangs."""
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
            yield name, ("nccl", "error", evidence, "install the same requirements.txt on every host")


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


def _disks(recipe: Recipe, plan: Plan, host: Host, disks: Mapping[str, Any], alone: bool) -> Iterator[Fault]:
    share = host.slots / plan.world_size
    if "run" in disks:
        one = checkpoint_bytes(plan) * (1.0 if alone else share)  # each host writes its own shards
        copies = recipe.checkpoint.keep_last + 1  # the new one is whole before the oldest goes
        need = one * copies - disks["run"]["checkpoint_bytes"]
        what = f"{copies} checkpoints of {format_bytes(one)}"
        fix = "free space, give --runs on a larger disk, or lower checkpoint.keep_last"
        yield from _space("disk", disks["run"], need, what, fix)
    if "nvme" in disks:
        element = 4 if plan.precision == "fp32" else 2
        optimizer = 12 * plan.parameters if plan.offload_optimizer == "nvme" else 0
        weights = element * plan.parameters if plan.offload_param == "nvme" else 0
        fix = "give zero.nvme_path on a larger disk or offload to cpu"
        yield from _space("nvme", disks["nvme"], (optimizer + weights) * share, "offloaded states", fix)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of one DeepSpeed checkpoint: weights, fp32 master (none for fp32 at stage 0) and two Adam moments."""
    weights = 4 if plan.precision == "fp32" else 2
    master = 0 if plan.precision == "fp32" and plan.zero_stage == 0 else 4
    return (weights + master + 8) * plan.parameters


def _space(name: str, disk: Mapping[str, Any], need: float, what: str, fix: str) -> Iterator[Fault]:
    if disk["free"] < need:
        evidence = f"{format_bytes(disk['free'])} free at {disk['path']}, {format_bytes(need)} needed for {what}"
        yield name, "error", evidence, fix
    if not disk["writable"]:
        yield name, "error", f"{disk['path']} cannot be written", f"change its owner or permissions ({what} go there)"


def _shm(plan: Plan, host: Host, shm: Mapping[str, Any] | None) -> Iterator[Fault]:
    """NCCL's ranks of one host talk through /dev/shm; CPU ranks use gloo over TCP, which does not need it."""
    if plan.device == "cpu" or host.slots == 1 or shm is None:
        return
    fix = "start the container with --shm-size=8g (or --ipc=host); files left in /dev/shm by dead runs may be removed"
    evidence = f"/dev/shm has {format_bytes(shm['free'])} free of {format_bytes(shm['total'])} for {host.slots} ranks"
    if shm["free"] < MIN_SHM_BYTES:
        yield "shm", "error", f"{evidence}; NCCL needs {format_bytes(MIN_SHM_BYTES)} or more", fix
    elif shm["total"] <= MIN_SHM_BYTES:
        yield "shm", "warning", f"{evidence}, Docker's default; NCCL's segments are 9.6 MB a channel", fix


def _open_files(limits: Mapping[str, Any] | None) -> Iterator[Fault]:
    soft, hard = limits["nofile"] if limits else (None, None)
    if soft is not None and soft < MIN_OPEN_FILES:
        evidence = f"{soft} open files allowed (hard limit {'none' if hard is None else hard}), {MIN_OPEN_FILES} needed"
        yield "open-files", "error", evidence, "`ulimit -n 4096`, or raise nofile in /etc/security/limits.conf"


def built_ops(plan: Plan) -> set[str]:
    """DeepSpeed's C++ ops that are compiled at first use under this plan; the others run on torch's own kernels."""
    places = {plan.offload_optimizer, plan.offload_param}
    ops = {"cpu_adam"} if plan.offload_optimizer != "none" else set()
    return ops | ({"async_io", "pin_memory"} if "nvme" in places else set())


def _compilers(plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    tools, extensions = facts["tools"], facts["extensions"] or {}
    ops = built_ops(plan) - set(extensions.get("prebuilt", ()))
    if not ops or tools is None:
        return
    why = f"DeepSpeed compiles {', '.join(sorted(ops))} at first use"
    install = {
        "g++": "`apt-get install g++` or `yum install gcc-c++`",
        "ninja": "`pip install -r requirements.txt` brings it; .venv/bin must be on PATH",
        "nvcc": "install the CUDA toolkit of torch's CUDA version and set CUDA_HOME",
    }
    for name in ("g++", "ninja", "nvcc") if plan.device == "cuda" else ("g++", "ninja"):
        tool = tools[name]
        if tool is None:
            yield "compiler", "error", f"{why}; {name} was not found", install[name]
        elif name != "nvcc" and not tool["on_path"]:
            yield "compiler", "error", f"{why}; {name} is at {tool['path']}, which is not on PATH", install[name]
    if "async_io" in ops and facts["libaio"] is False:
        evidence = "offload to nvme needs libaio: a test program with libaio.h and -laio does not compile"
        yield "libaio", "error", evidence, "`apt-get install libaio-dev` or `yum install libaio-devel`"


def _locks(plan: Plan, extensions: Mapping[str, Any] | None) -> Iterator[Fault]:
    """A build killed midway leaves its lock, and every later build of that op waits for it without a word."""
    if not extensions or extensions["compilers"]:
        return
    for lock in extensions["locks"]:
        if lock["held"] or (extensions["network"] and lock["age_seconds"] < SHARED_LOCK_SECONDS):
            continue
        op = Path(lock["path"]).parent.name
        level: Level = "error" if op in built_ops(plan) else "warning"
        evidence = f"{lock['path']} is {lock['age_seconds']:,} s old, no process holds it and no compiler runs; "
        yield "build-lock", level, f"{evidence}a run that uses {op} waits for it forever", f"`rm {lock['path']}`"
