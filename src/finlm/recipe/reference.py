"""Put a recipe's keys in words: the reference pages, and pydantic's errors as sentences for a recipe's author.

docs/recipe-reference.md and its Chinese twin have every key, generated from the schema's own descriptions by `python -m
finlm.recipe.reference`; `--check` says whether they are current. The Chinese sentences are in reference.zh.yaml; a key
without one shows the English sentence, and `--check` names it.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from finlm.base import screen
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_data import Section

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {"en": DOCS / "recipe-reference.md", "zh": DOCS / "recipe-reference.zh-CN.md"}
CHINESE = Path(__file__).with_name("reference.zh.yaml")

_HEAD = {
    "en": """# Every key of a recipe

[中文](recipe-reference.zh-CN.md). Generated from [the schema](../src/finlm/recipe/schema.py) by
`python -m finlm.recipe.reference`.

A recipe is YAML 1.2: `3e-4` is a number, `no` a word, a key twice an error. Sizes take units (`200MB`, `256GiB`),
counts do too (`3.9M`, `10B`). `--set a.b=value` overrides a key, `data.sources[0].path` reaches into a list. `base:
OTHER.yaml` inherits: mappings merge, everything else replaces. "auto" is decided by `finlm plan`, which says why.
""",
    "zh": """# 配方的全部键

[English](recipe-reference.md)。由 `python -m finlm.recipe.reference` 根据
[schema](../src/finlm/recipe/schema.py) 生成。

配方是 YAML 1.2：`3e-4` 是数字，`no` 是字符串，重复的键是错误。
字节数可以带单位（`200MB`、`256GiB`），计数也可以（`3.9M`、`10B`）。
`--set a.b=value` 覆盖一个键，`data.sources[0].path` 指向列表中的一项。
`base: OTHER.yaml` 继承另一份配方：映射合并，其余替换。
"auto" 由 `finlm plan` 决定，并说明理由。
""",
}
_WORDS = {  # English and Chinese ones of the tables
    "key": ("key", "键"),
    "value": ("value", "取值"),
    "default": ("default", "默认值"),
    "meaning": ("meaning", "含义"),
    "required": ("**required**", "**必填**"),
    "bytes": ("bytes", "字节数"),
    "count": ("count", "计数"),
    "list": ("list of {}", "{} 的列表"),
    "mapping": ("name: {}", "名称: {}"),
    "section": ("section", "小节"),
    "integer": ("integer", "整数"),
    "number": ("number", "数"),
    "text": ("text", "文本"),
    "flag": ("true, false", "true, false"),
    "any": ("value", "值"),
}


def parts() -> list[tuple[str, type[Section]]]:
    """Return [(dotted key, class)] of the recipe, whose key is "", and of every section below it, in schema order."""
    return [("", Recipe), *_below(Recipe, "")]


def _below(made_of: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield (dotted key, class) of the sections inside a section, outer ones first; [i] is a list's, .NAME a mapping's.

    `prefix`, "" or ending in a dot, begins each key.
    """
    for name, field in made_of.model_fields.items():
        for inner, suffix in _sections(field.annotation):
            yield f"{prefix}{name}{suffix}", inner
            yield from _below(inner, f"{prefix}{name}{suffix}.")


