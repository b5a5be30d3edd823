"""Find and read files by URL through fsspec: object stores (s3://), clusters (hdfs://), whatever else it knows.

Of a data set on the Hub only files of the kinds that prepare reads are fetched, once. A branch or tag moves, so the
recipe must name the commit; with the files in the Hub's cache no network is needed (HF_HUB_OFFLINE=1).

A file is read in ranges of at most 8 MiB, each asked for again when it fails for a reason that may pass, so memory is a
range and not a file. Credentials and endpoints are the store's own: environment, ~/.aws, ~/.config/fsspec. Every level
of a glob is listed by itself, because fsspec's own glob passes over directories that it may not list.

What the store says of a file's version (an ETag, a time) decides only whether known bytes are hashed again. A store
that says nothing has its files hashed by every command.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch, fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from finlm.base import screen, step_cache
from finlm.base.errors import UserError
from finlm.base.step_cache import NotPrepared
from finlm.recipe.models import config_json
from finlm.recipe.schema_data import Source

Answer = TypeVar("Answer")
About = dict[str, Any]  # what fsspec says of a file

RANGE_BYTES = 8 * 2**20
TRIES = 5
_PAUSE_SECONDS = 0.5  # before the second try; twice as long before each further one
# What stores call a file's version, the best first. One alone: MinIO lists milliseconds, and tells a key in seconds.
_VERSIONS = ("ETag", "etag", "generation", "md5", "mtime", "modificationTime", "LastModified", "created")
_INSTALL = ".venv/bin/pip install -r requirements-s3.lock"
READABLE = (".parquet", *(kind + packed for kind in (".jsonl", ".json", ".txt") for packed in ("", ".gz", ".zst")))
_GLOB = frozenset("*?[")
# Three layers that each ask again took two minutes to say that a store is busy.
_ONCE = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}


def is_readable(name: str) -> bool:
    """Return whether `finlm prepare` reads a file of this name, by its suffix; False for dataset_info.json."""
    return name.lower().endswith(READABLE) and not name.endswith(("dataset_infos.json", "dataset_info.json"))


def is_url(path: str) -> bool:
    """Return whether a path of a recipe is a URL of a store."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


class _Size(NamedTuple):
    """What stat() of a RemoteFile returns."""

    st_size: int  # bytes


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote store as it was listed; has the methods of Path that reading needs."""

    url: str
    size: int  # bytes
    version: str  # "" where the store has no name for it

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of its name: .gz of news.jsonl.gz."""
        return "." + self.name.rpartition(".")[2] if "." in self.name.lstrip(".") else ""

    def with_name(self, name: str) -> RemoteFile:
        """Return a RemoteFile of another name beside it, with size 0 and version ""."""
        return RemoteFile(f"{self.url.rpartition('/')[0]}/{name}", 0, "")

    def stat(self) -> _Size:
        """Return an object whose st_size is the listed size in bytes."""
        return _Size(self.size)

    def open(self, mode: Literal["rb"], /) -> io.BufferedReader:
        """Open for reading in ranges of 8 MiB. UserError if the store fails; reads raise it, and for a changed file."""
        return io.BufferedReader(_Ranges(self), min(RANGE_BYTES, max(1, self.size)))

    def open_exactly(self) -> io.RawIOBase:
        """Open unbuffered: a read fetches only its bytes, as for columns of a table. Errors as of open()."""
        return _Ranges(self)

    def state(self) -> list[Any]:
        """Return [size, version] as listed, which differ if the content changes."""
        return [self.size, self.version]

    def state_now(self) -> list[Any] | None:
        """Return [size, version] in the store now, None if gone. Raises UserError if it does not answer."""
        fs, path = _open_store(self.url)
        answer = _ask(self.url, lambda: _info(fs, path))
        return None if answer is None else _listed(self.url, answer).state()


class _Ranges(io.RawIOBase):
    """A file of a store as a raw, seekable stream. Raises UserError if the store cannot be opened."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0
        self._store, self._path = _open_store(file.url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read at most 8 MiB; return how many bytes, 0 at the end. UserError if the store fails or it changed."""
        with memoryview(buffer).cast("B") as view:
            end = min(self._at + min(len(view), RANGE_BYTES), self._file.size)
            if end <= self._at:
                return 0
            try:
                data = _ask(self._file.url, lambda: self._read(end))
            except UserError:
                step_cache.check_unchanged(self._file, self._file.state())  # the usual cause
                raise
            view[: len(data)] = data
        self._at = end
        return len(data)

    def readall(self) -> bytes:
        """Return the remaining bytes, in reads of 8 MiB; the inherited method reads 8 KiB at a time."""
        return b"".join(iter(lambda: self.read(RANGE_BYTES) or b"", b""))

    def _read(self, end: int) -> bytes:
        """Return the bytes from the current offset to before `end`; _CutShort if the store gives another number."""
        data: bytes = self._store.cat_file(self._path, start=self._at, end=end)
        if len(data) != end - self._at:
            raise _CutShort(f"bytes {self._at:,} to {end:,} of {self._file.size:,}: {len(data):,} came")
        return data


