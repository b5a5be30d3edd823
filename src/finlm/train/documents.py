"""Attention within documents: a row holds several of them, and with `data.document_masks` none sees another.

What travels to the model is one tensor of bounds. Where torch's varlen_attn runs (bf16 or fp16 on compute capability
8.0 and later) attention takes the bounds as they are and skips what they cut off; elsewhere transformers makes the
block-diagonal mask from position ids that start again at every document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import repeat_kv

NAME = "finlm_documents"
FEWEST = 64  # bounds are filled up to this many, or twice, four times ... as many: a size is compiled for


def bounds(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where documents begin in the rows laid end to end, then the end, repeated: int32 [FEWEST * 2^k].

    documents: [batch, sequence], the number of its row's document for every token (shards.Rows.documents).
    """
    begins = np.ones(documents.shape, dtype=bool)  # a row never goes on in the next one
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = np.flatnonzero(begins.ravel())
    filled = np.full(max(FEWEST, 1 << len(found).bit_length()), documents.size, dtype=np.int32)
    filled[: len(found)] = found
    return filled


def arguments(bounds: torch.Tensor | None, shape: torch.Size, implementation: str) -> dict[str, Any]:
    """What LlamaModel takes so that its layers attend within documents; nothing when bounds is None.

    bounds: int32 on the model's device. shape: of the inputs, [batch, sequence].
    """
    if bounds is None:
        return {}
    places = torch.arange(shape.numel(), dtype=bounds.dtype, device=bounds.device)
    starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
    positions = {"position_ids": (places - starts).view(shape)}
    return positions | {"document_bounds": bounds} if implementation == NAME else positions


def implementation(device: str, dtype: torch.dtype) -> str:
    """The attention that a model with document masks is built with: one of transformers' names, or ours."""
    if device == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability() >= (8, 0):
        AttentionInterface.register(NAME, _attend)
        return NAME
    return "sdpa"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    document_bounds: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within the bounds. query, key, value: [batch, heads, sequence, head]; out: transposed."""
    batch, _heads, sequence, _head = query.shape
    groups = query.shape[1] // key.shape[1]
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, repeat_kv(key, groups), repeat_kv(value, groups)))
    limits = (document_bounds, document_bounds, sequence, sequence)
    out: torch.Tensor = varlen_attn(q, k, v, *limits, scale=scaling, window_size=(-1, 0))  # type: ignore[assignment]
    return out.view(batch, sequence, *out.shape[1:]), None
