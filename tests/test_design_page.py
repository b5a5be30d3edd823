"""docs/design.md: its table of rows is what the code records, its modules are those there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir

from helpers import ROOT

PAGES = [ROOT / "docs/design.md", ROOT / "docs/design.zh-CN.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def table(page: Path) -> dict[str, set[str]]:
    """The keys of each kind of row."""
    part = page.read_text(encoding="utf-8").partition("## events.jsonl")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| .* \|$", part, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", keys)) for kind, keys in rows}


def recorded() -> dict[str, set[str]]:
    """Kinds, and the keys that are written out, of every call in the code that records a row."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src/finlm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) in ("append_event", "record", "record_event"):
                kinds = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
                for kind in kinds[:1]:
                    found.setdefault(str(kind), set()).update(word.arg for word in node.keywords if word.arg)
    return found


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


@every_page
def test_every_kind_of_row_is_on_the_page_with_its_keys(page: Path) -> None:
    rows = table(page)
    assert set(rows) == set(recorded())
    assert {kind: keys - rows[kind] for kind, keys in recorded().items() if keys - rows[kind]} == {}


@pytest.mark.slow
def test_a_run_records_nothing_that_the_page_does_not_tell(finished: tuple[RunDir, str]) -> None:
    rows = table(PAGES[0])
    for row in finished[0].read_events():
        assert set(row) - {"kind", "time"} <= rows[row["kind"]], row["kind"]
        for source in (row.get("sources") or {}).values():
            assert set(source) <= rows[row["kind"]]


@every_page
def test_the_table_of_modules_names_every_package(page: Path) -> None:
    part = page.read_text(encoding="utf-8").partition("## ")[2].partition("\n## ")[0]
    packages = {path.parent.name for path in (ROOT / "src/finlm").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`([\w.]+)`", part))
