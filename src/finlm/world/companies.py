"""Define the laws of the synthetic world, and make its companies: names, people, codes and six years of books.

The laws are what the train and the held-out half have in common, so that a model that has learnt them on one half can
be examined on companies of the other: a code's first two digits name the exchange, the board and its daily price limit;
an industry names the regulator, the income tax rate and the typical risk; a city lies in one province; the debt ratio
decides the rating; rating and term decide the coupon. They stand in prose/world.toml; everything in it is invented.

Everything with a name (companies, people, products, codes) belongs to one split only: the characters and digits that
names are built from are divided between the splits. All sums are integers in 万元, so every statement adds up exactly.
A company takes about 60 microseconds to make and 5 KB of memory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")
YEARS = (2019, 2020, 2021, 2022, 2023, 2024)  # the first is only ever quoted as the year before
SPLITS = ("train", "held_out")
GROUP = 4  # so many neighbours share an industry
MAX_COMPANIES = 12_000  # codes of the largest board run out soon after


class Dice:
    """A random stream seeded by its arguments, the same on every machine.

    Only Random.random() is used: the only method whose results Python promises to keep from version to version.
    """

    __slots__ = ("random",)

    def __init__(self, *name: str | int) -> None:
        """Seed the stream with the arguments, joined by colons."""
        self.random = Random(":".join(map(str, name))).random

    def pick(self, options: Sequence[T]) -> T:
        """Return a random option; all are equally likely. Raises IndexError without options."""
        return options[int(self.random() * len(options))]

    def shuffle(self, options: Sequence[T]) -> list[T]:
        """Return the options in a random order, as a new list."""
        keys = [self.random() for _ in options]
        return [options[place] for place in sorted(range(len(options)), key=keys.__getitem__)]

    def between(self, low: int, high: int) -> int:
        """Return a random integer from low to high, both included."""
        return low + int(self.random() * (high - low + 1))


def mix(*numbers: int) -> int:
    """Return a well-spread integer below 2^28 that depends on all arguments, for facts that use no random stream."""
    value = 0x9E3779B9
    for number in numbers:
        value = ((value ^ number) * 0x85EBCA6B) & 0xFFFFFFFF
        value ^= value >> 15
    return (value * 0xC2B2AE35 & 0xFFFFFFFF) >> 4


class Board(NamedTuple):
    """A market segment: the first digits of its codes, and its daily price limit in percent."""

    prefix: str
    exchange: str
    name: str
    limit_percent: int


class Industry(NamedTuple):
    """The properties that all companies of an industry share; `up` and `down` are causes of a better or worse year."""

    name: str
    words: tuple[str, ...]
    regulator: str
    risk: str
    tax_percent: int
    margin_percent: tuple[int, int]
    goods: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


_LISTS = ("words", "goods", "up", "down")
_WORLD = tomllib.loads((Path(__file__).parent / "prose/world.toml").read_text(encoding="utf-8"))
_NAMES = _WORLD["names"]
BOARDS = tuple(Board(*row) for row in _WORLD["boards"])
INDUSTRIES = tuple(
    Industry(
        **row | {key: tuple(row[key].split()) for key in _LISTS} | {"margin_percent": tuple(row["margin_percent"])}
    )
    for row in _WORLD["industry"]
)
CITIES = tuple((city, province) for province, cities in _WORLD["provinces"].items() for city in cities.split())
AUDITORS, BROKERS = tuple(_WORLD["auditors"].split()), tuple(_WORLD["brokers"].split())
RATINGS = tuple((str(grade), int(below)) for grade, below, _, _ in _WORLD["ratings"])  # the debt ratio it ends below
SPREAD = {str(grade): int(spread) for grade, _, spread, _ in _WORLD["ratings"]}
BAND = {str(grade): str(band) for grade, _, _, band in _WORLD["ratings"]}


def hundredths_of_percent(part: int, whole: int) -> int:
    """Return part / whole in 0.01 %, rounded half away from zero. Raises ZeroDivisionError for a `whole` of 0."""
    rounded = (20_000 * abs(part) + abs(whole)) // (2 * abs(whole))
    return rounded if (part < 0) == (whole < 0) else -rounded


def rating(debt_ratio: int) -> str:
    """Return the credit rating, a name of RATINGS, for a debt ratio in units of 0.01 %, below 100 %."""
    return next(grade for grade, below in RATINGS if debt_ratio < below)


def coupon(grade: str, years: int) -> int:
    """Return a bond's coupon in units of 0.01 %: 200, plus the spread of its `grade` (a rating), plus 10 a year."""
    return 200 + SPREAD[grade] + 10 * years


