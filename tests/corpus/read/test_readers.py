"""Every format and damage a source may have: what is read, and what is said about the rest."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from finlm.base import files, step_cache
from finlm.base.errors import UserError
from finlm.corpus import documents
from finlm.corpus.read import parsing, readers, sources
from finlm.corpus.workers import LocalEngine
from finlm.recipe.schema_data import Clean, Source, clean_or_none

from helpers import ROOT

NO_RULES = Clean(**clean_or_none("none"))
TEXTS = [f"第{number}篇：营业收入同比增长{number}%" for number in range(500)]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def read(directory: Path, **settings: Any) -> tuple[documents.InputRead, list[str], list[dict[str, Any]]]:
    """(manifest entry, texts, broken rows) of a recipe's source that is one input."""
    (item,) = sources.find_inputs(Source(**settings), "data.sources[0]")
    (item,) = sources.hash_files([item], step_cache.Cache(directory, build=True))
    out = directory / "step"
    out.mkdir(exist_ok=True)
    manifest = documents.write(out, [item], NO_RULES, LocalEngine(1), 1.0, directory)
    texts = [
        text
        for chunk in manifest.chunks
        for text in documents.read_texts(chunk.path, np.ones(chunk.rows.stop - chunk.rows.start, dtype=np.bool_))
    ]
    return manifest.inputs[0], texts, list(files.read_json_lines(out / "broken.jsonl"))


def utf16(path: Path) -> None:
    path.write_bytes(jsonl(TEXTS).decode().encode("utf-16"))


def two_members(path: Path) -> None:
    path.write_bytes(gzip.compress(jsonl(TEXTS[:200])) + gzip.compress(jsonl(TEXTS[200:])) + b"\0" * 512)


def two_frames(path: Path) -> None:
    packer = zstandard.ZstdCompressor()
    path.write_bytes(packer.compress(jsonl(TEXTS[:200])) + packer.compress(jsonl(TEXTS[200:])))


def table(path: Path) -> None:
    rows = pa.table({"text": TEXTS, "embedding": [[0.0] * 8] * 500, "meta": [{"site": "a"}] * 500})
    parquet.write_table(rows, path, row_group_size=64)


def lines(path: Path) -> None:
    path.write_text("\n".join(TEXTS), encoding="gb18030")


@pytest.mark.parametrize(
    ("name", "write", "settings"),
    [
        ("news.jsonl", lambda path: path.write_bytes(b"\xef\xbb\xbf" + jsonl(TEXTS)), {}),
        ("news.jsonl", utf16, {}),
        ("news.jsonl.gz", two_members, {}),
        ("unpacked.jsonl.gz", lambda path: path.write_bytes(jsonl(TEXTS)), {}),
        ("news.jsonl.zst", two_frames, {}),
        ("news.parquet", table, {}),
        ("news.txt", lines, {"format": "lines", "encoding": "gb18030"}),
    ],
)
def test_every_format_gives_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Any, settings: dict[str, str]
) -> None:
    write(tmp_path / name)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 5000)
    entry, texts, broken = read(tmp_path, path=str(tmp_path / name), **settings)
    assert texts == TEXTS and broken == [] and entry.rows == 500
    assert entry.files == [{"source": sources.stem(name), "split": "share", "file": name, "sha256": entry.sha256}]


def test_a_saved_data_set_is_read_without_its_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"content": TEXTS, "other": list(range(500))})
    datasets.DatasetDict({"train": split, "test": split.select(range(3))}).save_to_disk(tmp_path / "set")
    entry, texts, _ = read(tmp_path, path=str(tmp_path / "set"), text_field="content")
    assert texts == TEXTS and entry.source == "set" and len(entry.sha256) == 64
    assert len(read(tmp_path, path=str(tmp_path / "set"), text_field="content", split="test")[1]) == 3
    with pytest.raises(UserError, match="has no column 'body'") as caught:
        read(tmp_path, path=str(tmp_path / "set"), text_field="body")
    assert caught.value.evidence == "it has content, other"


