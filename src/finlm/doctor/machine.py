"""Check hosts' software, memory, disks and limits: pure functions from plan and facts to faults, one per cause.

Each threshold has a comment on where it comes from. A fact that is None is unknown and gives no fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from finlm.base.units import format_bytes
from finlm.doctor.gather import AllFacts, HostFacts
from finlm.hosts.remote import probe
from finlm.plan.advice import checkpoint_bytes, copies_kept, copy_bytes
from finlm.plan.host_memory import IN_MEMORY
from finlm.plan.memory import ELEMENT_BYTES
from finlm.plan.plan import ON_HOST, Plan
from finlm.recipe import parents, shape
from finlm.recipe.cluster import Host
from finlm.recipe.schema import Recipe

MIN_PYTHON = (3, 11)
TORCH_VERSIONS = ("2.11", "2.12", "2.13")  # the range the trainer was run with
MIN_SHM_BYTES = 64 * 2**20  # Docker's default, which NCCL's segments (9.6 MB a channel) of a few GPUs fill
MIN_OPEN_FILES = 1024
FEWEST_FILES = 2000  # a run's code, logs, and a few checkpoints of some dozen files
MIN_LOCKED_BYTES = 64 * 2**20  # NCCL registers some 10 MB a channel; systemd's default of 8 MiB fails at the first
SHARED_LOCK_SECONDS = 600  # on a network disk another host may be building: the slowest op took 165 s
_PRETRAIN = ("torch", "deepspeed", "transformers", "sentencepiece", "tokenizers", "protobuf", "numpy", "pydantic")
NEEDED = {"pretrain": (*_PRETRAIN, "ruamel.yaml")}
ALL_STAGES = (*NEEDED["pretrain"], "accelerate", "trl", "datasets")

Level = Literal["error", "warning"]
Fault = tuple[str, Level, str, str]
"""Check, level, evidence and fix."""
HostFault = tuple[str, Fault]


def pins() -> dict[str, str]:
    """Return {package: exact version} of the requirements.txt that came with finlm; {} when it is not there."""
    file = parents.shipped_file(Path("requirements.txt"))
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    matches = (re.match(r"([A-Za-z0-9._-]+)\s*==\s*([^\s;#]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in matches if match}


def check_host(recipe: Recipe, plan: Plan, host: Host, facts: HostFacts, alone: bool) -> Iterator[Fault]:
    """Yield the faults of a host by itself; `alone` says that the run has no other host.

    Raises UserError for an unknown model type.
    """
    yield from _check_python(facts)
    yield from _check_packages(recipe, plan, facts)
    yield from _check_memory(plan, host, facts)
    cores = facts.cores
    if plan.device == "cpu" and cores and not alone and host.slots > cores.affinity:
        evidence = f"{host.slots} CPU ranks on {cores.affinity} core(s)"
        yield "cores", "error", evidence, f"slots={cores.affinity} or fewer for {host.name} in the hostfile"
    if not alone and not facts.is_here:
        yield from _check_sync(host, facts)
    yield from _check_disks(recipe, plan, host, facts, alone)
    yield from _check_shm(plan, host, facts.shm)
    yield from _check_limits(plan, facts)
    yield from _check_compilers(plan, facts)
    yield from _check_locks(plan, facts.extensions)


def _check_python(facts: HostFacts) -> Iterator[Fault]:
    """Yield an error when the ranks' interpreter is missing or older than Python 3.11; nothing when it is unknown."""
    python = facts.python
    if python and not facts.has_python_of_ranks:
        evidence = f"{python.wanted} is not there; its python3 is {python.version} ({python.executable})"
        fix = "`bash scripts/setup.sh` there makes .venv; an interpreter elsewhere is named by hosts.<name>.python"
        yield "python", "error", evidence, fix
    elif python and tuple(map(int, re.findall(r"\d+", python.version)[:2])) < MIN_PYTHON:
        evidence = f"{python.executable} is Python {python.version}; 3.11 or newer is needed"
        yield "python", "error", evidence, "`bash scripts/setup.sh` makes .venv with a newer Python"


def _check_sync(host: Host, facts: HostFacts) -> Iterator[Fault]:
    """Yield an error when rsync is missing on a host, and when a login prints text where rsync expects none."""
    if facts.rsync is None:
        fix = f"`apt-get install rsync` or `yum install rsync` on {host.name}"
        yield "sync", "error", "rsync is not installed; code and data are copied with it", fix
    if noise := facts.printed:
        evidence = f"a login without a terminal prints {noise!r} before the command's own output"
        fix = f"~/.bashrc of {host.name}: print only when it is interactive ([[ $- == *i* ]])"
        yield "sync", "error", evidence, fix


