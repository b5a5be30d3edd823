"""Intervals around accuracies."""

from __future__ import annotations

import numpy as np
import pytest

from finlm.evals import questions
from finlm.evals.questions import Count


def test_wilson_gives_the_published_example_and_stays_within_bounds() -> None:
    # Newcombe (1998, Statistics in Medicine 17:857), table I: 81 of 263 and 1 of 29.
    assert questions.wilson(Count(81, 263)) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert questions.wilson(Count(1, 29)) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert questions.wilson(Count(0, 20))[0] == 0.0 and questions.wilson(Count(20, 20))[1] == 1.0


def test_the_macro_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    truth, sizes, random = np.array([0.3, 0.5, 0.8]), np.array([60, 120, 90]), np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        drawn = random.binomial(sizes, truth)
        counts = zip("abc", drawn.tolist(), sizes.tolist(), strict=True)
        low, high = questions.macro_interval({name: Count(right, size) for name, right, size in counts})
        covered += low <= truth.mean() <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_intervals_of_few_answers_nearly_all_right_are_as_wide_as_they_say() -> None:
    random, macro, mean = np.random.default_rng(1), 0, 0
    for _ in range(100):
        counts = {name: Count(int(random.binomial(10, 0.95)), 10) for name in "abcd"}
        low, high = questions.macro_interval(counts)
        macro += low <= 0.95 <= high
    for _ in range(50):
        low, high = questions.bootstrap((random.random(30) < 0.97).astype(float).tolist())
        mean += low <= 0.97 <= high
    assert macro >= 94 and mean >= 45, "drawn again from what was seen, 80 and 30"
    assert questions.macro_interval({"a": Count(20, 20)}) == questions.wilson(Count(20, 20))
    low, high = questions.bootstrap([0.0, 0.25, 1.0] * 100)
    error = np.std([0.0, 0.25, 1.0]) / 300**0.5
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.03)


def test_macro_weighs_subjects_and_micro_questions() -> None:
    result = questions.Scores.of({"a": Count(10, 10), "b": Count(0, 30)})
    assert (result.macro, result.micro) == (0.5, 0.25)
    assert result.questions == 40 and result.subjects["b"].interval[0] == 0.0
