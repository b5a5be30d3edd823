"""What differs between two runs, and what a recipe promises, on run directories made by hand."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files, language
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import recipe
from finlm.recipe.schema_train import Expect
from finlm.record import compare, expectations, history
from finlm.runs import proofs
from finlm.world import writer

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
    found = compare.compare(a, b)
    assert found.equal and found.first is None
    other = ["record.tracking=[tensorboard]", "checkpoint.every_steps=7", "data.num_proc=3", "hardware.network_gbit=1"]
    files.write_text(b.recipe, recipe.dump(recipe.load(QUICKSTART, other).recipe))
    result = finlm("compare", a.path, b.path)
    assert result.returncode == 0 and "equal in all 3 steps" in result.stdout


def test_the_most_telling_difference_comes_first(tmp_path: Path) -> None:
    a = run_at(tmp_path / "a", [3.0, 2.0, 1.5])
    b = run_at(tmp_path / "b", [3.0, 2.1, 1.5])
    manifest = files.read_json(b.manifest) | {"packages": {"torch": "2.12.0"}}
    files.write_json(b.manifest, manifest)
    assert str(compare.compare(a, b).first) == "packages: torch: 2.13.0 | 2.12.0"
    sources = files.read_json(b.data)
    sources["files"][0]["sha256"] = "bb"
    files.write_json(b.data, sources)
    assert str(compare.compare(a, b).first) == "data: file a.jsonl of news: aa | bb"
    files.write_text(b.recipe, recipe.dump(recipe.load(QUICKSTART, ["optim.lr=1e-3"]).recipe))
    found = compare.compare(a, b)
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
    found = compare.compare(a, b)
    assert found.first is not None and found.first.field == "finlm/loss.py"
    assert found.curve is not None and found.curve.field == "loss at step 3" and found.curve.b is None


def test_rows_that_differ_come_before_the_losses_they_explain(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0]) for name in "ab")
    for run, crc in ((a, 7), (b, 8)):
        run.append_event("step", step=2, loss=2.0, rows_crc=5)
        run.append_event("step", step=3, loss=1.0 + crc, rows_crc=crc)
    found = compare.compare(a, b, tolerance=9.0)
    assert not found.equal and found.curve is None
    assert str(found.first) == "rows: checksum of the rows of step 3: 7 | 8"
    assert "rows part" in finlm("compare", a.path, b.path).stdout


def test_a_rolled_back_stretch_does_not_count(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0, 2.0, 9.0])
    run.append_event("rollback", step=1, origin=3, data_step=3)
    run.append_event("step", step=2, loss=1.9)
    assert history.read_history(run).points("loss") == [(1, 3.0), (2, 1.9)]


def test_expectations_are_met_missed_or_of_other_hardware(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0, 2.0, 1.5])
    expect = Expect(hardware="cpu", loss={1: 3.01, 3: 1.49}, held_out={"all": 5.0, "news": 4.5}, tolerance=0.02)
    met = expectations.check_expectations(run, expect)
    assert met.ok and met.lines() == ["expected        all 4 numbers of the recipe's expect: are met"]
    missed = expectations.check_expectations(run, expect.model_copy(update={"loss": {2: 2.5, 7: 1.0}}))
    assert not missed.ok
    assert missed.lines()[1:] == [
        "  training loss at step 2: 2.0000, expected 2.4800 to 2.5200",
        "  training loss at step 7: nothing, expected 0.9800 to 1.0200",
    ]
    assert expectations.Outcome.from_json(missed.to_json()) == missed
    asked = expect.model_copy(update={"suites": {"exam": 0.56}, "suite_tolerance": 0.03})
    run.append_event("end", step=3, status="finished")
    run.append_event("suite", suite="exam", step=0, micro=0.55)  # of the model it started from: does not count
    assert expectations.check_expectations(run, asked).lines()[1:] == [
        "  right answers in exam: nothing, expected 0.5300 to 0.5900"
    ]
    run.append_event("suite", suite="exam", step=3, micro=0.54)
    assert expectations.check_expectations(run, asked).ok
    elsewhere = expectations.check_expectations(run, expect.model_copy(update={"hardware": "H200"}))
    assert elsewhere.ok and elsewhere.lines() == ["expected        not checked: measured on H200, this is cpu"]


def test_the_outcome_is_printed_without_steps_and_with_numbers_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)  # it went on from its last step on other hosts
    run.append_event("start", step=3)
    expectations.print_outcome(run, "grpo")
    said = capsys.readouterr().err
    assert "run directory" in said and "training loss" not in said and "speed" not in said
    run.append_event("step", step=3, loss=float("nan"), tokens_per_second=None)
    for step in (0, 3):
        run.append_event("eval", step=step, loss=None, sampled=None, sources={})
    expectations.print_outcome(run, "grpo")
    said = capsys.readouterr().err
    assert "training loss   not finite after 3 steps" in said and "earn not finite -> not finite" in said


def test_an_interval_is_met_within_its_ends_and_says_where_it_was_measured(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0])
    run.append_event("eval", step=0, loss=9.0, sources={"news": {"loss": 7.5}})
    run.append_event("eval", step=1, sources={"pairs": {"accuracy": 0.7}, "prompts": {"reward": 0.3, "rise": 0.06}})
    met = Expect(
        loss={1: (2.9, 3.0)},
        before={"all": (8.0, 9.0), "news": (7.5, 7.5)},
        accuracy={"pairs": (0.6, 0.7)},
        reward={"prompts": (0.3, 0.5)},
        rise={"prompts": (0.05, 0.2)},
        origin="4 runs on two CPUs",
    )
    assert expectations.check_expectations(run, met).ok
    missed = expectations.check_expectations(
        run,
        met.model_copy(update={"before": {"news": (7.6, 9.0)}, "reward": {"news": 0.1}, "rise": {"all": (0.0, 1.0)}}),
    )
    assert missed.lines() == [
        "expected        3 of 5 numbers of the recipe's expect: are off",
        "  held-out loss before training of news: 7.5000, expected 7.6000 to 9.0000",
        "  held-out reward of news: nothing, expected 0.0800 to 0.1200",
        "  rise of the held-out reward of all: nothing, expected 0.0000 to 1.0000",
        "  measured: 4 runs on two CPUs",
    ]
    former = {"ok": False, "elsewhere": "", "checked": [{"what": "x", "expected": 1.0, "found": 2.0, "ok": False}]}
    assert expectations.Outcome.from_json(former).lines()[1] == "  x: 2.0000, expected 1.0000"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("[3, 2]", "the lowest value comes first: [2, 3], not [3, 2]"),
        ("[3]", "should be a number or [lowest, highest], got [3]"),
        ("[1, 2, 3]", "should be a number or [lowest, highest], got [1, 2, 3]"),
        ("low", "should be a number or [lowest, highest], got 'low'"),
        ("51", "a share lies between 0 and 1, got 51.0"),
    ],
)
def test_a_promise_that_is_no_interval_is_a_mistake_of_the_recipe(value: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        recipe.load(QUICKSTART, [f"expect={{suites: {{exam: {value}}}}}"])
    assert f"expect.suites.exam: {sentence}" in str(error.value.evidence)


def test_the_same_bits_are_promised_only_where_both_runs_recorded_the_same_kernels(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0]) for name in "ab")
    assert compare.compare(a, b).other_bits == "a run has no record of the CPU kernels that it used"
    for run in (a, b):
        run.append_event("start", step=1, device="cpu", cpu_capability="AVX2", threads=1)
    assert compare.compare(a, b).other_bits == "" and compare.compare(a, b).equal
    b.append_event("start", step=1, device="cpu", cpu_capability="AVX512", threads=1)
    differing = compare.compare(a, b)
    assert differing.other_bits == str(differing.first) == "hardware: cpu_capability: AVX2 | AVX512"
    files.write_json(b.manifest, files.read_json(b.manifest) | {"packages": {"torch": "2.13.0", "rich": "15"}})
    b.append_event("start", step=1, device="cpu", cpu_capability="AVX2", threads=1)
    assert compare.compare(a, b).other_bits == "", "no arithmetic in that package"
    for run in (a, b):
        files.write_json(run.plan, {"device": "cuda"})
    assert "train.deterministic" in compare.compare(a, b).other_bits
    result = finlm("compare", a.path, b.path, "--json")
    assert "same bits          not promised: GPUs" in result.stderr
    assert json.loads(result.stdout)["same_bits_promised"] is False


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
    assert history.sparkline([8.0 - step for step in range(8)], 1.0, 8.0) == "█▇▆▅▄▃▂▁"
    assert history.sparkline([1.0, 1.0], 1.0, 1.0) == "▁▁"
    assert len(history.sparkline([float(value) for value in range(1000)], 0.0, 999.0, 40)) == 40


def test_reproduce_refuses_a_run_that_has_not_finished(tmp_path: Path) -> None:
    run = run_at(tmp_path / "a", [3.0])
    result = finlm("reproduce", run.path)
    assert result.returncode == 2 and "has not finished" in result.stderr and "Traceback" not in result.stderr


# Stands for the code of a run: prepares nothing, trains what TRAINED says, beside a run that somebody else begins.
CODE = """
import json, os, pathlib, sys, time
command, recipe, *rest = sys.argv[1:]
shards = pathlib.Path(os.environ["SHARDS"])
if command == "prepare":
    print(shards)
