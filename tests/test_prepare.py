"""The whole preparation: skipping, continuing after kill -9, equal bytes whatever the workers, clear refusals."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm import prepare
from finlm.base import files, processes, step_cache
from finlm.base.errors import UserError
from finlm.corpus import documents, encode, steps
from finlm.corpus.read import readers
from finlm.recipe import cluster, recipe
from finlm.recipe.schema import Recipe
from finlm.record.report import run_page
from finlm.rows import packing
from finlm.rows.shards import Rows, Shards
from finlm.tokens import encoders, vocab
from finlm.world import writer

ROOT = Path(__file__).resolve().parents[1]
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
            "data.num_proc=1",  # two workers cost a second a step to start; tests that are about them ask for them
            "tokenizer.vocab_size=400",
        )
        return recipe.load(ROOT / "recipes/quickstart/pretrain.yaml", (*settings, *overrides)).recipe

    return load


def prepared(wanted: Recipe) -> Path:
    """The directory of a recipe's shards."""
    return prepare.run(wanted).directory


def located(wanted: Recipe) -> Path | None:
    """The same where they are complete, else None."""
    shards = prepare.locate(wanted)
    return shards.directory if shards else None


def contents(directory: Path) -> dict[str, bytes]:
    files_there = [path for path in directory.rglob("*") if path.is_file() and path.name != encoders.PROVEN]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files_there}


def steps_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir() and path.name != "chunks"}


