"""Find near-duplicates from MinHash signatures: candidates of equal bands are verified and dropped for a kept document.

Documents that agree in a band stand in a run of its sorted keys. The first of a run is its leader and is compared with
the others. Those that do not duplicate it form a new run with a new leader, so work grows with the number of different
texts in a run, not with its square. Pairs with a high estimated similarity are then compared by the exact Jaccard
similarity of their 5-grams, which takes 3 microseconds for a pair of 460 characters.

A document is dropped only for a kept document before it that is at least as similar as the threshold and has all of its
figures, dates and names (find_facts), the figures in the same order. So announcements of the same form, and news that
differ in a number, all stay.
Documents of the held-out world come before all others.

Memory is bounded: keys lie on disk, a file per band, and are sorted a few million at a time; caches of n-grams and
refused pairs take at most 64 and 32 MB. Beyond that a document takes 40 bytes: 511 MiB for 12 million.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.step_cache import Step
from finlm.corpus import documents, ngrams, selection
from finlm.corpus.documents import Documents
from finlm.corpus.workers import Arrays, ChunkTask, Context
from finlm.rows.shards import mix

Ids = npt.NDArray[np.int64]
Labels = npt.NDArray[np.uint32]
Verify = Callable[[Ids, Ids], npt.NDArray[np.bool_]]

_SORTED_AT_ONCE = 4_000_000  # documents: about 100 MB
_ROUNDS = 6  # in each, those are looked at again whose document was itself dropped
_LEADERS = 32  # leaders a run has at most; a run of more different texts is a frame (a date, a heading), no duplicate


def find_likes(table: ngrams.Table, ranks: Ids, wanted: npt.NDArray[np.bool_], verify: Verify) -> tuple[Labels, int]:
    """Find near-duplicates; return (like, the number of pairs compared).

    like, uint32 [documents], has the index of the kept document that a document duplicates, else its own index. `ranks`
    [documents] is the order of preference, lowest first; `wanted` [documents] selects documents. verify(left, right)
    returns for each pair whether the right document adds nothing to the left one.
    """
    numbers = np.arange(table.documents, dtype=np.uint32)
    order = np.argsort(ranks, kind="stable").astype(np.uint32)
    like, is_open, compared = numbers.copy(), wanted.copy(), 0
    for _ in range(_ROUNDS):
        taking_part = wanted & (like == numbers)
        for band in range(ngrams.BANDS):
            for runs in _runs(table, band, taking_part, ranks, order):
                compared += _drop_members(runs, like, is_open, verify)
        orphans = np.flatnonzero(like[like] != like)  # what they were dropped for was dropped later
        heirs = like[like[orphans]]
        while not np.array_equal(heirs, like[heirs]):
            heirs = like[heirs]
        same = verify(heirs.astype(np.int64), orphans)
        compared += len(orphans)
        like[orphans] = np.where(same, heirs, orphans)
        is_open = np.zeros(table.documents, dtype=np.bool_)
        is_open[orphans[~same]] = True
        if not is_open.any():
            break
    orphans = np.flatnonzero(like[like] != like)
    like[orphans] = orphans
    return like, compared


def _runs(
    table: ngrams.Table, band: int, wanted: npt.NDArray[np.bool_], ranks: Ids, order: npt.NDArray[np.uint32]
) -> Iterator[tuple[Ids, Ids]]:
    """Yield (documents, start of each run): documents that share this band's key with another lie in the same run.

    `wanted` selects documents; `ranks` has each document's rank and `order` the document of each rank. A run is sorted
    by rank. Only a part of the keys is read and sorted at a time, to save memory.
    """
    if not wanted.any():
        return
    parts = -(-int(np.count_nonzero(wanted)) // _SORTED_AT_ONCE)
    for packed in _by_part(table, band, wanted, ranks, parts):
        packed.sort()
        equal = (packed[1:] >> np.uint64(32)) == (packed[:-1] >> np.uint64(32))
        member = np.concatenate((equal, [False])) | np.concatenate(([False], equal))
        start = np.concatenate(([True], ~equal))[member]
        documents = order[(packed[member] & np.uint64(2**32 - 1)).astype(np.int64)].astype(np.int64)
        yield documents, np.flatnonzero(start)


def _by_part(
    table: ngrams.Table, band: int, wanted: npt.NDArray[np.bool_], ranks: Ids, parts: int
) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the band's keys of the wanted documents as key << 32 | rank, uint64, unsorted, in `parts` arrays.

    Splits the band by key into temporary files in the table's directory, and deletes each file after yielding it.
    """
    paths = [table.directory / f"part-{part}.u64" for part in range(parts)]
    for first, keys in table.keys(band):
        chosen = np.flatnonzero(wanted[first : first + len(keys)])
        packed = keys[chosen].astype(np.uint64) << np.uint64(32) | ranks[chosen + first].astype(np.uint64)
        part = keys[chosen] % np.uint32(parts)
        by_part = np.argsort(part, kind="stable")
        ends = np.searchsorted(part[by_part], np.arange(parts), side="right")
        for path, piece in zip(paths, np.split(packed[by_part], ends[:-1]), strict=True):
            with path.open("ab") as file:
                file.write(piece.tobytes())
    for path in paths:
        yield np.fromfile(path, dtype=np.uint64)
        path.unlink()


