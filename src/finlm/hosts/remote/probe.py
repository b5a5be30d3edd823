"""Print a JSON document with the facts of this host: `python probe.py ...`, or `ssh host python3 - ... < probe.py`.

Python 3.8 syntax and the standard library only, so that a bare host can be asked; about 0.4 s, most of it g++. Every
section is gathered on its own: one that fails is null and explained under "errors". The dataclasses are what is sent,
and doctor reads its answer with them. Options, repeatable: --disk ROLE=PATH (the roles "run" and "nvme" have a meaning
to doctor), --only SECTION.

Judges nothing: what is right or wrong depends on the plan and is decided in doctor. Changes nothing but a temporary
file for the libaio link test. GPUs are gpu.py's, the network is links.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence  # noqa: UP035 - Python 3.8

PACKAGES = (
    *("torch", "deepspeed", "transformers", "accelerate", "trl", "datasets", "sentencepiece", "numpy"),
    *("tokenizers", "protobuf", "pydantic", "ruamel.yaml", "ninja", "rich", "peft", "torchao"),
)
COMPILERS = ("ninja", "cc1plus", "g++", "c++", "clang++", "nvcc", "cicc", "ptxas", "cudafe++", "ld", "collect2")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass
class Python:
    """The interpreter that answers; `wanted` is the path of the ranks' interpreter, which doctor fills in."""

    version: str
    executable: str
    wanted: str = ""


@dataclass
class Cores:
    """CPU cores: all logical cores, those this process may use, and how many that is within the cgroup's quota."""

    logical: int
    affinity: int
    usable: float


@dataclass
class Memory:
    """RAM in bytes: all of the machine, what is available within the cgroup's limit, and that limit (None: none)."""

    total: int
    available: int
    cgroup_limit: int | None = None


@dataclass
class Space:
    """The bytes of a file system, and how many more files it can hold; None where it does not count files."""

    total: int
    free: int
    files_free: int | None = None


@dataclass
class Disk:
    """The file system where `path` is or would be created, whether that is writable, and bytes of checkpoints below it.

    `is_directory` is False when the path is, or is below, a file.
    """

    path: str
    is_directory: bool
    writable: bool
    checkpoint_bytes: int
    total: int
    free: int
    files_free: int | None = None


@dataclass
class Tool:
    """A compiler: its path, its version (None: unknown), and whether it is on PATH."""

    path: str
    version: str | None
    on_path: bool


@dataclass
class Lock:
    """A C++ build's lock file; `held` says whether a process that this user may look into has it open."""

    path: str
    age_seconds: int
    held: bool


@dataclass
class Compiler:
    """A compiler process that runs now."""

    pid: int
    name: str


@dataclass
class Extensions:
    """Builds of torch's C++ extensions; on a `network` disk other hosts may hold their locks."""

    network: bool
    locks: list[Lock]
    compilers: list[Compiler]
    prebuilt: list[str]


def main() -> None:
    """Print gather_facts() of the sections asked for as a JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk", action="append", default=[], metavar="ROLE=PATH")
    parser.add_argument("--only", action="append", default=[], metavar="SECTION")
    options = parser.parse_args()
    print(json.dumps(gather_facts(dict(item.partition("=")[::2] for item in options.disk), options.only), default=vars))


def gather_facts(disks: dict[str, str], only: Sequence[str] = ()) -> dict[str, object]:
    """Return {section: facts} of all sections, or of those in `only`; `disks` maps roles to paths.

    A section that fails is None, and `errors`, one more key, has its reason by name. Raises KeyError for an unknown
    section.
    """
    sections: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "machine": machine_id,
        "python": lambda: Python(platform.python_version(), sys.executable),
        "platform": platform.platform,
        "cpu": cpu,
        "cores": cores,
        "memory": memory,
        "disks": lambda: {role: disk(path) for role, path in disks.items()},
        "shm": lambda: space("/dev/shm"),
        "limits": limits,
        "tools": lambda: {name: tool(name) for name in ("g++", "ninja", "nvcc")},
        "rsync": lambda: shutil.which("rsync"),
        "libaio": can_link_libaio,
        "packages": packages,
        "extensions": extensions,
    }
    result: dict[str, object] = {}
    errors = {}
    for name in only or sections:
        gather = sections[name]
        try:
            result[name] = gather()
        except Exception as error:
            result[name] = None
            errors[name] = f"{type(error).__name__}: {error}"
    result["errors"] = errors
    return result


def run(*command: str) -> tuple[int, str]:
    """Return the exit code and stripped output of a command; (127, reason) if it cannot start or takes over 60 s."""
    pipe, to_output = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, stdout=pipe, stderr=to_output, stdin=subprocess.DEVNULL, timeout=60)
        return done.returncode, done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)


def read(path: str | Path) -> str:
    """Return a small file's text without surrounding blanks; "" when it is unreadable."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def machine_id() -> str:
    """Return a text that is equal for two names of one machine: its boot id and its network namespace.

    Containers of one machine share the boot id and differ in the namespace.
    """
    return f"{read('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - Python 3.8


def cpu() -> str:
    """Return the CPU's name, family and model, and those of its instruction sets by which torch chooses its kernels."""
    rows = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", read("/proc/cpuinfo"), re.M))
    name = rows.get("model name", platform.processor() or platform.machine())
    has = (rows.get("flags") or rows.get("Features") or "").split()
    kinds = [kind for kind in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "sve") if kind in has]
    numbers = [f"{key} {rows[row]}" for key, row in (("family", "cpu family"), ("model", "model")) if row in rows]
    return ", ".join([name, *numbers, *kinds])


