"""Turn rows into clean documents, in chunks that worker processes write to the cache.

The parent reads blocks of rows (read/readers.py). Workers parse, clean and hash them into three files: <chunk>.txt has
the documents' UTF-8 text end to end, <chunk>.npy a record per document (INDEX), and <chunk>.json, written last, the
counts (Parsed). The cache key of a chunk is a hash of its rows and the cleaning rules, so a changed source redoes only
its changed chunks. A file with a known hash is not read again. selection.py decides later which documents are used.

broken.jsonl lists the rows that cannot be read, dropped.jsonl the first that cleaning dropped for each reason.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter, deque
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

_SAMPLES = 20  # rows of each source and reason kept in dropped.jsonl, and values of a field in the manifest
_VALUES = 10_000  # different values of a counted field, above which it is no category but an identity
_EXCERPT = 200
_NO_FILE = Path()

Values = dict[str, Counter[str]]  # of each counted field: {value: documents}
Where = tuple[tuple[File, int], ...]  # of each part of a chunk: its file and first line
KeptRow = tuple[int, int, str, str]  # number of its part, lines after its first, reason, start


@dataclass(frozen=True)
class Task:
    """A chunk to parse, or a chunk that is already in the cache."""

    number: int  # of the input
    item: Input  # without its files
    blocks: tuple[Block, ...]  # none where it is kept, and without their files
    first: tuple[File, int]  # where its first row is: file and line
    rules: Clean
    chunk: Path  # without a suffix
    kept: Parsed | None = None  # its record, for a host that does not have its files

    def writes(self) -> tuple[Path, ...]:
        """Return the chunk's .txt, .npy and .json in the order they are written; empty if the cache has them."""
        return tuple(self.chunk.with_suffix(suffix) for suffix in (".txt", ".npy", ".json")) if self.blocks else ()

    def __str__(self) -> str:
        return f"{self.first[0]}:{self.first[1]}"


@dataclass
class Parsed:
    """The counts, broken rows and samples of dropped rows of a chunk, as its .json stores them."""

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
        """Return the record in <chunk>.json; None if it is missing or invalid, or the .txt or .npy has another size."""
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
        """Return `rows`, which store part and line offset, as (file, line number, reason, first characters)."""
        return [(self.where[part][0], self.where[part][1] + line, why, start) for part, line, why, start in rows]


@dataclass(frozen=True)
class InputRead(parsing.RowCounts):
    """The counts and file hashes of an input, as the manifest of the documents step stores them."""

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
        """The cache key of the chunk: a hash of its rows and the cleaning rules."""
        return self.path.stem


@dataclass(frozen=True)
class Documents:
    """The result of a documents step: the counts of its inputs, and its chunks in order."""

    inputs: tuple[InputRead, ...]
    chunks: tuple[Chunk, ...]
    kept_bytes: dict[str, int]  # of the files in the cache
    content: str  # a key of all texts in order and of the inputs they belong to, whatever their names and chunks are
    key: str = ""

    @property
    def count(self) -> int:
        """The number of documents of all inputs."""
        return sum(item.documents for item in self.inputs)

    def to_json(self) -> dict[str, object]:
        """Return the content of the step's manifest.json, which of() reads."""
        chunks = [
            {"input": each.input, "file": "/".join(each.path.parts[-4:]), "documents": each.rows.stop - each.rows.start}
            for each in self.chunks
        ]
        about = {"inputs": [dict(vars(item)) for item in self.inputs], "chunks": chunks}
        return about | {"content": self.content, "kept_bytes": self.kept_bytes}

    @classmethod
    def of(cls, step: Step) -> Documents:
        """Return the Documents that the manifest of a finished documents step describes."""
        about, inputs = step.manifest, tuple(InputRead(**item) for item in step.manifest["inputs"])
        listed = [(row["input"], step.path.parent / row["file"], row["documents"]) for row in about["chunks"]]
        return cls(inputs, _number_chunks(inputs, listed), about["kept_bytes"], about["content"], step.key)


def _number_chunks(inputs: Sequence[InputRead], listed: Sequence[tuple[int, Path, int]]) -> tuple[Chunk, ...]:
    """Return a Chunk for each (input number, path, documents), with the range of its documents among all."""
    ends = list(itertools.accumulate(count for _, _, count in listed))
    return tuple(
        Chunk(number, inputs[number].source, path, slice(end - count, end))
        for (number, path, count), end in zip(listed, ends, strict=True)
    )


