"""Make the model of a recipe as an instance of transformers' class for its config.json.

New weights depend on (seed, parameter name) only: the same model at every ZeRO stage and world size. New rows of an
extended tokenizer's embedding are the mean of the old rows that spelt their piece, as XuanYuan made them (13B and 70B
reports).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import sentencepiece
import tokenizers
import torch
from safetensors import SafetensorError
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import distributed
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from finlm.base import files
from finlm.base.errors import UserError
from finlm.plan.plan import Plan
from finlm.recipe.models import config_json, traits
from finlm.recipe.settings import Settings, config_of
from finlm.train import batches
from finlm.train.model import delta_net, kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "head_dim", *traits.NORM_EPS),
)


def model_config(recipe: Settings, plan: Plan, bos_id: int, eos_id: int) -> PreTrainedConfig:
    """Return the transformers configuration of the recipe's model: unpadded vocabulary, no dropout, no cache.

    Raises UserError for an unknown model type.
    """
    values = {
        **traits.without_dropout(config_of(recipe.model)),
        "vocab_size": plan.vocab_size,
        "max_position_embeddings": context_length(recipe, plan),
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "use_cache": False,
    }
    return AutoConfig.for_model(**values)


def context_length(recipe: Settings, plan: Plan) -> int:
    """Return max_position_embeddings: the tokens of a sequence of the run, or those of model.init_from if it has more.

    init_from counts only if its config.json can be read and the recipe does not change its RoPE base.
    """
    rows = plan.sequence_length // recipe.sequences_per_row
    if recipe.model.init_from is None or recipe.model.former_rope_theta is not None:
        return rows
    try:
        saved = config_json.read_config(config_json.config_path(recipe.model.init_from, recipe.model.revision))
    except UserError:  # gone since the weights were loaded
        return rows
    return max(rows, int(saved.get("max_position_embeddings", rows)))


def load(recipe: Settings, plan: Plan, ds_config: Path, config: PreTrainedConfig, tokenizer: Path) -> Any:
    """Return the recipe's model in the plan's precision: drawn from the seed, or with the weights of model.init_from.

    Under ZeRO-3 it is partitioned already. `config` is model_config(), `tokenizer` the tokenizer file of the shards.
    Raises UserError when the weights of init_from cannot be read or lack some, when it has another shape, or when the
    tokenizer was extended from another; OSError when its config.json cannot be read. For a new model raises
    RuntimeError if its class draws the values of a vector at random.
    """
    if recipe.model.init_from is None:
        return _from_scratch(recipe, plan, ds_config, config)
    return _from_pretrained(recipe, plan, ds_config, config, tokenizer)


def start_config(source: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """Return transformers' configuration of a model directory or Hub model, or of its text decoder if it reads more.

    Raises UserError when there is no readable config.json, and what the configuration's class raises.
    """
    config: PreTrainedConfig = AutoConfig.for_model(
        **config_json.read_config(config_json.config_path(str(source), revision))
    )
    return config


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' causal class for a configuration, made to run on CPUs too. KeyError if there is none."""
    kind: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    delta_net.choose_by_device(kind)
    return kind


def _from_scratch(recipe: Settings, plan: Plan, ds_config: Path, config: PreTrainedConfig) -> Any:
    """Return load()'s new model, with padded vocabulary, on the plan's device."""
    device = torch.device(plan.device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[plan.precision])  # in which transformers makes the parameters
    try:
        with deepspeed.zero.Init(config_dict_or_path=str(ds_config)) if plan.zero_stage == 3 else nullcontext(), device:
            padded = type(config)(**config.to_dict() | {"vocab_size": plan.padded_vocab_size})
            model = causal_class(config)._from_config(padded, attn_implementation=_attention(recipe, plan, config))
    finally:
        torch.set_default_dtype(default)
    initialize(model, recipe.train.seed, recipe.model.init_std, plan.vocab_size)
    return model


def plain_attention(config: PreTrainedConfig) -> str:
    """Return the attn_implementation for attention that does not keep the documents of a row apart.

    "eager", "sdpa", or batches.PADDED when value heads are smaller than key heads. Raises UserError if the user's file
    of model types is damaged.
    """
    if getattr(config, "attn_logit_softcapping", None) or has_sinks(config):  # SDPA ignores both
        return "eager"
    size, value_size = kernels.head_sizes(config)
    return batches.PADDED if value_size < size else "sdpa"


