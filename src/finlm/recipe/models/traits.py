"""Read the sizes of a model's layers from its config.json, without torch, for planner, checks, adapters and export.

model_types.json has a record for every model type that `finlm admit` has tried: the tensors of a layer with their sizes
in symbols, what config.json may leave out, and which checks failed. `finlm admit --record` writes a record from
transformers' own class; a user's records are kept in ~/.config/finlm/model_types.json.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError

RECORD = Path(__file__).with_name("model_types.json")
# Names of the same number, of which config.json has one.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")  # experts of a token
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
DENSE = ("first_k_dense_replace", "num_dense_layers")  # layers without experts, which come first
_ALIASES = (EXPERTS, CHOSEN, SHARED, ("mlp_layer_types", *DENSE))
SCALES = {"logit_scale": 1, "logits_scaling": -1}  # of the head: logits times, and divided by; a row knows better
LIMITED_ROPE = ("dynamic", "longrope")  # whose angles change once a batch is longer than the model was made for
SINKS = "self_attn.sinks"  # the tensor of a logit a head that the softmax of its scores has as a further column
LINEAR = "linear_attention"  # the kind of a layer
DELTA_CHUNK = 64  # tokens that such a layer goes over at once
LISTS = ("layer_types", "no_rope_layers")  # keys with the kind of every layer, beside those of dense_layers()
DROPOUT = ("dropout", "_pdrop")  # ends of keys
NOISE = (*DROPOUT, "jitter_noise")  # the same, of all keys that draw random numbers
NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
Config = Mapping[str, Any]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TypeRecord:
    """The record of one model type in model_types.json.

    Sizes are symbols: h (hidden), f (feed-forward), q, k (widths of queries and keys), d (a head), e (number of
    experts), m (width of an expert). Of latent attention l and c are the widths that keys and values, and queries, are
    made from, n and r the parts of a head without and with RoPE, w the size of a head's values. Of linear attention i
    and o are the widths of keys and values, u the size of a head's values, b their heads, t the convolution's tokens.
    """

    layer: dict[str, list[str]]  # sizes of every tensor, in the model's order
    outer: list[list[str]]  # of the tensors beside layers, embedding and head
    # Tensors that a true key of config.json, or two joined by "+", adds; None: takes away.
    switches: dict[str, dict[str, list[str] | None]]
    defaults: dict[str, Any]  # of the keys of FIELDS that the class has
    dense: dict[str, list[str] | None] = field(default_factory=dict)  # tensors that layers without experts have
    linear: dict[str, list[str] | None] = field(default_factory=dict)  # the same of layers of linear attention
    buffers: list[str] = field(default_factory=list)  # of a layer, which files hold as they hold tensors
    pattern: int = 0  # every so many-th layer sees all before; -1: config.json must say which
    norm_bytes: int = 6  # that a norm keeps a number, uncompiled, in 16 bits
    rewards: bool = True  # transformers has a reward model of this type
    ffn_bytes: float = 8  # that the feed-forward block keeps a number of its width, uncompiled, in 16 bits
    router_bytes: int = 0  # that the router keeps a number of its input, in 16 bits
    bare_norms: list[str] = field(default_factory=list)  # widths of a layer's norms that have no tensor
    copies_output: bool = False  # attention's output is copied before o_proj: queries lie head by head
    scales: dict[str, int] = field(default_factory=dict)  # 1: logits times this key, -1: divided by it
    needs: list[str] = field(default_factory=list)  # keys without which transformers' class does not work
    held: dict[str, Any] = field(default_factory=dict)  # keys that finlm would train wrongly at another value than this
    cells: dict[str, str] = field(default_factory=dict)  # of the gate, with what is wrong, or nothing

    @property
    def ffn_key(self) -> str:
        """The key of the feed-forward block's inner width; of an expert's where no layer has another block."""
        sizes = (tensor for of in (self.layer, self.dense) for tensor in of.values() if tensor)
        has_block = any("f" in size for tensor in sizes for size in tensor)
        return "intermediate_size" if has_block else "moe_intermediate_size"

    @property
    def failing(self) -> dict[str, str]:
        """{check of `finlm admit`: what is wrong} of the checks that failed."""
        return {cell: why for cell, why in self.cells.items() if why}


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): widths that a token's keys, values and queries are made from."""

    cached: int  # of keys and values, which generation keeps
    rotated: int  # of the part with RoPE that all heads' keys share
    queries: int  # 0: they are made from hidden states
    value_size: int  # of a head's values, which may be another than its keys'

    def kept_bytes(self, heads: int, keys: int) -> int:
        """Return the bytes that attention keeps per token of a layer, at 16 bits; `keys` is the width of all heads'.

        Unpadded values keep the keys' elements without RoPE alive too; padded ones have a padded output and a cut copy.
        """
        out = heads * self.value_size
        beside = heads * self.rotated  # of the keys, not of what lies beside values
        attended = 8 * keys + 2 * out if out != keys else 4 * keys + 2 * (keys - beside) + 4 * out
        return attended + 2 * (self.cached + self.queries)


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a layer of linear attention, a Gated DeltaNet (arXiv 2412.06464), which has a state and no scores."""

    keys: int  # width of a token's keys, as of its queries
    values: int
    key_size: int  # of a head
    value_heads: int

    @property
    def flops(self) -> float:
        """FLOPs a token of the rule forward.

        The state is read for values and outputs, and written. Within a chunk a token meets half of the others: in keys
        by keys, queries by keys, and three products by these.
        """
        sizes = 3 * self.key_size * self.value_heads + 2 * self.values
        return 6.0 * self.key_size * self.values + DELTA_CHUNK * sizes

    @property
    def state_bytes(self) -> int:
        """Bytes of the rule's state of a row that is generated, in fp32; the convolution's is a percent of it."""
        return 4 * self.key_size * self.values

    def kept_bytes(self, compiled: bool, has_documents: bool) -> int:
        """Return the bytes that a layer keeps per token beside its input and what its other block keeps, at 16 bits.

        Compiled: what the convolution reads and makes, the rule's output and gate, and their product. Eager: also what
        silu reads, the output on its way through its norm, and with documents the convolution's other three tokens.
        Both: the chunk's matrix, decay and beta.
        """
        convolved = (2 * self.keys + self.values) * (4 if compiled else 12 if has_documents else 6)
        return convolved + (6 if compiled else 18) * self.values + (2 * DELTA_CHUNK + 14) * self.value_heads


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a model's layers, and what they keep for the backward pass; of all its kinds of layers."""

    heads: int
    kv_heads: int
    head_size: int = 0
    ffn: int  # inner width that a token passes through
    layer: tuple[tuple[str, Sizes], ...] = ()  # tensors of a layer by name, in the model's order
    windows: Sizes = ()  # tokens seen, of the layers that do not see all before
    experts: tuple[int, int] = (0, 0)  # of a layer, and those that a token passes through
    norm_bytes: int = 6  # that a norm keeps a number, uncompiled, in 16 bits
    ffn_bytes: float = 8  # that the feed-forward block keeps a number of its width, uncompiled, in 16 bits
    router_bytes: int = 0  # that the router keeps a number of its input, in 16 bits
    bare_norms: Sizes = ()  # widths of the norms that have no tensor
    copies_output: bool = False  # attention's output is copied before o_proj
    latent: Latent | None = None  # what keys, values and queries are made from
    dense_layer: tuple[tuple[str, Sizes], ...] = ()  # tensors of a layer without experts, in a model of experts
    dense_ffn: int = 0
    linear_layer: tuple[tuple[str, Sizes], ...] = ()  # tensors of a layer of linear attention
    delta: DeltaNet | None = None  # what such a layer has for heads


