"""n-gram hashes of many documents equal those of each alone."""

from __future__ import annotations

import numpy as np

from finlm.corpus import ngrams
from finlm.rows.shards import GOLDEN, mix, unmix

TEXTS = ["", "甲", "净利润增长3.5%，ROE 15%", "𠮷野家😀报告", "ABC－abc", "营收", "净利润增长"]


def block(texts: list[str]) -> ngrams.Characters:
    encoded = [text.encode() for text in texts]
    return ngrams.characters(b"".join(encoded), np.cumsum([len(text) for text in encoded]))


def test_documents_keep_their_characters_and_only_words_are_kept() -> None:
    text = block(TEXTS)
    cut = [text.codes[first:last] for first, last in zip(text.starts, text.starts[1:], strict=False)]
    assert ["".join(map(chr, codes)) for codes in cut] == TEXTS
    words = ngrams.words_only(text)
    cut = [words.codes[first:last] for first, last in zip(words.starts, words.starts[1:], strict=False)]
    expected = ["", "甲", "净利润增长35roe15", "𠮷野家😀报告", "abcabc", "营收", "净利润增长"]
    assert ["".join(map(chr, codes)) for codes in cut] == expected


def test_grams_lie_inside_documents_and_are_those_of_each_alone() -> None:
    for size in (1, 3, 5):
        grams = ngrams.hash_grams(block(TEXTS), size)
        for number, text in enumerate(TEXTS):
            alone = ngrams.hash_grams(block([text]), size)
            assert grams.count[number] == alone.count[0] == max(0, len(text) - size + 1)
            assert np.array_equal(grams.hashes[grams.document == number], alone.hashes)
    assert ngrams.hash_grams(block([]), 3).hashes.size == 0


def test_unmixed_hashes_are_the_sums_that_were_mixed() -> None:
    values = np.random.default_rng(1).integers(0, 2**64, 1000, dtype=np.uint64)
    assert np.array_equal(unmix(mix(values)), values)
    codes = block(TEXTS).codes
    for size in (1, 2, 5, 6, 7):
        wide = ngrams.sums(codes.astype(np.uint64), size)
        plain = [
            sum(int(code) * int(GOLDEN) ** (size - 1 - at) for at, code in enumerate(codes[first : first + size]))
            for first in range(len(codes) - size + 1)
        ]
        assert wide.tolist() == [value % 2**64 for value in plain]
        assert ngrams.sums(codes, size).tolist() == [value % 2**32 for value in plain]
        places = np.arange(len(plain))
        assert np.array_equal(ngrams.hash_at(codes, places, size), ngrams.windows(codes, size))
    assert not len(ngrams.sums(codes[:3], 4))
