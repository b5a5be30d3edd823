"""Facts of GPU kinds from gpus.yaml: memory, compute capability, peaks, links.

A kind is named as in recipes (A100-40G) or as nvidia-smi prints it (NVIDIA A100-SXM4-40GB). Boards of one kind that
differ (PCIe and SXM) share an entry: memory is exact, speed is that of the SXM board. Nothing here asks the machine.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Gpu:
    """One kind. FLOP/s are dense; bandwidths are bytes/s; a peak is None where the hardware has no such unit."""

    name: str
    memory_bytes: int
    compute_capability: float
    bf16_flops: float | None
    fp16_flops: float
    fp8_flops: float | None
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
    peaks = {f"{kind}_flops": row.pop(kind) for kind in ("bf16", "fp16", "fp8")}
    return Gpu(name=name, memory_bytes=row.pop("memory_mib") * 2**20, **peaks, **row)


@functools.cache
def find(name: str) -> Gpu:
    """The kind called `name`, or the one whose nvidia-smi pattern matches it. Raises PlanError naming near ones."""
    known = kinds()
    by_name = {kind.casefold(): gpu for kind, gpu in known.items()}
    if name.casefold() in by_name:
        return by_name[name.casefold()]
    for gpu in known.values():
        if re.search(gpu.nvidia_smi, name, re.IGNORECASE):
            return gpu
    near = difflib.get_close_matches(name.upper().removeprefix("NVIDIA "), known, n=3, cutoff=0.4)
    raise PlanError(
        f"no facts about the GPU kind {name!r}",
        evidence=f"nearest: {', '.join(near) or 'none'}; known: {', '.join(known)}",
        fix="give one of the known kinds in hardware.hosts[].gpu or --gpu",
    )
