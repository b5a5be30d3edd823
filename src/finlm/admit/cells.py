"""Check, without a run, that a small model of a type computes the same with finlm's swaps as transformers' eager model.

A cell is such a check of `finlm admit`: a function of a Case that returns what is wrong, or "". Weights are drawn so
that none could be left out unseen: biases are not 0, norms not 1.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoConfig

from finlm.admit import record
from finlm.admit.record import GROUPS
from finlm.base.errors import UserError
from finlm.plan import memory
from finlm.plan.plan import Plan
from finlm.recipe import shape
from finlm.recipe.models import traits
from finlm.recipe.models.traits import EXPERTS, Config, TypeRecord
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Lora
from finlm.rows.shards import IGNORED
from finlm.train import batches
from finlm.train.model import kernels
from finlm.train.model.causal_lm import causal_class, has_sinks, plain_attention
from finlm.train.post import start

VOCABULARY, PADDED = 500, 512
LENGTHS = ((48,), (7, 30, 11), (1, 46, 1))  # of the documents of each row
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 2e-4  # shares; of the largest gradient of a tensor
ROWS = 12  # for activations, so that what rows share does not count
REFUSED = ("use_bidirectional_attention", "output_router_logits")  # keys that no model of any type may have on
CAPS = ("softcapping", "clip")  # parts of the names of keys that the gate sets where they are not set
MEMORY_TOLERANCE = 0.05  # share of what a layer keeps; under partial rotation attention also copies its output


@dataclass(frozen=True)
class Case:
    """What the cells check: a model type's configuration, its row of the table, and a small model with its plan."""

    config: traits.Config  # the model's own
    row: traits.TypeRecord
    small: Any  # the same, small
    recipe: Recipe  # a small one, whose plan is changed by the cells
    plan: Plan

    @functools.cached_property
    def plain(self) -> Any:
        """The small model as transformers' class with eager attention, in fp32 and training mode; built once."""
        return build(self.small, "eager")

    @functools.cached_property
    def expected(self) -> tuple[float, dict[str, torch.Tensor]]:
        """(summed loss, gradients of a hundredth of it by parameter) of the plain model on batch(); computed once."""
        inputs, labels = batch()
        logits = self.plain(input_ids=inputs, use_cache=False).logits.float()
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return _gradients(self.plain, loss)

    def swapped(self, **changes: Any) -> Any:
        """Return a model with the plain model's weights, swapped by the plan with the fields in `changes` replaced."""
        plan = dataclasses.replace(self.plan, **{"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY} | changes)
        padded = type(self.small)(**self.small.to_dict() | {"vocab_size": plan.padded_vocab_size})
        model = build(padded, attention_of(self.small), self.plain)
        kernels.swap(model, plan)
        return model


def attention_of(config: Any) -> str:
    """Return the attn_implementation to train a model on a CPU, no document masks. Raises as has_sinks() does."""
    return batches.NAME if has_sinks(config) else plain_attention(config)


def build(config: Any, attention: str, like: Any = None) -> Any:
    """Return an fp32 model in training mode with weights of `like`, 0 in further rows, or random ones; seed torch."""
    torch.manual_seed(0)
    model = causal_class(config)._from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if like is None:
                drawn = torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.05)
                parameter.copy_(parameter + drawn if parameter.ndim == 1 else drawn)
            else:
                theirs = like.get_parameter(name)
                parameter.zero_()[: len(theirs)] = theirs
    return model.train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, labels), int64 [rows, tokens], the same each time; every fifth label is IGNORED."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randint(3, VOCABULARY, (2, len(LENGTHS), sum(LENGTHS[0])), generator=generator).unbind(0)
    labels[:, ::5] = IGNORED
    return inputs, labels


