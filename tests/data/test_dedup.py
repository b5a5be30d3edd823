"""Which documents are used: one decision each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from finlm.base.errors import UserError
from finlm.data import dedup
from finlm.recipe.schema_data import Data


def table(*sources: Sequence[str]) -> dedup.Table:
    texts = [text for source in sources for text in source]
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return dedup.Table(
        np.repeat(np.arange(len(sources), dtype=np.int32), [len(source) for source in sources]),
        np.array([len(text) for text in texts], dtype=np.uint32),
        np.array([len(text.encode()) for text in texts], dtype=np.int64),
        np.frombuffer(digests, dtype="<u8").reshape(-1, 2),
    )


def data(**settings: Any) -> Data:
    return Data.model_validate({"sources": "x", "min_characters": 2, "held_out_fraction": 0.0} | settings)


def names(decision: dedup.Decisions) -> list[str]:
    return [dedup.NAMES[code] for code in decision]


def test_the_first_of_equal_documents_stays_over_all_sources() -> None:
    decision = dedup.decide(table(["甲甲", "乙乙", "甲甲"], ["丙丙", "乙乙", "短"]), ["share", "share"], data())
    assert names(decision) == ["kept", "kept", "duplicate", "kept", "duplicate", "too_short"]


def test_a_document_of_the_held_out_world_is_never_trained_on() -> None:
    worlds = table(["甲甲", "乙乙", "甲甲"], ["甲甲", "丁丁", "丁丁"], ["甲甲", "戊戊"])
    expected = ["equals_held_out", "kept", "equals_held_out", "held_out", "held_out", "duplicate"]
    decision = dedup.decide(worlds, ["train", "held_out", "share"], data())
    assert names(decision) == [*expected, "equals_held_out", "kept"]


@pytest.mark.parametrize("mode", ["exact", "none"])
def test_no_training_text_equals_a_held_out_text_whatever_the_dedup(mode: str) -> None:
    dice = np.random.default_rng(3)
    sources = [[f"文档{number}" for number in dice.integers(0, 300, size=500)] for _ in range(3)]
    decision = dedup.decide(table(*sources), ["share"] * 3, data(dedup=mode, held_out_fraction=0.2))
    texts = np.array([text for source in sources for text in source])
    train, held_out = set(texts[decision == dedup.TRAIN]), set(texts[decision == dedup.HELD_OUT])
    assert train and held_out and not train & held_out
    assert (decision == dedup.DUPLICATE).any() == (mode == "exact")


@pytest.mark.parametrize(
    ("count", "fraction", "most", "low", "high"),
    [
        (10_000, 0.01, 500, 70, 130),
        (10_000, 0.5, 50, 50, 50),
        (20, 0.0001, 500, 1, 1),  # every source of two documents has held-out perplexity
        (5, 1.0, 500, 4, 4),  # never all
        (1, 1.0, 500, 0, 0),
        (100, 0.0, 500, 0, 0),
        (100, 0.5, 0, 0, 0),
    ],
)
def test_the_held_out_share_is_bounded_and_never_everything(
    count: int, fraction: float, most: int, low: int, high: int
) -> None:
    documents = table([f"文档{number}" for number in range(count)])
    decision = dedup.decide(documents, ["share"], data(held_out_fraction=fraction, held_out_documents=most))
    assert low <= np.count_nonzero(decision == dedup.HELD_OUT) <= high


def test_copies_of_the_lowest_hash_do_not_keep_a_source_from_holding_a_document_out() -> None:
    texts = sorted((f"文档{number}" for number in range(4)), key=lambda text: table([text]).hash[0, 0])
    copies = [texts[0]] * 30 + texts[1:]
    decision = dedup.decide(table(copies), ["share"], data(dedup="none", held_out_fraction=0.001, held_out_documents=5))
    assert names(decision) == ["held_out", *["equals_held_out"] * 29, "kept", "kept", "kept"]
    every = dedup.decide(table(copies), ["share"], data(dedup="none", held_out_fraction=1.0))
    assert names(every)[-3:].count("held_out") == 2 and names(every)[-1] == "kept", "never all"


def test_held_out_documents_stay_held_out_when_the_corpus_grows() -> None:
    texts = [f"文档{number}" for number in range(2000)]
    held_out = []
    for size in (1000, 2000):
        decision = dedup.decide(table(texts[:size]), ["share"], data(held_out_fraction=0.05))
        held_out.append({text for text, code in zip(texts, decision, strict=False) if code == dedup.HELD_OUT})
    assert held_out[0] and held_out[0] < held_out[1]


def test_every_row_is_counted_once_and_an_entry_without_documents_is_refused() -> None:
    documents = table(["甲甲", "乙乙", "甲甲", "短"], ["乙乙"])
    decision = dedup.decide(documents, ["share", "share"], data())
    inputs = [
        {"source": "a", "rows": 9, "broken": 2, "dropped": {"garbled": 1, "symbols": 2}},
        {"source": "b", "rows": 1, "broken": 0, "dropped": {}},
    ]
    row = dedup.count(documents, decision, inputs[:1])["a"]
    assert row["rows"] == row["broken"] + row["cleaned"] + sum(row[name] for name in dedup.NAMES)
    assert row["bytes"] == 12
    counts = dedup.count(documents, decision, inputs)
    assert dedup.without_documents(counts, {"a": "data.sources[0]", "b": "data.sources[0]"}) == ["b"]
    with pytest.raises(UserError, match="source b has no document to train on") as caught:
        dedup.without_documents(counts, {"a": "data.sources[0]", "b": "data.sources[1]"})
    assert "1 duplicate" in caught.value.evidence


def test_near_duplicates_go_after_exact_ones_and_the_first_still_in_use_stays() -> None:
    documents = table(["甲甲一", "甲甲二", "甲甲二", "乙乙", "丙丙一", "丙丙二"], ["甲甲三", "丁丁", "丁丁"])
    components = np.array([0, 0, 0, 3, 4, 4, 0, 7, 7], dtype=np.uint32)
    dropped = np.zeros(9, dtype=np.uint8)
    dropped[[0, 3]] = dedup.PERPLEXITY, dedup.CONTAMINATED
    decision = dedup.decide(documents, ["share", "share"], data(dedup="near"), components, dropped)
    expected = ["perplexity", "kept", "duplicate", "contaminated", "kept", "near_duplicate"]
    assert names(decision) == [*expected, "near_duplicate", "kept", "duplicate"]


def test_no_training_document_is_a_near_duplicate_of_a_held_out_one() -> None:
    documents = table(["甲甲一", "乙乙"], ["甲甲二", "甲甲三"], ["甲甲四", "丙丙"])
    components = np.array([0, 1, 0, 0, 0, 5], dtype=np.uint32)
    decision = dedup.decide(documents, ["train", "held_out", "share"], data(dedup="near"), components)
    assert names(decision) == ["near_held_out", "kept", "held_out", "near_duplicate", "near_held_out", "kept"]
    dice = np.random.default_rng(4)
    many = table([f"文档{number}" for number in range(1000)])
    components = np.minimum(dice.integers(0, 300, 1000), np.arange(1000)).astype(np.uint32)
    components = components[components][components[components]]
    decision = dedup.decide(many, ["share"], data(dedup="near", held_out_fraction=0.3), components)
    held_out = set(components[decision == dedup.HELD_OUT].tolist())
    assert held_out and not held_out & set(components[decision == dedup.TRAIN].tolist())


def test_equal_texts_are_found_in_parts_as_in_one() -> None:
    dice = np.random.default_rng(9)
    few = dice.integers(0, 2**64, (300_000, 2), dtype=np.uint64)
    hashes = few[dice.integers(0, len(few), 2**20 + 7)]  # more than are sorted at once
    _, first, place = np.unique(hashes[:, 0], return_index=True, return_inverse=True)
    assert np.array_equal(dedup.equal_texts(hashes), first[place])
    hashes[5, 1] ^= np.uint64(1)  # half of a hash is not enough
    assert dedup.equal_texts(hashes)[5] == 5
