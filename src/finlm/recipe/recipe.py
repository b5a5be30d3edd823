"""Load YAML as a frozen Recipe, with every mistake at once as `file:line: dotted.key: sentence; did you mean ...`.

`base:` inherits one level: mappings merge, everything else replaces. `--set a.b=value` overrides last. Of the lengths
of a run, which exclude each other, the nearest one counts. The origin of every value is kept, so that `plan` can print
where it came from. YAML 1.2 through ruamel, unlike PyYAML: 3e-4 is a number, `no` a string, duplicate keys an error.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from finlm.base import language, screen
from finlm.base.errors import UserError
from finlm.recipe import parents, reference, rules, weights
from finlm.recipe.models import refusals
from finlm.recipe.reference import Location, dotted_key
from finlm.recipe.rules import SAME_LOSS, is_within
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import terms_of

# Their ~ becomes the home directory here and nowhere else: ranks, other hosts and libraries read the path as it is.
_DIRECTORIES = ("model.init_from", "data.cache_dir", "data.prepared", "zero.nvme_path", "self_qa.model")
_LENGTHS = ("steps", "tokens", "epochs")  # of train; exactly one is given
_YAML_FIX = "indent with spaces, write a key once, and quote text that holds ': ' or begins with * & { [ or %"
_BASE_FIX = "give the file as seen from the recipe's directory, for example base: ../quickstart/pretrain.yaml"
_INDEX = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Loaded:
    """A valid recipe, and where each written value came from, by dotted key ("recipes/x.yaml:12" or "--set")."""

    recipe: Recipe
    origins: Mapping[str, str]
    path: str
    said: tuple[str, ...] = ()  # what was changed to make the values fit, for the user to know


@dataclass
class Document:
    """Merged plain values of a recipe, with the file:line of every location."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Location, str] = field(default_factory=dict)


