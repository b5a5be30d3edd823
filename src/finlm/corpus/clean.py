"""Clean a row's text: the changes and filters of data.clean, in order, each with a name.

A filter takes a normalised text and returns None, or the reason why the document is dropped; counts by reason and
samples are kept by the documents step. Filters judge the form of a document, never its subject, and pass documents of
fewer than 50 characters. Broken mark-up goes first, since every later rule counts characters. `clean: none` makes only
the uniform spelling of normalize.py. Perplexity and duplicates have steps of their own.

Many texts are cleaned at once: a few passes over all of them name the texts that a rule may concern, and the rule is
applied only to those. The patterns run in pyarrow's RE2, at 0.5 GB/s where Python's take 0.1, and tables of bytes count
the kinds of characters. Each pattern matches at least the texts that its rule changes or drops, so the result is that
of cleaning text by text; a text that a rule has changed goes through all that follow, and a rule without a pattern sees
all texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.base.errors import UserError
from finlm.corpus import normalize
from finlm.corpus.normalize import CHINESE, normalise, shape
from finlm.recipe.schema_data import Clean

Filter = Callable[[str], str | None]
Rules = frozenset[str]  # keys of data.clean

ENOUGH = 50
_SHORT_LINE = 10
ENOUGH_LINES = 10

_NOT_CHINESE = re.compile(f"[^{CHINESE}]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(rf"[^\W\d_{CHINESE}]{{3,}}")
# Without number forms (Ⅱ) and enclosed numbers (②), which name an exam's options.
_SYMBOL = re.compile("[!-/:-@\\[-`{-~\u00a1-\u00bf\u2010-\u214f\u2190-\u245f\u2500-\u2bff\u3001-\u303f\uff01-\uff65]")
_DIGITS_A_WORD = 200
_LABELLED = re.compile(r"[\d:：\t |]")
# UTF-8 read as GBK and back, and UTF-8 read as Latin-1.
_MAY_BE_GARBLED = "[\ufffd锟烫屯\xc0-\xff]"
_SUSPECT = re.compile(_MAY_BE_GARBLED)
_MOJIBAKE = re.compile("\ufffd|锟斤拷|烫烫烫|屯屯屯|ï»¿|ï¿½|[ÃÂ][\x80-\xbf]|[äåæçèé][\x80-\xbf»¼½¾¿¡-¹]{2}")


def garbled(text: str) -> str | None:
    """Return "garbled" if the text's encoding was lost, else None.

    It was lost if there are more than two replacement sequences, and more than one in 200 characters.
    """
    if _SUSPECT.search(text):
        lost = len(_MOJIBAKE.findall(text))
        if lost > 2 and 200 * lost > len(text):
            return "garbled"
    return None


def numeric_table(most: float) -> Filter:
    """Return a filter that drops texts with more than the share `most` of digits, and no words that name the numbers.

    Texts of fewer than 50 characters pass. The share is of visible characters.
    """

    def check(text: str) -> str | None:
        """Return "numeric_table" for a text to drop, else None."""
        digits, letters, _ = _count_kinds(text)
        if len(text) < ENOUGH or digits <= most * (digits + letters):
            return None
        return "numeric_table" if digits > most * _visible(text) and not _names_numbers(text, digits) else None

    return check


def _names_numbers(text: str, digits: int) -> bool:
    """Return whether words name a table's numbers.

    If at least half of its lines have a word, there must be a word for every 200 digits. Else one of the first three
    lines must have two words, as a table's header has.
    """
    words = [len(_LETTERS.findall(line)) for line in text.split("\n") if line]
    named = sum(map(bool, words))
    if 2 * named < len(words):
        return max(words[:3]) > 1
    return digits <= _DIGITS_A_WORD * sum(words)


def symbols(most: float) -> Filter:
    """Return a filter that drops texts with more than the share `most` of punctuation and symbols.

    Texts of fewer than 50 characters pass. The share is of visible characters.
    """

    def check(text: str) -> str | None:
        """Return "symbols" for a text to drop, else None."""
        digits, letters, others = _count_kinds(text)
        if len(text) < ENOUGH or others * (1 - most) <= most * (digits + letters):
            return None
        return "symbols" if len(_SYMBOL.findall(text)) > most * _visible(text) else None

    return check


def language(least: float) -> Filter:
    """Return a filter that drops texts with less than the share `least` of Chinese among their letters.

    Other letters count only in words of three or more, and only if there are 50 of them: formulas and tables pass.
    """

    def check(text: str) -> str | None:
        """Return "language" for a text to drop, else None."""
        if len(text) < ENOUGH or shape(text).count(b"c") >= least * len(text):
            return None
        other = sum(map(len, _WORD.findall(text)))
        chinese = len(_NOT_CHINESE.sub("", text))
        return "language" if other >= ENOUGH and chinese < least * (chinese + other) else None

    return check


def short_lines(most: float) -> Filter:
    """Return a filter that drops texts of ten or more lines with more than the share `most` of short lines, as menus.

    A short line has fewer than 10 characters, and no digit, tab, space, | or colon, which tables and lists have.
    """

    def check(text: str) -> str | None:
        """Return "short_lines" for a text to drop, else None."""
        if text.count("\n") < ENOUGH_LINES - 1:
            return None
        lines = [line for line in text.split("\n") if line]
        short = sum(len(line) < _SHORT_LINE and not _LABELLED.search(line) for line in lines)
        return "short_lines" if len(lines) >= ENOUGH_LINES and short > most * len(lines) else None

    return check


def bad_keywords(words: frozenset[str], limit: int) -> Filter:
    """Return a filter that drops texts with at least `limit` different words of the list (Aho-Corasick, one pass)."""
    import ahocorasick  # only recipes with a list

    automaton: Any = ahocorasick.Automaton()
    for word in sorted(words):
        automaton.add_word(word, word)
    automaton.make_automaton()

    def check(text: str) -> str | None:
        """Return "bad_keyword" for a text to drop, else None."""
        words_found: set[str] = set()
        for _, word in automaton.iter(text):
            words_found.add(word)
            if len(words_found) >= limit:
                return "bad_keyword"
        return None

    return check


def read_keywords(path: Path, key: str) -> frozenset[str]:
    """Return the words of a list file: a word per line, # starts a comment line.

    Raises UserError, naming the recipe key `key`, for a file that cannot be read or has no words.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: cannot read {path}", evidence=str(error), fix="give a UTF-8 text file") from None
    words = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not words:
        raise UserError(f"{key}: {path} holds no word", fix="write one word a line, or take the key out")
    return words


