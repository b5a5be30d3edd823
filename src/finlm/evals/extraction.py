"""The letter that a written answer gives: the same text always gives the same letter, or none.

In this order: the letter that the answer opens with as an option ("B." or "B、"); the first statement, as "答案是B";
the only letter that stands alone; the only option whose text is quoted.

An answer that gives none counts as wrong and is reported as unanswered. The reference draws a random letter for it,
unseeded, which lifts a silent model to 25 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from finlm.data.synthetic_exam import LETTERS

_WRAP = r"[\s（(【\[《「“\"'*`$\\]*"
_END = r"(?![A-Za-z])"
# "A。" may be the credit grade A, which an answer can begin with before it names its letter.
_OPENS = re.compile(rf"^{_WRAP}([A-D])(?=[.．、:：,，)）\]】\s])")
_STATES = re.compile(
    rf"(?:答案|选项|应选|故选|选择|选)(?:应该|应当|应)?(?:是|为|选|：|:)*{_WRAP}(?:选项|选)?{_WRAP}([A-D]){_END}"
    rf"|(?i:answer|option|choice)(?:\s+is)?\s*:?{_WRAP}([A-D]){_END}"
)
_ALONE = re.compile(rf"(?<![A-Za-z])([A-D]){_END}")


def decided(text: str) -> str | None:
    """The letter that no further text can change; None while there is none. The last character may still grow."""
    found = _OPENS.match(text) or _STATES.search(text)
    return _letter(found) if found and found.end() < len(text) else None


def letter(text: str, options: Sequence[str]) -> str | None:
    """The letter of a whole answer; None when it gives none."""
    found = _OPENS.match(text) or _STATES.search(text)
    if found:
        return _letter(found)
    alone = set(_ALONE.findall(text))
    if len(alone) == 1:
        return str(alone.pop())
    quoted = [name for name, option in zip(LETTERS, options, strict=True) if option in text]
    return quoted[0] if len(quoted) == 1 else None


def _letter(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group)