_CODES_PER_BOARD = 5_000


class Books(NamedTuple):
    """One year of a company in 万元: the income statement, the balance sheet, the cash from operations."""

    rev: int
    cost: int
    sell: int
    admin: int
    rnd: int
    fin: int
    profit: int  # before income tax
    tax: int
    net: int
    ocf: int
    cur: int
    fixed: int
    assets: int
    cdebt: int
    ldebt: int
    debts: int
    equity: int
    per10: int  # dividend per ten shares, in 角
    div: int  # dividend paid out, 万元


class Company(NamedTuple):
    """Everything that does not change over the years, and the books that do."""

    number: int
    salt: int
    brand: str
    short: str
    full: str
    code: str
    board: Board
    industry: Industry
    city: str
    province: str
    product: str
    second_product: str
    founded: int
    listed: int
    chair: str
    ceo: str
    cfo: str
    secretary: str
    auditor: str
    shares: int  # 万股
    held: int  # 万股 of the controlling shareholder
    books: tuple[Books, ...]  # one for each of YEARS


class World:
    """The companies and writers of one split, equal for equal (split, seed); a larger world starts with a smaller's."""

    def __init__(self, split: str, seed: int, companies: int) -> None:
        """Make this many companies, at most MAX_COMPANIES, and forty writers. Raises ValueError for another split."""
        if split not in SPLITS:
            raise ValueError(f"split is one of {', '.join(SPLITS)}, got {split!r}")
        self.split = split
        self.seed = seed
        self._brands = _shuffled_brands(split, seed)
        self._taken = dict.fromkeys((board.prefix for board in BOARDS), 0)
        self.companies = [self._make_company(index) for index in range(min(companies, MAX_COMPANIES))]
        dice = Dice(split, seed, "writers")
        self.writers = [self._draw_person(dice) for _ in range(40)]

    def _draw_person(self, dice: Dice) -> str:
        """Return a random name of a person of the split."""
        surname, given = dice.pick(_NAMES["surnames"]), dice.pick(_NAMES["given_first"][self.split])
        return f"{surname}{given}{dice.pick(_NAMES['given_second'])}"

    def _take_code(self, board: Board) -> str:
        """Return the next free code of a board and count it: even for the train split, odd for the held-out split."""
        taken = self._taken[board.prefix]
        self._taken[board.prefix] = taken + 1
        number = (taken * 1237 + mix(self.seed & 0xFFFFFFFF, int(board.prefix))) % _CODES_PER_BOARD
        return f"{board.prefix}{2 * number + SPLITS.index(self.split):04d}"

    def _make_company(self, index: int) -> Company:
        """Return company number `index`, which depends on split and seed too; takes the next code of its board."""
        dice = Dice(self.split, self.seed, "company", index)
        lap, place = divmod(index, len(self._brands))
        brand = self._brands[place]
        # Neighbours share an industry, so that even a small world has peers to compare; the lap moves a reused brand
        # on to another industry, which keeps short names unique.
        industry = INDUSTRIES[(place // GROUP + lap) % len(INDUSTRIES)]
        short = brand + dice.pick(industry.words)
        board = dice.pick((*BOARDS, BOARDS[0], BOARDS[2]))
        city, province = dice.pick(CITIES)
        founded = dice.between(1988, 2008)
        first = dice.pick(industry.goods)
        second = dice.pick([goods for goods in industry.goods if goods != first])
        revenue = 40_000 + int(1_400_000 * dice.random() * dice.random() * dice.random())
        shares = max(60, revenue // dice.between(400, 1600)) * 100
        return Company(
            number=index,
            salt=dice.between(1, 10**6),
            brand=brand,
            short=short,
            full=short + dice.pick(("股份有限公司", "股份有限公司", "集团股份有限公司", "科技股份有限公司")),
            code=self._take_code(board),
            board=board,
            industry=industry,
            city=city,
            province=province,
            product=self._draw_product(dice) + first,
            second_product=self._draw_product(dice) + second,
            founded=founded,
            listed=dice.between(max(2004, founded + 5), 2018),
            chair=self._draw_person(dice),
            ceo=self._draw_person(dice),
            cfo=self._draw_person(dice),
            secretary=self._draw_person(dice),
            auditor=dice.pick(AUDITORS) + "会计师事务所",
            shares=shares,
            held=shares * dice.between(22, 58) // 100,
            books=_draw_books(dice, industry, revenue, shares),
        )

    def _draw_product(self, dice: Dice) -> str:
        """Return a random product name in quotation marks, without the kind of product."""
        return f"“{dice.pick(_NAMES['product_first'][self.split])}{dice.pick(_NAMES['product_second'])}”"


def _shuffled_brands(split: str, seed: int) -> list[str]:
    """Return the brand names of a split in random order, without real brands, cut to whole groups of GROUP."""
    brands = [first + second for first in _NAMES["brand_first"][split] for second in _NAMES["brand_second"]]
    brands = [brand for brand in brands if brand not in _NAMES["real_brands"].split()]
    # Whole groups only, so that a lap through the brands never begins within a group.
    return Dice(split, seed, "brands").shuffle(brands)[: len(brands) // GROUP * GROUP]


def _draw_books(dice: Dice, industry: Industry, revenue: int, shares: int) -> tuple[Books, ...]:
    """Return a company's random books of YEARS in 万元, each following from the year before.

    `revenue` (万元) is that of the year before the first, `shares` are in 万股.
    """
    margin = 100 * dice.between(*industry.margin_percent)
    ratio = dice.between(2000, 7600)
    equity = revenue * dice.between(50, 130) // 100
    # Overheads eat most of the gross margin, in proportions that stay with the company.
    shares_of_margin = [dice.between(low, high) for low, high in ((20, 36), (14, 28), (8, 30), (2, 12))]
    structure = (dice.between(38, 64), dice.between(58, 84))
    years: list[Books] = []
    for _ in YEARS:
        revenue = revenue * (10_000 + dice.between(-1500, 3200)) // 10_000
        margin = min(9000, max(500, margin + dice.between(-250, 250)))
        ratio = min(7900, max(1500, ratio + dice.between(-450, 450)))
        cost = revenue * (10_000 - margin) // 10_000
        sell, admin, rnd, fin = (
            (revenue - cost) * share * dice.between(85, 125) // 10_000 + dice.between(0, 99)
            for share in shares_of_margin
        )
        profit = revenue - cost - sell - admin - rnd - fin
        tax = (max(0, profit) * industry.tax_percent + 50) // 100
        net = profit - tax
        equity += net - (years[-1].div if years else 0)
        assets = equity * 10_000 // (10_000 - ratio)
        debts = assets - equity
        current = assets * (structure[0] * 10 + dice.between(-25, 25)) // 1000
        current_debts = debts * (structure[1] * 10 + dice.between(-25, 25)) // 1000
        cash = net * dice.between(60, 150) // 100 + revenue * dice.between(0, 6) // 100
        # Shares come in hundreds of 万股, which makes every dividend a whole number of 万元.
        per10 = max(0, net) * dice.pick((0, 20, 25, 30, 35, 40, 50)) // shares
        sheet = (current, assets - current, assets, current_debts, debts - current_debts, debts, equity)
        income = (revenue, cost, sell, admin, rnd, fin, profit, tax, net, cash)
        years.append(Books(*income, *sheet, per10, shares * per10 // 100))
    return tuple(years)