def test_a_data_set_of_the_hub_is_read_at_its_commit_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / f"hub/datasets--finance--corpus/snapshots/{commit}/data"
    place.mkdir(parents=True)
    for name, texts in (("train-0.parquet", TEXTS[:250]), ("train-1.parquet", TEXTS[250:]), ("test-0.parquet", ["x"])):
        parquet.write_table(pa.table({"text": texts}), place / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    entry, texts, _ = read(tmp_path, dataset="finance/corpus", revision=commit)
    assert texts == TEXTS and entry.pinned == f"finance/corpus@{commit}" and entry.file == "2 files"
    assert read(tmp_path, dataset="finance/corpus", revision=commit, files="data/test*")[1] == ["x"]
    with pytest.raises(UserError, match="needs the commit"):
        read(tmp_path, dataset="finance/corpus", revision="main")
    for absent in ("finance/absent", "not/an/id"):
        with pytest.raises(UserError, match="cannot be fetched"):
            read(tmp_path, dataset=absent, revision=commit)


def test_nothing_of_the_hub_is_fetched_to_look_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, asked = "0123456789abcdef0123456789abcdef01234567", list[dict[str, Any]]()

    def snapshot(dataset: str, **wanted: Any) -> str:
        asked.append(wanted)
        if wanted["local_files_only"]:
            raise LocalEntryNotFoundError("not in the cache")
        raise HfHubHTTPError.__mro__[1]("403 Forbidden")  # what a proxy that refuses gives

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = Source(dataset="finance/corpus", revision=commit)
    with pytest.raises(step_cache.NotPrepared):
        sources.find_inputs(source, "data.sources[0]", fetch=False)
    with pytest.raises(UserError, match="cannot be fetched") as caught:
        sources.find_inputs(source, "data.sources[0]")
    assert caught.value.evidence == "403 Forbidden"
    assert {"*.jsonl.gz", "*.parquet"} <= set(asked[1]["allow_patterns"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("report.txt.jsonl", "jsonl"),
        ("report.jsonl.txt.GZ", "txt"),
        ("a.parquet.jsonl.zst", "jsonl"),
        ("news", "jsonl"),
    ],
)
def test_the_last_suffix_but_the_compression_says_the_format(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).touch()
    (item,) = sources.find_inputs(Source(path=str(tmp_path / name)), "data.sources[0]")
    assert item.format == kind


def test_text_files_of_a_folder_are_one_source_and_each_one_document(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for number, text in enumerate(["第一本\n\n第二章", "第二本", ""]):
        (tmp_path / f"books/{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "books/3.txt.gz").write_bytes(gzip.compress("第四本".encode()))
    (tmp_path / "books/4.txt").write_bytes(b"\xff\xfe" + "第五本".encode("utf-16-le"))
    entry, texts, broken = read(tmp_path, path=str(tmp_path / "books/*.txt*"))
    assert texts == ["第一本\n\n第二章", "第二本", "", "第四本", "第五本"] and broken == []
    assert entry.source == "books" and entry.file == "5 files" and len(entry.files) == 5


def test_json_lines_files_are_one_source_under_a_name_and_one_each_without(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"part-{number}.jsonl").write_bytes(jsonl(TEXTS[number * 10 : number * 10 + 10]))
    entry, texts, _ = read(tmp_path, path=f"{tmp_path}/part-*.jsonl", name="news")
    assert texts == TEXTS[:30] and entry.source == "news" and entry.file == "3 files"
    found = sources.find_inputs(Source(path=f"{tmp_path}/part-*.jsonl"), "data.sources[0]")
    assert [item.source for item in found] == ["part-0", "part-1", "part-2"]


def test_two_stars_follow_links_and_find_every_file_once(tmp_path: Path) -> None:
    for name in ("corpus/a/old.jsonl", "corpus/b/deep/new.jsonl", "elsewhere/x/linked.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "corpus/0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/1").symlink_to(tmp_path / "corpus/b")
    (tmp_path / "corpus/a/again.jsonl").symlink_to(tmp_path / "corpus/a/old.jsonl")
    for circle in ("corpus/b/up", "corpus/b/deep/up", "elsewhere/up"):
        (tmp_path / circle).symlink_to(tmp_path / "corpus")
    found = sources.expand(f"{tmp_path}/**/*.jsonl")
    assert {path.name for path in found} == {"again.jsonl", "new.jsonl", "linked.jsonl"} and len(found) == 3
    found = sources.expand(f"{tmp_path}/corpus/**/x/*.jsonl")
    assert found == [tmp_path / "corpus/0/x/linked.jsonl"]


def test_a_worker_is_not_sent_the_names_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, plain = list[int](), documents.parse
    monkeypatch.setattr(documents, "parse", lambda task: sizes.append(len(pickle.dumps(task.item))) or plain(task))
    for count in (1, 200):
        for number in range(count):
            (tmp_path / f"{number}.txt").write_text("书", encoding="utf-8")
        assert len(read(tmp_path, path=f"{tmp_path}/*.txt", name="books")[1]) == count
    assert sizes == sizes[:1] * 2


def test_text_and_counted_fields_may_lie_deep_and_rows_may_differ(tmp_path: Path) -> None:
    rows = [
        {"body": {"zh": "甲"}, "meta": {"source": "新浪", "tags": [1]}},
        {"body": {"zh": "乙"}, "meta": {"source": "东方财富"}, "meta.source": "新浪"},
        {"body": {"zh": "丙"}, "meta": None},
        {"body": "丁"},
        {"body": {"zh": "戊"}, "meta": {"source": "\ud800"}},
    ]
    path = tmp_path / "news.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows))
    entry, texts, broken = read(tmp_path, path=str(path), text_field="body.zh", meta={"site": "meta.source"})
    assert texts == ["甲", "乙", "丙"] and entry.values == {"site": [("新浪", 2), ("", 1)]}
    assert [row["reason"] for row in broken] == [
        "no field 'body.zh', only 'body'", "half of a surrogate pair in field 'meta.source'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pack", "what", "tool"), [(lzma.compress, "an xz", "xz -d"), (bz2.compress, "a bzip2", "bunzip2")]
)
def test_an_archive_that_is_not_read_is_named_with_what_unpacks_it(
    tmp_path: Path, pack: Any, what: str, tool: str
) -> None:
    path = tmp_path / "news.jsonl.packed"
    path.write_bytes(pack(jsonl(TEXTS)))
    with pytest.raises(UserError, match=f"news.jsonl.packed is {what} archive") as caught:
        read(tmp_path, path=str(path))
    assert f"{tool} news.jsonl.packed" in caught.value.fix


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_joined_files_may_each_begin_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    mark = "".encode("utf-16") if encoding == "utf-16" else b"\xef\xbb\xbf"
    native = "utf-16-le" if encoding == "utf-16" else encoding
    parts = [mark + jsonl(TEXTS[first : first + 10]).decode().encode(native) for first in (0, 10)]
    (tmp_path / "news.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    _, texts, broken = read(tmp_path, path=str(tmp_path / "news.jsonl.gz"))
    assert texts == TEXTS[:20] and broken == []


def test_only_encodings_of_text_are_taken() -> None:
    for name in ("base64", "rot13", "zlib"):
        with pytest.raises(ValueError, match=f"no text encoding '{name}'"):
            Source(path="a.jsonl", encoding=name)
    assert Source(path="a.jsonl", encoding="big5").encoding == "big5"


def test_damage_costs_only_the_rows_it_struck_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    good = jsonl(TEXTS[:3])
    path.write_bytes(good + b'{"text": "\xb9\xfe"}\n' + b"\0" * 4096 + b"\n" + b'{"text": "a\0b"}\n' + good)
    _, texts, broken = read(tmp_path, path=str(path))
    assert texts == TEXTS[:3] * 2 and [row["line"] for row in broken] == [4, 5, 6]
    assert "not UTF-8: byte 0xb9" in broken[0]["reason"] and "NUL bytes" in broken[1]["reason"]
    assert "NUL bytes" in broken[2]["reason"]
    path.write_bytes(jsonl(TEXTS).decode().encode("gb18030").replace("第7篇".encode("gb18030"), b"\xff\xff", 1))
    _, texts, broken = read(tmp_path, path=str(path), encoding="gb18030")
    assert texts == TEXTS[:7] + TEXTS[8:] and [(row["line"], row["reason"]) for row in broken] == [(8, "not gb18030")]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "struck"])
def test_a_damaged_archive_gives_what_comes_before(tmp_path: Path, kind: str, damage: str) -> None:
    rng = np.random.default_rng(0)
    texts = [f"{number} {rng.bytes(300).hex()}" for number in range(5000)]
    pack = gzip.compress if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(pack(jsonl(texts)))
    if damage == "cut":
        del data[-20_000:]
    else:
        data[-20_000:-19_000] = rng.bytes(1000)
    path = tmp_path / f"news.jsonl.{kind}"
    path.write_bytes(data)
    entry, found, broken = read(tmp_path, path=str(path))
    assert entry.cut == 1 and "the archive is" in broken[-1]["reason"]
    assert found[:2500] == texts[:2500]  # beyond, a struck archive may give nonsense before its checksum fails
    if damage == "cut":
        assert found == texts[: len(found)] and len(found) > 4800 and broken[-1]["line"] == len(found) + 1


def test_a_damaged_table_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "news.parquet"
    table(path)
    path.write_bytes(path.read_bytes()[:-100])
    entry, texts, broken = read(tmp_path, path=str(path))
    assert texts == [] and entry.cut == 1 and broken[0]["reason"].startswith("the file is damaged: ")


def test_a_string_that_is_not_utf8_costs_its_row_in_columns_of_strings_and_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "news.parquet"
    strings = pa.array([b"first", "净利润".encode("gbk"), b"third"])
    parquet.write_table(pa.table({"text": strings.view(pa.string()), "raw": strings}), path)
    entry, texts, broken = read(tmp_path, path=str(path))
    assert texts == ["first", "third"] and entry.rows == 3
    assert [(row["line"], row["reason"]) for row in broken] == [(2, "not UTF-8: byte 0xbe at byte 1")]
    _, texts, broken = read(tmp_path, path=str(path), text_field="raw")
    assert texts == ["first", "third"] and [row["line"] for row in broken] == [2]


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + "/新闻.jsonl".encode("gbk"))).write_bytes(jsonl(TEXTS))
    with pytest.raises(UserError, match="not UTF-8") as caught:
        read(tmp_path, path=f"{tmp_path}/*.jsonl")
    assert caught.value.evidence.endswith("as GBK " + f"{tmp_path}/新闻.jsonl")
    f"{caught.value}".encode()


