"""Read rows made of pieces of documents, and compute which row each position of a run reads.

The index belongs to (shards, packing, T), is built once inside the shards directory (rows/dialogues.py) and
memory-mapped, so opening is instant. The pieces of a step are counted and numbered by arrays and copied one by one, a
microsecond each (benchmarks/data_rows.py).

A run's rows are cut into stages (data.mixture), each with a whole number of rows of every source; within a stage the
sources are interleaved by a permutation, and each is read in its own endless order, going on from stage to stage. Every
number is computed from (seed, position): no state, no table, the same at any world size.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe.settings import MixtureStage
from finlm.rows.shards import IGNORED, Ids, Order, Rows, Shard, Shards, check_ids, within

VERSION = 1

Packing = Literal["blocks", "best_fit", "single"]  # data.packing but for concat; single: a dialogue a row
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Stretches of the streams of all shards laid end to end; row r has the pieces first[r]:first[r + 1]."""

    start: Longs  # [pieces] first token, counted over all shards
    length: npt.NDArray[np.int32]  # [pieces] tokens
    first: Longs  # [rows + 1]


@dataclass(frozen=True)
class SourceRows:
    """The number of a source's rows, and of the tokens in them."""

    source: str
    rows: int
    tokens: int = 0


@dataclass(frozen=True)
class Index:
    """The rows of some shards, source after source; `packing` is "" for pairs and prompts, which are not filled."""

    pieces: Pieces
    packing: str
    sequence_length: int
    sources: tuple[SourceRows, ...]

    @classmethod
    def read(cls, directory: Path) -> Index:
        """Open a finished index, its arrays memory-mapped. Raises FileNotFoundError if there is none."""
        about = files.read_json(directory / "manifest.json")
        sources = tuple(SourceRows(**source) for source in about["sources"])
        arrays = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("start", "length", "first"))
        return cls(Pieces(*map(np.asarray, arrays)), about["packing"], about["sequence_length"], sources)


def index_path(shards_directory: Path, packing: Packing, sequence_length: int) -> Path:
    """Return the directory for the row index of the training shards in `shards_directory`; it may not exist."""
    return shards_directory / "rows" / f"{packing}-{sequence_length}-v{VERSION}"


@dataclass(frozen=True)
class Batch:
    """The pieces of some rows, row by row, cut to T + 1 tokens a row; each array but `filled` is int64 [pieces]."""

    row: Longs  # within the batch
    start: Longs  # first token, counted over all shards
    length: Longs  # tokens
    column: Longs  # of the first token
    filled: npt.NDArray[np.bool_]  # [rows, T + 1], where the row has a token