def _check_packages(recipe: Recipe, plan: Plan, facts: HostFacts) -> Iterator[Fault]:
    """Yield faults of missing packages (error), other versions than pinned (warning) and a torch without CUDA (error).

    Yields nothing when the packages of the ranks' interpreter are unknown.
    """
    installed, wanted = facts.packages, pins()
    if installed is None or not facts.has_python_of_ranks:
        return
    install = "`pip install -r requirements.txt` with the interpreter of .venv"
    needed = [name for name in NEEDED.get(recipe.stage, ALL_STAGES) if name in wanted]
    needed += ["peft"] if recipe.lora else []
    needed += ["torchao"] if plan.precision == "fp8" or (recipe.lora and recipe.lora.quantize == "nf4") else []
    missing = [f"{name}=={wanted[name]}" for name in needed if not installed.get(name)]
    if missing:
        yield "packages", "error", f"not installed: {', '.join(missing)}", install
    other = [
        f"{name} {installed[name]} (pinned: {wanted[name]})" for name in needed if _is_untested(name, installed, wanted)
    ]
    if other:
        yield "packages", "warning", f"other versions than tested: {', '.join(other)}", install
    if plan.device == "cuda" and (installed.get("torch") or "").endswith("+cpu"):
        evidence = f"torch {installed['torch']} has no CUDA, the plan is for GPUs"
        yield "torch", "error", evidence, "`pip install --force-reinstall torch` from the CUDA index"


def _is_untested(name: str, installed: Mapping[str, str | None], wanted: Mapping[str, str]) -> bool:
    """Return whether an installed version is not the pinned one, of torch not a tested one; False if not installed."""
    version = (installed.get(name) or "").partition("+")[0]
    if not version:
        return False
    return ".".join(version.split(".")[:2]) not in TORCH_VERSIONS if name == "torch" else version != wanted[name]


def _check_memory(plan: Plan, host: Host, facts: HostFacts) -> Iterator[Fault]:
    """Yield an error when less RAM is available than the plan needs; a warning if the recipe states more RAM for it."""
    memory = facts.memory
    if memory and memory.available + _reused_bytes(plan, facts) < plan.host_bytes:
        limit = f", cgroup limit {format_bytes(memory.cgroup_limit)}" if memory.cgroup_limit else ""
        total = format_bytes(memory.total)
        evidence = f"{format_bytes(memory.available)} RAM available of {total}{limit}, the plan needs "
        evidence += format_bytes(plan.host_bytes)
        fix = "end other processes, raise the container's limit, or use fewer ranks a host"
        if plan.device == "cpu":
            yield "memory", "error", evidence, fix
        elif host.memory_bytes and host.memory_bytes > memory.total:
            evidence += f"; planned for {format_bytes(host.memory_bytes)}, as hardware.hosts[].memory says"
            yield "memory", "warning", evidence, f"unless this machine's memory grows when it is used: {fix}"
        else:
            fix += "; if this machine's memory grows when it is used, say what it has: hardware.hosts[].memory"
            yield "memory", "error", evidence, fix


