"""Find the files that a recipe reads: expand globs and Hub data sets, recognise formats, suggest names after mistakes.

A JSON-lines file is a source by itself in counts and in held-out perplexity, named after the file. Under a name that
the recipe gives, and always for text, parquet or Arrow, the files of an entry are a source together. Only directories
are read here, and the state.json of saved sets.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache, File
from finlm.corpus.read import remote
from finlm.recipe.schema_data import Source

# "share": a share of the documents is held out; the embedded corpus brings a held-out file of its own instead.
Split = Literal["train", "held_out", "share"]
Format = Literal["jsonl", "lines", "txt", "parquet", "arrow"]
_NOT_READ = (".csv", ".tsv", ".xls", ".xlsx", ".pdf", ".doc", ".docx")
_CONVERT = (
    'convert it to JSON lines: python -c "import pandas,sys;pandas.read_csv(sys.argv[1],dtype=str)'
    ".to_json(sys.argv[2],orient='records',lines=True,force_ascii=False)\" FILE.csv FILE.jsonl"
)
_SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "arrow", ".txt": "txt"}
_MOST_SOURCES = 1000  # of an entry; each costs 20 ms, and a line in every table
_LISTED = 10_000  # files of a source: a million would put 140 MB into every run
_LOOKED_AT = 10_000  # entries of a directory that was given instead of its files


@dataclass(frozen=True)
class Input:
    """The files of one source and how their rows are read."""

    source: str
    paths: tuple[File, ...]
    split: Split
    format: Format = "jsonl"
    text_field: str = "text"
    meta: Mapping[str, str] = field(default_factory=dict)  # fields whose values are counted, by name
    encoding: str = "auto"
    null_text: str = "broken"
    sides: Mapping[str, str] = field(default_factory=dict)  # Data.sides
    expected: str = ""  # the sha256 or the revision that the recipe names
    sha256: tuple[str, ...] = ()  # of each file
    sizes: tuple[int, ...] = ()  # of each file when it was hashed, in bytes
    entry: str = ""  # its place in the recipe, for messages

    def identity(self) -> list[Any]:
        """Return everything that the input's documents depend on, for step keys."""
        return [self.source, self.split, *self.settings(), *self.sha256]

    def settings(self) -> list[Any]:
        """Return what decides how the input's rows are read, for cache keys."""
        how = [self.format, self.text_field, dict(self.meta), self.encoding, self.null_text]
        return [*how, dict(self.sides)] if self.sides else how

    def file_sizes(self) -> Sequence[int]:
        """Return the size of every file in bytes: when it was hashed, or now if it was not (OSError if missing)."""
        return self.sizes or [path.stat().st_size for path in self.paths]

    def part(self, first: int, last: int) -> Input:
        """Return the input with only its files from the number `first` to before `last`."""
        here = slice(first, last)
        return replace(self, paths=self.paths[here], sha256=self.sha256[here], sizes=self.sizes[here])

    def files_with_hashes(self) -> Iterator[tuple[File, str]]:
        """Yield (file, its SHA-256) of every file; "" where the files are not hashed."""
        return zip(self.paths, self.sha256 or itertools.repeat(""), strict=False)

    def file_entries(self) -> list[dict[str, str]]:
        """Return [{source, split, file: its name, sha256}] of every hashed file, for manifests and reports.

        More than 10,000 have one entry together. Raises ValueError for files without hashes.
        """
        about = {"source": self.source, "split": self.split}
        if len(self.paths) > _LISTED:
            return [about | {"file": f"{len(self.paths):,} files", "sha256": files.sha256_json(self.sha256)}]
        listed = zip(self.paths, self.sha256, strict=True)
        return [about | {"file": path.name, "sha256": sha256} for path, sha256 in listed]


