"""Build LoRA adapters with peft, merge them for export, and keep frozen weights in 4 bits.

QLoRA (arXiv 2305.14314) with torchao's NF4: blocks of 64 weights share a scale, which is itself kept in 8 bits. A
matrix is unpacked when it multiplies and again in the backward pass. It is an attribute, not a parameter: DeepSpeed
neither casts, partitions nor saves it, so a checkpoint holds the adapters, and the matrices come from model.init_from
again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (  # type: ignore[import-untyped]
    linear_nf4,
    to_nf4,
)
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finlm.base import runs
from finlm.plan.plan import Plan
from finlm.recipe import shape
from finlm.recipe.schema import Recipe
from finlm.recipe.settings import config_of
from finlm.recipe.shape import is_quantized
from finlm.train.model import causal_lm, kernels


def build(recipe: Recipe, plan: Plan, ds_config: Path, config: PreTrainedConfig, tokenizer: Path) -> Any:
    """Load the recipe's model, pack it in 4 bits if lora.quantize asks for it, swap its kernels, and return it.

    It has no adapters yet: peft adds them later. `config` is model_config(), `tokenizer` the tokenizer file of the
    shards. Raises UserError if the start's weights cannot be loaded or do not fit the recipe.
    """
    model = causal_lm.load(recipe, plan, ds_config, config, tokenizer)
    if is_quantized(recipe):
        quantize(model, plan.device)
    kernels.swap(model, plan, draws=recipe.lora is not None and recipe.lora.dropout > 0)
    return model


def lora_config(recipe: Recipe) -> Any:
    """Return peft's LoraConfig of the recipe's adapters; None when the recipe trains every weight."""
    if recipe.lora is None:
        return None
    from peft import LoraConfig

    settings = recipe.lora
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(shape.adapted(recipe, shape.of_config(config_of(recipe.model), 1))),
        task_type="CAUSAL_LM",
    )


def merge_adapters(weights: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the weights by the plain model's names, with alpha / rank * B A of each adapter added in fp32.

    `weights` has peft's names and stays as it is. Dtypes stay, and so do weights without adapters. The recipe must have
    lora:. Raises RuntimeError when an adapter belongs to no weight.
    """
    assert recipe.lora is not None
    scale = recipe.lora.alpha / recipe.lora.rank
    merged, added = {}, set[str]()
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        module, _, kind = name.rpartition(".")  # weight, bias, or a parameter of several experts
        stem = module.removesuffix(".base_layer")
        names = [f"{stem}.lora_{which}.default.weight" for which in "AB"]
        if kind == "weight" and all(part in weights for part in names):
            down, up = (weights[part].float() for part in names)
            weight = (weight.float() + scale * (up @ down)).to(weight.dtype)
            added.update(names)
        merged[f"{stem.removeprefix('base_model.model.')}.{kind}"] = weight
    if lost := sorted(name for name in weights if ".lora_" in name and name not in added):
        raise RuntimeError(f"{len(lost)} trained adapters belong to no weight: {', '.join(lost[:3])}")
    return merged


BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share a factor, at most


class Nf4Linear(torch.nn.Linear):
    """A frozen linear layer whose matrix is kept in 4 bits (NF4); peft puts adapters on it as on any other."""

    def __init__(self, matrix: torch.Tensor, bias: torch.nn.Parameter | None = None) -> None:
        """Pack `matrix` [outputs, inputs] in 4 bits; products are in its dtype. `bias` must be on its device."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.bias = bias  # type: ignore[assignment]
        self.weight = pack_nf4(matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., outputs] for x [..., inputs]."""
        product: torch.Tensor = linear_nf4(x, self.weight)
        return product if self.bias is None else product + self.bias


def pack_nf4(matrix: torch.Tensor) -> Any:
    """Return the matrix as torchao's NF4Tensor, on its device.

    Fails unless its number of elements is a multiple of 64.
    """
    blocks = matrix.numel() // BLOCK
    return to_nf4(matrix.detach().contiguous(), BLOCK, math.gcd(blocks, SCALES))


def quantize(model: Any, device: str) -> None:
    """Replace every linear layer of the decoder in place by an Nf4Linear on `device`, layer after layer."""
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, child = name.rpartition(".")
                bias = None if module.bias is None else torch.nn.Parameter(module.bias.detach().to(device))
                setattr(layer.get_submodule(parent), child, Nf4Linear(module.weight.to(device), bias))


def load_matrices(recipe: Recipe, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Load init_from, pack the linear weights of its decoder as quantize does, and return {name: unpacked matrix}.

    These are the weights that the adapters were trained on, on the CPU in `dtype`; a GPU may round a scale that lies
    between two values the other way. Raises UserError when model.init_from is gone, damaged or lacks weights.
    """
    runs.prove_model(Path(str(recipe.model.init_from)))
    base = causal_lm.load_weights(
        AutoModelForCausalLM,
        recipe.model.init_from,
        "put the model of model.init_from back: under lora.quantize a checkpoint holds the adapters only",
        config=causal_lm.start_config(str(recipe.model.init_from), recipe.model.revision),
        revision=recipe.model.revision,
        dtype=dtype,
        use_safetensors=True,
    )
    return {
        f"{prefix}.weight": pack_nf4(module.weight).get_original_weight()
        for prefix, module in base.named_modules()
        if prefix.startswith("model.layers.") and isinstance(module, torch.nn.Linear)
    }
