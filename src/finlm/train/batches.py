"""Read a rank's rows of each step, keep the documents of a row apart in attention, and compute held-out losses.

Which rows a step reads is computed from (seed, step), so resuming is a seek. Position p of the endless order is row
order[p]; a step takes the next rows_per_step positions, cut into micro-steps, then ranks, whose micro-batches may
differ: how a step is cut never changes its rows.

With `data.document_masks` the model gets a tensor with the bounds of the documents: torch's varlen_attn (bf16 or fp16,
compute capability 8.0 and later) takes it as it is; elsewhere transformers makes the block-diagonal mask from position
ids that start again at every document.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from finlm.plan.plan import Plan
from finlm.recipe.settings import Settings
from finlm.rows.packing import Mixture, PackedRows
from finlm.rows.shards import IGNORED, Ids, Order, Rows, Shard, Shards

Arrays = tuple[npt.NDArray[Any], ...]


class Checksum:
    """Sum of the CRC-32 of the token ids of every row read since the last take(); proof of what was fed."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._sum = 0  # not a CRC of all: a sum is the same however a step is cut into ranks and micro-batches

    def add(self, rows: Iterable[npt.NDArray[Any]]) -> None:
        """Add the CRC-32 of each row's bytes to the sum. A row is a contiguous int64 array of token ids."""
        self._sum += sum(zlib.crc32(row.data) for row in rows)

    def take(self) -> int:
        """Return the sum and set it to zero."""
        total, self._sum = self._sum, 0
        return total


