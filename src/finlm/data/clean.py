"""What happens to a row's text: the changes and filters of data.clean, in order, each with a name.

A filter returns a reason and the document is dropped under it; counts by reason and samples are kept by the documents
step. Broken mark-up goes first, since every later rule counts characters; filters come last.

Recipes say `clean: none` for text that is used as it is: then only the one spelling of clean_text.normalise is made.
Perplexity and duplicates need more than one document's text; they have steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finlm.data import clean_pii, clean_rules, clean_text
from finlm.data.clean_text import normalise
from finlm.recipe.schema_clean import Clean

VERSION = 4


class Cleaner:
    """Maps a raw text to (clean text, None) or ("", reason); pickled as its settings.

    Raises UserError for a keyword list that cannot be read.
    """

    def __init__(self, settings: Clean) -> None:
        self.settings = settings
        self._changes = list(_changes(settings))
        self._filters = list(_filters(settings))

    def __call__(self, text: str) -> tuple[str, str | None]:
        """(clean text, None), or ("", reason) for a document to drop."""
        text = spelled = normalise(clean_text.strip_html(text) if self.settings.html else text)
        for change in self._changes:
            text = change(text)
        if text is not spelled:  # what was removed may leave blanks at the ends
            text = normalise(text)
        for judge in self._filters:
            if reason := judge(text):
                return "", reason
        return text, None

    def __reduce__(self) -> tuple[Any, ...]:
        return Cleaner, (self.settings,)


def depends_on(settings: Clean) -> dict[str, Any]:
    """What the documents of a recipe depend on here: the rules, and the words of the keyword list. Raises UserError."""
    chosen = settings.model_dump(exclude={"perplexity"})
    if settings.bad_keywords is not None:
        chosen["bad_keywords"] = sorted(_keywords(settings.bad_keywords))
    return {"version": VERSION, **chosen}


def _changes(settings: Clean) -> Iterator[Callable[[str], str]]:
    if settings.repeated_symbols:
        yield clean_text.compress_repeats
    if settings.boilerplate_lines:
        yield clean_text.drop_boilerplate
    if settings.simplified:
        yield clean_text.simplify
    if settings.punctuation:
        yield clean_text.width_of_punctuation
    if settings.mask:
        yield clean_pii.masker(settings.mask)


def _filters(settings: Clean) -> Iterator[clean_rules.Filter]:
    if settings.garbled:
        yield clean_rules.garbled
    if settings.max_digits < 1:
        yield clean_rules.numeric_table(settings.max_digits)
    if settings.max_symbols < 1:
        yield clean_rules.symbols(settings.max_symbols)
    if settings.min_chinese > 0:
        yield clean_rules.language(settings.min_chinese)
    if settings.max_short_lines < 1:
        yield clean_rules.short_lines(settings.max_short_lines)
    if settings.bad_keywords is not None:
        yield clean_rules.bad_keywords(_keywords(settings.bad_keywords), settings.bad_keyword_limit)


def _keywords(path: str) -> frozenset[str]:
    return clean_rules.read_keywords(Path(path).expanduser(), "data.clean.bad_keywords")
