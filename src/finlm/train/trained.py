"""A finished checkpoint as a plain Hugging Face model on the CPU, for export and evaluation.

Weights come from the fp32 master copy where ZeRO keeps one and are cast to the run's precision: what the last training
step left, not a second rounding of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from transformers.initialization import no_init_weights

from finlm.base.checkpoints import Manifest
from finlm.base.rundir import RunDir, complete_checkpoint, open_run
from finlm.data.shards import Shards
from finlm.plan.plan import Plan
from finlm.plan.stages import is_quantized
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.train import checkpoint_layout, checkpoint_store, lora
from finlm.train.model import DTYPES, VOCABULARY, llama_config, padding_id


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model with what it was made from."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    shards: Shards
    model: LlamaForCausalLM | LlamaForSequenceClassification
    checkpoint: Path


def load(checkpoint: Path) -> Trained:
    """The model of runs/<run>/checkpoints/step-N, or of the newest of runs/<run>, in the run's precision.

    Adapters are merged into its weights. Raises UserError when the checkpoint is not complete.
    """
    checkpoint = complete_checkpoint(checkpoint)
    run = open_run(checkpoint.resolve().parent.parent)
    plan, recipe = Plan.read(run.plan), recipes.load(run.recipe).recipe
    shards = Shards(run.shards)
    config = llama_config(recipe, plan, shards.bos_id, shards.eos_id)
    config.use_cache = True  # off in training, needed to generate
    kind = LlamaForCausalLM
    if recipe.stage == "reward":
        kind, config.num_labels, config.pad_token_id = LlamaForSequenceClassification, 1, padding_id(shards)
    with no_init_weights():  # drawing weights that are read next takes minutes of one core for 6B
        model = kind._from_config(config, attn_implementation="sdpa", dtype=DTYPES[plan.precision])
    weights = _weights(checkpoint, plan)
    if recipe.lora is not None:
        if is_quantized(recipe):
            from finlm.train import nf4  # loads torchao

            matrices = nf4.matrices(recipe, DTYPES[plan.precision])
            weights |= {f"base_model.model.{name}": matrix for name, matrix in matrices.items()}
        weights = lora.merged(weights, recipe)
    for name in VOCABULARY:  # without the rows that padded it
        if name in weights:
            weights[name] = weights[name][: plan.vocab_size]
    has_own_head = not recipe.model.tie_embeddings or recipe.stage == "reward"
    if not has_own_head:
        weights.pop("lm_head.weight", None)
    missing, unknown = model.load_state_dict(weights, strict=False)
    if missing != ([] if has_own_head else ["lm_head.weight"]) or unknown:
        raise RuntimeError(f"{checkpoint} is not of this model: without {missing}, with {unknown}")
    model.tie_weights()
    if recipe.stage != "reward":
        # An assistant ends its turn with the template's token, a base model a document with its own.
        ends = list(dict.fromkeys((shards.manifest.get("end_of_turn_id", shards.eos_id), shards.eos_id)))
        model.generation_config.eos_token_id = ends if len(ends) > 1 else shards.eos_id
    return Trained(run, recipe, plan, shards, model.eval(), checkpoint)


def _weights(checkpoint: Path, plan: Plan) -> dict[str, torch.Tensor]:
    if plan.zero_stage == 0:
        module: dict[str, torch.Tensor] = checkpoint_store.load(checkpoint / "mp_rank_00_model_states.pt")["module"]
        return module
    return checkpoint_layout.Shards(checkpoint, Manifest.read(checkpoint)).weights()
