"""Which rows a rank reads at a step: arithmetic on (seed, step), so resuming is a seek at any world size.

Position p of the endless order is row Order[p]; a step takes the next rows_per_step positions, cut into micro-steps,
then ranks, whose micro-batches may differ: how a step is cut never changes its rows. Reading is a memory-map slice
(hundreds of Mtoken/s from the page cache, a disk's seek a row without it), so a thread reads the next step while the
device works on this one. The copy to a GPU is from pinned memory, and the host does not wait for it. What several ask
of the same step is worked out once: an order of many sources takes milliseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from finlm.data.mixture import Sequencing
from finlm.data.packed import PackedRows
from finlm.data.shards import Ids, Rows
from finlm.plan.plan import Plan
from finlm.train import documents

Arrays = tuple[npt.NDArray[Any], ...]


class Checksum:
    """Sum of the CRC-32 of the token ids of every row read since it was taken last.

    Summed over ranks it is the same however a step is cut into ranks and micro-batches: proof of what was fed.
    """

    def __init__(self) -> None:
        self._sum = 0

    def add(self, rows: Iterable[npt.NDArray[Any]]) -> None:
        """rows: contiguous, int64."""
        self._sum += sum(zlib.crc32(row.data) for row in rows)

    def take(self) -> int:
        """The sum, which begins anew."""
        found, self._sum = self._sum, 0
        return found


class Batches:
    """The micro-batches of one rank."""

    def __init__(
        self, rows: Rows | PackedRows, order: Sequencing, plan: Plan, rank: int, document_masks: bool = False
    ) -> None:
        self.rows = rows
        self.order = order
        self.document_masks = document_masks
        self.micro_steps = plan.gradient_accumulation_steps
        self.rows_per_micro_step = sum(plan.rank_micro_batches)
        first = sum(plan.rank_micro_batches[:rank])
        self.own = slice(first, first + plan.rank_micro_batches[rank])
        self.device = torch.device(plan.device)
        self.checksum = Checksum()
        self._reader = ThreadPoolExecutor(1, "rows")
        self._coming: tuple[int, Future[list[Arrays]]] | None = None
        self._row_ids = lru_cache(maxsize=2)(self._ordered)
        self._supervised = lru_cache(maxsize=2)(lambda step: self.rows.supervised(self.row_ids(step).ravel()))

    def row_ids(self, step: int) -> Ids:
        """Row ids of a step over all ranks: [micro_steps, rows of rank 0, of rank 1, ...]; read-only."""
        return self._row_ids(step)

    def supervised(self, step: int) -> int:
        """Labels that count in a step over all ranks and micro-steps: the loss's denominator, without a message."""
        return self._supervised(step)

    def read(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The model's arguments of this rank for each micro-step, on the device.

        Inputs and labels, int64 [micro_batch, sequence], and with document masks the bounds of documents.bounds.
        """
        coming, self._coming = self._coming, None
        for arrays in coming[1].result() if coming and coming[0] == step else self._arrays(step):
            self.checksum.add(np.ascontiguousarray(arrays[0]))
            yield tuple(map(self._moved, arrays))

    def read_ahead(self, step: int) -> None:
        """Begin to read what read(step) gives."""
        self._coming = step, self._reader.submit(self._arrays, step)

    def _arrays(self, step: int) -> list[Arrays]:
        found: list[Arrays] = []
        for row_ids in self.row_ids(step)[:, self.own]:
            bounds = (documents.bounds(self.rows.documents(row_ids)),) if self.document_masks else ()
            found.append((*self.rows.read(row_ids), *bounds))
        return found

    def _ordered(self, step: int) -> Ids:
        count = self.micro_steps * self.rows_per_micro_step
        positions = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
        found = self.order[positions].reshape(self.micro_steps, self.rows_per_micro_step)
        found.flags.writeable = False
        return found

    def _moved(self, ids: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(ids)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
