"""Checks of a recipe that need more than one key, before any hardware is known.

Each yields (dotted key, sentence) so that the loader prints it at the key's line beside the other mistakes. What
depends on the cluster (bf16 on a V100, hpZ and the world size) is the planner's and config.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from finlm.recipe import rules_post
from finlm.recipe.schema import Optim, Recipe, Zero

ROWS_OF_ONE_LENGTH = ("pretrain", "sft")  # the other stages' batches are as long as their longest row
FP32_GRADIENTS = {2: ("none", "stream"), 3: ("none", "cpu")}  # ZeRO stage: where its optimizer may be for such sums
FP8_STAGES = (1, 2)  # torchao casts whole weights; ZeRO-3 would gather them in bf16 all the same


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every inconsistency of the recipe."""
    yield from _model(recipe)
    yield from _tokenizer(recipe)
    yield from _data(recipe)
    yield from _length(recipe)
    yield from _zero(recipe)
    yield from rules_post.problems(recipe)


def _model(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model = recipe.model
    if model.hidden_size % model.heads:
        yield "model.heads", f"{model.heads} heads do not divide hidden_size {model.hidden_size}"
    elif model.hidden_size // model.heads % 2:
        yield "model.heads", f"head size {model.hidden_size // model.heads} is odd; RoPE rotates pairs"
    if model.former_rope_theta is not None and (model.init_from is None or recipe.stage != "pretrain"):
        yield "model.former_rope_theta", "is about pretraining that goes on from model.init_from; leave it out"
    if model.kv_heads is not None and model.heads % model.kv_heads:
        yield "model.kv_heads", f"{model.kv_heads} does not divide heads ({model.heads})"


def _tokenizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    tokenizer, rows = recipe.tokenizer, recipe.model.vocab_size
    if (tokenizer.path is None) == (tokenizer.vocab_size is None):
        yield "tokenizer", "give either path (an existing tokenizer.model) or vocab_size (to train one)"
    if tokenizer.extend_to is not None and tokenizer.path is None:
        yield "tokenizer.extend_to", "needs path, the tokenizer.model to extend"
    if tokenizer.pieces is not None and rows != "auto" and rows < tokenizer.pieces:
        yield "model.vocab_size", f"{rows} rows are fewer than the tokenizer's {tokenizer.pieces} pieces"
    weights = tokenizer.sample_weights
    if weights is not None and tokenizer.pieces is None:
        yield "tokenizer.sample_weights", "has no effect: an existing tokenizer is not trained; leave it out"
    elif weights is not None and not any(weights.values()):
        yield "tokenizer.sample_weights", "gives no source a weight above 0"


def _data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for index, source in enumerate(recipe.data.sources):
        if sum(where is not None for where in (source.path, source.dataset, source.synthetic)) != 1:
            yield f"data.sources[{index}]", "give either path or dataset or synthetic"
        if source.dataset is None and (source.revision or source.files):
            yield f"data.sources[{index}]", "revision and files belong to a dataset, which is not given"
        if source.sha256 is not None and source.path is not None and set(source.path) & set("*?["):
            yield f"data.sources[{index}].sha256", f"belongs to one file, but path is a glob ({source.path})"
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
        yield (
            "data.token_dtype",
            f"uint16 holds ids up to 65,535, the vocabulary has {vocabulary:,}; use auto or uint32",
        )


def _length(recipe: Recipe) -> Iterator[tuple[str, str]]:
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
    if optim.min_lr > optim.lr:
        yield "optim.min_lr", f"{optim.min_lr:g} is above lr ({optim.lr:g})"
    if optim.schedule == "constant" and optim.min_lr > 0:
        yield "optim.min_lr", "has no effect: a constant schedule stays at lr; leave it out or choose another schedule"
    if optim.schedule != "constant" and optim.warmup_steps < 2:
        yield "optim.warmup_steps", "DeepSpeed's decaying schedules warm up for at least 2 steps; give 2 or more"


def _zero(recipe: Recipe) -> Iterator[tuple[str, str]]:
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
            yield (
                "train.grad_accum_dtype",
                "fp32 needs ZeRO stage 2 (offload_optimizer none or stream) or 3 (none or cpu)",
            )
    if zero.stage != "auto":
        yield from zero_problems(zero, zero.stage, zero.offload_optimizer, zero.offload_param)
    if "nvme" in (zero.offload_param, zero.offload_optimizer) and zero.nvme_path is None:
        yield "zero.nvme_path", "is required with nvme offload"


def zero_problems(zero: Zero, stage: int, offload_optimizer: str, offload_param: str) -> Iterator[tuple[str, str]]:
    """What DeepSpeed refuses or ignores at a ZeRO stage; also asked about the stage and offload the planner chose."""
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
    """A ramp as long as the run; also asked about the number of steps the planner computed."""
    if optim.warmup_steps >= steps:
        yield "optim.warmup_steps", f"{optim.warmup_steps} is not less than the {steps:,} steps of the run"
