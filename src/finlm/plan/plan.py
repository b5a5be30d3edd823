"""Store the Plan: what will be done, all numbers decided. The trainer reads plan.json and decides nothing.

Beside it what the planner and the ranks count alike: optimizer groups, slices of logits, the time between failures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from finlm.base import files
from finlm.base.errors import UserError

Offload = Literal["none", "stream", "cpu", "nvme"]
OffloadParam = Literal["none", "cpu", "nvme"]
Member = TypeVar("Member")
ON_HOST = ("cpu", "nvme")  # offload whose optimizer steps on the host's cores; with "stream" the GPU steps
OPTIMIZER_GROUP = 500_000_000  # parameters that a rank steps at once at DeepSpeed's stages 1 and 2
STREAM_GROUP = 70_000_000  # that pass through its GPU together: a matrix or four of a 7B model
STREAM_SETS = 3  # groups on the GPU at once: one comes, one is stepped, one goes
LOGITS_SLICE_BYTES = {"cuda": 2**30, "cpu": 2**24}  # that exist at once (train/model/kernels.py); on CPU in a cache


@dataclass(frozen=True)
class PlannedHost:
    """One host of the plan: name, ranks, GPU kind (None = CPU), and a rank's rows and bytes."""

    name: str
    slots: int
    gpu: str | None
    micro_batch: int
    gpu_bytes: int


@dataclass(frozen=True)
class Plan:
    """Every decision of a run. Bytes are per GPU (or per CPU rank) and per host; those of the tightest host are given.

    micro_batch is the largest of the hosts' own, which are equal unless GPUs differ.
    """

    recipe: str
    hosts: tuple[PlannedHost, ...]
    device: Literal["cuda", "cpu"]
    world_size: int
    precision: Literal["bf16", "fp16", "fp32", "fp8"]
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Offload
    offload_param: OffloadParam
    recompute: Literal["none", "selective", "full"]
    compiled: bool
    attention: Literal["default", "cudnn", "flash", "efficient"]
    micro_batch: int
    gradient_accumulation_steps: int
    sequence_length: int
    tokens_per_step: int
    steps: int
    vocab_size: int
    padded_vocab_size: int
    parameters: int
    flops_per_token: float
    fits: bool
    gpu_bytes: int
    gpu_bytes_items: dict[str, int]
    gpu_memory_bytes: int
    host_bytes: int
    peak_flops: float | None
    tokens_per_second: float | None
    days: float | None
    reasons: tuple[str, ...]
    gpu_allocated_bytes: int = 0
    host_bytes_items: dict[str, int] = dataclasses.field(default_factory=dict)
    nvme_bytes: int = 0
    fp32_gradients: bool = False
    step_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    asynchronous_checkpoints: bool = True
    generation_rows: int = 0  # answers that a rank generates at once (GRPO); 0 in plans of earlier versions: all
    generation_bytes_items: dict[str, int] = dataclasses.field(default_factory=dict)
    gpu_mfu: float | None = None  # that the speed was planned with, of a 7B model; None where kinds differ

    @property
    def rank_micro_batches(self) -> tuple[int, ...]:
        """Rows that each rank holds at once, in the order of the ranks."""
        return tuple(host.micro_batch for host in self.hosts for _ in range(host.slots))

    @property
    def rank_hosts(self) -> list[str]:
        """Host names of the ranks, in the order of the ranks."""
        return [host.name for host in self.hosts for _ in range(host.slots)]

    def to_json(self) -> dict[str, object]:
        """Return the plan as a JSON-able dict, whose keys are part of the command line's contract."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        """Return the plan of to_json's dict. UserError for unknown keys, and missing ones that have no default."""
        try:
            hosts = tuple(PlannedHost(**host) for host in value["hosts"])
            return Plan(**{**value, "hosts": hosts, "reasons": tuple(value["reasons"])})
        except (KeyError, TypeError) as error:
            raise UserError(
                "this plan was written by another version of finlm",
                evidence=str(error),
                fix="use the code that the run directory carries: PYTHONPATH=RUN/code python -m finlm ...",
            ) from None

    @staticmethod
    def read(path: Path) -> Plan:
        """Return the plan in a file. UserError for another version's or damaged JSON, OSError without the file."""
        return Plan.from_json(files.read_json(path))


def optimizer_group(offload_optimizer: Offload, world_size: int) -> int:
    """Return the most parameters of an optimizer group over all ranks; a matrix with more is a group of its own."""
    return world_size * (STREAM_GROUP if offload_optimizer == "stream" else OPTIMIZER_GROUP)