def load(path: str | Path, overrides: Sequence[str] = (), parent: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a recipe and return it with the origins of its values.

    `overrides` are "a.b=value" strings; `parent` loads the recipe it starts from (default: load). Overrides that change
    the training remove expect:. A warm-up, mixture or suites that no longer fit are changed; Loaded.said tells it.
    Fetches config.json of a start if need be. Raises UserError that lists all mistakes in keys, or at once for an
    unreadable file, an invalid override or a start that finlm cannot use.
    """
    file = parents.find_shipped(Path(path))
    document = read_with_base(file)
    had_world = rules.has_world(document.values)
    for text in overrides:
        _override(document, text)
    _forget_lengths(document, [name for name in _lengths(document) if document.lines.get(("train", name)) == "--set"])
    said = tuple(rules.leave_world_out(document.values, document.lines)) if had_world else ()
    _expand_home(document)
    model, of_run = document.values.get("model"), file.with_name("plan.json").is_file()
    if isinstance(model, dict) and isinstance(model.get("init_from"), str):
        named = weights.fetch_description(model["init_from"], model.get("revision"))
        model["init_from"] = parents.export_of("model.init_from", named)
    mistaken, inherited = parents.inherit(document.values, parent or load, of_run=of_run)
    mistaken += [] if of_run else _fill_in_terms(document.values.get("grpo"), parent or load)
    mistakes = [(_split(key), sentence) for key, sentence in mistaken]
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        mistakes += reference.sentences(error)
    else:
        recipe, shortened = _shorten_warmup(recipe, document.lines)
        mistakes += [(_split(key), sentence) for key, sentence in rules.problems(recipe)]
    if mistakes:
        raise _mistakes(path, [f"{_line(document, at, str(path))}: {dotted_key(at)}: {said}" for at, said in mistakes])
    said = shortened + said
    said += () if of_run else (*weights.text_alone(recipe.model), *refusals.notices(recipe.model.config or {}))
    inner = {location[:length] for location in document.lines for length in range(1, len(location))}
    leaves = {dotted_key(place): where for place, where in document.lines.items() if place not in inner}
    leaves |= inherited
    if changes_training(overrides):
        recipe = recipe.model_copy(update={"expect": None})
        leaves = {key: where for key, where in leaves.items() if not key.startswith("expect.")}
    return Loaded(recipe, leaves, str(path), said)


def _mistakes(path: str | Path, problems: Sequence[str]) -> UserError:
    """Return the UserError about all problems, not raised; with Chinese messages, register keys' translations."""
    if language.current() == "zh":
        language.add(reference.meanings())
    count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    names = (re.search(r": ([^ ]+): unknown key; (?:here it is|did you mean) ([^ ?]+)", line) for line in problems)
    fix = ", ".join(f"{name[2]} instead of {name[1]}" for name in names if name)
    again = f"`{screen.program()} plan {path}` checks again"
    fix = f"write {fix}; {again}" if fix else again
    return UserError(f"{count} in the recipe {path}", evidence="\n".join(problems), fix=fix)


def changes_training(overrides: Sequence[str]) -> bool:
    """Return whether an override "a.b=value" may move the loss by more than rounding, so that `expect` is void."""
    return not all(is_within(text.partition("=")[0], SAME_LOSS) for text in overrides)


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: every key, no base."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 1000
    yaml.dump(recipe.model_dump(mode="json"), stream)
    return stream.getvalue()


def read_with_base(path: Path) -> Document:
    """Read a recipe file and merge it over its base, without the base's expect and forked_from.

    The base's train.steps, tokens or epochs give way to another one of these in the file. Raises UserError for
    unreadable files and a base with a base.
    """
    child = _read(path)
    base = child.values.pop("base", None)
    where = child.lines.pop(("base",), str(path))
    if base is None:
        return child
    if not isinstance(base, str):
        problem = f"{where}: base: expected the path of a recipe, got {base!r}"
        raise UserError(problem, fix="name one file: inheritance is one level deep")
    parent = _read(parents.find_shipped(Path(relative((path.parent / base).resolve()))), child_of=where)
    if "base" in parent.values:
        raise UserError(
            f"{where}: base: {base} itself has a base",
            evidence=parent.lines[("base",)],
            fix="inheritance is one level deep: copy what you need",
        )
    for key in ("expect", "forked_from"):  # measured on the parent; where the parent itself comes from
        parent.values.pop(key, None)
        parent.lines = {location: line for location, line in parent.lines.items() if location[0] != key}
    _forget_lengths(parent, _lengths(child))
    return Document(_merge(parent.values, child.values), _merge_lines(parent.lines, child))


def _read(path: Path, child_of: str | None = None) -> Document:
    """Read a recipe file, not its base; `child_of` is file:line of a `base:` that names it. UserError if it cannot."""
    shown = relative(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read the recipe {shown}" if child_of is None else f"{child_of}: base: cannot read {shown}"
        fix = "recipes are in recipes/<family>/<stage>.yaml" if child_of is None else _BASE_FIX
        fix = fix if isinstance(error, OSError) else "save it as UTF-8"
        raise UserError(problem, evidence=str(error), fix=fix) from None
    parsed = _parse(text, shown)
    return Document(copy.deepcopy(parsed.values), dict(parsed.lines))


@functools.lru_cache(maxsize=32)  # a command reads a recipe several times, at 0.02 s each
def _parse(text: str, shown: str) -> Document:
    """Return the values of a recipe's text, cached: do not change them. `shown` is its file in messages. UserError."""
    try:
        root = YAML(typ="rt").load(text)
        if not isinstance(root, CommentedMap):
            kind = {CommentedSeq: "a list", type(None): "nothing"}.get(type(root), "one value")
            raise UserError(
                f"{shown}:1: a recipe is a mapping of keys",
                evidence=f"the file holds {kind}",
                fix="write `name:`, `model:` and so on, or `base: OTHER.yaml` and what differs",
            )
        document = Document()
        document.values = _plain(root, (), shown, document.lines)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        near = "".join(text.split("\n")[max(0, line - 2) : line])
        wide = [mark for mark in "：，｛｝［］“”" if mark in near]
        fix = f"write the ASCII mark instead of {' '.join(wide)}" if wide else _YAML_FIX
        problem = f"{shown}:{line}: not valid YAML: {error.problem}"
        raise UserError(problem, evidence=error.context or "", fix=fix) from None
    except ReaderError as error:  # its own sentence repeats the file
        line = text.count("\n", 0, error.position) + 1
        said = str(error).partition("\n")[0]
        raise UserError(f"{shown}:{line}: not valid YAML: a control character", evidence=said) from None
    except (YAMLError, ValueError, RecursionError) as error:  # !!int abc, 2026-13-45; a list within itself
        raise UserError(f"{shown}: not valid YAML", evidence=str(error).partition("\n")[0]) from None
    return document


def relative(path: Path) -> str:
    """Return the path relative to the current directory if it lies below it, else unchanged, as text."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


def _plain(node: Any, location: Location, file: str, lines: dict[Location, str]) -> Any:
    """Return ruamel's round-trip nodes as dict / list / scalars; add {location: file:line} to `lines`.

    `location` is the node's. A value with an unknown tag becomes "TAG value". RecursionError for a list within itself.
    """
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            place = (node.lc.data or {}).get(key, [node.lc.line])  # those that << merges in have no line here
            lines[(*location, key)] = f"{file}:{place[0] + 1}"
            result[str(key)] = _plain(value, (*location, str(key)), file, lines)
        return result
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            lines[(*location, index)] = f"{file}:{node.lc.item(index)[0] + 1}"
        return [_plain(value, (*location, index), file, lines) for index, value in enumerate(node)]
    for plain in (bool, int, float, str):
        if isinstance(node, plain):
            return plain(node)
    if isinstance(node, TaggedScalar):
        return f"{node.tag.value} {node.value}"
    return node


def _merge(parent: Any, child: Any) -> Any:
    """Return the child's value over the parent's; only mappings merge."""
    if isinstance(parent, dict) and isinstance(child, dict):
        return parent | {key: _merge(parent.get(key), value) for key, value in child.items()}
    return child


def _merge_lines(parent: dict[Location, str], child: Document) -> dict[Location, str]:
    """Return the child's lines over the parent's, without the parent's lines inside what the child replaces."""
    replaced = {location for location in child.lines if not isinstance(_at(child.values, location), dict)}
    kept = {
        location: line
        for location, line in parent.items()
        if not any(location[:length] in replaced for length in range(1, len(location)))
    }
    return kept | child.lines


def _lengths(document: Document) -> list[str]:
    """Return which of train.steps, tokens and epochs a document gives."""
    train = document.values.get("train")
    return [name for name in _LENGTHS if train.get(name) is not None] if isinstance(train, dict) else []


def _forget_lengths(document: Document, nearer: Sequence[str]) -> None:
    """Remove train.steps, tokens or epochs of the document, in place, if `nearer` is exactly one other of these."""
    for name in _lengths(document):
        if len(nearer) == 1 and name not in nearer:
            del document.values["train"][name]
            document.lines.pop(("train", name), None)


def _shorten_warmup(recipe: Recipe, lines: dict[Location, str]) -> tuple[Recipe, tuple[str, ...]]:
    """Return (the recipe with a warm-up that fits the steps or tokens that --set asks for, a sentence about it if any).

    Leaves a warm-up that --set gives. `lines` are the values' origins; that of a shortened warm-up is changed in place.
    """
    train = recipe.train
    lengths = [name for name in ("steps", "tokens") if getattr(train, name) is not None]
    asked = {("train", name) for name in lengths} | ({("batch", "tokens_per_step")} if lengths == ["tokens"] else set())
    given = {location for location, origin in lines.items() if origin == "--set"}
    if not asked & given or ("optim", "warmup_steps") in given:
        return recipe, ()
    steps = train.steps or (train.tokens or 0) // recipe.batch.tokens_per_step
    shorter, origin, sentence = rules.shorter_warmup(recipe.optim.warmup_steps, steps)
    if not sentence:
        return recipe, ()
    lines[("optim", "warmup_steps")] = origin
    return _with_warmup(recipe, shorter), (sentence,)


def _with_warmup(recipe: Recipe, steps: int) -> Recipe:
    """Return a copy of the recipe with so many warm-up steps."""
    return recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"warmup_steps": steps})})