def write(
    directory: Path, inputs: Sequence[Input], rules: Clean, engine: Engine, max_broken_fraction: float, keep: Path
) -> Documents:
    """Parse and clean all rows; write chunks to the cache `keep`, and broken.jsonl and dropped.jsonl to `directory`.

    Reuses chunks in the cache; starts workers of `engine` for the others. Raises UserError if a source has no row, or
    broken rows beyond the share `max_broken_fraction`, which are then also in keep/broken-<source>.jsonl.
    """
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
        places = deque[Where]()  # of the chunks that are being made: 100 bytes a file that no worker needs
        tasks = (task for span in spans for task in _tasks(span, store, advance, places))
        for parsed in run(parse, tasks):
            parsed.where = places.popleft()
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
    """Return a hash of each input's split and texts in order, independent of source names and of chunk limits."""
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
        """Return the cache path, without suffix, of the chunk for rows of this digest, read as `item` says."""
        return self.cache.chunk("documents", files.sha256_json([VERSION, self.rules_key, item.settings(), digest]))


class _Span(NamedTuple):
    """Files of an input that are read together."""

    number: int  # of the input
    item: Input  # with these files alone
    size: int  # of them together, in bytes
    record: Path  # where its chunks are listed: [[digest, [[number of the file, first line]]]]
    known: list[tuple[str, list[list[int]]]]  # the list, empty where the files have to be read


def _spans(inputs: Sequence[Input], store: _Store) -> Iterator[_Span]:
    """Yield each input's files in groups that close at BLOCK_BYTES; `known` lists the chunks if the cache has all."""
    for number, item in enumerate(inputs):
        sizes, first, size = item.file_sizes(), 0, 0
        for last, file_size in enumerate(sizes, 1):
            size += file_size
            if size < readers.BLOCK_BYTES and last < len(sizes):
                continue
            part = item.part(first, last)
            key = files.sha256_json([VERSION, readers.BLOCK_BYTES, item.settings(), part.sha256])
            record = store.cache.chunk("files", key).with_suffix(".json")
            listed = files.read_json(record) if part.sha256 and record.is_file() else []
            if not all(Parsed.load(store.chunk(digest, item)) for digest, _ in listed):
                listed = []
            yield _Span(number, part, size, record, listed)
            first, size = last, 0


def _tasks(span: _Span, store: _Store, advance: screen.Advance, places: deque[Where]) -> Iterator[Task]:
    """Yield a span's tasks in order: reads the files unless `known`, and records the chunks of hashed files.

    Appends the Where of each task to `places`. Raises UserError if a known chunk is no longer in the cache.
    """
    how, paths = span.item.part(0, 0), span.item.paths  # 100 bytes a file, in every task
    numbers = {id(path): number for number, path in enumerate(paths)}  # a Path's own hash takes 5 us
    for digest, parts in span.known:
        where = tuple((paths[number], line) for number, line in parts)
        chunk = store.chunk(digest, how)
        kept = Parsed.load(chunk)
        if kept is None:
            raise step_cache.file_changed(chunk.with_suffix(".json"))
        places.append(where)
        yield Task(span.number, how, (), where[0], store.rules, chunk, kept)
    if span.known:
        return
    listed = []
    for blocks in _bundles(readers.blocks(span.item, advance)):
        digest, where = _digest(blocks), tuple((path, line) for block in blocks for path, line, _ in _parts(block))
        chunk = store.chunk(digest, how)
        kept = Parsed.load(chunk)
        places.append(where)
        sent = () if kept else tuple(block._replace(path=_NO_FILE) for block in blocks)
        yield Task(span.number, how, sent, where[0], store.rules, chunk, kept)
        listed.append([digest, [[numbers[id(path)], line] for path, line in where]])
    if span.item.sha256:
        files.write_text(span.record, json.dumps(listed))


def _bundles(blocks: Iterator[Block]) -> Iterator[tuple[Block, ...]]:
    """Yield the blocks in groups of at most BLOCK_BYTES bytes; a larger block is a group by itself."""
    waiting, size = list[Block](), 0
    for block in blocks:
        length = sum(len(data) for *_, data in _parts(block))
        if waiting and size + length > readers.BLOCK_BYTES:
            yield tuple(waiting)
            waiting, size = [], 0
        waiting.append(block)
        size += length
    if waiting:
        yield tuple(waiting)


def _parts(block: Block) -> list[tuple[File, int, bytes]]:
    """Return (file, first line, content) of each part of a block; a block of text files has a part per file."""
    if isinstance(block.data, tuple):
        return [(path, 1, data) for path, data in block.data]
    return [(block.path, block.first, block.data)]