class Batches:
    """Reads the micro-batches of a rank, step by step, in the run's order of rows. Steps count from 0."""

    def __init__(
        self, rows: Rows | PackedRows, order: Order | Mixture, plan: Plan, rank: int, document_masks: bool = False
    ) -> None:
        """Compute this rank's share of each micro-step from the plan; read no rows yet.

        `order` maps positions to row ids and never ends. With `document_masks`, read() also yields document_bounds().
        """
        self.rows = rows
        self.order = order
        self.document_masks = document_masks
        self.micro_steps = plan.gradient_accumulation_steps
        self.rows_per_micro_step = sum(plan.rank_micro_batches)
        ends = np.cumsum((0, *plan.rank_micro_batches)).tolist()
        self.of_rank = [slice(start, end) for start, end in itertools.pairwise(ends)]  # rows of a micro-step
        self.of_this_rank = self.of_rank[rank]
        self.device = torch.device(plan.device)
        self.checksum = Checksum()
        self._reader = ThreadPoolExecutor(1, "rows")
        self._coming: tuple[int, Future[list[Arrays]]] | None = None
        self._row_ids = lru_cache(maxsize=2)(self._order_rows)
        self._supervised = lru_cache(maxsize=2)(lambda step: self.rows.supervised(self.row_ids(step).ravel()))

    def row_ids(self, step: int) -> Ids:
        """Return the row ids of a step over all ranks, int64 [micro_steps, rows of rank 0, of 1, ...], read-only."""
        return self._row_ids(step)

    def supervised(self, step: int) -> int:
        """Return the number of labels that are not -100 in a step, over all ranks and micro-steps; not collective."""
        return self._supervised(step)

    def tokens_read(self, step: int) -> int:
        """Return the number of input tokens without padding in a step, over all ranks and micro-steps."""
        return self.rows.tokens_read(self.row_ids(step).ravel())

    def read(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the model's arguments for each micro-step of this rank, on the device; add the inputs to the checksum.

        The arguments are inputs and labels, int64 [micro_batch, sequence], and with document masks document_bounds(),
        int32. Takes the rows of read_ahead(step); reads them now if other rows or none were read ahead.
        """
        coming, self._coming = self._coming, None
        for arrays in coming[1].result() if coming and coming[0] == step else self._read_step(step):
            self.checksum.add(np.ascontiguousarray(arrays[0]))
            yield tuple(map(self._move_to_device, arrays))

    def read_first(self, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        """Return the arguments of the first micro-step of `rank`, on this rank's device; leave the checksum alone."""
        return tuple(map(self._move_to_device, self._read_rows(self.row_ids(step)[0, self.of_rank[rank]])))

    def read_ahead(self, step: int) -> None:
        """Start to read the rows of read(step) in a thread, and return at once. read(step) raises its errors."""
        self._coming = step, self._reader.submit(self._read_step, step)

    def _read_step(self, step: int) -> list[Arrays]:
        """Return the arrays of read(step), a tuple for each micro-step, on the CPU."""
        return [self._read_rows(row_ids) for row_ids in self.row_ids(step)[:, self.of_this_rank]]

    def _read_rows(self, row_ids: Ids) -> Arrays:
        """Return the rows' arrays: inputs and labels, int64 [rows, sequence], and document_bounds() if asked for."""
        bounds = (document_bounds(self.rows.documents(row_ids)),) if self.document_masks else ()
        return (*self.rows.read(row_ids), *bounds)

    def _order_rows(self, step: int) -> Ids:
        """Return the row ids of a step, computed anew: read-only int64 [micro_steps, rows of all ranks in order]."""
        count = self.micro_steps * self.rows_per_micro_step
        positions = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
        row_ids = self.order[positions].reshape(self.micro_steps, self.rows_per_micro_step)
        row_ids.flags.writeable = False
        return row_ids

    def _move_to_device(self, ids: npt.NDArray[Any]) -> torch.Tensor:
        """Return the array as a tensor on the device; a copy to a GPU, from pinned memory, may still be running."""
        tensor = torch.from_numpy(ids)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


NAME, PADDED = "finlm_documents", "finlm_padded"
FEWEST = 64  # bounds are filled up to this many, or twice, four times ... as many: a size is compiled for


def document_bounds(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the token index at which each document begins in the rows laid end to end, padded with the end: int32.

    `documents` is int32 [batch, sequence]: the index of each token's document in its row (shards.Rows.documents). The
    length is the smallest of 64, 128, 256, ... above the number of documents.
    """
    begins = np.ones(documents.shape, dtype=bool)  # a row never goes on in the next one
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = np.flatnonzero(begins.ravel())
    filled = np.full(max(FEWEST, 1 << len(starts).bit_length()), documents.size, dtype=np.int32)
    filled[: len(starts)] = starts
    return filled


def document_positions(bounds: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return each token's position in its document, int32 in `shape` [batch, sequence]; of document_bounds()."""
    places = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
    return (places - starts).view(shape)


def has_document_kernel(device: str, dtype: torch.dtype, has_sinks: bool) -> bool:
    """Return whether attention NAME works here: in 16 bits from compute capability 8.0 on; with sinks, on CPUs too."""
    has_flash = device == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability() >= (8, 0)
    return has_flash or (has_sinks and device == "cpu")


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return (causal attention within documents, [batch, sequence, heads, size of value heads], None).

    `query` and `key` are [batch, heads, sequence, head size], key with fewer heads in grouped-query attention; `value`
    is as `key`, with heads of at most that size. `sliding_window` counts the current token; `s_aux` has the sink of
    each head, [heads]. Reads module.document_bounds (none: every row is a document); ignores attention_mask.
    """
    batch, heads, sequence, size = query.shape
    groups, value, value_size = heads // key.shape[1], _fill_up(value, size), value.shape[-1]
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, repeat_kv(key, groups), repeat_kv(value, groups)))
    bounds, left = getattr(module, "document_bounds", None), -1 if sliding_window is None else sliding_window - 1
    if bounds is None:
        bounds = torch.arange(0, (batch + 1) * sequence, sequence, dtype=torch.int32, device=query.device)
    if s_aux is not None:
        scale = size**-0.5 if scaling is None else scaling
        out, _ = attend_with_sinks(q.contiguous(), k.contiguous(), v.contiguous(), s_aux, bounds, sequence, scale, left)
    else:
        limits = (bounds, bounds, sequence, sequence)
        out = varlen_attn(q, k, v, *limits, scale=scaling, window_size=(left, 0))
    return out.view(batch, sequence, heads, size)[..., :value_size], None


@torch.library.custom_op("finlm::attend_with_sinks", mutates_args=())
def attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention within documents, [tokens, heads, size], and its log-sum-exp, fp32 [heads, tokens].

    A head's softmax has a further column, its sink, whose value is 0. So with the log-sum-exp of the scores, as flash
    attention returns it, the output is multiplied by sigmoid(log-sum-exp - sink), and the sink joins the log-sum-exp.

    `q`, `k` and `v` are [tokens, heads, size]; `sinks` is [heads]; `bounds` is of document_bounds(), and `longest` the
    most tokens of a document. `left` is how many tokens before its own a token sees, -1 for all.
    """
    if q.is_cuda:
        limits = (bounds, bounds, longest, longest, 0.0, left < 0, False)
        window = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        out, sums, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *limits, **window)
    else:
        out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for part, mask in _documents(bounds, left, q):
            heads = (each[part].transpose(0, 1)[None] for each in (q, k, v))
            attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads, is_causal=mask is None, attn_mask=mask, scale=scale
            )
            out[part], sums[:, part] = attended[0][0].transpose(0, 1), attended[1].view(1, len(sums), -1)[0]
    with_sink = torch.logaddexp(sums, sinks.float()[:, None])
    return out.mul_((sums - with_sink).exp().T[..., None].to(out.dtype)), with_sink


