"""Build the index of packed rows, and read rows of dialogues and preferences, whose labels count where a .mask says so.

blocks: what the released XuanYuan llm-code trains on. Each group of 1,000 documents of a source is concatenated and
cut into blocks of T tokens; the remainder is dropped, and a block's last token is an input without a label. best_fit:
no document that fits is cut (Ding et al., "Fewer Truncations Improve Language Modeling", 2024). A row has room for T +
1 tokens, T inputs and their labels; longer documents are cut into whole rows, and what is left of them is placed like
a document. Best-fit-decreasing over counts of lengths and of room: half a second and 100 MB a million documents.

Labels of a dialogue are the next token of the same dialogue. With sft.packing a row holds as many dialogues as fit
(best fit, none is cut) and Rows.documents tells them apart; without it a row holds one. `padding` repeats a mistake of
the released XuanYuan code: what is left of a row is </s>, and learnt. A pair is two neighbouring documents of a shard,
chosen and rejected; the mask marks the answer, and before it both are the same. For grpo a document is a prompt, and
behind it, marked, the right answer where it is known.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from finlm.base import files, step_cache
from finlm.base.errors import UserError
from finlm.recipe.schema import Recipe
from finlm.rows import packing
from finlm.rows.packing import VERSION, Index, Longs, PackedRows, Packing, Pieces, SourceRows, index_path
from finlm.rows.shards import IGNORED, Ids, Rows, Shard, Shards, within

Row = dict[str, npt.NDArray[np.int64]]


class Pair(TypedDict, total=False):
    """A preference pair as trl's collator takes it; ref_*_logps are the reference model's, if computed."""

    prompt_ids: npt.NDArray[np.int64]
    chosen_ids: npt.NDArray[np.int64]
    rejected_ids: npt.NDArray[np.int64]
    ref_chosen_logps: float
    ref_rejected_logps: float


def read_pairs(shards: Sequence[Shard]) -> Iterator[Pair]:
    """Yield {prompt_ids, chosen_ids, rejected_ids} of every pair in order.

    A shard holds chosen and rejected documents in turn; raises ValueError, after its pairs, if their number is odd.
    prompt_ids is the part of the chosen document before the mark. Raises FileNotFoundError for a missing .mask.
    """
    for shard in shards:
        documents = _read_documents(shard)
        for (prompt, chosen), (_, rejected) in zip(documents, documents, strict=True):  # two at a time
            yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def read_prompts(shards: Sequence[Shard]) -> Iterator[Row]:
    """Yield {prompt_ids, answer_ids} of every prompt in order; answer_ids is empty where no right answer is known."""
    for shard in shards:
        for prompt, answer in _read_documents(shard):
            yield {"prompt_ids": prompt, "answer_ids": answer}


def _read_documents(shard: Shard) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (ids before the marked part, ids in it) of each document, int64. The marked part is the document's end.

    Reads the shard's .mask, unless the shard has no tokens. Raises FileNotFoundError if it is missing.
    """
    mask = _mask(shard.path.with_suffix(".mask")) if shard.tokens else np.empty(0, np.uint8)  # no empty file is mapped
    ends = shard.offsets.astype(np.int64)
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        ids = shard.ids[start:stop].astype(np.int64)
        first = stop - start - int(mask[start:stop].sum())
        yield ids[:first], ids[first:]