class _CutShort(Exception):
    """A store gave another number of bytes than requested."""


def expand(pattern: str) -> list[RemoteFile]:
    """Return the files of a URL or glob, sorted by name, without hidden ones; empty if none matches.

    `**` spans directories. Raises UserError for a store, bucket or directory that cannot be listed.
    """
    prefix, parts = _split(pattern)
    fixed = next((number for number, part in enumerate(parts) if _GLOB & set(part)), len(parts))
    base, rest = "/".join([prefix, *parts[:fixed]]), parts[fixed:]
    fs, path = _open_store(base)
    if not rest:
        answer = _ask(base, lambda: _info(fs, path))
        return [_listed(base, answer)] if answer and answer["type"] == "file" else []
    return sorted(set(_walk(fs, base, path, rest)), key=lambda file: file.url)


def entries_near(url: str) -> tuple[str, list[tuple[str, bool]]]:
    """Return (URL, [(name, is a directory)]) of the nearest directory that exists. UserError if none answers."""
    prefix, parts = _split(url)
    parts = parts[: next((number for number, part in enumerate(parts) if _GLOB & set(part)), len(parts))]
    while True:
        base = "/".join([prefix, *parts])
        fs, path = _open_store(base)
        answer = _ask(base, lambda fs=fs, path=path, base=base: _list(fs, path, base))  # type: ignore[misc]
        if answer or not parts:
            return base, [(name, about["type"] == "directory") for name, about in answer or ()]
        parts = parts[:-1]


def _split(url: str) -> tuple[str, list[str]]:
    """Return (scheme and authority, the parts of the path): s3://bucket/a/b -> (s3://bucket, [a, b])."""
    scheme, _, rest = url.partition("://")
    authority, *parts = rest.split("/")
    return f"{scheme}://{authority}", [part for part in parts if part]


def _walk(fs: Any, url: str, path: str, parts: Sequence[str]) -> Iterator[RemoteFile]:
    """Yield the files below a directory whose paths match the parts of a glob; some perhaps twice.

    `url` and `path`, as the filesystem `fs` has it, name the directory. Raises UserError if it cannot be listed.
    """
    if parts[0] == "**" and len(parts) > 1:
        yield from _walk(fs, url, path, parts[1:])
    for name, about in _ask(url, lambda: _list(fs, path, url)) or ():
        inner, is_directory = f"{url}/{name}", about["type"] == "directory"
        if parts[0] == "**":
            if is_directory:
                yield from _walk(fs, inner, about["name"].rstrip("/"), parts)
        elif fnmatchcase(name, parts[0]):
            if len(parts) > 1 and is_directory:
                yield from _walk(fs, inner, about["name"].rstrip("/"), parts[1:])
            elif len(parts) == 1 and not is_directory and not name.startswith("."):
                yield _listed(inner, about)


def _list(fs: Any, path: str, url: str) -> list[tuple[str, About]] | None:
    """Return [(name, what the store says of it)] of a directory, sorted by name; None if it does not exist.

    Raises FileNotFoundError or NotADirectoryError for a missing bucket, and the store's other errors.
    """
    try:
        entries = fs.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        if not _split(url)[1]:  # the bucket itself
            raise
        return None
    here = path.rstrip("/")
    named = [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]
    return sorted((pair for pair in named if pair[1]["name"].rstrip("/") != here), key=lambda pair: pair[0])


