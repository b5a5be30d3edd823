"""Near-duplicates against the exact answer."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from finlm.base.step_cache import Cache
from finlm.corpus import contamination, documents, near, ngrams, selection, workers
from finlm.corpus.workers import Context, Mapper
from finlm.recipe import recipe
from finlm.world import writer

from helpers import QUICKSTART


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
        index["characters"] = [len(text) for text in texts[first : first + size]]
        path = directory / f"{number}.txt"
        path.write_bytes(b"".join(encoded))
        np.save(path.with_suffix(".npy"), index)
        found.append(documents.Chunk(0, "source", path, slice(first, first + len(encoded))))
        first += size
    return found


def plan(chunks: Sequence[documents.Chunk], directory: Path) -> tuple[near.Search, list[near.Group]]:
    """The search for near-duplicates of chunks whose signatures are kept beside them."""
    signed = [
        workers.Kept(near.sign_chunk, workers.ChunkTask(chunk.path), directory / f"{chunk.path.stem}.npz")
        for chunk in chunks
    ]
    for kept in signed:
        workers.load_kept(kept)
    ngrams.Catalog.write(directory, chunks, [kept.path for kept in signed])
    return near.plan_search(directory, chunks, signed, 0.8)


def likes(
    texts: Sequence[str], directory: Path, sizes: Sequence[int], first: Sequence[int] = (), run: Mapper = map
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Of each text the one that it is dropped for, else its own number; those of `first` come before the others."""
    directory.mkdir()
    search, groups = plan(chunks_of(texts, directory, sizes), directory)
    for _ in run(near.sort_group, groups):
        pass
    states = np.full(len(texts), near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)
    states[list(first)] |= near.COMES_FIRST
    near.find_likes(search, states, lambda _, function, tasks: run(function, tasks))
    near.load_verifier.cache_clear()
    found: npt.NDArray[np.unsignedinteger[Any]] = np.load(directory / "like.npy")
    return found