class DialogueRows(PackedRows):
    """Rows of sequence_length tokens whose labels count where a mask marks them.

    `padding`, if given, is the input at the unused end of a row, and the label wherever no token of the same dialogue
    follows; else these are 0 and -100.
    """

    def __init__(self, shards: Sequence[Shard], index: Index, padding: int | None = None) -> None:
        """Keep the shards, the index of their rows, and the id that fills rows up; None for none."""
        super().__init__(shards, index)
        self.padding = padding

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """Return how many labels are not -100, those of `padding` included; reads masks, with `padding` tokens too."""
        if self.padding is not None:
            return int((self.read(rows)[1] != IGNORED).sum())
        return int(self._learnt_mask(self._batch(rows)).sum())

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Return inputs and labels, int64 [len(rows), T]; -100 where nothing is learnt, unless they have `padding`."""
        batch = self._batch(rows)
        tokens, learnt = self._tokens(batch), self._learnt_mask(batch)
        labels = np.where(learnt, tokens[:, 1:], IGNORED)
        inputs = tokens[:, :-1].copy()
        if self.padding is not None:
            inputs[~batch.filled[:, :-1]] = self.padding
            labels[~packing.has_next_token(batch)] = self.padding
        return inputs, labels

    def _learnt_mask(self, batch: packing.Batch) -> npt.NDArray[np.bool_]:
        """Return bool [rows, T]: whether the next token belongs to the same dialogue and is marked."""
        marked = np.zeros(batch.filled.shape, dtype=bool)
        marked[batch.filled] = self._copy_pieces(batch, lambda shard: _mask(shard.path.with_suffix(".mask"))) == 1
        return marked[:, 1:] & packing.has_next_token(batch)


def packing_of(recipe: Recipe) -> Packing:
    """Return the packing of a recipe's dialogues: best_fit, or single (a dialogue a row) without sft.packing."""
    return "best_fit" if recipe.sft is not None and recipe.sft.packing else "single"


def open_rows(shards: Shards, recipe: Recipe) -> Rows | PackedRows:
    """Return the training rows of prepared shards: dialogues, preferences (pairs or prompts) or documents.

    Builds a missing index in the shards' directory for dialogues, and for documents unless data.packing is concat.
    Raises UserError when that cannot be written, and when documents give no row.
    """
    if is_dialogues(shards):
        return train_rows(shards, recipe)
    if "stage" in shards.manifest:
        return _preference_rows(shards, recipe)
    return prepare_rows(shards, recipe.batch.sequence_length, recipe.data.packing)


def train_rows(shards: Shards, recipe: Recipe) -> DialogueRows:
    """Return the training rows of dialogues, which may be none; build a missing index, or raise UserError."""
    parts = shards.split("train")
    rows = build_index(shards.directory, parts, packing_of(recipe), recipe.batch.sequence_length)
    return DialogueRows(parts, rows, shards.eos_id if recipe.sft and recipe.sft.pad_labels else None)