def _reused_bytes(plan: Plan, facts: HostFacts) -> int:
    """Return the bytes that an earlier launch's checkpoints take in memory, which this launch reuses.

    At most half of what the plan needs for such checkpoints.
    """
    disks = facts.disks or {}
    kept = disks["memory"].checkpoint_bytes if "memory" in disks else 0
    return min(kept, plan.host_bytes_items.get(IN_MEMORY, 0) // 2)


def _check_disks(recipe: Recipe, plan: Plan, host: Host, facts: HostFacts, alone: bool) -> Iterator[Fault]:
    """Yield an error for each disk that lacks space: of the runs, of checkpoints in memory, and NVMe of offloading.

    `alone` says that the run has no other host. Raises UserError for an unknown model type.
    """
    disks, share = facts.disks or {}, host.slots / plan.world_size
    element = ELEMENT_BYTES[plan.precision]
    if "run" in disks:
        whole, kept = checkpoint_bytes(recipe, shape.of(recipe, plan.vocab_size), plan)[0], recipe.checkpoint.keep_last
        size = whole * (1.0 if alone else share)  # each host writes its own shards
        need = size * (kept + 1)  # the new one is whole before the oldest goes
        purpose = f"{kept + 1} checkpoints of {format_bytes(size)}"
        if facts.is_here and recipe.checkpoint.copies and not alone:
            copied = copy_bytes(recipe, shape.of(recipe, plan.vocab_size), plan) * copies_kept(recipe, plan)
            need, purpose = need + copied, f"{purpose}, {format_bytes(copied)} of copies of the other hosts' parts"
        end = size * kept + (whole - size) + element * plan.parameters
        if facts.is_here and end > need:
            need = end
            purpose = f"{kept} checkpoints of {format_bytes(size)}, the other hosts' parts of the last and the export"
        fix = "free space, give --runs on a larger disk, or lower checkpoint.keep_last"
        yield from _check_space("disk", disks["run"], need - disks["run"].checkpoint_bytes, purpose, fix)
    if "memory" in disks:
        need = plan.host_bytes_items.get(IN_MEMORY, 0) - _reused_bytes(plan, facts)
        fix = "a larger tmpfs (`mount -o remount,size=...`, a container's --shm-size), one elsewhere "
        fix += "(checkpoint.memory_directory), or no checkpoint.memory_minutes"
        yield from _check_space("memory", disks["memory"], need, "checkpoints in memory", fix)
    if "nvme" in disks:
        optimizer = 12 * plan.parameters if plan.offload_optimizer == "nvme" else 0
        weights = element * plan.parameters if plan.offload_param == "nvme" else 0
        fix = "give zero.nvme_path on a larger disk or offload to cpu"
        yield from _check_space("nvme", disks["nvme"], (optimizer + weights) * share, "offloaded states", fix)


def _check_space(name: str, disk: probe.Disk, need: float, purpose: str, fix: str) -> Iterator[Fault]:
    """Yield an error when a disk has fewer than `need` bytes or too few inodes, or its directory is not writable.

    `name` is the check's name, `purpose` says what the space is for.
    """
    if disk.free < need:
        evidence = f"{format_bytes(disk.free)} free at {disk.path}, {format_bytes(need)} needed for {purpose}"
        yield name, "error", evidence, fix
    elif disk.files_free is not None and disk.files_free < FEWEST_FILES:
        evidence = f"the file system of {disk.path} holds {disk.files_free:,} more files (inodes)"
        yield name, "error", evidence, f"remove small files there (`df -i`); a run writes up to {FEWEST_FILES:,}"
    if not disk.is_directory:
        yield name, "error", f"{disk.path} is a file, or below one", f"give a directory ({purpose} go there)"
    elif not disk.writable:
        yield name, "error", f"{disk.path} cannot be written", f"change its owner or permissions ({purpose} go there)"


def _check_shm(plan: Plan, host: Host, shm: probe.Space | None) -> Iterator[Fault]:
    """Yield a fault when /dev/shm is too small for NCCL between GPUs of a host: an error with less than 64 MiB free."""
    if plan.device == "cpu" or host.slots == 1 or shm is None:
        return
    fix = "start the container with --shm-size=8g (or --ipc=host); files left in /dev/shm by dead runs may be removed"
    evidence = f"/dev/shm has {format_bytes(shm.free)} free of {format_bytes(shm.total)} for {host.slots} ranks"
    if shm.free < MIN_SHM_BYTES:
        yield "shm", "error", f"{evidence}; NCCL needs {format_bytes(MIN_SHM_BYTES)} or more", fix
    elif shm.total <= MIN_SHM_BYTES:
        yield "shm", "warning", f"{evidence}, Docker's default; NCCL's segments are 9.6 MB a channel", fix


def _check_limits(plan: Plan, facts: HostFacts) -> Iterator[Fault]:
    """Yield an error when the limit of open files, or of locked memory for GPU ranks with InfiniBand, is too low."""
    limits = facts.limits or {}
    soft, hard = limits.get("nofile", (None, None))
    if soft is not None and soft < MIN_OPEN_FILES:
        evidence = f"{soft} open files allowed (hard limit {'none' if hard is None else hard}), {MIN_OPEN_FILES} needed"
        yield "open-files", "error", evidence, "`ulimit -n 4096`, or raise nofile in /etc/security/limits.conf"
    soft, hard = limits.get("memlock", (None, None))
    uses_infiniband = plan.device == "cuda" and any(port.active for port in facts.infiniband)
    if uses_infiniband and soft is not None and soft < MIN_LOCKED_BYTES:
        evidence = f"{format_bytes(soft)} of memory may be locked; InfiniBand locks every buffer it sends from"
        yield "memlock", "error", evidence, "memlock unlimited in /etc/security/limits.conf, then log in anew"


def ops_to_build(plan: Plan) -> set[str]:
    """Return the DeepSpeed C++ ops that offloading compiles at first use.

    cpu_adam for an optimizer in host memory or on NVMe; async_io and pin_memory for anything on NVMe.
    """
    places = {plan.offload_optimizer, plan.offload_param}
    ops = {"cpu_adam"} if plan.offload_optimizer in ON_HOST else set()
    return ops | ({"async_io", "pin_memory"} if "nvme" in places else set())


def _check_compilers(plan: Plan, facts: HostFacts) -> Iterator[Fault]:
    """Yield an error for each compiler or library missing for torch.compile or for DeepSpeed's C++ ops.

    Yields nothing when the tools are unknown or another interpreter than the ranks' answered.
    """
    tools, extensions = facts.tools, facts.extensions
    ops = ops_to_build(plan) - set(extensions.prebuilt if extensions else ())
    if tools is None or not facts.has_python_of_ranks:
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
        elif name != "nvcc" and not tool.on_path:
            yield "compiler", "error", f"{why}; {name} is at {tool.path}, which is not on PATH", install[name]
    if "async_io" in ops and facts.libaio is False:
        evidence = "offload to nvme needs libaio: a test program with libaio.h and -laio does not compile"
        yield "libaio", "error", evidence, "`apt-get install libaio-dev` or `yum install libaio-devel`"


def _check_locks(plan: Plan, extensions: probe.Extensions | None) -> Iterator[Fault]:
    """Yield a fault for a killed build's lock file, for which builds wait: an error if the plan builds that op.

    Yields nothing while a compiler runs; skips locks that a process holds, or young ones on a network disk.
    """
    if not extensions or extensions.compilers:
        return
    for lock in extensions.locks:
        if lock.held or (extensions.network and lock.age_seconds < SHARED_LOCK_SECONDS):
            continue
        op = Path(lock.path).parent.name
        level: Level = "error" if op in ops_to_build(plan) else "warning"
        evidence = f"{lock.path} is {lock.age_seconds:,} s old, no process holds it and no compiler runs; "
        yield "build-lock", level, f"{evidence}a run that uses {op} waits for it forever", f"`rm {lock.path}`"


def check_versions(recipe: Recipe, plan: Plan, facts: AllFacts) -> Iterator[HostFault]:
    """Yield an error for each host whose Python, packages, CUDA or NCCL differ from what most hosts have.

    Hosts where another interpreter than the ranks' answered are left out.
    """
    # Ranks exchange pickles and collectives, which must mean the same on all hosts.
    rows: dict[str, Callable[[HostFacts], str | None]] = {
        "Python": lambda host: ".".join(host.python.version.split(".")[:2]) if host.python else None,
        **{name: partial(_find_version, name) for name in NEEDED.get(recipe.stage, ALL_STAGES)},
    }
    if plan.device == "cuda":
        rows |= {
            "CUDA of torch": lambda host: host.torch.cuda if host.torch else None,
            "NCCL": lambda host: (host.torch.nccl if host.torch else None) or _nccl_wheel(host),
        }
    comparable = {name: host for name, host in facts.items() if host.has_python_of_ranks}
    different: dict[str, list[str]] = {}
    for row, read in rows.items():
        versions = {name: read(host) for name, host in comparable.items()}
        known = {name: version for name, version in versions.items() if version is not None}
        if not known:
            continue
        usual = Counter(known.values()).most_common(1)[0][0]
        like = next(name for name, version in known.items() if version == usual)
        for name, version in known.items():
            if version != usual:
                different.setdefault(name, []).append(f"{row} {version}, {like} has {usual}")
    for name, lines in different.items():
        fix = f"the same requirements.txt on every host: `bash scripts/setup.sh` on {name}"
        yield name, ("versions", "error", "\n".join(lines), fix)


def _find_version(name: str, host: HostFacts) -> str | None:
    """Return a package's version on a host, without a suffix such as +cu130; None if unknown."""
    return ((host.packages or {}).get(name) or "").partition("+")[0] or None


def _nccl_wheel(host: HostFacts) -> str | None:
    """Return the NCCL wheels with their versions, for hosts where torch was not asked; None if there are none."""
    installed = host.packages or {}
    wheels = sorted(f"{name} {installed[name]}" for name in installed if name.startswith("nvidia-nccl"))
    return ", ".join(wheels) or None
