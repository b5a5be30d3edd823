"""Write data about the synthetic world for the stages after pretraining: dialogues, preference pairs, questions.

    exam_chat     the exam's open-book questions as a user would put them; the answer ends with `答案：` and the letter
    recall_chat   the same with its closed-book ones
    law_chat      one law of the world, asked for in free text
    reading_chat  a company's figures, quoted and asked for in two turns
    exam_pairs    an open-book question, its right answer, and any of the other three choices with equal chance
    figures       questions of two or three steps of arithmetic; of ten answers four have the chain that solves it, the
                  others the number alone, as people answer: rewards can teach which of the two is right more often
    laws          the exam's questions that a law answers in words

The companies are those of the split, so held-out questions share laws with training and no name; held-out recall_chat
cannot be known, and there is no held-out law_chat, as the laws are the same ones. Questions have the exam's own text
without its last line: the form in which the exam of other companies is put to the model afterwards.

Figures are quoted in whole 百万元; each step of a chain is exact for what the one before wrote, and divisions are long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from finlm.world import writer
from finlm.world.companies import BOARDS, CITIES, INDUSTRIES, SPREAD, Dice, coupon
from finlm.world.exam import CLOSED_BOOK, LETTERS, exam
from finlm.world.facts import Archive, Facts, Stage
from finlm.world.grammar import banks, fill

SOURCES = {
    "dialogues": ("exam_chat", "recall_chat", "law_chat", "reading_chat"),
    "pairs": ("exam_pairs",),
    "figures": ("figures",),
    "laws": ("laws",),
}
SHARE_PERCENT = {"exam_chat": 80, "recall_chat": 10, "law_chat": 5, "reading_chat": 5}  # the others come alone
WORKED_PERCENT = 40  # of the answers about figures show their steps
PART_BYTES = 16_000_000  # of a dialogue source's text, six seconds of a core
_AMOUNT = re.compile(r"\d\.\d|元|日|年|增长|下降|持平")  # in an option
_LAWS, _READING, _FIGURES = banks("law_chat"), banks("reading_chat"), banks("figures")

Messages = list[dict[str, str]]
Row = Mapping[str, str | Messages]
Sized = tuple[Row, Sequence[str]]  # a row, and its texts, which count towards the size


def count_parts(source: str, size_bytes: int) -> int:
    """Return in how many parts a source is written; those other than dialogues and unknown ones have one part."""
    return -(-size_bytes * SHARE_PERCENT[source] // (100 * PART_BYTES)) if source in SHARE_PERCENT else 1


def write_part(source: str, directory: Path, size_bytes: int, seed: int, split: str, part: int) -> Path:
    """Write a part of a source into directory as JSON lines, over a file that is there; return its path.

    size_bytes is the UTF-8 text of all parts of all sources of its kind (a value of SOURCES) together. Raises UserError
    below 100 KB or for an unknown split, KeyError for an unknown source.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (f"{source}-{part}.jsonl" if source in SHARE_PERCENT else f"{source}.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for row in rows(source, size_bytes, seed, split, part):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def rows(source: str, size_bytes: int, seed: int, split: str, part: int = 0) -> Iterator[Row]:
    """Yield the rows of a part of a source, up to its share of size_bytes; none for held-out law_chat.

    Raises UserError below 100 KB or for an unknown split, KeyError for an unknown source.
    """
    if source == "law_chat" and split == "held_out":
        return
    archive = writer.archive(size_bytes, seed, split)
    dice = Dice(split, seed, source, *([part] if part else []))
    left = size_bytes * SHARE_PERCENT.get(source, 100) // (100 * count_parts(source, size_bytes))
    for row, texts in _KINDS[source](archive, dice):
        left -= sum(len(text.encode()) for text in texts)
        if left < 0:
            return
        yield row


def _dialogue(*turns: tuple[str, str]) -> Sized:
    """Return (a row of messages, its texts) for turns of (question, answer)."""
    roles = (each for turn in turns for each in zip(("user", "assistant"), turn, strict=True))
    return {"messages": [{"role": role, "content": text} for role, text in roles]}, [t for turn in turns for t in turn]


class _Question(NamedTuple):
    """A question of the exam, its right letter, and whether it quotes what its answer needs."""

    text: str  # without the line of the answer
    right: str  # the letter
    is_open: bool  # whether it quotes what it needs

    def answer(self, letter: str) -> str:
        """Return the answer that takes the choice of this letter: its text, then `答案：` and the letter."""
        choice = next(line for line in self.text.split("\n") if line.startswith(f"{letter}. "))
        return f"{choice.removeprefix(f'{letter}. ')}。答案：{letter}"


def _questions(archive: Archive, dice: Dice) -> Iterator[_Question]:
    """Yield the exam's questions without end; their texts lack the exam's last line, which has the answer."""
    for text, meta in exam(archive, dice):
        yield _Question(text.rpartition("\n")[0], str(meta["answer"]), meta["subject"] != CLOSED_BOOK)


def _exam_chat(archive: Archive, dice: Dice, *, is_open: bool) -> Iterator[Sized]:
    """Yield dialogues, without end, of an open-book or a closed-book question and its answer."""
    return (_dialogue((q.text, q.answer(q.right))) for q in _questions(archive, dice) if q.is_open == is_open)


def _law_chat(archive: Archive, dice: Dice) -> Iterator[Sized]:
    """Yield dialogues, without end, about a law of the world; the answer is a word."""
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
        yield _dialogue((fill(dice, _LAWS[law], {"name": name}), f"{answer}。"))


def _reading_chat(archive: Archive, dice: Dice) -> Iterator[Sized]:
    """Yield dialogues of two turns, without end, about a company's revenue and profit."""
    stage = Stage(archive)
    while True:
        facts = stage.draw(dice)
        first, second = (fill(dice, _READING[turn], facts) for turn in ("first", "second"))
        yield _dialogue((first, f"{facts['rev_w']}万元。"), (second, f"{facts['net_w']}万元。"))


def _pairs(archive: Archive, dice: Dice) -> Iterator[Sized]:
    """Yield rows {prompt, chosen, rejected, answer} without end; `answer` is the letter of the right choice."""
    for question in _questions(archive, dice):
        if question.is_open:
            wrong = dice.pick([letter for letter in LETTERS if letter != question.right])
            texts = question.text, question.answer(question.right), question.answer(wrong)
            yield dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) | {"answer": question.right}, texts


