"""The letter that a written answer gives: the same text always gives the same letter, or none.

In this order: a first line that is the letter alone; a conclusion, as "答案是B" or "故选B", the first that ends its
sentence, else the last of the text (what follows a finished conclusion is often another question that the model asks
itself); the only option that is called right; the letter that the answer opens with as an option ("B." or "B：");
the only letter that stands alone. What is denied ("不能选A", "答案A错误") or one of several ("故选A、B") concludes
nothing.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_WRAP = r"[\s（(【\[《「“\"'*`$\\]*+"
_CLOSE = r"[）)】\]》」”\"'*`$ \t]*+"
_DENIED = (
    r"(?P<denied>(?:不|非|勿|别|无法|没有?)(?:能够?|可以?|应该?|应当|当|会|该|要|宜|是|得|再)?|(?i:not|n't|never)\s+)?"
)
_CONCLUDES = (
    r"(?:答案|(?<![不非])正确的?(?:选项|说法|表述|一项)?(?=是|为)|选择?)(?:应该|应当|应)?(?:是|为|选择?(?!项)|：|:)*+"
)
_SAYS = r"(?i:answer|choice|correct\s+option|choose|select)(?:\s++(?:is|should\s++be))?+\s*+:?"
_WRONG = r"(?:选项|项)?(?:是|为|的)*(?:错|不对|不正确|不符|有误|吗|[?？]|\s++is\s++(?:not|wrong|incorrect))"
_RIGHT = (
    r"(?:选项|项)?(?:的?(?:说法|表述|描述|内容|观点))?(?:是|为|：|:|\s)*+(?:完全)?正确(?!吗|[?？])"
    r"|\s++is\s++(?:correct|right)"
)


class _Patterns(NamedTuple):
    whole: re.Pattern[str]
    line: re.Pattern[str]
    concludes: re.Pattern[str]
    ends: re.Pattern[str]
    right: re.Pattern[str]
    opens: re.Pattern[str]
    alone: re.Pattern[str]


@cache
def _patterns(letters: str) -> _Patterns:
    one, either = f"[{letters}]", f"[{letters}{letters.lower()}]"
    several = rf"[ \t]*(?:[、/和与或及]|还是)[ \t]*{one}(?![A-Za-z])"
    single = rf"(?![A-Za-z])(?!{several})(?!{_CLOSE}{_WRONG})"
    return _Patterns(
        re.compile(rf"{_WRAP}({either})[.．。]?{_CLOSE}\n?"),
        re.compile(rf"{_WRAP}({one}){_CLOSE}\n"),
        re.compile(
            rf"{_DENIED}(?:{_CONCLUDES}{_WRAP}(?:选项|选)?{_WRAP}(?P<letter>{either})"
            rf"|{_SAYS}{_WRAP}(?:(?i:option)\s+)?(?P<other>{one})){single}"
        ),
        # "B。", "B\n" and "B. its text。"
        re.compile(rf"(?:选项|项)?{_CLOSE}(?:[.．、:：][^\n。！？，；,;?!]{{0,100}})?[。！!\n]"),
        re.compile(rf"(?<![A-Za-z、和与或及])({one})(?:{_RIGHT})"),
        # "A。" may be the credit grade A, which an answer can begin with before it names its letter.
        re.compile(rf"^{_WRAP}({one})(?=[.．、:：,，)）\]】\s])(?!{several})(?!\s*[,，]\s*{one}(?![A-Za-z]))"),
        re.compile(rf"(?<![A-Za-z])({one})(?![A-Za-z])"),
    )


def decided(text: str, letters: str) -> str | None:
    """The letter that no further text can change; None while there is none."""
    own = _patterns(letters)
    line = own.line.match(text)
    if line:
        return line[1]
    return next((_letter(one) for one in _conclusions(own, text) if own.ends.match(text, one.end())), None)


def named(text: str, letters: str) -> str | None:
    """The letter, one of `letters`, of a whole answer; None when it names none, or several alike."""
    own = _patterns(letters)
    whole = own.whole.fullmatch(text)
    if whole:
        return whole[1].upper()
    concluded = [_letter(found) for found in _conclusions(own, text)]
    found = decided(text, letters) or (concluded[-1] if concluded else None)
    if found:
        return found
    right = set(own.right.findall(text))
    if len(right) == 1:
        return str(right.pop())
    opening = own.opens.match(text)
    if opening:
        return opening[1]
    denied = {_letter(one) for one in own.concludes.finditer(text) if one["denied"]}
    alone = set(own.alone.findall(text)) - denied
    return str(alone.pop()) if len(alone) == 1 else None


def _conclusions(own: _Patterns, text: str) -> list[re.Match[str]]:
    return [found for found in own.concludes.finditer(text) if not found["denied"]]


def _letter(found: re.Match[str]) -> str:
    return str(found["letter"] or found["other"]).upper()
