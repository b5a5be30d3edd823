"""Render the facts of one company-year as text, and choose the companies that are written about.

Facts renders a figure when a sentence first asks for it, and stores the text. A company-year takes about 70
microseconds to draw up and 10 KB of memory; up to 6,000 are cached, about 60 MB. Companies come in groups of four of
the same industry, which are compared with each other, and two neighbouring groups trade with each other. A source
writes about 250 such pairs of groups at a time, each in a single year: drawing from all company-years of a large world
would render the facts of nearly every document anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta
from hashlib import blake2b
from operator import attrgetter
from struct import unpack

from finlm.world.companies import (
    BAND,
    BROKERS,
    GROUP,
    SPREAD,
    YEARS,
    Books,
    Company,
    Dice,
    World,
    coupon,
    hundredths_of_percent,
    rating,
)
from finlm.world.grammar import templates

Meta = dict[str, str | list[str]]
Row = tuple[str, Meta]  # the meta without the source
REPORT_YEARS = YEARS[1:]
LAST_YEAR = YEARS[-1]


def per_share(amount: int, shares: int) -> int:
    """Return `amount` in 万元 per share, in 分, for `shares` in 万股; rounded half away from zero."""
    rounded = (200 * abs(amount) + shares) // (2 * shares)
    return rounded if amount >= 0 else -rounded


def decimal(hundredths: int) -> str:
    """Return hundredths as text with two decimals: 1234 -> '12.34'."""
    return f"{hundredths / 100:.2f}"  # no quotient is near a tie, so floats do


def percent(part: int, whole: int) -> str:
    """Return part / whole as text such as '12.34%'. Raises ZeroDivisionError for a `whole` of 0."""
    return decimal(hundredths_of_percent(part, whole)) + "%"


def in_yi(amount: int) -> str:
    """Return an amount in 万元 as the press prints it: 亿元 with two decimals from 10,000 万元 on, 万元 below."""
    if abs(amount) < 10_000:
        return f"{amount:,}万元"
    return decimal((abs(amount) + 50) // 100 * (1 if amount > 0 else -1)) + "亿元"


def growth(now: int, before: int) -> str:
    """Return the change of a figure in words: 增长12.34%, 下降12.34% or 持平.

    Unless both figures are positive, there is no number: 扭亏为盈, 由盈转亏, 亏损收窄 or 亏损扩大.
    """
    if now <= 0 or before <= 0:
        if now > 0:
            return "扭亏为盈"
        if before > 0:
            return "由盈转亏"
        return "亏损收窄" if now > before else "亏损扩大"
    change = hundredths_of_percent(now - before, before)
    return f"{'增长' if change > 0 else '下降'}{decimal(abs(change))}%" if change else "持平"


def growth_cell(now: int, before: int) -> str:
    """Return the change of a figure as a table prints it, '12.34%'; 不适用 unless both years are positive."""
    return percent(now - before, before) if now > 0 and before > 0 else "不适用"


def points(now: int, before: int) -> str:
    """Return the change of a ratio, given in units of 0.01 %, in words: 上升 or 下降 by 个百分点, or 与上年持平."""
    if now == before:
        return "与上年持平"
    return f"{'上升' if now > before else '下降'}{decimal(abs(now - before))}个百分点"


def weekday(year: int, month: int, day: int) -> date:
    """Return that date, or the Monday after it if it is a Saturday or Sunday; `day` is at most 26."""
    late = date(year, month, day).weekday() - 4
    return date(year, month, day if late <= 0 else day + 3 - late)


def format_day(day: date) -> str:
    """Return a day as prose writes it: 2025年3月28日."""
    return f"{day.year}年{day.month}月{day.day}日"


class Facts(dict[str, str]):
    """The phrases about a company after its report for `year`: format_map looks them up by `name_form`.

    Forms of amounts: w 1,234 / n 1234 / y 亿元 / g change in words / p change in a table / l 净利润 or 净亏损; of
    ratios: r percent, d plain, k change in points; t dividend per ten shares; of days: c 2025年3月28日 / m 3月28日 / i
    2025-03-28, o number of that day's announcement. A name ending in 1 means the year before.
    """

    def __init__(self, company: Company, year: int) -> None:
        """Collect the figures, words and days of the company-year; `year` is one of REPORT_YEARS."""
        super().__init__(_names(company))
        self.company = company
        self.year = year
        now, before = company.books[year - YEARS[0]], company.books[year - 1 - YEARS[0]]
        self.books = now
        self.numbers: dict[str, int] = dict(zip(Books._fields, now, strict=True))
        self.numbers.update(zip(_YEAR_BEFORE, before, strict=True))
        self.numbers.update(_ratios(now, company.shares))
        self.numbers["gm1"] = hundredths_of_percent(before.rev - before.cost, before.rev)
        self.numbers["dr1"] = hundredths_of_percent(before.debts, before.assets)
        self.numbers["eps1"] = per_share(before.net, company.shares)
        self.update(y=str(year), y0=str(year - 1), yn=str(year + 1))
        self.days: dict[str, date] = {}
        # A hash is five times as fast as seeding a stream for the sixty numbers that follow.
        key = f"{company.code}{company.salt}:{year}".encode()
        self._draws: tuple[int, ...] = unpack("<64H", blake2b(key).digest() + blake2b(key + b"+").digest())
        self._add_words()
        self._add_events()

    def __missing__(self, key: str) -> str:
        """Render the fact `name_form`, store it and return it. Raises KeyError for an unknown name or form."""
        value = self[key] = _FORMS[key[-1]](self, key[:-2])
        return value

    def with_others(self, others: dict[str, Facts]) -> Quoted:
        """Return a copy of these facts, with those of other companies under a letter each: `b_rev_y`."""
        return Quoted(self, others)

    def chance(self, use: int, size: int) -> int:
        """Return a fixed number from 0 to size - 1 for this company, year and use; `use` is a number from 0 to 63."""
        return self._draws[use] * size >> 16

    def _add_words(self) -> None:
        """Add to the phrases causes, hopes and worries, and the credit grades of this year and the year before."""
        industry, n = self.company.industry, self.numbers
        rising = n["rev"] >= n["rev1"]
        causes = industry.up if rising else industry.down
        first = self.chance(1, len(causes))
        self["why"] = causes[first]
        self["why2"] = causes[(first + 1) % len(causes)]
        rose = n["net"] >= n["net1"]
        causes = industry.up if rose else industry.down
        other = first if rose == rising else self.chance(4, len(causes))
        self["cause"] = causes[other]
        self["cause2"] = causes[(other + 1) % len(causes)]
        self["worry"] = industry.down[self.chance(2, len(industry.down))]
        self["hope"] = industry.up[self.chance(3, len(industry.up))]
        moods = ("稳中有进", "增势良好", "持续扩张") if rising else ("有所承压", "短期放缓", "面临调整")
        self["mood"] = moods[first % 3]
        grade = rating(n["dr"])
        self.update(grade=grade, band=BAND[grade], grade1=rating(n["dr1"]))

    def _add_events(self) -> None:
        """Add to `days`, `numbers` and the phrases the events of the year after the report, equal for every source."""
        n, days, shares, year = self.numbers, self.days, self.company.shares, self.year + 1
        days["report"] = weekday(year, 3 + self.chance(10, 2), 5 + self.chance(11, 20))
        days["forecast"] = weekday(year, 1, 8 + self.chance(12, 18))
        days["meeting"] = weekday(year, 5, 8 + self.chance(13, 20))
        days["record"] = weekday(year, 6, 5 + self.chance(14, 22))
        days["ex"] = days["record"] + timedelta(days=3 if days["record"].weekday() == 4 else 1)
        for name, use in (("pledge", 15), ("contract", 16), ("buyback", 17), ("project", 18), ("board", 19)):
            days[name] = weekday(year, 5 + self.chance(use, 7), 1 + self.chance(use + 29, 26))
        pledged = max(1, self.company.held * (4 + self.chance(30, 30)) // 100)
        n.update(shares=shares, held=self.company.held, pledged=pledged)
        n["allpledged"] = pledged + self.company.held * self.chance(31, 40) // 100
        n["held_of"] = hundredths_of_percent(self.company.held, shares)
        n["pledged_of"] = hundredths_of_percent(pledged, self.company.held)
        n["pledged_in"] = hundredths_of_percent(pledged, shares)
        n["allpledged_of"] = hundredths_of_percent(n["allpledged"], self.company.held)
        n["contract"] = max(100, n["rev"] * (3 + self.chance(32, 24)) // 10_000 * 100)
        n["contract_of"] = hundredths_of_percent(n["contract"], n["rev"])
        n["project"] = max(500, n["assets"] * (2 + self.chance(33, 12)) // 50_000 * 500)
        n["project_of"] = hundredths_of_percent(n["project"], n["assets"])
        n["backlow"] = max(10, n["assets"] * (4 + self.chance(34, 6)) // 100_000) * 100
        n["backhigh"] = 2 * n["backlow"]
        n["price"] = max(n["bps"], 100) * (90 + self.chance(35, 260)) // 100
        n["backcap"] = n["price"] * (120 + self.chance(36, 25)) // 100
        spread = max(abs(n["net"]) * (3 + self.chance(37, 7)) // 100, 20)
        n["netlow"], n["nethigh"] = n["net"] - spread, n["net"] + spread * (10 + self.chance(38, 6)) // 10
        self["months"] = str(12 + 6 * self.chance(39, 5))
        self["broker"] = BROKERS[self.chance(40, len(BROKERS))] + "证券"
        self["broker2"] = BROKERS[self.chance(40, len(BROKERS)) - 3] + "证券"
        self["no"] = str(self.chance(41, 80) + 10)
        self["directors"] = str(7 + 2 * self.chance(42, 3))
        self._add_plan()
        self._add_bond()

    def _add_plan(self) -> None:
        """Add `plan`, the sentence about the dividend, to the phrases; with a dividend also `payout` to `numbers`."""
        n = self.numbers
        if not n["div"]:
            self["plan"] = f"公司{self.year}年度拟不派发现金红利，也不以公积金转增股本，未分配利润结转下一年度。"
            return
        n["payout"] = hundredths_of_percent(n["div"], n["net"])
        self["plan"] = (
            f"公司拟以总股本{n['shares']:,}万股为基数，"
            f"向全体股东每10股派发现金红利{decimal(10 * n['per10'])}元（含税），"
            f"合计派发{n['div']:,}万元，占当年净利润的{decimal(n['payout'])}%。"
        )

    def _add_bond(self) -> None:
        """Add the terms of the year's bond to numbers, days and phrases: amount, coupon, interest, term."""
        n, day = self.numbers, weekday(self.year + 1, 9 + self.chance(50, 3), 2 + self.chance(51, 24))
        term = (3, 5, 7, 10)[self.chance(52, 4)]
        n["bond"] = max(1, n["equity"] * (5 + self.chance(53, 16)) // 1_000_000) * 10_000
        n["cpn"] = coupon(self["grade"], term)
        n["spread"] = SPREAD[self["grade"]]
        n["premium"] = 10 * term
        # A bond is a whole number of 亿元, so its yearly interest is a whole number of 万元.
        n["interest"] = n["bond"] // 10_000 * n["cpn"]
        n["allinterest"] = term * n["interest"]
        n["baseinterest"] = n["bond"] // 10_000 * (n["cpn"] - n["premium"])  # without what the term adds
        self.days["bond"] = day
        self.days["due"] = day.replace(year=day.year + term)
        self["term"] = str(term)


_ISSUES = {"forecast": 3, "report": 20, "record": 45, "pledge": 60, "contract": 75, "board": 85, "bond": 95}
_YEAR_BEFORE = tuple(name + "1" for name in Books._fields)
_NAMES = {name: attrgetter(path) for name, path in templates("names").items()}


def _names(company: Company) -> dict[str, str]:
    """Return the words about a company that do not change over the years."""
    names = {name: str(read(company)) for name, read in _NAMES.items()}
    return names | {"holder": company.brand + "投资控股有限公司"}


def _ratios(books: Books, shares: int) -> dict[str, int]:
    """Return gm, nm, dr, roe and rd in units of 0.01 %, and eps and bps in 分 per share; `shares` is in 万股."""
    return {
        "gm": hundredths_of_percent(books.rev - books.cost, books.rev),
        "nm": hundredths_of_percent(books.net, books.rev),
        "dr": hundredths_of_percent(books.debts, books.assets),
        "roe": hundredths_of_percent(books.net, books.equity),
        "rd": hundredths_of_percent(books.rnd, books.rev),
        "eps": per_share(books.net, shares),
        "bps": per_share(books.equity, shares),
    }


_FORMS: dict[str, Callable[[Facts, str], str]] = {
    "w": lambda f, k: f"{f.numbers[k]:,}",
    "n": lambda f, k: str(f.numbers[k]),
    "y": lambda f, k: in_yi(f.numbers[k]),
    "g": lambda f, k: growth(f.numbers[k], f.numbers[k + "1"]),
    "p": lambda f, k: growth_cell(f.numbers[k], f.numbers[k + "1"]),
    "r": lambda f, k: decimal(f.numbers[k]) + "%",
    "d": lambda f, k: decimal(f.numbers[k]),
    "k": lambda f, k: points(f.numbers[k], f.numbers[k + "1"]),
    "t": lambda f, k: decimal(10 * f.numbers[k]),
    "l": lambda f, k: ("净利润" if f.numbers[k] >= 0 else "净亏损") + in_yi(abs(f.numbers[k])),
    "c": lambda f, k: format_day(f.days[k]),
    "m": lambda f, k: f"{f.days[k].month}月{f.days[k].day}日",
    "i": lambda f, k: f.days[k].isoformat(),
    "o": lambda f, k: f"{f.days[k].year}-{_ISSUES[k] + f.chance(60, 10):03d}",
}


class Quoted(dict[str, str]):
    """The facts of a company, with those of others beside them; extra words may be added."""

    def __init__(self, facts: Facts, others: dict[str, Facts]) -> None:
        """Copy the facts; `others` has those of other companies by a letter each."""
        super().__init__(facts)  # a copy: looking up twice costs more than the 2 microseconds it takes
        self.facts = facts
        self.others = others

    def __missing__(self, key: str) -> str:
        """Return another company's fact for `letter_name_form`, else the company's own for `name_form`.

        Raises KeyError for an unknown letter, name or form.
        """
        return self.others[key[0]][key[2:]] if key[1] == "_" else self.facts[key]


_CACHED_FACTS = 6_000
_SLOTS = 250
_LEAVES = 1 / 480  # chance that a slot is given to another eight at a draw: 60 draws for each company


class Archive:
    """A world and the facts of its company-years, cached up to a limit."""

    def __init__(self, world: World) -> None:
        """Begin with no facts in the cache."""
        self.world = world
        self._facts: dict[tuple[int, int], Facts] = {}

    def facts(self, company: Company, year: int) -> Facts:
        """Return the facts of a company after its report for that year; beyond 6,000 cached facts, drops the oldest."""
        key = (company.number, year)
        facts = self._facts.get(key)
        if facts is None:
            if len(self._facts) >= _CACHED_FACTS:
                del self._facts[next(iter(self._facts))]
            facts = self._facts[key] = Facts(company, year)
        return facts

    def peers(self, company: Company) -> list[Company]:
        """Return the other three companies of its group of four, which share its industry."""
        first = company.number // GROUP * GROUP
        return [other for other in self.world.companies[first : first + GROUP] if other is not company]

    def customer(self, facts: Facts) -> Facts:
        """Return the same year's facts of the other party to its contract: a company of a neighbouring group."""
        group = facts.company.number // GROUP
        other = group ^ 1 if (group ^ 1) * GROUP < len(self.world.companies) else group - 1
        return self.facts(self.world.companies[other * GROUP + facts.chance(61, GROUP)], facts.year)


class Stage:
    """The company-years that a source writes about at a time: up to 250 groups of eight companies, each in a year."""

    def __init__(self, archive: Archive, years: Sequence[int] = REPORT_YEARS) -> None:
        """Begin with no groups; draw() adds them, each in one of `years`."""
        self._archive = archive
        self._years = years
        self._slots: list[list[Facts]] = []

    def draw(self, dice: Dice) -> Facts:
        """Return the facts of a random company-year of the stage; now and then replaces a group of eight first."""
        place = int(dice.random() * _SLOTS)
        if place >= len(self._slots):
            place = len(self._slots)
            self._slots.append(self._eight(dice))
        elif dice.random() < _LEAVES:
            self._slots[place] = self._eight(dice)
        eight = self._slots[place]
        return eight[int(dice.random() * len(eight))]

    def _eight(self, dice: Dice) -> list[Facts]:
        """Return the facts of eight neighbouring companies in a random year; fewer at the end of the world."""
        companies = self._archive.world.companies
        first = dice.between(0, (len(companies) - 1) // (2 * GROUP)) * 2 * GROUP
        year = dice.pick(self._years)
        return [self._archive.facts(company, year) for company in companies[first : first + 2 * GROUP]]
