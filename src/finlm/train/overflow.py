"""Which gradients are not finite, by name; and the end of fp16's loss scale, told before it comes.

The names cost a reduction a parameter, so they are watched only after a first incident, or when the loss scale is
within two halvings of its minimum. DeepSpeed raises "Current loss scale already at minimum" there; here the run ends
with the same words, the tensor and the advice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import distributed

from finlm.recipe.schema import Recipe
from finlm.train.incidents import Incident

NEAR = 4.0  # times the minimum


class Gradients:
    """Names of the gradients that were not finite since the last question."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._parameters = dict(model.named_parameters())
        self._flags = torch.zeros(len(self._parameters), dtype=torch.uint8, device=device)
        self.is_watching = False

    def watch(self) -> None:
        """Look at every gradient from now on."""
        if not self.is_watching:
            self.is_watching = True
            for number, parameter in enumerate(self._parameters.values()):
                parameter.register_hook(partial(self._look, number, parameter))  # type: ignore[no-untyped-call]

    def _look(self, number: int, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        # SummingLinear has no gradient of its own in the middle micro-steps: it is in the sum already.
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            self._flags[number] |= ~gradient.isfinite().all()

    def words(self) -> str:
        """The gradients of all ranks, for a message; every rank must ask. Begins to watch."""
        if not self.is_watching:
            self.watch()
            return ""
        distributed.all_reduce(self._flags, op=distributed.ReduceOp.MAX)
        names = [name for name, flag in zip(self._parameters, self._flags.tolist(), strict=True) if flag]
        self._flags.zero_()
        # Backward runs from the loss to the embedding: the last in the model's order is where it began.
        return f"; it began in the gradient of {names[-1]} ({len(names)} of {len(self._parameters)})" if names else ""


class LossScale:
    """fp16's dynamic loss scale; for other precisions, and a fixed scale, there is nothing to say."""

    def __init__(self, engine: Any, recipe: Recipe, gradients: Gradients) -> None:
        self._engine, self._recipe, self._gradients = engine, recipe, gradients
        self._is_last = False
        self.remember()

    @property
    def _scaler(self) -> Any:
        """Asked for every time: loading a checkpoint puts another object in its place."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def judge(self, is_applied: bool) -> Incident | None:
        """What a skipped step means; None when it was applied, or where DeepSpeed scales no loss."""
        scaler = self._scaler
        if scaler is None:
            return None
        was_last, scale, least = self._is_last, scaler.cur_scale, scaler.min_scale
        self.remember()
        if is_applied:
            return None
        if was_last:
            return Incident(
                "Current loss scale already at minimum",
                f"fp16 overflows at scale {scale:g}{self._gradients.words()}; {self._advice()}",
                "stop",
                blame=True,
            )
        detail = f"gradient overflow; the loss scale is now {scale:g}"
        if scale > NEAR * least:
            return Incident("step skipped", detail)
        near = f", its minimum is {least:g}: at the next overflow there the run ends{self._gradients.words()}"
        return Incident("step skipped", f"{detail}{near}; {self._advice()}")

    def remember(self) -> None:
        """Whether the next overflow is the last; to be called after a checkpoint is loaded, too."""
        scaler = self._scaler
        if scaler is None:
            return
        scaler.raise_error_at_min_scale = False  # judge() ends the run instead
        is_spent = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
        self._is_last = is_spent and scaler.cur_scale == scaler.min_scale
        if scaler.cur_scale <= NEAR * scaler.min_scale:
            self._gradients.watch()

    def _advice(self) -> str:
        optim, batch = self._recipe.optim, self._recipe.batch
        return (
            f"lower optim.lr ({optim.lr:g}, try {optim.lr / 3:.2g}), lengthen optim.warmup_steps "
            f"({optim.warmup_steps}) or raise batch.tokens_per_step ({batch.tokens_per_step:,}); bf16 needs none"
        )
