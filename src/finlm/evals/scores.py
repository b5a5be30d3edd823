"""Accuracy with its uncertainty.

Of all questions (micro) and of a subject: Wilson's score interval (1927), which stays within 0 and 1 and holds for 88
questions. Of the mean over subjects (macro, what the FinanceIQ table reports): 10,000 bootstrap draws within each
subject, the middle 95 %. Both say how much other questions of the same kind would change the number, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_Z = 1.959964  # 95 % of a normal distribution lies within so many standard deviations
_DRAWS, _SEED = 10_000, 0


class Count(NamedTuple):
    """Right answers among all."""

    correct: int
    total: int


def wilson(count: Count) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, n = count.correct / count.total, count.total
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def macro_interval(subjects: Mapping[str, Count]) -> tuple[float, float]:
    """The 95 % interval of the mean over subjects."""
    counts = np.array(list(subjects.values()))
    # Drawing a subject's 0s and 1s again with replacement is a binomial draw.
    draws = np.random.default_rng(_SEED).binomial(counts[:, 1], counts[:, 0] / counts[:, 1], size=(_DRAWS, len(counts)))
    low, high = np.quantile((draws / counts[:, 1]).mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def summary(subjects: Mapping[str, Count]) -> dict[str, Any]:
    """{"micro", "micro_interval", "macro", "macro_interval", "questions", "subjects"} of counts by subject."""
    whole = Count(sum(count.correct for count in subjects.values()), sum(count.total for count in subjects.values()))
    return {
        "questions": whole.total,
        "micro": whole.correct / whole.total,
        "micro_interval": wilson(whole),
        "macro": sum(count.correct / count.total for count in subjects.values()) / len(subjects),
        "macro_interval": macro_interval(subjects),
        "subjects": {
            name: {
                "correct": count.correct,
                "total": count.total,
                "accuracy": count.correct / count.total,
                "interval": wilson(count),
            }
            for name, count in subjects.items()
        },
    }
