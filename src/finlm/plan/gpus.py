"""Look up facts of GPU kinds: memory, compute capability, peaks, links; from gpus.yaml and from what a user declares.

Boards of one kind that differ (PCIe and SXM) share an entry unless the table names both: memory is exact, speed is that
of the SXM board. Kinds as this user measured them, by `finlm plan --calibrate` and by every finished run, are kept in
$XDG_CONFIG_HOME/finlm (~/.config/finlm): gpus.yaml and runs.jsonl. Only commands read them (declare_calibrated), so
tests and committed files do not depend on whose machine it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.units import parse_bytes
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe

BF16_CAPABILITY = 8.0  # bf16 matrix units exist from Ampere on
DRIVER_SHARE = 0.006  # of the memory, kept by the driver: 480 of an H100's 81,559 MiB (nvidia-smi -q, reserved)
CUDNN_CAPABILITIES = (9.0, 10.0)  # Hopper, data-centre Blackwell
UNKNOWN_MFU = 0.46  # assumed for a kind that nobody has measured


@dataclass(frozen=True)
class Gpu:
    """One GPU kind. FLOP/s are dense, bandwidths bytes/s; a peak is None where the hardware has no such unit."""

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
    calibrated: str = ""  # what the user measured of it, in words

    @property
    def usable_bytes(self) -> int:
        """Bytes that processes can have: the memory without the driver's share."""
        return int(self.memory_bytes * (1 - DRIVER_SHARE))

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs on its matrix units."""
        return self.compute_capability >= BF16_CAPABILITY

    @property
    def has_fp8(self) -> bool:
        """Whether float8 runs on its matrix units."""
        return self.fp8_flops is not None

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s that MFU refers to: bf16, or fp16 where there is no bf16."""
        return self.bf16_flops or self.fp16_flops


@functools.cache
def kinds() -> dict[str, Gpu]:
    """Return every kind of gpus.yaml by name, in file order; cached."""
    text = resources.files("finlm.plan").joinpath("gpus.yaml").read_text(encoding="utf-8")
    table = {}
    for name, row in YAML(typ="safe").load(text)["kinds"].items():
        peaks = {f"{unit}_flops": row.pop(unit) for unit in ("bf16", "fp16", "fp8", "fp32")}
        table[name] = Gpu(name=name, memory_bytes=row.pop("memory_mib") * 2**20, **peaks, **row)
    return table


_declared: dict[str, Gpu] = {}


def declare(gpu: Gpu) -> None:
    """Register a GPU kind in this process; find() then returns it before the table's entry of that name."""
    _declared[gpu.name.casefold()] = gpu
    find.cache_clear()


@functools.cache
def find(name: str) -> Gpu:
    """Return the GPU kind of this name, or of the name that nvidia-smi prints; declared kinds come first. Cached.

    Upper and lower case are alike. Raises PlanError for an unknown name.
    """
    known = kinds()
    by_name = {kind.casefold(): gpu for kind, gpu in known.items()} | _declared
    if name.casefold() in by_name:
        return by_name[name.casefold()]
    for gpu in known.values():
        if re.search(gpu.nvidia_smi, name, re.IGNORECASE):
            return _declared.get(gpu.name.casefold(), gpu)
    wanted = name.upper().removeprefix("NVIDIA ")
    near = [kind for kind in known if wanted in kind.upper()][:3]
    near = near or difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
    raise PlanError(
        f"no facts about the GPU kind {name!r}",
        evidence=f"nearest: {', '.join(near) or 'none'}; known: {', '.join(known)}",
        fix="give one of the known kinds in hardware.hosts[].gpu or --gpu; or describe this one with --gpu-memory and"
        " --gpu-flops, or run `finlm plan --calibrate` on a host that has it",
    )


