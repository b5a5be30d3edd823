"""Stretches of numbers laid end to end, as arrays: what a loop over documents or pieces would count one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def within(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on: the place of each element in its stretch."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts), dtype=np.int64)
