"""Sources by URL: the same results as from files, few requests, and what is said when a store does not give them."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import pickle
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache, NotPrepared
from finlm.cli import main
from finlm.corpus.read import readers, remote, sources
from finlm.recipe.schema_data import Source
from object_store import Server, serve

from helpers import QUICKSTART, sets

needs_requests = pytest.mark.skipif(importlib.util.find_spec("requests") is None, reason="pip install requests")
needs_s3fs = pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="pip install -r requirements-s3.lock")
ROWS = [{"text": f"第{number}篇：营业收入同比增长{number}%，净利润{number * 7}万元。"} for number in range(4000)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def table() -> bytes:
    packed = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), packed, row_group_size=1000)
    return packed.getvalue()


FILES = {
    "fin/a.jsonl": LINES,
    "fin/b.jsonl.gz": gzip.compress(LINES.replace("篇".encode(), "份".encode())),
    "fin/2024/c.parquet": table(),
    "fin/2024/q 1/说明.txt": "公司公告全文。".encode() * 50,
    "fin/.hidden.jsonl": b"",
    "fin/2024/.hidden/d.jsonl": "\n".join(LINES.decode().split("\n")[:50]).encode(),
    "other/e.jsonl": LINES,
}
PATTERNS = ["fin/a.jsonl", "fin/*", "fin/*.jsonl*", "fin/*/*", "fin/**/*", "**/*.jsonl", "*/[ab].jsonl*", "fin/202?/*"]


class Moody(MemoryFileSystem):
    """A store in memory whose next reads fail with these errors, or give too little, as often as is told."""

    protocol = "moody"
    store: dict[str, Any] = {}  # noqa: RUF012 - as MemoryFileSystem has it
    errors: list[Exception] = []  # noqa: RUF012
    missing = 0  # bytes that each read leaves out
    reads = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("moody://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        Moody.reads += 1
        if self.errors:
            raise self.errors.pop(0)
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return data[: len(data) - self.missing]


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> type[Moody]:
    fsspec.register_implementation("moody", Moody, clobber=True)
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(Moody, "store", {})
    monkeypatch.setattr(Moody, "errors", [])
    monkeypatch.setattr(Moody, "reads", 0)
    fsspec.filesystem("moody").pipe({f"/d/{name}": data for name, data in FILES.items()})
    return Moody


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from s3fs import S3FileSystem

    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.001)
    with serve() as server:
        server.objects |= FILES
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        forget(S3FileSystem)
        yield server
        forget(S3FileSystem)


def forget(kind: type[fsspec.AbstractFileSystem]) -> None:
    """Have the next request ask the environment again."""
    remote._open_root.cache_clear()
    kind.clear_instance_cache()


def local(directory: Path) -> Path:
    for name, data in FILES.items():
        path = directory / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory / "local"


def prepare(directory: Path, pattern: str, cache: str) -> int:
    settings = ("tokenizer.vocab_size=300", "data.num_proc=1", "data.clean=none", f"data.cache_dir={directory / cache}")
    return main.main(["prepare", str(QUICKSTART), *sets([f"data.sources={pattern}", *settings])])


def contents(cache: Path) -> dict[str, bytes]:
    """The files of a cache but the record of what was hashed, which names the sources."""
    found = {path.relative_to(cache).as_posix(): path for path in cache.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "fingerprints.json"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_glob_finds_in_a_store_what_it_finds_on_disk(pattern: str, tmp_path: Path, moody: type[Moody]) -> None:
    root = local(tmp_path)
    found = remote.expand(f"moody://d/{pattern}")
    here = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in sources.expand(f"{root}/{pattern}")]
    assert here and [(file.url.removeprefix("moody://d/"), file.size) for file in found] == here
    assert all(file.version for file in found) and not moody.reads


def test_prepared_data_are_those_of_local_files_and_are_reused(
    tmp_path: Path, moody: type[Moody], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, "moody://d/fin/**/*", "cache") == 0
    assert prepare(tmp_path, f"{local(tmp_path)}/fin/**/*", "here") == 0
    assert contents(tmp_path / "cache") == contents(tmp_path / "here")
    moody.reads = 0
    capsys.readouterr()
    assert prepare(tmp_path, "moody://d/fin/**/*", "cache") == 0
    assert not moody.reads and "shards" in capsys.readouterr().err
    fsspec.filesystem("moody").pipe("/d/fin/a.jsonl", LINES + LINES.partition(b"\n")[0])
    assert prepare(tmp_path, "moody://d/fin/**/*", "cache") == 0
    assert "to read, the rest is kept" in capsys.readouterr().err


def test_a_large_file_costs_a_request_a_range_and_no_more_memory(moody: type[Moody]) -> None:
    data = b"x" * (5 * remote.RANGE_BYTES + 7)
    fsspec.filesystem("moody").pipe("/d/large.txt", data)
    (file,) = remote.expand("moody://d/large.txt")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert files.sha256_file(file) and moody.reads == 6
    assert tracemalloc.get_traced_memory()[1] - before < 3.5 * remote.RANGE_BYTES
    tracemalloc.stop()
    with file.open("rb") as stream:
        stream.seek(-7, io.SEEK_END)
        assert stream.read() == b"x" * 7 and stream.read() == b""
        stream.seek(3)
        assert len(stream.read()) == len(data) - 3
    assert pickle.loads(pickle.dumps(file)) == file and {file: 1}[file] == 1


def test_a_failure_that_passes_is_not_noticed(moody: type[Moody]) -> None:
    (file,) = remote.expand("moody://d/fin/a.jsonl")
    moody.errors += [OSError(16, "Please reduce your request rate"), TimeoutError(), ConnectionResetError()]
    with file.open("rb") as stream:
        assert stream.read() == LINES


def test_a_file_that_changes_is_refused_whenever_it_does(tmp_path: Path, moody: type[Moody]) -> None:
    fs, cache = fsspec.filesystem("moody"), Cache(tmp_path, build=True)
    for name, other in (("a.jsonl", LINES[:-300]), ("a.jsonl", LINES[::-1]), ("2024/c.parquet", table() + b" ")):
        (item,) = sources.find_inputs(Source(path=f"moody://d/fin/{name}"), "data.sources[0]")
        (item,) = sources.hash_files([item], cache)
        fs.pipe(f"/d/fin/{name}", other)
        with pytest.raises(UserError, match=f"{name} changed while it was read"):
            list(readers.blocks(item, lambda *_: None))
        with pytest.raises(UserError, match="changed while it was read"):
            Cache(tmp_path / "new", build=True).fingerprints(item.paths)
    fs.rm("/d/fin/a.jsonl")
    with pytest.raises(UserError, match="no file matches"):
        sources.find_inputs(Source(path="moody://d/fin/a.jsonl"), "data.sources[0]")


def test_a_store_that_gives_too_little_is_named_with_the_bytes(moody: type[Moody], monkeypatch: Any) -> None:
    (file,) = remote.expand("moody://d/fin/a.jsonl")
    monkeypatch.setattr(Moody, "missing", 5)
    with pytest.raises(UserError, match="is cut short") as caught, file.open("rb") as stream:
        stream.read()
    assert f"{len(LINES):,}: {len(LINES) - 5:,} came" in caught.value.evidence and moody.reads == remote.TRIES


def test_known_bytes_are_not_read_again_unless_the_store_tells_no_version(tmp_path: Path, moody: type[Moody]) -> None:
    cache = Cache(tmp_path, build=True)
    found = remote.expand("moody://d/fin/**/*")
    assert cache.fingerprints(found) == [(files.sha256_file(file), file.size) for file in found]
    moody.reads = 0
    assert Cache(tmp_path, build=False).fingerprints(found) and not moody.reads
    untold = [remote.RemoteFile(file.url, file.size, "") for file in found[:1]]
    with pytest.raises(NotPrepared):
        Cache(tmp_path, build=False).fingerprints(untold)


@pytest.mark.parametrize(
    ("path", "said", "fix"),
    [
        ("moody://d/fin/z.jsonl", "no file matches moody://d/fin/z.jsonl", "correct data.sources[0].path"),
        ("moody://d/fin/2023/*", "no file matches", "correct data.sources[0].path"),
        ("moody://d/fin", "moody://d/fin is a directory", "name its files: moody://d/fin/*.jsonl"),
        ("nostore://d/a.jsonl", "no store is known by nostore://", "s3://"),
        ("gs://d/a.jsonl", "gs:// needs a package that is not installed", "pip install"),
    ],
)
def test_a_wrong_url_is_told_with_what_is_there(
    path: str, said: str, fix: str, tmp_path: Path, moody: type[Moody], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, path, "cache") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert said in told and fix in told and "Traceback" not in told
    assert main.main(["plan", str(QUICKSTART), "--set", f"data.sources={path}"]) == 2


def test_a_cache_has_to_be_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["prepare", str(QUICKSTART), "--set", "data.cache_dir=s3://bucket/cache"]) == 2
    assert "data.cache_dir: is a URL" in " ".join(capsys.readouterr().err.split())


@needs_s3fs
def test_s3_gives_the_bytes_of_local_files_in_few_requests(tmp_path: Path, s3: Server) -> None:
    s3.busy = 3
    assert prepare(tmp_path, "s3://corpus/fin/**/*", "cache") == 0
    assert s3.requests["GET fin/a.jsonl"] <= 5  # hashed, looked at, sampled, read; and once busy
    assert prepare(tmp_path, f"{local(tmp_path)}/fin/**/*", "here") == 0
    assert contents(tmp_path / "cache") == contents(tmp_path / "here")
    s3.requests.clear()
    assert prepare(tmp_path, "s3://corpus/fin/**/*", "cache") == 0
    assert {request.partition(" ")[2] for request in s3.requests} == {"list"}


@needs_s3fs
def test_s3_lists_more_than_a_page(s3: Server) -> None:
    s3.objects |= {f"many/{number:05}.jsonl": b"{}" for number in range(2500)}
    assert len(remote.expand("s3://corpus/many/*.jsonl")) == 2500 and s3.requests["GET list"] <= 4


@needs_s3fs
def test_an_object_that_changes_while_s3_gives_it_is_refused(tmp_path: Path, s3: Server) -> None:
    s3.objects["large.jsonl"] = LINES * 60
    for other in (LINES * 61, LINES * 20):
        s3.changes["large.jsonl"] = 1, other
        with pytest.raises(UserError, match="changed while it was read"):
            Cache(tmp_path, build=True).fingerprints(remote.expand("s3://corpus/large.jsonl"))
    assert "fingerprints.json" not in [path.name for path in tmp_path.iterdir()]


@needs_s3fs
@pytest.mark.parametrize(
    ("trouble", "path", "said"),
    [
        ("", "s3://nobucket/*.jsonl", "s3://nobucket is not there"),
        ("", "s3://corpus/fin/z.jsonl", "s3://corpus/fin holds"),
        ("key", "s3://corpus/fin/*", "the store refuses s3://corpus/fin"),
        ("none", "s3://corpus/fin/*", "cannot be read without credentials"),
        ("closed", "s3://corpus/fin/**/*", "the store refuses s3://corpus/fin/2024"),
        ("secret", "s3://corpus/fin/a.jsonl", "the store refuses s3://corpus/fin/a.jsonl"),
        ("busy", "s3://corpus/fin/*", "asked 5 times"),
        ("short", "s3://corpus/fin/a.jsonl", "s3://corpus/fin/a.jsonl cannot be read"),
        ("away", "s3://corpus/fin/a.jsonl", "Could not connect to the endpoint"),
    ],
)
def test_what_s3_refuses_ends_with_the_reason(
    trouble: str, path: str, said: str, tmp_path: Path, s3: Server, monkeypatch: Any, capsys: Any
) -> None:
    from s3fs import S3FileSystem

    if trouble == "none":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    elif trouble == "away":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    elif trouble == "key":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    s3.forbidden |= {"closed": {"fin/2024/"}, "secret": {"fin/a.jsonl"}}.get(trouble, set())
    s3.short |= {"fin/a.jsonl"} if trouble == "short" else set()
    s3.busy = 1000 if trouble == "busy" else 0
    forget(S3FileSystem)
    assert prepare(tmp_path, path, "cache") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert said in told and "fix:" in told and "Traceback" not in told


class NameNode(BaseHTTPRequestHandler):
    """A directory as a Hadoop cluster's WebHDFS gives it; a reader is sent on to a data node, which is here as well."""

    root: Path
    asked: Counter[str]  # requests by operation

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        service, _, name = unquote(split.path)[1:].partition("/v1")
        query, path = dict(parse_qsl(split.query)), self.root / name.lstrip("/")
        self.asked[f"{service} {query['op']}"] += 1
        if not path.exists():
            error = {"exception": "FileNotFoundException", "message": f"File does not exist: {name}"}
            self.answer(404, json.dumps({"RemoteException": error}).encode())
        elif query["op"] == "GETFILESTATUS":
            self.answer(200, json.dumps({"FileStatus": self.status(path, "")}).encode())
        elif query["op"] == "LISTSTATUS":
            listed = [self.status(entry, entry.name) for entry in path.iterdir()]
            self.answer(200, json.dumps({"FileStatuses": {"FileStatus": listed}}).encode())
        elif service == "webhdfs":
            self.answer(307, b"", f"http://{self.headers['Host']}/data{self.path.removeprefix('/webhdfs')}")
        else:
            first = int(query["offset"])
            self.answer(200, path.read_bytes()[first : first + int(query["length"])])

    def status(self, path: Path, suffix: str) -> dict[str, Any]:
        about = path.stat()
        kind, size = ("DIRECTORY", 0) if path.is_dir() else ("FILE", about.st_size)
        return {"pathSuffix": suffix, "type": kind, "length": size, "modificationTime": int(about.st_mtime * 1000)}

    def answer(self, code: int, body: bytes, location: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)


@needs_requests
def test_a_hadoop_cluster_is_read_by_webhdfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = type("Node", (NameNode,), {"root": local(tmp_path), "asked": Counter[str]()})
    with ThreadingHTTPServer(("127.0.0.1", 0), node) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"webhdfs://127.0.0.1:{server.server_port}"
        assert prepare(tmp_path, f"{url}/fin/**/*", "cache") == 0
        assert prepare(tmp_path, f"{tmp_path}/local/fin/**/*", "here") == 0
        assert contents(tmp_path / "cache") == contents(tmp_path / "here")
        assert node.asked["webhdfs OPEN"] == node.asked["data OPEN"] > 0
        node.asked.clear()
        assert prepare(tmp_path, f"{url}/fin/**/*", "cache") == 0
        assert not node.asked["webhdfs OPEN"]  # known by size and time
        (tmp_path / "local/fin/a.jsonl").write_bytes(LINES + LINES.partition(b"\n")[0])
        assert prepare(tmp_path, f"{url}/fin/**/*", "cache") == 0 and node.asked["webhdfs OPEN"]
        capsys.readouterr()
        assert prepare(tmp_path, f"{url}/fin/z.jsonl", "cache") == 2
        assert "no file matches" in capsys.readouterr().err
        server.shutdown()
