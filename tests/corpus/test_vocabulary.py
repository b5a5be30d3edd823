"""What a tokenizer is learnt from: every source's share, weights, memory."""

from __future__ import annotations

import numpy as np
import pytest

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.corpus import selection, vocabulary
from finlm.corpus.vocabulary import shares

SOURCES = ("news", "reports")


def fake_table() -> selection.Table:
    dice = np.random.default_rng(0)
    sizes = np.concatenate([np.full(900, 100), np.full(100, 300)]).astype(np.int64)
    sources = np.repeat(np.arange(2, dtype=np.int32), [900, 100])
    return selection.Table(
        sources, sizes.astype(np.uint32), sizes, dice.integers(0, 2**63, (1000, 2)).astype(np.uint64)
    )


def test_the_sample_takes_its_share_of_every_source_and_no_held_out_document() -> None:
    table = fake_table()
    decision = np.zeros(1000, dtype=np.uint8)
    decision[::10] = selection.HELD_OUT
    for weights, expected in ((None, [81_000 / 4, 27_000 / 4]), ({"news": 1, "reports": 2.0}, [9_000, 18_000])):
        wanted = vocabulary.choose_sample(table, decision, SOURCES, 27_000, weights)  # of 108,000 training bytes
        taken = [int(table.text_bytes[wanted & (table.source == source)].sum()) for source in (0, 1)]
        assert not (wanted & (decision != selection.TRAIN)).any()
        assert taken == [pytest.approx(expected[0], abs=100), pytest.approx(expected[1], abs=300)]
    assert np.array_equal(vocabulary.choose_sample(table, decision, SOURCES, 10**9), decision == selection.TRAIN)
    only_news = vocabulary.choose_sample(table, decision, SOURCES, 10**9, {"news": 1})
    assert np.array_equal(only_news, (decision == selection.TRAIN) & (table.source == 0))


def test_a_document_longer_than_the_share_is_left_out_or_alone_gives_its_beginning() -> None:
    sizes = np.array([300, 100, 5_000_000_000 // 2, 100, 100], dtype=np.uint32)
    hashes = np.stack([np.arange(5, dtype=np.uint64)] * 2, axis=1)
    table = selection.Table(np.zeros(5, dtype=np.int32), sizes, sizes, hashes)
    decision = np.zeros(5, dtype=np.uint8)
    assert vocabulary.choose_sample(table, decision, ["news"], 450).tolist() == [True, True, False, False, False]
    assert vocabulary.choose_sample(table, decision, ["news"], 50).tolist() == [False, True, False, False, False]
    assert "".join(vocabulary.lines(["短", "长" * 100], 50)) == "短" + "长" * 16


def test_what_a_source_lacks_the_others_give_by_their_weights() -> None:
    available = {"a": 100, "b": 1000, "c": 1000}
    assert shares(available, 600, {"a": 1, "b": 1, "c": 1}) == {"a": 100, "b": 250, "c": 250}
    assert shares(available, 700, {"a": 4, "b": 2, "c": 1}) == {"a": 100, "b": 400, "c": 200}
    assert shares(available, 1500, {"a": 9, "b": 1}) == {"a": 100, "b": 1000, "c": 0}
    assert shares(available, 210, None) == {"a": 10, "b": 100, "c": 100}
    assert shares(available, 9999, None) == available


def test_weights_name_sources_or_globs() -> None:
    table, decision = fake_table(), np.zeros(1000, dtype=np.uint8)
    by_name = vocabulary.choose_sample(table, decision, SOURCES, 6000, {"news": 3, "reports": 1})
    assert np.array_equal(
        by_name, vocabulary.choose_sample(table, decision, SOURCES, 6000, {"*": 0, "n*": 3, "rep*": 1})
    )
    every = vocabulary.choose_sample(table, decision, SOURCES, 6000, {"*": 1})
    assert np.array_equal(every, vocabulary.choose_sample(table, decision, SOURCES, 6000))
    with pytest.raises(UserError, match="sample_weights: exams is no source") as caught:
        vocabulary.choose_sample(table, decision, SOURCES, 1000, {"exams": 1})
    assert caught.value.evidence == "the sources are news, reports"


def test_a_sample_beyond_memory_is_refused_with_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_bytes", lambda: 60_000_000)
    table = fake_table()
    table.text_bytes[:] *= 50_000
    with pytest.raises(UserError, match="does not fit in memory") as caught:
        vocabulary.choose_sample(table, np.zeros(1000, dtype=np.uint8), SOURCES, 200_000_000)
    assert caught.value.fix == "lower tokenizer.sample_bytes to 2MB"
