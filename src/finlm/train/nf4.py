"""QLoRA (arXiv 2305.14314): the decoder's frozen matrices in 4 bits, under adapters that are trained in 16 or 32.

torchao's NF4: blocks of 64 weights share a scale, which is itself kept in 8 bits. A matrix is made whole when it
multiplies and again in the backward pass. It is an attribute, not a parameter: DeepSpeed neither casts, partitions nor
saves it, so a checkpoint holds the adapters, and the matrices come from model.init_from again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (  # type: ignore[import-untyped]
    linear_nf4,
    to_nf4,
)
from transformers import LlamaForCausalLM

from finlm.recipe.schema import Recipe
from finlm.train import weights

BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share a factor, at most


class Nf4Linear(torch.nn.Linear):
    """A frozen linear layer without bias whose matrix is kept in 4 bits; peft puts adapters on it as on any other."""

    def __init__(self, matrix: torch.Tensor) -> None:
        """matrix: [outputs, inputs], in the dtype that it multiplies in."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.bias = None  # type: ignore[assignment]
        self.weight = packed(matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs]; out: [..., outputs]."""
        return linear_nf4(x, self.weight)  # type: ignore[no-any-return]


def packed(matrix: torch.Tensor) -> Any:
    """The matrix as torchao's NF4Tensor, on its device. Its number of elements is a multiple of 64."""
    blocks = matrix.numel() // BLOCK
    return to_nf4(matrix.detach().contiguous(), BLOCK, math.gcd(blocks, SCALES))


def quantize(model: LlamaForCausalLM, device: str) -> None:
    """Every linear layer of the decoder becomes an Nf4Linear on the device, one after the other."""
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(layer.get_submodule(parent), own, Nf4Linear(module.weight.to(device)))


def matrices(recipe: Recipe, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """{name: matrix} of all that quantize would pack, rounded as it rounds: what the adapters were trained beside.

    Rounded on the CPU; a GPU may round a scale that lies between two of them the other way. Raises UserError when
    model.init_from is gone or lacks weights.
    """
    base = weights.load(
        LlamaForCausalLM,
        recipe.model.init_from,
        "put the model of model.init_from back: under lora.quantize a checkpoint holds the adapters only",
        revision=recipe.model.revision,
        dtype=dtype,
        use_safetensors=True,
    )
    return {
        f"{prefix}.weight": packed(module.weight).get_original_weight()
        for prefix, module in base.named_modules()
        if prefix.startswith("model.layers.") and isinstance(module, torch.nn.Linear)
    }
