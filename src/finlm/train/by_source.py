"""Training loss by source: what a mixture of dialogues and documents does to each of them, step by step.

The loss of a row is a by-product of the loss of all (train.loss), so this costs one small message a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from finlm.data.shards import IGNORED


class BySource:
    """Sums over the micro-batches of a step, taken when it ends."""

    def __init__(self, ranges: Mapping[str, range], device: torch.device) -> None:
        self.names = [name for name, rows in ranges.items() if rows]
        self._ends = np.array([ranges[name].stop for name in self.names])
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)  # losses, labels

    def numbers(self, row_ids: npt.NDArray[Any]) -> torch.Tensor:
        """The number of each row's source, int64 [rows]."""
        return torch.from_numpy(np.searchsorted(self._ends, row_ids, side="right"))

    def add(self, numbers: torch.Tensor, losses: torch.Tensor, labels: torch.Tensor) -> None:
        """A micro-batch of this rank: losses [rows], labels [rows, sequence]."""
        where = numbers.to(self._sums.device)
        self._sums[0].index_add_(0, where, losses.double())
        self._sums[1].index_add_(0, where, (labels != IGNORED).sum(1).double())

    def take(self) -> dict[str, dict[str, float]]:
        """{source: {loss, tokens}} of the step over all ranks, which call this together; the sums begin anew."""
        if distributed.is_initialized():
            distributed.all_reduce(self._sums)
        losses, tokens = self._sums.tolist()
        self._sums.zero_()
        return {
            name: {"loss": loss / count, "tokens": int(count)}
            for name, loss, count in zip(self.names, losses, tokens, strict=True)
            if count
        }
