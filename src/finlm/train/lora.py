"""Low-rank adapters through peft: which layers get one, and the whole model again at the end."""

from __future__ import annotations

from typing import Any

import torch

from finlm.recipe.schema import Recipe


def config(recipe: Recipe) -> Any:
    """peft's settings of the recipe's adapters; None when every weight is trained."""
    if recipe.lora is None:
        return None
    from peft import LoraConfig

    settings = recipe.lora
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        task_type="CAUSAL_LM",
    )


def base(model: Any) -> Any:
    """The Llama inside the adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def merged(weights: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """The plain model's weights of a run with adapters: peft's names removed, alpha / rank * B A added in fp32.

    Raises RuntimeError for an adapter that was trained and has no place.
    """
    assert recipe.lora is not None
    scale = recipe.lora.alpha / recipe.lora.rank
    found, added = {}, set[str]()
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".weight").removesuffix(".base_layer")
        names = [f"{stem}.lora_{which}.default.weight" for which in "AB"]
        if all(part in weights for part in names):
            down, up = (weights[part].float() for part in names)
            weight = (weight.float() + scale * (up @ down)).to(weight.dtype)
            added.update(names)
        found[stem.removeprefix("base_model.model.") + ".weight"] = weight
    if lost := sorted(name for name in weights if ".lora_" in name and name not in added):
        raise RuntimeError(f"{len(lost)} trained adapters belong to no weight: {', '.join(lost[:3])}")
    return found
