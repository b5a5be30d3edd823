"""Read token shards as training does: memory-mapped streams, rows by index arithmetic, an order without a table.

A shard is a stream of little-endian uint16 or uint32 ids, [<s>] document </s> after the other, so one set of shards
serves every sequence length, and resuming is a seek. Reading rows of 2,048 costs 7 microseconds each (300 Mtoken/s from
the page cache).

A row is a window of the stream: it may start inside a document and hold several. Nothing is padded but the end of a
shard, whose rest the released XuanYuan code would drop. Other ways to fill rows are in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.errors import UserError

Ids = npt.NDArray[np.int64]
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
IGNORED = -100  # the label that no loss counts, as in PyTorch's cross entropy


@dataclass(frozen=True)
class Shard:
    """A stream of tokens of a source, in the file `path`, with a .idx beside it; text_bytes is the size of its text."""

    source: str
    path: Path
    tokens: int
    documents: int
    text_bytes: int
    dtype: np.dtype[Any]

    @cached_property
    def ids(self) -> npt.NDArray[Any]:
        """The memory-mapped ids: uint16 or uint32 [tokens]."""
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,)))

    @cached_property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """The first token of each document, and the end: uint64 [documents + 1], memory-mapped."""
        index = self.path.with_suffix(".idx")
        return np.asarray(np.memmap(index, dtype="<u8", mode="r", shape=(self.documents + 1,)))

    def documents_before(self, places: npt.ArrayLike) -> Ids:
        """Return how many documents begin before each of these token positions: int64, in the shape of `places`.

        That number is also the index of the first document that begins at the position or later.
        """
        # In the index's own type: for any other integers numpy converts the whole index first, at every call (3.4 ms
        # instead of 7 microseconds in two million documents; a small model waited for it longer than for its GPU).
        return np.searchsorted(self.offsets, np.asarray(places).astype(self.offsets.dtype))


def tokenizer_file(directory: Path) -> Path:
    """Return tokenizer/tokenizer.json in a directory of `finlm prepare` if it exists, else tokenizer.model."""
    file = directory / "tokenizer" / "tokenizer.json"
    return file if file.is_file() else directory / "tokenizer.model"


class Shards:
    """A directory of prepared shards."""

    def __init__(self, directory: str | Path) -> None:
        """Read the manifest; raise UserError without it, or if a file is missing or has another size than recorded."""
        self.directory = Path(directory)
        if not (self.directory / "manifest.json").is_file():
            raise UserError(
                f"{directory} holds no prepared shards",
                evidence="manifest.json, which is written last, is missing",
                fix="give the directory that `finlm prepare RECIPE` prints",
            )
        self.manifest: dict[str, Any] = files.read_json(self.directory / "manifest.json")
        self.dtype: np.dtype[Any] = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self.vocab_size: int = self.manifest["vocab_size"]
        self.bos_id: int = self.manifest["bos_id"]
        self.eos_id: int = self.manifest["eos_id"]
        self.tokenizer = tokenizer_file(self.directory)
        self._check_sizes()

    def split(self, name: Split) -> list[Shard]:
        """Return the shards of a split in the manifest's order, source after source; [] if it has none."""
        parts = (item for item in self.manifest["shards"] if item["split"] == name)
        return [
            Shard(x["source"], self.directory / x["file"], x["tokens"], x["documents"], x["text_bytes"], self.dtype)
            for x in parts
        ]

    def by_source(self, name: Split) -> dict[str, list[Shard]]:
        """Return {source: its shards of a split}; a source without shards in the split is left out."""
        shards: dict[str, list[Shard]] = {}
        for shard in self.split(name):
            shards.setdefault(shard.source, []).append(shard)
        return shards

    def _check_sizes(self) -> None:
        """Raise UserError if a file is missing or has another size than the manifest says."""
        for item in self.manifest["shards"]:
            path = self.directory / item["file"]
            sizes = {path: item["tokens"] * self.dtype.itemsize, path.with_suffix(".idx"): 8 * (item["documents"] + 1)}
            for file, size in sizes.items():
                actual = file.stat().st_size if file.is_file() else None
                if actual != size:
                    raise UserError(
                        f"the shard {file} is damaged",
                        evidence=f"{'missing' if actual is None else f'{actual:,} bytes'}, the manifest says {size:,}",
                        fix=f"copy it again, or remove {self.directory} and run `finlm prepare`",
                    )


