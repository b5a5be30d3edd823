"""The exam of the synthetic world: four choices, one right, every letter right equally often.

Three questions in five quote what they need (a code, a statement, a debt ratio) and are answered by a law of the world,
so they examine a model on companies it has never read about. The rest, of the subject 公司常识, are closed-book: their
answers stand in the announcements, in the annual summary of the last year.

Questions are not graded by difficulty, and no law is asked about more than its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

from finlm.data.synthetic_archive import Archive, Stage
from finlm.data.synthetic_choices import (
    BY_NAME,
    BY_PRODUCT,
    Drafter,
    Question,
    against_others,
    among,
    amounts,
    office,
    three_wrong,
    year_of,
)
from finlm.data.synthetic_facts import LAST_YEAR, Row
from finlm.data.synthetic_grammar import Bank, bank, fill
from finlm.data.synthetic_laws import AUDITORS, CITIES, INDUSTRIES
from finlm.data.synthetic_questions import OPEN_BOOK
from finlm.data.synthetic_world import Dice

LETTERS = "ABCD"
CLOSED_BOOK = "公司常识"


def _closed(stems: str, draft: Drafter, context: Bank = BY_PRODUCT) -> Question:
    return Question(CLOSED_BOOK, bank(stems), draft, context)


_CLOSED = (
    _closed(
        "(根据公司公告，|据{y}年年度报告，|){short}（{code}）的总经理(是|为)下列(四人中的哪一位|哪一位人士)？|(目前|)担任{full}（{code}）总经理的是(下列|以下)哪一位？",
        office("ceo", "ceo", "chair"),
    ),
    _closed(
        "(根据公司公告，|据{y}年年度报告，|){short}（{code}）的董事长(是|为)下列(四人中的哪一位|哪一位人士)？|主持{full}（{code}）董事会工作的董事长是(下列|以下)哪一位？",
        office("chair", "chair", "ceo"),
    ),
    _closed(
        "(根据公司公告，|据{y}年年度报告，|){short}（{code}）的财务总监(是|为)下列(四人中的哪一位|哪一位人士)？|担任{full}（{code}）财务总监的是(下列|以下)哪一位？",
        office("cfo", "cfo", "sec"),
    ),
    _closed(
        "(根据公司公告，|据{y}年年度报告，|){full}（{code}）的总部(位于|设在)下列哪座城市？|{ind}企业{full}（{code}）的注册地(在|是)下列哪座城市？",
        among("{city}", [city for city, _ in CITIES]),
    ),
    _closed(
        "在{exch}{board}上市的{full}，其证券代码是(下列|以下)哪一个？|{ind}企业{full}（{short}）的证券代码(是|为)下列哪一个？",
        against_others("code", "code"),
    ),
    _closed("(根据公司公告，|){full}（证券代码{code}）(成立|设立)于(哪一年|下列哪一年)？", year_of("founded")),
    _closed("(根据公司公告，|){full}（证券代码{code}）是(哪一年|下列哪一年)在{exch}上市的？", year_of("listed")),
    _closed(
        "(下列哪一项|以下哪一项)是{short}（{code}）的主要产品？|{ind}企业{short}（{code}）的(核心|主要)产品是下列哪一项？",
        against_others("prod", "product"),
        BY_NAME,
    ),
    _closed(
        "{full}{y}年度财务报表由下列哪家会计师事务所审计？|为{short}（{code}）{y}年度财务报表(发表审计意见|出具审计报告)的是哪家机构？",
        among("{auditor}", [name + "会计师事务所" for name in AUDITORS]),
    ),
    _closed(
        "根据{y}年年度报告，{short}（{code}）(全年|当年)实现的营业收入是多少？",
        amounts("rev", lambda n: n["rev1"], lambda n: n["cost"]),
    ),
    _closed(
        "根据{y}年年度报告，{short}（{code}）(全年|当年)的净利润是多少？",
        amounts("net", lambda n: n["net1"], lambda n: n["profit"]),
    ),
    _closed(
        "根据{y}年年度报告，{short}（{code}）年末的资产总计是多少？",
        amounts("assets", lambda n: n["assets1"], lambda n: n["debts"], lambda n: n["equity"]),
    ),
    _closed(
        "根据{y}年年度报告，{short}（{code}）属于下列哪个行业？",
        among("{ind}", [industry.name for industry in INDUSTRIES]),
    ),
)


def exam(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Questions without end; each letter is right once in every four."""
    stage, last_year = Stage(archive), Stage(archive, (LAST_YEAR,))
    letters: list[int] = []
    while True:
        is_open = dice.random() < 0.6
        facts = (stage if is_open else last_year).draw(dice)
        question = dice.pick(OPEN_BOOK if is_open else _CLOSED)
        if not question.applies(facts):
            continue
        if not letters:
            letters = _deal(dice)
        letter = letters.pop()
        draft = question.draft(facts, dice, archive)
        choices = three_wrong(draft)
        choices.insert(letter, draft[0])
        lines = [fill(dice, question.context, facts) + fill(dice, question.stems, facts)]
        lines += [f"{name}. {choice}" for name, choice in zip(LETTERS, choices, strict=True)]
        lines.append(f"答案：{LETTERS[letter]}")
        yield "\n".join(lines), {"subject": question.subject, "answer": LETTERS[letter]}


def _deal(dice: Dice) -> list[int]:
    """The four letters in an order of the dice."""
    rest = list(range(len(LETTERS)))
    return [rest.pop(dice.between(0, len(rest) - 1)) for _ in LETTERS]
