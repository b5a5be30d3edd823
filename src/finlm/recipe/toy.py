"""`train --toy`: any recipe at a size that a laptop trains in a minute, to see its settings run.

Kept: optimizer, schedule, clipping, ZeRO stage, recompute, packing, masks, seeds. Shrunk: model, batch, steps, corpus
(the synthetic one) and tokenizer. A stage after pretraining starts from the toy of the recipe it names, else from the
quickstart's. Losses mean nothing by themselves; `expect.toy` holds them to what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from finlm.recipe import parents
from finlm.recipe import recipe as recipes
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema_expect import Expect

STEPS = 10
TOLERANCE = 0.001  # rounding of another CPU moves these losses by 1e-5
_EVERY_STAGE = (
    "data.decontaminate=none",
    "data.num_proc=2",
    "zero.offload_optimizer=none",
    "zero.offload_param=none",
    f"train.steps={STEPS}",
    "train.tokens=null",
    "train.epochs=null",
    "optim.warmup_steps=2",
    "checkpoint.every_steps=null",
    "eval={every_steps: null, max_tokens_per_source: 2000}",
    "hardware={hosts: [{name: localhost, slots: 1, memory: 8GiB}]}",
    "train.cpu_ranks=1",
)
_PRETRAIN = (
    "model.init_from=null",
    "model.revision=null",
    "model.former_rope_theta=null",
    "model.hidden_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=null",
    "model.ffn_size=128",
    "model.vocab_size=auto",
    "tokenizer={vocab_size: 4096}",
    "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
    "batch={sequence_length: 64, tokens_per_step: 1024}",
)
_AFTER = {  # rows hold a question of the exam, or two
    "sft": (
        "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3, dialogues: true}}]",
        "batch={sequence_length: 256, tokens_per_step: 1024}",
    ),
    **dict.fromkeys(
        ("dpo", "reward", "grpo"),
        (
            "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
            "batch={sequence_length: 512, tokens_per_step: 4096}",
        ),
    ),
}
_TEXT = "{name: text, synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}"
_MIXED = (  # hybrid tuning stays one, whatever its weights
    _AFTER["sft"][0].replace("]", f", {_TEXT}]"),
    "data.mixture=[{weights: {'*_chat': 3, 'text-*': 1}}]",
)
_PARENT = "recipes/quickstart/pretrain.yaml"
_TEMPLATES = ("xuanyuan", "llm-code", "llama2")  # whose turns end with </s>, which the toy's tokenizer has


def load(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """A recipe at toy scale, with what it promises of that. Raises UserError."""
    written = recipes.load(path).recipe
    shrunk = (*_EVERY_STAGE, *(_PRETRAIN if written.stage == "pretrain" else _AFTER[written.stage]))
    if written.stage != "pretrain":
        init_from = written.model.init_from
        shrunk += (f"model={{init_from: {init_from if parents.is_recipe(init_from) else _PARENT}}}",)
        shrunk += _MIXED if written.data.mixture else ()
        if written.chat is not None and written.chat.template not in _TEMPLATES:
            shrunk += ("chat.template=xuanyuan",)
    toy = recipes.load(path, (*shrunk, *overrides), parent=load)
    curve = written.expect.toy if written.expect and not recipes.changes_training(overrides) else {}
    expect = Expect(hardware="cpu", loss=curve, tolerance=TOLERANCE) if curve else None
    return dataclasses.replace(toy, recipe=toy.recipe.model_copy(update={"expect": expect}))
