"""JSON lines to normalised documents, in chunks that worker processes read and write independently.

The parent decompresses and cuts each file into blocks of whole lines (8 MB; gzip cannot be read in parallel), workers
parse, normalise and hash them, one chunk a block: <chunk>.txt, the documents' UTF-8 end to end, and <chunk>.npy, a
record a document (INDEX). A chunk's bytes depend on the file and the block size only, never on the number of workers;
memory is a few blocks a worker. Every document is kept here; what is left out is decided afterwards (dedup.py).

A row that cannot be read is set aside with its line and reason in broken.jsonl. Only the text is taken: `meta` differs
between files of one corpus and is not looked at.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.data import clean, steps, workers
from finlm.data.sources import Input

VERSION = 1
BLOCK_BYTES = 8 * 2**20
INDEX = np.dtype([("end", "<u8"), ("characters", "<u4"), ("hash", "<u8", (2,))])

_EXCERPT = 200
# What a cut archive has lost cannot be counted: it stands for this share of the rows at least, so that the default
# limit refuses it and a limit raised on purpose accepts it.
_CUT_ARCHIVE_SHARE = 0.01
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines of one input."""

    input: int
    number: int
    first_line: int
    data: bytes
    text_field: str
    chunk: Path
    cut: str = ""  # why the archive ends here, when it ends too early; data is then the cut row


@dataclass
class Parsed:
    """What became of a block."""

    input: int
    rows: int = 0
    documents: int = 0
    text_bytes: int = 0
    broken: list[tuple[int, str, str]] = field(default_factory=list)  # line, reason, first characters
    cut: bool = False
    chunk: str = ""


def estimate_bytes(inputs: Sequence[Input]) -> int:
    """Disk space for the chunks of these files; Chinese text in gzip is a third to a quarter of its size."""
    return sum(item.path.stat().st_size * (4 if _is_gzip(item.path) else 1) for item in inputs)


