"""The choices of an exam question: the right one from the facts, wrong ones from the usual slips.

Wrong choices are plausible: a cost left out, the wrong base, a neighbour's rate, a colleague's name. A draft offers
more than three, as slips can coincide with each other or with the truth; `three_wrong` keeps the first that do not.

Nothing here knows how a question is put or where its right letter goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from finlm.data.synthetic_archive import Archive
from finlm.data.synthetic_facts import Facts, chinese, decimal, growth, per_share, percent
from finlm.data.synthetic_grammar import Bank, bank
from finlm.data.synthetic_laws import RATINGS, coupon
from finlm.data.synthetic_world import Dice

_STEPS = (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
Draft = tuple[str, list[str]]  # the right choice, and wrong ones: at least three that differ from it
Drafter = Callable[[Facts, Dice, Archive], Draft]


def three_wrong(draft: Draft) -> list[str]:
    """The first three wrong choices that differ from the right one and from each other."""
    right, wrong = draft
    found = [choice for choice in dict.fromkeys(wrong) if choice != right]
    if len(found) < 3:
        raise ValueError(f"fewer than three wrong choices beside {right!r}: {wrong}")
    return found[:3]


BY_PRODUCT = bank(
    "||||单选题：|（单选）|{short}是一家主营{prod}的上市公司。|{short}主要从事{prod}业务，同时经营{prod2}。"
    "|以下问题(与{short}有关|涉及上市公司{short})。|投资者在研究{short}（主营{prod}）。"
)
BY_NAME = bank("||||单选题：|（单选）|以下问题涉及上市公司{short}。|投资者在研究{full}。|请回答关于{full}的问题。")


class Question(NamedTuple):
    """One kind of question: how it is put, and how its choices follow from the facts."""

    subject: str
    stems: Bank
    draft: Drafter
    context: Bank = BY_PRODUCT  # opens some questions; another where it would give the answer away
    applies: Callable[[Facts], bool] = lambda facts: True


def wan(amount: int) -> str:
    """1234 -> '1,234万元'."""
    return f"{amount:,}万元"


def among(right: str, all_names: Iterable[str]) -> Drafter:
    """The choice filled from the facts against the other names."""
    names = list(dict.fromkeys(all_names))

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        return right.format_map(facts), dice.shuffled(names)

    return draft


def against_others(field: str, attribute: str) -> Drafter:
    """The company's own against that of its neighbours in the industry and of any other companies."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        companies = [*archive.peers(facts.company), *(dice.pick(archive.world.companies) for _ in range(4))]
        return facts[field], dice.shuffled([getattr(company, attribute) for company in companies])

    return draft


def office(field: str, attribute: str, rival: str) -> Drafter:
    """The holder of an office against a colleague and the holders elsewhere."""
    others = against_others(field, attribute)

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        right, wrong = others(facts, dice, archive)
        return right, [facts[rival], *wrong]

    return draft


def amounts(right: str, *slips: Callable[[dict[str, int]], int]) -> Drafter:
    """A sum against slips in working it out; near misses fill up where there are too few or slips coincide."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        n = facts.numbers
        value = n[right]
        near = [value + step * (abs(value) // 50 + 7) for step in dice.shuffled(_STEPS)]
        return wan(value), [wan(amount) for amount in [*(slip(n) for slip in slips), *near]]

    return draft


def ratios(right: str, *slips: Callable[[dict[str, int]], tuple[int, int]]) -> Drafter:
    """A ratio against ratios of the wrong parts."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        n = facts.numbers
        near = [decimal(n[right] + 97 * step) + "%" for step in dice.shuffled(_STEPS)]
        return decimal(n[right]) + "%", [percent(*slip(n)) for slip in slips] + near

    return draft


def revenue_growth(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """The change of revenue against the base swapped, the sign turned, the change of costs."""
    n = facts.numbers
    now, before = n["rev"], n["rev1"]
    slips = [growth(before, now), growth(2 * before - now, before), growth(n["cost"], n["cost1"])]
    slips += [growth(now + step * before // 40, before) for step in dice.shuffled(_STEPS)]
    return growth(now, before), slips


def income_tax(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """The tax on a profit against other industries' rates."""
    profit = facts.books.profit
    return wan(facts.books.tax), [wan((profit * rate + 50) // 100) for rate in dice.shuffled((5, 10, 15, 20, 25))]


def bond_coupon(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """The coupon against one without its term and those of other grades."""
    term, n = int(facts["term"]), facts.numbers
    slips = [n["cpn"] - n["premium"]] + [coupon(grade, term) for grade, *_ in RATINGS]
    return decimal(n["cpn"]) + "%", [decimal(slip) + "%" for slip in dice.shuffled(slips)]


def bond_due(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """The day a bond falls due against other terms."""
    due = facts.days["due"]
    return facts["due_c"], [chinese(due.replace(year=due.year + step)) for step in dice.shuffled((-2, -1, 1, 2, 3))]


def limit_up(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """The highest price of the day against other boards' limits and the lowest."""
    before = facts.numbers["price"]
    right = facts.company.board.limit_percent
    prices = [_limit_price(before, change) for change in dice.shuffled((10, 20, 30, -right, 5))]
    return _limit_price(before, right), prices


def _limit_price(before: int, change: int) -> str:
    return decimal((before * (100 + change) * 2 + 100) // 200) + "元"


def earnings_per_share(facts: Facts, dice: Dice, archive: Archive) -> Draft:
    """Profit per share against other figures per share."""
    n = facts.numbers
    slips = [per_share(n[name], n["shares"]) for name in ("profit", "equity", "rev")]
    near = [n["eps"] + 7 * step for step in dice.shuffled(_STEPS)]
    return f"{decimal(n['eps'])}元", [f"{decimal(slip)}元" for slip in slips + near]


def year_of(field: str) -> Drafter:
    """A year against its neighbours."""

    def draft(facts: Facts, dice: Dice, archive: Archive) -> Draft:
        return f"{facts[field]}年", [f"{int(facts[field]) + step}年" for step in dice.shuffled(_STEPS)]

    return draft