def group_members(members: Iterable[Member], most: int, size: Callable[[Member], int]) -> list[list[Member]]:
    """Return the members in order, in groups whose size(member) sum to `most` at most; larger ones are groups alone."""
    groups: list[list[Member]] = []
    total = 0
    for member in members:
        if not groups or total + size(member) > most:
            groups.append([])
            total = 0
        groups[-1].append(member)
        total += size(member)
    return groups


def is_contiguous(stage: int, world_size: int, offload_optimizer: Offload) -> bool:
    """Return whether DeepSpeed copies gradients into buckets during the backward pass (contiguous_gradients).

    False at stage 0, and at stage 1 on one GPU unless its optimizer steps on the host ("cpu" or "nvme").
    """
    # On one GPU nothing is reduced, and the copy of all gradients would be made while activations still live: 12 GiB of
    # XuanYuan-6B.
    return stage > 1 or (stage == 1 and (world_size > 1 or offload_optimizer in ON_HOST))


# What the planner chooses where the recipe says auto: the field of a plan and of a layout, the recipe's key.
CHOICES = {
    "zero_stage": "zero.stage",
    "offload_optimizer": "zero.offload_optimizer",
    "offload_param": "zero.offload_param",
    "recompute": "train.recompute",
    "micro_batch": "batch.micro_batch",
    "generation_rows": "grpo.generation_rows",
}


def changed_keys(old: Plan, new: Plan) -> dict[str, tuple[Any, Any]]:
    """Return {recipe key: (old value, new value)} for the decisions of the new plan that differ from the old one's.

    The old value is None where only the new plan has the key; keys that only the old plan has are left out.
    """
    before, after = decided_keys(old.to_json()), decided_keys(new.to_json())
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def hosts_error(path: Path, step: int, planned: Mapping[str, Any], plan: Plan, changes: Sequence[str]) -> UserError:
    """Return, without raising it, the UserError for the run in `path` that the hosts of `plan` cannot go on with.

    The run was saved after `step`. `planned` is its plan.json, and `changes` says what would differ. The fix is the
    keys that go on with it, if there are any.
    """
    tokens, ranks = planned["tokens_per_step"], plan.world_size
    rows = tokens // planned["sequence_length"]
    former = {"batch.tokens_per_step": tokens, "train.precision": planned["precision"]}
    now = {"batch.tokens_per_step": plan.tokens_per_step, "train.precision": plan.precision}
    sets = " ".join(f"--set {key}={value}" for key, value in former.items() if value != now[key])
    fix = f"{sets} goes on with it"
    if tokens != plan.tokens_per_step and rows % ranks:
        fix = f"train on hosts whose number of ranks divides {rows:,} rows"
    elif not sets or planned["device"] != plan.device:
        fix = "train on hosts like the former ones"
    return UserError(
        f"{path} cannot go on with these hosts, so nothing was started: {', '.join(changes)}",
        evidence=f"it was saved after step {step:,}, on {planned['world_size']} ranks; now there are {ranks}",
        fix=f"{fix}; --new starts another run at step 0",
    )


def decided_keys(plan: Mapping[str, Any]) -> dict[str, object]:
    """Return {recipe key: value} for what a plan (as JSON) decides; unequal micro-batches are {host name: rows}.

    A key that an older plan lacks has the value None; grpo.generation_rows is left out where it is 0 or absent.
    """
    values = {key: plan.get(name) for name, key in CHOICES.items() if name != "generation_rows" or plan.get(name)}
    rows = {host["name"]: host.get("micro_batch") for host in plan.get("hosts", ())}
    return values | ({"batch.micro_batch": rows} if len(set(rows.values())) > 1 else {})


# 419 unexpected interruptions in 54 days on 16,384 GPUs: Llama 3's training (arXiv 2407.21783, section 3.3.4).
HOURS_BETWEEN_FAILURES_OF_A_GPU = 54 * 24 * 16384 / 419


def seconds_between(ranks: int, failures: int = 0, seconds: float = 0.0) -> float:
    """Return the expected seconds between two failures of a run with `ranks` ranks.

    The assumed rate counts as one failure in its time; the run's `failures` in `seconds` so far are added to it.
    """
    return (HOURS_BETWEEN_FAILURES_OF_A_GPU * 3600 / ranks + seconds) / (1 + failures)


def best_interval(stall: float, between: float, write: float) -> float:
    """Return the seconds between checkpoints that lose the least time, but at least 1.5 times `write`.

    `stall` is the seconds that training waits for a checkpoint, `write` the seconds until it is written, `between` the
    seconds between failures.
    """
    # Young, CACM 17(9), 1974; Daly's refinement differs by the stall itself.
    return max(math.sqrt(2 * stall * between) - stall, 1.5 * write)
