"""What is left out of a corpus: near-duplicates, benchmark questions, surprising text; the same for any workers."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache
from finlm.corpus import encode, selection, steps
from finlm.corpus.read import readers
from finlm.corpus.workers import Context
from finlm.recipe import recipe
from finlm.rows import dialogues
from finlm.rows.shards import Shard, Shards
from finlm.world import writer

from helpers import QUICKSTART

STEM = "在海岚自治州的债券登记制度中，下列哪一项不属于登记机构的法定职责？"


def write(path: Path, texts: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), mtime=0))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files: news with edited copies and shuffled text; exams of which three ask the benchmark's question."""
    dice = random.Random(3)
    news = [row["text"] for row in writer.documents("fin_news", 1_200_000, 4, "train")]
    exams = [row["text"] for row in writer.documents("fin_exam", 3_000_000, 4, "train")][:280]
    write(tmp_path / "clean.jsonl.gz", news[1::2] + exams[80:])
    news, exams = news[::2][:400], exams[:80]
    copies = [text[:40] + "（续）" + text[40:] for text in news[:60] if len(text) > 150]
    noise = ["".join(dice.sample(text, len(text))) for text in news[100:110]]
    write(tmp_path / "news.jsonl.gz", [*news, *copies, *noise, "锟斤拷" * 30])
    asked = [f"{number}. {STEM}\nA. 过户\nB. 付息\n答案：A" for number in range(3)]
    write(tmp_path / "exam.jsonl.gz", exams + asked)
    (tmp_path / "benchmark.csv").write_text(f",Question,A,B,Answer\n0,{STEM},过户,付息,A\n", encoding="utf-8")
    return tmp_path


def run(corpus: Path, cache: str, *overrides: str) -> Path:
    settings = (
        f"data.sources=[{corpus}/news.jsonl.gz, {corpus}/exam.jsonl.gz]",
        f"data.cache_dir={corpus}/{cache}",
        "data.dedup=near",
        f"data.decontaminate={corpus}/benchmark.csv",
        f"data.clean.perplexity={{clean_set: {corpus}/clean.jsonl.gz, max_perplexity: 100}}",
        "tokenizer.vocab_size=4000",
        "data.num_proc=1",
    )
    return prepare.run(recipe.load(QUICKSTART, (*settings, *overrides)).recipe).directory


def rows(corpus: Path, cache: str, pattern: str) -> list[dict[str, Any]]:
    (path,) = (corpus / cache).glob(pattern)
    return list(files.read_json_lines(path))


def test_every_reason_is_counted_and_shown(corpus: Path) -> None:
    counts = files.read_json(run(corpus, "cache") / "documents.json")["sources"]
    assert counts["news"]["cleaned"] == 1
    assert counts["news"]["perplexity"] == 10
    assert counts["news"]["near_duplicate"] >= 20
    assert counts["exam"]["contaminated"] == 3
    for row in counts.values():
        reasons = [name for name in row if name not in ("rows", "bytes", "held_out_bytes")]
        assert row["rows"] == sum(row[name] for name in reasons)
    ledger = rows(corpus, "cache", "selection-*/dropped.jsonl")
    copies = [row for row in ledger if row["reason"] == "near_duplicate" and "（续）" in row["start"]]
    assert copies and all(
        row["like_start"][:40] == row["start"][:40] and row["like"] < row["document"] for row in copies
    )
    (hit,) = {(row["stem"], row["file"]) for row in rows(corpus, "cache", "contamination-*/contaminated.jsonl")}
    assert hit == (STEM, "benchmark.csv")
    assert rows(corpus, "cache", "documents-*/dropped.jsonl")[0]["reason"] == "garbled"


def test_shards_are_the_same_for_any_workers_and_block_sizes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Shards(run(corpus, "one"))
    many = Shards(run(corpus, "many", "data.num_proc=2"))
    assert [item["sha256"] for item in one.manifest["shards"]] == [item["sha256"] for item in many.manifest["shards"]]
    monkeypatch.setattr(readers, "BLOCK_BYTES", 20_000)
    small = run(corpus, "small")
    assert (
        files.read_json(small / "documents.json")["total"] == files.read_json(one.directory / "documents.json")["total"]
    )


