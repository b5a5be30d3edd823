"""One JSON document with what this host's GPUs, driver and torch say: `python probe_gpu.py [--torch]`.

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
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Print the document."""
    try:
        print(json.dumps(facts("--torch" in sys.argv)))
    except Exception as error:
        print(json.dumps({"gpu": None, "torch": None, "errors": {"gpu": f"{type(error).__name__}: {error}"}}))


def facts(with_torch: bool) -> dict[str, Any]:
    """Keys gpu, torch (null unless asked for) and errors."""
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(torch) if with_torch else None
        found, errors = gpu(), {}
        said = asked.result() if asked else None
    if said is not None and "failed" in said:
        errors["torch"], said = said["failed"], None
    return {"gpu": found, "torch": said, "errors": errors}


def run(*command: str, seconds: float = 30) -> tuple[int, str]:
    """Exit code and output of a command, standard error included; 127 when there was no answer."""
    pipe, to_output = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, stdout=pipe, stderr=to_output, stdin=subprocess.DEVNULL, timeout=seconds)
        return done.returncode, done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)


def read(path: Path) -> str:
    """A small file's text; empty when unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def gpu() -> dict[str, Any]:
    """What nvidia-smi says, or its error; what CUDA_VISIBLE_DEVICES says; NVIDIA GPUs on the PCI bus; recent Xids."""
    smi, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    buses = list(Path("/sys/bus/pci/devices").glob("*"))
    pci = sum(read(bus / "vendor") == "0x10de" and read(bus / "class").startswith("0x03") for bus in buses)
    result: dict[str, Any] = {"nvidia_smi": smi, "error": None, "devices": [], "visible": visible, "pci": pci}
    result["xids"] = xids() if smi or pci else None
    if smi is None:
        return result
    csv = "--format=csv,noheader,nounits"
    with ThreadPoolExecutor(4) as pool:
        # Older drivers refuse a whole query for one field they do not know.
        queries = {keys: pool.submit(run, smi, "--query-gpu=" + ",".join(keys), csv) for keys in (BASE, CAP, HEALTH)}
        apps = pool.submit(run, smi, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", csv)
    code, output = queries[BASE].result()
    if code != 0:
        result["error"] = output or f"nvidia-smi exited with code {code}"
        return result
    more: dict[str, dict[str, str]] = {}
    for keys in (CAP, HEALTH):
        for row in rows(keys, queries[keys].result()):
            more.setdefault(row["index"], {}).update(row)
    result["devices"] = [device({**more.get(row["index"], {}), **row}) for row in rows(BASE, (code, output))]
    for line in apps.result()[1].splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        for one in result["devices"]:
            if len(cells) == 4 and one["uuid"] == cells[0]:
                one["processes"].append({"pid": number(cells[1]), "bytes": number(cells[2], MIB), "name": cells[3]})
    return result


def rows(keys: tuple[str, ...], answer: tuple[int, str]) -> list[dict[str, str]]:
    """The rows of a query's answer by key; none when it failed."""
    cells = [[cell.strip() for cell in line.split(",")] for line in answer[1].splitlines()] if answer[0] == 0 else []
    return [dict(zip(keys, row)) for row in cells if len(row) == len(keys)]  # noqa: B905 - no `strict` in Python 3.8


def device(row: dict[str, str]) -> dict[str, Any]:
    """One GPU; null for what the driver does not tell."""
    capability = row.get("compute_cap", "") if re.match(r"\d+\.\d+$", row.get("compute_cap", "")) else None
    named = {"index": number(row["index"]), "name": row["name"], "uuid": row["uuid"], "driver": row["driver_version"]}
    bytes_of = {f"memory_{kind}": number(row[f"memory.{kind}"], MIB) for kind in ("total", "used", "free")}
    yes_no = {"yes": True, "no": False}
    health = {
        "ecc_errors": number(row.get(HEALTH[1], "")),
        "remap_pending": yes_no.get(row.get(HEALTH[2], "").lower()),
        "remap_failed": yes_no.get(row.get(HEALTH[3], "").lower()),
    }
    return {**named, "compute_capability": capability, **bytes_of, **health, "processes": []}


def number(text: str, unit: int = 1) -> int | None:
    """A whole number of units; null for nvidia-smi's [N/A] and its like."""
    return int(text) * unit if text.isdigit() else None


def xids() -> list[dict[str, Any]] | None:
    """The driver's error reports in the kernel's log; null where it may not be read."""
    code, output = run("dmesg")
    if code != 0:
        return None
    now, found = time.monotonic(), []
    for match in filter(None, map(XID.search, output.splitlines())):
        age, text = round(now - int(match.group(1))), match.group(4)[:120]
        found.append({"xid": int(match.group(3)), "pci": match.group(2), "age_seconds": age, "text": text})
    return found[-50:]


def torch() -> dict[str, Any]:
    """torch's own words; {"failed": why} when it cannot be imported."""
    code, output = run(sys.executable, "-c", TORCH)
    _, mark, answer = output.rpartition("finlm-torch:")
    if mark:
        said: dict[str, Any] = json.loads(answer.splitlines()[0])
        return said
    return {"failed": "\n".join(output.splitlines()[-3:]) or f"import torch ended with code {code}"}


if __name__ == "__main__":
    main()
