"""Parse the rows of a block: the text of a document, or the values of a dialogue, or the reason why there is none.

Only the text and the fields that the recipe counts are taken, so rows may differ in everything else. Too many rows
that cannot be read are an error: a wrong text_field or encoding breaks every row, and the beginning of each source
shows it before hours of reading. A file that is one JSON list (Alpaca's) is read whole, for dialogues only.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from finlm.base import files, screen, step_cache
from finlm.base.errors import UserError
from finlm.base.screen import Advance
from finlm.corpus.read import readers
from finlm.corpus.read.readers import Block
from finlm.corpus.read.sources import Input

_EXCERPT = 200
_MISSING = object()
_NO_META: Mapping[str, str] = {}


class Row(NamedTuple):
    """A parsed row: its text, or the reason why it has none."""

    path: step_cache.File
    line: int
    text: str
    meta: Mapping[str, str]
    broken: str = ""
    raw: bytes = b""

    def excerpt(self) -> str:
        """Return the first 200 characters of its raw bytes, for people."""
        return self.raw[: 4 * _EXCERPT].decode("utf-8", errors="replace")[:_EXCERPT]


def parse_block(block: Block, item: Input) -> Iterator[Row]:
    """Yield the rows of a block, numbered from 1, without empty lines; an unreadable one has `broken` set."""
    if block.cut:
        assert isinstance(block.data, bytes)
        yield Row(block.path, block.first, "", {}, block.cut, block.data)
    elif block.kind == "arrow":
        yield from _parse_table(block, item)
    elif block.kind == "files":
        assert isinstance(block.data, tuple)
        for path, data in block.data:
            yield _plain(path, 1, data, item)
    else:
        yield from _parse_lines(block, item)


def _parse_lines(block: Block, item: Input) -> Iterator[Row]:
    """Yield the rows of a block of JSON lines or text lines, without empty ones; `broken` is set where unreadable."""
    assert isinstance(block.data, bytes)
    path, field, read = block.path, item.text_field, _json if block.kind == "jsonl" else _plain
    is_simple = block.kind == "jsonl" and not item.meta and not item.sides
    loads, make = orjson.loads, Row._make
    for number, line in enumerate(block.data.split(b"\n"), block.first):
        if is_simple:  # what nearly all rows are, in a third of the time that the general way takes
            try:
                text = loads(line)[field]
                if type(text) is str:
                    yield make((path, number, text, _NO_META, "", line))
                    continue
            except (ValueError, KeyError, TypeError):
                pass
        if line and not line.isspace():
            yield read(path, number, line, item)


def parse_json(line: bytes) -> Any:
    """Return the value of a JSON line, NaN and lone surrogates too. ValueError if not JSON, RecursionError if deep."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # Slower; takes NaN and such halves, says better what is wrong. Joined files have the mark at each beginning.
        return json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))


def _json(path: step_cache.File, number: int, line: bytes, item: Input) -> Row:
    """Return the Row of a line of JSON; `broken` tells if it is no JSON, or a field is missing or invalid."""
    try:
        row = parse_json(line)
        text, meta = _text(row, item), _meta(row, item)
        text.encode("utf-8")  # what cannot be written is broken
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        return Row(path, number, "", {}, explain_error(error, line, item.encoding), line)
    return Row(path, number, text, meta, "", line)


def _plain(path: step_cache.File, number: int, data: bytes, item: Input) -> Row:
    """Return the Row of UTF-8 text, without byte-order mark; `broken` tells if it is not UTF-8."""
    try:
        return Row(path, number, data.decode("utf-8").removeprefix("\ufeff"), {}, "", data)
    except UnicodeDecodeError as error:
        return Row(path, number, "", {}, explain_error(error, data, item.encoding), data)


def read_table_rows(data: bytes) -> Iterator[tuple[Any, str]]:
    """Yield (row, "") or (None, why it cannot be read) for every row of an Arrow stream."""
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        for batch in stream:
            try:
                yield from ((row, "") for row in batch.to_pylist())
            except ValueError:  # before the first row
                yield from (_single_value(batch.slice(place, 1)) for place in range(batch.num_rows))


def _single_value(batch: Any) -> tuple[Any, str]:
    """Return (row, "") or (None, why it cannot be read) for a batch of one row."""
    try:
        return batch.to_pylist()[0], ""
    except ValueError as error:  # of strings that are not UTF-8, too: writers need not check them
        return None, _not_utf8(error) if isinstance(error, UnicodeDecodeError) else str(error)


