"""Read the letter or number that an answer concludes with, and score answers by rules or by the user's function.

A rule reads one conclusion and never the best of several, so that naming everything earns nothing.

A letter, in this order: a first line that is the letter alone; a conclusion, as "答案是B" or "故选B", the first that
ends its sentence, else the last of the text (what follows a finished conclusion is often another question that the
model asks itself); the only option that is called right; the letter that the answer opens with as an option ("B." or
"B："); the only letter that stands alone. What is denied ("不能选A", "答案A错误") or one of several ("故选A、B")
concludes nothing.

A number: a conclusion counts ("答案：", "answer is", "####", "\\boxed{"), the last of the text, and its first number;
without a conclusion the text's last number. Amounts are compared in their unit (1.2亿元 is 12,000万元), and a fall in
words is negative (下降3.5% is -3.5%). Chinese numerals (三成) are not read. math-verify 0.9 reads 1.23亿元 as 1.23, and
no number behind 答案：.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import operator
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from finlm.base.errors import UserError
from finlm.recipe.schema_train import Term

LETTERS = "ABCDEFGH"  # of the questions of a file: some have more than four options
TOLERANCE = 0.001  # of numbers, where the term says nothing
PIECE = 10  # characters whose repetition counts
_OPTION = re.compile(rf"^([{LETTERS}])[.．、]\s*(.+?)\s*$", re.MULTILINE)
_LETTER = re.compile(rf"答案(?:是|为|：|:|\s)*[{LETTERS}](?![A-Za-z+])")
_SEPARATES = re.compile(r"[、,;\n]")


def score(term: Term, asked: str, said: str, right: str, tokens: int, most_tokens: int) -> float | None:
    """Return the score, 0 to 1, of an answer by a reward term whose rule needs no model.

    `asked`, `said` and `right` are the texts of question, answer and right answer. `tokens` is the answer's length in
    tokens, `most_tokens` its limit. None if `right` is not of the rule's type; format, length and steps do not use it.
    """
    if term.rule == "format":
        return float(re.fullmatch(str(term.pattern), said.strip(), re.DOTALL) is not None)
    if term.rule == "length":
        free = term.most or most_tokens
        over = (tokens - free) / (most_tokens - free) if most_tokens > free else 0.0
        return max(0.0, 1.0 - max(0.0, over))
    if term.rule == "steps":
        steps = check_steps(said)
        return sum(steps) / len(steps) if steps else 0.0
    if not is_right_answer(term.rule, right):
        return None
    if term.rule == "option":
        return float(find_letter(said) == find_letter(right))
    if term.rule == "words":
        return float(find_quoted_option(asked, said) == right.strip())
    if term.rule == "number":
        given, wanted = find_number(said), find_number(right)
        tolerance = TOLERANCE if term.tolerance is None else term.tolerance
        return float(given is not None and wanted is not None and are_equal(wanted, given, tolerance))
    items, expected = list_items(said), list_items(right)
    return 2 * len(items & expected) / (len(items) + len(expected)) if items else 0.0  # F1


Function = Callable[..., Any]


def read_function(path: Path, name: str) -> Function:
    """Run a Python file and return its function `name`. UserError if the file fails, AttributeError if it lacks it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise broken_function(name, _explain(error)) from error
    function: Function = getattr(module, name)
    return function


def call_function(
    function: Function, name: str, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
) -> list[float | None]:
    """Return the function's value, a float or None, of each completion; UserError if it fails or returns others."""
    try:
        returned = function(prompts=prompts, completions=completions, answers=answers)
    except Exception as error:
        raise broken_function(name, _explain(error)) from error
    if isinstance(returned, (str, dict)) or not isinstance(returned, Iterable):
        raise broken_function(name, f"it returned {returned!r:.80}")
    values = list(returned)
    if len(values) != len(completions):
        raise broken_function(name, f"it returned {len(values)} values for {len(completions)} answers")
    for value in values:
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise broken_function(name, f"it returned {value!r:.80} for an answer")
    return [None if value is None else float(value) for value in values]


def broken_function(name: str, evidence: str) -> UserError:
    """Return, without raising it, the UserError of a function that failed or returned no number for each answer."""
    return UserError(
        f"grpo.reward: the function {name} cannot score answers",
        evidence=evidence,
        fix="it gets lists of prompts, completions and answers, and returns a finite number, or None, for each",
    )


