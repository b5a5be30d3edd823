"""docs/incidents.md names every incident that the code can record, and every option with its default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from finlm.recipe.schema import Launch
from finlm.recipe.schema_data import Section
from finlm.recipe.schema_train import Incidents

from helpers import ROOT

PAGES = [ROOT / "docs/incidents.md", ROOT / "docs/incidents.zh-CN.md"]
# What records one: the place of `what` in each call's arguments.
CALLS = {"Incident": 0, "RunFailed": 0, "_skip": 1, "note": 1}
LAUNCH = ("start_minutes", "stall_minutes", "outage_seconds", "grace_seconds", "restarts", "restart_wait_seconds")


def recorded() -> Iterator[str]:
    """A pattern for each text that becomes the `what` of an incident row, read from the source."""
    for path in sorted([*(ROOT / "src/finlm/train").rglob("*.py"), *(ROOT / "src/finlm/launch").glob("*.py")]):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                yield from _of(function)


def _of(function: ast.FunctionDef) -> Iterator[str]:
    variables = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    several = [node.value for node in ast.walk(function) if _is_problem(node) and isinstance(node, ast.Assign)]
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        records = name in ("record", "record_event", "append_event")
        found = [word.value for word in node.keywords if word.arg == "what" and records]
        found += node.args[CALLS[name] : CALLS[name] + 1] if name in CALLS else []
        for value in found:
            named = isinstance(value, ast.Name)
            for text in several if named and several else [variables.get(value.id, value) if named else value]:
                if pattern := _pattern(text):
                    yield pattern


def _is_problem(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "problem" for t in node.targets)


def _pattern(text: ast.expr) -> str:
    """A regular expression for a string or f-string; empty for anything else."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return re.escape(text.value)
    if isinstance(text, ast.JoinedStr):
        parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in text.values]
        return "".join(parts)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_incident_of_the_code_is_on_the_page_and_no_other(page: Path) -> None:
    cells = re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8").partition("\n## ")[2], re.MULTILINE)
    told = [cell for cell in cells if not re.match(r"(incidents|launch)\.", cell)]
    patterns = set(recorded())
    assert len(patterns) > 15
    missing = [pattern for pattern in patterns if not any(re.fullmatch(pattern, cell) for cell in told)]
    unknown = [cell for cell in told if not any(re.fullmatch(pattern, cell) for pattern in patterns)]
    assert (missing, unknown) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_is_on_the_page_with_its_default(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wanted = [*_defaults(Incidents(), "incidents"), *((f"launch.{key}", getattr(Launch(), key)) for key in LAUNCH)]
    rows = [f"| `{key}` | {f'`{value}`' if isinstance(value, str) else f'{value:g}'} |" for key, value in wanted]
    assert [row for row in rows if row not in text] == []


def _defaults(section: Section, prefix: str) -> Iterator[tuple[str, str | float]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _defaults(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value
