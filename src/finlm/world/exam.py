"""Write the exam of the synthetic world: four choices, one right, every letter right equally often.

Three questions in five quote what they need (a code, a statement, a debt ratio) and are answered by a law of the world,
so they examine a model on companies it has never read about. The rest, of the subject 公司常识, are closed-book: their
answers stand in the announcements, in the annual summary of the last year.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from finlm.world.companies import AUDITORS, BOARDS, CITIES, INDUSTRIES, RATINGS, Dice, coupon
from finlm.world.facts import LAST_YEAR, Archive, Facts, Row, Stage, decimal, format_day, growth, per_share, percent
from finlm.world.grammar import Bank, bank, banks, fill, prose

_STEPS = (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
Draft = tuple[str, list[str]]  # the right choice, and wrong ones: at least three that differ from it
Drafter = Callable[[Facts, Dice, Archive], Draft]


def three_wrong(draft: Draft) -> list[str]:
    """Return the first three wrong choices, each different and not right. Raises ValueError when there are fewer."""
    right, wrong = draft
    choices = [choice for choice in dict.fromkeys(wrong) if choice != right]
    if len(choices) < 3:
        raise ValueError(f"fewer than three wrong choices beside {right!r}: {wrong}")
    return choices[:3]


BY_PRODUCT, BY_NAME = (banks("exam")[name] for name in ("by_product", "by_name"))


class Rule(NamedTuple):
    """How the choices of a question follow from the facts, and for which companies it can be asked."""

    draft: Drafter
    context: Bank = BY_PRODUCT  # opens some questions; another where it would give the answer away
    applies: Callable[[Facts], bool] = lambda facts: True


class Question(NamedTuple):
    """One kind of question: its subject, its wordings, and its rule."""

    subject: str
    stems: Bank
    rule: Rule


def questions(name: str, rules: Mapping[str, Rule]) -> tuple[Question, ...]:
    """Return the questions of prose/<name>.txt, in its order, each with the rule of its name.

    `== rule subject` opens a question; `-` and `|` lines are its wordings. Raises KeyError for an unknown rule, and
    AssertionError for a rule without a question.
    """
    made = []
    for block in prose(name).removeprefix("== ").split("\n== "):
        head, *lines = block.strip().split("\n")
        rule, subject = head.split()
        made.append(Question(subject, bank("|".join(line[2:] for line in lines)), rules[rule]))
    assert len(made) == len(rules)
    return tuple(made)


def format_wan(amount: int) -> str:
    """Return an amount in 万元 as text: 1234 -> '1,234万元'."""
    return f"{amount:,}万元"


def among(right: str, all_names: Iterable[str]) -> Drafter:
    """Return a function that drafts (`right` filled from the facts, all names shuffled).

    `right` is a template such as "{limit}%". The names include the right choice, which three_wrong() leaves out.
    """
    names = list(dict.fromkeys(all_names))

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        return right.format_map(facts), dice.shuffle(names)

    return draft


def against_others(field: str, attribute: str) -> Drafter:
    """Return a function that drafts (the fact `field`, the `attribute` of its peers and four random companies)."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        companies = [*archive.peers(facts.company), *(dice.pick(archive.world.companies) for _ in range(4))]
        return facts[field], dice.shuffle([getattr(company, attribute) for company in companies])

    return draft


def office(field: str, attribute: str, rival: str) -> Drafter:
    """Return a function that drafts (the holder of an office, [a colleague, the holders at other companies]).

    `field` is the fact with the holder, `attribute` its name in Company, `rival` the fact with the colleague.
    """
    others = against_others(field, attribute)

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        right, wrong = others(facts, dice, archive)
        return right, [facts[rival], *wrong]

    return draft


def total(formula: str) -> Callable[[dict[str, int]], int]:
    """Return a function that computes a formula such as `rev-cost` or `interest*10` from {name: figure}."""
    terms = re.findall(r"([+-]?)(\w+)(?:\*(\d+))?", formula)

    def add_up(n: dict[str, int]) -> int:
        return sum((-1 if sign == "-" else 1) * n[name] * int(factor or 1) for sign, name, factor in terms)

    return add_up