def write(
    directory: Path, inputs: Sequence[Input], processes: int, max_broken_fraction: float, keep: Path
) -> dict[str, Any]:
    """Write the chunks of all inputs below directory; the manifest: inputs with their counts, chunks in order.

    Raises UserError when a source has too many broken rows, with those kept in `keep`/broken-<source>.jsonl.
    """
    (directory / "chunks").mkdir()
    counts = [{"rows": 0, "broken": 0, "cut": 0, "documents": 0, "bytes": 0} for _ in inputs]
    written: list[dict[str, Any]] = []
    total = sum(item.path.stat().st_size for item in inputs)
    used = min(processes, max(1, estimate_bytes(inputs) // BLOCK_BYTES))
    with (
        (directory / "broken.jsonl").open("w", encoding="utf-8") as broken,
        steps.bar("documents", total, fast_bytes=30_000_000) as advance,
        workers.pool(used) as pool,
    ):
        blocks = _blocks(directory, inputs, advance)
        for parsed in workers.in_order(pool, used, parse, blocks):
            item, count = inputs[parsed.input], counts[parsed.input]
            count["rows"] += parsed.rows
            count["broken"] += len(parsed.broken)
            count["cut"] += parsed.cut
            count["documents"] += parsed.documents
            count["bytes"] += parsed.text_bytes
            for line, reason, excerpt in parsed.broken:
                row = {"source": item.source, "file": str(item.path), "line": line, "reason": reason, "start": excerpt}
                broken.write(json.dumps(row, ensure_ascii=False) + "\n")
            if parsed.documents:
                written.append({"input": parsed.input, "file": parsed.chunk, "documents": parsed.documents})
    described = [
        {"source": item.source, "split": item.split, "file": item.path.name, "sha256": item.sha256, **count}
        for item, count in zip(inputs, counts, strict=True)
    ]
    manifest = {"inputs": described, "chunks": written}
    check_broken(directory, manifest, max_broken_fraction, keep)
    return manifest


def check_broken(directory: Path, manifest: dict[str, Any], max_broken_fraction: float, keep: Path) -> None:
    """Raises UserError for the first source with more broken rows than allowed, and keeps them where they are found."""
    for item in manifest["inputs"]:
        kept = keep / f"broken-{item['source']}.jsonl"
        lost = max(item["broken"], _CUT_ARCHIVE_SHARE * item["rows"] if item["cut"] else 0)
        if lost <= max_broken_fraction * item["rows"]:
            kept.unlink(missing_ok=True)
            continue
        rows = [row for row in files.read_json_lines(directory / "broken.jsonl") if row["source"] == item["source"]]
        files.write_text(kept, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        shown = rows[:3] if rows[-1] in rows[:3] or not item["cut"] else [*rows[:2], rows[-1]]
        raise UserError(
            f"source {item['source']}: {item['broken']:,} of {item['rows']:,} rows cannot be read "
            f"({item['broken'] / item['rows']:.2%}{', and what follows them is lost' if item['cut'] else ''}); "
            f"data.max_broken_fraction allows {max_broken_fraction:.2%}",
            evidence="\n".join(f"{row['file']}:{row['line']}: {row['reason']}: {row['start'][:60]!r}" for row in shown),
            fix=f"all of them are in {kept}; mend the file (or set data.sources[i].text_field), "
            "or raise data.max_broken_fraction",
        )


def parse(block: Block) -> Parsed:
    """Read a block's rows and write their chunk. Runs in a worker."""
    result = Parsed(block.input)
    if block.cut:
        excerpt = block.data.decode("utf-8", errors="replace")[:_EXCERPT]
        return Parsed(block.input, rows=1, broken=[(block.first_line, block.cut, excerpt)], cut=True)
    texts, hashes, ends, characters = [], [], [], []
    for number, line in enumerate(block.data.split(b"\n")):
        if not line.strip():
            continue
        result.rows += 1
        try:
            text = clean.normalise(_text(line, block.text_field))
            encoded = text.encode("utf-8")
        except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
            reason = _reason(error)
            excerpt = line.decode("utf-8", errors="replace")[:_EXCERPT]
            result.broken.append((block.first_line + number, reason, excerpt))
            continue
        texts.append(encoded)
        hashes.append(hashlib.blake2b(encoded, digest_size=16).digest())
        result.text_bytes += len(encoded)
        ends.append(result.text_bytes)
        characters.append(len(text))
    if texts:
        index = np.empty(len(texts), dtype=INDEX)
        index["end"], index["characters"] = ends, characters
        index["hash"] = np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2)
        block.chunk.write_bytes(b"".join(texts))
        np.save(block.chunk.with_suffix(".npy"), index)
        result.documents, result.chunk = len(texts), block.chunk.name
    return result


@dataclass(frozen=True)
class Chunk:
    """A chunk of a finished documents step."""

    input: int
    source: str
    path: Path
    rows: slice  # its documents among all


def chunks(directory: Path, manifest: dict[str, Any]) -> Iterator[Chunk]:
    """All chunks in order."""
    first = 0
    for item in manifest["chunks"]:
        rows = slice(first, first + item["documents"])
        source = manifest["inputs"][item["input"]]["source"]
        yield Chunk(item["input"], source, directory / "chunks" / item["file"], rows)
        first = rows.stop


def read_index(path: Path) -> npt.NDArray[Any]:
    """A chunk's records, INDEX [documents]."""
    index: npt.NDArray[Any] = np.load(path.with_suffix(".npy"))
    return index


def read_texts(path: Path, wanted: npt.NDArray[np.bool_]) -> Iterator[str]:
    """The wanted documents of a chunk; wanted is bool [documents]."""
    ends = read_index(path)["end"].astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    data = path.read_bytes()
    for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True):
        yield data[start:end].decode("utf-8")


def _text(line: bytes, text_field: str) -> str:
    """The text of a row. Raises ValueError with the reason where there is none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"not an object but {_kind(row)}")
    if text_field not in row:
        raise ValueError(f"no field {text_field!r}, only {', '.join(map(repr, list(row)[:8])) or 'none'}")
    text = row[text_field]
    if not isinstance(text, str):
        raise ValueError(f"field {text_field!r} is {_kind(text)}, not a string")
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair in the text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _blocks(directory: Path, inputs: Sequence[Input], advance: screen.Advance) -> Iterator[Block]:
    """Every input as blocks of whole lines, in order."""
    for place, item in enumerate(inputs):
        for number, (first_line, data, cut) in enumerate(_lines(item.path, advance)):
            chunk = directory / "chunks" / f"{item.source}.{item.split}-{number:05d}.txt"
            yield Block(place, number, first_line, data, item.text_field, chunk, cut)


def _lines(path: Path, advance: screen.Advance) -> Iterator[tuple[int, bytes, str]]:
    """(number of the first line, whole lines, "") of a file; last (line, the cut row, reason) for a damaged archive."""
    line, rest, done, first, cut, at_end = 1, bytearray(), 0, True, "", False
    with path.open("rb") as raw:
        stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if _is_gzip(path) else raw
        while not at_end:
            full = len(rest) + BLOCK_BYTES
            try:
                # read1, not read: what a damaged archive still gives before it fails is not lost.
                while len(rest) < full and not at_end:
                    part = stream.read1(min(2**20, full - len(rest)))
                    rest += part
                    at_end = not part
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                cut, at_end = f"the archive is damaged or cut short: {error}", True
            if first and rest.startswith(_BYTE_ORDER_MARK):
                del rest[: len(_BYTE_ORDER_MARK)]
            first = False
            end = len(rest) if at_end and not cut else rest.rfind(b"\n") + 1
            if end:
                yield line, bytes(rest[:end]), ""
                line += rest.count(b"\n", 0, end)
                del rest[:end]
            advance(raw.tell() - done)
            done = raw.tell()
    if cut:
        yield line, bytes(rest[: 4 * _EXCERPT]), cut


def _is_gzip(path: Path) -> bool:
    """By content: a download named .gz that was already unpacked is common."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
