"""Parse and format sizes, counts and durations: bytes, tokens, documents, seconds."""

from __future__ import annotations

import re

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
    """Return the whole number of text, a number with a suffix of `units`. Raises ValueError that shows the examples."""
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


def format_duration(seconds: float) -> str:
    """Return seconds in a fitting unit: 90061 -> '25 hours'; years from 730 days on, for plans."""
    for size, unit in ((730 * 86400, "years"), (2 * 86400, "days"), (2 * 3600, "hours"), (120, "minutes")):
        if seconds >= size:
            per = {"years": 365.25 * 86400, "days": 86400, "hours": 3600, "minutes": 60}[unit]
            return f"{seconds / per:.3g} {unit}"
    return f"{seconds:.3g} seconds"
