"""Checks of one host's software, memory, disks and limits: pure functions from plan and facts to faults, one a cause.

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
from finlm.plan.advice import checkpoint_bytes
from finlm.plan.buckets import ON_HOST
from finlm.plan.memory import ELEMENT_BYTES
from finlm.plan.plan import Plan
from finlm.recipe import shape
from finlm.recipe.cluster import Host
from finlm.recipe.schema import Recipe

MIN_PYTHON = (3, 11)
TORCH_VERSIONS = ("2.11", "2.12", "2.13")  # the range the trainer was run with
MIN_SHM_BYTES = 64 * 2**20  # Docker's default, which NCCL's segments (9.6 MB a channel) of a few GPUs fill
MIN_OPEN_FILES = 1024
MIN_LOCKED_BYTES = 64 * 2**20  # NCCL registers some 10 MB a channel; systemd's default of 8 MiB fails at the first
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
    yield from _memory(plan, facts)
    cores = facts["cores"]
    if plan.device == "cpu" and cores and not alone and host.slots > cores["affinity"]:
        evidence = f"{host.slots} CPU ranks on {cores['affinity']} core(s)"
        yield "cores", "error", evidence, f"slots={cores['affinity']} or fewer for {host.name} in the hostfile"
    yield from _disks(recipe, plan, host, facts, alone)
    yield from _shm(plan, host, facts["shm"])
    yield from _limits(plan, facts)
    yield from _compilers(plan, facts)
    yield from _locks(plan, facts["extensions"])


def _python(facts: Mapping[str, Any]) -> Iterator[Fault]:
    python = facts["python"]
    if python and python["executable"] != python.get("wanted", python["executable"]):
        evidence = f"{python['wanted']} is not there; its python3 is {python['version']} ({python['executable']})"
        fix = "`bash scripts/setup.sh` there makes .venv; an interpreter elsewhere is named by hosts.<name>.python"
        yield "python", "error", evidence, fix
    elif python and tuple(map(int, re.findall(r"\d+", python["version"])[:2])) < MIN_PYTHON:
        evidence = f"{python['executable']} is Python {python['version']}; 3.11 or newer is needed"
        yield "python", "error", evidence, "`bash scripts/setup.sh` makes .venv with a newer Python"


def is_ranks_own(facts: Mapping[str, Any]) -> bool:
    """Whether the facts come from the interpreter that the ranks use, so that its packages mean something."""
    python = facts.get("python")
    return not python or python["executable"] == python.get("wanted", python["executable"])


def _packages(recipe: Recipe, plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    installed, wanted = facts["packages"], pins()
    if installed is None or not is_ranks_own(facts):
        return
    install = "`pip install -r requirements.txt` with the interpreter of .venv"
    needed = [name for name in NEEDED.get(recipe.stage, ALL_STAGES) if name in wanted]
    needed += ["torchao"] if plan.precision == "fp8" else []
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


def _differs(name: str, installed: Mapping[str, str | None], wanted: Mapping[str, str]) -> bool:
    version = (installed.get(name) or "").partition("+")[0]
    if not version:
        return False
    return ".".join(version.split(".")[:2]) not in TORCH_VERSIONS if name == "torch" else version != wanted[name]


def _memory(plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    memory = facts["memory"]
    if memory and memory["available"] < plan.host_bytes:
        limit = f", cgroup limit {format_bytes(memory['cgroup_limit'])}" if memory["cgroup_limit"] else ""
        total = format_bytes(memory["total"])
        evidence = f"{format_bytes(memory['available'])} RAM available of {total}{limit}, the plan needs "
        evidence += format_bytes(plan.host_bytes)
        yield "memory", "error", evidence, "end other processes, raise the container's limit, or use fewer ranks a host"


def _disks(recipe: Recipe, plan: Plan, host: Host, facts: Mapping[str, Any], alone: bool) -> Iterator[Fault]:
    disks, share = facts["disks"] or {}, host.slots / plan.world_size
    element = ELEMENT_BYTES[plan.precision]
    if "run" in disks:
        whole, kept = checkpoint_bytes(recipe, shape.of(recipe, plan.vocab_size), plan)[0], recipe.checkpoint.keep_last
        one = whole * (1.0 if alone else share)  # each host writes its own shards
        need = one * (kept + 1)  # the new one is whole before the oldest goes
        what = f"{kept + 1} checkpoints of {format_bytes(one)}"
        end = one * kept + (whole - one) + element * plan.parameters
        if facts.get("is_here") and end > need:
            need = end
            what = f"{kept} checkpoints of {format_bytes(one)}, the other hosts' parts of the last and the export"
        fix = "free space, give --runs on a larger disk, or lower checkpoint.keep_last"
        yield from _space("disk", disks["run"], need - disks["run"]["checkpoint_bytes"], what, fix)
    if "nvme" in disks:
        optimizer = 12 * plan.parameters if plan.offload_optimizer == "nvme" else 0
        weights = element * plan.parameters if plan.offload_param == "nvme" else 0
        fix = "give zero.nvme_path on a larger disk or offload to cpu"
        yield from _space("nvme", disks["nvme"], (optimizer + weights) * share, "offloaded states", fix)


def _space(name: str, disk: Mapping[str, Any], need: float, what: str, fix: str) -> Iterator[Fault]:
    if disk["free"] < need:
        evidence = f"{format_bytes(disk['free'])} free at {disk['path']}, {format_bytes(need)} needed for {what}"
        yield name, "error", evidence, fix
    if not disk["is_directory"]:
        yield name, "error", f"{disk['path']} is a file, or below one", f"give a directory ({what} go there)"
    elif not disk["writable"]:
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


def _limits(plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    limits = facts["limits"] or {}
    soft, hard = limits.get("nofile", (None, None))
    if soft is not None and soft < MIN_OPEN_FILES:
        evidence = f"{soft} open files allowed (hard limit {'none' if hard is None else hard}), {MIN_OPEN_FILES} needed"
        yield "open-files", "error", evidence, "`ulimit -n 4096`, or raise nofile in /etc/security/limits.conf"
    soft, hard = limits.get("memlock", (None, None))
    ports = (facts.get("links") or {}).get("infiniband") or []
    if plan.device == "cuda" and soft is not None and soft < MIN_LOCKED_BYTES and any(one["active"] for one in ports):
        evidence = f"{format_bytes(soft)} of memory may be locked; InfiniBand locks every buffer it sends from"
        yield "memlock", "error", evidence, "memlock unlimited in /etc/security/limits.conf, then log in anew"


def built_ops(plan: Plan) -> set[str]:
    """DeepSpeed's C++ ops that are compiled at first use under this plan; the others run on torch's own kernels."""
    places = {plan.offload_optimizer, plan.offload_param}
    ops = {"cpu_adam"} if plan.offload_optimizer in ON_HOST else set()
    return ops | ({"async_io", "pin_memory"} if "nvme" in places else set())


def _compilers(plan: Plan, facts: Mapping[str, Any]) -> Iterator[Fault]:
    tools, extensions = facts["tools"], facts["extensions"] or {}
    ops = built_ops(plan) - set(extensions.get("prebuilt", ()))
    if tools is None or not is_ranks_own(facts):
        return
    if not ops and plan.compiled and plan.device == "cuda" and tools["g++"] is None:
        evidence = "torch.compile builds its kernels' launchers with a C compiler; g++ was not found"
        fix = "`apt-get install g++` or `yum install gcc-c++`; train.compile: false does without, a fifth slower"
        yield "compiler", "error", evidence, fix
    if not ops:
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