def _count_kinds(text: str) -> tuple[int, int, int]:
    """Return (digits, ASCII and Chinese letters, other visible characters) of a text."""
    kinds = shape(text)
    return kinds.count(b"0"), kinds.count(b"a") + kinds.count(b"c"), kinds.count(b"s")


def _visible(text: str) -> int:
    """Return the number of characters that are not white space."""
    return sum(map(len, text.split()))


VERSION = 6


class Cleaner:
    """Maps a raw text to (clean text, None) or ("", reason); pickled as its settings.

    Raises UserError for a keyword list that cannot be read.
    """

    def __init__(self, settings: Clean) -> None:
        self.settings = settings
        self._changes = list(_changes(settings))
        self._filters = list(_filters(settings))

    def __call__(self, text: str) -> tuple[str, str | None]:
        """Return (clean text, None), or ("", reason) for a document to drop."""
        return self.finish(self.spell(text), self.rules)

    @property
    def rules(self) -> Rules:
        """The names of all rules that the settings ask for."""
        return frozenset(name for name, _ in (*self._changes, *self._filters))

    def spell(self, text: str) -> str:
        """Return the text in its normal spelling (normalise), without HTML if the settings say so."""
        return normalise(normalize.strip_html(text) if self.settings.html else text)

    def finish(self, spelled: str, rules: Rules) -> tuple[str, str | None]:
        """Apply the named rules to a text from spell(), and all later rules once a rule has changed it.

        Returns (clean text, None), or ("", reason) for a document to drop.
        """
        text = spelled
        for name, change in self._changes:
            if name in rules or text is not spelled:
                text = change(text)
        if text is not spelled:  # what was removed may leave blanks at the ends
            text = normalise(text)
        for name, judge in self._filters:
            if (name in rules or text is not spelled) and (reason := judge(text)):
                return "", reason
        return text, None

    def __reduce__(self) -> tuple[Any, ...]:
        return Cleaner, (self.settings,)


