from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.world import writer
from finlm.world.companies import World

Row = dict[str, Any]
Corpus = dict[str, list[Row]]
TRAIN_BYTES, HELD_OUT_BYTES = 2_000_000, 1_000_000
AMOUNT = r"(-?[\d,]+)万元"
CHANGED = "the synthetic corpus changed: golden curves and reports made on it must be made anew, then this hash"


def read(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    paths = writer.write(tmp_path_factory.mktemp("train"), TRAIN_BYTES, 7, "train")
    return {source: read(path) for source, path in paths.items()}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    paths = writer.write(tmp_path_factory.mktemp("held_out"), HELD_OUT_BYTES, 11, "held_out")
    return {source: read(path) for source, path in paths.items()}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def hundredths(part: int, whole: int) -> str:
    """part / whole as a percentage with two decimals, half up, in whole numbers only."""
    rounded = (20_000 * abs(part) + whole) // (2 * whole)
    return f"{'-' if part < 0 and rounded else ''}{rounded // 100}.{rounded % 100:02d}"


def tables(text: str) -> dict[str, tuple[int, int]]:
    """The rows of all tables in an announcement: this year and the year before."""
    return {label: (now, before) for label, now, before, _ in table_rows(text)}


def table_rows(text: str) -> list[tuple[str, int, int, str]]:
    gap, amount = r"(?: \| |　|\t)", r"(-?[\d,]+)"
    row = rf"^(?:\| )?([\u4e00-\u9fff]+){gap}{amount}{gap}{amount}{gap}([-\d.%]+|不适用)(?: \|)?$"
    return [(m[1], number(m[2]), number(m[3]), m[4]) for m in re.finditer(row, text, re.MULTILINE)]


def annual_summaries(corpus: Corpus) -> list[str]:
    return [row["text"] for row in corpus["announcement"] if "年年度报告" in row["text"].split("\n")[0]]


def last_summaries(corpus: Corpus) -> dict[str, str]:
    """The annual summary of 2024 by stock code."""
    rows = (row for row in corpus["announcement"] if "2024年年度报告" in row["text"].split("\n")[0])
    return {row["meta"]["code"]: row["text"] for row in rows}


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = writer.write(tmp_path / "a", 300_000, 5, "train")
    second = writer.write(tmp_path / "b", 300_000, 5, "train")
    for source in writer.SOURCES:
        assert gzip.decompress(first[source].read_bytes()) == gzip.decompress(second[source].read_bytes())
        # Bytes 4-7 of a gzip header are the time; flag 8 would say that a file name follows.
        assert first[source].read_bytes()[3:8] == bytes(5)


def test_the_bytes_are_those_of_every_other_machine(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for path in writer.write(tmp_path, 300_000, 5, "held_out").values():
        digest.update(gzip.decompress(path.read_bytes()))
    assert digest.hexdigest() == "9929590e7ceefbc01ee8e684578adc68183e1014f515ef90baee456b5e0d87ce", CHANGED


def test_another_seed_is_another_world() -> None:
    names = [{row["meta"]["company"] for row in writer.documents("announcement", 200_000, s, "train")} for s in (1, 2)]
    assert not names[0] <= names[1] and not names[1] <= names[0]


def test_the_size_is_met_within_two_percent(train: Corpus, held_out: Corpus) -> None:
    for corpus, wanted in ((train, TRAIN_BYTES), (held_out, HELD_OUT_BYTES)):
        got = {source: sum(len(row["text"].encode()) for row in rows) for source, rows in corpus.items()}
        assert sum(got.values()) == pytest.approx(wanted, rel=0.02)
        for source, share in writer.SHARE_PERCENT.items():
            assert got[source] == pytest.approx(wanted * share / 100, rel=0.05)


def test_documents_are_the_rows_of_the_files(train: Corpus) -> None:
    for source in writer.SOURCES:
        assert list(writer.documents(source, TRAIN_BYTES, 7, "train")) == train[source]


def test_splits_share_no_name_in_their_texts(train: Corpus, held_out: Corpus) -> None:
    found = []
    for corpus in (train, held_out):
        texts = [row["text"] for rows in corpus.values() for row in rows]
        names: dict[str, set[str]] = {"company": {row["meta"]["company"] for row in corpus["announcement"]}}
        names["short"] = {m for text in texts for m in re.findall(r"证券简称：(\S+)", text)}
        names["code"] = {
            m for text in texts for m in re.findall(r"（(\d{6})）|代码为?：?(\d{6})", text) for m in m if m
        }
        office = "(?:董事长|总经理|财务总监|董事会秘书)"
        names["person"] = {
            m for text in texts for m in re.findall(office + r"(?:为|由)([\u4e00-\u9fff]{3})[，。担]", text)
        }
        names["person"] |= {row["meta"]["author"] for row in corpus["fin_articles"]}
        names["product"] = {m for text in texts for m in re.findall("“(..)”", text)}
        assert all(len(values) > 20 for values in names.values()), {k: len(v) for k, v in names.items()}
        found.append(names)
    for kind in found[0]:
        assert not found[0][kind] & found[1][kind], kind


@pytest.mark.parametrize("seeds", [(7, 7), (7, 8), (0, 123456789)])
def test_worlds_of_two_splits_are_disjoint_for_any_seeds(seeds: tuple[int, int]) -> None:
    one, two = World("train", seeds[0], 2_000), World("held_out", seeds[1], 2_000)
    for field in ("brand", "short", "full", "code", "product"):
        assert not {getattr(c, field) for c in one.companies} & {getattr(c, field) for c in two.companies}
    people = [
        {p for c in world.companies for p in (c.chair, c.ceo, c.cfo, c.secretary)} | set(world.writers)
        for world in (one, two)
    ]
    assert not people[0] & people[1]


def test_names_and_codes_of_a_large_world_are_unique() -> None:
    world = World("held_out", 3, 4_000)
    for field in ("short", "full", "code"):
        assert len({getattr(company, field) for company in world.companies}) == 4_000
    for first in range(0, 4_000, 4):
        assert len({company.industry.name for company in world.companies[first : first + 4]}) == 1


def test_a_larger_world_starts_with_the_companies_of_the_smaller() -> None:
    assert World("train", 7, 40).companies == World("train", 7, 80).companies[:40]


def test_statement_arithmetic_adds_up(train: Corpus, held_out: Corpus) -> None:
    summaries = annual_summaries(train) + annual_summaries(held_out)
    assert len(summaries) > 100
    costs = ("营业成本", "销售费用", "管理费用", "研发费用", "财务费用")
    for text in summaries:
        rows = tables(text)
        now, before = ({label: row[year] for label, row in rows.items()} for year in (0, 1))
        for value in (now, before):
            assert value["营业收入"] - sum(value[cost] for cost in costs) == value["利润总额"], text
            assert value["利润总额"] - value["所得税费用"] == value["净利润"], text
            assert value["流动资产"] + value["非流动资产"] == value["资产总计"], text
            assert value["流动负债"] + value["非流动负债"] == value["负债合计"], text
            assert value["负债合计"] + value["所有者权益合计"] == value["资产总计"], text
            rate = re.search(r"所得税税率为(\d+)%|(\d+)%的所得税税率", text)
            assert rate is not None, text
            tax = (max(0, value["利润总额"]) * int(rate[1] or rate[2]) + 50) // 100
            assert value["所得税费用"] == tax, text


def test_growth_is_computed_from_the_two_years(train: Corpus) -> None:
    checked = 0
    for row in train["announcement"]:
        for label, now, before, change in table_rows(row["text"]):
            expected = f"{hundredths(now - before, before)}%" if now > 0 and before > 0 else "不适用"
            assert change == expected, (label, row["text"])
            checked += 1
    for row in train["fin_news"]:
        if m := re.search(r"营业收入为([\d,]+)万元，上年为([\d,]+)万元，同比(增长|下降)([\d.]+)%", row["text"]):
            sign = "-" if m[3] == "下降" else ""
            assert hundredths(number(m[1]) - number(m[2]), number(m[2])) == sign + m[4]
            checked += 1
    assert checked > 1_000


ROLLED = rf"年初(?:净资产)?{AMOUNT}，加上?(?:当年)?净利润{AMOUNT}，减去?(?:已)?派发的上年度红利{AMOUNT}，\D*?{AMOUNT}"
BALANCED = rf"资产总计{AMOUNT}等于负债合计{AMOUNT}加所有者权益合计{AMOUNT}"
PRICED = r"信用利差是([\d.]+)%，\d+年的期限溢价是([\d.]+)%，加上2.00%的基准利率，票面利率为([\d.]+)%"


def test_sums_worked_in_articles_come_out_right(train: Corpus) -> None:
    checked = Counter[str]()
    for text in (row["text"] for row in train["fin_articles"]):
        for start, net, paid, end in re.findall(ROLLED, text):
            assert number(start) + number(net) - number(paid) == number(end), text
            checked["equity"] += 1
        for assets, debts, equity in re.findall(BALANCED, text):
            assert number(assets) == number(debts) + number(equity), text
            checked["balance"] += 1
        for spread, premium, total in re.findall(PRICED, text):
            assert round(100 * (float(spread) + float(premium) + 2)) == round(100 * float(total)), text
            checked["coupon"] += 1
    assert min(checked[name] for name in ("equity", "balance", "coupon")) > 10, checked


def test_files_agree_on_people_and_figures(train: Corpus) -> None:
    office = r"总经理为?(\S{3})(?:[，。]|负责|主持)"
    bosses = {code: re.search(office, text)[1] for code, text in last_summaries(train).items()}  # type: ignore[index]
    revenue: dict[tuple[str, int], int] = {}
    for row in train["announcement"]:
        title = re.search(r"(\d{4})年年度报告", row["text"].split("\n")[0])
        if title:
            revenue[row["meta"]["code"], int(title[1])] = tables(row["text"])["营业收入"][0]
    checked = Counter[str]()
    for row in train["fin_news"] + train["fin_articles"]:
        text = row["text"]
        if (m := re.search(r"（(\d{6})）总经理(\S{3})在", text)) and m[1] in bosses:
            assert bosses[m[1]] == m[2], text
            checked["people"] += 1
        m = re.search(r"（(\d{6})）(\d{4})年年报为例.*?营业收入([\d,]+)万元", text, re.DOTALL)
        if m and (m[1], int(m[2])) in revenue:
            assert revenue[m[1], int(m[2])] == number(m[3]), text
            checked["lesson"] += 1
        m = re.search(r"（(\d{6})）(\d{4})年(?:营业收入|营收)([\d.]+)亿元", text)
        if m and (m[1], int(m[2])) in revenue:
            assert f"{(revenue[m[1], int(m[2])] + 50) // 100 / 100:.2f}" == m[3], text
            checked["news"] += 1
    assert min(checked[name] for name in ("people", "lesson", "news")) > 2, checked


def test_meta_keys_differ_between_the_files(train: Corpus) -> None:
    keys = {source: {tuple(row["meta"]) for row in rows} for source, rows in train.items()}
    assert keys == {
        "announcement": {("source", "code", "company", "date")},
        "fin_news": {("source", "time", "column")},
        "fin_articles": {("source", "author", "tags")},
        "fin_exam": {("source", "subject", "answer")},
    }
    assert all(row["meta"]["source"] == source for source, rows in train.items() for row in rows)


def test_documents_have_their_lengths_and_no_open_fields(train: Corpus, held_out: Corpus) -> None:
    limits = {"announcement": (400, 1500), "fin_news": (60, 250), "fin_articles": (500, 1800), "fin_exam": (50, 250)}
    for corpus in (train, held_out):
        for source, (shortest, longest) in limits.items():
            for text in (row["text"] for row in corpus[source]):
                assert shortest <= len(text) <= longest, (source, len(text), text)
                assert not re.search(r"[{}()]|%s|None|\n\n", text), text


def test_fewer_than_one_document_in_two_hundred_is_a_duplicate(train: Corpus) -> None:
    for source, rows in train.items():
        assert len({row["text"] for row in rows}) >= 0.995 * len(rows), source


def test_companies_grow_with_the_root_of_the_size() -> None:
    counts = [writer.company_count(size * 10**6) for size in (1, 4, 16, 1_000, 10_000, 100_000)]
    assert counts == [48, 200, 400, 3_160, 10_000, 12_000]


def test_a_run_that_dies_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(archive: Any, dice: Any) -> Any:
        yield "一", {"time": "x"}
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "news", dying)
    with pytest.raises(KeyboardInterrupt):
        writer.write(tmp_path, 200_000, 1, "train")
    assert [path.name for path in tmp_path.iterdir()] == ["announcement.jsonl.gz"]
    assert read(tmp_path / "announcement.jsonl.gz")


@pytest.mark.parametrize("size", ["sixteen", "16XB", "-5MB", "10KB", ""])
def test_a_bad_size_is_one_line_and_exit_code_2(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert writer.main([str(tmp_path / "out"), f"--size={size}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_writes_four_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert writer.main([str(tmp_path), "--size", "200KB", "--seed", "3", "--split", "held_out"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{source}.jsonl.gz") for source in writer.SOURCES]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="tweets"):
        next(writer.documents("tweets", 200_000, 1, "train"))
    with pytest.raises(UserError, match="test"):
        next(writer.documents("fin_news", 200_000, 1, "test"))
