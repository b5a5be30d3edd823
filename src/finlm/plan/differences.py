"""What follows from a difference between two recipes: memory, time, tokens and the decisions behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finlm.base import screen
from finlm.base.units import format_bytes, format_count, format_duration
from finlm.plan.plan import Plan
from finlm.recipe.differences import ABSENT, Difference


@dataclass(frozen=True)
class Consequence:
    """One number or decision of the plan. change: b / a - 1 for numbers, None otherwise."""

    name: str
    a: Any
    b: Any
    a_text: str
    b_text: str
    change: float | None


def _duration(days: float) -> str:
    return format_duration(days * 86400)


def _per_second(tokens: float) -> str:
    return f"{tokens:,.0f} tokens/s"


def _offload(plan: Plan) -> str:
    return f"optimizer {plan.offload_optimizer}, parameters {plan.offload_param}"


# What it takes first, what was decided for it after.
_NUMBERS: tuple[tuple[str, Callable[[Plan], Any], Callable[[Any], str]], ...] = (
    ("time", lambda plan: plan.days, _duration),
    ("speed", lambda plan: plan.tokens_per_second, _per_second),
    ("memory of a rank", lambda plan: plan.gpu_bytes, format_bytes),
    ("memory of a host", lambda plan: plan.host_bytes, format_bytes),
    ("tokens", lambda plan: plan.steps * plan.tokens_per_step, format_count),
    ("steps", lambda plan: plan.steps, "{:,}".format),
    ("tokens a step", lambda plan: plan.tokens_per_step, "{:,}".format),
    ("parameters", lambda plan: plan.parameters, format_count),
    ("ranks", lambda plan: plan.world_size, str),
    ("micro-batch", lambda plan: plan.micro_batch, str),
    ("accumulation", lambda plan: plan.gradient_accumulation_steps, str),
    ("sequence", lambda plan: plan.sequence_length, "{:,}".format),
    ("vocabulary", lambda plan: plan.vocab_size, "{:,}".format),
    ("device", lambda plan: plan.device, str),
    ("precision", lambda plan: plan.precision, str),
    ("ZeRO stage", lambda plan: str(plan.zero_stage), str),
    ("offload", _offload, str),
    ("recompute", lambda plan: plan.recompute, str),
)


def between(a: Plan, b: Plan) -> list[Consequence]:
    """Every number or decision that differs."""
    found = []
    for name, of, shown in _NUMBERS:
        first, second = of(a), of(b)
        if first == second:
            continue
        texts = [ABSENT if value is None else shown(value) for value in (first, second)]
        numbers = isinstance(first, int | float) and isinstance(second, int | float) and first
        found.append(Consequence(name, first, second, texts[0], texts[1], second / first - 1 if numbers else None))
    return found


def show(names: tuple[str, str], values: list[Difference], follows: list[Consequence] | str) -> None:
    """Print both tables. follows: what kept a plan from being made, when it is a sentence."""
    for changes_loss, title in ((True, "what is trained"), (False, "how it is carried out")):
        rows = [row for row in values if row.changes_loss == changes_loss]
        if rows:
            screen.heading(title)
            screen.table(
                ("key", *names), [(row.key, _cell(row.a, row.a_origin), _cell(row.b, row.b_origin)) for row in rows]
            )
            screen.say()
    if not values:
        screen.say("both say the same")
    if isinstance(follows, str):
        screen.say(f"no plan to compare: {follows}")
    elif follows:
        screen.heading("what follows")
        lines = [(row.name, row.a_text, row.b_text, _change(row.change)) for row in follows]
        screen.table(("plan", *names, ""), lines)
    else:
        screen.say("the plan is the same")


def _cell(value: Any, origin: str) -> str:
    shown = ABSENT if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{shown}  ({origin})"


def _change(change: float | None) -> str:
    if change is None:
        return ""
    return f"x {change + 1:.3g}" if change > 1 else f"{100 * change:+.1f} %"
