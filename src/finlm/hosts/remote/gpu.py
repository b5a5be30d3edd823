"""Print a JSON document with what this host's GPUs, driver and torch report: `python gpu.py [--torch]`.

Sent by doctor beside probe.py under the same rules: Python 3.8 syntax, standard library only, never raises. nvidia-smi
answers in 0.1 s where the driver stays loaded; --torch imports torch in a process of its own (1 to 3 s) and asks it
which GPUs it has kernels for and which NCCL it really loaded, since a wheel's metadata tells neither.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - Python 3.8

BASE = ("index", "name", "uuid", "memory.total", "memory.used", "memory.free", "driver_version")
CAP = ("index", "compute_cap")
HEALTH = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
MIB = 1024 * 1024
XID = re.compile(r"\[\s*(\d+)\.\d+\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), *(.*)")
TORCH = """
import json, re, torch
said = {"version": torch.__version__, "cuda": torch.version.cuda, "arch": [], "nccl": None, "error": None}
if torch.version.cuda:
    said["arch"] = (torch._C._cuda_getArchFlags() or "").split()
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
    except Exception as error:
        said["error"] = str(error).splitlines()[0]
with open("/proc/self/maps") as file:
    said["nccl_files"] = sorted(set(re.findall(r"(/\\S*libnccl\\.so\\S*)", file.read())))
print("finlm-torch:" + json.dumps(said))
"""


@dataclass
class Process:
    """A process that holds memory of a GPU."""

    pid: int | None
    bytes: int | None
    name: str


@dataclass
class Xid:
    """An error report of the NVIDIA driver: its number, the GPU's PCI address, its age in seconds and its text."""

    xid: int
    pci: str
    age_seconds: int
    text: str


@dataclass
class Device:
    """A GPU as nvidia-smi describes it. Memory is in bytes; a field is None where the driver does not tell."""

    index: int
    name: str
    uuid: str
    driver: str
    compute_capability: str | None
    memory_total: int | None
    memory_used: int | None
    memory_free: int | None
    ecc_errors: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    processes: list[Process]


@dataclass
class Gpu:
    """What nvidia-smi and the kernel report: nvidia-smi's path (None: not installed), its devices or its error.

    `visible` is CUDA_VISIBLE_DEVICES, `pci` the number of NVIDIA GPUs on the PCI bus, `xids` the recent errors of the
    driver.
    """

    nvidia_smi: str | None
    visible: str | None
    pci: int
    xids: list[Xid] | None  # null where the kernel's log may not be read
    error: str | None = None
    devices: list[Device] = field(default_factory=list)


@dataclass
class Torch:
    """What torch reports about itself: the GPUs it has kernels for, the NCCL it really loaded."""

    version: str
    cuda: str | None
    arch: list[str]
    nccl: str | None
    error: str | None
    nccl_files: list[str] = field(default_factory=list)


@dataclass
class Facts:
    """The document that is printed; `torch` is None unless asked for, `errors` says why a section is missing."""

    gpu: Gpu | None
    torch: Torch | None
    errors: dict[str, str]


def main() -> None:
    """Print gather_facts() as a JSON document; torch is asked too with --torch."""
    print(json.dumps(gather_facts("--torch" in sys.argv), default=vars))


def gather_facts(with_torch: bool) -> Facts:
    """Return the facts of the GPUs and, if `with_torch`, of torch, gathered at the same time.

    Never raises: an exception becomes a text in `errors`, and its section stays None.
    """
    result = Facts(None, None, {})
    sections: dict[str, Callable[[], Any]] = {"gpu": gather_gpu}
    with ThreadPoolExecutor(1) as pool:
        if with_torch:
            sections["torch"] = pool.submit(gather_torch).result  # imported while nvidia-smi answers
        for name, gather in sections.items():
            try:
                setattr(result, name, gather())
            except Exception as error:
                result.errors[name] = f"{type(error).__name__}: {error}"
    return result


def run(*command: str, seconds: float = 30) -> tuple[int, str]:
    """Return a command's exit code and stripped output; (127, reason) if it cannot start or takes over `seconds`."""
    pipe, to_output = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, stdout=pipe, stderr=to_output, stdin=subprocess.DEVNULL, timeout=seconds)
        return done.returncode, done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)


