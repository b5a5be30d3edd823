"""Let Gated DeltaNet layers (Qwen3-Next, Qwen3.5) begin anew at each document of a packed row.

Such a layer (arXiv 2412.06464) is a short convolution and a recurrent state, both of which run through a row and over
the ends of its documents in transformers' own code. On a GPU the state is computed by flash-linear-attention's kernels,
which take the documents' bounds; elsewhere by transformers' code in torch, a document at a time.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from finlm.recipe.models.traits import DELTA_CHUNK

HAS_KERNELS = importlib.util.find_spec("fla") is not None
# Functions of transformers' modules that are a package's wherever it is installed.
OF_PACKAGES = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"),
)


def choose_by_device(kind: type) -> None:
    """Replace OF_PACKAGES in the module of a model's class, once, so that its layers use torch's code on a CPU."""
    module = sys.modules[kind.__module__]
    for name in OF_PACKAGES:
        function = getattr(module, name, None)
        if function is not None and not isinstance(function, functools.partial):
            setattr(module, name, functools.partial(_choose, function))


def _choose(function: Any, first: torch.Tensor, *rest: Any, **given: Any) -> Any:
    """Return function(...) if `first` is on a GPU, else the torch implementation's result."""
    return (function if first.is_cuda else in_torch(function))(first, *rest, **given)


def in_torch(function: Any) -> Any:
    """Return the torch implementation behind `function`, of OF_PACKAGES, which choose_by_device() may have replaced."""
    return inspect.unwrap(function.args[0] if isinstance(function, functools.partial) else function)


def mixers(decoder: Any) -> Iterator[Any]:
    """Yield the linear-attention module, known by its A_log, of each layer that has one."""
    yield from (module for layer in decoder.layers for module in layer.children() if hasattr(module, "A_log"))


class ConvolvesWithin(torch.nn.Module):
    """Mixin, put before the class of a Gated DeltaNet layer's convolution: it does not cross the ends of documents."""

    weight: torch.Tensor

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return silu of the causal convolution of x [batch, sequence, channels] within documents, in the same shape.

        `positions` [batch, sequence] are the tokens' positions in their documents; None: every row is a document. The
        class's own forward takes channels before the sequence and applies no silu.
        """
        weight, length = self.weight[:, 0], x.shape[1]  # [channels, taps]
        taps = weight.shape[1]
        padded = functional.pad(x, (0, 0, taps - 1, 0))  # once: compiled, padding is kept and not done again
        total = padded[:, taps - 1 :] * weight[:, -1]
        for back in range(1, taps):
            shifted = padded[:, taps - 1 - back :][:, :length]
            if positions is not None:
                shifted = torch.where((positions >= back)[..., None], shifted, 0)
            total = torch.addcmul(total, shifted, weight[:, taps - 1 - back])
        return functional.silu(total)


class WithinDocuments(torch.nn.Module):
    """Mixin, put before the class of a Gated DeltaNet layer, that begins anew at each document of a row.

    document_bounds is as batches.document_bounds makes it, document_positions [batch, sequence]; None: a row is a
    document.
    """

    document_bounds: torch.Tensor | None = None
    document_positions: torch.Tensor | None = None

    def forward(
        self, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **given: Any
    ) -> torch.Tensor:
        """Return the layer's output for hidden_states [batch, sequence, hidden]; documents end at document_bounds.

        attention_mask is [batch, sequence] or None.
        """
        mixer: Any = self
        if cache_params is not None:  # in generation
            return super().forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **given)  # type: ignore[no-any-return]
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[..., None]).to(hidden_states.dtype)
        batch, length, _ = hidden_states.shape
        if hasattr(mixer, "in_proj_qkvz"):  # Qwen3-Next: two products, whose parts lie head by head
            both = mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
            *mixed, z, b, a = mixer.fix_query_key_value_ordering(*both)
            mixed = torch.cat([part.reshape(batch, length, -1) for part in mixed], dim=-1)
        else:
            products = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a
            mixed, z, b, a = (product(hidden_states) for product in products)
        mixed = mixer.conv1d(mixed, self.document_positions)  # a call of the module: ZeRO-3 gathers its weight
        q, k, v = mixed.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), -1)
        q, k = (part.reshape(batch, length, -1, mixer.head_k_dim) for part in (q, k))
        v = v.reshape(batch, length, -1, mixer.head_v_dim)
        bounds = self.document_bounds
        if bounds is None:
            bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        decay = -mixer.A_log.float().exp() * functional.softplus(a.float() + mixer.dt_bias)
        out, _ = delta_rule(*(part.flatten(0, 1) for part in (q, k, v, decay, b.sigmoid())), bounds)
        out = mixer.norm(out.view(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
        return mixer.out_proj(out.view(batch, length, -1))  # type: ignore[no-any-return]


@torch.library.custom_op("finlm::delta_rule", mutates_args=())
def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, inverse): the gated delta rule within documents, and what its backward pass needs.

    q and k are [tokens, key heads, size]; both are scaled to length 1 here, and q by size ** -0.5. v and the output are
    [tokens, value heads, size]. `decay`, the logarithm of what is left of the state, and `beta`, the share that is
    written, are [tokens, value heads]. `bounds` has where each document begins and then, once or more, the number of
    tokens. inverse, [tokens, value heads, DELTA_CHUNK], has no values on CPU or without flash-linear-attention.
    """
    if not _uses_kernels(q):
        return _by_document(q, k, v, decay, beta, bounds).to(q.dtype), _new_inverse(q, v)
    fla, rows = _kernels(), _chunks(bounds, len(q))
    (q, _), (k, _) = (fla.l2norm_fwd(each.contiguous()) for each in (q, k))
    given = {"v": v.contiguous(), "g": decay.contiguous(), "beta": beta.contiguous()}
    given = {name: part[None] for name, part in ({"q": q, "k": k} | given).items()}
    _, out, inverse, *_ = fla.chunk_gated_delta_rule_fwd(
        **given, **rows, scale=q.shape[-1] ** -0.5, initial_state=None, output_final_state=False
    )
    return out[0].to(v.dtype), inverse[0]


