"""Print a plan for people: decisions, memory, time and reasons; then advice and the best candidates side by side.

For two recipes and their plans (`finlm diff`), print what the recipes say differently, and what follows. Of the
candidates that differ only in their micro-batch the fastest that fits stands for all, or the smallest if none fits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finlm.base import screen
from finlm.base.secrets import redact_key
from finlm.base.units import format_bytes, format_count, format_duration, format_items, format_rate
from finlm.plan import advice, planner, search
from finlm.plan.advice import Change
from finlm.plan.gpus import Gpu
from finlm.plan.plan import Plan
from finlm.plan.search import Candidate
from finlm.recipe import rules
from finlm.recipe import shape as shapes
from finlm.recipe.cluster import Cluster
from finlm.recipe.recipe import Loaded
from finlm.recipe.rules import ABSENT, recipe_differences
from finlm.recipe.schema import Recipe


def print_plan(made: Plan, loaded: Loaded) -> None:
    """Print decisions, memory, time, reasons, and which hosts may fail. Raises UserError for an unknown model type."""
    screen.heading(f"plan of {loaded.path}")
    lost = advice.losable_hosts(loaded.recipe, shapes.of(loaded.recipe, made.vocab_size), made)
    for name, value in [*rows(made), *([("may fail", lost)] if lost else [])]:
        screen.show(f"  {name:<10} {value}")
    if made.gpu_bytes_items:
        per = "GPU" if made.device == "cuda" else "rank"
        screen.heading(f"memory per {per}: {format_bytes(made.gpu_bytes)} of {format_bytes(made.gpu_memory_bytes)}")
        screen.show("  " + format_items(made.gpu_bytes_items))
        disk = f", and {format_bytes(made.nvme_bytes)} on its NVMe disk" if made.nvme_bytes else ""
        screen.heading(f"memory per host: {format_bytes(made.host_bytes)}{disk}")
        screen.show("  " + format_items(made.host_bytes_items))
    screen.heading("why")
    for reason in made.reasons:
        screen.show(f"  - {reason}")


def print_origins(loaded: Loaded) -> None:
    """Print to stdout every written value and the line it comes from; credentials are masked."""
    screen.heading("values written")
    for key, where in loaded.origins.items():
        screen.show(f"  {key} = {redact_key(key, _value(loaded, key))}   ({where})")


def print_advice(consulted: Consulted, made: Plan) -> None:
    """Print to stdout epochs, cost, checkpoints, the other candidates, and what would be faster."""
    screen.heading("what it means")
    for name, value in advice.sentences(consulted.advice, made):
        screen.show(f"  {name:<10} {value}")
    if len(consulted.options) > 1:
        screen.heading("the best candidates")
        for option in consulted.options:
            rows_of_rank = f"{option.micro_batch} rows x {option.gradient_accumulation_steps}"
            offload = f"offload {option.offload_optimizer}/{option.offload_param}"
            settings = f"ZeRO-{option.zero_stage}, {offload}, recompute {option.recompute}, {rows_of_rank}"
            speed = f"{option.tokens_per_second or 0:>11,.0f} tokens/s"
            screen.show(f"  {settings:<58} {format_bytes(option.gpu_bytes):>10} {speed}   {option.verdict}")
    if consulted.changes:
        screen.heading("what would make it faster")
        for change in consulted.changes:
            screen.show(f"  {change.times:>5.2f} times  {change.what}: {change.tokens_per_second:,.0f} tokens/s")


def print_calibrated(kinds: Sequence[Gpu], where: Path) -> None:
    """Print to stdout the measured GPU kinds and `where`, the file in which they are stored."""
    for gpu in kinds:
        screen.show(
            f"{gpu.name}: {format_bytes(gpu.memory_bytes)}, peak {gpu.peak_flops / 1e12:.0f} TFLOP/s, of which a"
            f" 7B model reaches {gpu.mfu:.0%}, PCIe {gpu.pcie_bytes_per_second / 1e9:.0f} GB/s, {gpu.link}"
            f" {gpu.link_bytes_per_second / 1e9:.0f} GB/s"
        )
    screen.show(f"stored in {where}; delete the file to go back to finlm's own table")


def rows(made: Plan) -> list[tuple[str, str]]:
    """Return the (name, value) rows, both text, of the plan's decisions, speed and time."""
    unequal = len(set(made.rank_micro_batches)) > 1
    hosts = ", ".join(
        f"{host.name}: {host.slots} x {host.gpu or 'CPU rank'}" + f" (micro-batch {host.micro_batch})" * unequal
        for host in made.hosts[:4]
    )
    hosts += f", ... {len(made.hosts)} hosts" if len(made.hosts) > 4 else ""
    tokens = made.steps * made.tokens_per_step
    micro_steps = made.gradient_accumulation_steps
    factors = f"{made.world_size} ranks x {micro_steps} micro-steps x {made.micro_batch} rows"
    if unequal:
        factors = f"{micro_steps} micro-steps x {sum(made.rank_micro_batches)} rows of all ranks"
    factors += f" x {made.sequence_length} tokens"
    length = f"{made.steps:,} steps = {format_count(tokens)} tokens = {format_rate(tokens / made.parameters)}"
    rows = [
        ("hosts", hosts),
        ("model", f"{format_count(made.parameters)} parameters, vocabulary {made.vocab_size:,}"),
        ("precision", f"{made.precision}, gradients added up in fp32" if made.fp32_gradients else made.precision),
        ("ZeRO", f"stage {made.zero_stage}, offload {_offload(made)}"),
        ("batch", f"{made.tokens_per_step:,} tokens = {factors}"),
        ("recompute", made.recompute),
        ("length", f"{length} per parameter"),
    ]
    if made.generation_rows:
        answers = f"{made.generation_rows} of a rank's {made.micro_batch * micro_steps} at once"
        rows.append(("answers", f"{answers}: {format_items(made.generation_bytes_items)}"))
    if made.tokens_per_second is not None and made.days is not None:
        rows.append(("time", f"{format_duration(made.days * 86400)} at {made.tokens_per_second:,.0f} tokens/s"))
        named = {"overlapped": "transfers beside it", "exposed": "transfers after it"}
        parts = (f"{named.get(name, name)} {value:.3g}" for name, value in made.step_seconds.items() if value >= 5e-4)
        seconds = made.tokens_per_step / made.tokens_per_second
        rows.append(("a step", f"{seconds:.3g} seconds: {', '.join(parts)}"))
    return rows