@attend_with_sinks.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors in the form of attend_with_sinks's results, for the compiler."""
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("finlm::attend_with_sinks_backward", mutates_args=())
def _attend_with_sinks_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    longest: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v and sinks, given that of `out`; `out` and `sums` are what forward returned."""
    # The kernels' backward passes form each probability from the log-sum-exp, and its gradient from out * gradient:
    # with those of attention with sinks they give the gradients of attention with sinks. A sink's value is 0, so its
    # score's gradient is -probability * sum(out * gradient).
    by_sinks = -((sinks.float() - sums.T).exp() * (out.float() * gradient.float()).sum(-1)).sum(0).to(sinks.dtype)
    if q.is_cuda:
        none = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of dropout
        limits = (bounds, bounds, longest, longest, 0.0, left < 0, *none)
        window = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        return *torch.ops.aten._flash_attention_backward(gradient, q, k, v, out, sums, *limits, **window), by_sinks
    by = [torch.empty_like(each) for each in (q, k, v)]
    for part, mask in _documents(bounds, left, q):
        heads = (each[part].transpose(0, 1)[None] for each in (gradient, q, k, v, out))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, sums[:, part].contiguous()[None], 0.0, mask is None, attn_mask=mask, scale=scale
        )
        for whole, its in zip(by, gradients, strict=True):
            whole[part] = its[0].transpose(0, 1)
    return by[0], by[1], by[2], by_sinks


@_attend_with_sinks_backward.register_fake
def _(gradient: torch.Tensor, q: Any, k: Any, v: Any, sinks: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return empty tensors in the form of the gradients, for the compiler."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(sinks)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the backward pass reads; torch calls it after the forward pass."""
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.limits = inputs[5:]


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of attend_with_sinks's arguments, None for those that are no floats."""
    gradients = _attend_with_sinks_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.limits)
    return *gradients, None, None, None, None