else:
    runs = pathlib.Path(rest[rest.index("--runs") + 1])
    plan = json.loads(os.environ["PLAN"])
    for name, pid in (("tiny-1", os.getpid()), ("tiny-2", 1)):
        (runs / name).mkdir()
        (runs / name / "plan.json").write_text(json.dumps(plan))
        (runs / name / "recipe.yaml").write_text(pathlib.Path(recipe).read_text())
        (runs / name / "manifest.json").write_text(os.environ["MANIFEST"])
        row = {"kind": "end", "time": 0, "step": 1, "status": "finished", "hosts": pathlib.Path(
            rest[rest.index("--hostfile") + 1]).read_text(), "include": rest[rest.index("--include") + 1],
            "sets": [value for name, value in zip(rest, rest[1:]) if name == "--set"]}
        (runs / name / "events.jsonl").write_text(json.dumps(row) + "\\n")
        (runs / name / ".lock").write_text(f"{pid} {os.uname().nodename}\\n")
    if plan["world_size"] != 4:
        time.sleep(60)
"""


def reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, **more: Any
) -> tuple[compare.Comparison, RunDir]:
    """What reproduce says of a run of two hosts whose code plans this many ranks, and the new run; more of its plan."""
    run, shards, again = run_at(tmp_path / "a", [3.0]), tmp_path / "shards", tmp_path / "again"
    run.append_event("end", step=1, status="finished")
    described = "hosts={a: {user: u}, left-out: {user: u}}"
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART, [described]).recipe))
    plan = {"hosts": [{"name": "b", "slots": 2}, {"name": "a", "slots": 2}], "world_size": 4, **more}
    if more:
        files.write_json(run.path / "plan.1.json", plan)
    files.write_json(run.plan, plan)
    files.write_json(run.data, {})
    monkeypatch.setenv("MANIFEST", json.dumps(files.read_json(run.manifest) | {"packages": {"torch": "2.12.0"}}))
    files.write_json(shards / "manifest.json", {})
    files.write_text(run.code / "finlm/__init__.py", "")
    files.write_text(run.code / "finlm/__main__.py", CODE)
    monkeypatch.setenv("SHARDS", str(shards))
    monkeypatch.setenv("PLAN", json.dumps(plan | {"world_size": world_size}))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    return proofs.reproduce(run, again, 0.0), RunDir(again / "tiny-1")


def test_a_run_is_reproduced_on_the_hosts_of_its_plan_and_compared_with_its_own_process_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, again = reproduced(tmp_path, monkeypatch, 4)
    (end,) = again.read_events("end")
    assert end["hosts"] == "b slots=2\na slots=2\nleft-out slots=1\n" and end["include"] == "b@a" and not end["sets"]
    said = capsys.readouterr().err
    assert f"again in {again.path}\n" in said
    assert "the same bits are not promised: packages: torch: 2.13.0 | 2.12.0" in said


def test_a_run_that_ran_out_of_memory_is_reproduced_by_the_plan_that_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = {"zero_stage": 1, "offload_optimizer": "none", "offload_param": "none", "recompute": "full"}
    _, again = reproduced(tmp_path, monkeypatch, 4, micro_batch=2, **decided)
    (end,) = again.read_events("end")
    assert 'train.recompute="full"' in end["sets"] and "batch.micro_batch=2" in end["sets"] and len(end["sets"]) == 5
    recipe.load(QUICKSTART, end["sets"])  # they mean what they say


def test_what_auto_stood_for_is_compared_with_what_was_set(tmp_path: Path) -> None:
    a, b = (run_at(tmp_path / name, [3.0]) for name in "ab")
    fixed = ["batch.micro_batch=4", "train.recompute=none"]
    files.write_text(b.recipe, recipe.dump(recipe.load(QUICKSTART, fixed).recipe))
    decided = {"world_size": 2, "zero_stage": 1, "micro_batch": 4, "recompute": "none"}
    for run in (a, b):
        files.write_json(run.plan, decided)
    assert compare.compare(a, b).equal
    files.write_json(a.plan, decided | {"micro_batch": 8})
    assert str(compare.compare(a, b).first) == "recipe: batch.micro_batch: 8 | 4"


def test_another_plan_ends_a_reproduction_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = reproduced(tmp_path, monkeypatch, 2)
    assert [str(one) for one in found.fields] == ["plan: world_size: 4 | 2"]


@pytest.mark.slow
def test_one_changed_character_of_the_corpus_is_named_by_its_file_before_anything_is_trained(
    make_run: Any, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    writer.write(corpus, 1_000_000, 5, "train")
    run = make_run(f"data.sources={corpus}/*.jsonl.gz", f"data.cache_dir={tmp_path / 'cache'}")
    run.append_event("end", step=20, status="finished")
    changed = sorted(corpus.glob("*.jsonl.gz"))[1]
    text = gzip.decompress(changed.read_bytes()).decode()
    changed.write_bytes(gzip.compress(text.replace("。", "！", 1).encode()))
    result = finlm("reproduce", run.path, "--runs", tmp_path / "again", "--json")
    assert result.returncode == 1 and not (tmp_path / "again").exists(), result.stderr
    assert f"first difference   data: file {changed.name}" in result.stderr
    assert json.loads(result.stdout)["first_difference"]["field"].startswith(f"file {changed.name}")


def test_where_the_runs_ended_is_shown_with_four_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_at(tmp_path / "a", [3.0, 2.123456789]), run_at(tmp_path / "b", [3.0, 2.123456123])
    for run, loss, rate in ((a, 2.5, 100.0), (b, 2.4, 110.0)):
        run.append_event("eval", step=2, loss=loss, perplexity=1.0, sources={})
        run.append_event("step", step=2, loss=2.0, tokens_per_second=rate)
    shown = compare.format_comparison(compare.compare(a, b), ("a", "b"))
    assert (
        "held-out loss      2.5000 | 2.4000   -4.00 %" in shown and "tokens/s           100 | 110   +10.00 %" in shown
    )
    assert compare.format_losses(compare.Difference("curve", "x", 2.0, 2.1)) == "2.0000 | 2.1000"
    assert compare.format_losses(compare.Difference("curve", "x", 2.123456789, 2.123456123)) == "2.123457 | 2.123456"
    assert compare.format_losses(compare.Difference("curve", "x", 2.0, None)) == "2.0000 | absent"


@pytest.mark.parametrize("first, last", [(8.3, None), (None, 8.3), (8.3, 8.0)])
def test_a_run_whose_last_numbers_are_not_finite_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: float | None, last: float | None
) -> None:
    run = RunDir(tmp_path / "run")
    run.export.mkdir(parents=True)
    run.append_event("step", step=1, loss=last, tokens_per_second=10.0)
    for step, loss in ((0, first), (1, last)):
        run.append_event("eval", step=step, loss=loss, sources={"news": {"loss": loss, "perplexity": loss}})
    expectations.print_outcome(run, "pretrain")
    said = capsys.readouterr().err
    shown = ["not finite" if value is None else f"{value:.4f}" for value in (first, last)]
    assert f"held-out loss   {shown[0]} -> {shown[1]}" in said and f"training loss   {shown[1]} after 1 steps" in said
    assert f"loss {shown[1]}  perplexity {shown[1]}" in said and ("lower" in said) == (None not in (first, last))


def test_commands_to_try_next_are_explained_in_the_language_of_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.export.mkdir(parents=True)
    run.append_event("step", step=1, loss=1.0, tokens_per_second=10.0)
    monkeypatch.setattr(language, "_language", "zh")
    expectations.print_outcome(run, "pretrain")
    assert "   # stage 为 sft 的配方\n" in capsys.readouterr().err
