"""A model's own config.json at a small size, with every kind of layer that it has."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from finlm.admit.record import GROUPS
from finlm.recipe.models import traits
from finlm.recipe.models.traits import EXPERTS, Config, TypeRecord

# Of a model for two CPU cores.
SMALL_HIDDEN, FFN, HEADS, HEAD, SMALL_LAYERS, WINDOW, ORIGINAL = 64, 128, 4, 32, 3, 8, 64
SMALL_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SMALL_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}


def shrink(config: Config, row: TypeRecord, vocab_size: int) -> Any:
    """Return transformers' configuration of the same model, small."""
    known = row.defaults | dict(config)
    values = dict(config) | {
        "hidden_size": SMALL_HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": SMALL_LAYERS,
        "vocab_size": vocab_size,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    groups, heads = known.get("num_key_value_heads"), int(known["num_attention_heads"])
    kind = CONFIG_MAPPING[str(config["model_type"])]()
    if groups or hasattr(kind, "num_key_value_heads"):
        values["num_key_value_heads"] = {heads: HEADS, 1: 1}.get(int(groups or heads), 2)
    if hasattr(kind, "head_dim"):  # some classes have no number, and need one
        own = int(known.get("head_dim") or 0)
        values["head_dim"] = HEAD if own and own * heads != int(known["hidden_size"]) else SMALL_HIDDEN // HEADS
    values |= {key: size for key, size in SMALL_EXPERTS.items() if known.get(key)}
    values |= {key: 4 for key in EXPERTS if config.get(key)}
    values |= {key: size for key, size in GROUPS.items() if (known.get("n_group") or 1) > 1}
    if known.get("kv_lora_rank"):
        widths = {key: known.get(key) for key in SMALL_LATENT}
        values |= {key: size for key, size in SMALL_LATENT.items() if widths[key]} | {"num_key_value_heads": HEADS}
        if widths["v_head_dim"] == widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]:
            values["v_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        values.pop("head_dim", None)
    values.update(few_layers(config, known, row.pattern))
    rotated = values.get("qk_rope_head_dim") or values.get("head_dim") or SMALL_HIDDEN // HEADS
    rotated *= float(known.get("partial_rotary_factor") or 1.0)
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            values[key] = _shrink_rope(config[key], int(rotated) // 2)
    if any(rope.get("rope_type", rope.get("type", "default")) != "default" for rope in traits.ropes(config)):
        values |= {"max_position_embeddings": 4 * ORIGINAL}
        values |= {"original_max_position_embeddings": ORIGINAL} if "original_max_position_embeddings" in known else {}
    else:
        values["max_position_embeddings"] = max(256, ORIGINAL)
    return AutoConfig.for_model(**values)


def few_layers(config: Config, known: Config, pattern: int) -> Config:
    """Return the keys for few layers, with one of each kind. known: the config with its class's defaults.

    pattern: TypeRecord.pattern.
    """
    found: dict[str, Any] = {}
    if known.get("sliding_window"):
        found["sliding_window"] = WINDOW
    if pattern > 0 and not config.get("layer_types"):
        found["num_hidden_layers"] = pattern
    layers = found.get("num_hidden_layers", SMALL_LAYERS)
    for key in traits.LISTS:
        if kinds := list(dict.fromkeys(config.get(key) or ())):
            found[key] = [*kinds, *kinds * layers][:layers]
    if known.get("first_k_dense_replace"):
        found["first_k_dense_replace"] = 1
    if known.get("mlp_only_layers"):
        found["mlp_only_layers"] = [0]
    if known.get("use_sliding_window") and "max_window_layers" in known:
        found["max_window_layers"] = 1
    return found


def _shrink_rope(rope: Config, pairs: int) -> Config:
    """Return RoPE's parameters for fewer dimensions, which change what comes after ORIGINAL tokens."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _shrink_rope(value, pairs) if isinstance(value, dict) else value for kind, value in rope.items()}
    found = {key: value[:pairs] if isinstance(value, list) else value for key, value in rope.items()}
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = ORIGINAL
    return found
