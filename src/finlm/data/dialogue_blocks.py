"""Files of dialogues as blocks of rows, and a block's rows as Python values.

As with documents the parent reads, and workers parse. One format is known here only: a file that is one JSON list
(Alpaca's), which is read whole and passed on in blocks of JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.data import parsing, readers, steps, streams
from finlm.data.readers import Block
from finlm.data.sources import Input

_ROWS = 10_000  # of a list, a block


def of(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """The input's blocks in order. Raises UserError for text files, and for a list that cannot be read to its end."""
    if item.format not in ("jsonl", "parquet", "arrow"):
        raise UserError(
            f"{item.paths[0]}: text files hold no dialogues", fix="give .jsonl, .json, .parquet or a saved set"
        )
    for path in item.paths:
        if item.format == "jsonl" and _is_list(path, item.encoding):
            yield from _of_list(path, item.encoding, advance)
        else:
            yield from readers.blocks(replace(item, paths=(path,)), advance)


def rows(block: Block) -> Iterator[tuple[Any, str]]:
    """(the row, "") or (None, why it cannot be read) of every row of a block."""
    assert isinstance(block.data, bytes)
    if block.cut:
        yield None, block.cut
    elif block.kind == "arrow":
        yield from parsing.of_table(block.data)
    else:
        for line in block.data.split(b"\n"):
            if line and not line.isspace():
                try:
                    yield parsing.json_of(line), ""
                except (ValueError, RecursionError):
                    yield None, "not JSON"


def _is_list(path: Path, encoding: str) -> bool:
    try:
        start = next(streams.pieces(path, encoding, 4096, steps.unseen), b"")
    except streams.Cut:  # damaged from its first byte: readers.blocks says so
        return False
    return start.lstrip()[:1] == b"["


def _of_list(path: Path, encoding: str, advance: screen.Advance) -> Iterator[Block]:
    try:
        found = parsing.json_of(b"".join(streams.pieces(path, encoding, 2**20, advance)))
    except (streams.Cut, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not one JSON list", evidence=str(error), fix="fetch the file again") from None
    for first in range(0, len(found), _ROWS):
        yield Block("jsonl", path, first + 1, b"\n".join(map(_line, found[first : first + _ROWS])))


def _line(row: Any) -> bytes:
    try:
        return orjson.dumps(row)
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return json.dumps(row).encode()
