"""Which documents are used: one decision each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm.base.errors import UserError
from finlm.corpus import documents, selection
from finlm.corpus.documents import InputRead
from finlm.recipe.schema_data import Data


def table(*sources: Sequence[str]) -> selection.Table:
    texts = [text for source in sources for text in source]
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return selection.Table(
        np.repeat(np.arange(len(sources), dtype=np.int32), [len(source) for source in sources]),
        np.array([len(text) for text in texts], dtype=np.uint32),
        np.array([len(text.encode()) for text in texts], dtype=np.int64),
        np.frombuffer(digests, dtype="<u8").reshape(-1, 2),
    )


def data(**settings: Any) -> Data:
    return Data.model_validate({"sources": "x", "min_characters": 2, "held_out_fraction": 0.0} | settings)


def names(decision: selection.Decisions) -> list[str]:
    return [selection.NAMES[code] for code in decision]


def test_the_first_of_equal_documents_stays_over_all_sources() -> None:
    decision = selection.decide(table(["甲甲", "乙乙", "甲甲"], ["丙丙", "乙乙", "短"]), ["share", "share"], data())
    assert names(decision) == ["kept", "kept", "duplicate", "kept", "duplicate", "too_short"]


def test_a_document_of_the_held_out_world_is_never_trained_on() -> None:
    worlds = table(["甲甲", "乙乙", "甲甲"], ["甲甲", "丁丁", "丁丁"], ["甲甲", "戊戊"])
    expected = ["equals_held_out", "kept", "equals_held_out", "held_out", "held_out", "duplicate"]
    decision = selection.decide(worlds, ["train", "held_out", "share"], data())
    assert names(decision) == [*expected, "equals_held_out", "kept"]


@pytest.mark.parametrize("mode", ["exact", "none"])
def test_no_training_text_equals_a_held_out_text_whatever_the_dedup(mode: str) -> None:
    dice = np.random.default_rng(3)
    sources = [[f"文档{number}" for number in dice.integers(0, 300, size=500)] for _ in range(3)]
    decision = selection.decide(table(*sources), ["share"] * 3, data(dedup=mode, held_out_fraction=0.2))
    texts = np.array([text for source in sources for text in source])
    train, held_out = set(texts[decision == selection.TRAIN]), set(texts[decision == selection.HELD_OUT])
    assert train and held_out and not train & held_out
    assert (decision == selection.DUPLICATE).any() == (mode == "exact")


@pytest.mark.parametrize(
    ("count", "fraction", "most", "low", "high"),
    [
        (10_000, 0.01, 500, 70, 130),
        (10_000, 0.5, 50, 50, 50),
        (20, 0.0001, 500, 1, 1),  # every source of two documents has held-out perplexity
        (5, 0.999999, 500, 4, 4),  # never all
        (1, 0.999999, 500, 0, 0),
        (100, 0.0, 500, 0, 0),
        (100, 0.5, 0, 0, 0),
    ],
)
def test_the_held_out_share_is_bounded_and_never_everything(
    count: int, fraction: float, most: int, low: int, high: int
) -> None:
    documents = table([f"文档{number}" for number in range(count)])
    decision = selection.decide(documents, ["share"], data(held_out_fraction=fraction, held_out_documents=most))
    assert low <= np.count_nonzero(decision == selection.HELD_OUT) <= high


def test_copies_of_the_lowest_hash_do_not_keep_a_source_from_holding_a_document_out() -> None:
    texts = sorted((f"文档{number}" for number in range(4)), key=lambda text: table([text]).hash[0, 0])
    copies = [texts[0]] * 30 + texts[1:]
    decision = selection.decide(
        table(copies), ["share"], data(dedup="none", held_out_fraction=0.001, held_out_documents=5)
    )
    assert names(decision) == ["held_out", *["equals_held_out"] * 29, "kept", "kept", "kept"]
    every = selection.decide(table(copies), ["share"], data(dedup="none", held_out_fraction=0.999999))
    assert names(every)[-3:].count("held_out") == 2 and names(every)[-1] == "kept", "never all"


@pytest.mark.parametrize("most", [500, 40])
@pytest.mark.parametrize("grows_at_the_end", [True, False])
def test_a_grown_corpus_trains_on_nothing_that_was_held_out_before(most: int, grows_at_the_end: bool) -> None:
    texts, held_out = [f"文档{number}" for number in range(4000)], set[str]()
    for size in (1000, 2000, 4000):
        here = texts[:size] if grows_at_the_end else texts[-size:]
        decision = selection.decide(table(here), ["share"], data(held_out_fraction=0.05, held_out_documents=most))
        now = {text for text, code in zip(here, decision, strict=True) if code == selection.HELD_OUT}
        assert 0 < len(now) <= most
        held_out |= now
        assert not held_out & {text for text, code in zip(here, decision, strict=True) if code == selection.TRAIN}
    assert most == 500 or np.count_nonzero(decision == selection.RESERVED) > 100


def test_the_one_document_held_out_of_a_tiny_source_is_not_trained_on_when_it_grows() -> None:
    texts, held_out = [f"文档{number}" for number in range(300)], set[str]()
    for size in range(1, 300):
        decision = names(selection.decide(table(texts[:size]), ["share"], data(held_out_fraction=0.005)))
        by_text = dict(zip(texts, decision, strict=False))
        held_out |= {text for text, name in by_text.items() if name == "held_out"}
        assert not any(by_text[text] == "kept" for text in held_out) and "kept" in decision
        assert size == 1 or "held_out" in decision


def test_all_rows_of_a_prompt_are_on_one_side_and_the_limit_counts_rows() -> None:
    prompts = [f"问{number % 100}" for number in range(400)]
    sources = table([f"{prompt}答{n}" for n, prompt in enumerate(prompts)], [f"{prompt}又" for prompt in prompts[:100]])
    hashes = table(prompts, prompts[:100]).hash
    for most in (20, 21, 1, 0):
        settings = data(held_out_fraction=0.5, held_out_documents=most, dedup="none")
        decision = selection.decide(sources, ["share", "train"], settings, prompts=hashes)
        sides = [set(hashes[decision == code, 0].tolist()) for code in (selection.TRAIN, selection.HELD_OUT)]
        assert not sides[0] & sides[1] and (decision == selection.HELD_OUT).sum() == most
        equal, reserved = (decision[:400] == code for code in (selection.EQUALS_HELD_OUT, selection.RESERVED))
        assert equal.sum() == -most % 4, "what no longer fits of the last prompt"
        assert reserved.any() == (most > 0) and reserved.sum() % 4 == 0
        apart = set(hashes[:400, 0][decision[:400] != selection.TRAIN].tolist())
        assert set(hashes[400:, 0][decision[400:] != selection.TRAIN].tolist()) == apart, "the other source's"


def test_every_row_is_counted_once_and_an_entry_without_documents_is_refused() -> None:
    documents = table(["甲甲", "乙乙", "甲甲", "短"], ["乙乙"])
    decision = selection.decide(documents, ["share", "share"], data())
    inputs = [InputRead("a", rows=9, broken=2, dropped={"garbled": 1, "symbols": 2}), InputRead("b", rows=1)]
    row = selection.count_decisions(documents, decision, inputs[:1])["a"]
    assert row["rows"] == row["broken"] + row["cleaned"] + sum(row[name] for name in selection.NAMES)
    assert row["bytes"] == 12
    counts = selection.count_decisions(documents, decision, inputs)
    assert selection.find_empty_sources(counts, {"a": "data.sources[0]", "b": "data.sources[0]"}) == ["b"]
    with pytest.raises(UserError, match="source b has no document to train on") as caught:
        selection.find_empty_sources(counts, {"a": "data.sources[0]", "b": "data.sources[1]"})
    assert "1 duplicate" in caught.value.evidence


def test_near_duplicates_go_after_exact_ones_and_each_reason_is_its_own() -> None:
    documents = table(["甲甲一", "甲甲二", "甲甲二", "乙乙", "丙丙一", "丙丙二"], ["甲甲三", "丁丁", "丁丁"])
    dropped = np.zeros(9, dtype=np.uint8)
    dropped[[0, 3]] = selection.PERPLEXITY, selection.CONTAMINATED
    settings = data(dedup="near")
    settled = selection.settle(documents, ["share", "share"], settings, dropped)
    assert names(settled)[:4] == ["perplexity", "kept", "duplicate", "contaminated"]
    like = np.array([0, 1, 2, 3, 4, 4, 1, 7, 8], dtype=np.uint32)
    decision = selection.hold_out(documents, ["share", "share"], settings, settled, like)
    expected = ["perplexity", "kept", "duplicate", "contaminated", "kept", "near_duplicate"]
    assert names(decision) == [*expected, "near_duplicate", "kept", "duplicate"]


def test_a_near_duplicate_of_a_held_out_document_has_that_reason() -> None:
    documents = table(["甲甲一", "乙乙"], ["甲甲二", "甲甲三"], ["甲甲四", "丙丙"])
    splits, settings = ["train", "held_out", "share"], data(dedup="near")
    like = np.array([2, 1, 2, 2, 2, 5], dtype=np.uint32)
    settled = selection.settle(documents, splits, settings)
    decision = selection.hold_out(documents, splits, settings, settled, like)
    assert names(decision) == ["near_held_out", "kept", "held_out", "near_duplicate", "near_held_out", "kept"]


def test_equal_texts_are_found_in_parts_as_in_one() -> None:
    dice = np.random.default_rng(9)
    few = dice.integers(0, 2**64, (300_000, 2), dtype=np.uint64)
    hashes = few[dice.integers(0, len(few), 2**20 + 7)]  # more than are sorted at once
    _, first, place = np.unique(hashes[:, 0], return_index=True, return_inverse=True)
    assert np.array_equal(selection.equal_texts(hashes), first[place])
    hashes[5, 1] ^= np.uint64(1)  # half of a hash is not enough
    assert selection.equal_texts(hashes)[5] == 5


def test_decisions_made_in_files_and_in_blocks_are_those_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = np.random.default_rng(4)
    for trial in range(40):
        count, kinds = int(dice.integers(1, 300)), int(dice.integers(2, 200))
        pool = dice.integers(0, 2**64, (kinds, 2), dtype=np.uint64) >> np.uint64(dice.choice([0, 0, 62]))
        columns = {
            "source": np.sort(dice.integers(0, 3, count)).astype(np.int32),
            "characters": dice.integers(0, 60, count).astype(np.uint32),
            "text_bytes": dice.integers(1, 100, count),
            "hash": pool[dice.integers(0, kinds, count)],
        }
        splits = [str(split) for split in dice.choice(["share", "held_out"], 3)]
        settings = data(
            held_out_fraction=float(dice.choice([0, 0.1, 0.5])),
            held_out_documents=int(dice.choice([1, 3, 1000])),
            min_characters=10,
            dedup=str(dice.choice(["none", "near"])),
        )
        dropped = np.where(dice.random(count) < 0.1, selection.PERPLEXITY, selection.TRAIN).astype(np.uint8)
        like = np.arange(count, dtype=np.uint32)
        made = []
        for directory in (None, tmp_path):
            monkeypatch.setattr(selection, "BLOCK", 2**20 if directory is None else 1 + trial)
            mapped = {
                name: selection.new_array(directory, name, array.shape, array.dtype) for name, array in columns.items()
            }
            for name, array in columns.items():
                mapped[name][:] = array
            here = selection.Table(**mapped, directory=directory)
            settled = selection.settle(here, splits, settings, dropped)
            in_use = np.flatnonzero(settled <= selection.HELD_OUT)[::3]
            like[in_use] = in_use // 2
            made += [settled, selection.hold_out(here, splits, settings, settled, like)]
            here.remove()
        assert np.array_equal(made[0], made[2]) and np.array_equal(made[1], made[3])
    assert not list(tmp_path.iterdir())


def test_the_table_of_chunks_is_the_same_in_files(tmp_path: Path) -> None:
    chunks, first = [], 0
    for number, count in enumerate((3, 5)):
        index = np.zeros(count, dtype=documents.SIDES if number else documents.INDEX)
        index["end"], index["hash"] = np.arange(1, count + 1) * 7, np.arange(2 * count).reshape(-1, 2)
        if number:
            index["group"], index["day"] = 9, np.arange(count)
        np.save(tmp_path / f"{number}.npy", index)
        chunks.append(documents.Chunk(number, "source", tmp_path / f"{number}.txt", slice(first, first + count)))
        first += count
    (tmp_path / "columns").mkdir()
    whole, mapped = selection.Table.read(chunks), selection.Table.read(chunks, tmp_path / "columns")
    for name in ("source", "characters", "text_bytes", "hash", "group", "day"):
        assert np.array_equal(getattr(whole, name), getattr(mapped, name)), name
    assert whole.text_bytes.tolist() == [7] * 8 and whole.day is not None
    assert whole.source.tolist() == [0] * 3 + [1] * 5 and whole.day.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    mapped.remove()
    assert not list((tmp_path / "columns").iterdir()) and selection.Table.read([]).rows_of(0) == slice(0, 0)
