"""Which files a recipe reads: globs expanded, names given, every mistake answered with what lies beside it.

Each file is a source of its own in counts and in held-out perplexity. A file is named after itself unless the recipe
names it. Nothing is read here but the directory.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from finlm.base.errors import UserError
from finlm.recipe.schema import Source

# "share": a share of the documents is held out; the embedded corpus brings a held-out file of its own instead.
Split = Literal["train", "held_out", "share"]


@dataclass(frozen=True)
class Input:
    """One file of documents."""

    source: str
    path: Path
    split: Split
    text_field: str
    sha256: str = ""  # what the recipe expects, then what the file has


def of_files(source: Source, key: str) -> list[Input]:
    """The inputs of a recipe's path. `key` is its place in the recipe, for messages. Raises UserError for no file."""
    assert source.path is not None
    paths = expand(source.path)
    if not paths:
        raise UserError(
            f"{key}: no file matches {source.path}", evidence=_beside(source.path), fix=f"correct {key}.path"
        )
    alone = len(paths) == 1
    return [
        Input(_name(source.name, path, alone), path, "share", source.text_field, source.sha256 or "") for path in paths
    ]


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted by name; `**` spans directories, hidden files are left out."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts))
    rest = path.parts[len(fixed) :]
    if not rest:
        return []
    found = Path(*fixed).glob(str(Path(*rest)))
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def checked(inputs: list[Input]) -> list[Input]:
    """The same inputs. Raises UserError when two files would share a name."""
    counts = Counter((item.source, item.split) for item in inputs)
    for (name, _), count in counts.items():
        if count > 1:
            same = [str(item.path) for item in inputs if item.source == name]
            raise UserError(
                f"{count} sources are named {name}",
                evidence="\n".join(same),
                fix="give each a name: data.sources[i].name",
            )
    return inputs


def verified(item: Input, sha256: str) -> Input:
    """The input with its file's hash. Raises UserError when the recipe names another."""
    if item.sha256 and item.sha256.lower() != sha256:
        raise UserError(
            f"{item.path} is not the file that the recipe names",
            evidence=f"sha256 {sha256}\nthe recipe says {item.sha256}",
            fix="fetch the file again, or correct data.sources[i].sha256",
        )
    return replace(item, sha256=sha256)


def stem(path: Path) -> str:
    """news.jsonl.gz -> news."""
    return re.sub(r"(\.jsonl?)?(\.gz)?$", "", path.name) or path.name


def safe(name: str) -> str:
    """The name as a part of file names."""
    return re.sub(r"[^\w.-]+", "_", name)


def _name(given: str | None, path: Path, alone: bool) -> str:
    return safe(stem(path) if given is None else given if alone else f"{given}-{stem(path)}")


def _beside(pattern: str) -> str:
    """The nearest directory of a path that exists, and the names in it that are most like the wanted one."""
    wanted = Path(pattern).expanduser()
    directory = next(parent for parent in wanted.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    closest = difflib.get_close_matches(wanted.name, names, n=10, cutoff=0)
    more = [f"and {len(names) - len(closest):,} more"] if len(names) > len(closest) else []
    return f"looked for {wanted.absolute()}\n{directory} holds {', '.join([*closest, *more]) or 'nothing'}"
