"""Score answers to CFLUE's extraction tasks as its own code does (utils/compute_score.py, arXiv 2405.10542).

That code reads what models of 2023 wrote. Each kind of row has a rule; a rule that misreads an answer misreads it here
too, or the scores would be no comparison.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

_EVENT, _CAUSE, ENTITY, _INDUSTRY = "金融事件抽取", "金融事件因果关系抽取", "金融事件主体抽取", "行业情感信息抽取"
_CAUSES = {
    f"{side}{name}": f"{key}_{kind}"
    for side, key in (("原因", "reason"), ("结果", "result"))
    for name, kind in (("类型", "type"), ("产品", "product"), ("地区", "region"), ("行业", "industry"))
}
_MARKS = (",", "，", "。", ".", "、", ";", "；", ":", "：", " ")


def score_extraction(part: str, right: str, said: str) -> float:
    """Return the F1 of an answer to an extraction, as CFLUE's code reads it; 0 for a sub-task that it does not know."""
    if part == ENTITY:
        return float(right in said)
    if part == _CAUSE:
        return _score_causes(read_label(part, right), said)
    if part == _EVENT:
        return _pair_f1(read_label(part, right), _read_events(said))
    if part == _INDUSTRY:
        return _pair_f1(_first_moods(read_label(part, right)), _first_moods(_read_industries(said)))
    return 0.0


def read_label(part: str, right: str) -> dict[str, str]:
    """Return the right answer of an extraction as {key: value}; of causes the first, as that code compares it alone.

    Raises KeyError, TypeError, ValueError, SyntaxError or IndexError if it is not of the sub-task's form.
    """
    label = ast.literal_eval(right) if part in (_EVENT, _CAUSE, _INDUSTRY) else {}
    if part == _EVENT:
        label = {row["role"]: row["argument"] for row in label}
    elif part == _CAUSE:
        label = {key: label[0][key] for key in _CAUSES.values()}
    if not all(isinstance(text, str) for pair in label.items() for text in pair):
        raise TypeError("a key or value that is no text")
    return dict(label)


def _score_causes(right: Mapping[str, str], said: str) -> float:
    """Return the F1 of eight named fields: precision is the share of right ones, recall the share of named ones.

    A field is right when it says that nothing is there (无, 未提及) and nothing is, or when the text from its name to
    the end of its line, line end included, is the right one. So that code counts, although a colon then makes it wrong.
    """
    named = hits = 0
    for name, key in _CAUSES.items():
        if match := re.search(f"{name}(.*?)(\n|$)", said):
            value = "".join(part for part in match.groups() if part not in _MARKS)
            named += 1
            hits += right[key] in value if re.search("未提及|无|None", value) else right[key] == value
    return 2 * hits * named / 8 / (hits + named) if hits + named else 0.0


def _pair_f1(right: Mapping[str, str], said: Mapping[str, str]) -> float:
    """Return the F1 of the pairs of `said` against those of `right`."""
    hits = len(right.items() & said.items())
    return 2 * hits / (len(right) + len(said)) if hits else 0.0


def _first_moods(moods: Mapping[str, str]) -> dict[str, str]:
    """Return {industry: the first of 正, 负, 中, 无 in its text}, without industries that have none."""
    return {name: match[0] for name, text in moods.items() if (match := re.search("[正负中无]", text))}


def _simplify(said: str) -> str:
    """Return the text with narrow punctuation, without spaces and without commas at line ends."""
    return said.translate(str.maketrans("：，；。", ":,;.", " ")).replace(",\n", "\n")


def _trim(text: str) -> str:
    """Return the text without line ends, full stops and semicolons around it, then without spaces around the rest."""
    return text.strip("\n.;").strip()


def _read_events(said: str) -> dict[str, str]:
    """Return {role: argument} of an answer in lines "role: argument", or "key1: role", "value1: argument"."""
    text = _simplify(said)
    if "value" in text:
        found = re.findall(r"key\d:(.*)\s*value\d?:?\s*(.*)", text)
    else:
        found = re.findall("(.*):(.*)", text)
        found = found[: next((place for place, (role, _) in enumerate(found) if "key" in role), None)]
    return {_trim(role): _trim(argument) for role, argument in found}


