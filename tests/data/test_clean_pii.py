"""Personal numbers are masked, and no other number is."""

from __future__ import annotations

import pytest

from finlm.data import clean_pii

MASK = clean_pii.masker(clean_pii.KINDS)


# The numbers are made up: the identity card is the example of GB 11643, the cards are test numbers with Luhn's digit.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("身份证号码：11010519491231002X。", "身份证号码：[身份证号]。"),
        ("(440524188001010014)", "([身份证号])"),
        ("身份证110105194912310021有误", "身份证[身份证号]有误"),  # wrong check digit, but it says what it is
        ("联系电话：13912345678，微信同号", "联系电话：[手机号]，微信同号"),
        ("致电+86 139 1234 5678", "致电[手机号]"),
        ("电话0755-83991234转802", "电话[电话号码]转802"),
        ("传真：(010)65361234", "传真：[电话号码]"),
        ("电话：021—22001234", "电话：[电话号码]"),
        ("汇至6222021234567890128", "汇至[银行卡号]"),
        ("卡号 4111 1111 1111 1111", "卡号 [银行卡号]"),
    ],
)
def test_a_personal_number_is_masked(text: str, expected: str) -> None:
    assert MASK(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "净利润13912345678元，同比增长3.5%",
        "总资产13912345678.90元",
        "流通股本13912345678股",
        "13,912,345,678.00",
        "统一社会信用代码：91110105194912310X",
        "公告编号：2021-0123456",
        "临2023-045号",
        "股票代码600519、000858.SZ、00700.HK",
        "债券代码：019547，ISIN CNE0000018R8",
        "http://weibo.cn/7255633821/4111111111111111",
        "订单编号：13912345678",
        "保证金专户(账号:4000020338000025491)",  # no Luhn digit: a company's account
        "4111111111111111",  # Luhn's digit alone says little
        "2021-11-30 09:30:00",
        "e16051216489",
        "第110105194912310021号",
        "400-678-3333",
        "3.1391234567812",
        "20211231-20221231",
    ],
)
def test_other_numbers_of_finance_stay(text: str) -> None:
    assert MASK(text) == text


def test_only_the_kinds_asked_for_are_masked() -> None:
    text = "手机13912345678，卡6222021234567890128"
    assert clean_pii.masker(["bank_card"])(text) == "手机13912345678，卡[银行卡号]"
