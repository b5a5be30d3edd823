"""The character n-gram model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from finlm.corpus import ngrams, perplexity
from finlm.corpus.perplexity import Model, Table
from finlm.world import writer


def block(texts: list[str]) -> ngrams.Characters:
    encoded = [text.encode() for text in texts]
    return ngrams.characters(b"".join(encoded), np.cumsum([len(text) for text in encoded], dtype=np.int64))


@pytest.fixture(scope="module")
def news() -> list[str]:
    return [row["text"] for row in writer.documents("fin_news", 1_500_000, 2, "train")]


@pytest.mark.parametrize("order", [2, 3, 4])
def test_the_probabilities_of_all_next_characters_add_up_to_one(news: list[str], order: int) -> None:
    model = perplexity.train_model(block(news[:300]), order)
    alphabet = sorted(
        {letter for text in news[:300] for letter in text.lower() if not letter.isdigit()} - {"\n"} | {"0"}
    )
    for context in ("净利润同比", "。", "龘龘龘", "公司00"):
        history = (context * order)[-(order - 1) :]
        log, _ = model.log_perplexity(block([history + letter for letter in [*alphabet, "\ue000"]]))
        *seen, unseen = np.exp(-log).tolist()
        # Every character that the text does not have is as likely as the other, and there are 20,000 in all.
        assert sum(seen) + (20_000 - len(alphabet)) * unseen == pytest.approx(1, abs=2e-3)


def test_shuffled_text_is_more_surprising_than_any_clean_one(news: list[str], tmp_path: Path) -> None:
    dice = random.Random(1)
    perplexity.train_model(block(news[::2]), 3).save(tmp_path / "model.npz")
    model = Model.load(tmp_path / "model.npz")
    held_out = [text for text in news[1::2] if len(text) > 50][:300]
    shuffled = ["".join(dice.sample(text, len(text))) for text in held_out]
    clean, count = model.log_perplexity(block(held_out))
    noise, _ = model.log_perplexity(block(shuffled))
    assert count.tolist() == [len(text) - 2 for text in held_out]
    assert clean.max() < noise.min()
    # A document's value is its own, whatever stands beside it.
    assert model.log_perplexity(block(held_out[7:8]))[0][0] == clean[7]
    assert model.log_perplexity(block(["", "短"]))[1].tolist() == [0, 0]


def test_a_table_finds_what_it_holds_and_nothing_else() -> None:
    dice = np.random.default_rng(3)
    hashes = np.unique(dice.integers(0, 2**64, 5000, dtype=np.uint64))
    hashes[-3:] = [2**64 - 4, 2**64 - 3, 2**64 - 2]  # the last slots
    table = Table.of(hashes, np.arange(len(hashes), dtype=np.float32))
    asked = np.concatenate((hashes, dice.integers(0, 2**64, 5000, dtype=np.uint64)))
    expected = np.where(np.isin(asked, hashes), np.searchsorted(hashes, asked), -1)
    assert np.array_equal(table.look_up(asked, -1), expected)
