"""Find near-duplicates from MinHash signatures: candidates of equal bands are verified and dropped for a kept document.

Documents that agree in a band have the same key there. In the order of preference, the first of them is a leader and is
compared with the others. Those that do not duplicate it have a new leader, so work grows with the number of different
texts of a key, not with its square. Pairs with a high estimated similarity are compared by the exact Jaccard similarity
of their 5-grams, which takes 3 microseconds for a pair of 460 characters.

A document is dropped only for a kept document before it that is at least as similar as the threshold and has all of its
facts (contamination.find_facts), the figures in the same order. So announcements of the same form, and news that differ
in a number, all stay. Documents of the held-out world come before all others.

Bands follow one another, since a document that one drops takes no part in the next. Within a band every key is by
itself: workers sort the keys of groups of a million documents once, and then each task takes one range of the keys from
all groups (_find_repeats). What a task returns depends on the texts alone, so neither the number of workers and hosts
nor that of ranges changes a byte. What finished tasks returned is kept: a run that was killed does not do them again.

Memory: the parent holds 5 bytes a document (9 beyond 2**32). A worker takes 230 MB for a group's keys, 70 for a range,
and at most 96 for caches of n-grams and refused pairs; each document beyond a million that shares its key takes 60
bytes more. Disk: 256 bytes a document are kept, 258 more are taken by a search.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.corpus import contamination, documents, ngrams, selection
from finlm.corpus.workers import Arrays, ChunkTask, Context, Kept, load_kept, make_missing
from finlm.rows.shards import GOLDEN, mix

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
States = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.unsignedinteger[Any]]

TAKES_PART, IS_OPEN, COMES_FIRST = 1, 2, 4  # bits of a document's state; an open document may still be dropped

_ROUNDS = 6  # in each, those are looked at again whose document was itself dropped
_LEADERS = 32  # leaders a key has at most; a key of more different texts is a frame (a date, a heading), no duplicate
_GROUP = 2**20  # documents whose keys are sorted together
_PART = 2**20  # documents of a range of keys, about
_PAIRS_A_TASK = 2**16


class Search(NamedTuple):
    """What all tasks of a search share."""

    directory: Path  # of its files, which every worker sees
    keys: ngrams.SortedKeys
    threshold: float  # least Jaccard similarity
    is_leak: bool = False  # a held-out document is looked for, whatever the facts; else one that makes it superfluous


@dataclass(frozen=True)
class Range:
    """The documents whose key of a band lies in a range, and the file with the states of all documents."""

    search: Search
    states: Path
    band: int
    part: int


@dataclass(frozen=True)
class Pairs:
    """Documents to compare, in pairs: [pairs] each."""

    search: Search
    left: Ids
    right: Ids


RunTasks = Callable[[str, Callable[[Any], Arrays], Sequence[Any]], Iterator[Arrays]]


def first_states(decision: selection.Decisions) -> States:
    """Return the first states, uint8 [documents]: documents in use take part and are open, held-out ones come first."""
    states = np.where(decision <= selection.HELD_OUT, np.uint8(TAKES_PART | IS_OPEN), np.uint8(0))
    states[decision == selection.HELD_OUT] |= COMES_FIRST
    return states


def find_likes(search: Search, states: States, run_tasks: RunTasks) -> int:
    """Find near-duplicates and write like.npy into the search's directory; return the number of pairs compared.

    like.npy [documents], of label_type, has the index of the kept document that a document duplicates, else its own
    index. `states` [documents], which is changed, has TAKES_PART and IS_OPEN for documents to look at, and COMES_FIRST
    for those preferred to all others; otherwise the first is preferred. run_tasks(name, function, tasks) yields the
    function's arrays for each task in order; the name is unique. Raises what a task raises.
    """
    # In memory: labels are written at random places, and a mapped file would be rewritten with every range.
    like = np.empty(len(states), dtype=selection.label_type(len(states)))
    for block in selection.slices(len(like)):
        like[block] = np.arange(block.start, block.stop)
    compared = 0
    for number in range(_ROUNDS):
        for band in range(ngrams.BANDS):
            path = search.directory / f"states-{number}-{band}.npy"  # never written twice: hosts keep what they read
            np.save(path, states)
            ranges = [Range(search, path, band, part) for part in range(search.keys.parts)]
            for made in run_tasks(f"round {number} band {band}", _find_repeats, ranges):
                like[made["repeats"]] = made["like"]
                states[made["repeats"]] &= COMES_FIRST
                compared += int(made["compared"])
            path.unlink()
        orphans, heirs = _find_orphans(like)
        starts = range(0, len(orphans), _PAIRS_A_TASK)
        pairs = [Pairs(search, *(each[first : first + _PAIRS_A_TASK] for each in (heirs, orphans))) for first in starts]
        answers = [made["same"] for made in run_tasks(f"round {number} orphans", _compare, pairs)]
        same = np.concatenate([*answers, np.empty(0, dtype=np.bool_)])
        compared += len(orphans)
        like[orphans] = np.where(same, heirs, orphans)
        for block in selection.slices(len(states)):
            states[block] &= TAKES_PART | COMES_FIRST
        states[orphans[~same]] |= TAKES_PART | IS_OPEN
        if same.all():
            break
    orphans, _ = _find_orphans(like)
    like[orphans] = orphans
    np.save(search.directory / "like.npy", like)
    return compared


def _find_orphans(like: Labels) -> tuple[Ids, Ids]:
    """Return the documents dropped for a document that was dropped later, and for each the kept one it leads to."""
    orphans = [dropped[like[repeated] != repeated] for dropped, repeated in selection.list_repeats(like)]
    those = np.concatenate([*orphans, np.empty(0, dtype=np.int64)])
    heirs = like[like[those]].astype(np.int64)
    while not np.array_equal(heirs, like[heirs]):
        heirs = like[heirs].astype(np.int64)
    return those, heirs


def _find_repeats(task: Range) -> Arrays:
    """Return {repeats, like, compared} of a range: documents to drop, what each repeats, and how many pairs that took.

    Compares the documents of a key with 32 leaders at most. Reads keys, states and texts. Runs in a worker.
    """
    keys, numbers = task.search.keys.read(task.band, task.part)
    states = np.load(task.states, mmap_mode="r")[numbers]
    used = states & TAKES_PART != 0
    if not (states[used] & IS_OPEN).all():  # a later round: only keys with an open document
        used &= np.isin(keys, np.unique(keys[used & (states & IS_OPEN != 0)]))
    numbers, run, states = _list_runs(keys[used], numbers[used], states[used])
    repeats, like, compared = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)], 0
    for _ in range(_LEADERS):
        if not len(numbers):
            break
        is_leader = np.concatenate(([True], run[1:] != run[:-1]))
        place = np.flatnonzero(is_leader)[np.cumsum(is_leader) - 1][~is_leader]
        leader, leads_first = numbers[place], states[place] & COMES_FIRST != 0
        numbers, run, states = numbers[~is_leader], run[~is_leader], states[~is_leader]
        asked = states & IS_OPEN != 0
        compared += int(np.count_nonzero(asked))
        if task.search.is_leak:
            asked &= leads_first & (states & COMES_FIRST == 0)
        same = np.zeros(len(numbers), dtype=np.bool_)
        same[asked] = load_verifier(task.search)(leader[asked], numbers[asked])
        repeats.append(numbers[same])
        like.append(leader[same])
        numbers, run, states = numbers[~same], run[~same], states[~same]
    return {"repeats": np.concatenate(repeats), "like": np.concatenate(like), "compared": np.array(compared)}


def _list_runs(keys: npt.NDArray[np.uint64], numbers: Ids, states: States) -> tuple[Ids, Ids, States]:
    """Return (document, number of its run, state) of the documents that share their key with another.

    A run has the documents of a key: those that come first, then the others, each in ascending order.
    """
    order = np.argsort(keys)
    keys = keys[order]
    equal = keys[1:] == keys[:-1]
    is_member = np.concatenate((equal, [False])) | np.concatenate(([False], equal))
    run = np.cumsum(np.concatenate(([True], ~equal)))[is_member] if len(keys) else np.empty(0, dtype=np.int64)
    members = order[is_member[: len(order)]]
    numbers, states = numbers[members], states[members]
    order = np.lexsort((numbers, states & COMES_FIRST == 0, run))
    return numbers[order], run[order], states[order]


def _compare(task: Pairs) -> Arrays:
    """Return {"same": bool [pairs], whether the right document repeats the left one}. Runs in a worker."""
    return {"same": load_verifier(task.search)(task.left, task.right)}


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


@lru_cache(maxsize=1)
def load_verifier(search: Search) -> Verifier:
    """Return the Verifier of a search, kept in the process; FileNotFoundError without the search's catalog."""
    return Verifier(ngrams.Catalog.read(search.directory), search.threshold, by_facts=not search.is_leak)