@dataclass(frozen=True, kw_only=True)
class Traits(LayerSizes):
    """Sizes and features of one model's layers, by its config.json."""

    model_type: str
    outer: int  # parameters beside layers, embedding and head
    ropes: tuple[str, ...]
    dense: Sizes = ()  # numbers of the layers that have no experts, in a model of experts
    linear: Sizes = ()  # numbers of the layers of linear attention
    score_cap: float | None = None  # soft cap of attention's scores
    head: tuple[float, float | None] = (1.0, None)  # factor and soft cap of the logits

    def tensors(self, number: int) -> dict[str, Sizes]:
        """Return {name: sizes} of the tensors of the layer with this number."""
        return dict(
            self.dense_layer if number in self.dense else self.linear_layer if number in self.linear else self.layer
        )


def user_file() -> Path:
    """Return the path of this user's model_types.json, the records of types that they admitted; it need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "finlm" / RECORD.name


def shipped() -> dict[str, TypeRecord]:
    """Return {model type: record} of the types that come with finlm."""
    return {name: TypeRecord(**row) for name, row in files.read_json(RECORD).items()}


@functools.cache
def records() -> Mapping[str, TypeRecord]:
    """Return {model type: record} of all known types; cached. A record of finlm's replaces the user's of that name.

    Raises UserError when the user's file is damaged or of another version.
    """
    rows = files.read_json(user_file()) if user_file().is_file() else {}
    try:
        return {name: TypeRecord(**row) for name, row in rows.items()} | shipped()
    except TypeError as error:
        raise UserError(
            f"{user_file()} was written by another version of finlm", evidence=str(error), fix="remove it, admit again"
        ) from None


def write_records(rows: Mapping[str, TypeRecord], path: Path) -> None:
    """Write {model type: record} as JSON to `path`, a record a line; make its folder."""
    lines = [f" {json.dumps(name)}: {json.dumps(dataclasses.asdict(rows[name]))}" for name in sorted(rows)]
    files.write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def record_of(config: Config) -> TypeRecord:
    """Return the record of a config.json's model type. Raises UserError when the type is unknown."""
    name = config.get("model_type")
    row = records().get(str(name))
    if row is None:
        raise UserError(
            "config.json has no model_type" if name is None else f"model_type {name!r} is not admitted",
            evidence=f"admitted: {', '.join(sorted(records()))}",
            fix="finlm admit DIRECTORY tells whether finlm trains it as transformers does, and admits it then",
        )
    return row