def amounts(right: str, *formulas: str) -> Drafter:
    """Return a function that drafts (the figure named `right`, results of wrong formulas), amounts in 万元.

    Amounts close to the right one follow, in case too few formulas give another result.
    """
    slips = [total(formula) for formula in formulas]

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        value = facts.numbers[right]
        near = [value + step * (abs(value) // 50 + 7) for step in dice.shuffle(_STEPS)]
        return format_wan(value), [format_wan(amount) for amount in [*(slip(facts.numbers) for slip in slips), *near]]

    return draft


def ratios(right: str, *formulas: str) -> Drafter:
    """Return a function that drafts (the ratio named `right`, results of wrong formulas `part/whole`), in percent.

    Ratios close to the right one follow, in case too few formulas give another result.
    """
    slips = [tuple(map(total, formula.split("/"))) for formula in formulas]

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        n = facts.numbers
        near = [decimal(n[right] + 97 * step) + "%" for step in dice.shuffle(_STEPS)]
        return decimal(n[right]) + "%", [percent(part(n), whole(n)) for part, whole in slips] + near

    return draft


def revenue_growth(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the growth of revenue, wrong ones: years swapped, sign turned, growth of costs, values close to it)."""
    n = facts.numbers
    now, before = n["rev"], n["rev1"]
    slips = [growth(before, now), growth(2 * before - now, before), growth(n["cost"], n["cost1"])]
    slips += [growth(now + step * before // 40, before) for step in dice.shuffle(_STEPS)]
    return growth(now, before), slips


def income_tax(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the tax on the company's profit, the tax at rates from 5 to 25 % in random order)."""
    rates = dice.shuffle((5, 10, 15, 20, 25))
    return format_wan(facts.books.tax), [format_wan((facts.books.profit * rate + 50) // 100) for rate in rates]


def bond_coupon(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the coupon, choices: without the premium for its term, and of each grade, its own too; shuffled)."""
    term, n = int(facts["term"]), facts.numbers
    slips = [n["cpn"] - n["premium"]] + [coupon(grade, term) for grade, _ in RATINGS]
    return decimal(n["cpn"]) + "%", [decimal(slip) + "%" for slip in dice.shuffle(slips)]


def bond_due(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the day on which the bond falls due, the same day of other years)."""
    due = facts.days["due"]
    return facts["due_c"], [format_day(due.replace(year=due.year + step)) for step in dice.shuffle((-2, -1, 1, 2, 3))]


def limit_up(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the highest price of the day, wrong ones: by other limits, and the lowest price)."""
    before = facts.numbers["price"]
    right = facts.company.board.limit_percent
    prices = [_limit_price(before, change) for change in dice.shuffle((10, 20, 30, -right, 5))]
    return _limit_price(before, right), prices


def _limit_price(before: int, change: int) -> str:
    """Return the price in 元 as text, after a change in percent of the price `before` in 分."""
    return decimal((before * (100 + change) * 2 + 100) // 200) + "元"


def earnings_per_share(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Return (the profit per share, wrong ones: other figures per share, and amounts close to it)."""
    n = facts.numbers
    slips = [per_share(n[name], n["shares"]) for name in ("profit", "equity", "rev")]
    near = [n["eps"] + 7 * step for step in dice.shuffle(_STEPS)]
    return f"{decimal(n['eps'])}元", [f"{decimal(slip)}元" for slip in slips + near]


def year_of(field: str) -> Drafter:
    """Return a function that drafts (the year in `field`, years up to five before and after)."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        return f"{facts[field]}年", [f"{int(facts[field]) + step}年" for step in dice.shuffle(_STEPS)]

    return draft


_BOARD_NAMES = [board.exchange + board.name for board in BOARDS]
_GRADES = [grade for grade, _ in RATINGS]
OPEN_BOOK = questions(
    "open_book",
    {
        "exchange": Rule(among("{exch}{board}", _BOARD_NAMES)),
        "limit": Rule(among("{limit}%", ("5%", "10%", "20%", "30%"))),
        "limit_up": Rule(limit_up),
        "regulator": Rule(among("{reg}", [industry.regulator for industry in INDUSTRIES])),
        "risk": Rule(among("{risk}", [industry.risk for industry in INDUSTRIES])),
        "tax_rate": Rule(among("{rate}%", ("5%", "10%", "15%", "20%", "25%"))),
        "income_tax": Rule(income_tax, applies=lambda facts: facts.books.profit > 200),
        "profit": Rule(amounts("profit", "profit+fin", "profit+rnd", "profit-fin")),
        "net": Rule(amounts("net", "profit+tax", "profit", "net-tax")),
        "equity": Rule(
            amounts("equity", "assets+debts", "debts", "equity+ldebt"),
            applies=lambda facts: facts.books.debts != facts.books.equity,
        ),
        "equity_after_dividend": Rule(
            amounts("equity", "equity1+net", "equity1-net-div1", "equity1+net+div1"),
            applies=lambda facts: facts.numbers["div1"] > 0,
        ),
        "revenue_growth": Rule(revenue_growth),
        "gross_margin": Rule(ratios("gm", "cost/rev", "rev-cost/cost", "net/rev")),
        "debt_ratio": Rule(ratios("dr", "equity/assets", "debts/equity", "ldebt/assets")),
        "earnings_per_share": Rule(earnings_per_share),
        "rating": Rule(among("{grade}", _GRADES)),
        "rating_from_balance": Rule(among("{grade}", _GRADES)),
        "coupon": Rule(bond_coupon),
        "interest": Rule(amounts("interest", "allinterest", "interest*10", "baseinterest")),
        "due": Rule(bond_due),
        "dividend": Rule(amounts("div", "div*10", "div*2", "net"), applies=lambda facts: facts.books.div > 0),
        "pledged_share": Rule(ratios("pledged_of", "pledged/shares", "held/shares", "held-pledged/held")),
        "province": Rule(among("{prov}", [province for _, province in CITIES])),
    },
)


LETTERS = "ABCD"
CLOSED_BOOK = "公司常识"
_CLOSED = questions(
    "closed_book",
    {
        "ceo": Rule(office("ceo", "ceo", "chair")),
        "chair": Rule(office("chair", "chair", "ceo")),
        "cfo": Rule(office("cfo", "cfo", "sec")),
        "city": Rule(among("{city}", [city for city, _ in CITIES])),
        "code": Rule(against_others("code", "code")),
        "founded": Rule(year_of("founded")),
        "listed": Rule(year_of("listed")),
        "product": Rule(against_others("prod", "product"), context=BY_NAME),
        "auditor": Rule(among("{auditor}", [name + "会计师事务所" for name in AUDITORS])),
        "revenue": Rule(amounts("rev", "rev1", "cost")),
        "net": Rule(amounts("net", "net1", "profit")),
        "assets": Rule(amounts("assets", "assets1", "debts", "equity")),
        "industry": Rule(among("{ind}", [industry.name for industry in INDUSTRIES])),
    },
)


def exam(archive: Archive, dice: Dice) -> Iterator[Row]:
    """Yield (text, {subject, answer}) without end; each letter is right once in four.

    The text has a question, four lines of choices and a line with the answer. Raises ValueError in a world too small
    for three wrong choices.
    """
    stage, last_year = Stage(archive), Stage(archive, (LAST_YEAR,))
    letters: list[int] = []
    while True:
        is_open = dice.random() < 0.6
        facts = (stage if is_open else last_year).draw(dice)
        question = dice.pick(OPEN_BOOK if is_open else _CLOSED)
        if not question.rule.applies(facts):
            continue
        if not letters:
            letters = _deal(dice)
        letter = letters.pop()
        draft = question.rule.draft(facts, dice, archive)
        choices = three_wrong(draft)
        choices.insert(letter, draft[0])
        lines = [fill(dice, question.rule.context, facts) + fill(dice, question.stems, facts)]
        lines += [f"{name}. {choice}" for name, choice in zip(LETTERS, choices, strict=True)]
        lines.append(f"答案：{LETTERS[letter]}")
        yield "\n".join(lines), {"subject": question.subject, "answer": LETTERS[letter]}


def _deal(dice: Dice) -> list[int]:
    """Return the indexes of the four letters in a random order."""
    rest = list(range(len(LETTERS)))
    return [rest.pop(dice.between(0, len(rest) - 1)) for _ in LETTERS]
