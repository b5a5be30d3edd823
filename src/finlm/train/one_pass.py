"""AdamW of ZeRO-1 and 2 in one compiled pass over master weights, moments and the 16-bit gradients.

DeepSpeed copies a group's gradients to fp32, scales them for clipping, and only then calls torch's fused AdamW. The
formula is torch's, computed in fp32 as well: 38 bytes a parameter pass through memory instead of 54.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

ALIGNED = 64  # elements: groups of a multiple of them are read in wide words


def adamw(
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    numbers: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    l2: float,
) -> None:
    """One step, in place. numbers: the gradient's factor, what decay leaves of a weight, the rate, the root's divisor.

    l2: weight decay of plain Adam, which adds it to the gradient.
    """
    factor, keep, rate, root = numbers.unbind()
    scaled = gradient.float() * factor + l2 * master
    mean.add_((1 - beta1) * (scaled - mean))
    square.copy_(beta2 * square + (1 - beta2) * scaled * scaled)
    master.copy_(keep * master - rate * mean / (square.sqrt() / root + eps))


class OnePassZero(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer of stages 1 and 2; the fp32 gradient it works with is one number in a group's shape."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._adamw: Any = torch.compile(adamw)
        super().__init__(*arguments, **named)

    def _get_preflattened_grad_partition(self, group_no: int) -> torch.Tensor:
        """Keep the gradients of a group for its step, and give DeepSpeed something to copy and to scale."""
        flat = super()._get_preflattened_grad_partition(group_no)
        self._gradient = self.flatten(self.averaged_gradients[group_no]) if flat is None else flat
        return torch.zeros(1, device=self.device).expand(int(self.partition_size[group_no]))

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: torch.Tensor) -> None:
        """Keep the factor of the gradients for the step. DeepSpeed's asks the GPU in every group whether it is finite.

        total_norm: finite, or the step would have been left out; that of the scaled loss.
        """
        excess = torch.ones_like(total_norm, dtype=torch.float64)
        if self.clip_grad > 0:
            excess = ((total_norm.double() / self.loss_scale + 1e-6) / self.clip_grad).clamp(min=1)
        self._factor = (1 / (excess * self.loss_scale)).to(self.device, non_blocking=True)

    def _optimizer_step(self, group_no: int) -> None:
        group, master = self.optimizer.param_groups[group_no], self.single_partition_of_fp32_groups[group_no]
        state = self.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), device=self.device)
            state |= {name: torch.zeros_like(master.data) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = state["step"].to(self.device) + 1
        (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"].double()
        decay, l2 = (group["weight_decay"], 0.0) if group["decoupled_weight_decay"] else (0.0, group["weight_decay"])
        keep = torch.full_like(step, 1 - lr * decay)
        numbers = [self._factor, keep, lr / (1 - beta1**step), (1 - beta2**step).sqrt()]
        size = len(self._gradient)
        flat = [tensor[:size] for tensor in (master.data, state["exp_avg"], state["exp_avg_sq"], self._gradient)]
        if size % ALIGNED == 0:
            flat = [tensor.view(-1, ALIGNED) for tensor in flat]
        for tensor in flat:  # groups differ in size; compiled with dynamic=True, the betas would be variables too
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        tensors = (*flat, torch.stack(numbers).float())
        self._adamw(*tensors, beta1=beta1, beta2=beta2, eps=group["eps"], l2=l2)
        del self._gradient
        self._lazy_init_hp_params_optimizer_state()
