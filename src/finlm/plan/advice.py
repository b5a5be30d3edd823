"""What a plan means beyond one step: epochs, GPU-hours and cost, the end date, checkpoints and the disk they need.

Arithmetic on a Plan; nothing is decided here and nothing is stored in a run.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from dataclasses import dataclass
from typing import Any

from finlm.base.units import format_bytes, format_count, format_duration, format_rate
from finlm.plan import memory, stages
from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

# 419 unexpected interruptions in 54 days on 16,384 GPUs: Llama 3's training (arXiv 2407.21783, section 3.3.4).
HOURS_BETWEEN_FAILURES_OF_A_GPU = 54 * 24 * 16384 / 419
DISK_BYTES_PER_SECOND = 1e9  # a host writes its checkpoint shards; one NVMe disk, assumed
COPY_BYTES_PER_SECOND = 5e9  # a rank's copy to host memory that training waits for; assumed
NIGHT_HOURS = 12


@dataclass(frozen=True)
class Advice:
    """Bytes are of all hosts together; a disk figure is of the host that needs most. Seconds are predictions."""

    tokens: int
    tokens_per_parameter: float
    epochs: float | None
    epoch_tokens: int | None
    gpu_hours: float | None
    price_per_gpu_hour: float | None
    cost: float | None
    finish: str | None
    night_steps: int | None
    checkpoint_bytes: int
    checkpoint_disk_bytes: int
    checkpoint_stall_seconds: float
    checkpoint_write_seconds: float
    checkpoint_every_steps: int | None
    checkpoint_advised_steps: int | None

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return dataclasses.asdict(self)


def of(
    recipe: Recipe,
    shape: ModelShape,
    plan: Plan,
    epoch_tokens: int | None = None,
    price: float | None = None,
    now: datetime.datetime | None = None,
) -> Advice:
    """epoch_tokens: of the prepared data, when known. price: of a GPU-hour, over the recipe's. now: when it starts."""
    tokens = plan.steps * plan.tokens_per_step
    price = recipe.hardware.price_per_gpu_hour if price is None else price
    hours = None if plan.days is None or plan.device == "cpu" else plan.days * 24 * plan.world_size
    days = None if plan.days is None else datetime.timedelta(days=min(plan.days, 200_000))
    begin = now or datetime.datetime.now()
    whole, share = checkpoint_bytes(recipe, shape, plan)
    waits = recipe.checkpoint.asynchronous and recipe.checkpoint.every_steps is not None
    write = share * max(host.slots for host in plan.hosts) / DISK_BYTES_PER_SECOND
    stall = share / COPY_BYTES_PER_SECOND if waits else write
    seconds = plan.tokens_per_step / plan.tokens_per_second if plan.tokens_per_second else None
    return Advice(
        tokens=tokens,
        tokens_per_parameter=tokens / plan.parameters,
        epochs=tokens / epoch_tokens if epoch_tokens else None,
        epoch_tokens=epoch_tokens,
        gpu_hours=hours,
        price_per_gpu_hour=price,
        cost=None if price is None or hours is None else price * hours,
        finish=None if days is None else (begin + days).isoformat(sep=" ", timespec="minutes"),
        night_steps=None if seconds is None else int(NIGHT_HOURS * 3600 / seconds),
        checkpoint_bytes=whole,
        checkpoint_disk_bytes=_disk_bytes(recipe, shape, plan, whole, share),
        checkpoint_stall_seconds=stall,
        checkpoint_write_seconds=write,
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        checkpoint_advised_steps=_advised_steps(plan, stall, write, seconds),
    )


def checkpoint_bytes(recipe: Recipe, shape: ModelShape, plan: Plan) -> tuple[int, int]:
    """(all files of a checkpoint, the largest rank's): 16-bit weights, fp32 master and Adam's two moments.

    Stage 3 keeps no separate weights, stage 0 in fp32 no separate master. Beside adapters frozen weights are kept too.
    """
    e = memory.ELEMENT_BYTES[plan.precision]
    has_master = plan.zero_stage > 0 or e == 2
    trained = plan.parameters if recipe.lora is None else stages.adapter_parameters(recipe, shape)
    frozen = e * stages.frozen(shape, recipe.lora is not None, stages.is_quantized(recipe))
    states = (8 + 4 * has_master) * trained
    weights = 0 if plan.zero_stage == 3 else e * trained
    ranks = plan.world_size if plan.zero_stage > 0 else 1
    own = frozen // (ranks if plan.zero_stage == 3 else 1)
    return frozen + weights + states, own + weights + states // ranks


