"""Everything that runs in place of transformers' own code: attention backend, loss, compiled layers, recompute, float8.

The Hugging Face model stays the model: its parameters, their names and its modules' code. `swap` overrides the forward
of instances, in this one place; tests/train/test_kernels.py holds each swap to the plain model's loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from finlm.plan.plan import Plan
from finlm.train import documents
from finlm.train.loss import linear_cross_entropy
from finlm.train.products import SumsWithinProducts

ATTENTION = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}


class RecomputedMlp(LlamaMLP):  # type: ignore[misc]
    """The feed-forward block keeping nothing but its input."""

    draws: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, hidden]."""
        return _recomputed(self.draws, super().forward, x)  # type: ignore[no-any-return]


class LeanMlp(LlamaMLP):  # type: ignore[misc]
    """The feed-forward block without keeping silu(gate) * up, a sixth of a layer's activations.

    The compiled backward reads gate and up anyway and forms their product on the way (0.2 % of XuanYuan-6B's step).
    """

    draws: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, hidden]."""
        return _recomputed(self.draws, self._down, self.gate_proj(x), self.up_proj(x))  # type: ignore[no-any-return]

    def _down(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


@contextmanager
def attention(plan: Plan) -> Iterator[None]:
    """scaled_dot_product_attention takes the plan's backend first; the mathematical definition is the last resort."""
    if plan.attention == "default":
        yield
        return
    with sdpa_kernel([*ATTENTION[plan.attention], SDPBackend.MATH], set_priority=True):
        yield


def swap(model: LlamaForCausalLM, plan: Plan, draws: bool = False) -> None:
    """Override the forwards of the model, its head and its layers as the plan says; before deepspeed.initialize.

    draws: layers will draw random numbers (adapters with dropout), which recomputation must draw again.
    """
    swap_loss(model, plan.vocab_size)
    if plan.precision == "fp8":
        _to_float8(model)
    run: Callable[..., Any] = _recomputed_layer if plan.recompute == "full" else _layer
    for layer in model.model.layers:
        layer.draws = layer.mlp.draws = draws
        # The class, not the instance's forward: one class for all layers, so that they share one compiled function.
        if plan.recompute == "selective":
            layer.mlp.__class__ = RecomputedMlp
        elif plan.recompute == "none" and plan.compiled:
            layer.mlp.__class__ = LeanMlp
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
    if plan.compiled or plan.recompute == "full":
        for layer in model.model.layers:
            layer.forward = partial(run, layer)


def swap_loss(model: LlamaForCausalLM, vocab_size: int, by_row: bool = False) -> None:
    """Let model(inputs, labels), each int64 [batch, sequence], be the summed next-token loss, an fp32 scalar.

    With a third argument, int32 bounds (documents.bounds), attention and positions end at a document's end. by_row: it
    is (that scalar, the losses of the rows [batch], which have no gradient).
    """
    model.lm_head.forward = partial(_head_loss, model.lm_head, vocab_size, by_row)
    model.forward = partial(_summed_loss, model)
    modeling_llama.create_causal_mask = _causal_mask


def _summed_loss(
    model: LlamaForCausalLM,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    bounds: torch.Tensor | None = None,
    **_: Any,  # what peft hands on
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    within = documents.arguments(bounds, input_ids.shape, model.config._attn_implementation)
    if not within:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        places.begin_once = True  # type: ignore[attr-defined]
        within = {"position_ids": places}
    hidden = model.model(input_ids=input_ids, use_cache=False, **within).last_hidden_state
    return model.lm_head(hidden, labels)  # type: ignore[no-any-return]  # a call of the module: ZeRO-3 gathers its weight


def _causal_mask(**given: Any) -> Any:
    """transformers' causal mask. To know whether a row's positions begin again it asks the GPU and waits for it."""
    if getattr(given.get("position_ids"), "begin_once", False):
        given["position_ids"] = None
    return create_causal_mask(**given)


def _head_loss(
    head: torch.nn.Linear, vocab_size: int, by_row: bool, hidden: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    loss, rows = linear_cross_entropy(hidden, head.weight, labels, vocab_size)
    return (loss, rows) if by_row else loss


def _layer(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    return type(layer).forward(layer, *arguments, **named)


def _recomputed_layer(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    return _recomputed(layer.draws, type(layer).forward, layer, *arguments, **named)


def _recomputed(draws: Any, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """forward, whose intermediate results are computed again in the backward pass instead of being kept."""
    # Reentrant checkpointing breaks under ZeRO-3 (CheckpointError: recomputed shapes differ).
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=draws, **named)


def _to_float8(model: LlamaForCausalLM) -> None:
    """Linear layers of the decoder multiply in float8 with one scale a tensor; head and embedding stay in bf16."""
    from torchao.float8 import (  # type: ignore[import-untyped]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    convert_to_float8_training(model.model.layers, config=Float8LinearConfig.from_recipe_name("tensorwise"))
