"""Which files a recipe reads: globs expanded, formats found, every mistake answered with what lies beside it.

A JSON-lines file is a source of its own in counts and in held-out perplexity, named after itself; under a name that the
recipe gives, and always of text, parquet or Arrow, the files of one entry are one source together. Nothing is read here
but directories and the first bytes of files.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe.schema_data import Source

# "share": a share of the documents is held out; the embedded corpus brings a held-out file of its own instead.
Split = Literal["train", "held_out", "share"]
Format = Literal["jsonl", "lines", "txt", "parquet", "arrow"]
_SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "arrow", ".txt": "txt"}
_LOOKED_AT = 10_000  # entries of a directory that was given instead of its files
READABLE = (".parquet", *(kind + packed for kind in (".jsonl", ".json", ".txt") for packed in ("", ".gz", ".zst")))


@dataclass(frozen=True)
class Input:
    """The files of one source and how their rows are read."""

    source: str
    paths: tuple[Path, ...]
    split: Split
    format: Format = "jsonl"
    text_field: str = "text"
    meta: Mapping[str, str] = field(default_factory=dict)  # fields whose values are counted, by name
    encoding: str = "auto"
    expected: str = ""  # the sha256 or the revision that the recipe names
    sha256: tuple[str, ...] = ()  # of each file
    entry: str = ""  # its place in the recipe, for messages

    def identity(self) -> list[Any]:
        """Everything that its documents depend on, for step keys."""
        how = [self.format, self.text_field, dict(self.meta), self.encoding]
        return [self.source, self.split, *how, *self.sha256]

    def described(self) -> list[dict[str, str]]:
        """Its files with their hashes, as manifests and reports name them."""
        return [
            {"source": self.source, "split": self.split, "file": path.name, "sha256": sha256}
            for path, sha256 in zip(self.paths, self.sha256, strict=True)
        ]


def of_source(source: Source, key: str, *, fetch: bool = True) -> list[Input]:
    """The inputs of a recipe's entry. `key` is its place in the recipe, for messages. Raises UserError for no file.

    Without `fetch` nothing is downloaded: NotPrepared for files of the Hub that are not in its cache.
    """
    if source.dataset is not None:
        from finlm.data import hub  # imports this module

        paths, expected = hub.files(source, key, fetch=fetch), f"{source.dataset}@{source.revision}"
    else:
        assert source.path is not None
        paths, expected = expand(source.path, source.split), source.sha256 or ""
    if not paths:
        _check_directory(Path(str(source.path)), key)
        raise UserError(
            f"{key}: no file matches {source.path}", evidence=_beside(str(source.path)), fix=f"correct {key}.path"
        )
    by_format: dict[Format, list[Path]] = {}
    for path in paths:
        by_format.setdefault(_format(path, source), []).append(path)
    together = source.dataset or str(source.path)
    found = []
    for kind, members in by_format.items():
        groups = [[path] for path in members] if kind == "jsonl" and source.name is None else [members]
        for group in groups:
            alone = len(by_format) == len(groups) == 1
            own = stem(group[0]) if len(group) == 1 and kind != "arrow" else _common(together)
            name = _name(source.name, own, alone)
            found.append(
                Input(
                    *(name, tuple(group), "share", kind, source.text_field, source.meta, source.encoding),
                    expected=expected,
                    entry=key,
                )
            )
    return found


def expand(pattern: str, split: str = "train") -> list[Path]:
    """The files of a path or glob, sorted by name; `**` spans directories and links, hidden files are left out.

    A directory written by datasets.save_to_disk stands for its Arrow files, one of several splits by `split`. Raises
    UserError for a name that is not UTF-8, as an old archive's: it could be written into no manifest.
    """
    found = _matching(pattern, split)
    for path in found:
        name = os.fsencode(path)
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(
                "the name of a file is not UTF-8",
                evidence=f"{name.decode('utf-8', 'backslashreplace')}\nas GBK {name.decode('gb18030', 'replace')}",
                fix="rename it; for many: convmv -f gbk -t utf8 --notest -r DIRECTORY",
            ) from None
    return found


def _matching(pattern: str, split: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        path = path / split
    if (path / "state.json").is_file():
        return [path / item["filename"] for item in files.read_json(path / "state.json")["_data_files"]]
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts))
    rest = path.parts[len(fixed) :]
    if not rest:
        return []
    found = sorted(file for file in _glob(Path(*fixed), rest) if file.is_file() and not file.name.startswith("."))
    return list({file.resolve(): file for file in reversed(found)}.values())[::-1] if "**" in rest else found


def _glob(directory: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Path.glob, whose `**` passes over linked directories without a word."""
    if "**" not in parts:
        yield from directory.glob(str(Path(*parts))) if parts else ()
        return
    at = parts.index("**")
    for start in directory.glob(str(Path(*parts[:at]))) if at else (directory,):
        for inner in _below(start):
            yield from _glob(inner, parts[at + 1 :])


