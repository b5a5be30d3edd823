"""Turn rows into clean documents, in chunks that worker processes write to the cache under keys of their content.

The parent reads blocks of rows (read/readers.py), small ones of several files together, and workers parse, clean and
hash them: <chunk>.txt, the documents' UTF-8 end to end; <chunk>.npy, a record per document (INDEX); last <chunk>.json,
its counts (Parsed). A chunk is kept under a key of its bytes and the rules, so a source that is added, renamed or
changed in one place costs its own chunks only, and a killed run loses only the chunks that were under way. A file's
chunks are listed under its hash: a known file is not read again. Memory is a few blocks per worker. selection.py
decides afterwards which documents are used.

A row that cannot be read is set aside with its file, line and reason in broken.jsonl; of those that cleaning drops, all
are counted and the first of each reason are kept in dropped.jsonl.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files, screen, step_cache, units
from finlm.base.step_cache import Cache, File, Step
from finlm.corpus import clean
from finlm.corpus.read import parsing, readers
from finlm.corpus.read.readers import Block
from finlm.corpus.read.sources import Input, Split
from finlm.corpus.workers import Engine
from finlm.recipe.schema_data import Clean

VERSION = 3
INDEX = np.dtype([("end", "<u8"), ("characters", "<u4"), ("hash", "<u8", (2,))])
SIDES = np.dtype([*INDEX.descr, ("group", "<u8"), ("day", "<u4")])  # a hash of held_out_by's value; YYYYMMDD

_SAMPLES = 20  # rows of each source and reason kept in dropped.jsonl
_VALUES = 10_000  # different values of a counted field, above which it is no category but an identity
_EXCERPT = 200

Values = dict[str, Counter[str]]  # of each counted field: {value: documents}
Where = tuple[tuple[File, int], ...]  # of each part of a chunk: its file and first line
KeptRow = tuple[int, int, str, str]  # number of its part, lines after its first, reason, start


@dataclass(frozen=True)
class Task:
    """A chunk to parse, or a chunk that is already in the cache."""

    number: int  # of the input
    item: Input  # without its files
    blocks: tuple[Block, ...]  # none where it is kept
    where: Where
    rules: Clean
    chunk: Path  # without a suffix
    kept: Parsed | None = None  # its record, for a host that does not have its files

    def writes(self) -> tuple[Path, ...]:
        """Return the files of the chunk, in the order in which they are written; none where it is kept."""
        return tuple(self.chunk.with_suffix(suffix) for suffix in (".txt", ".npy", ".json")) if self.blocks else ()

    def __str__(self) -> str:
        """Return the file and line of its first row."""
        return f"{self.where[0][0]}:{self.where[0][1]}"


@dataclass
class Parsed:
    """The counts and set-aside rows of a chunk, as its .json holds them."""

    number: int = 0  # of the input
    where: Where = ()
    rows: int = 0
    documents: int = 0
    text_bytes: int = 0
    index_bytes: int = 0
    broken: list[KeptRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: list[KeptRow] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    cut: bool = False
    chunk: str = ""

    @classmethod
    def load(cls, chunk: Path) -> Parsed | None:
        """Return the chunk's record from its .json, or None unless all its files have the recorded sizes."""
        try:
            kept = cls(**json.loads(chunk.with_suffix(".json").read_bytes()))
            suffixes = (".txt", ".npy") if kept.documents else ()
            sizes = [chunk.with_suffix(suffix).stat().st_size for suffix in suffixes] or [0, 0]
        except (OSError, ValueError, TypeError):
            return None
        if sizes != [kept.text_bytes, kept.index_bytes]:
            return None
        kept.values = {name: Counter(values) for name, values in kept.values.items()}
        return kept

    def locate(self, rows: Sequence[KeptRow]) -> list[parsing.BrokenRow]:
        """Return rows of this chunk as (file, line, reason, first characters)."""
        return [(self.where[part][0], self.where[part][1] + line, why, start) for part, line, why, start in rows]


@dataclass(frozen=True)
class InputRead(parsing.RowCounts):
    """The counts of an input's rows, as the documents step's manifest has them."""

    split: Split = "share"
    file: str = ""  # its name, or how many there are
    sha256: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    pinned: str = ""
    documents: int = 0
    bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    values: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # of counted fields the most frequent


@dataclass(frozen=True)
class Chunk:
    """A chunk of a documents step."""

    input: int
    source: str
    path: Path
    rows: slice  # its documents among all

    @property
    def key(self) -> str:
        """The cache key of its content."""
        return self.path.stem