def describe_gpu(
    name: str,
    memory_bytes: int | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    capability: float | None = None,
) -> Gpu:
    """Return the GPU kind `name` with the given values, and otherwise what the table knows of it.

    An unknown kind needs memory and FLOP/s, else PlanError. `flops` are dense, in 16 bits. `bandwidth` is its memory's
    in bytes/s; if None, one byte for 200 FLOP, as an A100 has. `capability` is CUDA's, 8.0 (with bf16) if unknown.
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


def declare_described(
    name: str | None, memory: str | None, flops: float | None, bandwidth: float | None, capability: float | None
) -> None:
    """Declare the GPU kind `name` as the command line describes it; do nothing without a description.

    Raises UserError for a description without a name, a malformed size, and an unknown kind without memory or FLOP/s.
    """
    if memory is None and flops is None and bandwidth is None and capability is None:
        return
    if name is None:
        raise UserError("--gpu-memory and the like describe the kind that --gpu names", fix="add --gpu NAME")
    try:
        size = None if memory is None else parse_bytes(int(memory) if memory.isdigit() else memory)
    except ValueError as error:
        raise UserError(f"--gpu-memory: {error}", fix="for example --gpu-memory 48GiB") from None
    declare(describe_gpu(name, size, flops, bandwidth, capability))


class PlanError(UserError):
    """Raised when nothing fits or the hardware cannot do what is asked; the fix names a plan that would, if any."""


def check_devices(cluster: Cluster) -> None:
    """Raise PlanError when some hosts have GPUs and others have none."""
    without = [host.name for host in cluster.hosts if host.gpu is None]
    if without and not cluster.is_cpu:
        raise PlanError(
            "some hosts have GPUs and some do not",
            evidence=f"no GPU kind for {', '.join(without)}",
            fix="leave those out (--exclude), give every host a gpu in hardware.hosts, or pass --gpu for all",
        )


def attention(
    cluster: Cluster, precision: str, deterministic: bool
) -> Literal["default", "cudnn", "flash", "efficient"]:
    """Return the sdpa backend that is fastest on the cluster's oldest GPU; "default" on CPU.

    It is "efficient" in fp32 and before Ampere, "cudnn" on Hopper and data-centre Blackwell unless `deterministic`,
    else "flash". Raises PlanError for an unknown GPU kind.
    """
    if cluster.is_cpu:
        return "default"
    capability = min(find(host.gpu or "").compute_capability for host in cluster.hosts)
    if capability < BF16_CAPABILITY or precision == "fp32":  # the others have no fp32, or need Ampere
        return "efficient"
    # XuanYuan-6B's on one H200, forward and backward: flash 3.22 ms, cuDNN 1.79. On Ampere and consumer Blackwell cuDNN
    # is slower (transformers#48163), and torch does not take it where results must be deterministic.
    return "cudnn" if capability in CUDNN_CAPABILITIES and not deterministic else "flash"


def precision_problem(precision: str, cluster: Cluster) -> tuple[str, str] | None:
    """Return (problem, fix) if the hardware cannot run this precision, else None. PlanError for an unknown GPU kind."""
    if cluster.is_cpu:
        if precision == "fp16":
            return "fp16 does not run on CPU ranks (DeepSpeed: Type fp16 is not supported)", "use auto, fp32 or bf16"
        if precision == "fp8":
            return "fp8 does not run on CPU ranks", "use auto, fp32 or bf16"
        return None
    without = [host for host in cluster.hosts if host.gpu and not find(host.gpu).has_fp8]
    if precision == "fp8" and without:
        kind = find(without[0].gpu or "")
        problem = f"fp8 needs float8 matrix units on every GPU: {kind.name} of host {without[0].name} has none"
        return problem, "use bf16" if kind.has_bf16 else "use fp16"
    old = [host for host in cluster.hosts if host.gpu and not find(host.gpu).has_bf16]
    if precision == "bf16" and old:
        return f"bf16 needs compute capability 8.0 on every host: {_capability(old[0].name, old[0].gpu)}", "use fp16"
    return None


def _capability(host: str, gpu: str | None) -> str:
    """Return text that says that a host's GPU kind is too old for bf16. UserError for an unknown kind."""
    kind = find(gpu or "")
    return f"host {host} has {kind.name}, compute capability {kind.compute_capability} < {BF16_CAPABILITY}"