class Verifier:
    """Callable that tells for pairs of document indexes, in any order, whether the right document repeats the left.

    `threshold` is the least Jaccard similarity; with `by_facts`, the right document must also have no fact that left
    lacks. Reads signatures and texts from the chunks of `catalog`, and keeps n-grams, facts and refused pairs in
    bounded caches.
    """

    def __init__(self, catalog: ngrams.Catalog, threshold: float, by_facts: bool) -> None:
        self._by_facts = by_facts
        self._catalog = catalog
        self._threshold = threshold
        self._text = lru_cache(_KEPT_MAPS)(catalog.map_text)
        self._ends = lru_cache(_KEPT_MAPS)(catalog.read_ends)
        self._signatures = lru_cache(_KEPT_MAPS)(catalog.map_signatures)
        self._grams: dict[int, ngrams.Distinct] = {}
        self._count = 0  # n-grams in it
        self._facts: dict[int, contamination.Facts] = {}
        self._refused = np.zeros(_KEPT_PAIRS, dtype=np.uint64)  # by the end of its hash; a later pair replaces one

    def __call__(self, left: Ids, right: Ids) -> Bools:
        """Return bool [pairs]; of texts over 4 MiB the similarity is estimated, of others exact."""
        same = np.zeros(len(left), dtype=np.bool_)
        for first in range(0, len(left), _PAIRS_AT_ONCE):
            here = slice(first, first + _PAIRS_AT_ONCE)
            estimate = ngrams.similarity(self._sign(left[here]), self._sign(right[here]))
            close = np.flatnonzero(estimate >= self._threshold - _MARGIN)
            lefts, rights = left[here][close], right[here][close]
            pair = mix(lefts.astype(np.uint64) * GOLDEN) + rights.astype(np.uint64)  # two are equal once in 2**64
            place = mix(pair) % np.uint64(_KEPT_PAIRS)
            sizes = self._sizes(lefts), self._sizes(rights)
            is_huge = np.maximum(*sizes) > _HUGE
            likely = np.flatnonzero((self._refused[place] != pair) & ~is_huge)
            repeats = np.zeros(len(close), dtype=np.bool_)
            total = np.cumsum(sizes[0][likely] + sizes[1][likely])
            batches = ngrams.split(likely, np.flatnonzero(np.diff(total // _BYTES_AT_ONCE)) + 1)
            for some in batches if len(likely) else ():
                repeats[some] = self._compare_pairs(lefts[some], rights[some])
            for number in np.flatnonzero(is_huge & (estimate[close] >= self._threshold)).tolist():
                repeats[number] = self._says_nothing_new(int(lefts[number]), int(rights[number]))
            refused = likely[~repeats[likely]]
            self._refused[place[refused]] = pair[refused]
            same[first + close] = repeats
        return same

    def _compare_pairs(self, left: Ids, right: Ids) -> Bools:
        """Return bool [pairs]: whether the exact similarity reaches the threshold and _says_nothing_new() is true."""
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
                self._facts[number] = contamination.find_facts(self._read(np.array([number]))[0].decode("utf-8"))
        return contamination.covers(self._facts[left], self._facts[right])

    def _sign(self, ids: Ids) -> ngrams.Signatures:
        """Return the documents' signatures: [ids, BINS]."""
        signatures = np.empty((len(ids), ngrams.BINS), dtype=np.uint16)
        for number, places, inside in self._by_chunk(ids):
            signatures[places] = self._signatures(number)[inside]
        return signatures

    def _sizes(self, ids: Ids) -> Ids:
        """Return the size of each text in bytes."""
        sizes = np.empty(len(ids), dtype=np.int64)
        for number, places, inside in self._by_chunk(ids):
            ends = self._ends(number)
            sizes[places] = ends[inside + 1] - ends[inside]
        return sizes

    def _by_chunk(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield (number of the chunk, places of its documents in `ids`, their numbers within the chunk)."""
        numbers, inside = self._catalog.locate(ids)
        order = np.argsort(numbers, kind="stable")
        for places in ngrams.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(places):
                yield int(numbers[places[0]]), places, inside[places]

    def _read(self, ids: Ids) -> tuple[bytes, Ids]:
        """Return (UTF-8 texts of `ids` end to end in their order, byte offset of the end of each)."""
        numbers, inside = self._catalog.locate(ids)
        texts = []
        for number, place in zip(numbers.tolist(), inside.tolist(), strict=True):
            start, end = self._ends(number)[place : place + 2].tolist()
            texts.append(self._text(number)[start:end])
        return b"".join(texts), np.cumsum([len(text) for text in texts], dtype=np.int64)


VERSION = 3


def count_leak(
    context: Context, directory: Path, chunks: Sequence[documents.Chunk], decision: selection.Decisions
) -> dict[str, int]:
    """Count the training documents at least as similar to a held-out one as dedup.threshold, whatever their facts.

    Returns {"documents": such documents, "held_out": those that they match}. Works and fails as write_likes().
    """
    write_likes(context, directory, chunks, first_states(decision), is_leak=True)
    like = np.load(directory / "like.npy")
    (directory / "like.npy").unlink()
    leaked = like[like != np.arange(len(like))]
    return {"documents": len(leaked), "held_out": len(np.unique(leaked))}


@dataclass(frozen=True)
class Group:
    """Chunks whose keys are sorted together, and the kept signatures of each."""

    keys: ngrams.SortedKeys
    number: int
    signed: tuple[Kept[ChunkTask], ...]
    documents: int


def write_likes(
    context: Context, directory: Path, chunks: Sequence[documents.Chunk], states: States, is_leak: bool = False
) -> int:
    """Sign all chunks, sort their keys, and write like.npy into `directory`; return the number of pairs compared.

    like.npy is find_likes()'; with is_leak, it has the held-out document that a training document resembles. `states`,
    from first_states(), is changed. Writes temporary files into `directory` too, and removes them. Starts workers, or
    raises UserError; the cache keeps signatures and, for large searches, results.
    """
    load_verifier.cache_clear()
    keys = [files.sha256_json([ngrams.SIGNATURE_VERSION, chunk.key]) for chunk in chunks]
    named = [(key, ChunkTask(chunk.path)) for key, chunk in zip(keys, chunks, strict=True)]
    signed = list(context.make_kept("signatures", sign_chunk, named))
    ngrams.Catalog.write(directory, chunks, [kept.path for kept in signed])
    search, groups = plan_search(directory, chunks, signed, context.data.dedup.threshold, is_leak)
    parts, digest = search.keys.parts, files.sha256_json([keys, hashlib.sha256(states.data).hexdigest()])
    about = [VERSION, contamination.FACTS_VERSION, search.threshold, is_leak, parts, digest]

    at_most = max(len(groups), parts)
    # The tasks of a search write and read files of one directory: workers that do not share it are of no use.
    is_shared = at_most > 1 and context.engine.shares_cache()
    with (context.engine if is_shared else context.local).start(at_most) as run:

        def run_tasks(name: str, function: Callable[[Any], Arrays], tasks: Sequence[Any]) -> Iterator[Arrays]:
            """Yield function(task) in order; with several key ranges by workers, and the cache keeps the results."""
            if parts == 1:
                return map(function, tasks)
            work = [(files.sha256_json([about, name, number]), task) for number, task in enumerate(tasks)]
            kept = context.list_kept("near", function, work)
            return map(load_kept, make_missing("near", kept, [not each.path.is_file() for each in kept], run))

        for _ in run(sort_group, groups):
            pass
        compared = find_likes(search, states, run_tasks)
    load_verifier.cache_clear()
    search.keys.remove()
    ngrams.Catalog.remove(directory)
    return compared


def plan_search(
    directory: Path,
    chunks: Sequence[documents.Chunk],
    signed: Sequence[Kept[ChunkTask]],
    threshold: float,
    is_leak: bool = False,
) -> tuple[Search, list[Group]]:
    """Return the search for near-duplicates of these chunks, and the groups to sort before (sort_group).

    `signed` has the kept signatures of each chunk; the search's files will lie in `directory`. Writes nothing.
    """
    limits, first = [0], 0
    for number, chunk in enumerate(chunks, 1):
        if chunk.rows.stop - first >= _GROUP or number == len(chunks):
            limits.append(number)
            first = chunk.rows.stop
    firsts = tuple(chunks[start].rows.start for start in limits[:-1])
    count = chunks[-1].rows.stop if chunks else 0
    keys = ngrams.SortedKeys(directory, firsts, max(1, -(-count // _PART)))
    groups = [
        Group(keys, number, tuple(signed[start:end]), chunks[end - 1].rows.stop - chunks[start].rows.start)
        for number, (start, end) in enumerate(pairwise(limits))
    ]
    return Search(directory, keys, threshold, is_leak), groups


def sign_chunk(task: ChunkTask) -> Arrays:
    """Return {"signatures": uint16 [documents, BINS]} of a chunk. Runs in a worker."""
    index = documents.read_index(task.chunk)
    return {"signatures": ngrams.sign_block(task.chunk.read_bytes(), index["end"], index["characters"])}


def sort_group(group: Group) -> None:
    """Write a group's sorted keys, computed from its kept signatures; damaged ones are made again. Runs in a worker."""
    keys = np.empty((ngrams.BANDS, group.documents), dtype=np.uint64)
    signed, done, first = np.empty(group.documents, dtype=np.uint32), 0, 0
    for kept in group.signed:
        signatures = load_kept(kept)["signatures"]
        here = np.flatnonzero((signatures != 0).any(axis=1))  # those with a 5-gram
        keys[:, done : done + len(here)] = ngrams.band_keys(signatures[here])
        signed[done : done + len(here)] = here + first
        done, first = done + len(here), first + len(signatures)
    group.keys.write(group.number, keys[:, :done], signed[:done])