def read(config: Config, row: TypeRecord | None = None) -> Traits:
    """Return the traits of a model by its config.json; `row` is the record of its type, None looks it up.

    Raises UserError for an unknown type, and for missing layer_types of a type whose sliding windows they tell.
    """
    row = row or record_of(config)
    known = complete(config, row)
    symbols = _symbols(known)
    tensors: dict[str, list[str] | None] = dict(row.layer)
    for keys, more in row.switches.items():
        if all(known.get(key) for key in keys.split("+")):
            tensors |= more
    experts = symbols["e"], _first(known, CHOSEN)
    dense = tuple(dense_layers(known)) if row.dense else ()
    linear = tuple(linear_layers(known)) if row.linear else ()

    def sized(tensors: Mapping[str, list[str] | None]) -> tuple[tuple[str, Sizes], ...]:
        """Return the tensors that are not None with their sizes as numbers."""
        return tuple(
            (name, tuple(evaluate(size, symbols) for size in sizes)) for name, sizes in tensors.items() if sizes
        )

    layer = sized(tensors)
    shared = sum(sizes[-1] for name, sizes in layer if "shared" in name and name.endswith("down_proj.weight"))
    return Traits(
        model_type=str(config["model_type"]),
        heads=symbols["a"],
        kv_heads=symbols["g"],
        head_size=symbols["d"],
        ffn=experts[1] * symbols["m"] + shared if experts[0] else symbols["f"],
        layer=layer,
        latent=Latent(symbols["l"], symbols["r"], symbols["c"], symbols["w"]) if known.get("kv_lora_rank") else None,
        dense=dense,
        dense_layer=sized(tensors | row.dense) if dense else (),
        dense_ffn=symbols["p"] if dense else 0,
        linear=linear,
        linear_layer=sized(tensors | row.linear) if linear else (),
        delta=DeltaNet(symbols["i"], symbols["o"], int(known["linear_key_head_dim"]), symbols["b"]) if linear else None,
        outer=sum(math.prod(evaluate(size, symbols) for size in sizes) for sizes in row.outer),
        windows=_windows(known, row.pattern),
        ropes=tuple(str(rope_kind(rope)) for rope in ropes(config)),
        experts=experts if experts[0] else (0, 0),
        norm_bytes=row.norm_bytes,
        ffn_bytes=row.ffn_bytes,
        router_bytes=row.router_bytes,
        bare_norms=tuple(evaluate(size, symbols) for size in row.bare_norms),
        copies_output=row.copies_output,
        score_cap=known.get("attn_logit_softcapping"),
        head=head_of(known, row),
    )


