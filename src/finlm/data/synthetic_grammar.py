"""The phrase grammar of the synthetic corpus: choices, paragraphs and forms.

A phrase is written once with its choices, `(全年|报告期内)实现营业收入{rev_y}`, and expanded in full on import (about 0.1 s
for all modules); a sentence is then one pick and one `%` with an itemgetter, 2.5 times as fast as format_map.

It knows no words and no facts; those are in the filings, news, articles and facts modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from finlm.data.synthetic_world import Dice

Words = Mapping[str, str]
# A %s-format and what fetches its values: a tuple, or the string itself where there is one; None where there is none.
Phrase = tuple[str, Callable[[Any], Any] | None]
Bank = tuple[Phrase, ...]
_FIELD = re.compile(r"{(\w+)}")
_NUMERALS = "一二三四五六七八九十"


class Paragraph(NamedTuple):
    """Sentences printed as one paragraph."""

    headings: Bank  # numbered in print; empty for a plain paragraph
    sentences: tuple[Bank, ...]  # one of each, in order
    share: float  # of the documents that have this paragraph


class Form(NamedTuple):
    """One kind of document."""

    name: str
    weight: int  # how often it is drawn against its neighbours
    label: str
    paragraphs: tuple[Paragraph, ...]

    def render(self, dice: Dice, words: Words) -> str:
        """One reading filled with words; the first paragraph is the title."""
        random = dice.random
        lines: list[str] = []
        headings = 0
        for heads, sentences, share in self.paragraphs:
            if share < 1 and random() >= share:
                continue
            if heads:
                lines.append(f"{_NUMERALS[headings]}、{fill(dice, heads, words)}")
                headings += 1
            if len(sentences) == 1:
                lines.append(fill(dice, sentences[0], words))
                continue
            parts = []
            for bank in sentences:
                text, values = bank[int(random() * len(bank))]
                parts.append(text if values is None else text % values(words))
            lines.append("".join(parts))
        return "\n".join(lines)


def fill(dice: Dice, bank: Bank, words: Words) -> str:
    """One phrase of the bank, filled with words."""
    text, values = bank[int(dice.random() * len(bank))]
    return text if values is None else text % values(words)


def phrases(template: str) -> Bank:
    """Every reading of the template: (甲|乙) is a choice, which may be empty and may nest; 甲|乙 works at the top too."""
    found, end = _alternatives(template, 0)
    if end != len(template):
        raise ValueError(f"unbalanced ) in {template!r}")
    return tuple(compiled(text) for text in found)


def compiled(text: str) -> Phrase:
    """The text with its {fields} ready to be filled."""
    pieces = _FIELD.split(text)
    names = pieces[1::2]
    if not names:
        return text, None
    return "%s".join(piece.replace("%", "%%") for piece in pieces[::2]), itemgetter(*names)


def _alternatives(text: str, at: int) -> tuple[list[str], int]:
    """The readings of text from `at` to the closing bracket or the end, and the place after them."""
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


def forms(text: str, tables: Mapping[str, Bank] | None = None) -> tuple[Form, ...]:
    """Read forms: `== name weight label` opens one, `# headings 70%` a numbered and `* 70%` a plain paragraph (the
    share may be left out), `- phrase` adds a sentence, `| phrase` another wording of it, `@name` a table."""
    found: list[Form] = []
    for block in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.strip().splitlines()
        name, weight, label = head.split()
        paragraphs: list[Paragraph] = []
        banks: list[Bank] = []
        for line in lines:
            mark, rest = line[0], line[1:].strip()
            if mark in "#*":
                share = re.search(r"\s*(\d+)%$", rest)
                headings = rest[: share.start()] if share else rest
                banks = []
                paragraphs.append(
                    Paragraph(phrases(headings) if headings else (), (), int(share[1]) / 100 if share else 1)
                )
            elif mark == "|":
                banks[-1] += phrases(rest.replace("\\n", "\n"))
            elif mark == "@":
                banks.append((tables or {})[rest])
            elif mark == "-":
                banks.append(phrases(rest.replace("\\n", "\n")))
            else:
                raise ValueError(f"form {name}: no such mark: {line!r}")
            paragraphs[-1] = paragraphs[-1]._replace(sentences=tuple(banks))
        found.append(Form(name, int(weight), label, tuple(paragraphs)))
    return tuple(found)


def by_weight(found: tuple[Form, ...]) -> tuple[Form, ...]:
    """Each form as often as it weighs, for one uniform pick."""
    return tuple(form for form in found for _ in range(form.weight))
