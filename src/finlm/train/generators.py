"""The random generators of a rank (python, numpy, torch, CUDA) as a state of tensors and plain values.

Pretraining draws from none of them: rows come from (seed, step). Adapters with dropout do, and are resumed to the bit
because the states are saved.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """What restore() takes back; loads with weights_only."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore(saved: dict[str, Any]) -> None:
    """Set all generators to a saved state."""
    random.setstate(saved["python"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
