"""Dialogues about the synthetic world: what a model pretrained on its corpus is fine-tuned on.

Four kinds, a file each: exam_chat puts the exam's open-book questions as a user would, answers with choice and letter;
recall_chat does the same with its closed-book ones; law_chat asks for one law of the world in free text; reading_chat
quotes a company's figures and asks for them in two turns. The companies are those of the split, so held-out questions
share laws with training and no name; held-out recall_chat cannot be known.

The user's turn of exam_chat is the exam's own text without its last line, and the answer ends with `答案：` and the
letter: the form in which the exam of other companies is put to the model afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from finlm.data import synthetic
from finlm.data.synthetic_archive import Archive, Stage
from finlm.data.synthetic_exam import CLOSED_BOOK, exam
from finlm.data.synthetic_grammar import bank, fill
from finlm.data.synthetic_laws import BOARDS, CITIES, INDUSTRIES
from finlm.data.synthetic_world import Dice

SOURCES = ("exam_chat", "recall_chat", "law_chat", "reading_chat")
SHARE_PERCENT = {"exam_chat": 80, "recall_chat": 10, "law_chat": 5, "reading_chat": 5}
PART_BYTES = 16_000_000  # of a source's text, six seconds of a core
Turns = list[tuple[str, str]]

_LAWS = {
    "regulator": bank("{name}行业(的监管机构是哪家|由哪个机构监管)？|哪个机构(负责监管|监管){name}企业？"),
    "risk": bank("{name}行业(的典型风险是什么|主要面临什么风险)？|投资{name}企业时(应关注|要注意)什么风险？"),
    "tax": bank("{name}(行业的所得税税率是多少|企业按什么税率缴纳所得税)？"),
    "board": bank("代码以{name}开头的股票(在哪里上市|属于哪个市场板块)？"),
    "limit": bank("代码以{name}开头的股票(每日涨跌幅限制是多少|单日最多涨跌多少)？"),
    "province": bank("{name}(位于哪个省|属于哪个省|在哪个省)？"),
}
_READING = bank("{short}（{code}）{y}年营业收入{rev_w}万元，净利润{net_w}万元。(请问|)(营业收入是多少|收入多少)？")
_SECOND = bank("(那|)净利润(呢|是多少)？")


def parts_of(source: str, size_bytes: int) -> int:
    """In how many parts a source can be written at the same time."""
    return -(-size_bytes * SHARE_PERCENT[source] // (100 * PART_BYTES))


def write_part(source: str, directory: Path, size_bytes: int, seed: int, split: str, part: int) -> Path:
    """Write <source>-<part>.jsonl into directory. size_bytes: the text of all parts of all sources."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{source}-{part}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for turns in dialogues(source, size_bytes, seed, split, part):
            roles = [
                {"role": role, "content": text}
                for pair in turns
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            file.write(json.dumps({"messages": roles}, ensure_ascii=False) + "\n")
    return path


def dialogues(source: str, size_bytes: int, seed: int, split: str, part: int) -> Iterator[Turns]:
    """(question, answer) pairs of one part of a source, up to its share of size_bytes."""
    archive = synthetic.archive(size_bytes, seed, split)
    dice = Dice(split, seed, source, *([part] if part else []))
    left = size_bytes * SHARE_PERCENT[source] // (100 * parts_of(source, size_bytes))
    kinds = {"exam_chat": _exam, "recall_chat": _recall, "law_chat": _laws, "reading_chat": _reading}
    for turns in kinds[source](archive, dice):
        left -= sum(len(text.encode()) for pair in turns for text in pair)
        if left < 0:
            return
        yield turns


def _exam(archive: Archive, dice: Dice) -> Iterator[Turns]:
    return (turns for subject, turns in _questions(archive, dice) if subject != CLOSED_BOOK)


def _recall(archive: Archive, dice: Dice) -> Iterator[Turns]:
    return (turns for subject, turns in _questions(archive, dice) if subject == CLOSED_BOOK)


def _questions(archive: Archive, dice: Dice) -> Iterator[tuple[str, Turns]]:
    for text, meta in exam(archive, dice):
        question, _, _ = text.rpartition("\n")
        yield str(meta["subject"]), [(question, answer_with(question, str(meta["answer"])))]


def answer_with(question: str, letter: str) -> str:
    """The answer that takes a choice of the question: its text, then `答案：` and the letter."""
    choice = next(line for line in question.split("\n") if line.startswith(f"{letter}. "))
    return f"{choice.removeprefix(f'{letter}. ')}。答案：{letter}"


def _laws(archive: Archive, dice: Dice) -> Iterator[Turns]:
    while True:
        industry, board, (city, province) = dice.pick(INDUSTRIES), dice.pick(BOARDS), dice.pick(CITIES)
        named = {
            "regulator": (industry.name, industry.regulator),
            "risk": (industry.name, industry.risk),
            "tax": (industry.name, f"{industry.tax_percent}%"),
            "board": (board.prefix, board.exchange + board.name),
            "limit": (board.prefix, f"{board.limit_percent}%"),
            "province": (city, province),
        }
        law = dice.pick(sorted(named))
        name, answer = named[law]
        yield [(fill(dice, _LAWS[law], {"name": name}), f"{answer}。")]


def _reading(archive: Archive, dice: Dice) -> Iterator[Turns]:
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        yield [
            (fill(dice, _READING, facts), f"{facts['rev_w']}万元。"),
            (fill(dice, _SECOND, facts), f"{facts['net_w']}万元。"),
        ]
