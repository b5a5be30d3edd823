from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.data import synthetic
from finlm.data.synthetic_world import World

Row = dict[str, Any]
Corpus = dict[str, list[Row]]
TRAIN_BYTES, HELD_OUT_BYTES = 2_000_000, 1_000_000
CHANGED = "the synthetic corpus changed: golden curves and reports made on it must be made anew, then this hash"


def read(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    paths = synthetic.write(tmp_path_factory.mktemp("train"), TRAIN_BYTES, 7, "train")
    return {source: read(path) for source, path in paths.items()}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    paths = synthetic.write(tmp_path_factory.mktemp("held_out"), HELD_OUT_BYTES, 11, "held_out")
    return {source: read(path) for source, path in paths.items()}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def hundredths(part: int, whole: int) -> str:
    """part / whole as a percentage with two decimals, half up, in whole numbers only."""
    rounded = (20_000 * abs(part) + whole) // (2 * whole)
    return f"{'-' if part < 0 and rounded else ''}{rounded // 100}.{rounded % 100:02d}"


def tables(text: str) -> dict[str, tuple[int, int, str]]:
    """The rows of all tables in an announcement: this year, the year before, the change."""
    gap, amount = r"(?: \| |　|\t)", r"(-?[\d,]+)"
    row = rf"^(?:\| )?([\u4e00-\u9fff]+){gap}{amount}{gap}{amount}{gap}([-\d.%]+|不适用)(?: \|)?$"
    return {m[1]: (number(m[2]), number(m[3]), m[4]) for m in re.finditer(row, text, re.MULTILINE)}


def annual_summaries(corpus: Corpus) -> list[str]:
    return [row["text"] for row in corpus["announcement"] if "年年度报告" in row["text"].split("\n")[0]]


def last_summaries(corpus: Corpus) -> dict[str, str]:
    """The annual summary of 2024 by stock code."""
    rows = (row for row in corpus["announcement"] if "2024年年度报告" in row["text"].split("\n")[0])
    return {row["meta"]["code"]: row["text"] for row in rows}


def parse(question: str) -> tuple[str, dict[str, str], str]:
    stem, *choices, answer = question.split("\n")
    assert re.fullmatch("答案：[ABCD]", answer), question
    options = {choice[0]: choice[3:] for choice in choices}
    assert list(options) == list("ABCD"), question
    return stem, options, options[answer[-1]]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = synthetic.write(tmp_path / "a", 300_000, 5, "train")
    second = synthetic.write(tmp_path / "b", 300_000, 5, "train")
    for source in synthetic.SOURCES:
        assert gzip.decompress(first[source].read_bytes()) == gzip.decompress(second[source].read_bytes())
        # Bytes 4-7 of a gzip header are the time; flag 8 would say that a file name follows.
        assert first[source].read_bytes()[3:8] == bytes(5)


def test_the_bytes_are_those_of_every_other_machine(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for path in synthetic.write(tmp_path, 300_000, 5, "held_out").values():
        digest.update(gzip.decompress(path.read_bytes()))
    assert digest.hexdigest() == "GOLDEN", CHANGED


def test_another_seed_is_another_world() -> None:
    names = [
        {row["meta"]["company"] for row in synthetic.documents("announcement", 200_000, s, "train")} for s in (1, 2)
    ]
    assert not names[0] <= names[1] and not names[1] <= names[0]


def test_the_size_is_met_within_two_percent(train: Corpus, held_out: Corpus) -> None:
    for corpus, wanted in ((train, TRAIN_BYTES), (held_out, HELD_OUT_BYTES)):
        got = {source: sum(len(row["text"].encode()) for row in rows) for source, rows in corpus.items()}
        assert sum(got.values()) == pytest.approx(wanted, rel=0.02)
        for source, share in synthetic.SHARE_PERCENT.items():
            assert got[source] == pytest.approx(wanted * share / 100, rel=0.05)


def test_documents_are_the_rows_of_the_files(train: Corpus) -> None:
    for source in synthetic.SOURCES:
        assert list(synthetic.documents(source, TRAIN_BYTES, 7, "train")) == train[source]


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
        for year in (0, 1):
            value = {label: row[year] for label, row in rows.items()}
            assert value["营业收入"] - sum(value[cost] for cost in costs) == value["利润总额"], text
            assert value["利润总额"] - value["所得税费用"] == value["净利润"], text
            assert value["流动资产"] + value["非流动资产"] == value["资产总计"], text
            assert value["流动负债"] + value["非流动负债"] == value["负债合计"], text
            assert value["负债合计"] + value["所有者权益合计"] == value["资产总计"], text
        rate = int(re.search(r"(\d+)%", re.search(r"所得税税率.{0,3}\d+%|\d+%的所得税税率", text)[0])[1])  # type: ignore[index]
        assert value["所得税费用"] == (max(0, value["利润总额"]) * rate + 50) // 100


def test_growth_is_computed_from_the_two_years(train: Corpus) -> None:
    checked = 0
    for row in train["announcement"]:
        for label, (now, before, change) in tables(row["text"]).items():
            expected = f"{hundredths(now - before, before)}%" if now > 0 and before > 0 else "不适用"
            assert change == expected, (label, row["text"])
            checked += 1
    for row in train["fin_news"]:
        if m := re.search(r"营业收入为([\d,]+)万元，上年为([\d,]+)万元，同比(增长|下降)([\d.]+)%", row["text"]):
            sign = "-" if m[3] == "下降" else ""
            assert hundredths(number(m[1]) - number(m[2]), number(m[2])) == sign + m[4]
            checked += 1
    assert checked > 1_000


def test_balance_and_rolled_equity_hold_in_articles(train: Corpus) -> None:
    checked = Counter[str]()
    for text in (row["text"] for row in train["fin_articles"]):
        for m in re.finditer(
            r"年初(?:净资产)?([\d,]+)万元，加上?(?:当年)?净利润(-?[\d,]+)万元，减去?(?:已)?派发的上年度红利([\d,]+)万元，\D*?([\d,]+)万元",
            text,
        ):
            assert number(m[1]) + number(m[2]) - number(m[3]) == number(m[4]), text
            checked["equity"] += 1
        for m in re.finditer(r"资产总计([\d,]+)万元等于负债合计([\d,]+)万元加所有者权益合计([\d,]+)万元", text):
            assert number(m[1]) == number(m[2]) + number(m[3])
            checked["balance"] += 1
        for m in re.finditer(
            r"各?级的信用利差是([\d.]+)%，\d+年的期限溢价是([\d.]+)%，加上2.00%的基准利率，票面利率为([\d.]+)%", text
        ):
            assert round(100 * (float(m[1]) + float(m[2]) + 2)) == round(100 * float(m[3]))
            checked["coupon"] += 1
    assert min(checked[name] for name in ("equity", "balance", "coupon")) > 10, checked


def test_ratings_follow_the_debt_ratio_in_every_file(train: Corpus) -> None:
    checked = 0
    for rows in train.values():
        for text in (row["text"] for row in rows):
            for m in re.finditer(r"资产负债率(?:为)?([\d.]+)%，(?:对应)?(?:主体信用等级|评级)(?:为)?([AB+]+)", text):
                assert m[2] == grade(float(m[1])), text
                checked += 1
    assert checked > 300


def grade(debt_ratio: float) -> str:
    for name, below in (("AAA", 30), ("AA+", 45), ("AA", 60), ("A", 70)):
        if debt_ratio < below:
            return name
    return "BBB"


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
    assert min(checked[name] for name in ("people", "lesson", "news")) > 5, checked


def test_each_company_is_introduced_once_for_the_closed_book_exam(train: Corpus, held_out: Corpus) -> None:
    assert len(last_summaries(train)) == synthetic.company_count(TRAIN_BYTES)
    assert len(last_summaries(held_out)) == synthetic.company_count(HELD_OUT_BYTES)
    smallest = list(synthetic.documents("announcement", synthetic.MIN_BYTES, 1, "train"))
    assert len({row["meta"]["code"] for row in smallest}) == synthetic.company_count(synthetic.MIN_BYTES)


def test_closed_book_answers_stand_in_the_announcements(train: Corpus, held_out: Corpus) -> None:
    checked = 0
    for corpus in (train, held_out):
        summaries = last_summaries(corpus)
        by_name = {row["meta"]["company"]: row["meta"]["code"] for row in corpus["announcement"]}
        for row in corpus["fin_exam"]:
            if row["meta"]["subject"] != "公司常识":
                continue
            stem, options, right = parse(row["text"])
            names = [name for name in by_name if name in stem]
            code = m[1] if (m := re.search(r"(?:（|代码)(\d{6})）", stem)) else by_name[names[0]]
            text = summaries[code]
            plain = text.replace(",", "")
            for letter, option in options.items():
                value = option.removesuffix("万元").replace(",", "") if option.endswith("万元") else option
                if option == right and not option.endswith("年"):
                    assert value in plain, (letter, row["text"], text)
            asked = {"总经理": "总经理", "董事长": "董事长", "财务总监": "财务总监"}
            for office in asked:
                if re.search(f"{office}(?:是|为|的)", stem):
                    assert re.search(f"{office}(?:为|由)?{right}", text), row["text"]
            if "成立" in stem or "设立" in stem:
                assert re.search(f"于{right}|{right}(?:创立|成立|设立)", text), row["text"]
            if "上市的？" in stem:
                assert f"{right}在" in text or f"自{right}起" in text, row["text"]
            for label in ("营业收入", "净利润", "资产总计"):
                if f"的{label}是多少" in stem:
                    assert tables(text)[label][0] == number(right.removesuffix("万元")), row["text"]
            checked += 1
    assert checked > 100


AMOUNT = r"(-?[\d,]+)万元"


def solve(stem: str, subject: str) -> str | None:
    """The answer to an open-book question from its own words and the laws, by other code than the exam's."""
    amounts = [number(text) for text in re.findall(AMOUNT, stem)]
    board = {"71": ("东屏", "主板", 10), "73": ("东屏", "创新板", 20), "21": ("南屿", "主板", 10)}
    board |= {"25": ("南屿", "成长板", 20), "95": ("北原", "精选板", 30)}
    code = re.search(r"\d{6}", stem)
    place = board[code[0][:2]] if code else ("", "", 0)
    if "财务费用" in stem and "利润总额" in stem:
        return f"{amounts[0] - sum(amounts[1:]):,}万元"
    if re.search("净利润(是|为)多少|净利润为？", stem):
        return f"{amounts[0] - amounts[1]:,}万元"
    if "年初净资产" in stem:
        return f"{amounts[0] + amounts[1] - amounts[2]:,}万元"
    if re.search("(所有者权益|净资产).*？", stem):
        return f"{amounts[0] - amounts[1]:,}万元"
    if re.search("收入同比|同比变动|收入同比变化", stem):
        years = re.findall(r"(\d{4})年", stem)
        now, before = amounts if years[0] > years[1] else amounts[::-1]
        change = hundredths(abs(now - before), before)
        return f"{'增长' if now > before else '下降'}{change}%"
    if "毛利率" in stem:
        return f"{hundredths(amounts[0] - amounts[1], amounts[0])}%"
    if "资产负债率" in stem and re.search("(资产负债率为|资产负债率是)多少", stem):
        return f"{hundredths(amounts[1], amounts[0])}%"
    if "等级" in stem or "应评为" in stem:
        if m := re.search(r"主体信用等级为([AB+]+)的.*?(\d+)年期", stem):
            return coupon(m[1], int(m[2]))
        ratio = re.search(r"资产负债率为([\d.]+)%", stem)
        return grade(float(ratio[1]) if ratio else float(hundredths(amounts[1], amounts[0])))
    if m := re.search(r"评级为([AB+]+)，.*?(\d+)年期", stem):
        return coupon(m[1], int(m[2]))
    if m := re.search(r"票面利率([\d.]+)%.*每年", stem):
        return f"{amounts[0] * round(100 * float(m[1])) // 10_000:,}万元"
    if m := re.search(r"于(\d+)年(\d+)月(\d+)日发行(\d+)年期", stem):
        due = date(int(m[1]) + int(m[4]), int(m[2]), int(m[3]))
        return f"{due.year}年{due.month}月{due.day}日"
    if m := re.search(r"总股本([\d,]+)万股.*每10股派发现金红利([\d.]+)元", stem):
        return f"{number(m[1]) * round(100 * float(m[2])) // 1000:,}万元"
    if m := re.search(r"持有\S+?([\d,]+)万股，质押其中([\d,]+)万股", stem):
        return f"{hundredths(number(m[2]), number(m[1]))}%"
    if m := re.search(r"净利润(-?[\d,]+)万元，总股本([\d,]+)万股", stem):
        sign = "-" if m[1].startswith("-") and number(m[1]) else ""
        cents = (200 * abs(number(m[1])) + number(m[2])) // (2 * number(m[2]))
        return f"{sign if cents else ''}{cents // 100}.{cents % 100:02d}元"
    if subject != "市场规则":
        return None
    if m := re.search(r"收盘价为?([\d.]+)元", stem):
        cents = (round(100 * float(m[1])) * (100 + place[2]) * 2 + 100) // 200
        return f"{cents / 100:.2f}元"
    return f"{place[2]}%" if "涨跌幅" in stem else f"{place[0]}证券交易所{place[1]}"


def coupon(name: str, years: int) -> str:
    spread = {"AAA": 20, "AA+": 60, "AA": 110, "A": 180, "BBB": 300}[name]
    return f"{(200 + spread + 10 * years) / 100:.2f}%"


def test_open_book_answers_follow_from_the_question_and_the_laws(train: Corpus, held_out: Corpus) -> None:
    solved: Counter[str] = Counter()
    for row in train["fin_exam"] + held_out["fin_exam"]:
        stem, options, right = parse(row["text"])
        if row["meta"]["subject"] != "公司常识" and (answer := solve(stem, row["meta"]["subject"])) is not None:
            assert right == answer, row["text"]
            assert list(options.values()).count(answer) == 1
            solved[row["meta"]["subject"]] += 1
    assert set(solved) >= {"市场规则", "财务会计", "财务分析", "信用评级", "固定收益", "股东权益"}, solved
    assert sum(solved.values()) > 100


def test_laws_of_the_held_out_exam_can_be_learnt_from_the_training_text(train: Corpus, held_out: Corpus) -> None:
    text = "\n".join(row["text"] for row in train["announcement"] + train["fin_articles"])
    industry = r"(?:属于|行业为|分类为)([\u4e00-\u9fff]{3,4}?)(?:行业)?，"
    laws = {
        "监管制度": dict(re.findall(industry + r"(?:行业主管机构为|行业监管机构为|由)(\S+?)(?:负责|实施|，)", text)),
        "风险管理": dict(re.findall(r"([\u4e00-\u9fff]{3,4})行业的典型风险是([^，。；]+)", text)),
        "税务基础": dict(re.findall(r"([\u4e00-\u9fff]{3,4})行业(?:的所得税税率为|适用)(\d+%)", text)),
        "区域常识": {city: province for province, city in re.findall(r"([\u4e00-\u9fff]{2}省)([\u4e00-\u9fff]{2}市)", text)},
    }
    checked: Counter[str] = Counter()
    for row in held_out["fin_exam"]:
        stem, _, right = parse(row["text"])
        subject = row["meta"]["subject"]
        if subject in laws and "利润总额" not in stem:
            known = [value for name, value in laws[subject].items() if name in stem]
            assert right in known, (row["text"], laws[subject])
            checked[subject] += 1
    assert set(checked) == set(laws), checked


def test_answer_letters_are_balanced_and_choices_differ(train: Corpus) -> None:
    letters: Counter[str] = Counter()
    for row in train["fin_exam"]:
        _, options, right = parse(row["text"])
        assert len(set(options.values())) == 4, row["text"]
        assert options[row["meta"]["answer"]] == right
        letters[row["meta"]["answer"]] += 1
    assert all(0.2 <= letters[letter] / sum(letters.values()) <= 0.3 for letter in "ABCD"), letters
    assert len({row["meta"]["subject"] for row in train["fin_exam"]}) >= 8


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
    counts = [synthetic.company_count(size * 10**6) for size in (1, 4, 16, 1_000, 10_000, 100_000)]
    assert counts == [48, 200, 400, 3_160, 10_000, 12_000]


def test_a_run_that_dies_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(archive: Any, dice: Any) -> Any:
        yield "一", {"time": "x"}
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "news", dying)
    with pytest.raises(KeyboardInterrupt):
        synthetic.write(tmp_path, 200_000, 1, "train")
    assert [path.name for path in tmp_path.iterdir()] == ["announcement.jsonl.gz"]
    assert read(tmp_path / "announcement.jsonl.gz")


@pytest.mark.parametrize("size", ["sixteen", "16XB", "-5MB", "10KB", ""])
def test_a_bad_size_is_one_line_and_exit_code_2(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main([str(tmp_path / "out"), f"--size={size}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_writes_four_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main([str(tmp_path), "--size", "200KB", "--seed", "3", "--split", "held_out"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{source}.jsonl.gz") for source in synthetic.SOURCES]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="tweets"):
        next(synthetic.documents("tweets", 200_000, 1, "train"))
    with pytest.raises(UserError, match="test"):
        next(synthetic.documents("fin_news", 200_000, 1, "test"))
