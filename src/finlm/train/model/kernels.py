"""Replace transformers' own code where ours is faster: attention backend, loss, compiled layers, recompute, float8.

The Hugging Face model stays the model: its parameters, their names and its modules' code. `swap` overrides the forward
of instances, in this one place; tests/train/model/test_kernels.py compares each swap with the plain model.

The head and its cross-entropy are one operation that never keeps fp32 logits. transformers' own path holds the logits
three times, 10 bytes a token and vocabulary entry: 3.2 GB for 8,192 tokens of XuanYuan-6B. Here the gradient with
respect to the logits is formed as soon as they are known, a slice of at most LOGITS_SLICE_BYTES at a time: the method
of Liger's fused linear cross-entropy (arXiv 2410.10989), with cuBLAS for the three products.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.integrations import sdpa_attention

from finlm.plan.plan import LOGITS_SLICE_BYTES, Plan
from finlm.recipe.models import config_json, traits
from finlm.rows.shards import IGNORED
from finlm.train import batches
from finlm.train.model.delta_net import ConvolvesWithin, WithinDocuments, mixers
from finlm.train.model.products import SumsWithinProducts

Form = tuple[float, float | None]  # factor and soft cap of the logits (traits.head_of)
PLAIN: Form = (1.0, None)
Head = tuple[int, Form]  # rows of the vocabulary, and what becomes of the logits
ATTENTION = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],  # flash takes no mask
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}
_positions: list[torch.Tensor] = []  # of the forward pass at work


class RecomputedMlp(torch.nn.Module):
    """Mixin, put before the model's class: a feed-forward block that keeps only its input for the backward pass."""

    draws: bool

    def forward(self, x: torch.Tensor) -> Any:
        """Return the block's output for x [batch, sequence, hidden]; the backward pass computes all inside again."""
        return _recompute(self.draws, super().forward, x)


class LeanMlp(torch.nn.Module):
    """Mixin for Llama's feed-forward block that does not keep silu(gate) * up, a sixth of a layer's activations."""

    draws: bool
    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    down_proj: torch.nn.Module
    act_fn: torch.nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for x [batch, sequence, hidden]; its backward pass forms silu(gate) * up again."""
        # Compiled, that reads gate and up anyway and forms their product on the way (0.2 % of XuanYuan-6B's step).
        return _recompute(self.draws, self._down, self.gate_proj(x), self.up_proj(x))  # type: ignore[no-any-return]

    def _down(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the block's output from the products of gate_proj and up_proj."""
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


LEAN = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # modules of a block that is Llama's


@functools.cache
def _mix_class(mixin: Any, kind: Any) -> Any:
    """Return a subclass of `mixin` and `kind`, the same for the same two."""
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


