"""Checks of the stages after pretraining that need more than one key. Part of recipe.rules."""

from __future__ import annotations

from collections.abc import Iterator

from finlm.recipe.schema import Recipe
from finlm.recipe.schema_clean import Clean, clean_or_none
from finlm.recipe.schema_data import Data

_DOCUMENTS_ONLY = "works on documents only; leave it out"


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(dotted key, sentence) of every inconsistency."""
    if recipe.eval.suites and not any(source.synthetic for source in recipe.data.sources):
        yield "eval.suites", "asks about the embedded corpus, which is no source here; set it to []"
    if recipe.eval.suites and recipe.stage == "reward":
        yield "eval.suites", "a reward model answers no questions; leave it out"
    if recipe.stage == "pretrain":
        for name in ("chat", "sft", "lora", "dpo", "reward", "grpo"):
            if getattr(recipe, name) is not None:
                yield name, f"has no effect in stage {recipe.stage}; leave it out"
        return
    for name in ("sft", "dpo", "reward", "grpo"):
        if getattr(recipe, name) is not None and recipe.stage != name:
            yield name, f"has no effect in stage {recipe.stage}; leave it out"
    yield from _documents_only(recipe.data)
    if recipe.train.precision == "fp8":
        yield "train.precision", "fp8 trains from scratch only; use auto"
    yield from _sft(recipe)
    yield from _preference(recipe)
    yield from _lora(recipe)


def _documents_only(data: Data) -> Iterator[tuple[str, str]]:
    """Keys of data that dialogues, and documents among them, know nothing of. `clean: none` is what they have."""
    for name in ("decontaminate", "min_characters", "encoder", "token_dtype", "shard_tokens", "packing"):
        if getattr(data, name) != Data.model_fields[name].default:
            yield f"data.{name}", _DOCUMENTS_ONLY
    for index, source in enumerate(data.sources):
        if source.text_field != "text":
            yield f"data.sources[{index}].text_field", "dialogues are known by their keys; leave it out"
        if source.meta:
            yield f"data.sources[{index}].meta", _DOCUMENTS_ONLY
    if data.dedup.method == "near":
        yield "data.dedup", "near works on documents only; dialogues know exact and none"
    none = clean_or_none("none")
    for name, field in Clean.model_fields.items():
        if name != "mask" and getattr(data.clean, name) not in (field.default, none.get(name, field.default)):
            yield f"data.clean.{name}", _DOCUMENTS_ONLY


def _sft(recipe: Recipe) -> Iterator[tuple[str, str]]:
    sft = recipe.sft
    if sft is None:
        return
    for name in ("pad_labels", "hide_eos"):
        if getattr(sft, name) and sft.packing:
            yield f"sft.{name}", "is about rows of one dialogue: set sft.packing to false"
    if sft.order == "sampler" and recipe.data.mixture:
        yield "sft.order", "sampler knows no weights; leave data.mixture out"


def _lora(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.lora is None:
        return
    if recipe.lora.quantize == "nf4":
        yield from _nf4(recipe)


def _nf4(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Weights in 4 bits are no parameters: nothing partitions, offloads or compiles them."""
    if recipe.zero.stage == 3:
        yield "zero.stage", "3 divides weights, which lora.quantize: nf4 keeps whole on every rank; use 1 or 2"
    if recipe.zero.offload_param not in ("auto", "none"):
        yield "zero.offload_param", "moves parameters, which weights in 4 bits are not; use none"
    if recipe.train.compile is True:
        yield "train.compile", "has not been tried with lora.quantize: nf4; use auto"
    if recipe.model.hidden_size % 64:
        yield "lora.quantize", f"nf4 has a scale for 64 weights; {recipe.model.hidden_size} is not a multiple of 64"


def _preference(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.stage in ("dpo", "reward", "grpo"):
        if recipe.train.compile is True:
            yield "train.compile", f"stage {recipe.stage} would compile anew for every length of a batch; use auto"
        if isinstance(recipe.batch.micro_batch, dict):
            yield "batch.micro_batch", f"stage {recipe.stage} weighs every rank alike: give one number for all"
        if recipe.data.mixture:
            yield "data.mixture", f"stage {recipe.stage} reads every pair once an epoch; leave it out"
        if recipe.data.document_masks:
            yield "data.document_masks", f"a row of stage {recipe.stage} is one sequence; leave it out"
    if recipe.dpo is not None and recipe.dpo.label_smoothing and recipe.dpo.loss != "robust":
        yield "dpo.label_smoothing", f"has no effect with loss {recipe.dpo.loss}; choose robust or leave it out"
    if recipe.stage == "reward" and recipe.lora is not None:
        yield "lora", "a reward model trains every weight; leave it out"
    grpo, length = recipe.grpo, recipe.batch.sequence_length
    if grpo is None:
        return
    if grpo.max_new_tokens >= length:
        yield "grpo.max_new_tokens", f"{grpo.max_new_tokens} leave no room for a prompt in rows of {length} tokens"
    rows = recipe.batch.tokens_per_step // length
    if rows % grpo.generations:
        yield "grpo.generations", f"{grpo.generations} do not divide the {rows} rows of a step into groups"
