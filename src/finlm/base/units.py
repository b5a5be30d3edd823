"""Parse and format sizes, counts and durations (bytes, tokens, documents, seconds)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes of '16MB', '1.5 GiB' or 4096. Raises ValueError on anything else."""
    return _parse(text, _BYTES, "16MB, 1.5GiB or a whole number of bytes")


def parse_count(text: str | int) -> int:
    """Return the number (of tokens, documents) of '3.9M', '1.5B' or 4096. Raises ValueError on anything else."""
    return _parse(text, _COUNTS, "4096, 3.9M or 1.5B")


def _parse(text: str | int, units: dict[str, int], examples: str) -> int:
    """Return the whole number of a text with a suffix of `units`. Raises ValueError on anything else or below 0."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"expected {examples}, got {text!r}")
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text.replace(",", "").replace("_", ""))
        if match is None or match[2].upper() not in units:
            raise ValueError(f"expected {examples}, got {text!r}")
        value = round(float(match[1]) * units[match[2].upper()])
    if value < 0:
        raise ValueError(f"expected {examples}, got {text!r}")
    return value


def format_bytes(value: float) -> str:
    """Return bytes in binary units: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_items(items: Mapping[str, int], most: int | None = None) -> str:
    """Return items of bytes as text, largest first, at most `most`, without those of 0 bytes: 'a 3.0 GiB, b 8 B'."""
    largest = sorted(items.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)


def format_count(value: float) -> str:
    """Return a count as text; from 10,000 on with three digits and a suffix k, M, B or T: 6394000000 -> '6.39B'."""
    value = float(f"{value:.3g}") if abs(value) >= 1e4 else value  # 999,999,999 is 1B, not 1e+03M
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def format_rate(value: float) -> str:
    """Return a number with two digits, or as a whole number from 99.5 on: 0.0123 -> '0.012', 312.5 -> '312'."""
    return f"{value:.2g}" if abs(value) < 99.5 else f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    """Return seconds in a fitting unit with three digits: 90061 -> '25 hours'; years from 730 days on, for plans."""
    for size, unit in ((730 * 86400, "years"), (2 * 86400, "days"), (2 * 3600, "hours"), (120, "minutes")):
        if seconds >= size:
            per = {"years": 365.25 * 86400, "days": 86400, "hours": 3600, "minutes": 60}[unit]
            return f"{seconds / per:.3g} {unit}"
    return f"{seconds:.3g} seconds"
