"""Read inputs of every format as blocks of rows that a worker can parse: JSON lines, text files, parquet, Arrow.

The parent reads and decompresses, because neither gzip nor a text encoding can be entered in the middle; a block holds
8 MB or one longer row, so memory is bounded by blocks, not files. Compression is known by content, UTF-16 by its
byte-order mark; any other encoding is named in the recipe. A byte sequence without meaning makes its own row broken,
and no other. Of a file that is cut short, what comes before the cut is read; how much is lost cannot be counted, so a
cut stands for a share of the rows at least, which the default limit refuses.

Parquet files and saved Hugging Face sets (save_to_disk) are read with pyarrow alone, so neither pandas nor torch is
loaded. `datasets.load_dataset` is not used: it fails on JSON lines whose `meta` has other keys in another file.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from isal import isal_zlib

from finlm.base import screen, step_cache
from finlm.base.errors import UserError
from finlm.base.step_cache import File
from finlm.corpus.read.sources import Input

_CUT_SHARE = 0.01  # of the source's rows, for which a cut file counts at least
# How the reason of the row at the cut begins.
ARCHIVE_SHORT = "the archive is cut short"
ARCHIVE_DAMAGED = "the archive is damaged"
FILE_DAMAGED = "the file is damaged"
FILE_SHORT = "the file is cut short"


def is_cut(reason: str) -> bool:
    """Return whether a row's reason says that its file is cut short or damaged there."""
    return reason.startswith((ARCHIVE_SHORT, ARCHIVE_DAMAGED, FILE_DAMAGED, FILE_SHORT))


def lost_rows(rows: int, broken: int, has_cut: bool) -> float:
    """Return how many rows of a source count as lost: `broken`, but at least 1 % of `rows` if a file is cut short."""
    return max(_CUT_SHARE * rows, broken) if has_cut else broken


def refuse_cut(source: str, cuts: Sequence[tuple[str, int, str]], rows: int, broken: int, allowed: float) -> None:
    """Raise UserError if the cut files of a source lose more than the share `allowed` (data.max_broken_fraction).

    `cuts` are (file, row, reason). Does nothing if the other broken rows alone are too many: that is another error.
    """
    counted = lost_rows(rows, broken, has_cut=True)
    if not cuts or counted <= allowed * rows or broken - len(cuts) > allowed * rows:
        return
    file, _, reason = cuts[0]
    what = "ends early" if reason.startswith((ARCHIVE_SHORT, FILE_SHORT)) else "is damaged"
    more = f", as {'do' if what == 'ends early' else 'are'} {len(cuts) - 1:,} more" if len(cuts) > 1 else ""
    needed = math.ceil(round(counted / rows * 1000, 6)) / 1000
    raise UserError(
        f"source {source}: {Path(file).name} {what}{more}",
        evidence="".join(f"{name}:{row}: {why}; what follows is lost\n" for name, row, why in cuts[:3])
        + f"how much is unknown: it counts as {counted / rows:.2%} of the rows, of which "
        f"data.max_broken_fraction allows {allowed:.2%}",
        fix="fetch it again (compare its size or checksum), "
        f"or set data.max_broken_fraction={needed:g}, which leaves out the rest of the file",
    )


def describe_cut(cut_files: Sequence[str]) -> str:
    """Return a phrase that names the first three of accepted cut files, to append to counts; "" when there are none."""
    names = ", ".join(Path(file).name for file in cut_files[:3]) + (", ..." if len(cut_files) > 3 else "")
    return f"; {names}: cut, the rest not read" if cut_files else ""


_TAR = (".tar", ".tar.gz", ".tar.zst", ".tgz")
_UNREAD = {  # by a file's first bytes: what it is, and what unpacks it
    b"\xfd7zXZ\0": ("an xz archive", "xz -d"),
    b"BZh": ("a bzip2 archive", "bunzip2"),
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "7z x"),
}
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ = 256 * 1024
_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Decoding puts a lone surrogate where bytes have no meaning; "surrogateescape" then writes it as the byte 0xff.
_MEANINGLESS = ("\udcff", "surrogateescape")


class Cut(Exception):
    """Raised where a file ends too early or is damaged; says how. lines() adds (line number, rest of that line)."""