def read(path: Path) -> str:
    """Return a small file's text without surrounding blanks; "" when it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def gather_gpu() -> Gpu:
    """Return what nvidia-smi says of the GPUs and their processes, the GPUs on the PCI bus, and the driver's errors.

    Has no devices where nvidia-smi is not installed, or where it fails, which sets `error`.
    """
    smi = shutil.which("nvidia-smi")
    buses = list(Path("/sys/bus/pci/devices").glob("*"))
    pci = sum(read(bus / "vendor") == "0x10de" and read(bus / "class").startswith("0x03") for bus in buses)
    result = Gpu(smi, os.environ.get("CUDA_VISIBLE_DEVICES"), pci, read_xids() if smi or pci else None)
    if smi is None:
        return result
    csv = "--format=csv,noheader,nounits"
    with ThreadPoolExecutor(4) as pool:
        # Older drivers refuse a whole query for one field they do not know.
        queries = {keys: pool.submit(run, smi, "--query-gpu=" + ",".join(keys), csv) for keys in (BASE, CAP, HEALTH)}
        apps = pool.submit(run, smi, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", csv)
    code, output = queries[BASE].result()
    if code != 0:
        result.error = output or f"nvidia-smi exited with code {code}"
        return result
    more: dict[str, dict[str, str]] = {}
    for keys in (CAP, HEALTH):
        for row in parse_rows(keys, queries[keys].result()):
            more.setdefault(row["index"], {}).update(row)
    result.devices = [make_device({**more.get(row["index"], {}), **row}) for row in parse_rows(BASE, (code, output))]
    for line in apps.result()[1].splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        for gpu in result.devices:
            if len(cells) == 4 and gpu.uuid == cells[0]:
                gpu.processes.append(Process(parse_number(cells[1]), parse_number(cells[2], MIB), cells[3]))
    return result


def parse_rows(keys: tuple[str, ...], answer: tuple[int, str]) -> list[dict[str, str]]:
    """Return the rows of nvidia-smi's answer (exit code, output) as {key: value}, complete ones only."""
    cells = [[cell.strip() for cell in line.split(",")] for line in answer[1].splitlines()] if answer[0] == 0 else []
    return [dict(zip(keys, row)) for row in cells if len(row) == len(keys)]  # noqa: B905 - no `strict` in Python 3.8


def make_device(row: dict[str, str]) -> Device:
    """Return a Device, without processes, from a GPU's rows of all queries merged into {key: value}."""
    capability = row.get("compute_cap", "")
    total, used, free = (parse_number(row[f"memory.{kind}"], MIB) for kind in ("total", "used", "free"))
    pending, failed = ({"yes": True, "no": False}.get(row.get(key, "").lower()) for key in HEALTH[2:])
    return Device(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        driver=row["driver_version"],
        compute_capability=capability if re.match(r"\d+\.\d+$", capability) else None,
        memory_total=total,
        memory_used=used,
        memory_free=free,
        ecc_errors=parse_number(row.get(HEALTH[1], "")),
        remap_pending=pending,
        remap_failed=failed,
        processes=[],
    )


def parse_number(text: str, unit: int = 1) -> int | None:
    """Return the whole number in `text` times `unit`; None if it is not a number, such as nvidia-smi's [N/A]."""
    return int(text) * unit if text.isdigit() else None


def read_xids() -> list[Xid] | None:
    """Return the last 50 Xids, the driver's error reports, in the kernel's log; None when dmesg fails."""
    code, output = run("dmesg")
    if code != 0:
        return None
    now, matches = time.monotonic(), filter(None, map(XID.search, output.splitlines()))
    return [Xid(int(m.group(3)), m.group(2), round(now - int(m.group(1))), m.group(4)[:120]) for m in matches][-50:]


def gather_torch() -> Torch:
    """Import torch in another process (1 to 3 s) and return what it reports. Raises OSError when the import fails."""
    code, output = run(sys.executable, "-c", TORCH)
    _, mark, answer = output.rpartition("finlm-torch:")
    if not mark:
        raise OSError("\n".join(output.splitlines()[-3:]) or f"import torch ended with code {code}")
    return Torch(**json.loads(answer.splitlines()[0]))


if __name__ == "__main__":
    main()