def _drop_members(runs: tuple[Ids, Ids], like: Labels, is_open: npt.NDArray[np.bool_], verify: Verify) -> int:
    """Set like[d] to the leader for each open document d that duplicates a leader of its run.

    Returns the number of pairs compared. `is_open` [documents] marks documents that may still be dropped.
    """
    documents, starts = runs
    run = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(documents))))
    compared = 0
    for _ in range(_LEADERS):
        in_use = like[documents] == documents
        documents, run = documents[in_use], run[in_use]
        if not len(documents):
            break
        is_leader = np.concatenate(([True], run[1:] != run[:-1]))
        leader = documents[is_leader][np.cumsum(is_leader) - 1]
        leader, documents, run = leader[~is_leader], documents[~is_leader], run[~is_leader]
        asked = np.flatnonzero(is_open[documents])
        same = asked[verify(leader[asked], documents[asked])]
        compared += len(asked)
        like[documents[same]] = leader[same]
    return compared


# Facts are numbers (1,000.50 is 1000.5) with the direction that stands before them (+ rose, - fell), Chinese numbers
# with what they count (三季度, 第五次), words in Latin letters (COMEX), the names of companies and funds (what stands
# before 有限公司, 银行, 基金 and the like) and of persons (after a title, or before 先生 and 女士). Other names, as a
# share's short one without its code, are not known. Judging a pair by them costs 20 to 100 microseconds a text.
class Facts(NamedTuple):
    """What a text says, for covers()."""

    known: frozenset[str]
    numbers: tuple[str, ...]  # in order: the 1 of 1月 is not the 1 of 1年期


FACTS_VERSION = 2

_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_BEFORE_NUMBER = re.compile(
    r"(?:([涨升增盈高])|([跌降减亏低滑]))?[了幅超逾约近至到为达额损]{0,2}((?<![0-9A-Za-z])[-－−+＋])?\Z"
)
_BEFORE = 4  # characters of it at most
_CHINESE_NUMBER = re.compile(
    "第?[〇零一二两三四五六七八九十百千万亿]+(?:年|月|日|季|期|届|次|号|条|章|节|批|轮|成|倍|个|家|名|位|亿|元|股|度|分之)"
)
_WORD = re.compile("[A-Z]{2,}|[A-Za-z]{4,}")
_KIND = (
    "(?:股份有限公司|有限责任公司|有限公司|控股集团|集团|银行|证券|信托|保险|基金管理|"
    "(?:债券|混合|股票|指数|货币)[\u3400-\u9fff]{0,6}基金)"
)
_BEGINS_KIND = re.compile(f"(?={_KIND})")
_ORGANISATION = re.compile(f"([\u3400-\u9fffA-Za-z]{{2,6}}){_KIND}")
_SURNAMES = (
    "王李张刘陈杨黄赵吴周徐孙马朱胡郭何林罗高郑梁谢宋唐许韩邓冯曹彭曾肖田董潘袁蔡蒋余于杜叶程魏苏吕丁任卢姚沈钟姜崔谭陆"
    "范汪廖石金韦贾夏付方邹熊白孟秦邱侯江尹薛闫段雷龙黎史陶贺毛郝顾龚邵万覃武钱戴严莫孔向常汤褚卫尤施华戚喻柏章云葛奚"
)
_PERSON = re.compile(
    f"(?:董事长|董事|监事|经理|总监|总裁|行长|主席|秘书|董秘|会计师|代表人|分析师|记者|先后由|聘任|选举|提名)[:：]?\\s?"
    f"([{_SURNAMES}][\u4e00-\u9fff]{{1,2}})"
    f"|([{_SURNAMES}][\u4e00-\u9fff]{{1,2}})(?:先生|女士|同志|博士|教授)"
)
_SIGNS = {"-": "-", "－": "-", "−": "-", "+": "+", "＋": "+"}