def compression(path: File, start: bytes) -> str:
    """Return "gzip", "zstd" or "" (none) by a file's first 6 bytes. UserError for .tar, .zip and the like."""
    unread = next((archive for mark, archive in _UNREAD.items() if start.startswith(mark)), None)
    if path.name.endswith(_TAR):
        unread = "a tar archive", "tar -xf"
    if unread is not None:
        what, unpack = unread
        raise UserError(
            f"{path} is {what}, which is not read",
            fix=f"unpack it ({unpack} {path.name}) and name what it holds; .gz and .zst need no unpacking",
        )
    return "gzip" if start[:2] == GZIP else "zstd" if start[:4] == ZSTD else ""


def pieces(path: File, encoding: str, most: int, advance: screen.Advance, sha256: str = "") -> Iterator[bytes]:
    """Yield the decompressed file as UTF-8 (see _utf8), read in parts of at most `most` bytes; advance() hears of each.

    Raises Cut after the last good piece if the file is cut short or damaged. Raises UserError at the end when the file
    does not have the hash `sha256` ("" skips this check), and at once for an archive that is not read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) if isinstance(path, Path) else path.open("rb") as file:
        start = file.read(most)
        kind = compression(path, start[:6])
        raw = _raw(file, start, min(_READ, most) if kind else most, advance, digest.update)
        try:
            yield from _utf8(_decompress(raw, kind) if kind else raw, encoding)
        except Cut:
            for _ in raw:  # what follows the damage belongs to the hash
                pass
            _check_hash(path, digest.hexdigest(), sha256)
            raise
    _check_hash(path, digest.hexdigest(), sha256)


def _check_hash(path: File, digest: str, wanted: str) -> None:
    """Raise UserError if `digest` is not the hash `wanted`; do nothing if `wanted` is ""."""
    if wanted and digest != wanted:
        raise step_cache.file_changed(path)


def lines(parts: Iterator[bytes], block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, whole lines) in blocks of at least block_bytes, except the last.

    If `parts` raise Cut, yields the lines before it and raises Cut(reason, line number, rest of the damaged line).
    """
    first, rest, size = 1, list[bytes](), 0
    try:
        for part in parts:
            rest.append(part)
            size += len(part)
            end = part.rfind(b"\n") + 1 if size >= block_bytes else 0
            if end:
                block = b"".join([*rest[:-1], part[:end]])
                yield first, block
                first += block.count(b"\n")
                rest, size = [part[end:]], len(part) - end
    except Cut as error:
        whole, _, torn = b"".join(rest).rpartition(b"\n")
        if whole:
            yield first, whole + b"\n"
            first += whole.count(b"\n") + 1
        raise Cut(str(error), first, torn) from None
    if size:
        yield first, b"".join(rest)


