"""Question sets: what is read, what is refused, what the world asks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.evals import questions
from finlm.recipe.schema_data import Synthetic
from finlm.world.exam import CLOSED_BOOK

WORLD = Synthetic(size=1_000_000, held_out_size=200_000, seed=3)
HEAD = ",Question,A,B,C,D,Answer\n"
ROWS = """0,"1000元存3年，年利率2%，单利，利息是（）元。",60,61.2,20,6,A
1,"股票代码300开头的""涨跌幅""限制是？",5%,10%,20%,30%,C
"""


def folder(directory: Path, part: str, name: str, text: str) -> Path:
    (directory / part).mkdir(exist_ok=True)
    (directory / part / name).write_text(text, encoding="utf-8-sig")
    return directory


def test_financeiq_files_are_read_with_their_examples(tmp_path: Path) -> None:
    folder(tmp_path, "test", "保险.csv", HEAD + ROWS)
    folder(tmp_path, "dev", "保险.csv", HEAD + ROWS[: ROWS.index("\n") + 1])
    found = questions.read_questions("financeiq", tmp_path, None)
    first, second = found.questions
    assert (first.subject, first.options, first.answer) == ("保险", ("60", "61.2", "20", "6"), "A")
    assert second.text == '股票代码300开头的"涨跌幅"限制是？'
    assert [len(items) for items in found.examples.values()] == [1]
    assert found.is_released is False  # two questions are not the released 7,123


@pytest.mark.parametrize(
    ("suite", "file", "subject"), [("ceval", "tax_accountant", "税务师"), ("fineval", "china_actuary", "中国精算师")]
)
def test_subjects_get_their_chinese_names(suite: questions.Name, file: str, subject: str, tmp_path: Path) -> None:
    head = "id,question,A,B,C,D,answer,explanation\n"
    for part in ("val", "dev"):
        folder(tmp_path, part, f"{file}_{part}.csv", head + "0,增值税是？,甲,乙,丙,丁,B,略\n")
    found = questions.read_questions(suite, tmp_path, None)
    assert {question.subject for question in found.questions} == {subject} == set(found.examples)
    with pytest.raises(UserError) as raised:
        questions.read_questions(suite, None, None)
    assert questions.FETCH[suite] in str(raised.value.fix)


def test_the_hash_of_a_set_ignores_order_and_sees_a_changed_option(tmp_path: Path) -> None:
    def sha256(text: str) -> str:
        folder(tmp_path, "dev", "a.csv", HEAD + text)
        return questions.read_questions("financeiq", folder(tmp_path, "test", "a.csv", HEAD + text), None).sha256

    lines = ROWS.splitlines(keepends=True)
    assert sha256(ROWS) == sha256("".join(reversed(lines))) != sha256(ROWS.replace("61.2", "61.3"))


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("id,text\n0,a\n", "no column question"),
        (HEAD + ROWS + "2,问题？,1,2,3,4,E\n", "answer 'E'"),
        (HEAD + ROWS + "2,问题？,1,2,,4,A\n", "3 options"),
    ],
)
def test_a_broken_file_is_named_with_its_line(text: str, evidence: str, tmp_path: Path) -> None:
    folder(tmp_path, "test", "a.csv", text)
    with pytest.raises(UserError) as caught:
        questions.read_questions("financeiq", tmp_path, None)
    assert evidence in (caught.value.evidence or "") and "a.csv" in caught.value.problem


def test_a_missing_folder_says_what_is_needed(tmp_path: Path) -> None:
    for data in (None, tmp_path):
        with pytest.raises(UserError) as caught:
            questions.read_questions("financeiq", data, None)
        assert "--data" in (caught.value.fix or "")


def test_the_exam_asks_what_laws_answer_and_recall_what_only_the_text_says() -> None:
    exam, recall = questions.read_questions("exam", None, WORLD), questions.read_questions("recall", None, WORLD)
    assert len(exam.questions) == len(recall.questions) == questions.EXAM_QUESTIONS
    assert CLOSED_BOOK not in {question.subject for question in exam.questions}
    assert {question.subject for question in recall.questions} == {CLOSED_BOOK}
    for suite in (exam, recall):
        shown = {example.sha256 for items in suite.examples.values() for example in items}
        assert shown.isdisjoint(question.sha256 for question in suite.questions)
        assert {len(items) for items in suite.examples.values()} == {questions.EXAMPLES}
        letters = Counter(question.answer for question in suite.questions)
        assert max(letters.values()) < 0.3 * len(suite.questions)
    assert questions.read_questions("exam", None, WORLD).sha256 == exam.sha256


@pytest.mark.parametrize(
    ("row", "evidence"),
    [
        ({"choices": "{'A': '对', 'B': '错'}", "answer": "C"}, "answer 'C'"),
        ({"choices": "{'A': '对', 'C': '错'}", "answer": "A"}, "options A, C"),
        ({"choices": "对", "answer": "A"}, "ValueError"),
        ({"answer": "A"}, "choices"),
        ({"choices": "{'A': '对', 'B': '错'}", "answer": "A", "task": None}, "task"),
    ],
)
def test_a_row_that_is_none_of_cflues_is_named(row: dict[str, str | None], evidence: str, tmp_path: Path) -> None:
    sound = {"名称": "银行", "task": "判断题", "question": "对吗？", "choices": "{'A': '对', 'B': '错'}", "answer": "A"}
    broken = {"名称": "银行", "task": "判断题", "question": "对吗？"} | row
    broken = {key: value for key, value in broken.items() if value is not None}
    (tmp_path / "knowledge.json").write_text(json.dumps([sound, broken], ensure_ascii=False), encoding="utf-8")
    with pytest.raises(UserError, match="row 2") as caught:
        questions.read_questions("cflue", tmp_path, None)
    assert evidence in caught.value.evidence
    with pytest.raises(UserError, match="there is no"):
        questions.read_questions("cflue", tmp_path / "nothing", None)
