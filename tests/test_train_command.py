"""`finlm train` from a recipe to its report."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ForkedLaunch
from finlm import config, pipeline
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.runs import is_finished
from finlm.cli import main
from finlm.doctor import preflight
from finlm.inference import export
from finlm.launch import restart, start
from finlm.recipe import recipe
from finlm.record.report import run_page

import dialogues
from helpers import QUICKSTART, ROOT, TINY, finlm, finlm_here, sets, with_fault

pytestmark = pytest.mark.slow
ERROR = preflight.Finding("disk", "localhost", "error", "as if", "nothing")


def test_a_run_ends_with_everything_a_user_needs(finished: tuple[RunDir, str]) -> None:
    run, printed = finished
    for word in ("run directory", "held-out loss", "tokens/s", "report", "try next"):
        assert word in printed
    assert run.report.stat().st_size > 10_000
    assert [event["status"] for event in run.read_events("end")] == ["finished"]
    evals = list(run.read_events("eval"))
    assert [event["step"] for event in evals] == [0, 10, 20]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert set(evals[-1]["sources"]) == {"announcement", "fin_news", "fin_articles", "fin_exam"}
    assert (run.code / "finlm" / "train" / "pretrain.py").exists()


def test_the_export_loads_in_plain_transformers_and_generates(finished: tuple[RunDir, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = finished
    tokenizer, model = AutoTokenizer.from_pretrained(run.export), AutoModelForCausalLM.from_pretrained(run.export)
    ids = tokenizer("公司", return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert out.shape[1] > ids.shape[1]


def test_eval_of_the_last_checkpoint_equals_the_training_runs_own(finished: tuple[RunDir, str]) -> None:
    run, _ = finished
    result = finlm_here("eval", run.path, "--json")  # of its newest checkpoint
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(list(run.read_events("eval"))[-1]["loss"], abs=1e-4)


def test_the_command_of_a_finished_run_starts_a_new_one_on_the_same_data(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    former, _ = finished
    shutil.copytree(former.path, tmp_path / former.path.name, ignore=shutil.ignore_patterns("checkpoints", "export"))
    # --print makes the run directory that training would start from.
    result = finlm_here("train", QUICKSTART, *sets(tiny), "--runs", tmp_path, "--print", "torchrun")
    assert result.returncode == 0, result.stderr
    assert "reused" in result.stderr
    (new,) = (path for path in tmp_path.iterdir() if path.name != former.path.name)
    shards = [files.read_json(RunDir(path).manifest)["shards"]["path"] for path in (former.path, new)]
    assert shards[0] == shards[1] and not RunDir(new).events.exists()


def test_a_run_that_was_cut_after_training_is_completed_not_trained_again(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished[0], tmp_path, "end")
    shutil.rmtree(run.export)
    monkeypatch.setattr(restart, "run_ranks", lambda *_, **__: pytest.fail("trained again"))
    # Though it asks otherwise than before, and would train otherwise: on one rank, with another micro-batch.
    changed = (*tiny, "eval.mode=cloze", "train.cpu_ranks=1", "batch.micro_batch=4")
    assert main.main(["train", str(QUICKSTART), *sets(changed), "--runs", str(tmp_path)]) == 0
    assert (run.export / "config.json").exists() and list(tmp_path.iterdir()) == [run.path]
    assert [row["kind"] for row in run.read_events()][-4:] == ["end", "export", "sample", "prediction"]
    about = files.read_json(run.finished)
    assert is_finished(run) and (about["steps"], about["promises_kept"]) == (20, None)


def test_a_report_that_cannot_be_written_hides_no_failure(
    finished: tuple[RunDir, str],
    tiny: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(words: str) -> None:
        raise OSError(words)

    run = copied(finished[0], tmp_path, "end")
    shutil.rmtree(run.export)
    monkeypatch.setattr(export, "export", lambda *_: fail("the export failed"))
    monkeypatch.setattr(run_page, "build", lambda *_, **__: fail("the report failed"))
    told: list[str] = []
    monkeypatch.setattr(start, "notify", lambda *words: told.append(words[-1]))
    with pytest.raises(OSError, match="the export failed"):
        main.main(["train", str(QUICKSTART), *sets(tiny), "--runs", str(tmp_path)])
    assert "report.html could not be written: the report failed" in capsys.readouterr().err
    assert told == ["the export failed"]


def dry_run(*options: str | Path) -> dict[str, tuple[str, str]]:
    """State and words of every step that `finlm train --dry-run` prints."""
    result = finlm_here("train", "--dry-run", *options)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^  (.{14}) (.{6}) (.*)$", result.stdout, re.MULTILINE)
    assert [name.rstrip() for name, _, _ in rows] == [step.name for step in pipeline.STEPS]
    return {name.rstrip(): (state.rstrip(), words) for name, state, words in rows}


def tree(directory: Path) -> dict[Path, int]:
    """What a directory holds, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_dry_run_of_a_fresh_recipe_names_all_steps_and_writes_nothing(tmp_path: Path) -> None:
    where = sets((*TINY, f"data.cache_dir={tmp_path}/cache", "train.cpu_ranks=2"))
    steps = dry_run(QUICKSTART, *where, "--runs", tmp_path / "runs")
    assert {name for name, (state, _) in steps.items() if state == "-"} == {"parent", "labels", "gather", "questions"}
    assert {name for name, (state, _) in steps.items() if state == "done"} == {"plan"}
    assert "world size 2," in steps["plan"][1] and steps["hosts"][1] == "check localhost (2 x CPU rank)"
    family = QUICKSTART.with_name("sft.yaml")
    steps = dry_run(family, "--set", f"data.cache_dir={tmp_path}/cache", "--runs", tmp_path / "runs")
    assert steps["parent"][0] == "to do" and steps["parent"][1].startswith(f"train {QUICKSTART.relative_to(ROOT)} fi")
    assert not list(tmp_path.iterdir())
    refused = finlm_here("train", QUICKSTART, "--dry-run", *where, "--set", "zero.stage=4")
    assert refused.returncode == 2 and "zero.stage" in refused.stderr
    refused = finlm_here("train", QUICKSTART, "--dry-run", *where, "--set", f"data.sources={tmp_path}/*.jsonl")
    assert refused.returncode == 2 and "data.sources[0]: no file matches" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_knows_an_unfinished_run_and_what_of_it_is_done(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    before = tree(tmp_path)
    with (run.path / ".lock").open("a") as other:  # also while it is running
        fcntl.flock(other, fcntl.LOCK_EX)
        steps = dry_run(QUICKSTART, *sets(tiny), "--runs", tmp_path)
    assert steps["data"][0] == "done" and steps["run directory"] == ("done", str(run.path))
    assert steps["train"] == ("to do", "from step 20 of 20")
    steps = dry_run(QUICKSTART, *sets(tiny), "--runs", tmp_path, "--set", "batch.micro_batch=4")
    continued = f"make one that continues {run.path} from step 20 under this plan"
    assert steps["run directory"] == ("to do", continued)
    copied(finished[0], tmp_path / "trained", "end")
    steps = dry_run(QUICKSTART, *sets(tiny), "--runs", tmp_path / "trained")
    assert [steps[name][0] for name in ("hosts", "train", "export", "report")] == ["-", "done", "done", "to do"]
    shutil.rmtree(tmp_path / "trained")
    assert tree(tmp_path) == before


def test_a_dry_run_says_that_a_run_is_finished_and_from_which_one_the_next_stage_would_start(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    whole, runs = finished[0], finished[0].path.parent
    steps = dry_run(QUICKSTART, *sets(tiny), "--runs", runs)
    assert steps["resume"] == ("-", f"{whole.path} is finished, this would be another run")
    assert steps["run directory"][0] == steps["train"][0] == "to do"
    files.write_text(tmp_path / "pretrain.yaml", whole.recipe.read_text())
    source = dialogues.write(tmp_path / "rows.jsonl", dialogues.sample(60))
    wanted = dialogues.sft(tmp_path, tmp_path / "pretrain.yaml", source, "train={steps: 3, cpu_ranks: 1}")
    files.write_text(tmp_path / "sft.yaml", recipe.dump(wanted))
    steps = dry_run(tmp_path / "sft.yaml", "--runs", runs)
    assert steps["parent"] == ("done", str(whole.export)) and steps["labels"][0] == "to do"
    assert not (tmp_path / "cache").exists()


def test_an_unfinished_runs_checkpoints_need_no_second_room(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    seen: list[Any] = []

    def judge(*given: Any) -> list[preflight.Finding]:
        seen.append(given[3])
        return [ERROR]

    monkeypatch.setattr(preflight, "judge", judge)
    assert main.main(["train", str(QUICKSTART), *sets(tiny), "--runs", str(tmp_path)]) == 1
    written = sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    assert seen[0]["localhost"].disks["run"].checkpoint_bytes >= written > 0


def test_a_second_command_leaves_a_running_run_as_it_is(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    before = {path: path.read_bytes() for path in (run.doctor, run.report)}
    with (run.path / ".lock").open("a") as other:  # as another process holds it
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main.main(["train", str(QUICKSTART), *sets(tiny), "--runs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{run.path} is running now" in said and "doctor" not in said
    assert {path: path.read_bytes() for path in before} == before


def test_the_next_stage_starts_from_the_recipe_as_written_and_says_from_which_run(
    finished: tuple[RunDir, str], forked_launch: ForkedLaunch, tmp_path: Path
) -> None:
    forked_launch()
    runs, whole = tmp_path / "runs", finished[0]
    shutil.copytree(whole.path, runs / whole.path.name)
    trial = RunDir(shutil.copytree(whole.path, runs / "quickstart-9", ignore=shutil.ignore_patterns("checkpoints")))
    trial.recipe.write_text(whole.recipe.read_text().replace("seed: 7\n  precision", "seed: 8\n  precision"))
    files.write_text(tmp_path / "pretrain.yaml", whole.recipe.read_text())
    source = dialogues.write(tmp_path / "rows.jsonl", dialogues.sample(60))
    wanted = dialogues.sft(tmp_path, tmp_path / "pretrain.yaml", source, "train={steps: 3, cpu_ranks: 1}")
    files.write_text(tmp_path / "sft.yaml", recipe.dump(wanted))
    result = finlm_here("train", tmp_path / "sft.yaml", "--runs", runs)
    assert result.returncode == 0, result.stderr
    assert f"passed over {trial.path}: train.seed 8, the recipe says 7" in result.stderr
    (run,) = map(RunDir, runs.glob("quickstart-sft-*"))
    words = f"step 20 of {whole.path.name} (recipe quickstart)"
    assert f"starting from {words} in {runs / whole.path.name}/export" in result.stderr
    begun = files.read_json(run.manifest)["start"]
    assert (begun["run"], begun["step"]) == (whole.path.name, 20)
    card = (run.export / "README.md").read_text(encoding="utf-8")
    assert f"starting from {words}." in card and str(tmp_path) not in card
    assert words in run.report.read_text(encoding="utf-8")


def copied(run: RunDir, runs: Path, last: str) -> RunDir:
    """A copy whose events end with the last row of a kind."""
    copy = RunDir(runs / run.path.name)
    shutil.copytree(run.path, copy.path)
    rows = list(run.read_events())
    count = max(place for place, row in enumerate(rows) if row["kind"] == last) + 1
    lines = run.events.read_text(encoding="utf-8").splitlines(keepends=True)
    copy.events.write_text("".join(lines[:count]), encoding="utf-8")
    copy.finished.unlink()
    return copy


def test_a_terminated_run_leaves_no_process_and_the_same_command_resumes_it(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    command = ["train", str(QUICKSTART), *sets((*tiny, "train.cpu_ranks=1")), "--runs", str(runs)]
    env = os.environ | {"PYTHONPATH": with_fault(tmp_path / "site", "held(12)")}  # the signal comes in that step
    line = [sys.executable, "-m", "finlm", *command]
    process = subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    # Not for the checkpoint of step 10: a slow disk publishes it with a later step than the one that waits.
    while not any(row["step"] == 11 for path in runs.glob("quickstart-*") for row in RunDir(path).read_events("step")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 143 and "with a checkpoint; the same command resumes" in printed
    assert subprocess.run(["pgrep", "-f", str(runs)], capture_output=True, check=False).returncode == 1
    (path,) = runs.iterdir()
    assert RunDir(path).report.exists()
    (end,) = RunDir(path).read_events("end")
    assert (end["status"], end["exit_code"]) == ("interrupted", 143)
    assert end["step"] in (12, 13), "a signal is looked at as a step's loss is gathered: this one's or the next one's"
    assert RunDir(path).complete_checkpoints()[-1][0] == end["step"], "the step that was running is not lost"
    resumed = finlm_here(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {path} from step" in resumed.stderr and "held-out loss" in resumed.stderr
    assert [event["status"] for event in RunDir(path).read_events("end")] == ["interrupted", "finished"]
    assert list(runs.iterdir()) == [path]


def test_a_damaged_checkpoint_is_not_started_from_and_the_step_before_it_is_announced(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    shard = next(run.checkpoint(20).glob("*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size - 1)
    result = finlm_here("train", QUICKSTART, *sets(tiny), "--runs", tmp_path)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "resuming" in line or "set aside:" in line]
    assert [line.partition(" (--new")[0] for line in said] == [
        f"resuming {run.path} from step 20",
        "a damaged checkpoint was set aside: started again from the one before it",
        f"resuming {run.path} from step 10",
    ]
    assert [row["step"] for row in run.read_events("start")] == [0, 10]


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    before = run.events.read_bytes()
    shutil.rmtree(run.checkpoints)
    result = finlm_here("train", QUICKSTART, *sets(tiny), "--runs", tmp_path)
    assert result.returncode == 2 and "resuming" not in result.stderr
    assert "localhost: none; events.jsonl records one after step 20" in result.stderr
    assert run.events.read_bytes() == before


def test_the_report_can_be_built_again(finished: tuple[RunDir, str], tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "run")
    ignored = shutil.ignore_patterns("checkpoints", "export", "report.html")
    shutil.copytree(finished[0].path, copy.path, ignore=ignored)
    assert finlm_here("report", copy.path).returncode == 0
    assert copy.report.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "runs/none/checkpoints/step-5"), "holds no model"),
        (("report", "nowhere"), "there is no run nowhere"),
        (("export", "nowhere", "out"), "nowhere holds no model"),
        (("sample", "runs/none", "x"), "runs/none holds no model"),
    ],
)
def test_mistakes_on_the_command_line_exit_2_without_a_traceback(arguments: Any, words: str) -> None:
    result = finlm(*arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_finished_run_goes_on_with_more_steps_and_another_rate_when_it_is_asked_to(
    finished: tuple[RunDir, str], forked_launch: ForkedLaunch, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    forked_launch()
    first = RunDir(tmp_path / finished[0].path.name)
    shutil.copytree(finished[0].path, first.path, symlinks=True)
    again = finlm_here("train", QUICKSTART, *sets(tiny), "--runs", tmp_path, "--continue")
    assert again.returncode == 2 and "has its 20 steps already" in again.stderr
    other = finlm_here(
        "train", QUICKSTART, *sets((*tiny, "train.steps=24", "train.seed=8")), "--runs", tmp_path, "--continue"
    )
    assert other.returncode == 2 and "train.seed differ; --continue may change train.steps" in other.stderr
    assert list(tmp_path.iterdir()) == [first.path]
    changed = (*tiny, "train.steps=24", "optim.lr=1e-3")
    longer = finlm_here("train", QUICKSTART, *sets(changed), "--runs", tmp_path, "--continue")
    assert longer.returncode == 0, longer.stderr
    assert f"continuing {first.path} from step 20 to 24" in longer.stderr
    assert "learning rate of a run of 24 steps: it ended at" in longer.stderr
    (path,) = (each for each in tmp_path.iterdir() if each != first.path)
    rows = list(RunDir(path).read_events("step"))
    assert [row["step"] for row in rows] == list(range(1, 25))
    wanted = recipe.load(path / "recipe.yaml").recipe
    assert rows[-1]["lr"] == pytest.approx(config.lr_at(wanted.optim, 24, 23))
    assert is_finished(RunDir(path)) and len(list(RunDir(path).read_events("export"))) == 1
    assert files.read_json(path / "manifest.json")["continues"]["step"] == 20