def _raw(
    file: IO[bytes], start: bytes, size: int, advance: screen.Advance, update: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Yield `start`, which was read already, and the rest of the file, `size` bytes at a time.

    Calls advance(number of bytes) and update(bytes) for each part, `start` included, which is cut to `size` too.
    """
    data = start
    while data:
        for at in range(0, len(data), size):
            part = data[at : at + size]
            advance(len(part))
            update(part)
            yield part
        data = file.read(size)


def _decompress(parts: Iterator[bytes], kind: str) -> Iterator[bytes]:
    """Yield the unpacked bytes of a gzip or zstd archive of any members; Cut where it is damaged or ends."""
    errors, member = _opener(kind)
    current = member()
    begun = False  # within a member
    for part in parts:
        data = part
        while data := data if begun else data.lstrip(b"\0"):  # padding may follow a gzip member
            try:
                unpacked = current.decompress(data)
            except errors as error:
                raise Cut(f"{ARCHIVE_DAMAGED}: {error}") from None
            begun = not current.eof
            data = b"" if begun else current.unused_data
            if not begun:
                current = member()
            if unpacked:
                yield unpacked
    if begun:
        raise Cut(ARCHIVE_SHORT)


def _opener(kind: str) -> tuple[Any, Any]:
    """Return (the library's error class, a function that returns a new decompressor) for "gzip" or "zstd"."""
    if kind == "gzip":
        return isal_zlib.IsalError, lambda: isal_zlib.decompressobj(wbits=31)
    import zstandard  # 40 ms that only .zst files need

    return zstandard.ZstdError, lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


def _utf8(parts: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the text as UTF-8 without byte-order mark; "auto" is UTF-16 if the file begins with its mark, else UTF-8.

    UTF-8 is not checked. Bytes that another encoding cannot decode become 0xff. Raises LookupError for no encoding.
    """
    start = b""
    for part in parts:
        start += part
        if len(start) >= 3:
            break
    if encoding == "auto":
        encoding = _MARKS.get(start[:2], "utf-8")
    if encoding in ("utf-8", "utf8", "UTF-8"):
        yield start.removeprefix(codecs.BOM_UTF8)
        yield from parts
        return
    codecs.register_error("finlm.meaningless", lambda error: (_MEANINGLESS[0], error.end))  # type: ignore[attr-defined]
    decoder = codecs.getincrementaldecoder(encoding)("finlm.meaningless")
    first = True
    for part in itertools.chain((start,), parts):
        text = decoder.decode(part)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        yield text.encode("utf-8", _MEANINGLESS[1])
    yield decoder.decode(b"", final=True).encode("utf-8", _MEANINGLESS[1])


BLOCK_BYTES = 8 * 2**20
WHOLE_ROW = ""  # as an input's text_field: all columns of a table
_ARROW_ROWS = 64  # decoded at once: few, as one may be a book

Kind = Literal["jsonl", "lines", "files", "arrow"]


class Block(NamedTuple):
    """Rows of a file: its lines from `first` on, or rows of a table; for "files", (path, content) of several."""

    kind: Kind
    path: File
    first: int
    data: bytes | tuple[tuple[File, bytes], ...]
    cut: str = ""  # why the file ends here when it ends too early; data is then the row it struck


def blocks(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """Yield all rows of an input in order, as blocks; a file that is cut short ends in a block with `cut`.

    advance(n) hears of n bytes read. Raises UserError for a column that a table does not have, a file that changed
    since it was hashed, and an archive of a kind that is not read.
    """
    if item.format == "txt":
        yield from _files(item, advance)
        return
    for path, sha256 in item.files_with_hashes():
        if item.format in ("parquet", "arrow"):
            yield from _tables(item, path, advance)
            if not isinstance(path, Path):
                step_cache.check_unchanged(path, path.state())
            elif sha256:  # its columns are read here and there
                _check_hash(path, step_cache.sha256(path), sha256)
        else:
            yield from _lines(item, path, sha256, "jsonl" if item.format == "jsonl" else "lines", advance)


def _lines(item: Input, path: File, sha256: str, kind: Kind, advance: screen.Advance) -> Iterator[Block]:
    """Yield the blocks of a file of lines; a file that ends early, also within JSON, ends in a block with `cut`.

    Raises UserError at the file's end if it does not have the hash `sha256`, and for an archive that is not read.
    """
    try:
        parts = pieces(path, item.encoding, min(2**20, BLOCK_BYTES), advance, sha256)
        for first, data in lines(parts, BLOCK_BYTES):
            end = data.rfind(b"\n") + 1
            if kind == "jsonl" and _ends_early(data[end:]):
                if end:
                    yield Block(kind, path, first, data[:end])
                raise Cut(FILE_SHORT, first + data.count(b"\n"), data[end:])
            yield Block(kind, path, first, data)
    except Cut as error:
        reason, first, torn = error.args
        yield Block(kind, path, first, torn[:1000], cut=reason)


def _ends_early(row: bytes) -> bool:
    """Return whether `row`, a file's last without newline, is only the beginning of a JSON object; False for b""."""
    if not row.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(row)
    except UnicodeDecodeError as error:
        return error.end >= len(row)  # within a character
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated") or error.pos >= len(error.doc) - len("\\u0000")
    except RecursionError:
        return False
    return False


def _files(item: Input, advance: screen.Advance) -> Iterator[Block]:
    """Yield blocks of whole text files, one document per file; a block closes once it holds BLOCK_BYTES.

    A cut file gets a block of its own before those that wait. UserError for changed files and unread archives.
    """
    waiting: list[tuple[File, bytes]] = []
    size = 0
    for path, sha256 in item.files_with_hashes():
        parts: list[bytes] = []
        try:
            parts.extend(pieces(path, item.encoding, 2**20, advance, sha256))
        except Cut as error:
            yield Block("files", path, 1, b"".join(parts)[:1000], cut=str(error))
            continue
        waiting.append((path, b"".join(parts)))
        size += len(waiting[-1][1])
        if size >= BLOCK_BYTES:
            yield Block("files", path, 1, tuple(waiting))
            waiting, size = [], 0
    if waiting:
        yield Block("files", waiting[0][0], 1, tuple(waiting))


def _tables(item: Input, path: File, advance: screen.Advance) -> Iterator[Block]:
    """Yield a parquet or Arrow file as blocks of Arrow streams with the needed columns, then advance() by its size.

    A damaged file ends in a block with `cut`. Raises UserError when no column holds the text.
    """
    import pyarrow as pa

    first, waiting, size, cut = 1, list[Any](), 0, ""
    try:
        for batch in _batches(item, path):
            waiting.append(batch)
            size += batch.nbytes
            if size >= BLOCK_BYTES:
                yield Block("arrow", path, first, _serialise_batches(waiting))
                first += sum(part.num_rows for part in waiting)
                waiting, size = [], 0
    except (pa.ArrowInvalid, OSError) as error:
        cut = f"{FILE_DAMAGED}: {' '.join(str(error).split())[:200]}"
    if waiting:
        yield Block("arrow", path, first, _serialise_batches(waiting))
        first += sum(part.num_rows for part in waiting)
    if cut:
        yield Block("arrow", path, first, b"", cut)
    else:
        advance(path.stat().st_size)


def _batches(item: Input, path: File) -> Iterator[Any]:
    """Yield record batches of at most 64 rows with the needed columns. Raises UserError when no column has the text."""
    import pyarrow as pa

    remote = None if isinstance(path, Path) else pa.PythonFile(path.open_exactly(), "r")
    if item.format == "parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(remote or path, buffer_size=2**20) as file:
            columns = _columns(item, path, file.schema_arrow.names)
            yield from file.iter_batches(batch_size=_ARROW_ROWS, columns=columns, use_threads=False)
        return
    with remote or pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        columns = _columns(item, path, stream.schema.names)
        for batch in stream:
            chosen = batch.select(columns)
            for start in range(0, batch.num_rows, _ARROW_ROWS):
                yield chosen.slice(start, _ARROW_ROWS)


def _columns(item: Input, path: File, names: list[str]) -> list[str]:
    """Return the columns that hold the fields of the input; all for WHOLE_ROW. UserError when none holds the text.

    A field names a whole column, or a value inside the column that its part before the first dot names.
    """
    if item.text_field == WHOLE_ROW:
        return names
    fields = item.text_field, *item.meta.values(), *item.sides.values()
    wanted = {name if name in names else name.partition(".")[0] for name in fields}
    if item.text_field not in names and item.text_field.partition(".")[0] not in names:
        raise UserError(
            f"source {item.source}: {path} has no column {item.text_field!r}",
            evidence=f"it has {', '.join(names)}",
            fix="set data.sources[i].text_field",
        )
    return [name for name in names if name in wanted]


def _serialise_batches(batches: list[Any]) -> bytes:
    """Return the batches, at least one, as the bytes of one Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def estimate_bytes(inputs: Sequence[Input], packed: int = 4) -> int:
    """Return the estimated unpacked bytes; a compressed file counts `packed` times. UserError for archives."""
    sizes = (pair for item in inputs for pair in zip(item.paths, item.file_sizes(), strict=True))
    return sum(size * (packed if _is_compressed(path, size) else 1) for path, size in sizes)


def _is_compressed(path: File, size: int) -> bool:
    """Return whether a file is compressed, by its name if small or remote; UserError for unread archives."""
    if size < 2**16 or not isinstance(path, Path):
        return path.suffix in (".gz", ".zst", ".parquet")
    with path.open("rb") as file:
        return bool(compression(path, file.read(6))) or path.suffix == ".parquet"
