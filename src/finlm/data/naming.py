"""Rows back to documents: which ones a batch held, by source, shard and number, with their first words.

For the incident of a loss spike, where a person wants to read what the model read. A document's number counts within
its shard, from 0, in the order of the corpus after cleaning; `finlm prepare` keeps the texts in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from finlm.data import vocab
from finlm.data.packed import PackedRows
from finlm.data.shards import Rows, Shards

WORDS_TOKENS = 40
WORDS_CHARACTERS = 60


def documents(rows: Rows | PackedRows, shards: Shards, row_ids: Iterable[int]) -> Iterator[dict[str, Any]]:
    """{"source", "shard", "document", "tokens", "text"} of every document in the rows; tokens: those inside them."""
    processor = vocab.load(shards.tokenizer)
    for row in row_ids:
        for shard, start, count in rows.pieces(int(row)):
            first, last = shard.documents_before([start + 1, start + count]) - 1
            for number in range(int(first), int(last) + 1):
                begin, end = int(shard.offsets[number]), int(shard.offsets[number + 1])
                words = processor.decode(shard.ids[begin : min(end, begin + WORDS_TOKENS)].tolist())
                yield {
                    "source": shard.source,
                    "shard": shard.path.name,
                    "document": number,
                    "tokens": min(end, start + count) - max(begin, start),
                    "text": " ".join(str(words).split())[:WORDS_CHARACTERS],
                }
