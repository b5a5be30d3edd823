"""Weight gradients of linear layers added up by the matrix product itself.

Autograd computes a micro-batch's gradient of a weight and then adds it to the sum of those before: the sum is read and
written once more than the product needs, 1.7 % of a step of XuanYuan-6B. Between the first micro-batch of a step, which
begins the sums, and the last, whose gradients DeepSpeed waits for, the product adds to the sum here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from finlm.plan.plan import Plan
from finlm.train.products import add_product


class _Linear(torch.autograd.Function):
    """x [..., n] times weight [m, n] transposed, whose backward pass adds the weight's gradient to `total`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, total)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        x, weight, total = ctx.saved_tensors
        add_product(total, upstream[0].flatten(0, -2).t(), x.flatten(0, -2))
        return upstream[0] @ weight, None, None


class SummingLinear(torch.nn.Linear):
    """A linear layer without bias."""

    total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs]."""
        if self.total is None:
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.total)  # type: ignore[no-any-return,no-untyped-call]


def swap(model: torch.nn.Module, layers: torch.nn.Module, plan: Plan, is_last: Callable[[], bool]) -> None:
    """Let the linear layers of a compiled model under ZeRO-1 add up their gradients; the engine exists.

    is_last: whether the micro-step that the model's forward pass begins ends the step.
    """
    if not plan.compiled or plan.zero_stage != 1 or plan.gradient_accumulation_steps < 3:
        return
    found: list[Any] = [one for one in layers.modules() if type(one) is torch.nn.Linear and one.bias is None]
    for module in found:
        module.__class__ = SummingLinear

    def choose(*_: Any) -> None:
        sums = torch.is_grad_enabled() and not is_last()
        for module in found:
            module.total = module.weight.grad if sums else None  # none yet in the first micro-step

    model.register_forward_pre_hook(choose)
