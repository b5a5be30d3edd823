"""Checks of one host's GPUs: driver, number, memory, health, and whether the installed torch has kernels for them.

Pure functions from plan and facts of probe_gpu.py to faults. What nvidia-smi or torch did not tell gives no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finlm.base.units import format_bytes, format_duration
from finlm.ops.doctor_checks import Fault, Level, is_ranks_own
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Host

# Xid: the driver's error number. These are the hardware's or the driver's fault and not the program's: 48, 63, 64, 94
# and 95 memory (ECC, row remapping), 74 NVLink, 79 fallen off the bus, 119 and 120 GSP firmware (NVIDIA, "Xid Errors").
HARDWARE_XIDS = {48, 63, 64, 74, 79, 94, 95, 119, 120}
XID_SECONDS = 24 * 3600  # older ones were seen to and would be told until the next reboot
CAPABILITY = {"bf16": 8.0, "fp8": 8.9}
Device = Mapping[str, Any]


def of_gpus(plan: Plan, host: Host, facts: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything wrong with the GPUs that a host gives to the run."""
    gpu = facts["gpu"]
    if gpu is None:
        return
    yield from _driver(plan, host, gpu)
    if plan.device == "cuda":
        devices = used(host, gpu)
        yield from _memory(_needed(plan, host), devices)
        yield from _health(devices, gpu)
        yield from _precision(plan, devices)
        yield from _nccl(facts)
        if facts.get("torch") and is_ranks_own(facts):
            yield from _torch(facts["torch"], devices)


def _driver(plan: Plan, host: Host, gpu: Mapping[str, Any]) -> Iterator[Fault]:
    mend = "`nvidia-smi` must list the GPUs: after a driver update reboot, or reload the nvidia modules"
    if gpu["error"] and plan.device == "cuda":
        yield "driver", "error", f"nvidia-smi: {gpu['error']}", mend
    elif gpu["error"] and gpu["pci"]:
        evidence = f"{gpu['pci']} NVIDIA GPU(s) on the PCI bus, but nvidia-smi: {gpu['error']}; the plan uses CPU ranks"
        yield "driver", "warning", evidence, mend
    elif plan.device == "cuda":
        chosen = visible(gpu)
        limit = "" if gpu["visible"] is None else f", CUDA_VISIBLE_DEVICES={gpu['visible']}"
        smi = f"nvidia-smi lists {len(gpu['devices'])}" if gpu["nvidia_smi"] else "nvidia-smi is not installed"
        missing = [number for number in host.devices if number >= len(gpu["devices"])]
        if missing:  # the launcher makes these numbers of the machine CUDA_VISIBLE_DEVICES, whatever it was
            evidence = f"GPUs {', '.join(map(str, missing))} chosen, but {smi}"
            yield "gpus", "error", evidence, "choose GPUs that are there: --include, or CUDA_VISIBLE_DEVICES"
        elif chosen is not None and not host.devices and len(chosen) < host.slots:
            evidence = f"{len(chosen)} visible GPU(s), the plan uses {host.slots} ({smi}{limit})"
            yield "gpus", "error", evidence, "lower slots in the hostfile, or make the GPUs visible"
        elif chosen is not None and len({one["uuid"] for one in chosen}) < len(chosen):
            evidence = f"a GPU is listed twice{limit}; NCCL would stop with `Duplicate GPU detected`"
            yield "gpus", "error", evidence, "name each GPU once in CUDA_VISIBLE_DEVICES"


def visible(gpu: Mapping[str, Any]) -> list[Device] | None:
    """The devices CUDA_VISIBLE_DEVICES leaves, in its order, by CUDA's rule; None with MIG, which is not understood."""
    devices: list[Device] = gpu["devices"]
    if gpu["visible"] is None:
        return devices
    chosen: list[Device] = []
    for item in (part.strip() for part in gpu["visible"].split(",")):
        if item.startswith("MIG-"):
            return None
        match = [one for one in devices if item == str(one["index"]) or (item[:4] == "GPU-" and item in one["uuid"])]
        if not match:  # the first invalid entry ends the list
            break
        chosen += match[:1]
    return chosen


def used(host: Host, gpu: Mapping[str, Any]) -> list[Device]:
    """The devices that the ranks of a host take."""
    if host.devices:  # numbers of the machine: DeepSpeed's launcher makes them CUDA_VISIBLE_DEVICES
        return [gpu["devices"][number] for number in host.devices if number < len(gpu["devices"])]
    return (visible(gpu) or [])[: host.slots]


def _needed(plan: Plan, host: Host) -> int:
    """Bytes the plan needs on a GPU of this host."""
    return next((one.gpu_bytes for one in plan.hosts if one.name == host.name), plan.gpu_bytes)


def _memory(needed: int, devices: Sequence[Device]) -> Iterator[Fault]:
    full = [one for one in devices if one["memory_free"] is not None and one["memory_free"] < needed]
    fix = "end those processes, choose other GPUs with CUDA_VISIBLE_DEVICES, or plan for less memory with --gpu"
    if full:
        lines = [
            f"GPU {one['index']} ({one['name']}): {format_bytes(one['memory_free'])} free of "
            f"{format_bytes(one['memory_total'])}, the plan needs {format_bytes(needed)}{_holders(one)}"
            for one in full
        ]
        yield "gpu-memory", "error", "\n".join(lines), fix
    busy = [one for one in devices if one["processes"] and one not in full]
    if busy:
        lines = [f"GPU {one['index']} ({one['name']}): memory suffices{_holders(one)}" for one in busy]
        what = "\nevery rank waits for the GPU that is shared"
        yield "gpu-processes", "warning", "\n".join(lines) + what, "end those processes, or choose other GPUs"


