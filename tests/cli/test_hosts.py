"""Which hosts a command means: --hostfile, hostfile.txt, this machine or the recipe's hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.cli import command_line, main
from finlm.cli import options as cli_options
from finlm.doctor import gather
from finlm.doctor import gpus as doctor_gpus
from finlm.plan import gpus
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster

from helpers import QUICKSTART

LLAMA = QUICKSTART.parents[1] / "llama2-7b-fincorpus/pretrain.yaml"
WANTED = recipe.load(LLAMA).recipe
WRITTEN_FOR = [host.name for host in WANTED.hardware.hosts]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose hostfile.txt names two hosts, and other.txt one; no host is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Path("hostfile.txt").write_text("a slots=2\nb slots=2\n")
    Path("other.txt").write_text("c slots=1\n")
    monkeypatch.setattr(doctor_gpus, "ask_kinds", lambda recipe, cluster, *_, **__: cluster)
    monkeypatch.setattr(gather, "gather_hardware", lambda *_: {})
    monkeypatch.setattr(gpus, "_declared", {})
    return tmp_path


def names(*words: str) -> list[str]:
    """The hosts that a command line means."""
    options = cli_options.parser().parse_args(words)
    if options.command == "sync":
        return command_line.to_sync(options)
    choose = {
        "plan": command_line.to_plan,
        "diff": command_line.to_plan,
        "doctor": command_line.to_examine,
        "train": command_line.to_train,
    }
    found: Cluster = choose[options.command](options, WANTED)
    return [host.name for host in found.hosts]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan R", WRITTEN_FOR),
        ("plan R --local", ["localhost"]),
        ("plan R --hostfile other.txt --gpu A100-40G", ["c"]),
        ("diff R", WRITTEN_FOR),
        ("doctor R", ["a", "b"]),
        ("doctor R --local", ["localhost"]),
        ("doctor R --hostfile other.txt", ["c"]),
        ("train R", ["a", "b"]),
        ("train R --exclude a", ["b"]),
        ("train R --hostfile other.txt --gpu A100-40G", ["c"]),
        ("train R --hostfile other.txt --gpu A100-40G --print slurm", ["c"]),
        ("sync", ["a", "b"]),
        ("sync --hostfile other.txt", ["c"]),
    ],
)
def test_a_command_means_these_hosts(words: str, expected: list[str]) -> None:
    assert names(*words.split()) == expected


def test_without_a_hostfile_train_means_this_machine_and_doctor_plans_for_the_recipes() -> None:
    Path("hostfile.txt").write_text("# a slots=2\n")
    assert names("train", "R") == ["localhost"] and names("doctor", "R") == WRITTEN_FOR and names("sync") == []
    with pytest.raises(UserError, match="there is none"):
        names("train", "R", "--gpu", "A100-40G")


def test_plan_and_diff_refuse_a_host_whose_gpus_nobody_names(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "diff"):
        with pytest.raises(UserError, match="does not say which GPUs c has"):
            names(command, "R", "--hostfile", "other.txt")


def test_train_knows_a_kind_that_was_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    gpus.store([gpus.describe_gpu("Measured-48G", 48 * 2**30, 150e12, 1e12, 8.6)])
    command = ["train", str(QUICKSTART), "--dry-run", "--hostfile", "other.txt", "--gpu", "Measured-48G"]
    assert main.main([*command, "--set", "tokenizer.vocab_size=4096", "--set", "data.cache_dir=cache"]) == 0
    assert "check c (1 x Measured-48G)" in capsys.readouterr().out
