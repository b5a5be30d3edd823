"""Check a host's GPUs: driver, number, memory, health, kernels of the installed torch; ask hosts for their GPU kinds.

The checks are pure functions from the plan and the facts of hosts/remote/gpu.py to faults. What nvidia-smi or torch did
not report gives no fault. A hostfile has names and slots only, and a recipe's `hardware:` says what its author used:
what a host's nvidia-smi reports takes precedence, and a sentence is printed where it contradicts the recipe. `finlm
train` ends at once when a host cannot be asked (check_reached); for doctor such a host is planned as the recipe says,
or like the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes, format_duration
from finlm.doctor import gather
from finlm.doctor.gather import AllFacts, HostFacts
from finlm.doctor.machine import Fault, HostFault
from finlm.hosts.remote.gpu import Device, Gpu, Torch
from finlm.plan import gpus
from finlm.plan.gpus import PlanError
from finlm.plan.plan import Plan
from finlm.recipe import cluster as clusters
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

# Xid: the driver's error number. These are the hardware's or the driver's fault and not the program's: 48, 63, 64, 94
# and 95 memory (ECC, row remapping), 74 NVLink, 79 fallen off the bus, 119 and 120 GSP firmware (NVIDIA, "Xid Errors").
HARDWARE_XIDS = {48, 63, 64, 74, 79, 94, 95, 119, 120}
XID_SECONDS = 24 * 3600  # older ones were seen to and would be told until the next reboot
CAPABILITY = {"bf16": 8.0, "fp8": 8.9}


def check_gpus(plan: Plan, host: Host, facts: HostFacts) -> Iterator[Fault]:
    """Yield the faults of the GPUs that a host gives to the run; none when they are unknown.

    For a plan of CPU ranks, only a warning that nvidia-smi fails although the host has NVIDIA GPUs.
    """
    gpu = facts.gpu
    if gpu is None:
        return
    yield from _check_driver(plan, host, gpu)
    if plan.device == "cuda":
        devices = devices_of_ranks(host, gpu)
        needed = next((planned.gpu_bytes for planned in plan.hosts if planned.name == host.name), plan.gpu_bytes)
        yield from _check_memory(needed, devices)
        yield from _check_health(devices, gpu)
        yield from _check_precision(plan, devices)
        yield from _check_nccl(facts)
        if facts.torch and facts.has_python_of_ranks:
            yield from _check_torch(facts.torch, devices)


def _check_driver(plan: Plan, host: Host, gpu: Gpu) -> Iterator[Fault]:
    """Yield at most one fault: of nvidia-smi itself (a warning for CPU ranks), or of the number or choice of GPUs."""
    mend = "`nvidia-smi` must list the GPUs: after a driver update reboot, or reload the nvidia modules"
    if gpu.error and plan.device == "cuda":
        yield "driver", "error", f"nvidia-smi: {gpu.error}", mend
    elif gpu.error and gpu.pci:
        evidence = f"{gpu.pci} NVIDIA GPU(s) on the PCI bus, but nvidia-smi: {gpu.error}; the plan uses CPU ranks"
        yield "driver", "warning", evidence, mend
    elif plan.device == "cuda":
        chosen = visible_devices(gpu)  # None with MIG, whose devices nvidia-smi does not count
        limit = "" if gpu.visible is None else f", CUDA_VISIBLE_DEVICES={gpu.visible}"
        smi = f"nvidia-smi lists {len(gpu.devices)}" if gpu.nvidia_smi else "nvidia-smi is not installed"
        missing = sorted(set(host.devices) - {device.index for device in gpu.devices})
        if missing:  # the launcher makes these numbers of the machine CUDA_VISIBLE_DEVICES, whatever it was
            evidence = f"GPUs {', '.join(map(str, missing))} chosen, but {smi}"
            yield "gpus", "error", evidence, "choose GPUs that are there: --include, or CUDA_VISIBLE_DEVICES"
        elif chosen is not None and not host.devices and len(chosen) < host.slots:
            evidence = f"{len(chosen)} visible GPU(s), the plan uses {host.slots} ({smi}{limit})"
            yield "gpus", "error", evidence, "lower slots in the hostfile, or make the GPUs visible"
        elif chosen is not None and len({device.uuid for device in chosen}) < len(chosen):
            evidence = f"a GPU is listed twice{limit}; NCCL would stop with `Duplicate GPU detected`"
            yield "gpus", "error", evidence, "name each GPU once in CUDA_VISIBLE_DEVICES"


def visible_devices(gpu: Gpu) -> list[Device] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, all if unset; None for MIG devices."""
    if gpu.visible is None:
        return gpu.devices
    if "MIG-" in gpu.visible:
        return None
    devices = {device.index: device for device in gpu.devices}
    uuids = {index: device.uuid for index, device in devices.items()}
    return [devices[index] for index in clusters.visible_devices(uuids, gpu.visible)]


