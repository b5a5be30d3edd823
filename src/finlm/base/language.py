"""Say messages in another language: English sentences, as the code writes them, and their Chinese form in zh.toml.

The code raises and prints plain English. What leaves the program for people (`screen`, the errors and the help of the
command line, the report and the board) goes through `translate`, which finds the sentence in the catalogue. A sentence
that is not in it stays English. JSON, events, logs of ranks and commands to type are never translated: only the command
line chooses a language (`use`), so whatever runs without it speaks English.

An entry of zh.toml is a sentence with named holes, "there is no run {name}". What stands in a hole is kept as it is,
or, where the name begins with an underscore ({_reason}), translated too. What {size}, {number}, {many},
{few}, {rows}, {step} and {steps} hold are numbers.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("en", "zh")
CATALOGUE = Path(__file__).with_name("zh.toml")
VARIABLES = ("FINLM_LANG", "LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides
WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6"  # two columns each
HOLE = re.compile(r"\{(_?[a-z]+)\}")

_SIZE, _NUMBER = r"[-+\d.,]+(?: ?[KMGT]?i?B)?", r"[-+]?\d\S*"
_NUMBERS = {
    "size": _SIZE,
    "gpu": "[^ ,]+",
    **dict.fromkeys(("number", "many", "few", "steps", "rows", "step"), _NUMBER),
}
_SETTINGS = re.compile(r"[^ ,]+, [a-z_]+(?:\.[a-z_]+)+: ")  # of `zero.stage: 2, zero.offload_param: none`
_SENTENCE = re.compile("[a-z]{2,} [a-z]{2,}")

_language = "en"
_more: dict[str, str] = {}
missed: set[str] = set()  # sentences that had no translation, for the tests


class _Pattern(NamedTuple):
    """A catalogue sentence with holes: its longest stretch of fixed text, the English and the Chinese sentence."""

    fixed: str
    english: str
    chinese: str


def choose(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the language of messages, "en" or "zh", from --lang in the arguments, else from the environment.

    --lang with another value, or none, gives "en". In the environment the first variable of VARIABLES that is set
    decides; "en" if none is.
    """
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--lang":
            wanted = value or next(iter(arguments[position + 1 :]), "")
            return wanted if wanted in LANGUAGES else "en"
    said = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    return "zh" if said.lower().startswith(("zh", "cn")) else "en"


def use(language: str) -> None:
    """Set the language, "en" or "zh", that `translate` uses in this process from now on."""
    global _language
    _language = language


def current() -> str:
    """Return the language of messages: "en" or "zh"."""
    return _language


def add(sentences: Mapping[str, str]) -> None:
    """Add translations, {English: Chinese}, of sentences without holes that are not in the catalogue zh.toml."""
    _more.update(sentences)


@functools.cache
def words(language: str) -> Mapping[str, str]:
    """Return {English: Chinese} for the report's and the board's pages; {} for English, the templates' own. Cached."""
    return _catalogue()["pages"] if language == "zh" else {}


def translate(text: str, language: str | None = None) -> str:
    """Return a message translated line by line to `language` (default: the current one); unknown text stays English.

    A sentence that is known in part is translated in part. Adds unknown sentences of two words or more to `missed`.
    """
    if (language or _language) == "en" or not text:
        return text
    return "\n".join(map(_translate_line, text.split("\n")))


@functools.cache
def _catalogue() -> dict[str, dict[str, str]]:
    """Return the tables of zh.toml, `messages` and `pages`: {English: Chinese} each; read once."""
    return tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))


@functools.cache
def _patterns() -> list[_Pattern]:
    """Return the catalogue's messages that have holes, those with the most fixed text first; cached."""
    patterns = []
    for english, chinese in _catalogue()["messages"].items():
        if HOLE.search(english):
            patterns.append(_Pattern(max(HOLE.sub("\n", english).split("\n"), key=len), english, chinese))
    return sorted(patterns, key=lambda pattern: -len(HOLE.sub("", pattern.english)))