def _value(loaded: Loaded, key: str) -> object:
    """Return the value at a dotted key of a recipe, as JSON-able values; sections without their defaults.

    [i] is read as .i; the index of the only item of a tuple may be missing.
    """
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
    return _without_defaults(value)


def _without_defaults(value: object) -> object:
    """Return sections as dicts without values that are defaults; other values are returned unchanged."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True, mode="json")
    return [_without_defaults(each) for each in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Consulted:
    """Everything that `finlm plan` adds to a plan: advice, the best candidates, and changes that would be faster."""

    advice: advice.Advice
    options: list[Option]
    changes: list[Change]

    def to_json(self) -> dict[str, object]:
        """Return the keys that `plan --json` has beside the plan's."""
        return dataclasses.asdict(self)


def consult(
    recipe: Recipe, cluster: Cluster, plan: Plan, epoch_tokens: int | None = None, price: float | None = None
) -> Consulted:
    """Return the plan's advice, its best candidates and what would be faster; only advice on CPU or when nothing fits.

    `epoch_tokens` are the tokens of one epoch of the prepared data, None if unknown. `price` is that of a GPU-hour,
    None for the recipe's. Raises UserError for an unknown model type, PlanError for an unknown GPU kind.
    """
    shape = shapes.of(recipe, plan.vocab_size)
    chosen = planner.fastest(recipe, cluster, shape)
    said = advice.make_advice(recipe, shape, plan, epoch_tokens, price)
    if chosen is None or cluster.is_cpu:
        return Consulted(said, [], [])
    free = planner.list_candidates(search.relax_recipe(recipe), cluster, shape)
    changes = advice.faster_changes(recipe, cluster, chosen, lambda other, hosts: planner.fastest(other, hosts, shape))
    return Consulted(said, _best_options(free, chosen), changes)


MOST_OPTIONS = 5


@dataclass(frozen=True)
class Option:
    """A candidate in numbers, and its verdict in words."""

    zero_stage: int
    offload_optimizer: str
    offload_param: str
    recompute: str
    micro_batch: int
    gradient_accumulation_steps: int
    gpu_bytes: int
    host_bytes: int
    tokens_per_second: float | None
    fits: bool
    verdict: str


