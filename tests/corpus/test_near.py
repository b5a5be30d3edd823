"""Near-duplicates against the exact answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from finlm.corpus import documents, near, ngrams
from finlm.world import writer


def words(text: str) -> set[str]:
    letters = "".join(letter.lower() for letter in text if letter.isalnum())
    return {letters[start : start + 5] for start in range(len(letters) - 4)}


def jaccard(left: str, right: str) -> float:
    return len(words(left) & words(right)) / max(1, len(words(left) | words(right)))


def corpus(count: int) -> list[str]:
    """Synthetic news of which every fourth is an edited copy of an earlier one, between 0.5 and 1 alike."""
    dice = random.Random(7)
    rows = writer.documents("fin_news", 4_000_000, 11, "train")
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


def likes(
    texts: Sequence[str], directory: Path, sizes: Sequence[int], ranks: Sequence[int] | None = None
) -> npt.NDArray[np.uint32]:
    """Of each text the one that it is dropped for, else its own number."""
    directory.mkdir()
    chunks = chunks_of(texts, directory, sizes)
    writer = ngrams.Writer(directory)
    for chunk in chunks:
        writer.append(*ngrams.sign_chunk(chunk.path))
    writer.close()
    table = ngrams.Table(directory, len(texts))
    text_bytes = np.array([len(text.encode()) for text in texts])
    verify = near.Verifier(table, chunks, text_bytes, 0.8)
    order = np.arange(len(texts)) if ranks is None else np.array(ranks)
    found, _ = near.find_likes(table, order, ngrams.has_signature(table.signatures()), verify)
    return found


def test_every_near_duplicate_goes_and_only_for_a_kept_text_that_says_all_it_says(tmp_path: Path) -> None:
    texts = corpus(700)
    like = likes(texts, tmp_path / "near", [300, 400])
    grams, known = [words(text) for text in texts], [near.find_facts(text) for text in texts]
    kept, dropped = np.flatnonzero(like == np.arange(700)).tolist(), np.flatnonzero(like != np.arange(700)).tolist()
    assert len(dropped) > 30
    for number in dropped:
        partner = int(like[number])
        assert partner < number and like[partner] == partner, "the first stays"
        assert jaccard(texts[number], texts[partner]) >= 0.8 and near.covers(known[partner], known[number])
    left = [
        (first, second)
        for first, second in combinations(kept, 2)
        if grams[first]
        and len(grams[first] & grams[second]) >= 0.8 * len(grams[first] | grams[second])
        and near.covers(known[first], known[second])
    ]
    assert len(left) <= 0.01 * len(dropped)


def test_a_chain_of_edits_drops_nothing_that_resembles_no_kept_text(tmp_path: Path) -> None:
    dice, letters = random.Random(5), [chr(0x4E00 + place) for place in range(3000)]
    text = dice.choices(letters, k=300)
    chain = []
    for place in range(0, 240, 10):  # neighbours are 0.9 alike, the ends 0.1
        text[place : place + 10] = dice.choices(letters, k=10)
        chain.append("".join(text))
    dice.shuffle(chain)
    like = likes(chain, tmp_path / "near", [len(chain)])
    dropped = np.flatnonzero(like != np.arange(len(chain)))
    assert len(dropped) > 5
    assert all(jaccard(chain[number], chain[like[number]]) >= 0.8 for number in dropped.tolist())
    assert (like[like] == like).all()


FORM = (
    "{company}股份有限公司董事会近日收到公司副总经理{person}先生的书面辞职报告，因个人原因申请辞去公司副总经理职务，辞职后将"
    "不再担任公司任何职务。根据《公司法》《公司章程》等有关规定，该报告自{month}送达董事会之日起生效。截至本公告披露日，其持有"
    "公司股份{shares}股，将继续严格按照有关规定进行管理，公司董事会对其在任职期间所做出的贡献表示衷心感谢！"
)


@pytest.mark.parametrize(
    "changed", [{"shares": "12,300"}, {"person": "李文海"}, {"company": "青石光电"}, {"month": "五月"}]
)
def test_a_form_with_another_figure_name_or_date_stays_and_a_repeated_one_goes(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    first = {"company": "海岚精密", "person": "赵国强", "month": "三月", "shares": "45,600"}
    repeated = FORM.format(**first).replace("衷心感谢", "由衷感谢")
    texts = [FORM.format(**first), FORM.format(**first | changed), repeated]
    assert jaccard(texts[0], texts[1]) >= 0.8
    assert likes(texts, tmp_path / "near", [3]).tolist() == [0, 1, 0]


def test_a_rise_is_not_a_fall_of_the_same_size() -> None:
    known = {text: near.find_facts(text) for text in ("金价日内涨1.50%", "金价日内跌1.5%", "金价日内变动1.5%")}
    rose, fell, moved = known.values()
    assert not near.covers(rose, fell) and not near.covers(fell, rose)
    assert near.covers(rose, moved) and near.covers(fell, moved) and near.covers(moved, rose)
    assert near.covers(near.find_facts("收入1,000.50元和2元"), near.find_facts("收入1000.5元"))


def test_a_figure_counts_where_it_stands() -> None:
    """The 1 of January is none of a year's term, and 200 twice is not 1000 and 200."""
    march, january = (near.find_facts(f"2020年{month}月21日1年期为3.95%，5年期为4.75%") for month in (3, 1))
    assert not near.covers(march, january)
    mixed, equal = (near.find_facts(f"开展{amount}亿元逆回购，今日有200亿元到期") for amount in (1000, 200))
    assert not near.covers(mixed, equal)


