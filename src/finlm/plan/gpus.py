"""Facts of GPU kinds from gpus.yaml: memory, compute capability, peaks, links.

A kind is named as in recipes (A100-40G) or as nvidia-smi prints it (NVIDIA A100-SXM4-40GB). Boards of one kind that
differ (PCIe and SXM) share an entry unless the table names both: memory is exact, speed is that of the SXM board.
Nothing here asks the machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ruamel.yaml import YAML

from finlm.plan.plan import PlanError

BF16_CAPABILITY = 8.0
"""bf16 matrix units exist from compute capability 8.0 (Ampere) on."""


UNKNOWN_MFU = 0.46
"""Assumed for a kind that nobody has measured."""


@dataclass(frozen=True)
class Gpu:
    """One kind. FLOP/s are dense; bandwidths are bytes/s; a peak is None where the hardware has no such unit."""

    name: str
    memory_bytes: int
    compute_capability: float
    bf16_flops: float | None
    fp16_flops: float
    fp8_flops: float | None
    fp32_flops: float
    memory_bandwidth: float
    link: str
    link_bytes_per_second: float
    pcie_bytes_per_second: float
    mfu: float
    nvidia_smi: str
    source: str

    @property
    def has_bf16(self) -> bool:
        """True when bf16 runs on its matrix units."""
        return self.compute_capability >= BF16_CAPABILITY

    @property
    def has_fp8(self) -> bool:
        """True when float8 runs on its matrix units."""
        return self.fp8_flops is not None

    @property
    def peak_flops(self) -> float:
        """The peak that MFU refers to: dense bf16, or fp16 where there is no bf16."""
        return self.bf16_flops or self.fp16_flops


@functools.cache
def kinds() -> dict[str, Gpu]:
    """Every known kind by name, in file order."""
    text = resources.files("finlm.plan").joinpath("gpus.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = YAML(typ="safe").load(text)["kinds"]
    return {name: _gpu(name, row) for name, row in rows.items()}


def _gpu(name: str, row: dict[str, Any]) -> Gpu:
    peaks = {f"{kind}_flops": row.pop(kind) for kind in ("bf16", "fp16", "fp8", "fp32")}
    return Gpu(name=name, memory_bytes=row.pop("memory_mib") * 2**20, **peaks, **row)


_declared: dict[str, Gpu] = {}


def declare(gpu: Gpu) -> None:
    """Let find know a kind of this user's, before any of the table."""
    _declared[gpu.name.casefold()] = gpu
    find.cache_clear()


@functools.cache
def find(name: str) -> Gpu:
    """The kind called `name`, or the one whose nvidia-smi pattern matches it. Raises PlanError naming near ones."""
    known = kinds()
    by_name = {kind.casefold(): gpu for kind, gpu in known.items()} | _declared
    if name.casefold() in by_name:
        return by_name[name.casefold()]
    for gpu in known.values():
        if re.search(gpu.nvidia_smi, name, re.IGNORECASE):
            return gpu
    near = difflib.get_close_matches(name.upper().removeprefix("NVIDIA "), known, n=3, cutoff=0.4)
    raise PlanError(
        f"no facts about the GPU kind {name!r}",
        evidence=f"nearest: {', '.join(near) or 'none'}; known: {', '.join(known)}",
        fix="give one of the known kinds in hardware.hosts[].gpu or --gpu; or describe this one with --gpu-memory and"
        " --gpu-flops, or run `finlm plan --calibrate` on a host that has it",
    )


def described(
    name: str,
    memory_bytes: int | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    capability: float | None = None,
) -> Gpu:
    """A kind by what a user says of it, over what the table knows; an unknown one needs memory and FLOP/s.

    flops: dense, 16 bits. bandwidth: of its memory, bytes/s; else one byte for 200 FLOP, as an A100 has. capability:
    CUDA's; 8.0, with bf16, when unknown.
    """
    try:
        known = dataclasses.replace(find(name), name=name)
    except PlanError as error:
        if memory_bytes is None or flops is None:
            raise error
        has_bf16 = (capability or BF16_CAPABILITY) >= BF16_CAPABILITY
        known = Gpu(
            name=name,
            memory_bytes=memory_bytes,
            compute_capability=capability or BF16_CAPABILITY,
            bf16_flops=flops if has_bf16 else None,
            fp16_flops=flops,
            fp8_flops=None,
            fp32_flops=flops / 16,
            memory_bandwidth=bandwidth or flops / 200,
            link="PCIe4 x16",
            link_bytes_per_second=24e9,
            pcie_bytes_per_second=24e9,
            mfu=UNKNOWN_MFU,
            nvidia_smi=re.escape(name),
            source="--gpu-memory, --gpu-flops",
        )
    if flops is not None:
        known = dataclasses.replace(known, fp16_flops=flops, bf16_flops=flops if known.has_bf16 else None)
    return dataclasses.replace(
        known,
        memory_bytes=memory_bytes or known.memory_bytes,
        memory_bandwidth=bandwidth or known.memory_bandwidth,
        compute_capability=capability or known.compute_capability,
    )