def _best_options(candidates: Iterable[Candidate], chosen: Candidate) -> list[Option]:
    """Return at most 5 options: the chosen candidate, the fastest others that fit, and faster ones that do not fit.

    Of candidates that differ only in their micro-batch, the best that fits stands for all, else the nearest to fitting.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for each in candidates:
        layout = each.layout
        key = (layout.zero_stage, layout.offload_optimizer, layout.offload_param, layout.recompute)
        groups.setdefault(key, []).append(each)
    mine = chosen.layout
    groups.pop((mine.zero_stage, mine.offload_optimizer, mine.offload_param, mine.recompute), None)
    stand = []
    for group in groups.values():
        able = [each for each in group if each.fits]
        stand.append(search.best(able) if able else min(group, key=lambda each: each.over))
    fitting = sorted((each for each in stand if each.fits), key=lambda each: (not each.is_roomy, *_slowness(each)))
    faster = [each for each in stand if not each.fits and _slowness(each) < _slowness(chosen)]
    faster.sort(key=lambda each: each.over)
    kept = fitting[: MOST_OPTIONS - 1 - min(1, len(faster))]
    kept += faster[: MOST_OPTIONS - 1 - len(kept)]
    return [_option(each, chosen) for each in (chosen, *kept)]


def _slowness(candidate: Candidate) -> tuple[float, tuple[int, ...]]:
    """Return the key that sorts candidates from the fastest to the slowest; of equal speed, the simplest first."""
    return -(candidate.tokens_per_second or 0.0), candidate.complexity


def _option(candidate: Candidate, chosen: Candidate) -> Option:
    """Return the Option of a candidate, with its verdict beside `chosen`."""
    layout = candidate.layout
    return Option(
        zero_stage=layout.zero_stage,
        offload_optimizer=layout.offload_optimizer,
        offload_param=layout.offload_param,
        recompute=layout.recompute,
        micro_batch=layout.micro_batch,
        gradient_accumulation_steps=candidate.accumulation,
        gpu_bytes=candidate.gpu_bytes,
        host_bytes=candidate.host_bytes,
        tokens_per_second=candidate.tokens_per_second,
        fits=candidate.fits,
        verdict=_verdict(candidate, chosen),
    )


def _verdict(candidate: Candidate, chosen: Candidate) -> str:
    """Return in words why the candidate was taken, "taken" for `chosen` itself, or why it was not."""
    if candidate is chosen:
        return "taken"
    if not candidate.fits:
        need = ""
        if candidate.host_limit and candidate.host_bytes > candidate.host_limit:
            need = f"{format_bytes(candidate.host_bytes)} of {format_bytes(candidate.host_limit)} usable host memory"
        elif candidate.gpu_limit:
            need = f"{format_bytes(candidate.gpu_bytes)} of {format_bytes(candidate.gpu_limit)} a GPU"
        return f"does not fit: {need}" if need else "does not fit"
    if not candidate.tokens_per_second or not chosen.tokens_per_second:
        return "fits too; has more moving parts"
    times = candidate.tokens_per_second / chosen.tokens_per_second
    if not candidate.is_roomy and times > 1 - search.NEARLY_EQUAL:
        return "fits without a margin"
    if abs(times - 1) < search.NEARLY_EQUAL:
        return "as fast, with more moving parts" if candidate.complexity > chosen.complexity else "as fast"
    if times < 1:
        return f"{1 - times:.0%} slower"
    is_doubted = candidate.layout.offload_optimizer != "none" and chosen.layout.offload_optimizer == "none"
    return f"{times - 1:.0%} faster{', if the host keeps up' if is_doubted else ': the recipe says otherwise'}"


@dataclass(frozen=True)
class Consequence:
    """A number or decision that differs between two plans. `change` is b / a - 1 for numbers, else None."""

    name: str
    a: Any
    b: Any
    a_text: str
    b_text: str
    change: float | None


def _offload(plan: Plan) -> str:
    """Return "optimizer X, parameters Y"; X and Y are none, cpu or nvme."""
    return f"optimizer {plan.offload_optimizer}, parameters {plan.offload_param}"


_NUMBERS: tuple[tuple[str, Callable[[Plan], Any], Callable[[Any], str]], ...] = (
    ("time", lambda plan: plan.days, lambda days: format_duration(days * 86400)),
    ("speed", lambda plan: plan.tokens_per_second, "{:,.0f} tokens/s".format),
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
    """Return a Consequence for every number or decision of _NUMBERS in which plans `a` and `b` differ."""
    differing = []
    for name, of, shown in _NUMBERS:
        first, second = of(a), of(b)
        if first == second:
            continue
        texts = [ABSENT if value is None else shown(value) for value in (first, second)]
        numbers = isinstance(first, int | float) and isinstance(second, int | float) and first
        change = second / first - 1 if numbers else None
        differing.append(Consequence(name, first, second, texts[0], texts[1], change))
    return differing


def print_differences(names: tuple[str, str], values: list[Difference], follows: list[Consequence] | str) -> None:
    """Print the differing values of A and B, and what follows: Consequences, or a text why no plan could be made."""
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
    """Return a value and its origin as text for a table, ABSENT for None; lines of the file `path` only by number."""
    shown = ABSENT if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{shown}  ({origin.replace(f'{path}:', 'line ')})"


def _change(change: float | None) -> str:
    """Return a relative change as text, 0.05 as "+5.0 %" and above 1 as a factor, "x 3"; "" for None."""
    if change is None:
        return ""
    return f"x {change + 1:.3g}" if change > 1 else f"{100 * change:+.1f} %"


@dataclass(frozen=True)
class Difference:
    """A recipe key with two values; origins are "file:line", "--set" or "default".

    `changes_loss` is False for keys that only say how a run is carried out.
    """

    key: str
    a: Any
    b: Any
    a_origin: str
    b_origin: str
    changes_loss: bool


def compare_recipes(a: Loaded, b: Loaded) -> list[Difference]:
    """Return a Difference for every key whose value differs, in the schema's order; credentials are masked.

    Name, description, forked_from and expect are left out.
    """
    return [
        Difference(
            key,
            redact_key(key, first),
            redact_key(key, second),
            rules.origin_of(key, a.origins) or "default",
            rules.origin_of(key, b.origins) or "default",
            not rules.is_within(key, rules.SAME_LOSS),
        )
        for key, first, second in recipe_differences(a.recipe, b.recipe)
        if not rules.is_within(key, rules.WORDS)
    ]