def devices_of_ranks(host: Host, gpu: Gpu) -> list[Device]:
    """Return the GPUs that the ranks of a host take, fewer than its slots if fewer are there; [] when unknown."""
    if host.devices:  # numbers of the machine: the launcher makes them CUDA_VISIBLE_DEVICES
        return [device for number in host.devices for device in gpu.devices if device.index == number]
    return (visible_devices(gpu) or [])[: host.slots]


def check_devices(plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Yield a fault for each host whose GPUs another host also has: two names of one machine; none for CPU ranks."""
    if plan.device != "cuda":
        return
    first: dict[str, str] = {}
    for host in cluster.hosts:
        gpu = facts[host.name].gpu if host.name in facts else None
        twice: dict[str, list[str]] = {}
        for device in devices_of_ranks(host, gpu) if gpu else ():
            other = first.setdefault(device.uuid, host.name)
            if other != host.name:
                twice.setdefault(other, []).append(f"GPU {device.index} ({device.uuid})")
        for other, listed in twice.items():
            evidence = f"{', '.join(listed)} of {host.name} are also {other}'s: two names of one machine"
            yield host.name, ("gpus", "error", evidence, "one hostfile line a machine; NCCL refuses a duplicate GPU")


def _check_memory(needed: int, devices: Sequence[Device]) -> Iterator[Fault]:
    """Yield an error for all GPUs with less than `needed` bytes free, a warning for the others that processes use."""
    full = [device for device in devices if device.memory_free is not None and device.memory_free < needed]
    fix = "end those processes, choose other GPUs with CUDA_VISIBLE_DEVICES, or plan for less memory with --gpu"
    if full:
        lines = [
            f"GPU {device.index} ({device.name}): {format_bytes(device.memory_free or 0)} free of "
            f"{format_bytes(device.memory_total or 0)}, the plan needs {format_bytes(needed)}{_holders(device)}"
            for device in full
        ]
        yield "gpu-memory", "error", "\n".join(lines), fix
    busy = [device for device in devices if device.processes and device not in full]
    if busy:
        lines = [f"GPU {device.index} ({device.name}): memory suffices{_holders(device)}" for device in busy]
        note = "\nevery rank waits for the GPU that is shared"
        yield "gpu-processes", "warning", "\n".join(lines) + note, "end those processes, or choose other GPUs"


def _holders(device: Device) -> str:
    """Return the processes that hold memory of a GPU as text for a message; "" if there are none."""
    held = [
        f"{process.name} (pid {process.pid}{', ' + format_bytes(process.bytes) if process.bytes is not None else ''})"
        for process in device.processes
    ]
    return f"; held by {', '.join(held)}" if held else ""


def _check_health(devices: Sequence[Device], gpu: Gpu) -> Iterator[Fault]:
    """Yield faults of GPU memory that failed (ECC, row remapping) and of hardware errors in the last 24 hours (Xid).

    A row that could not be replaced is an error, all else a warning.
    """
    for device in devices:
        named = f"GPU {device.index} ({device.name}, {device.uuid})"
        if device.remap_failed:
            evidence = f"{named}: a broken memory row could not be replaced (remapped_rows.failure)"
            yield "gpu-health", "error", evidence, "take this GPU out of CUDA_VISIBLE_DEVICES and have it replaced"
        elif device.remap_pending or device.ecc_errors:
            count = device.ecc_errors or 0
            evidence = f"{named}: {count} uncorrectable memory error(s) since the driver was loaded"
            evidence += ", a row waits to be replaced" * bool(device.remap_pending)
            fix = f"`nvidia-smi --gpu-reset -i {device.index}` or reboot; replace the GPU if they come back"
            yield "gpu-health", "warning", evidence, fix
    reported = {}
    for xid in gpu.xids or ():
        if xid.xid in HARDWARE_XIDS and xid.age_seconds < XID_SECONDS:
            reported[xid.pci, xid.xid] = xid  # the latest of its kind
    if reported:
        lines = [
            f"Xid {xid.xid} on PCI {xid.pci}, {format_duration(xid.age_seconds)} ago: {xid.text}"
            for xid in reported.values()
        ]
        fix = "read `dmesg | grep Xid`; reboot the host, and replace the GPU or its cable if it comes back"
        yield "gpu-health", "warning", "\n".join(lines), fix


def _check_precision(plan: Plan, devices: Sequence[Device]) -> Iterator[Fault]:
    """Yield an error for the GPUs whose compute capability is too low for the plan's precision."""
    needed = CAPABILITY.get(plan.precision, 0.0)
    old = [device for device in devices if device.compute_capability and float(device.compute_capability) < needed]
    if old:
        named = ", ".join(f"GPU {device.index} ({device.name}) {device.compute_capability}" for device in old)
        fix = "set train.precision to fp16" if needed == CAPABILITY["bf16"] else "set train.precision to bf16"
        yield "precision", "error", f"{plan.precision} needs compute capability {needed}: {named}", fix


def _check_torch(torch: Torch, devices: Sequence[Device]) -> Iterator[Fault]:
    """Yield an error when torch cannot start CUDA with this driver, or was not built for these GPUs."""
    if torch.error:
        evidence = f"torch {torch.version} (CUDA {torch.cuda}) cannot use the GPUs: {torch.error}"
        yield "torch", "error", evidence, "install a driver for that CUDA, or the torch build of the driver's CUDA"
        return
    for capability in sorted({device.compute_capability for device in devices if device.compute_capability}, key=float):
        if not torch.arch or has_kernels(capability, torch.arch):
            continue
        names = sorted({device.name for device in devices if device.compute_capability == capability})
        code = "sm_" + capability.replace(".", "")
        evidence = f"torch {torch.version} (CUDA {torch.cuda}) has kernels for {' '.join(torch.arch)}, "
        evidence += f"{' and '.join(names)} needs {code}: `no kernel image is available for execution on the device`"
        if float(capability) < 7.5:  # https://github.com/pytorch/pytorch/issues/172352
            fix = "`bash scripts/setup.sh requirements-v100.txt` on every host: torch's last build with Volta, cu126"
        else:
            fix = "install a torch built for a newer CUDA (Blackwell, sm_100 and sm_120: cu128 or later) on every host"
        yield "torch", "error", evidence, fix


def has_kernels(capability: str, arch: Sequence[str]) -> bool:
    """Return whether a GPU of this compute capability ("8.6") runs code built for the architectures `arch` ("sm_80").

    By torch's rule (torch/cuda/__init__.py): sm_XY runs on the same X with a higher or equal Y, sm_XYa only on XY
    itself, and compute_XY (PTX) on all later ones.
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


def _check_nccl(facts: HostFacts) -> Iterator[Fault]:
    """Yield an error when torch loads several NCCL libraries, else a warning when several wheels install NCCL."""
    installed = facts.packages or {}
    wheels = [f"{name} {version}" for name, version in installed.items() if name.startswith("nvidia-nccl") and version]
    loaded = facts.torch.nccl_files if facts.torch else []
    if len(loaded) > 1:
        fix = "take the other one out of LD_LIBRARY_PATH and LD_PRELOAD"
        yield "nccl", "error", f"torch loads {len(loaded)} NCCL libraries: {', '.join(loaded)}", fix
    elif len(wheels) > 1 and facts.has_python_of_ranks:
        evidence = f"{', '.join(wheels)} install the same libnccl.so.2; the last one installed wins"
        yield "nccl", "warning", evidence, "uninstall the one torch does not need, then reinstall the other"


WayOut = Callable[[Sequence[str]], str]
"""What can be done when hosts of these names do not come back, as a clause behind other fixes."""


def ask_kinds(
    recipe: Recipe, cluster: Cluster, accept_new_keys: bool = False, way_out: WayOut | None = None
) -> Cluster:
    """Ask the hosts for their GPUs and memory, and return the cluster with them; print what contradicts the recipe.

    `accept_new_keys` stores unknown ssh host keys. A host that cannot be asked raises UserError with `way_out`
    (check_reached); without, it is planned as the recipe says, or like the other hosts.
    """
    facts = gather.gather_hardware(recipe, cluster, accept_new_keys)
    if way_out:
        check_reached(facts, way_out)
    asked, contradictions = settle_kinds(cluster, facts)
    for sentence in contradictions:
        screen.say(sentence)
    return asked


def check_reached(facts: AllFacts, way_out: WayOut) -> None:
    """Raise UserError that names every host that could not be asked, if any.

    Its fix has the hosts' fixes, then way_out(their names), a clause that often begins with "or".
    """
    failed = {name: host.failed for name, host in facts.items() if host.failed}
    if failed:
        fixes = dict.fromkeys(each.fix for each in failed.values() if each.fix)
        raise UserError(
            f"{len(failed)} of {len(facts)} hosts cannot be asked: {', '.join(failed)}",
            evidence="\n".join(f"{each.problem}\n{each.evidence}".rstrip() for each in failed.values()),
            fix="\n".join([*fixes, way_out(list(failed))]),
        )


def settle_kinds(cluster: Cluster, facts: AllFacts) -> tuple[Cluster, list[str]]:
    """Return (the cluster with each host's GPU kind and memory, a sentence for each contradiction with the recipe).

    `facts` needs `gpu` and `memory` of each host. A host whose GPUs are unknown keeps the kind that the recipe gives,
    else gets the kind of the first host that has one.
    """
    hosts, contradictions, unknown = [], [], set()
    for host in cluster.hosts:
        gpu = facts[host.name].gpu
        if gpu is None or gpu.error or (gpu.pci and not gpu.nvidia_smi):
            unknown.add(host.name)
            hosts.append(host)
            continue
        names = list(dict.fromkeys(device.name for device in devices_of_ranks(host, gpu)))
        kind = _choose_kind(names, host.gpu)
        has = f"{host.name} has {' and '.join(names) or 'no GPU'}"
        if host.gpu is not None and kind != _choose_kind([host.gpu], None):
            contradictions.append(f"{has}, the recipe's hardware says {host.gpu}: planned for {kind or 'CPU ranks'}")
        elif len(names) > 1:
            contradictions.append(f"{has}: planned for {kind}, the one with less memory")
        # Of CPU ranks doctor compares the memory that is free; a plan for GPUs decides on offload by it.
        memory = host.memory_bytes or (_ram_bytes(facts[host.name]) if kind else None)
        hosts.append(dataclasses.replace(host, gpu=kind, memory_bytes=memory))
    usual = next((host.gpu for host in hosts if host.gpu), None)
    for place, host in enumerate(hosts):
        if host.name in unknown:
            hosts[place] = dataclasses.replace(host, gpu=host.gpu or usual)
    return dataclasses.replace(cluster, hosts=tuple(hosts)), contradictions


def _choose_kind(names: list[str], otherwise: str | None) -> str | None:
    """Return the GPU kind with the least memory of these names, None for no names.

    With a name that the planner does not know, return `otherwise`, or the first name if that is None.
    """
    try:
        kinds = [gpus.find(name) for name in names]
    except PlanError:
        return otherwise or names[0]  # which the planner refuses, with the names it knows
    return min(kinds, key=lambda kind: kind.memory_bytes).name if kinds else None


def _ram_bytes(facts: HostFacts) -> int | None:
    """Return the RAM of a host in bytes, or the limit of the container that its ranks run in; None when unknown."""
    memory = facts.memory
    return min(memory.total, memory.cgroup_limit or memory.total) if memory else None
