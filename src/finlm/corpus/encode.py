"""Run the step `shards`: encode the chosen documents in workers and write their ids in order.

train/<source>-00000.bin and held_out/<source>-00000.bin are flat little-endian uint16 or uint32 streams, each document
[<s>] ids </s>, cut between documents at data.shard_tokens; the .idx beside each holds where its documents start, and
the end, as uint64. The bytes depend on the documents and the tokenizer only, not on the number of workers, the chunks
or the encoder. Memory is a chunk or two per worker. Rows are made of documents later (rows/packing.py).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files, screen, step_cache
from finlm.base.errors import UserError
from finlm.base.step_cache import Step
from finlm.corpus import documents, selection, vocabulary
from finlm.corpus.documents import Documents
from finlm.corpus.read import readers
from finlm.corpus.selection import Selection
from finlm.corpus.workers import Arrays, ChunkTask, Context
from finlm.rows.shards import ShardEntry, Split, tokenizer_file, totals
from finlm.tokens import encoders, pretrained, tokenizer_json

VERSION = 1
SPLITS: dict[Split, int] = {"train": selection.TRAIN, "held_out": selection.HELD_OUT}
_COMPARED = 2**18  # bytes of a document that are compared
_SAMPLED = 256  # one document of so many is encoded by both encoders, and the first of every chunk


class Disagreement(Exception):
    """The error that gigatoken gave other ids than the tokenizer's library; names the text."""


@dataclass(frozen=True)
class Task:
    """A chunk to encode."""

    source: str
    chunk: Path
    decisions: selection.Decisions
    tokenizer: Path
    tokenizer_sha256: str
    special: tuple[int | None, int]  # <s> where documents begin with it, </s>
    dtype: str
    encoder: str  # "gigatoken", or the name of the library that defines the ids

    def reads(self) -> tuple[Path, ...]:
        """Return the files that the task needs: the chunk's, and all files beside the tokenizer."""
        beside = sorted(path for path in self.tokenizer.parent.iterdir() if path.is_file())
        return (*ChunkTask(self.chunk).reads(), *beside)

    def key(self) -> str:
        """Return a hash of all that the result depends on; the chunk's name, itself a hash, stands for its text."""
        used = np.select([self.decisions == code for code in SPLITS.values()], list(SPLITS.values()), 255)
        digest = hashlib.blake2b(used.astype(np.uint8).tobytes(), digest_size=16).hexdigest()
        how = [self.tokenizer_sha256, self.special, self.dtype, self.encoder]
        return files.sha256_json([VERSION, self.chunk.stem, digest, *how])


class Encoded(NamedTuple):
    """The encoded documents of one split of a chunk, in order."""

    ids: npt.NDArray[Any]  # [tokens], <s> and </s> included
    lengths: npt.NDArray[np.int64]  # tokens of each document
    text_bytes: npt.NDArray[np.int64]  # bytes of each document


def encode_chunk(task: Task) -> Arrays:
    """Return a chunk's encoded documents: the arrays of Encoded as <split>.<array>, none for a split without any.

    Runs in a worker. Raises Disagreement when gigatoken and the library differ on a sampled document.
    """
    encoder = _load_encoder(task.tokenizer, task.encoder)
    result: Arrays = {}
    for split, code in SPLITS.items():
        texts = documents.read_bytes(task.chunk, task.decisions == code)
        if not texts:
            continue
        ids, lengths = _load_cutter(task.tokenizer).encode(encoder, texts)
        if task.encoder == "gigatoken":
            _check_sample(task, texts, ids, lengths)
        encoded = _join(ids, lengths, texts, task)
        result |= {f"{split}.{name}": array for name, array in encoded._asdict().items()}
    return result


@cache
def _load_encoder(tokenizer: Path, name: str) -> encoders.Encode:
    """Return gigatoken's encoder for "gigatoken", else the library's; cached. UserError if unreadable."""
    return encoders.Gigatoken(tokenizer) if name == "gigatoken" else encoders.reference(tokenizer)


_load_cutter = cache(encoders.load_cutter)