def _preference_rows(shards: Shards, recipe: Recipe) -> DialogueRows:
    """Return the training rows of a preference stage: a pair a row, or a prompt for grpo. Writes no index.

    A last document without a partner is in no row. No piece is cut, however long.
    """
    parts, together = shards.split("train"), recipe.sequences_per_row
    sources = tuple(
        SourceRows(name, sum(shard.documents for shard in members) // together)
        for name, members in shards.by_source("train").items()
    )
    starts = _document_bounds(parts)
    pieces = Pieces(starts[:-1], np.diff(starts).astype(np.int32), np.arange(0, len(starts), together))
    return DialogueRows(parts, Index(pieces, "", recipe.batch.sequence_length, sources))


def held_out(recipe: Recipe) -> Callable[[Sequence[Shard], int], DialogueRows]:
    """Return a function (shards, sequence_length) -> rows of held-out dialogues, filled as in training but not padded.

    It makes the index in memory at each call, as these dialogues are few.
    """
    return lambda shards, length: DialogueRows(shards, make_index(shards, packing_of(recipe), length))


def is_dialogues(shards: Shards) -> bool:
    """Return whether these shards hold dialogues, with masks."""
    return shards.manifest.get("stage") == "sft"


@lru_cache(maxsize=256)
def _mask(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a .mask file, uint8 [tokens], memory-mapped; the last 256 files stay cached."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # slicing a memmap object takes microseconds more


BLOCK_DOCUMENTS = 1000  # documents that the released code concatenates at once


def build_index(directory: Path, shards: Sequence[Shard], packing: Packing, sequence_length: int) -> Index:
    """Return the index of these training shards; build it in their directory, under a lock, if it is missing.

    While another process holds the lock, prints that it waits. Raises UserError when the index cannot be written.
    """
    path = index_path(directory, packing, sequence_length)
    try:
        if not (path / "manifest.json").is_file():
            with step_cache.lock_directory(path.parent):
                if not (path / "manifest.json").is_file():  # while this process waited
                    for left_over in (path, *path.parent.glob(f".{path.name}.*.tmp")):  # of a killed run
                        shutil.rmtree(left_over, ignore_errors=True)
                    index = make_index(shards, packing, sequence_length)
                    with files.new_directory(path) as temporary:
                        _write(temporary, index)
    except OSError as error:
        raise UserError(
            f"cannot write the index of {packing} rows of {sequence_length} tokens",
            evidence=str(error),
            fix="copy the prepared data to where you may write, or set data.packing to concat, which needs no index",
        ) from None
    return Index.read(path)


def _write(directory: Path, index: Index) -> None:
    """Write the index's arrays to an existing directory, and manifest.json last."""
    for name in ("start", "length", "first"):
        np.save(directory / f"{name}.npy", getattr(index.pieces, name))
    about = {"packing": index.packing, "sequence_length": index.sequence_length, "version": VERSION}
    files.write_json(directory / "manifest.json", about | {"sources": [vars(source) for source in index.sources]})


def make_index(shards: Sequence[Shard], packing: Packing, sequence_length: int) -> Index:
    """Return the index of the rows of these shards; write nothing. The shards of a source must be neighbours."""
    parts, sources = [], []
    offset = 0  # of the source's first token over all shards
    for name, members in groupby(shards, key=lambda shard: shard.source):
        starts = _document_bounds(list(members)) + offset
        if packing == "blocks":
            rows = _cut_blocks(starts, sequence_length)
        else:
            rows = _best_fit(starts, sequence_length, together=packing == "best_fit")
        parts.append(rows)
        sources.append(SourceRows(name, len(rows.first) - 1, int(rows.length.sum())))
        offset = int(starts[-1])
    return Index(_join_pieces(parts), packing, sequence_length, tuple(sources))


def _cut_blocks(bounds: Longs, sequence_length: int) -> Pieces:
    """Return rows of a piece of T tokens each, cut from groups of BLOCK_DOCUMENTS documents without remainders.

    `bounds`, int64 [documents + 1], has the first token of each document, and the end.
    """
    edges = np.unique(np.append(np.arange(0, len(bounds) - 1, BLOCK_DOCUMENTS), len(bounds) - 1))
    starts = bounds[edges[:-1]]
    counts = np.diff(bounds[edges]) // sequence_length
    start = np.repeat(starts, counts) + sequence_length * within(counts)
    return Pieces(start, np.full(len(start), sequence_length, dtype=np.int32), np.arange(len(start) + 1))


def _best_fit(bounds: Longs, sequence_length: int, together: bool) -> Pieces:
    """Return rows of at most T + 1 tokens (T is `sequence_length`); documents of that size or less are not cut.

    First come the full rows of longer documents, each beginning with the token that ends the one before; then, by best
    fit, their rests and the other documents. A rest or document of one token is dropped. `bounds`, int64 [documents +
    1], has the first token of each document, and the end. Without `together` no two documents share a row.
    """
    lengths = np.diff(bounds)
    # A document of n tokens has n - 1 labels; every full row takes T of them, the last takes the rest.
    full = np.where(lengths > sequence_length + 1, (lengths - 1) // sequence_length, 0)
    whole_start = np.repeat(bounds[:-1], full) + sequence_length * within(full)
    rest_start = bounds[:-1] + full * sequence_length
    rest = lengths - full * sequence_length
    placed = np.flatnonzero(rest > 1)  # one token alone has no label
    if together:
        row, count = fit_best(rest[placed].astype(np.int32), sequence_length + 1)
    else:
        row, count = np.arange(len(placed), dtype=np.int32), len(placed)
    order = np.lexsort((rest_start[placed], row))
    packed = Pieces(
        rest_start[placed][order],
        rest[placed][order].astype(np.int32),
        np.concatenate(([0], np.cumsum(np.bincount(row, minlength=count)))),
    )
    whole = Pieces(
        whole_start, np.full(len(whole_start), sequence_length + 1, dtype=np.int32), np.arange(len(whole_start) + 1)
    )
    return _join_pieces([whole, packed])


def fit_best(lengths: npt.NDArray[np.int32], room: int) -> tuple[npt.NDArray[np.int32], int]:
    """Return (row of each length, number of rows): best-fit-decreasing into rows of `room`; lengths are 1 to `room`.

    Equal lengths are placed together into the rows with the least room that takes them, so the work is over different
    lengths and rooms, not over documents.
    """
    row = np.empty(len(lengths), dtype=np.int32)
    order = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order], prepend=-1, append=-1))
    free: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(room + 1)]  # rows by the room left in them
    has_rows = 0  # bit r: free[r] is not empty
    count = 0

    def give(left: int, rows: npt.NDArray[np.int32]) -> None:
        """Append the rows to free[left], as `left` is their room in tokens, and set that bit of has_rows; not for 0."""
        nonlocal has_rows
        if left and len(rows):
            free[left].append(rows)
            has_rows |= 1 << left

    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        length = int(lengths[order[first]])
        while first < last and (fitting := has_rows >> length):
            left = length + (fitting & -fitting).bit_length() - 1
            rows = free[left].pop()
            if not free[left]:
                has_rows ^= 1 << left
            taken, kept = rows[: last - first], rows[last - first :]
            row[order[first : first + len(taken)]] = taken
            first += len(taken)
            give(left, kept)
            give(left - length, taken)
        each = room // length
        needed = -(-(last - first) // each)
        if needed:
            new = np.arange(count, count + needed, dtype=np.int32)
            row[order[first:last]] = np.repeat(new, each)[: last - first]
            count += needed
            in_last = last - first - each * (needed - 1)
            give(room - each * length, new[:-1])
            give(room - in_last * length, new[-1:])
    return row, count


def _join_pieces(parts: Sequence[Pieces]) -> Pieces:
    """Return the rows of all parts, one part after the other; `start` of their pieces stays as it is."""
    offsets = np.cumsum([0, *(len(part.start) for part in parts)])
    return Pieces(
        np.concatenate([np.empty(0, dtype=np.int64), *(part.start for part in parts)]),
        np.concatenate([np.empty(0, dtype=np.int32), *(part.length for part in parts)]),
        np.concatenate([[0], *(part.first[1:] + offset for part, offset in zip(parts, offsets, strict=False))]),
    )


def _document_bounds(shards: Sequence[Shard]) -> Longs:
    """Return the first token of each document, and the end, counted from the first shard: int64 [documents + 1]."""
    bounds, offset = [np.zeros(1, dtype=np.int64)], 0
    for shard in shards:
        bounds.append(np.asarray(shard.offsets[1:], dtype=np.int64) + offset)
        offset += shard.tokens
    return np.concatenate(bounds)


def prepare_rows(shards: Shards, sequence_length: int, how: Packing | Literal["concat"]) -> Rows | PackedRows:
    """Return the training rows of prepared documents, after building a missing index; `how` is data.packing.

    Raises UserError when the index cannot be written, and when there is no row.
    """
    if how != "concat":
        build_index(shards.directory, shards.split("train"), how, sequence_length)
    rows = packing.open_rows(shards, sequence_length, how)
    if not len(rows):
        raise UserError(
            f"the prepared data give no row of {sequence_length:,} tokens",
            evidence=f"data.packing: {how} fills no row with what is there",
            fix="add text, lower batch.sequence_length, or set data.packing: concat",
        )
    return rows