def test_a_document_of_100_megabytes_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    long = "净利润同比增长。" * (100_000_000 // 24)
    path.write_bytes(jsonl(["前", long, "后"]))
    entry, texts, _ = read(tmp_path, path=str(path))
    assert texts == ["前", long, "后"] and entry.bytes > 99_000_000


def test_pieces_of_a_file_are_cut_into_whole_lines_of_any_length() -> None:
    text = b"one\n" + b"x" * 1000 + b"\ntwo\n\nthree"
    for step in (1, 3, 7, 100, 5000):
        parts = (text[start : start + step] for start in range(0, len(text), step))
        found = list(readers.lines(parts, 10))
        assert b"".join(data for _, data in found) == text
        for first, data in found:
            assert text[: text.index(data)].count(b"\n") + 1 == first


def test_reading_tables_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    table(tmp_path / "news.parquet")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from finlm.corpus.read import readers; from finlm.corpus.read import sources;"
        "item = sources.Input('a', (Path(sys.argv[2]),), 'share', 'parquet');"
        "assert sum(1 for block in readers.blocks(item, lambda n: None)) == 1;"
        "sys.exit(bool({'torch', 'pandas', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "src"), str(tmp_path / "news.parquet")]
    assert subprocess.run(command, check=False).returncode == 0


def test_what_is_not_a_text_is_named() -> None:
    item = sources.Input("a", (Path("x"),), "share")
    block = readers.Block("jsonl", Path("x"), 1, b'{"text": NaN}\n{"text": "ok", "n": NaN}\n{"text": ["a"]}')
    found = list(parsing.parse_block(block, item))
    assert [row.text for row in found] == ["", "ok", ""]
    assert [row.broken for row in found] == [
        "field 'text' is a number, not a string", "", "field 'text' is a list, not a string"
    ]  # fmt: skip


def test_a_glob_names_the_directory_that_it_cannot_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "news.jsonl").write_bytes(jsonl(TEXTS))
    plain = os.scandir

    def scandir(path: Path) -> Any:  # chmod does not keep root out
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(sources.os, "scandir", scandir)
    for pattern in ("*/*.jsonl", "**/*.jsonl"):
        with pytest.raises(UserError, match=r"cannot look into .*closed"):
            sources.expand(f"{tmp_path}/{pattern}")


