"""The model of a recipe as a Hugging Face LlamaForCausalLM, and its loss.

Weights drawn here depend on (seed, parameter name) only: the same model at every ZeRO stage and world size. A start
from existing weights is refused when its shape is not the recipe's, because the plan was made for the recipe's.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig
from transformers.integrations import HfDeepSpeedConfig

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.plan.stages import is_quantized
from finlm.recipe import parents
from finlm.recipe.schema import Recipe
from finlm.train import documents, embeddings, encoding, kernels, weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps"),
)


def llama_config(recipe: Recipe, plan: Plan, bos_id: int, eos_id: int) -> LlamaConfig:
    """The transformers configuration of the recipe's model, without the padding of its vocabulary."""
    model = recipe.model
    return LlamaConfig(
        vocab_size=plan.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        max_position_embeddings=context(recipe, plan),
        rms_norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=None,
        use_cache=False,
    )


def context(recipe: Recipe, plan: Plan) -> int:
    """Tokens that the model can read at once: the rows of pretraining, afterwards also what its start could."""
    rows = plan.sequence_length // 2 if recipe.stage in ("dpo", "reward") else plan.sequence_length
    init_from, revision = str(recipe.model.init_from), recipe.model.revision
    gone = revision is None and not (Path(init_from) / "config.json").is_file()
    if recipe.stage == "pretrain" or gone:
        return rows
    found = files.read_json(parents.config_path(init_from, revision))
    longest = int(found["max_position_embeddings"])  # beyond a Mistral's window it would no longer be the same model
    return max(rows, min(longest, int(found.get("sliding_window") or longest)))


def padding_id(shards: Shards) -> int:
    """A token that fills up rows and ends no sequence: the tokenizer's own for padding, <unk> or <s>, but not </s>.

    A reward is read at the last token that is not padding; with </s> it would be read before the end of the turn.
    """
    tokenizer = encoding.of_dialogues(shards)
    ends = (shards.eos_id, shards.manifest["end_of_turn_id"])
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    return next((number for number in known if number is not None and number not in ends), shards.eos_id)


def build(
    recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig, tokenizer: Path
) -> LlamaForCausalLM:
    """The model in the plan's precision on this rank's device; partitioned already under ZeRO-3.

    tokenizer: the tokenizer.model of the shards, which knows what an extended vocabulary was extended from.
    """
    if recipe.model.init_from is not None:
        model = _from_pretrained(recipe, plan, ds_config, config, tokenizer)
        if is_quantized(recipe):
            from finlm.train import nf4  # loads torchao

            nf4.quantize(model, plan.device)
    else:
        model = _from_scratch(recipe, plan, ds_config, config)
    kernels.swap(model, plan, draws=recipe.lora is not None and recipe.lora.dropout > 0)
    return model


def _from_scratch(recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig) -> LlamaForCausalLM:
    device = torch.device(plan.device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[plan.precision])
    try:
        with deepspeed.zero.Init(config_dict_or_path=ds_config) if plan.zero_stage == 3 else nullcontext(), device:
            padded = LlamaConfig(**config.to_dict() | {"vocab_size": plan.padded_vocab_size})
            model = LlamaForCausalLM._from_config(padded, attn_implementation=_attention(recipe, plan))
    finally:
        torch.set_default_dtype(default)
    initialize(model, recipe.train.seed, recipe.model.init_std, plan.vocab_size)
    return model


def _attention(recipe: Recipe, plan: Plan) -> str:
    """transformers' name of the attention."""
    return documents.implementation(plan.device, DTYPES[plan.precision]) if recipe.data.document_masks else "sdpa"


def initialize(model: torch.nn.Module, seed: int, std: float, vocab_size: int) -> None:
    """Norms 1, everything else normal(0, std) from a generator seeded by (seed, name); rows beyond vocab_size 0."""
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device)
                generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                # Drawn in fp32, so that bf16 and fp32 runs start from the same weights up to rounding.
                rows = vocab_size if name in VOCABULARY else len(parameter)
                shape = (rows, *parameter.shape[1:])
                parameter.zero_()
                parameter[:rows] = torch.randn(shape, generator=generator, device=parameter.device) * std


def _as_llama(found: PretrainedConfig, rope: dict[str, Any]) -> LlamaConfig:
    """The configuration of weights that are Llama's, or Mistral's, with the recipe's rotations."""
    if not isinstance(found, LlamaConfig):
        left_out = ("model_type", "sliding_window")
        values = {key: value for key, value in found.to_dict().items() if key not in left_out}
        found = LlamaConfig(**values | {"architectures": ["LlamaForCausalLM"]})
    found.rope_parameters = rope
    return found


def _rotations(found: PretrainedConfig) -> tuple[str, float]:
    """(kind of RoPE, its base) of a configuration."""
    rope = getattr(found, "rope_parameters", None) or {}
    return rope.get("rope_type", "default"), float(rope.get("rope_theta", 10000.0))


def _from_pretrained(
    recipe: Recipe, plan: Plan, ds_config: dict[str, Any], config: LlamaConfig, tokenizer: Path
) -> LlamaForCausalLM:
    source, revision = recipe.model.init_from, recipe.model.revision
    found = AutoConfig.from_pretrained(source, revision=revision)
    # Pretraining that goes on from an extended model finds it as large as it is wanted.
    extends = recipe.stage == "pretrain" and recipe.tokenizer.extend_to not in (None, found.vocab_size)
    compared = [name for name in SHAPE if not (extends and name == "vocab_size")]
    differing = [name for name in compared if getattr(found, name, None) != getattr(config, name)]
    lines = [f"{name}: {getattr(found, name, None)} there, {getattr(config, name)} in the recipe" for name in differing]
    theirs, ours = _rotations(found), ("default", recipe.model.former_rope_theta or recipe.model.rope_theta)
    if theirs != ours:
        lines.append(f"RoPE: {theirs[0]}, base {theirs[1]:,.0f} there; {ours[0]}, base {ours[1]:,.0f} in the recipe")
    if found.model_type not in parents.LLAMA_SHAPED or lines:
        raise UserError(
            f"{source} does not have the recipe's shape",
            evidence="\n".join([f"model_type: {found.model_type}", *lines]),
            fix="make the recipe's model: section equal to the config.json of model.init_from",
        )
    # transformers partitions while loading only if it finds such an object alive.
    keep_alive = HfDeepSpeedConfig(ds_config) if plan.zero_stage == 3 else None
    model: LlamaForCausalLM = weights.load(
        LlamaForCausalLM,
        source,
        "give a complete model in model.init_from: config.json and every *.safetensors that belongs to it",
        ("lm_head.weight",) if recipe.stage == "reward" else (),  # it gets a head of its own
        config=_as_llama(found, config.rope_parameters),
        revision=revision,
        dtype=DTYPES[plan.precision],
        attn_implementation=_attention(recipe, plan),
        use_safetensors=True,
    )
    del keep_alive
    model.config.use_cache = False
    if extends:
        embeddings.extend(model, tokenizer, plan.padded_vocab_size)
    elif plan.padded_vocab_size > plan.vocab_size:
        model.resize_token_embeddings(plan.padded_vocab_size, mean_resizing=False)
    return model
