"""Check what needs more than one key of a recipe, and list the keys that two recipes may differ in.

Each check yields (dotted key, sentence), so that the loader prints it at the key's line beside the other mistakes.
What depends on the cluster (bf16 on a V100, hpZ and the world size) is checked by the planner and config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finlm.recipe import shape as shapes
from finlm.recipe.reference import Location
from finlm.recipe.schema import Optim, Recipe, Zero
from finlm.recipe.schema_data import Clean, Data, clean_or_none
from finlm.recipe.schema_train import Term

ROWS_OF_ONE_LENGTH = ("pretrain", "sft")  # the other stages' batches are as long as their longest row
BYTE_PIECES = 256 + 4  # of a sentencepiece model with byte fallback: bytes, <unk>, <s>, </s>, and the space
FP32_GRADIENTS = {2: ("none", "stream"), 3: ("none", "cpu")}  # ZeRO stage: where its optimizer may be for such sums
_DOCUMENTS_ONLY = "works on documents only; leave it out"
FP8_STAGES = (1, 2)  # torchao casts whole weights; ZeRO-3 would gather them in bf16 all the same


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for every inconsistency of a recipe. UserError if its model type is not admitted."""
    for check in (_check_model, _check_tokenizer, _check_data, _check_length, _check_zero, _check_post_training):
        yield from check(recipe)