class Rows:
    """Rows of T = sequence_length tokens: row r of a shard is tokens r * T to r * T + T, labels are the next tokens.

    A row id that does not exist raises IndexError in every method.
    """

    def __init__(self, shards: Sequence[Shard], sequence_length: int) -> None:
        """Count the rows of the shards, of which a shard's last may be shorter; read no ids yet."""
        self.shards = list(shards)
        self.sequence_length = sequence_length
        # A stream of n tokens has n - 1 (input, label) pairs.
        self._labels = np.array([max(0, shard.tokens - 1) for shard in self.shards], dtype=np.int64)
        self._ends = np.cumsum(-(-self._labels // sequence_length))

    def __len__(self) -> int:
        """Return the number of rows of all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """Return how many labels of these rows are not -100; reads no tokens."""
        shard, row = self._locate(rows)
        left = self._labels[shard] - row * self.sequence_length
        return int(np.minimum(left, self.sequence_length).sum())

    def tokens_read(self, rows: npt.NDArray[Any]) -> int:
        """Return how many inputs of these rows are tokens, not padding; reads no tokens."""
        return self.supervised(rows)

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Return inputs and next-token labels, each int64 [len(rows), T]; past a shard's last label 0 and -100."""
        length = self.sequence_length
        inputs = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
        for place, (shard, row) in enumerate(zip(*self._locate(rows), strict=True)):
            start = int(row) * length
            window = self.shards[shard].ids[start : start + length + 1]
            inputs[place, : len(window) - 1] = window[:-1]
            labels[place, : len(window) - 1] = window[1:]
        return inputs, labels

    def documents(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the index of each input's document within its row, from 0: int32 [len(rows), T]; -1 for padding."""
        length = self.sequence_length
        shard, row = self._locate(rows)
        start = row * length
        stop = np.minimum(start + length, self._labels[shard])
        begins = np.zeros((len(rows), length), dtype=np.int32)
        for number in np.unique(shard).tolist():
            here = np.flatnonzero(shard == number)
            first, last = map(self.shards[number].documents_before, (start[here] + 1, stop[here]))
            count = last - first
            place = np.repeat(here, count)
            documents = np.repeat(first, count) + within(count)
            begins[place, self.shards[number].offsets[documents].astype(np.int64) - start[place]] = 1
        filled = np.arange(length) < (stop - start)[:, None]
        return np.where(filled, np.cumsum(begins, axis=1, dtype=np.int32), np.int32(-1))

    def pieces(self, row: int) -> list[tuple[Shard, int, int]]:
        """Return [(shard, first token in it, number of inputs)]: the stretch that fills a row, always one."""
        (shard,), (number,) = self._locate(np.array([row]))
        start = int(number) * self.sequence_length
        return [(self.shards[shard], start, min(self.sequence_length, int(self._labels[shard]) - start))]

    def source_ranges(self) -> dict[str, range]:
        """Return {source: range of its row ids}. The shards of a source must be neighbours."""
        ranges: dict[str, range] = {}
        for shard, end, begin in zip(self.shards, self._ends.tolist(), [0, *self._ends.tolist()], strict=False):
            ranges[shard.source] = range(ranges[shard.source].start if shard.source in ranges else begin, end)
        return ranges

    def _locate(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Return (shard index, row within the shard) of each row id."""
        ids = check_ids(rows, len(self))
        shard = np.searchsorted(self._ends, ids, side="right")
        return shard, ids - np.concatenate(([0], self._ends))[shard]


def check_ids(rows: npt.NDArray[Any], count: int) -> Ids:
    """Return the row ids as int64. Raises IndexError for an id that is negative or not below count."""
    ids = np.asarray(rows).astype(np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < count):
        raise IndexError(f"row ids {ids.min()}..{ids.max()} of {count} rows")
    return ids


class Order:
    """An endless order of row ids 0..count-1: position p belongs to epoch p // count, each epoch its own permutation.

    A balanced Feistel network over the next even power of two, walked until it lands below count (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002): a bijection computed per index in constant time, so the order needs
    no table, no state and no agreement between ranks. A call takes 1 ms and half a microsecond an index.
    """

    ROUNDS = 8  # four make a bijection look random; small domains have short halves, and more rounds cost nothing here

    def __init__(self, count: int, seed: int) -> None:
        """Make the order of `count` rows by `seed`. Raises ValueError for a count below 1."""
        if count < 1:
            raise ValueError(f"an order of {count} rows")
        self.count = count
        self.seed = seed
        self._half_bits = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))

    def __getitem__(self, positions: npt.NDArray[Any]) -> Ids:
        """Return the row ids of the positions: int64, in their shape. Positions are integers from 0 on."""
        shape = np.shape(positions)
        flat = np.asarray(positions, dtype=np.uint64).ravel()
        epoch, value = np.divmod(flat, np.uint64(self.count))
        base = _splitmix(np.array([self.seed % 2**64], dtype=np.uint64)) + epoch
        keys = [_splitmix(base + _splitmix(np.array([number], dtype=np.uint64))) for number in range(self.ROUNDS)]
        value = self._permute(value, keys)
        while (outside := np.flatnonzero(value >= self.count)).size:
            value[outside] = self._permute(value[outside], [key[outside] for key in keys])
        return value.astype(np.int64).reshape(shape)

    def _permute(self, value: npt.NDArray[np.uint64], keys: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
        """Return the values after a Feistel network with these keys: a bijection on twice self._half_bits bits."""
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = value >> self._half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_splitmix(right ^ key) & mask)
        return (left << self._half_bits) | right


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard in the manifest of a shards directory."""

    source: str
    split: Split
    file: str
    sha256: str
    index_sha256: str
    mask_sha256: str | None = None  # of dialogues
    tokens: int
    documents: int
    text_bytes: int
    learnt: int | None = None  # tokens of dialogues that are learnt from

    def to_json(self) -> dict[str, str | int]:
        """Return the entry as manifest.json has it, without fields that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def totals(entries: Sequence[ShardEntry]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the sums over shards as {split: {source: {tokens, documents, text_bytes, learnt}}}.

    Both splits are keys, {} if no shard has it. `learnt`, the tokens that are learnt from, is there only for dialogues.
    """
    sums: dict[str, dict[str, dict[str, int]]] = {split: {} for split in SPLITS}
    for entry in entries:
        counts = {name: getattr(entry, name) for name in ("tokens", "documents", "text_bytes", "learnt")}
        row = sums[entry.split].setdefault(entry.source, {})
        for name, count in counts.items():
            if count is not None:
                row[name] = row.get(name, 0) + count
    return sums


EDGES = (0, *(2**power for power in range(5, 18)))  # tokens; the last class is open


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the training documents of a source."""

    documents: int
    tokens: int
    median: int
    longest: int
    histogram: list[list[int]]  # [least length, documents, their tokens] of each class of EDGES with documents


def measure_lengths(directory: Path, entries: Sequence[ShardEntry]) -> Iterator[tuple[str, Lengths]]:
    """Yield (source, lengths of its training documents) from the .idx files, for each source with train shards."""
    by_source: dict[str, list[Path]] = {}
    for entry in entries:
        if entry.split == "train":
            by_source.setdefault(entry.source, []).append((directory / entry.file).with_suffix(".idx"))
    for source, paths in by_source.items():
        lengths = np.concatenate([np.diff(np.fromfile(path, dtype="<u8").astype(np.int64)) for path in paths])
        kind = np.searchsorted(EDGES, lengths, side="right") - 1
        numbers = np.bincount(kind, minlength=len(EDGES)).tolist()
        tokens = np.bincount(kind, weights=lengths, minlength=len(EDGES)).astype(np.int64).tolist()
        classes = [list(each) for each in zip(EDGES, numbers, tokens, strict=True) if each[1]]
        median, longest = int(np.median(lengths)), int(lengths.max())
        yield source, Lengths(len(lengths), int(lengths.sum()), median, longest, classes)


def _splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64's number for each uint64 state in `values`."""
    return mix(values + GOLDEN)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return each value mapped one to one to 64 bits that look independent (Stafford's mix 13 of MurmurHash3).

    mix(x + GOLDEN) is splitmix64 (Steele, Lea and Flood, 2014).
    """
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def unmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the values that mix maps to these: its inverse, on uint64."""
    plain: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    plain *= np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    plain ^= (plain >> np.uint64(27)) ^ (plain >> np.uint64(54))
    plain *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    plain ^= (plain >> np.uint64(30)) ^ (plain >> np.uint64(60))
    return plain


def within(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return each element's index in its stretch, int64: 0 to counts[0] - 1, then 0 to counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(np.sum(counts))) - np.repeat(ends - counts, counts), dtype=np.int64)
