"""Expand the phrase grammar of the synthetic corpus: choices, paragraphs and forms.

A phrase is written once with its choices, `(全年|报告期内)实现营业收入{rev_y}`, and expanded in full on import (about
0.1 s for all modules); a sentence is then one pick and one `%` with an itemgetter, 2.5 times as fast as format_map.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from finlm.world.companies import Dice

Words = Mapping[str, str]
Readings = tuple[str, ...]
# A %s-format and what fetches its values: a tuple, or the string itself where there is one; None where there is none.
Phrase = tuple[str, Callable[[Any], Any] | None]
Bank = tuple[Phrase, ...]
_NUMERALS = "一二三四五六七八九十"
_PROSE = Path(__file__).parent / "prose"
_FIELD = re.compile(r"{(\w+)}")


class Paragraph(NamedTuple):
    """Sentences printed as one paragraph."""

    headings: Readings  # numbered in print; empty for a plain paragraph
    sentences: tuple[Readings, ...]  # one of each, in order
    share: float  # of the documents that have this paragraph


class Form(NamedTuple):
    """One kind of document as it is written down."""

    name: str
    weight: int  # how often it is drawn against its neighbours
    label: str
    paragraphs: tuple[Paragraph, ...]


class Press:
    """A form with its phrases compiled, ready to render."""

    def __init__(self, form: Form) -> None:
        """Compile the form's phrases."""
        self.name = form.name
        self.label = form.label
        self._paragraphs = [
            (heads, [tuple(map(_compile_phrase, readings)) for readings in sentences], share)
            for heads, sentences, share in form.paragraphs
        ]

    def render(self, dice: Dice, words: Words) -> str:
        """Return a random reading filled with `words`, a paragraph a line, title first. KeyError for a missing word."""
        random = dice.random
        parts: list[str] = []
        headings = 0
        for heads, banks, share in self._paragraphs:
            if share < 1 and random() >= share:
                continue
            if heads:
                parts.append(f"{_NUMERALS[headings]}、{heads[int(random() * len(heads))].format_map(words)}\n")
                headings += 1
            for bank in banks:
                text, values = bank[int(random() * len(bank))]
                parts.append(text if values is None else text % values(words))
            parts.append("\n")
        parts.pop()
        return "".join(parts)


def fill(dice: Dice, bank: Bank, words: Words) -> str:
    """Return a random phrase of the bank, filled with `words`. Raises KeyError for a missing word."""
    text, values = bank[int(dice.random() * len(bank))]
    return text if values is None else text % values(words)


def bank(template: str) -> Bank:
    """Return the readings of the template, compiled for fill(). Raises ValueError for a surplus closing bracket."""
    return tuple(map(_compile_phrase, phrases(template)))


def _compile_phrase(text: str) -> Phrase:
    """Return (a %s-format of the text, a function that gets its values from the words, None without {name})."""
    pieces = _FIELD.split(text)
    names = pieces[1::2]
    if not names:
        return text, None
    return "%s".join(piece.replace("%", "%%") for piece in pieces[::2]), itemgetter(*names)


def phrases(template: str) -> Readings:
    """Return every reading of the template: (甲|乙) is a choice, may be empty, may nest; 甲|乙 works at the top.

    Raises ValueError for a closing bracket without an opening one.
    """
    readings, end = _alternatives(template, 0)
    if end != len(template):
        raise ValueError(f"unbalanced ) in {template!r}")
    return tuple(readings)


def _alternatives(text: str, at: int) -> tuple[list[str], int]:
    """Return (the readings of text from index `at` to the closing bracket or the end, the index where they end)."""
    done: list[str] = []
    current = [""]
    while at < len(text) and text[at] != ")":
        if text[at] == "|":
            done += current
            current = [""]
            at += 1
        elif text[at] == "(":
            inner, at = _alternatives(text, at + 1)
            at += 1
            current = [head + tail for head in current for tail in inner]
        else:
            end = min((place for place in (text.find(c, at) for c in "(|)") if place >= 0), default=len(text))
            current = [head + text[at:end] for head in current]
            at = end
    return done + current, at


_WORDS: dict[str, dict[str, str]] = tomllib.loads((_PROSE / "words.toml").read_text(encoding="utf-8"))


def templates(section: str) -> dict[str, str]:
    """Return {name: template} of a section of prose/words.toml. Raises KeyError if there is no such section."""
    return _WORDS[section]


def banks(section: str) -> dict[str, Bank]:
    """Return {name: readings compiled for fill()} of a section of prose/words.toml. KeyError without the section."""
    return {name: bank(template) for name, template in templates(section).items()}


def prose(name: str) -> str:
    """Return the text of prose/<name>.txt beside this file. Raises FileNotFoundError if there is none."""
    return (_PROSE / f"{name}.txt").read_text(encoding="utf-8")


def forms(text: str, tables: Mapping[str, Readings] | None = None) -> tuple[Form, ...]:
    """Return the forms that the text of a prose file defines.

    `== name weight label` opens a form, `# headings 70%` a numbered and `* 70%` a plain paragraph (the share may be
    left out), `- phrase` adds a sentence, `| phrase` another wording of it, `@name` a table of `tables`. Raises
    ValueError for a line with another mark or a head without three words, KeyError for an unknown table.
    """
    made: list[Form] = []
    for block in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.strip().splitlines()
        name, weight, label = head.split()
        paragraphs: list[Paragraph] = []
        banks: list[Readings] = []
        for line in lines:
            mark, rest = line[0], line[1:].strip()
            if mark in "#*":
                share = re.search(r"\s*(\d+)%$", rest)
                headings, banks = rest[: share.start()] if share else rest, []
                heads = phrases(headings) if headings else ()
                paragraphs.append(Paragraph(heads, (), int(share[1]) / 100 if share else 1))
            elif mark == "|":
                banks[-1] += phrases(rest.replace("\\n", "\n"))
            elif mark == "@":
                banks.append((tables or {})[rest])
            elif mark == "-":
                banks.append(phrases(rest.replace("\\n", "\n")))
            else:
                raise ValueError(f"form {name}: no such mark: {line!r}")
            paragraphs[-1] = paragraphs[-1]._replace(sentences=tuple(banks))
        made.append(Form(name, int(weight), label, tuple(paragraphs)))
    return tuple(made)


def by_weight(drawn: Iterable[Form]) -> tuple[Press, ...]:
    """Return the forms as Presses, each repeated as often as its form's weight, so that a uniform pick is weighted."""
    return tuple(press for form in drawn for press in [Press(form)] * form.weight)
