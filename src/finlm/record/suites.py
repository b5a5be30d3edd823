"""The section of a report about multiple-choice questions: the newest result of each suite and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finlm.record import page
from finlm.record.page import Html

Row = Mapping[str, Any]


def section(rows: Sequence[Row]) -> Html | None:
    """A line a suite, the subjects folded below; None where no suite was asked."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        newest[(row.get("suite"), row.get("mode"), row.get("shots"), row.get("model"))] = row
    if not newest:
        return None
    head = ("Suite", "Mode", "Model", "Examples", "Questions", "Macro", "95 %", "Micro", "95 %", "Unanswered")
    table = page.table(head, [_line(row) for row in newest.values()], text=3)
    folded = [_subjects(row) for row in newest.values()]
    note = "Macro is the mean of the subjects, micro of all questions; four choices, so chance is 25 %."
    return page.section("Multiple choice", "suites", table, *folded, note=note)


def _line(row: Row) -> tuple[Any, ...]:
    about = row.get("set") or {}
    suite = f"{row.get('suite')}{' (not the released set)' if about.get('released') is False else ''}"
    return (
        suite,
        row.get("mode"),
        row.get("model"),
        page.count(row.get("shots")),
        page.count(row.get("questions")),
        page.percent(row.get("macro")),
        _interval(row.get("macro_interval")),
        page.percent(row.get("micro")),
        _interval(row.get("micro_interval")),
        page.count(row.get("unanswered")),
    )


def _subjects(row: Row) -> Html:
    lines = [
        (name, page.count(item.get("total")), page.percent(item.get("accuracy")), _interval(item.get("interval")))
        for name, item in (row.get("subjects") or {}).items()
    ]
    title = f"{row.get('suite')}, {row.get('mode')}, by subject"
    return page.folded(title, page.table(("Subject", "Questions", "Accuracy", "95 %"), lines))


def _interval(bounds: Any) -> str | None:
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return None
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"