def has_sinks(config: PreTrainedConfig) -> bool:
    """Return whether a further logit, the sink, is in the softmax of each head. UserError as of traits.records()."""
    row = traits.records().get(config.model_type)
    return row is not None and traits.SINKS in row.layer


def _attention(recipe: Settings, plan: Plan, config: PreTrainedConfig) -> str:
    """Return the run's attn_implementation: batches.NAME if document masks or sinks can use it, else the plain one."""
    plain, sinks = plain_attention(config), has_sinks(config)
    is_wanted = sinks or (plain != "eager" and recipe.data.document_masks)
    has_kernel = is_wanted and batches.has_document_kernel(plan.device, DTYPES[plan.precision], sinks)
    return batches.NAME if has_kernel else plain


def attention_kernel(recipe: Settings, plan: Plan, config: PreTrainedConfig) -> str:
    """Return the kernel that attention takes in training: varlen, flash, efficient, cudnn or math.

    Call it within kernels.attention_backends(plan). Rank 0 prints a warning when a GPU has to take math in place of a
    fused kernel.
    """
    name = _attention(recipe, plan, config)
    if name == batches.NAME:
        return "varlen"
    if name == "eager":
        return "math"
    masked = recipe.data.document_masks or (recipe.sft is not None and recipe.sft.hide_eos)
    kernel = kernels.attention_kernel(plan, config, DTYPES[plan.precision], masked)
    if kernel == "math" and plan.device == "cuda" and distributed.get_rank() == 0:
        warning = "no attention kernel of this GPU takes these heads: every score is kept, quadratic in the row"
        print(warning, flush=True)
    return kernel


def initialize(model: torch.nn.Module, seed: int, std: float, vocab_size: int) -> None:
    """Set all weights in place: matrices and sinks to normal(0, std), drawn by a generator seeded with (seed, name).

    The decay of linear attention, A_log, is drawn as its class does. Biases (not dt_bias) and vocabulary rows from
    vocab_size on become 0. Other vectors (norms) stay as their class makes them. Raises RuntimeError if the values of
    such a vector differ: then its class drew them at random. Collective under ZeRO-3.
    """
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            if name.endswith("A_log"):
                numbers = torch.rand(len(parameter), generator=generator, device=parameter.device)
                parameter.copy_((0.01 + 15.99 * numbers).log())
            elif name.endswith("bias") and not name.endswith("dt_bias"):
                parameter.zero_()
            elif parameter.ndim == 1 and not name.endswith(traits.SINKS):
                if bool((parameter != parameter.flatten()[:1]).any()):
                    raise RuntimeError(f"{name} is drawn by its class, not by the run's seed")
            else:
                # Drawn in fp32, so that bf16 and fp32 runs start from the same weights up to rounding.
                rows = vocab_size if name in VOCABULARY else len(parameter)
                shape = (rows, *parameter.shape[1:])
                parameter.zero_()
                parameter[:rows] = torch.randn(shape, generator=generator, device=parameter.device) * std


def _config_of_run(start: PreTrainedConfig, decided: PreTrainedConfig, recipe: Settings) -> PreTrainedConfig:
    """Return a copy of `start`, init_from's configuration, changed for the run: no dropout, no cache, no auto_map.

    Takes max_position_embeddings from `decided` (model_config()), bos and eos ids unless `start` has these among its
    own, and the recipe's RoPE base if the recipe changes it.
    """
    values = {**traits.without_dropout(start.to_dict()), "use_cache": False}
    values.pop("auto_map", None)  # it names code in the start's directory, which no export brings along
    for key in ("bos_token_id", "eos_token_id"):
        known = values.get(key)
        if getattr(decided, key) not in (known if isinstance(known, list) else [known]):
            values[key] = getattr(decided, key)
    values["max_position_embeddings"] = decided.max_position_embeddings
    if recipe.model.former_rope_theta is not None:
        return type(start)(**traits.with_rope_theta(values, recipe.model.rope_theta))
    return type(start)(**values)


