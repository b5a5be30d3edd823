"""Clean a row's text: the changes and filters of data.clean, in order, each with a name.

A filter takes a normalised text and returns None, or the reason why the document is dropped; counts by reason and
samples are kept by the documents step. Filters judge the form of a document, never its subject, and pass documents of
fewer than 50 characters. Broken mark-up goes first, since every later rule counts characters. `clean: none` makes only
the uniform spelling of normalize.py. Perplexity and duplicates have steps of their own.

Many texts are cleaned at once (blocks.py): frequent changes are made in arrays of all their characters, and counts of
them name the few texts that a filter has to judge. What is rare, as traditional Chinese or a line of boilerplate, sends
its text through the rules one by one. The result is that of cleaning text by text; a rule that blocks.py does not know
sees all texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base.errors import UserError
from finlm.corpus import blocks, normalize
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
_SUSPECT = re.compile(blocks.MAY_BE_GARBLED)
_MOJIBAKE = re.compile("\ufffd|锟斤拷|烫烫烫|屯屯屯|ï»¿|ï¿½|[ÃÂ][\x80-\xbf]|[äåæçèé][\x80-\xbf»¼½¾¿¡-¹]{2}")


def garbled(text: str) -> str | None:
    """Return "garbled" if over two replacement sequences, over 1 in 200 characters, show that its encoding was lost."""
    if _SUSPECT.search(text):
        lost = len(_MOJIBAKE.findall(text))
        if lost > 2 and 200 * lost > len(text):
            return "garbled"
    return None


def numeric_table(most: float, text: str) -> str | None:
    """Return "numeric_table" if more than the share `most` of a text are digits, and no words name the numbers.

    Texts of fewer than 50 characters pass. The share is of visible characters.
    """
    digits, letters, _ = _count_kinds(text)
    if len(text) < ENOUGH or digits <= most * (digits + letters):
        return None
    return "numeric_table" if digits > most * _visible(text) and not _names_numbers(text, digits) else None


def _names_numbers(text: str, digits: int) -> bool:
    """Return whether words name the numbers of a table: a `text` with `digits` digits, which has a line.

    If at least half of its lines have a word, there must be a word for every 200 digits. Else one of the first three
    lines must have two words, as a table's header has.
    """
    words = [len(_LETTERS.findall(line)) for line in text.split("\n") if line]
    named = sum(map(bool, words))
    if 2 * named < len(words):
        return max(words[:3]) > 1
    return digits <= _DIGITS_A_WORD * sum(words)


def symbols(most: float, text: str) -> str | None:
    """Return "symbols" for 50 characters or more with over the share `most` of symbols among the visible ones."""
    digits, letters, others = _count_kinds(text)
    if len(text) < ENOUGH or others * (1 - most) <= most * (digits + letters):
        return None
    return "symbols" if len(_SYMBOL.findall(text)) > most * _visible(text) else None


def language(least: float, text: str) -> str | None:
    """Return "language" if less than the share `least` of a text's letters is Chinese.

    Others count only in words of three letters or more, and if there are 50 of them: formulas and short texts pass.
    """
    if len(text) < ENOUGH or shape(text).count(b"c") >= least * len(text):
        return None
    other = sum(map(len, _WORD.findall(text)))
    chinese = len(_NOT_CHINESE.sub("", text))
    return "language" if other >= ENOUGH and chinese < least * (chinese + other) else None


def short_lines(most: float, text: str) -> str | None:
    """Return "short_lines" for a text of ten or more lines with more than the share `most` of short ones, as a menu.

    A short line has fewer than 10 characters, and no digit, tab, space, | or colon, which tables and lists have.
    """
    if text.count("\n") < ENOUGH_LINES - 1:
        return None
    lines = [line for line in text.split("\n") if line]
    short = sum(len(line) < _SHORT_LINE and not _LABELLED.search(line) for line in lines)
    return "short_lines" if len(lines) >= ENOUGH_LINES and short > most * len(lines) else None


def bad_keywords(words: frozenset[str], limit: int) -> Filter:
    """Return a filter that drops texts with at least `limit` different words of the list (Aho-Corasick, one pass)."""
    import ahocorasick  # only recipes with a list

    automaton: Any = ahocorasick.Automaton()
    for word in sorted(words):
        automaton.add_word(word, word)
    automaton.make_automaton()

    def check(text: str) -> str | None:
        words_found: set[str] = set()
        for _, word in automaton.iter(text):
            words_found.add(word)
            if len(words_found) >= limit:
                return "bad_keyword"
        return None

    return check


def read_keywords(name: str) -> frozenset[str]:
    """Return the words of the list data.clean.bad_keywords, without # lines. UserError if unreadable or empty."""
    path, key = Path(name).expanduser(), "data.clean.bad_keywords"
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
    """Maps a raw text to (clean text, None) or ("", reason). UserError for an unreadable or empty keyword list."""

    def __init__(self, settings: Clean) -> None:
        self.settings = settings
        self.changes = list(_changes(settings))
        self.filters = list(_filters(settings))

    def __call__(self, text: str) -> tuple[str, str | None]:
        """Return (clean text, None), or ("", reason) for a document to drop."""
        spelled = normalise(normalize.strip_html(text) if self.settings.html else text)
        return self.finish(spelled, self.rules)

    @property
    def rules(self) -> Rules:
        """The names of all rules that the settings ask for."""
        return frozenset(name for name, _ in (*self.changes, *self.filters))

    def finish(self, spelled: str, rules: Rules) -> tuple[str, str | None]:
        """Apply the named rules to a normalised text, and all later ones once it changed; return as __call__()."""
        text = spelled
        for name, change in self.changes:
            if name in rules or text is not spelled:
                text = change(text)
        if text is not spelled:  # what was removed may leave blanks at the ends
            text = normalise(text)
        for name, judge in self.filters:
            if (name in rules or text is not spelled) and (reason := judge(text)):
                return "", reason
        return text, None