def precision(recipe: Recipe, cluster: Cluster) -> tuple[str, list[str]]:
    """Return (precision, [a sentence with the reason]); auto is fp32 on CPU, bf16 where every GPU has it, else fp16.

    Raises PlanError when the hardware cannot run train.precision, and for an unknown GPU kind.
    """
    wanted = recipe.train.precision
    if wanted != "auto":
        problem = precision_problem(wanted, cluster)
        if problem:
            raise PlanError(f"train.precision: {problem[0]}", fix=f"{problem[1]}, or leave train.precision at auto")
        return wanted, [f"{wanted}: train.precision says so"]
    if cluster.is_cpu:
        return "fp32", ["fp32: CPU ranks"]
    for host in cluster.hosts:
        if host.gpu and not find(host.gpu).has_bf16:
            return "fp16", [f"fp16: {_capability(host.name, host.gpu)}"]
    return "bf16", ["bf16: every GPU has compute capability 8.0 or more"]


PRODUCT_SHARE = 0.79  # of H200's peak that the products of train/measure_hardware.py reach there; its mfu goes with it
LIMIT_SECONDS = 300
NEWEST_RUNS = 5  # of a kind, whose median counts
ARITHMETIC = 0.7  # share of a planned step that must be arithmetic for the run to tell a GPU's speed
LEAST_PARAMETERS = 300_000_000  # of smaller models the host's launches set the speed


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its GPU kind, its directory's name, and the mfu of a 7B model that explains its speed."""

    kind: str
    run: str
    mfu: float


def user_file() -> Path:
    """Return the path of the user's table of GPU kinds; it need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "finlm" / "gpus.yaml"


def runs_file() -> Path:
    """Return the path of the user's list of finished runs; it need not exist."""
    return user_file().with_name("runs.jsonl")


def declare_calibrated() -> list[str]:
    """Declare every GPU kind that this user measured; return the names in the user's table.

    The median speed of a kind's newest finished runs replaces the one of `finlm plan --calibrate`, which times matrix
    products and no model. Raises UserError when the table or the list of runs is damaged.
    """
    try:
        table = _read_user_kinds()
        for gpu in table:
            declare(gpu)
    except Exception as error:
        raise UserError(
            f"{user_file()} is not a table of GPUs",
            evidence=str(error),
            fix="remove it, or run `finlm plan --calibrate`",
        ) from None
    try:
        runs = _read_runs()
        for kind in {run.kind for run in runs}:
            newest = [run for run in runs if run.kind == kind][-NEWEST_RUNS:]
            mfu = round(statistics.median(run.mfu for run in newest), 3)
            words = (
                f"speed of {kind}: {mfu:.1%} of its peak by finished runs ({len(newest)}, the newest {newest[-1].run})"
            )
            with contextlib.suppress(PlanError):  # a kind that is no longer described, of which no plan can be made
                declare(dataclasses.replace(find(kind), mfu=mfu, calibrated=words))
    except Exception as error:
        raise UserError(
            f"{runs_file()} is not a list of finished runs",
            evidence=str(error),
            fix="remove it: later runs write it again",
        ) from None
    return [gpu.name for gpu in table]


