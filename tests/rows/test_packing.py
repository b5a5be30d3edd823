"""Rows: what each packing promises, against plain counting; the released code's rows, against its own arithmetic."""

from __future__ import annotations

import errno
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from finlm.base import screen, step_cache
from finlm.base.errors import UserError
from finlm.rows import dialogues
from finlm.rows.packing import PackedRows
from finlm.rows.shards import IGNORED, Rows, Shards

LENGTH = 64


def prepared(directory: Path, lengths: dict[str, list[list[int]]]) -> tuple[Shards, dict[str, list[list[int]]]]:
    """Shards of documents with these lengths, {source: [[of a shard]]}; (shards, {source: documents' tokens})."""
    (directory / "train").mkdir(parents=True)
    token = itertools.count(10)
    items, documents = [], dict[str, list[list[int]]]()
    for source, shards in lengths.items():
        for number, sizes in enumerate(shards):
            texts = [[1, *(next(token) % 60_000 + 3 for _ in range(size - 2)), 2] for size in sizes]
            documents.setdefault(source, []).extend(texts)
            name = f"train/{source}-{number:05d}.bin"
            np.array(list(itertools.chain(*texts)), dtype="<u2").tofile(directory / name)
            np.cumsum([0, *sizes]).astype("<u8").tofile((directory / name).with_suffix(".idx"))
            about = {"tokens": sum(sizes), "documents": len(sizes), "text_bytes": 1}
            items.append({"source": source, "split": "train", "file": name, **about})
    manifest = {"dtype": "uint16", "vocab_size": 65_000, "bos_id": 1, "eos_id": 2, "shards": items}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return Shards(directory), documents


