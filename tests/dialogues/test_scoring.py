"""What answers earn by rules: numbers in their unit, letters, lists, form, length."""

from __future__ import annotations

import pytest

from finlm.dialogues import scoring
from finlm.dialogues.scoring import find_number
from finlm.recipe.schema_train import Term


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ("1.23亿元", "营业收入为12,300万元"),
        ("12,300万元", "先算差，再除以2。答案：1.23亿元"),
        ("12,300万元", "12300万"),
        ("12.34%", "增长12.34%"),
        ("12.34%", "答案：１２．３４％"),
        ("-3.5%", "答案：下降3.5%"),
        ("下降3.5%", "-3.5%"),
        ("3.5%", "比率由12%变为\\boxed{3.5\\%}"),
        ("1.50倍", "#### 1.5"),
        ("1.2个百分点", "答案是1.2百分点"),
        ("1234", "the answer is 1,234 million"),
        ("-0.25%", "the answer is -.25%"),
        ("2024年", "共3元.2024年"),
    ],
)
def test_a_right_number_is_known_in_other_words(right: str, said: str) -> None:
    wanted, given = find_number(right), find_number(said)
    assert wanted is not None and given is not None and scoring.are_equal(wanted, given, 0.001)


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ("1.23亿元", "答案：1.23万元"),
        ("1.23亿元", "1.23"),
        ("12.34%", "0.1234"),
        ("12.34%", "12.34个百分点"),
        ("12.34%", "答案：12.39%"),
        ("-3.5%", "答案：3.5%"),
        ("-3.5%", "由5%下降至3.5%"),
        ("12.34%", "12.34% 12.35% 99%"),
        ("12.34%", "答案：99%、12.34%"),
        ("12,300万元", "12,300万股"),
        ("5", "答案：.5"),
    ],
)
def test_a_wrong_number_unit_or_sign_is_none_of_it(right: str, said: str) -> None:
    wanted, given = find_number(right), find_number(said)
    assert wanted is not None and given is not None and not scoring.are_equal(wanted, given, 0.001)


@pytest.mark.parametrize("text", ["", "无法计算", "收入12亿元。答案：不知道"])
def test_an_answer_without_a_number_has_none(text: str) -> None:
    assert find_number(text) is None


def test_the_last_conclusion_counts_and_the_tolerance_is_the_terms() -> None:
    text = "先设答案：5%。检查后，答案：6.1%"
    assert scoring.score(Term(rule="number"), "", text, "6%", 9, 64) == 0
    assert scoring.score(Term(rule="number", tolerance=0.02), "", text, "6%", 9, 64) == 1


def test_each_rule_has_its_value() -> None:
    option, terms = Term(rule="option"), Term(rule="terms")
    assert [scoring.score(option, "", said, "B", 1, 64) for said in ("答案：B", "答案：C", "不知道")] == [1, 0, 0]
    assert scoring.score(terms, "", "答案：应收账款、存货", "存货、应收账款、商誉", 1, 64) == pytest.approx(0.8)
    assert scoring.score(terms, "", "存货可能上升。答案：没有", "存货", 1, 64) == 0
    form = Term(rule="format", pattern="<think>.+</think>答案：[^<]+")
    assert [scoring.score(form, "", said, "", 1, 64) for said in ("<think>a\nb</think>答案：1\n", "答案：1")] == [1, 0]
    assert scoring.score(form, "", "<think>a</think>答案：1<think>", "", 1, 64) == 0
    length = Term(rule="length", most=32)
    assert [scoring.score(length, "", "", "", tokens, 64) for tokens in (1, 32, 48, 64)] == [1, 1, 0.5, 0]


def test_the_words_of_an_option_count_where_no_other_is_named() -> None:
    words, asked = Term(rule="words"), "税率是多少？\nA. 5%\nB. 15%\nC. 25%\nD. 免税"
    said = {"15%。答案：B": 1, "15%。答案：A": 1, "5%": 0, "15%或25%": 0, "免税": 0, "不知道": 0}
    assert {text: scoring.score(words, asked, text, "B", 1, 64) for text in said} == said
    assert scoring.score(words, asked, "15%", "15%", 1, 64) is None, "no letter"
    grades = "评级？\nA. BBB\nB. AA\nC. AAA\nD. A"
    assert [scoring.find_quoted_option(grades, f"{said}。答案：A") for said in ("BBB", "AA", "A", "AAA")] == [
        "A",
        "B",
        "D",
        "C",
    ]


def test_a_row_of_another_kind_has_no_score() -> None:
    assert scoring.score(Term(rule="number"), "", "答案：A", "A", 1, 64) is None
    assert scoring.score(Term(rule="option"), "", "答案：3%", "3%", 1, 64) is None
    assert scoring.score(Term(rule="terms"), "", "存货", "B", 1, 64) is None


def test_repetition_is_the_share_of_text_that_stood_there_before() -> None:
    assert scoring.repetition("营业收入增长，净利润下降，毛利率持平。") == 0
    assert scoring.repetition("短") == 0 and scoring.repetition("同样的话。" * 20) > 0.9


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ("2279÷5173：4×5173=20692余2098，0.4406=44.1%。答案：44.1%", [True]),
        ("先算5173-2894=2279，再算2279÷5173=44.1%", [True, True]),
        ("(5,173-2,894)÷5,173=44.06%", [True]),
        ("（5173－2894）／5173≈0.441", [True]),
        ("5173-2894=2269，2269÷5173=43.9%", [False, True]),
        ("12亿元-3亿元=9亿元", [True]),
        ("1234+1000=2234百万元", [True]),
        ("12.5%-10.3%=2.2个百分点", [True]),
        ("2894-5173=-2279", [True]),
        ("100÷3=33，100-3=96", [True, False]),
        ("1÷0=1，2*(3+4=7", [False, False]),
        ("2+3×4=14，(2+3)×4=20，2+3×4=20", [True, True, False]),
        ("营收为5173百万元，利润率=44%", []),
        ("1=1，x=3，2024年=好", []),
        ("1" * 400 + "+1=2", [False]),
    ],
)
def test_the_steps_of_a_chain_are_checked_one_by_one(said: str, steps: list[bool]) -> None:
    assert scoring.check_steps(said) == steps
    reward = scoring.score(Term(rule="steps"), "", said, "", 1, 2)
    assert reward == pytest.approx(sum(steps) / len(steps) if steps else 0.0)
