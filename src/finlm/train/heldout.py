"""Held-out loss, perplexity and bits per byte of each source.

Sums of log-likelihoods over sums of tokens: token-weighted, independent of micro-batch and world size. Every rank makes
the same number of forward passes, because ZeRO-3 gathers parameters in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from finlm.data.shards import IGNORED, Rows, Shard, Shards
from finlm.train import documents

LossSum = Callable[..., torch.Tensor]


def evaluate(
    loss_sum: LossSum,
    shards: Shards,
    sequence_length: int,
    micro_batches: Sequence[int],
    max_tokens: int,
    device: torch.device,
    document_masks: bool = False,
    rows_of: Callable[[Sequence[Shard], int], Any] = Rows,
) -> dict[str, Any]:
    """{"loss", "perplexity", "sources": {name: {loss, perplexity, tokens, bits_per_byte}}} over the held-out split.

    bits_per_byte: of pretraining text alone. Of a dialogue some tokens count, and the bytes of those are not known.

    micro_batches: rows that each rank holds at once; of a single process one number.
    rows_of: rows of a source's shards and sequence length; those of a stream of documents unless told otherwise.
    loss_sum maps (inputs, labels), each int64 [batch, sequence], and with document masks the bounds of
    documents.bounds, to the summed negative log-likelihood.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    first = sum(micro_batches[:rank])
    by_source: dict[str, list[Any]] = {}
    for shard in shards.split("held_out"):
        by_source.setdefault(shard.source, []).append(shard)
    sources: dict[str, dict[str, Any]] = {}
    for name, parts in sorted(by_source.items()):
        rows = rows_of(parts, sequence_length)
        count = min(len(rows), max(1, max_tokens // sequence_length))
        # From everywhere: a stream lies in the order of its files; where best fit fills rows the longest come first.
        chosen = np.linspace(0, len(rows) - 1, count).round().astype(np.int64)
        nll, tokens = torch.zeros(2, dtype=torch.float64, device=device)
        for start in range(first, count + first, sum(micro_batches)):
            wanted = np.arange(start, start + micro_batches[rank])
            read = chosen[np.minimum(wanted, count - 1)]
            inputs, labels = rows.read(read)
            labels[wanted >= count] = IGNORED  # a rank past the end computes along without counting
            batch = [torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device)]
            if document_masks:
                within = documents.bounds(rows.documents(read))
                batch.append(torch.from_numpy(within).to(device))
            with torch.no_grad():
                nll += loss_sum(*batch).double()
            tokens += int((labels != IGNORED).sum())
        if len(micro_batches) > 1:
            distributed.all_reduce(nll)
            distributed.all_reduce(tokens)
        sources[name] = _summary(float(nll), int(tokens)) | {"tokens": int(tokens)}
        if rows_of is Rows:
            bytes_per_token = sum(part.text_bytes for part in parts) / sum(part.tokens for part in parts)
            sources[name]["bits_per_byte"] = sources[name]["loss"] / math.log(2) / bytes_per_token
    total = sum(source["loss"] * source["tokens"] for source in sources.values())
    return _summary(total, sum(source["tokens"] for source in sources.values())) | {"sources": sources}


def _summary(nll: float, tokens: int) -> dict[str, float]:
    loss = nll / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}
