"""The files of a checkpoint: what is noticed, what is refused, what counts when."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from finlm.base import checkpoints, runs
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import UserError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """step-10 with two shards, one of them of two blocks, published."""
    monkeypatch.setattr(checkpoints, "BLOCK_BYTES", 1 << 14)
    directory = tmp_path / "step-10"
    saved = checkpoints.temporary_path(directory)
    saved.mkdir()
    for name, size in (("a.pt", checkpoints.BLOCK_BYTES + 5), ("b.pt", 0)):
        (saved / name).write_bytes(os.urandom(1024) * (size // 1024) + bytes(size % 1024))
    hashes = checkpoints.sha256([saved / "a.pt", saved / "b.pt"], threads=3)
    parts = {path.name: Part(path.stat().st_size, hashes[path], 0) for path in hashes}
    checkpoints.publish(directory, Manifest(10, 2, 1, "none", parts))
    return directory


def faults(directory: Path) -> list[str]:
    return checkpoints.find_faults(directory, Manifest.read(directory).files, threads=3)


def test_a_whole_checkpoint_has_no_faults_and_an_extra_file_is_named_but_not_read(directory: Path) -> None:
    (directory / "mp_rank_99_model_states.pt").write_text("not ours")
    assert faults(directory) == []
    assert checkpoints.unlisted_files(directory, Manifest.read(directory)) == ["mp_rank_99_model_states.pt"]


def test_every_kind_of_damage_is_named(directory: Path) -> None:
    shard = directory / "a.pt"
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[checkpoints.BLOCK_BYTES + 2] ^= 1  # a bit of the second block
    shard.write_bytes(flipped)
    assert faults(directory) == ["a.pt: sha256 differs"]
    shard.write_bytes(content[:-1])
    assert faults(directory) == [f"a.pt: expected {len(content)} bytes, found {len(content) - 1}"]
    shard.unlink()
    assert faults(directory) == ["a.pt: the file is missing"]
    (directory.parent / "elsewhere").write_bytes(content)
    shard.symlink_to(directory.parent / "elsewhere")
    assert faults(directory) == ["a.pt: the file is a link"]


def test_files_are_proved_once_while_they_stay_the_same_and_a_long_proof_is_shown(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, read = Manifest.read(directory).files, list[Path]()
    plain = checkpoints._block_digest

    def digest(block: tuple[Path, int]) -> bytes:
        read.append(block[0])
        return plain(block)

    monkeypatch.setattr(checkpoints, "_block_digest", digest)
    monkeypatch.setattr(runs, "QUIET_SECONDS", 0.0)
    for _ in range(3):
        runs.check_parts(directory, parts, "", "")
    assert len(read) == 3  # the blocks of two files
    said = capsys.readouterr().err
    assert "proving step-10: 100 %" in said and f"{directory}: 16.0 KiB compared with their sha256 in 0." in said
    (directory / "b.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="is damaged: 1 of its 2 files"):
        runs.check_parts(directory, parts, "", "")


@pytest.mark.parametrize(
    "name", ["../../etc/cron.d/x", "/etc/passwd", "a/../../b", "", "a//b", "..\\b", "manifest.json"]
)
def test_a_manifest_that_names_files_outside_its_directory_is_refused(directory: Path, name: str) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["a.pt"]
    with pytest.raises(UserError, match="outside its directory"):
        Manifest.from_json(manifest, "n1")


@pytest.mark.parametrize("value", [{}, [], {"version": 1}, {"version": 2, "files": [1]}, None, 3])
def test_what_is_no_manifest_of_ours_is_refused_without_a_traceback(value: object) -> None:
    with pytest.raises(UserError, match="another version"):
        Manifest.from_json(value, "n1")


def test_a_cut_manifest_is_damage(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"version": 2, "st')
    with pytest.raises(checkpoints.Unreadable, match="is not JSON"):
        Manifest.read(directory)


def test_nothing_counts_before_the_manifest_and_the_rename(directory: Path) -> None:
    assert not checkpoints.temporary_path(directory).exists()
    following = directory.with_name("step-20")
    checkpoints.temporary_path(following).mkdir()
    with pytest.raises(OSError):  # the disk is full
        (checkpoints.temporary_path(following) / "manifest.json").mkdir()
        checkpoints.publish(following, Manifest.read(directory))
    assert not following.exists()


def test_the_newest_and_every_nth_are_kept() -> None:
    steps = [30, 10, 20, 40, 50]
    assert checkpoints.steps_to_remove(steps, keep_last=2, keep_every=None) == [10, 20, 30]
    assert checkpoints.steps_to_remove(steps, keep_last=1, keep_every=20) == [10, 30]


def test_a_checkpoint_that_is_removed_meanwhile_is_none(tmp_path: Path) -> None:
    assert (
        checkpoints.identities([(10, tmp_path / "step-10")])
        == {}
        == checkpoints.whole_checkpoints([(10, tmp_path / "step-10")])
    )
