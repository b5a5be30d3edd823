"""YAML to a frozen Recipe, with every mistake at once as `file:line: dotted.key: sentence; did you mean ...`.

`base:` inherits one level: mappings merge, everything else replaces. `--set a.b=value` overrides last. The origin of
every value is kept, so that `plan` can print where it came from. YAML 1.2 through ruamel: 3e-4 is a number, `no` a
string, duplicate keys an error (PyYAML differs on all three).
"""

from __future__ import annotations

import difflib
import io
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from finlm.base.errors import UserError
from finlm.recipe import rules
from finlm.recipe.schema import Recipe

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Loaded:
    """A valid recipe and where each of its written values came from ("recipes/x.yaml:12" or "--set")."""

    recipe: Recipe
    origins: Mapping[str, str]
    path: str


@dataclass
class _Document:
    """Merged plain values with the file:line of every location."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Location, str] = field(default_factory=dict)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe. `overrides` are "a.b=value" strings. Raises UserError that lists every mistake."""
    document = _read_with_base(Path(path))
    for text in overrides:
        _override(document, text)
    problems: list[str] = []
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        problems = list(_sentences(error, document, str(path)))
    else:
        for key, sentence in rules.problems(recipe):
            problems.append(f"{_line(document, _split(key), str(path))}: {key}: {sentence}")
    if problems:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        raise UserError(
            f"{count} in the recipe {path}", evidence="\n".join(problems), fix="`finlm plan RECIPE` checks again"
        )
    leaves = {_dotted(location): where for location, where in document.lines.items() if _is_leaf(document, location)}
    return Loaded(recipe, leaves, str(path))


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key, no base."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 1000
    yaml.dump(recipe.model_dump(mode="json"), stream)
    return stream.getvalue()


def _read_with_base(path: Path) -> _Document:
    child = _read(path)
    base = child.values.pop("base", None)
    where = child.lines.pop(("base",), str(path))
    if base is None:
        return child
    if not isinstance(base, str):
        raise UserError(f"{where}: base: expected the path of a recipe, got {base!r}")
    parent = _read((path.parent / base).resolve() if not Path(base).is_absolute() else Path(base), child_of=where)
    if "base" in parent.values:
        raise UserError(
            f"{where}: base: {base} itself has a base",
            evidence=parent.lines[("base",)],
            fix="inheritance is one level deep: copy what you need",
        )
    merged = _Document(_merge(parent.values, child.values), parent.lines | child.lines)
    return merged


