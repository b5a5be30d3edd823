"""A file's bytes as UTF-8 pieces, whatever it was compressed and encoded with; and those cut into whole lines.

Compression is known by content, not by name: a download named .gz that was already unpacked is common. gzip (ISA-L, 2
times zlib here) and zstd may have several members; what a damaged archive gives before it fails is not lost. UTF-16 is
known by its byte-order mark, any other encoding is named in the recipe; a byte sequence that has no meaning in it
becomes a byte that is no UTF-8 either, so that its row, and no other, is found broken later.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.data import cut_files

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
    """An archive ends too early or is damaged; says how."""


def compression(path: Path) -> str:
    """ "gzip", "zstd" or "" by a file's first bytes. Raises UserError for an archive that is not read."""
    with path.open("rb") as file:
        start = file.read(6)
    for mark, (what, unpack) in _UNREAD.items():
        if start.startswith(mark):
            raise UserError(
                f"{path} is {what}, which is not read",
                fix=f"unpack it ({unpack} {path.name}) and name what it holds; .gz and .zst need no unpacking",
            )
    return "gzip" if start[:2] == GZIP else "zstd" if start[:4] == ZSTD else ""


def pieces(path: Path, encoding: str, most: int, advance: screen.Advance) -> Iterator[bytes]:
    """The file as UTF-8 in pieces of `most` bytes read at once. Raises Cut after the last good piece."""
    kind = compression(path)
    with path.open("rb") as file:
        raw = _raw(file, min(_READ, most) if kind else most, advance)
        yield from _utf8(_decompressed(raw, kind) if kind else raw, encoding)


def lines(parts: Iterator[bytes], block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, whole lines) in blocks of at least block_bytes, a line longer than that alone.

    Raises Cut after the lines before the damage; its second argument is what is left of the line it struck.
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


def _raw(file: BinaryIO, size: int, advance: screen.Advance) -> Iterator[bytes]:
    while data := file.read(size):
        advance(len(data))
        yield data


def _decompressed(parts: Iterator[bytes], kind: str) -> Iterator[bytes]:
    errors, member = _opener(kind)
    current = member()
    begun = False  # within a member
    for part in parts:
        data = part
        while data := data if begun else data.lstrip(b"\0"):  # padding may follow a gzip member
            try:
                found = current.decompress(data)
            except errors as error:
                raise Cut(f"{cut_files.ARCHIVE_DAMAGED}: {error}") from None
            begun = not current.eof
            data = b"" if begun else current.unused_data
            if not begun:
                current = member()
            if found:
                yield found
    if begun:
        raise Cut(cut_files.ARCHIVE_SHORT)


def _opener(kind: str) -> tuple[Any, Any]:
    """(its errors, a function that begins a member)."""
    if kind == "gzip":
        return isal_zlib.IsalError, lambda: isal_zlib.decompressobj(wbits=31)
    import zstandard  # 40 ms that only .zst files need

    return zstandard.ZstdError, lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


def _utf8(parts: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The same text in UTF-8 without a byte-order mark."""
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
    for part in _chain(start, parts):
        text = decoder.decode(part)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        yield text.encode("utf-8", _MEANINGLESS[1])
    yield decoder.decode(b"", final=True).encode("utf-8", _MEANINGLESS[1])


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
