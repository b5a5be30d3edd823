"""Checkpoints of two ranks: killed at random moments, damaged, without room, and continued in another layout."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from finlm import pipeline
from finlm.base import checkpoints, files
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import cluster, recipe
from finlm.recipe.schema import Checkpoint
from finlm.train.zero import storage
from finlm.train.zero.checkpoint import Checkpoints

from helpers import QUICKSTART
from ranks import Ranks

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("FINLM_TEST_KILLS", "3"))  # a ZeRO stage; 15 and 15 were run for the logbook
SHORT = ("checkpoint.every_steps=3", "train.steps=24", "eval.every_steps=null", "eval.max_tokens_per_source=500")

Whole = Callable[[int], RunDir]


@pytest.fixture(scope="module")
def whole(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Whole:
    """The undisturbed run of a ZeRO stage; read it only."""
    runs: dict[int, RunDir] = {}

    def of(stage: int) -> RunDir:
        if stage not in runs:
            runs[stage] = planned(tiny, tmp_path_factory.mktemp(f"whole{stage}"), f"zero.stage={stage}")
            ranks.train(runs[stage])
        return runs[stage]

    return of


def planned(tiny: tuple[str, ...], runs: Path, *overrides: str, ranks: int = 2) -> RunDir:
    """The run directory that `finlm train` would use below runs: an unfinished one, its continuation, or a new one."""
    loaded = recipe.load(QUICKSTART, (*tiny, *SHORT, f"train.cpu_ranks={ranks}", *overrides))
    hosts = cluster.Cluster((cluster.Host("localhost", ranks, None, 8 * 2**30),))
    t = pipeline.Training(loaded, hosts, runs)
    for act in (pipeline.prepare_data, pipeline.plan_run, pipeline.find_unfinished, pipeline.open_run):
        act(t)
    return t.run


def copy_at(run: RunDir, tmp_path: Path) -> RunDir:
    """A copy of a finished run whose last checkpoint is gone, so that it goes on from the one before."""
    copy = RunDir(tmp_path / "runs" / run.path.name)
    shutil.copytree(run.path, copy.path)
    shutil.rmtree(copy.complete_checkpoints()[-1][1])
    return copy


def steps(run: RunDir) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in run.read_events("step")}


def curve(run: RunDir) -> list[tuple[Any, ...]]:
    return [(step, row["loss"], row["grad_norm"], row["rows_crc"]) for step, row in sorted(steps(run).items())]


def incidents(run: RunDir) -> list[str]:
    return [f"{row['what']}: {row['detail']}" for row in run.read_events("incident")]


def assert_equal(run: RunDir, expected: RunDir) -> None:
    """Rows, losses, gradient norms and every byte of the last checkpoint: weights, moments, generators."""
    assert curve(run) == curve(expected)
    (last, ours), (_, theirs) = run.complete_checkpoints()[-1], expected.complete_checkpoints()[-1]
    assert last == 24 and Manifest.read(ours).files == Manifest.read(theirs).files


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_killed_at_random_moments_ends_bit_identical(
    tiny: tuple[str, ...], tmp_path: Path, ranks: Ranks, whole: Whole, stage: int
) -> None:
    run, chance = planned(tiny, tmp_path / "runs", f"zero.stage={stage}"), random.Random(stage)
    for number in range(KILLS):
        # One rank or all; every other time while the first to third checkpoint of this launch is written (50 ms).
        save = chance.randint(1, 3) if number % 2 else 0
        seconds = chance.uniform(0, 0.06) if save else chance.uniform(0.5, 2.0)
        codes = ranks.codes(run, "killed", chance.choice([-1, 0, 1]), save, seconds)
        left = sorted(path.name for path in run.checkpoints.glob(".*")) if run.checkpoints.exists() else []
        print(f"kill {number + 1}: exit codes {codes}, half-written {left}")
        if not any(codes):
            break
    if not list(run.read_events("end")):
        ranks.train(run)
    assert_equal(run, whole(stage))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-21", "step-24"]


def damaged(directory: Path, kind: str) -> None:
    """Spoil a checkpoint of two ranks at ZeRO-1."""
    shard = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(shard.read_bytes())
    if kind == "missing":
        shard.unlink()
    elif kind == "manifest":
        (directory / "manifest.json").write_text("{")
    elif kind == "truncated":
        shard.write_bytes(content[:-100])
    else:
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)


def test_damaged_shards_are_found_before_loading_and_the_checkpoint_before_is_used(
    tmp_path: Path, ranks: Ranks, whole: Whole
) -> None:
    run = copy_at(whole(1), tmp_path)
    os.truncate(run.events, 0)
    shutil.copytree(run.checkpoint(21), run.checkpoint(22))  # the newest ones, each spoilt in its way
    shutil.copytree(run.checkpoint(21), run.checkpoint(23))
    shutil.copytree(run.checkpoint(21), run.checkpoint(24))
    shutil.copytree(run.checkpoint(21), run.checkpoint(25))
    kinds = {22: "missing", 23: "truncated", 24: "flipped", 25: "manifest"}
    for step, kind in kinds.items():
        damaged(run.checkpoint(step), kind)
    (run.checkpoint(21) / "mp_rank_99_model_states.pt").write_text("a stranger")
    (run.checkpoints / ".step-30.saving").mkdir()  # what a kill leaves
    ranks.train(run)
    said = incidents(run)
    print("\n".join(said))
    for words, step in zip(
        ("is not JSON", "sha256 differs", "bytes, found", "is missing"), (25, 24, 23, 22), strict=True
    ):
        (one,) = [text for text in said if f"step-{step}.damaged" in text]
        assert one.startswith("damaged checkpoint: ") and words in one
    assert curve(run) == curve(whole(1))[21:]
    assert "not in its manifest, ignored: mp_rank_99" in (run.logs / "localhost.0.log").read_text()
    assert not (run.checkpoints / ".step-30.saving").exists()


def test_when_no_whole_checkpoint_is_left_the_run_does_not_start_over(
    tmp_path: Path, ranks: Ranks, whole: Whole
) -> None:
    run = copy_at(whole(1), tmp_path)
    for _, directory in run.complete_checkpoints():
        damaged(directory, "flipped")
    assert ranks.codes(run) == [1, 1]
    assert "no whole checkpoint is left" in (run.logs / "localhost.0.log").read_text()


@pytest.mark.parametrize(
    ("held", "announced", "words"),
    [
        (((), (18, 21)), None, "n0: none; n1: steps 18, 21"),
        (((18, 21), ()), 21, "n0: steps 18, 21; n1: none"),
        (((18,), (21,)), None, "n0: steps 18; n1: steps 21"),
        (((), ()), None, "n0: none; n1: none; events.jsonl records one after step 24"),
        (((18, 21), (18,)), 21, "step 21 was announced, and the newest whole checkpoint is of step 18"),
        (((18,), (18,)), 0, "step 0 was announced, and the newest whole checkpoint is of step 18"),
    ],
)
def test_ranks_do_not_start_from_another_step_than_announced_or_over_a_hosts_checkpoints(
    tmp_path: Path,
    ranks: Ranks,
    whole: Whole,
    held: tuple[tuple[int, ...], ...],
    announced: int | None,
    words: str,
) -> None:
    run = copy_at(whole(1), tmp_path)
    for rank, kept in enumerate(held):
        for step in kept:
            shutil.copytree(run.checkpoint(21), run.path / f"disk-{rank}" / f"step-{step}")
            manifest = dataclasses.replace(Manifest.read(run.checkpoint(21)), step=step)
            files.write_json(run.path / f"disk-{rank}" / f"step-{step}" / "manifest.json", manifest.to_json())
    before = run.events.read_bytes()
    assert ranks.codes(run, "disks_of_their_own", announced) == [1, 1]
    for host in ("n0.0", "n1.1"):
        assert words in (run.logs / f"{host}.log").read_text()
    assert run.events.read_bytes() == before and sorted(path.name for path in run.path.glob("disk-*/*")) == sorted(
        f"step-{step}" for kept in held for step in kept
    )


def test_parts_of_two_saves_of_one_step_are_not_mixed(tmp_path: Path, ranks: Ranks, whole: Whole) -> None:
    run = copy_at(whole(1), tmp_path)
    for rank in (0, 1):
        shutil.copytree(run.checkpoints, run.path / f"disk-{rank}")
    manifest = dataclasses.replace(Manifest.read(run.checkpoint(21)), identity="another save")
    files.write_json(run.path / "disk-1/step-21/manifest.json", manifest.to_json())
    assert ranks.codes(run, "disks_of_their_own", None) == [1, 1]
    assert "no checkpoint of" in (run.logs / "n0.0.log").read_text()


def test_a_manifest_of_another_version_ends_every_rank_with_the_same_words(
    tmp_path: Path, ranks: Ranks, whole: Whole
) -> None:
    run = copy_at(whole(1), tmp_path)
    for rank in (0, 1):
        shutil.copytree(run.checkpoints, run.path / f"disk-{rank}")
    manifest = run.path / "disk-1/step-21/manifest.json"
    files.write_json(manifest, files.read_json(manifest) | {"version": 1})
    assert ranks.codes(run, "disks_of_their_own", None) == [1, 1]
    for host in ("n0.0", "n1.1"):
        assert "disk-1/step-21/manifest.json was written by another version" in (run.logs / f"{host}.log").read_text()
    assert manifest.exists(), "what another version wrote is not damaged"


class Stranger:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_the_moments_are_freed_before_others_are_loaded() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    mapping = SimpleNamespace(optim_fragment={name: state[name].view(-1) for name in ("exp_avg", "exp_avg_sq")})
    model.weight._hp_mapping = mapping  # type: ignore[attr-defined]
    tensors = [weakref.ref(tensor) for one in (state, mapping.optim_fragment) for tensor in one.values()]
    del state
    assert len(tensors) == 5 and all(tensor() is not None for tensor in tensors)
    storage.free_moments(model, optimizer)
    assert [tensor() for tensor in tensors] == [None] * 5


def test_a_file_with_code_in_it_is_refused_and_the_code_does_not_run(tmp_path: Path) -> None:
    torch.save({"module": Stranger(tmp_path / "ran")}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="it holds code, not only tensors"):
        storage.Store().load(str(tmp_path / "mp_rank_00_model_states.pt"))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Stranger(tmp_path / "ran")))
    with pytest.raises(UserError, match="refused to load"):
        storage.load(tmp_path / "plain.pt")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, which holds one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_costs_checkpoints_but_not_the_run(
    tiny: tuple[str, ...], tmp_path: Path, ranks: Ranks, whole: Whole, small_disk: Path
) -> None:
    run = planned(tiny, tmp_path / "runs", "checkpoint.keep_last=1")
    run.checkpoints.symlink_to(small_disk)
    assert ranks.codes(run, "disk_is_full", str(small_disk), 9, 15) == [0, 0]
    slow, *said = incidents(run)
    print("\n".join((slow, *said)))
    assert "training waited for the disk: " in slow and "until the checkpoint of step 3 was written" in slow
    assert [row["step"] for row in run.read_events("incident")] == [6, 9, 12, 15]
    assert all(text.startswith("checkpoint not saved: localhost: ") for text in said)
    assert "needed at" in said[0] and "training goes on" in said[0] and "No space left on device" in said[1]
    assert [row["step"] for row in run.read_events("checkpoint")] == [3, 6, 18, 21, 24]
    assert curve(run) == curve(whole(1))
    assert [path.name for path in small_disk.iterdir()] == ["step-24"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 1), (1, 3)), ((1, 3), (4, 1)), ((4, 1), (2, 3))],
    ids=["2 ranks ZeRO-1 to 1 rank ZeRO-3", "1 rank ZeRO-3 to 4 ranks ZeRO-1", "4 ranks ZeRO-1 to 2 ranks ZeRO-3"],
)
def test_another_cluster_continues_with_the_same_rows_and_losses(
    tiny: tuple[str, ...],
    tmp_path: Path,
    ranks: Ranks,
    whole: Whole,
    saved: tuple[int, int],
    loaded: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = planned(tiny, tmp_path / "runs", f"zero.stage={saved[1]}", ranks=saved[0])
    assert set(ranks.codes(first, "stopped", 12)) == {-9}
    capsys.readouterr()
    second = planned(tiny, tmp_path / "runs", f"zero.stage={loaded[1]}", ranks=loaded[0])
    said = capsys.readouterr().err
    assert f"continuing {first.path} from step 9" in said
    assert f"world_size {saved[0]} -> {loaded[0]}; zero_stage {saved[1]} -> {loaded[1]}" in said
    ranks.train(second)
    ours, expected = curve(second), curve(whole(1))
    assert [(step, crc) for step, _, _, crc in ours] == [(step, crc) for step, _, _, crc in expected]
    assert [loss for _, loss, _, _ in ours] == pytest.approx([loss for _, loss, _, _ in expected], abs=1e-5)
    assert [norm for _, _, norm, _ in ours] == pytest.approx([norm for _, _, norm, _ in expected], rel=1e-4)
    assert first.complete_checkpoints()[-1][0] == 9, "the parent stays as it is"


@pytest.mark.parametrize("places", [("none", "stream"), ("stream", "none")], ids=" to ".join)
def test_a_run_goes_on_when_its_optimizer_moves(
    tiny: tuple[str, ...], tmp_path: Path, ranks: Ranks, whole: Whole, places: tuple[str, str]
) -> None:
    first = planned(tiny, tmp_path / "runs", "zero.stage=1", f"zero.offload_optimizer={places[0]}")
    assert set(ranks.codes(first, "stopped", 12)) == {-9}
    second = planned(tiny, tmp_path / "runs", "zero.stage=1", f"zero.offload_optimizer={places[1]}")
    assert second.path != first.path
    ranks.train(second)
    assert curve(second) == curve(whole(1)), "the same bits"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sizes", [(10**9, 100_000), (100_000, 10**9)], ids=["one to many", "many to one"])
def test_a_run_goes_on_when_its_optimizer_has_other_groups(
    tiny: tuple[str, ...], tmp_path: Path, ranks: Ranks, stage: int, sizes: tuple[int, int]
) -> None:
    def train(run: RunDir, size: int) -> None:
        settings = files.read_json(run.ds_config)
        settings["zero_optimization"]["sub_group_size"] = size
        files.write_json(run.ds_config, settings)
        assert ranks.codes(run, "small_groups_and_fingerprints", size, str(tmp_path / "hashes")) == [0, 0]

    run = planned(tiny, tmp_path / "whole", f"zero.stage={stage}", "train.steps=8")
    train(run, sizes[0])
    resumed = copy_at(run, tmp_path)
    os.truncate(resumed.events, 0)
    train(resumed, sizes[1])
    assert [row["step"] for row in resumed.read_events("resharded")] == [6]
    found, expected = curve(resumed), curve(run)[6:]
    assert [loss for _, loss, _, _ in found] == pytest.approx([loss for _, loss, _, _ in expected], abs=1e-6)
    assert [norm for _, _, norm, _ in found] == pytest.approx([norm for _, _, norm, _ in expected], rel=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "offload", "stream", "compiled", "fp16 compiled"])
def test_other_precisions_and_an_optimizer_on_the_host_resume_bit_identical(
    tiny: tuple[str, ...], tmp_path: Path, ranks: Ranks, kind: str
) -> None:
    overrides = {
        "bf16": ("train.precision=bf16", "zero.stage=3"),
        "fp16": ("zero.stage=1",),
        "offload": ("zero.stage=2", "zero.offload_optimizer=cpu"),
        "stream": ("zero.stage=1", "zero.offload_optimizer=stream"),
        "compiled": ("zero.stage=1", "train.compile=true", "batch.micro_batch=2"),
        "fp16 compiled": ("zero.stage=2", "train.compile=true", "batch.micro_batch=2"),
    }[kind]
    # A compiled rank takes 12 CPU s; the shapes of test_training's are compiled already.
    count = 1 if "compiled" in kind else 2
    run = planned(tiny, tmp_path / "whole", *overrides, "train.steps=8", ranks=count)
    is_fp16 = kind.startswith("fp16")
    if is_fp16:  # the planner refuses it on a CPU
        files.write_json(run.plan, files.read_json(run.plan) | {"precision": "fp16"})
        scaling = {"enabled": True, "loss_scale": 0, "initial_scale_power": 3, "loss_scale_window": 2}
        files.write_json(run.ds_config, files.read_json(run.ds_config) | {"fp16": scaling})
    # Several groups, as every large model has.
    fault = ("fp16",) if is_fp16 else ("small_groups_and_fingerprints", 300_000, str(tmp_path / "hashes"))
    assert ranks.codes(run, *fault) == [0] * count
    resumed = copy_at(run, tmp_path)
    os.truncate(resumed.events, 0)
    assert ranks.codes(resumed, *fault) == [0] * count
    expected, found = ([(*row, steps(each)[row[0]]["loss_scale"]) for row in curve(each)] for each in (run, resumed))
    assert found == expected[6:]
    assert Manifest.read(run.checkpoint(8)).files == Manifest.read(resumed.checkpoint(8)).files
    assert not is_fp16 or len({scale for *_, scale in expected[:6]}) > 1, "the loss scale grew"


def test_a_checkpoint_whose_removal_was_killed_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "step-3"
    directory.mkdir()
    (directory / checkpoints.MANIFEST).write_text("{}")
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)  # as far as a kill let it come
    checkpoints.remove(directory)
    assert [path.name for path in tmp_path.iterdir()] == [".step-3.removed"], "what Checkpoints._clean removes"


def test_a_checkpoint_is_not_removed_for_later_ones_of_an_attempt_that_lost_its_other_hosts(tmp_path: Path) -> None:
    part = checkpoints.Part(1, "0" * 64, 0)
    for step in (50, 60, 64, 70, 80):  # 70 and 80 have no part of a host that came back with an empty disk
        directory = tmp_path / f"checkpoints/step-{step}"
        directory.mkdir(parents=True)
        files.write_json(directory / "manifest.json", Manifest(step, 1, 1, "none", {"a": part}, "").to_json())
    with ThreadPoolExecutor(1) as pool:
        saver = object.__new__(Checkpoints)
        saver.run, saver.keep, saver.rolls_back, saver.pool = RunDir(tmp_path), Checkpoint(keep_last=2), False, pool
        saver._remove_superseded(64)
    assert [step for step, _ in saver.run.complete_checkpoints()] == [60, 64, 70, 80]


def test_an_enum_is_stored_as_its_value() -> None:
    """Python 3.11.2 pickles it as a call of getattr, which a safe reader refuses: no export, no resume."""
    stored = storage.copy_tensors({"zero_stage": ZeroStageEnum.gradients}, torch.Tensor.detach)["zero_stage"]
    assert type(stored) is int and stored == ZeroStageEnum.gradients
