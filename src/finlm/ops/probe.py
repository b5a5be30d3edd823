"""One JSON document with the facts of this host: `python probe.py ...`, or `ssh host python3 - ... < probe.py`.

Python 3.8 syntax and the standard library only, so that a bare host can be asked; about 0.4 s, most of
it g++. Every section is gathered on its own: one that fails is null and explained under "errors".
Options, repeatable: --disk ROLE=PATH (the roles "run" and "nvme" have a meaning to doctor), --only SECTION.

Judges nothing: what is right or wrong depends on the plan and is decided in doctor.py. Changes nothing but a temporary
file for the libaio link test. GPUs are probe_gpu.py's, the network is probe_links.py's.
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
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence  # noqa: UP035 - Python 3.8

PACKAGES = (
    *("torch", "deepspeed", "transformers", "accelerate", "trl", "datasets", "sentencepiece", "numpy"),
    *("tokenizers", "protobuf", "pydantic", "ruamel.yaml", "ninja", "rich"),
)
COMPILERS = ("ninja", "cc1plus", "g++", "c++", "clang++", "nvcc", "cicc", "ptxas", "cudafe++", "ld", "collect2")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def main() -> None:
    """Print the document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk", action="append", default=[], metavar="ROLE=PATH")
    parser.add_argument("--only", action="append", default=[], metavar="SECTION")
    options = parser.parse_args()
    print(json.dumps(facts(dict(item.partition("=")[::2] for item in options.disk), options.only)))


def facts(disks: dict[str, str], only: Sequence[str] = ()) -> dict[str, Any]:
    """All sections, or only some. Never raises."""
    sections: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "resolves_to": resolves_to,
        "python": lambda: {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform,
        "cores": cores,
        "memory": memory,
        "disks": lambda: {role: disk(path) for role, path in disks.items()},
        "shm": lambda: space("/dev/shm"),
        "limits": limits,
        "tools": lambda: {name: tool(name) for name in ("g++", "ninja", "nvcc")},
        "libaio": libaio,
        "packages": packages,
        "extensions": extensions,
    }
    result: dict[str, Any] = {"probe": 1, "time": time.time()}
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
    """Exit code and output of a command, standard error included; 127 when there was no answer."""
    pipe, to_output = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, stdout=pipe, stderr=to_output, stdin=subprocess.DEVNULL, timeout=60)
        return done.returncode, done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)


def read(path: str | Path) -> str:
    """A small file's text; empty when unreadable."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def resolves_to() -> list[str]:
    """Addresses of this host's own name, as a rank on it would get them; empty when unknown."""
    with contextlib.suppress(OSError):
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(socket.gethostname(), None)})
    return []


def cores() -> dict[str, Any]:
    """Logical cores, those this process may use, and how many that is within the cgroup's quota."""
    quotas = []
    for directory in cgroups("cpu"):  # v2: "max 100000" or "200000 100000"; v1: two files, -1 for none
        v1 = f"{read(directory / 'cpu.cfs_quota_us')} {read(directory / 'cpu.cfs_period_us')}"
        match = re.match(r"(\d+) (\d+)", read(directory / "cpu.max") or v1)
        if match:
            quotas.append(int(match.group(1)) / int(match.group(2)))
    affinity = len(os.sched_getaffinity(0))
    return {"logical": os.cpu_count(), "affinity": affinity, "usable": min([affinity, *quotas])}


def cgroups(controller: str) -> Iterator[Path]:
    """This process's cgroup and its ancestors, in v2 and in v1's hierarchy of the controller."""
    for line in read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = Path("/sys/fs/cgroup", names)
        here = root / path.lstrip("/")
        yield from (directory for directory in (here, *here.parents) if root in (directory, *directory.parents))


def memory() -> dict[str, Any]:
    """Bytes of RAM: of the machine, and what is available within the cgroup's limit."""
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
    return {"total": total, "available": max(0, available), "cgroup_limit": limit}


