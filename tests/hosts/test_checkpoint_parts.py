"""From which step hosts start together, by what each of them holds."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from finlm.base import checkpoints, files, runs
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.hosts import checkpoint_parts
from finlm.recipe.cluster import Cluster, Host


def holding(name: str, rank: int, *steps: int, save: str = "a") -> checkpoint_parts.Holding:
    """A host with one rank of two that holds its part of these steps."""
    saved = {
        f"checkpoints/step-{step}": Manifest(step, 2, 1, "none", {"x": Part(1, "0", rank)}, save) for step in steps
    }
    return checkpoint_parts.Holding(Host(name, 1), saved)


def run_of(path: Path, *recorded: int) -> RunDir:
    run = RunDir(path)
    run.append_event("start", step=0)
    for step in recorded:
        run.append_event("checkpoint", step=step)
    return run


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((), (20, 26), "n0: none; n1: steps 20, 26; events"),  # the first host of the hostfile has a new disk
        ((20, 26), (), "n0: steps 20, 26; n1: none; events"),
        ((20,), (26,), "n0: steps 20; n1: steps 26; events"),
        ((), (), "n0: none; n1: none; events.jsonl records one after step 26"),
    ],
)
def test_without_a_common_step_nothing_starts(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], words: str
) -> None:
    run = run_of(tmp_path, 20, 26)
    with pytest.raises(UserError, match="is on all hosts, so nothing was started") as caught:
        checkpoint_parts.choose_step(run, [holding("n0", 0, *first), holding("n1", 1, *second)])
    assert words in caught.value.evidence and "--new" in caught.value.fix


def test_the_newest_common_step_is_announced_and_why_it_is_not_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 20, 26)
    assert checkpoint_parts.choose_step(run, [holding("n0", 0, 20, 26), holding("n1", 1, 20)]) == 20
    said = capsys.readouterr().err
    assert "step 26 cannot be used: n1 without it\nresuming" in said and "from step 20 (--new" in said


def test_parts_of_two_saves_of_a_step_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = run_of(tmp_path, 20), holding("n1", 1, 20, save="b")
    with pytest.raises(UserError, match="nothing was started"):
        checkpoint_parts.choose_step(run, [holding("n0", 0, 20), other])
    earlier = checkpoint_parts.Holding(other.host, other.parts | holding("n1", 1, 10).parts)
    assert checkpoint_parts.choose_step(run, [holding("n0", 0, 10, 20), earlier]) == 10
    assert "step 20 cannot be used: parts of two saves" in capsys.readouterr().err


def test_only_a_run_that_never_had_a_checkpoint_starts_at_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint_parts.choose_step(RunDir(tmp_path), [holding("n0", 0), holding("n1", 1)]) == 0
    assert not capsys.readouterr().err
    assert checkpoint_parts.choose_step(run_of(tmp_path), [holding("n0", 0), holding("n1", 1)]) == 0
    assert "from step 0" in capsys.readouterr().err


def test_a_host_that_cannot_be_asked_starts_nothing(tmp_path: Path) -> None:
    away = checkpoint_parts.Holding(Host("n1", 1), {}, failure=UserError("n1 does not answer"))
    with pytest.raises(UserError, match="n1 does not answer"):
        checkpoint_parts.choose_step(run_of(tmp_path, 20), [holding("n0", 0, 20), away])


@pytest.mark.parametrize(("is_held", "words"), [(True, "is running now, started on n1"), (False, "was started on n1")])
def test_a_host_that_has_the_run_itself_is_not_overwritten(tmp_path: Path, is_held: bool, words: str) -> None:
    other = dataclasses.replace(holding("n1", 1, 20), holder="42 n1", is_held=is_held)
    with pytest.raises(UserError, match=words) as caught:
        checkpoint_parts.choose_step(run_of(tmp_path, 20), [holding("n0", 0, 20), other])
    assert "42" in caught.value.evidence and "rm" not in caught.value.fix.split()
    shared = dataclasses.replace(other, holder=f"{os.getpid()} {os.uname().nodename}")  # it sees our own lock
    assert checkpoint_parts.choose_step(run_of(tmp_path, 20), [holding("n0", 0, 20), shared]) == 20


def saved(run: RunDir, step: int, *ranks: int) -> Path:
    """A checkpoint of two ranks on this machine, with the files of these ranks."""
    directory = run.checkpoint(step)
    for rank in ranks:
        files.write_text(directory / f"loop_rank_{rank}.pt", f"{step} {rank}")
    hashes = checkpoints.sha256(sorted(directory.iterdir()), 1)
    parts = {path.name: Part(path.stat().st_size, digest, int(path.stem[-1])) for path, digest in hashes.items()}
    files.write_json(directory / "manifest.json", Manifest(step, 2, 1, "none", parts, "a").to_json())
    return directory


def test_a_host_with_a_new_disk_gets_the_newest_checkpoint_that_is_whole_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 20, 30, 40)
    saved(run, 20, 0, 1)
    (saved(run, 30, 0, 1) / "loop_rank_1.pt").write_text("damaged")
    saved(run, 40, 0)
    holdings = [holding("n0", 0, 20, 30, 40), holding("n1", 1)]
    assert checkpoint_parts.choose_step(run, holdings) == 20
    said = capsys.readouterr().err
    assert "step-30 is damaged and not used: loop_rank_1.pt" in said and "n1 gets step 20 from this machine" in said
    assert [step for step, _ in run.continued_checkpoints()] == [20]
    assert checkpoint_parts.choose_step(run, [holdings[0], holding("n1", 1, 40)]) == 40, "what all hold comes first"


@pytest.mark.parametrize(
    ("whole", "part", "says", "excludes"),
    [
        ((), (), "or go on without it: --exclude n1", True),
        ((), (20,), "the part of step 20 that n1 holds exists nowhere else", False),
        ((20,), (), "or go on from step 20 without it: --exclude n1", True),
        ((20,), (30,), "the part of step 30 that n1 holds exists nowhere else; or go on from step 20 without it", True),
    ],
)
def test_a_lost_host_is_left_out_only_when_its_parts_are_here(
    tmp_path: Path, whole: tuple[int, ...], part: tuple[int, ...], says: str, excludes: bool
) -> None:
    run = run_of(tmp_path, *whole, *part)
    files.write_json(run.plan, {"offload_optimizer": "none"})
    for step in whole:
        saved(run, step, 0, 1)
    for step in part:
        saved(run, step, 0)
    words = checkpoint_parts.way_out(run, ["n1"])
    assert says in words and ("--exclude" in words) == excludes and ("--new" in words) == (not excludes)
    away = checkpoint_parts.Holding(Host("n1", 1), {}, failure=UserError("n1 does not answer", fix="ping n1"))
    with pytest.raises(UserError) as caught:
        checkpoint_parts.choose_step(run, [holding("n0", 0), away])
    assert caught.value.fix == f"ping n1\n{words}"


N1 = Cluster((Host("localhost", 1), Host("n1", 1)))


def test_a_checkpoint_is_whole_here_once_every_part_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, far = RunDir(tmp_path / "here"), RunDir(tmp_path / "far")
    there, here = saved(far, 20, 1), saved(run, 20, 0)
    monkeypatch.setattr(checkpoint_parts.ssh, "is_this_machine", lambda name: name == "localhost")
    answer = (there / "manifest.json").read_text()
    monkeypatch.setattr(checkpoint_parts.ssh, "run", lambda *_, **__: SimpleNamespace(stdout=answer))
    arriving = ["20 x"]

    def fetch(_: str, __: Path, aside: Path, names: list[str], **___: object) -> None:
        for name in names:
            (aside / name).write_text(arriving[0])

    monkeypatch.setattr(checkpoint_parts.file_trees, "fetch", fetch)
    with pytest.raises(UserError, match="1 files of step-20 differ from what n1 wrote"):
        checkpoint_parts.gather_checkpoint(run, N1, 20)
    assert not Manifest.read(here).is_whole and not (here / "loop_rank_1.pt").exists()
    with pytest.raises(UserError, match="do not fit on this machine's disk"):
        checkpoint_parts.gather_checkpoint(run, N1, 20, spare_bytes=1 << 60)
    arriving[0] = "20 1"
    (here / "loop_rank_0.pt").write_text("20 y")
    with pytest.raises(checkpoint_parts.Incomplete, match="this machine's part of step-20 is damaged"):
        checkpoint_parts.gather_checkpoint(run, N1, 20)
    (here / "loop_rank_0.pt").write_text("20 0")
    checkpoint_parts.gather_checkpoint(run, N1, 20)
    manifest = Manifest.read(here)
    assert manifest.is_whole and not checkpoints.find_faults(here, manifest.files, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-20"]
    (here / "loop_rank_1.pt").write_text("20 y")
    checkpoint_parts.gather_checkpoint(run, N1, 20)
    assert (here / "loop_rank_1.pt").read_text() == "20 1", "a damaged copy is fetched again"
    (here / "loop_rank_0.pt").write_text("20 y")
    with pytest.raises(checkpoint_parts.Incomplete, match="this machine's part of step-20 is damaged") as lost:
        checkpoint_parts.gather_checkpoint(run, N1, 20)
    assert "loop_rank_0.pt" in lost.value.evidence, "the other host does not have it"
    (here / "loop_rank_0.pt").write_text("20 0")

    def away(*_: object, **__: object) -> None:
        raise UserError("n1 does not answer", fix="ping n1")

    monkeypatch.setattr(checkpoint_parts.ssh, "run", away)
    assert checkpoint_parts.gather_checkpoint(run, N1, 20) == here, "nobody is asked when all of it is here"
    files.write_json(run.plan, {"offload_optimizer": "none"})
    (here / "loop_rank_1.pt").write_text("20 y")
    with pytest.raises(checkpoint_parts.Incomplete, match="n1's part of step-20 exists nowhere else") as caught:
        checkpoint_parts.gather_checkpoint(run, N1, 20)
    assert "the copy on this machine is damaged: loop_rank_1.pt" in caught.value.evidence
    assert caught.value.fix == "ping n1\nor go on without it: --exclude n1"
    monkeypatch.setattr(checkpoint_parts.ssh, "run", lambda *_, **__: SimpleNamespace(stdout="{"))
    with pytest.raises(checkpoint_parts.Incomplete) as caught:
        checkpoint_parts.gather_checkpoint(run, N1, 20)
    assert caught.value.fix.startswith("try `ssh n1 cat /") and "\nor go on" in caught.value.fix


def test_what_needs_the_whole_takes_the_newest_whole_one_and_refuses_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 20, 30)
    files.write_json(run.plan, {})
    part = saved(run, 30, 0)
    with pytest.raises(UserError, match="step-30 is a part of a checkpoint: the rest is on other hosts") as caught:
        runs.complete_checkpoint(run.path)
    assert "rank 0 of 2 ranks" in caught.value.evidence and "checkpoint.copies" in caught.value.fix
    whole = saved(run, 20, 0, 1)
    assert runs.complete_checkpoint(run.path) == whole
    assert "parts of step-30 are on other hosts only" in capsys.readouterr().err
    with pytest.raises(UserError, match="is a part of a checkpoint"):
        runs.complete_checkpoint(part)


def test_a_checkpoint_in_memory_needs_no_lost_host_and_comes_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, far, tmpfs = RunDir(tmp_path / "here"), RunDir(tmp_path / "n2"), tmp_path / "tmpfs"
    saved(run, 20, 0)
    (run.checkpoints / "step-20").rename(tmpfs)
    (run.checkpoints / "step-20").symlink_to(tmpfs)
    there = saved(far, 20, 1)  # n2 has the part of n1, which is lost

    def answer(name: str, *_: object, **__: object) -> SimpleNamespace:
        if name == "n1":
            raise UserError("n1 does not answer")
        return SimpleNamespace(stdout=(there / "manifest.json").read_text())

    def fetch(_: str, __: Path, aside: Path, names: list[str], **___: object) -> None:
        for name in names:
            shutil.copyfile(there / name, aside / name)

    monkeypatch.setattr(checkpoint_parts.ssh, "is_this_machine", lambda name: name == "n0")
    monkeypatch.setattr(checkpoint_parts.ssh, "run", answer)
    monkeypatch.setattr(checkpoint_parts.file_trees, "fetch", fetch)
    hosts = Cluster(tuple(Host(name, 1) for name in ("n0", "n1", "n2")))
    files.write_json(run.plan, {"offload_optimizer": "none"})
    run.append_event("checkpoint", step=10)
    run.append_event("in_memory", step=20)
    assert "go on from step 20, of which a neighbour's memory has the part of n1" in checkpoint_parts.way_out(
        run, ["n1"]
    )
    # n1 came back without its memory: the others bring its part, on the disk of this machine, for all hosts.
    held = {"checkpoints/step-20": Manifest.read(run.checkpoint(20))}, {}, {"checkpoints/step-20": Manifest.read(there)}
    holdings = [checkpoint_parts.Holding(host, each) for host, each in zip(hosts.hosts, held, strict=True)]
    assert checkpoint_parts.whole_step_together(holdings[:2]) == 0
    assert checkpoint_parts.choose_step(run, holdings) == 20
    whole = run.checkpoint(20)
    assert not whole.is_symlink() and not tmpfs.exists() and Manifest.read(whole).is_whole
    assert [step for step, _ in run.continued_checkpoints()] == [20]
    with pytest.raises(checkpoint_parts.Incomplete):
        checkpoint_parts.gather_checkpoint(run, Cluster((Host("n1", 1),)), 30)


def test_a_checkpoint_in_memory_that_no_host_has_any_more_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 20)
    run.append_event("in_memory", step=26)
    (run.checkpoints / "step-26").parent.mkdir()
    (run.checkpoints / "step-26").symlink_to(tmp_path / "tmpfs/step-26")  # the host was switched off
    assert checkpoint_parts.choose_step(run, [holding("n0", 0, 20), holding("n1", 1, 20)]) == 20
    said = capsys.readouterr().err
    assert "the checkpoint in memory of step 26 went with the memory of its hosts" in said and "from step 20" in said
    assert [step for step, _ in run.complete_checkpoints()] == []
    run.append_event("start", step=20)
    assert run.recorded_in_memory() == 0, "said once"


def test_a_manifest_that_was_cut_short_is_passed_over_with_a_message_here_and_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 10, 20, 30)
    files.write_json(run.plan, {"offload_optimizer": "none"})
    whole, part = saved(run, 10, 0, 1), saved(run, 30, 0)
    text = (part / "manifest.json").read_text()[:-40]
    monkeypatch.setattr(checkpoint_parts.ssh, "is_this_machine", lambda name: name == "localhost")
    monkeypatch.setattr(checkpoint_parts.ssh, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    with pytest.raises(checkpoint_parts.Incomplete, match="n1's part of step-30") as caught:
        checkpoint_parts.gather_checkpoint(run, N1, 30)
    assert "manifest.json is not JSON" in caught.value.evidence
    (part / "manifest.json").write_text(text)
    with pytest.raises(checkpoint_parts.Incomplete, match="this machine's part of step-30 is damaged"):
        checkpoint_parts.gather_checkpoint(run, N1, 30)
    assert (part / "loop_rank_0.pt").exists()
    assert runs.newest_checkpoint(run) == whole
    assert f"step-30 is passed over: {part}/manifest.json is not JSON" in capsys.readouterr().err
    shutil.copytree(part, run.path / "continued" / "step-30")
    assert checkpoint_parts.list_holdings(run, Cluster((Host("localhost", 1),)))[0].parts["continued/step-30"] is None
