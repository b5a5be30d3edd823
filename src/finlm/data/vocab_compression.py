"""How much text a token holds, by source: before and after a vocabulary is extended, or after one is trained.

Measured on held-out documents, which the tokenizer has not seen (at most 2 MB a source); on training documents where a
source holds none out. Fewer tokens mean shorter rows for the same text: cost falls by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finlm.data import dedup, documents, vocab

_BYTES_A_SOURCE = 2_000_000


def texts(read: Path, manifest: dict[str, Any], decision: dedup.Decisions) -> Iterator[tuple[str, str]]:
    """(source, document) of a documents step, to measure on."""
    chunks = list(documents.chunks(read, manifest))
    left = dict.fromkeys((chunk.source for chunk in chunks), _BYTES_A_SOURCE)
    has_held_out = {chunk.source for chunk in chunks if (decision[chunk.rows] == dedup.HELD_OUT).any()}
    for chunk in chunks:
        wanted = decision[chunk.rows] == (dedup.HELD_OUT if chunk.source in has_held_out else dedup.TRAIN)
        if left[chunk.source] <= 0 or not np.any(wanted):
            continue
        for text in documents.read_texts(chunk.path, wanted):
            left[chunk.source] -= len(text.encode())
            yield chunk.source, text
            if left[chunk.source] <= 0:
                break


def measure(processors: Mapping[str, Any], found: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{source: {documents, bytes, characters, tokens: {name of the processor: tokens}}}."""
    sums: dict[str, dict[str, Any]] = {}
    for source, text in found:
        row = sums.setdefault(
            source, {"documents": 0, "bytes": 0, "characters": 0, "tokens": dict.fromkeys(processors, 0)}
        )
        row["documents"] += 1
        row["bytes"] += len(text.encode())
        row["characters"] += len(text)
        for name, processor in processors.items():
            row["tokens"][name] += len(vocab.encode(processor, [text])[0])
    return sums


def table(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The measurement as aligned lines: of each source, bytes and characters a token, processors joined by ->."""
    rows: list[tuple[str, ...]] = [("source", "bytes a token", "characters a token")]
    for source, row in measured.items():
        ratios = [
            " -> ".join(f"{row[unit] / max(1, tokens):.2f}" for tokens in row["tokens"].values())
            for unit in ("bytes", "characters")
        ]
        rows.append((source, *ratios))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