def test_a_link_that_leads_nowhere_is_no_file_less(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "in/b.jsonl").symlink_to("/mnt/lost/b.jsonl")
    (tmp_path / "in/.lock").symlink_to("editor@host")
    for pattern in ("in/*.jsonl", "**/*.jsonl", "in/b.jsonl"):
        with pytest.raises(UserError, match=r"b\.jsonl leads nowhere"):
            sources.expand(f"{tmp_path}/{pattern}")
    assert sources.expand(f"{tmp_path}/in/a*.jsonl") == [tmp_path / "in/a.jsonl"]
    (tmp_path / "in/b.jsonl").unlink()
    assert sources.expand(f"{tmp_path}/**/*.jsonl") == [tmp_path / "in/a.jsonl"]


@pytest.mark.parametrize("lost", [1, 2, 5, 9, 20, 40])
def test_a_plain_file_that_ends_within_a_row_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    whole = jsonl(TEXTS).removesuffix(b"\n")
    (tmp_path / "news.jsonl").write_bytes(whole[:-lost])
    for size in (8 * 2**20, 5000):
        monkeypatch.setattr(readers, "BLOCK_BYTES", size)
        entry, texts, (broken,) = read(tmp_path, path=str(tmp_path / "news.jsonl"))
        assert texts == TEXTS[:-1] and entry.cut == 1 and entry.rows == 500
        assert broken["reason"] == readers.FILE_SHORT and broken["line"] == 500
    (tmp_path / "news.jsonl").write_bytes(whole)
    entry, texts, broken_rows = read(tmp_path, path=str(tmp_path / "news.jsonl"))
    assert texts == TEXTS and not entry.cut and not broken_rows
    (tmp_path / "news.jsonl").write_bytes(whole + b"\n{broken: 1}")  # a mistake in the last row is no cut
    assert not read(tmp_path, path=str(tmp_path / "news.jsonl"))[0].cut


