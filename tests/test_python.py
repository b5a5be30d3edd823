"""finlm from Python: the names that `import finlm` offers answer as the commands do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import finlm
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.plan import gpus

from helpers import ROOT

LARGE = ROOT / "recipes/xuanyuan-6b/pretrain.yaml"


def test_importing_finlm_loads_nothing_of_it_and_reading_a_recipe_no_torch() -> None:
    code = (
        "import sys, finlm\n"
        "assert [name for name in sys.modules if name.startswith('finlm.')] == []\n"
        "print(finlm.make_plan(finlm.load_recipe('quickstart', 'train.steps=500')).steps)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("500\n", 0), done.stderr


def test_a_plan_is_that_of_the_command_also_where_finished_runs_have_measured_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(gpus, "_declared", {})
    monkeypatch.delenv("FINLM_LANG", raising=False)
    gpus.find.cache_clear()
    request.addfinalizer(gpus.find.cache_clear)  # what was found of a kind here is no other test's
    recipe = finlm.load_recipe(LARGE)
    before = finlm.make_plan(recipe, gpu="H100-80G")
    gpus.runs_file().parent.mkdir(parents=True)
    gpus.runs_file().write_text(json.dumps({"kind": "H100-80G", "run": "first", "mfu": 0.11}) + "\n")
    plan = finlm.make_plan(recipe, gpu="H100-80G")
    assert plan.tokens_per_second and before.tokens_per_second
    assert plan.tokens_per_second < before.tokens_per_second / 2
    assert main.main(["plan", str(LARGE), "--gpu", "H100-80G", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_second"] == plan.tokens_per_second


def test_a_run_is_opened_by_its_directory(finished: tuple[RunDir, str]) -> None:
    run = finlm.open_run(finished[0].path)
    assert (run.state, run.plan.steps, run.recipe.name) == ("finished", 20, "quickstart")
    assert run.history.points("loss")[-1][0] == 20


def test_the_notebook_runs_and_is_kept_without_outputs(
    finished: tuple[RunDir, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = json.loads((ROOT / "docs/python.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], len({cell["id"] for cell in book["cells"]})) == (4, len(book["cells"]))
    (tmp_path / "runs").symlink_to(finished[0].path.parent)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
            printed[cell["id"]] = capsys.readouterr().out
    assert printed["recipe"] == "quickstart 500 0.002\n"
    assert "optim.lr instead of optim.learning_rate" in printed["mistakes"]
    assert [line.split()[0] for line in printed["plans"].splitlines()] == ["A100-80G", "H100-80G", "H200"]
    assert printed["run"] == "quickstart finished 20 steps\n" and printed["losses"].count("#") > 100
    assert " -> " in printed["held-out"]


def test_what_cannot_be_read_is_a_mistake_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the recipe"):
        finlm.load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError) as caught:
        finlm.open_run(tmp_path / "none")
    assert caught.value.fix
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb\n")
    with pytest.raises(UserError, match="hosts:2"):
        finlm.make_plan(finlm.load_recipe("quickstart"), hostfile=hostfile)