def _check_model(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of the section model; UserError for a type that is not admitted."""
    model = recipe.model
    yield from shapes.problems(recipe)
    if model.former_rope_theta is not None and (model.init_from is None or recipe.stage != "pretrain"):
        yield "model.former_rope_theta", "is about pretraining that goes on from model.init_from; leave it out"
    if model.kv_heads is not None and model.heads % model.kv_heads:
        yield "model.kv_heads", f"{model.kv_heads} does not divide heads ({model.heads})"


def _check_tokenizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of the section tokenizer."""
    tokenizer, rows = recipe.tokenizer, recipe.model.vocab_size
    if tokenizer.path is not None and tokenizer.vocab_size is not None:
        yield "tokenizer", "give either path (an existing tokenizer) or vocab_size (to train one)"
    if tokenizer.path is None and tokenizer.vocab_size is None and recipe.model.init_from is None:
        yield "tokenizer", "give path (an existing tokenizer) or vocab_size (to train one), or model.init_from"
    if tokenizer.extend_to is not None and tokenizer.vocab_size is not None:
        yield "tokenizer.extend_to", "needs path or model.init_from, whose tokenizer it extends; leave vocab_size out"
    if tokenizer.pieces is not None and rows != "auto" and rows < tokenizer.pieces:
        yield "model.vocab_size", f"{rows} rows are fewer than the tokenizer's {tokenizer.pieces} pieces"
    if tokenizer.vocab_size is not None and tokenizer.vocab_size <= BYTE_PIECES:
        yield "tokenizer.vocab_size", f"must be above {BYTE_PIECES}: so many pieces are single bytes and special tokens"
    weights = tokenizer.sample_weights
    if weights is not None and tokenizer.pieces is None:
        yield "tokenizer.sample_weights", "has no effect: an existing tokenizer is not trained; leave it out"
    elif weights is not None and not any(weights.values()):
        yield "tokenizer.sample_weights", "gives no source a weight above 0"


def _check_data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of sources, mixture and token_dtype."""
    for index, source in enumerate(recipe.data.sources):
        if sum(where is not None for where in (source.path, source.dataset, source.synthetic)) != 1:
            yield f"data.sources[{index}]", "give either path or dataset or synthetic"
        if source.dataset is None and (source.revision or source.files):
            yield f"data.sources[{index}]", "revision and files belong to a dataset, which is not given"
        if source.sha256 is not None and source.path is not None and set(source.path) & set("*?["):
            yield f"data.sources[{index}].sha256", f"belongs to one file, but path is a glob ({source.path})"
    if "://" in recipe.data.cache_dir:
        yield "data.cache_dir", "is a URL; prepared data are locked and mapped into memory: give a directory"
    given_share = sum(stage.share or 0.0 for stage in recipe.data.mixture)
    if given_share > 1 + 1e-9:
        yield "data.mixture", f"the stages' shares are {given_share:g} of the run together, more than 1"
    for index, stage in enumerate(recipe.data.mixture):
        key = f"data.mixture[{index}]"
        if (stage.weights is None) == (stage.tokens is None):
            yield key, "give either weights or tokens"
        elif stage.tokens is not None and (stage.to is not None or stage.share is not None):
            yield key, "tokens say how long the stage is: leave out to and share"
        elif any(sum(weights.values()) == 0 for weights in (stage.weights, stage.to) if weights is not None):
            yield key, "gives no source a weight above 0"
    vocabulary = recipe.tokenizer.pieces or recipe.model.vocab_size
    if recipe.data.token_dtype == "uint16" and isinstance(vocabulary, int) and vocabulary > 65536:
        too_many = f"uint16 holds ids up to 65,535, the vocabulary has {vocabulary:,}; use auto or uint32"
        yield "data.token_dtype", too_many


def _check_length(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of length, batch, checkpoints and learning-rate schedule."""
    train, batch, optim = recipe.train, recipe.batch, recipe.optim
    given = [name for name in ("steps", "tokens", "epochs") if getattr(train, name) is not None]
    if len(given) != 1:
        yield "train", f"give exactly one of steps, tokens, epochs; found {', '.join(given) or 'none'}"
    if batch.tokens_per_step < batch.sequence_length:
        yield "batch.tokens_per_step", f"{batch.tokens_per_step} is less than one row of {batch.sequence_length} tokens"
    steps = train.steps or (train.tokens // batch.tokens_per_step if train.tokens else None)
    tokens = train.tokens or (train.steps or 0) * batch.tokens_per_step
    budgets = sum(sum(stage.tokens.values()) for stage in recipe.data.mixture if stage.tokens)
    if 0 < tokens < budgets:
        yield "data.mixture", f"the stages' tokens are {budgets:,}, more than the run's {tokens:,}"
    if steps is not None:
        yield from warmup_problems(optim, steps)
    every, always = recipe.checkpoint.every_steps, recipe.checkpoint.keep_every_steps
    if every and always and always % every:
        yield "checkpoint.keep_every_steps", f"{always:,} is no multiple of every_steps ({every:,}), so few are written"
    if recipe.checkpoint.copies and recipe.checkpoint.keep_last < 2:
        yield "checkpoint.keep_last", "copies: 1 needs 2 or more: hosts would remove their parts while they are copied"
    if optim.lr >= 1:
        yield "optim.lr", f"{optim.lr:g} moves every weight by about as much in a step; usual are 1e-6 to 1e-3"
    if optim.min_lr > optim.lr:
        yield "optim.min_lr", f"{optim.min_lr:g} is above lr ({optim.lr:g})"
    if optim.schedule == "constant" and optim.min_lr > 0:
        yield "optim.min_lr", "has no effect: a constant schedule stays at lr; leave it out or choose another schedule"
    if optim.warmup == "log" and optim.warmup_steps < 2:
        yield "optim.warmup", "log has no effect: there is no warm-up of 2 or more steps"
    if optim.schedule != "constant" and optim.warmup_steps < 2:
        yield "optim.warmup_steps", "DeepSpeed's decaying schedules warm up for at least 2 steps; give 2 or more"


def _check_zero(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of ZeRO, precision and gradient sums."""
    zero = recipe.zero
    if recipe.train.precision == "fp8":
        if zero.stage != "auto" and zero.stage not in FP8_STAGES:
            yield "zero.stage", f"fp8 runs at ZeRO stages 1 and 2; use one of them, or auto, instead of {zero.stage}"
        if recipe.train.compile is False:
            yield "train.compile", "fp8 without torch.compile is slower than bf16; use auto"
    if recipe.train.grad_accum_dtype == "fp32" and recipe.train.precision != "fp32":
        stages = set(FP32_GRADIENTS) if zero.stage == "auto" else {zero.stage} & FP32_GRADIENTS.keys()
        places = {"auto", *(place for stage in stages for place in FP32_GRADIENTS[stage])}
        if not stages or zero.offload_optimizer not in places:
            needs = "fp32 needs ZeRO stage 2 (offload_optimizer none or stream) or 3 (none or cpu)"
            yield "train.grad_accum_dtype", needs
    if zero.stage != "auto":
        yield from zero_problems(zero, zero.stage, zero.offload_optimizer, zero.offload_param)
    if "nvme" in (zero.offload_param, zero.offload_optimizer) and zero.nvme_path is None:
        yield "zero.nvme_path", "is required with nvme offload"


def zero_problems(zero: Zero, stage: int, offload_optimizer: str, offload_param: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for each ZeRO value, auto aside, that DeepSpeed refuses or ignores at `stage`."""
    if stage < 3 and offload_param in ("cpu", "nvme"):
        yield "zero.offload_param", f"needs stage 3: DeepSpeed ignores it at stage {stage}"
    if stage == 0 and offload_optimizer in ("stream", "cpu", "nvme"):
        yield "zero.offload_optimizer", "needs stage 1, 2 or 3"
    elif stage == 3 and offload_optimizer == "stream":
        yield "zero.offload_optimizer", "stream needs stage 1 or 2; at stage 3 give cpu"
    elif stage < 3 and offload_optimizer == "nvme":
        yield "zero.offload_optimizer", f"nvme needs stage 3: DeepSpeed takes it for cpu at stage {stage}"
    for name, is_on in (
        ("hpz_partition_size", zero.hpz_partition_size > 1),
        ("quantized_weights", zero.quantized_weights),
        ("quantized_gradients", zero.quantized_gradients),
    ):
        if stage < 3 and is_on:
            yield f"zero.{name}", f"ZeRO++ needs stage 3, the stage is {stage}"


def warmup_problems(optim: Optim, steps: int) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) if the warm-up is not shorter than a run of `steps` steps."""
    if optim.warmup_steps >= steps:
        yield "optim.warmup_steps", f"{optim.warmup_steps} is not less than the {steps:,} steps of the run"


def shorter_warmup(warmup: int, steps: int) -> tuple[int, str, str]:
    """Return (warm-up steps that fit a run of `steps`, their origin, a sentence); both texts are "" if unchanged.

    `warmup` is in steps too; the shorter one is a tenth of the run, at least 2. Runs under 3 steps change nothing.
    """
    if warmup < steps or steps < 3:
        return warmup, "", ""
    shorter = max(2, steps // 10)
    sentence = f"optim.warmup_steps: {shorter} instead of {warmup}, since the run has {steps:,} steps"
    return shorter, f"a tenth of the run, instead of {warmup}", sentence


def has_world(values: Mapping[str, Any]) -> bool:
    """Return whether a recipe's plain values have a synthetic source, which is made from the fictional world."""
    data = values.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    return isinstance(sources, list) and any(isinstance(source, dict) and "synthetic" in source for source in sources)


def leave_world_out(values: Mapping[str, Any], lines: dict[Location, str]) -> Iterator[str]:
    """Empty data.mixture and eval.suites in place if no source is synthetic; yield a sentence about each.

    Changes them as it is iterated. Keys that --set gives stay. `lines` maps each location to its origin and is changed
    too.
    """
    for place in (("data", "mixture"), ("eval", "suites")) if not has_world(values) else ():
        section = values.get(place[0])
        if isinstance(section, dict) and section.get(place[1]) and lines.get(place) != "--set":
            kept = section[place[1]] = _keep_given(section[place[1]], place, lines) or []
            for inside in [known for known, origin in lines.items() if known[:2] == place and origin != "--set"]:
                del lines[inside]
            lines[place] = "about sources that --set replaces"
            key = ".".join(place)
            if kept:
                yield f"{key}: only what --set gives is kept: the rest is about sources that --set replaces"
            else:
                yield f"{key}: left out, since it is about sources that --set replaces"


def _keep_given(value: Any, place: Location, lines: Mapping[Location, str]) -> Any:
    """Return what --set gives of the value at `place`: all of it, or the keys inside; None if nothing."""
    if lines.get(place) == "--set":
        return value
    inside = value.items() if isinstance(value, dict) else ()
    return {key: kept for key, part in inside if (kept := _keep_given(part, (*place, key), lines)) is not None} or None


def _check_post_training(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for suites, synthetic sources, other stages' sections, and post-training stages."""
    if recipe.eval.suites and not any(source.synthetic for source in recipe.data.sources):
        yield "eval.suites", "asks about the embedded corpus, which is no source here; set it to []"
    for index, source in enumerate(recipe.data.sources if recipe.stage != "grpo" else ()):
        made = source.synthetic
        if made is not None and made.about != "exam" and not (recipe.stage == "sft" and made.dialogues):
            key = f"data.sources[{index}].synthetic.about"
            yield key, f"{made.about} are for sft with dialogues: true, and for grpo"
    if recipe.eval.suites and recipe.stage == "reward":
        yield "eval.suites", "a reward model answers no questions; leave it out"
    for name in ("sft", "dpo", "reward", "grpo", *(("chat", "lora") if recipe.stage == "pretrain" else ())):
        if getattr(recipe, name) is not None and recipe.stage != name:
            yield name, f"has no effect in stage {recipe.stage}; leave it out"
    if recipe.stage == "pretrain":
        return
    yield from _check_documents_only(recipe.data)
    if recipe.train.precision == "fp8":
        yield "train.precision", "fp8 trains from scratch only; use auto"
    for name in ("pad_labels", "hide_eos"):
        if recipe.sft is not None and getattr(recipe.sft, name) and recipe.sft.packing:
            yield f"sft.{name}", "is about rows of one dialogue: set sft.packing to false"
    if recipe.sft is not None and recipe.sft.order == "sampler" and recipe.data.mixture:
        yield "sft.order", "sampler knows no weights; leave data.mixture out"
    yield from _check_preference(recipe)
    if recipe.lora is not None and recipe.lora.quantize == "nf4":
        yield from _check_nf4(recipe)


def _check_documents_only(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for each key that works on documents only, not at its default or `clean: none`."""
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


def _check_nf4(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for settings that do not work with weights in 4 bits, which are no parameters."""
    if recipe.zero.stage == 3:
        yield "zero.stage", "3 divides weights, which lora.quantize: nf4 keeps whole on every rank; use 1 or 2"
    if recipe.zero.offload_param not in ("auto", "none"):
        yield "zero.offload_param", "moves parameters, which weights in 4 bits are not; use none"
    if recipe.train.compile is True:
        yield "train.compile", "has not been tried with lora.quantize: nf4; use auto"
    if recipe.model.hidden_size % 64:
        yield "lora.quantize", f"nf4 has a scale for 64 weights; {recipe.model.hidden_size} is not a multiple of 64"


def _check_preference(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for the problems of the stages dpo, reward and grpo."""
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
    if (grpo.engine == "vllm-server") != (grpo.server is not None):
        yield "grpo.server", f"{'has no effect' if grpo.server else 'is required'} with engine {grpo.engine}"
    if grpo.form == "ppo" and recipe.lora is not None:
        yield "lora", "the value head of grpo.form: ppo is no adapter; leave it out"
    if grpo.form != "ppo" and grpo.ppo != type(grpo.ppo)():
        yield "grpo.ppo", f"has no effect with form {grpo.form}; leave it out"
    for place, term in enumerate(grpo.reward):
        for key, sentence in term_problems(term, grpo.max_new_tokens):
            yield f"grpo.reward[{place}].{key}", sentence


_OPTIONS = {"tolerance": ("number",), "pattern": ("format",), "most": ("length",), "path": ("function", "model")}


def term_problems(term: Term, most_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each option of a reward term that is missing, invalid or without effect.

    The key is relative to the term. `most_tokens` is the longest answer that the recipe allows (grpo.max_new_tokens).
    """
    for name, rules in {**_OPTIONS, "sha256": ("function",)}.items():
        if getattr(term, name) is not None and term.rule not in rules:
            yield name, f"has no effect with rule {term.rule}; it belongs to {' and '.join(rules)}"
    needed = next((name for name, rules in _OPTIONS.items() if term.rule in rules and name != "tolerance"), None)
    if needed is not None and getattr(term, needed) is None:
        yield needed, f"is required with rule {term.rule}"
    if not term.weight:
        yield "weight", "0 gives the term no effect; leave the term out"
    if term.most is not None and term.most >= most_tokens:
        yield "most", f"{term.most} is not below grpo.max_new_tokens ({most_tokens}): no answer would cost anything"
    if term.pattern is not None:
        try:
            re.compile(term.pattern)
        except re.error as error:
            yield "pattern", f"is no regular expression: {error}"


ABSENT = "–"


def recipe_differences(a: Recipe, b: Recipe) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value of a, value of b) wherever two recipes differ; credentials are not masked."""
    return differing_values(a.model_dump(mode="json"), b.model_dump(mode="json"))


def differing_values(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value of a, value of b) wherever two JSON values differ; ABSENT stands for a missing key.

    `key` is the dotted key of `a` and `b`. Lists that hold mappings and have equal lengths are compared item by item,
    other lists as a whole. 1 and 1.0 differ, but not within mappings or lists that are otherwise equal.
    """
    if a == b and type(a) is type(b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            inner = f"{key}.{name}" if key else str(name)
            yield from differing_values(a.get(name, ABSENT), b.get(name, ABSENT), inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, Mapping) for x in a):
        for index, (first, second) in enumerate(zip(a, b, strict=True)):
            yield from differing_values(first, second, f"{key}[{index}]")
    else:
        yield key, a, b


# What two recipes may say differently and still train the same, from words to how a run is carried out; each list holds
# the one before it, and a key stands for all below it.
WORDS = ("name", "description", "forked_from", "expect")
SAME_NUMBERS = (
    *(*WORDS, "hosts", "launch", "hardware", "checkpoint", "record", "self_qa"),
    *("data.cache_dir", "data.num_proc", "data.engine", "data.ray_address"),
)
SAME_LOSS = (  # but for rounding, and for what `incidents` does about trouble
    *(*SAME_NUMBERS, "env", "zero", "incidents"),
    *("train.cpu_ranks", "train.recompute", "train.compile", "train.deterministic"),
    *("train.grad_accum_dtype", "grpo.generation_rows"),
)
# A run that differs in nothing else trained the model that the recipe says: it may be the parent of the next stage.
SAME_MODEL = (*(key for key in SAME_LOSS if key != "incidents"), "eval", "batch.micro_batch")
# An unfinished run goes on when only these were changed; what precision: auto stood for is in its plan, compared too.
SAME_RUN = (*SAME_MODEL, "incidents", "train.precision")


def origin_of(key: str, origins: Mapping[str, str]) -> str | None:
    """Return where a key's value was written: the key's own origin, else that of a key inside or around it.

    None without any. `origins` has the origin of every written value by dotted key, as Loaded.origins.
    """
    if key in origins:
        return origins[key]
    for known, origin in origins.items():
        inner, outer = (known, key) if len(known) > len(key) else (key, known)
        if inner.startswith((f"{outer}.", f"{outer}[")):
            return origin
    return None


def is_within(key: str, keys: Sequence[str]) -> bool:
    """Return whether a dotted key is one of the keys or below one; an item of a list, a[0], is not below a."""
    return any(f"{key}.".startswith(f"{other}.") for other in keys)
