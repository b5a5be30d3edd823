"""A plan for people: the table that `plan` and `train` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from finlm.base import screen
from finlm.base.secrets import redact_key
from finlm.base.units import format_bytes, format_count, format_duration, format_rate
from finlm.plan import advice
from finlm.plan.consult import Consulted
from finlm.plan.gpus import Gpu
from finlm.plan.plan import Plan
from finlm.recipe.recipe import Loaded


def plan(made: Plan, loaded: Loaded) -> None:
    """Print the decisions, the memory, the time and the reasons."""
    screen.heading(f"plan of {loaded.path}")
    for name, value in _rows(made):
        screen.say(f"  {name:<10} {value}")
    if made.gpu_bytes_items:
        per = "GPU" if made.device == "cuda" else "rank"
        screen.heading(f"memory per {per}: {format_bytes(made.gpu_bytes)} of {format_bytes(made.gpu_memory_bytes)}")
        screen.say("  " + _items(made.gpu_bytes_items))
        disk = f", and {format_bytes(made.nvme_bytes)} on its NVMe disk" if made.nvme_bytes else ""
        screen.heading(f"memory per host: {format_bytes(made.host_bytes)}{disk}")
        screen.say("  " + _items(made.host_bytes_items))
    screen.heading("why")
    for reason in made.reasons:
        screen.say(f"  - {reason}")


def origins(loaded: Loaded) -> None:
    """Print every value that is not a default, and the line it comes from."""
    screen.heading("values written")
    for key, where in loaded.origins.items():
        screen.say(f"  {key} = {redact_key(key, _value(loaded, key))}   ({where})")


def consulted(found: Consulted, made: Plan) -> None:
    """Print epochs, cost, checkpoints, the other candidates, and what would be faster."""
    screen.heading("what it means")
    for name, value in advice.sentences(found.advice, made):
        screen.say(f"  {name:<10} {value}")
    if len(found.options) > 1:
        screen.heading("the best candidates")
        for one in found.options:
            settings = (
                f"ZeRO-{one.zero_stage}, offload {one.offload_optimizer}/{one.offload_param}, recompute"
                f" {one.recompute}, {one.micro_batch} rows x {one.gradient_accumulation_steps}"
            )
            screen.say(
                f"  {settings:<58} {format_bytes(one.gpu_bytes):>10} {one.tokens_per_second or 0:>11,.0f} tokens/s"
                f"   {one.verdict}"
            )
    if found.changes:
        screen.heading("what would make it faster")
        for change in found.changes:
            screen.say(f"  {change.times:>5.2f} times  {change.what}: {change.tokens_per_second:,.0f} tokens/s")


def calibrated(found: Sequence[Gpu], where: Path) -> None:
    """Print what was measured and where it lies."""
    for gpu in found:
        screen.say(
            f"{gpu.name}: {format_bytes(gpu.memory_bytes)}, peak {gpu.peak_flops / 1e12:.0f} TFLOP/s, of which a"
            f" 7B model reaches {gpu.mfu:.0%}, PCIe {gpu.pcie_bytes_per_second / 1e9:.0f} GB/s, {gpu.link}"
            f" {gpu.link_bytes_per_second / 1e9:.0f} GB/s"
        )
    screen.say(f"stored in {where}; delete the file to go back to finlm's own table")


def _items(items: Mapping[str, int]) -> str:
    largest = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)


def _rows(made: Plan) -> list[tuple[str, str]]:
    unequal = len(set(made.rank_micro_batches)) > 1
    each = (
        f"{host.name}: {host.slots} x {host.gpu or 'CPU rank'}" + f" (micro-batch {host.micro_batch})" * unequal
        for host in made.hosts[:4]
    )
    hosts = ", ".join(each)
    hosts += f", ... {len(made.hosts)} hosts" if len(made.hosts) > 4 else ""
    tokens = made.steps * made.tokens_per_step
    offload = f"optimizer {made.offload_optimizer}, parameters {made.offload_param}"
    micro_steps = made.gradient_accumulation_steps
    factors = f"{made.world_size} ranks x {micro_steps} micro-steps x {made.micro_batch} rows"
    if unequal:
        factors = f"{micro_steps} micro-steps x {sum(made.rank_micro_batches)} rows of all ranks"
    factors += f" x {made.sequence_length} tokens"
    rows = [
        ("hosts", hosts),
        ("model", f"{format_count(made.parameters)} parameters, vocabulary {made.vocab_size:,}"),
        ("precision", f"{made.precision}, gradients added up in fp32" if made.fp32_gradients else made.precision),
        ("ZeRO", f"stage {made.zero_stage}, offload {offload}"),
        ("batch", f"{made.tokens_per_step:,} tokens = {factors}"),
        ("recompute", made.recompute),
        (
            "length",
            f"{made.steps:,} steps = {format_count(tokens)} tokens = "
            f"{format_rate(tokens / made.parameters)} per parameter",
        ),
    ]
    if made.tokens_per_second is not None and made.days is not None:
        rows.append(("time", f"{format_duration(made.days * 86400)} at {made.tokens_per_second:,.0f} tokens/s"))
        named = {"overlapped": "transfers beside it", "exposed": "transfers after it"}
        parts = (f"{named.get(name, name)} {value:.3g}" for name, value in made.step_seconds.items() if value >= 5e-4)
        seconds = made.tokens_per_step / made.tokens_per_second
        rows.append(("a step", f"{seconds:.3g} seconds: {', '.join(parts)}"))
    return rows


def _value(loaded: Loaded, key: str) -> object:
    """The value at a dotted key; names in a mapping may be numbers (expect.loss) and hold dots (hosts)."""
    value: object = loaded.recipe
    rest = key.replace("[", ".").replace("]", "")
    while rest:
        if isinstance(value, dict):
            names = {str(name): name for name in value}
            part = max((name for name in names if f"{rest}.".startswith(f"{name}.")), key=len)
            value = value[names[part]]
        elif isinstance(value, tuple) and not rest[0].isdigit():  # one written for a list of one (data.mixture)
            (value,) = value
            continue
        else:
            part = rest.partition(".")[0]
            value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
        rest = rest[len(part) + 1 :]
    return _written(value)


def _written(value: object) -> object:
    """Without the defaults, as YAML would have it."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True, mode="json")
    return [_written(one) for one in value] if isinstance(value, tuple) else value