def _answered_row(prompt: str, completion: str, answer: str) -> Sized:
    """Return (a row {prompt, completion, answer}, the texts that count towards the size)."""
    return {"prompt": prompt, "completion": completion, "answer": answer}, (prompt, completion)


def _laws(archive: Archive, dice: Dice) -> Iterator[Sized]:
    """Yield rows {prompt, completion, answer} without end: law questions whose options hold no amount."""
    for question in _questions(archive, dice):
        if question.is_open and not _AMOUNT.search(question.text.partition("\n")[2]):
            yield _answered_row(question.text, question.answer(question.right), question.right)


def _figures(archive: Archive, dice: Dice) -> Iterator[Sized]:
    """Yield rows {prompt, completion, answer} of arithmetic without end, WORKED_PERCENT of them with their steps."""
    stage, kinds = Stage(archive), list(_SOLVERS.items())
    while True:
        (name, solve), facts = dice.pick(kinds), stage.draw(dice)
        peer = archive.facts(dice.pick(archive.peers(facts.company)), facts.year)
        try:
            problem = solve(facts, peer)
        except _TooSmall:
            continue
        words = {key: facts[key] for key in ("short", "y", "y0")} | problem.words
        chain = f"{'；'.join(problem.steps)}。" if dice.between(1, 100) <= WORKED_PERCENT else ""
        yield _answered_row(fill(dice, _FIGURES[name], words), f"{chain}答案：{problem.answer}", problem.answer)


_KINDS: dict[str, Callable[[Archive, Dice], Iterator[Sized]]] = {
    "exam_chat": partial(_exam_chat, is_open=True),
    "recall_chat": partial(_exam_chat, is_open=False),
    "law_chat": _law_chat,
    "reading_chat": _reading_chat,
    "exam_pairs": _pairs,
    "figures": _figures,
    "laws": _laws,
}

MILLION = 100  # 万元
LEAST = 10  # 百万元: smaller figures would have ratios of no digits


class _TooSmall(Exception):
    """A figure is too small to divide by, or to divide another."""


class Problem(NamedTuple):
    """The words that fill in a question's template, the steps that solve it, and the answer."""

    words: dict[str, str]
    steps: list[str]
    answer: str


Solver = Callable[[Facts, Facts], Problem]  # of a company and one of its peers; raises _TooSmall


