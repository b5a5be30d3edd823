"""What of a model's config.json finlm does not train, in sentences; without torch."""

from __future__ import annotations

from collections.abc import Iterator

from finlm.base.errors import UserError
from finlm.recipe.models import traits


def check_admitted(config: traits.Config) -> None:
    """Raise UserError when a config.json's type is unknown, or failed in a cell of the gate."""
    name, failing = config.get("model_type"), traits.record_of(config).failing
    if failing:
        raise UserError(
            f"model_type {name!r} is not admitted: {', '.join(failing)} failed",
            evidence="\n".join(f"{cell}: {why}" for cell, why in failing.items()),
            fix=f"choose another model; finlm admit {name} shows every cell",
        )


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
DROPOUT = ("dropout", "_pdrop", "jitter_noise")  # ends of keys
_SEES = ("full_attention", "sliding_attention")  # kinds of layers that know where a document of a row ends
_SCALES = ("final_logit_softcapping", *traits.SCALES, "lm_head_multiplier", "output_multiplier")


def explain(config: traits.Config, rows: int) -> Iterator[str]:
    """Yield a sentence for each key of config.json that finlm would train, plan or export as something else.

    rows: tokens of the rows to train, or 0 where they are not known.
    """
    if missing := [key for key in NEEDED if config.get(key) in (None, 0)]:
        yield f"config.json has no {', '.join(missing)}" + (
            ": it is of several models" if "text_config" in config else ""
        )
    yield from _malformed_keys(config)
    yield from traits.rope_problems(config)
    other = [kind for kind in config.get("layer_types") or () if kind not in _SEES]
    if other:
        yield (
            f"layer_types: {len(other)} layers of {other[0]}, which do not know where a document of a packed row ends: "
            "it would leak into the next"
        ) + ("; they need flash-linear-attention, which finlm does not drive" if "linear_attention" in other else "")
    for rope in traits.ropes(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        longest = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        longest = longest or config.get("max_position_embeddings") or 0
        if kind in traits.LIMITED_ROPE and isinstance(longest, int) and rows > longest:
            yield f"batch.sequence_length {rows}: RoPE {kind!r} turns all rows otherwise once one exceeds {longest}"
    for key in (key for key in config if key.endswith(DROPOUT) and not key.startswith("classifier") and config[key]):
        yield f"{key} {config[key]}, which no kernel here draws"
    if config.get("output_router_logits"):
        yield "output_router_logits true: transformers adds the router's own loss, which is not trained here"
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        yield "attention to later tokens"
    row = traits.records().get(str(config.get("model_type")))
    if row is not None:
        yield from _unfit_keys(config, row)
    for key in _SCALES:
        if config.get(key) not in (None, 1) and row is not None and key not in row.defaults:
            yield f"{key} {config[key]}, which {config['model_type']}'s layers do not compute and trl's head does"
    if (kind := config.get("quantization_config")) is not None:
        method = kind.get("quant_method", "quantization_config")
        yield f"quantised weights ({method}): start from a copy of the model in bf16"


def _malformed_keys(config: traits.Config) -> Iterator[str]:
    """Yield a sentence for each value that transformers' classes refuse, whatever the type."""
    for key in (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{key} {value!r} is no whole number above 0"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and groups > 0 and heads % groups:
        yield f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
    padding, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if type(padding) is int and type(vocabulary) is int and padding >= vocabulary:
        yield f"pad_token_id {padding} is no token of a vocabulary of {vocabulary}"
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and len(kinds) != layers:
        yield f"layer_types: {len(kinds)} kinds for {layers} layers"


def _unfit_keys(config: traits.Config, row: traits.TypeRecord) -> Iterator[str]:
    """Yield a sentence for each key that the type needs and config.json lacks, or whose value is not trained."""
    name = config["model_type"]
    for key in row.needs:
        if config.get(key) is None:
            yield f"config.json has no {key}, without which transformers' class of {name} fails"
    for key, value in row.held.items():
        if config.get(key, value) != value:
            yield f"{key} {config[key]}: finlm trains a {name} as transformers does only where it is {value}"
    for key, value in row.defaults.items():
        if isinstance(value, bool) and not isinstance(config.get(key, value), bool):
            yield f"{key} {config[key]!r}, where transformers' class of {name} takes true or false"
        elif key in traits.NORM_EPS and not isinstance(config.get(key, value), float):
            yield f"{key} {config[key]!r}, where transformers' class of {name} takes a number with a point"


def refuse_unsupported(config: traits.Config, named: str, rows: int = 0) -> None:
    """Raise UserError when a config.json says what finlm does not train. rows: their tokens, or 0."""
    if problems := list(explain(config, rows)):
        raise UserError(
            f"{named} is not a model that finlm trains",
            evidence="\n".join(problems),
            fix="start from another model; `finlm admit DIRECTORY` shows what finlm makes of one",
        )
