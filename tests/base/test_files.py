"""Files that are whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files, runs, step_cache
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir


def test_a_failed_directory_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), files.new_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_replaces_the_old_one_and_leaves_no_temporary(tmp_path: Path) -> None:
    for value in (1, 2):
        files.write_json(tmp_path / "a" / "v.json", {"v": value})
    assert files.read_json(tmp_path / "a" / "v.json") == {"v": 2}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["v.json"]


def test_a_row_written_after_a_cut_line_is_read_and_the_cut_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    files.append_json_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write('{"step": 2, "text": "净'.encode()[:-1])
    files.append_json_line(path, {"step": 3})
    assert list(files.read_json_lines(path)) == [{"step": 1}, {"step": 3}]


def test_the_tree_hash_depends_on_names_and_bytes_only(tmp_path: Path) -> None:
    x, y = tmp_path / "x", tmp_path / "y"
    for path in (x / "a", x / "b", y / "a", y / "b"):
        files.write_text(path, path.name)
    assert runs.tree_hash(x, [x / "a", x / "b"]) == runs.tree_hash(y, [y / "b", y / "a"])
    files.write_text(y / "a", "other")
    assert runs.tree_hash(x, [x / "a", x / "b"]) != runs.tree_hash(y, [y / "a", y / "b"])


def test_events_hold_no_nan(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append_event("step", loss=float("nan"), grad_norm=float("inf"), lr=0.1)
    (row,) = run.read_events("step")
    assert (row["loss"], row["grad_norm"], row["lr"]) == (None, None, 0.1)
    json.loads(run.events.read_text(), parse_constant=pytest.fail)


def test_only_checkpoints_with_a_manifest_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 100):
        run.checkpoint(step).mkdir(parents=True)
    for step in (100, 5):
        files.write_json(run.checkpoint(step) / "manifest.json", {})
    assert [step for step, _ in run.complete_checkpoints()] == [5, 100]


def test_a_file_that_is_removed_while_it_is_hashed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sha256 = tmp_path / "news.jsonl", step_cache.sha256
    source.write_text("{}", encoding="utf-8")

    def hash_and_remove(path: Path, advance: Any) -> str:
        digest = sha256(path, advance)
        path.unlink()
        return digest

    monkeypatch.setattr(step_cache, "sha256", hash_and_remove)
    with pytest.raises(UserError, match=r"news\.jsonl changed while it was read") as told:
        step_cache.Cache(tmp_path, build=True).fingerprints([source])
    assert told.value.evidence == "it is gone"
