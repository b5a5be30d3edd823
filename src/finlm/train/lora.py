"""Low-rank adapters through peft: which layers get one, and the whole model again at the end."""

from __future__ import annotations

from typing import Any

import torch

from finlm.base.errors import UserError
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


def quantization(recipe: Recipe) -> Any:
    """transformers' settings of 4-bit weights, or None. Raises UserError where bitsandbytes cannot run."""
    if recipe.lora is None or recipe.lora.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not (is_bitsandbytes_available() and torch.cuda.is_available()):
        raise UserError(
            "lora.quantize nf4 cannot run here",
            evidence=f"bitsandbytes installed: {is_bitsandbytes_available()}; GPU: {torch.cuda.is_available()}",
            fix="pip install bitsandbytes on a machine with a GPU, or set lora.quantize to none",
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )


def merged(weights: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """The plain model's weights of a run with adapters: peft's names removed, alpha / rank * B A added in fp32."""
    assert recipe.lora is not None
    scale = recipe.lora.alpha / recipe.lora.rank
    found = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".weight").removesuffix(".base_layer")
        down, up = (weights.get(f"{stem}.lora_{which}.default.weight") for which in "AB")
        if down is not None and up is not None:
            weight = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
        found[stem.removeprefix("base_model.model.") + ".weight"] = weight
    return found
