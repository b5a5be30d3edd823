"""Who is written about: the companies of a world with their facts, and the few thousand that are on stage.

Companies come in fours of one industry, which are compared with each other, and two fours trade with each other. A
source writes about 250 such eights at a time, each in one year: drawing from all company-years of a large world would
render the facts of nearly every document anew. Facts are kept for up to 6,000 company-years, about 60 MB.

It decides nothing about what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from finlm.data.synthetic_facts import REPORT_YEARS, Facts
from finlm.data.synthetic_world import GROUP, Company, Dice, World

_CACHED_FACTS = 6_000
_SLOTS = 250
_LEAVES = 1 / 480  # chance that a slot is given to another eight at a draw: 60 draws for each company


class Archive:
    """A world and its facts, kept while there is room."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._facts: dict[tuple[int, int], Facts] = {}

    def facts(self, company: Company, year: int) -> Facts:
        """What can be said about the company after its report for that year."""
        key = (company.number, year)
        found = self._facts.get(key)
        if found is None:
            if len(self._facts) >= _CACHED_FACTS:
                del self._facts[next(iter(self._facts))]
            found = self._facts[key] = Facts(company, year)
        return found

    def peers(self, company: Company) -> list[Company]:
        """The other three of its four."""
        first = company.number // GROUP * GROUP
        return [other for other in self.world.companies[first : first + GROUP] if other is not company]

    def customer(self, facts: Facts) -> Facts:
        """The company on the other side of the year's contract: one of the other four of its eight, if there is."""
        group = facts.company.number // GROUP
        other = (group ^ 1) * GROUP
        if other >= len(self.world.companies):
            other = (group - 1) * GROUP
        return self.facts(self.world.companies[other + facts.chance(61, GROUP)], facts.year)


class Stage:
    """The company-years a source writes about at a time."""

    def __init__(self, archive: Archive, years: Sequence[int] = REPORT_YEARS) -> None:
        self._archive = archive
        self._years = years
        self._slots: list[list[Facts]] = []

    def draw(self, dice: Dice) -> Facts:
        """A company-year to write about."""
        place = int(dice.random() * _SLOTS)
        if place >= len(self._slots):
            place = len(self._slots)
            self._slots.append(self._eight(dice))
        elif dice.random() < _LEAVES:
            self._slots[place] = self._eight(dice)
        eight = self._slots[place]
        return eight[int(dice.random() * len(eight))]

    def _eight(self, dice: Dice) -> list[Facts]:
        companies = self._archive.world.companies
        first = dice.between(0, (len(companies) - 1) // (2 * GROUP)) * 2 * GROUP
        year = dice.pick(self._years)
        return [self._archive.facts(company, year) for company in companies[first : first + 2 * GROUP]]