def _explain(error: Exception) -> str:
    """Return the error's type and message as text, with the line of code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (line {last.lineno} of {Path(last.filename).name}: {last.line})"


def check_function() -> None:
    """Call the function that stdin names; print {"evidence": what is wrong with it, or ""} as JSON.

    stdin has file, name, prompt and right as JSON; the function gets the right answer and an empty one. What the file
    prints goes to stderr. Run it in a process of its own, as the file is the user's. AttributeError without `name`.
    """
    asked, evidence = json.load(sys.stdin), ""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            function = read_function(Path(asked["file"]), asked["name"])
            call_function(function, asked["name"], [asked["prompt"]] * 2, [asked["right"], ""], [asked["right"]] * 2)
        except UserError as error:
            evidence = error.evidence
    print(json.dumps({"evidence": evidence}))


def is_right_answer(rule: str, right: str) -> bool:
    """Return whether a rule can check this right answer.

    The rules option and words need a letter A to H, number needs a number, terms words; a single letter suits only the
    first two.
    """
    is_letter = len(right.strip()) == 1 and right.strip() in LETTERS
    if rule in ("option", "words"):
        return is_letter
    return not is_letter and names_answer(rule, right)


def names_answer(rule: str, said: str) -> bool:
    """Return whether an answer concludes with what the rule (option, words, number, else a list) can compare."""
    if rule == "option":
        return find_letter(said) is not None
    if rule == "words":
        return bool(said.strip())
    return find_number(said) is not None if rule == "number" else bool(list_items(said))


def find_letter(text: str) -> str | None:
    """Return the option letter A to H that an answer names, read as the evaluation reads it; None if it names none."""
    return find_named_letter(text, LETTERS)


def find_quoted_option(asked: str, said: str) -> str | None:
    """Return the letter of the only option of the question whose words are in the answer; None for none or several.

    Ignores an option whose words are part of another quoted option's ("5%" in "15%"), and the letter that the answer
    concludes with.
    """
    options, said = dict(_OPTION.findall(asked)), _LETTER.sub("", said)
    quoted = {letter: words for letter, words in options.items() if words in said}
    longest = [name for name, words in quoted.items() if not any(words in o and words != o for o in quoted.values())]
    return str(longest[0]) if len(longest) == 1 else None


def repetition(text: str) -> float:
    """Return the share of a text's stretches of PIECE characters that occur earlier in it; 0 for a shorter text."""
    pieces = [text[start : start + PIECE] for start in range(len(text) - PIECE + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


def list_items(text: str) -> set[str]:
    """Return the items, divided by 、 , ; or line ends, after the last conclusion, or of the whole text without one."""
    text = unicodedata.normalize("NFKC", text)
    concluded = [match.end() for match in CONCLUDES.finditer(text)]
    rest = text[concluded[-1] :] if concluded else text
    return {item.strip(" .。\t") for item in _SEPARATES.split(rest)} - {""}


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
    """The patterns of find_named_letter() and find_decided_letter() for some letters."""

    whole: re.Pattern[str]
    line: re.Pattern[str]
    concludes: re.Pattern[str]
    ends: re.Pattern[str]
    right: re.Pattern[str]
    opens: re.Pattern[str]
    alone: re.Pattern[str]


@cache
def _patterns(letters: str) -> _Patterns:
    """Return the compiled patterns that read one of these letters in an answer; cached."""
    capital, either = f"[{letters}]", f"[{letters}{letters.lower()}]"
    several = rf"[ \t]*(?:[、/和与或及]|还是)[ \t]*{capital}(?![A-Za-z])"
    single = rf"(?![A-Za-z])(?!{several})(?!{_CLOSE}{_WRONG})"
    return _Patterns(
        re.compile(rf"{_WRAP}({either})[.．。]?{_CLOSE}\n?"),
        re.compile(rf"{_WRAP}({capital}){_CLOSE}\n"),
        re.compile(
            rf"{_DENIED}(?:{_CONCLUDES}{_WRAP}(?:选项|选)?{_WRAP}(?P<letter>{either})"
            rf"|{_SAYS}{_WRAP}(?:(?i:option)\s+)?(?P<other>{capital})){single}"
        ),
        # "B。", "B\n" and "B. its text。"
        re.compile(rf"(?:选项|项)?{_CLOSE}(?:[.．、:：][^\n。！？，；,;?!]{{0,100}})?[。！!\n]"),
        re.compile(rf"(?<![A-Za-z、和与或及])({capital})(?:{_RIGHT})"),
        # "A。" may be the credit grade A, which an answer can begin with before it names its letter.
        re.compile(rf"^{_WRAP}({capital})(?=[.．、:：,，)）\]】\s])(?!{several})(?!\s*[,，]\s*{capital}(?![A-Za-z]))"),
        re.compile(rf"(?<![A-Za-z])({capital})(?![A-Za-z])"),
    )


def find_decided_letter(text: str, letters: str) -> str | None:
    """Return the letter, one of `letters`, that `text` names and no text after it can change; None if there is none."""
    patterns = _patterns(letters)
    if line := patterns.line.match(text):
        return line[1]
    ended = (match for match in _find_conclusions(patterns, text) if patterns.ends.match(text, match.end()))
    return next(map(_matched_letter, ended), None)


def find_named_letter(text: str, letters: str) -> str | None:
    """Return the letter, one of `letters`, that a whole answer names; None when it names none, or several."""
    patterns = _patterns(letters)
    if whole := patterns.whole.fullmatch(text):
        return whole[1].upper()
    concluded = [_matched_letter(match) for match in _find_conclusions(patterns, text)]
    letter = find_decided_letter(text, letters) or (concluded[-1] if concluded else None)
    if letter:
        return letter
    right = set(patterns.right.findall(text))
    if len(right) == 1:
        return str(right.pop())
    if opening := patterns.opens.match(text):
        return opening[1]
    denied = {_matched_letter(match) for match in patterns.concludes.finditer(text) if match["denied"]}
    alone = set(patterns.alone.findall(text)) - denied
    return str(alone.pop()) if len(alone) == 1 else None


def _find_conclusions(patterns: _Patterns, text: str) -> list[re.Match[str]]:
    """Return the matches of conclusions that are not denied."""
    return [match for match in patterns.concludes.finditer(text) if not match["denied"]]


def _matched_letter(match: re.Match[str]) -> str:
    """Return the letter in upper case that a match of an option's pattern holds."""
    return str(match["letter"] or match["other"]).upper()


_SCALES = {"万亿": 10**12, "千亿": 10**11, "百亿": 10**10, "亿": 10**8, "千万": 10**7, "百万": 10**6}
_SCALES |= {"万": 10**4, "千": 10**3, "trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 10**3}
_UNITS = {"%": "%", "percent": "%", "‰": "‰", "倍": ""} | dict.fromkeys(("个百分点", "百分点"), "point")
_UNITS |= dict.fromkeys(("个基点", "基点", "bp"), "bp") | dict.fromkeys(("元", "人民币", "yuan"), "元")
_UNITS |= {"美元": "美元", "usd": "美元", "港元": "港元", "股": "股", "次": "次", "年": "年"}
_UNITS |= {"个月": "月", "月": "月", "天": "天", "日": "天"}
_SCALED = ("元", "美元", "港元", "股")  # units that a bare 1.2亿 may stand for


def _one_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches any of the names, the longest first."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


_FALLS = r"(?:下降|下滑|减少|降低|缩减|亏损)(?:了|约|幅度为|率为)*\s*"
_NUMBER = re.compile(
    rf"(?P<falls>{_FALLS})?(?P<sign>(?<![\w.])[-−]\s*)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.)])\.\d+)"
    rf"\s*\\?(?P<scale>{_one_of(_SCALES)})?\s*(?P<unit>{_one_of(_UNITS)})?(?:/股)?",
    re.IGNORECASE,
)
CONCLUDES = re.compile(
    r"答案(?:(?:应该|应当|应)?(?:是|为|等于)|:|\s)*|answer(?:\s+is|\s*:|\s)+|####\s*|\\boxed\{", re.IGNORECASE
)


class Number(NamedTuple):
    """A number as it is written, and its value in its unit."""

    written: Decimal  # without scale and unit: 1.2 of 1.2亿元
    value: Decimal  # in the unit: 120,000,000
    unit: str  # empty without one
    is_scaled: bool  # 万, 亿, million
    half_place: Decimal  # half of the last decimal that is written, in the unit; 0 of a whole number


def find_number(text: str) -> Number | None:
    """Return the first number in the last conclusion's sentence; without conclusions the text's last; None for none."""
    text = unicodedata.normalize("NFKC", text)
    conclusions = list(CONCLUDES.finditer(text))
    if conclusions:
        rest = text[conclusions[-1].end() :]
        concluded = _NUMBER.search(re.split(r"[。\n]", rest, maxsplit=1)[0])
        return None if concluded is None else _to_number(concluded)
    numbers = list(_NUMBER.finditer(text))
    return _to_number(numbers[-1]) if numbers else None


def are_equal(right: Number, said: Number, tolerance: float) -> bool:
    """Return whether an answer's number has the right unit and is within `tolerance`, a share of the right number.

    A right number with decimals may be missed by half a unit of its last decimal. If the right number has neither scale
    nor unit, those of the answer are ignored and only the digits are compared.
    """
    if not right.unit and not right.is_scaled:
        missed, half = abs(right.written - said.written), right.half_place
        return missed <= max(abs(right.written) * Decimal(str(tolerance)), half)
    is_same = said.unit == right.unit or (not said.unit and said.is_scaled and right.unit in _SCALED)
    allowed = max(abs(right.value) * Decimal(str(tolerance)), right.half_place)
    return is_same and abs(right.value - said.value) <= allowed


_TERM = rf"(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?\s*(?:{_one_of(_SCALES)})?\s*(?:{_one_of(_UNITS)})?"
_EACH = re.compile(_TERM, re.IGNORECASE)
_LEFT = re.compile(rf"[-(]*{_TERM}(?:\s*\)*\s*[-+*/]\s*[-(]*{_TERM})+\)*\s*$", re.IGNORECASE)
_RIGHT_SIDE = re.compile(rf"\s*(-?{_TERM})", re.IGNORECASE)
_LEFT_CHARACTERS = 200
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "≈": "=", "，": ";"})
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def check_steps(text: str) -> list[bool]:
    """Return, for each equation in a text such as (12-10)÷10=20%, whether it is right to the last digit written.

    The left side is at most 200 characters; other = signs are skipped. Scales and percent count, or are left out on
    both sides: 3百万元-1百万元=2百万元 is right, and so is 3-1=2百万元.
    """
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS))
    judged: list[bool] = []
    begin = 0
    for sign in re.finditer("=", text):
        left = _LEFT.search(text[max(begin, sign.start() - _LEFT_CHARACTERS) : sign.start()])
        begin, right = sign.end(), _RIGHT_SIDE.match(text, sign.end())
        if left and right:
            judged.append(_is_right(left[0], right[1]))
    return judged


