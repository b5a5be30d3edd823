"""Find documents that contain a benchmark's questions, by the share of a question's 6-grams that stand in the document.

A question counts as contained when the document holds at least 65 % of its 6-grams, of letters and digits only. In
47,493 real finance documents no question of FinanceIQ (7,173, many about the laws in the corpus) reaches more than 53
%; one printed as an exam reaches 100 %, with two characters changed three in four are still found. The usual test, any
13-gram in common, would drop 289 of these documents, for phrases of law.

A stem that is mostly wording shared with other questions ("下列说法正确的是") says little: there the options, with
their letters, belong to the question. Of a stem that was shortened or reworded two fifths are enough where the options
stand beside it, and two rows in a row count as one where each holds a part. Other rewordings and translations are not
found, nor a question whose halves lie in two chunks of 8 MB.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import NotPrepared, Step, file_changed
from finlm.corpus import documents, ngrams, normalize
from finlm.corpus.documents import Documents
from finlm.corpus.read import sources
from finlm.corpus.workers import Arrays, ChunkTask, Context
from finlm.rows.shards import unmix, within

VERSION = 2
GRAM = 6
SHARE = 0.65
_OF_OPTIONS, _OF_STEM = 0.8, 0.4  # shares that together are a question, too
_OF_A_ROW, _MORE = 0.15, 0.1  # share that each of two rows has of a question that spans them, and adds to the other
_WORDING = 3  # an n-gram of more questions than this is wording: "以下哪一项是正确的"
_ENOUGH_OWN = 9  # n-grams of its own that make a stem say what it asks
_OPTIONS = ("a", "b", "c", "d", "e", "f")
_TABLE_BITS = 21
_SPREAD = 0x9E3779B1  # a prime near 2**32 over the golden ratio


@dataclass(frozen=True)
class Question:
    """One row of a benchmark's CSV file."""

    file: str
    line: int
    stem: str
    options: str


@dataclass(frozen=True)
class Hit:
    """A question that a document contains."""

    document: int  # in its chunk
    question: int
    share: float  # of the question's n-grams
    start: str = ""  # of the document, as a chunk's result is kept


def read_questions(paths: Sequence[Path]) -> Iterator[Question]:
    """Yield the questions of CSV files; raises UserError for one without a column `question`, or unreadable."""
    fix = "data.decontaminate takes CSV files with a column question (and A, B, C, D)"
    for path in paths:
        for line, row in read_csv(path, ("question",), fix):
            yield question(path.name, line, row)


def read_csv(path: Path, columns: Sequence[str], fix: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, {lower-case column name: value}) for each row of a CSV file of questions.

    Raises UserError for a file that cannot be read, and with `fix` for a file that lacks one of the `columns`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = [name.strip().lower() for name in next(reader, [])]
            if missing := [name for name in columns if name not in names]:
                said = f"no column {', '.join(missing)}; its columns are {', '.join(names) or 'none'}"
                raise UserError(f"{path} holds no questions", evidence=said, fix=fix)
            for values in reader:
                yield reader.line_num, dict(zip(names, values, strict=False))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}", evidence=str(error), fix="give a CSV file in UTF-8") from None


def question(file: str, line: int, row: dict[str, str]) -> Question:
    """Return the Question of a row, {lower-case column: value}: its question, "" if missing, and its options a to f."""
    options = " ".join(f"{name} {_normalise_question(row[name])}" for name in _OPTIONS if row.get(name))
    return Question(file, line, _normalise_question(row.get("question", "")), options)


def _normalise_question(text: str) -> str:
    """Return a question's text without HTML, in uniform spelling and simplified Chinese."""
    return normalize.simplify(normalize.normalise(normalize.strip_html(text)))


_BUCKET_BITS = 20


