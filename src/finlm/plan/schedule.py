"""The learning rate of every optimizer step, exactly as DeepSpeed's schedulers give it to the optimizer.

DeepSpeed steps the optimizer first and the scheduler after it (engine.py, _take_model_step), and a new scheduler stands
at iteration -1: optimizer step s runs with the rate of iteration s - 1. So the first TWO steps have the rate of the
ramp's start (0, or min_lr for `linear`), and the last step is one short of the schedule's end. Warmup is at least 2.

An overflow under fp16 skips both the optimizer and the scheduler; lr_at counts applied steps.
"""

from __future__ import annotations

import math

from finlm.recipe.schema import Optim


def lr_at(optim: Optim, steps: int, step: int) -> float:
    """The learning rate of optimizer step `step` (0-based) in a run of `steps`."""
    steps = optim.decay_steps or steps
    if optim.schedule == "constant" and optim.warmup_steps == 0:
        return optim.lr
    warmup = max(2, optim.warmup_steps)
    iteration = step - 1
    ramp = max(0, iteration) / warmup
    if optim.schedule == "constant":
        return optim.lr * min(1.0, ramp)
    if optim.schedule == "linear":
        # WarmupDecayLR knows one minimum: it starts the ramp and ends the decay.
        left = max(0.0, (steps - iteration) / max(1.0, steps - warmup))
        return optim.min_lr + (optim.lr - optim.min_lr) * (ramp if iteration < warmup else left)
    if iteration < warmup:
        return optim.lr * ramp
    floor = optim.min_lr / optim.lr
    progress = min(1.0, (iteration - warmup + 1) / max(1, steps - warmup))
    return optim.lr * max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2)