def find_inputs(source: Source, key: str, *, fetch: bool = True) -> list[Input]:
    """Return the inputs of an entry of data.sources; `key` is its recipe key, for error messages.

    Without a name in the entry, each JSON-lines file is an input; files of any other format are an input per format.
    Raises UserError when no file matches, more than 1,000 files would each be a source, or a store does not answer.
    Downloads a Hub data set; with fetch=False raises NotPrepared if its files are not in the Hub's cache.
    """
    if source.dataset is not None:
        paths: Sequence[File] = remote.fetch_dataset(source, key, fetch=fetch)
        expected = f"{source.dataset}@{source.revision}"
    else:
        assert source.path is not None
        paths, expected = find_files(source.path, source.split), source.sha256 or ""
    if not paths:
        raise _no_file_error(str(source.path), key)
    by_format: dict[Format, list[File]] = {}
    for path in paths:
        by_format.setdefault(_format(path, source), []).append(path)
    together = source.dataset or str(source.path)
    if source.name is None and len(by_format.get("jsonl", ())) > _MOST_SOURCES:
        raise UserError(
            f"{key}: {together} matches {len(by_format['jsonl']):,} files, each of which would be a source",
            evidence=f"without a name every JSON-lines file is a source with losses and counts of its own; "
            f"{_MOST_SOURCES:,} are the most",
            fix=f"give the entry a name, which makes them one source: {key}.name",
        )
    inputs = []
    for kind, members in by_format.items():
        groups = [[path] for path in members] if kind == "jsonl" and source.name is None else [members]
        for group in groups:
            alone = len(by_format) == len(groups) == 1
            file_name = stem(group[0].name) if len(group) == 1 and kind != "arrow" else _common_name(together)
            name = file_name if source.name is None else source.name if alone else f"{source.name}-{file_name}"
            inputs.append(
                Input(
                    *(safe_name(name), tuple(group), "share", kind, source.text_field, source.meta, source.encoding),
                    null_text=source.null_text,
                    expected=expected,
                    entry=key,
                )
            )
    return inputs


def find_files(pattern: str, split: str = "train") -> Sequence[File]:
    """Return the files of a path, URL or glob, sorted by name; empty if none matches; see expand() for `split`.

    Raises UserError for what cannot be listed, a link without a target, and a name that is not UTF-8.
    """
    return remote.expand(pattern) if remote.is_url(pattern) else expand(pattern, split)


def missing(entries: Sequence[Source]) -> Iterator[str]:
    """Yield a warning for each path of data.sources that matches no file here; UserError if one is unreadable."""
    for number, source in enumerate(entries):
        if source.path and not remote.is_url(source.path) and not expand(source.path, source.split):
            yield f"data.sources[{number}]: no file here matches {source.path}"


def expand(pattern: str, split: str = "train") -> list[Path]:
    """Return the files of a path or glob, sorted by name; empty if none matches. Leaves out hidden files of a glob.

    `**` spans directories and links. A directory written by datasets.save_to_disk stands for its Arrow files; `split`
    selects one of several splits. Raises UserError for a name that is not UTF-8, and for directories and links that
    cannot be read.
    """
    paths = _matching(pattern, split)
    for path in paths:
        name = os.fsencode(path)
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:  # no manifest could hold it
            raise UserError(
                "the name of a file is not UTF-8",
                evidence=f"{name.decode('utf-8', 'backslashreplace')}\nas GBK {name.decode('gb18030', 'replace')}",
                fix="rename it; for many: convmv -f gbk -t utf8 --notest -r DIRECTORY",
            ) from None
    return paths