def _parse_table(block: Block, item: Input) -> Iterator[Row]:
    """Yield the rows of a block that is an Arrow stream; a row that cannot be used has `broken` set."""
    assert isinstance(block.data, bytes)
    for number, (value, broken) in enumerate(read_table_rows(block.data), block.first):
        try:
            if broken:
                raise ValueError(broken)
            text, meta = _text(value, item), _meta(value, item)
            yield Row(block.path, number, text, meta, "", text[:_EXCERPT].encode("utf-8", "replace"))
        except ValueError as error:
            yield Row(block.path, number, "", {}, str(error), str(value)[:_EXCERPT].encode("utf-8", "replace"))


def _text(row: Any, item: Input) -> str:
    """Return a row's text, from bytes too; "" for null if item.null_text is empty. Raises ValueError if it has none."""
    field = item.text_field
    if type(row) is not dict:
        raise ValueError(f"not an object but {_kind(row)}")
    text = row.get(field, _MISSING)
    if text is _MISSING and "." in field:
        text = _inner(row, field)
    if text is _MISSING:
        raise ValueError(f"no field {field!r}, only {', '.join(map(repr, list(row)[:8])) or 'none'}")
    if text is None and item.null_text == "empty":
        return ""
    if type(text) is bytes:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(_not_utf8(error)) from None
    if type(text) is not str:
        raise ValueError(f"field {field!r} is {_kind(text)}, not a string")
    return text


def _meta(row: Mapping[str, Any], item: Input) -> Mapping[str, str]:
    """Return the counted fields of a row as strings, "" if missing, and the fields that decide what is held out.

    Raises ValueError for a lone surrogate, and for a deciding field that is missing, empty or not a date.
    """
    values = {}
    for name, field in (*item.meta.items(), *item.sides.items()):
        value = row.get(field, _inner(row, field))
        values[name] = "" if value is _MISSING or value is None else str(value)
        if name in item.sides and not values[name]:
            raise ValueError(f"nothing in field {field!r}, by which data.{name} holds out")
        if name == "held_out_from":
            values[name] = _day(field, values[name])
        try:
            values[name].encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"half of a surrogate pair in field {field!r}") from None
    return values


def _day(field: str, value: str) -> str:
    """Return the day of an ISO date or time as YYYYMMDD. Raises ValueError, naming `field`, for another value."""
    try:
        return f"{date.fromisoformat(value[:10].replace('/', '-')):%Y%m%d}"
    except ValueError:
        raise ValueError(f"field {field!r} is {value[:20]!r}, not a date as 2024-01-31") from None


def _inner(row: Any, field: str) -> Any:
    """Return the value at a dotted path, _MISSING if there is none."""
    for name in field.split("."):
        row = row.get(name, _MISSING) if isinstance(row, dict) else _MISSING
    return row


def _kind(value: object) -> str:
    """Return the JSON type of a value in words, such as "a list"; "a number" for any type that is not known."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")


def explain_error(error: Exception, data: bytes, encoding: str = "auto") -> str:
    """Return in words why a row, with these bytes and this encoding, cannot be read."""
    if b"\0" in data and not isinstance(error, UnicodeDecodeError):
        return "NUL bytes in the row (a file cut by a crash, or UTF-16 without its mark: set data.sources[i].encoding)"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(error) if encoding == "auto" else f"not {encoding}"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair in the text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _not_utf8(error: UnicodeDecodeError) -> str:
    """Return in words which byte is not UTF-8, and where, counted from 1."""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


BrokenRow = tuple[step_cache.File, int, str, str]  # file, line, reason, first characters

_KEPT = 10_000  # rows of a source that are kept for a look: most often all are broken for one reason
_FIRST = 1000  # rows that a source is judged by
_ALMOST_ALL = 0.9
_SAMPLES = 3
_HINTS = {
    "is null, not a string": "set data.sources[i].null_text to empty, which leaves out such rows and no others",
    "only 'messages'": "these are dialogues, for a recipe of stage sft",
    "no field": "set data.sources[i].text_field",
    "not UTF-8": "set data.sources[i].encoding, for example gb18030",
    "not JSON: Expecting value": "set data.sources[i].format to txt or lines where it is plain text",
    "not JSON": "write a whole JSON object a line (jq -c . FILE > ROWS.jsonl)",
}


class Reader(NamedTuple):
    """The functions that read a source's blocks and check its first rows."""

    blocks: Callable[[Input, Advance], Iterator[Block]]
    first: Callable[[Block, Input, int], tuple[int, list[BrokenRow]]]  # (rows, broken ones) of a block's first
    formats: Sequence[str] = ()  # of rows, where more is asked of them than a text


