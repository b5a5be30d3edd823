"""Cleaning a document: all rules together."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.data import clean_rules, clean_text, synthetic
from finlm.data.clean import Cleaner, depends_on
from finlm.recipe.schema_clean import Clean
from finlm.recipe.schema_data import Data


def settings(**rules: Any) -> Clean:
    return Data.model_validate({"sources": "x", "clean": rules}).clean


REPORTS = {
    "punctuation": True,
    "boilerplate_lines": True,
    "min_chinese": 0.1,
    "max_digits": 0.6,
    "max_short_lines": 0.8,
}
ARTICLE = "某某股份发布公告，前三季度实现营业收入12.5亿元，同比增长3.5%，归属于上市公司股东的净利润1,245.60万元。" * 3


def test_the_embedded_corpus_passes_the_default_rules_untouched() -> None:
    cleaner = Cleaner(settings())
    for split in ("train", "held_out"):
        for source in synthetic.SOURCES:
            for row in synthetic.documents(source, 2_000_000, 5, split):
                assert cleaner(row["text"]) == (clean_text.normalise(row["text"]), None), row["text"][:80]


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        ({}, ARTICLE, None),
        (REPORTS, ARTICLE, None),
        ({}, "锟斤拷" * 20, "garbled"),
        ({}, "净利润\ufffd\ufffd增长\ufffd" * 5, "garbled"),
        ({}, ARTICLE * 9 + "\ufffd", None),  # one lost character
        ({}, "20230101 12.5 13.8 15.2 99.1 20.7 31.4\n" * 4, "numeric_table"),
        ({}, "★☆★→←↑↓■□●○" * 10, "symbols"),
        ({}, "|    |\n" * 30, "symbols"),  # shares are of what is not blank
        (
            {"min_chinese": 0.1},
            "The company reported higher revenue for the third quarter of the year. " * 2,
            "language",
        ),
        ({"min_chinese": 0.1}, "이 회사의 삼분기 매출은 작년보다 크게 늘었다. " * 4, "language"),
        ({"min_chinese": 0.1}, "ひらがなだけのぶんしょうです。" * 6, "language"),
        ({"min_chinese": 0.1}, "บริษัทรายงานรายได้ไตรมาสที่สาม " * 4, "language"),
        ({"min_chinese": 0.9}, "净利润增长Growth" * 10, "language"),  # 5 of 11 letters
        ({"min_chinese": 0.4}, "净利润增长Growth" * 10, None),
        ({"max_short_lines": 0.8}, "首页\n新闻\n股票\n基金\n债券\n期货\n外汇\n黄金\n银行\n保险\n理财", "short_lines"),
        ({"max_digits": 0.1, "min_chinese": 0.9}, "600519", None),  # too short to have shares
    ],
)
def test_a_document_is_dropped_for_its_reason(rules: dict[str, Any], text: str, reason: str | None) -> None:
    cleaned, found = Cleaner(settings(**rules))(text)
    assert found == reason
    assert bool(cleaned) == (reason is None)


def test_bad_words_are_counted_by_their_kinds(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("# bad\n赌博\n\n博彩\n时时彩\n", encoding="utf-8")
    rules = settings(bad_keywords=str(words), bad_keyword_limit=2)
    cleaner = pickle.loads(pickle.dumps(Cleaner(rules)))
    assert cleaner("赌博，赌博，还是赌博")[1] is None
    assert cleaner("赌博网站与时时彩")[1] == "bad_keyword"
    before = depends_on(rules)
    words.write_text("赌博\n", encoding="utf-8")
    assert depends_on(rules) != before
    words.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no word"):
        Cleaner(rules)
    with pytest.raises(UserError, match="cannot read"):
        clean_rules.read_keywords(tmp_path / "absent", "data.clean.bad_keywords")


def test_clean_none_leaves_the_one_spelling() -> None:
    text = "<p>电话13912345678</p>！！！！！！\r\n"
    none = Data.model_validate({"sources": "x", "clean": "none"}).clean
    assert Cleaner(none)(text) == (clean_text.normalise(text), None)
    assert Cleaner(settings())(text) == ("电话[手机号]\n！！！", None)


def test_cleaning_twice_changes_nothing() -> None:
    cleaner = Cleaner(settings(**REPORTS))
    for text in (
        ARTICLE,
        "<p>公告称,公司</p>\n责任编辑：王某\n结束　　　　",
        "電話產業資產總額應稅貨幣" * 3,
        "a   b\xa0\n\n\n\nc",
    ):
        once = cleaner(text)[0]
        assert cleaner(once)[0] == once
