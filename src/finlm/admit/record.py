"""Make the row of a model type in model_types.json.

It is measured on transformers' own class at a size whose numbers all differ. A tensor's sizes become symbols (q*h is
the query projection), so that the planner can count a model of any size without torch.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finlm.base.errors import UserError
from finlm.recipe import shape
from finlm.recipe.models import traits
from finlm.recipe.models.traits import CHOSEN, EXPERTS, NORM_EPS, SCALES, SHARED, Config, TypeRecord, evaluate

LINEAR = {  # sizes of linear attention, as SIZES
    **{"linear_num_key_heads": 3, "linear_key_head_dim": 26, "linear_num_value_heads": 9, "linear_value_head_dim": 34},
    "linear_conv_kernel_dim": 5,
}
# Keys that may be absent from config.json, whose defaults a row notes.
FIELDS = (
    *("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias"),
    *("use_qkv_bias", "qk_layernorm", "use_qk_norm", "sliding_window", "use_sliding_window", "max_window_layers"),
    *(*NORM_EPS, "rope_theta", "hidden_act", "max_position_embeddings"),
    *("final_logit_softcapping", "attn_logit_softcapping", *SCALES, *EXPERTS, *CHOSEN, *SHARED),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "prefix_dense_intermediate_size"),
    *(*traits.NEEDED, *traits.DENSE, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", *LINEAR),
)

# Keys that a class may read and fill in from none.
_UNSAID = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_shared_experts", "n_routed_experts")

# Numbers of which none is a product or sum that another tensor may have; those of experts fill 16 bytes.
SIZES = {"h": 112, "f": 152, "a": 4, "g": 2, "d": 20, "e": 6, "m": 48, "s": 56, "p": 72, "v": 389}
LATENT = {"l": 28, "c": 44, "n": 12, "r": 8, "w": 22}  # of which n + r is d
CHOSEN_SMALL, SHARE, GROUPS = 2, 3, {"n_group": 2, "topk_group": 1}
LAYERS = 24  # enough to see which of them see all before
NAMED = {
    **{"hidden_size": "h", "intermediate_size": "f", "num_attention_heads": "a", "num_key_value_heads": "g"},
    **{"moe_intermediate_size": "m", "shared_expert_intermediate_size": "s", "vocab_size": "v"},
    **{"prefix_dense_intermediate_size": "p"},
}
NAMED_LATENT = {
    "kv_lora_rank": "l",
    "q_lora_rank": "c",
    "qk_nope_head_dim": "n",
    "qk_rope_head_dim": "r",
    "v_head_dim": "w",
}
EXPRESSIONS = ("h", "q", "k", "f", "2*f", "q+2*k", "d", "e", "m", "2*m", "s", "p", "a", "1")
OF_LATENT = ("l", "c", "l+r", "a*n+a*w", "a*w")
OF_LINEAR = ("2*q", "2*i+o", "2*i+2*o", "2*b", "o", "b", "u", "t")


def record(model_type: str) -> TypeRecord:
    """Return the row of a type, without the results of the cells; builds several small models.

    Raises UserError for a type that transformers does not have or whose structure finlm's swaps do not fit.
    """
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"transformers has no causal model of model_type {model_type!r}",
            fix="give the model_type of a config.json; code of a model's own directory is never run",
        )
    # Some classes have no heads of another size than hidden / heads, or do not work with one.
    for changes in ({"head_dim": SIZES["d"]}, {}, {"head_dim": SIZES["h"] // SIZES["a"]}):
        try:
            config = small_config(model_type, **changes)
            layer, outer, switches = _structure(config)
            names = {*layer, *(name for tensors in switches.values() for name in tensors)}
            dense, linear = _other_layers(model_type, names)
            buffers = _buffers(config)
            measured = _measure(config)
            break
        except Exception as error:  # of transformers' classes there are many kinds
            problem = error
    else:
        if isinstance(problem, UserError):
            raise problem
        raise UserError(
            f"{model_type} cannot be made small by the keys that finlm knows",
            evidence=f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}",
            fix="choose a model of another type",
        )
    defaults = CONFIG_MAPPING[model_type]()
    return TypeRecord(
        layer,
        outer,
        switches,
        _defaults(model_type, config),
        dense,
        linear,
        buffers,
        _pattern(model_type),
        rewards=type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        scales=_scales(model_type),
        needs=[key for key in _UNSAID if getattr(defaults, key, "") is None and not _can_run(model_type, key)],
        **measured,
    )


def _can_run(model_type: str, left_out: str) -> bool:
    """Return whether a model can be built and run when its configuration has None for the key left_out."""
    try:
        with torch.no_grad():
            AutoModelForCausalLM.from_config(small_config(model_type, 2, **{left_out: None}))(torch.arange(8)[None])
    except Exception:  # of transformers' classes there are many kinds
        return False
    return True


def _measure(config: Any) -> dict[str, Any]:
    """Run a bf16 model of a small_config(); return norm_bytes, router_bytes, ffn_bytes, bare_norms, copies_output.

    Raises UserError for a norm of unknown width, and whatever transformers raises.
    """
    config = copy.deepcopy(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) < 1:  # a quarter of these heads is odd
        config.rope_parameters = rope | {"partial_rotary_factor": 0.5}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layer, symbols, tokens = model.model.layers[0], _symbols(config), 64
    states = torch.randn(1, tokens, SIZES["h"], dtype=torch.bfloat16, requires_grad=True) * 1
    widths: list[str] = []
    first: list[bool] = []  # whether queries lie head by head, and so does what attention makes of them
    attend = torch.nn.functional.scaled_dot_product_attention

    def note_width(name: str, given: Any) -> None:
        """Append the symbol of the width of a norm's input to `widths`. Raises UserError if there is none."""
        widths.append(_size(given[0].numel() // tokens, symbols, f"the input of {name}"))

    def note_attention(query: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """Append to `first` whether the queries lie head by head, and return torch's attention."""
        first.append(not query.transpose(1, 2).is_contiguous())
        return attend(query, *arguments, **named)

    for name, module in layer.named_modules():
        if "norm" in type(module).__name__.lower() and not list(module.parameters()):
            module.register_forward_pre_hook(lambda _, given, name=name: note_width(name, given))
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", note_attention), torch.no_grad():
        model(torch.arange(tokens)[None])
    block = layer.mlp
    children = dict(block.named_children()) if any(len(p.shape) > 2 for p in block.parameters()) else {}
    router = next((children[name] for name in shape.ROUTERS if name in children), None)
    kept = 0 if router is None else sum(n for n in _saved_in(router, block, states) if n >= 2 * states.numel())
    of_block = _count_saved_bytes(block, states, with_input=False) / (tokens * SIZES["f"])
    return {
        "norm_bytes": round(_count_saved_bytes(model.model.norm, states, with_input=True) / (tokens * SIZES["h"])),
        "router_bytes": kept // states.numel(),
        "ffn_bytes": round(_expert_bytes(config, states) if "experts" in children else of_block, 2),
        "bare_norms": widths,
        "copies_output": any(first),
    }


def _expert_bytes(config: Any, states: torch.Tensor) -> float:
    """Return the bytes that experts save for backward per token, chosen expert and unit of their width (bf16)."""
    key = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    width, sums = getattr(config, key), list[int]()
    for times in (1, 2):
        wider = copy.deepcopy(config)
        setattr(wider, key, times * width)
        block = AutoModelForCausalLM.from_config(wider, dtype=torch.bfloat16).eval().model.layers[0].mlp
        sums.append(sum(_saved_in(block.experts, block, states)))
    return (sums[1] - sums[0]) / (states.shape[1] * CHOSEN_SMALL * int(width))


def _scales(model_type: str) -> dict[str, int]:
    """Return {scale: power, 1, 0 or -1, with which the class multiplies logits by it}; run a small model per scale."""
    powers: dict[str, int] = {}
    known = CONFIG_MAPPING[model_type]().to_dict()
    for key in (key for key in (*SCALES, "dim_model_base") if key in known):
        changed = {key: 2 if key == "dim_model_base" else 2.0}
        model = AutoModelForCausalLM.from_config(small_config(model_type, 2, **changed))
        with torch.no_grad():
            said = model(torch.arange(8)[None])
            plain = model.lm_head(model.model(torch.arange(8)[None]).last_hidden_state)
        power = float((said.logits / plain).median()) * (SIZES["h"] if key == "dim_model_base" else 1)
        powers |= {key: round(math.log2(power))} | ({"hidden_size": -1} if key == "dim_model_base" else {})
    return powers


def _saved_in(part: Any, block: Any, states: torch.Tensor) -> list[int]:
    """Return the bytes of each storage that autograd saves for `part` in block(states), but for weights and states."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*part.parameters(), states)}
    forward, kept = part.forward, dict[int, int]()

    def note(*given: Any, **named: Any) -> Any:
        """Run the part's own forward, add what it saves to `kept`, and return its output."""
        with collect_saved(left_out) as saved:
            out = forward(*given, **named)
        kept.update(saved)
        return out

    with patch.object(part, "forward", note):  # some take more than states
        block(states)
    return list(kept.values())


def _count_saved_bytes(module: Any, states: torch.Tensor, *, with_input: bool) -> int:
    """Return the bytes that a module saves for its backward pass: without weights, with `states` if with_input."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    left_out |= set() if with_input else {states.untyped_storage().data_ptr()}
    with collect_saved(left_out) as kept:
        out = module(states)
    del out
    return sum(kept.values())


@contextmanager
def collect_saved(left_out: Set[int]) -> Iterator[dict[int, int]]:
    """Yield a dict that fills with the storages that autograd saves, {address: bytes}, but for those in left_out."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor's storage to `saved` unless left out; return the tensor without its graph."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # tensor itself would hold the graph that holds it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def own_keys(config: Any) -> Config:
    """Return {key: value} of a configuration without the keys that every class has."""
    common = {*PreTrainedConfig().to_dict(), "use_cache", "initializer_range"} - {"tie_word_embeddings"}
    return {key: value for key, value in config.to_dict().items() if key not in common and not key.startswith("_")}


def _structure(plain: Any) -> tuple[dict[str, list[str]], list[list[str]], dict[str, dict[str, list[str] | None]]]:
    """Return (layer, outer, switches) of a TypeRecord; changes `plain` meanwhile and restores it.

    These are the tensors' sizes within and outside layers, and {key: tensors that it adds, None for those it removes}.
    If the plain model does not fit finlm's swaps, raises UserError and leaves `plain` changed.
    """
    known = own_keys(plain)
    keys = [key for key, value in known.items() if isinstance(value, bool) and key != "tie_word_embeddings"]
    optional: dict[str, object] = {"q_lora_rank": None} if known.get("q_lora_rank") else {}
    optional |= {key: 0 for key in SHARED if known.get(key) and _may_lack(plain, key)}
    values: dict[str, object] = dict.fromkeys(keys, True) | {key: known[key] for key in optional}
    keys += optional
    symbols = _symbols(plain)
    for key in keys:
        setattr(plain, key, optional.get(key, False))
    layer, outer = _tensors(plain, symbols)
    switches: dict[str, dict[str, list[str] | None]] = {}
    # Two of them may add what neither adds alone, as biases of what q_lora_rank adds.
    pairs = itertools.product([key for key in keys if key not in optional], optional)
    for chosen in (*((key,) for key in keys), *pairs):
        config, expected = copy.deepcopy(plain), dict[str, list[str] | None](layer)
        for key in chosen:
            setattr(config, key, values[key])
            expected |= switches.get(key, {})
        try:
            tensors, beside = _tensors(config, symbols)
        except (UserError, ValueError, TypeError):
            continue  # the gate's cell of settings holds the key
        if beside == outer:
            added = {name: sizes for name, sizes in tensors.items() if expected.get(name) != sizes}
            gone = {name: None for name, sizes in expected.items() if sizes is not None and name not in tensors}
            switches["+".join(chosen)] = added | gone
    for key in keys:
        setattr(plain, key, known[key])
    return layer, outer, {key: tensors for key, tensors in switches.items() if tensors}


def _may_lack(config: Any, key: str) -> bool:
    """Return whether a model of this configuration, but with 0 for `key`, has no empty tensor."""
    config = copy.deepcopy(config)
    setattr(config, key, 0)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # of tensors without numbers
        return all(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def whole_config(model_type: str) -> Any:
    """Return transformers' default configuration of a type, with complete RoPE parameters."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_rope(kind()))


def _rope(config: Any) -> Config:
    """Return the keys that replace default RoPE parameters which lack a factor they need; {} if none are missing."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default" or "factor" in rope:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.default_theta}}


def small_config(model_type: str, layers: int = 2, **changes: float | None) -> Any:
    """Return a configuration of the type's class with the sizes of SIZES, `layers` layers, and these changes.

    Raises whatever the class raises for values that it does not accept.
    """
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    values: dict[str, object] = {key: SIZES[symbol] for key, symbol in NAMED.items() if key in known}
    values |= {"num_hidden_layers": layers, "pad_token_id": None}
    if known.get("head_dim"):
        values["head_dim"] = SIZES["d"]
    values |= {key: SIZES["e"] for key in EXPERTS if hasattr(kind(), key)}
    values |= {key: CHOSEN_SMALL for key in CHOSEN if key in known} | {key: SHARE for key in SHARED if key in known}
    values |= GROUPS if known.get("n_group") else {}
    values |= traits.with_dense(known, 0, layers)
    if traits.LINEAR in (known.get("layer_types") or ()):
        values |= LINEAR | {"layer_types": ["full_attention"] * layers}
    if "kv_lora_rank" in known:
        values |= {key: LATENT[symbol] for key, symbol in NAMED_LATENT.items()} | {"num_key_value_heads": SIZES["a"]}
        values.pop("head_dim", None)
        changes.pop("head_dim", None)
    return kind(**{**values, **_rope(kind()), **changes})


def _other_layers(model_type: str, names: Set[str]) -> Iterator[dict[str, list[str] | None]]:
    """Yield two dicts, {tensor: sizes as symbols}: of dense layers in a model of experts, and of linear attention.

    A dict is {} if the type has no such layers. Sizes are None for those of `names` that such a layer lacks. Raises
    UserError if finlm's swaps do not fit, or for a size that no expression gives.
    """
    known = CONFIG_MAPPING[model_type]().to_dict()
    linear = {"layer_types": [traits.LINEAR] * 2} if traits.LINEAR in (known.get("layer_types") or ()) else {}
    of_linear = "self_attn.", "linear_attn."
    for changes, within in ((traits.with_dense(known, 2, 2), ("mlp.",)), (linear, of_linear)):
        config = small_config(model_type, **changes)
        for key, value in own_keys(config).items():
            if isinstance(value, bool) and key != "tie_word_embeddings":
                setattr(config, key, False)
        tensors = _tensors(config, _symbols(config))[0] if changes else {}
        lost = {name: None for name in sorted(names) if changes and name.startswith(within) and name not in tensors}
        yield {name: sizes for name, sizes in tensors.items() if name.startswith(within)} | lost


def _buffers(config: Any) -> list[str]:
    """Return the sorted names of the buffers in the first layer's state_dict."""
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    return sorted(layer.state_dict().keys() - dict(layer.named_parameters()).keys())


def _symbols(config: Any) -> dict[str, int]:
    """Return {symbol: number} for the sizes (h, f, a, g, d, q, k, ...) of a small model's configuration."""
    head = getattr(config, "head_dim", None) or SIZES["h"] // SIZES["a"]
    groups = SIZES["g"] if hasattr(config, "num_key_value_heads") else SIZES["a"]
    more: dict[str, int] = {}
    if getattr(config, "kv_lora_rank", None):
        head, groups, more = LATENT["n"] + LATENT["r"], SIZES["a"], LATENT
    if any(getattr(config, key, None) for key in SHARED):
        more = more | {"s": SHARE * SIZES["m" if hasattr(config, "moe_intermediate_size") else "f"]}
    more = more | traits.linear_symbols(config.to_dict())
    return SIZES | more | {"d": head, "g": groups, "q": SIZES["a"] * head, "k": groups * head}


def _tensors(config: Any, symbols: dict[str, int]) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Return ({tensor: sizes as symbols} of a layer, [such sizes] of tensors outside layers, embedding and head).

    Raises UserError if finlm's swaps do not fit, or for a size that no expression gives.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = getattr(getattr(model, "model", None), "layers", None)
    shapes = [{name: tuple(p.shape) for name, p in layer.named_parameters()} for layer in layers or []]
    problem = ""
    if not shapes or not isinstance(getattr(model, "lm_head", None), torch.nn.Linear):
        problem = "has no model.layers and lm_head"
    elif model.lm_head.bias is not None:
        problem = "has a head with a bias, which the fused loss does not add"
    elif not any(name.startswith("mlp.") for name in shapes[0]):
        problem = "has layers whose feed-forward block is not called mlp"
    elif any(each != shapes[0] for each in shapes):
        problem = "has layers of several kinds, whose tensors differ"
    if problem:
        raise UserError(
            f"{config.model_type} {problem}, so finlm's swaps do not fit it", fix="choose a model of another type"
        )
    vocabulary = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    beside = [(n, p) for n, p in model.named_parameters() if ".layers." not in n and id(p) not in vocabulary]
    layer = {name: [_size(number, symbols, name) for number in shape] for name, shape in shapes[0].items()}
    return layer, [[_size(number, symbols, name) for number in p.shape] for name, p in beside]


def _size(number: int, symbols: dict[str, int], name: str) -> str:
    """Return the first of EXPRESSIONS whose value is this number. Raises UserError, naming the tensor, if none is."""
    known = OF_LINEAR * ("i" in symbols) + EXPRESSIONS + OF_LATENT * ("l" in symbols)
    for expression in known:
        if evaluate(expression, symbols) == number:
            return expression
    raise UserError(
        f"{name} has a size of {number}, which follows from no key that finlm knows, so its memory cannot be planned",
        fix="choose a model of another type",
    )


def _defaults(model_type: str, other: Any) -> dict[str, object]:
    """Return {key of FIELDS: the class's default, None if it follows from other keys}; RoPE is the config `other`'s."""
    kind = CONFIG_MAPPING[model_type]
    config = kind()
    defaults: dict[str, object] = {}
    for key in FIELDS:
        if key in {*NAMED, "head_dim", "v_head_dim"} - {*traits.NEEDED}:
            alone = config.to_dict().get(key)
            defaults |= {key: _independent_default(kind, key, alone)} if alone is not None else {}
        elif hasattr(config, key):
            defaults[key] = getattr(config, key)
    if hasattr(config, "mlp_layer_types"):  # of another depth as long: the first ones, then none that is dense
        defaults["mlp_layer_types"] = [kind for kind in config.mlp_layer_types if kind == "dense"]
    if "moe_layer_end_index" in defaults:
        defaults["moe_layer_end_index"] = -1  # the class says the last of its own depth
    ropes = getattr(other, "rope_parameters", None) or {}
    if "full_attention" in ropes:
        defaults["rope_parameters"], ropes = ropes, ropes["full_attention"]
    return defaults | {"rope_theta": ropes.get("rope_theta", 10000.0)}


def _independent_default(kind: Any, key: str, value: Any) -> Any:
    """Return `value`, or None if the default of `key` changes with the number of heads or the width."""
    changed = kind(num_attention_heads=8, hidden_size=2048).to_dict().get(key)
    return value if changed == value else None


def _pattern(model_type: str) -> int:
    """Return n if only every n-th layer has full attention; 0 if none or all have; -1 for another pattern."""
    kinds = getattr(small_config(model_type, LAYERS), "layer_types", None) or []
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    if not full or len(full) == len(kinds):
        return 0
    return full[0] if full == list(range(full[0], LAYERS + 1, full[0])) else -1
