"""`finlm train` from a recipe to its report."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finlm import cli
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.ops import doctor, launch_restart

from helpers import QUICKSTART, ROOT, finlm, sets

pytestmark = pytest.mark.slow
ERROR = doctor.Finding("disk", "localhost", "error", "as if", "nothing")


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
    result = finlm("eval", run.path, "--json")  # of its newest checkpoint
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(list(run.read_events("eval"))[-1]["loss"], abs=1e-4)


def test_the_command_of_a_finished_run_starts_a_new_one_on_the_same_data(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    former, _ = finished
    shutil.copytree(former.path, tmp_path / former.path.name, ignore=shutil.ignore_patterns("checkpoints", "export"))
    # --print makes the run directory that training would start from.
    result = finlm("train", QUICKSTART, *sets(tiny), "--runs", tmp_path, "--print", "torchrun")
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
    monkeypatch.setattr(launch_restart, "run_ranks", lambda *_, **__: pytest.fail("trained again"))
    # Though it asks otherwise than before, and would train otherwise: on one rank, with another micro-batch.
    changed = (*tiny, "eval.mode=cloze", "train.cpu_ranks=1", "batch.micro_batch=4")
    assert cli.main(["train", str(QUICKSTART), *sets(changed), "--runs", str(tmp_path)]) == 0
    assert (run.export / "config.json").exists() and list(tmp_path.iterdir()) == [run.path]
    assert [row["kind"] for row in run.read_events()][-4:] == ["end", "export", "sample", "prediction"]


def test_an_unfinished_runs_checkpoints_need_no_second_room(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    seen: list[Any] = []

    def judge(*given: Any) -> list[doctor.Finding]:
        seen.append(given[3])
        return [ERROR]

    monkeypatch.setattr(doctor, "judge", judge)
    assert cli.main(["train", str(QUICKSTART), *sets(tiny), "--runs", str(tmp_path)]) == 1
    written = sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    assert seen[0]["localhost"]["disks"]["run"]["checkpoint_bytes"] >= written > 0


def test_a_second_command_leaves_a_running_run_as_it_is(
    finished: tuple[RunDir, str], tiny: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(finished[0], tmp_path, "checkpoint")
    before = {path: path.read_bytes() for path in (run.doctor, run.report)}
    with (run.path / ".lock").open("a") as other:  # as another process holds it
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cli.main(["train", str(QUICKSTART), *sets(tiny), "--runs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{run.path} is running now" in said and "doctor" not in said
    assert {path: path.read_bytes() for path in before} == before


def copied(run: RunDir, runs: Path, last: str) -> RunDir:
    """A copy whose events end with the last row of a kind."""
    copy = RunDir(runs / run.path.name)
    shutil.copytree(run.path, copy.path)
    rows = list(run.read_events())
    count = max(place for place, row in enumerate(rows) if row["kind"] == last) + 1
    lines = run.events.read_text(encoding="utf-8").splitlines(keepends=True)
    copy.events.write_text("".join(lines[:count]), encoding="utf-8")
    return copy


def test_a_terminated_run_leaves_no_process_and_the_same_command_resumes_it(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    command = ["train", str(QUICKSTART), *sets((*tiny, "train.steps=80")), "--runs", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "finlm", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/checkpoints/step-10/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 143 and "with a checkpoint; the same command resumes" in printed
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).returncode == 1
    (path,) = tmp_path.iterdir()
    assert RunDir(path).report.exists()
    (end,) = RunDir(path).read_events("end")
    assert (end["status"], end["exit_code"]) == ("interrupted", 143)
    assert RunDir(path).complete_checkpoints()[-1][0] == end["step"], "the step that was running is not lost"
    resumed = finlm(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {path} from step" in resumed.stderr and "held-out loss" in resumed.stderr
    assert [event["status"] for event in RunDir(path).read_events("end")] == ["interrupted", "finished"]
    assert list(tmp_path.iterdir()) == [path]


def test_the_report_can_be_built_again(finished: tuple[RunDir, str], tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "run")
    ignored = shutil.ignore_patterns("checkpoints", "export", "report.html")
    shutil.copytree(finished[0].path, copy.path, ignore=ignored)
    assert finlm("report", copy.path).returncode == 0
    assert copy.report.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "runs/none/checkpoints/step-5"), "not a complete checkpoint"),
        (("report", "nowhere"), "not a run directory"),
        (("export", "nowhere", "out"), "not a complete checkpoint"),
        (("sample", "runs/none", "x"), "no such directory"),
    ],
)
def test_mistakes_on_the_command_line_exit_2_without_a_traceback(arguments: Any, words: str) -> None:
    result = finlm(*arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr
