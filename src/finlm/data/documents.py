"""Rows to clean documents, in chunks that worker processes write independently.

The parent reads blocks of rows (readers.py), workers parse, clean and hash them, one chunk a block: <chunk>.txt, the
documents' UTF-8 end to end, and <chunk>.npy, a record a document (INDEX). A chunk's bytes depend on the files, the
rules and the block size only, never on the number of workers; memory is a few blocks a worker. Which of the documents
are used is decided afterwards (dedup.py).

A row that cannot be read is set aside with its file, line and reason in broken.jsonl; of those that cleaning drops, all
are counted and the first of each reason are kept in dropped.jsonl.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.data import broken_rows, clean, cut_files, parsing, readers, steps, streams, workers
from finlm.data.readers import Block
from finlm.data.sources import Input
from finlm.recipe.schema_clean import Clean

VERSION = 2
INDEX = np.dtype([("end", "<u8"), ("characters", "<u4"), ("hash", "<u8", (2,))])

_SAMPLES = 20  # rows of each source and reason kept in dropped.jsonl
_VALUES = 10_000  # different values of a counted field, above which it is no category but an identity
_EXCERPT = 200

Values = dict[str, Counter[str]]  # of each counted field: {value: documents}


@dataclass(frozen=True)
class Task:
    """A block to parse."""

    number: int  # of the input
    item: Input  # without its files
    block: Block
    rules: Clean
    chunk: Path


@dataclass
class Parsed:
    """What became of a block."""

    number: int
    rows: int = 0
    documents: int = 0
    text_bytes: int = 0
    broken: list[tuple[Path, int, str, str]] = field(default_factory=list)  # file, line, reason, first characters
    dropped: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[Path, int, str, str]] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    cut: bool = False
    chunk: str = ""


def estimate_bytes(inputs: Sequence[Input], packed: int = 4) -> int:
    """Disk space for the chunks of these files; compressed Chinese text is a third of its size, at least a quarter."""
    paths = [path for item in inputs for path in item.paths]
    return sum(path.stat().st_size * (packed if _is_compressed(path) else 1) for path in paths)


def write(
    directory: Path, inputs: Sequence[Input], rules: Clean, processes: int, max_broken_fraction: float, keep: Path
) -> dict[str, Any]:
    """Write the chunks of all inputs below directory; the manifest: inputs with their counts, chunks in order.

    Raises UserError when a source has too many broken rows, kept in `keep`/broken-<source>.jsonl; at once when it
    begins with hardly anything else.
    """
    broken_rows.check_first(inputs, max_broken_fraction)
    (directory / "chunks").mkdir()
    tallies = [_Tally(item) for item in inputs]
    written: list[dict[str, Any]] = []
    total = sum(path.stat().st_size for item in inputs for path in item.paths)
    used = min(processes, max(1, estimate_bytes(inputs) // readers.BLOCK_BYTES))
    how = [replace(item, paths=(), sha256=()) for item in inputs]  # 100 bytes a file, in every task
    with (
        (directory / "broken.jsonl").open("w", encoding="utf-8") as broken,
        (directory / "dropped.jsonl").open("w", encoding="utf-8") as dropped,
        steps.bar("documents", total, fast_bytes=30_000_000) as advance,
        workers.pool(used) as pool,
    ):
        tasks = (
            Task(place, how[place], block, rules, directory / "chunks" / f"{item.source}.{item.split}-{number:05d}.txt")
            for place, item in enumerate(inputs)
            for number, block in enumerate(readers.blocks(item, advance))
        )
        for parsed in workers.in_order(pool, used, parse, tasks):
            tally = tallies[parsed.number]
            dropped.writelines(tally.add(parsed))
            broken.writelines(_line(tally.item.source, row) for row in parsed.broken)
            if parsed.documents:
                written.append({"input": parsed.number, "file": parsed.chunk, "documents": parsed.documents})
    manifest = {"inputs": [tally.described() for tally in tallies], "chunks": written}
    broken_rows.check(directory, manifest, max_broken_fraction, keep)
    return manifest


class _Tally:
    """The counts of one input as its blocks come back in order."""

    def __init__(self, item: Input) -> None:
        self.item = item
        self.counts = {"rows": 0, "broken": 0, "cut": 0, "documents": 0, "bytes": 0}
        self.dropped: Counter[str] = Counter()
        self.sampled: Counter[str] = Counter()
        self.values: Values = {name: Counter() for name in item.meta}

    def add(self, parsed: Parsed) -> Iterator[str]:
        """Count a block; the lines of dropped.jsonl that it adds."""
        found = (parsed.rows, len(parsed.broken), parsed.cut, parsed.documents, parsed.text_bytes)
        for name, count in zip(self.counts, found, strict=True):
            self.counts[name] += int(count)
        self.dropped.update(parsed.dropped)
        for name, values in parsed.values.items():
            if len(self.values[name]) <= _VALUES:
                self.values[name].update(values)
        for row in parsed.samples:
            self.sampled[row[2]] += 1
            if self.sampled[row[2]] <= _SAMPLES:
                yield _line(self.item.source, row)

    def described(self) -> dict[str, Any]:
        """The manifest's entry; of counted fields the 20 most frequent values."""
        listed = self.item.described()
        one = len(listed) == 1
        return {
            "source": self.item.source,
            "split": self.item.split,
            "file": listed[0]["file"] if one else f"{len(listed):,} files",
            "sha256": listed[0]["sha256"] if one else files.sha256_json([row["sha256"] for row in listed]),
            "files": listed,
            "pinned": self.item.expected,
            **self.counts,
            "dropped": dict(sorted(self.dropped.items())),
            "values": {
                name: sorted(values.items(), key=lambda entry: (-entry[1], entry[0]))[:20]
                for name, values in self.values.items()
                if len(values) <= _VALUES
            },
        }