def _holders(device: Device) -> str:
    held = [
        f"{one['name']} (pid {one['pid']}{', ' + format_bytes(one['bytes']) if one['bytes'] is not None else ''})"
        for one in device["processes"]
    ]
    return f"; held by {', '.join(held)}" if held else ""


def _health(devices: Sequence[Device], gpu: Mapping[str, Any]) -> Iterator[Fault]:
    """Memory cells that failed (ECC, row remapping) and what the driver reported of late (Xid)."""
    for one in devices:
        named = f"GPU {one['index']} ({one['name']}, {one['uuid']})"
        if one.get("remap_failed"):
            evidence = f"{named}: a broken memory row could not be replaced (remapped_rows.failure)"
            yield "gpu-health", "error", evidence, "take this GPU out of CUDA_VISIBLE_DEVICES and have it replaced"
        elif one.get("remap_pending") or one.get("ecc_errors"):
            count = one.get("ecc_errors") or 0
            evidence = f"{named}: {count} uncorrectable memory error(s) since the driver was loaded"
            evidence += ", a row waits to be replaced" * bool(one.get("remap_pending"))
            fix = f"`nvidia-smi --gpu-reset -i {one['index']}` or reboot; replace the GPU if they come back"
            yield "gpu-health", "warning", evidence, fix
    reported = {}
    for xid in gpu.get("xids") or ():
        if xid["xid"] in HARDWARE_XIDS and xid["age_seconds"] < XID_SECONDS:
            reported[xid["pci"], xid["xid"]] = xid  # the latest of its kind
    if reported:
        lines = [
            f"Xid {xid['xid']} on PCI {xid['pci']}, {format_duration(xid['age_seconds'])} ago: {xid['text']}"
            for xid in reported.values()
        ]
        fix = "read `dmesg | grep Xid`; reboot the host, and replace the GPU or its cable if it comes back"
        yield "gpu-health", "warning", "\n".join(lines), fix


def _precision(plan: Plan, devices: Sequence[Device]) -> Iterator[Fault]:
    needed = CAPABILITY.get(plan.precision, 0.0)
    old = [one for one in devices if one["compute_capability"] and float(one["compute_capability"]) < needed]
    if old:
        named = ", ".join(f"GPU {one['index']} ({one['name']}) {one['compute_capability']}" for one in old)
        fix = "set train.precision to fp16" if needed == CAPABILITY["bf16"] else "set train.precision to bf16"
        yield "precision", "error", f"{plan.precision} needs compute capability {needed}: {named}", fix


def _torch(torch: Mapping[str, Any], devices: Sequence[Device]) -> Iterator[Fault]:
    """Whether torch starts CUDA with this driver, and was built for these GPUs."""
    if torch["error"]:
        evidence = f"torch {torch['version']} (CUDA {torch['cuda']}) cannot use the GPUs: {torch['error']}"
        yield "torch", "error", evidence, "install a driver for that CUDA, or the torch build of the driver's CUDA"
        return
    for capability in sorted({one["compute_capability"] for one in devices if one["compute_capability"]}, key=float):
        if not torch["arch"] or has_kernels(capability, torch["arch"]):
            continue
        names = sorted({one["name"] for one in devices if one["compute_capability"] == capability})
        own = "sm_" + capability.replace(".", "")
        evidence = f"torch {torch['version']} (CUDA {torch['cuda']}) has kernels for {' '.join(torch['arch'])}, "
        evidence += f"{' and '.join(names)} needs {own}: `no kernel image is available for execution on the device`"
        if float(capability) < 7.5:  # https://github.com/pytorch/pytorch/issues/172352
            fix = "`bash scripts/setup.sh requirements-v100.txt` on every host: torch's last build with Volta, cu126"
        else:
            fix = "install a torch built for a newer CUDA (Blackwell, sm_100 and sm_120: cu128 or later) on every host"
        yield "torch", "error", evidence, fix


def has_kernels(capability: str, arch: Sequence[str]) -> bool:
    """Whether a GPU runs code built for these architectures, by torch's own rule (torch/cuda/__init__.py).

    sm_XY runs on the same X with a higher or equal Y, sm_XYa only on XY itself, and compute_XY (PTX) on all later ones.
    """
    major, minor = map(int, capability.split("."))
    for item in arch:
        kind, _, digits = item.partition("_")
        number = int(digits.rstrip("af"))
        if kind == "compute":
            fits = number <= 10 * major + minor
        elif digits.endswith("a"):
            fits = number == 10 * major + minor
        else:
            fits = number // 10 == major and number % 10 <= minor
        if fits:
            return True
    return False


def _nccl(facts: Mapping[str, Any]) -> Iterator[Fault]:
    """One NCCL: one wheel, one library in the process. With two, which one is used depends on the order of loading."""
    installed, torch = facts["packages"] or {}, facts.get("torch") or {}
    wheels = [f"{name} {version}" for name, version in installed.items() if name.startswith("nvidia-nccl") and version]
    loaded: list[str] = torch.get("nccl_files", [])
    if len(loaded) > 1:
        fix = "take the other one out of LD_LIBRARY_PATH and LD_PRELOAD"
        yield "nccl", "error", f"torch loads {len(loaded)} NCCL libraries: {', '.join(loaded)}", fix
    elif len(wheels) > 1 and is_ranks_own(facts):
        level: Level = "warning"
        evidence = f"{', '.join(wheels)} install the same libnccl.so.2; the last one installed wins"
        yield "nccl", level, evidence, "uninstall the one torch does not need, then reinstall the other"
