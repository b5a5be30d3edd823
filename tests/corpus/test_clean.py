"""Cleaning a document: all rules together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.corpus import clean, normalize
from finlm.corpus.clean import Cleaner, depends_on
from finlm.recipe.schema_data import Clean, Data
from finlm.world import writer


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
        for source in writer.SOURCES:
            for row in writer.documents(source, 2_000_000, 5, split):
                assert cleaner(row["text"]) == (normalize.normalise(row["text"]), None), row["text"][:80]


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        ({}, ARTICLE, None),
        (REPORTS, ARTICLE, None),
        ({}, "锟斤拷" * 20, "garbled"),
        ({}, "净利润\ufffd\ufffd增长\ufffd" * 5, "garbled"),
        ({}, ARTICLE * 9 + "\ufffd", None),  # one lost character
        ({}, "20230101 12.5 13.8 15.2 99.1 20.7 31.4\n" * 4, "numeric_table"),
        ({}, "行情\n" + "20230101 12.5 13.8 15.2 99.1 20.7 31.4\n" * 40, "numeric_table"),  # one word names nothing
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


ITEMS = [
    "货币资金",
    "应收账款",
    "存货",
    "固定资产",
    "无形资产",
    "短期借款",
    "应付账款",
    "实收资本",
    "未分配利润",
    "资产总计",
]
PEOPLE = ["赵一", "钱二", "孙三", "李四", "周五", "吴六", "郑七", "王八", "冯九", "陈十", "褚一", "卫二"]
GOOD = {
    "balance sheet": "资产负债表\n"
    + "\n".join(f"{item} {10**9 + 7 * k}.25 {10**9 + k}.50" for k, item in enumerate(ITEMS)),
    "with commas": "单位：元\n"
    + "\n".join(f"{item} 1,234,567,8{k}0.25 998,877,66{k}.50" for k, item in enumerate(ITEMS)),
    "four periods": "\n".join(
        f"{item} {12345678.5 + k} {22345678.5} {32345678.25} {42345678.5}" for k, item in enumerate(ITEMS)
    ),
    "markdown": "| 项目 | 2023 |\n|---|---|\n" + "\n".join(f"| {item} | 12345.6{k} |" for k, item in enumerate(ITEMS)),
    "repayment plan": "期数 应还日期 本金 利息\n" + "\n".join(f"{k} 202301{k} 1234.56 78.90" for k in range(10, 40)),
    "prices": "date,open,close,volume\n" + "\n".join(f"2023-05-{k},12.3{k},12.5{k},8765{k}" for k in range(10, 30)),
    "rates": "2023-05-22\n"
    + "\n".join(f"{term} 2.1234 -0.50" for term in ("O/N", "1W", "2W", "1M", "3M", "6M", "9M", "1Y")),
    "net value": "解：NPV=-1000000+300000/(1+10%)+300000/(1+10%)^2=-1000000+272727.27+247933.88=-479338.85<0",
    "formulas": "σp²=w1²σ1²+w2²σ2²+2w1w2ρσ1σ2；E(Rp)=w1E(R1)+w2E(R2)；β=Cov(Ri,Rm)/Var(Rm)；S=(Rp-Rf)/σp",
    "entries": "借：银行存款 1000000\n  贷：主营业务收入 884955.75\n    应交税费 115044.25",
    "directors": "董事会成员\n" + "\n".join(f"{name} 董事" for name in PEOPLE),
    "job titles": "\n".join(f"董事：{name}" for name in PEOPLE),
    "headlines": "\n".join(f"{name}证券：{k}月新增贷款{k}万亿" for k, name in enumerate(PEOPLE)),
    "options": "下列属于系统性风险的有（）。\nⅠ.市场\nⅡ.政策\nⅢ.信用\nA. Ⅱ、Ⅲ\nB. Ⅰ、Ⅱ\nC. Ⅰ、Ⅱ、Ⅲ\nD. Ⅰ、Ⅲ\n① ② ③ ④ ⑤",
}


@pytest.mark.parametrize("rules", [{}, REPORTS], ids=["default", "reports"])
@pytest.mark.parametrize("name", GOOD)
def test_statements_tables_formulas_lists_and_headlines_stay(name: str, rules: dict[str, Any]) -> None:
    assert Cleaner(settings(**rules))(GOOD[name])[1] is None


def test_bad_words_are_counted_by_their_kinds(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("# bad\n赌博\n\n博彩\n时时彩\n", encoding="utf-8")
    rules = settings(bad_keywords=str(words), bad_keyword_limit=2)
    cleaner = Cleaner(rules)
    assert cleaner("赌博，赌博，还是赌博")[1] is None
    assert cleaner("赌博网站与时时彩")[1] == "bad_keyword"
    before = depends_on(rules)
    words.write_text("赌博\n", encoding="utf-8")
    assert depends_on(rules) != before
    words.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no word"):
        Cleaner(rules)
    with pytest.raises(UserError, match="cannot read"):
        clean.read_keywords(str(tmp_path / "absent"))


def test_clean_none_leaves_the_one_spelling() -> None:
    text = "<p>电话13912345678</p>！！！！！！\r\n"
    none = Data.model_validate({"sources": "x", "clean": "none"}).clean
    assert Cleaner(none)(text) == (normalize.normalise(text), None)
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
