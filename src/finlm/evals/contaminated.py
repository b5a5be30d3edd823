"""Which questions of a suite stand in the training data, and how much better those are answered.

The training data are the shards of a run, decoded: what the model has read, whatever cleaning came before. A question
counts by the test of data/contamination.py (at least 65 % of its 6-grams in one document), which finds printed
questions, not rewordings. One core checks 2 to 4 MB of text a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import screen
from finlm.base.rundir import RunDir
from finlm.data import chat_tokens, contamination, vocab
from finlm.data.shards import Shard, Shards
from finlm.data.synthetic_exam import LETTERS
from finlm.evals.questions import Question

_BLOCK_TOKENS = 1_000_000


def find(questions: Sequence[Question], training: Path) -> dict[int, float]:
    """{place of a question: largest share of its 6-grams in one document} of those contained in a run or shards."""
    shards = Shards(RunDir(training).shards if (training / "plan.json").is_file() else training)
    index = contamination.Index.of([_as_row(question) for question in questions])
    parts = shards.split("train")
    found: dict[int, float] = {}
    with screen.progress("contamination", sum(part.tokens for part in parts), "read") as advance:
        for part in parts:
            for tokens, texts in _texts(part, shards):
                encoded = [text.encode() for text in texts]
                ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
                for hit in index.find(b"".join(encoded), ends):
                    found[hit.question] = max(hit.share, found.get(hit.question, 0.0))
                advance(tokens)
    return found


def summary(found: dict[int, float], is_right: Sequence[bool], training: Path) -> dict[str, Any]:
    """Counts, and accuracy on contained and other questions; None where there are none."""
    contained = [right for place, right in enumerate(is_right) if place in found]
    others = [right for place, right in enumerate(is_right) if place not in found]
    return {
        "training": str(training),
        "contained": len(contained),
        "questions": len(is_right),
        "accuracy_contained": sum(contained) / len(contained) if contained else None,
        "accuracy_others": sum(others) / len(others) if others else None,
    }


def _as_row(question: Question) -> contamination.Question:
    options = dict(zip(LETTERS.lower(), question.options, strict=True))
    return contamination.question(question.subject, 0, {"question": question.text} | options)


def _texts(part: Shard, shards: Shards) -> Iterator[tuple[int, list[str]]]:
    """Blocks of (tokens, documents as text)."""
    own = shards.directory / "tokenizer"
    processor: Any = chat_tokens.open_tokenizer(own) if own.is_dir() else vocab.load(shards.tokenizer)
    block, tokens = list[list[int]](), 0
    for start, end in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
        block.append(part.ids[start:end].tolist())
        tokens += end - start
        if tokens >= _BLOCK_TOKENS:
            yield tokens, [processor.decode(ids) for ids in block]
            block, tokens = [], 0
    if block:
        yield tokens, [processor.decode(ids) for ids in block]