def test_every_near_duplicate_goes_and_only_for_a_kept_text_that_says_all_it_says(tmp_path: Path) -> None:
    texts = corpus(700)
    like = likes(texts, tmp_path / "near", [300, 400])
    grams, known = [words(text) for text in texts], [contamination.find_facts(text) for text in texts]
    kept, dropped = np.flatnonzero(like == np.arange(700)).tolist(), np.flatnonzero(like != np.arange(700)).tolist()
    assert len(dropped) > 30
    for number in dropped:
        partner = int(like[number])
        assert partner < number and like[partner] == partner, "the first stays"
        assert jaccard(texts[number], texts[partner]) >= 0.8 and contamination.covers(known[partner], known[number])
    left = [
        (first, second)
        for first, second in combinations(kept, 2)
        if grams[first]
        and len(grams[first] & grams[second]) >= 0.8 * len(grams[first] | grams[second])
        and contamination.covers(known[first], known[second])
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
    known = {text: contamination.find_facts(text) for text in ("金价日内涨1.50%", "金价日内跌1.5%", "金价日内变动1.5%")}
    rose, fell, moved = known.values()
    assert not contamination.covers(rose, fell) and not contamination.covers(fell, rose)
    assert contamination.covers(rose, moved) and contamination.covers(fell, moved) and contamination.covers(moved, rose)
    assert contamination.covers(
        contamination.find_facts("收入1,000.50元和2元"), contamination.find_facts("收入1000.5元")
    )


def test_a_figure_counts_where_it_stands() -> None:
    """The 1 of January is none of a year's term, and 200 twice is not 1000 and 200."""
    march, january = (contamination.find_facts(f"2020年{month}月21日1年期为3.95%，5年期为4.75%") for month in (3, 1))
    assert not contamination.covers(march, january)
    mixed, equal = (contamination.find_facts(f"开展{amount}亿元逆回购，今日有200亿元到期") for amount in (1000, 200))
    assert not contamination.covers(mixed, equal)


def test_what_is_dropped_does_not_depend_on_chunks_or_on_how_much_is_sorted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = corpus(600)
    whole = likes(texts, tmp_path / "whole", [600])
    assert np.array_equal(likes(texts, tmp_path / "cut", [1, 99, 200, 300]), whole)
    with workers.LocalEngine(2).start(2) as run:
        monkeypatch.setattr(near, "_PART", 100)
        monkeypatch.setattr(near, "_GROUP", 150)
        assert np.array_equal(likes(texts, tmp_path / "workers", [100] * 6, run=run), whole)
    monkeypatch.setattr(near, "_PART", 7)
    monkeypatch.setattr(near, "_PAIRS_A_TASK", 3)
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
    assert np.array_equal(pieces, reference)
    assert longest <= 101 + 4


def test_the_first_by_rank_stays(tmp_path: Path) -> None:
    rows = writer.documents("announcement", 10**6, 3, "train")
    first, second = next(rows)["text"], next(rows)["text"]
    texts = [first, second, first + "（完）", "短文", "！！！", first + "（续）", second + "。"]
    assert likes(texts, tmp_path / "near", [7]).tolist() == [0, 1, 0, 3, 4, 0, 1]
    assert likes(["短", "！"], tmp_path / "none", [2]).tolist() == [0, 1]
    assert likes(texts, tmp_path / "ranks", [7], first=[6]).tolist() == [0, 6, 0, 3, 4, 0, 6]  # as a held-out one


def test_a_signature_estimates_the_similarity(tmp_path: Path) -> None:
    texts = corpus(400)
    (chunk,) = chunks_of(texts, tmp_path, [400])
    signatures = near.sign_chunk(workers.ChunkTask(chunk.path))["signatures"]
    assert ngrams.band_keys(signatures).shape == (ngrams.BANDS, 400)
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


def test_labels_have_64_bits_where_32_do_not_reach(tmp_path: Path) -> None:
    assert selection.label_type(2**32) == np.uint32 and selection.label_type(2**32 + 1) == np.uint64
    keys = ngrams.SortedKeys(tmp_path, (0, 2**32 - 2), 3)  # the second group reaches over 2**32
    values = np.arange(ngrams.BANDS * 4, dtype=np.uint64).reshape(ngrams.BANDS, 4) * np.uint64(2**57)
    for group in range(2):
        keys.write(group, values, np.arange(4, dtype=np.uint32))
    for band in (0, ngrams.BANDS - 1):
        parts = [keys.read(band, part) for part in range(3)]
        numbers = np.concatenate([numbers for _, numbers in parts])
        assert sorted(numbers.tolist()) == [0, 1, 2, 3, 2**32 - 2, 2**32 - 1, 2**32, 2**32 + 1]
        for part, (some, _) in enumerate(parts):
            assert all(part * 2**64 // 3 <= key < (part + 1) * 2**64 // 3 for key in some.tolist())
    big = np.arange(8, dtype=np.int64) + 2**32
    states = np.full(8, near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)
    states[5] |= near.COMES_FIRST
    numbers, run, _ = near._list_runs(np.array([9, 1, 9, 2, 1, 9, 3, 4], dtype=np.uint64), big, states)
    assert (numbers - 2**32).tolist() == [1, 4, 5, 0, 2] and (np.diff(run) > 0).tolist() == [False, True, False, False]


def test_what_repeats_a_dropped_document_is_compared_with_the_kept_one_of_64_bits() -> None:
    like = np.array([0, 0, 1, 2, 4, 4], dtype=np.uint64)
    orphans, heirs = near._find_orphans(like)
    assert orphans.tolist() == [2, 3] and heirs.tolist() == [0, 0]
    assert [(a.tolist(), b.tolist()) for a, b in selection.list_repeats(like)] == [([1, 2, 3, 5], [0, 1, 2, 4])]


def test_no_document_is_no_near_duplicate(tmp_path: Path) -> None:
    assert likes([], tmp_path / "none", []).tolist() == []


class Watched(Exception):
    """Raised in place of a kill."""


def test_a_search_that_was_killed_takes_up_the_finished_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus(400)
    whole = likes(texts, tmp_path / "whole", [400])
    (tmp_path / "texts").mkdir()
    chunks = chunks_of(texts, tmp_path / "texts", [150, 250])
    monkeypatch.setattr(near, "_PART", 100)
    settings = (f"data.cache_dir={tmp_path / 'cache'}", "data.dedup.method=near", "data.num_proc=1")
    loaded = recipe.load(QUICKSTART, settings)
    context = Context(loaded.recipe, Cache(tmp_path / "cache", build=True))
    done, plain = list[tuple[int, int]](), near._find_repeats
    left = 30

    def count(task: near.Range) -> workers.Arrays:
        """Do a range, until `left` were done."""
        if len(done) == left:
            raise Watched
        done.append((task.band, task.part))
        return plain(task)

    monkeypatch.setattr(near, "_find_repeats", count)

    def search(name: str) -> npt.NDArray[Any]:
        """like.npy of a new directory."""
        directory = tmp_path / name
        directory.mkdir()
        states = np.full(400, near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)
        near.write_likes(context, directory, chunks, states)
        assert [path.name for path in directory.iterdir()] == ["like.npy"]
        found: npt.NDArray[Any] = np.load(directory / "like.npy")
        return found

    with pytest.raises(Watched):
        search("killed")
    left = -1
    assert np.array_equal(search("second"), whole)
    assert done[:30] == [(band, part) for band in range(8) for part in range(4)][:30]
    assert done[30] == (7, 2), "the first range that was not finished"
    finished = len(done)
    assert np.array_equal(search("third"), whole) and len(done) == finished
    kept = sorted((tmp_path / "cache" / "chunks" / "near").rglob("*.npz"))
    kept[0].write_bytes(b"damaged")
    assert np.array_equal(search("fourth"), whole) and len(done) == finished + 1


def test_a_range_takes_the_same_memory_in_a_larger_corpus_and_the_parent_a_label_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any equal keys, so that nothing is compared: what the search itself allocates."""
    size, dice = 40_000, np.random.default_rng(5)

    def measure(groups: int) -> tuple[int, int]:
        """Most bytes allocated at once by (a range, the whole search) for groups of `size` documents."""
        directory = tmp_path / str(groups)
        directory.mkdir()
        keys = ngrams.SortedKeys(directory, tuple(size * group for group in range(groups)), groups)
        for group in range(groups):
            values = dice.integers(0, 2**64, (ngrams.BANDS, size), dtype=np.uint64)
            keys.write(group, values, np.arange(size, dtype=np.uint32))
        search = near.Search(directory, keys, 0.8)
        states = np.full(groups * size, near.TAKES_PART | near.IS_OPEN, dtype=np.uint8)
        np.save(directory / "states.npy", states)
        peaks = []
        for work in (
            lambda: near._find_repeats(near.Range(search, directory / "states.npy", 3, groups - 1)),
            lambda: near.find_likes(search, states, lambda _, function, tasks: map(function, tasks)),
        ):
            gc.collect()
            tracemalloc.start()
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return peaks[0], peaks[1]

    monkeypatch.setattr(selection, "BLOCK", size)
    small, large = measure(2), measure(32)
    assert large[0] < 1.1 * small[0] and large[0] < 80 * size
    assert large[1] < small[1] + 6 * 30 * size, "4 of them labels; the states were there"