class _Buckets:
    """Distinct ascending `hashes` by their first 20 bits, to look many others up in a step or two each."""

    def __init__(self, hashes: npt.NDArray[np.uint64]) -> None:
        self._hashes = hashes
        firsts = np.arange(2**_BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - _BUCKET_BITS)
        self._begin = np.append(np.searchsorted(hashes, firsts), len(hashes))

    def find(self, wanted: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return (index, is there) of each wanted hash; an index means nothing where the hash is not there."""
        bucket = wanted >> np.uint64(64 - _BUCKET_BITS)
        place, end = self._begin[bucket], self._begin[bucket + np.uint64(1)]
        is_there = np.zeros(len(wanted), dtype=np.bool_)
        left = np.flatnonzero(place < end)
        while len(left):
            here = self._hashes[place[left]]
            is_there[left] = here == wanted[left]
            left = left[(here < wanted[left]) & (place[left] + 1 < end[left])]
            place[left] += 1
        return place, is_there


class Index:
    """The n-grams of all questions, for finding them in many documents at once."""

    def __init__(self, hashes: npt.NDArray[np.uint64], part: npt.NDArray[np.int32], total: npt.NDArray[np.int64]):
        self.hashes = hashes  # [entries], ascending; a gram of two questions is there twice
        self.part = part  # [entries]: 2 i what question i asks, 2 i + 1 its options
        self.total = total  # [parts], different grams of each
        self.unique, first = np.unique(hashes, return_index=True)
        self._first, self._buckets = np.append(first, len(hashes)), _Buckets(self.unique)
        self._maybe = np.zeros(1 << _TABLE_BITS, dtype=np.uint8)  # eight n-grams a byte
        place, bit = _places(unmix(self.unique).astype(np.uint32))
        np.bitwise_or.at(self._maybe, place, bit)

    @classmethod
    def of(cls, questions: Sequence[Question]) -> Index:
        """Return the index of these questions; a question shorter than an n-gram is never a hit."""
        stems = _gram_records([question.stem for question in questions])
        _, of_gram, askers = np.unique(stems["hash"], return_inverse=True, return_counts=True)
        own_grams = np.bincount(stems["question"][askers[of_gram] <= _WORDING], minlength=len(questions))
        texts = [
            question.stem if count >= _ENOUGH_OWN else f"{question.stem} {question.options}"
            for question, count in zip(questions, own_grams, strict=True)
        ]
        pairs = _gram_records(
            [part for text, question in zip(texts, questions, strict=True) for part in (text, question.options)]
        )
        return cls(pairs["hash"], pairs["question"], np.bincount(pairs["question"], minlength=2 * len(questions)))

    def save(self, path: Path) -> None:
        """Write the index's arrays to the .npz file `path`."""
        np.savez(path, hashes=self.hashes, part=self.part, total=self.total)

    @classmethod
    def load(cls, path: Path) -> Index:
        """Read an index that save() wrote."""
        with np.load(path) as arrays:
            return cls(arrays["hashes"], arrays["part"], arrays["total"])

    def find(self, data: bytes, ends: npt.NDArray[np.integer]) -> list[Hit]:
        """Return the questions that each document contains, as hits sorted by document and question.

        A document contains a question if its share (_shares) is at least SHARE. `data` is UTF-8 documents end to end,
        `ends` [documents] the byte offset of each end. A question that spans two documents in a row is a hit in both.
        """
        document, place = self._look_up(data, ends)
        alone = self._shares(document, place)
        hits = {pair: share for pair, share in alone.items() if share >= SHARE}
        first = {number for number, question in alone if (number + 1, question) in alone}
        here = np.isin(document, list(first | {number + 1 for number in first}))
        document, place = document[here], place[here]
        for shift in (0, 1):  # rows 0 and 1, 2 and 3, ..., then 1 and 2, 3 and 4, ...
            for (row, question), share in self._shares((document + shift) // 2, place).items():
                rows = [(2 * row - shift, question), (2 * row - shift + 1, question)]
                parts = [alone.get(pair, 0.0) for pair in rows]
                if share >= max(SHARE, max(parts) + _MORE) and min(parts) >= _OF_A_ROW:
                    hits |= dict.fromkeys(rows, share)
        return [Hit(document, question, share) for (document, question), share in sorted(hits.items())]

    def _look_up(
        self, data: bytes, ends: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """Return (document, index into `unique`) of every n-gram of the data that a question has, in order.

        Half of each sum and a bit table tell first which n-grams may be among them: 3 to 8 in 100.
        """
        numbers, places = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.intp)]
        for first, here, limits in ngrams.blocks(data, ends):
            text = ngrams.words_only(ngrams.characters(here, limits))
            at, bit = _places(ngrams.sums(text.codes, GRAM))
            maybe = np.flatnonzero((self._maybe.take(at) & bit) != 0)
            document = np.searchsorted(text.starts, maybe, side="right") - 1
            inside = maybe + GRAM <= text.starts[document + 1]
            maybe, document = maybe[inside], document[inside]
            place, known = self._buckets.find(ngrams.hash_at(text.codes, maybe, GRAM))
            numbers.append(document[known] + first)
            places.append(place[known])
        return np.concatenate(numbers), np.concatenate(places)

    def _shares(self, document: npt.NDArray[np.int64], place: npt.NDArray[np.intp]) -> dict[tuple[int, int], float]:
        """Return {(document, question): share of the question's n-grams in the document}, where it is at least 15 %.

        Takes what _look_up() returns. With the question's options beside it, two fifths of the stem count as SHARE.
        """
        # Each gram once a document, then once for each part that has it.
        seen, _ = _count_distinct(document * len(self.unique) + place)
        document, place = seen // max(1, len(self.unique)), seen % max(1, len(self.unique))
        times = self._first[place + 1] - self._first[place]
        part = self.part[np.repeat(self._first[place], times) + within(times)]
        pair, count = _count_distinct(np.repeat(document, times) * len(self.total) + part)
        share = count / self.total[pair % len(self.total)]
        asked = pair[share >= _OF_A_ROW] % 2 == 0
        pair, share = pair[share >= _OF_A_ROW], share[share >= _OF_A_ROW]
        enough = share >= np.where(self.total[pair % len(self.total)] >= _ENOUGH_OWN, _OF_OPTIONS, np.inf)
        beside = np.isin(pair, pair[~asked & enough] - 1) & (share >= _OF_STEM)
        values = zip(
            pair[asked].tolist(), np.where(beside, np.maximum(share, SHARE), share)[asked].tolist(), strict=True
        )
        return {(number // len(self.total), number % len(self.total) // 2): value for number, value in values}


def _count_distinct(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (the distinct values in order, how often each is there). Sorts `values` in place; none may be negative."""
    values.sort()
    first = np.flatnonzero(np.diff(values, prepend=-1))
    return values[first], np.diff(first, append=len(values))


def _places(sums: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Return (byte index in the bit table, bit mask) of n-grams, from the lower halves of their sums."""
    spread = sums * np.uint32(_SPREAD)
    bit = (spread >> np.uint32(32 - _TABLE_BITS - 3)).astype(np.uint8) & np.uint8(7)
    return spread >> np.uint32(32 - _TABLE_BITS), np.uint8(1) << bit


def _gram_records(texts: Sequence[str]) -> npt.NDArray[Any]:
    """Return records (hash, question: the text's index) of the distinct 6-grams of each text, sorted by hash."""
    encoded = [text.encode() for text in texts]
    text = ngrams.characters(b"".join(encoded), np.cumsum([len(item) for item in encoded], dtype=np.int64))
    grams = ngrams.hash_grams(ngrams.words_only(text), GRAM)
    pairs = np.empty(len(grams.hashes), dtype=[("hash", np.uint64), ("question", np.int32)])
    order = np.lexsort((grams.document, grams.hashes))  # a tenth of the time that records take to sort
    pairs["hash"], pairs["question"] = grams.hashes[order], grams.document[order]
    is_new = np.ones(len(pairs), dtype=np.bool_)
    is_new[1:] = pairs[1:] != pairs[:-1]
    distinct: npt.NDArray[Any] = pairs[is_new]
    return distinct


def find_hits(task: ChunkTask) -> Arrays:
    """Return {"hits": uint8, JSON of a chunk's hits with the first 120 characters of documents}. Runs in a worker."""
    data, ends = task.chunk.read_bytes(), documents.read_index(task.chunk)["end"]
    bounds = [0, *ends.tolist()]
    hits = []
    for hit in _load_index(*task.beside).find(data, ends):
        start, end = bounds[hit.document : hit.document + 2]
        begins = data[start : min(end, start + 600)].decode("utf-8", errors="ignore")[:120]
        hits.append(asdict(replace(hit, share=round(hit.share, 3), start=begins)))
    return {"hits": np.frombuffer(json.dumps(hits).encode(), dtype=np.uint8)}


_load_index = lru_cache(maxsize=1)(Index.load)  # a worker has many chunks for one index


_SAMPLES = 50  # hits a source kept in contaminated.jsonl


def check_benchmarks(context: Context) -> None:
    """Raise UserError if a pattern of data.decontaminate matches no file; do nothing if the cache may not build."""
    if context.cache.build:
        _find_files(context, context.data.decontaminate)


def find_contaminated(context: Context, read: Documents) -> Step | None:
    """Run the step `contamination` unless cached; it writes documents.npy, the ascending indexes, and samples.

    None without data.decontaminate. Prints the counts. Raises UserError for benchmark files that are missing,
    unreadable or changed since they were hashed; NotPrepared instead if they, their hashes or the step are missing and
    the cache may not build.
    """
    patterns = context.data.decontaminate
    if not patterns:
        return None
    paths = _find_files(context, patterns)

    def make(directory: Path) -> dict[str, int]:
        """Write documents.npy, contaminated.jsonl and questions.npz (the index) into directory; return the counts."""
        questions = list(read_questions(paths))
        for path in paths:
            if files.sha256_file(path) != hashes[path]:
                raise file_changed(path)
        index = directory / "questions.npz"
        Index.of(questions).save(index)
        key = [VERSION, [hashes[path] for path in paths]]
        tasks = [(files.sha256_json([key, each.key]), ChunkTask(each.path, (index,))) for each in read.chunks]
        contaminated: list[int] = []
        by_source: Counter[str] = Counter()
        asked: set[int] = set()
        with (directory / "contaminated.jsonl").open("w", encoding="utf-8") as ledger:
            for chunk, made in zip(read.chunks, context.map_kept("contamination", find_hits, tasks), strict=True):
                hits = [Hit(**row) for row in json.loads(made["hits"].tobytes())]
                for hit in hits:
                    question = questions[hit.question]
                    asked.add(hit.question)
                    by_source[chunk.source] += 1
                    if by_source[chunk.source] <= _SAMPLES:
                        row = {"source": chunk.source, "file": question.file, "line": question.line}
                        row |= {"stem": question.stem, "share": hit.share, "start": hit.start}
                        ledger.write(json.dumps(row, ensure_ascii=False) + "\n")
                contaminated += sorted({chunk.rows.start + hit.document for hit in hits})
        np.save(directory / "documents.npy", np.array(contaminated, dtype=np.int64))
        return {"questions": len(questions), "documents": len(contaminated), "found": len(asked)}

    hashes = {path: about.sha256 for path, about in zip(paths, context.cache.fingerprints(paths), strict=True)}
    depends_on = {
        "version": VERSION,
        "documents": read.content,
        "questions": [[path.name, hashes[path]] for path in paths],
    }
    step = context.cache.step("contamination", depends_on, make, 64 * 2**20)
    context.say(
        step,
        f"{step.manifest['documents']:,} documents contain {step.manifest['found']:,} of "
        f"{step.manifest['questions']:,} benchmark questions",
    )
    return step


def _find_files(context: Context, patterns: Sequence[str]) -> list[Path]:
    """Return the files that match, each once. None: UserError, or NotPrepared if the cache may not build."""
    paths: list[Path] = []
    for pattern in patterns:
        matching = sources.expand(pattern)
        if not matching and not context.cache.build:
            raise NotPrepared("contamination")
        if not matching:
            raise UserError(
                f"data.decontaminate: no file matches {pattern}",
                evidence=f"looked from {Path.cwd()}",
                fix="correct the path, or take it out of data.decontaminate",
            )
        paths += matching
    return list(dict.fromkeys(paths))


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