def _info(fs: Any, path: str) -> About | None:
    """Return what the store says of a path; None if it does not exist. Raises the store's other errors."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError:
        return None


def _listed(url: str, about: About) -> RemoteFile:
    """Return the RemoteFile for what a store says about a URL. Raises UserError if the size is missing."""
    if about.get("size") is None:
        raise UserError(f"the size of {url} is unknown", evidence="its server does not say", fix=_DOWNLOAD)
    version = next((about[key] for key in _VERSIONS if about.get(key)), "")
    if isinstance(version, datetime):  # of info() where ls() gives a number
        version = version.timestamp()
    return RemoteFile(url, int(about["size"]), str(version))


@lru_cache(maxsize=64)
def _open_root(root: str) -> Any:
    """Return the fsspec filesystem of a URL's scheme and authority; the last 64 are cached.

    Raises UserError if it is unknown, lacks a package or fails to open; S3 and HTTP are not contacted yet.
    """
    scheme = root.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        fs = url_to_fs(root, use_listings_cache=False, **(_ONCE if scheme in ("s3", "s3a") else {}))[0]
        fs.retries = 1
        return fs
    except ImportError as error:
        package = _INSTALL if scheme in _BY_S3FS else "pip install what it names"
        raise UserError(
            f"{scheme}:// needs a package that is not installed",
            evidence=f"fsspec says {error}",
            fix=_fix(scheme, f"install it: {package}"),
        ) from None
    except ValueError as error:
        fix = "give a path, or a URL such as s3://bucket/... or hdfs://host:port/..."
        raise UserError(f"no store is known by {scheme}://", evidence=f"fsspec says {error}", fix=fix) from None
    except Exception as error:  # an address that no host answers at, a library that is missing
        raise _failure(root, error, asked=1) from None


_BY_S3FS = ("s3", "s3a", "http", "https")  # aiohttp comes with it
_ADDRESS = {
    "s3": "see to the network and AWS_ENDPOINT_URL, then run again",
    "hdfs": "see to the network, JAVA_HOME, HADOOP_HOME and CLASSPATH (`hadoop classpath --glob`), then run again",
}
_DOWNLOAD = "download it and name the file"


def _open_store(url: str) -> tuple[Any, str]:
    """Return (filesystem, path in it) of a URL. Raises UserError for a store that cannot be used."""
    fs = _open_root(_split(url)[0])
    return fs, fs._strip_protocol(url)


def _ask(url: str, question: Callable[[], Answer]) -> Answer:
    """Return question(), asked up to five times while its failure may pass; then UserError, naming the url."""
    for number in range(TRIES):
        try:
            return question()
        except Exception as error:  # each store has its own kinds
            if number + 1 == TRIES or not _may_pass(error):
                raise _failure(url, error) from None
            time.sleep(_PAUSE_SECONDS * 2**number)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """Return whether a failure of a store may pass, so that asking again helps."""
    lasting = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ValueError, ImportError)
    return not isinstance(error, lasting) and "Credentials" not in type(error).__name__


def _failure(url: str, error: Exception, asked: int = TRIES) -> UserError:
    """Return the UserError for a store's failure; `asked` is how often the store was asked."""
    scheme, said = url.partition("://")[0], " ".join(str(error).split())[:400]
    evidence = f"{type(error).__name__}: {said}"
    if isinstance(error, _CutShort):
        return UserError(f"{url} is cut short", evidence=said, fix="write or fetch the file again, then run again")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{url} is not there", evidence=evidence, fix="correct the bucket, host or path")
    if "Credentials" in type(error).__name__:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
        return UserError(f"{url} cannot be read without credentials", evidence=evidence, fix=fix)
    if isinstance(error, PermissionError):
        fix = "correct the credentials, or the rights that they give"
        return UserError(f"the store refuses {url}", evidence=evidence, fix=fix)
    return UserError(
        f"{url} cannot be read",
        evidence=f"{evidence}\nasked {asked} times" if _may_pass(error) and asked > 1 else evidence,
        fix=_fix(scheme, _ADDRESS.get(scheme, "see to the network and the store's address, then run again")),
    )


def _fix(scheme: str, first: str) -> str:
    """Return `first`, the fix to suggest; for http and https, followed by the advice to download the file."""
    return f"{first}; or {_DOWNLOAD}" if scheme in ("http", "https") else first


def fetch_dataset(source: Source, key: str, *, fetch: bool) -> list[Path]:
    """Return the sorted local paths of the dataset's files at source.revision; with `fetch` download missing ones.

    Selects the files that match source.files; without it, the readable files named after source.split, or all if none
    are. Raises UserError, naming the recipe key `key`, when source.revision is not a full commit hash, the download
    fails or no file matches; without `fetch`, NotPrepared if no matching file is in the Hub's cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert source.dataset is not None
    if not re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        raise UserError(
            f"{key}: {source.dataset} needs the commit to read",
            evidence=f"revision: {source.revision}",
            fix=f"set {key}.revision to the 40 digits under 'Files and versions' of huggingface.co/datasets/"
            f"{source.dataset}",
        )
    if fetch:
        screen.say(f"{source.dataset} at {source.revision}")
    problem = f"{key}: {source.dataset} at {source.revision} cannot be fetched"
    with config_json.hub_errors(
        problem, "check the id, the commit and the network; a set behind a licence needs `hf auth login`"
    ):
        try:
            snapshot = snapshot_download(
                source.dataset,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=source.files or [f"*{suffix}" for suffix in READABLE],
                local_files_only=not fetch,
            )
        except LocalEntryNotFoundError:
            if fetch:
                raise
            raise NotPrepared("sources") from None
    root = Path(snapshot)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and is_readable(path.name))
    chosen = [path for path in paths if source.files is None or fnmatch(str(path.relative_to(root)), source.files)]
    named = [path for path in chosen if re.search(rf"(^|[^a-z]){re.escape(source.split)}([^a-z]|$)", path.name)]
    if source.files is None and named:
        chosen = named
    if not chosen and not fetch:
        raise NotPrepared("sources")
    if not chosen:
        listed = ", ".join(str(path.relative_to(root)) for path in paths[:10])
        raise UserError(
            f"{key}: {source.dataset} has no file to read",
            evidence=f"files {source.files}, split {source.split}; it holds {listed or 'none that prepare reads'}",
            fix=f"set {key}.files to a glob such as data/*.parquet",
        )
    return chosen
