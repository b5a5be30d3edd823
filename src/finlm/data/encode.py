"""Documents to token shards: workers encode chunks, the parent writes their ids in order.

train/<source>-00000.bin and held_out/<source>-00000.bin are flat little-endian uint16 or uint32 streams, each document
[<s>] ids </s>, cut between documents at data.shard_tokens; the .idx beside each holds where its documents start, and
the end, as uint64. The bytes depend on the documents and the tokenizer only, not on the number of workers, the chunks
or the encoder. Memory is a chunk or two a worker.

Each worker compares a sample of its chunk, so of every shard, between the two encoders (encoders.py).

It does not pack documents into rows (packing.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import dedup, documents, encoders, readers, steps, workers

VERSION = 1
SPLITS = {"train": dedup.TRAIN, "held_out": dedup.HELD_OUT}


_COMPARED = 2**18  # bytes of a document that are compared
_SAMPLED = 64  # one document of so many is encoded by both encoders, and the first of every chunk


class Disagreement(Exception):
    """gigatoken gave other ids than sentencepiece; says for which text."""


@dataclass(frozen=True)
class Task:
    """A chunk to encode."""

    source: str
    chunk: Path
    decisions: dedup.Decisions
    tokenizer: Path
    special: tuple[int | None, int]  # <s> where documents begin with it, </s>
    dtype: str
    encoder: str  # "gigatoken" or "sentencepiece"


@dataclass(frozen=True)
class Encoded:
    """A chunk's documents of one split, in order."""

    ids: npt.NDArray[Any]  # [tokens], <s> and </s> included
    lengths: npt.NDArray[np.int64]  # tokens of each document
    text_bytes: npt.NDArray[np.int64]  # bytes of each document


def encode(task: Task) -> tuple[Task, dict[str, Encoded]]:
    """The chunk's documents as ids, by split. Runs in a worker. Raises Disagreement."""
    encoder = _encoder(task.tokenizer, task.encoder)
    result = {}
    for split, code in SPLITS.items():
        texts = documents.read_bytes(task.chunk, task.decisions == code)
        if not texts:
            continue
        if task.encoder == "gigatoken":
            reference = _encoder(task.tokenizer, "sentencepiece")
            sample = [_begin(text) for text in texts[::_SAMPLED]]
            if different := encoders.difference(encoder, reference, sample):
                raise Disagreement(f"{different} in {task.chunk.name}")
        result[split] = _join(*_cuts(task.tokenizer).encode(encoder, texts), texts, task)
    return task, result


@cache
def _encoder(tokenizer: Path, name: str) -> encoders.Encode:
    """Loaded once a process; the path is that of a finished step, whose content never changes."""
    return encoders.Gigatoken(tokenizer) if name == "gigatoken" else encoders.Sentencepiece(tokenizer)


@cache
def _cuts(tokenizer: Path) -> encoders.Cuts:
    return encoders.Cuts(tokenizer)


def _begin(text: bytes) -> bytes:
    """What of a sampled text is compared: all but of very long ones."""
    return text if len(text) <= _COMPARED else text[:_COMPARED].decode("utf-8", errors="ignore").encode()


def _join(ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], texts: Sequence[bytes], task: Task) -> Encoded:
    """[<s>] ids </s> of every document end to end."""
    bos, eos = task.special
    lengths = lengths + 1 + (bos is not None)
    ends = np.cumsum(lengths)
    stream = np.empty(int(ends[-1]), dtype=np.dtype(task.dtype).newbyteorder("<"))
    is_text = np.ones(len(stream), dtype=np.bool_)
    stream[ends - 1], is_text[ends - 1] = eos, False
    if bos is not None:
        stream[ends - lengths], is_text[ends - lengths] = bos, False
    stream[is_text] = ids
    return Encoded(stream, lengths, np.array([len(text) for text in texts], dtype=np.int64))


def write(
    directory: Path, tasks: Sequence[Task], processes: int, shard_tokens: int, text_bytes: int
) -> list[dict[str, Any]]:
    """Encode all chunks and write the shards below directory; their manifest entries, by split and source.

    Raises Disagreement, with an unfinished directory.
    """
    for split in SPLITS:
        (directory / split).mkdir()
    streams: dict[tuple[str, str], _Stream] = {}
    used = min(processes, len(tasks), max(1, text_bytes // readers.BLOCK_BYTES))  # a worker takes 0.3 s to start
    with (
        steps.bar("shards", text_bytes, fast_bytes=20_000_000 * used) as advance,
        workers.pool(used) as pool,
    ):
        for task, result in workers.in_order(pool, used, encode, tasks):
            for (source, _), stream in streams.items():
                if source != task.source:
                    stream.close()  # its last chunk has come: the tasks are in the order of the sources
            for split, encoded in result.items():
                stream = streams.setdefault((task.source, split), _Stream(directory, split, task.source, shard_tokens))
                stream.add(encoded)
                advance(int(encoded.text_bytes.sum()))
    for stream in streams.values():
        stream.close()
    return [entry for split in SPLITS for key, stream in streams.items() if key[1] == split for entry in stream.entries]


def totals(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """{split: {source: {tokens, documents, text_bytes}}}."""
    sums: dict[str, dict[str, dict[str, int]]] = {split: {} for split in SPLITS}
    for entry in entries:
        row = sums[entry["split"]].setdefault(entry["source"], {"tokens": 0, "documents": 0, "text_bytes": 0})
        for name in row:
            row[name] += entry[name]
    return sums


class _Stream:
    """The shards of one source and split as they grow."""

    def __init__(self, directory: Path, split: str, source: str, shard_tokens: int) -> None:
        self.directory = directory
        self.split = split
        self.source = source
        self.shard_tokens = shard_tokens
        self.entries: list[dict[str, Any]] = []
        self._shard: _Shard | None = None

    def add(self, encoded: Encoded) -> None:
        """Append documents, opening a new shard where the next document does not fit; a longer one has its own."""
        ends = np.cumsum(encoded.lengths)
        for first, last in self._cuts(ends):
            if self._shard is None:
                self._shard = _Shard(self.directory, f"{self.split}/{self.source}-{len(self.entries):05d}.bin")
            start = int(ends[first - 1]) if first else 0
            part = slice(first, last)
            self._shard.append(
                encoded.ids[start : int(ends[last - 1])], encoded.lengths[part], encoded.text_bytes[part]
            )

    def _cuts(self, ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Ranges of documents, each for the shard then open."""
        first = 0
        while first < len(ends):
            used = self._shard.tokens if self._shard else 0
            start = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, start + self.shard_tokens - used, side="right"))
            if last <= first and used:
                self.close()
                continue
            last = max(last, first + 1)
            yield first, last
            first = last

    def close(self) -> None:
        """End the open shard, if any."""
        if self._shard is not None:
            self.entries.append({"source": self.source, "split": self.split, **self._shard.close()})
            self._shard = None


class _Shard:
    """One .bin and .idx being written."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.path = directory / name
        self.tokens = 0
        self._text_bytes = 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._sha256 = hashlib.sha256()
        self._file = self.path.open("wb")

    def append(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64]) -> None:
        data = ids.tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self.tokens += len(ids)
        self._text_bytes += int(text_bytes.sum())
        self._lengths.append(lengths)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate(self._lengths)
        index = np.concatenate(([0], np.cumsum(lengths))).astype("<u8").tobytes()
        self.path.with_suffix(".idx").write_bytes(index)
        return {
            "file": self.name,
            "sha256": self._sha256.hexdigest(),
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "tokens": self.tokens,
            "documents": len(lengths),
            "text_bytes": self._text_bytes,
        }
