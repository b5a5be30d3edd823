"""What differs between two runs, and what a recipe promises, on run directories made by hand."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm import reproduce
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.data import synthetic
from finlm.recipe import recipe
from finlm.recipe.schema_expect import Expect
from finlm.record import compare, curves, expectations, history

from helpers import QUICKSTART, finlm


def run_at(path: Path, losses: list[float], **data: Any) -> RunDir:
    """A run directory with a recipe, a manifest, data and a curve."""
    run = RunDir(path)
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART).recipe))
    files.write_json(run.plan, {"world_size": 2, "zero_stage": 1})
    files.write_json(run.ds_config, {})
    files.write_json(
        run.data, {"files": [{"source": "news", "split": "train", "file": "a.jsonl", "sha256": "aa"}], **data}
    )
    code = {"code_sha256": "1", "git": {"commit": "c0ffee"}}
    files.write_json(run.manifest, {"finlm": code, "packages": {"torch": "2.13.0"}, "machine": {"python": "3.11.7"}})
    run.append_event("start", step=0, device="cpu")
    for step, loss in enumerate(losses, 1):
        run.append_event("step", step=step, loss=loss)
    run.append_event("eval", step=len(losses), loss=5.0, sources={"news": {"loss": 4.5}})
    return run


def test_equal_runs_are_equal_and_paths_and_times_do_not_count(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0, 2.0, 1.5]) for name in "ab")
    found = compare.runs(a, b)
    assert found.equal and found.first is None
    other = ["record.tracking=[tensorboard]", "checkpoint.every_steps=7", "data.num_proc=3", "hardware.network_gbit=1"]
    files.write_text(b.recipe, recipe.dump(recipe.load(QUICKSTART, other).recipe))
    result = finlm("compare", a.path, b.path)
    assert result.returncode == 0 and "equal in all 3 steps" in result.stderr


def test_the_most_telling_difference_comes_first(tmp_path: Path) -> None:
    a = run_at(tmp_path / "a", [3.0, 2.0, 1.5])
    b = run_at(tmp_path / "b", [3.0, 2.1, 1.5])
    manifest = files.read_json(b.manifest) | {"packages": {"torch": "2.12.0"}}
    files.write_json(b.manifest, manifest)
    assert str(compare.runs(a, b).first) == "packages: torch: 2.13.0 | 2.12.0"
    sources = files.read_json(b.data)
    sources["files"][0]["sha256"] = "bb"
    files.write_json(b.data, sources)
    assert str(compare.runs(a, b).first) == "data: file a.jsonl of news: aa | bb"
    files.write_text(b.recipe, recipe.dump(recipe.load(QUICKSTART, ["optim.lr=1e-3"]).recipe))
    found = compare.runs(a, b)
    assert [field.section for field in found.fields] == ["recipe", "data", "packages"]
    assert str(found.first) == "recipe: optim.lr: 0.002 | 0.001"
    assert found.curve == compare.Difference("curve", "loss at step 2", 2.0, 2.1)
    result = finlm("compare", a.path, b.path, "--json")
    assert result.returncode == 1 and "curves part" in result.stderr and '"field": "optim.lr"' in result.stdout


def test_code_is_compared_file_by_file_and_a_missing_step_is_a_difference(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0] * count) for name, count in (("a", 3), ("b", 2)))
    for run, text in ((a, "x = 1\n"), (b, "x = 2\n")):
        files.write_text(run.code / "finlm/loss.py", text)
    files.write_json(b.manifest, files.read_json(b.manifest) | {"finlm": {"code_sha256": "2"}})
    found = compare.runs(a, b)
    assert found.first is not None and found.first.field == "finlm/loss.py"
    assert found.curve is not None and found.curve.field == "loss at step 3" and found.curve.b is None


def test_rows_that_differ_come_before_the_losses_they_explain(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0]) for name in "ab")
    for run, crc in ((a, 7), (b, 8)):
        run.append_event("step", step=2, loss=2.0, rows_crc=5)
        run.append_event("step", step=3, loss=1.0 + crc, rows_crc=crc)
    found = compare.runs(a, b, tolerance=9.0)
    assert not found.equal and found.curve is None
    assert str(found.first) == "rows: checksum of the rows of step 3: 7 | 8"
    assert "rows part" in finlm("compare", a.path, b.path).stderr


def test_a_rolled_back_stretch_does_not_count(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0, 2.0, 9.0])
    run.append_event("rollback", step=1, origin=3, data_step=3)
    run.append_event("step", step=2, loss=1.9)
    assert history.read(run).points("loss") == [(1, 3.0), (2, 1.9)]


def test_expectations_are_met_missed_or_of_other_hardware(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0, 2.0, 1.5])
    expect = Expect(hardware="cpu", loss={1: 3.01, 3: 1.49}, held_out={"all": 5.0, "news": 4.5}, tolerance=0.02)
    met = expectations.check(run, expect)
    assert met.ok and met.lines() == ["expected        all 4 numbers of the recipe's expect: are met"]
    missed = expectations.check(run, expect.model_copy(update={"loss": {2: 2.5, 7: 1.0}}))
    assert not missed.ok
    assert missed.lines()[1:] == [
        "  training loss at step 2: 2.0000, expected 2.5000",
        "  training loss at step 7: nothing, expected 1.0000",
    ]
    assert expectations.Outcome.from_json(missed.to_json()) == missed
    asked = expect.model_copy(update={"suites": {"exam": 0.56}, "suite_tolerance": 0.03})
    run.append_event("end", step=3, status="finished")
    run.append_event("suite", suite="exam", step=0, micro=0.55)  # of the model it started from: does not count
    assert expectations.check(run, asked).lines()[1:] == ["  right answers in exam: nothing, expected 0.5600"]
    run.append_event("suite", suite="exam", step=3, micro=0.54)
    assert expectations.check(run, asked).ok
    elsewhere = expectations.check(run, expect.model_copy(update={"hardware": "H200"}))
    assert elsewhere.ok and elsewhere.lines() == ["expected        not checked: measured on H200, this is cpu"]


@pytest.mark.parametrize(
    ("override", "holds"),
    [("optim.lr=1e-3", False), ("train.steps=70", False), ("zero.stage=3", True), ("data.cache_dir=x", True)],
)
def test_an_override_that_changes_the_training_takes_the_promise_back(override: str, holds: bool) -> None:
    assert (recipe.load(QUICKSTART, [override]).recipe.expect is not None) is holds


def test_a_recipe_does_not_inherit_the_promise_of_its_base(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(f"base: {QUICKSTART}\nname: child\noptim: {{lr: 1.0e-3}}\n")
    assert recipe.load(child).recipe.expect is None


def test_spark_shows_a_curve_in_eight_heights() -> None:
    assert curves.spark([8.0 - step for step in range(8)], 1.0, 8.0) == "█▇▆▅▄▃▂▁"
    assert curves.spark([1.0, 1.0], 1.0, 1.0) == "▁▁"
    assert len(curves.spark([float(value) for value in range(1000)], 0.0, 999.0, 40)) == 40


def test_reproduce_refuses_a_run_that_has_not_finished(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0])
    result = finlm("reproduce", run.path)
    assert result.returncode == 2 and "has not finished" in result.stderr and "Traceback" not in result.stderr


# Stands for the code of a run: prepares nothing, trains what TRAINED says, beside a run that somebody else begins.
CODE = """
import json, os, pathlib, sys, time
command, _, *rest = sys.argv[1:]
shards = pathlib.Path(os.environ["SHARDS"])
if command == "prepare":
    print(shards)