def find_facts(text: str) -> Facts:
    """Return the facts of a text: numbers, signed as well if a direction stands before, Latin words and names."""
    facts, numbers = set[str](), list[str]()
    for number in _NUMBER.finditer(text):
        plain = number[0].replace(",", "")
        plain = (plain.rstrip("0").rstrip(".") if "." in plain else plain).lstrip("0") or "0"
        facts.add(plain)
        numbers.append(plain)
        before = _BEFORE_NUMBER.search(text, max(0, number.start() - _BEFORE), number.start())
        assert before is not None  # it may be empty
        rose, fell, sign = before.groups()
        direction = "+" if rose else "-" if fell else _SIGNS.get(sign, "")
        if direction:
            facts.add(direction + plain)
    facts.update(_CHINESE_NUMBER.findall(text))
    facts.update(word.lower() for word in _WORD.findall(text))
    facts.update(f"={name}" for name in _organisations(text))
    facts.update(f"@{after or before}" for after, before in _PERSON.findall(text))
    return Facts(frozenset(facts), tuple(numbers))


def _organisations(text: str) -> Iterator[str]:
    """Yield what _ORGANISATION.findall(text) returns, ten times as fast: it looks only where a kind of firm begins."""
    done = 0
    for kind in _BEGINS_KIND.finditer(text):
        for start in range(max(done, kind.start() - 6), kind.start() - 1):
            if match := _ORGANISATION.match(text, start):
                yield match[1]
                done = match.end()
                break


def covers(left: Facts, right: Facts) -> bool:
    """Return whether left has all facts of right, and right's numbers in their order, perhaps with others between them.

    A missing sign (+ or -) counts only if left has the opposite sign.
    """
    for fact in right.known - left.known:
        if fact[0] not in "+-" or ("-+"[fact[0] == "-"] + fact[1:]) in left.known:
            return False
    rest = iter(left.numbers)
    return all(number in rest for number in right.numbers)


# An estimate lies this far below the truth once in a million pairs of long documents; of short ones, whose empty bins
# repeat others, no pair of the real text was lost by it.
_MARGIN = 0.2
_PAIRS_AT_ONCE = 8192
_BYTES_AT_ONCE = 16 * 2**20
_HUGE = 4 * 2**20  # bytes; the estimate of so long a text needs no second look
_KEPT_GRAMS = 8 * 2**20
_KEPT_PAIRS = 2**22
_KEPT_MAPS = 64  # chunks, of 8 MB or one longer document
_KEPT_FACTS = 20_000  # documents: about 40 MB