def fit_warmup(loaded: Loaded, epoch_tokens: int) -> Loaded:
    """Return the recipe with its warm-up shortened to fit the epochs that --set asks for; print that to stderr.

    Returns `loaded` unchanged if the warm-up fits, or --set asks for no epochs or gives the warm-up too. `epoch_tokens`
    are the tokens of one epoch of the prepared data.
    """
    recipe, where = loaded.recipe, loaded.origins.get
    if where("train.epochs") != "--set" or where("optim.warmup_steps") == "--set":
        return loaded
    steps = int(epoch_tokens * (recipe.train.epochs or 0)) // recipe.batch.tokens_per_step
    shorter, origin, sentence = rules.shorter_warmup(recipe.optim.warmup_steps, steps)
    if not sentence:
        return loaded
    screen.say(sentence)
    return replace(
        loaded, recipe=_with_warmup(recipe, shorter), origins={**loaded.origins, "optim.warmup_steps": origin}
    )


def _expand_home(document: Document) -> None:
    """Replace ~ in the document's directories (_DIRECTORIES) by the home directory, in place."""
    for key in _DIRECTORIES:
        section, _, name = key.partition(".")
        inside = document.values.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), str):
            inside[name] = os.path.expanduser(inside[name])  # noqa: PTH111 - a Hub id is no path


