"""Rows of a block as texts: what a row of each format is, and the reason where it has no text.

Only the text and the fields that the recipe counts are taken, so rows may differ in everything else.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from finlm.data.readers import Block
from finlm.data.sources import Input

_EXCERPT = 200
_MISSING = object()
_NO_META: Mapping[str, str] = {}


class Row(NamedTuple):
    """One row: its text, or the reason why it has none."""

    path: Path
    line: int
    text: str
    meta: Mapping[str, str]
    broken: str = ""
    raw: bytes = b""

    def excerpt(self) -> str:
        """Its first characters, for people."""
        return self.raw[: 4 * _EXCERPT].decode("utf-8", errors="replace")[:_EXCERPT]


def rows(block: Block, item: Input) -> Iterator[Row]:
    """The rows of a block in order; empty lines are none. Line numbers are from 1, in tables row numbers."""
    if block.cut:
        assert isinstance(block.data, bytes)
        yield Row(block.path, block.first, "", {}, block.cut, block.data)
    elif block.kind == "arrow":
        yield from _of_table(block, item)
    elif block.kind == "files":
        assert isinstance(block.data, tuple)
        for path, data in block.data:
            yield _plain(path, 1, data, item)
    else:
        yield from _of_lines(block, item)


def _of_lines(block: Block, item: Input) -> Iterator[Row]:
    assert isinstance(block.data, bytes)
    path, field, read = block.path, item.text_field, _json if block.kind == "jsonl" else _plain
    is_simple = block.kind == "jsonl" and not item.meta
    for number, line in enumerate(block.data.split(b"\n"), block.first):
        if is_simple:  # what nearly all rows are, in a third of the time that the general way takes
            try:
                text = orjson.loads(line)[field]
                if type(text) is str:
                    yield Row(path, number, text, _NO_META, "", line)
                    continue
            except (ValueError, KeyError, TypeError):
                pass
        if line and not line.isspace():
            yield read(path, number, line, item)


def json_of(line: bytes) -> Any:
    """A row of JSON, whose strings may hold half of a surrogate pair. Raises ValueError or RecursionError."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # Joined files have the mark at each beginning.
        return json.loads(
            line.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        )  # slower; takes NaN and such halves, and says better what is wrong


def _json(path: Path, number: int, line: bytes, item: Input) -> Row:
    try:
        row = json_of(line)
        text, meta = _text(row, item.text_field), _meta(row, item.meta)
        text.encode("utf-8")  # what cannot be written is broken
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        return Row(path, number, "", {}, _reason(error, line, item), line)
    return Row(path, number, text, meta, "", line)


def _plain(path: Path, number: int, data: bytes, item: Input) -> Row:
    try:
        return Row(path, number, data.decode("utf-8").removeprefix("\ufeff"), {}, "", data)
    except UnicodeDecodeError as error:
        return Row(path, number, "", {}, _reason(error, data, item), data)


def of_table(data: bytes) -> Iterator[tuple[Any, str]]:
    """(the row, "") or (None, why it cannot be read) of every row of an Arrow stream."""
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        for batch in stream:
            try:
                yield from ((row, "") for row in batch.to_pylist())
            except ValueError:  # before the first row
                yield from (_alone(batch.slice(place, 1)) for place in range(batch.num_rows))


def _alone(batch: Any) -> tuple[Any, str]:
    try:
        return batch.to_pylist()[0], ""
    except UnicodeDecodeError as error:  # writers need not check their strings
        return None, _not_utf8(error)
    except ValueError as error:
        return None, str(error)


def _of_table(block: Block, item: Input) -> Iterator[Row]:
    assert isinstance(block.data, bytes)
    for number, (value, broken) in enumerate(of_table(block.data), block.first):
        try:
            if broken:
                raise ValueError(broken)
            text, meta = _text(value, item.text_field), _meta(value, item.meta)
            yield Row(block.path, number, text, meta, "", text[:_EXCERPT].encode("utf-8", "replace"))
        except ValueError as error:
            yield Row(block.path, number, "", {}, str(error), str(value)[:_EXCERPT].encode("utf-8", "replace"))


def _text(row: Any, field: str) -> str:
    """The text of a row. Raises ValueError with the reason where there is none."""
    if type(row) is not dict:
        raise ValueError(f"not an object but {_kind(row)}")
    text = row.get(field, _MISSING)
    if text is _MISSING and "." in field:
        text = _inner(row, field)
    if text is _MISSING:
        raise ValueError(f"no field {field!r}, only {', '.join(map(repr, list(row)[:8])) or 'none'}")
    if type(text) is not str:
        raise ValueError(f"field {field!r} is {_kind(text)}, not a string")
    return text


def _meta(row: dict[str, Any], fields: Mapping[str, str]) -> Mapping[str, str]:
    """The counted fields of a row as strings; "" where a row has none. Raises ValueError for what is no text."""
    found = {}
    for name, field in fields.items():
        value = row.get(field, _inner(row, field))
        found[name] = "" if value is _MISSING or value is None else str(value)
        try:
            found[name].encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"half of a surrogate pair in field {field!r}") from None
    return found


def _inner(row: Any, field: str) -> Any:
    """The value at a dotted path."""
    for name in field.split("."):
        row = row.get(name, _MISSING) if isinstance(row, dict) else _MISSING
    return row


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")


def _reason(error: Exception, data: bytes, item: Input) -> str:
    if b"\0" in data and not isinstance(error, UnicodeDecodeError):
        return "NUL bytes in the row (a file cut by a crash, or UTF-16 without its mark: set data.sources[i].encoding)"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(error) if item.encoding == "auto" else f"not {item.encoding}"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair in the text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
