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
        """How many labels of these rows count."""
        return int((self.read(rows)[1] != IGNORED).sum())

    def read(self, rows: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Inputs and next-token labels, each int64 [len(rows), T]; -100 where nothing is learnt."""
        filler = 0 if self.padding is None else self.padding
        inputs = np.full((len(rows), self.sequence_length), filler, dtype=np.int64)
        labels = np.full((len(rows), self.sequence_length), IGNORED if self.padding is None else filler, dtype=np.int64)
        for place, pieces in enumerate(map(self._row, self._checked(rows).tolist())):
            at = 0
            for start, length in pieces:
                tokens, mask = self._tokens(start, length), self._masks(start, length)
                kept = tokens[: self.sequence_length - at]
                inputs[place, at : at + len(kept)] = kept
                labels[place, at : at + length - 1] = np.where(mask[1:] == 1, tokens[1:].astype(np.int64), IGNORED)
                if self.padding is None and at + length - 1 < self.sequence_length:
                    labels[place, at + length - 1] = IGNORED  # the next dialogue's first token is no label
                at += length
        return inputs, labels

    def _masks(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """What is learnt of a stretch, which lies within one shard."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        inner = start - int(self._starts[number])
        return _mask(self.shards[number].path.with_suffix(".mask"))[inner : inner + length]


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
    together = 1 if shards.manifest["stage"] == "grpo" else 2
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
    return np.memmap(path, dtype=np.uint8, mode="r")