@functools.cache
def _sentence_pattern(english: str) -> re.Pattern[str]:
    """Return the regular expression for a whole sentence of the catalogue, with a named group for each hole; cached."""
    parts = re.split(HOLE.pattern, english)  # fixed text, name, fixed text, ...
    return re.compile(
        "".join(f"(?P<{part}>{_hole_pattern(part)})" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    )


def _hole_pattern(name: str) -> str:
    """Return the pattern of the text that fits a hole: a number, any text for a _name, else text without "; "."""
    return ".+" if name.startswith("_") else _NUMBERS.get(name, "(?:(?!; ).)+?")


def _translate_line(line: str) -> str:
    """Return one line in Chinese, keeping its indentation, list mark (- or #) and the positions of its columns.

    Columns are texts with two or more blanks between them. Of a line with columns, drops blanks at the end.
    """
    start = re.match(r"\s*(?:- |# )?", line)
    indent = start[0] if start else ""
    body = line[len(indent) :]
    cells = re.split(r"(\s{2,})", body)
    if len(cells) == 1:
        return indent + _translate_part(body)
    translated = indent
    for cell, gap in zip(cells[::2], [*cells[1::2], ""], strict=True):
        known = _translate_part(cell)
        translated += known + " " * max(2 * bool(gap), len(gap) - (width(known) - width(cell)))
    return translated.rstrip()


def _translate_part(text: str) -> str:
    """Return the Chinese of a sentence or a part of one; the text as given if it is unknown.

    Adds unknown text of two words or more to `missed`.
    """
    known = _find_translation(text)
    if known is None and _SENTENCE.search(text):
        missed.add(text)
    return text if known is None else known


def _find_translation(text: str) -> str | None:
    """Return the Chinese of a sentence, as a whole, else by its parts; None when no part is known.

    Unknown parts stay English; those with two words or more are added to `missed`.
    """
    translated = _look_up(text)
    if translated is not None:
        return translated
    main, remark = _split_remark(text)
    if meaning := _look_up(remark):
        return f"{_translate_part(main)}（{meaning}）"
    key, colon, rest = text.partition(": ")
    if colon and " " not in key:
        if translated := _fill_pattern(text, f"{key}: "):
            return translated
        if " " in rest and not _SETTINGS.match(rest) and (translated := _find_translation(rest)):
            return f"{_look_up(f'{key}:') or f'{key}：'}{translated}"
    return _fill_pattern(text) or _translate_parts(text, main, remark)


def _fill_pattern(text: str, start: str = "") -> str | None:
    """Return the translation of `text` by the first catalogue pattern that fits all of it; None if none fits.

    Tries only patterns whose English begins with `start`, those with the most fixed text first. What fills a hole whose
    name begins with an underscore is translated too, and if unknown is added to `missed`.
    """
    for pattern in _patterns():
        if not pattern.english.startswith(start) or pattern.fixed not in text:
            continue
        if match := _sentence_pattern(pattern.english).fullmatch(text):
            holes = {
                name: _translate_part(held) if name.startswith("_") else held
                for name, held in match.groupdict().items()
            }
            return HOLE.sub(lambda hole, holes=holes: holes[hole[1]], pattern.chinese)  # type: ignore[misc]
    return None


def _translate_parts(text: str, main: str, remark: str) -> str | None:
    """Return a sentence translated clause by clause, or item by item at commas; None when no clause is known.

    `main` and `remark` are what _split_remark(text) returned. Clauses end at "; ". Items are translated only if each of
    two words or more is known. Adds unknown clauses of two words or more to `missed`.
    """
    if "; " in text:
        clauses = text.split("; ")
        return (
            "；".join(map(_translate_part, clauses)) if any(_find_translation(clause) for clause in clauses) else None
        )
    if remark and ((translated := _find_translation(main)) or _find_translation(remark)):
        return f"{translated or _translate_part(main)}（{_translate_part(remark)}）"
    items = text.split(", ")
    known = [_find_translation(item) for item in items] if len(items) > 1 else []
    if any(known) and all(chinese or not _SENTENCE.search(item) for chinese, item in zip(known, items, strict=True)):
        return "，".join(chinese or item for chinese, item in zip(known, items, strict=True))
    return None


def _look_up(text: str) -> str | None:
    """Return the translation of a sentence without holes, from the catalogue or add(); None if it is unknown."""
    return _catalogue()["messages"].get(text) or _more.get(text)


def _split_remark(text: str) -> tuple[str, str]:
    """Return (text before, text inside) the parentheses that end `text`; (text, "") unless a space precedes them."""
    depth = 0
    for position in range(len(text) - 1, 0, -1) if text.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(text[position], 0)
        if depth == 0:
            return (text[: position - 1], text[position + 1 : -1]) if text[position - 1] == " " else (text, "")
    return text, ""


def width(text: str) -> int:
    """Return how many terminal columns text takes; Chinese characters take two."""
    return len(text) + len(re.findall(f"[{WIDE}]", text))