def _sections(annotation: Any, suffix: str = "") -> Iterator[tuple[type[Section], str]]:
    """Yield (section, suffix) for each section that a value may be or hold; suffix: [i] in a list, .NAME in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, suffix
        return
    origin: Any
    origin, inside = get_origin(annotation), get_args(annotation)
    for inner in inside[:1] if origin is Annotated else inside if origin is not Literal else ():
        if not isinstance(inner, str):
            yield from _sections(inner, "[i]" if origin is tuple else ".NAME" if origin is dict else suffix)


def _fields(key: str, made_of: type[Section]) -> dict[str, FieldInfo]:
    """Return {dotted key: field} of the keys of the section `key`."""
    return {f"{key}.{name}" if key else name: field for name, field in made_of.model_fields.items()}


def page(lang: str) -> str:
    """Return the whole reference page in Markdown; `lang` is en or zh."""
    words = {name: pair[lang == "zh"] for name, pair in _WORDS.items()}
    chinese = translations() if lang == "zh" else {}
    lines = [_HEAD[lang], *(f"- [`{key}`](#{_anchor(key)})" for key, _ in parts()[1:])]
    for key, made_of in parts():
        if key:
            about = chinese.get(key, _one_line(made_of.__doc__ or ""))
            lines += ["", f'<a id="{_anchor(key)}"></a>', "", f"## `{key}`", "", about]
        lines += ["", f"| {words['key']} | {words['value']} | {words['default']} | {words['meaning']} |"]
        lines.append("| --- | --- | --- | --- |")
        for full, field in _fields(key, made_of).items():
            inner, name = next(_sections(field.annotation), None), full.rpartition(".")[2]
            meaning = field.description or (_one_line(inner[0].__doc__ or "") if inner else "")
            link = f"[`{name}`](#{_anchor(full + inner[1])})" if inner else f"`{name}`"
            said = re.sub(r"</?s>", r"`\g<0>`", chinese.get(full, meaning))  # GitHub takes it for HTML
            cells = (link, _value(field, words), _default(field, words), said)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def keys() -> list[str]:
    """Return the dotted keys of all sections and fields of a recipe; each should have a Chinese sentence."""
    sections, fields = [key for key, _ in parts()[1:]], [full for part in parts() for full in _fields(*part)]
    return list(dict.fromkeys(sections + fields))


@functools.cache
def translations() -> Mapping[str, str]:
    """Return {dotted key: Chinese sentence} of reference.zh.yaml; cached."""
    return {str(key): str(text) for key, text in YAML(typ="safe").load(CHINESE.read_text(encoding="utf-8")).items()}


def meanings() -> dict[str, str]:
    """Return {English description of a key: Chinese one}, both without full stop, to translate mistakes."""
    return {
        field.description.rstrip("."): translations()[key].rstrip("。")
        for part in parts()
        for key, field in _fields(*part).items()
        if field.description and key in translations()
    }


def _value(field: FieldInfo, words: Mapping[str, str]) -> str:
    """Return in words which values a key takes; `words` are those of the language, by the names in _WORDS."""
    return _shape(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation, words)


def _shape(annotation: Any, words: Mapping[str, str]) -> str:
    """Return in words which values a type takes, as "integer > 0" or "`a`, `b`"."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        converters = {getattr(getattr(item, "func", None), "__name__", "") for item in inside[1:]}
        for name in ("bytes", "count"):
            if f"_{name}" in converters:  # of schema_data
                return words[name]
        return _shape(inside[0], words) + _bounds(inside[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return ", ".join(_shape(inner, words) for inner in inside if inner is not type(None))
    if origin is tuple:
        return words["list"].format(_shape(inside[0], words))
    if origin is dict:
        return words["mapping"].format(_shape(inside[1], words))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return words["section"]
    simple = {int: "integer", float: "number", str: "text", bool: "flag", Any: "any"}
    return words[simple[annotation]] if annotation in simple else str(annotation)


def _bounds(metadata: Sequence[Any]) -> str:
    """Return the limits of a number as text, " > 0", " 0–1" or ""; `metadata` is what Annotated or pydantic holds."""
    limits = {}
    for item in (inner for outer in metadata for inner in getattr(outer, "metadata", [outer])):
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
            if getattr(item, name, None) is not None:
                limits[sign] = getattr(item, name)
    if ">" in limits:
        limits.pop("≥", None)
    if "≥" in limits and "≤" in limits:
        return f" {limits['≥']:g}–{limits['≤']:g}"
    return "".join(f" {sign} {limits[sign]}" for sign in (">", "≥", "<", "≤") if sign in limits)


def _default(field: FieldInfo, words: Mapping[str, str]) -> str:
    """Return the table cell for a field's default: that it is required, a dash if it is empty, else in backticks."""
    if field.is_required():
        return words["required"]
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section) or value in (None, "", (), {}):
        return "–"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{_number(field, value) if isinstance(value, int | float) else value}`"


def _number(field: FieldInfo, value: float) -> str:
    """Return a number as an author would write it: 64MB and 200k where the key takes units."""
    shape = _value(field, {name: name for name in _WORDS}).partition(",")[0]
    for size, units in ((10**6, {"count": "M", "bytes": "MB"}), (10**3, {"count": "k", "bytes": "KB"})):
        if shape in units and value >= size and value % size == 0:
            return f"{int(value) // size}{units[shape]}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    """Return the first paragraph of the text as one line."""
    return re.sub(r"\s+", " ", text.strip().partition("\n\n")[0])


def _anchor(key: str) -> str:
    """Return the id of the heading of the section `key` in the page."""
    return re.sub(r"[^a-z0-9]+", "-", key.casefold()).strip("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Write both pages and return 0; with --check only print which are stale and return 1 if any is.

    Also prints the keys without a Chinese sentence, which do not change the result.
    """
    pages = {path: page(lang) for lang, path in PAGES.items()}
    stale = screen.write_pages(pages, argv, "python -m finlm.recipe.reference")
    missing = [key for key in keys() if key not in translations()]
    if missing:
        screen.say(f"{CHINESE.name} has no sentence for {', '.join(missing)}")
    return stale


Location = tuple[str | int, ...]
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
}


def dotted_key(location: Location) -> str:
    """Return a location as a dotted key: ('data', 'sources', 0, 'path') -> 'data.sources[0].path'."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def sentences(error: ValidationError) -> Iterator[tuple[Location, str]]:
    """Yield (location, sentence) for every mistake in pydantic's error about a recipe."""
    places: dict[Location, list[Any]] = {}
    for item in error.errors(include_url=False):
        places.setdefault(_known_part(item["loc"], item["type"]), []).append(item)
    for location, items in places.items():
        # pydantic counts only valid items, so a list with one bad item is "too short" as well.
        inside = any(len(other) > len(location) and other[: len(location)] == location for other in places)
        if not (inside and items[0]["type"] == "too_short"):
            yield location, _sentence(items, location)


def _known_part(location: Location, kind: str) -> Location:
    """Return pydantic's location up to the last known key, without union members; an extra_forbidden key stays."""
    model: type[Section] | None = Recipe
    for index, part in enumerate(location):
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            last_is_key = kind == "extra_forbidden" and model is not None
            return location[: index + 1] if last_is_key else location[:index]
        annotation = model.model_fields[part].annotation
        if typing.get_origin(annotation) is dict:
            return location
        model = _section(annotation)
    return location


def _section(annotation: Any) -> type[Section] | None:
    """Return the first section inside a type, or None."""
    first = next(_sections(annotation), None)
    return None if first is None else first[0]


def _sentence(items: list[Any], location: Location) -> str:
    """Return the sentence about pydantic's complaints `items`, all at one location of the recipe."""
    value, kind = items[0]["input"], items[0]["type"]
    if kind == "extra_forbidden":
        return f"unknown key{_did_you_mean(location)}"
    if kind == "missing":
        return f"is required ({_description(location)})"
    if isinstance(value, str) and _is_number(value):
        return f"expected a number, got the string {value!r}; write it without quotes"
    if kind == "value_error":
        return str(items[0]["msg"]).removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(_expected_value(item) for item in items))
    if kind == "model_type" and (names := list(_model_at(location).model_fields)):
        return f"should be {expected}, got {value!r}; known here: {', '.join(names)}"
    if said := other_programs()["values"].get(dotted_key(location), {}).get(str(value)):
        return f"{value!r} is here: {said}"
    close = difflib.get_close_matches(str(value), list(_choices(items)), n=1)
    meant = f"; did you mean {close[0]!r}?" if isinstance(value, str) and close else ""
    return f"should be {expected}, got {value!r}{meant} ({_description(location)})"


def _expected_value(item: Any) -> str:
    """Return what one of pydantic's complaints asks for, to be read after `should be`."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in EXPECTED:
        return EXPECTED[kind]
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    if kind == "string_pattern_mismatch":
        return f"like {context['pattern']}"
    if "literal" in kind:
        return str(context["expected"])
    return str(item["msg"]).removeprefix("Input should be ")


def _choices(items: list[Any]) -> Iterator[str]:
    """Yield the allowed words that pydantic's complaints name."""
    for item in items:
        if "literal" in item["type"]:
            yield from re.findall(r"'([^']*)'", item["ctx"]["expected"])
        elif item["type"] == "bool_type":
            yield from ("true", "false")


def _is_number(text: str) -> bool:
    """Return whether the text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _model_at(location: Location) -> type[Section]:
    """Return the section at a location, or the last one on the way there."""
    model: type[Section] = Recipe
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _section(model.model_fields[part].annotation) or model
    return model


def _description(location: Location) -> str:
    """Return the description of the last known key of a location, without its full stop."""
    model: type[Section] | None = Recipe
    text = "a section"
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            text = model.model_fields[part].description or text
            model = _section(model.model_fields[part].annotation)
    return text.rstrip(".")


@functools.cache
def other_names() -> dict[str, str]:
    """Return {name of a setting in other programs: dotted key of a recipe}; cached."""
    return {name: key for key, names in other_programs()["keys"].items() for name in names}


@functools.cache
def other_programs() -> dict[str, dict[str, Any]]:
    """Return the tables of other_names.yaml; cached.

    `keys` is {our dotted key: [names in other programs]}, `values` {our dotted key: {their value: advice}}, `needless`
    {name in other programs: why a recipe leaves it out}.
    """
    table: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("other_names.yaml"))
    return table


def _did_you_mean(location: Location) -> str:
    """Return the hint for an unknown key, from "; " on: our key for another program's name, else the closest key.

    A close key of the same section comes before the same key of another one, except outside of all sections. When no
    key is close, the hint lists the section's keys.
    """
    name = str(location[-1])
    foreign = name.replace("-", "_").casefold()
    if key := other_names().get(foreign):
        return f"; here it is {key} ({_description(tuple(key.split('.')))})"
    if reason := other_programs()["needless"].get(foreign):
        return f"; leave it out: {reason}"
    model = _model_at(location[:-1])
    if name.partition(":")[0] in model.model_fields and ":" in name:
        return "; write a blank after the colon"
    close = difflib.get_close_matches(name, list(model.model_fields), n=1)
    keys = dict(all_keys(Recipe, ()))
    elsewhere = [dotted for dotted, last in keys.items() if last == name]
    if close and not (elsewhere and len(location) == 1):
        return f"; did you mean {dotted_key((*location[:-1], close[0]))}?"
    elsewhere = elsewhere or [
        k for k, last in keys.items() if last in difflib.get_close_matches(name, keys.values(), 1, 0.75)
    ]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(model.model_fields)}"


def all_keys(model: type[BaseModel], prefix: Location) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, last name) of every key below the section `model` that is no section itself."""
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is None:
            yield dotted_key((*prefix, name)), name
        else:
            yield from all_keys(section, (*prefix, name))


if __name__ == "__main__":
    sys.exit(main())