def _disk_bytes(recipe: Recipe, shape: ModelShape, plan: Plan, whole: int, share: int) -> int:
    """Bytes on one host: the kept checkpoints, the one being written, and the export."""
    of_host = whole if len(plan.hosts) == 1 else min(whole, share * max(host.slots for host in plan.hosts))
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saved = 1 if every is None else min(keep + 1, plan.steps // every + 1)
    if every and (always := recipe.checkpoint.keep_every_steps):
        saved += max(0, plan.steps // always - keep)
    return saved * of_host + memory.ELEMENT_BYTES[plan.precision] * shape.parameters


def _advised_steps(plan: Plan, stall: float, write: float, step_seconds: float | None) -> int | None:
    """Steps between checkpoints that lose the least time, to two digits.

    Young's sqrt(2 x stall x time between failures) (CACM 17(9), 1974; Daly's refinement differs by the stall itself),
    not below the time a write takes, not beyond the run.
    """
    if step_seconds is None:
        return None
    between = HOURS_BETWEEN_FAILURES_OF_A_GPU * 3600 / plan.world_size
    seconds = max(math.sqrt(2 * stall * between) - stall, 1.5 * write)
    steps = max(1, round(seconds / step_seconds))
    digits = max(0, len(str(steps)) - 2)
    return min(plan.steps, round(steps, -digits))


def sentences(advice: Advice, plan: Plan) -> list[tuple[str, str]]:
    """(label, sentence) rows for people."""
    rows = []
    if advice.epoch_tokens:
        per = advice.epoch_tokens / plan.parameters
        rows.append(
            (
                "data",
                f"1 epoch of this corpus = {format_count(advice.epoch_tokens)} tokens = {format_rate(per)} tokens per "
                f"parameter; the run takes {advice.epochs:.3g} epochs",
            )
        )
    if advice.finish is not None and plan.tokens_per_second and advice.night_steps is not None:
        night = advice.night_steps * plan.tokens_per_step
        rows.append(("end", f"started now: {advice.finish}"))
        if plan.days and plan.days > 1.5:
            share = advice.night_steps / plan.steps
            rows.append(
                (
                    "a night",
                    f"{NIGHT_HOURS} hours do {advice.night_steps:,} steps = {format_count(night)} tokens,"
                    f" {share:.2g} of the run",
                )
            )
    if advice.gpu_hours is not None:
        cost = "" if advice.cost is None else f", {advice.cost:,.2f} at {advice.price_per_gpu_hour:g} an hour"
        rows.append(("GPU-hours", f"{advice.gpu_hours:,.3g}{cost}"))
    rows.append(("checkpoint", _checkpoint(advice, plan)))
    return rows


def _checkpoint(advice: Advice, plan: Plan) -> str:
    every = advice.checkpoint_every_steps
    text = f"{format_bytes(advice.checkpoint_bytes)} each, {format_bytes(advice.checkpoint_disk_bytes)} of disk a host"
    if plan.tokens_per_second is None:
        return text + (f"; every {every:,} steps" if every else "; at the end only")
    step = plan.tokens_per_step / plan.tokens_per_second
    text += (
        f"; training waits {format_duration(advice.checkpoint_stall_seconds)}, the disk is busy for"
        f" {format_duration(advice.checkpoint_write_seconds)}"
    )
    if every is None:
        text += "; at the end only"
    else:
        share = advice.checkpoint_stall_seconds / (every * step + advice.checkpoint_stall_seconds)
        text += f"; every {every:,} steps = {format_duration(every * step)}, {share:.1%} of the time"
    advised = advice.checkpoint_advised_steps
    if advised is not None and advised < plan.steps and every != advised:
        text += f"; every {advised:,} steps = {format_duration(advised * step)} would lose least to failures"
    return text