def _differences(recipe: Settings, config: PreTrainedConfig, start: PreTrainedConfig) -> list[str]:
    """Return a line for each difference in shape between `start`, init_from's configuration, and the recipe's `config`.

    If shapes agree, also compares model.config with config.json; UserError if that cannot be read.
    """
    # Pretraining that goes on from an extended model finds it as large as it is wanted.
    compared = [name for name in SHAPE if not (_is_extending(recipe, start) and name == "vocab_size")]
    values = [(name, getattr(start, name, None), getattr(config, name, None)) for name in compared]
    lines = [f"{name}: {there} there, {here} in the recipe" for name, there, here in values if there != here]
    there, here = start.to_dict(), config.to_dict()  # both as transformers reads older keys
    former = recipe.model.former_rope_theta or recipe.model.rope_theta
    theirs, ours = traits.read(there), traits.read(here)
    if (theirs.ropes, traits.rope_theta(there)) != (ours.ropes, former):
        kinds, base = [" and ".join(each.ropes) for each in (theirs, ours)], traits.rope_theta(there)
        lines.append(f"RoPE: {kinds[0]}, base {base:,.0f} there; {kinds[1]}, base {former:,.0f} in the recipe")
    if not lines and recipe.model.config is not None:  # which was read from the same place before the run
        named = recipe.model.config
        read = config_json.read_config(config_json.config_path(str(recipe.model.init_from), recipe.model.revision))
        lines = [
            f"{key}: {read.get(key)} there, {named[key]} in the recipe" for key in named if named[key] != read.get(key)
        ]
    if not lines and theirs != ours:
        lines = [f"{start.model_type} there, {ours.model_type} in the recipe: write model.config with its config.json"]
    return lines


def _is_extending(recipe: Settings, start: PreTrainedConfig) -> bool:
    """Return whether pretraining enlarges the vocabulary of the model that it starts from."""
    return recipe.stage == "pretrain" and recipe.tokenizer.extend_to not in (None, start.vocab_size)


def _from_pretrained(recipe: Settings, plan: Plan, ds_config: Path, config: PreTrainedConfig, tokenizer: Path) -> Any:
    """Return load()'s model of model.init_from, its vocabulary extended and padded as planned."""
    source, revision = recipe.model.init_from, recipe.model.revision
    start = start_config(str(source), revision)
    if lines := _differences(recipe, config, start):
        raise UserError(
            f"{source} does not have the recipe's shape",
            evidence="\n".join([f"model_type: {start.model_type}", *lines]),
            fix="make the recipe's model: section equal to the config.json of model.init_from",
        )
    # transformers partitions while loading only if it finds such an object alive.
    keep_alive = HfDeepSpeedConfig(str(ds_config)) if plan.zero_stage == 3 else None
    model = load_weights(
        causal_class(start),
        source,
        "give a complete model in model.init_from: config.json and every *.safetensors that belongs to it",
        ("lm_head.weight",) if recipe.stage == "reward" else (),  # it gets a head of its own
        config=_config_of_run(start, config, recipe),
        revision=revision,
        dtype=DTYPES[plan.precision],
        attn_implementation=_attention(recipe, plan, start),
        use_safetensors=True,
    )
    del keep_alive
    if _is_extending(recipe, start):
        extend_embeddings(model, tokenizer, plan.padded_vocab_size)
    elif plan.padded_vocab_size > plan.vocab_size:
        model.resize_token_embeddings(plan.padded_vocab_size, mean_resizing=False)
    return model