def _below(directory: Path) -> Iterator[Path]:
    """The directory and those in it, each once: what is there before what is linked, which may lead in a circle."""
    waiting, links, seen = [directory], list[Path](), set[Path]()
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        if here.resolve() in seen or not os.access(here, os.R_OK | os.X_OK):
            continue
        seen.add(here.resolve())
        yield here
        for inner in sorted(here.iterdir()):
            if inner.is_dir():
                (links if inner.is_symlink() else waiting).append(inner)


def readable(name: str) -> bool:
    """Whether a file of this name is one that prepare reads."""
    return name.lower().endswith(READABLE) and not name.endswith(("dataset_infos.json", "dataset_info.json"))


def _check_directory(path: Path, key: str) -> None:
    """Raises UserError for a directory, with the glob of what is found in it."""
    directory = path.expanduser()
    if not directory.is_dir():
        return
    inside = itertools.islice(directory.rglob("*"), _LOOKED_AT)
    names = [(file.parent == directory, suffix(file)) for file in inside if readable(file.name) and file.is_file()]
    counts = Counter(names).most_common()
    is_here, kind = next((found for found, _ in counts if found[0]), counts[0][0] if counts else (True, ""))
    raise UserError(
        f"{key}: {path} is a directory",
        evidence=_beside(str(path / "*")).partition("\n")[2],
        fix=f"name its files: {path / ('' if is_here else '**') / f'*{kind}'}"
        if counts
        else f"name a directory's files; it holds none that prepare reads ({', '.join(READABLE)})",
    )


def checked(inputs: list[Input]) -> list[Input]:
    """The same inputs. Raises UserError when two would share a name."""
    counts = Counter((item.source, item.split) for item in inputs)
    for (name, split), count in counts.items():
        if count > 1:
            same = [item for item in inputs if (item.source, item.split) == (name, split)]
            raise UserError(
                f"{count} sources are named {name}",
                evidence="\n".join(str(item.paths[0]) for item in same),
                fix=_other_names(same),
            )
    return inputs


def _other_names(same: Sequence[Input]) -> str:
    """How inputs of one name get several."""
    entries = Counter(item.entry for item in same)
    if len(entries) == len(same):
        return "give each a name of its own: data.sources[i].name"
    again = [item for item in same if entries[item.entry] > 1]
    if any("@" in item.expected for item in again):
        return f"write an entry for each instead of {again[0].entry}, with files and a name of its own"
    paths = [item.paths[0] for item in again]
    if len({path.parent for path in paths}) == len(paths):
        paths = [path.parent / f"*{suffix(path)}" for path in paths]
    example = ", ".join(f"{{path: {path}, name: {chr(ord('a') + at)}}}" for at, path in enumerate(paths[:2]))
    what = "directory" if "*" in paths[0].name else "file"
    more = ", ..." if len(paths) > 2 else ""
    return (
        f"one name for all: {again[0].entry}.name; or "
        f"one entry a {what} instead of {again[0].entry}, each with a name: --set 'data.sources=[{example}{more}]'"
    )


def verified(item: Input, sha256: Sequence[str]) -> Input:
    """The input with the hashes of its files. Raises UserError when the recipe names another for its only file."""
    if item.expected and "@" not in item.expected and item.expected.lower() != sha256[0]:
        raise UserError(
            f"{item.paths[0]} is not the file that the recipe names",
            evidence=f"sha256 {sha256[0]}\nthe recipe says {item.expected}",
            fix="fetch the file again, or correct data.sources[i].sha256",
        )
    return replace(item, sha256=tuple(sha256))


def stem(path: Path) -> str:
    """news.jsonl.gz -> news."""
    return re.sub(r"(\.(jsonl?|txt|parquet|arrow))?(\.(gz|zst))?$", "", path.name) or path.name


def suffix(path: Path) -> str:
    """news.jsonl.gz -> .jsonl.gz."""
    return path.name.removeprefix(stem(path))


def safe(name: str) -> str:
    """The name as a part of file names."""
    return re.sub(r"[^\w.-]+", "_", name)


def _format(path: Path, source: Source) -> Format:
    if source.format != "auto":
        return source.format
    name = re.sub(r"\.(gz|zst)$", "", path.name.lower())
    return _SUFFIXES.get(Path(name).suffix, "jsonl")


def _name(given: str | None, own: str, alone: bool) -> str:
    return safe(own if given is None else given if alone else f"{given}-{own}")


def _common(pattern: str) -> str:
    """A name for several files: the last part of their path that is no glob."""
    parts = [part for part in Path(pattern).parts if not set(part) & set("*?[") and part != "/"]
    return stem(Path(parts[-1])) if parts else "files"


def _beside(pattern: str) -> str:
    """The nearest directory of a path that exists, and the names in it that are most like the wanted one."""
    wanted = Path(pattern).expanduser()
    directory = next(parent for parent in wanted.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    closest = difflib.get_close_matches(wanted.name, names, n=10, cutoff=0)
    more = [f"and {len(names) - len(closest):,} more"] if len(names) > len(closest) else []
    return f"looked for {wanted.absolute()}\n{directory} holds {', '.join([*closest, *more]) or 'nothing'}"