else:
    runs = pathlib.Path(rest[rest.index("--runs") + 1])
    plan = json.loads(os.environ["PLAN"])
    for name, pid in (("tiny-1", os.getpid()), ("tiny-2", 1)):
        (runs / name).mkdir()
        (runs / name / "plan.json").write_text(json.dumps(plan))
        (runs / name / "recipe.yaml").write_text("")
        row = {"kind": "end", "time": 0, "step": 1, "status": "finished", "hosts": pathlib.Path(
            rest[rest.index("--hostfile") + 1]).read_text(), "include": rest[-1]}
        (runs / name / "events.jsonl").write_text(json.dumps(row) + "\\n")
        (runs / name / ".lock").write_text(f"{pid} {os.uname().nodename}\\n")
    if plan["world_size"] != 4:
        time.sleep(60)
"""


def reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> tuple[compare.Comparison, RunDir]:
    """What reproduce says of a run of two hosts whose code plans this many ranks, and the new run."""
    run, shards, again = run_at(tmp_path / "a", [3.0]), tmp_path / "shards", tmp_path / "again"
    run.append_event("end", step=1, status="finished")
    described = "hosts={a: {user: u}, left-out: {user: u}}"
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART, [described]).recipe))
    plan = {"hosts": [{"name": "b", "slots": 2}, {"name": "a", "slots": 2}], "world_size": 4}
    files.write_json(run.plan, plan)
    files.write_json(run.data, {})
    files.write_json(shards / "manifest.json", {})
    files.write_text(run.code / "finlm/__init__.py", "")
    files.write_text(run.code / "finlm/__main__.py", CODE)
    monkeypatch.setenv("SHARDS", str(shards))
    monkeypatch.setenv("PLAN", json.dumps(plan | {"world_size": world_size}))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    return reproduce.reproduce(run, again, 0.0), RunDir(again / "tiny-1")


def test_a_run_is_reproduced_on_the_hosts_of_its_plan_and_compared_with_its_own_process_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, again = reproduced(tmp_path, monkeypatch, 4)
    (end,) = again.read_events("end")
    assert end["hosts"] == "b slots=2\na slots=2\nleft-out slots=1\n" and end["include"] == "b@a"
    assert f"again in {again.path}\n" in capsys.readouterr().err


def test_another_plan_ends_a_reproduction_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = reproduced(tmp_path, monkeypatch, 2)
    assert [str(one) for one in found.fields] == ["plan: world_size: 4 | 2"]


@pytest.mark.slow
def test_one_changed_character_of_the_corpus_is_named_by_its_file_before_anything_is_trained(
    make_run: Any, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    synthetic.write(corpus, 1_000_000, 5, "train")
    run = make_run(f"data.sources={corpus}/*.jsonl.gz", f"data.cache_dir={tmp_path / 'cache'}")
    run.append_event("end", step=20, status="finished")
    changed = sorted(corpus.glob("*.jsonl.gz"))[1]
    text = gzip.decompress(changed.read_bytes()).decode()
    changed.write_bytes(gzip.compress(text.replace("。", "！", 1).encode()))
    result = finlm("reproduce", run.path, "--runs", tmp_path / "again", "--json")
    assert result.returncode == 1 and not (tmp_path / "again").exists(), result.stderr
    assert f"first difference   data: file {changed.name}" in result.stderr
    assert json.loads(result.stdout)["first_difference"]["field"].startswith(f"file {changed.name}")