@contextmanager
def attention_backends(plan: Plan) -> Iterator[None]:
    """Within the block, make scaled_dot_product_attention prefer the plan's backends and take its math kernel last.

    Also patches transformers' choice to repeat the keys of grouped heads. Does nothing when plan.attention is
    "default". Raises KeyError for an unknown one.
    """
    if plan.attention == "default":
        yield
        return
    grouped = sdpa_attention.use_gqa_in_sdpa

    def shares(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether SDPA gets keys unrepeated: as transformers says, never for "efficient" or above size 192."""
        return plan.attention != "efficient" and key.shape[-1] <= 192 and bool(grouped(mask, key, value))

    # Math keeps every score for the backward pass: 400 MiB a layer, not 20 (2 rows of 1,024, 32 heads of 128).
    backends = sdpa_kernel([*ATTENTION[plan.attention], SDPBackend.MATH], set_priority=True)
    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", shares), backends:
        yield


def attention_kernel(plan: Plan, config: PreTrainedConfig, dtype: torch.dtype, masked: bool) -> str:
    """Return the kernel that torch picks in attention_backends(plan) for attention: flash, efficient, cudnn or math.

    `config` gives the numbers and sizes of heads. `masked` tells whether attention gets a mask as a tensor.
    """
    heads, tokens = config.num_attention_heads, 128
    size, _ = head_sizes(config)  # values are filled up to it
    groups = getattr(config, "num_key_value_heads", None) or heads
    query = torch.empty(1, heads, tokens, size, dtype=dtype, device=plan.device, requires_grad=True)
    key, mask = query[:, :groups], None
    if masked:
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=plan.device)
    shared = sdpa_attention.use_gqa_in_sdpa(mask, key, key)
    if not shared:
        key = sdpa_attention.repeat_kv(key, heads // groups)
    backend = torch._fused_sdp_choice(query, key, key, mask, is_causal=not masked, enable_gqa=shared)
    return SDPBackend(backend).name.partition("_")[0].lower()


def head_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Return (size of a query or key head, size of a value head); they differ in latent attention only."""
    if getattr(config, "kv_lora_rank", None):  # whose head_dim is of RoPE alone
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size, size


def plain_positions(input_ids: torch.Tensor) -> torch.Tensor:
    """Return the position ids 0, 1, ... of rows that hold a single text each, int64 [1, sequence], for _make_mask()."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    positions.begin_once = True  # type: ignore[attr-defined]
    return positions


def swap(model: Any, plan: Plan, draws: bool = False) -> None:
    """Change the model in place as the plan says, before deepspeed.initialize: loss, fp8, recompute, compiled layers.

    `draws` tells whether layers will draw random numbers (adapters with dropout), which recomputation must draw again.
    For compiled layers also sets global options of torch's compiler. Raises UserError if kernels that the model's
    linear attention needs are missing.
    """
    config_json.check_kernels(model.config.to_dict(), plan.device)
    swap_loss(model, plan.vocab_size)
    if plan.precision == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]

        # A scale per tensor; the head stays in bf16.
        convert_to_float8_training(model.model.layers, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    run: Callable[..., Any] = _run_recomputed_layer if plan.recompute == "full" else run_layer
    for layer in model.model.layers:
        layer.draws = layer.mlp.draws = draws
        # The class, not the instance's forward: layers of one class share a compiled function.
        if plan.recompute == "selective":
            layer.mlp.__class__ = _mix_class(RecomputedMlp, layer.mlp.__class__)
        elif plan.recompute == "none" and plan.compiled and {name for name, _ in layer.mlp.named_children()} == LEAN:
            layer.mlp.__class__ = _mix_class(LeanMlp, layer.mlp.__class__)
    if plan.compiled:
        # Training, evaluation and each size of the documents' bounds are compiled for; past torch's limit of 8 a layer
        # would run uncompiled without a word.
        torch._dynamo.config.recompile_limit = 64
        torch._inductor.config.post_grad_custom_post_pass = SumsWithinProducts()
        # One function for all layers, the layer an argument: compiled once, not once a layer.
        run = torch.compile(run, dynamic=False)
        model.model.norm.forward = torch.compile(model.model.norm.forward, dynamic=False)
        if plan.zero_stage == 3:
            # ZeRO-3 gathers a whole layer in the hook around it; hooks inside would cut the compiled graph.
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
            # The hook behind a layer, which gives its weights back, runs before the layer's backward pass where no
            # input has a gradient: the first layer's under adapters, whose embedding is frozen.
            model.enable_input_require_grads()
    if plan.compiled or plan.recompute == "full":
        for layer in model.model.layers:
            layer.forward = partial(run, layer)


def swap_loss(model: Any, vocab_size: int, by_row: bool = False) -> None:
    """Make model(inputs, labels), each int64 [batch, sequence], return the summed loss, an fp32 scalar.

    Replaces the forward of `model` and its lm_head in place; patches masks and linear attention. Labels are next-token
    labels; IGNORED counts nothing, and vocabulary rows from vocab_size on are padding. With a third argument, int32
    bounds (batches.document_bounds), attention and positions end at a document's end. With `by_row` it returns (that
    scalar, the losses of the rows [batch], which have no gradient). Raises as traits.head_of() does.
    """
    form = traits.head_of(model.config.to_dict())
    model.lm_head.forward = partial(_head_loss, model.lm_head, vocab_size, by_row, form)
    model.forward = partial(_summed_loss, model)
    for mixer in mixers(model.model):
        if not isinstance(mixer, WithinDocuments):
            mixer.__class__ = _mix_class(WithinDocuments, mixer.__class__)
            mixer.conv1d.__class__ = _mix_class(ConvolvesWithin, mixer.conv1d.__class__)
    module = sys.modules[type(model.model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):  # for all models of the class, once
        make = getattr(module, name, None)
        if make is not None and not isinstance(make, partial):
            setattr(module, name, partial(_make_mask, make))


def _summed_loss(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    bounds: torch.Tensor | None = None,
    **_: Any,  # what peft hands on
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what swap_loss() says, in place of model.forward.

    Stores `bounds` as document_bounds on attention modules, and the positions within documents on linear attention's.
    """
    positions = plain_positions(input_ids) if bounds is None else batches.document_positions(bounds, input_ids.shape)
    for module in attention_modules(model.model):  # not as an argument: some types do not hand further ones down
        module.document_bounds = bounds
    for module in mixers(model.model):
        module.document_positions = None if bounds is None else positions
    _positions.append(positions)
    try:
        hidden = model.model(input_ids=input_ids, use_cache=False, position_ids=positions).last_hidden_state
    finally:
        _positions.pop()
    return model.lm_head(hidden, labels)  # type: ignore[no-any-return]  # a call of the module: ZeRO-3 gathers its weight