def _quote(facts: Facts, *names: str) -> dict[str, int]:
    """Return {name: figure} of a company in whole 百万元. Raises _TooSmall if a figure is below 10."""
    amounts = {name: facts.numbers[name] for name in names}
    values = {k: (abs(n) + MILLION // 2) // MILLION * (1 if n >= 0 else -1) for k, n in amounts.items()}
    if min(values.values()) < LEAST:
        raise _TooSmall
    return values


def _words(values: Mapping[str, int], prefix: str = "") -> dict[str, str]:
    """Return {prefix + name: figure as text} of {name: figure}."""
    return {prefix + name: str(value) for name, value in values.items()}


def _divide(part: int, whole: int) -> tuple[str, int]:
    """Return (the long division of part / whole, the ratio in units of 0.1 %, rounded half away from zero).

    `whole` is above 0. Each step shows a digit, its product with the whole, and the remainder, of which ten times is
    divided next. A model that writes 2894÷5173=55.9% at once has to do all of it in its head. Raises _TooSmall for
    ratios of 10 and more.
    """
    rest, digits = abs(part), ""
    products: list[str] = []
    if rest >= 10 * whole:
        raise _TooSmall
    for place in range(5):  # of ones, tenths, ... of the ratio
        digit, rest = divmod(rest, whole)
        if place or digit:
            products.append(f"{digit}×{whole}={digit * whole}余{rest}")
        digits += str(digit)
        rest *= 10
    sign, tenths = "-" if part < 0 else "", (int(digits) + 5) // 10
    share = f"{sign}{digits[0]}.{digits[1:]}={sign}{_decimal(tenths)}%"
    return f"{abs(part)}÷{whole}：{'，'.join(products)}，{share}", tenths if part >= 0 else -tenths


def _decimal(tenths: int) -> str:
    """Return a number of tenths as text with one decimal: 123 -> '12.3'."""
    return f"{'-' if tenths < 0 else ''}{abs(tenths) // 10}.{abs(tenths) % 10}"


def _difference_ratio(first: str, second: str, whole: str) -> Solver:
    """Return a solver for (first - second) / whole in percent, where these name figures of the company."""

    def solve(facts: Facts, peer: Facts) -> Problem:
        values = _quote(facts, first, second, whole)
        a, b, total = values[first], values[second], values[whole]
        division, tenths = _divide(a - b, total)
        return Problem(_words(values), [f"{a}-{b}={a - b}", division], f"{_decimal(tenths)}%")

    return solve


def _average(facts: Facts, peer: Facts) -> Problem:
    """Return the problem of the mean of this year's and last year's assets. Raises _TooSmall."""
    values = _quote(facts, "assets", "assets1")
    now, before = values.values()
    half = _decimal(5 * (now + before))
    return Problem(_words(values), [f"{now}+{before}={now + before}", f"{now + before}÷2={half}"], f"{half}百万元")


def _steps_apart(first: tuple[int, int], second: tuple[int, int], *, signed: bool) -> tuple[list[str], str]:
    """Return (the steps from two ratios (part, whole) to their difference, the answer in points).

    Unsigned, the smaller ratio is subtracted from the larger; signed, the second from the first. Raises _TooSmall.
    """
    steps = [_divide(*first), _divide(*second)]
    left, right = (tenths for _, tenths in (steps if signed else sorted(steps, key=lambda step: -step[1])))
    apart = _decimal(left - right)
    return [*(division for division, _ in steps), f"{_decimal(left)}-{_decimal(right)}={apart}"], f"{apart}个百分点"


def _margins_apart(facts: Facts, peer: Facts) -> Problem:
    """Return the problem by how many points the net margin changed since the year before. Raises _TooSmall."""
    values = _quote(facts, "net", "rev", "net1", "rev1")
    net, rev, net1, rev1 = values.values()
    return Problem(_words(values), *_steps_apart((net, rev), (net1, rev1), signed=True))


def _debts_apart(facts: Facts, peer: Facts) -> Problem:
    """Return the problem by how many points the debt ratios of a company and its peer differ. Raises _TooSmall."""
    mine, other = _quote(facts, "debts", "assets"), _quote(peer, "debts", "assets")
    words = _words(mine) | {"peer": peer["short"]} | _words(other, "p_")
    pairs = ((each["debts"], each["assets"]) for each in (mine, other))
    return Problem(words, *_steps_apart(*pairs, signed=False))


def _revenue_left(facts: Facts, peer: Facts) -> Problem:
    """Return the problem how much revenue is left after three costs. Raises _TooSmall."""
    values = _quote(facts, "rev", "cost", "sell", "admin")
    rest, *costs = values.values()
    steps = []
    for cost in costs:
        steps.append(f"{rest}-{cost}={rest - cost}")
        rest -= cost
    return Problem(_words(values), steps, f"{rest}百万元")


def _coupon(facts: Facts, peer: Facts) -> Problem:
    """Return the problem of a bond's coupon, which needs the laws of the world too."""
    grade, term = facts["grade"], int(facts["term"])
    base, spread, premium, total = (f"{v / 100:.2f}%" for v in (200, SPREAD[grade], 10 * term, coupon(grade, term)))
    steps = [f"评级{grade}，利差{spread}", f"{base}+{spread}+{premium}={total}"]
    return Problem({"ratio": facts["dr_r"], "term": facts["term"]}, steps, total)


_SOLVERS: dict[str, Solver] = {  # by the names of their words, in this order
    "revenue_growth": _difference_ratio("rev", "rev1", "rev1"),
    "profit_growth": _difference_ratio("net", "net1", "net1"),
    "gross_margin": _difference_ratio("rev", "cost", "rev"),
    "debt_ratio": _difference_ratio("assets", "equity", "assets"),
    "net_margin": _difference_ratio("profit", "tax", "rev"),
    "average": _average,
    "margins_apart": _margins_apart,
    "debts_apart": _debts_apart,
    "left": _revenue_left,
    "coupon": _coupon,
}
