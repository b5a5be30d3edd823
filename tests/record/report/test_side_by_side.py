"""The page of several runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.recipe import recipe
from finlm.record import compare

from helpers import QUICKSTART

EVIL = "<script>alert(1)</script>"


def run_of(path: Path, losses: list[float], *overrides: str) -> RunDir:
    """A finished run of the quickstart's recipe with these losses."""
    run = RunDir(path)
    path.mkdir()
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART, overrides).recipe))
    run.append_event("start", step=0)
    for step, loss in enumerate(losses, 1):
        run.append_event("step", step=step, loss=loss, lr=1e-3, tokens=4096, tokens_per_second=1000.0)
    run.append_event("eval", step=len(losses), loss=losses[-1], sources={EVIL: {"loss": losses[-1]}})
    return run


def test_curves_outcomes_and_differing_keys_of_every_run_are_on_the_page(tmp_path: Path) -> None:
    one = run_of(tmp_path / "quickstart-20261121-0900", [5.0, 4.0, 3.25])
    two = run_of(tmp_path / "quickstart-20261121-1000", [5.0, 3.5], "optim.lr=3e-3", "train.seed=8")
    text = compare.write_page([one, two], tmp_path / "out.html").read_text(encoding="utf-8")
    data = json.loads(re.search('id="run-data">(.*?)</script>', text).group(1))
    charts = {chart["title"]: chart["series"] for chart in data["charts"]}
    assert [(line["name"], line["points"][1]) for line in charts["Held-out loss"]] == [
        ("0900", [3.25]),
        ("1000", [3.5]),
    ]
    assert [line["style"] for line in charts["Learning rate"]] == ["run0", "run1"]
    body = text.partition("<body>")[2].partition("<script")[0]
    assert {"optim.lr", "train.seed"} <= set(re.findall('<td class="text">([a-z_.]+)</td>', body))
    assert "optim.min_lr" not in body and "3.2500" in body and EVIL not in body
    assert not re.search("https?://", body)


def test_too_many_runs_and_the_same_twice_are_refused(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a", [1.0])
    with pytest.raises(UserError, match="named twice"):
        compare.write_page([one, one], tmp_path / "out.html")
    with pytest.raises(UserError, match="cannot show 7 runs"):
        compare.write_page([RunDir(tmp_path / str(number)) for number in range(7)], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_a_page_of_one_run_goes_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, out = run_of(tmp_path / "a", [1.0]), tmp_path / "elsewhere/a.html"
    files.write_json(one.plan, {})
    files.write_json(one.ds_config, {})
    assert main.main(["report", str(one.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and out.exists() and not one.report.exists()


def test_runs_are_called_by_what_tells_them_apart() -> None:
    assert compare._names(["a-1121-08", "a-1121-12"]) == ["08", "12"]
    assert compare._names(["a-1121-08", "b-1121-12"]) == ["a", "b"]
    assert compare._names(["a-1121-08", "a-1121-12", "b-1122-01"]) == ["a-1121-08", "a-1121-12", "b-1122-01"]