def attention_modules(decoder: Any) -> Iterator[Any]:
    """Yield the attention module of each layer, linear or not: the layer's children that have a layer_idx."""
    for layer in decoder.layers:
        yield from (module for module in layer.children() if hasattr(module, "layer_idx"))


def _make_mask(make: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """Return make(...), a transformers mask function, with the pass's position_ids where the model gives none."""
    if given.get("position_ids") is None and _positions:
        given["position_ids"] = _positions[-1]
    if getattr(given.get("position_ids"), "begin_once", False):  # of plain_positions(): to read them would be a wait
        given["position_ids"] = None
    return make(*arguments, **given)


def _head_loss(
    head: torch.nn.Linear, vocab_size: int, by_row: bool, form: Form, hidden: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss, fp32, or with `by_row` (that, losses of the rows [batch]). Replaces head.forward."""
    loss, rows = linear_cross_entropy(hidden, head.weight, labels, vocab_size, form)
    return (loss, rows) if by_row else loss


def run_layer(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    """Return the output of the forward of the layer's own class."""
    return type(layer).forward(layer, *arguments, **named)


def _run_recomputed_layer(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    """Return the output of the forward of the layer's own class; the backward pass computes the layer again."""
    return _recompute(layer.draws, type(layer).forward, layer, *arguments, **named)


def _recompute(draws: Any, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return forward(...); the backward pass computes it again, in the same random state if it `draws`."""
    if not torch.is_grad_enabled():  # nothing is kept anyway
        return forward(*arguments, **named)
    # Reentrant checkpointing breaks under ZeRO-3 (CheckpointError: recomputed shapes differ).
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=draws, **named)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(hidden @ weight.T)[label] over labels that are not IGNORED; each part, without gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss sum, losses [tokens]) of hidden [tokens, hidden], weight [rows, hidden], labels [tokens]; fp32.

        The losses carry no gradient and are 0 for IGNORED. `head` is (vocab_size, form of the logits): rows of weight
        from vocab_size on are padding. With `with_grad`, computes the gradients here and keeps them for backward(),
        which fails without.
        """
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if with_grad else None
        weight_grad: torch.Tensor | None = None
        shrunk = _shrinkage(hidden) if with_grad and hidden.dtype == torch.float16 and ctx.needs_input_grad[1] else None
        kernel = _compile(softmax_gradient) if hidden.is_cuda else softmax_gradient
        # On a GPU a second kernel, for evaluations alone, would cost more to compile than it saves.
        needs_gradient = with_grad or hidden.is_cuda
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            part = hidden[start:stop]
            losses[start:stop], gradient = kernel(part @ weight.T, labels[start:stop], *head, needs_gradient)
            if hidden_grad is None or gradient is None:
                continue
            torch.mm(gradient, weight, out=hidden_grad[start:stop])
            if not ctx.needs_input_grad[1]:  # a frozen head, under adapters
                continue
            if shrunk is not None:
                part = (part * shrunk).to(part.dtype)
            if weight_grad is None:
                weight_grad = gradient.T @ part
            else:
                weight_grad.addmm_(gradient.T, part)
        ctx.save_for_backward(hidden_grad, weight_grad, shrunk)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients by hidden and weight: those formed in forward, times the gradient of the sum."""
        scale = upstream[0]
        # torch multiplies 16 bits by an fp32 scalar on the GPU at a quarter of its memory's speed.
        times = _compile(_times) if scale.is_cuda else _times
        hidden_grad, weight_grad, shrunk = ctx.saved_tensors
        if weight_grad is not None:
            weight_grad = times(weight_grad, scale if shrunk is None else scale / shrunk)
        return times(hidden_grad, scale), weight_grad, None, None, None


def shape_logits(scores: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return (logits, slope): fp32 scores times the form's factor, soft-capped if it has a cap, and their derivative.

    The slope is None where it is 1, a float without a cap, else a tensor like the scores.
    """
    factor, cap = form
    if factor != 1.0:
        scores = scores * factor
    if cap is None:
        return scores, None if factor == 1.0 else factor
    bent = torch.tanh(scores / cap)
    return cap * bent, factor * (1 - bent * bent)


def softmax_gradient(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, form: Form = PLAIN, with_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (negative log-likelihoods, fp32 [tokens]; gradient of their sum by the logits, in the logits' dtype).

    `logits` is [tokens, rows], before factor and cap; `labels` is [tokens], and IGNORED gives 0. Columns from
    vocab_size on count as minus infinity. The gradient is None without `with_grad`.
    """
    scores, slope = shape_logits(logits.float(), form)
    if vocab_size < logits.shape[1]:
        scores = torch.where(torch.arange(logits.shape[1], device=logits.device) < vocab_size, scores, -math.inf)
    counted = (labels != IGNORED)[:, None]
    target = labels.clamp(min=0)[:, None]
    log_probability = functional.log_softmax(scores, dim=-1)
    picked = log_probability.gather(1, target)
    losses = -(picked * counted)[:, 0]
    if not with_grad:
        return losses, None
    probability = log_probability.exp_()  # in place: on a CPU, new memory for so many numbers costs more than they do
    if logits.is_cuda or not counted.all():
        probability *= counted
    if slope is not None:
        gradient = probability.scatter(1, target, torch.expm1(picked) * counted) * slope
        return losses, gradient.to(logits.dtype)
    gradient = probability.to(logits.dtype)
    # p - 1 is computed in fp32: in bf16 it would lose the small difference of a confident prediction.
    gradient.scatter_(1, target, (torch.expm1(picked) * counted).to(logits.dtype))
    return losses, gradient


def _shrinkage(hidden: torch.Tensor) -> torch.Tensor:
    """Return factors for the columns of `hidden` [tokens, hidden]: powers of two, at most 1, fp32 [hidden].

    With them, the sum of a column's absolute values is at most 2**15, so the weight's gradient fits fp16.
    """
    # That gradient is summed before the loss scale is applied, so no loss scale would cure its overflow. Where the sum
    # fits anyway the factor is 1: to shrink more would push small numbers below what fp16 holds.
    largest = torch.linalg.vector_norm(hidden, ord=1, dim=0, dtype=torch.float32)
    return torch.exp2(-(largest / 2**15).log2().ceil().clamp(min=0))


def _times(gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return gradient * scale in the gradient's dtype."""
    return (gradient * scale).to(gradient.dtype)


@functools.cache
def _compile(function: Any) -> Any:
    """Return torch.compile(function), cached. Not at import: it loads torch's compiler, a second wasted on a CPU."""
    return torch.compile(function, dynamic=False)


def slices(tokens: int, row_bytes: int, device: str) -> list[tuple[int, int]]:
    """Return half-open ranges (start, end) that cut the tokens into equal slices; the last may be shorter.

    `row_bytes` is the bytes of a token's logits; those of a slice take about LOGITS_SLICE_BYTES[device] at most. Raises
    ValueError for 0 tokens.
    """
    count = max(1, math.ceil(tokens * row_bytes / LOGITS_SLICE_BYTES[device]))
    size = math.ceil(tokens / count)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int, form: Form = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss sum, loss of each row) of hidden [batch, sequence, hidden] against labels [batch, sequence].

    Both are fp32, a scalar and [batch]; only the sum has a gradient. `weight` is the head's [rows, hidden], with
    padding from vocab_size on.
    """
    # On a CPU, positions whose label does not count are left out: three quarters of the quickstart's SFT. On a GPU
    # their changing number would compile the kernel again and again.
    counted = labels != IGNORED
    is_part = not hidden.is_cuda and 0 < int(counted.sum()) < labels.numel()
    flat, targets = (hidden[counted], labels[counted]) if is_part else (hidden.flatten(0, -2), labels.flatten())
    head, with_grad = (vocab_size, form), torch.is_grad_enabled()
    loss, losses = LinearCrossEntropy.apply(flat, weight, targets, head, with_grad)  # type: ignore[no-untyped-call]
    if is_part:
        losses = torch.zeros(labels.shape, dtype=losses.dtype).masked_scatter(counted, losses)
    return loss, losses.view(labels.shape).sum(1)
