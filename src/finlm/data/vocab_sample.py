"""The text that a tokenizer is learnt from: a share of every source's training documents, chosen by hash.

By default each source gives in proportion to its text; weights change that, and what a source lacks the others give.
The choice depends on the documents only, not on workers or time; a document longer than its source's share is left out
where others fit. A sample that training would not have the memory for is refused before anything is read, and again
when the text is counted. The weights of data.mixture are not taken over: changing the mixture of a run
would then make another tokenizer and encode everything again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from finlm.base import memory, units
from finlm.base.errors import UserError
from finlm.data import mixture
from finlm.data.dedup import TRAIN, Decisions, Table

VERSION = 2
# sentencepiece drops lines over 4,192 bytes without a word; a character has at most 4.
_LINE_CHARACTERS = 1000
_MEMORY_PER_SAMPLE_BYTE = 30  # 26 measured at 21 MB


def choose(
    table: Table,
    decision: Decisions,
    sources: Sequence[str],
    sample_bytes: int,
    weights: Mapping[str, float] | None = None,
) -> npt.NDArray[np.bool_]:
    """Which training documents to learn from: bool [documents]. `sources` names the source of each input.

    Chosen by the second half of the hash; the first half chose the held-out documents. Raises UserError when the sample
    would not fit in memory, and for weights of what is no source.
    """
    is_train = decision == TRAIN
    names = list(dict.fromkeys(sources))
    number = np.array([names.index(name) for name in sources], dtype=np.int32)[table.source]  # source of each document
    text_bytes = np.bincount(number[is_train], table.text_bytes[is_train], minlength=len(names))
    available = {name: int(size) for name, size in zip(names, text_bytes, strict=True)}
    weight = weights and mixture.of_each(weights, available, "tokenizer.sample_weights")
    wanted = shares(available, sample_bytes, weight)
    check(sum(wanted.values()))
    chosen = np.zeros(len(decision), dtype=np.bool_)
    for place, share in enumerate(wanted.values()):
        here = np.flatnonzero(is_train & (number == place))
        here = here[np.argsort(table.hash[here, 1], kind="stable")]
        size = table.text_bytes[here].astype(np.int64)
        fitting = size <= share
        if fitting.any():
            here, size = here[fitting], size[fitting]
            chosen[here[: np.searchsorted(np.cumsum(size), share, side="right")]] = True
        elif share:
            chosen[here[np.argmin(size)]] = True  # lines() takes its beginning
    return chosen


def shares(available: Mapping[str, int], wanted: int, weights: Mapping[str, float] | None) -> dict[str, int]:
    """Bytes to take of each source, `wanted` in all or everything there is.

    In proportion to the weights (0 where none is given), or to the text without weights. A source with less text than
    its share gives all of it, and the others share the rest.
    """
    result, left = dict.fromkeys(available, 0), wanted
    given: Mapping[str, float] = available if weights is None else weights
    weight = {name: given[name] for name in available if given.get(name, 0) > 0}
    while weight:
        total = sum(weight.values())
        exhausted = [name for name in weight if available[name] * total <= left * weight[name]]
        if not exhausted:
            return result | {name: int(left * part / total) for name, part in weight.items()}
        for name in exhausted:
            result[name] = available[name]
            left -= available[name]
            del weight[name]
    return result


def lines(texts: Iterable[str], longest: int = sys.maxsize) -> Iterator[str]:
    """Documents as the lines that sentencepiece learns from; a long line is cut, which splits a word now and then.

    Of a document of more than `longest` bytes its beginning.
    """
    for text in texts:
        if len(text) > longest // 4:
            text = text.encode()[:longest].decode(errors="ignore")
        for line in text.split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def check(sample_bytes: int) -> None:
    """Raises UserError when training on so much text does not fit in memory."""
    needed, available = _MEMORY_PER_SAMPLE_BYTE * sample_bytes, memory.available_bytes()
    if needed > available:
        raise UserError(
            f"training a tokenizer on {units.format_bytes(sample_bytes)} of text does not fit in memory",
            evidence=f"about {units.format_bytes(needed)} needed, {units.format_bytes(available)} available",
            fix=f"lower tokenizer.sample_bytes to {max(1, available // _MEMORY_PER_SAMPLE_BYTE // 10**6)}MB",
        )