def test_every_document_is_in_the_shards_once_and_decodes_to_itself(make: Make, tmp_path: Path) -> None:
    wanted = make("data.shard_tokens=5000")
    directory = prepared(wanted)
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
    total = counts["total"]
    assert set(found) <= expected and len(found) == len(set(found)) == len(expected) - total["reserved"] > 450
    (tokenizer,) = directory.parent.glob("tokenizer-*/manifest.json")
    written = sum(path.stat().st_size for split in ("train", "held_out") for path in (directory / split).iterdir())
    rows = files.read_json(tokenizer)["compression"].values()
    needed = encode.needed_bytes([(row["bytes"], *row["tokens"].values()) for row in rows], total, "uint16")
    assert written < needed < 1.5 * written  # what is asked of the disk, and no more
    assert total["rows"] == 600 and total["too_short"] == 30 and total["duplicate"] == 60
    assert total["kept"] + total["held_out"] + total["reserved"] == len(expected)
    manifest = files.read_json(directory / "manifest.json")
    assert list(manifest["totals"]["train"]) == list(manifest["totals"]["held_out"]) == ["news", "reports"]
    for item in manifest["shards"]:
        assert files.sha256_file(directory / item["file"]) == item["sha256"]
    length = wanted.batch.sequence_length
    rows = sum(-(-(shard.tokens - 1) // length) for shard in shards.split("train"))
    assert (shards.vocab_size, prepare.epoch_tokens(wanted, shards)) == (400, rows * length)
    assert prepare.summary(Shards(directory))["documents"] == counts["sources"]


def test_a_second_run_does_nothing_and_locate_finds_the_same(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert located(make()) is None
    assert not Path(make().data.cache_dir).exists()
    directory = prepared(make())
    before = {path: path.stat().st_mtime_ns for path in directory.parent.rglob("*") if path.name != ".lock"}
    capsys.readouterr()
    assert prepared(make()) == located(make()) == directory
    assert {path: path.stat().st_mtime_ns for path in before} == before
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("(reused)")]
    assert [line.split(":")[0] for line in lines] == ["documents", "selection", "tokenizer", "shards"]


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("data.num_proc=2", set()),
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
    prepared(make(sources))
    cache = Path(make().data.cache_dir)
    before = steps_in(cache)
    assert (located(make(sources, override)) is None) == bool(redone)
    prepared(make(sources, override))
    assert {name.split("-")[0] for name in steps_in(cache) - before} == redone


def test_changed_content_is_noticed_and_a_changed_date_is_not(make: Make, tmp_path: Path) -> None:
    directory = prepared(make())
    os.utime(tmp_path / "corpus/news.jsonl.gz", (1, 1))
    assert prepared(make()) == directory
    corpus(tmp_path / "corpus/reports.jsonl", 201, 3)
    assert located(make()) is None
    assert prepared(make()) != directory


def test_a_step_whose_files_are_not_as_long_as_they_were_is_made_again(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = prepared(make())
    reference = contents(directory.parent)
    (manifest,) = directory.parent.glob("documents-*/manifest.json")
    chunk = directory.parent / files.read_json(manifest)["chunks"][-1]["file"]
    (model,) = directory.parent.glob("tokenizer-*/tokenizer.model")
    for damaged in (chunk, chunk.with_suffix(".npy"), model, directory / "train/news-00000.idx"):
        os.truncate(damaged, 0)  # as a file that was not yet on disk when the host went down
        assert located(make()) is None
        capsys.readouterr()
        assert prepared(make()) == directory
        assert f"{damaged} has 0 bytes instead of" in capsys.readouterr().err
        assert contents(directory.parent) == reference


def test_the_bytes_do_not_depend_on_workers_or_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = contents(prepared(make("data.num_proc=1", cache="one")))
    monkeypatch.setattr(readers, "BLOCK_BYTES", 10_000)
    for workers in (1, 2):
        found = contents(prepared(make(f"data.num_proc={workers}", cache=f"small-{workers}")))
        assert found == reference


KILLED = """
import os, signal, sys
from finlm.base import files
from finlm import prepare
from finlm.corpus import encode; from finlm.corpus import selection
from finlm.corpus.read import parsing; from finlm.corpus.read import readers
from finlm.tokens import vocab
from finlm.world import writer
from finlm.recipe import cluster, recipe

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
    owner, name = {"documents": (parsing, "check_broken_rows"), "selection": (selection, "total_counts"),
                   "tokenizer": (vocab, "describe"), "shards": (encode._Shard, "append"),
                   "fingerprints": (os, "replace"), "manifest": (files, "write_json")}[point]
    deadly(owner, name, int(calls))
    prepare.run(recipe.load(yaml, overrides).recipe)
"""


@pytest.mark.parametrize(
    ("point", "calls", "finished"),
    [
        ("fingerprints", 0, set()),  # between the temporary file and its rename
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
    reference = prepared(make(cache="reference"))
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
    assert located(make()) is None
    directory = prepared(make())
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
        prepared(make())
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {".lock", "fingerprints.json", "broken-reports.jsonl", "chunks"}
    directory = prepared(make("data.max_broken_fraction=0.02"))
    assert files.read_json(directory / "documents.json")["sources"]["reports"]["broken"] == 3
    with pytest.raises(UserError, match="3 of 203"):  # a finished step does not hide them from a stricter recipe
        prepared(make())


def test_an_accepted_cut_is_said_with_the_counts(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus/news.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"source news: news\.jsonl\.gz ends early") as caught:
        prepared(make())
    for _ in range(2):  # reused too
        capsys.readouterr()
        prepared(make(f"data.{caught.value.fix.partition('data.')[2].partition(',')[0]}"))
        assert "; news.jsonl.gz: cut, the rest not read" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["corpus/missing.jsonl", "corpus/*.parquet", "nowhere/deep/*.jsonl"])
def test_a_path_without_files_shows_what_lies_beside_it(make: Make, tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"data.sources\[0\]: no file matches") as caught:
        prepared(make(f"data.sources={tmp_path}/{path}"))
    assert located(make(f"data.sources={tmp_path}/{path}")) is None  # a plan needs no data
    beside = ("news.jsonl.gz", "reports.jsonl") if path.startswith("corpus") else (f"{tmp_path} holds corpus",)
    for part in (f"looked for {tmp_path}/{path}\n", *beside):
        assert part in caught.value.evidence


@pytest.mark.parametrize(("path", "files"), [("corpus", "*.jsonl"), ("", "**/*.jsonl"), ("cache", "holds none")])
def test_a_directory_instead_of_files_is_said_to_be_one(make: Make, tmp_path: Path, path: str, files: str) -> None:
    corpus(tmp_path / "corpus/more.jsonl", 1, 3)
    (tmp_path / "cache").mkdir()
    with pytest.raises(UserError, match=rf"data.sources\[0\]: {tmp_path / path} is a directory") as caught:
        prepared(make(f"data.sources={tmp_path / path}"))
    assert (files if "holds" in files else f"{tmp_path / path / files}") in caught.value.fix


def test_files_of_one_name_under_a_glob_get_a_fix_that_works(make: Make, tmp_path: Path) -> None:
    corpus(tmp_path / "corpus/old/news.jsonl", 30, 5)
    corpus(tmp_path / "corpus/new/news.jsonl", 30, 6)
    with pytest.raises(UserError, match="2 sources are named news") as caught:
        prepared(make(f"data.sources={{path: {tmp_path}/corpus/*/*.jsonl}}"))
    assert (
        "one name for all: data.sources[0].name; or one entry a directory instead of data.sources[0]"
        in caught.value.fix
    )
    directory = prepared(make(caught.value.fix.partition("--set ")[2].strip("'")))
    assert [shard.source for shard in Shards(directory).split("train")] == ["a", "b"]
    directory = prepared(make(f"data.sources={{path: {tmp_path}/corpus/*/*.jsonl, name: all news}}"))
    assert [shard.source for shard in Shards(directory).split("train")] == ["all_news"]
    assert [row["file"] for row in files.read_json(directory / "documents.json")["files"]] == ["news.jsonl"] * 2


def test_the_sha256_of_a_source_is_checked(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "corpus/reports.jsonl"
    for digest, fails in ((files.sha256_file(path).upper(), False), ("0" * 64, True)):
        wanted = make(f"data.sources=[{{path: {path}, sha256: '{digest}'}}]")
        if fails:
            with pytest.raises(UserError, match="not the file that the recipe names") as caught:
                prepared(wanted)
            assert digest in caught.value.evidence and files.sha256_file(path) in caught.value.evidence
        else:
            prepared(wanted)


def test_two_files_of_one_name_need_names(make: Make, tmp_path: Path) -> None:
    corpus(tmp_path / "old/news.jsonl", 30, 5)
    both = [{"path": f"{tmp_path}/corpus/news.jsonl.gz"}, {"path": f"{tmp_path}/old/*.jsonl"}]
    with pytest.raises(UserError, match="2 sources are named news"):
        prepared(make(f"data.sources={json.dumps(both)}"))
    both[1]["name"] = "old news"
    directory = prepared(make(f"data.sources={json.dumps(both)}"))
    assert [shard.source for shard in Shards(directory).split("train")] == ["news", "old_news"]


@pytest.mark.parametrize("content", ["", '{"text": "短"}\n', None], ids=["empty", "too short", "a repeated file"])
def test_one_file_of_many_may_have_nothing_new_and_alone_it_is_refused(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    part, whole = tmp_path / "corpus/part-2.jsonl", tmp_path / "corpus/reports.jsonl"
    part.write_text(whole.read_text() if content is None else content)
    wanted = make("data.mixture={weights: {'*': 1}}", "train.steps=30")
    about = prepare.summary(Shards(prepared(wanted)), wanted)
    kept = {"news", "reports"} if content is not None else {"news", "part-2"}  # the first of two stays
    empty = ({"part-2", "reports"} - kept).pop()
    assert f"selection: nothing to train on in {empty}" in capsys.readouterr().err
    assert {name for name, row in about["documents"].items() if row["kept"]} == set(about["shards"]) == kept
    assert empty in [row[0] for row in run_page._count_data(about)["sources"]]
    sources = json.dumps([f"{tmp_path}/corpus/{name}" for name in ("news.jsonl.gz", "part-2.jsonl", "reports.jsonl")])
    with pytest.raises(UserError, match=f"source {empty} has no document to train on"):
        prepared(make(f"data.sources={sources}"))


def test_an_existing_tokenizer_is_used_and_must_fit_the_integer_type(make: Make, tmp_path: Path) -> None:
    model = shutil.copy(prepared(make()) / "tokenizer.model", tmp_path / "given.model")
    given = ("tokenizer.vocab_size=null", f"tokenizer.path={model}")
    directory = prepared(make(*given, "data.token_dtype=uint32"))
    assert files.sha256_file(directory / "tokenizer.model") == files.sha256_file(Path(model))
    assert Shards(directory).dtype == np.dtype("<u4")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        prepared(make("tokenizer.vocab_size=null", "tokenizer.path=missing.model"))


def test_prepared_shards_are_used_when_they_are_whole_and_of_the_same_tokenizer(make: Make, tmp_path: Path) -> None:
    directory = shutil.copytree(prepared(make()), tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "corpus")
    given = ("tokenizer.vocab_size=null", f"data.prepared={directory}")
    same = make(*given, f"tokenizer.path={directory}/tokenizer.model")
    assert prepared(same) == located(same) == directory
    corpus(tmp_path / "corpus/news.jsonl", 100, 9)
    other = prepared(make("tokenizer.vocab_size=350")) / "tokenizer.model"
    with pytest.raises(UserError, match="the tokenizer does not match the shards") as caught:
        prepared(make(*given, f"tokenizer.path={other}"))
    assert files.sha256_file(other) in caught.value.evidence
    (directory / "train/news-00000.idx").unlink()
    with pytest.raises(UserError, match=r"news-00000.idx is damaged"):
        prepared(same)
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds no prepared shards"):
        located(same)


def test_a_mixture_is_shown_and_recorded_and_a_wrong_name_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = "[{weights: {news: 1, reports: 9}, share: 0.5}, {weights: {'*': 1}}]"
    wanted = make(f"data.mixture={mixture}", "data.packing=best_fit", "train.steps=100", "batch.sequence_length=64")
    directory = prepared(wanted)
    assert "(best_fit); the run reads" in capsys.readouterr().err
    about = prepare.summary(Shards(directory), wanted)
    reading = {row["source"]: row for row in about["reading"]["sources"]}
    assert sum(row["tokens"] for row in reading.values()) == 100 * 4096
    assert reading["news"]["share_by_part"][0] == pytest.approx(0.1, abs=0.001)
    assert reading["reports"]["epochs"] > reading["news"]["epochs"]
    assert about["lengths"]["news"]["documents"] == sum(row[1] for row in about["lengths"]["news"]["histogram"])
    with pytest.raises(UserError, match="books is no source"):
        prepared(make("data.mixture={weights: {books: 1}}"))


def test_the_rows_that_are_shown_are_those_that_the_run_reads(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    length = ("train.tokens=50000", "batch.sequence_length=64", "optim.warmup_steps=2")
    wanted = make("data.mixture=[{weights: {news: 1, reports: 2}}]", *length)
    shards = Shards(prepared(wanted))
    plan = prepare.plan_with_data(wanted, cluster.local(2), shards)
    assert plan.steps * plan.tokens_per_step < 50000, "tokens are no whole steps"
    rows = Rows(shards.split("train"), 64)
    run_rows = plan.steps * plan.tokens_per_step // 64  # as train/pretrain.py counts them
    order = packing.order(rows.source_ranges(), wanted.data.mixture, run_rows, 64, wanted.train.seed)
    capsys.readouterr()
    prepare.show_rows(wanted, shards, 5)
    shown = re.findall(r"row ([\d,]+) of", capsys.readouterr().out)
    assert [int(row.replace(",", "")) for row in shown] == order[np.arange(5)].tolist()


def test_a_full_disk_is_told_before_and_cleaned_up_after(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(step_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="not enough disk space for the step documents"):
            prepared(make())

    size = (tmp_path / "corpus/reports.jsonl").stat().st_size // 2  # of which text is a half
    with monkeypatch.context() as patch:
        patch.setattr(step_cache, "_SPACE_TO_SPARE", 0)
        patch.setattr(step_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, size))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="not enough disk space for the step documents to shards"):
            prepared(make(f"data.sources={tmp_path}/corpus/reports.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(processes, "available_bytes", lambda: 1000)
        with pytest.raises(UserError, match=r"training a tokenizer on .* does not fit in memory"):
            prepared(make("data.num_proc=1"))
    assert not steps_in(tmp_path / "cache")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(encode._Shard, "append", full)
        with pytest.raises(UserError, match="the disk is full: shards was given up"):
            prepared(make())
    assert {name.split("-")[0] for name in steps_in(tmp_path / "cache")} == {"documents", "selection", "tokenizer"}
    prepared(make())


def test_the_embedded_corpus_brings_its_own_held_out_world(make: Make) -> None:
    source = "{synthetic: {size: 400KB, held_out_size: 100KB, seed: 3}}"
    directory = prepared(make(f"data.sources=[{source}]", "tokenizer.vocab_size=1500"))
    counts = files.read_json(directory / "documents.json")
    assert len(counts["sources"]) == 4
    shards = Shards(directory)
    assert 300_000 < sum(shard.text_bytes for shard in shards.split("train")) < 440_000
    assert 85_000 < sum(shard.text_bytes for shard in shards.split("held_out")) < 115_000
    again = make(f"data.sources=[{source}]", "tokenizer.vocab_size=1500", cache="again")
    assert contents(prepared(again)) == contents(directory)


def test_the_embedded_corpus_depends_on_every_file_of_the_world() -> None:
    world = Path(writer.__file__).parent
    known = {path for path in world.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert set(steps.generator_files()) == known and world / "prose/news.txt" in known


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real finance text at {REAL}")
def test_the_real_corpus_is_read_to_the_last_row(make: Make) -> None:
    directory = prepared(
        make(f"data.sources={REAL}/*.jsonl.gz", "tokenizer.vocab_size=6000", "tokenizer.sample_bytes=500KB")
    )
    total = files.read_json(directory / "documents.json")["total"]
    assert total["rows"] == 47_543 and total["broken"] == 0
    names = ("kept", "held_out", "reserved", "duplicate", "too_short")
    assert sum(total[name] for name in names) == 47_543
    assert 18_000_000 < total["bytes"] < 21_000_000


def chunks_in(cache: Path) -> dict[str, int]:
    """The kept chunks by name, each with the time when it was written."""
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in (cache / "chunks").rglob("*.*")}


@pytest.mark.parametrize("change", ["add", "rename", "one character", "append", "remove"])
def test_a_change_of_the_sources_makes_only_what_depends_on_it_and_the_bytes_of_a_fresh_cache(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 20_000)
    rules = ("data.dedup=near", f"tokenizer={{path: {prepared(make(cache='first'))}/tokenizer.model}}")
    large = tmp_path / "corpus/large.jsonl"
    corpus(large, 1500, 9)
    prepared(make(*rules))
    before = chunks_in(tmp_path / "cache")
    text = large.read_text(encoding="utf-8")
    if change == "add":
        corpus(tmp_path / "corpus/other.jsonl", 40, 11)
    elif change == "rename":
        large.rename(tmp_path / "corpus/renamed.jsonl")
    elif change == "one character":
        large.write_text(text.replace("\\u516c", "\\u5de5", 1), encoding="utf-8")
    elif change == "append":
        with large.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": "附加的一行，营业收入增长。" * 3}) + "\n")
    else:
        (tmp_path / "corpus/reports.jsonl").unlink()
    capsys.readouterr()
    directory = prepared(make(*rules))
    after = chunks_in(tmp_path / "cache")
    assert {name: time for name, time in after.items() if name in before} == before, "none is written again"
    new = {kind: sum(f"/{kind}/" in name for name in after.keys() - before.keys()) for kind in ("documents", "encoded")}
    most = {"add": (6, 2), "rename": (0, 0), "one character": (3, 2), "append": (6, 3), "remove": (0, 2)}[change]
    assert new["documents"] <= most[0] and new["encoded"] <= most[1], new
    said = capsys.readouterr().err
    assert ("to read, the rest is kept" in said) == (change in ("add", "one character", "append"))
    assert contents(prepared(make(*rules, cache="fresh"))) == contents(directory)


def test_a_killed_step_goes_on_with_the_chunks_that_were_finished(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 5_000)
    wanted = make("data.num_proc=1")
    reference = contents(prepared(make("data.num_proc=1", cache="reference")))
    parsed, plain, most = list[Path](), documents.parse, 5

    def parse(task: documents.Task) -> documents.Parsed:
        if task.kept is None:
            if len(parsed) == most:
                raise KeyboardInterrupt
            parsed.append(task.chunk)
        return plain(task)

    monkeypatch.setattr(documents, "parse", parse)
    with pytest.raises(KeyboardInterrupt):
        prepared(wanted)
    first = list(parsed)
    torn = first[0].parent / ".chunk.host.1.tmp"  # as a kill in the middle of writing leaves
    torn.write_bytes(b"torn")
    most = -1
    assert contents(prepared(wanted)) == reference
    assert not torn.exists()
    assert len(first) == 5 and not set(first) & set(parsed[5:]) and len(parsed) > 8


def test_many_small_files_share_chunks_and_their_broken_rows_have_their_files(make: Make, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for number in range(300):
        row = json.dumps({"text": f"第{number}篇公告：营业收入增长。"})
        (small / f"{number:03}.jsonl").write_text("\n" * (number % 3) + (row if number != 77 else "oops") + "\n")
    override = (f"data.sources=[{{path: {small}/*.jsonl, name: small}}, {tmp_path}/corpus/news.jsonl.gz]",)
    directory = prepared(make(*override, "data.max_broken_fraction=0.01"))
    (manifest,) = directory.parent.glob("documents-*/manifest.json")
    assert [chunk["documents"] for chunk in files.read_json(manifest)["chunks"] if chunk["input"] == 0] == [299]
    (row,) = files.read_json_lines(manifest.parent / "broken.jsonl")
    assert row["file"] == f"{small}/077.jsonl" and row["line"] == 77 % 3 + 1