load = lru_cache(1)(Cleaner)  # a keyword list is an automaton of megabytes


def depends_on(settings: Clean) -> dict[str, object]:
    """Return the rules and the words of the keyword list, for step keys. UserError for an unreadable or empty one."""
    chosen = settings.model_dump(exclude={"perplexity"})
    if settings.bad_keywords is not None:
        chosen["bad_keywords"] = sorted(read_keywords(settings.bad_keywords))
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
    """Yield (key of data.clean, filter) of the settings, in order. UserError for a keyword list unreadable or empty."""
    if settings.garbled:
        yield "garbled", garbled
    if settings.max_digits < 1:
        yield "max_digits", partial(numeric_table, settings.max_digits)
    if settings.max_symbols < 1:
        yield "max_symbols", partial(symbols, settings.max_symbols)
    if settings.min_chinese > 0:
        yield "min_chinese", partial(language, settings.min_chinese)
    if settings.max_short_lines < 1:
        yield "max_short_lines", partial(short_lines, settings.max_short_lines)
    if settings.bad_keywords is not None:
        yield "bad_keywords", bad_keywords(read_keywords(settings.bad_keywords), settings.bad_keyword_limit)


_FEW = 2**12  # characters: below, each text is cleaned alone, without arrays
_AT_ONCE = 2**18  # characters, whose arrays stay in the processor's cache

Cleaned = tuple[bytes, int, str | None]  # (UTF-8 of the clean text, its characters, None), or (b"", 0, reason)


def clean_texts(cleaner: Cleaner, texts: Sequence[str]) -> list[Cleaned]:
    """Return cleaner(text) for each text as Cleaned, faster than a call for each; texts must be encodable as UTF-8."""
    sizes = np.cumsum([0, *map(len, texts)])
    if sizes[-1] < _FEW:
        return [_encode(*cleaner(text)) for text in texts]
    cleaned, first = list[Cleaned](), 0
    while first < len(texts):
        last = max(first + 1, int(np.searchsorted(sizes, sizes[first] + _AT_ONCE, side="right")) - 1)
        cleaned += _clean_block(cleaner, texts[first:last])
        first = last
    return cleaned


def _encode(text: str, reason: str | None) -> Cleaned:
    """Return what a Cleaner returns as Cleaned."""
    return text.encode(), len(text), reason


