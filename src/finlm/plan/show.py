"""A plan for people: the table that `plan` and `train` print."""

from __future__ import annotations

from finlm.base import screen
from finlm.base.units import format_bytes, format_count, format_duration
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
        items = sorted(made.gpu_bytes_items.items(), key=lambda item: -item[1])
        screen.say("  " + ", ".join(f"{name} {format_bytes(size)}" for name, size in items if size))
    screen.heading("why")
    for reason in made.reasons:
        screen.say(f"  - {reason}")


def origins(loaded: Loaded) -> None:
    """Print every value that is not a default, and the line it comes from."""
    screen.heading("values written")
    for key, where in loaded.origins.items():
        screen.say(f"  {key} = {_value(loaded, key)}   ({where})")


def _rows(made: Plan) -> list[tuple[str, str]]:
    hosts = ", ".join(f"{host.name}: {host.slots} x {host.gpu or 'CPU rank'}" for host in made.hosts[:4])
    hosts += f", ... {len(made.hosts)} hosts" if len(made.hosts) > 4 else ""
    tokens = made.steps * made.tokens_per_step
    offload = f"optimizer {made.offload_optimizer}, parameters {made.offload_param}"
    micro_steps = made.gradient_accumulation_steps
    factors = (
        f"{made.world_size} ranks x {micro_steps} micro-steps x {made.micro_batch} rows x {made.sequence_length} tokens"
    )
    rows = [
        ("hosts", hosts),
        ("model", f"{format_count(made.parameters)} parameters, vocabulary {made.vocab_size:,}"),
        ("precision", made.precision),
        ("ZeRO", f"stage {made.zero_stage}, offload {offload}"),
        ("batch", f"{made.tokens_per_step:,} tokens = {factors}"),
        ("recompute", made.recompute),
        (
            "length",
            f"{made.steps:,} steps = {format_count(tokens)} tokens = {tokens / made.parameters:.2g} per parameter",
        ),
    ]
    if made.tokens_per_second is not None and made.days is not None:
        rows.append(("time", f"{format_duration(made.days * 86400)} at {made.tokens_per_second:,.0f} tokens/s"))
    return rows


def _value(loaded: Loaded, key: str) -> object:
    value: object = loaded.recipe
    for part in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value
