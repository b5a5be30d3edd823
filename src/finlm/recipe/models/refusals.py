"""Say in sentences what of a model's config.json finlm does not train, and refuse such a model; without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator

from finlm.base.errors import UserError
from finlm.recipe.models import traits


def check_admitted(config: traits.Config) -> None:
    """Raise UserError when a config.json's model type is unknown, or failed a check of `finlm admit`."""
    name, failing = config.get("model_type"), traits.record_of(config).failing
    if failing:
        raise UserError(
            f"model_type {name!r} is not admitted: {', '.join(failing)} failed",
            evidence="\n".join(f"{cell}: {why}" for cell, why in failing.items()),
            fix=f"choose another model; finlm admit {name} shows every cell",
        )


def refuse_model(config: traits.Config, init_from: str, longest: int = 0) -> None:
    """Raise UserError when a model's config.json has something that finlm does not train, or an unadmitted type.

    `longest` is the longest sequence in tokens, 0 if unknown; only forms of RoPE that change beyond a length limit it.
    """
    refuse_unsupported(config, f"model.init_from: {init_from}", longest)
    check_admitted(config)


def notices(config: traits.Config) -> Iterator[str]:
    """Yield a sentence that names the dropout of a config.json, which finlm trains without; nothing without dropout."""
    if dropped := traits.dropouts(config):
        named = ", ".join(f"{key} {value}" for key, value in dropped.items())
        yield f"model.config: {named}: finlm trains without dropout, and the export keeps the key"


_PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")  # keys of a model of several
_SEES = ("full_attention", "sliding_attention", "attention")  # kinds of layers that know where a document of a row ends
_SCALES = ("final_logit_softcapping", *traits.SCALES, "lm_head_multiplier", "output_multiplier")


def explain(config: traits.Config, rows: int) -> Iterator[str]:
    """Yield a sentence for each key of config.json that finlm would train, plan or export as something else.

    `rows` is the sequence length in tokens, 0 if unknown. A model that reads more than text gets that sentence alone.
    Raises UserError for a damaged file of the user's records.
    """
    if parts := [key for key in _PARTS if isinstance(config.get(key), dict)]:
        yield f"it reads more than text: {', '.join(parts)}, and has no text_config with a model_type"
        return
    row = traits.records().get(str(config.get("model_type")))
    needed = [row.ffn_key if row and key == "intermediate_size" else key for key in traits.NEEDED]
    missing = [key for key in needed if config.get(key) in (None, 0)]
    if missing and (row or len(missing) < len(needed)):  # of an unknown type that leaves all to its class, that is said
        lacks_attention = missing[0] == "num_attention_heads"
        yield f"config.json has no {', '.join(missing)}" + (": it has no attention" if lacks_attention else "")
    yield from _malformed_keys(config)
    yield from rope_problems(config)
    sees = (*_SEES, traits.LINEAR) if row and row.linear else _SEES
    if other := [kind for kind in config.get("layer_types") or () if kind not in sees]:
        yield (
            f"layer_types: {len(other)} layers of {other[0]}, which do not know where a document of a packed row ends: "
            "it would leak into the next"
        )
    if row and row.linear and row.dense and traits.dense_layers(traits.complete(config, row)):
        yield "layers without experts beside layers of linear attention, which are not planned for"
    for rope in traits.ropes(config):
        kind = traits.rope_kind(rope)
        longest = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        longest = longest or config.get("max_position_embeddings") or 0
        if kind in traits.LIMITED_ROPE and isinstance(longest, int) and rows > longest:
            yield f"batch.sequence_length {rows}: RoPE {kind!r} turns all rows otherwise once one exceeds {longest}"
    for key in (key for key in config if key.endswith("jitter_noise") and config[key]):
        yield f"{key} {config[key]}, which no router here draws"
    if config.get("output_router_logits"):
        yield "output_router_logits true: transformers adds the router's own loss, which is not trained here"
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        yield "attention to later tokens"
    if row is not None:
        yield from _unfit_keys(config, row)
    for key in _SCALES:
        if config.get(key) not in (None, 1) and row is not None and key not in row.defaults:
            yield f"{key} {config[key]}, which {config['model_type']}'s layers do not compute and trl's head does"
    if (kind := config.get("quantization_config")) is not None:
        method = kind.get("quant_method", "quantization_config")
        how = " (docs/extending.md shows how to save it)" if method == "mxfp4" else ""
        yield f"quantised weights ({method}): start from a copy of the model in bf16{how}"


def _malformed_keys(config: traits.Config) -> Iterator[str]:
    """Yield a sentence for each value of config.json that transformers' classes refuse, whatever the model type."""
    for key in (*traits.NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
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
    """Yield a sentence for each key that the model type needs and config.json lacks, or whose value does not do.

    A value does not do if finlm would train it as another one, or transformers' class takes another type. `row` is the
    record of the type.
    """
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
        elif key in traits.NORM_EPS and value is not None and not isinstance(config.get(key, value), float):
            yield f"{key} {config[key]!r}, where transformers' class of {name} takes a number with a point"


def refuse_unsupported(config: traits.Config, named: str, rows: int = 0) -> None:
    """Raise UserError, about the model called `named`, when its config.json has something that finlm does not train.

    `rows` is the sequence length in tokens, 0 if unknown.
    """
    if problems := list(explain(config, rows)):
        raise UserError(
            f"{named} is not a model that finlm trains",
            evidence="\n".join(problems),
            fix="start from another model; `finlm admit DIRECTORY` shows what finlm makes of one",
        )


ROPES = {  # with the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def rope_problems(config: traits.Config) -> Iterator[str]:
    """Yield a sentence for each of RoPE's parameters that transformers' classes refuse or would read otherwise."""
    heads, hidden, head = (config.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    for rope in traits.ropes(config):
        kind = traits.rope_kind(rope)
        if kind not in list(ROPES):  # it may be anything
            yield f"RoPE {kind!r}, not {', '.join(ROPES)}"
            continue
        if rope.keys().isdisjoint(("rope_type", "type")) and rope.get("factor") is not None:
            yield f"RoPE has a factor of {rope['factor']!r} and no rope_type that would use it"
        base = rope.get("rope_theta", config.get("rope_theta", 1))  # transformers 4 had it in config.json itself
        if not _is_above_0(base):
            yield f"rope_theta {json.dumps(base)}, which no class reads as its default: leave it out, or write a number"
        longest = rope.get("original_max_position_embeddings")
        if longest is not None and not _is_above_0(longest):
            yield f"original_max_position_embeddings {longest!r} is no number above 0"
        lists = {key: rope[key] for key in ROPES["longrope"] if isinstance(rope.get(key), list)}
        for key in ROPES[kind]:
            numbers = lists.get(key, [rope.get(key)])
            if (key in ROPES["longrope"]) != (key in lists) or not all(map(_is_above_0, numbers)):
                what = "a list of numbers above 0" if key in ROPES["longrope"] else "a number above 0"
                yield f"RoPE {kind!r} needs {key}, {what}; it has {rope.get(key)!r}"
        if type(heads) is int and type(hidden) is int and heads > 0:
            share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
            pairs = int((config.get("qk_rope_head_dim") or head or hidden // heads) * share) // 2
            for key, numbers in lists.items():
                if len(numbers) != pairs:
                    yield f"RoPE's {key} has {len(numbers)} numbers, and a head rotates {pairs} pairs"


def _is_above_0(value: object) -> bool:
    """Return whether a value of config.json is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
