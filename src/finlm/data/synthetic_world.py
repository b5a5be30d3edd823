"""The companies of the synthetic world: names, people, codes and six years of books.

Everything with a name (companies, people, products, codes) belongs to one split only: the characters and digits that
names are built from are divided between the splits. All sums are integers in 万元, so every statement adds up exactly.
A company takes about 60 microseconds to make and 5 KB to keep.

It does not model an economy: no business cycle, no ties between companies, no prices that follow from anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

from finlm.data.synthetic_laws import AUDITORS, BOARDS, CITIES, INDUSTRIES, Board, Industry

T = TypeVar("T")
YEARS = (2019, 2020, 2021, 2022, 2023, 2024)  # the first is only ever quoted as the year before
SPLITS = ("train", "held_out")
GROUP = 4  # so many neighbours share an industry
MAX_COMPANIES = 12_000  # codes of the largest board run out soon after


class Dice:
    """A random stream named by its arguments. Only Random.random() is used: the one method whose results Python
    promises to keep from version to version."""

    __slots__ = ("random",)

    def __init__(self, *name: str | int) -> None:
        self.random = Random(":".join(map(str, name))).random

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all alike likely."""
        return options[int(self.random() * len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """The options in a random order."""
        keys = [self.random() for _ in options]
        return [options[place] for place in sorted(range(len(options)), key=keys.__getitem__)]

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))


def mix(*numbers: int) -> int:
    """A well-spread 32-bit number that depends on all arguments: facts that need no stream of their own."""
    value = 0x9E3779B9
    for number in numbers:
        value = ((value ^ number) * 0x85EBCA6B) & 0xFFFFFFFF
        value ^= value >> 15
    return (value * 0xC2B2AE35 & 0xFFFFFFFF) >> 4


# The characters that open a name decide its split, so no two splits can share one, whatever the seeds.
_BRAND_FIRST = {
    "train": "澜霁珩峤沅槿屹翊朔汀苇棠岑泓璟洵聿臻祺韬樾楹溯漪澄潇濯煦琮瑾璞碧穗筠粼绛翎荻萤蓼",
    "held_out": "栎砚淼嵘弈恺憬昊昭晏晟曜曦杉枫栩桦梓梧槐橙沐泠浔涵渊滢烁皓昕湉滟骁婺俪旌穹阙黛瑶",
}
_BRAND_SECOND = "岭原屿舟岳峰岩石林森野禾谷达信诚远拓弘盛锐联同和利丰润景辉骏腾翔越凌云霖洲湾桥门关台轩庭维程章方"
_REAL_BRANDS = ("溯联", "昭和")  # combinations known to be taken
_PRODUCT_FIRST = {"train": "星磐鲸燕雀鹿犀鲤鸿麒鹤蜂貂鹰", "held_out": "月鲲麦鸢麟狮鹭豹鹏鸥隼螺鲟驼"}
_PRODUCT_SECOND = "影脉图核翼帆芯源流轮桥塔弦衡尺锋镜羽"
_SURNAMES = (
    "赵钱孙李周吴郑冯陈褚卫蒋沈韩杨朱秦许何吕施张孔曹严金魏陶姜戚"
    "谢邹章苏潘葛范彭鲁韦马苗方任袁柳史唐薛雷贺倪汤罗毕郝邬常"
)
_GIVEN_FIRST = {
    "train": "承砚知屿槐序牧昀疏澈樵蔚翊彦弘霄岱钧",
    "held_out": "淮予越初晏川简栖棹矜绍沛汝骁恪珂衍鹭",
}
_GIVEN_SECOND = "之宁安衡然白远舒言山和禾文清林远南青"
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
    """The companies and writers of one split, the same for the same (split, seed); a larger world starts with the
    companies of the smaller one."""

    def __init__(self, split: str, seed: int, companies: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is one of {', '.join(SPLITS)}, got {split!r}")
        self.split = split
        self.seed = seed
        self._brands = _shuffled_brands(split, seed)
        self._taken = dict.fromkeys((board.prefix for board in BOARDS), 0)
        self.companies = [self._company(index) for index in range(min(companies, MAX_COMPANIES))]
        dice = Dice(split, seed, "writers")
        self.writers = [self._person(dice) for _ in range(40)]

    def _person(self, dice: Dice) -> str:
        return dice.pick(_SURNAMES) + dice.pick(_GIVEN_FIRST[self.split]) + dice.pick(_GIVEN_SECOND)

    def _code(self, board: Board) -> str:
        """The next free code of a board: even for the train split, odd for the held-out one."""
        taken = self._taken[board.prefix]
        self._taken[board.prefix] = taken + 1
        number = (taken * 1237 + mix(self.seed & 0xFFFFFFFF, int(board.prefix))) % _CODES_PER_BOARD
        return f"{board.prefix}{2 * number + SPLITS.index(self.split):04d}"

    def _company(self, index: int) -> Company:
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
            code=self._code(board),
            board=board,
            industry=industry,
            city=city,
            province=province,
            product=self._product(dice) + first,
            second_product=self._product(dice) + second,
            founded=founded,
            listed=dice.between(max(2004, founded + 5), 2018),
            chair=self._person(dice),
            ceo=self._person(dice),
            cfo=self._person(dice),
            secretary=self._person(dice),
            auditor=dice.pick(AUDITORS) + "会计师事务所",
            shares=shares,
            held=shares * dice.between(22, 58) // 100,
            books=_books(dice, industry, revenue, shares),
        )

    def _product(self, dice: Dice) -> str:
        return f"“{dice.pick(_PRODUCT_FIRST[self.split])}{dice.pick(_PRODUCT_SECOND)}”"