def _check_sample(task: Task, texts: Sequence[bytes], ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
    """Raise Disagreement if the library gives other ids for a sampled document: the first and every 256th after it.

    It finds what the tests before the step (encoders.find_disagreement) do not hold, a script or a state of gigatoken's
    caches, but hardly a fault of single documents: one in 1,000 shows within 3 M documents (but for once in 100,000).
    `ids` holds all texts end to end, `lengths` [texts] the number of ids of each.
    """
    reference, encoder = _load_encoder(task.tokenizer, ""), _load_encoder(task.tokenizer, task.encoder)
    # Of a long document both encode the start anew: the library takes 2.4 MB/s.
    long = [text[:_COMPARED] for text in texts[::_SAMPLED] if len(text) > _COMPARED]
    long = [text.decode("utf-8", errors="ignore").encode() for text in long]
    different = encoders.difference(encoder, reference, long) if long else ""
    places = [place for place in range(0, len(texts), _SAMPLED) if len(texts[place]) <= _COMPARED]
    expected, wanted = reference([texts[place] for place in places])
    starts, ends = np.cumsum(lengths) - lengths, np.cumsum(wanted)
    for place, end, count in zip(places, ends.tolist(), wanted.tolist(), strict=True):
        here = ids[starts[place] : starts[place] + lengths[place]]
        if not different and not np.array_equal(here, expected[end - count : end]):
            different = repr(texts[place][:60].decode("utf-8", errors="replace"))
    if different:
        raise Disagreement(f"{different} in {task.chunk.name}")


def _join(ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], texts: Sequence[bytes], task: Task) -> Encoded:
    """Return the documents end to end as <s> (if task.special has it), ids, </s>, with lengths in tokens and bytes."""
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


