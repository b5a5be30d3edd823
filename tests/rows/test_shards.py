"""Token shards as training reads them: rows by arithmetic, an order without a table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm.base.errors import UserError
from finlm.rows import shards
from finlm.rows.shards import Order, Rows, Shards

SOURCE = Path(shards.__file__).parents[2]


def write(directory: Path, *streams: list[int], dtype: str = "uint16", **fields: Any) -> Shards:
    """A prepared directory with one training shard a stream."""
    items = []
    (directory / "train").mkdir(parents=True)
    for number, ids in enumerate(streams):
        name = f"train/s-{number:05d}.bin"
        np.array(ids, dtype=f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(directory / name)
        np.array([0, len(ids)], dtype="<u8").tofile((directory / name).with_suffix(".idx"))
        items.append(
            {"source": "s", "split": "train", "file": name, "tokens": len(ids), "documents": 1, "text_bytes": 9}
        )
    manifest = {"dtype": dtype, "vocab_size": 100, "bos_id": 1, "eos_id": 2, "shards": items} | fields
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return Shards(directory)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 100])
def test_every_next_token_is_a_label_exactly_once_at_any_sequence_length(tmp_path: Path, length: int) -> None:
    streams = [list(range(10, 20)), list(range(30, 39)), [50, 51]]
    rows = Rows(write(tmp_path, *streams).split("train"), length)
    assert len(rows) == sum(math.ceil((len(ids) - 1) / length) for ids in streams)
    inputs, labels = rows.read(np.arange(len(rows)))
    assert inputs.shape == labels.shape == (len(rows), length) and inputs.dtype == labels.dtype == np.int64
    counted = labels != -100
    assert labels[counted].tolist() == [token for ids in streams for token in ids[1:]]
    assert inputs[counted].tolist() == [token for ids in streams for token in ids[:-1]]
    assert (inputs[~counted] == 0).all()


def test_supervised_counts_the_labels_without_reading(tmp_path: Path) -> None:
    rows = Rows(write(tmp_path, list(range(10)), list(range(24))).split("train"), 4)
    for path in tmp_path.glob("train/*.bin"):
        path.unlink()
    assert [rows.supervised(np.array([row])) for row in range(len(rows))] == [4, 4, 1, 4, 4, 4, 4, 4, 3]
    assert rows.supervised(np.array([0, 2, 8, 8])) == 11


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_is_not_there_is_an_error(tmp_path: Path, row: int) -> None:
    rows = Rows(write(tmp_path, list(range(10))).split("train"), 4)
    with pytest.raises(IndexError):
        rows.read(np.array([row]))


def test_a_stream_of_one_token_has_no_row(tmp_path: Path) -> None:
    assert len(Rows(write(tmp_path, [5]).split("train"), 4)) == 0
    assert len(Rows([], 4)) == 0


def test_uint32_shards_hold_large_ids_and_offsets_are_readable(tmp_path: Path) -> None:
    (shard,) = write(tmp_path, [70_000, 5, 120_000], dtype="uint32").split("train")
    assert shard.ids.tolist() == [70_000, 5, 120_000]
    assert shard.offsets.tolist() == [0, 3]


def test_a_damaged_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared shards"):
        Shards(tmp_path / "nowhere")
    write(tmp_path, list(range(10)))
    with (tmp_path / "train/s-00000.bin").open("r+b") as file:
        file.truncate(18)
    with pytest.raises(UserError, match=r"s-00000\.bin is damaged") as caught:
        Shards(tmp_path)
    assert caught.value.evidence == "18 bytes, the manifest says 20"


def test_reading_shards_loads_neither_sentencepiece_nor_torch() -> None:
    code = "import sys, finlm.rows.shards; sys.exit(bool({'sentencepiece', 'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 4096, 4097, 2**20 + 7])
def test_an_epoch_of_the_order_visits_every_row_once(count: int) -> None:
    order = Order(count, seed=7)
    for epoch in (0, 5):
        rows = order[np.arange(count) + epoch * count]
        assert np.array_equal(np.sort(rows), np.arange(count))


def test_epochs_and_seeds_differ() -> None:
    first = Order(1000, 7)[np.arange(1000)]
    for other in (Order(1000, 7)[np.arange(1000, 2000)], Order(1000, 8)[np.arange(1000)]):
        assert np.count_nonzero(first == other) < 10


@pytest.mark.parametrize("count", [1000, 65_536, 300_007])
def test_the_order_looks_random(count: int) -> None:
    rows = Order(count, 3)[np.arange(count)].astype(np.float64)
    noise = 4 / math.sqrt(count)
    assert abs(np.corrcoef(rows, np.arange(count))[0, 1]) < noise
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < noise
    steps, expected = np.histogram(np.abs(np.diff(rows)) / count, bins=10, range=(0, 1))[0], np.arange(19, 0, -2) / 100
    assert np.abs(steps / (count - 1) - expected).max() < noise
    # Every tenth of the epoch draws evenly from every tenth of the rows.
    tenths = np.histogram2d(np.arange(count), rows, bins=10)[0]
    assert np.abs(tenths - count / 100).max() < 6 * math.sqrt(count / 100)


def test_all_permutations_of_three_rows_occur() -> None:
    order = Order(3, 0)
    seen = {tuple(order[np.arange(3) + 3 * epoch].tolist()) for epoch in range(200)}
    assert len(seen) == 6


def test_a_position_means_the_same_row_whoever_asks() -> None:
    order = Order(1000, 7)
    positions = np.arange(500, 2900)
    assert np.array_equal(order[positions.reshape(4, 3, -1)].ravel(), order[positions])
    assert np.array_equal(order[positions.astype(np.uint64)], order[positions])
    assert [int(order[np.array([position])][0]) for position in positions[:50]] == order[positions[:50]].tolist()


GOLDEN_1000 = [147, 816, 383, 721, 235, 794]
GOLDEN_2_20 = [805122, 464551, 1039640, 884090, 402330]
GOLDEN_5 = [4, 2, 0, 1, 3, 3, 0, 1, 2, 4, 3, 1, 2, 0, 4]


def test_the_order_is_frozen() -> None:
    """Runs are resumed and reproduced by these numbers: changing them changes every training run."""
    assert Order(1000, 7)[np.array([0, 1, 2, 999, 1000, 123_456])].tolist() == GOLDEN_1000
    assert Order(2**20 + 7, 0)[np.array([0, 1, 2**20 + 6, 2**20 + 7, 10**12])].tolist() == GOLDEN_2_20
    assert Order(5, 123)[np.arange(15)].tolist() == GOLDEN_5
