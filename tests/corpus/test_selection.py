"""What is left out of a corpus: near-duplicates, benchmark questions, surprising text; the same for any workers."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache
from finlm.corpus import encode, selection, steps
from finlm.corpus.read import readers
from finlm.corpus.workers import Context
from finlm.recipe import recipe
from finlm.rows import dialogues
from finlm.rows.shards import Shard, Shards, measure_lengths
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
    lengths = dict(measure_lengths(tmp_path, entries))
    assert [row.longest for row in lengths.values()] == [9] * count
    shards = [Shard(entry.source, tmp_path / entry.file, 9, 1, 20, np.dtype("<u2")) for entry in entries]
    assert len(dialogues.make_index(shards, "best_fit", 8).sources) == count
    assert Name.compared < 20 * count


FIRMS = ("海岚银行", "青禾证券", "北岭化工", "南浦航运", "东泽医药", "西陵电力", "江汀置业", "云岫软件")


def announcements(path: Path, drop: str = "", at: int = 0) -> list[dict[str, str]]:
    """Write 40 announcements each of eight firms over 40 days; row `at` has no field `drop`. Returns the rows."""
    dice, rows = random.Random(7), []
    for number in range(320):
        words = "".join(chr(0x4E00 + dice.randrange(3000)) for _ in range(120))
        day = f"2024-0{1 + number // 8 // 28}-{1 + number // 8 % 28:02d}"
        rows.append({"text": f"{words}第{number}号", "firm": FIRMS[number % 8], "date": day})
    rows[9]["text"] = rows[0]["text"][:-4] + "第9号"  # a form of two firms, of one day and the next
    if drop:
        del rows[at][drop]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return rows


def sides(directory: Path, *overrides: str) -> tuple[list[int], dict[str, Any]]:
    """Prepare announcements by the recipe; return the decision of each row, and the manifest of the shards."""
    settings = (f"data.sources={directory}/a.jsonl", f"data.cache_dir={directory}/cache", "tokenizer.vocab_size=3600")
    wanted = recipe.load(QUICKSTART, (*settings, "data.num_proc=1", "tokenizer.sample_bytes=1MB", *overrides)).recipe
    shards = prepare.run(wanted)
    cache = Cache(directory / "cache", build=False)
    prepare.run_steps(wanted, cache)
    step = next(path for path in cache.used if path.name.startswith("selection-"))
    return np.load(step / "decisions.npy").tolist(), shards.manifest


def test_all_documents_of_a_firm_are_on_one_side_and_the_leak_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = announcements(tmp_path / "a.jsonl")
    decided, manifest = sides(tmp_path, "data.held_out_by=firm", "data.held_out_fraction=0.3")
    by_firm = {firm: {code for row, code in zip(rows, decided, strict=True) if row["firm"] == firm} for firm in FIRMS}
    out = [firm for firm, codes in by_firm.items() if codes == {selection.HELD_OUT}]
    assert 0 < len(out) < 8 and all(by_firm[firm] == {selection.TRAIN} for firm in FIRMS if firm not in out)
    is_leak = (rows[0]["firm"] in out) != (rows[9]["firm"] in out)
    assert manifest["leak"] == {"documents": int(is_leak), "held_out": int(is_leak)}
    assert f"leak: {int(is_leak)} training documents resemble" in capsys.readouterr().err
    capped, _ = sides(tmp_path, "data.held_out_by=firm", "data.held_out_fraction=0.3", "data.held_out_documents=5")
    assert capped.count(selection.HELD_OUT) == 5
    assert [code == selection.TRAIN for code in capped] == [code == selection.TRAIN for code in decided]


def test_documents_from_a_date_on_are_held_out_and_those_before_are_not(tmp_path: Path) -> None:
    rows = announcements(tmp_path / "a.jsonl")
    decided, manifest = sides(tmp_path, "data.held_out_from=2024-01-02")
    assert [code == selection.HELD_OUT for code in decided] == [row["date"] >= "2024-01-02" for row in rows]
    assert manifest["leak"] == {"documents": 1, "held_out": 1}  # rows 0 and 9


def test_the_column_that_holds_documents_out_is_read_from_parquet(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(announcements(tmp_path / "a.jsonl"))
    parquet.write_table(table, tmp_path / "a.parquet")
    wanted = sides(tmp_path, "data.held_out_from=2024-01-02")[0]
    assert sides(tmp_path, f"data.sources={tmp_path}/a.parquet", "data.held_out_from=2024-01-02")[0] == wanted


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.held_out_by=company",), "a.jsonl:1: nothing in field 'company', by which data.held_out_by holds out"),
        (("data.held_out_by=firm", "data.max_broken_fraction=0"), "a.jsonl:4: nothing in field 'firm'"),
        (("data.held_out_from=2024-01-09", "data.held_out_date_field=firm"), "'海岚银行', not a date as 2024-01-31"),
    ],
)
def test_rows_without_the_field_are_refused_with_their_place_and_share(
    tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    announcements(tmp_path / "a.jsonl", "firm" if "=firm" in overrides[0] else "", 3)
    with pytest.raises(UserError, match=r"rows cannot be read \(.*%\)") as told:
        sides(tmp_path, *overrides)
    assert says in told.value.evidence


def test_text_files_cannot_be_held_out_by_a_field_and_a_date_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("公司预计净利润同比增长一成。" * 9, "utf-8")
    with pytest.raises(UserError, match=r"data.held_out_by: source b is text"):
        sides(tmp_path, f"data.sources={tmp_path}/b.txt", "data.held_out_by=firm")
    announcements(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"data.held_out_from holds out no document"):
        sides(tmp_path, "data.held_out_from=2025-01-01")
    with pytest.raises(UserError, match="held_out_from"):
        sides(tmp_path, "data.held_out_from=2024-13-01")
