"""The data section of a report: documents by source, why some were dropped, lengths, how the run reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finlm.record import page
from finlm.record.page import Html, element

# Always shown; the others only where a document fell under them.
_USUAL = {"broken", "duplicate", "too_short", "equals_held_out", "held_out", "kept"}
_COUNTS = (
    ("Broken", "broken"),
    ("Cleaned away", "cleaned"),
    ("Perplexity", "perplexity"),
    ("In a benchmark", "contaminated"),
    ("Duplicate", "duplicate"),
    ("Near-duplicate", "near_duplicate"),
    ("Too short", "too_short"),
    ("As held out", "equals_held_out"),
    ("Near held out", "near_held_out"),
    ("Held out", "held_out"),
    ("Kept", "kept"),
)


def section(data: Mapping[str, Any]) -> Html | None:
    """The section of a run's data.json; None when it names no source."""
    documents, shards = data.get("documents") or {}, data.get("shards") or {}
    shown = [(title, key) for title, key in _COUNTS if key in _USUAL or any(row.get(key) for row in documents.values())]
    rows = [_row(name, row, shards.get(name) or {}, shown) for name, row in documents.items()]
    if not rows:
        return None
    if len(rows) > 1:
        rows.append(_row("all", _sum(documents), _all_shards(shards), shown))
    head = ("Source", "Rows", *(title for title, _ in shown), "Tokens", "Bytes a token")
    note = f"Vocabulary of {page.count(data.get('vocab_size')) or page.MISSING} pieces."
    if data.get("encoder"):
        note += f" Encoded by {data['encoder']}."
    more = [part for part in (_reading(data), _lengths(data), _cleaned(data), _values(data)) if part is not None]
    return page.section("Data", "data", page.table(head, rows, total=len(rows) > 1), *more, note=note)


def _reading(data: Mapping[str, Any]) -> Html | None:
    reading = data.get("reading") or {}
    rows = []
    for row in reading.get("sources") or ():
        parts = [page.percent(share) for share in row.get("share_by_part") or ()]
        change = " → ".join(str(part) for part in dict.fromkeys((parts[0], parts[-1]))) if parts else None
        epochs = page.digits(row.get("epochs"), 2)
        rows.append((row.get("source"), page.count(row.get("tokens")), page.percent(row.get("share")), change, epochs))
    if not rows:
        return None
    title = (
        f"How the run reads it: {page.count(reading.get('rows'))} rows of {page.count(reading.get('sequence_length'))} "
        f"tokens, packed by {reading.get('packing')}"
    )
    head = ("Source", "Tokens read", "Share", "From first to last", "Epochs")
    return page.folded(title, page.table(head, rows), is_open=True)


def _lengths(data: Mapping[str, Any]) -> Html | None:
    lengths = data.get("lengths") or {}
    edges = sorted({edge for row in lengths.values() for edge, _, _ in row.get("histogram") or ()})
    if not edges:
        return None
    rows = []
    for name, row in lengths.items():
        count = {edge: documents for edge, documents, _ in row.get("histogram") or ()}
        whole = max(1, row.get("documents") or 0)
        shares = (page.percent(count[edge] / whole) if edge in count else "" for edge in edges)
        rows.append((name, page.count(row.get("median")), page.count(row.get("longest")), *shares))
    head = ("Source", "Median", "Longest", *(f"{edge:,}+" for edge in edges))
    return page.folded("Tokens a document, share of documents by length", page.table(head, rows))


def _cleaned(data: Mapping[str, Any]) -> Html | None:
    rows = [
        (source, reason, page.count(count))
        for source, reasons in (data.get("cleaned") or {}).items()
        for reason, count in sorted(reasons.items(), key=lambda entry: -entry[1])
    ]
    return (
        page.folded("Cleaned away, by rule", page.table(("Source", "Rule", "Documents"), rows, text=2))
        if rows
        else None
    )


def _values(data: Mapping[str, Any]) -> Html | None:
    rows = [
        (source, name, value or "(none)", page.count(count))
        for source, fields in (data.get("values") or {}).items()
        for name, values in fields.items()
        for value, count in values
    ]
    head = ("Source", "Field", "Value", "Documents")
    return page.folded("Most frequent origins", element("div", page.table(head, rows, text=3))) if rows else None


def _row(name: str, row: Mapping[str, Any], shard: Mapping[str, Any], shown: list[tuple[str, str]]) -> list[Any]:
    counts = (page.count(row.get(key)) for key in ("rows", *(key for _, key in shown)))
    return [name, *counts, page.count(shard.get("train_tokens")), page.digits(shard.get("bytes_per_token"), 2)]


def _all_shards(shards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The sums over all sources; the bytes a token weighted by tokens."""
    whole = _sum(shards)
    if not {"train_tokens", "bytes_per_token"} <= set(whole) or not whole["train_tokens"]:
        return {}
    text = sum(row["train_tokens"] * row["bytes_per_token"] for row in shards.values())
    return whole | {"bytes_per_token": text / whole["train_tokens"]}


def _sum(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sums of the keys that every row has: what one row lacks has no total."""
    keys = set.intersection(*(set(row) for row in rows.values())) if rows else set()
    return {key: sum(row[key] for row in rows.values()) for key in keys}