def check_first_rows(inputs: Sequence[Input], max_broken_fraction: float, reader: Reader | None = None) -> None:
    """Raise UserError if a source's first 1000 rows are almost all broken, or an entry's files are all empty.

    Almost all is above 90 %, or max_broken_fraction if more. Sources of one block pass. `reader` is DOCUMENTS if None.
    """
    reader = reader or DOCUMENTS
    filled = set()
    for item in inputs:
        blocks = list(itertools.islice(reader.blocks(item, step_cache.ignore_progress), 2))
        filled |= {item.entry} if blocks else set()
        if len(blocks) < 2 or blocks[0].cut:  # read in no time; all of its broken rows are told then
            continue
        rows, broken = reader.first(blocks[0], item, _FIRST)
        if len(broken) > max(_ALMOST_ALL, max_broken_fraction) * rows:
            raise UserError(
                f"source {item.source}: {len(broken):,} of its first {rows:,} rows "
                f"cannot be {'used' if reader.formats else 'read'}",
                evidence=_format_evidence(broken),
                fix=_suggest_fix(broken[0], reader.formats),
            )
    for item in inputs:
        if item.entry not in filled:
            raise UserError(
                f"source {item.source} has no row",
                evidence="\n".join(f"{path}: {path.stat().st_size:,} bytes" for path in item.paths[:_SAMPLES]),
                fix=f"write or fetch the file again, or take {item.entry or 'it'} out",
            )


@dataclass(frozen=True)
class RowCounts:
    """The counts of a source's rows."""

    source: str
    rows: int = 0
    broken: int = 0
    cut: int = 0  # files that end too early


def check_broken_rows(
    directory: Path, inputs: Sequence[RowCounts], allowed: float, keep: Path, formats: Sequence[str] = ()
) -> None:
    """Raise UserError for the first source with a larger share of broken rows than `allowed`; copy them into `keep`.

    They come from directory/broken.jsonl; the copy is removed for sources that pass. `formats` are for the message.
    """
    for item in inputs:
        kept = keep / f"broken-{item.source}.jsonl"
        if readers.lost_rows(item.rows, item.broken, bool(item.cut)) <= allowed * item.rows:
            kept.unlink(missing_ok=True)
            continue
        rows, ends = list[BrokenRow](), list[BrokenRow]()
        reasons = Counter[str]()
        for row in files.read_json_lines(directory / "broken.jsonl"):
            if row["source"] == item.source:
                entry = row["file"], row["line"], row["reason"], row["start"]
                rows += [entry] * (len(rows) < _KEPT)
                ends += [entry] * readers.is_cut(row["reason"])
                reasons[row["reason"]] += 1
        files.write_text(kept, "".join(json_line(item.source, row) for row in rows))
        where = [(str(file), number, reason) for file, number, reason, _ in ends]
        readers.refuse_cut(item.source, where, item.rows, item.broken, allowed)
        each = "\n" + format_reasons(reasons) if formats and len(reasons) > 1 else ""
        raise UserError(
            f"source {item.source}: {item.broken:,} of {item.rows:,} rows cannot be {'used' if formats else 'read'} "
            f"({item.broken / item.rows:.2%}); data.max_broken_fraction allows {allowed:.2%}",
            evidence=_format_evidence([*ends[:1], *(row for row in rows if row not in ends[:1])]) + each,
            fix=f"{'all' if item.broken <= _KEPT else f'the first {_KEPT:,}'} of them are in {kept}; "
            + _suggest_fix(rows[0], formats),
        )


def json_line(source: str, row: BrokenRow) -> str:
    """Return a broken row of `source` as a line of broken.jsonl."""
    path, number, reason, start = row
    entry = {"source": source, "file": str(path), "line": number, "reason": reason, "start": start}
    return json.dumps(entry, ensure_ascii=False) + "\n"


def format_reasons(reasons: Mapping[str, int]) -> str:
    """Return the eight most frequent reasons with their numbers of rows, a line each."""
    return "\n".join(f"{count:,} rows: {reason}" for reason, count in Counter(reasons).most_common(8))