@dataclass(frozen=True)
class Documents:
    """A documents step: its inputs, and its chunks in order."""

    inputs: tuple[InputRead, ...]
    chunks: tuple[Chunk, ...]
    kept_bytes: dict[str, int]  # of the files in the cache
    content: str  # a key of all texts in order and of the inputs they belong to, whatever their names and chunks are
    key: str = ""

    @property
    def count(self) -> int:
        """Number of documents of all inputs."""
        return sum(item.documents for item in self.inputs)

    def to_json(self) -> dict[str, Any]:
        """Return the content of manifest.json."""
        names = "input", "file", "documents"
        rows = ((c.input, "/".join(c.path.parts[-4:]), c.rows.stop - c.rows.start) for c in self.chunks)
        about = {"chunks": [dict(zip(names, row, strict=True)) for row in rows], "content": self.content}
        return {"inputs": [dict(vars(item)) for item in self.inputs], **about, "kept_bytes": self.kept_bytes}

    @classmethod
    def of(cls, step: Step) -> Documents:
        """Read the manifest of a finished documents step."""
        about, inputs = step.manifest, tuple(InputRead(**item) for item in step.manifest["inputs"])
        listed = [(row["input"], step.path.parent / row["file"], row["documents"]) for row in about["chunks"]]
        return cls(inputs, _number_chunks(inputs, listed), about["kept_bytes"], about["content"], step.key)


def _number_chunks(inputs: Sequence[InputRead], listed: Sequence[tuple[int, Path, int]]) -> tuple[Chunk, ...]:
    """Build Chunks from rows of (input, file, documents), each with the range of its documents among all."""
    ends = list(itertools.accumulate(count for _, _, count in listed))
    return tuple(
        Chunk(number, inputs[number].source, path, slice(end - count, end))
        for (number, path, count), end in zip(listed, ends, strict=True)
    )


