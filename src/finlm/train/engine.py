"""The DeepSpeed engine of a run, with what its configuration cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import distributed
from transformers import LlamaForCausalLM

from finlm.plan.buckets import ON_HOST, grouped, is_contiguous, optimizer_group
from finlm.plan.plan import Plan
from finlm.train import accumulate
from finlm.train.one_pass import OnePassZero
from finlm.train.streamed import StreamedOnePassZero, StreamedZero

# By (zero.offload_optimizer, whether the plan compiles): classes in the place of DeepSpeed's for stages 1 and 2.
OPTIMIZERS = {("none", True): OnePassZero, ("stream", True): StreamedOnePassZero, ("stream", False): StreamedZero}


def initialize(model: LlamaForCausalLM, plan: Plan, ds_config: dict[str, Any]) -> Any:
    """The engine around the model. The process group exists."""
    with own_optimizer(plan):
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=parameter_groups(model, plan), config=ds_config
        )
    tune(optimizer, plan)
    accumulate.swap(model, model.model.layers, plan, engine.is_gradient_accumulation_boundary)
    return engine


@contextmanager
def own_optimizer(plan: Plan) -> Iterator[None]:
    """Within it deepspeed.initialize makes our optimizer of stages 1 and 2, where the plan has one."""
    plain = deepspeed.runtime.engine.DeepSpeedZeroOptimizer
    deepspeed.runtime.engine.DeepSpeedZeroOptimizer = OPTIMIZERS.get((plan.offload_optimizer, plan.compiled), plain)
    try:
        yield
    finally:
        deepspeed.runtime.engine.DeepSpeedZeroOptimizer = plain


def tune(optimizer: Any, plan: Plan) -> None:
    """What makes DeepSpeed's optimizer faster, or stop at what is not finite; before the first step."""
    if plan.zero_stage == 0 and plan.precision == "fp32":
        skip_non_finite(optimizer)
    if plan.zero_stage in (1, 2) and plan.offload_optimizer not in ON_HOST:
        optimizer.get_grad_norm_direct = partial(global_norm, optimizer)
        # The norm tells whether a gradient is not finite. Looking at each of them before takes 12 ms at 6.4 B.
        optimizer.has_overflow = lambda *_, **__: False
        if not is_contiguous(plan.zero_stage, plan.world_size, plan.offload_optimizer):
            # The average over one rank: copying all gradients into buckets and back for it takes 18 ms at 6.4 B.
            optimizer.buffered_reduce_fallback = lambda *_, **__: None


def skip_non_finite(optimizer: torch.optim.Optimizer) -> None:
    """Let a plain optimizer leave the weights alone when a gradient is not finite, as ZeRO's and the 16-bit ones do.

    The gradients are averaged over the ranks by then, so all ranks decide alike; the engine asks for `overflow`.
    """
    take_step = optimizer.step

    def step(*arguments: Any, **named: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm(gradients)
        optimizer.overflow = not bool(torch.stack(norms).isfinite().all())  # type: ignore[attr-defined]
        if not optimizer.overflow:  # type: ignore[attr-defined]
            take_step(*arguments, **named)

    optimizer.step = step  # type: ignore[assignment,method-assign]


def parameter_groups(model: torch.nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """The trained parameters in groups of at most optimizer_group() elements (or one parameter); one group at stage 3.

    DeepSpeed's stages 1 and 2 step group by group and hold the fp32 gradient of one group at a time; in one group it
    would be of all parameters, and set the peak of the whole step.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if plan.zero_stage not in (1, 2):
        return [{"params": trained}]
    most = optimizer_group(plan.offload_optimizer, plan.world_size)
    return [{"params": group} for group in grouped(trained, most, torch.nn.Parameter.numel)]


def global_norm(optimizer: Any, gradients: list[torch.Tensor], *_: Any) -> torch.Tensor:
    """2-norm of a group's gradients over all ranks, fp32; -1 when it is not finite, which is DeepSpeed's sign for it.

    DeepSpeed 0.19.8 copies every gradient to fp64 first: 41 ms of XuanYuan-6B's 180 ms optimizer step on one H200. The
    reduction in fp32, straight from the 16-bit gradients, takes 4.
    """
    own = [part for part in gradients if not getattr(part, "_zero_padding", False)]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in own]
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    distributed.all_reduce(squares, group=optimizer.dp_process_group)
    norm = squares.sqrt()
    return torch.where(norm.isfinite(), norm, -1.0)
