from __future__ import annotations

import re
from collections import Counter
from datetime import date
from typing import Any

import pytest

from finlm.world import writer

Row = dict[str, Any]
Corpus = dict[str, list[Row]]
TRAIN_BYTES, HELD_OUT_BYTES = 2_000_000, 1_000_000
AMOUNT = r"(-?[\d,]+)万元"
CLOSED_BOOK = "公司常识"


@pytest.fixture(scope="module")
def train() -> Corpus:
    return {source: list(writer.documents(source, TRAIN_BYTES, 7, "train")) for source in writer.SOURCES}


@pytest.fixture(scope="module")
def held_out() -> Corpus:
    return {source: list(writer.documents(source, HELD_OUT_BYTES, 11, "held_out")) for source in writer.SOURCES}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def hundredths(part: int, whole: int) -> str:
    """part / whole as a percentage with two decimals, half up, in whole numbers only."""
    rounded = (20_000 * abs(part) + whole) // (2 * whole)
    return f"{'-' if part < 0 and rounded else ''}{rounded // 100}.{rounded % 100:02d}"


def grade(debt_ratio: float) -> str:
    for name, below in (("AAA", 30), ("AA+", 45), ("AA", 60), ("A", 70)):
        if debt_ratio < below:
            return name
    return "BBB"


def coupon(name: str, years: int) -> str:
    spread = {"AAA": 20, "AA+": 60, "AA": 110, "A": 180, "BBB": 300}[name]
    return f"{(200 + spread + 10 * years) / 100:.2f}%"


def parse(question: str) -> tuple[str, dict[str, str], str]:
    stem, *choices, answer = question.split("\n")
    assert re.fullmatch("答案：[ABCD]", answer), question
    options = {choice[0]: choice[3:] for choice in choices}
    assert list(options) == list("ABCD"), question
    return stem, options, options[answer[-1]]


def last_summaries(corpus: Corpus) -> dict[str, str]:
    """The annual summary of 2024 by stock code."""
    rows = (row for row in corpus["announcement"] if "2024年年度报告" in row["text"].split("\n")[0])
    return {row["meta"]["code"]: row["text"] for row in rows}


def test_each_company_is_introduced_once_for_the_closed_book_exam(train: Corpus, held_out: Corpus) -> None:
    assert len(last_summaries(train)) == writer.company_count(TRAIN_BYTES)
    assert len(last_summaries(held_out)) == writer.company_count(HELD_OUT_BYTES)
    smallest = list(writer.documents("announcement", writer.MIN_BYTES, 1, "train"))
    assert len({row["meta"]["code"] for row in smallest}) == writer.company_count(writer.MIN_BYTES)


CLOSED_BOOK_ANSWERS = (
    ("总经理的?(?:是|为)", "总经理(?:为)?{}"),
    ("董事长(?:是|为)", "董事长(?:为)?{}"),
    ("财务总监的?(?:是|为)", "财务总监(?:为)?{}"),
    ("总部|注册地", "省{}"),
    ("成立|设立", "于{}|{}(?:创立|设立|成立)"),
    ("上市的？", "{}在|自{}起"),
    ("证券代码(?:是|为)", "(?:代码：|代码为?){}"),
    ("产品", "(?:主要产品为|主营){}"),
    ("审计", "{}"),
    ("营业收入", r"营业收入\W+{}\b"),
    ("净利润", r"净利润\W+{}\b"),
    ("资产总计", r"资产总计\W+{}\b"),
    ("行业？", "{}"),
)


def test_closed_book_answers_stand_in_the_announcements(train: Corpus, held_out: Corpus) -> None:
    checked: Counter[str] = Counter()
    for corpus in (train, held_out):
        summaries = last_summaries(corpus)
        codes = {row["meta"]["company"]: row["meta"]["code"] for row in corpus["announcement"]}
        for row in corpus["fin_exam"]:
            if row["meta"]["subject"] == CLOSED_BOOK:
                stem, _, right = parse(row["text"])
                by_name = [code for name, code in codes.items() if name in stem]
                coded = re.search(r"(?:（|代码)(\d{6})）", stem)
                text = summaries[coded[1] if coded else by_name[0]].replace(",", "")
                question = stem.split("，")[-1] if "年年度报告，" in stem else stem
                asked, told = next((a, t) for a, t in CLOSED_BOOK_ANSWERS if re.search(a, question))
                answer = right.removesuffix("万元").replace(",", "")
                assert re.search(told.replace("{}", re.escape(answer)), text), (row["text"], text)
                checked[asked] += 1
    assert set(checked) == {asked for asked, _ in CLOSED_BOOK_ANSWERS}, checked


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


def test_open_book_answers_follow_from_the_question_and_the_laws(train: Corpus, held_out: Corpus) -> None:
    solved: Counter[str] = Counter()
    for row in train["fin_exam"] + held_out["fin_exam"]:
        stem, options, right = parse(row["text"])
        if row["meta"]["subject"] != CLOSED_BOOK and (answer := solve(stem, row["meta"]["subject"])) is not None:
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
        "税务基础": dict(re.findall(r"按?([\u4e00-\u9fff]{3,4}?)行业(?:的所得税税率为|适用|)(\d+%)", text)),
        "区域常识": {
            city: province for province, city in re.findall(r"([\u4e00-\u9fff]{2}省)([\u4e00-\u9fff]{2}市)", text)
        },
    }
    checked: Counter[str] = Counter()
    for row in held_out["fin_exam"]:
        stem, _, right = parse(row["text"])
        subject = row["meta"]["subject"]
        if subject in laws:
            known = [value for name, value in laws[subject].items() if name in stem]
            if "利润总额" in stem:
                profit = number(re.findall(AMOUNT, stem)[0])
                known = [f"{(profit * int(rate[:-1]) + 50) // 100:,}万元" for rate in known]
            assert right in known, (row["text"], laws[subject])
            checked[subject] += 1
    assert set(checked) == set(laws), checked


def test_ratings_follow_the_debt_ratio_in_every_file(train: Corpus) -> None:
    checked = 0
    for rows in train.values():
        for text in (row["text"] for row in rows):
            for m in re.finditer(r"资产负债率(?:为)?([\d.]+)%，(?:对应)?(?:主体信用等级|评级)(?:为)?([AB+]+)", text):
                assert m[2] == grade(float(m[1])), text
                checked += 1
    assert checked > 300


def test_answer_letters_are_balanced_and_choices_differ(train: Corpus) -> None:
    letters: Counter[str] = Counter()
    for row in train["fin_exam"]:
        _, options, right = parse(row["text"])
        assert len(set(options.values())) == 4, row["text"]
        assert options[row["meta"]["answer"]] == right
        letters[row["meta"]["answer"]] += 1
    assert all(0.2 <= letters[letter] / sum(letters.values()) <= 0.3 for letter in "ABCD"), letters
    assert len({row["meta"]["subject"] for row in train["fin_exam"]}) >= 8