def test_what_is_dropped_does_not_depend_on_chunks_or_on_how_much_is_sorted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = corpus(600)
    whole = likes(texts, tmp_path / "whole", [600])
    assert np.array_equal(likes(texts, tmp_path / "cut", [1, 99, 200, 300]), whole)
    monkeypatch.setattr(near, "_SORTED_AT_ONCE", 100)
    monkeypatch.setattr(ngrams, "_READ_AT_ONCE", 64)
    monkeypatch.setattr(ngrams, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(near, "_PAIRS_AT_ONCE", 5)
    monkeypatch.setattr(near, "_BYTES_AT_ONCE", 2000)
    monkeypatch.setattr(ngrams, "_BYTES_AT_ONCE", 500)
    assert np.array_equal(likes(texts, tmp_path / "parts", [250, 350]), whole)


def test_a_long_document_has_the_same_signature_piece_by_piece_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [*corpus(30), "", "短", "a、b。" * 400, "长篇" + "".join(map(str, range(4000)))]
    data, ends = "".join(texts).encode(), np.cumsum([len(text.encode()) for text in texts])
    reference = ngrams.sign_block(data, ends)
    longest, plain = 0, ngrams.windows

    def watched(codes: npt.NDArray[np.uint32], n: int) -> npt.NDArray[np.uint64]:
        nonlocal longest
        longest = max(longest, len(codes))
        return plain(codes, n)

    monkeypatch.setattr(ngrams, "windows", watched)
    monkeypatch.setattr(ngrams, "_BYTES_AT_ONCE", 101, raising=False)
    pieces = ngrams.sign_block(data, ends)
    assert all(np.array_equal(*pair) for pair in zip(pieces, reference, strict=True))
    assert longest <= 101 + 4


def test_the_first_by_rank_stays(tmp_path: Path) -> None:
    rows = writer.documents("announcement", 10**6, 3, "train")
    first, second = next(rows)["text"], next(rows)["text"]
    texts = [first, second, first + "（完）", "短文", "！！！", first + "（续）", second + "。"]
    assert likes(texts, tmp_path / "near", [7]).tolist() == [0, 1, 0, 3, 4, 0, 1]
    assert likes(["短", "！"], tmp_path / "none", [2]).tolist() == [0, 1]
    ranks = [1, 2, 3, 4, 5, 6, 0]  # the last comes first, as a held-out one
    assert likes(texts, tmp_path / "ranks", [7], ranks).tolist() == [0, 6, 0, 3, 4, 0, 6]


def test_a_signature_estimates_the_similarity(tmp_path: Path) -> None:
    texts = corpus(400)
    (chunk,) = chunks_of(texts, tmp_path, [400])
    signatures, keys = ngrams.sign_chunk(chunk.path)
    assert keys.shape == (ngrams.BANDS, 400)
    pairs = [(number - 1 - back, number) for number in range(8, 400, 4) for back in range(3)]
    left, right = np.array(pairs).T
    estimate = ngrams.similarity(signatures[left], signatures[right])
    exact = np.array([jaccard(texts[a], texts[b]) for a, b in pairs])
    assert np.abs(estimate - exact).mean() < 0.03
    encoded = [text.encode() for text in texts]
    grams = ngrams.hash_grams(
        ngrams.words_only(ngrams.characters(b"".join(encoded), np.cumsum([len(text) for text in encoded]))), 5
    )
    sets = ngrams.distinct_grams(grams)
    for number in set(left.tolist()):
        others = [sets[place] for place in right[left == number]]
        for partner, wanted in zip(others, exact[left == number], strict=True):
            for several in ([partner], [partner, *others, *others]):  # counted at once, and one by one
                assert ngrams.are_similar(sets[number], several, wanted)[0]
                assert not ngrams.are_similar(sets[number], several, wanted + 1e-9)[0]


def test_texts_of_one_frame_are_read_once_however_often_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, letters = random.Random(3), [chr(0x4E00 + place) for place in range(3000)]
    frame = "".join(dice.choices(letters, k=400))
    texts = [frame + "".join(dice.choices(letters, k=60)) for _ in range(300)]  # 0.75 alike
    hashed, plain = list[int](), ngrams.hash_grams
    compared, similar = list[int](), ngrams.are_similar

    def count(text: ngrams.Characters, n: int) -> ngrams.Grams:
        hashed.append(len(text.starts) - 1)
        return plain(text, n)

    def count_pairs(own: ngrams.Distinct, others: Sequence[ngrams.Distinct], least: float) -> npt.NDArray[np.bool_]:
        compared.append(len(others))
        return similar(own, others, least)

    monkeypatch.setattr(ngrams, "hash_grams", count)
    monkeypatch.setattr(ngrams, "are_similar", count_pairs)
    assert np.array_equal(likes(texts, tmp_path / "near", [300]), np.arange(300))
    assert sum(hashed) <= 2 * len(texts)  # once for the signature, once to compare
    assert 1000 < sum(compared) <= 300 * 299 // 2
