"""The letter of a written answer."""

from __future__ import annotations

import pytest

from finlm.dialogues import scoring
from finlm.evals import questions

PUBLISHED = {  # what FinanceIQ's own code reads in them
    "B\n\n题目：下列": "B",
    "\nC": "C",
    "BCD都对，答案是A": "B",
    "解析：应选：D。答案是A": "A",
    "本题选择：D，B错误": "D",
    "甲：B选项正确，C不正确": "B",
    "应是A、C、D三项当选": "D",
    "甲项：A不对，B说法正确": "B",
    "这不是：A，而是：B": "B",
    "甲乙丙A丁": "A",
    "题目：下列哪项。A. 一 B. 二": None,
    "答案为甲乙丙A或B": "A",
    "E": None,
    "": None,
}
OPTIONS = ("5%", "10%", "20%", "30%")
CASES = {
    "B": "B",
    "B. 10%": "B",
    "（C）": "C",
    "答案是B。": "B",
    "正确答案：**D**": "D",
    "根据规定，应选择选项C，因为涨跌幅为20%。": "C",
    "A。答案：C": "C",  # the text of the choice, the credit grade A, comes first
    "AA。答案：D": "D",
    "A+。\n答案：B": "B",
    "The correct answer is B.": "B",
    "Answer: (C) 20%": "C",
    "选项A是错误的": "A",  # the only letter, whatever is said of it
    "C": "C",
    "c": "C",
    "我认为是 D 吧": "D",
    "涨跌幅限制是20%": "C",
    "A和B都对": None,
    "As an AI language model": None,
    "不知道": None,
    "": None,
    "5%或10%": None,
    # What is discussed is not what is chosen.
    "A、B、C三项均正确，故选D。": "D",
    "选项A错误，因为基金不保本；选项B、C也不对，所以答案是D。": "D",
    "A和B都不对，应选C。": "C",
    "分析：选项A属于流动资产，不符合题意。故选B": "B",
    "A 股市场的特点是波动大，因此答案是C": "C",
    "不能选A，正确答案是C": "C",
    "不应该选A": None,
    "Option A is incorrect. The answer is B.": "B",
    "A: 错误 B: 正确。答案是B": "B",
    "A: 错误 B: 正确": "B",
    "选项A、B错误，选项C正确。": "C",
    "选项A正确，选项B正确。": None,
    "下列说法中，不正确的是C": "C",
    "这道题选择A还是B？答案：B": "B",
    "答案A错误，答案D符合题意": "D",
    "答案是A吗？不，正确的是C": "C",
    "有人认为答案是A，但正确答案是B": "B",
    "故选A、B": None,
    "A、B均可": None,
    "B\n解析：选A的人忽略了利息，而答案是B。": "B",
    "答案是B。\n题目：……\n答案是：C。": "B",  # the rest is another question
    "B. 10%\n故选B": "B",
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_the_letter_of_an_answer(text: str, expected: str | None) -> None:
    assert questions.extract_letter(text, OPTIONS) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("B\n", "B"), ("答案是B。", "B"), ("故选B. 10%\n", "B"), ("B", None), ("答案是A，", None)]
)
def test_writing_ends_where_the_letter_is_settled(text: str, expected: str | None) -> None:
    assert questions.decided_letter(text) == expected


@pytest.mark.parametrize("text", CASES)
def test_what_is_decided_early_is_what_the_whole_answer_says(text: str) -> None:
    early = {questions.decided_letter(text[:length]) for length in range(len(text) + 1)} - {None}
    assert early <= {questions.extract_letter(text, OPTIONS)}


def test_a_reward_reads_the_letter_that_the_evaluation_reads() -> None:
    by_text = {text: expected for text, expected in CASES.items() if text != "涨跌幅限制是20%"}  # quotes no letter
    assert {text: scoring.find_letter(text) for text in by_text} == by_text
    assert scoring.find_letter("不选A，答案是f。") == "F"


@pytest.mark.parametrize("text", PUBLISHED)
def test_the_published_extraction_is_that_of_financeiq(text: str) -> None:
    assert questions.read_published(text) == PUBLISHED[text]


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("答案：ABD\n解析：商品市场不属于金融市场。", "ABD"),
        ("答案是:A、C\n解析：略", "AC"),
        ("AC", "AC"),
        ("好的\n答案：B", None),  # of two lines the first is read
        ("好的。\n答案：B\n解析：略", "B"),
        ("\n答案：B", None),
        ("应选B", None),
        ("", None),
    ],
)
def test_cflues_extraction(text: str, letters: str | None) -> None:
    assert questions.read_cflue(text) == letters


@pytest.mark.parametrize(
    "text", ["答案：A", "答案：A、", "答案：A、B\n", "答案：AB\n解析：答案：C\n更多", "\n答案：B\n", "解析\n答案：B\n"]
)
def test_what_cflues_first_line_decides_stays(text: str) -> None:
    decided = questions.decided_by_cflue(text)
    if decided is not None:
        for more in ("", "解析：略", "答案：D", "\n\n答案是C"):
            assert questions.read_cflue(text + more) == decided
    assert (decided is None) == (not text.lstrip().startswith("答案：") or "\n" not in text.lstrip())