def _is_right(left: str, right: str) -> bool:
    """Return whether left = right holds, with scales or without; False for a left side that is no expression."""
    for is_scaled in (True, False):
        try:
            value = _compute(ast.parse("".join(_expression(left, is_scaled))))
        except (SyntaxError, ZeroDivisionError):
            return False
        said, half = _read_term(right, is_scaled)
        if abs(value - said) <= (half if "." in right or "/" in left else 0.0) + 1e-9 * max(1.0, abs(said)):
            return True
    return False


def _expression(left: str, is_scaled: bool) -> Iterator[str]:
    """Yield the parts of an equation's left side, numbers as Python writes floats (read by _read_term)."""
    end = 0
    for match in _EACH.finditer(left):
        yield left[end : match.start()].strip()
        yield repr(_read_term(match[0], is_scaled)[0])
        end = match.end()
    yield left[end:].strip()


def _read_term(text: str, is_scaled: bool) -> tuple[float, float]:
    """Return (number, half of its last written digit) of a text; with `is_scaled`, scale and percent count."""
    match = _NUMBER.fullmatch(text.strip())
    assert match is not None
    number = _to_number(match)
    scale = float(number.value / number.written) if number.written else 1.0
    factor = 0.01 if number.unit in ("%", "point") else 1.0
    half = float(number.half_place) / scale or 0.5
    return (float(number.value) * factor, half * scale * factor) if is_scaled else (float(number.written), half)


def _compute(node: Any) -> float:
    """Return the value of an expression of numbers. Raises ZeroDivisionError, and SyntaxError for anything else."""
    match node:
        case ast.Module(body=[ast.Expr(value=inner)]):
            return _compute(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return float(_OPERATIONS[type(op)](_compute(left), _compute(right)))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_compute(inner)
        case ast.Constant(value=float(value)):
            return value
    raise SyntaxError


def _to_number(match: re.Match[str]) -> Number:
    """Return the Number of a match of _NUMBER; negative after a sign or a word for a fall."""
    digits = Decimal(match["digits"].replace(",", ""))
    written = -digits if match["falls"] or match["sign"] else digits
    scale = _SCALES[match["scale"].lower()] if match["scale"] else 1
    places = len(match["digits"].partition(".")[2])
    half = Decimal(5).scaleb(-places - 1) if places else Decimal(0)
    unit = _UNITS[match["unit"].lower()] if match["unit"] else ""
    return Number(written, written * scale, unit, scale != 1, half * scale)
