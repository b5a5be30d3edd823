"""Rows of dialogues: packed.PackedRows whose labels count only where the .mask beside a shard says so.

Labels are the next token of the same dialogue. With sft.packing a row holds as many dialogues as fit (best fit, none is
cut) and Rows.documents tells them apart; without it a row holds one. `padding` repeats a mistake of the released
XuanYuan code: what is left of a row is </s>, and learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import packed, packing, pair_rows
from finlm.data.packed import PackedRows
from finlm.data.shards import IGNORED, Ids, Rows, Shard, Shards, Split
from finlm.recipe.schema import Recipe


class DialogueRows(PackedRows):
    """Rows of sequence_length tokens with labels by mask."""

    def __init__(
        self, shards: Sequence[Shard], index: Path | tuple[packing.Pieces, dict[str, Any]], padding: int | None = None
    ) -> None:
        super().__init__(shards, index)
        self.padding = padding

    def supervised(self, rows: npt.NDArray[Any]) -> int:
        """How many labels of these rows count; reads their masks, and with padding their tokens."""
        if self.padding is not None:
            return int((self.read(rows)[1] != IGNORED).sum())
        return int(self._learnt(self._batch(rows)).sum())

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Inputs and next-token labels, each int64 [len(rows), T]; -100 where nothing is learnt."""
        batch = self._batch(rows)
        tokens, learnt = self._tokens(batch), self._learnt(batch)
        labels = np.where(learnt, tokens[:, 1:], IGNORED)
        inputs = tokens[:, :-1].copy()
        if self.padding is not None:
            inputs[~batch.filled[:, :-1]] = self.padding
            labels[~packed.followed(batch)] = self.padding
        return inputs, labels

    def _learnt(self, batch: packed.Batch) -> npt.NDArray[np.bool_]:
        """[rows, T]: where the next token is of the same dialogue and marked."""
        marked = np.zeros(batch.filled.shape, dtype=bool)
        marked[batch.filled] = self._copied(batch, lambda shard: _mask(shard.path.with_suffix(".mask"))) == 1
        return marked[:, 1:] & packed.followed(batch)


def how(recipe: Recipe) -> packing.Packing:
    """The packing of a recipe's dialogues."""
    return "best_fit" if recipe.sft is not None and recipe.sft.packing else "single"


def of(shards: Shards, recipe: Recipe) -> Rows | PackedRows:
    """The training rows of prepared shards, of dialogues or of documents."""
    if is_dialogues(shards):
        return train_rows(shards, recipe)
    if "stage" in shards.manifest:
        return _preference_rows(shards, recipe)
    return packed.rows(shards, recipe.batch.sequence_length, recipe.data.packing)


def train_rows(shards: Shards, recipe: Recipe) -> DialogueRows:
    """The training rows; their index is built where it is missing."""
    parts = shards.split("train")
    index = packing.index(shards.directory, parts, how(recipe), recipe.batch.sequence_length)
    return DialogueRows(parts, index, shards.eos_id if recipe.sft and recipe.sft.pad_labels else None)


def _preference_rows(shards: Shards, recipe: Recipe) -> DialogueRows:
    """One pair a row, or for grpo one prompt."""
    parts = shards.split("train")
    together = documents_a_row(recipe)
    sources = [
        {"source": name, "rows": sum(shard.documents for shard in members) // together}
        for name, members in splits(shards, "train").items()
    ]
    about = {"sequence_length": recipe.batch.sequence_length, "sources": sources}
    return DialogueRows(parts, (pair_rows.single(parts, together), about))


def held_out(recipe: Recipe) -> Callable[[Sequence[Shard], int], DialogueRows]:
    """Makes the rows of one source's held-out dialogues, filled as in training; padding never counts.

    They are small: their index is made when they are asked for.
    """

    def rows(shards: Sequence[Shard], sequence_length: int) -> DialogueRows:
        return DialogueRows(shards, packing.in_memory(shards, how(recipe), sequence_length))

    return rows


def documents_a_row(recipe: Recipe) -> int:
    """Documents of the shards that make a row where rows are not filled: both sequences of a pair, else one."""
    return 2 if recipe.stage in ("dpo", "reward") else 1


def is_dialogues(shards: Shards) -> bool:
    """Whether these shards hold dialogues, with masks."""
    return shards.manifest.get("stage") == "sft"


def splits(shards: Shards, name: Split) -> dict[str, list[Shard]]:
    """The shards of a split by source."""
    found: dict[str, list[Shard]] = {}
    for shard in shards.split(name):
        found.setdefault(shard.source, []).append(shard)
    return found


@lru_cache(maxsize=256)
def _mask(path: Path) -> npt.NDArray[np.uint8]:
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # slicing a memmap object takes microseconds more
