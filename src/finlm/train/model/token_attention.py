"""Attention of one token of each row to the tokens before it, a Triton kernel for compute capability 8.0 and later.

A program computes the query heads of a row that share a key head. It reads keys and values up to the row's length, so
one launch, and one CUDA graph, serves every length. The answers to a prompt read the prompt from the cache of a single
row: the programs of neighbouring rows find it in the GPU's L2, and memory is read once for all of them. Where rows are
too few to fill the GPU, several programs read parts of a row, and a second kernel merges their softmaxes, as in
Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

BLOCK = 64  # keys that a program reads at once
PROGRAMS = 256  # that fill a GPU: about two of each multiprocessor of an H100
SPAN = 4 * BLOCK  # keys of a row that are worth a program


@triton.jit
def _read(
    q,
    state,
    keys,
    values,
    row,
    head,
    begin,
    end,
    size,
    room,
    kv_heads,
    scale: tl.constexpr,
    cap: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    """Return the softmax `state` (maximum, sum, output) of queries q, continued over keys [begin, end) of a cache row.

    q is [queries, D], the cache [row, kv head, room, size], and D is `size` filled up to a power of two. B keys are
    read at a time. `scale` multiplies the scores; a `cap` above 0 soft-caps them.
    """
    most, total, out = state
    width = tl.arange(0, D)
    base = (row * kv_heads + head).to(tl.int64) * room * size  # a cache may have more than 2**31 numbers
    for start in range(begin, end, B):
        places = start + tl.arange(0, B)
        at = base + places[:, None] * size + width[None, :]
        seen = (places < end)[:, None] & (width < size)[None, :]
        k = tl.load(keys + at, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if cap > 0:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)  # cap * tanh(scores / cap): tl has no tanh
        scores = tl.where((places < end)[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - now[:, None])
        shrunk = tl.exp(most - now)  # an online softmax: what was summed for a smaller maximum
        v = tl.load(values + at, mask=seen, other=0.0)
        out = out * shrunk[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrunk + tl.sum(weights, 1)
        most = now
    return most, total, out


@triton.jit
def _attend(
    queries,
    keys,
    values,
    outputs,
    most,
    total,
    reach,
    prompts,
    sources,
    span,
    window,
    size,
    room,
    kv_heads,
    groups,
    scale: tl.constexpr,
    cap: tl.constexpr,
    SPLITS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    """Write the attention of query heads that share a key head. Grid: rows, key heads, parts of the keys.

    With one part (SPLITS 1), writes final outputs. With several, writes for each part the sums, the softmax maximum
    (`most`) and the softmax sum (`total`), which _merge joins: [rows, heads, parts], the sums with the head size after
    it. `reach`, `prompts` and `sources` are the `bounds` of attend(). D and G are the head size and `groups` filled up
    to powers of two, B the keys read at once, `span` the keys of a part.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, width = tl.arange(0, G), tl.arange(0, D)
    at = ((row * kv_heads + head) * groups + member)[:, None] * size + width[None, :]
    inside = (member < groups)[:, None] & (width < size)[None, :]
    q = tl.load(queries + at, mask=inside, other=0.0)
    end = tl.load(reach + row)
    begin = tl.maximum(tl.maximum(end - window, 0), split * span)
    end = tl.minimum(end, (split + 1) * span)
    shared = tl.minimum(tl.load(prompts + row), end)
    state = (tl.full([G], float("-inf"), tl.float32), tl.zeros([G], tl.float32), tl.zeros([G, D], tl.float32))
    source = tl.load(sources + row)
    state = _read(q, state, keys, values, source, head, begin, shared, size, room, kv_heads, scale, cap, D, B)
    after_prompt = tl.maximum(begin, shared)
    state = _read(q, state, keys, values, row, head, after_prompt, end, size, room, kv_heads, scale, cap, D, B)
    if SPLITS == 1:
        tl.store(outputs + at, (state[2] / state[1][:, None]).to(outputs.dtype.element_ty), mask=inside)
    else:
        place = ((row * kv_heads + head) * groups + member) * SPLITS + split
        tl.store(most + place, state[0], mask=member < groups)
        tl.store(total + place, state[1], mask=member < groups)
        tl.store(outputs + place[:, None] * size + width[None, :], state[2], mask=inside)


@triton.jit
def _merge(parts, most, total, outputs, size, SPLITS: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    """Write the outputs of query heads, merged from the parts that _attend wrote. Grid: rows times query heads."""
    place, split, width = tl.program_id(0), tl.arange(0, P), tl.arange(0, D)
    at = place * SPLITS + split
    largest = tl.load(most + at, mask=split < SPLITS, other=float("-inf"))
    weights = tl.exp(largest - tl.max(largest, 0))
    inside = (split < SPLITS)[:, None] & (width < size)[None, :]
    part = tl.load(parts + at[:, None] * size + width[None, :], mask=inside, other=0.0)
    sums = tl.sum(tl.load(total + at, mask=split < SPLITS, other=0.0) * weights, 0)
    out = tl.sum(part * weights[:, None], 0) / sums
    tl.store(outputs + place * size + width, out.to(outputs.dtype.element_ty), mask=width < size)


class Scoring(NamedTuple):
    """How attention scores tokens: a factor of the scores, their soft cap (0 for none), the most tokens seen."""

    scale: float
    cap: float
    window: int


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention of a single token of each row to the cached tokens: [rows, 1, heads, head size].

    `query` is [rows, heads, 1, head size]; `key` and `value` are contiguous caches [rows, key heads, room, head size].
    `bounds` has three int32 tensors [rows]: how many tokens each row sees, how many are its prompt's, and which row's
    cache holds the prompt.
    """
    scale, cap, window = scoring
    rows, heads, _, size = query.shape
    kv_heads, room = key.shape[1:3]
    groups = heads // kv_heads
    query = query.contiguous()
    out = torch.empty_like(query)
    queries = max(16, triton.next_power_of_2(groups))  # the fewest that a product takes
    width = triton.next_power_of_2(size)
    splits = max(1, min(triton.cdiv(PROGRAMS, rows * kv_heads), room // SPAN))
    span = triton.cdiv(triton.cdiv(room, splits), BLOCK) * BLOCK
    given = *bounds, span, window, size, room, kv_heads, groups, scale, cap, splits, queries, width, BLOCK
    if splits == 1:
        _attend[(rows, kv_heads, 1)](query, key, value, out, out, out, *given, num_warps=4, num_stages=2)
    else:
        most, total = torch.empty(2, rows, heads, splits, device=query.device, dtype=torch.float32)
        parts = torch.empty(rows, heads, splits, size, device=query.device, dtype=torch.float32)
        _attend[(rows, kv_heads, splits)](query, key, value, parts, most, total, *given, num_warps=4, num_stages=2)
        _merge[(rows * heads,)](parts, most, total, out, size, splits, triton.next_power_of_2(splits), width)
    return out.view(rows, 1, heads, size)
