"""The whole preparation: skipping, continuing after kill -9, equal bytes whatever the workers, clear refusals."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm.base import files, memory
from finlm.base.errors import UserError
from finlm.data import encode, prepare, readers, step_shards, steps, vocab
from finlm.data.shards import Shards
from finlm.recipe import recipe
from finlm.recipe.schema import Recipe
from finlm.record import report_data

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data"
WORDS = (
    *("公司", "营业收入", "净利润", "同比增长", "报告期", "现金流量", "股东大会", "审计"),
    *("资产负债表", "亿元", "万元", "其中", "主要系", "所致"),
)

Make = Callable[..., Recipe]


def corpus(path: Path, count: int, seed: int) -> list[str]:
    """Write count documents; every tenth repeats the one before, every twentieth is too short."""
    dice = random.Random(seed)
    texts: list[str] = []
    for number in range(count):
        text = "".join(dice.choices(WORDS, k=dice.randrange(5, 60))) + f"</s>{dice.random():.6f}。\n<s>续"
        texts.append("短" if number % 20 == 5 else texts[-1] if number % 10 == 9 else text)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": text, "meta": {f"key{seed}": 1}}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(rows.encode(), mtime=0) if path.suffix == ".gz" else rows.encode())
    return texts


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make("a.b=c", ...) -> the recipe of a small corpus of two files, with its cache under tmp_path."""
    corpus(tmp_path / "corpus/news.jsonl.gz", 400, 1)
    corpus(tmp_path / "corpus/reports.jsonl", 200, 2)

    def load(*overrides: str, cache: str = "cache") -> Recipe:
        settings = (
            f"data.sources={tmp_path}/corpus/*",
            f"data.cache_dir={tmp_path}/{cache}",
            "data.held_out_fraction=0.05",
            "data.clean=none",
            "tokenizer.vocab_size=400",
        )
        return recipe.load(ROOT / "recipes/quickstart/pretrain.yaml", (*settings, *overrides)).recipe

    return load


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def steps_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_every_document_is_in_the_shards_once_and_decodes_to_itself(make: Make, tmp_path: Path) -> None:
    wanted = make("data.shard_tokens=5000")
    directory = prepare.run(wanted)
    shards, model = Shards(directory), vocab.load(directory / "tokenizer.model")
    counts = files.read_json(directory / "documents.json")
    found: list[str] = []
    for part in (shards.split("train"), shards.split("held_out")):
        for shard in part:
            bounds = shard.offsets.astype(int).tolist()
            assert bounds[-1] == shard.tokens <= 5000 and shard.ids.dtype == np.dtype("<u2")
            texts = []
            for start, end in itertools.pairwise(bounds):
                ids = shard.ids[start:end].tolist()
                assert ids[0] == 1 and ids[-1] == 2 and not {1, 2} & set(ids[1:-1])
                texts.append(model.decode(ids[1:-1]))
            assert sum(len(text.encode()) for text in texts) == shard.text_bytes
            found += texts
    assert len(shards.split("train")) > 4
    expected = {text for seed, n in ((1, 400), (2, 200)) for text in corpus(tmp_path / "x", n, seed) if text != "短"}
    assert set(found) == expected and len(found) == len(expected)
    total = counts["total"]
    (tokenizer,) = directory.parent.glob("tokenizer-*/manifest.json")
    written = sum(path.stat().st_size for split in ("train", "held_out") for path in (directory / split).iterdir())
    needed = step_shards.needed_bytes(files.read_json(tokenizer), total, "uint16")
    assert written < needed < 1.5 * written  # what is asked of the disk, and no more
    assert total["rows"] == 600 and total["too_short"] == 30 and total["duplicate"] == 60
    assert total["kept"] + total["held_out"] == len(expected)
    manifest = files.read_json(directory / "manifest.json")
    assert list(manifest["totals"]["train"]) == list(manifest["totals"]["held_out"]) == ["news", "reports"]
    for item in manifest["shards"]:
        assert files.sha256_file(directory / item["file"]) == item["sha256"]
    length = wanted.batch.sequence_length
    rows = sum(-(-(shard.tokens - 1) // length) for shard in shards.split("train"))
    assert prepare.sizes(directory, wanted) == (400, rows * length)
    assert prepare.summary(directory)["documents"] == counts["sources"]


def test_a_second_run_does_nothing_and_locate_finds_the_same(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.locate(make()) is None
    assert not Path(make().data.cache_dir).exists()
    directory = prepare.run(make())
    before = {path: path.stat().st_mtime_ns for path in directory.parent.rglob("*") if path.name != ".lock"}
    capsys.readouterr()
    assert prepare.run(make()) == prepare.locate(make()) == directory
    assert {path: path.stat().st_mtime_ns for path in before} == before
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("(reused)")]
    assert [line.split(":")[0] for line in lines] == ["documents", "selection", "tokenizer", "shards"]


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("data.num_proc=1", set()),
        ("train.seed=9", set()),
        ("batch.sequence_length=64", set()),
        ("data.shard_tokens=5000", {"shards"}),
        ("tokenizer.add_bos=false", {"shards"}),
        ("tokenizer.vocab_size=350", {"tokenizer", "shards"}),
        ("data.held_out_fraction=0.1", {"selection", "tokenizer", "shards"}),
        ("data.dedup=none", {"selection", "tokenizer", "shards"}),
        ("data.sources[0].text_field=text", set()),
        ("data.sources[0].name=other", {"documents", "selection", "tokenizer", "shards"}),
    ],
)
def test_a_changed_setting_redoes_only_what_follows(make: Make, override: str, redone: set[str]) -> None:
    sources = f"data.sources=[{{path: {make().data.sources[0].path}}}]"
    prepare.run(make(sources))
    cache = Path(make().data.cache_dir)
    before = steps_in(cache)
    assert (prepare.locate(make(sources, override)) is None) == bool(redone)
    prepare.run(make(sources, override))
    assert {name.split("-")[0] for name in steps_in(cache) - before} == redone


