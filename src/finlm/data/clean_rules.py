"""Filters: each takes a normalised text and returns None, or the reason why the document is dropped.

They judge the form of a document, never its subject; the subject is the keyword list's and the perplexity filter's
business. Shares are of the characters that are not blank. A document of fewer than 50 characters has no shares worth
judging and passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finlm.base.errors import UserError
from finlm.data.clean_text import CHINESE

Filter = Callable[[str], str | None]

_ENOUGH = 50
_SHORT_LINE = 10
_ENOUGH_LINES = 10

_NOT_CHINESE = re.compile(f"[^{CHINESE}]+")
_NOT_A_LETTER = re.compile(r"[\W\d_]+")
_SYMBOL = re.compile("[!-/:-@\\[-`{-~\u00a1-\u00bf\u2010-\u2bff\u3001-\u303f\uff01-\uff65]")
# UTF-8 read as GBK and back, and UTF-8 read as Latin-1.
_SUSPECT = re.compile("[\ufffd锟烫屯\xc0-\xff]")
_MOJIBAKE = re.compile("\ufffd|锟斤拷|烫烫烫|屯屯屯|ï»¿|ï¿½|[ÃÂ][\x80-\xbf]|[äåæçèé][\x80-\xbf»¼½¾¿¡-¹]{2}")


def garbled(text: str) -> str | None:
    """Text whose encoding was lost: more than one replacement sequence in 200 characters."""
    if _SUSPECT.search(text):
        lost = len(_MOJIBAKE.findall(text))
        if lost > 2 and 200 * lost > len(text):
            return "garbled"
    return None


def numeric_table(most: float) -> Filter:
    """Documents whose digits are more than this share: tables that lost their words."""

    def check(text: str) -> str | None:
        # One byte a character of ASCII, three a Chinese one: bytes bound the ASCII characters, and those the digits.
        if len(text) < _ENOUGH or len(text.encode()) >= (3 - 2 * most) * len(text):
            return None
        digits = sum(map(text.count, "0123456789"))
        return "numeric_table" if digits > most * _visible(text) else None

    return check


def symbols(most: float) -> Filter:
    """Documents whose punctuation and symbols are more than this share."""

    def check(text: str) -> str | None:
        if len(text) < _ENOUGH:
            return None
        return "symbols" if len(_SYMBOL.findall(text)) > most * _visible(text) else None

    return check


def language(least: float) -> Filter:
    """Documents whose letters are Chinese in less than this share (digits and punctuation are no letters)."""

    def check(text: str) -> str | None:
        # There are no more letters than characters, and most Chinese ones are counted in an eighth of the time.
        if len(text) < _ENOUGH or _begun_as_chinese(text.encode()) >= least * len(text):
            return None
        letters = len(_NOT_A_LETTER.sub("", text))
        chinese = len(_NOT_CHINESE.sub("", text))
        return "language" if chinese < least * letters else None

    return check


def short_lines(most: float) -> Filter:
    """Documents of ten lines or more of which more than this share is shorter than 10 characters: menus, tag clouds."""

    def check(text: str) -> str | None:
        if text.count("\n") < _ENOUGH_LINES - 1:
            return None
        lines = [line for line in text.split("\n") if line]
        short = sum(len(line) < _SHORT_LINE for line in lines)
        return "short_lines" if len(lines) >= _ENOUGH_LINES and short > most * len(lines) else None

    return check


def bad_keywords(words: frozenset[str], limit: int) -> Filter:
    """Documents that contain at least `limit` different words of the list (Aho-Corasick: one pass for any list)."""
    import ahocorasick  # only recipes with a list

    automaton: Any = ahocorasick.Automaton()
    for word in sorted(words):
        automaton.add_word(word, word)
    automaton.make_automaton()

    def check(text: str) -> str | None:
        found: set[str] = set()
        for _, word in automaton.iter(text):
            found.add(word)
            if len(found) >= limit:
                return "bad_keyword"
        return None

    return check


def read_keywords(path: Path, key: str) -> frozenset[str]:
    """The words of a list: one a line, # starts a comment. Raises UserError for a file without words."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: cannot read {path}", evidence=str(error), fix="give a UTF-8 text file") from None
    words = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not words:
        raise UserError(f"{key}: {path} holds no word", fix="write one word a line, or take the key out")
    return words


def _begun_as_chinese(data: bytes) -> int:
    """Characters U+4000 to U+9FFF of UTF-8 text: all but the rare Chinese ones, none of another script."""
    return len(data) - len(data.translate(None, b"\xe4\xe5\xe6\xe7\xe8\xe9"))


def _visible(text: str) -> int:
    return sum(map(len, text.split()))
