"""Cleaning many texts at once gives what cleaning each alone gives."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from finlm.corpus import blocks, clean, normalize
from finlm.recipe.schema_data import _OFF, Clean
from finlm.world import writer

ODD = (
    *(
        "",
        "\u3000",
        "\ufeff甲",
        "１２３ＡＢＣ",
        "x\n\n\n\ny",
        " \n x",
        "x \t",
        "\n\n",
        "\x00\x85\r\n\u2028",
        "𠮷😀",
        "Ⅱ②",
    ),
    *(
        "<br>甲<b>乙",
        "A & B&amp;C",
        "锟斤拷锟斤拷锟斤拷",
        "Ã©Ã©Ã©Ã©",
        "\ufffd" * 5,
        "電話業務經過這個國家",
        "a     b",
        "\xa0\xa0x",
        "x\xa0\ny",
        "甲\xa0 \n\n\xa0\n\n乙",
        "\r",
        "\r\r\n",
        "甲\0",
        "\u2009",
    ),
    *("！！！！！！", "=====", "-", "(甲)", "甲,乙", "甲,", "甲;\n乙", "＋％", "（甲", "甲:"),
    *("责任编辑：张三\n正文", "正文\n\t来源： 新华社\n", "版权所有", "未经授权,不得转载", "点击阅读原文", "广告"),
    *(
        "13812345678 电话",
        "1234 5678 9012 3456",
        "6222021234567890123",
        "（010）12345678",
        "0000000",
        "1234，567",
        "123456\n",
    ),
    *("短\n" * 12, "1 2 3 4 5\n" * 12, "english words " * 8, "3.14 2.71 " * 12, "。，！" * 30),
)
RULES = {
    "none": Clean(**_OFF),
    "default": Clean(),
    "all": Clean(punctuation=True, boilerplate_lines=True, min_chinese=0.1, max_digits=0.6, max_short_lines=0.8),
    "some": Clean(
        html=False, repeated_symbols=False, simplified=False, garbled=False, mask=("phone",), max_symbols=0.2
    ),
}


def clean_together(cleaner: clean.Cleaner, texts: Sequence[str]) -> list[tuple[str, str | None]]:
    cleaned = clean.clean_texts(cleaner, texts)
    assert all(count == len(data.decode()) for data, count, _ in cleaned)
    return [(data.decode(), reason) for data, _, reason in cleaned]


@pytest.mark.parametrize("name", RULES)
def test_each_text_is_cleaned_as_if_it_were_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "_FEW", 0)
    drawn = random.Random(3)
    real = [row["text"] for row in writer.documents("fin_news", 100_000, 3, "train")]
    texts = [*ODD, *(left + right for left in ODD for right in ODD), *real]
    for text in drawn.choices(real, k=300):
        at = drawn.randrange(len(text))
        texts.append(text[:at] + drawn.choice(ODD) * drawn.choice((1, 2, 40)) + text[at:])
    cleaner = clean.Cleaner(RULES[name])
    assert clean_together(cleaner, texts) == [cleaner(text) for text in texts]
    assert clean.clean_texts(cleaner, []) == []
    for rest in (["", "\u3000"], ["𠮷" * 10, ""], ["<br>", "  \n"]):  # nothing is left beside a text that fills a block
        texts = ["净利润，" * 50_000, *rest]
        assert clean_together(cleaner, texts) == [cleaner(text) for text in texts]


def test_every_number_that_is_masked_alone_is_masked_in_a_block() -> None:
    drawn = random.Random(4)
    real = ("13812345678", "8613812345678", "110101199003070070", "6222021234567890123", "01012345678", "075512345678")
    texts = []
    for _ in range(6000):
        number, text = drawn.choice(real), drawn.choice(("", "电话", "卡号", "身份证", "(", "+86 ", "12345678.90 "))
        gaps = drawn.sample(range(17), drawn.choice((0, 1, 3)))
        for place, digit in enumerate(number):
            text += digit + (drawn.choice("    - —()）—+.,/X中") if place in gaps else "")
        texts.append(text)
    for name in ("default", "some"):
        cleaner = clean.Cleaner(RULES[name])
        expected = [cleaner(text) for text in texts]
        assert clean_together(cleaner, texts) == expected
        assert sum("号" in text and "[" in text for text, _ in expected) > 500


def test_blocks_do_not_depend_on_which_flags_are_watched() -> None:
    texts = [left + right for left in ODD for right in ODD]
    (block, high), (spelling, same) = blocks.Block.of(texts), blocks.Block.of(texts, blocks.SPELLING)
    assert high == same == [number for number, text in enumerate(texts) if max(text, default="") > "\uffff"]
    texts = ["" if number in high else text for number, text in enumerate(texts)]
    spelled = blocks.spell(block)
    assert [spelled[number] for number in range(len(texts))] == [normalize.normalise(text) for text in texts]
    assert spelled.text == blocks.spell(spelling).text
    table = blocks._tables()[0]
    for flag in (1 << bit for bit in range(16) if 1 << bit != blocks.IDEOGRAPH):  # kept up to date
        for changed in (spelled, blocks.compress(spelled), blocks.convert_widths(spelled)):
            assert changed.where(flag).tolist() == np.flatnonzero(table[changed.codes] & flag).tolist()


def test_rules_do_not_run_on_texts_that_they_cannot_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "_FEW", 0)
    monkeypatch.setattr(normalize, "convert_widths", lambda text: pytest.fail(text))
    cleaner = clean.Cleaner(RULES["all"])
    monkeypatch.setattr(clean.Cleaner, "__call__", lambda _, text: pytest.fail(text))
    text = "公司预计净利润同比增长一成，现金分红的比例保持不变。" * 3
    assert clean_together(cleaner, [text] * 5) == [(text, None)] * 5


def test_a_rule_of_the_users_own_sees_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that docs/extending.md adds to clean.py alone was never asked about blocks of more than 65,536 characters."""
    monkeypatch.setattr(clean, "_filters", lambda settings: [("own", lambda text: "own" if "转载" in text else None)])
    cleaner = clean.Cleaner(Clean())
    texts = ["本公司净利润同比增长。" * 4000, "转载于网络。" * 4000]
    assert clean_together(cleaner, texts) == [(texts[0], None), ("", "own")]