def _matching(pattern: str, split: str) -> list[Path]:
    """Return what expand() does, also names that are not UTF-8, with its other errors."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        path = path / split
    if (path / "state.json").is_file():
        return [path / item["filename"] for item in files.read_json(path / "state.json")["_data_files"]]
    if path.is_symlink() and not path.exists():
        raise _dead_link_error(path)
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts))
    rest = path.parts[len(fixed) :]
    if not rest:
        return []
    entries = [entry for entry in _glob(Path(*fixed), rest) if entry.is_file and not entry.name.startswith(".")]
    entries.sort(key=lambda entry: (*entry.directory.parts, entry.name))  # as paths sort, in a fifth of the time
    if "**" in rest:
        real = lru_cache(Path.resolve)  # of directories, which are few
        once = dict[tuple[Path, str], _Entry]()
        for entry in entries:
            where = entry.path.resolve() if entry.is_link else None
            once.setdefault((where.parent, where.name) if where else (real(entry.directory), entry.name), entry)
        entries = list(once.values())
    return [entry.path for entry in entries]


class _Entry(NamedTuple):
    """A directory entry; is_directory and is_file of a symbolic link describe its target."""

    directory: Path
    name: str
    is_directory: bool
    is_file: bool
    is_link: bool

    @property
    def path(self) -> Path:
        """The path of the entry."""
        return self.directory / self.name


def _glob(directory: Path, parts: Sequence[str]) -> Iterator[_Entry]:
    """Yield the entries below `directory` that match the parts of a glob, with the errors of _entries().

    pathlib's own glob passes over what it cannot list, and enters no linked directory.
    """
    if parts[0] == "**":
        for inner in _below(directory) if len(parts) > 1 else ():
            yield from _glob(inner, parts[1:])
    elif directory.is_dir():
        for entry in _entries(directory, parts[0]):
            if len(parts) == 1:
                yield entry
            elif entry.is_directory:
                yield from _glob(entry.path, parts[1:])


def _below(directory: Path) -> Iterator[Path]:
    """Yield the directory, if it exists, and all below it, each once, linked ones last, without lost+found."""
    waiting, links, seen = [directory] * directory.is_dir(), list[Path](), set[Path]()
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        if here.resolve() in seen:
            continue
        seen.add(here.resolve())
        yield here
        for entry in _entries(here, "*"):
            if entry.is_directory and entry.name != "lost+found":  # root's alone, on every ext4
                (links if entry.is_link else waiting).append(entry.path)


def _entries(directory: Path, pattern: str) -> list[_Entry]:
    """Return matching entries by name. UserError for a directory that cannot be listed, and a link without target."""
    try:
        with os.scandir(directory) as listed:
            matching = [at for at in listed if fnmatchcase(at.name, pattern)]
            entries = [_Entry(directory, at.name, at.is_dir(), at.is_file(), at.is_symlink()) for at in matching]
        for entry in entries:
            if entry.is_link and not entry.path.exists() and not entry.name.startswith("."):
                raise _dead_link_error(entry.path)
    except OSError as error:
        raise UserError(
            f"cannot look into {directory}",
            evidence=str(error),
            fix="correct its permissions or mount, or name the files so that it does not belong to them",
        ) from None
    return sorted(entries, key=lambda entry: entry.name)


def _dead_link_error(link: Path) -> UserError:
    """Return the UserError for a symbolic link whose target does not exist."""
    return UserError(
        f"{link} leads nowhere",
        evidence=f"a link to {link.readlink()}, which is not there",
        fix="mount or fetch what it stands for, or remove the link",
    )


def _no_file_error(pattern: str, key: str) -> UserError:
    """Return the UserError for a path, URL or glob that no file matches, with the names nearby.

    Raises it instead if the path is a local directory, and another if a URL's store does not answer.
    """
    if remote.is_url(pattern):
        where, entries = remote.entries_near(pattern)
        if where == pattern.rstrip("/") and entries:
            readable = [name for name, is_directory in entries if not is_directory and remote.is_readable(name)]
            suffixes = Counter(map(suffix, readable))
            glob = f"*{suffixes.most_common(1)[0][0]}" if suffixes else "**/*.jsonl"
            evidence, fix = _listing(where, [name for name, _ in entries], glob), f"name its files: {where}/{glob}"
            return UserError(f"{key}: {pattern} is a directory", evidence=evidence, fix=fix)
        evidence = _listing(where, [name for name, _ in entries], pattern.rpartition("/")[2])
    else:
        _check_directory(Path(pattern), key)
        evidence = _similar_names(pattern)
    fix = f"correct {key}.path"
    if "," in pattern:
        fix = f"write a list: --set 'data.sources=[{', '.join(part.strip() for part in pattern.split(','))}]'"
    return UserError(f"{key}: no file matches {pattern}", evidence=evidence, fix=fix)


def _check_directory(path: Path, key: str) -> None:
    """Raise UserError if the path is a directory, with a glob for its most frequent kind of file, if it has any."""
    directory = path.expanduser()
    if not directory.is_dir():
        return
    inside = itertools.islice(directory.rglob("*"), _LOOKED_AT)
    readable = (file for file in inside if remote.is_readable(file.name) and file.is_file())
    names = [(file.parent == directory, suffix(file.name)) for file in readable]
    counts = Counter(names).most_common()
    is_here, kind = next((each for each, _ in counts if each[0]), counts[0][0] if counts else (True, ""))
    raise UserError(
        f"{key}: {path} is a directory",
        evidence=_similar_names(str(path / "*")).partition("\n")[2],
        fix=f"name its files: {path / ('' if is_here else '**') / f'*{kind}'}"
        if counts
        else f"name a directory's files; it holds none that prepare reads ({', '.join(remote.READABLE)})",
    )


def check_names(inputs: list[Input]) -> list[Input]:
    """Return the inputs unchanged. Raises UserError when two share a name and a split."""
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
    """Return the fix to suggest for inputs that share a name."""
    entries = Counter(item.entry for item in same)
    if len(entries) == len(same):
        return "give each a name of its own: data.sources[i].name"
    again = [item for item in same if entries[item.entry] > 1]
    if any("@" in item.expected for item in again):
        return f"write an entry for each instead of {again[0].entry}, with files and a name of its own"
    paths = [item.paths[0] for item in again]
    if len({path.with_name("_") for path in paths}) == len(paths):
        paths = [path.with_name(f"*{suffix(path.name)}") for path in paths]
    example = ", ".join(f"{{path: {path}, name: {chr(ord('a') + at)}}}" for at, path in enumerate(paths[:2]))
    what = "directory" if "*" in paths[0].name else "file"
    more = ", ..." if len(paths) > 2 else ""
    return (
        f"one name for all: {again[0].entry}.name; or "
        f"one entry a {what} instead of {again[0].entry}, each with a name: --set 'data.sources=[{example}{more}]'"
    )


def hash_files(inputs: Sequence[Input], cache: Cache) -> list[Input]:
    """Return copies of the inputs with the hash and the size of each file, from the cache or stored there.

    Raises UserError for an unreadable or unexpected file, OSError for a missing one, NotPrepared for an unknown hash.
    """
    prints = iter(cache.fingerprints([path for item in inputs for path in item.paths]))
    hashed = []
    for item in inputs:
        sha256, sizes = zip(*itertools.islice(prints, len(item.paths)), strict=True)
        if item.expected and "@" not in item.expected and item.expected.lower() != sha256[0]:  # @: a Hub revision
            raise UserError(
                f"{item.paths[0]} is not the file that the recipe names",
                evidence=f"sha256 {sha256[0]}\nthe recipe says {item.expected}",
                fix="fetch the file again, or correct data.sources[i].sha256",
            )
        hashed.append(replace(item, sha256=sha256, sizes=sizes))
    return hashed


def stem(name: str) -> str:
    """Return a file's name without its kind and compression: news.jsonl.gz -> news."""
    return re.sub(r"(\.(jsonl?|txt|parquet|arrow))?(\.(gz|zst))?$", "", name) or name


