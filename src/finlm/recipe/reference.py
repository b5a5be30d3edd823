"""docs/recipe-reference.md and its Chinese twin: every key of a recipe, generated from the schema's own descriptions.

`python -m finlm.recipe.reference` writes both, `--check` says whether they are current. The Chinese sentences are in
reference.zh.yaml, one a key; a key without one shows the English sentence, and `--check` names it.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from finlm.base import files, screen
from finlm.recipe import section
from finlm.recipe.schema import Recipe
from finlm.recipe.section import Section

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
_WORDS = {
    "en": {"key": "key", "value": "value", "default": "default", "meaning": "meaning", "required": "**required**"},
    "zh": {"key": "键", "value": "取值", "default": "默认值", "meaning": "含义", "required": "**必填**"},
}
_NAMES = {
    "en": {
        "bytes": "bytes",
        "count": "count",
        "list": "list of {}",
        "mapping": "name: {}",
        "section": "section",
        "integer": "integer",
        "number": "number",
        "text": "text",
        "flag": "true, false",
    },
    "zh": {
        "bytes": "字节数",
        "count": "计数",
        "list": "{} 的列表",
        "mapping": "名称: {}",
        "section": "小节",
        "integer": "整数",
        "number": "数",
        "text": "文本",
        "flag": "true, false",
    },
}


@dataclass(frozen=True)
class Part:
    """A section of the page: the keys of one mapping."""

    key: str
    made_of: type[Section]


def parts() -> list[Part]:
    """The recipe itself and every section below it, in the order of the schema."""
    return [Part("", Recipe), *_below(Recipe, "")]


def _below(made_of: type[Section], prefix: str) -> Iterator[Part]:
    for name, field in made_of.model_fields.items():
        for inner, suffix in _sections(field.annotation):
            part = Part(f"{prefix}{name}{suffix}", inner)
            yield part
            yield from _below(inner, f"{part.key}.")


def _sections(annotation: Any, suffix: str = "") -> Iterator[tuple[type[Section], str]]:
    """The sections a value may be, with how a key reaches into it: nothing, [i] or .NAME."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, suffix
        return
    origin: Any
    origin, inside = get_origin(annotation), get_args(annotation)
    for inner in inside[:1] if origin is Annotated else inside if origin is not Literal else ():
        if not isinstance(inner, str):
            yield from _sections(inner, "[i]" if origin is tuple else ".NAME" if origin is dict else suffix)


def page(lang: str) -> str:
    """The whole page in one language."""
    words, chinese = _WORDS[lang], translations() if lang == "zh" else {}
    lines = [_HEAD[lang], *(f"- [`{part.key}`](#{_anchor(part)})" for part in parts()[1:])]
    for part in parts():
        if part.key:
            about = chinese.get(part.key, _one_line(part.made_of.__doc__ or ""))
            lines += ["", f'<a id="{_anchor(part)}"></a>', "", f"## `{part.key}`", "", about]
        lines += ["", f"| {words['key']} | {words['value']} | {words['default']} | {words['meaning']} |"]
        lines.append("| --- | --- | --- | --- |")
        for name, field in part.made_of.model_fields.items():
            full = f"{part.key}.{name}" if part.key else name
            inner = next(iter(_sections(field.annotation)), None)
            meaning = field.description or (_one_line(inner[0].__doc__ or "") if inner else "")
            link = f"[`{name}`](#{_anchor(Part(full + inner[1], inner[0]))})" if inner else f"`{name}`"
            said = re.sub(r"</?s>", r"`\g<0>`", chinese.get(full, meaning))  # GitHub takes it for HTML
            cells = (link, _value(field, lang), _default(field, words["required"]), said)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def keys() -> list[str]:
    """Every dotted key and section that has a sentence."""
    found = [part.key for part in parts()[1:]]
    for part in parts():
        found += [f"{part.key}.{name}" if part.key else name for name in part.made_of.model_fields]
    return list(dict.fromkeys(found))


@functools.cache
def translations() -> Mapping[str, str]:
    """The Chinese sentences by key."""
    return {str(key): str(text) for key, text in YAML(typ="safe").load(CHINESE.read_text(encoding="utf-8")).items()}


def _value(field: FieldInfo, lang: str) -> str:
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _shape(annotation, _NAMES[lang])


def _shape(annotation: Any, names: dict[str, str]) -> str:
    """A type as its author writes it."""
    for known, name in ((section.Bytes, "bytes"), (section.Count, "count")):
        if annotation == known:
            return names[name]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        converters = [getattr(item, "func", None) for item in inside[1:]]
        if any(getattr(converter, "__name__", "") in ("_bytes", "_count") for converter in converters):
            return names["bytes" if any(c.__name__ == "_bytes" for c in converters if c) else "count"]
        return _shape(inside[0], names) + _bounds(inside[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return ", ".join(_shape(inner, names) for inner in inside if inner is not type(None))
    if origin is tuple:
        return names["list"].format(_shape(inside[0], names))
    if origin is dict:
        return names["mapping"].format(_shape(inside[1], names))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return names["section"]
    simple = {int: "integer", float: "number", str: "text", bool: "flag"}
    return names[simple[annotation]] if annotation in simple else str(annotation)


def _bounds(metadata: Sequence[Any]) -> str:
    """The limits of a number: " > 0", " 0–1"."""
    found = {}
    for item in (inner for outer in metadata for inner in getattr(outer, "metadata", [outer])):
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
            if getattr(item, name, None) is not None:
                found[sign] = getattr(item, name)
    if ">" in found:
        found.pop("≥", None)
    if "≥" in found and "≤" in found:
        return f" {found['≥']:g}–{found['≤']:g}"
    return "".join(f" {sign} {found[sign]:g}" for sign in (">", "≥", "<", "≤") if sign in found)


def _default(field: FieldInfo, required: str) -> str:
    if field.is_required():
        return required
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, Section) or value in ((), {}):
        return "–"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, str):
        return f"`{value}`" if value else "–"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"`{_number(field, value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _number(field: FieldInfo, value: float) -> str:
    """As an author would write it: 64MB and 200k where the key takes units."""
    shape = _value(field, "en").partition(",")[0]
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if shape in ("bytes", "count") and value >= size and value % size == 0:
            return f"{int(value) // size}{unit if shape == 'count' else {'M': 'MB', 'k': 'KB'}[unit]}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().partition("\n\n")[0])


def _anchor(part: Part) -> str:
    return re.sub(r"[^a-z0-9]+", "-", part.key.casefold()).strip("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check both pages; 1 when --check finds a stale one."""
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    stale = 0
    for lang, path in PAGES.items():
        text = page(lang)
        if not (path.exists() and path.read_text(encoding="utf-8") == text):
            stale += 1
            if check:
                screen.say(f"{path.name} is stale: run python -m finlm.recipe.reference")
            else:
                files.write_text(path, text)
    missing = [key for key in keys() if key not in translations()]
    if missing:
        screen.say(f"{CHINESE.name} has no sentence for {', '.join(missing)}")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
