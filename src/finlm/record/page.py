"""HTML in small pieces: every text is escaped here, and a value that is not there is shown as an en dash.

Knows nothing about runs; report.py decides what is shown. The look is in report.css, the charts are in report.js.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from finlm.base import units

MISSING = "–"


@dataclass(frozen=True)
class Html:
    """Text that is HTML already; a plain str never is."""

    text: str


def escape(value: Any) -> str:
    """HTML of any value: Html as it is, None as an en dash, the rest escaped."""
    if isinstance(value, Html):
        return value.text
    return MISSING if value is None else html.escape(str(value))


def show(value: Any, how: Callable[[Any], str]) -> str | None:
    """A value in the given format; None stays None, and so does what is not of the expected type."""
    try:
        return None if value is None else how(value)
    except (TypeError, ValueError):
        return None


def count(value: Any) -> str | None:
    """1234567 -> '1,234,567'."""
    return show(value, lambda v: f"{v:,.0f}")


def short(value: Any) -> str | None:
    """2048000 -> '2.05M'."""
    return show(value, units.format_count)


def size(value: Any) -> str | None:
    """Bytes with a unit."""
    return show(value, units.format_bytes)


def duration(value: Any) -> str | None:
    """Seconds with a unit."""
    return show(value, units.format_duration)


def digits(value: Any, places: int = 4) -> str | None:
    """A number with fixed decimal places."""
    return show(value, lambda v: f"{v:,.{places}f}")


def percent(value: Any, places: int = 1) -> str | None:
    """0.123 -> '12.3 %'."""
    return show(value, lambda v: f"{100 * v:.{places}f} %")


def moment(value: Any) -> str | None:
    """Unix seconds as UTC date and time."""
    return show(value, lambda v: datetime.fromtimestamp(v, UTC).strftime("%Y-%m-%d %H:%M UTC"))


def period(first: Any, last: Any) -> str | None:
    """From when to when; the date once when it is the same."""
    begun, ended = moment(first), moment(last)
    if begun is None or ended is None:
        return begun
    return f"{begun.removesuffix(' UTC')} to {ended[11:] if ended[:10] == begun[:10] else ended}"


def element(tag: str, *content: Any, **attributes: str) -> Html:
    """<tag attributes>content</tag>; an attribute's trailing underscore is dropped (class_)."""
    names = "".join(f' {name.rstrip("_")}="{html.escape(value)}"' for name, value in attributes.items() if value)
    return Html(f"<{tag}{names}>{''.join(map(escape, content))}</{tag}>")


def join(parts: Iterable[Any], separator: str = "") -> Html:
    """Parts one after the other."""
    return Html(separator.join(map(escape, parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, text: int = 1, total: bool = False) -> Html:
    """A table; the first `text` columns are left-aligned, the others are numbers. `total` sets the last row apart."""
    kinds = ["text" if index < text else "number" for index in range(len(head))]
    titles = join(element("th", name, class_=kind, scope="col") for name, kind in zip(head, kinds, strict=True))
    lines = [join(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)) for row in rows]
    marks = ["total" if total and index == len(lines) - 1 else "" for index in range(len(lines))]
    body = join(element("tr", line, class_=mark) for line, mark in zip(lines, marks, strict=True))
    inner = join([element("thead", element("tr", titles)), element("tbody", body)])
    return element("div", element("table", inner), class_="scroll", tabindex="0")


def pairs(rows: Iterable[tuple[str, Any]]) -> Html:
    """A list of names and values."""
    return element("dl", join(element("div", element("dt", name), element("dd", value)) for name, value in rows))


def section(title: str, identity: str, *content: Any, note: str = "") -> Html:
    """A titled part of the page."""
    under = element("p", note, class_="note") if note else ""
    return element("section", element("h2", title), under, *content, id=identity)


def charts() -> Html:
    """Where report.js draws what page.data holds."""
    note = "Drag across a chart to zoom, double-click to go back; all charts follow."
    return section("Curves", "curves", element("div", "", id="charts"), note=note)


def folded(title: str, *content: Any, is_open: bool = False) -> Html:
    """A part that opens on a click."""
    body = element("details", element("summary", title), *content)
    return Html(body.text.replace("<details>", "<details open>", 1)) if is_open else body


def code(text: str) -> Html:
    """Preformatted text."""
    return element("pre", element("code", text))


def data(value: Any) -> str:
    """JSON that cannot end its <script> element; non-finite numbers become null before they get here."""
    packed = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return packed.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fill(template: str, values: Mapping[str, str]) -> str:
    """The package file `template` with every {{name}} replaced, once: braces inside values stay as they are."""
    text = asset(template)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def asset(name: str) -> str:
    """A file beside this module."""
    return resources.files("finlm.record").joinpath(name).read_text(encoding="utf-8")
