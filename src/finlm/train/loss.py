"""The language-model head and its cross-entropy as one operation that never keeps fp32 logits.

transformers' own path holds the logits three times, once of them in fp32: 10 bytes a token and vocabulary entry, 3.2 GB
for 8,192 tokens of XuanYuan-6B. Here the gradient with respect to the logits is formed as soon as they are known
(softmax minus one-hot needs nothing from behind it), a slice of tokens at a time, so that at most LOGITS_SLICE_BYTES of
logits and as much gradient exist: the method of Liger's fused linear cross-entropy (arXiv 2410.10989), with cuBLAS for
the three matrix products and one compiled kernel between them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from finlm.data.shards import IGNORED
from finlm.plan.memory import LOGITS_SLICE_BYTES


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(hidden @ weight.T)[label] over the labels that are not IGNORED, and each token's part of it.

    Only the sum has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [tokens, hidden], weight [rows, hidden], labels [tokens]; rows from vocab_size on are padding."""
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if with_grad else None
        weight_grad: torch.Tensor | None = None
        kernel = _compiled(softmax_gradient) if hidden.is_cuda else softmax_gradient
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            part = hidden[start:stop]
            losses[start:stop], gradient = kernel(part @ weight.T, labels[start:stop], vocab_size)
            if hidden_grad is None:
                continue
            torch.mm(gradient, weight, out=hidden_grad[start:stop])
            if not ctx.needs_input_grad[1]:  # a frozen head, under adapters
                continue
            if weight_grad is None:
                weight_grad = gradient.T @ part
            else:
                weight_grad.addmm_(gradient.T, part)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients formed in forward, times the scalar from above."""
        scale = upstream[0]
        # torch multiplies 16 bits by an fp32 scalar on the GPU at a quarter of its memory's speed.
        times = _compiled(_times) if scale.is_cuda else _times
        hidden_grad, weight_grad = ctx.saved_tensors
        return times(hidden_grad, scale), None if weight_grad is None else times(weight_grad, scale), None, None, None


class LinearLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T)[label] of each token; the logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        """hidden [tokens, hidden], weight [rows, hidden], labels [tokens]; rows from vocab_size on are padding."""
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            scores = (hidden[start:stop] @ weight[:vocab_size].T).float()
            picked = scores.gather(1, labels[start:stop, None])[:, 0]
            found[start:stop] = picked - scores.logsumexp(dim=1)
        ctx.save_for_backward(hidden, weight, labels)
        ctx.vocab_size = vocab_size
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """one-hot minus softmax, times what comes from above for each token."""
        hidden, weight, labels = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        rows = weight[: ctx.vocab_size]
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            part = hidden[start:stop]
            gradient = (part @ rows.T).float().softmax(dim=1).neg_()
            gradient.scatter_add_(1, labels[start:stop, None], torch.ones_like(gradient[:, :1]))
            gradient = gradient.mul_(upstream[0][start:stop, None]).to(hidden.dtype)
            hidden_grad[start:stop] = gradient @ rows
            weight_grad[: ctx.vocab_size].addmm_(gradient.T, part)
        return hidden_grad, weight_grad if ctx.needs_input_grad[1] else None, None, None


def softmax_gradient(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(negative log-likelihoods in fp32 [tokens], the gradient of their sum with respect to the logits in their dtype).

    logits: [tokens, rows]; labels: [tokens]. Columns from vocab_size on count as minus infinity.
    """
    scores = logits.float()
    if vocab_size < logits.shape[1]:
        scores = torch.where(torch.arange(logits.shape[1], device=logits.device) < vocab_size, scores, -math.inf)
    counted = (labels != IGNORED)[:, None]
    target = labels.clamp(min=0)[:, None]
    log_probability = functional.log_softmax(scores, dim=-1)
    picked = log_probability.gather(1, target)
    gradient = (log_probability.exp() * counted).to(logits.dtype)
    # p - 1 is computed in fp32: in bf16 it would lose the small difference of a confident prediction.
    gradient.scatter_(1, target, (torch.expm1(picked) * counted).to(logits.dtype))
    return -(picked * counted)[:, 0], gradient


def _times(gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return gradient * scale


@functools.cache
def _compiled(function: Any) -> Any:
    """One kernel on a GPU. Not at import: it loads torch's compiler, a second that a CPU run has no use for."""
    return torch.compile(function, dynamic=False)


def slices(tokens: int, row_bytes: int, device: str) -> list[tuple[int, int]]:
    """Equal slices of the tokens whose logits, row_bytes a token, stay below the device's LOGITS_SLICE_BYTES."""
    count = max(1, math.ceil(tokens * row_bytes / LOGITS_SLICE_BYTES[device]))
    size = math.ceil(tokens / count)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of hidden [batch, sequence, hidden] against labels [batch, sequence]: (sum, each row's without gradient).

    fp32; a scalar and [batch]. On a CPU only counted positions meet the head, a quarter of the quickstart's SFT;
    on a GPU their changing number would compile the kernel again and again.
    """
    counted = labels != IGNORED
    is_part = not hidden.is_cuda and 0 < int(counted.sum()) < labels.numel()
    flat, wanted = (hidden[counted], labels[counted]) if is_part else (hidden.flatten(0, -2), labels.flatten())
    with_grad = torch.is_grad_enabled()
    loss, losses = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, weight, wanted, vocab_size, with_grad
    )
    if is_part:
        losses = torch.zeros(labels.shape, dtype=losses.dtype).masked_scatter(counted, losses)
    return loss, losses.view(labels.shape).sum(1)


def linear_log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """fp32 log-probability of each label [batch, sequence], 0 where it is IGNORED; hidden [batch, sequence, hidden].

    Only the counted positions meet the head: of a pair's tokens these are the answers.
    """
    counted = labels != IGNORED
    found = LinearLogProbs.apply(hidden[counted], weight, labels[counted], vocab_size)  # type: ignore[no-untyped-call]
    whole: torch.Tensor = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    return whole.masked_scatter(counted, found)