def _digest(blocks: Sequence[Block]) -> str:
    """Return the hex SHA-256 of the blocks' contents, kinds and cut reasons, without file names and line numbers."""
    digest = hashlib.sha256()  # twice as fast as blake2b where the processor knows it
    for block in blocks:
        for *_, data in _parts(block):
            digest.update(f"{block.kind} {block.cut} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


class _Tally:
    """The running counts of one input while its chunks come back in order."""

    def __init__(self, item: Input) -> None:
        self.item = item
        self.counts = {"rows": 0, "broken": 0, "cut": 0, "documents": 0, "bytes": 0}
        self.dropped: Counter[str] = Counter()
        self.sampled: Counter[str] = Counter()
        self.values: Values = {name: Counter() for name in item.meta}

    def add(self, parsed: Parsed) -> Iterator[str]:
        """Add a chunk's counts, then yield the dropped.jsonl lines of its samples, at most 20 per reason and input."""
        counts = (parsed.rows, len(parsed.broken), parsed.cut, parsed.documents, parsed.text_bytes)
        for name, count in zip(self.counts, counts, strict=True):
            self.counts[name] += count
        self.dropped.update(parsed.dropped)
        for name, values in parsed.values.items():
            if len(self.values[name]) <= _VALUES:
                self.values[name].update(values)
        for row in parsed.locate(parsed.samples):
            self.sampled[row[2]] += 1
            if self.sampled[row[2]] <= _SAMPLES:
                yield parsing.json_line(self.item.source, row)

    def summarize(self) -> InputRead:
        """Return the input's manifest entry, with the 20 most frequent values of fields with at most 10,000 values."""
        paths, hashes = self.item.paths, self.item.sha256
        alone = len(paths) == 1
        return InputRead(
            source=self.item.source,
            split=self.item.split,
            file=paths[0].name if alone else f"{len(paths):,} files",
            sha256=hashes[0] if alone else files.sha256_json(hashes),
            files=self.item.file_entries(),
            pinned=self.item.expected,
            **self.counts,
            dropped=dict(sorted(self.dropped.items())),
            values={
                name: sorted(values.items(), key=lambda entry: (-entry[1], entry[0]))[:_SAMPLES]
                for name, values in self.values.items()
                if len(values) <= _VALUES
            },
        )


def parse(task: Task) -> Parsed:
    """Parse, clean and hash the rows; write .txt and .npy if any document is left, then .json; return the record.

    Does nothing but return task.kept if that is set. Runs in a worker.
    """
    if task.kept is not None:
        return replace(task.kept, number=task.number)
    result = Parsed(values={name: Counter() for name in task.item.meta})
    rows = _read_rows(task, result)
    texts, characters, sides = [], [], list[tuple[int, int]]()
    cleaned = clean.clean_texts(clean.load(task.rules), [row.text for _, _, row in rows])
    for (part, line, row), (data, count, reason) in zip(rows, cleaned, strict=True):
        if reason is not None:
            result.dropped[reason] += 1
            if result.dropped[reason] <= _SAMPLES:
                result.samples.append((part, line, reason, row.text[:_EXCERPT]))
            continue
        texts.append(data)
        characters.append(count)
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
        result.documents, result.text_bytes, result.index_bytes = len(texts), int(index["end"][-1]), packed.tell()
        result.chunk = "/".join(task.chunk.with_suffix(".txt").parts[-4:])
    files.write_text(task.chunk.with_suffix(".json"), json.dumps(vars(result), ensure_ascii=False))
    result.number = task.number  # not in the file: another recipe may have the chunk in another input
    return result


def _read_rows(task: Task, result: Parsed) -> list[tuple[int, int, parsing.Row]]:
    """Return (part, line offset, row) of each readable row; add counts and the broken rows to `result`."""
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
    """Return the records in the .npy of a chunk: INDEX [documents], or SIDES if a field decides what is held out."""
    index: npt.NDArray[Any] = np.load(path.with_suffix(".npy"))
    return index


def read_bytes(path: Path, wanted: npt.NDArray[np.bool_]) -> list[bytes]:
    """Return the UTF-8 bytes of documents in the chunk's .txt `path`: those where `wanted` [documents] is True."""
    ends = read_index(path)["end"].astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    data = path.read_bytes()
    return [data[start:end] for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True)]


def read_texts(path: Path, wanted: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Yield the texts of the documents that read_bytes() returns."""
    return (text.decode("utf-8") for text in read_bytes(path, wanted))
