"""Inputs of every format as blocks of rows that a worker can parse: JSON lines, text files, parquet, Arrow.

The parent reads and decompresses, because neither gzip nor a text encoding can be entered in the middle; a block holds
8 MB or one longer row, so memory is bounded by blocks, not files. A block's content depends on the files only.

Parquet files and saved Hugging Face sets (save_to_disk) are read with pyarrow alone, so neither pandas nor torch is
loaded; of their columns only those that the recipe names are decoded. `datasets.load_dataset` is not used: it fails on
JSON lines whose `meta` has other keys in another file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.data import cut_files, streams
from finlm.data.sources import Input

BLOCK_BYTES = 8 * 2**20
WHOLE_ROW = ""  # as an input's text_field: all columns of a table
_ARROW_ROWS = 64  # decoded at once: few, as one may be a book

Kind = Literal["jsonl", "lines", "files", "arrow"]


@dataclass(frozen=True)
class Block:
    """Rows of one file: its lines from `first` on, or rows of a table; of kind "files" the (path, content) of some."""

    kind: Kind
    path: Path
    first: int
    data: bytes | tuple[tuple[Path, bytes], ...]
    cut: str = ""  # why the file ends here when it ends too early; data is then the row it struck


def blocks(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """All rows of an input in order. Raises UserError for a column that a table does not have."""
    if item.format == "txt":
        yield from _files(item, advance)
        return
    for path in item.paths:
        if item.format in ("parquet", "arrow"):
            yield from _tables(item, path, advance)
        else:
            yield from _lines(item, path, "jsonl" if item.format == "jsonl" else "lines", advance)


def _lines(item: Input, path: Path, kind: Kind, advance: screen.Advance) -> Iterator[Block]:
    try:
        parts = streams.pieces(path, item.encoding, min(2**20, BLOCK_BYTES), advance)
        for first, data in streams.lines(parts, BLOCK_BYTES):
            yield Block(kind, path, first, data)
    except streams.Cut as error:
        reason, first, torn = error.args
        yield Block(kind, path, first, torn[:1000], cut=reason)


def _files(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """Text files, each one document; small ones share a block."""
    waiting: list[tuple[Path, bytes]] = []
    size = 0
    for path in item.paths:
        parts: list[bytes] = []
        try:
            parts.extend(streams.pieces(path, item.encoding, 2**20, advance))
        except streams.Cut as error:
            yield Block("files", path, 1, b"".join(parts)[:1000], cut=str(error))
            continue
        waiting.append((path, b"".join(parts)))
        size += len(waiting[-1][1])
        if size >= BLOCK_BYTES:
            yield Block("files", path, 1, tuple(waiting))
            waiting, size = [], 0
    if waiting:
        yield Block("files", waiting[0][0], 1, tuple(waiting))


def _tables(item: Input, path: Path, advance: screen.Advance) -> Iterator[Block]:
    """A parquet or Arrow file as Arrow streams of the named columns."""
    import pyarrow as pa

    first, waiting, size = 1, list[Any](), 0
    try:
        for batch in _batches(item, path):
            waiting.append(batch)
            size += batch.nbytes
            if size >= BLOCK_BYTES:
                yield Block("arrow", path, first, _serialised(waiting))
                first += sum(part.num_rows for part in waiting)
                waiting, size = [], 0
    except (pa.ArrowInvalid, OSError) as error:
        if waiting:
            yield Block("arrow", path, first, _serialised(waiting))
            first += sum(part.num_rows for part in waiting)
        yield Block("arrow", path, first, b"", cut=f"{cut_files.FILE_DAMAGED}: {' '.join(str(error).split())[:200]}")
        return
    if waiting:
        yield Block("arrow", path, first, _serialised(waiting))
    advance(path.stat().st_size)


def _batches(item: Input, path: Path) -> Iterator[Any]:
    """Record batches of at most _ARROW_ROWS rows with the needed columns."""
    import pyarrow as pa

    if item.format == "parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path, buffer_size=2**20) as file:
            columns = _columns(item, path, file.schema_arrow.names)
            yield from file.iter_batches(batch_size=_ARROW_ROWS, columns=columns, use_threads=False)
        return
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        columns = _columns(item, path, stream.schema.names)
        for batch in stream:
            chosen = batch.select(columns)
            for start in range(0, batch.num_rows, _ARROW_ROWS):
                yield chosen.slice(start, _ARROW_ROWS)


def _columns(item: Input, path: Path, names: list[str]) -> list[str]:
    """The columns that hold the text and the counted fields: whole names, or what stands before the first dot."""
    if item.text_field == WHOLE_ROW:
        return names
    wanted = {name if name in names else name.partition(".")[0] for name in (item.text_field, *item.meta.values())}
    if item.text_field not in names and item.text_field.partition(".")[0] not in names:
        raise UserError(
            f"source {item.source}: {path} has no column {item.text_field!r}",
            evidence=f"it has {', '.join(names)}",
            fix="set data.sources[i].text_field",
        )
    return [name for name in names if name in wanted]


def _serialised(batches: list[Any]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())