def cut(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """The files that end too early."""
    if not any(item["cut"] for item in manifest["inputs"]):
        return []
    return [row["file"] for row in files.read_json_lines(directory / "broken.jsonl") if cut_files.is_cut(row["reason"])]


def parse(task: Task) -> Parsed:
    """Read a block's rows and write their chunk. Runs in a worker."""
    result = Parsed(task.number, cut=bool(task.block.cut), values={name: Counter() for name in task.item.meta})
    cleaner = _cleaner(task.rules)
    texts, characters = [], []
    for row in parsing.rows(task.block, task.item):
        result.rows += 1
        if row.broken:
            result.broken.append((row.path, row.line, row.broken, row.excerpt()))
            continue
        text, reason = cleaner(row.text)
        if reason is not None:
            result.dropped[reason] += 1
            if result.dropped[reason] <= _SAMPLES:
                result.samples.append((row.path, row.line, reason, row.text[:_EXCERPT]))
            continue
        texts.append(text.encode("utf-8"))
        characters.append(len(text))
        for name, value in row.meta.items():
            result.values[name][value] += 1
    if texts:
        hashes = b"".join([hashlib.blake2b(text, digest_size=16).digest() for text in texts])
        index = np.empty(len(texts), dtype=INDEX)
        index["end"], index["characters"] = np.cumsum([len(text) for text in texts]), characters
        index["hash"] = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
        with task.chunk.open("wb") as file:
            file.write(b"".join(texts))
        np.save(task.chunk.with_suffix(".npy"), index)
        result.documents, result.text_bytes, result.chunk = len(texts), int(index["end"][-1]), task.chunk.name
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
        here = slice(first, first + item["documents"])
        source = manifest["inputs"][item["input"]]["source"]
        yield Chunk(item["input"], source, directory / "chunks" / item["file"], here)
        first = here.stop


def read_index(path: Path) -> npt.NDArray[Any]:
    """A chunk's records, INDEX [documents]."""
    index: npt.NDArray[Any] = np.load(path.with_suffix(".npy"))
    return index


def read_bytes(path: Path, wanted: npt.NDArray[np.bool_]) -> list[bytes]:
    """The wanted documents of a chunk in UTF-8; wanted is bool [documents]."""
    ends = read_index(path)["end"].astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    data = path.read_bytes()
    return [data[start:end] for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True)]


def read_texts(path: Path, wanted: npt.NDArray[np.bool_]) -> Iterator[str]:
    """The wanted documents of a chunk; wanted is bool [documents]."""
    return (text.decode("utf-8") for text in read_bytes(path, wanted))


@lru_cache(1)
def _cleaner(rules: Clean) -> clean.Cleaner:
    """Built once a process: a keyword list is an automaton of megabytes."""
    return clean.Cleaner(rules)


def _line(source: str, row: tuple[Path, int, str, str]) -> str:
    path, line, reason, start = row
    entry = {"source": source, "file": str(path), "line": line, "reason": reason, "start": start}
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _is_compressed(path: Path) -> bool:
    return bool(streams.compression(path)) or path.suffix == ".parquet"