def base_model(model: Any) -> Any:
    """Return the model inside peft's adapters, or the model itself when it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_weights(kind: Any, source: Any, fix: str, may_lack: Collection[str] = (), **given: Any) -> Any:
    """Return kind.from_pretrained(source, **given), after checking that all weights were loaded.

    Of a model of more than text, loads the text decoder alone if its configuration is given as `config`. Raises
    UserError with `fix` when the files cannot be read, or when a weight is missing, unless `may_lack` names it, or has
    another shape. Also makes linear attention run on CPUs.
    """
    try:
        # As a warning a shape comes back with its name; as an error it only stands in the log.
        how = {"output_loading_info": True, "ignore_mismatched_sizes": True, "key_mapping": config_json.TEXT_NAMES}
        model, report = kind.from_pretrained(source, **how, **given)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the model in {source} cannot be loaded", evidence=str(error).strip().splitlines()[0], fix=fix
        ) from None
    shapes = {name: f"has {list(there)} there, {list(here)} here" for name, there, here in report["mismatched_keys"]}
    delta_net.choose_by_device(type(model))
    lines = {name: "is missing" for name in report["missing_keys"] if name not in may_lack} | shapes
    if lines:  # transformers would draw these at random
        evidence = [f"{name} {lines[name]}" for name in sorted(lines)[:3]]
        raise UserError(
            f"the files of {source} lack {len(lines)} of the model's weights", evidence="\n".join(evidence), fix=fix
        )
    return model


def spellings(tokenizer: Path) -> tuple[int, list[list[int]]]:
    """Return (number of ids before the extension, the old ids that spell each new piece) of an extended tokenizer.

    `tokenizer` is a tokenizer.model, or a tokenizer.json with extension.json beside it. If it was not extended, the
    list is empty. Raises NotJson if a JSON file is damaged.
    """
    if tokenizer.suffix == ".json":
        return _json_spellings(tokenizer)
    model = ModelProto.FromString(tokenizer.read_bytes())
    old = model.trainer_spec.vocab_size  # of the vocabulary it was extended from
    new = [piece.piece for piece in model.pieces[old:]]
    del model.pieces[old:]
    model.normalizer_spec.add_dummy_prefix = False  # a piece stands inside a text
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return old, processor.encode(new)


def _json_spellings(tokenizer: Path) -> tuple[int, list[list[int]]]:
    """Return spellings() of a tokenizer.json; (0, []) without extension.json beside it."""
    path = tokenizer.with_name("extension.json")
    if not path.is_file():
        return 0, []
    settings, before = files.read_json(tokenizer), files.read_json(path)
    model, old = settings["model"], before["old_ids"]
    pieces = model["vocab"].items()
    new = sorted((number, piece) for piece, number in pieces if number >= old)
    model["vocab"] = {piece: number for piece, number in pieces if number < old}
    model["merges"] = model["merges"][: before["old_merges"]]
    former = tokenizers.Tokenizer.from_str(json.dumps(settings)).model
    return old, [[token.id for token in former.tokenize(piece)] for _, piece in new]


def enlarge_table(table: torch.Tensor, ids: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    """Return the embedding table [old rows, hidden] enlarged to [rows, hidden], in its dtype.

    Behind the old rows come len(ids) new ones, the i-th the mean of the old rows ids[i], then zeros. Raises
    RuntimeError if `rows` is less than old and new ones together.
    """
    wide = table.detach().float()
    flat = torch.tensor([number for spelling in ids for number in spelling], device=table.device)
    starts = torch.tensor([0, *(len(spelling) for spelling in ids)], device=table.device).cumsum(0)[:-1]
    new = functional.embedding_bag(flat, wide, starts, mode="mean")
    padding = table.new_zeros(rows - len(table) - len(ids), table.shape[1])
    return torch.cat([table.detach(), new.to(table.dtype), padding])


def extend_embeddings(model: Any, tokenizer: Path, rows: int) -> None:
    """Enlarge the embedding and head of `model` in place to `rows` rows, with new rows for the tokenizer's new pieces.

    Raises UserError when `tokenizer`, a file, was not extended from the model's, or `rows` is too small; NotJson as
    spellings() does. Collective under ZeRO-3.
    """
    old, ids = spellings(tokenizer)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # A table may have more rows than a tokenizer.json has ids; a sentencepiece model names its rows.
    has_spare = tokenizer.suffix == ".json" and embedding.num_embeddings > old
    if not ids or not (embedding.num_embeddings == old or has_spare) or rows < old + len(ids):
        raise UserError(
            "the extended tokenizer does not belong to the weights of model.init_from",
            evidence=f"{embedding.num_embeddings:,} embedding rows there; {old:,} old and {len(ids):,} new pieces in "
            f"{tokenizer}, {rows:,} rows wanted",
            fix="take tokenizer.path from the same model as model.init_from",
        )
    for module in [embedding] if model.config.tie_word_embeddings else [embedding, head]:
        with deepspeed.zero.GatheredParameters(module.weight):  # whole on every rank; does nothing below ZeRO-3
            table = enlarge_table(module.weight[:old], ids, rows)
        module.weight = torch.nn.Parameter(table)
    if model.config.tie_word_embeddings:
        head.weight = embedding.weight
    embedding.num_embeddings = head.out_features = rows
    model.vocab_size = model.config.vocab_size = rows
