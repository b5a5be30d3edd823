"""Ask this host for its memory, counting the limits of the container around this process, and for its GPUs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def total_bytes() -> int:
    """Return the bytes of this host's RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes free for this process: MemAvailable, or what cgroup limits leave (page cache is free)."""
    rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    least = int(rows["MemAvailable"].split()[0]) * 1024
    own = proc / "self" / "cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, name = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if controllers and not old:
            continue
        root = cgroup / "memory" if old else cgroup
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
        here = root / name.lstrip("/")
        for directory in (here, *here.parents):
            if not directory.is_relative_to(root):
                break
            least = min(least, _bytes_left(directory, limit, used, least))
    return max(0, least)


def _bytes_left(directory: Path, limit: str, used: str, otherwise: int) -> int:
    """Return the bytes that a cgroup's limit leaves; `otherwise` where it has none."""
    try:
        most, now = (directory / limit).read_text().strip(), int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return otherwise
    if most == "max":
        return otherwise
    # In version 1 the use counts those below, and so must what of it is page cache.
    return int(most) - now + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def gpus(*keys: str) -> list[dict[str, str]]:
    """Return {key: value} of each GPU by nvidia-smi --query-gpu, in its order; empty where that fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]