def write(
    directory: Path, inputs: Sequence[Input], rules: Clean, engine: Engine, max_broken_fraction: float, keep: Path
) -> Documents:
    """Write chunks to the cache `keep`, rows left out to directory. Raises UserError for too many broken rows."""
    parsing.check_first_rows(inputs, max_broken_fraction)
    tallies = [_Tally(item) for item in inputs]
    written: list[tuple[int, Path, int]] = []
    kept_bytes: dict[str, int] = {}
    store = _Store(Cache(keep, build=True), rules, clean.depends_on(rules))
    spans = list(_spans(inputs, store))
    used = max(1, readers.estimate_bytes([span.item for span in spans if not span.known]) // readers.BLOCK_BYTES)
    total, whole = sum(span.size for span in spans if not span.known), sum(span.size for span in spans)
    if 0 < total < whole:
        screen.say(f"documents: {units.format_bytes(total)} of {units.format_bytes(whole)} to read, the rest is kept")
    with (
        (directory / "broken.jsonl").open("w", encoding="utf-8") as broken,
        (directory / "dropped.jsonl").open("w", encoding="utf-8") as dropped,
        step_cache.bar("documents", total, fast_bytes=30_000_000) as advance,
        engine.start(used) as run,
    ):
        tasks = (task for span in spans for task in _tasks(span, store, advance))
        for parsed in run(parse, tasks):
            tally = tallies[parsed.number]
            dropped.writelines(tally.add(parsed))
            broken.writelines(parsing.json_line(tally.item.source, row) for row in parsed.locate(parsed.broken))
            if parsed.documents:
                written.append((parsed.number, keep / parsed.chunk, parsed.documents))
                kept_bytes[parsed.chunk] = parsed.text_bytes
                kept_bytes[f"{parsed.chunk.removesuffix('.txt')}.npy"] = parsed.index_bytes
    reads = tuple(tally.summarize() for tally in tallies)
    parsing.check_broken_rows(directory, reads, max_broken_fraction, keep)
    chunks = _number_chunks(reads, written)
    return Documents(reads, chunks, kept_bytes, _content_key(inputs, chunks))


def _content_key(inputs: Sequence[Input], chunks: Sequence[Chunk]) -> str:
    """Return a key of each input's split and texts in order, whatever the names and chunks are."""
    digests = [hashlib.sha256() for _ in inputs]
    for chunk in chunks:
        digests[chunk.input].update(read_index(chunk.path)["hash"].tobytes())
    return files.sha256_json([[item.split, digest.hexdigest()] for item, digest in zip(inputs, digests, strict=True)])


@dataclass(frozen=True)
class _Store:
    """The part of the cache that keeps the chunks made by these cleaning rules."""

    cache: Cache
    rules: Clean
    rules_key: Mapping[str, Any]

    def chunk(self, digest: str, item: Input) -> Path:
        """Return the path, without suffix, of the chunk of the input's rows that have this digest."""
        return self.cache.chunk("documents", files.sha256_json([VERSION, self.rules_key, _settings(item), digest]))


class _Span(NamedTuple):
    """Files of an input that are read together."""

    number: int  # of the input
    item: Input  # with these files alone
    size: int  # of them together, in bytes
    record: Path  # where its chunks are listed: [[digest, [[number of the file, first line]]]]
    known: list[tuple[str, list[list[int]]]]  # the list, empty where the files have to be read


def _spans(inputs: Sequence[Input], store: _Store) -> Iterator[_Span]:
    """Group each input's files into spans of BLOCK_BYTES, with their known chunks if the cache has all of them."""
    for number, item in enumerate(inputs):
        hashed, first, size = list(item.files_with_hashes()), 0, 0
        for last, (path, _) in enumerate(hashed, 1):
            size += path.stat().st_size
            if size < readers.BLOCK_BYTES and last < len(hashed):
                continue
            paths, sha256 = zip(*hashed[first:last], strict=True)
            part = replace(item, paths=paths, sha256=sha256 if all(sha256) else ())
            key = files.sha256_json([VERSION, readers.BLOCK_BYTES, _settings(item), sha256])
            record = store.cache.chunk("files", key).with_suffix(".json")
            listed = files.read_json(record) if all(sha256) and record.is_file() else []
            if not all(Parsed.load(store.chunk(digest, item)) for digest, _ in listed):
                listed = []
            yield _Span(number, part, size, record, listed)
            first, size = last, 0


def _settings(item: Input) -> list[Any]:
    """Return the settings of an input that decide how its rows are read, for cache keys."""
    how = [item.format, item.text_field, dict(item.meta), item.encoding, item.null_text]
    return [*how, dict(item.sides)] if item.sides else how


def _tasks(span: _Span, store: _Store, advance: screen.Advance) -> Iterator[Task]:
    """Yield a span's tasks in order; list the chunks of hashed files that are read now in the span's record."""
    how = replace(span.item, paths=(), sha256=())  # 100 bytes a file, in every task
    paths = span.item.paths
    numbers = {path: number for number, path in enumerate(paths)}
    for digest, parts in span.known:
        where = tuple((paths[number], line) for number, line in parts)
        chunk = store.chunk(digest, how)
        kept = Parsed.load(chunk)
        if kept is None:
            raise step_cache.file_changed(chunk.with_suffix(".json"))
        yield Task(span.number, how, (), where, store.rules, chunk, kept)
    if span.known:
        return
    listed = []
    for blocks in _bundles(readers.blocks(span.item, advance)):
        digest, where = _digest(blocks), tuple(part for block in blocks for part in _parts(block))
        chunk = store.chunk(digest, how)
        kept = Parsed.load(chunk)
        yield Task(span.number, how, () if kept else blocks, where, store.rules, chunk, kept)
        listed.append([digest, [[numbers[path], line] for path, line in where]])
    if span.item.sha256:
        files.write_text(span.record, json.dumps(listed))


def _bundles(blocks: Iterator[Block]) -> Iterator[tuple[Block, ...]]:
    """Yield groups of blocks of about BLOCK_BYTES: a large block alone, or several small ones together."""
    waiting, size = list[Block](), 0
    for block in blocks:
        length = sum(len(data) for _, data in block.data) if isinstance(block.data, tuple) else len(block.data)
        if waiting and size + length > readers.BLOCK_BYTES:
            yield tuple(waiting)
            waiting, size = [], 0
        waiting.append(block)
        size += length
    if waiting:
        yield tuple(waiting)


def _parts(block: Block) -> list[tuple[File, int]]:
    """Return (file, first line) of each part of a block; a block of text files has a part per file."""
    return [(path, 1) for path, _ in block.data] if isinstance(block.data, tuple) else [(block.path, block.first)]


def _digest(blocks: Sequence[Block]) -> str:
    """Return the SHA-256 of what decides the documents of blocks: contents and kinds, not names and lines."""
    digest = hashlib.sha256()  # twice as fast as blake2b where the processor knows it
    for block in blocks:
        for data in [data for _, data in block.data] if isinstance(block.data, tuple) else [block.data]:
            digest.update(f"{block.kind} {block.cut} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


class _Tally:
    """The running counts of one input while its chunks come back in order."""

    def __init__(self, item: Input) -> None:
        """Start with zero counts."""
        self.item = item
        self.counts = {"rows": 0, "broken": 0, "cut": 0, "documents": 0, "bytes": 0}
        self.dropped: Counter[str] = Counter()
        self.sampled: Counter[str] = Counter()
        self.values: Values = {name: Counter() for name in item.meta}

    def add(self, parsed: Parsed) -> Iterator[str]:
        """Add a chunk's counts; yield the lines of dropped.jsonl for its samples, the first 20 of each reason."""
        counts = (parsed.rows, len(parsed.broken), parsed.cut, parsed.documents, parsed.text_bytes)
        for name, count in zip(self.counts, counts, strict=True):
            self.counts[name] += int(count)
        self.dropped.update(parsed.dropped)
        for name, values in parsed.values.items():
            if len(self.values[name]) <= _VALUES:
                self.values[name].update(values)
        for row in parsed.locate(parsed.samples):
            self.sampled[row[2]] += 1
            if self.sampled[row[2]] <= _SAMPLES:
                yield parsing.json_line(self.item.source, row)

    def summarize(self) -> InputRead:
        """Return the manifest's entry of the input; of each counted field it has the 20 most frequent values."""
        listed = self.item.file_entries()
        alone = len(listed) == 1
        return InputRead(
            source=self.item.source,
            split=self.item.split,
            file=listed[0]["file"] if alone else f"{len(listed):,} files",
            sha256=listed[0]["sha256"] if alone else files.sha256_json([row["sha256"] for row in listed]),
            files=listed,
            pinned=self.item.expected,
            **self.counts,
            dropped=dict(sorted(self.dropped.items())),
            values={
                name: sorted(values.items(), key=lambda entry: (-entry[1], entry[0]))[:20]
                for name, values in self.values.items()
                if len(values) <= _VALUES
            },
        )


def parse(task: Task) -> Parsed:
    """Parse and clean a task's rows into its chunk, unless it is kept; return its record. Runs in a worker."""
    return replace(task.kept or _parse(task), number=task.number, where=task.where)


def _parse(task: Task) -> Parsed:
    """Parse, clean and hash the task's rows; write the chunk's .txt, .npy and last .json, and return its counts."""
    result = Parsed(values={name: Counter() for name in task.item.meta})
    rows = _read_rows(task, result)
    texts, characters, sides = [], [], list[tuple[int, int]]()
    cleaned = clean.clean_texts(clean.load(task.rules), [row.text for _, _, row in rows])
    for (part, line, row), (text, reason) in zip(rows, cleaned, strict=True):
        if reason is not None:
            result.dropped[reason] += 1
            if result.dropped[reason] <= _SAMPLES:
                result.samples.append((part, line, reason, row.text[:_EXCERPT]))
            continue
        texts.append(text.encode("utf-8"))
        characters.append(len(text))
        for name in task.item.meta:
            result.values[name][row.meta[name]] += 1
        if task.item.sides:
            value = hashlib.blake2b(row.meta.get("held_out_by", "").encode(), digest_size=8).digest()
            sides.append((int.from_bytes(value, "little"), int(row.meta.get("held_out_from", 0))))
    result.cut = any(block.cut for block in task.blocks)
    if texts:
        hashes = b"".join([hashlib.blake2b(text, digest_size=16).digest() for text in texts])
        index = np.empty(len(texts), dtype=SIDES if sides else INDEX)
        if sides:
            index["group"], index["day"] = np.array(sides, dtype=np.uint64).T
        index["end"], index["characters"] = np.cumsum([len(text) for text in texts]), characters
        index["hash"] = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
        packed = io.BytesIO()
        np.save(packed, index)
        files.write_bytes(task.chunk.with_suffix(".txt"), *texts)
        files.write_bytes(task.chunk.with_suffix(".npy"), packed.getvalue())
        result.documents, result.text_bytes = len(texts), int(index["end"][-1])
        result.index_bytes = packed.tell()
        result.chunk = "/".join(task.chunk.with_suffix(".txt").parts[-4:])
    files.write_text(task.chunk.with_suffix(".json"), json.dumps(vars(result), ensure_ascii=False))
    return result


def _read_rows(task: Task, result: Parsed) -> list[tuple[int, int, parsing.Row]]:
    """Return (part, line after its first, row) of rows that can be read; count all in result, set broken ones aside."""
    rows, part = list[tuple[int, int, parsing.Row]](), 0
    for block in task.blocks:
        for row in parsing.parse_block(block, task.item):
            result.rows += 1
            if row.broken:
                result.broken.append((part, row.line - block.first, row.broken, row.excerpt()))
            else:
                rows.append((part, row.line - block.first, row))
            part += block.kind == "files" and not block.cut
        part += block.kind != "files" or bool(block.cut)
    return rows


def read_index(path: Path) -> npt.NDArray[Any]:
    """Return a chunk's records: INDEX [documents], or SIDES where the recipe holds out by a field."""
    index: npt.NDArray[Any] = np.load(path.with_suffix(".npy"))
    return index


def read_bytes(path: Path, wanted: npt.NDArray[np.bool_]) -> list[bytes]:
    """Return the wanted documents of a chunk as UTF-8; wanted is bool [documents]."""
    ends = read_index(path)["end"].astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    data = path.read_bytes()
    return [data[start:end] for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True)]


def read_texts(path: Path, wanted: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Yield the wanted documents of a chunk as strings; wanted is bool [documents]."""
    return (text.decode("utf-8") for text in read_bytes(path, wanted))