@pytest.mark.parametrize("name", ["news.jsonl", "news.jsonl.gz", "news.txt", "news.parquet"])
@pytest.mark.parametrize("change", ["append", "truncate", "replace"])
def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path: Path, name: str, change: str) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        table(path)
    else:
        path.write_bytes(gzip.compress(jsonl(TEXTS)) if name.endswith(".gz") else jsonl(TEXTS))
    (item,) = sources.find_inputs(Source(path=str(path)), "data.sources[0]")
    (item,) = sources.hash_files([item], step_cache.Cache(tmp_path, build=True))
    data = path.read_bytes()
    changed = {"append": data + data, "truncate": data[: len(data) * 2 // 3], "replace": data[:-9] + b"\n" + data[-8:]}
    path.write_bytes(changed[change])
    with pytest.raises(UserError, match="changed while it was read"):
        list(readers.blocks(item, step_cache.ignore_progress))


def test_new_bytes_of_the_same_size_and_time_are_seen(tmp_path: Path) -> None:
    path, cache = tmp_path / "news.jsonl", step_cache.Cache(tmp_path / "cache", build=True)
    path.write_bytes(jsonl(TEXTS))
    before, state = cache.fingerprints([path]), path.stat()
    assert cache.fingerprints([path]) == before
    path.write_bytes(jsonl(TEXTS[::-1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as rsync -t and cp -p do
    assert path.stat().st_size == state.st_size and path.stat().st_mtime_ns == state.st_mtime_ns
    assert cache.fingerprints([path]) != before


def test_nulls_have_a_remedy_that_lets_no_damage_through_and_binary_columns_are_text(tmp_path: Path) -> None:
    path = str(tmp_path / "news.parquet")
    texts = [None if number % 10 == 0 else text for number, text in enumerate(TEXTS)]
    parquet.write_table(pa.table({"text": texts}), path)
    entry, read_texts, broken = read(tmp_path, path=path)
    assert entry.broken == 50 and "null" in broken[0]["reason"]
    (item,) = sources.find_inputs(Source(path=path), "data.sources[0]")
    (item,) = sources.hash_files([item], step_cache.Cache(tmp_path, build=True))
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError) as caught:
        documents.write(tmp_path / "again", [item], NO_RULES, LocalEngine(1), 0.001, tmp_path)
    assert "data.sources[i].null_text" in caught.value.fix
    entry, read_texts, broken = read(tmp_path, path=path, null_text="empty")
    assert entry.broken == 0 and read_texts == [text or "" for text in texts]
    parquet.write_table(pa.table({"text": [*(text.encode() for text in TEXTS), b"\xff\xfe"]}), path)
    entry, read_texts, (wrong,) = read(tmp_path, path=path)
    assert read_texts == TEXTS and wrong["line"] == 501 and wrong["reason"].startswith("not UTF-8: byte 0xff")
