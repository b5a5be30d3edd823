"""pydantic's errors as sentences for the author of a recipe: what was expected, what was found, what was meant.

One sentence a place: the complaints of a union (`a whole number or 'auto'`) are joined. Lines are the loader's.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from finlm.base.errors import UserError
from finlm.recipe.schema import Recipe

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


def dotted(location: Location) -> str:
    """('data', 'sources', 0, 'path') -> 'data.sources[0].path'."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def no_place(setting: str, parts: Location, depth: int, there: Any) -> UserError:
    """A `--set` that goes past what the recipe has: `there`, after `depth` parts of its key."""
    key, _, value = setting.partition("=")
    where, last = dotted(parts[:depth]), parts[-1]
    if isinstance(there, list):
        evidence, fix = f"{where} is a list of {len(there)}", f"name one of its items; the first is {where}[0]"
    elif isinstance(there, str) and where.startswith("data.sources"):  # a path stands for {path: ...}
        evidence = f"{where} is the path {there!r}"
        is_path = last == "path" or isinstance(last, int)
        fix = f"--set '{where}={value if is_path else f'{{path: {there}, {last}: {value}}}'}'"
    else:
        evidence, fix = f"{where} is {there!r}, with nothing inside", f"--set {where}=VALUE"
    return UserError(f"--set {setting}: {key} is not a place in the recipe", evidence=evidence, fix=fix)


def sentences(error: ValidationError) -> Iterator[tuple[Location, str]]:
    """(place, sentence) of every mistake."""
    places: dict[Location, list[Any]] = {}
    for item in error.errors(include_url=False):
        places.setdefault(_known_part(item["loc"], item["type"]), []).append(item)
    for location, items in places.items():
        # pydantic counts only valid items, so a list with one bad item is "too short" as well.
        inside = any(len(other) > len(location) and other[: len(location)] == location for other in places)
        if not (inside and items[0]["type"] == "too_short"):
            yield location, _sentence(items, location)


def _known_part(location: Location, kind: str) -> Location:
    """pydantic appends the tried type of a union to the location; cut it off."""
    model: type[BaseModel] | None = Recipe
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


def _section(annotation: Any) -> type[BaseModel] | None:
    """The Section inside Optional[...], tuple[...] or Annotated[...], if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _section(inner)
        if found is not None:
            return found
    return None


def _sentence(items: list[Any], location: Location) -> str:
    value, kind = items[0]["input"], items[0]["type"]
    if kind == "extra_forbidden":
        return f"unknown key{_did_you_mean(location)}"
    if kind == "missing":
        return f"is required ({_description(location)})"
    if isinstance(value, str) and _is_number(value):
        return f"expected a number, got the string {value!r}; write it without quotes"
    if kind == "value_error":
        return str(items[0]["msg"]).removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
    close = difflib.get_close_matches(str(value), list(_choices(items)), n=1)
    meant = f"; did you mean {close[0]!r}?" if isinstance(value, str) and close else ""
    return f"should be {expected}, got {value!r}{meant} ({_description(location)})"


def _expected(item: Any) -> str:
    """What one complaint asks for, to be read after `should be`."""
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
    """The words that are allowed, not those of the sentence around them."""
    for item in items:
        if "literal" in item["type"]:
            yield from re.findall(r"'([^']*)'", item["ctx"]["expected"])
        elif item["type"] == "bool_type":
            yield from ("true", "false")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _description(location: Location) -> str:
    model: type[BaseModel] | None = Recipe
    text = "a section"
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            text = model.model_fields[part].description or text
            model = _section(model.model_fields[part].annotation)
    return text.rstrip(".")


def _did_you_mean(location: Location) -> str:
    """A close key of the same section, else the same key in another one; that one first outside of all sections."""
    model: type[BaseModel] | None = Recipe
    for part in location[:-1]:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _section(model.model_fields[part].annotation)
    name = str(location[-1])
    close = difflib.get_close_matches(name, list(model.model_fields) if model else [], n=1)
    keys = dict(_all_keys(Recipe, ()))
    elsewhere = [dotted for dotted, last in keys.items() if last == name]
    if close and not (elsewhere and len(location) == 1):
        return f"; did you mean {dotted((*location[:-1], close[0]))}?"
    elsewhere = elsewhere or [
        k for k, last in keys.items() if last in difflib.get_close_matches(name, keys.values(), 1)
    ]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(model.model_fields)}" if model else ""


def _all_keys(model: type[BaseModel], prefix: Location) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is None:
            yield dotted((*prefix, name)), name
        else:
            yield from _all_keys(section, (*prefix, name))
