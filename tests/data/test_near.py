"""Near-duplicates against the exact answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from finlm.data import documents, near, near_signatures, near_verify, ngrams, synthetic


def words(text: str) -> set[str]:
    letters = "".join(letter.lower() for letter in text if letter.isalnum())
    return {letters[start : start + 5] for start in range(len(letters) - 4)}


def jaccard(left: str, right: str) -> float:
    return len(words(left) & words(right)) / max(1, len(words(left) | words(right)))


def corpus(count: int) -> list[str]:
    """Synthetic news of which every fourth is an edited copy of an earlier one, between 0.5 and 1 alike."""
    dice = random.Random(7)
    rows = synthetic.documents("fin_news", 4_000_000, 11, "train")
    texts: list[str] = []
    for row in rows:
        texts.append(row["text"])
        if len(texts) % 4 == 3:
            copy = list(dice.choice(texts))
            for _ in range(dice.randrange(1 + len(copy) // 12)):
                copy[dice.randrange(len(copy))] = dice.choice("升降增减一二三")
            texts.append("".join(copy))
        if len(texts) >= count:
            break
    return texts


def chunks_of(texts: Sequence[str], directory: Path, sizes: Sequence[int]) -> list[documents.Chunk]:
    """The texts as chunks of a documents step."""
    found, first = [], 0
    for number, size in enumerate(sizes):
        encoded = [text.encode() for text in texts[first : first + size]]
        index = np.zeros(len(encoded), dtype=documents.INDEX)
        index["end"] = np.cumsum([len(text) for text in encoded])
        path = directory / f"{number}.txt"
        path.write_bytes(b"".join(encoded))
        np.save(path.with_suffix(".npy"), index)
        found.append(documents.Chunk(0, "source", path, slice(first, first + len(encoded))))
        first += size
    return found


def components(
    texts: Sequence[str], directory: Path, sizes: Sequence[int], source: Sequence[int] | None = None
) -> npt.NDArray[np.uint32]:
    directory.mkdir()
    chunks = chunks_of(texts, directory, sizes)
    writer = near.Writer(directory)
    for chunk in chunks:
        writer.append(*near_signatures.of_chunk(chunk.path))
    writer.close()
    table = near.Table(directory, len(texts))
    text_bytes = np.array([len(text.encode()) for text in texts])
    verify = near_verify.Verifier(table, chunks, text_bytes, 0.8)
    numbers = np.zeros(len(texts), dtype=np.int32) if source is None else np.array(source)
    labels, _ = near.components(table, numbers, near_signatures.has_signature(table.signatures()), verify)
    return labels


def test_every_near_duplicate_is_found_and_nothing_else(tmp_path: Path) -> None:
    texts = corpus(700)
    labels = components(texts, tmp_path / "near", [300, 400])
    grams = [words(text) for text in texts]
    alike = [
        (left, right)
        for left, right in combinations(range(len(texts)), 2)
        if grams[left] and len(grams[left] & grams[right]) >= 0.8 * len(grams[left] | grams[right])
    ]
    found = sum(labels[left] == labels[right] for left, right in alike)
    assert len(alike) > 50
    assert found >= 0.99 * len(alike)
    with_partner = {number for pair in alike for number in pair}
    removed = np.flatnonzero(labels != np.arange(len(texts)))
    assert set(removed.tolist()) <= with_partner
    assert (labels[removed] < removed).all()  # the first stays


def test_components_do_not_depend_on_chunks_or_on_how_much_is_sorted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = corpus(600)
    whole = components(texts, tmp_path / "whole", [600])
    assert np.array_equal(components(texts, tmp_path / "cut", [1, 99, 200, 300]), whole)
    monkeypatch.setattr(near, "_SORTED_AT_ONCE", 100)
    monkeypatch.setattr(near, "_READ_AT_ONCE", 64)
    monkeypatch.setattr(near, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(near_verify, "_PAIRS_AT_ONCE", 5)
    monkeypatch.setattr(near_verify, "_BYTES_AT_ONCE", 2000)
    monkeypatch.setattr(near_signatures, "_BYTES_AT_ONCE", 500)
    assert np.array_equal(components(texts, tmp_path / "parts", [250, 350]), whole)


def test_a_long_document_has_the_same_signature_piece_by_piece_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [*corpus(30), "", "短", "a、b。" * 400, "长篇" + "".join(map(str, range(4000)))]
    data, ends = "".join(texts).encode(), np.cumsum([len(text.encode()) for text in texts])
    reference = near_signatures.of_block(data, ends)
    longest, plain = 0, ngrams.windows

    def watched(codes: npt.NDArray[np.uint32], n: int) -> npt.NDArray[np.uint64]:
        nonlocal longest
        longest = max(longest, len(codes))
        return plain(codes, n)

    monkeypatch.setattr(ngrams, "windows", watched)
    monkeypatch.setattr(near_signatures, "_BYTES_AT_ONCE", 101, raising=False)
    pieces = near_signatures.of_block(data, ends)
    assert all(np.array_equal(*pair) for pair in zip(pieces, reference, strict=True))
    assert longest <= 101 + 4


def test_duplicates_within_a_source_and_across_sources_are_joined(tmp_path: Path) -> None:
    rows = synthetic.documents("announcement", 10**6, 3, "train")
    first, second = next(rows)["text"], next(rows)["text"]
    texts = [first, second, first + "（完）", "短文", "！！！", first + "（续）", second + "。"]
    labels = components(texts, tmp_path / "near", [7], [0, 0, 0, 0, 1, 1, 1])
    assert labels.tolist() == [0, 1, 0, 3, 4, 0, 1]


def test_a_signature_estimates_the_similarity(tmp_path: Path) -> None:
    texts = corpus(400)
    (chunk,) = chunks_of(texts, tmp_path, [400])
    signatures, keys = near_signatures.of_chunk(chunk.path)
    assert keys.shape == (near_signatures.BANDS, 400)
    pairs = [(number - 1 - back, number) for number in range(8, 400, 4) for back in range(3)]
    left, right = np.array(pairs).T
    estimate = near_signatures.similarity(signatures[left], signatures[right])
    exact = np.array([jaccard(texts[a], texts[b]) for a, b in pairs])
    assert np.abs(estimate - exact).mean() < 0.03
    encoded = [text.encode() for text in texts]
    grams = ngrams.grams(
        ngrams.words_only(ngrams.characters(b"".join(encoded), np.cumsum([len(text) for text in encoded]))), 5
    )
    sets = near_verify.different(grams)
    for number in set(left.tolist()):
        others = [sets[place] for place in right[left == number]]
        for partner, wanted in zip(others, exact[left == number], strict=True):
            for several in ([partner], [partner, *others, *others]):  # counted at once, and one by one
                assert near_verify.similar(sets[number], several, wanted)[0]
                assert not near_verify.similar(sets[number], several, wanted + 1e-9)[0]


def test_texts_of_one_frame_are_read_once_however_often_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, letters = random.Random(3), [chr(0x4E00 + place) for place in range(3000)]
    frame = "".join(dice.choices(letters, k=400))
    texts = [frame + "".join(dice.choices(letters, k=60)) for _ in range(300)]  # 0.75 alike
    hashed, plain = list[int](), ngrams.grams
    compared, similar = list[int](), near_verify.similar

    def count(text: ngrams.Characters, n: int) -> ngrams.Grams:
        hashed.append(len(text.starts) - 1)
        return plain(text, n)

    def count_pairs(own: near_verify.Grams, others: Sequence[near_verify.Grams], least: float) -> npt.NDArray[np.bool_]:
        compared.append(len(others))
        return similar(own, others, least)

    monkeypatch.setattr(ngrams, "grams", count)
    monkeypatch.setattr(near_verify, "similar", count_pairs)
    labels = components(texts, tmp_path / "near", [300])
    assert np.array_equal(labels, np.arange(300))
    assert sum(hashed) <= 2 * len(texts)  # once for the signature, once to compare
    assert 1000 < sum(compared) <= 300 * 299 // 2


def test_joining_pairs_in_any_order_gives_the_smallest_document_of_a_component() -> None:
    dice = np.random.default_rng(5)
    left, right = dice.integers(0, 400, (2, 300))
    labels = np.arange(400, dtype=np.uint32)
    near.join(labels, left[:150], right[:150])
    near.join(labels, left[150:], right[150:])
    expected = list(range(400))
    for _ in range(400):  # until nothing changes, the slow way
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            expected[a] = expected[b] = min(expected[a], expected[b])
    assert near.roots(labels, np.arange(400)).tolist() == expected