def test_changed_content_is_noticed_and_a_changed_date_is_not(make: Make, tmp_path: Path) -> None:
    directory = prepare.run(make())
    os.utime(tmp_path / "corpus/news.jsonl.gz", (1, 1))
    assert prepare.run(make()) == directory
    corpus(tmp_path / "corpus/reports.jsonl", 201, 3)
    assert prepare.locate(make()) is None
    assert prepare.run(make()) != directory


def test_a_step_whose_files_are_not_as_long_as_they_were_is_made_again(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = prepare.run(make())
    reference = contents(directory.parent)
    (chunk,) = directory.parent.glob("documents-*/chunks/reports*.txt")
    (model,) = directory.parent.glob("tokenizer-*/tokenizer.model")
    for damaged in (chunk, chunk.with_suffix(".npy"), model, directory / "train/news-00000.idx"):
        os.truncate(damaged, 0)  # as a file that was not yet on disk when the host went down
        assert prepare.locate(make()) is None
        capsys.readouterr()
        assert prepare.run(make()) == directory
        assert f"{damaged} has 0 bytes instead of" in capsys.readouterr().err
        assert contents(directory.parent) == reference


def test_the_bytes_do_not_depend_on_workers_or_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = contents(prepare.run(make("data.num_proc=1", cache="one")))
    monkeypatch.setattr(readers, "BLOCK_BYTES", 10_000)
    for processes in (1, 2):
        found = contents(prepare.run(make(f"data.num_proc={processes}", cache=f"small-{processes}")))
        assert found == reference


KILLED = """
import os, signal, sys
from finlm.base import files
from finlm.data import broken_rows, dedup, encode, prepare, readers, vocab
from finlm.recipe import recipe

def deadly(owner, name, calls):
    function = getattr(owner, name)
    def wrapped(*arguments):
        nonlocal calls
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    setattr(owner, name, wrapped)

if __name__ == "__main__":
    point, calls, yaml, *overrides = sys.argv[1:]
    readers.BLOCK_BYTES = 20_000
    owner, name = {"documents": (broken_rows, "check"), "selection": (dedup, "write"),
                   "tokenizer": (vocab, "describe"), "shards": (encode._Shard, "append"),
                   "manifest": (files, "write_json")}[point]
    deadly(owner, name, int(calls))
    prepare.run(recipe.load(yaml, overrides).recipe)
"""


@pytest.mark.parametrize(
    ("point", "calls", "finished"),
    [
        ("documents", 0, set()),
        ("selection", 0, {"documents"}),
        ("tokenizer", 0, {"documents", "selection"}),
        ("shards", 3, {"documents", "selection", "tokenizer"}),
        ("manifest", 5, {"documents", "selection", "tokenizer"}),  # fingerprints, three manifests, documents.json
    ],
)
def test_after_kill_9_a_rerun_continues_and_gives_the_same_bytes(
    make: Make, tmp_path: Path, point: str, calls: int, finished: set[str]
) -> None:
    reference = prepare.run(make(cache="reference"))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    overrides = [
        f"data.sources={tmp_path}/corpus/*",
        f"data.cache_dir={tmp_path}/cache",
        "data.held_out_fraction=0.05",
        "data.clean=none",
        "tokenizer.vocab_size=400",
    ]
    yaml = str(ROOT / "recipes/quickstart/pretrain.yaml")
    command = [sys.executable, str(script), point, str(calls), yaml, *overrides]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL
    cache = tmp_path / "cache"
    whole = {name for name in steps_in(cache) if not name.startswith(".")}
    assert {name.split("-")[0] for name in whole} == finished
    kept = {name: (cache / name / "manifest.json").stat().st_mtime_ns for name in whole}
    assert prepare.locate(make()) is None
    directory = prepare.run(make())
    assert directory.name == reference.name and contents(directory) == contents(reference)
    assert {name: (cache / name / "manifest.json").stat().st_mtime_ns for name in whole} == kept
    assert not list(cache.glob(".*.tmp"))


def test_starved_of_open_files_it_finishes_and_says_what_binds(make: Make, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    settings = f"data.sources={tmp_path}/corpus/* data.cache_dir={tmp_path}/cache tokenizer.vocab_size=400"
    yaml = ROOT / "recipes/quickstart/pretrain.yaml"
    command = f"ulimit -n 64; set -f; exec {sys.executable} {script} shards 9999 {yaml} {settings} data.num_proc=1024"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "1024 workers asked, " in result.stderr and " used: " in result.stderr


def test_broken_rows_stop_the_run_and_leave_nothing_but_themselves(make: Make, tmp_path: Path) -> None:
    with (tmp_path / "corpus/reports.jsonl").open("a") as file:
        file.write("not json\n" * 3)
    with pytest.raises(UserError, match="source reports: 3 of 203 rows cannot be read"):
        prepare.run(make())
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {".lock", "fingerprints.json", "broken-reports.jsonl"}
    directory = prepare.run(make("data.max_broken_fraction=0.02"))
    assert files.read_json(directory / "documents.json")["sources"]["reports"]["broken"] == 3
    with pytest.raises(UserError, match="3 of 203"):  # a finished step does not hide them from a stricter recipe
        prepare.run(make())


def test_an_accepted_cut_is_said_with_the_counts(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus/news.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"source news: news\.jsonl\.gz ends early") as caught:
        prepare.run(make())
    for _ in range(2):  # reused too
        capsys.readouterr()
        prepare.run(make(f"data.{caught.value.fix.partition('data.')[2].partition(',')[0]}"))
        assert "; news.jsonl.gz: cut, the rest not read" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["corpus/missing.jsonl", "corpus/*.parquet", "nowhere/deep/*.jsonl"])
def test_a_path_without_files_shows_what_lies_beside_it(make: Make, tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"data.sources\[0\]: no file matches") as caught:
        prepare.run(make(f"data.sources={tmp_path}/{path}"))
    assert prepare.locate(make(f"data.sources={tmp_path}/{path}")) is None  # a plan needs no data
    beside = ("news.jsonl.gz", "reports.jsonl") if path.startswith("corpus") else (f"{tmp_path} holds corpus",)
    for part in (f"looked for {tmp_path}/{path}\n", *beside):
        assert part in caught.value.evidence


@pytest.mark.parametrize(("path", "files"), [("corpus", "*.jsonl"), ("", "**/*.jsonl"), ("cache", "holds none")])
def test_a_directory_instead_of_files_is_said_to_be_one(make: Make, tmp_path: Path, path: str, files: str) -> None:
    corpus(tmp_path / "corpus/more.jsonl", 1, 3)
    (tmp_path / "cache").mkdir()
    with pytest.raises(UserError, match=rf"data.sources\[0\]: {tmp_path / path} is a directory") as caught:
        prepare.run(make(f"data.sources={tmp_path / path}"))
    assert (files if "holds" in files else f"{tmp_path / path / files}") in caught.value.fix


def test_files_of_one_name_under_a_glob_get_a_fix_that_works(make: Make, tmp_path: Path) -> None:
    corpus(tmp_path / "corpus/old/news.jsonl", 30, 5)
    corpus(tmp_path / "corpus/new/news.jsonl", 30, 6)
    with pytest.raises(UserError, match="2 sources are named news") as caught:
        prepare.run(make(f"data.sources={{path: {tmp_path}/corpus/*/*.jsonl}}"))
    assert (
        "one name for all: data.sources[0].name; or one entry a directory instead of data.sources[0]"
        in caught.value.fix
    )
    directory = prepare.run(make(caught.value.fix.partition("--set ")[2].strip("'")))
    assert [shard.source for shard in Shards(directory).split("train")] == ["a", "b"]
    directory = prepare.run(make(f"data.sources={{path: {tmp_path}/corpus/*/*.jsonl, name: all news}}"))
    assert [shard.source for shard in Shards(directory).split("train")] == ["all_news"]
    assert [row["file"] for row in files.read_json(directory / "documents.json")["files"]] == ["news.jsonl"] * 2


def test_the_sha256_of_a_source_is_checked(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "corpus/reports.jsonl"
    for digest, fails in ((files.sha256_file(path).upper(), False), ("0" * 64, True)):
        wanted = make(f"data.sources=[{{path: {path}, sha256: '{digest}'}}]")
        if fails:
            with pytest.raises(UserError, match="not the file that the recipe names") as caught:
                prepare.run(wanted)
            assert digest in caught.value.evidence and files.sha256_file(path) in caught.value.evidence
        else:
            prepare.run(wanted)


def test_two_files_of_one_name_need_names(make: Make, tmp_path: Path) -> None:
    corpus(tmp_path / "old/news.jsonl", 30, 5)
    both = [{"path": f"{tmp_path}/corpus/news.jsonl.gz"}, {"path": f"{tmp_path}/old/*.jsonl"}]
    with pytest.raises(UserError, match="2 sources are named news"):
        prepare.run(make(f"data.sources={json.dumps(both)}"))
    both[1]["name"] = "old news"
    directory = prepare.run(make(f"data.sources={json.dumps(both)}"))
    assert [shard.source for shard in Shards(directory).split("train")] == ["news", "old_news"]


@pytest.mark.parametrize("content", ["", '{"text": "短"}\n', None], ids=["empty", "too short", "a repeated file"])
def test_one_file_of_many_may_have_nothing_new_and_alone_it_is_refused(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    part, whole = tmp_path / "corpus/part-2.jsonl", tmp_path / "corpus/reports.jsonl"
    part.write_text(whole.read_text() if content is None else content)
    wanted = make("data.mixture={weights: {'*': 1}}", "train.steps=30")
    about = prepare.summary(prepare.run(wanted), wanted)
    kept = {"news", "reports"} if content is not None else {"news", "part-2"}  # the first of two stays
    empty = ({"part-2", "reports"} - kept).pop()
    assert f"selection: nothing to train on in {empty}" in capsys.readouterr().err
    assert {name for name, row in about["documents"].items() if row["kept"]} == set(about["shards"]) == kept
    assert f">{empty}<" in str(report_data.section(about))
    sources = json.dumps([f"{tmp_path}/corpus/{name}" for name in ("news.jsonl.gz", "part-2.jsonl", "reports.jsonl")])
    with pytest.raises(UserError, match=f"source {empty} has no document to train on"):
        prepare.run(make(f"data.sources={sources}"))


def test_an_existing_tokenizer_is_used_and_must_fit_the_integer_type(make: Make, tmp_path: Path) -> None:
    model = shutil.copy(prepare.run(make()) / "tokenizer.model", tmp_path / "given.model")
    given = ("tokenizer.vocab_size=null", f"tokenizer.path={model}")
    directory = prepare.run(make(*given, "data.token_dtype=uint32"))
    assert files.sha256_file(directory / "tokenizer.model") == files.sha256_file(Path(model))
    assert Shards(directory).dtype == np.dtype("<u4")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        prepare.run(make("tokenizer.vocab_size=null", "tokenizer.path=missing.model"))


def test_prepared_shards_are_used_when_they_are_whole_and_of_the_same_tokenizer(make: Make, tmp_path: Path) -> None:
    directory = shutil.copytree(prepare.run(make()), tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "corpus")
    given = ("tokenizer.vocab_size=null", f"data.prepared={directory}")
    same = make(*given, f"tokenizer.path={directory}/tokenizer.model")
    assert prepare.run(same) == prepare.locate(same) == directory
    corpus(tmp_path / "corpus/news.jsonl", 100, 9)
    other = prepare.run(make("tokenizer.vocab_size=350")) / "tokenizer.model"
    with pytest.raises(UserError, match="the tokenizer does not match the shards") as caught:
        prepare.run(make(*given, f"tokenizer.path={other}"))
    assert files.sha256_file(other) in caught.value.evidence
    (directory / "train/news-00000.idx").unlink()
    with pytest.raises(UserError, match=r"news-00000.idx is damaged"):
        prepare.run(same)
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds no prepared shards"):
        prepare.locate(same)


def test_a_mixture_is_shown_and_recorded_and_a_wrong_name_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = "[{weights: {news: 1, reports: 9}, share: 0.5}, {weights: {'*': 1}}]"
    wanted = make(f"data.mixture={mixture}", "data.packing=best_fit", "train.steps=100", "batch.sequence_length=64")
    directory = prepare.run(wanted)
    assert "(best_fit); the run reads" in capsys.readouterr().err
    about = prepare.summary(directory, wanted)
    reading = {row["source"]: row for row in about["reading"]["sources"]}
    assert sum(row["tokens"] for row in reading.values()) == 100 * 4096
    assert reading["news"]["share_by_part"][0] == pytest.approx(0.1, abs=0.001)
    assert reading["reports"]["epochs"] > reading["news"]["epochs"]
    assert about["lengths"]["news"]["documents"] == sum(row[1] for row in about["lengths"]["news"]["histogram"])
    with pytest.raises(UserError, match="books is no source"):
        prepare.run(make("data.mixture={weights: {books: 1}}"))


def test_a_full_disk_is_told_before_and_cleaned_up_after(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(steps.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="not enough disk space for the step documents"):
            prepare.run(make())

    size = (tmp_path / "corpus/reports.jsonl").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_SPACE_TO_SPARE", 0)
        patch.setattr(steps.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, size))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="not enough disk space for the step documents to shards"):
            prepare.run(make(f"data.sources={tmp_path}/corpus/reports.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(UserError, match=r"training a tokenizer on .* does not fit in memory"):
            prepare.run(make("data.num_proc=1"))
    assert not steps_in(tmp_path / "cache")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(encode._Shard, "append", full)
        with pytest.raises(UserError, match="the disk is full: shards was given up"):
            prepare.run(make())
    assert {name.split("-")[0] for name in steps_in(tmp_path / "cache")} == {"documents", "selection", "tokenizer"}
    prepare.run(make())


def test_the_embedded_corpus_brings_its_own_held_out_world(make: Make) -> None:
    source = "{synthetic: {size: 400KB, held_out_size: 100KB, seed: 3}}"
    directory = prepare.run(make(f"data.sources=[{source}]", "tokenizer.vocab_size=1500"))
    counts = files.read_json(directory / "documents.json")
    assert len(counts["sources"]) == 4
    shards = Shards(directory)
    assert 300_000 < sum(shard.text_bytes for shard in shards.split("train")) < 440_000
    assert 85_000 < sum(shard.text_bytes for shard in shards.split("held_out")) < 115_000
    again = make(f"data.sources=[{source}]", "tokenizer.vocab_size=1500", cache="again")
    assert contents(prepare.run(again)) == contents(directory)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real finance text at {REAL}")
def test_the_real_corpus_is_read_to_the_last_row(make: Make) -> None:
    directory = prepare.run(
        make(f"data.sources={REAL}/*.jsonl.gz", "tokenizer.vocab_size=6000", "tokenizer.sample_bytes=500KB")
    )
    total = files.read_json(directory / "documents.json")["total"]
    assert total["rows"] == 47_543 and total["broken"] == 0
    assert total["kept"] + total["held_out"] + total["duplicate"] + total["too_short"] == 47_543
    assert 18_000_000 < total["bytes"] < 21_000_000
