"""One page of several runs: their curves in the same charts, what came out, and the recipe keys in which they differ.

Made from the run directories alone, like report.html, and as self-contained. Runs are told apart by the name of their
directory without what all have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_key
from finlm.recipe.recipe import WORDS, is_within
from finlm.record import curves, page, report_details
from finlm.record import history as histories
from finlm.record.history import History, Points, is_number
from finlm.record.page import Html, element, join

COLOURS = 6  # .run0 to .run5 in report.css, distinguishable with red-green blindness


@dataclass(frozen=True)
class Run:
    """A run under the name it has on the page."""

    name: str
    directory: RunDir
    history: History
    recipe: dict[str, Any]


def build(runs: Sequence[RunDir], out: Path) -> Path:
    """Write the page. Raises UserError for more runs than there are colours, or the same run twice."""
    paths = [run.path.resolve() for run in runs]
    if len(runs) > COLOURS or len(set(paths)) < len(paths):
        raise UserError(
            f"cannot show {len(runs)} runs on one page" if len(runs) > COLOURS else "the same run is named twice",
            evidence=", ".join(path.name for path in paths),
            fix=f"name two to {COLOURS} different run directories",
        )
    loaded = [
        Run(name, run, histories.read(run), report_details.values(run))
        for name, run in zip(_names([path.name for path in paths]), runs, strict=True)
    ]
    sections = [
        element("section", _outcomes(loaded), id="summary"),
        page.charts(),
        _differences(loaded),
    ]
    title = f"{len(loaded)} runs side by side"
    values = {
        "title": page.escape(f"{title} · finlm"),
        "style": page.asset("report.css"),
        "script": page.asset("report.js"),
        "header": join(
            [element("h1", title), element("p", ", ".join(path.name for path in paths), class_="lead")]
        ).text,
        "body": join(sections).text,
        "data": page.data({"charts": list(_charts(loaded))}),
        "built": page.escape(page.moment(time.time())),
    }
    files.write_text(out, page.fill("report.html", values))
    return out


def _names(names: Sequence[str]) -> list[str]:
    """What tells the names apart: a-1121-0858, a-1121-1212 -> 0858, 1212; a-1121-0858, b-1121-1212 -> a, b."""
    parts = [name.split("-") for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({tuple(part[:-1]) for part in parts}) == len(parts):
        parts = [part[:-1] for part in parts]
    return ["-".join(part) for part in parts]


def _outcomes(runs: Sequence[Run]) -> Html:
    """A line a measure, a column a run."""
    lines: list[tuple[str, Callable[[Run], str | None]]] = [
        ("Steps", lambda run: page.count(run.history.last("step"))),
        ("Tokens", lambda run: page.short(sum(run.history.values("tokens")) or None)),
        ("Training loss, last", lambda run: page.digits(run.history.last("loss"))),
        ("Held-out loss at start", lambda run: page.digits(histories.first_and_last(run.history.evals)[0].get("loss"))),
        ("Held-out loss at end", lambda run: page.digits(histories.first_and_last(run.history.evals)[1].get("loss"))),
        *((f"… {name}", _source_loss(name)) for name in _sources(runs)),
        ("Tokens a second, median", lambda run: page.short(run.history.median("tokens_per_second"))),
        ("MFU, median", lambda run: page.percent(run.history.median("mfu"))),
        ("Peak memory of a rank", lambda run: page.size(max(run.history.values("memory_bytes"), default=None))),
        ("Wall time", lambda run: page.duration(run.history.wall_seconds)),
        ("Incidents", lambda run: page.count(len(run.history.incidents))),
    ]
    rows = [(label, *(show(run) for run in runs)) for label, show in lines]
    return page.table(("", *(run.name for run in runs)), [row for row in rows if any(row[1:])])


def _sources(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.history.held_out()))


def _source_loss(name: str) -> Callable[[Run], str | None]:
    def show(run: Run) -> str | None:
        points = run.history.held_out().get(name)
        return page.digits(points[-1][1]) if points else None

    return show


def _charts(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A chart a measure, a line a run."""
    measures: list[tuple[str, Callable[[History], Points], bool]] = [
        ("Training loss, smoothed", lambda history: curves.smooth(history.points("loss")), False),
        ("Held-out loss", _held_out, False),
        ("Learning rate", lambda history: history.points("lr"), True),
        ("Gradient norm, smoothed", lambda history: curves.smooth(history.points("grad_norm")), True),
        ("Tokens a second, smoothed", lambda history: curves.smooth(history.points("tokens_per_second")), True),
    ]
    for title, points_of, zero in measures:
        found = [(number, run.name, points_of(run.history)) for number, run in enumerate(runs)]
        series = [
            {"name": name, "style": f"run{number}", "points": curves.columns(curves.reduce(points))}
            for number, name, points in found
            if points
        ]
        if series:
            yield {"title": title, "series": series, "zero": zero, "marks": title == "Held-out loss"}


def _held_out(history: History) -> Points:
    return [(row["step"], row["loss"]) for row in history.evals if is_number(row.get("loss"))]


def _differences(runs: Sequence[Run]) -> Html:
    """The keys of the resolved recipes that are not equal in all of them."""
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe if not is_within(key, WORDS)))
    rows = []
    for key in keys:
        values = [run.recipe.get(key) for run in runs]
        if any(value != values[0] for value in values[1:]):
            rows.append((key, *(None if value is None else str(redact_key(key, value)) for value in values)))
    if not rows:
        return page.section("Recipes", "recipe", element("p", "The resolved recipes are equal.", class_="quiet"))
    table = element("div", page.table(("Key", *(run.name for run in runs)), rows, text=1 + len(runs)), class_="sides")
    return page.section("Recipes", "recipe", table, note="The keys whose values are not the same in all runs.")
