"""Clean many texts at once: a few passes over all of them name the texts that a rule may concern; it sees only those.

The patterns run in pyarrow's RE2, at 0.5 GB/s where Python's take 0.1, and tables of bytes count the kinds of
characters. Each names at least the texts that its rule changes or drops, so the result is that of clean.Cleaner, text
by text; a text that one rule has changed goes through all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.corpus import clean, normalize

_FEW = 2**16  # characters: below, each text is cleaned alone, without pyarrow

Bools = npt.NDArray[np.bool_]
Cleaned = tuple[str, str | None]  # (clean text, None), or ("", reason)


def clean_texts(cleaner: clean.Cleaner, texts: Sequence[str]) -> list[Cleaned]:
    """Return what cleaner(text) returns for each of the texts, which UTF-8 can write."""
    if not texts or sum(map(len, texts)) < _FEW:
        return [cleaner(text) for text in texts]
    block = _Block(texts)
    settings = cleaner.settings
    spelled = list(texts)
    changed = block.matches(f"{normalize.MAY_CHANGE}|[<&]" if settings.html else normalize.MAY_CHANGE)
    for number in np.flatnonzero(changed).tolist():
        spelled[number] = cleaner.spell(texts[number])
    if not cleaner.rules:
        return [(text, None) for text in spelled]
    if changed.any():
        block = _Block(spelled)
    cleaned: list[Cleaned] = [(text, None) for text in spelled]
    rules: dict[int, set[str]] = {}
    for name, concerned in _find_concerned(block, cleaner):
        for number in np.flatnonzero(concerned).tolist():
            rules.setdefault(number, set()).add(name)
    for number, names in rules.items():
        cleaned[number] = cleaner.finish(spelled[number], frozenset(names))
    return cleaned


class _Block:
    """Texts end to end as UTF-8."""

    def __init__(self, texts: Sequence[str]) -> None:
        import pyarrow  # 0.1 s that small corpora need not pay

        self._array: Any = pyarrow.array(texts, pyarrow.large_string())
        _, ends, data = self._array.buffers()
        self.data = b"" if data is None else data.to_pybytes()
        self.limits = np.frombuffer(ends, dtype=np.int64)  # bytes: [texts + 1]
        self.lengths = np.array([len(text) for text in texts], dtype=np.int64)

    def matches(self, pattern: str) -> Bools:
        """Return, as bool [texts], which texts hold a match of a pattern of RE2."""
        import pyarrow.compute as compute

        found: Bools = compute.match_substring_regex(self._array, pattern).to_numpy(zero_copy_only=False)
        return found


def _find_concerned(block: _Block, cleaner: clean.Cleaner) -> Iterator[tuple[str, Bools]]:
    """Yield (rule, bool [texts]: which texts it may change or drop) for each of the cleaner's rules."""
    rules, settings = cleaner.rules, cleaner.settings
    kinds = _Kinds(block)
    patterns = {
        "repeated_symbols": normalize.MAY_HAVE_BLANKS,
        "boilerplate_lines": normalize.MAY_HAVE_BOILERPLATE,
        "simplified": normalize.MAY_BE_TRADITIONAL,
        "punctuation": normalize.MAY_HAVE_WIDTHS,
        "garbled": clean.MAY_BE_GARBLED,
    }
    rare = sorted(rules & {"repeated_symbols", "simplified", "garbled"})
    if rare:  # one pass for all: few texts hold any of them
        is_rare = block.matches("|".join(patterns[name] for name in rare))
        yield from ((name, is_rare) for name in rare)
    for name in sorted(rules & {"boilerplate_lines", "punctuation"}):
        yield name, block.matches(patterns[name])
    if "repeated_symbols" in rules:
        yield "repeated_symbols", kinds.holding(_in_a_row(kinds.kinds == ord("s"), 4))
    if "mask" in rules:
        yield "mask", kinds.holding(_long_numbers(kinds))
    enough = block.lengths >= clean.ENOUGH
    digits, others = kinds.count("0"), kinds.count("s")
    words = block.lengths - others - kinds.count(" ")
    if "max_digits" in rules:
        yield "max_digits", enough & (digits > settings.max_digits * words)
    if "max_symbols" in rules:
        yield "max_symbols", enough & (others * (1 - settings.max_symbols) > settings.max_symbols * words)
    if "min_chinese" in rules:
        yield "min_chinese", enough & (kinds.count("c") < settings.min_chinese * block.lengths)
    if "max_short_lines" in rules:
        ends = np.flatnonzero(np.frombuffer(block.data, dtype=np.uint8) == ord("\n"))
        yield "max_short_lines", np.diff(np.searchsorted(ends, block.limits)) >= clean.ENOUGH_LINES - 1
    if "bad_keywords" in rules:
        yield "bad_keywords", np.ones(len(block.lengths), dtype=np.bool_)


class _Kinds:
    """The kinds of all characters of a block (normalize.shape)."""

    def __init__(self, block: _Block) -> None:
        self.kinds = np.frombuffer(normalize.shape.of_bytes(block.data), dtype=np.uint8)
        self._limits = np.concatenate(([0], np.cumsum(block.lengths)))

    def count(self, kind: str) -> npt.NDArray[np.int64]:
        """Return how many characters of a kind each text has: [texts]."""
        return np.diff(np.searchsorted(np.flatnonzero(self.kinds == ord(kind)), self._limits))

    def holding(self, begins: Bools) -> Bools:
        """Return, as bool [texts], in which texts one of the characters is marked: bool [characters]."""
        found: Bools = np.diff(np.searchsorted(np.flatnonzero(begins), self._limits)) > 0
        return found


def _in_a_row(marked: Bools, count: int) -> Bools:
    """Return where `count` marked characters in a row begin, also across texts: bool [characters]."""
    begins = marked.copy()
    for back in range(1, count):
        begins[:-back] &= marked[back:]
        begins[-back:] = False
    return begins


def _long_numbers(kinds: _Kinds) -> Bools:
    """Return where seven digits begin that have a blank or a symbol at most after the fourth: bool [characters]."""
    is_digit = kinds.kinds == ord("0")
    four, three = _in_a_row(is_digit, 4), _in_a_row(is_digit, 3)
    after = np.zeros_like(three)
    after[:-4] = three[4:]
    after[:-5] |= three[5:] & ~is_digit[4:-1]
    return four & after