def remember_run(
    name: str, plan: Plan, stage: str, planned: float | None, measured: float | None
) -> MeasuredRun | None:
    """Store the GPU speed that a finished run shows in runs.jsonl and return it; None if the run shows none.

    `planned` and `measured` are tokens/s, `name` the run's, whose former row is replaced. Only 16-bit pretraining and
    SFT runs count, of LEAST_PARAMETERS or more, on GPUs of one kind, whose planned step is 70 % arithmetic, which took
    between half and twice as long as planned. Raises PlanError for a GPU kind that is unknown by now, OSError when the
    file cannot be written, and ValueError or TypeError when it is damaged.
    """
    kinds, parts = {host.gpu for host in plan.hosts}, plan.step_seconds
    if not (planned and measured and plan.gpu_mfu and parts) or len(kinds) != 1:
        return None
    if stage not in ("pretrain", "sft") or plan.precision not in ("bf16", "fp16") or plan.parameters < LEAST_PARAMETERS:
        return None
    seconds = max(parts["compute"], parts["overlapped"]) + parts["exposed"] + parts["optimizer"]
    # In the time that was measured, if transfers and the optimizer took what was planned.
    compute = parts["compute"] - seconds * (1 - planned / measured)
    if parts["compute"] < ARITHMETIC * seconds or not 0.5 < compute / parts["compute"] < 2:
        return None
    (kind,) = kinds
    run = MeasuredRun(find(str(kind)).name, name, plan.gpu_mfu * parts["compute"] / compute)
    others = [row for row in _read_runs() if row.run != name]
    runs_file().parent.mkdir(parents=True, exist_ok=True)
    files.write_text(runs_file(), "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in (*others, run)))
    return run


def _read_runs() -> list[MeasuredRun]:
    """Return the user's finished runs, oldest first; [] without the file. ValueError or TypeError if it is damaged."""
    if not runs_file().exists():
        return []
    return [MeasuredRun(**json.loads(line)) for line in runs_file().read_text(encoding="utf-8").splitlines()]


def _read_user_kinds() -> list[Gpu]:
    """Return the GPU kinds in the user's YAML table; [] without it. Raises YAML's or Gpu's errors if malformed."""
    if not user_file().exists():
        return []
    rows = YAML(typ="safe").load(user_file().read_text(encoding="utf-8"))["kinds"]
    return [Gpu(name=name, **row) for name, row in rows.items()]


def measure() -> list[Gpu]:
    """Measure this machine's GPUs in a process with torch; store their kinds in the user's table and return them.

    Raises UserError when that fails or takes more than LIMIT_SECONDS, OSError when the table cannot be written.
    """
    command = [sys.executable, "-c", "from finlm.train import measure_hardware; measure_hardware.measure_gpus()"]
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
    measured = [calibrate_gpu(json.loads(line)) for line in lines]
    store(measured)
    return measured


def calibrate_gpu(row: Mapping[str, Any]) -> Gpu:
    """Return the GPU kind of what train/measure_hardware.py printed about one GPU, a JSON object.

    For a kind of gpus.yaml, peak and memory bandwidth are the table's. mfu, the share of the peak that a model reaches,
    follows from the share that plain matrix products reach.
    """
    flops = row["products"]["bf16"] or row["products"]["fp16"]
    is_known = any(re.search(gpu.nvidia_smi, row["name"], re.IGNORECASE) for gpu in kinds().values())
    peak = None if is_known else flops / PRODUCT_SHARE
    known = describe_gpu(row["name"], int(row["memory_bytes"]), peak, capability=row["capability"])
    reference = kinds()["H200"].mfu
    return dataclasses.replace(
        known,
        memory_bandwidth=known.memory_bandwidth if is_known else row["copy_bytes_per_second"] / 0.9,
        link_bytes_per_second=row["link_bytes_per_second"] or known.link_bytes_per_second,
        pcie_bytes_per_second=row["pcie_bytes_per_second"],
        mfu=round(min(0.9, reference * flops / known.peak_flops / PRODUCT_SHARE), 3),
        source=f"measured by `finlm plan --calibrate` on {row['host']}, torch {row['torch']}",
        calibrated=f"speed of {row['name']}: measured by `finlm plan --calibrate` on {row['host']}",
    )


def store(measured: list[Gpu]) -> None:
    """Write these GPU kinds into the user's table, beside others that it has. Replaces a damaged table. OSError."""
    try:
        kept = _read_user_kinds()
    except Exception:  # damaged: declare_calibrated() says that measuring mends it
        kept = []
    rows = {gpu.name: {k: v for k, v in dataclasses.asdict(gpu).items() if k != "name"} for gpu in (*kept, *measured)}
    user_file().parent.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, and says floats in full.
    files.write_text(user_file(), json.dumps({"kinds": rows}, indent=1) + "\n")