def _gradients(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Clear the model's gradients, backpropagate loss / 100, and return (loss, {parameter: copy of its gradient})."""
    model.zero_grad()
    (loss / 100).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def _compare(actual: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> str:
    """Return how two results of _gradients() differ by more than rounding, or which padded rows learn; else ""."""
    if not abs(actual[0] - expected[0]) <= LOSS_TOLERANCE * abs(expected[0]):
        return f"loss {actual[0]:.6f}, transformers' {expected[0]:.6f}"
    if lost := sorted(expected[1].keys() - actual[1].keys()):
        return f"{lost[0]} has no gradient"
    for name, wanted in expected[1].items():
        gradient, largest = actual[1][name], float(wanted.abs().max())
        apart = float((gradient[: len(wanted)] - wanted).abs().max())
        if not apart <= GRADIENT_TOLERANCE * largest + 5e-7:  # where terms cancel, as in A_log, rounding left 1.6e-7
            return f"gradient of {name} is {apart / (largest or 1):.1e} of its largest away from transformers'"
        if gradient[len(wanted) :].any():
            return f"padded rows of {name} learn"
    return ""


def check_swap(case: Case, **changes: Any) -> str:
    """Return how case.swapped(**changes) differs from eager in loss or gradients; "" if equal. Resets torch._dynamo."""
    torch._dynamo.reset()
    # The compiler's code generator is not what differs by model, and takes half a minute a graph.
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    with patch.object(torch, "compile", compiled):
        model = case.swapped(**changes)
        return _compare(_gradients(model, model(*batch())), case.expected)


def sum_documents(
    model: Any, inputs: torch.Tensor, labels: torch.Tensor, lengths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return the summed loss of the documents of packed rows, each read alone by a plain model; an fp32 scalar.

    `inputs` and `labels` are int64 [rows, tokens]; `lengths` has the tokens of each document of each row.
    """
    total = torch.zeros((), device=inputs.device)
    for row, sizes in enumerate(lengths):
        for words, wanted in zip(inputs[row].split(sizes), labels[row].split(sizes), strict=True):  # type: ignore[no-untyped-call]
            logits = model(input_ids=words[None], use_cache=False).logits[0].float()
            total = total + cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED)
    return total


def check_packed(case: Case) -> str:
    """Return how the documents of packed rows differ from each document alone in loss or gradients; "" if equal."""
    inputs, labels = batch()
    alone, model = build(case.small, "eager", case.plain), case.swapped()
    expected = sum_documents(alone, inputs, labels, LENGTHS)
    numbers = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in LENGTHS])
    bounds = torch.from_numpy(batches.document_bounds(numbers))
    problem = _compare(_gradients(model, model(inputs, labels, bounds)), _gradients(alone, expected))
    return f"documents of a row see each other: {problem}" if problem else ""


def check_adapters(case: Case) -> str:
    """Return what is wrong with a model's adapters; "" if nothing.

    Wrong is: no layer can be adapted, the number of trained parameters differs from the plan's, or the merged weights
    do not fit the model or give other logits.
    """
    from peft import get_peft_model

    recipe = case.recipe.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    sizes = shape.of_config(case.small.to_dict(), VOCABULARY, case.row)
    names = list(shape.adapted(recipe, sizes))
    if not names:
        return "no linear layer to adapt"
    settings = start.lora_config(recipe)
    settings.target_modules = set(names)
    model = get_peft_model(build(case.small, "eager", case.plain), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if trained != (planned := shape.adapter_parameters(recipe, sizes)):
        return f"{trained:,} parameters of adapters, {planned:,} planned"
    merged = build(case.small, "eager")
    weights = start.merge_adapters(model.state_dict(), recipe)
    if case.small.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    missing, unknown = merged.load_state_dict(weights, strict=False)
    if unknown or [name for name in missing if name != "lm_head.weight"]:
        return f"merged weights lack {missing[:2]}, and {unknown[:2]} have no place"
    merged.tie_weights()
    with torch.no_grad():
        apart = (model(batch()[0]).logits - merged(batch()[0]).logits).abs().max()
    return "" if apart < 1e-4 else f"merged logits are {apart:.1e} away"


def check_four_bits(case: Case) -> str:
    """Return how a model with 4-bit matrices differs from one with the same rounded values; "" if equal.

    For a type with experts: "" if shape.problems() refuses lora.quantize.
    """
    if any("e" in sizes for sizes in case.row.layer.values() if len(sizes) > 2):  # it has experts, no linear layers
        model = case.recipe.model.model_copy(update={"config": case.small.to_dict()})
        asked = {"model": model, "lora": Lora(rank=4, alpha=8, quantize="nf4")}
        refused = [key for key, _ in shape.problems(case.recipe.model_copy(update=asked))]
        return "" if "lora.quantize" in refused else "lora.quantize is not refused, and leaves the experts in 16 bits"
    rounded, packed_ = build(case.small, "eager", case.plain), build(case.small, "eager", case.plain)
    start.quantize(packed_, "cpu")
    with torch.no_grad():
        for name, module in rounded.model.layers.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(packed_.model.layers.get_submodule(name).weight.get_original_weight())
        apart = (packed_(batch()[0]).logits - rounded(batch()[0]).logits).abs().max()
    return "" if apart < 1e-4 else f"logits are {apart:.1e} away from those of the rounded matrices"


def check_parameters(case: Case) -> str:
    """Return how planned parameters and windows differ from transformers' model at its own size; "" if equal."""
    with torch.device("meta"):
        config = type(case.small)(**{key: value for key, value in case.config.items() if key != "quantization_config"})
        model = causal_class(config)._from_config(config)
    planned = shape.of_config(config.to_dict(), config.vocab_size, case.row)
    real = sum(parameter.numel() for parameter in model.parameters())
    if planned.parameters != real:
        return f"{planned.parameters:,} parameters planned, {real:,} in transformers' model"
    attending = list(kernels.attention_modules(model.model))
    windows = [m.sliding_window for m in attending if getattr(m, "is_sliding", getattr(m, "sliding_window", None))]
    if any(hasattr(each, "sliding_window") for each in attending) and list(planned.windows) != windows:
        return f"{len(planned.windows)} layers with a window planned, {len(windows)} in transformers' model"
    return ""


def check_small_parameters(case: Case) -> str:
    """Return how the planned number of parameters differs from the small model's; "" if equal."""
    planned = shape.of_config(case.small.to_dict(), VOCABULARY, case.row).parameters
    real = sum(parameter.numel() for parameter in case.plain.parameters())
    return "" if planned == real else f"{planned:,} parameters planned, {real:,} in transformers' model"


def check_activations(case: Case) -> str:
    """Return a sentence if the planned bytes of a layer and what autograd saves in bf16 are over 5 % apart; else ""."""
    layers = len(case.plain.model.layers)
    sizes = [_count_saved_bytes(case.small, times) for times in (1, 2)]
    saved = (sizes[1] - sizes[0]) / layers / (ROWS * batch()[0].shape[1])
    layout = memory.Layout("cuda", "bf16", 1, "none", "none", "none", ROWS, batch()[0].shape[1], 1)
    kept = memory.kept_bytes(shape.of_config(case.small.to_dict(), VOCABULARY, case.row), layout)
    planned = kept / (layers * layout.tokens)
    return (
        ""
        if abs(planned / saved - 1) <= MEMORY_TOLERANCE
        else f"{planned:,.0f} bytes a token and layer planned, {saved:,.0f} saved"
    )


def _count_saved_bytes(config: Any, times: int) -> int:
    """Return the bytes that the forward pass of a bf16 model of `times` as many layers saves, each storage once."""
    config = copy.deepcopy(config)
    layers = config.num_hidden_layers
    for key in traits.LISTS:
        if kinds := getattr(config, key, None):
            setattr(config, key, list(kinds) * times)
    said = config.to_dict()
    for key, value in traits.with_dense(said, times * len(traits.dense_layers(said)), times * layers).items():
        setattr(config, key, value)
    config.num_hidden_layers = layers * times
    model = causal_class(config)._from_config(config, attn_implementation=attention_of(config), dtype=torch.bfloat16)
    kernels.swap_loss(model, VOCABULARY)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    inputs = batch()[0][:1].expand(ROWS, -1).contiguous()
    model.eval()  # a dropout of 0 keeps a mask, which no compiled layer does
    with record.collect_saved(weights) as saved:
        kept = model.model(input_ids=inputs, position_ids=kernels.plain_positions(inputs), use_cache=False)
    del kept
    return sum(saved.values())


def other_settings(case: Case) -> Iterator[tuple[str, Any, traits.Config]]:
    """Yield (key, its default in the class, config.json with another value) for each key that may switch something.

    These are booleans, factors, caps, windows and the share of the rotation.
    """
    known = record.own_keys(record.whole_config(str(case.config["model_type"])))
    for key, value in known.items():
        change: traits.Config = {}
        now = case.config.get(key, value)
        if key in REFUSED or key.endswith(traits.NOISE):
            continue
        if key == "use_sliding_window":
            change = {} if now else {key: True, "sliding_window": 4096}
        elif isinstance(now, bool):
            change = {key: not now}
        elif isinstance(now, float) and key not in traits.NORM_EPS:
            change = {key: 2 * now}
        elif now is None and any(part in key for part in CAPS):
            change = {key: 5.0}
        elif now is None and key in traits.NORM_EPS:
            change = {key: 1e-5}
        elif now is None and key == "sliding_window" and "use_sliding_window" not in known:
            change = {key: 4096}
        elif key == "rope_parameters" and "partial_rotary_factor" in (now or {}):
            change = {key: now | {"partial_rotary_factor": 0.5 if now["partial_rotary_factor"] != 0.5 else 0.25}}
        if change:
            yield key, value, {**case.config, **change}


def check_settings(case: Case) -> str:
    """Return what is wrong when a switching key has another value, unless the row pins it (`held`); "" if nothing."""
    return next((why for key, why in find_wrong_keys(case) if key not in case.row.held), "")


def find_wrong_keys(case: Case) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong or was raised) for each key of which finlm trains or plans another value wrongly."""
    for key, _, config in other_settings(case):
        try:
            other = make_case(config, case.row, case.recipe, case.plan)
            cells = check_swap, check_small_parameters, check_activations
            problem = next(filter(None, (cell(other) for cell in cells)), "")
        except Exception as error:  # a class that cannot be built so
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem:
            yield key, f"{key} {config[key]}: {problem}"


def fill_held(case: Case) -> traits.TypeRecord:
    """Return the case's row with `held` filled in: {key: value} of the keys that finlm trains with one value only."""
    values = {key: value for key, value, _ in other_settings(case)}
    return dataclasses.replace(case.row, held={key: values[key] for key, _ in find_wrong_keys(case)})


CELLS: dict[str, Callable[[Case], str]] = {
    "loss": check_swap,
    "padded vocabulary": functools.partial(check_swap, padded_vocab_size=PADDED),
    "selective recompute": functools.partial(check_swap, recompute="selective"),
    "full recompute": functools.partial(check_swap, recompute="full"),
    "compiled": functools.partial(check_swap, compiled=True),
    "packed rows": check_packed,
    "adapters": check_adapters,
    "4 bits": check_four_bits,
    "parameters": check_parameters,
    "activations": check_activations,
    "other settings": check_settings,
}


def make_case(config: traits.Config, row: traits.TypeRecord, recipe: Recipe, plan: Plan) -> Case:
    """Return the Case of a model's config.json. Raises UserError when transformers rejects the configuration."""
    try:
        small = shrink(config, row, VOCABULARY)
    except Exception as error:  # of every class's own validation
        raise UserError(
            f"transformers makes no {config['model_type']} of this config.json",
            evidence=" ".join(str(error).split())[:300],
            fix="mend config.json",
        ) from None
    return Case(config, row, small, recipe, plan)


# Of a model for two CPU cores.
SMALL_HIDDEN, FFN, HEADS, HEAD, SMALL_LAYERS, WINDOW, ORIGINAL = 64, 128, 4, 32, 3, 8, 64
SMALL_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SMALL_EXPERTS |= {"prefix_dense_intermediate_size": 96} | dict.fromkeys(traits.CHOSEN, 2)
SMALL_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
SMALL_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
SMALL_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}


def shrink(config: Config, row: TypeRecord, vocab_size: int) -> Any:
    """Return transformers' config object of the same model, small and without dropout. Raises what its class raises."""
    known = traits.complete(config, row)
    values = dict(traits.without_dropout(config)) | {
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
        head = int(known.get("head_dim") or 0)
        values["head_dim"] = HEAD if head and head * heads != int(known["hidden_size"]) else SMALL_HIDDEN // HEADS
    if known.get("rotary_dim") and known.get("head_dim"):
        values["rotary_dim"] = values["head_dim"] * int(known["rotary_dim"]) // int(known["head_dim"])
    values |= {key: size for key, size in SMALL_EXPERTS.items() if known.get(key) and hasattr(kind, key)}
    values |= SMALL_LINEAR if known.get("linear_num_key_heads") else {}
    values |= {key: 4 for key in EXPERTS if config.get(key)}
    values |= {key: size for key, size in GROUPS.items() if (known.get("n_group") or 1) > 1}
    if known.get("kv_lora_rank"):
        widths: Config = {key: known.get(key) for key in SMALL_LATENT}
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
    if any(traits.rope_kind(rope) != "default" for rope in traits.ropes(config)):
        values |= {"max_position_embeddings": 4 * ORIGINAL}
        values |= {"original_max_position_embeddings": ORIGINAL} if "original_max_position_embeddings" in known else {}
    else:
        values["max_position_embeddings"] = max(256, ORIGINAL)
    return AutoConfig.for_model(**values)


def few_layers(config: Config, known: Config, pattern: int) -> Config:
    """Return the configuration keys for few layers, with at least one layer of each type.

    `known` is the config with its class's defaults, `pattern` is that of the TypeRecord.
    """
    keys = dict[str, object]()
    if known.get("sliding_window"):
        keys["sliding_window"] = WINDOW
    if pattern > 0 and not config.get("layer_types"):
        keys["num_hidden_layers"] = pattern
    layers = pattern if "num_hidden_layers" in keys else SMALL_LAYERS
    for key in traits.LISTS:
        if kinds := list(dict.fromkeys(config.get(key) or ())):
            keys[key] = [*kinds, *kinds * layers][:layers]
    dense = len(traits.dense_layers(known))
    keys |= traits.with_dense(known, layers if dense == known["num_hidden_layers"] else min(dense, 1), layers)
    if known.get("use_sliding_window") and "max_window_layers" in known:
        keys["max_window_layers"] = 1
    return keys


def _shrink_rope(rope: Config, pairs: int) -> Config:
    """Return a copy of RoPE's parameters with lists cut to `pairs` values and an original length of ORIGINAL tokens."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _shrink_rope(value, pairs) if isinstance(value, dict) else value for kind, value in rope.items()}
    small = {key: value[:pairs] if isinstance(value, list) else value for key, value in rope.items()}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = ORIGINAL
    return small