class Verifier:
    """Callable that returns for pairs of document indexes, in any order, whether the right document repeats the left.

    Reads the texts from the chunks when needed, and keeps n-grams, facts and refused pairs in bounded caches.
    """

    def __init__(
        self,
        table: ngrams.Table,
        chunks: Sequence[documents.Chunk],
        text_bytes: npt.NDArray[np.integer],
        threshold: float,
        by_facts: bool = True,
    ) -> None:
        """Keep the signatures, the chunks with the texts, and the size of each text in bytes: [documents].

        `threshold` is the least Jaccard similarity. With `by_facts`, the right document must have no fact that left
        lacks.
        """
        self._by_facts = by_facts
        self._table = table
        self._chunks = chunks
        self._first = np.array([chunk.rows.start for chunk in chunks])
        self._map = lru_cache(_KEPT_MAPS)(lambda number: _map_file(chunks[number].path))
        self._bytes = text_bytes
        self._start = np.concatenate(([0], np.cumsum(text_bytes, dtype=np.int64)))  # as if the chunks were one file
        self._threshold = threshold
        self._grams: dict[int, ngrams.Distinct] = {}
        self._count = 0  # n-grams in it
        self._facts: dict[int, Facts] = {}
        self._refused = np.zeros(_KEPT_PAIRS, dtype=np.uint64)  # by the end of its hash; a later pair replaces one

    def __call__(self, left: Ids, right: Ids) -> npt.NDArray[np.bool_]:
        """Return bool [pairs]: whether right is at least as similar as the threshold and, if by_facts, adds no fact.

        For texts over 4 MiB the estimated similarity is used, for others the exact similarity.
        """
        same = np.zeros(len(left), dtype=np.bool_)
        for first in range(0, len(left), _PAIRS_AT_ONCE):
            here = slice(first, first + _PAIRS_AT_ONCE)
            estimate = self._table.similarity(left[here], right[here])
            longer = np.maximum(self._bytes[left[here]], self._bytes[right[here]])
            huge = (longer > _HUGE) & (estimate >= self._threshold)
            pair = left[here].astype(np.uint64) << np.uint64(32) | right[here].astype(np.uint64)
            place = mix(pair) % np.uint64(_KEPT_PAIRS)
            close = (estimate >= self._threshold - _MARGIN) & (self._refused[place] != pair)
            likely = first + np.flatnonzero(close & (longer <= _HUGE))
            for some in self._batches(likely, left, right):
                same[some] = self._compare_pairs(left[some], right[some])
            for number in (first + np.flatnonzero(huge)).tolist():
                same[number] = self._says_nothing_new(int(left[number]), int(right[number]))
            refused = likely[~same[likely]] - first
            self._refused[place[refused]] = pair[refused]
        return same

    def _batches(self, pairs: Ids, left: Ids, right: Ids) -> Iterator[Ids]:
        """Yield the indexes of pairs in groups whose texts together have about 16 MiB; yields nothing without pairs.

        `pairs` are indexes into `left` and `right`, which have a document each.
        """
        total = np.cumsum(self._bytes[left[pairs]].astype(np.int64) + self._bytes[right[pairs]])
        batch = total // _BYTES_AT_ONCE
        yield from np.split(pairs, np.flatnonzero(np.diff(batch)) + 1) if len(pairs) else ()

    def _compare_pairs(self, left: Ids, right: Ids) -> npt.NDArray[np.bool_]:
        """Return bool [pairs]: whether the exact similarity reaches the threshold and _says_nothing_new() is true.

        The similarity is the Jaccard similarity of the documents' 5-grams, which are kept for later calls.
        """
        ids = np.unique(np.concatenate((left, right)))
        if self._count > _KEPT_GRAMS:
            self._grams.clear()
            self._count = 0
        missing = ids[[number not in self._grams for number in ids.tolist()]]
        if len(missing):
            data, ends = self._read(missing)
            grams = ngrams.hash_grams(ngrams.words_only(ngrams.characters(data, ends)), ngrams.SHINGLE)
            distinct = ngrams.distinct_grams(grams)
            self._count += sum(map(len, distinct))
            self._grams.update(zip(missing.tolist(), distinct, strict=True))
        same = np.zeros(len(left), dtype=np.bool_)
        order = np.argsort(left, kind="stable")
        for pairs in ngrams.split(order, np.flatnonzero(np.diff(left[order])) + 1):
            others = [self._grams[number] for number in right[pairs].tolist()]
            same[pairs] = ngrams.are_similar(self._grams[int(left[pairs[0]])], others, self._threshold)
        for number in np.flatnonzero(same).tolist():
            same[number] = self._says_nothing_new(int(left[number]), int(right[number]))
        return same

    def _says_nothing_new(self, left: int, right: int) -> bool:
        """Return whether document left has all facts of document right; True without by_facts."""
        if not self._by_facts:
            return True
        if len(self._facts) > _KEPT_FACTS:
            self._facts.clear()
        for number in (left, right):
            if number not in self._facts:
                self._facts[number] = find_facts(self._read(np.array([number]))[0].decode("utf-8"))
        return covers(self._facts[left], self._facts[right])

    def _read(self, ids: Ids) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Return (UTF-8 texts end to end, byte offset of the end of each); `ids` must ascend."""
        numbers = np.searchsorted(self._first, ids, side="right") - 1
        starts, sizes = self._start[ids] - self._start[self._first[numbers]], self._bytes[ids].astype(np.int64)
        places = zip(numbers.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        return b"".join(self._map(number)[start : start + size] for number, start, size in places), np.cumsum(sizes)


def _map_file(path: Path) -> mmap.mmap | bytes:
    """Return a file's bytes, mapped into memory unless it is empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if path.stat().st_size else b""


VERSION = 2