def cores() -> Cores:
    """Return this host's CPU cores; within a cgroup's quota, `usable` may be a fraction."""
    quotas = []
    for directory in cgroups("cpu"):  # v2: "max 100000" or "200000 100000"; v1: two files, -1 for none
        v1 = f"{read(directory / 'cpu.cfs_quota_us')} {read(directory / 'cpu.cfs_period_us')}"
        match = re.match(r"(\d+) (\d+)", read(directory / "cpu.max") or v1)
        if match:
            quotas.append(int(match.group(1)) / int(match.group(2)))
    affinity = len(os.sched_getaffinity(0))
    return Cores(os.cpu_count() or affinity, affinity, min([affinity, *quotas]))


def cgroups(controller: str) -> Iterator[Path]:
    """Yield this process's cgroup directory and its ancestors, in v2 and in v1's hierarchy of `controller`."""
    for line in read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = Path("/sys/fs/cgroup", names)
        here = root / path.lstrip("/")
        yield from (directory for directory in (here, *here.parents) if root in (directory, *directory.parents))


def memory() -> Memory:
    """Return the machine's RAM, what is available of it, and the cgroup's limit (None without), in bytes."""
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M))
    total, available, limit = int(rows["MemTotal"]) * 1024, int(rows["MemAvailable"]) * 1024, None
    for directory in cgroups("memory"):
        most = read(directory / "memory.max") or read(directory / "memory.limit_in_bytes")
        used = read(directory / "memory.current") or read(directory / "memory.usage_in_bytes")
        if most.isdigit() and used.isdigit() and int(most) < UNLIMITED:
            # The page cache counts as used but is given back before anything is killed.
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", read(directory / "memory.stat"), re.M)
            limit = min(limit or int(most), int(most))
            available = min(available, int(most) - int(used) + (int(cache.group(1)) if cache else 0))
    return Memory(total, max(0, available), limit)


def space(path: str | Path) -> Space:
    """Return the size and free space of the file system that holds path. Raises OSError if there is no such path."""
    usage, status = shutil.disk_usage(str(path)), os.statvfs(str(path))
    return Space(usage.total, usage.free, status.f_favail if status.f_files else None)


def disk(path: str) -> Disk:
    """Return the space for `path`, which need not exist yet, and the bytes of checkpoints below it, in memory too."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    patterns = "checkpoints/**/*", f"finlm-{os.getuid()}/*/step-*/*"  # a run's; a user's in memory
    kept = sum(file.stat().st_size for pattern in patterns for file in Path(path).glob(pattern))
    return Disk(path, place.is_dir(), os.access(str(place), os.W_OK), kept, **vars(space(place)))


def limits() -> dict[str, list[int | None]]:
    """Return {name: [soft, hard]} of the limits of open files and of locked memory (bytes); None = unlimited."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    pairs = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    return {name: [None if n == resource.RLIM_INFINITY else n for n in pair] for name, pair in pairs.items()}


def tool(name: str) -> Tool | None:
    """Return a compiler's path and version, from PATH, beside this interpreter or CUDA_HOME/bin; None if not there."""
    on_path, cuda = shutil.which(name), os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = on_path or shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{cuda}/bin")
    if path is None:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", run(path, "--version")[1])
    return Tool(path, version.group() if version else None, on_path is not None)


def can_link_libaio() -> bool | None:
    """Return whether g++ compiles and links a program that uses libaio, as DeepSpeed tests it; None without g++."""
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "t.cpp")
        source.write_text("#include <libaio.h>\nint main() { return io_submit(0, 0, 0) != 0; }\n")
        flags = os.environ.get("CFLAGS", "").split() + os.environ.get("LDFLAGS", "").split()
        return run("g++", str(source), "-o", f"{source}.out", *flags, "-laio")[0] == 0


def packages() -> dict[str, str | None]:
    """Return {package: version} of what training needs and of every NCCL wheel; None = not installed."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        versions.setdefault((distribution.metadata["Name"] or "").lower(), distribution.version)
    nccl = {name: version for name, version in versions.items() if name.startswith("nvidia-nccl")}
    return {**{name: versions.get(name) for name in PACKAGES}, **nccl}


def extensions() -> Extensions:
    """Return the lock files of builds of C++ extensions, the compilers that run now, and the ops built already."""
    cache = os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    paths = sorted({*Path(root).glob("*/lock"), *Path(root).glob("*/*/lock")})
    opened = set(open_files()) if paths else set()
    locks = []
    for path in paths:
        with contextlib.suppress(OSError):  # released meanwhile
            status = path.stat()
            held = (status.st_dev, status.st_ino) in opened
            locks.append(Lock(str(path), round(time.time() - status.st_mtime), held))
    names = {int(comm.parent.name): read(comm) for comm in Path("/proc").glob("[0-9]*/comm")}
    compilers = [Compiler(pid, name) for pid, name in names.items() if name in COMPILERS]
    mounts = [line.split()[1:3] for line in read("/proc/mounts").splitlines()]
    kinds = [(len(place), kind) for place, kind in mounts if f"{root}/".startswith(place.rstrip("/") + "/")]
    shared = bool(kinds) and max(kinds)[1] in NETWORK_FILESYSTEMS
    return Extensions(shared, locks, compilers, prebuilt_ops())


def prebuilt_ops() -> list[str]:
    """Return the DeepSpeed ops that were compiled when it was installed, so that no compiler is needed for them."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = read(str(metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")))
        return re.findall(r"'(\w+)': True", text)
    return []


def open_files() -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of every file that some process has open, as far as this user may see."""
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - Path.glob raises when a process ends meanwhile
        with contextlib.suppress(OSError):
            status = Path(link).stat()
            yield status.st_dev, status.st_ino


if __name__ == "__main__":
    main()
