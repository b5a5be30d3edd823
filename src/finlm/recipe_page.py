"""What a new recipe needs beside it: README.md with the plan's numbers, and its committed DeepSpeed settings.

Written once, by `finlm new`; afterwards they are the author's, and tests/test_recipes.py says where they are behind.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from finlm import config
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.units import format_bytes, format_count, format_duration
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe

SCRIPTS = {"pretrain": "pretrain_run.sh", "sft": "sft_run.sh"}


def write(path: Path, parent: Path) -> list[Path]:
    """A part of README.md beside the recipe and, in a checkout, configs/ds/; the files written."""
    wanted = recipe.load(path).recipe
    settings = Path("configs/ds") / f"{path.parent.name}-{path.stem}.json"
    plan: Plan | None = None
    with contextlib.suppress(UserError):  # its data or its parent may not be here yet
        plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
    has_settings = plan is not None and settings.parent.is_dir() and path.parent.parent == Path("recipes")
    page = path.parent / "README.md"
    before = page.read_text(encoding="utf-8").rstrip() + "\n\n#" if page.exists() else ""
    title = wanted.name if before else path.parent.name
    lines = _lines(path, parent, settings if has_settings else None, wanted, plan)
    files.write_text(page, f"{before}# {title}\n\n" + "\n".join(lines) + "\n")
    written = [page]
    if plan is not None and has_settings:
        files.write_text(settings, json.dumps(config.deepspeed(wanted, plan), ensure_ascii=False, indent=2) + "\n")
        written.append(settings)
    return written


def program() -> str:
    """What starts finlm when it is typed here: `finlm` where it is on the path."""
    interpreter = Path(sys.executable)
    shown = interpreter.relative_to(Path.cwd()) if interpreter.is_relative_to(Path.cwd()) else interpreter
    return "finlm" if shutil.which("finlm") else f"{shown} -m finlm"


def train_command(path: Path) -> str:
    """How a recipe is run: by its stage's script where there is one."""
    script = Path("scripts") / SCRIPTS.get(recipe.load(path).recipe.stage, "")
    return f"bash {script} {path}" if script.is_file() else f"python -m finlm train {path}"


def _lines(path: Path, parent: Path, settings: Path | None, wanted: Recipe, plan: Plan | None) -> Iterator[str]:
    yield f"Made from `{parent}` by `finlm new`."
    yield f"`python -m finlm diff {path}` says what differs and what follows."
    yield from ("", "```", f"python -m finlm plan {path}", train_command(path), "```", "", "| | |", "|---|---|")
    hosts = (f"{host.count * host.slots} x {host.gpu or 'CPU rank'}" for host in wanted.hardware.hosts)
    yield f"| hardware | {', '.join(hosts)} |"
    if plan is not None:
        yield from _planned(plan)
    yield "| measured | not yet |"
    if settings is not None:
        yield f"| DeepSpeed settings | `{settings}` |"
    yield ""
    yield f"Chosen by us: everything that differs from `{parent}`."
    yield "Say here why, what came out, and on which hardware."


def _planned(plan: Plan) -> Iterator[str]:
    rows = f"micro-batch {plan.micro_batch}, {plan.tokens_per_step:,} tokens a step"
    yield f"| plan | {plan.precision}, ZeRO-{plan.zero_stage}, {rows} |"
    of = f" of {format_bytes(plan.gpu_memory_bytes)} a GPU" if plan.device != "cpu" else " a rank"
    yield f"| memory (plan) | {format_bytes(plan.gpu_bytes)}{of} |"
    length = f"{plan.steps:,} steps, {format_count(plan.steps * plan.tokens_per_step)} tokens"
    if plan.days is not None and plan.tokens_per_second is not None:
        time = f"{format_duration(plan.days * 86400)} at {plan.tokens_per_second:,.0f} tokens/s"
        yield f"| time (plan) | {time}, {length} |"
    else:
        yield f"| length (plan) | {length} |"