attend_with_sinks.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _documents(bounds: torch.Tensor, left: int, like: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yield (slice of its tokens, mask to add to its scores) for each document of `bounds` that is not empty.

    A token sees `left` tokens before its own (-1: all). The mask is None where plain causal attention does, else
    [tokens, tokens] in the dtype of `like`.
    """
    for start, stop in itertools.pairwise(bounds.tolist()):
        if start < stop:
            mask, places = None, torch.arange(stop - start)
            if 0 <= left < stop - start - 1:  # `left` does not reach the document's first token from its last
                back = places[:, None] - places
                mask = torch.zeros(back.shape, dtype=like.dtype).masked_fill((back < 0) | (back > left), -math.inf)
            yield slice(start, stop), mask


def _attend_padded(module: Any, query: Any, key: Any, value: Any, *arguments: Any, **named: Any) -> tuple[Any, None]:
    """Return (transformers' SDPA attention with value heads padded to the size of query heads, then cut, None)."""
    # Most kernels need heads of equal size; the math kernel, which torch would use instead, keeps every score.
    out, _ = sdpa_attention_forward(module, query, key, _fill_up(value, query.shape[-1]), *arguments, **named)
    return out[..., : value.shape[-1]], None


def _fill_up(value: torch.Tensor, size: int) -> torch.Tensor:
    """Return `value` with its last dimension padded with zeros to `size`; as given if it has that size."""
    return value if value.shape[-1] == size else functional.pad(value, (0, size - value.shape[-1]))


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(PADDED, _attend_padded)
AttentionMaskInterface.register(PADDED, sdpa_mask)


LossSum = Callable[..., torch.Tensor]
Numbers = Mapping[str, "float | list[float] | Numbers"]  # by name, also within a name, as in rows of events.jsonl
PROOF_TOKENS = 128  # an export reads them on a CPU


def evaluate(
    loss_sum: LossSum,
    shards: Shards,
    recipe: Settings,
    micro_batches: Sequence[int],
    device: torch.device,
    rows_of: Callable[[Sequence[Shard], int], Any] = Rows,
) -> Numbers:
    """Return {"loss", "perplexity", "sources": {name: {loss, perplexity, tokens, bits_per_byte}}} of held-out rows.

    Losses are means over tokens, in nats. Collective, without gradients; the caller sets eval mode. Raises
    ZeroDivisionError if nothing is held out.

    Reads rows of batch.sequence_length, spread evenly over each source: at most eval.max_tokens_per_source tokens, but
    at least one row. `loss_sum` maps (inputs, labels), each int64 [batch, sequence], and with document masks
    document_bounds(), to the summed negative log-likelihood. `micro_batches` has the rows that each rank computes at
    once. `rows_of` makes rows from a source's shards and the sequence length; only Rows gives bits_per_byte.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    first = sum(micro_batches[:rank])
    sequence_length = recipe.batch.sequence_length
    sources: dict[str, dict[str, float]] = {}
    for name, parts in sorted(shards.by_source("held_out").items()):
        rows = rows_of(parts, sequence_length)
        count = min(len(rows), max(1, recipe.eval.max_tokens_per_source // sequence_length))
        # From everywhere: a stream lies in the order of its files; where best fit fills rows the longest come first.
        chosen = np.linspace(0, len(rows) - 1, count).round().astype(np.int64)
        nll, tokens = torch.zeros(2, dtype=torch.float64, device=device)
        for start in range(first, count + first, sum(micro_batches)):
            places = np.arange(start, start + micro_batches[rank])
            read = chosen[np.minimum(places, count - 1)]
            inputs, labels = rows.read(read)
            labels[places >= count] = IGNORED  # a rank past the end computes along without counting
            batch = [torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device)]
            if recipe.data.document_masks:
                within = document_bounds(rows.documents(read))
                batch.append(torch.from_numpy(within).to(device))
            with torch.no_grad():
                nll += loss_sum(*batch).double()
            tokens += int((labels != IGNORED).sum())
        if len(micro_batches) > 1:
            distributed.all_reduce(nll)
            distributed.all_reduce(tokens)
        sources[name] = _summary(float(nll), int(tokens)) | {"tokens": int(tokens)}
        if rows_of is Rows:  # the bytes of a dialogue's labels are not known
            bytes_per_token = sum(part.text_bytes for part in parts) / sum(part.tokens for part in parts)
            sources[name]["bits_per_byte"] = sources[name]["loss"] / math.log(2) / bytes_per_token
    total = sum(source["loss"] * source["tokens"] for source in sources.values())
    return _summary(total, sum(source["tokens"] for source in sources.values())) | {"sources": sources}


def proof_ids(shards: Shards, recipe: Settings) -> list[int]:
    """Return the first ids, at most PROOF_TOKENS and a row, of the first held-out shard, or else training shard.

    With sft.hide_eos, </s> is left out of them.
    """
    shard = [*shards.split("held_out"), *shards.split("train")][0]
    # Without </s> where training hides it from attention: the export does not.
    hidden = shards.eos_id if recipe.sft is not None and recipe.sft.hide_eos else None
    ids = shard.ids[: min(PROOF_TOKENS, recipe.batch.sequence_length)].tolist()
    return [number for number in ids if number != hidden]


def loss_of(
    ids: Sequence[int], loss_sum: LossSum, shape: tuple[int, int], recipe: Settings, device: torch.device
) -> float:
    """Return the mean negative log-likelihood of `ids` after the first; `loss_sum` is as in evaluate().

    `ids`, at least two, must fit a row of `shape` [batch, sequence]; ignored labels fill the rest. Computes without
    gradients; the caller sets eval mode.
    """
    inputs, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
    inputs[0, : len(ids)], labels[0, : len(ids) - 1] = torch.tensor(ids), torch.tensor(ids[1:])
    batch = [inputs.to(device), labels.to(device)]
    if recipe.data.document_masks:
        batch.append(torch.from_numpy(document_bounds(np.zeros(shape, dtype=np.int32))).to(device))
    with torch.no_grad():
        return float(loss_sum(*batch)) / (len(ids) - 1)


def _summary(nll: float, tokens: float) -> dict[str, float]:
    """Return {loss, perplexity} of a summed negative log-likelihood. ZeroDivisionError for 0 tokens."""
    loss = nll / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}
