"""A FinCorpus-shaped corpus about an invented financial world, made from (size, seed, split) alone.

It lets a recipe run without a download, and learning on it can be measured: train and held-out share the laws of the
world and no name, and the exam file asks about both. Of the text 33 % are announcements, 48 % news, 16 % articles and
3 % exam, as in FinCorpus. Companies number 100 * sqrt(megabytes), but at most one for 20 KB and 12,000 in all: 48 at
1 MB, 400 at 16 MB, 3,160 at 1 GB. The uncompressed bytes are the same on every machine and Python from 3.11 on; the
compressed ones depend on zlib. One core of a busy cloud machine writes 11 to 16 MB/s, and large sources come in parts
that several cores write; one process takes 135 MB of memory at 1 GB and 195 MB at 10 GB.

It does not imitate the noise of a real crawl, and at many GB its near-duplicates grow with the events per company.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from collections.abc import Iterator
from json import JSONEncoder
from json.encoder import encode_basestring
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from finlm.base.errors import UserError
from finlm.base.units import parse_bytes
from finlm.data.synthetic_archive import Archive
from finlm.data.synthetic_articles import articles
from finlm.data.synthetic_exam import exam
from finlm.data.synthetic_facts import Row
from finlm.data.synthetic_filings import filings
from finlm.data.synthetic_news import news
from finlm.data.synthetic_world import GROUP, MAX_COMPANIES, SPLITS, Dice, World

SOURCES = ("announcement", "fin_news", "fin_articles", "fin_exam")
SHARE_PERCENT = {"announcement": 33, "fin_news": 48, "fin_articles": 16, "fin_exam": 3}
MIN_BYTES = 100_000  # below, the announcements cannot introduce every company the exam asks about
PART_BYTES = 64_000_000  # of a source's text, six seconds of a core
_BLOCK_LINES = 2_000  # about 1 MB
_encode = JSONEncoder(ensure_ascii=False).encode


def write(directory: Path, size_bytes: int, seed: int, split: Literal["train", "held_out"]) -> dict[str, Path]:
    """Write <source>.jsonl.gz for the four sources into directory; return {source: path}.

    size_bytes is the UTF-8 text of all four together, met within 2 % from 1 MB on. Each file appears under its name
    only when it is whole. Raises UserError for a size below 100 KB.
    """
    about = archive(size_bytes, seed, split)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {source: directory / f"{source}.jsonl.gz" for source in SOURCES}
    for source, path in paths.items():
        _write_one(path, _lines(source, _rows(source, size_bytes, seed, about)))
    return paths


def parts_of(source: str, size_bytes: int) -> int:
    """In how many parts a source can be written at the same time."""
    return -(-size_bytes * SHARE_PERCENT[source] // (100 * PART_BYTES))


def write_part(source: str, directory: Path, size_bytes: int, seed: int, split: str, part: int) -> Path:
    """<source>-<part>.jsonl.gz; the parts one after the other are the file of `write`."""
    about = archive(size_bytes, seed, split)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{source}-{part}.jsonl.gz"
    _write_one(path, _lines(source, _part(source, size_bytes, seed, about, part)))
    return path


def documents(source: str, size_bytes: int, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Rows {"text": str, "meta": {"source": str, ...}} of one source as `write` stores them for the same arguments;
    size_bytes is the size of all four sources. Raises UserError for a size below 100 KB or an unknown name."""
    if source not in SOURCES:
        raise UserError(f"no synthetic source {source!r}", fix=f"use one of {', '.join(SOURCES)}")
    for text, meta in _rows(source, size_bytes, seed, archive(size_bytes, seed, split)):
        yield {"text": text, "meta": {"source": source, **meta}}


def company_count(size_bytes: int) -> int:
    """How many companies the world of a corpus of that size has: whole groups of four."""
    by_root = isqrt(size_bytes // 1_600)  # 25 * sqrt(megabytes)
    return min(GROUP * max(2, min(by_root, size_bytes // 80_000)), MAX_COMPANIES)


def archive(size_bytes: int, seed: int, split: str) -> Archive:
    """The half of the world that a corpus of that size is about. Raises UserError for a size below 100 KB."""
    if size_bytes < MIN_BYTES:
        raise UserError(f"{size_bytes:,} bytes are too few for a synthetic corpus", fix="ask for at least 100KB")
    if split not in SPLITS:
        raise UserError(f"no synthetic split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    return Archive(World(split, seed, company_count(size_bytes)))


def _rows(source: str, size_bytes: int, seed: int, archive: Archive) -> Iterator[Row]:
    """The source's share of the corpus."""
    for part in range(parts_of(source, size_bytes)):
        yield from _part(source, size_bytes, seed, archive, part)


def _part(source: str, size_bytes: int, seed: int, archive: Archive, part: int) -> Iterator[Row]:
    """One of the equal parts of a source, to the nearest document."""
    parts = parts_of(source, size_bytes)
    dice = Dice(archive.world.split, seed, source, *([part] if part else []))
    if source == "announcement":
        # In the smallest corpora the announcements barely suffice to introduce each company once.
        rows = filings(archive, dice, 2 if size_bytes >= 400_000 else 1, part, parts)
    else:
        rows = {"fin_news": news, "fin_articles": articles, "fin_exam": exam}[source](archive, dice)
    left = size_bytes * SHARE_PERCENT[source] // (100 * parts)
    for row in rows:
        text_bytes = len(row[0].encode())
        if 2 * left < text_bytes:
            return
        left -= text_bytes
        yield row


def _lines(source: str, rows: Iterator[Row]) -> Iterator[str]:
    """Rows as JSON lines; by hand, because a full json.dumps of each small row takes a tenth of the run."""
    template: str | None = None  # all rows of a source have the same keys
    for text, meta in rows:
        if template is None:
            entries = "".join(f', "{key}": %s' for key in meta)
            template = f'{{"text": %s, "meta": {{"source": "{source}"{entries}}}}}\n'
        values = [encode_basestring(value) if isinstance(value, str) else _encode(value) for value in meta.values()]
        yield template % (encode_basestring(text), *values)


def _write_one(path: Path, lines: Iterator[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            # Neither a time nor a name in the header; level 1 because the files are read about once.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=raw, mtime=0) as file:
                block: list[str] = []
                for line in lines:
                    block.append(line)
                    if len(block) == _BLOCK_LINES:
                        file.write("".join(block).encode())
                        block.clear()
                file.write("".join(block).encode())
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """`python -m finlm.data.synthetic OUT --size 16MB --seed 7 [--split train|held_out]`; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m finlm.data.synthetic", description="Write a synthetic corpus.")
    parser.add_argument("out", type=Path, help="directory for the four .jsonl.gz files")
    parser.add_argument("--size", default="16MB", help="text in all, such as 500KB, 16MB, 2GB or bytes (16MB)")
    parser.add_argument("--seed", type=int, default=7, help="which world (7)")
    parser.add_argument("--split", choices=SPLITS, default="train", help="which half of it (train)")
    options = parser.parse_args(arguments)
    try:
        paths = write(options.out, parse_bytes(options.size), options.seed, options.split)
    except ValueError as error:
        print(f"error: --size: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error.problem}; {error.fix}", file=sys.stderr)
        return 2
    for path in paths.values():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
