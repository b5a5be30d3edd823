"""Short names of runs and recipes, and the list of runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import newest_runs
from finlm.cli import command_line, main, options
from finlm.recipe import parents, recipe

from helpers import ROOT


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs, the newest last."""
    monkeypatch.chdir(tmp_path)
    stems = (
        "quickstart-20260101-101010",
        "quickstart-20260102-101010",
        "quickstart-sft-20260101-101010",
        "a-20260101-101010",
    )
    for number, stem in enumerate(stems):
        run = RunDir(Path("runs") / stem)
        for path in (run.recipe, run.ds_config):
            files.write_text(path, "{}")
        files.write_json(run.plan, {"steps": 20, "recipe": stem.rpartition("-2026")[0]})
        os.utime(run.recipe, (number, number))
    return Path("runs")


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("latest", "a-20260101-101010"),
        ("runs/latest", "a-20260101-101010"),
        ("quickstart", "quickstart-20260102-101010"),
        ("quickstart-sft", "quickstart-sft-20260101-101010"),
        ("quickstart-20260101", "quickstart-20260101-101010"),
        ("runs/quickstart-s", "quickstart-sft-20260101-101010"),
    ],
)
def test_a_run_is_meant_by_a_short_name(runs: Path, text: str, run: str) -> None:
    assert command_line.run_directory(text) == runs / run


def test_a_name_of_several_runs_or_of_none_is_refused_with_what_there_is(runs: Path) -> None:
    with pytest.raises(UserError, match="quickstart-2026 is the beginning of 2 runs' names") as caught:
        command_line.run_directory("quickstart-2026")
    assert "quickstart-20260102-101010" in caught.value.evidence
    with pytest.raises(UserError, match="there is no run b") as caught:
        command_line.run_directory("b", must_exist=True)
    assert caught.value.evidence.startswith("runs/ has a-20260101-101010, quickstart-sft")
    assert command_line.run_directory("b") == Path("b"), "a model directory, perhaps"


def test_a_recipe_is_meant_by_its_folder_or_its_short_name(runs: Path) -> None:
    for text, meant in (
        ("quickstart", "recipes/quickstart/pretrain.yaml"),
        ("quickstart/sft", "recipes/quickstart/sft.yaml"),
        ("xuanyuan-6b", "recipes/xuanyuan-6b/pretrain.yaml"),
        ("recipes/quickstart/dpo.yaml", "recipes/quickstart/dpo.yaml"),
        ("runs/latest", "runs/a-20260101-101010/recipe.yaml"),
        (str(ROOT / "recipes/quickstart"), str(ROOT / "recipes/quickstart/pretrain.yaml")),
    ):
        assert str(command_line.recipe_file(text)) == meant
    for text, words in (
        ("quickstrat", "did you mean recipes/quickstart/pretrain.yaml?"),
        ("zzz", "there are deepscaler-1.5b"),
    ):
        with pytest.raises(UserError, match=f"cannot read the recipe {text}") as caught:
            command_line.recipe_file(text)
        assert caught.value.fix.startswith(words)
    for text, meant in (("quickstart", "recipes/quickstart/pretrain.yaml"), ("a", "runs/a-20260101-101010")):
        assert str(command_line.recipe_or_run(text)) == meant, "what diff takes"
    with pytest.raises(UserError, match="cannot read the recipe zzz"):
        command_line.recipe_or_run("zzz")
    with pytest.raises(UserError, match="is a directory with 5 recipes"):
        command_line.recipe_file(ROOT / "recipes/mistral-7b-deita")


def test_folders_of_the_users_hide_no_recipe_that_came_with_finlm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("recipes/mine", "recipes/quickstart", "quickstart"):
        Path(folder).mkdir(parents=True)
    mine = Path("recipes/mine/pretrain.yaml")
    mine.write_text("base: ../quickstart/pretrain.yaml\nname: mine\n", encoding="utf-8")
    for text in ("quickstart", "recipes/quickstart", "recipes/quickstart/pretrain.yaml"):
        assert str(command_line.recipe_file(text)) == "recipes/quickstart/pretrain.yaml"
    assert str(command_line.recipe_file("mine")) == str(mine)
    known = parents.list_recipes()
    assert known["recipes/mine/pretrain.yaml"] == mine and "recipes/xuanyuan-6b/sft.yaml" in known
    assert recipe.load(mine).recipe.model.layers == 4, "a base is sought among those too"


@pytest.mark.parametrize("command", [["admit", "llama"], ["new", "mine", "--model", "org/model"]])
def test_a_model_type_or_a_model_of_the_hub_is_no_path(runs: Path, command: list[str]) -> None:
    given = options.parser().parse_args(command)
    command_line.resolve(given)
    assert given.model == command[-1]


def test_the_list_says_what_each_run_did_and_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, killed, waiting, failed = (RunDir(runs / name) for name in sorted(os.listdir(runs)))
    done.append_event("start", step=0)
    done.append_event("step", step=20, loss=2.34567, tokens_per_second=1234.0)
    done.append_event("end", step=20, status="finished")
    files.write_json(done.manifest, {"continues": {"run": "runs/a-1", "step": 10}})
    killed.append_event("step", step=3, loss=4.0, tokens_per_second=5.0)
    (killed.path / ".lock").write_text(f"1 {os.uname().nodename}\n")
    failed.append_event("end", step=0, status="failed")
    assert main.main(["runs", "--json"]) == 0
    out, err = capsys.readouterr()
    found = {row["name"]: row for row in json.loads(out)["runs"]}
    assert [row["state"] for row in found.values()] == ["finished", "failed", "not started", "killed"], "newest first"
    row = found[done.path.name]
    assert (row["step"], row["steps"], row["loss"], row["recipe"], row["start"]) == (20, 20, 2.34567, "a", "a-1 at 10")
    assert "20 of 20" in err and "2.3457" in err and "1,234" in err
    assert main.main(["runs", "--runs", "none"]) == 0
    assert "no runs in none/" in capsys.readouterr().out
    shutil.rmtree(waiting.path)
    assert len(newest_runs(runs)) == 3
