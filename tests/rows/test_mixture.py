"""The order of a run with weights: exact shares, every row in its turn, the same whoever asks."""

from __future__ import annotations

import numpy as np
import pytest

from finlm import prepare
from finlm.base.errors import UserError
from finlm.recipe.schema_data import Stage
from finlm.rows import packing
from finlm.rows.shards import Order

RANGES = {"fin_news": range(0, 300), "fin_laws": range(300, 400), "web": range(400, 5000)}


def of(ranges: dict[str, range], ids: np.ndarray) -> dict[str, int]:
    return {name: int(np.isin(ids, np.array(part)).sum()) for name, part in ranges.items()}


def test_without_stages_it_is_the_order_of_all_rows() -> None:
    order = packing.order(RANGES, (), 10_000, 64, seed=7)
    positions = np.arange(0, 10_000, 7)
    assert np.array_equal(order[positions], Order(5000, 7)[positions])


def test_stages_have_their_weights_exactly_and_finance_rises() -> None:
    stages = (Stage(weights={"fin_*": 1, "web": 9}, share=0.5), Stage(weights={"fin_*": 1, "web": 4}))
    order = packing.order(RANGES, stages, 10_000, 64, seed=7)
    first, second = order[np.arange(5000)], order[np.arange(5000, 10_000)]
    assert of(RANGES, first) == {"fin_news": 375, "fin_laws": 125, "web": 4500}  # a glob's weight goes by size
    assert of(RANGES, second) == {"fin_news": 750, "fin_laws": 250, "web": 4000}
    tenths = [of(RANGES, part)["web"] for part in np.split(first, 10)]
    assert min(tenths) > 400 and max(tenths) < 490  # interleaved, not one source after the other


def test_a_source_is_read_whole_before_any_row_of_it_comes_again() -> None:
    stages = (Stage(weights={"fin_news": 1, "web": 9}, share=0.3), Stage(weights={"fin_news": 3, "web": 1}))
    order = packing.order(RANGES, stages, 3000, 64, seed=1)
    ids = order[np.arange(3000)]
    counts = np.bincount(ids, minlength=5000)
    assert set(counts[:300].tolist()) == {5, 6} and counts[300:400].sum() == 0 and counts[400:].max() == 1
    later = np.bincount(order[np.arange(9000)], minlength=5000)  # past the end the last stage goes on with other rows
    assert later[400:].max() == 1 and later[400:].sum() > 2700


def test_a_ramp_rises_in_steps_and_budgets_are_tokens() -> None:
    ramp = (Stage(weights={"fin_news": 1, "web": 9}, to={"fin_news": 1, "web": 4}),)
    parts = packing.parts(RANGES, ramp, 16_000, 64)
    shares = [part.rows[0] / (part.end - part.start) for part in parts]
    assert len(parts) == 16 and shares[0] == pytest.approx(0.1) and shares[-1] == pytest.approx(0.2)
    assert shares == sorted(shares) and parts[-1].end == 16_000
    short = packing.parts(RANGES, (Stage(weights={"fin_news": 1, "web": 39}, to={"fin_news": 1, "web": 24}),), 160, 64)
    assert [part.end for part in short] == list(range(10, 170, 10))
    assert sum(part.rows[0] for part in short) == 5  # 0.25 to 0.4 a part, which alone rounds to none
    budget = (Stage(tokens={"web": 64_000}), Stage(tokens={"fin_laws": 6400, "web": 6400}))
    parts = packing.parts(RANGES, budget, 1500, 64)
    assert [(part.end, part.rows) for part in parts] == [(1000, (0, 0, 1000)), (1500, (0, 250, 250))]
    drawn = {row.source: row for row in prepare.describe_sources(RANGES, parts, 64)}
    assert drawn["fin_laws"].tokens == 16_000 and drawn["fin_laws"].epochs == 2.5


def test_a_position_means_the_same_row_whoever_asks_and_values_are_frozen() -> None:
    stages = (Stage(weights={"fin_*": 1, "web": 9}, share=0.25), Stage(weights={"web": 1}))
    order = packing.order(RANGES, stages, 10_000, 64, seed=7)
    positions = np.arange(2000, 4400)
    assert np.array_equal(order[positions.reshape(4, 3, -1)].ravel(), order[positions])
    assert [int(order[np.array([p])][0]) for p in positions[480:520]] == order[positions[480:520]].tolist()
    assert order[np.array([0, 1, 2499, 2500, 9999, 123_456])].tolist() == FROZEN
    other = packing.order(RANGES, stages, 10_000, 64, seed=8)
    assert np.count_nonzero(other[positions] == order[positions]) < 20


FROZEN = [4148, 1600, 533, 3324, 4094, 1835]


def test_a_name_that_is_no_source_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.mixture: books is no source") as caught:
        packing.order(RANGES, (Stage(weights={"books": 1}),), 100, 64, 0)
    assert "fin_news, fin_laws, web" in caught.value.evidence


def test_stages_longer_than_the_run_are_refused_not_dropped() -> None:
    web, laws = Stage(tokens={"web": 64_000}), Stage(tokens={"fin_laws": 6400})
    prepare.check_mixture((web, laws), 70_400)
    prepare.check_mixture((web, Stage(weights={"fin_laws": 1})), 64_001)
    prepare.check_mixture((Stage(weights={"web": 1}, share=0.9), Stage(weights={"fin_laws": 1}, share=0.1)), 1000)
    for stages in (
        (web, laws),
        (web, Stage(weights={"fin_laws": 1})),
        (Stage(tokens={"web": 60_000}), Stage(weights={"fin_laws": 1}, share=0.1)),
    ):
        with pytest.raises(UserError, match="longer than the run") as caught:
            prepare.check_mixture(stages, 64_000)
        assert "those of the run 64,000" in caught.value.evidence