def _separators(text: str) -> list[str]:
    """Return the separators 、 : ; , and line end that the text has, the rarest first."""
    counts = Counter(letter for letter in text if letter in "、:;,\n")
    return sorted((mark for mark in "、:;,\n" if counts[mark]), key=lambda mark: counts[mark])


def _as_pairs(parts: Iterable[str], mark: str) -> dict[str, str]:
    """Return {before: behind} the mark in each part. Raises ValueError for a part that has not one mark."""
    return dict(tuple(part.split(mark)) for part in parts)  # type: ignore[misc]


def _scan_moods(text: str, between: str = r"[:\s]+", letter: str = r"\w") -> dict[str, str]:
    """Return {name: mood} wherever the text has a name, `between`, one of 正, 负, 中, 无 or | and a further letter."""
    return dict(re.findall(f"({letter}+){between}([正|负|中|无]){letter}+", text))


def _read_industries(said: str) -> dict[str, str]:
    """Return {industry: text of its mood} of an answer, in any of the forms that CFLUE's code reads."""
    text = _simplify(said)
    if match := re.match("行业:(.*)情感分类:(.*)", text, re.DOTALL):
        found = _join_industries(*(part.strip("\n.;") for part in match.groups()))
    elif "抽取结果" in text:
        match = re.match("抽取结果.*?:(.*)", text, re.DOTALL)
        found = _read_announced(_trim(match[1])) if match else _scan_moods(text)
    else:
        match = re.match("^.*结果.*?:(.*)", text, re.DOTALL)
        found = _split_twice(_trim(match[1]) if match else text)
    return found or _scan_moods(text, r"[:\s]*")


def _join_industries(names: str, moods: str) -> dict[str, str]:
    """Return {industry: mood} of a list of industries and a list of moods, each in a row of its own."""
    marks, name_marks = _separators(moods), _separators(names)
    listed = names.split(name_marks[0]) if name_marks else None
    if not marks:
        return dict.fromkeys(listed or [names], moods)
    given = moods.split(marks[0])
    if len(marks) > 1:
        return _or_scan(lambda: _as_pairs(given, ":"), moods)
    if listed is None:
        return _scan_moods(moods)
    for pattern in (".*[为是](.*)", ".*（(.*)）"):
        said = [re.search(pattern, mood, re.DOTALL) for mood in given]
        if all(said):
            return dict(zip(listed, (match[1] for match in said if match), strict=False))
    return dict(zip(listed, [*given, *["无"] * len(listed)], strict=False))


def _read_announced(text: str) -> dict[str, str]:
    """Return {industry: mood} of what follows "抽取结果:": pairs, or a list of industries with or without its moods."""
    if match := re.match("(.*)情感分类结果:(.*)", text, re.DOTALL):
        marks = _separators(match[2])
        names = text[: text.rindex("情感分类结果")].strip()
        return dict(zip_longest(names.split(marks[0]), match[2].split(marks[0]), fillvalue="无")) if marks else {}
    marks = _separators(text)
    parts = text.split(marks[0]) if marks else [text]
    if len(marks) < 2:
        return dict.fromkeys(parts, "无")
    return _or_scan(lambda: _as_pairs(parts, marks[1]), text)


def _split_twice(text: str) -> dict[str, str]:
    """Return {name: mood} of pairs, split by the rarest separator and each by the next rarest, or the other way."""
    marks = _separators(text)
    if not marks:
        return {}
    parts = [_trim(part) for part in text.split(marks[0])]
    try:
        if len(marks) == 1:
            name, mood = parts[len(parts) % 2 :]
            return {name: mood}
        return _as_pairs(parts, marks[1])
    except ValueError:
        try:
            return _as_pairs((part for part in text.split(marks[1]) if marks[0] in part), marks[0])
        except (ValueError, IndexError):
            lines = "\n".join(_trim(line) for line in text.split("\n") if line)
            return _scan_moods(lines, letter="[\u4e00-\u9fa5]")


def _or_scan(read: Callable[[], dict[str, str]], text: str) -> dict[str, str]:
    """Return what `read` returns, or the moods that a scan of the text finds when it raises ValueError."""
    try:
        return read()
    except ValueError:
        return _scan_moods(text)