@delta_rule.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors in the form of delta_rule's results, for the compiler."""
    return torch.empty_like(v, memory_format=torch.contiguous_format), _new_inverse(q, v)


@torch.library.custom_op("finlm::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: torch.Tensor,
    inverse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, decay and beta. `gradient` is that of the output; `inverse` is delta_rule's."""
    if not _uses_kernels(q):
        # Autograd itself is off inside of an operator.
        differentiate: Any = torch.func.vjp(functools.partial(_by_document, bounds=bounds), q, k, v, decay, beta)[1]
        return tuple(part.contiguous() for part in differentiate(gradient.to(v.dtype)))
    fla, rows = _kernels(), _chunks(bounds, len(q))
    (q, q_length), (k, k_length) = (fla.l2norm_fwd(each.contiguous()) for each in (q, k))
    scaled = {"chunk_size": DELTA_CHUNK, "scale": fla.RCP_LN2}
    total = fla.chunk_local_cumsum(decay.contiguous()[None], **scaled, **rows)
    given = {"v": v.contiguous(), "beta": beta.contiguous(), "A": inverse, "do": gradient.contiguous()}
    given = {name: part[None] for name, part in ({"q": q, "k": k} | given).items()}
    scale = q.shape[-1] ** -0.5
    dq, dk, dv, db, dg, *_ = fla.chunk_gated_delta_rule_bwd(
        **given, **rows, g=total, scale=scale, initial_state=None, dht=None
    )
    dq, dk = fla.l2norm_bwd(q, q_length, dq[0].contiguous()), fla.l2norm_bwd(k, k_length, dk[0].contiguous())
    return dq.to(q.dtype), dk.to(k.dtype), dv[0].to(v.dtype), dg[0].to(decay.dtype), db[0].to(beta.dtype)


@_delta_rule_backward.register_fake
def _(_: Any, q: torch.Tensor, k: Any, v: Any, decay: Any, beta: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Return empty tensors in the form of the gradients, for the compiler."""
    kept = torch.contiguous_format
    return tuple(torch.empty_like(part, memory_format=kept) for part in (q, k, v, decay, beta))


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Save delta_rule's inputs and its second output for the backward pass; torch calls it after the forward pass."""
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of delta_rule's inputs, None for `bounds`."""
    return *_delta_rule_backward(gradient, *ctx.saved_tensors), None


delta_rule.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _new_inverse(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor in the form of delta_rule's second output."""
    return q.new_empty(*v.shape[:2], DELTA_CHUNK)


def _uses_kernels(q: torch.Tensor) -> bool:
    """Return whether q is on a GPU and flash-linear-attention is installed."""
    return q.is_cuda and HAS_KERNELS


@functools.cache
def _kernels() -> Any:
    """Return flash-linear-attention's module of the rule; replace its kernel of query and key gradients if need be."""
    from fla.ops.common import chunk_o  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk  # type: ignore[import-not-found]

    # Its own kernel refuses to run here: wrong gradients (flash-linear-attention, issue 640).
    if chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1:
        chunk.chunk_bwd_dqkwg = query_key_gradients
    return chunk


def _chunks(bounds: torch.Tensor, tokens: int) -> dict[str, torch.Tensor]:
    """Return flash-linear-attention's keyword arguments for documents, computed on the device: it reads nothing back.

    cu_seqlens is `bounds` with a last document that is empty. chunk_indices has (document, chunk of it) of every chunk,
    [most chunks of so many documents, 2].
    """
    # The rows of chunk_indices that are left over name the empty document, of which kernels write nothing.
    bounds = torch.cat([bounds, bounds[-1:]]).long()
    counts = -(-bounds.diff() // DELTA_CHUNK)
    ends = counts.cumsum(0)
    numbers = torch.arange(tokens // DELTA_CHUNK + len(counts), device=bounds.device)
    document = torch.searchsorted(ends, numbers, right=True)
    is_chunk = document < len(counts)
    document = document.clamp(max=len(counts) - 1)
    within = torch.where(is_chunk, numbers - ends[document] + counts[document], 0)
    return {"cu_seqlens": bounds, "chunk_indices": torch.stack([document, within], 1)}


def _by_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return delta_rule's output [tokens, value heads, size], by transformers' code in torch, a document at a time."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = in_torch(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    times = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(times, dim=1), k.repeat_interleave(times, dim=1)
    outputs = [
        rule(*(part[None, start:stop] for part in (q, k, v, decay, beta)), use_qk_l2norm_in_kernel=True)[0][0]
        for start, stop in itertools.pairwise(bounds.tolist())
        if start < stop
    ]
    return torch.cat(outputs)


def query_key_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients (dq, dk, dw, dg) that flash-linear-attention's chunk_bwd_dqkwg returns, computed in torch.

    dq and dk have the shape of q, dg that of g; dw is [1, tokens, value heads, key size].

    q and k are [1, tokens, key heads, size]. v, do and dv are [1, tokens, value heads, size]. h and dh, the states
    before each chunk and their gradients, are [1, chunks, value heads, size, size]. g, [1, tokens, value heads], is the
    decay added up within a chunk, as a logarithm to base 2. cu_seqlens and chunk_indices are those of _chunks().
    """
    tokens, heads, times = q.shape[1], v.shape[2], v.shape[2] // q.shape[2]
    document, chunk = chunk_indices.unbind(1)
    places = (cu_seqlens[document] + DELTA_CHUNK * chunk)[:, None] + torch.arange(DELTA_CHUNK, device=q.device)
    is_real = places < cu_seqlens[document + 1][:, None]
    last = (is_real.sum(1) - 1).clamp(min=0)

    def split_chunks(whole: torch.Tensor) -> torch.Tensor:
        """Return `whole` [1, tokens, heads, ...] as [chunks, heads, tokens of a chunk, ...], 0 past a document."""
        part = whole[0][places.clamp(max=tokens - 1)]
        part = part * is_real.view(*is_real.shape, *[1] * (part.dim() - 2))
        return part.repeat_interleave(heads // part.shape[2], dim=2).transpose(1, 2)  # [chunks, heads, tokens, size]

    def join_chunks(parts: torch.Tensor) -> torch.Tensor:
        """Return `parts` [chunks, heads, tokens of a chunk, ...] as [1, tokens, heads, ...]: split_chunks() undone."""
        whole = parts.new_empty(tokens + 1, *parts.shape[1:2], *parts.shape[3:])
        whole[torch.where(is_real, places, tokens)] = parts.transpose(1, 2)
        return whole[None, :-1]

    q, k, v, do, dv = map(split_chunks, (q, k, v, do, dv))
    before, after = h[0], dh[0].to(h.dtype)
    decay = split_chunks(g[..., None])[..., 0].float()
    end = decay.gather(2, last[:, None, None].expand(-1, heads, 1))
    by_end = (before.float() * after.float()).sum((2, 3)) * end[..., 0].exp2()
    dw = join_chunks(-(dv.to(h.dtype) @ before.transpose(2, 3)))
    from_scores = (do @ v.transpose(2, 3)).float() * (decay[..., :, None] - decay[..., None, :]).tril().exp2() * scale
    is_scored = is_real[:, None, :, None] & is_real[:, None, None, :]
    from_scores = torch.where(is_scored, from_scores, 0).tril().to(k.dtype)
    dq = (do @ before.transpose(2, 3)).float() * decay.exp2()[..., None] * scale
    dk = (v @ after.transpose(2, 3)).float() * torch.where(is_real[:, None], (end - decay).exp2(), 0)[..., None]
    by_end = by_end + (dk * k).sum((2, 3))
    dq, dk = dq + from_scores @ k, dk + from_scores.transpose(2, 3) @ q
    dg = (dq * q).sum(3) - (dk * k).sum(3)
    dg = dg + by_end[..., None] * functional.one_hot(last, DELTA_CHUNK)[:, None]
    dq, dk = (join_chunks(part.to(q.dtype)).view(1, tokens, -1, times, part.shape[-1]).sum(3) for part in (dq, dk))
    return dq, dk, dw, join_chunks(dg)
