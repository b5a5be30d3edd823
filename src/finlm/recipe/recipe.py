"""YAML to a frozen Recipe, with every mistake at once as `file:line: dotted.key: sentence; did you mean ...`.

`base:` inherits one level: mappings merge, everything else replaces. `--set a.b=value` overrides last. Of the lengths
of a run, which exclude each other, the nearest one counts. The origin of every value is kept, so that `plan` can print
where it came from. YAML 1.2 through ruamel: 3e-4 is a number, `no` a string, duplicate keys an error (PyYAML differs on
all three).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from finlm.base.errors import UserError
from finlm.recipe import mistakes, parents, rules, shipped
from finlm.recipe.mistakes import Location
from finlm.recipe.schema import Recipe

# What two recipes may say differently and still train the same, from words to how a run is carried out; each list holds
# the one before it, and a key stands for all below it.
WORDS = ("name", "description", "forked_from", "expect")
SAME_NUMBERS = (
    *(*WORDS, "hosts", "launch", "hardware", "checkpoint", "record", "self_qa"),
    *("data.cache_dir", "data.num_proc"),
)
SAME_LOSS = (  # but for rounding, and for what `incidents` does about trouble
    *(*SAME_NUMBERS, "env", "zero", "incidents"),
    *("train.cpu_ranks", "train.recompute", "train.compile", "train.deterministic"),
    "train.grad_accum_dtype",
)
# An unfinished run goes on when only these were changed; what precision: auto stood for is in its plan, compared too.
SAME_RUN = (*SAME_LOSS, "eval", "batch.micro_batch", "train.precision")

# Their ~ becomes the home directory here and nowhere else: ranks, other hosts and libraries read the path as it is.
_DIRECTORIES = ("model.init_from", "data.cache_dir", "data.prepared", "zero.nvme_path", "grpo.reward", "self_qa.model")
_LENGTHS = ("steps", "tokens", "epochs")  # of train; exactly one is given
_INDEX = re.compile(r"[0-9]{1,9}")


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


def load(path: str | Path, overrides: Sequence[str] = (), parent: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a recipe. `overrides` are "a.b=value" strings; `parent` reads the recipe it starts from, as this does.

    Raises UserError that lists every mistake.
    """
    document = _read_with_base(shipped.find(Path(path)))
    for text in overrides:
        _override(document, text)
    _forget_lengths(document, [name for name in _lengths(document) if document.lines.get(("train", name)) == "--set"])
    _expand_home(document.values)
    problems: list[str] = []
    mistaken, inherited = parents.inherit(document.values, parent or load)
    problems += [f"{_line(document, _split(key), str(path))}: {key}: {sentence}" for key, sentence in mistaken]
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        for location, sentence in mistakes.sentences(error):
            where = _line(document, location, str(path))
            problems.append(f"{where}: {mistakes.dotted(location)}: {sentence}")
    else:
        for key, sentence in rules.problems(recipe):
            problems.append(f"{_line(document, _split(key), str(path))}: {key}: {sentence}")
    if problems:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        raise UserError(
            f"{count} in the recipe {path}", evidence="\n".join(problems), fix="`finlm plan RECIPE` checks again"
        )
    leaves = {
        mistakes.dotted(location): where for location, where in document.lines.items() if _is_leaf(document, location)
    } | inherited
    if changes_training(overrides):
        recipe = recipe.model_copy(update={"expect": None})
        leaves = {key: where for key, where in leaves.items() if not key.startswith("expect.")}
    return Loaded(recipe, leaves, str(path))


def changes_training(overrides: Sequence[str]) -> bool:
    """True when an override may move the loss by more than rounding, so that the recipe's `expect` does not hold."""
    return not all(is_within(text.partition("=")[0], SAME_LOSS) for text in overrides)


def is_within(key: str, keys: Sequence[str]) -> bool:
    """True for a dotted key that is one of the others, or below one."""
    return any(f"{key}.".startswith(f"{other}.") for other in keys)


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
    for own in ("expect", "forked_from"):  # measured on the parent; where the parent itself comes from
        parent.values.pop(own, None)
        parent.lines = {location: line for location, line in parent.lines.items() if location[0] != own}
    _forget_lengths(parent, _lengths(child))
    return _Document(_merge(parent.values, child.values), _merge_lines(parent.lines, child))


