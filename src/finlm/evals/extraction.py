"""The letter of a written answer to a question with four options: what data/answer_letter.py reads, else the only
option whose text is quoted.

An answer that gives none counts as wrong and is reported as unanswered. The reference draws a random letter for it,
unseeded, which lifts a silent model to 25 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from finlm.data import answer_letter
from finlm.data.synthetic_exam import LETTERS


def decided(text: str) -> str | None:
    """The letter that no further text can change; None while there is none."""
    return answer_letter.decided(text, LETTERS)


def letter(text: str, options: Sequence[str]) -> str | None:
    """The letter of a whole answer; None when it gives none."""
    found = answer_letter.named(text, LETTERS)
    if found:
        return found
    quoted = [name for name, option in zip(LETTERS, options, strict=True) if option in text]
    return quoted[0] if len(quoted) == 1 else None
