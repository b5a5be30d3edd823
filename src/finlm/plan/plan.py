"""The Plan: what will be done, all numbers decided. Written to plan.json; the trainer reads it and decides nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finlm.base import files
from finlm.base.errors import UserError


class PlanError(UserError):
    """Nothing fits, or the recipe asks for what the hardware cannot do; the fix names the nearest plan that would."""


@dataclass(frozen=True)
class PlannedHost:
    """One host of the plan: name, ranks, GPU kind (None = CPU), and what a rank of it holds and needs."""

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
    offload_optimizer: Literal["none", "stream", "cpu", "nvme"]
    offload_param: Literal["none", "cpu", "nvme"]
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

    @property
    def rank_micro_batches(self) -> tuple[int, ...]:
        """Rows that each rank holds at once, in the order of the ranks."""
        return tuple(host.micro_batch for host in self.hosts for _ in range(host.slots))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict with the keys of the command-line contract."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        """The inverse of to_json. Raises UserError for a plan of another version."""
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
        """The plan stored in a run directory."""
        return Plan.from_json(files.read_json(path))
