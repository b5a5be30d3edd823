"""Seeds of everything that draws, and train.deterministic: the same bits again from the same GPUs.

What is and is not deterministic, and the price, is in docs/determinism.md. The environment that must be there before
CUDA and NCCL start is set by the launcher (ops/launch_env.py).
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python, numpy, torch and CUDA. Weights and data order do not draw from these: they have their own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all CUDA devices too


def switch_on() -> None:
    """Refuse or replace every operation whose result depends on the order of threads."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs, shows bugs only
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    from torch._inductor import config

    if hasattr(config, "deterministic"):  # torch 2.10: no choice of kernels by stopwatch
        config.deterministic = True