def _clean_block(cleaner: Cleaner, texts: Sequence[str]) -> list[Cleaned]:
    """Return the Cleaned of each text: frequent changes in arrays of all characters, what is rare text by text."""
    changed = dict[int, str]()  # by the text's index
    rules, change = cleaner.rules, dict[str, Any](cleaner.changes)
    if cleaner.settings.html:
        texts = [normalize.strip_html(text) if "<" in text or "&" in text else text for text in texts]
    block, high = blocks.Block.of(texts, blocks.ALL if rules else blocks.SPELLING)
    alone = {number: _encode(*cleaner.finish(normalise(texts[number]), rules)) for number in high}
    spelled = block = blocks.spell(block)
    if not len(block.codes):
        return [alone.get(number) or _encode(*cleaner.finish("", rules)) for number in range(len(texts))]
    if "repeated_symbols" in rules:
        block = blocks.compress(block)
    for number in np.flatnonzero(_find_hard(cleaner, spelled, block)).tolist():
        alone[number] = _encode(*cleaner.finish(spelled[number], rules))
    if "punctuation" in rules:
        block = blocks.convert_widths(block)
    numbers = blocks.find_long_numbers(block) if "mask" in rules else np.empty(0, dtype=np.int64)
    for number in np.unique(block.text_of(numbers)).tolist():
        begin, end = block.limits[number : number + 2].tolist()
        places = (numbers[slice(*np.searchsorted(numbers, [begin, end]))] - begin).tolist()
        if number not in alone and (masked := change["mask"](text := block[number], places)) is not text:
            changed[number] = normalise(masked)
    if "repeated_symbols" in rules and (block.flags_at(block.where(blocks.LINE) - 1) & blocks.BLANK).any():
        block = blocks.spell(block)  # no-break spaces at the end of a line are blanks now
    whole, limits = block.text, block.limits.tolist()
    cleaned: list[Cleaned] = [(whole[begin:end].encode(), end - begin, None) for begin, end in pairwise(limits)]
    for number, reason in _judge(cleaner, block):
        cleaned[number] = b"", 0, reason
    for number, text in changed.items():
        cleaned[number] = _encode(text, None)
    order = list(changed)
    for place, reason in _judge(cleaner, blocks.Block.of(list(changed.values()))[0]) if changed else ():
        cleaned[order[place]] = b"", 0, reason
    return [alone.get(number, each) for number, each in enumerate(cleaned)]


def _judge(cleaner: Cleaner, block: blocks.Block) -> Iterator[tuple[int, str]]:
    """Yield (index of the text, reason) for each text of the block that a filter of the cleaner drops."""
    concerned = dict(_find_concerned(block, cleaner) if cleaner.filters else ())
    for number in np.flatnonzero(sum(concerned.values(), np.zeros(len(block.limits) - 1))).tolist():
        judges = (judge for name, judge in cleaner.filters if concerned[name][number])
        reason = next(filter(None, (judge(block[number]) for judge in judges)), None)
        if reason is not None:
            yield number, reason


def _find_hard(cleaner: Cleaner, spelled: blocks.Block, block: blocks.Block) -> blocks.Bools:
    """Return bool [texts]: which texts need the rules one after the other, from `spelled` on.

    `block` has the texts after blocks.compress(). Hard are blanks that few texts have, traditional Chinese,
    boilerplate lines, and all texts where the cleaner has a change that is not known here.
    """
    hard, rules = np.zeros(len(block.limits) - 1, dtype=np.bool_), cleaner.rules
    known = {"repeated_symbols", "boilerplate_lines", "simplified", "punctuation", "mask"}
    if not known.issuperset(name for name, _ in cleaner.changes):
        return ~hard
    if "repeated_symbols" in rules:
        blanks = spelled.where(blocks.NO_BREAK)
        at_end = blanks[spelled.is_limit(blanks) | spelled.is_limit(blanks + 1)]
        hard[spelled.text_of(np.append(at_end, spelled.where(blocks.STRANGE)))] = True
    if "simplified" in rules:
        traditional = block.count(block.where(blocks.TRADITIONAL))
        hard |= (traditional > 0) & (traditional >= normalize.TRADITIONAL_SHARE * np.diff(block.limits))
    if "boilerplate_lines" in rules:
        hard[blocks.find_boilerplate(block)] = True
    return hard


def _find_concerned(block: blocks.Block, cleaner: Cleaner) -> Iterator[tuple[str, blocks.Bools]]:
    """Yield (filter's key in data.clean, bool [texts]: which it has to judge) for each filter of the cleaner."""
    settings, size = cleaner.settings, np.diff(block.limits)
    enough = size >= ENOUGH
    digits, others = block.count(block.where(blocks.DIGIT)), block.count(block.where(blocks.OTHER))
    words = size - others - block.count(block.where(blocks.BLANK | blocks.LINE))
    for name, _ in cleaner.filters:
        if name == "garbled":
            lost = block.count(block.where(blocks.LOST))
            yield name, (lost > 2) & (200 * lost > size)
        elif name == "max_digits":
            yield name, enough & (digits > settings.max_digits * words)
        elif name == "max_symbols":
            yield name, enough & (others * (1 - settings.max_symbols) > settings.max_symbols * words)
        elif name == "min_chinese":
            chinese = words - block.count(block.where(blocks.DIGIT | blocks.LETTER))
            yield name, enough & (chinese < settings.min_chinese * size)
        elif name == "max_short_lines":
            text, begins, ends = block.lines()
            short, full = (
                np.bincount(text[(ends > begins) & (ends - begins < most)], minlength=len(size))
                for most in (_SHORT_LINE, np.inf)
            )
            yield name, (full >= ENOUGH_LINES) & (short > settings.max_short_lines * full)
        else:
            yield name, np.ones(len(size), dtype=np.bool_)