def find_near_duplicates(
    context: Context, read: Documents, others: Mapping[str, Any], settle: Callable[[], selection.Decisions]
) -> Step | None:
    """Run the step `near_duplicates` unless cached; it writes like.npy (see find_likes).

    None unless data.dedup.method is near. settle() returns the decisions of selection.settle, which depend on `others`;
    it is called only if the step is not in the cache. Prints the counts. Raises NotPrepared if the step is missing and
    the cache may not build.
    """
    settings = context.data.dedup
    if settings.method != "near":
        return None

    def make(directory: Path) -> dict[str, int]:
        """Write like.npy into directory; return the counts of the manifest."""
        table, settled = selection.Table.read(read.chunks), settle()
        signatures = _sign(context, directory, read.chunks)
        verify = Verifier(signatures, read.chunks, table.text_bytes, settings.threshold)
        wanted = (settled <= selection.HELD_OUT) & _find_signed(signatures)
        ranks = np.empty(len(settled), dtype=np.int64)
        ranks[np.argsort(settled != selection.HELD_OUT, kind="stable")] = np.arange(len(settled))
        like, compared = find_likes(signatures, ranks, wanted, verify)
        signatures.remove()
        np.save(directory / "like.npy", like)
        return {"compared": compared, "duplicates": int(np.count_nonzero(like != np.arange(len(like))))}

    depends_on = {
        "version": [VERSION, FACTS_VERSION, ngrams.SIGNATURE_VERSION],
        "threshold": settings.threshold,
        **others,
    }
    step = context.cache.step("near_duplicates", depends_on, make, read.count * (5 + 2 * ngrams.BYTES_A_DOCUMENT))
    context.say(
        step,
        f"{step.manifest['duplicates']:,} of {read.count:,} documents are near-duplicates of one that is kept "
        f"({step.manifest['compared']:,} pairs compared)",
    )
    return step


def count_leak(
    context: Context, directory: Path, read: Documents, table: selection.Table, decision: selection.Decisions
) -> dict[str, int]:
    """Return how many training documents are as similar to a held-out one as the threshold, whatever their facts.

    Returns {"documents": such training documents, "held_out": the distinct held-out documents that they match}. Writes
    temporary signature files into `directory`.
    """
    signatures, held_out = _sign(context, directory, read.chunks), decision == selection.HELD_OUT
    compare = Verifier(signatures, read.chunks, table.text_bytes, context.data.dedup.threshold, by_facts=False)

    def verify(left: Ids, right: Ids) -> npt.NDArray[np.bool_]:
        """Return bool [pairs]: whether left is held out, right is not, and both are similar."""
        same: npt.NDArray[np.bool_] = held_out[left] & ~held_out[right]
        same[same] = compare(left[same], right[same])
        return same

    ranks = np.empty(len(decision), dtype=np.int64)
    ranks[np.argsort(~held_out, kind="stable")] = np.arange(len(decision))
    wanted = (decision <= selection.HELD_OUT) & _find_signed(signatures)
    like, _ = find_likes(signatures, ranks, wanted, verify)
    signatures.remove()
    leaked = like[like != np.arange(len(like))]
    return {"documents": len(leaked), "held_out": len(np.unique(leaked))}


def read_likes(step: Step | None) -> npt.NDArray[np.uint32] | None:
    """Return the like.npy of a near_duplicates step, uint32 [documents]; None without a step."""
    return None if step is None else np.load(step.path / "like.npy")


def _sign(context: Context, directory: Path, chunks: Sequence[documents.Chunk]) -> ngrams.Table:
    """Compute the signatures of all chunks in workers, write them to files in `directory`, and return their table."""
    version = ngrams.SIGNATURE_VERSION
    tasks = [(files.sha256_json([version, chunk.key]), ChunkTask(chunk.path)) for chunk in chunks]
    writer = ngrams.Writer(directory)
    for made in context.map_kept("signatures", _sign_chunk, tasks):
        writer.append(made["signatures"], made["keys"])
    writer.close()
    return ngrams.Table(directory, writer.documents)


def _sign_chunk(task: ChunkTask) -> Arrays:
    signatures, keys = ngrams.sign_chunk(task.chunk)
    return {"signatures": signatures, "keys": keys}


def _find_signed(table: ngrams.Table) -> npt.NDArray[np.bool_]:
    """Return bool [documents]: whether the document has a signature, that is at least one 5-gram."""

    def blocks() -> Iterator[npt.NDArray[np.bool_]]:
        for first in range(0, table.documents, 2**18):
            yield ngrams.has_signature(table.signatures()[first : first + 2**18])

    return np.concatenate([*blocks(), np.empty(0, dtype=np.bool_)])
