"""This user's own GPU kinds: `finlm plan --calibrate` measures the machine's, and later plans take them first.

They lie in $XDG_CONFIG_HOME/finlm/gpus.yaml (~/.config/finlm/gpus.yaml), in the form of plan/gpus.yaml, and are read by
the command line only: what the repository's tests and committed files say does not depend on whose machine it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.units import parse_bytes
from finlm.plan import gpus
from finlm.plan.gpus import Gpu

PRODUCT_SHARE = 0.79  # of H200's peak that the products of train/calibrate.py reach there; its mfu goes with it
LIMIT_SECONDS = 300


def path() -> Path:
    """The user's file; it need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "finlm" / "gpus.yaml"


def read() -> list[str]:
    """Declare every kind of the user's file; their names. Raises UserError when it cannot be understood."""
    try:
        found = _stored()
    except Exception as error:
        raise UserError(
            f"{path()} is not a table of GPUs", evidence=str(error), fix="remove it, or run `finlm plan --calibrate`"
        ) from None
    for gpu in found:
        gpus.declare(gpu)
    return [gpu.name for gpu in found]


def _stored() -> list[Gpu]:
    if not path().exists():
        return []
    rows: dict[str, dict[str, Any]] = YAML(typ="safe").load(path().read_text(encoding="utf-8"))["kinds"]
    return [Gpu(name=name, **row) for name, row in rows.items()]


def describe(
    name: str | None, memory: str | None, flops: float | None, bandwidth: float | None, capability: float | None
) -> None:
    """Declare the kind `name` as the command line describes it; nothing when it does not. Raises UserError."""
    if memory is None and flops is None and bandwidth is None and capability is None:
        return
    if name is None:
        raise UserError("--gpu-memory and the like describe the kind that --gpu names", fix="add --gpu NAME")
    try:
        size = None if memory is None else parse_bytes(int(memory) if memory.isdigit() else memory)
    except ValueError as error:
        raise UserError(f"--gpu-memory: {error}", fix="for example --gpu-memory 48GiB") from None
    gpus.declare(gpus.described(name, size, flops, bandwidth, capability))


def measure() -> list[Gpu]:
    """Measure this machine's GPUs in a process of their own, which has torch, and store them."""
    command = [sys.executable, "-m", "finlm.train.calibrate"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        fix = "look with nvidia-smi whether another process uses the GPUs"
        raise UserError(f"measuring took more than {LIMIT_SECONDS} s", fix=fix) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UserError(
            "this machine's GPUs could not be measured",
            evidence="\n".join((done.stderr or done.stdout).strip().splitlines()[-5:]),
            fix="`finlm doctor --local` checks driver, GPUs and torch",
        )
    found = [calibrated(json.loads(line)) for line in lines]
    store(found)
    return found


def calibrated(row: Mapping[str, Any]) -> Gpu:
    """A kind from a row of train/calibrate.py: the table's facts where it knows the name, speeds as measured.

    The share of the peak that a model reaches follows from the share that plain products reach.
    """
    flops = row["products"]["bf16"] or row["products"]["fp16"]
    memory = int(row["memory_bytes"])
    known = gpus.described(
        row["name"], memory, None if _is_known(row["name"]) else flops / PRODUCT_SHARE, capability=row["capability"]
    )
    reference = gpus.kinds()["H200"].mfu
    return dataclasses.replace(
        known,
        memory_bandwidth=known.memory_bandwidth if _is_known(row["name"]) else row["copy_bytes_per_second"] / 0.9,
        link_bytes_per_second=row["link_bytes_per_second"] or known.link_bytes_per_second,
        pcie_bytes_per_second=row["pcie_bytes_per_second"],
        mfu=round(min(0.9, reference * flops / known.peak_flops / PRODUCT_SHARE), 3),
        source=f"measured by `finlm plan --calibrate` on {row['host']}, torch {row['torch']}",
    )


def _is_known(name: str) -> bool:
    return any(re.search(gpu.nvidia_smi, name, re.IGNORECASE) for gpu in gpus.kinds().values())


def store(found: list[Gpu]) -> None:
    """Write these kinds into the user's file, beside those it has already."""
    try:
        kept = _stored()
    except Exception:  # damaged: read() says that measuring mends it
        kept = []
    rows = {gpu.name: {k: v for k, v in dataclasses.asdict(gpu).items() if k != "name"} for gpu in (*kept, *found)}
    path().parent.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, and says floats in full.
    files.write_text(path(), json.dumps({"kinds": rows}, indent=1) + "\n")
