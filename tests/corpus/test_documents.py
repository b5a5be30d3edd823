"""Rows to documents: what is read, what is set aside, when preparation stops."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache
from finlm.corpus import documents, steps
from finlm.corpus.read import parsing, readers, sources
from finlm.corpus.read.sources import Input
from finlm.corpus.workers import LocalEngine
from finlm.recipe.schema_data import Clean, Source, clean_or_none

NO_RULES = Clean(**clean_or_none("none"))


def row(text: Any, **meta: Any) -> bytes:
    return json.dumps({"text": text, "meta": meta}, ensure_ascii=False).encode()


def read(
    directory: Path, path: Path, allowed: float = 1.0, field: str = "text", processes: int = 1
) -> tuple[documents.Documents, list[str], list[dict[str, Any]]]:
    """(manifest, all texts, broken rows) of one file."""
    out = directory / "step"
    out.mkdir()
    item = Input("news", (path,), "share", text_field=field, sha256=(files.sha256_file(path),))
    manifest = documents.write(out, [item], NO_RULES, LocalEngine(processes), allowed, directory)
    texts = [
        text
        for chunk in manifest.chunks
        for text in documents.read_texts(chunk.path, np.ones(chunk.rows.stop - chunk.rows.start, dtype=np.bool_))
    ]
    return manifest, texts, list(files.read_json_lines(out / "broken.jsonl"))


def test_rows_are_read_whatever_their_meta_newlines_or_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    rows = [row("第一篇", source="a"), row("第二篇", other=[1, {"x": None}]), b"", b"   ", b'{"text": "third"}']
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    manifest, texts, broken = read(tmp_path, path)
    assert texts == ["第一篇", "第二篇", "third"]
    assert manifest.inputs[0].rows == 3 and broken == []


BROKEN = {
    b'{"text": "cut': "not JSON: Unterminated string starting at at character 10",
    b"[1, 2]": "not an object but a list",
    b'{"content": "x"}': "no field 'text', only 'content'",
    b'{"text": 7}': "field 'text' is a number, not a string",
    b'{"text": null}': "field 'text' is null, not a string",
    b'{"text": "\xff\xfe"}': "not UTF-8: byte 0xff at byte 11",
    b'{"text": "\\ud83d"}': "half of a surrogate pair in the text",
    b"[" * 100_000: "nested too deeply",
}


def test_every_kind_of_broken_row_is_set_aside_with_its_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(b"\n".join(part for line in BROKEN for part in (row("好的文档"), line)))
    manifest, texts, broken = read(tmp_path, path)
    assert texts == ["好的文档"] * len(BROKEN)
    assert [(item["line"], item["reason"]) for item in broken] == [
        (2 * number + 2, reason) for number, reason in enumerate(BROKEN.values())
    ]
    assert all(item["file"] == str(path) and len(item["start"]) <= 200 for item in broken)
    assert manifest.inputs[0].broken == len(BROKEN)


def test_too_many_broken_rows_stop_with_examples_and_keep_them_beside_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(b"\n".join([row("好的文档")] * 97 + [b"oops"] * 3))
    with pytest.raises(UserError) as caught:
        read(tmp_path, path, allowed=0.02)
    kept = tmp_path / "broken-news.jsonl"
    assert "3 of 100 rows" in caught.value.problem and "data.max_broken_fraction" in caught.value.problem
    assert f"{path}:98: not JSON" in caught.value.evidence and len(caught.value.evidence.splitlines()) == 3
    assert str(kept) in caught.value.fix
    assert len(list(files.read_json_lines(kept))) == 3


def test_a_file_that_is_one_json_list_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "news.json"
    path.write_bytes(b"[" + b", ".join([row("好的文档")] * 3) + b"]")
    with pytest.raises(UserError, match="1 of 1 rows cannot be read") as caught:
        read(tmp_path, path, allowed=0.02)
    assert "it is one JSON list: write a row a line (jq -c '.[]'" in caught.value.fix


def test_of_very_many_broken_rows_the_first_are_kept_and_the_cut_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "_KEPT", 5)
    path = tmp_path / "news.jsonl.gz"
    path.write_bytes(gzip.compress(b"oops\n" * 300 + (row("好的文档") + b"\n") * 60)[:-8])
    with pytest.raises(UserError) as caught:
        read(tmp_path, path, allowed=0.02)
    assert f"the first 5 of them are in {tmp_path}/broken-news.jsonl" in caught.value.fix
    assert [row["line"] for row in files.read_json_lines(tmp_path / "broken-news.jsonl")] == [1, 2, 3, 4, 5]
    assert "the archive is cut short" in caught.value.evidence


def test_a_wrong_text_field_of_the_last_source_is_told_before_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    for name, field in (("good", "text"), ("wrong", "content")):
        (tmp_path / f"{name}.jsonl").write_bytes(f'{{"{field}": "{"营业收入" * 20}"}}\n'.encode() * 50)
    inputs = [Input(name, (tmp_path / f"{name}.jsonl",), "share") for name in ("good", "wrong")]
    out = tmp_path / "step"
    out.mkdir()
    with pytest.raises(UserError, match=r"source wrong: \d+ of its first \d+ rows cannot be read") as caught:
        documents.write(out, inputs, NO_RULES, LocalEngine(1), 0.001, tmp_path)
    assert f"{tmp_path}/wrong.jsonl:1: no field 'text', only 'content'" in caught.value.evidence
    assert "text_field" in caught.value.fix and not list(tmp_path.rglob("chunks/**/*.txt"))
    (tmp_path / "wrong.jsonl").write_bytes(b"oops\n" * 400)
    parsing.check_first_rows(inputs, 1.0)  # all that is asked for


def test_broken_rows_within_the_limit_are_counted_only(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(b"\n".join([row("好的文档")] * 97 + [b"oops"] * 3))
    manifest, texts, broken = read(tmp_path, path, allowed=0.03)
    assert len(texts) == 97 and len(broken) == 3 and manifest.inputs[0].rows == 100
    assert not (tmp_path / "broken-news.jsonl").exists()


def test_a_cut_archive_stops_by_default_and_gives_what_it_has_when_allowed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = [f"{number} {rng.bytes(40).hex()}" for number in range(5000)]
    path = tmp_path / "news.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(map(row, whole)))[:-20_000])
    with pytest.raises(UserError, match=r"source news: news\.jsonl\.gz ends early") as caught:
        read(tmp_path, path, allowed=0.001)
    assert "the archive is cut short; what follows is lost" in caught.value.evidence
    assert "counts as 1.00% of the rows, of which data.max_broken_fraction allows 0.10%" in caught.value.evidence
    assert "fetch it again" in caught.value.fix and "data.max_broken_fraction=0.01," in caught.value.fix
    (tmp_path / "again").mkdir()
    manifest, texts, broken = read(tmp_path / "again", path, allowed=0.01)
    assert steps.list_cut_files(tmp_path / "again/step", manifest.inputs) == [str(path)]
    assert texts == whole[: len(texts)] and len(texts) > 3000
    assert [item["line"] for item in broken] == [len(texts) + 1]


def test_broken_rows_that_are_too_many_beside_a_cut_are_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([row("好的文档")] * 50 + [b"oops"] * 50))[:-8])
    with pytest.raises(UserError, match=r"source news: 5\d of \d+ rows cannot be read") as caught:
        read(tmp_path, path, allowed=0.02)
    assert "the archive is cut short" in caught.value.evidence and "not JSON" in caught.value.evidence


def test_chunks_do_not_depend_on_workers_and_lines_may_be_longer_than_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 4096)
    whole = [str(number) + "字" * (number % 90) for number in range(300)] + ["长" * 20_000, "尾巴"]
    path = tmp_path / "news.jsonl"
    path.write_bytes(b"\n".join(map(row, whole)))
    seen = []
    for processes in (1, 3):
        directory = tmp_path / str(processes)
        directory.mkdir()
        manifest, texts, _ = read(directory, path, processes=processes)
        assert texts == whole and len(manifest.chunks) > 5
        chunks = sorted(path for path in (directory / "chunks").rglob("*") if path.is_file())
        seen.append((manifest.to_json(), [(chunk.name, chunk.read_bytes()) for chunk in chunks]))
    assert seen[0] == seen[1]


def test_gzip_is_known_by_content_and_the_text_field_by_name(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(gzip.compress(b'{"content": "\\u6b63\\u6587"}\n') + gzip.compress(b'{"content": "second member"}'))
    assert read(tmp_path, path, field="content")[1] == ["正文", "second member"]


def write_small_files(directory: Path, count: int) -> None:
    """Write `count` files of one row, the row of number 7 broken."""
    for number in range(count):
        content = b'{"text": 7}' if number == 7 else row(f"第{number}篇")
        (directory / f"{number:04d}.jsonl").write_bytes(content)


@pytest.mark.parametrize("processes", [1, 2])
def test_many_small_files_share_a_chunk_and_a_broken_row_keeps_its_file(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 200)
    monkeypatch.setattr(sources, "_LISTED", 19)
    (tmp_path / "many").mkdir()
    write_small_files(tmp_path / "many", 20)
    inputs = sources.find_inputs(Source(path=f"{tmp_path}/many/*.jsonl", name="many"), "data.sources[0]")
    inputs = sources.hash_files(inputs, Cache(tmp_path, build=True))
    (tmp_path / "step").mkdir()
    made = documents.write(tmp_path / "step", inputs, NO_RULES, LocalEngine(processes), 1.0, tmp_path)
    assert 1 < len(made.chunks) < 10 and made.inputs[0].documents == 19
    (broken,) = files.read_json_lines(tmp_path / "step/broken.jsonl")
    assert (broken["file"], broken["line"]) == (f"{tmp_path}/many/0007.jsonl", 1)
    (listed,) = made.inputs[0].files  # above the limit they are one line of the report
    assert listed["file"] == "20 files" and listed["sha256"] == made.inputs[0].sha256


def test_very_many_files_without_a_name_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_files(tmp_path, 20)
    monkeypatch.setattr(sources, "_MOST_SOURCES", 19)
    with pytest.raises(UserError, match="matches 20 files") as caught:
        sources.find_inputs(Source(path=f"{tmp_path}/*.jsonl"), "data.sources[0]")
    assert "data.sources[0].name" in caught.value.fix
    assert len(sources.find_inputs(Source(path=f"{tmp_path}/*.jsonl", name="many"), "data.sources[0]")) == 1
    monkeypatch.setattr(sources, "_MOST_SOURCES", 20)
    assert len(sources.find_inputs(Source(path=f"{tmp_path}/*.jsonl"), "data.sources[0]")) == 20
