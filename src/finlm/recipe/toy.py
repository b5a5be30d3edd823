"""`train --toy`: any pretraining recipe at a size that a laptop trains in a minute, to see its settings run.

Kept: optimizer, schedule, clipping, ZeRO stage, recompute, packing, seeds. Shrunk: model, batch, steps, corpus
(the synthetic one) and tokenizer. Losses mean nothing by themselves; `expect.toy` holds them to what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from finlm.base.errors import UserError
from finlm.recipe import recipe as recipes
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema_expect import Expect

STEPS = 10
TOLERANCE = 0.001  # rounding of another CPU moves these losses by 1e-5
OVERRIDES = (
    "model.init_from=null",
    "model.revision=null",
    "model.hidden_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=null",
    "model.ffn_size=128",
    "model.vocab_size=auto",
    "tokenizer={vocab_size: 4096}",
    "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
    "data.decontaminate=none",
    "data.num_proc=2",
    "batch={sequence_length: 64, tokens_per_step: 1024}",
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


def load(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """A recipe at toy scale, with what it promises of that. Raises UserError for a stage after pretraining."""
    written = recipes.load(path).recipe
    if written.stage != "pretrain":
        raise UserError(
            f"--toy is for pretraining, {path} is of stage {written.stage}",
            fix="train it from a toy of the model it starts from: --set model.init_from=RUN_OF_THE_TOY/export",
        )
    toy = recipes.load(path, (*OVERRIDES, *overrides))
    curve = written.expect.toy if written.expect and not recipes.changes_training(overrides) else {}
    expect = Expect(hardware="cpu", loss=curve, tolerance=TOLERANCE) if curve else None
    return dataclasses.replace(toy, recipe=toy.recipe.model_copy(update={"expect": expect}))
