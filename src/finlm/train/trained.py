"""A finished checkpoint as a plain Hugging Face model on the CPU, for export and evaluation.

Weights come from the fp32 master copy where ZeRO keeps one and are cast to the run's precision: what the last training
step left, not a second rounding of it. Loads a run's own checkpoints only; DeepSpeed's files are pickles.
"""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import LlamaForCausalLM

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, open_run
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.train.model import DTYPES, VOCABULARY, llama_config


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model with what it was made from."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    shards: Shards
    model: LlamaForCausalLM


def load(checkpoint: Path) -> Trained:
    """The model of runs/<run>/checkpoints/step-N, in the run's precision. Raises UserError when it is not complete."""
    if not (checkpoint / "manifest.json").exists():
        found = sorted(path.parent.name for path in checkpoint.parent.glob("step-*/manifest.json"))
        raise UserError(
            f"{checkpoint} is not a complete checkpoint",
            evidence=f"no manifest.json in it; complete ones beside it: {', '.join(found) or 'none'}",
            fix="give runs/<run>/checkpoints/step-N",
        )
    run = open_run(checkpoint.resolve().parent.parent)
    plan, recipe = Plan.read(run.plan), recipes.load(run.recipe).recipe
    shards = Shards(Path(files.read_json(run.manifest)["shards"]["path"]))
    config = llama_config(recipe, plan, shards.bos_id, shards.eos_id)
    config.use_cache = True  # off in training, needed to generate
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=DTYPES[plan.precision])
    tied = recipe.model.tie_embeddings
    weights = _weights(checkpoint, plan)
    for name in VOCABULARY:  # without the rows that padded it
        weights[name] = weights[name][: plan.vocab_size]
    model.load_state_dict({k: v for k, v in weights.items() if not (tied and k == "lm_head.weight")}, strict=not tied)
    return Trained(run, recipe, plan, shards, model.eval())


def _weights(checkpoint: Path, plan: Plan) -> dict[str, torch.Tensor]:
    if plan.zero_stage == 0:
        # Holds numpy scalars and the client state, so weights_only would refuse it; the file is our own run's.
        state = torch.load(checkpoint / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        return state["module"]  # type: ignore[no-any-return]
    weights: dict[str, torch.Tensor]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints every step it takes
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    return weights