def suffix(name: str) -> str:
    """Return the kind and compression of a file's name: news.jsonl.gz -> .jsonl.gz."""
    return name.removeprefix(stem(name))


def safe_name(name: str) -> str:
    """Return the name with _ for every run of characters other than letters, digits, _, . and -."""
    return re.sub(r"[^\w.-]+", "_", name)


def _format(path: File, source: Source) -> Format:
    """Return the recipe's format, or the suffix's (default jsonl). UserError for a suffix not read, as .csv."""
    if source.format != "auto":
        return source.format
    name = path.name.lower()
    if name.endswith((".gz", ".zst")):
        name = name.rpartition(".")[0]
    if name.endswith(_NOT_READ):
        raise UserError(
            f"finlm does not read {path}",
            evidence="it reads JSON lines, .txt, .parquet and .arrow, the first two also as .gz and .zst",
            fix=_CONVERT if name.endswith(".csv") else "convert it to JSON lines, a document or a dialogue a line",
        )
    return _SUFFIXES.get(f".{name.rpartition('.')[2]}", "jsonl")


def _common_name(pattern: str) -> str:
    """Return the last part of a path that has no wildcard, without its suffix; "files" if every part has one."""
    parts = [part for part in Path(pattern).parts if not set(part) & set("*?[") and part != "/"]
    return stem(parts[-1]) if parts else "files"


def _similar_names(pattern: str) -> str:
    """Return two lines for messages: the path, and its nearest existing directory with the ten names most like it."""
    wanted = Path(pattern).expanduser()
    directory = next(parent for parent in wanted.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    return f"looked for {wanted.absolute()}\n{_listing(directory, names, wanted.name)}"


def _listing(directory: object, names: Sequence[str], wanted: str) -> str:
    """Return a line for messages: `directory`, the ten of its `names` closest to the wanted one, and how many more."""
    closest = difflib.get_close_matches(wanted, names, n=10, cutoff=0)
    more = [f"and {len(names) - len(closest):,} more"] if len(names) > len(closest) else []
    return f"{directory} holds {', '.join([*closest, *more]) or 'nothing'}"