def _read(path: Path, child_of: str | None = None) -> _Document:
    shown = _relative(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read the recipe {shown}" if child_of is None else f"{child_of}: base: cannot read {shown}"
        raise UserError(problem, evidence=str(error), fix="recipes are in recipes/<family>/<stage>.yaml") from None
    try:
        root = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{shown}:{line}: not valid YAML: {error.problem}", evidence=error.context or "") from None
    if not isinstance(root, CommentedMap):
        raise UserError(f"{shown}:1: a recipe is a mapping of keys", evidence=f"found {type(root).__name__}")
    document = _Document()
    document.values = _plain(root, (), shown, document.lines)
    return document


def _relative(path: Path) -> str:
    """Shorter where the file lies below the current directory."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


def _plain(node: Any, location: Location, file: str, lines: dict[Location, str]) -> Any:
    """ruamel's round-trip nodes as dict / list / scalars, noting the line of each."""
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            lines[(*location, key)] = f"{file}:{node.lc.key(key)[0] + 1}"
            result[str(key)] = _plain(value, (*location, str(key)), file, lines)
        return result
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            lines[(*location, index)] = f"{file}:{node.lc.item(index)[0] + 1}"
        return [_plain(value, (*location, index), file, lines) for index, value in enumerate(node)]
    for plain in (bool, int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return node


def _merge(parent: Any, child: Any) -> Any:
    if isinstance(parent, dict) and isinstance(child, dict):
        return parent | {key: _merge(parent.get(key), value) for key, value in child.items()}
    return child


def _override(document: _Document, text: str) -> None:
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise UserError(f"--set {text}: expected key=value", fix="for example --set optim.lr=3e-4")
    try:
        value = _plain(YAML(typ="rt").load(raw), (), "--set", {})
    except MarkedYAMLError:
        value = raw  # a bare glob such as *.jsonl.gz is an alias to YAML, a string to its author
    parts = _split(key)
    node: Any = document.values
    for part in parts[:-1]:
        child = node.get(part) if isinstance(node, dict) else node[part] if isinstance(part, int) else None
        if child is None:
            child = node[part] = {}
        node = child
    try:
        node[parts[-1]] = value
    except (TypeError, IndexError, KeyError):
        raise UserError(f"--set {text}: {key} is not a place in the recipe") from None
    for location in [known for known in document.lines if known[: len(parts)] == parts]:
        del document.lines[location]
    document.lines[parts] = "--set"


def _split(key: str) -> Location:
    """'data.sources[0].path' -> ('data', 'sources', 0, 'path'); 'data.sources.0.path' works too."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _dotted(location: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _line(document: _Document, location: Location, path: str) -> str:
    """file:line of the nearest written ancestor."""
    for length in range(len(location), 0, -1):
        if location[:length] in document.lines:
            return document.lines[location[:length]]
    return f"{path}:1"


def _is_leaf(document: _Document, location: Location) -> bool:
    return not any(len(other) > len(location) and other[: len(location)] == location for other in document.lines)


def _sentences(error: ValidationError, document: _Document, path: str) -> Iterator[str]:
    """One line per mistake; a union's several complaints about one value become one."""
    seen = set()
    for item in error.errors(include_url=False):
        location = _known_part(item["loc"], item["type"])
        if location in seen:
            continue
        seen.add(location)
        yield f"{_line(document, location, path)}: {_dotted(location)}: {_sentence(item, location)}"


def _known_part(location: Location, kind: str) -> Location:
    """pydantic appends the tried type of a union to the location; cut it off."""
    model: type[BaseModel] | None = Recipe
    for index, part in enumerate(location):
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            last_is_key = kind == "extra_forbidden" and model is not None
            return location[: index + 1] if last_is_key else location[:index]
        model = _section(model.model_fields[part].annotation)
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


def _sentence(item: Any, location: Location) -> str:
    value, kind = item["input"], item["type"]
    if kind == "extra_forbidden":
        return f"unknown key{_did_you_mean(location)}"
    if kind == "missing":
        return f"is required ({_description(location)})"
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            pass
        else:
            return f"expected a number, got the string {value!r}; write it without quotes"
    expected = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if "literal" in kind or "union" in kind:
        expected = f"should be {item['ctx']['expected']}" if "expected" in item.get("ctx", {}) else expected
        close = difflib.get_close_matches(str(value), expected.replace("'", " ").split(), n=1)
        expected += f"; did you mean {close[0]!r}?" if close else ""
    return f"{expected}, got {value!r} ({_description(location)})" if "got" not in expected else expected


def _description(location: Location) -> str:
    model: type[BaseModel] | None = Recipe
    text = "a section"
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            text = model.model_fields[part].description or text
            model = _section(model.model_fields[part].annotation)
    return text.rstrip(".")


def _did_you_mean(location: Location) -> str:
    """A close key of the same section, else the same key in another one."""
    model: type[BaseModel] | None = Recipe
    for part in location[:-1]:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _section(model.model_fields[part].annotation)
    name = str(location[-1])
    close = difflib.get_close_matches(name, list(model.model_fields) if model else [], n=1)
    if close:
        return f"; did you mean {_dotted((*location[:-1], close[0]))}?"
    keys = dict(_all_keys(Recipe, ()))
    elsewhere = [dotted for dotted, last in keys.items() if last == name]
    elsewhere = elsewhere or [
        k for k, last in keys.items() if last in difflib.get_close_matches(name, keys.values(), 1)
    ]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""


def _all_keys(model: type[BaseModel], prefix: Location) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is None:
            yield _dotted((*prefix, name)), name
        else:
            yield from _all_keys(section, (*prefix, name))