def write_shards(context: Context, directory: Path, tasks: Sequence[Task], text_bytes: int) -> list[ShardEntry]:
    """Encode all chunks and write the shards below `directory`; return their manifest entries, by split and source.

    The progress bar ends at `text_bytes`. Raises Disagreement, with unfinished shards, when gigatoken's ids are wrong.
    """
    for split in SPLITS:
        (directory / split).mkdir()
    entries: dict[Split, list[ShardEntry]] = {split: [] for split in SPLITS}
    used = max(1, text_bytes // readers.BLOCK_BYTES)  # a worker takes 0.3 s to start
    with step_cache.bar("shards", text_bytes, fast_bytes=20_000_000) as advance:
        kept = context.map_kept("encoded", encode_chunk, [(task.key(), task) for task in tasks], used)
        # The tasks of a source follow one another: sources.check_names() lets no other entry have its name.
        for source, chunks in itertools.groupby(zip(tasks, kept, strict=True), lambda pair: pair[0].source):
            streams = [_Stream(directory, split, source, context.data.shard_tokens) for split in SPLITS]
            for _, arrays in chunks:
                for stream in (stream for stream in streams if f"{stream.split}.ids" in arrays):
                    encoded = Encoded(*(arrays[f"{stream.split}.{name}"] for name in Encoded._fields))
                    stream.add(encoded)
                    advance(int(encoded.text_bytes.sum()))
            for stream in streams:
                stream.close()
                entries[stream.split] += stream.entries
    return [entry for split in SPLITS for entry in entries[split]]


class _Stream:
    """The shards of one source and split, of at most `shard_tokens` tokens, written as documents come."""

    def __init__(self, directory: Path, split: Split, source: str, shard_tokens: int) -> None:
        self.directory, self.split, self.source, self.shard_tokens = directory, split, source, shard_tokens
        self.entries: list[ShardEntry] = []
        self._shard: _Shard | None = None

    def add(self, encoded: Encoded) -> None:
        """Append documents; one that does not fit opens a new shard, which a longer one has to itself."""
        ends = np.cumsum(encoded.lengths)
        for first, last in self._cuts(ends):
            if self._shard is None:
                self._shard = _Shard(self.directory, self.split, self.source, len(self.entries))
            start = int(ends[first - 1]) if first else 0
            part = slice(first, last)
            self._shard.append(
                encoded.ids[start : int(ends[last - 1])], encoded.lengths[part], encoded.text_bytes[part]
            )

    def _cuts(self, ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield ranges first:last of documents, which end at `ends`, that fit the open shard; close a full one."""
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
        """Close the open shard, if any, and append its entry to `entries`."""
        if self._shard is not None:
            self.entries.append(self._shard.close())
            self._shard = None


class _Shard:
    """One <split>/<source>-<number>.bin, created empty and written, and its .idx."""

    def __init__(self, directory: Path, split: Split, source: str, number: int) -> None:
        self.split, self.source = split, source
        self.name = f"{split}/{source}-{number:05d}.bin"
        self.path = directory / self.name
        self.tokens = 0
        self._text_bytes = 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._sha256 = hashlib.sha256()
        self._file = self.path.open("wb")

    def append(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64]) -> None:
        """Write the ids of documents, end to end, to the .bin; remember their lengths in tokens and in bytes."""
        data = np.ascontiguousarray(ids).data.cast("B")
        self._file.write(data)
        self._sha256.update(data)
        self.tokens += len(ids)
        self._text_bytes += int(text_bytes.sum())
        self._lengths.append(lengths)

    def close(self) -> ShardEntry:
        """Close the .bin, write where documents end as .idx, and return the manifest entry. ValueError if empty."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate(self._lengths)
        index = np.concatenate(([0], np.cumsum(lengths))).astype("<u8").tobytes()
        self.path.with_suffix(".idx").write_bytes(index)
        return ShardEntry(
            source=self.source,
            split=self.split,
            file=self.name,
            sha256=self._sha256.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
            tokens=self.tokens,
            documents=len(lengths),
            text_bytes=self._text_bytes,
        )


def make_shards(context: Context, read: Documents, chosen: Selection, tokenizer: Step) -> Step:
    """Run the step `shards` unless cached: write shards, tokenizer and documents.json. Print the token counts.

    Raises UserError for a full disk, or a recipe that does not suit the tokenizer; NotPrepared if nothing may be built.
    """
    dtype = _choose_dtype(context, tokenizer.manifest["vocab_size"])
    model = tokenizer_file(tokenizer.path)
    add_bos, bos, eos = _choose_special_ids(context, tokenizer, model)
    text_bytes = chosen.total["bytes"] + chosen.total["held_out_bytes"]

    sha256, special = tokenizer.manifest["sha256"], (bos if add_bos else None, eos)

    def make(directory: Path) -> dict[str, object]:
        """Write shards, tokenizer and documents.json into directory; return the manifest."""
        decision = chosen.decisions()
        tasks = [
            Task(chunk.source, chunk.path, decision[chunk.rows], model, sha256, special, dtype, "")
            for chunk in read.chunks
        ]
        encoder, entries = _encode_documents(context, directory, tasks, model, text_bytes)
        if encoders.is_json(model):
            pretrained.copy_files(model.parent, directory / "tokenizer", (*pretrained.COPIED, tokenizer_json.BEFORE))
        else:
            shutil.copyfile(model, directory / "tokenizer.model")
        selection.write_description(directory, entries, read.inputs, chosen.sources)
        return {
            "version": VERSION,
            "dtype": dtype,
            "vocab_size": tokenizer.manifest["vocab_size"],
            "bos_id": bos,
            "eos_id": eos,
            "add_bos": add_bos,
            "encoder": encoder,
            "tokenizer_sha256": tokenizer.manifest["sha256"],
            "totals": totals(entries),
            **({"leak": chosen.leak} if chosen.leak else {}),
            "shards": [entry.to_json() for entry in entries],
        }

    depends_on = {
        "version": VERSION,
        "selection": chosen.key,
        "tokenizer": tokenizer.manifest["sha256"],
        "add_bos": add_bos,
        "dtype": dtype,
        "shard_tokens": context.data.shard_tokens,
    }
    if (bos, eos) != (tokenizer.manifest["bos_id"], tokenizer.manifest["eos_id"]):
        depends_on["special"] = [bos, eos]
    step = context.cache.step(
        "shards", depends_on, make, lambda: _estimate_space(read, chosen, tokenizer, model, dtype)
    )
    tokens = {split: sum(row["tokens"] for row in step.manifest["totals"][split].values()) for split in SPLITS}
    context.say(
        step,
        f"{tokens['train']:,} training tokens, {tokens['held_out']:,} held out, {dtype}, "
        f"{text_bytes / sum(tokens.values()):.2f} bytes a token",
    )
    return step


def _choose_special_ids(context: Context, tokenizer: Step, model: Path) -> tuple[bool, int, int]:
    """Return (whether documents begin with a token, its id or -1, the id of the token that ends them).

    Raises UserError if the tokenizer lacks document_begin or document_end, or a tokenizer.model <s> with add_bos.
    """
    begin, end = vocabulary.special_ids(context, model)
    made, asked = tokenizer.manifest, context.recipe.tokenizer.add_bos
    bos = made["bos_id"] if begin is None else begin
    if asked and bos < 0 and not encoders.is_json(model):
        raise UserError("the tokenizer has no <s>", fix="set tokenizer.add_bos to false")
    return asked and (begin is not None or made.get("begins", True)), bos, made["eos_id"] if end is None else end


def _estimate_space(read: Documents, chosen: Selection, tokenizer: Step, model: Path, dtype: str) -> int:
    """Return the bytes of disk for shards and chunks; encodes samples if the manifest has no measured compression."""
    measured = [(row.bytes, list(row.tokens.values())[-1]) for row in vocabulary.compressions(tokenizer).values()]
    if not measured:
        texts = [text.encode() for _, text in vocabulary.sample_texts(read, chosen.decisions())]
        tokens = int(_load_cutter(model).encode(_load_encoder(model, ""), texts)[1].sum()) if texts else 0
        measured = [(sum(map(len, texts)), tokens)]
    return 2 * needed_bytes(measured, chosen.total, dtype)  # its chunks are kept as well


def needed_bytes(measured: Sequence[tuple[int, int]], total: Mapping[str, int], dtype: str) -> int:
    """Return the disk space for the shards in bytes, for a fifth more tokens than measured.

    `measured` has (text bytes, tokens) of samples, `total` the selection's counts. Without tokens: 2 bytes each.
    """
    tokens = 1.2 * sum(count for _, count in measured)
    bytes_a_token = sum(size for size, _ in measured) / tokens if tokens else 2
    documents = total["kept"] + total["held_out"]
    width = np.dtype(dtype).itemsize
    return int((total["bytes"] + total["held_out_bytes"]) / bytes_a_token * width) + documents * (2 * width + 8)


def _encode_documents(
    context: Context, directory: Path, tasks: Sequence[Task], model: Path, text_bytes: int
) -> tuple[str, list[ShardEntry]]:
    """Write the shards, with gigatoken unless _choose_encoder() refuses it; if its ids differ, again with the library.

    Returns (name of the encoder that wrote the shards, their entries). Before it starts again, prints a notice and
    removes what was written. Raises UserError if data.encoder is gigatoken and its ids differ.
    """
    library, encoder = encoders.reference(model).name, _choose_encoder(context, model)
    tasks = [replace(task, encoder=encoder) for task in tasks]
    try:
        return encoder, write_shards(context, directory, tasks, text_bytes)
    except Disagreement as error:
        _refuse_or_say(context, library, str(error))
    for split in SPLITS:
        shutil.rmtree(directory / split)
    return library, write_shards(context, directory, [replace(task, encoder=library) for task in tasks], text_bytes)


def _choose_encoder(context: Context, model: Path) -> str:
    """Return the name of the encoder to try first: gigatoken, or the library if data.encoder or a test demands it.

    Prints a notice if the test fails. Raises UserError when data.encoder names an encoder that cannot be used.
    """
    library, wanted = encoders.reference(model).name, context.data.encoder
    if wanted == library:
        return library
    if wanted not in ("auto", "gigatoken"):
        raise UserError(
            f"data.encoder {wanted} does not read {model.name}", fix=f"set data.encoder to auto or {library}"
        )
    different = encoders.check_gigatoken(model)
    if not different:
        return "gigatoken"
    _refuse_or_say(context, library, different)
    return library


def _refuse_or_say(context: Context, library: str, different: str) -> None:
    """Raise UserError if data.encoder is gigatoken, else print that `library` is used; `different` tells why."""
    if context.data.encoder == "gigatoken":
        raise UserError(
            f"gigatoken does not give {library}'s ids with this tokenizer",
            evidence=different,
            fix=f"set data.encoder to auto or {library}",
        )
    slower = "half" if library == "sentencepiece" else "a tenth of"
    screen.say(f"shards: encoding with {library}, at {slower} the speed: gigatoken differs ({different})")


def _choose_dtype(context: Context, vocab_size: int) -> str:
    """Return uint16 up to 65,536 pieces, else uint32. Raises UserError when data.token_dtype is too small."""
    wanted = context.data.token_dtype
    if wanted == "uint16" and vocab_size > 65536:
        raise UserError(
            f"data.token_dtype uint16 holds ids up to 65,535, the tokenizer has {vocab_size:,} pieces",
            fix="set data.token_dtype to auto or uint32",
        )
    return wanted if wanted != "auto" else "uint16" if vocab_size <= 65536 else "uint32"
