"""The far end of sync, run here on a directory, and the choice of files."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files, runs
from finlm.base.errors import UserError
from finlm.hosts import file_trees, sync
from finlm.hosts.remote import receiver


def ask(what: str, root: Path, names: dict[str, str]) -> dict[str, Any]:
    """Pipe receiver.py to a bare python3, as ssh does."""
    tree = {"path": str(root), "files": names, "follow": False}
    request = {"do": what, "root": str(root), "source": "n0:/x", "token": "", "dry_run": False, "trees": [tree]}
    script = Path(receiver.__file__).read_text(encoding="utf-8") + f"\nanswer({json.dumps(request)!a})\n"
    command = [sys.executable, "-I", "-S", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, encoding="utf-8", check=True)
    reply: dict[str, Any] = json.loads(done.stdout.removeprefix(receiver.MARK))
    return reply


def test_it_is_python_3_8_without_our_modules() -> None:
    source = Path(receiver.__file__).read_text(encoding="utf-8")
    module = ast.parse(source, feature_version=(3, 8))
    names = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert not any(name and name.startswith("finlm") for name in names)


def test_the_tree_hash_is_the_one_of_base_files(tmp_path: Path) -> None:
    for name in ("a", "资产.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    found = receiver.digests(str(tmp_path), ["a", "资产.txt"], False)
    assert receiver.tree_hash(found) == runs.tree_hash(tmp_path, tmp_path.iterdir())


@pytest.mark.parametrize("escape", ["../precious", "{outside}/precious", "link/precious"])
def test_a_record_that_points_outside_removes_nothing(tmp_path: Path, escape: str) -> None:
    root, outside = tmp_path / "root", tmp_path
    (outside / "precious").write_text("x")
    root.mkdir()
    (root / "link").symlink_to(outside)
    record = {"trees": {str(root): {"tree": None, "files": [escape.format(outside=outside)]}}}
    (root / receiver.RECORD).write_text(json.dumps(record))
    assert ask("prepare", root, {})["removed"] == 0
    assert (outside / "precious").exists()


def test_what_the_disk_refuses_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Error" in ask("prepare", tmp_path / "file" / "below", {"a": "0"})["error"]
    (tmp_path / receiver.RECORD).write_text("{")
    assert "JSONDecodeError" in ask("prepare", tmp_path, {})["error"]


def test_data_is_followed_through_links_and_a_loop_ends(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f").write_text("tokens")
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.bin").symlink_to("../blobs/1f")
    (data / "loop").symlink_to(".")
    tree = file_trees.data_tree(data)
    assert tree.files == {"0.bin": files.sha256_file(tmp_path / "blobs" / "1f")} and tree.size_bytes == 6
    assert file_trees.data_tree(tmp_path / "blobs" / "1f").files.keys() == {"1f"}
    with pytest.raises(UserError, match="does not exist"):
        file_trees.data_tree(tmp_path / "none")


def test_a_tracked_file_deleted_here_and_a_nested_repository_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for path in (tmp_path / "nested", tmp_path):
        subprocess.run(["git", "init", "-q", path], check=True)
        (path / "kept").write_text("x")
        (path / "gone").write_text("x")
        subprocess.run(["git", "-C", path, "add", "-A"], check=True, capture_output=True)
        subprocess.run(["git", "-C", path, *identity, "commit", "-qm", "x"], check=True)
    (tmp_path / "gone").unlink()
    assert file_trees.code_tree(tmp_path).files.keys() == {"kept"}
    assert "nested: a repository of its own, not copied" in capsys.readouterr().err


def test_a_second_sync_of_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sync._lock_root(tmp_path) as token, pytest.raises(UserError, match="another sync"):
        assert (tmp_path / receiver.LOCK).read_text() == token
        sync.sync(tmp_path, {"192.0.2.1": Path})
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UserError, match="rsync is not installed on this machine"):
        sync.sync(tmp_path, {"192.0.2.1": Path})


def test_a_lock_that_its_holder_removes_meanwhile_is_not_taken_for_the_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, times = tmp_path / receiver.LOCK, fcntl.flock, list[int]()

    def removed_first(descriptor: int, how: int) -> None:
        times.append(how)
        if len(times) == 1:  # the sync before this one ends between the opening and the locking
            path.unlink()
        flock(descriptor, how)

    path.write_text("the token of a sync that was killed")
    monkeypatch.setattr(fcntl, "flock", removed_first)
    with sync._lock_root(tmp_path) as token:
        assert path.read_text() == token
        with pytest.raises(UserError, match="another sync"), sync._lock_root(tmp_path):
            pass
    assert not path.exists()


def test_what_another_sync_is_writing_is_not_taken_from_it(tmp_path: Path) -> None:
    (tmp_path / receiver.RECORD).write_text(json.dumps({"trees": {str(tmp_path): {"tree": None, "files": []}}}))
    being_written, left = tmp_path / ".0.bin.aB3dEf", tmp_path / ".1.bin.aB3dEf"
    left.write_text("what a killed rsync left")
    with being_written.open("w") as file:
        file.write("half")
        file.flush()
        ask("prepare", tmp_path, {"0.bin": "0", "1.bin": "0"})
        assert being_written.exists() and not left.exists()
        assert (tmp_path / receiver.PARTIAL / "1.bin").exists()
    ask("prepare", tmp_path, {"0.bin": "0", "1.bin": "0"})
    assert not being_written.exists()


def test_outside_the_repository_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="not inside the repository"):
        sync.repository_root()
