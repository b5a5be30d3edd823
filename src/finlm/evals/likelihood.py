"""Log-likelihoods of answer letters, many questions at a time.

All questions of a subject begin with the same examples: these are computed once and their keys and values shared (at
five shots four tokens of five). What the four letters' token sequences have in common is computed once too, which for
almost every tokenizer is all but the letter: one forward pass a question instead of four. Of options in full every
token counts, those in common too. Batches hold rows of similar length; padding goes to the right, where causal
attention does not see it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from finlm.base import memory
from finlm.evals.prompts import Prompt, common
from finlm.train.opened import Opened

_WORTH_SHARING = 16  # tokens; below it a second forward pass costs more
_SHARE_OF_FREE_MEMORY = 0.1  # for the keys and values of a batch, held three times while it grows
_CPU_TOKENS, _GPU_TOKENS = 2_048, 16_384  # computed at once


@dataclass(frozen=True)
class Row:
    """Tokens to compute, and what to read: (place, token, letter) whose log-probability counts for the letter."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, int, int], ...]


def scores(opened: Opened, prompts: Sequence[Prompt], tokens: int | None = None) -> Iterator[dict[int, list[float]]]:
    """{place in prompts: log-likelihood of each letter}, a batch of at most `tokens` at a time."""
    budget = tokens or (_GPU_TOKENS if opened.device.type == "cuda" else _CPU_TOKENS)
    alike: dict[tuple[str, int], list[int]] = {}
    for place, prompt in enumerate(prompts):
        alike.setdefault((prompt.question.subject, prompt.shots), []).append(place)
    for places in alike.values():
        begins = {place: _begin(prompts[place]) for place in places}
        shared = common([ids for place in places for ids in prompts[place].ids])[: min(begins.values()) - 1]
        if len(shared) < _WORTH_SHARING or len(places) == 1:
            shared = ()
        work = {place: _rows(prompts[place].ids, begins[place], len(shared)) for place in places}
        with torch.inference_mode():
            prefix = _prefix(opened, shared)
            for batch in _batches(opened, work, prefix, budget):
                rows = [row for place in batch for row in work[place]]
                sums = iter(_forward(opened, rows, prefix))
                yield {
                    place: [sum(own) for own in zip(*islice(sums, len(work[place])), strict=True)] for place in batch
                }


def _begin(prompt: Prompt) -> int:
    """The first token whose likelihood counts: of each answer at least the last."""
    begin = len(common(prompt.ids)) if prompt.begin is None else prompt.begin
    return min(begin, *(len(ids) - 1 for ids in prompt.ids))


def _rows(four: tuple[tuple[int, ...], ...], begin: int, shared: int) -> list[Row]:
    """One row where the letters are one token each, else one a letter; without the shared tokens."""
    if all(len(ids) == begin + 1 for ids in four):
        last = begin - shared - 1
        return [Row(four[0][shared:-1], tuple((last, ids[-1], letter) for letter, ids in enumerate(four)))]
    return [
        Row(ids[shared:-1], tuple((at - shared - 1, ids[at], letter) for at in range(begin, len(ids))))
        for letter, ids in enumerate(four)
    ]


def _prefix(opened: Opened, shared: tuple[int, ...]) -> Any:
    """The keys and values of the shared tokens; None without any."""
    if not shared:
        return None
    ids = torch.tensor([shared], device=opened.device)
    return opened.model(ids, use_cache=True, logits_to_keep=1).past_key_values


def _batches(opened: Opened, work: dict[int, list[Row]], prefix: Any, budget: int) -> Iterator[list[int]]:
    """Places of prompts of similar length, the longest first: what does not fit is known at once."""
    most = _most_rows(opened, prefix)
    batch, width, count = list[int](), 0, 0
    for place in sorted(work, key=lambda place: -max(len(row.ids) for row in work[place])):
        rows = len(work[place])
        if batch and ((count + rows) * width > budget or count + rows > most):
            yield batch
            batch, width, count = [], 0, 0
        width = width or max(len(row.ids) for row in work[place])
        batch.append(place)
        count += rows
    yield batch


def _most_rows(opened: Opened, prefix: Any) -> int:
    """Rows whose copies of the prefix fit in memory."""
    if prefix is None:
        return 1_000
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in prefix.layers)
    free = torch.cuda.mem_get_info(opened.device)[0] if opened.device.type == "cuda" else memory.available_bytes()
    return max(1, min(1_000, int(_SHARE_OF_FREE_MEMORY * free / held)))


def _forward(opened: Opened, rows: list[Row], prefix: Any) -> list[list[float]]:
    """For each row the log-likelihood that it adds to each letter."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + (0,) * (width - len(row.ids)) for row in rows], device=opened.device)
    places = sorted({at for row in rows for at, _, _ in row.targets})
    cache = None
    if prefix is not None:
        cache = copy.deepcopy(prefix)
        cache.batch_repeat_interleave(len(rows))
    # Logits of the few places that are read, not of all: a vocabulary is wider than the model.
    keep = torch.tensor(places, device=opened.device)
    logits = opened.model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep).logits
    # Only the places that a row reads leave the model's precision: rows x places of a wide vocabulary are gigabytes.
    column = {at: number for number, at in enumerate(places)}
    targets = [(row, column[at], token, letter) for row, own in enumerate(rows) for at, token, letter in own.targets]
    read = {pair: number for number, pair in enumerate(dict.fromkeys((row, at) for row, at, _, _ in targets))}
    picked = torch.log_softmax(logits[tuple(zip(*read, strict=True))].float(), dim=-1)  # [read, vocabulary]
    values = picked[[read[row, at] for row, at, _, _ in targets], [token for _, _, token, _ in targets]].tolist()
    added = [[0.0] * 4 for _ in rows]
    for (row, _, _, letter), value in zip(targets, values, strict=True):
        added[row][letter] += value
    return added