def _suggest_fix(first: BrokenRow, formats: Sequence[str]) -> str:
    """Return the fix to suggest for the first broken row; `formats` lists accepted rows, if a text is not enough."""
    _, number, reason, start = first
    hint = next((f"{hint}; " for mark, hint in _HINTS.items() if mark in reason), "")
    if formats:
        hint *= reason.startswith("not UTF-8")
        known = "".join(f"\n- {text}" for text in formats)
        return f"{hint}mend them, or raise data.max_broken_fraction to leave them out; a row is one of{known}"
    if number == 1 and start.lstrip().startswith("["):
        hint = "it is one JSON list: write a row a line (jq -c '.[]' LIST.json > ROWS.jsonl); "
    return f"{hint}mend the file, or raise data.max_broken_fraction"


def _format_evidence(broken: Sequence[BrokenRow]) -> str:
    """Return up to three of the rows as lines, those with different reasons first."""
    firsts = dict[str, BrokenRow]()
    for row in broken:
        firsts.setdefault(row[2], row)
    chosen = list(firsts.values())[:_SAMPLES]
    chosen += [row for row in broken[: 2 * _SAMPLES] if row not in chosen]
    return "\n".join(f"{file}:{number}: {reason}: {start[:60]!r}" for file, number, reason, start in chosen[:_SAMPLES])


def _first_documents(block: Block, item: Input, most: int) -> tuple[int, list[BrokenRow]]:
    """Return (number of rows read, the broken ones) of the first `most` rows of a block of documents."""
    rows = list(itertools.islice(parse_block(block, item), most))
    return len(rows), [(row.path, row.line, row.broken, row.excerpt()) for row in rows if row.broken]


DOCUMENTS = Reader(readers.blocks, _first_documents)


_ROWS = 10_000  # of a list, a block


def dialogue_blocks(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """Yield blocks of dialogue rows, a JSON list whole. UserError for text, archives, broken or changed files."""
    if item.format not in ("jsonl", "parquet", "arrow"):
        raise UserError(
            f"{item.paths[0]}: text files hold no dialogues", fix="give .jsonl, .json, .parquet or a saved set"
        )
    for number, (path, sha256) in enumerate(item.files_with_hashes()):
        if item.format == "jsonl" and _is_list(path, item.encoding):
            yield from _list_blocks(path, item.encoding, advance, sha256)
        else:
            yield from readers.blocks(item.part(number, number + 1), advance)


class DialogueRow(NamedTuple):
    """A row of dialogues, or the reason why it cannot be read."""

    line: int  # from 1; in tables and lists the row's number
    value: Any
    broken: str = ""
    raw: bytes = b""

    def excerpt(self) -> str:
        """Return the row's first 200 characters, for people."""
        raw = self.raw or json.dumps(self.value, ensure_ascii=False, default=str).encode("utf-8", "replace")
        return raw[:800].decode("utf-8", "replace")[:200]


def parse_dialogues(block: Block) -> Iterator[DialogueRow]:
    """Yield every row of a block, without empty lines; a row that cannot be parsed has its reason in `broken`."""
    assert isinstance(block.data, bytes)
    if block.cut:
        yield DialogueRow(block.first, None, block.cut, block.data)
    elif block.kind == "arrow":
        for number, (value, broken) in enumerate(read_table_rows(block.data), block.first):
            yield DialogueRow(number, value, broken)
    else:
        for number, line in enumerate(block.data.split(b"\n"), block.first):
            if line and not line.isspace():
                try:
                    yield DialogueRow(number, parse_json(line), "", line)
                except (ValueError, RecursionError) as error:
                    yield DialogueRow(number, None, explain_error(error, line), line)


def _is_list(path: step_cache.File, encoding: str) -> bool:
    """Return whether a file begins with [ past white space; False if damaged there. UserError for archives not read."""
    try:
        start = next(readers.pieces(path, encoding, 4096, step_cache.ignore_progress), b"")
    except readers.Cut:  # damaged from its first byte: readers.blocks says so
        return False
    return start.lstrip()[:1] == b"["


def _list_blocks(path: step_cache.File, encoding: str, advance: screen.Advance, sha256: str) -> Iterator[Block]:
    """Yield a JSON list as blocks of 10,000 lines, whole in memory. UserError if unparsable or changed."""
    try:
        rows = parse_json(b"".join(readers.pieces(path, encoding, 2**20, advance, sha256)))
    except (readers.Cut, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not one JSON list", evidence=str(error), fix="fetch the file again") from None
    for first in range(0, len(rows), _ROWS):
        yield Block("jsonl", path, first + 1, b"\n".join(map(_to_json, rows[first : first + _ROWS])))


def _to_json(row: Any) -> bytes:
    """Return a row as JSON without a newline."""
    try:
        return orjson.dumps(row)
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return json.dumps(row).encode()