def _shuffled_brands(split: str, seed: int) -> list[str]:
    brands = [a + b for a in _BRAND_FIRST[split] for b in _BRAND_SECOND if a + b not in _REAL_BRANDS]
    # Whole groups only, so that a lap through the brands never begins within a group.
    return Dice(split, seed, "brands").shuffled(brands)[: len(brands) // GROUP * GROUP]


def _books(dice: Dice, industry: Industry, revenue: int, shares: int) -> tuple[Books, ...]:
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
        overheads = [
            (revenue - cost) * share * dice.between(85, 125) // 10_000 + dice.between(0, 99)
            for share in shares_of_margin
        ]
        profit = revenue - cost - sum(overheads)
        tax = (max(0, profit) * industry.tax_percent + 50) // 100
        net = profit - tax
        equity += net - (years[-1].div if years else 0)
        years.append(_year(dice, revenue, cost, overheads, (profit, tax, net), (equity, ratio), structure, shares))
    return tuple(years)


def _year(
    dice: Dice,
    revenue: int,
    cost: int,
    overheads: list[int],
    result: tuple[int, int, int],
    balance: tuple[int, int],
    structure: tuple[int, int],
    shares: int,
) -> Books:
    equity, ratio = balance
    assets = equity * 10_000 // (10_000 - ratio)
    debts = assets - equity
    current = assets * (structure[0] * 10 + dice.between(-25, 25)) // 1000
    current_debts = debts * (structure[1] * 10 + dice.between(-25, 25)) // 1000
    cash = result[2] * dice.between(60, 150) // 100 + revenue * dice.between(0, 6) // 100
    # Shares come in hundreds of 万股, which makes every dividend a whole number of 万元.
    per10 = max(0, result[2]) * dice.pick((0, 20, 25, 30, 35, 40, 50)) // shares
    sheet = (current, assets - current, assets, current_debts, debts - current_debts, debts, equity)
    sell, admin, rnd, fin = overheads
    books = (revenue, cost, sell, admin, rnd, fin, *result, cash, *sheet)
    return Books(*books, per10, shares * per10 // 100)
