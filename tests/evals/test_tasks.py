"""CFLUE's application tasks: rows that are refused, answers scored as by CFLUE's own code, and the whole command."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.evals import questions, suite, tasks
from finlm.inference.open import open_model
from finlm.record.report import run_page

INSTALLED = all(importlib.util.find_spec(name) for name in tasks.PACKAGES)
needs_packages = pytest.mark.skipif(not INSTALLED, reason="needs requirements-cflue.lock")

TEMPLATE = "{% for message in messages %}Human: {{ message.content }} {% endfor %}Assistant:"
CAUSES = dict.fromkeys(tasks._CAUSES.values(), "") | {"reason_type": "旱灾", "result_product": "大豆"}
EVENTS = [{"role": "买方", "argument": "甲公司"}, {"role": "金额", "argument": "3亿元"}]
MOODS = {"钢铁": "正向", "水泥": "负向"}


def row(task: str, part: str, output: Any, instruction: str = "请回答。") -> dict[str, Any]:
    return {"task": task, "sub_task": part, "instruction": instruction, "input": "", "output": output, "history": []}


ROWS = [
    row(
        "金融文本分类",
        "ESG分类",
        "能源",
        "请给公告分类，类别包括：['能源', '物料']。\n公告：甲公司建成一座风电场。\n分类结果：",
    ),
    row("金融文本抽取", "行业情感信息抽取", json.dumps(MOODS, ensure_ascii=False)),
    row("金融文本抽取", "金融事件因果关系抽取", [CAUSES]),
    row("金融文本抽取", "金融事件抽取", EVENTS),
    row("金融文本抽取", "金融事件主体抽取", "甲公司"),
    row("金融咨询", "财报内容问答", "甲公司的主要产品是钢铁。"),
    row("金融翻译", "金融英中翻译", "利率上升，债券价格下降。"),
    row("金融翻译", "金融中英翻译", "Bond prices fell in 2020. Rates rose by 3%.\n"),
    row("金融文本生成", "金融术语解释", "久期是债券现金流的加权平均期限。"),
]


def write(directory: Path, rows: list[Any]) -> Path:
    (directory / tasks.FILE).write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return directory


# Each verdict is that of CFLUE's own code on the same answer, its misreadings included.
@pytest.mark.parametrize(
    ("part", "right", "said", "verdict"),
    [
        ("ESG分类", "物料", "物料", True),
        ("ESG分类", "物料", "分类结果是物料。", True),
        ("ESG分类", "物料", "'物料'", True),
        ("ESG分类", "物料", "['物料', '能源']", False),
        ("ESG分类", "物料", "物料，因为是原料", False),
        ("ESG情感分类", "正向", "正面", True),
        ("ESG情感分类", "正向", "Positive", True),
        ("ESG情感分类", "中性", "Neutral", False),
        ("ESG情感分类", "负向", "情绪是正面，不是负面", True),
        ("合规政策审核", "否", "不合规", True),
        ("合规政策审核", "是", "看不出来", True),
        ("合规政策审核", "否", "否", False),
    ],
)
def test_labels_are_right_where_cflues_code_says_so(part: str, right: str, said: str, verdict: bool) -> None:
    assert tasks.is_right_label(part, right, said) is verdict


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("钢铁:正向,\n水泥：负向", {"钢铁": "正", "水泥": "负"}),
        ("钢铁：正向，水泥：负向", {"钢铁": "正", "水泥": "负"}),
        ("抽取结果：钢铁：正向，水泥：负向", {"钢铁": "正", "水泥": "负"}),
        ("抽取结果：钢铁、水泥\n情感分类结果：正向、负向", {"钢铁": "正", "水泥": "负"}),
        ("抽取结果：钢铁", {"钢铁": "无"}),
        ("预测结果如下：钢铁:正向", {"钢铁": "正"}),
        ("行业：钢铁、水泥\n情感分类：正向、负向", {"钢铁": "正", "水泥": "负"}),
        ("行业：钢铁、水泥\n情感分类：钢铁为正向、水泥为负向", {"钢铁": "正", "水泥": "负"}),
        ("行业：钢铁、水泥\n情感分类：正向", {"钢铁": "正", "水泥": "正"}),
        ("行业：钢铁\n情感分类：正向", {"钢铁": "正"}),
        ("钢铁的看法：正向看待。\n水泥\n：负向", {"钢铁的看法": "正", "": "负"}),
        ("没有行业", {}),
    ],
)
def test_moods_of_industries_are_read_in_every_form(said: str, found: dict[str, str]) -> None:
    assert tasks._first_moods(tasks._read_industries(said)) == found


@pytest.mark.parametrize(
    ("part", "right", "said", "value"),
    [
        ("行业情感信息抽取", MOODS, "钢铁:正向", 2 / 3),
        ("行业情感信息抽取", MOODS, "钢铁:负向\n水泥:负向", 1 / 2),
        ("金融事件抽取", EVENTS, "买方：甲公司\n金额：3亿元", 1.0),
        ("金融事件抽取", EVENTS, "key1：买方\nvalue1：甲公司\nkey2：金额\nvalue2：5亿元", 1 / 2),
        ("金融事件抽取", EVENTS, "金额：3亿元。\nkey1：买方", 2 / 3),
        ("金融事件主体抽取", "甲公司", "主体是甲公司", 1.0),
        ("金融事件主体抽取", "甲公司", "乙公司", 0.0),
        # Eight fields: those that say 无 are right where nothing is; a colon makes the others wrong, as in that code.
        ("金融事件因果关系抽取", [CAUSES], "原因产品：无\n原因地区：未提及", 2 * 2 * 2 / 8 / 4),
        ("金融事件因果关系抽取", [CAUSES], "原因类型：旱灾", 0.0),
        ("金融事件因果关系抽取", [CAUSES], "原因类型旱灾", 2 * 1 * 1 / 8 / 2),
        ("金融事件因果关系抽取", [CAUSES], "旱灾使大豆减产", 0.0),
        ("另一种抽取", "甲公司", "甲公司", 0.0),
    ],
)
def test_extractions_score_as_in_cflues_code(part: str, right: Any, said: str, value: float) -> None:
    label = right if isinstance(right, str) else json.dumps(right, ensure_ascii=False)
    assert tasks.score_extraction(part, label, said) == pytest.approx(value)


@pytest.mark.parametrize(
    ("broken", "evidence"),
    [
        (row("金融问答", "问答", "是"), "金融问答"),
        (row("金融翻译", "金融法中翻译", "是"), "金融法中翻译"),
        (row("金融文本分类", "ESG分类", ""), "no sub_task"),
        (row("金融文本抽取", "金融事件抽取", [{"role": "买方"}]), "argument"),
        (row("金融文本抽取", "金融事件因果关系抽取", []), "IndexError"),
        (row("金融文本抽取", "行业情感信息抽取", "钢铁"), "ValueError"),
        ({"task": "金融咨询"}, "sub_task"),
        ("金融咨询", "TypeError"),
    ],
)
def test_a_row_that_is_no_task_is_named(
    broken: Any, evidence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PACKAGES", ())
    with pytest.raises(UserError, match="row 2 is no task") as caught:
        tasks.read_tasks(write(tmp_path, [ROWS[0], broken]))
    assert evidence in caught.value.evidence


def test_what_is_missing_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PACKAGES", ("sacrebleu", "no_such_package"))
    with pytest.raises(UserError, match="scored by packages") as caught:
        questions.read_questions("cflue-tasks", None, None)
    assert "no_such_package" in caught.value.evidence and "requirements-cflue.lock" in caught.value.fix
    monkeypatch.setattr(tasks, "PACKAGES", ())
    for data, problem in ((None, "needs its files"), (tmp_path / "nothing", "there is no")):
        with pytest.raises(UserError, match=problem) as caught:
            questions.read_questions("cflue-tasks", data, None)
        assert "git clone https://github.com/aliyun/cflue" in caught.value.fix
    with pytest.raises(UserError, match="CFLUE asks assistants"):
        suite.check_options(suite.Options("cflue-tasks", mode="likelihood"))


@needs_packages
def test_a_translation_has_sacrebleus_score_over_words() -> None:
    import jieba
    from sacrebleu.metrics import BLEU

    english = tasks.Question(
        "Fin_MT zh2en, 金融中英翻译", "", (), "Bond prices fell. They didn't rise in 2020. So what?\n"
    )
    chinese = tasks.Question("Fin_MT en2zh, 金融英中翻译", "", (), "利率上升，债券价格下降。")
    said = ["Bond prices fell. They did not rise in 2020. Why?", "利率上升时债券价格下降。"]
    scores = tasks.score([english, english, chinese, chinese], [said[0], "", said[1], "债券"])
    # Words as by nltk with its splitter of sentences, by hand.
    reference = "Bond prices fell . They did n't rise in 2020 . So what ?"
    wanted = BLEU().corpus_score(["Bond prices fell . They did not rise in 2020 . Why ?", ""], [[reference] * 2])
    assert scores["Fin_MT zh2en"].value == pytest.approx(wanted.score / 100)
    cut = [" ".join(jieba.lcut(text)) for text in (said[1], "债券", chinese.answer)]
    wanted = BLEU().corpus_score(cut[:2], [[cut[2]] * 2])
    assert scores["Fin_MT en2zh"].value == pytest.approx(wanted.score / 100)
    low, high = scores["Fin_MT en2zh"].interval
    assert 0 <= low <= scores["Fin_MT en2zh"].value <= high <= 1 and low < high


@needs_packages
def test_rouge_counts_words_of_jieba() -> None:
    # 债券 价格下降 against 债券 价格 上升: 债券 alone is common.
    assert tasks.rouge_l("债券价格下降", "债券价格上升") == pytest.approx(2 / 5, abs=1e-6)
    assert tasks.rouge_l("债券", "债券") == pytest.approx(1.0, abs=1e-6)
    assert tasks.rouge_l("债券", "") == tasks.rouge_l("债券", "...") == 0.0
    assert tasks.rouge_l("None", "") == pytest.approx(1.0, abs=1e-6)
    words = "利率债券价格股票" * 400  # a common subsequence deeper than Python's usual limit of calls
    assert tasks.rouge_l(words, words) == pytest.approx(1.0, abs=1e-6)


@needs_packages
def test_the_command_asks_scores_and_goes_on(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    style = dataclasses.replace(questions.STYLES["cflue-tasks"], max_tokens=8)
    monkeypatch.setitem(questions.STYLES, "cflue-tasks", style)
    opened = open_model(run.path)
    opened.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(suite, "open_model", lambda _: opened)
    data = write(tmp_path, ROWS)
    command = ["eval", str(run.path), "--suite", "cflue-tasks", "--data", str(data), "--json"]
    assert main.main([*command, "--contamination", str(run.path)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert list(result["scores"]) == list(tasks.METRICS)
    assert sum(score["rows"] for score in result["parts"].values()) == result["rows"] == len(ROWS)
    assert result["contamination"]["Fin_RE"]["contained"] == 0
    assert "COMET" in printed.err and "answers are in" not in printed.err
    *_, event = run.read_events("tasks")
    assert event["scores"] == result["scores"] and event["sha256"] == result["sha256"]
    page = run_page.build(run).read_text(encoding="utf-8")
    for name, score in result["scores"].items():
        cells = [name, result["model"], score["metric"], str(score["rows"]), f"{100 * score['value']:.1f} %"]
        assert re.sub("</?td[^>]*>", "|", page).count("||".join(cells)) == 1, name
    assert main.main([*command, "--limit", "4"]) == 0
    printed = capsys.readouterr()
    assert "4 of 4 answers are in" in printed.err and "a random 4 of 9" in printed.err
    assert main.main(["eval", str(run.path), "--suite", "cflue-tasks", "--data", str(tmp_path / "none")]) == 2
