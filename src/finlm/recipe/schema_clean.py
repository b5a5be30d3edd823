"""Sections of a recipe on what is taken out of its documents: cleaning, duplicates, benchmark questions.

Defaults are safe for any finance text: they mend the form and mask personal numbers, and drop only what is no text.
What the XuanYuan reports list beyond that (punctuation, page frames, keyword lists, perplexity, near-duplicates)
is switched on by a recipe.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from finlm.recipe.section import Auto, Bytes, Fraction, Int, Positive, Section


def _list(value: Any) -> Any:
    """One value for a list of one, and none for the empty list."""
    return () if value is None or value == "none" else (value,) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_list)]
Masks = Annotated[
    tuple[Literal["id_card", "phone", "bank_card"], ...],
    Strict(False),
    BeforeValidator(_list),
]


class Perplexity(Section):
    """A character n-gram model of the user's own clean set; documents it finds too surprising are dropped."""

    clean_set: Annotated[Paths, Field(min_length=1)] = Field(
        description="Files or globs of clean JSON lines that the model is trained on."
    )
    text_field: str = Field("text", description="Key of the text in their rows.")
    order: Annotated[Int, Field(ge=2, le=5)] = Field(3, description="Characters of an n-gram.")
    clean_bytes: Bytes = Field(
        64_000_000, description="Text used of the clean set, by hash from all of its files, e.g. 64MB."
    )
    max_perplexity: Annotated[float, Field(gt=1)] | Auto = Field(
        "auto", description="Perplexity a character above which a document is dropped; auto: see sigmas."
    )
    sigmas: Annotated[float, Field(gt=0)] = Field(
        4.0, description="auto: standard deviations of log perplexity above the mean of the clean set's held-out part."
    )


class Clean(Section):
    """Changes and filters of single documents; `clean: none` switches all of them off."""

    html: bool = Field(True, description="Remove the remains of HTML: tags, scripts, entities.")
    repeated_symbols: bool = Field(True, description="Compress runs of one symbol to three, of blanks to four.")
    boilerplate_lines: bool = Field(False, description="Remove lines that are a web page's frame.")
    simplified: bool = Field(True, description="Convert documents written in traditional Chinese to simplified.")
    punctuation: bool = Field(False, description="Half-width punctuation between Chinese characters to full width.")
    mask: Masks = Field(
        ("id_card", "phone", "bank_card"),
        description="Personal numbers replaced by placeholders, in dialogues too; none = keep them.",
    )
    garbled: bool = Field(True, description="Drop documents whose encoding was lost.")
    max_digits: Fraction = Field(0.7, description="Drop documents with a larger share of digits; 1 = keep all.")
    max_symbols: Fraction = Field(0.6, description="Drop documents with a larger share of symbols; 1 = keep all.")
    min_chinese: Fraction = Field(0.0, description="Drop documents with a smaller share of Chinese letters.")
    max_short_lines: Fraction = Field(
        1.0, description="Drop documents of ten lines or more with a larger share under 10 characters; 1 = keep all."
    )
    bad_keywords: str | None = Field(None, description="File of bad words, one a line.")
    bad_keyword_limit: Positive = Field(3, description="Different bad words at which a document is dropped.")
    perplexity: Perplexity | None = Field(None, description="The statistical language model's filter.")


_OFF: dict[str, Any] = {
    "html": False,
    "repeated_symbols": False,
    "simplified": False,
    "mask": (),
    "garbled": False,
    "max_digits": 1.0,
    "max_symbols": 1.0,
}


def clean_or_none(value: Any) -> Any:
    """`clean: none` as a section with every rule off."""
    return _OFF if value is None or value == "none" else value


class Dedup(Section):
    """Documents that occur twice; `dedup: near` stands for {method: near}."""

    method: Literal["none", "exact", "near"] = Field(
        "exact", description="exact: the same normalised text; near: also MinHash near-duplicates."
    )
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        0.8, description="near: Jaccard similarity of character 5-grams from which two documents are duplicates."
    )


def method_name(value: Any) -> Any:
    """A method's name for its section."""
    return {"method": value} if isinstance(value, str) else value
