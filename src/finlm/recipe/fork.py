"""`finlm new`: a recipe of one's own, made from another one, that says what it was made from.

A fork inherits (`base:`) and holds only what differs. A recipe that inherits already cannot be inherited from, so it is
copied, as --copy does with any: lines and comments stay, `name` changes. Either has `forked_from: path@sha256`, which
`finlm diff RECIPE` compares with and which goes with every run of it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe import recipe

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def new(name: str, parent: Path, recipes: Path = Path("recipes"), copy: bool = False) -> Path:
    """Write recipes/NAME/<the parent's file name> and give its path. Raises UserError and writes nothing otherwise."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name of a recipe", fix="small letters, digits, '.', '-' and '_', for example wider-2"
        )
    loaded = recipe.load(parent)
    path = recipes / name / parent.name
    if path.parent.exists():
        raise UserError(
            f"{path.parent} exists already",
            evidence=", ".join(sorted(file.name for file in path.parent.iterdir())) or "empty",
            fix=f"choose another name, or edit {path}",
        )
    text = parent.read_text(encoding="utf-8")
    lineage = f"{recipe.relative(parent)}@{files.sha256_file(parent)[:12]}"
    inherits = re.search(r"^base:", text, re.MULTILINE) is not None
    made = _copied(text, name, lineage, parent, path) if copy or inherits else _inheriting(name, lineage, parent, path)
    recipes.mkdir(parents=True, exist_ok=True)
    with files.new_directory(path.parent) as directory:
        files.write_text(directory / path.name, made)
        if recipe.load(directory / path.name).recipe.model_dump(exclude={"name", "forked_from", "expect"}) != (
            loaded.recipe.model_dump(exclude={"name", "forked_from", "expect"})
        ):
            raise RuntimeError(f"{path} would not be what {parent} is")
    return path


def parent_of(path: Path) -> Path:
    """The recipe that the recipe at path was made from. Raises UserError when it does not say or that is gone."""
    lineage = recipe.load(path).recipe.forked_from
    if lineage is None:
        raise UserError(
            f"{path} does not say what it was made from",
            evidence="no forked_from: in it",
            fix="name the other recipe too: finlm diff OTHER " + str(path),
        )
    parent = Path(lineage.rpartition("@")[0])
    if not parent.exists():
        raise UserError(f"{parent} is not there any more", evidence=f"forked_from: {lineage} in {path}")
    return parent


def _inheriting(name: str, lineage: str, parent: Path, path: Path) -> str:
    base = Path(os.path.relpath(parent.resolve(), path.parent.resolve())).as_posix()
    lines = [
        f"# Everything that is not said here is {base}'s. What differs was chosen by us.",
        f"base: {base}",
        f"name: {name}",
        f"forked_from: {lineage}",
        "",
        "# Write what differs, for example:",
        "# optim: {lr: 1.0e-3}",
        "",
    ]
    return "\n".join(lines)


def _copied(text: str, name: str, lineage: str, parent: Path, path: Path) -> str:
    """The parent's text with another name. Keys of the top level start their line, values that span lines do not."""
    own = f"name: {name}\nforked_from: {lineage}"
    text = re.sub(r"^forked_from:.*\n", "", text, flags=re.MULTILINE)
    text, found = re.subn(r"^name:[^#\n]*?(?=\s*(#.*)?$)", own, text, count=1, flags=re.MULTILINE)
    if not found:
        text = f"{own}\n{text}"

    def moved(line: re.Match[str]) -> str:
        target = (parent.parent / json.loads(line[2]) if line[2].startswith('"') else parent.parent / line[2]).resolve()
        return line[1] + Path(os.path.relpath(target, path.parent.resolve())).as_posix()

    return re.sub(r"^(base:\s*)(\"[^\"\n]*\"|[^\s#]+)", moved, text, count=1, flags=re.MULTILINE)