def space(path: str | Path) -> dict[str, Any]:
    """Bytes of a file system."""
    usage = shutil.disk_usage(str(path))
    return {"total": usage.total, "free": usage.free}


def disk(path: str) -> dict[str, Any]:
    """Space where path is or would be created, whether it can be, and bytes of a run's checkpoints in it."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    kept = sum(file.stat().st_size for file in Path(path).glob("checkpoints/**/*"))
    facts = {"path": path, "is_directory": place.is_dir(), "writable": os.access(str(place), os.W_OK)}
    return {**facts, "checkpoint_bytes": kept, **space(place)}


def limits() -> dict[str, Any]:
    """Soft and hard resource limits; null = unlimited."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    found = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    return {name: [None if n == resource.RLIM_INFINITY else n for n in pair] for name, pair in found.items()}


def tool(name: str) -> dict[str, Any] | None:
    """A compiler's path and version, and whether it is on PATH or only beside this interpreter; null = none."""
    on_path, cuda = shutil.which(name), os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = on_path or shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{cuda}/bin")
    if path is None:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", run(path, "--version")[1])
    return {"path": path, "version": version.group() if version else None, "on_path": on_path is not None}


def libaio() -> bool | None:
    """Whether a program that uses libaio compiles and links, which is DeepSpeed's own test; null without g++."""
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "t.cpp")
        source.write_text("#include <libaio.h>\nint main() { return io_submit(0, 0, 0) != 0; }\n")
        flags = os.environ.get("CFLAGS", "").split() + os.environ.get("LDFLAGS", "").split()
        return run("g++", str(source), "-o", f"{source}.out", *flags, "-laio")[0] == 0


def packages() -> dict[str, str | None]:
    """Versions of what training needs and of every NCCL wheel; null = not installed."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        found.setdefault((distribution.metadata["Name"] or "").lower(), distribution.version)
    nccl = {name: version for name, version in found.items() if name.startswith("nvidia-nccl")}
    return {**{name: found.get(name) for name in PACKAGES}, **nccl}


def extensions() -> dict[str, Any]:
    """Locks of torch's C++ extension builds, and the compilers that run now.

    A build keeps its lock file open: `held` tells whether a process that we may look into does. `network` tells that
    other hosts may hold it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    paths = sorted({*Path(root).glob("*/lock"), *Path(root).glob("*/*/lock")})
    opened = set(open_files()) if paths else set()
    locks = []
    for path in paths:
        with contextlib.suppress(OSError):  # released meanwhile
            status = path.stat()
            held = (status.st_dev, status.st_ino) in opened
            locks.append({"path": str(path), "age_seconds": round(time.time() - status.st_mtime), "held": held})
    names = {int(comm.parent.name): read(comm) for comm in Path("/proc").glob("[0-9]*/comm")}
    compilers = [{"pid": pid, "name": name} for pid, name in names.items() if name in COMPILERS]
    mounts = [line.split()[1:3] for line in read("/proc/mounts").splitlines()]
    kinds = [(len(place), kind) for place, kind in mounts if f"{root}/".startswith(place.rstrip("/") + "/")]
    shared = bool(kinds) and max(kinds)[1] in NETWORK_FILESYSTEMS
    return {"network": shared, "locks": locks, "compilers": compilers, "prebuilt": prebuilt_ops()}


def prebuilt_ops() -> list[str]:
    """DeepSpeed's ops that were compiled when it was installed, so that no compiler is needed for them."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = read(str(metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")))
        return re.findall(r"'(\w+)': True", text)
    return []


def open_files() -> Iterator[tuple[int, int]]:
    """(device, inode) of every file that some process has open, as far as we may see."""
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - Path.glob raises when a process ends meanwhile
        with contextlib.suppress(OSError):
            status = Path(link).stat()
            yield status.st_dev, status.st_ino


if __name__ == "__main__":
    main()