def _at(values: Any, location: Location) -> Any:
    """Return the value at a location of nested dicts and lists. Raises KeyError or IndexError if there is none."""
    for part in location:
        values = values[part] if isinstance(part, int) and isinstance(values, list) else values[str(part)]
    return values


def _override(document: Document, text: str) -> None:
    """Set a value of the document and its origin, in place, from "a.b=value". Raises UserError if it is invalid."""
    parts, value = parse_override(text)
    set_value(document.values, parts, _plain(value, (), "--set", {}), text)
    document.lines = {at: line for at, line in document.lines.items() if at[: len(parts)] != parts} | {parts: "--set"}


def parse_override(text: str) -> tuple[Location, Any]:
    """Return (location, value as ruamel's node) of "a.b[0]=value". A value that is no valid YAML is taken as text.

    Raises UserError without "=" or key, for a control character, and for a list within itself.
    """
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise UserError(f"--set {text}: expected key=value", fix="for example --set optim.lr=3e-4")
    try:
        value = YAML(typ="rt").load(raw)
        _plain(value, (), "--set", {})  # a list within itself fails here, not when it is used
    except (MarkedYAMLError, ValueError):
        value = raw  # a bare glob such as *.jsonl.gz is an alias to YAML, a string to its author
    except (YAMLError, RecursionError) as error:
        raise UserError(f"--set {key}: not valid YAML", evidence=str(error).partition("\n")[0]) from None
    return _split(key.strip()), value


def set_value(values: Any, parts: Location, value: Any, setting: str, inherited: Any = None) -> None:
    """Set the value at a location of nested mappings and lists, in place; missing mappings are made.

    `inherited` are the values that `values` will be merged over; a list that only they have is copied whole first,
    because a list replaces the inherited one. `setting` is the `--set` that errors show. Raises UserError for a
    location that goes past what is there.
    """
    node = values
    for depth, part in enumerate(parts):
        if not (part in range(len(node)) if isinstance(node, list) else isinstance(node, dict)):
            raise _no_place(setting, parts, depth, node)
        if depth == len(parts) - 1:
            node[part] = value
            return
        child = node.get(part) if isinstance(node, dict) else node[part]
        below = inherited.get(part) if isinstance(inherited, dict) else None
        if child is None:
            child = node[part] = copy.deepcopy(below) if isinstance(below, list) else {}
        node, inherited = child, below


