"""The letter of a written answer."""

from __future__ import annotations

import pytest

from finlm.evals import extraction

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
    "选项A是错误的": "A",  # the first statement counts, whatever it states
    "C": "C",
    "我认为是 D 吧": "D",
    "涨跌幅限制是20%": "C",
    "A和B都对": None,
    "As an AI language model": None,
    "不知道": None,
    "": None,
    "5%或10%": None,
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_the_letter_of_an_answer(text: str, expected: str | None) -> None:
    assert extraction.letter(text, OPTIONS) == expected


@pytest.mark.parametrize("text", CASES)
def test_what_is_decided_early_is_what_the_whole_answer_says(text: str) -> None:
    early = {extraction.decided(text[:length]) for length in range(len(text) + 1)} - {None}
    assert early <= {extraction.letter(text, OPTIONS)}