def test_a_setting_redoes_only_what_follows_from_it(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, "cache")
    kept = {path: path.stat().st_mtime_ns for path in corpus.glob("cache/chunks/signatures/*/*")}
    capsys.readouterr()
    run(corpus, "cache", "data.clean.perplexity.max_perplexity=auto", "data.dedup={method: near, threshold: 0.9}")
    said = capsys.readouterr().err
    for step in ("documents", "contamination", "language_model", "perplexity"):
        assert any(line.startswith(f"{step}: ") and line.endswith("(reused)") for line in said.splitlines()), step
    assert kept and {path: path.stat().st_mtime_ns for path in corpus.glob("cache/chunks/signatures/*/*")} == kept
    assert not any(line.startswith("near_duplicates: ") and "(reused)" in line for line in said.splitlines())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.decontaminate=absent/*.csv", "no file matches absent"),
        ("data.clean.perplexity={clean_set: absent.jsonl}", "no file matches absent"),
        ("data.clean.bad_keywords=absent.txt", "cannot read"),
        ("data.clean.mask=[passport]", "mask"),
        ("data.dedup=fuzzy", "dedup"),
        ("data.mixture={weights: {news: 1, exma: 2}}", "data.mixture[0].weights: exma is no source"),
        ("data.mixture={weights: {news: 1}, to: {exma: 2}}", "data.mixture[0].to: exma is no source"),
        ("data.mixture=[{tokens: {new?: 1000, exma: 2000}}]", "data.mixture[0].tokens: exma is no source"),
        ("tokenizer.sample_weights={exma: 1}", "tokenizer.sample_weights: exma is no source"),
    ],
)
def test_mistakes_are_refused_by_name_before_any_step(corpus: Path, override: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        run(corpus, "cache", override)
    assert problem in f"{caught.value}"
    assert not list(corpus.glob("cache/*-*/"))


def test_a_weight_of_no_source_of_dialogues_is_refused_as_early(corpus: Path) -> None:
    settings = (f"data.sources=[{corpus}/news.jsonl.gz]", "data.mixture={weights: {exam_chat: 1}}", "eval.suites=[]")
    wanted = recipe.load(QUICKSTART.with_name("sft.yaml"), settings).recipe
    with pytest.raises(UserError, match="exam_chat is no source"):
        steps.list_inputs(Context(wanted, Cache(corpus / "cache", build=True)))


class Name(str):
    """A source's name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Name.compared += 1
        return str.__ne__(self, other)

    __hash__ = str.__hash__


def test_sources_are_not_compared_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 files every one is a source: shards, lengths and the index of rows take each of them once."""
    count, document = 300, np.arange(9, dtype=np.uint16)
    names = [Name(f"s{number}") for number in range(count)]
    arrays = {"train.ids": document, "train.lengths": np.array([9]), "train.text_bytes": np.array([20])}
    monkeypatch.setattr(Context, "map_kept", lambda self, name, function, tasks, most: (arrays for _ in tasks))
    context = Context(recipe.load(QUICKSTART).recipe, Cache(tmp_path, build=True))
    decisions = np.zeros(1, dtype=np.uint8)
    tasks = [
        encode.Task(name, tmp_path / "a.txt", decisions, tmp_path / "t", "", (1, 2), "uint16", "") for name in names
    ]
    monkeypatch.setattr(Name, "compared", 0)
    entries = encode.write_shards(context, tmp_path, tasks, 20 * count)
    assert [entry.source for entry in entries] == names
    lengths = dict(selection._measure_lengths(tmp_path, entries))
    assert [row.longest for row in lengths.values()] == [9] * count
    shards = [Shard(entry.source, tmp_path / entry.file, 9, 1, 20, np.dtype("<u2")) for entry in entries]
    assert len(dialogues.make_index(shards, "best_fit", 8).sources) == count
    assert Name.compared < 20 * count
