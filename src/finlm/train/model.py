"""The model of a recipe as a Hugging Face LlamaForCausalLM, and its loss.

Weights drawn here depend on (seed, parameter name) only: the same model at every ZeRO stage and world size. A start
from existing weights is refused when its shape is not the recipe's, because the plan was made for the recipe's.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from finlm.base.errors import UserError
from finlm.data.shards import IGNORED
from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def llama_config(recipe: Recipe, plan: Plan, bos_id: int, eos_id: int) -> LlamaConfig:
    """The transformers configuration of the recipe's model."""
    model = recipe.model
    return LlamaConfig(
        vocab_size=plan.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        max_position_embeddings=plan.sequence_length,
        rms_norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=None,
        use_cache=False,
    )


def build(recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig) -> LlamaForCausalLM:
    """The model in the plan's precision on this rank's device; partitioned already under ZeRO-3."""
    if recipe.model.init_from is not None:
        model = _from_pretrained(recipe, plan, ds_config, config)
    else:
        model = _from_scratch(recipe, plan, ds_config, config)
    if plan.recompute == "full":
        # Reentrant checkpointing breaks under ZeRO-3 (CheckpointError: recomputed shapes differ).
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _from_scratch(recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig) -> LlamaForCausalLM:
    device = torch.device(plan.device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[plan.precision])
    try:
        with deepspeed.zero.Init(config_dict_or_path=ds_config) if plan.zero_stage == 3 else nullcontext(), device:
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(default)
    initialize(model, recipe.train.seed, recipe.model.init_std)
    return model


def initialize(model: torch.nn.Module, seed: int, std: float) -> None:
    """Norms 1, everything else normal(0, std) from a generator seeded by (seed, name)."""
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device)
                generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                # Drawn in fp32, so that bf16 and fp32 runs start from the same weights up to rounding.
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=parameter.device) * std)


def _from_pretrained(recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig) -> LlamaForCausalLM:
    source, revision = recipe.model.init_from, recipe.model.revision
    found = AutoConfig.from_pretrained(source, revision=revision)
    differing = [n for n in SHAPE if getattr(found, n, None) != getattr(config, n)]
    if found.model_type != "llama" or differing:
        lines = [
            f"{name}: {getattr(found, name, None)} there, {getattr(config, name)} in the recipe" for name in differing
        ]
        raise UserError(
            f"{source} does not have the recipe's shape",
            evidence="\n".join([f"model_type: {found.model_type}", *lines]),
            fix="make the recipe's model: section equal to the config.json of model.init_from",
        )
    # transformers partitions while loading only if it finds such an object alive.
    keep_alive = HfDeepSpeedConfig(ds_config) if plan.zero_stage == 3 else None
    model = LlamaForCausalLM.from_pretrained(
        source, revision=revision, dtype=DTYPES[plan.precision], attn_implementation="sdpa", use_safetensors=True
    )
    del keep_alive
    model.config.use_cache = False
    return model


def summed_loss(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the next-token negative log-likelihoods, in fp32. inputs, labels: [batch, sequence]; -100 is ignored."""
    logits = model(input_ids=inputs, use_cache=False).logits  # [batch, sequence, vocabulary]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