def _read(path: Path, child_of: str | None = None) -> _Document:
    shown = relative(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read the recipe {shown}" if child_of is None else f"{child_of}: base: cannot read {shown}"
        raise UserError(problem, evidence=str(error), fix="recipes are in recipes/<family>/<stage>.yaml") from None
    try:
        root = YAML(typ="rt").load(text)
        if not isinstance(root, CommentedMap):
            raise UserError(f"{shown}:1: a recipe is a mapping of keys", evidence=f"found {type(root).__name__}")
        document = _Document()
        document.values = _plain(root, (), shown, document.lines)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{shown}:{line}: not valid YAML: {error.problem}", evidence=error.context or "") from None
    except ReaderError as error:  # its own sentence repeats the file
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{shown}:{line}: not valid YAML: a control character", evidence=_first_line(error)) from None
    except (YAMLError, ValueError, RecursionError) as error:  # !!int abc, 2026-13-45; a list within itself
        raise UserError(f"{shown}: not valid YAML", evidence=_first_line(error)) from None
    return document


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def relative(path: Path) -> str:
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
            own = (node.lc.data or {}).get(key, [node.lc.line])  # those that << merges in have no line here
            lines[(*location, key)] = f"{file}:{own[0] + 1}"
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


def _merge_lines(parent: dict[Location, str], child: _Document) -> dict[Location, str]:
    """The child's lines over the parent's, without the parent's lines inside what the child replaces."""
    replaced = {location for location in child.lines if not isinstance(_at(child.values, location), dict)}
    kept = {
        location: line
        for location, line in parent.items()
        if not any(location[:length] in replaced for length in range(1, len(location)))
    }
    return kept | child.lines


def _lengths(document: _Document) -> list[str]:
    """The lengths of the run that a document gives."""
    train = document.values.get("train")
    return [name for name in _LENGTHS if train.get(name) is not None] if isinstance(train, dict) else []


def _forget_lengths(document: _Document, nearer: Sequence[str]) -> None:
    """Drop the lengths of the run that a single nearer one replaces; several nearer ones are a mistake to be shown."""
    for name in _lengths(document):
        if len(nearer) == 1 and name not in nearer:
            del document.values["train"][name]
            document.lines.pop(("train", name), None)


def _expand_home(values: dict[str, Any]) -> None:
    for key in _DIRECTORIES:
        section, _, name = key.partition(".")
        inside = values.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), str):
            inside[name] = os.path.expanduser(inside[name])  # noqa: PTH111 - a Hub id is no path


def _at(values: Any, location: Location) -> Any:
    for part in location:
        values = values[part] if isinstance(part, int) and isinstance(values, list) else values[str(part)]
    return values


def _override(document: _Document, text: str) -> None:
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise UserError(f"--set {text}: expected key=value", fix="for example --set optim.lr=3e-4")
    try:
        value = _plain(YAML(typ="rt").load(raw), (), "--set", {})
    except (MarkedYAMLError, ValueError):
        value = raw  # a bare glob such as *.jsonl.gz is an alias to YAML, a string to its author
    except (YAMLError, RecursionError) as error:
        raise UserError(f"--set {key}: not valid YAML", evidence=_first_line(error)) from None
    parts = _split(key)
    node: Any = document.values
    for depth, part in enumerate(parts):
        is_inside = part in range(len(node)) if isinstance(node, list) else isinstance(node, dict)
        if not is_inside:
            raise mistakes.no_place(text, parts, depth, node)
        if depth == len(parts) - 1:
            node[part] = value
            break
        child = node.get(part) if isinstance(node, dict) else node[part]
        if child is None:
            child = node[part] = {}
        node = child
    for location in [known for known in document.lines if known[: len(parts)] == parts]:
        del document.lines[location]
    document.lines[parts] = "--set"


def _split(key: str) -> Location:
    """'data.sources[0].path' -> ('data', 'sources', 0, 'path'); 'data.sources.0.path' works too."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)


def _line(document: _Document, location: Location, path: str) -> str:
    """file:line of a place, of what is written inside (a section that only --set has), of the nearest ancestor."""
    inside = [line for known, line in document.lines.items() if known[: len(location)] == location]
    if location and location not in document.lines and inside:
        return inside[0]
    for length in range(len(location), 0, -1):
        if location[:length] in document.lines:
            return document.lines[location[:length]]
    return f"{path}:1"


def _is_leaf(document: _Document, location: Location) -> bool:
    return not any(len(other) > len(location) and other[: len(location)] == location for other in document.lines)