def some(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [max(3, int(dice.lognormvariate(3.4, 0.9))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Shards, dict[str, list[list[int]]]]:
    return prepared(tmp_path, {"news": [some(1, 1500), some(2, 900)], "laws": [[700, 3, 65, 66, 64, 129]]})


def labelled(rows: Rows | PackedRows) -> list[tuple[int, int]]:
    """Every (input, label) pair that counts."""
    inputs, labels = rows.read(np.arange(len(rows)))
    counted = labels != IGNORED
    return sorted(zip(inputs[counted].tolist(), labels[counted].tolist(), strict=True))


def test_best_fit_cuts_no_document_that_fits_and_loses_no_label(
    corpus: tuple[Shards, dict[str, list[list[int]]]],
) -> None:
    shards, documents = corpus
    rows = dialogues.prepare_rows(shards, LENGTH, "best_fit")
    texts = [text for source in documents.values() for text in source]
    assert labelled(rows) == sorted(pair for text in texts for pair in itertools.pairwise(text))
    ids = np.arange(len(rows))
    found = []
    for row, label, number in zip(*rows.read(ids), rows.documents(ids), strict=True):
        for document in range(int(number.max()) + 1):
            (here,) = np.nonzero(number == document)
            last = label[here[-1]]  # of a full row's last document the end is a label only
            found.append([*row[here].tolist(), *([int(last)] if last != IGNORED else [])])
    whole = sorted(part for part in found if part[0] == 1 and part[-1] == 2)
    assert whole == sorted(text for text in texts if len(text) <= LENGTH + 1)
    concat = len(dialogues.prepare_rows(shards, LENGTH, "concat"))
    assert len(rows) <= 1.001 * concat + 2


def test_best_fit_fills_rows_like_the_plain_algorithm() -> None:
    for seed in range(5):
        lengths = np.array([length for length in some(seed, 3000) if length <= 65], dtype=np.int32)
        row, count = dialogues.fit_best(lengths, 65)
        used = np.bincount(row, weights=lengths, minlength=count)
        assert used.max() <= 65 and used.min() > 0 and len(used) == count
        left: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fits = [(room, number) for number, room in enumerate(left) if room >= length]
            if fits:
                left[min(fits)[1]] -= length
            else:
                left.append(65 - length)
        assert count <= len(left) * 1.001 + 1


def test_blocks_are_the_rows_of_the_released_code(corpus: tuple[Shards, dict[str, list[list[int]]]]) -> None:
    """llm-code: 1,000 documents concatenated, cut into blocks of T, the remainder dropped; labels are the inputs."""
    shards, documents = corpus
    wanted = []
    for texts in documents.values():
        for first in range(0, len(texts), 1000):
            stream = list(itertools.chain(*texts[first : first + 1000]))
            wanted += [stream[at : at + LENGTH] for at in range(0, len(stream) // LENGTH * LENGTH, LENGTH)]
    rows = dialogues.prepare_rows(shards, LENGTH, "blocks")
    inputs, labels = rows.read(np.arange(len(rows)))
    assert inputs.tolist() == wanted  # the second thousand of the news runs from one shard into the next
    assert labels[:, :-1].tolist() == [block[1:] for block in wanted] and (labels[:, -1] == IGNORED).all()


def test_concat_has_the_rows_of_concatenating_all_and_one_for_what_that_would_drop(
    corpus: tuple[Shards, dict[str, list[list[int]]]],
) -> None:
    shards, _ = corpus
    for shard in shards.split("train"):
        whole, rest = divmod(shard.tokens, LENGTH)  # concatenate, cut, drop the rest
        assert len(Rows([shard], LENGTH)) == whole + (rest > 1)


@pytest.mark.parametrize("how", ["concat", "blocks"])
def test_no_look_up_converts_the_index_of_a_corpus(
    corpus: tuple[Shards, dict[str, list[list[int]]]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 million documents that would be 100 MB a row."""
    rows, looked_up, plain = dialogues.prepare_rows(corpus[0], LENGTH, how), [], np.searchsorted

    def noting(index: Any, places: Any, **named: Any) -> Any:
        looked_up.append((index.dtype, np.asarray(places).dtype))
        return plain(index, places, **named)

    monkeypatch.setattr(np, "searchsorted", noting)
    rows.documents(np.arange(len(rows)))
    assert np.dtype("<u8") in dict(looked_up) and all(index == places for index, places in looked_up)


@pytest.mark.parametrize("how", ["concat", "blocks", "best_fit"])
def test_rows_know_their_documents_labels_and_sources(
    corpus: tuple[Shards, dict[str, list[list[int]]]], how: str
) -> None:
    shards, _ = corpus
    rows = dialogues.prepare_rows(shards, LENGTH, how)
    ids = np.arange(len(rows))
    inputs, labels = rows.read(ids)
    numbers = rows.documents(ids)
    starts = inputs == 1
    starts[:, 0] = True
    starts[:, 1:] |= inputs[:, :-1] == 2  # what is left of a long document may follow another
    assert np.array_equal(np.where(numbers >= 0, np.cumsum(starts, axis=1) - 1, -1), numbers)
    assert ((numbers == -1) <= (labels == IGNORED)).all()
    assert rows.supervised(ids) == np.count_nonzero(labels != IGNORED)
    assert rows.supervised(ids[[3, 1, 1]]) == np.count_nonzero(labels[[3, 1, 1]] != IGNORED)
    ranges = rows.source_ranges()
    assert list(ranges) == ["news", "laws"]
    assert list(ranges["news"]) + list(ranges["laws"]) == ids.tolist()
    with pytest.raises(IndexError):
        rows.read(np.array([len(rows)]))


def test_the_index_is_built_once_and_belongs_to_the_length(corpus: tuple[Shards, dict[str, list[list[int]]]]) -> None:
    shards, _ = corpus
    dialogues.prepare_rows(shards, LENGTH, "best_fit")
    made = shards.directory / "rows/best_fit-64-v1"
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    dialogues.prepare_rows(shards, LENGTH, "best_fit")
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert dialogues.prepare_rows(shards, 32, "best_fit").sequence_length == 32
    assert sorted(path.name for path in made.parent.iterdir()) == [".lock", "best_fit-32-v1", "best_fit-64-v1"]


def test_two_runs_on_the_same_shards_share_one_index(
    corpus: tuple[Shards, dict[str, list[list[int]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first builds."""
    shards, waits, plain = corpus[0], threading.Event(), dialogues.make_index
    built, said = list[str](), list[str]()

    def slow(*of: Any) -> Any:
        built.append(threading.current_thread().name)
        second.start()
        assert waits.wait(10)
        return plain(*of)

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    monkeypatch.setattr(dialogues, "make_index", slow)
    monkeypatch.setattr(screen, "say", say)
    found = list[Rows | PackedRows]()
    second = threading.Thread(target=lambda: found.append(dialogues.prepare_rows(shards, LENGTH, "best_fit")))
    first = dialogues.prepare_rows(shards, LENGTH, "best_fit")
    second.join(10)
    assert built == ["MainThread"] and "waiting" in said[0]
    assert len(found[0]) == len(first)


def test_an_index_is_read_where_nothing_can_be_written(
    corpus: tuple[Shards, dict[str, list[list[int]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialogues.prepare_rows(corpus[0], LENGTH, "best_fit")
    monkeypatch.setattr(step_cache, "lock_directory", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    dialogues.prepare_rows(corpus[0], LENGTH, "best_fit")
    with pytest.raises(UserError, match="cannot write the index of blocks rows of 64 tokens"):
        dialogues.prepare_rows(corpus[0], LENGTH, "blocks")