class PackedRows:
    """Rows of sequence_length tokens, each made of the pieces of an index, with the methods of shards.Rows.

    A row id that does not exist raises IndexError in every method.
    """

    def __init__(self, shards: Sequence[Shard], index: Index) -> None:
        """Keep the index and the shards that it was made of, in the same order, which is not checked."""
        self.shards = list(shards)
        self.sequence_length = index.sequence_length
        self.sources = {source.source: source.rows for source in index.sources}
        # A block's last token has no label within the block; best_fit's rows have room for one token more than T.
        self._pieces = index.pieces
        self._holds_many = index.packing == "blocks"  # a piece may hold several documents
        self._begins: list[int] = np.cumsum([0, *(shard.tokens for shard in self.shards)]).tolist()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._pieces.first) - 1

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """Return how many labels of these rows are not -100; reads no tokens."""
        batch = self._batch(rows)
        return int(batch.length.sum()) - len(batch.length)

    def tokens_read(self, rows: npt.NDArray[Any]) -> int:
        """Return how many inputs of these rows are tokens, not padding; reads no tokens."""
        return int(self._batch(rows).filled[:, :-1].sum())

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Return inputs and next-token labels, each int64 [len(rows), T]; unused ends are 0 and -100.

        The last token of a piece has the label -100. A block is one piece, so its labels cross documents.
        """
        batch = self._batch(rows)
        tokens = self._tokens(batch)
        return tokens[:, :-1].copy(), np.where(has_next_token(batch), tokens[:, 1:], IGNORED)

    def documents(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the index of each input's document within its row, from 0: int32 [len(rows), T]; -1 for padding."""
        batch = self._batch(rows)
        begins = np.zeros(batch.filled.shape, dtype=np.int32)
        begins[batch.row, batch.column] = 1
        if self._holds_many:
            pieces = np.stack((batch.row, batch.column, batch.start, batch.length), axis=1)
            for row, column, start, length in pieces.tolist():
                begins[row, [column + begin for begin in self._document_starts(start, length)]] = 1
        return np.where(batch.filled, np.cumsum(begins, axis=1, dtype=np.int32) - 1, np.int32(-1))[:, :-1]

    def pieces(self, row: int) -> list[tuple[Shard, int, int]]:
        """Return (shard, first token in it, number of tokens) of each stretch of a row, in order; none is cut to T + 1.

        A piece that crosses into the next shard gives two.
        """
        (row,) = check_ids(np.array([row]), len(self)).tolist()
        part = slice(int(self._pieces.first[row]), int(self._pieces.first[row + 1]))
        stretches = []
        for start, length in zip(self._pieces.start[part].tolist(), self._pieces.length[part].tolist(), strict=True):
            stretches += [(self.shards[number], inner, count) for number, inner, count in self._within(start, length)]
        return stretches

    def source_ranges(self) -> dict[str, range]:
        """Return {source: range of its row ids}; the range is empty for a source without rows."""
        ends = np.cumsum(list(self.sources.values())).tolist()
        return {name: range(end - rows, end) for (name, rows), end in zip(self.sources.items(), ends, strict=True)}

    def _batch(self, rows: npt.NDArray[Any]) -> Batch:
        """Return the pieces of these rows, cut to T + 1 tokens a row."""
        ids, room = check_ids(rows, len(self)), self.sequence_length + 1
        first = self._pieces.first[ids]
        counts = self._pieces.first[ids + 1] - first
        row = np.repeat(np.arange(len(ids)), counts)
        place = within(counts)  # of a piece in its row
        numbers = first[row] + place
        length = self._pieces.length[numbers].astype(np.int64)
        laid = np.cumsum(length) - length  # tokens of the pieces above
        column = laid - laid[np.arange(len(row)) - place]
        inside = column < room
        row, column, numbers = row[inside], column[inside], numbers[inside]
        length = np.minimum(length[inside], room - column)
        tokens = np.bincount(row, weights=length, minlength=len(ids))
        filled = np.arange(room) < tokens[:, None]
        return Batch(row, self._pieces.start[numbers], length, column, filled)

    def _tokens(self, batch: Batch) -> Ids:
        """Return the tokens of the rows: int64 [rows, T + 1], 0 for padding."""
        tokens = np.zeros(batch.filled.shape, dtype=np.int64)
        tokens[batch.filled] = self._copy_pieces(batch, lambda shard: shard.ids)
        return tokens

    def _copy_pieces(self, batch: Batch, stream: Callable[[Shard], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the pieces' values end to end; stream(shard) returns its tokens, or another array of that length."""
        of = cache(lambda number: stream(self.shards[number]))
        parts = [
            of(number)[inner : inner + count]
            for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True)
            for number, inner, count in self._within(start, length)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    def _within(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard index, first token, tokens) of a stretch; under `blocks` it may run into the next shard."""
        number = bisect_right(self._begins, start) - 1
        while length > 0:
            inner = start - self._begins[number]
            count = min(length, self.shards[number].tokens - inner)
            yield number, inner, count
            start, length, number = start + count, length - count, number + 1

    def _document_starts(self, start: int, length: int) -> list[int]:
        """Return where documents begin in the `length` tokens from `start` on, as offsets from it; 0 is always one."""
        starts = [0]
        number = bisect_right(self._begins, start) - 1
        while number < len(self.shards) and (base := self._begins[number]) < start + length:
            shard = self.shards[number]
            first, last = shard.documents_before([max(0, start + 1 - base), start + length - base])
            starts += [int(offset) + base - start for offset in shard.offsets[first:last]]
            number += 1
        return sorted(set(starts) - {length})


def has_next_token(batch: Batch) -> npt.NDArray[np.bool_]:
    """Return bool [rows, T]: whether the position holds a token, and the next one is of the same piece."""
    followed = batch.filled.copy()
    followed[batch.row, batch.column + batch.length - 1] = False
    return followed[:, :-1]


def open_rows(shards: Shards, sequence_length: int, how: Packing | Literal["concat"]) -> Rows | PackedRows:
    """Return the training rows of prepared shards; `how` is data.packing.

    Every packing but concat needs its index (build_index); raises FileNotFoundError without it.
    """
    train = shards.split("train")
    if how == "concat":
        return Rows(train, sequence_length)
    return PackedRows(train, Index.read(index_path(shards.directory, how, sequence_length)))


def _open_decoder(tokenizer: Path) -> Callable[[list[int]], str]:
    """Return a function from ids, without control tokens, to text for a tokenizer's file."""
    # Not through finlm.tokens, which trains and extends tokenizers: a rank would import it all after an incident.
    if tokenizer.suffix == ".json":
        from tokenizers import Tokenizer

        return partial(Tokenizer.from_file(str(tokenizer)).decode, skip_special_tokens=False)
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(tokenizer)).decode


WORDS_TOKENS = 40
WORDS_CHARACTERS = 60


@dataclass(frozen=True)
class NamedDocument:
    """A document of a row: its index in its shard, its number of tokens inside the row, its first 60 characters."""

    source: str
    shard: str
    document: int
    tokens: int
    text: str


def name_documents(rows: Rows | PackedRows, shards: Shards, row_ids: Iterable[int]) -> Iterator[NamedDocument]:
    """Yield a NamedDocument for every document in the rows with these ids, row by row. IndexError for an id of no row.

    The text is that of the document's first 40 tokens, even if these are in another row.
    """
    decode, around = _open_decoder(shards.tokenizer), (shards.bos_id, shards.eos_id)
    for row in row_ids:
        for shard, start, count in rows.pieces(int(row)):
            first, last = shard.documents_before([start + 1, start + count]) - 1
            for number in range(int(first), int(last) + 1):
                begin, end = int(shard.offsets[number]), int(shard.offsets[number + 1])
                ids = shard.ids[begin : min(end, begin + WORDS_TOKENS)].tolist()
                words = decode([token for token in ids if token not in around])
                tokens = min(end, start + count) - max(begin, start)
                text = " ".join(words.split())[:WORDS_CHARACTERS]
                yield NamedDocument(shard.source, shard.path.name, number, tokens, text)


_RAMP = 16  # equal steps of a stage whose weights change


@dataclass(frozen=True)
class Part:
    """The positions from `start` to before `end` of the run, with the number of rows of each source of the run."""

    start: int
    end: int
    rows: tuple[int, ...]


def order(
    ranges: Mapping[str, range], stages: Sequence[MixtureStage], run_rows: int, sequence_length: int, seed: int
) -> Order | Mixture:
    """Return the order in which a run of run_rows rows reads its rows; `ranges` has the row ids of each source.

    Without stages, every row is read once an epoch (shards.Order), and no rows at all raise ValueError. With stages, a
    source that does not exist or has no rows raises UserError.
    """
    if not stages:
        return Order(sum(map(len, ranges.values())), seed)
    return Mixture(ranges, parts(ranges, stages, run_rows, sequence_length), seed)


class Mixture:
    """An endless order of row ids; past the run's end the last part is repeated with other rows."""

    def __init__(self, ranges: Mapping[str, range], parts: Sequence[Part], seed: int) -> None:
        """Keep what parts() returned; make from `seed` the order of each source's rows and of the sources in a part."""
        self.parts = list(parts)
        self._first = np.array([rows.start for rows in ranges.values()], dtype=np.int64)
        self._orders = [
            Order(len(rows), seed * 2**32 + zlib.crc32(name.encode())) if rows else None
            for name, rows in ranges.items()
        ]
        self._inner = [Order(part.end - part.start, seed * 2**32 + number) for number, part in enumerate(self.parts)]
        self._starts = np.array([part.start for part in self.parts], dtype=np.int64)
        self._rows = np.array([part.rows for part in self.parts], dtype=np.int64)  # [parts, sources]
        self._before = np.concatenate((np.zeros_like(self._rows[:1]), np.cumsum(self._rows, axis=0)[:-1]))

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids:
        """Return the row ids, int64, of the positions, in their shape. Positions are integers from 0 on."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        row_ids = np.empty(len(flat), dtype=np.int64)
        where = np.searchsorted(self._starts, flat, side="right") - 1
        for number in np.unique(where).tolist():
            here = np.flatnonzero(where == number)
            part, rows = self.parts[number], self._rows[number]
            within = flat[here] - part.start
            place = self._inner[number][within]
            ends = np.cumsum(rows)
            source = np.searchsorted(ends, place, side="right")
            # Which reading of its source this is: after the earlier parts, and after repeats of the last one.
            repeats = within // (part.end - part.start)
            drawn = place - (ends - rows)[source] + self._before[number][source] + repeats * rows[source]
            for kind in np.unique(source).tolist():
                of_kind = source == kind
                row_ids[here[of_kind]] = self._first[kind] + self._orders[kind][drawn[of_kind]]
        return row_ids.reshape(np.shape(positions))


def parts(
    ranges: Mapping[str, range], stages: Sequence[MixtureStage], run_rows: int, sequence_length: int
) -> list[Part]:
    """Return the run's parts in order, each with a whole number of rows per source; a stage with `to` has up to 16.

    `ranges` has the row ids of each source. Parts without rows are left out; the last stage takes the rows beyond the
    stages' budgets. `stages` is not empty. Raises UserError for a source that does not exist or has no rows.
    """
    shares = _shares(stages, run_rows * sequence_length)
    slices: list[tuple[int, float, npt.NDArray[np.float64]]] = []
    for number, (stage, share) in enumerate(zip(stages, shares, strict=True)):
        first = _normalise_weights(stage.weights or dict(stage.tokens or {}), ranges)
        last = first if stage.to is None else _normalise_weights(stage.to, ranges)
        steps = 1 if stage.to is None else _RAMP
        for step in range(steps):
            along = step / max(1, steps - 1)
            slices.append((number, share / steps, first * (1 - along) + last * along))
    ends = np.rint(np.cumsum([share for _, share, _ in slices]) * run_rows).astype(np.int64)
    ends = np.minimum(ends, run_rows)
    ends[-1] = run_rows  # budgets may be less than the run: the last stage goes on
    cut, start, stage_before = list[Part](), 0, -1
    owed = np.zeros(len(ranges))
    for end, (number, _, weights) in zip(ends.tolist(), slices, strict=True):
        if number != stage_before:
            stage_before, owed = number, np.zeros(len(ranges))
        if end > start:
            rows = _apportion_rows(weights, end - start, owed)
            owed += weights * (end - start) - rows
            cut.append(Part(start, end, rows))
            start = end
    return cut


def _shares(stages: Sequence[MixtureStage], run_tokens: int) -> list[float]:
    """Return each stage's share of the run: its tokens / run_tokens or `share`; others divide the rest of 1 equally."""
    given = [sum(stage.tokens.values()) / run_tokens if stage.tokens else stage.share for stage in stages]
    missing = given.count(None)
    rest = max(0.0, 1 - sum(share for share in given if share is not None))
    return [rest / missing if share is None else share for share in given]


def _normalise_weights(weights: Mapping[str, float], ranges: Mapping[str, range]) -> npt.NDArray[np.float64]:
    """Return the sources' weights, float64 [sources], sum 1. UserError for a name or glob of no source with rows."""
    sizes = {name: len(rows) for name, rows in ranges.items()}
    values = np.array([*weights_by_source(weights, sizes, "data.mixture").values()], dtype=np.float64)
    return np.asarray(values / values.sum())


def weights_by_source(weights: Mapping[str, float], sizes: Mapping[str, int], key: str) -> dict[str, float]:
    """Return {source: weight} of all sources in `sizes`; those that match a glob share its weight by their sizes.

    A source that several entries match gets the sum, one that none matches 0. Raises UserError, naming the recipe key
    `key`, for an entry that matches no source, or only sources of size 0.
    """
    weight_of = dict.fromkeys(sizes, 0.0)
    for pattern, weight in weights.items():
        members = [name for name in sizes if fnmatchcase(name, pattern)]
        total = sum(sizes[name] for name in members)
        if total == 0:
            raise UserError(
                f"{key}: {pattern} {'has nothing to train on' if members else 'is no source'}",
                evidence=f"the sources are {', '.join(sizes)}",
                fix=f"name a source or a glob of sources, or take it out; without {key} each is read by its size",
            )
        for name in members:
            weight_of[name] += weight * sizes[name] / total
    return weight_of


def _apportion_rows(weights: npt.NDArray[np.float64], rows: int, owed: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Return the number of rows of each source, `rows` in all, in proportion to the weights, by largest remainder.

    `owed` [sources], in rows, is what the stage's earlier parts rounded away (below 0: gave too much), so that a small
    weight is not lost in each of them.
    """
    exact = weights * rows + owed
    if exact.min() < 0:  # it has had more than it is due
        exact = np.maximum(exact, 0)
        exact *= rows / exact.sum()
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")[: rows - int(counts.sum())]
    counts[largest] += 1
    return tuple(counts.tolist())