def complete(config: Config, row: TypeRecord) -> Config:
    """Return config.json with its class's defaults added; `row` is the record of its type.

    A key gets no default if config.json gives it under another of its names (_ALIASES).
    """
    said = {key for names in _ALIASES if any(config.get(name) is not None for name in names) for key in names}
    return {key: value for key, value in row.defaults.items() if key not in said} | dict(config)


def _symbols(known: Config) -> dict[str, int]:
    """Return {symbol of TypeRecord's sizes: number}.

    Beside them a: heads, g: key-value heads, s: width of shared experts, p: of the block in layers without experts.
    """
    heads, hidden = int(known["num_attention_heads"]), int(known["hidden_size"])
    groups = int(known.get("num_key_value_heads") or heads)
    head = int(known.get("head_dim") or hidden // heads)
    more = {"m": "moe_intermediate_size", "s": "shared_expert_intermediate_size"}
    latent = {"l": "kv_lora_rank", "c": "q_lora_rank", "n": "qk_nope_head_dim", "r": "qk_rope_head_dim"}
    sizes = {symbol: int(known.get(key) or 0) for symbol, key in (more | latent).items()}
    if sizes["l"]:  # whose head_dim is of RoPE alone
        head, groups = sizes["n"] + sizes["r"], heads
        sizes["w"] = int(known.get("v_head_dim") or hidden // heads)
    ffn = int(known.get("intermediate_size") or known["moe_intermediate_size"])
    sizes |= {"h": hidden, "f": ffn, "a": heads, "g": groups, "d": head}
    sizes["m"] = sizes["m"] or sizes["f"]
    sizes["s"] = sizes["s"] or sizes["m"] * _first(known, SHARED)
    sizes["p"] = int(known.get("prefix_dense_intermediate_size") or sizes["f"])
    return sizes | linear_symbols(known) | {"q": heads * head, "k": groups * head, "e": _first(known, EXPERTS)}


def linear_symbols(known: Config) -> dict[str, int]:
    """Return {symbol of TypeRecord's sizes: number} of linear attention; {} for a model without it."""
    if not known.get("linear_num_key_heads"):
        return {}
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    keys, heads, size, value, tokens = (int(known[f"linear_{name}"]) for name in names)
    return {"i": keys * size, "o": heads * value, "b": heads, "u": value, "t": tokens}


def _first(known: Config, names: tuple[str, ...]) -> int:
    """Return the first number of these keys that is not 0 or null (of a list its largest); 0 if there is none."""
    value = next((known[key] for key in names if known.get(key)), 0)
    return int(max(value) if isinstance(value, list) else value)


def dense_layers(known: Config) -> list[int]:
    """Return the indices of the layers that have no experts, in a model of experts; `known` is of complete()."""
    layers = range(int(known["num_hidden_layers"]))
    if (kinds := known.get("mlp_layer_types")) is not None:
        return [number for number, kind in zip(layers, kinds, strict=False) if kind == "dense"]
    if any(key in known for key in DENSE):
        return list(layers[: _first(known, DENSE)])
    if "moe_layer_start_index" in known:
        first, last, step = (int(known[f"moe_layer_{key}"]) for key in ("start_index", "end_index", "interval"))
        last = last if last >= 0 else len(layers) - 1
        return [number for number in layers if not first <= number <= last or (number + 1) % step > 0]
    step, listed = int(known.get("decoder_sparse_step") or 1), known.get("mlp_only_layers") or ()
    return [number for number in layers if number in listed or (number + 1) % step > 0]


def linear_layers(known: Config) -> list[int]:
    """Return the indices of the layers of linear attention, in a model that has some; `known` is of complete()."""
    if kinds := known.get("layer_types"):
        return [number for number, kind in enumerate(kinds) if kind == LINEAR]
    step = int(known.get("full_attention_interval") or 4)  # as transformers' classes do
    return [number for number in range(int(known["num_hidden_layers"])) if (number + 1) % step]


def with_dense(known: Config, dense: int, layers: int) -> Config:
    """Return the keys, of those in `known`, that tell dense_layers(): the first `dense` of `layers` have no experts."""
    said: Config = {
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        **{"mlp_only_layers": list(range(dense)), "decoder_sparse_step": 1},
        **{"moe_layer_end_index": layers - 1, "moe_layer_interval": 1},
        **dict.fromkeys((*DENSE, "moe_layer_start_index"), dense),
    }
    return {key: value for key, value in said.items() if key in known}


def evaluate(size: str, symbols: Mapping[str, int]) -> int:
    """Return the number that a size such as "q+2*k" stands for. Raises KeyError for an unknown symbol."""
    terms = (term.split("*") for term in size.split("+"))
    return sum(math.prod(int(part) if part.isdigit() else symbols[part] for part in term) for term in terms)


def _windows(known: Config, pattern: int) -> Sizes:
    """Return the window in tokens of every layer that has a sliding window, in order; () without windows.

    `pattern` is TypeRecord.pattern, for a config.json without its own. Raises UserError if it is -1 and the layer_types
    that it stands for are missing.
    """
    window, layers = known.get("sliding_window"), int(known["num_hidden_layers"])
    if "sliding_window" not in known or not window:
        return ()
    if kinds := known.get("layer_types"):
        return (int(window),) * list(kinds).count("sliding_attention")
    if not known.get("use_sliding_window", True):
        return ()
    given = known.get("sliding_window_pattern")
    pattern = given if isinstance(given, int) else pattern
    if pattern < 0:
        raise UserError(f"config.json of a {known['model_type']} has no layer_types", fix="save it with transformers 5")
    first = int(known.get("max_window_layers") or 0) if "use_sliding_window" in known else 0
    sees_all = [number < first or (pattern > 0 and (number + 1) % pattern == 0) for number in range(layers)]
    return (int(window),) * sees_all.count(False)


def ropes(config: Config) -> list[Config]:
    """Return RoPE's parameters: one mapping, or one for each kind of layer; [{}] if config.json has none."""
    parameters: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner: list[Config] = [value for value in parameters.values() if isinstance(value, dict)]
    return inner or [parameters]


def rope_kind(rope: Config) -> Any:
    """Return rope_type of RoPE's parameters, "default" if missing; it is not checked and may be of any type."""
    return rope.get("rope_type", rope.get("type", "default"))


def rope_theta(config: Config) -> float:
    """Return RoPE's base; of several kinds of layers, full attention's. UserError for an unknown model type."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or config.get("rope_theta") or record_of(config).defaults["rope_theta"])


def with_rope_theta(config: Config, theta: float) -> Config:
    """Return a copy of config.json with another RoPE base; of several kinds of layers only the first's RoPE stays."""
    former = {key: value for key, value in ropes(config)[0].items() if key != "type"}
    kind = rope_kind(ropes(config)[0])
    left = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return left | {"rope_parameters": former | {"rope_type": kind, "rope_theta": theta}}


def dropouts(config: Config) -> Config:
    """Return {key: value} of the keys of a config.json that set a decoder's dropout, which finlm trains without."""
    return {
        key: value for key, value in config.items() if key.endswith(DROPOUT) and value and not key.startswith("classif")
    }


def without_dropout(config: Config) -> Config:
    """Return a copy of config.json with every dropout 0."""
    return {**config, **dict.fromkeys(dropouts(config), 0.0)}


def head_of(config: Config, row: TypeRecord | None = None) -> tuple[float, float | None]:
    """Return (factor, soft cap or None) of the logits; `row` is the record of the type, None looks it up.

    An unknown type has the scales SCALES. Raises UserError for a damaged file of the user's records when it looks.
    """
    row = row or records().get(str(config.get("model_type")))
    scales = SCALES | (row.scales if row else {})
    factor = math.prod(float(config.get(key) or 1.0) ** power for key, power in scales.items())
    return factor, config.get("final_logit_softcapping")