def _no_place(setting: str, parts: Location, depth: int, there: Any) -> UserError:
    """Return the error of a `--set` whose key leads past `there`, the value after `depth` parts of its location."""
    key, _, value = setting.partition("=")
    where, last = dotted_key(parts[:depth]), parts[-1]
    if isinstance(there, list):
        evidence, fix = f"{where} is a list of {len(there)}", f"name one of its items; the first is {where}[0]"
    elif isinstance(there, str) and where.startswith("data.sources"):  # a path stands for {path: ...}
        evidence = f"{where} is the path {there!r}"
        is_path = last == "path" or isinstance(last, int)
        fix = f"--set '{where}={value if is_path else f'{{path: {there}, {last}: {value}}}'}'"
    else:
        evidence, fix = f"{where} is {there!r}, with nothing inside", f"--set {where}=VALUE"
    return UserError(f"--set {setting}: {key} is not a place in the recipe", evidence=evidence, fix=fix)


def _split(key: str) -> Location:
    """Return the location of a dotted key: a.b[0].c or a.b.0.c -> ('a', 'b', 0, 'c')."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)


def _line(document: Document, location: Location, path: str) -> str:
    """Return file:line of a location: its own, of something inside it, or of the nearest ancestor, else line 1."""
    inside = [line for known, line in document.lines.items() if known[: len(location)] == location]
    if location and location not in document.lines and inside:
        return inside[0]
    for length in range(len(location), 0, -1):
        if location[:length] in document.lines:
            return document.lines[location[:length]]
    return f"{path}:1"


def _fill_in_terms(grpo: Any, read: Callable[[str], Loaded]) -> list[tuple[str, str]]:
    """Complete the terms of grpo.reward (list, paths, hashes) in place; return [(key, mistake)]. Raises UserError."""
    if not isinstance(grpo, dict) or "reward" not in grpo:
        return []
    terms = grpo["reward"] = terms_of(grpo["reward"])
    mistakes: list[tuple[str, str]] = []
    for place, term in enumerate(terms if isinstance(terms, (list, tuple)) else ()):
        if not isinstance(term, dict) or not isinstance(term.get("path"), str):
            continue
        term["path"] = os.path.expanduser(term["path"])  # noqa: PTH111 - more than a path
        if term.get("rule") == "model" and parents.is_recipe(term["path"]):
            if (stage := read(term["path"]).recipe.stage) != "reward":
                wrong = f"{term['path']} is of stage {stage}: name one of stage reward"
                mistakes.append((f"grpo.reward[{place}].path", wrong))
        elif term.get("rule") == "model":
            term["path"] = parents.export_of("grpo.reward", term["path"])
        elif term.get("rule") == "function":
            sha256, wrong = _read_function(term["path"])
            mistakes += [(f"grpo.reward[{place}].path", wrong)] if wrong else []
            if sha256 is not None and term.setdefault("sha256", sha256) != sha256:
                mistakes.append(
                    (f"grpo.reward[{place}].sha256", f"{term['path'].rpartition(':')[0]} has the hash {sha256}")
                )
    return mistakes


def _read_function(named: str) -> tuple[str | None, str]:
    """Return (sha256 of the file, None if unreadable; mistake or "") of a function FILE.py:NAME, without running it."""
    file, _, name = named.rpartition(":")
    try:
        source = Path(file).read_bytes()
        defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except (OSError, SyntaxError, ValueError) as error:
        return None, f"{named!r} should be FILE.py:NAME of a function: {error}"
    wrong = "" if name in defined else f"{file} defines no function {name!r}; it has {', '.join(defined) or 'none'}"
    return hashlib.sha256(source).hexdigest(), wrong
