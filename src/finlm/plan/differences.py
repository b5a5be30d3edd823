"""Compare two recipes and their plans for `finlm diff`: what they say differently, and what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finlm.base import screen
from finlm.base.screen import format_count
from finlm.base.secrets import redact_key
from finlm.base.units import format_bytes, format_duration
from finlm.plan.plan import Plan
from finlm.recipe import rules
from finlm.recipe.recipe import Loaded
from finlm.recipe.rules import ABSENT, differing


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


def compare_plans(a: Plan, b: Plan) -> list[Consequence]:
    """Return every number or decision in which two plans differ."""
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
    """Print the differing values and what follows of them; a string in `follows` is why no plan could be made."""
    for letter, name in zip("AB", names, strict=True):
        screen.show(f"{letter}  {name}")
    for changes_loss, title in ((True, "what is trained"), (False, "how it is carried out")):
        rows = [row for row in values if row.changes_loss == changes_loss]
        if rows:
            screen.heading(title)
            screen.table(
                ("key", "A", "B"),
                [(row.key, _cell(row.a, row.a_origin, names[0]), _cell(row.b, row.b_origin, names[1])) for row in rows],
            )
            screen.show()
    if not values:
        screen.show("both say the same")
    if isinstance(follows, str):
        screen.show(f"no plan to compare: {follows}")
    elif follows:
        screen.heading("what follows")
        lines = [(row.name, row.a_text, row.b_text, _change(row.change)) for row in follows]
        screen.table(("plan", "A", "B", ""), lines)
    else:
        screen.show("the plan is the same")


def _cell(value: Any, origin: str, path: str) -> str:
    """Return a value and its origin as a cell; lines of the file `path` are given by number."""
    shown = ABSENT if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{shown}  ({origin.replace(f'{path}:', 'line ')})"


def _change(change: float | None) -> str:
    if change is None:
        return ""
    return f"x {change + 1:.3g}" if change > 1 else f"{100 * change:+.1f} %"


@dataclass(frozen=True)
class Difference:
    """A recipe key with two values. Origins are "file:line", "--set" or "default".

    changes_loss is False for how a run is carried out.
    """

    key: str
    a: Any
    b: Any
    a_origin: str
    b_origin: str
    changes_loss: bool


def compare_recipes(a: Loaded, b: Loaded) -> list[Difference]:
    """Return every key whose value differs, in the schema's order; names, descriptions and promises are left out."""
    return [
        Difference(
            key,
            redact_key(key, first),
            redact_key(key, second),
            _origin(a, key),
            _origin(b, key),
            not rules.is_within(key, rules.SAME_LOSS),
        )
        for key, first, second in differing(a.recipe, b.recipe)
        if not rules.is_within(key, rules.WORDS)
    ]


def _origin(loaded: Loaded, key: str) -> str:
    """Return where the key's value was written: the key, what it is part of, or the first of its parts."""
    for known, where in loaded.origins.items():
        if known == key or _is_inside(key, known) or _is_inside(known, key):
            return where
    return "default"


def _is_inside(inner: str, outer: str) -> bool:
    return inner.startswith((f"{outer}.", f"{outer}["))


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
    """Return {recipe key: (old, new)} for what two plans chose differently."""
    before, after = decided_keys(old.to_json()), decided_keys(new.to_json())
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def decided_keys(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return {recipe key: value} for what a plan (as JSON) decides; unequal micro-batches by host."""
    values = {key: plan.get(name) for name, key in CHOICES.items() if name != "generation_rows" or plan.get(name)}
    rows = {host["name"]: host.get("micro_batch") for host in plan.get("hosts", ())}
    return values | ({"batch.micro_batch": rows} if len(set(rows.values())) > 1 else {})
