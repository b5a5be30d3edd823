"""The one spelling of documents."""

from __future__ import annotations

import random
import time

import pytest

from finlm.data.clean import normalise


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("一\r\n二\r三\u2028四\x0b五\x85六", "一\n二\n三\n四\n五\n六"),
        ("净\0利\x07润\u200b增\ufeff长\xad", "净利润增长"),
        ("营收\u3000同比　增长", "营收 同比 增长"),
        ("ＡＢｃ１２９，股票代码６００５１９", "ABc129，股票代码600519"),
        ("第一条 \t\n\n  \n\n\n第二条  ", "第一条\n\n第二条"),
        ("\n\n  标题\n正文\n", "标题\n正文"),
        ("表\t格\n  缩进", "表\t格\n  缩进"),
        ("①㎡％：“引号”（括号）…", "①㎡％：“引号”（括号）…"),
        ("\r\u200b\n", ""),
        ("", ""),
    ],
)
def test_a_document_gets_its_one_spelling(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_normalising_twice_changes_nothing() -> None:
    dice = random.Random(1)
    alphabet = "增长 \t\n\r\0\u200b\u3000\u2028\x85\ufeffＡ９a，。"
    for _ in range(3000):
        text = "".join(dice.choice(alphabet) for _ in range(dice.randrange(12)))
        assert normalise(normalise(text)) == normalise(text)


def test_long_runs_of_spaces_take_linear_time() -> None:
    started = time.monotonic()
    normalise(("甲" + " " * 1_000_000 + "乙 \n") * 3)
    assert time.monotonic() - started < 5  # a backtracking pattern needs hours
