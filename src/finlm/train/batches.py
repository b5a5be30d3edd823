"""Which rows a rank reads at a step: arithmetic on (seed, step), so resuming is a seek at any world size.

Position p of the endless order is row Order[p]; a step takes the next rows_per_step positions, cut into micro-steps,
then ranks. Reading is a memory-map slice (hundreds of Mtoken/s), so nothing is read ahead; the copy to a GPU is
from pinned memory, and the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from finlm.data.mixture import Sequencing
from finlm.data.packed import PackedRows
from finlm.data.shards import Ids, Rows
from finlm.plan.plan import Plan


class Batches:
    """The micro-batches of one rank."""

    def __init__(self, rows: Rows | PackedRows, order: Sequencing, plan: Plan, rank: int) -> None:
        self.rows = rows
        self.order = order
        self.micro_batch = plan.micro_batch
        self.micro_steps = plan.gradient_accumulation_steps
        self.world_size = plan.world_size
        self.rank = rank
        self.device = torch.device(plan.device)

    def row_ids(self, step: int) -> np.ndarray:
        """Row ids of a step over all ranks: [micro_steps, world_size, micro_batch]."""
        count = self.micro_steps * self.world_size * self.micro_batch
        positions = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
        return self.order[positions].reshape(self.micro_steps, self.world_size, self.micro_batch)

    def supervised(self, step: int) -> int:
        """Labels that count in a step over all ranks and micro-steps: the loss's denominator, without a message."""
        return self.rows.supervised(self.row_ids(step).ravel())

    def read(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, labels) of this rank for each micro-step: int64 [micro_batch, sequence] on the device."""
        for row_ids in self.row_ids(step)[:, self.rank]:
            inputs, labels = self.rows.read(row_ids)
            yield self._moved(inputs), self._moved(labels)

    def _moved(self, ids: Ids) -> torch.Tensor:
        tensor = torch.from_numpy(ids)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
