"""What the stages after pretraining change in memory: adapters, frozen weights, pairs of answers, a reference model."""

from __future__ import annotations

from typing import Any

from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

NF4_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256  # a weight in 4 bits; an 8-bit scale for 64, and a factor for 256 of those
PAIRED = ("dpo", "reward")  # a row is a chosen and a rejected answer


def layout(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """The fields of memory.Layout that follow from the recipe's stage.

    DPO needs no second model: the reference's log-probabilities are computed before training starts.
    """
    if recipe.stage == "pretrain":
        return {}
    grpo = recipe.grpo
    fields: dict[str, Any] = {
        "sequences": 2 if recipe.stage in PAIRED else 1,
        # With adapters the reference is the model without them.
        "has_reference": grpo is not None and grpo.beta > 0 and recipe.lora is None,
        "has_judge": grpo is not None and grpo.reward != "choice",
        "has_vocabulary_head": recipe.stage != "reward",
    }
    if recipe.lora is not None:
        fields["trainable"] = adapter_parameters(recipe, shape)
        if is_quantized(recipe):
            matrices = shape.matrix_parameters
            fields["weight_bytes"] = (NF4_BYTES * matrices + 2 * (shape.parameters - matrices)) / shape.parameters
    return fields


def is_quantized(recipe: Recipe) -> bool:
    """Whether frozen weights are kept in 4 bits, outside of what DeepSpeed partitions."""
    return recipe.lora is not None and recipe.lora.quantize == "nf4"


def frozen(shape: ModelShape, has_adapters: bool, quantized: bool) -> int:
    """Parameters that are not trained but that a checkpoint holds; weights in 4 bits come from the start again."""
    return has_adapters * (shape.parameters - quantized * shape.matrix_parameters)


def adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """Parameters of all adapters: rank x (inputs + outputs) of every targeted layer (arXiv 2106.09685)."""
    if recipe.lora is None:
        return 0
    width = shape.hidden // shape.heads * shape.kv_heads
    sides = {
        "q_proj": 2 * shape.hidden,
        "o_proj": 2 * shape.hidden,
        "k_proj": shape.hidden + width,
        "v_proj": shape.hidden + width,
        "gate_proj": shape.hidden + shape.ffn,
        "up_proj": shape.hidden + shape.ffn,
        "down_proj": shape.hidden + shape.ffn,
    }
    known = sum(sides.get(target, 0) for target in recipe.lora.targets)
    return shape.layers * recipe.lora.rank * known
