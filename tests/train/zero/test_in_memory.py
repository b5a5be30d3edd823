"""Checkpoints in the memory of two hosts, each with its neighbour's part: lost, damaged, resumed from, cleaned up."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from finlm.base import checkpoints
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError, reason
from finlm.base.rundir import RunDir
from finlm.base.runs import complete_checkpoint
from finlm.train.zero import checkpoint, in_memory

from ranks import Ranks

SHORT = ("train.steps=24", "eval.every_steps=null", "eval.max_tokens_per_source=500", "zero.stage=1")


@pytest.mark.slow
def test_ranks_go_on_from_memory_bit_identical_and_from_disk_when_it_is_damaged_or_lost(
    make_run: Callable[..., RunDir], tmp_path: Path, ranks: Ranks
) -> None:
    whole = make_run(*SHORT)
    ranks.train(whole)
    tmpfs = tmp_path / "tmpfs"
    tmpfs.mkdir()
    keep = (
        *("checkpoint.every_steps=6", "checkpoint.asynchronous=false"),  # a save is whole before the next step
        *("checkpoint.memory_minutes=0.00001", f"checkpoint.memory_directory={tmpfs}"),
    )
    run = make_run(*SHORT, *keep)
    disks = [run.path / f"disk-{rank}" for rank in (0, 1)]

    def newest() -> int:
        """The newest step; in both memories, or on both disks."""
        steps = [max(int(path.parent.name[5:]) for path in disk.glob("step-*/manifest.json")) for disk in disks]
        assert steps[0] == steps[1]
        return steps[0]

    def stop(step: int) -> None:
        assert ranks.codes(run, "memory_of_their_own", step) == [-9, -9]

    stop(9)
    assert newest() == run.recorded_in_memory() == 8
    for disk in disks:
        held = disk / "step-8"
        manifest = Manifest.read(held)
        assert held.is_symlink() and manifest.is_whole and not checkpoints.find_faults(held, manifest.files, 1)
        assert len(list(held.resolve().parent.glob("step-*"))) <= 2, "the newest, and the one before for a moment"
    (disks[1] / "step-8" / "loop_rank_1.pt").write_text("damaged")
    stop(15)  # goes on from the disk
    (incident,) = run.read_events("incident")
    assert (incident["what"], incident["step"]) == ("damaged checkpoint", 8)
    stop(21)  # from memory
    shutil.rmtree(tmpfs / "memory-1")  # the second host was switched off: its link leads nowhere
    assert ranks.codes(run, "memory_of_their_own", 99) == [0, 0]
    assert [row["step"] for row in run.read_events("start")] == [0, 6, 14, 18]
    curve = {row["step"]: (row["loss"], row["grad_norm"], row["rows_crc"]) for row in run.read_events("step")}
    expected = {row["step"]: (row["loss"], row["grad_norm"], row["rows_crc"]) for row in whole.read_events("step")}
    assert curve == expected
    assert not list(tmpfs.glob("*/*/*")), "the end of the run frees the memory"
    assert [path.name for path in sorted(disks[0].iterdir())] == ["step-18", "step-24"]


@pytest.mark.parametrize(
    ("groups", "targets"),
    [
        ([[0, 1], [2, 3]], [2, 3, 0, 1]),
        ([[0], [1], [2]], [1, 2, 0]),
        ([[0, 1, 2], [3]], [3, 3, 3, 0]),  # hosts of unequal size
    ],
)
def test_every_rank_sends_to_the_next_host(groups: list[list[int]], targets: list[int]) -> None:
    pairs = [in_memory.neighbours(groups, rank) for rank in range(len(targets))]
    assert [target for _, target in pairs] == targets
    assert sorted((source, rank) for rank, (sources, _) in enumerate(pairs) for source in sources) == sorted(
        enumerate(targets)
    )


def test_what_an_ended_run_of_the_same_recipe_left_in_memory_goes_and_that_of_others_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "tiny-20261124-120000")
    kept = {}
    for name, holds in (
        ("tiny-20261124-110000", False),
        ("tiny-20261124-113000", True),
        ("sft-20261124-110000", False),
    ):
        other = RunDir(run.path.with_name(name))
        other.path.mkdir(parents=True)
        lock = other.host_lock(in_memory.host_name()).open("w")
        if holds:
            fcntl.flock(lock, fcntl.LOCK_SH)
        place = tmp_path / name
        place.mkdir()
        (place / in_memory.RUN).write_text(str(other.path))
        kept[name] = (not in_memory._is_superseded(place, run), lock)
    assert [is_kept for is_kept, _ in kept.values()] == [False, True, True]
    shutil.rmtree(tmp_path / "runs" / "sft-20261124-110000")
    assert in_memory._is_superseded(tmp_path / "sft-20261124-110000", run), "its run directory was removed"
    for _, lock in kept.values():
        lock.close()


def test_a_directory_is_made_with_the_name_of_its_run_while_nobody_cleans_up(tmp_path: Path) -> None:
    """Without its run's name another run's cleaning took it for a forgotten one."""
    run, directory = RunDir(tmp_path / "runs" / "tiny-20261124-120000"), tmp_path / "memory" / "tiny"
    directory.parent.mkdir()
    problems: list[str] = []
    maker = threading.Thread(target=lambda: problems.append(in_memory._make_directory(directory, run)))
    with in_memory._lock(directory.parent):
        maker.start()
        maker.join(0.3)
        assert not directory.exists(), "made while another run cleans up"
    maker.join()
    assert problems == [""] and (directory / in_memory.RUN).read_text() == str(run.path)


def test_a_checkpoint_that_is_gone_from_memory_is_refused_by_that_name(tmp_path: Path) -> None:
    link = RunDir(tmp_path).checkpoint(5)
    link.parent.mkdir()
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="is not a complete checkpoint") as refused:
        complete_checkpoint(link)
    assert "it was in this host's memory" in refused.value.evidence


def test_a_file_that_cannot_be_made_is_received_all_the_same(tmp_path: Path) -> None:
    """Its sender would wait for ten minutes."""
    blocks = list[int]()
    store = SimpleNamespace(_receive=lambda _, tensor: blocks.append(len(tensor)) or tensor)
    size = in_memory.BLOCK_BYTES + 7
    (problem,) = in_memory.InMemory._receive_file(store, 1, tmp_path / "gone" / "part", size)  # type: ignore[arg-type]
    assert "No such file" in problem and sum(blocks) == size


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError(28), os.strerror(28)), (OSError(28, "full"), "full"), (OSError("odd"), "odd"), (OSError(), "OSError")],
)
def test_a_write_error_is_said_in_words_whatever_it_carries(error: OSError, words: str, tmp_path: Path) -> None:
    assert reason(error) == words
    run = RunDir(tmp_path / "run")
    (run.path / "checkpoints").mkdir(parents=True)

    def fail(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "publish", fail)
        manifest = Manifest(1, 1, 0, "none", {})
        assert checkpoint._publish(run.checkpoint(1), manifest, None).endswith(words)