@lru_cache(1)
def load(settings: Clean) -> Cleaner:
    """Return the cleaner of these settings, built once per process: a keyword list is an automaton of megabytes.

    Raises UserError as Cleaner does.
    """
    return Cleaner(settings)


def depends_on(settings: Clean) -> dict[str, object]:
    """Return what the cleaned documents depend on: the rules and the words of the keyword list, for step keys.

    Raises UserError for a keyword list that cannot be read.
    """
    chosen = settings.model_dump(exclude={"perplexity"})
    if settings.bad_keywords is not None:
        chosen["bad_keywords"] = sorted(_keywords(settings.bad_keywords))
    return {"version": VERSION, **chosen}


def _changes(settings: Clean) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield (key of data.clean, function that changes a text), in order, for the changes that the settings ask for."""
    if settings.repeated_symbols:
        yield "repeated_symbols", normalize.compress_repeats
    if settings.boilerplate_lines:
        yield "boilerplate_lines", normalize.drop_boilerplate
    if settings.simplified:
        yield "simplified", normalize.simplify
    if settings.punctuation:
        yield "punctuation", normalize.convert_widths
    if settings.mask:
        yield "mask", normalize.make_masker(settings.mask)


def _filters(settings: Clean) -> Iterator[tuple[str, Filter]]:
    """Yield (key of data.clean, filter), in order, for the filters that the settings ask for.

    Raises UserError as _keywords.
    """
    if settings.garbled:
        yield "garbled", garbled
    if settings.max_digits < 1:
        yield "max_digits", numeric_table(settings.max_digits)
    if settings.max_symbols < 1:
        yield "max_symbols", symbols(settings.max_symbols)
    if settings.min_chinese > 0:
        yield "min_chinese", language(settings.min_chinese)
    if settings.max_short_lines < 1:
        yield "max_short_lines", short_lines(settings.max_short_lines)
    if settings.bad_keywords is not None:
        yield "bad_keywords", bad_keywords(_keywords(settings.bad_keywords), settings.bad_keyword_limit)


def _keywords(path: str) -> frozenset[str]:
    """Return the words of the list data.clean.bad_keywords. Raises UserError if it cannot be read or has no words."""
    return read_keywords(Path(path).expanduser(), "data.clean.bad_keywords")


_FEW = 2**16  # characters: below, each text is cleaned alone, without pyarrow

Bools = npt.NDArray[np.bool_]
Cleaned = tuple[bytes, int, str | None]  # (UTF-8 of the clean text, its characters, None), or (b"", 0, reason)


def clean_texts(cleaner: Cleaner, texts: Sequence[str]) -> list[Cleaned]:
    """Return cleaner(text) for each text as Cleaned, faster than a call for each; texts must be encodable as UTF-8."""
    if not texts or sum(map(len, texts)) < _FEW:
        return [_encode(*cleaner(text)) for text in texts]
    block = _Block(texts)
    settings = cleaner.settings
    spelled, encoded = list(texts), block.encoded
    changed = block.matches(f"{normalize.MAY_CHANGE}|[<&]" if settings.html else normalize.MAY_CHANGE)
    for number in np.flatnonzero(changed).tolist():
        spelled[number] = cleaner.spell(texts[number])
        encoded[number] = spelled[number].encode()
    cleaned: list[Cleaned] = [(data, len(text), None) for data, text in zip(encoded, spelled, strict=True)]
    if not cleaner.rules:
        return cleaned
    if changed.any():
        block = _Block(spelled, encoded)
    rules: dict[int, set[str]] = {}
    for name, concerned in _find_concerned(block, cleaner):
        for number in np.flatnonzero(concerned).tolist():
            rules.setdefault(number, set()).add(name)
    for number, names in rules.items():
        text, reason = cleaner.finish(spelled[number], frozenset(names))
        if reason or text is not spelled[number]:
            cleaned[number] = _encode(text, reason)
    return cleaned


def _encode(text: str, reason: str | None) -> Cleaned:
    """Return what a Cleaner returns as Cleaned."""
    return text.encode(), len(text), reason


class _Block:
    """Texts end to end as UTF-8."""

    def __init__(self, texts: Sequence[str], encoded: list[bytes] | None = None) -> None:
        """Join the texts; `encoded` has them as UTF-8 where they are already."""
        import pyarrow  # 0.1 s that small corpora need not pay

        self.encoded = [text.encode() for text in texts] if encoded is None else encoded
        self.data = b"".join(self.encoded)
        self.limits = np.cumsum([0, *map(len, self.encoded)], dtype=np.int64)  # bytes: [texts + 1]
        # pyarrow.array() and .to_numpy() would import pandas, 0.4 s in each worker.
        buffers = pyarrow.py_buffer(self.limits), pyarrow.py_buffer(self.data)
        self._array: Any = pyarrow.LargeStringArray.from_buffers(len(texts), *buffers)
        self.lengths = np.array([len(text) for text in texts], dtype=np.int64)

    def matches(self, pattern: str) -> Bools:
        """Return bool [texts]: whether the text holds a match of the RE2 pattern."""
        import pyarrow.compute as compute

        matching = compute.match_substring_regex(self._array, pattern)
        bits = np.frombuffer(matching.buffers()[1], dtype=np.uint8)
        return np.unpackbits(bits, count=len(matching), bitorder="little").view(np.bool_)


def _find_concerned(block: _Block, cleaner: Cleaner) -> Iterator[tuple[str, Bools]]:
    """Yield (rule, bool [texts]: which texts it may change or drop) for each rule; repeated_symbols comes twice."""
    rules, settings = cleaner.rules, cleaner.settings
    kinds = _Kinds(block)
    patterns = {
        "repeated_symbols": normalize.MAY_HAVE_BLANKS,
        "boilerplate_lines": normalize.MAY_HAVE_BOILERPLATE,
        "simplified": normalize.MAY_BE_TRADITIONAL,
        "punctuation": normalize.MAY_HAVE_WIDTHS,
        "garbled": _MAY_BE_GARBLED,
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
    enough = block.lengths >= ENOUGH
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
        yield "max_short_lines", np.diff(np.searchsorted(ends, block.limits)) >= ENOUGH_LINES - 1
    without_pattern = rules - {*patterns, "mask", "max_digits", "max_symbols", "min_chinese", "max_short_lines"}
    yield from ((name, np.ones(len(block.lengths), dtype=np.bool_)) for name in sorted(without_pattern))


class _Kinds:
    """The class bytes of all characters of a block (see normalize.shape)."""

    def __init__(self, block: _Block) -> None:
        self.kinds = np.frombuffer(normalize.shape.of_bytes(block.data), dtype=np.uint8)
        self._limits = np.concatenate(([0], np.cumsum(block.lengths)))

    def count(self, kind: str) -> npt.NDArray[np.int64]:
        """Return how many characters of a class each text has: int64 [texts]."""
        return np.diff(np.searchsorted(np.flatnonzero(self.kinds == ord(kind)), self._limits))

    def holding(self, begins: Bools) -> Bools:
        """Return bool [texts]: whether `begins`, bool [characters], marks a character of the text."""
        is_held: Bools = np.diff(np.searchsorted(np.flatnonzero(begins), self._limits)) > 0
        return is_held


def _in_a_row(marked: Bools, count: int) -> Bools:
    """Return bool [characters]: where `count` consecutive marked characters begin, also across texts."""
    begins = marked.copy()
    for back in range(1, count):
        begins[:-back] &= marked[back:]
        begins[-back:] = False
    return begins


def _long_numbers(kinds: _Kinds) -> Bools:
    """Return bool [characters]: where four digits begin that three more follow, directly or after another character."""
    is_digit = kinds.kinds == ord("0")
    four, three = _in_a_row(is_digit, 4), _in_a_row(is_digit, 3)
    after = np.zeros_like(three)
    after[:-4] = three[4:]
    after[:-5] |= three[5:] & ~is_digit[4:-1]
    return four & after
