"""Prepared preferences as rows of ids: what step_dialogues stored for the stages dpo, reward and grpo.

A pair is two neighbouring documents of a shard, chosen and rejected; the mask beside the shard marks the answer, and
before it both are the same. For grpo a document is a prompt, and behind it, marked, the right answer where it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from finlm.data import packing
from finlm.data.shards import Shard

Row = dict[str, npt.NDArray[np.int64]]


def pairs(shards: Sequence[Shard]) -> Iterator[Row]:
    """{prompt_ids, chosen_ids, rejected_ids} of every pair in order."""
    for shard in shards:
        documents = _documents(shard)
        for (prompt, chosen), (_, rejected) in zip(documents, documents, strict=True):  # two at a time
            yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def prompts(shards: Sequence[Shard]) -> Iterator[Row]:
    """{prompt_ids, answer_ids} of every prompt in order; no answer ids where no right answer is known."""
    for shard in shards:
        for prompt, answer in _documents(shard):
            yield {"prompt_ids": prompt, "answer_ids": answer}


def single(shards: Sequence[Shard], documents_a_row: int) -> packing.Pieces:
    """Rows of one pair, or of one prompt, as packed rows: for what is said about a run's rows."""
    starts = packing.document_bounds(shards)
    first = np.arange(0, len(starts), documents_a_row, dtype=np.int64)
    return packing.Pieces(starts[:-1], np.diff(starts).astype(np.int32), first)


def _documents(shard: Shard) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(ids before the mask, ids in it) of each document."""
    mask = (
        np.memmap(shard.path.with_suffix(".mask"), dtype=np.uint8, mode="r") if shard.tokens else np.empty(0, np.uint8)
    )
    ends = shard.offsets.astype(np.int64)
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        ids = shard.ids[start:stop].astype(np.int64)
        first = stop - start - int(mask[start:stop].sum())
        yield ids[:first], ids[first:]
