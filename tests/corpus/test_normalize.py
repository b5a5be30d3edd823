"""Changes to the text of a document."""

from __future__ import annotations

import random
import time

import pytest

from finlm.corpus import normalize
from finlm.corpus.normalize import normalise


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


@pytest.mark.parametrize(
    "text",
    [
        "甲" + " " * 1_000_000 + "乙 \n",
        "<" * 300_000 + "p" * 300_000,
        "<b" + " a" * 50_000 + "<b" + " " * 100_000 + "<b a" + "=" * 100_000 + '<b a="' * 20_000,
        "<!--" * 200_000,
        "（" * 300_000 + "(" * 300_000,
        "\n" * 300_000 + "责任编辑" * 100_000,
        "?" * 1_000_000,
    ],
    ids=["blanks", "brackets", "attributes", "comments", "parentheses", "lines", "symbols"],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    started = time.monotonic()
    for change in (
        normalise,
        normalize.strip_html,
        normalize.compress_repeats,
        normalize.convert_widths,
        normalize.drop_boilerplate,
        normalize.simplify,
    ):
        change(text)
    assert time.monotonic() - started < 300  # a backtracking pattern needs hours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>一</p><P>二</P>", "一\n\n二"),
        ("<!--{img:4}-->图<script>var a = '<p>';</script>", "图"),
        ('<a href="x">链接</a>与<span style=font-weight: bold;>粗体</span>', "链接与粗体"),
        ("<table><tr><td>营收</td><td>12</td></tr></table>", "营收\t12"),
        ("R&amp;D&nbsp;投入&gt;3%&#8212;", "R&D\xa0投入>3%—"),
        # Not HTML: FinCUGE's placeholder, comparisons, names with &, a bracketed English word.
        ("截至<N>年", "截至<N>年"),
        ("当a<b且c>d", "当a<b且c>d"),
        ("若 x<b 且本期净利润同比增长 12%，则 y>d 成立", "若 x<b 且本期净利润同比增长 12%，则 y>d 成立"),
        ("当 a<p 时买入，当 b>q 时卖出", "当 a<p 时买入，当 b>q 时卖出"),
        ("一<BR CLEAR=all/>二<td nowrap width='9'class=\"c\" >三</td>", "一\n二\t三"),
        ("<a href=http://x.cn/?a=1&b=2 style=color:#3d5699 =>四</a><img src='a.png' alt=\"净 利\" / >", "四"),
        ("S&P 500；AT&T", "S&P 500；AT&T"),
        ("<中国证券报>", "<中国证券报>"),
    ],
)
def test_only_html_is_removed_as_html(text: str, expected: str) -> None:
    assert normalise(normalize.strip_html(text)) == expected


def test_a_table_keeps_a_line_a_row_however_its_source_is_written() -> None:
    """Pretty-printed, with paragraphs within cells, empty cells, cells and rows that are not closed."""
    head = "<table class='t'>\n <thead>\n  <tr>\n   <th>项目</th>\n   <th>2023年</th>\n   <th>2022年</th>\n  </tr>"
    body = """
     </thead>
      <tr><td>
        <p>营业收入</p>
        <p>（万元）</p></td><td><b>1,200</b></td>
        <td>&nbsp;</td></tr>
      <TR><TD>净利润<TD>-3<TD>2<TR><TD COLSPAN=3>&nbsp;</TD></TR>
      <tr><td>合计</td><td></td><td>8</td></tr></table>"""
    expected = "前文\n项目\t2023年\t2022年\n营业收入 （万元）\t1,200\n净利润\t-3\t2\n合计\t\t8\n后文"
    text = normalise(normalize.strip_html(f"前文{head}{body}后文"))
    assert "\n".join(line for line in text.split("\n") if line) == expected


def test_a_page_within_a_table_keeps_its_paragraphs() -> None:
    long = "公司披露年度报告。" * 200
    for cells in (f"<td><p>一</p><p>{long}</p></td><td>导航</td>", "<td><p>一</p>\n<p>二</p></td>"):
        text = normalise(normalize.strip_html(f"<table><tr>{cells}</tr></table>"))
        assert text.split("\n")[0].strip() == "一" and len(text.split("\n")) > 1
    assert normalize.strip_html("<tr>" * 20_000 + " " * 100_000).strip() == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("涨停！！！！！！", "涨停！！！"),
        ("--------", "---"),
        ("标题         来源：新华社", "标题    来源：新华社"),
        ("证券代码：600000    证券简称：某某", "证券代码：600000    证券简称：某某"),
        ("金额1000000元，哈哈哈哈", "金额1000000元，哈哈哈哈"),
        ("    缩进四格", "    缩进四格"),
        ("省略……未完——", "省略……未完——"),
    ],
)
def test_runs_of_symbols_are_compressed_and_nothing_else(text: str, expected: str) -> None:
    assert normalize.compress_repeats(text) == expected


@pytest.mark.parametrize("symbol", "￥🔥￣＝\ue000─※—")
def test_a_run_is_shortened_whatever_else_stands_in_the_text(symbol: str) -> None:
    run = symbol * 6
    for text in (f"涨{run}跌", f"涨{run}跌----", f"涨{run}跌。！？、"):
        assert symbol * 3 in normalize.compress_repeats(text) and symbol * 4 not in normalize.compress_repeats(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("公告称,公司拟回购;方案已通过!", "公告称，公司拟回购；方案已通过！"),
        ("增长３.5％", "增长３.5%"),
        ("(中国证券报)", "（中国证券报）"),
        # What finance text means by a half-width mark stays.
        ("成交额1,245.60万元,较12:30时", "成交额1,245.60万元，较12:30时"),
        ("贵州茅台(600519)", "贵州茅台(600519)"),
        ("PE为15.2,ROE为20%", "PE为15.2,ROE为20%"),
    ],
)
def test_punctuation_becomes_full_width_only_between_chinese(text: str, expected: str) -> None:
    assert normalize.convert_widths(text) == expected


def test_traditional_documents_become_simplified_and_names_in_simplified_ones_stay() -> None:
    assert normalize.simplify("證券公司發佈業績報告，營業額較去年增長。") == "证券公司发布业绩报告，营业额较去年增长。"
    simplified = "乾照光电与昇兴股份发布公告，于今日复牌。" * 5
    assert normalize.simplify(simplified) == simplified
    quoting = simplified + "（大公報）"
    assert normalize.simplify(quoting) == quoting


def test_lines_of_a_page_frame_go_and_sentences_stay() -> None:
    law = "（四）在广告中未经同意使用他人名义或者形象的；\n第九条 广告不得含有下列内容：\n来源于境外的所得，依法纳税。"
    assert normalize.drop_boilerplate(law) == law
    page = "公司净利润增长。\n责任编辑：王某\n扫码关注公众号\n未经授权，不得转载\n公司将继续回购。"
    assert normalize.drop_boilerplate(page) == "公司净利润增长。\n公司将继续回购。"
    assert normalize.drop_boilerplate("责任编辑：王某") == "责任编辑：王某"  # all there is
