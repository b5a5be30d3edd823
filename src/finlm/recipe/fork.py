"""`finlm new`: a recipe of one's own, made from another one, that says what it was made from.

A fork inherits (`base:`) and holds only what differs. A recipe that inherits already cannot be inherited from, so it is
copied, as --copy does with any: lines and comments stay, `name` changes. Either has `forked_from: path@sha256`, which
`finlm diff RECIPE` compares with and which goes with every run of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe import recipe, shipped

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def new(name: str, parent: Path, recipes: Path = Path("recipes"), copy: bool = False) -> Path:
    """Write recipes/NAME/<the parent's file name> and give its path. Raises UserError and writes nothing otherwise."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name of a recipe", fix="small letters, digits, '.', '-' and '_', for example wider-2"
        )
    given, parent = parent, shipped.find(parent)
    loaded = recipe.load(parent)
    path = recipes / name / parent.name
    if path.exists():
        raise UserError(f"{path} exists already", fix="edit it, or choose another name")
    text = parent.read_text(encoding="utf-8")
    shown = recipe.relative(parent) if given == parent else str(given)  # not where pip put it here
    lineage = f"{shown}@{files.sha256_file(parent)[:12]}"
    own = name if path.stem == "pretrain" else f"{name}-{path.stem}"
    inherits = _entry("base").search(text) is not None
    # What lies outside the working directory may be gone or another version tomorrow.
    copy = copy or inherits or not parent.resolve().is_relative_to(Path.cwd())
    made = _copied(text, own, lineage, parent, path) if copy else _inheriting(own, lineage, parent, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    try:
        files.write_text(draft, made)
        if _read(draft) != _content(loaded):
            raise UserError(
                f"{given} cannot be copied as it is written",
                evidence="with another name it would be another recipe, or none",
                fix="begin a line with each key of its top level: name, expect, base, ...",
            )
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    return path


def _read(draft: Path) -> dict[str, Any] | None:
    """The content of a draft; None when it is no recipe."""
    try:
        return _content(recipe.load(draft))
    except UserError:
        return None


def _content(loaded: recipe.Loaded) -> dict[str, Any]:
    return loaded.recipe.model_dump(exclude={"name", "forked_from", "expect"})


def parent_of(path: Path) -> Path:
    """The recipe that the recipe at path was made from. Raises UserError when it does not say or that is gone."""
    lineage = recipe.load(path).recipe.forked_from
    if lineage is None:
        raise UserError(
            f"{path} does not say what it was made from",
            evidence="no forked_from: in it",
            fix="name the other recipe too: finlm diff OTHER " + str(path),
        )
    parent = shipped.find(Path(lineage.rpartition("@")[0]))
    if not parent.exists():
        raise UserError(f"{parent} is not there any more", evidence=f"forked_from: {lineage} in {path}")
    return parent


def _inheriting(name: str, lineage: str, parent: Path, path: Path) -> str:
    base = Path(os.path.relpath(parent.resolve(), path.parent.resolve())).as_posix()
    after = path.stem != "pretrain"
    example = f"model: {{init_from: {path.parent.as_posix()}/pretrain.yaml}}" if after else "optim: {lr: 1.0e-3}"
    lines = [
        f"# Everything that is not said here is {base}'s. What differs was chosen by us.",
        f"base: {base}",
        f"name: {name}",
        f"forked_from: {lineage}",
        "",
        "# Write what differs, for example:",
        f"# {example}",
        "",
    ]
    return "\n".join(lines)


def _copied(text: str, name: str, lineage: str, parent: Path, path: Path) -> str:
    """The parent's text with another name.

    Keys of the top level start their line, quoted or not; what is indented below them belongs to their value.
    """
    own = (
        f"# Made from {lineage.partition('@')[0]}; what differs was chosen by us.\nname: {name}\nforked_from: {lineage}"
    )
    text = _entry("forked_from").sub("", text)
    text = _entry("expect").sub("", text)  # measured on the parent
    text, found = _entry("name").subn(lambda entry: f"{own}{entry['comment'] or ''}\n", text, count=1)
    if not found:
        text = f"{own}\n{text}"

    def moved(entry: re.Match[str]) -> str:
        target = (parent.parent / YAML(typ="safe", pure=True).load(entry[0])["base"]).resolve()
        base = Path(os.path.relpath(target, path.parent.resolve())).as_posix()
        return f"base: {base}{entry['comment'] or ''}\n"

    return _entry("base").sub(moved, text, count=1)


def _entry(key: str) -> re.Pattern[str]:
    """A key of the top level with its value, over all its lines, and the comment on the first."""
    quoted = rf"""(?:{key}|"{key}"|'{key}')[ \t]*:"""
    first = rf"^{quoted}(?:[^#\n]|(?<=\S)\#)*?(?P<comment>[ \t]+\#.*)?(?:\n|\Z)"
    return re.compile(rf"{first}(?:(?:[ \t]*\n)*[ \t]+\S.*(?:\n|\Z))*", re.MULTILINE)
