"""`finlm verify-resume` around its two trainings; what it compares is in tests/train/post/test_sft.py."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.runs import proofs

from helpers import QUICKSTART


@pytest.mark.parametrize(
    ("program", "words"),
    [("import time; time.sleep(60)", "has not finished a step for"), ("exit(3)", "was not trained to its end")],
)
def test_a_training_that_hangs_or_fails_before_it_is_killed_is_no_training_that_has_ended(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_finlm_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(proofs, "PATIENCE_SECONDS", 0.5 if "sleep" in program else 60.0)
    with pytest.raises(UserError, match=words):
        proofs._train_and_kill("r.yaml", (), tmp_path / "killed", random.Random(0), 100, while_saving=False)


@pytest.mark.slow
def test_a_run_that_ends_before_it_is_killed_is_compared_not_trained_again(
    finished: tuple[RunDir, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(_recipe: str, _options: Any, runs: Path) -> int:
        shutil.copytree(finished[0].path, runs / finished[0].path.name)
        runs.with_suffix(".log").write_text("the end")
        trained.append(runs.name)
        return 1  # numbers that are not the recipe's expect:

    def not_killed(*given: Any, **_: Any) -> None:
        train(*given[:3])

    monkeypatch.setattr(proofs, "_train", train)
    monkeypatch.setattr(proofs, "_train_and_kill", not_killed)
    verdict = proofs.verify_resume(str(QUICKSTART), (), 3, tmp_path / "runs", 0)
    assert verdict.is_equal and not verdict.kills
    assert trained == ["undisturbed", "killed"]
    events = next((tmp_path / "runs/killed").glob("*/events.jsonl"))
    events.write_text(events.read_text(encoding="utf-8").replace('"finished"', '"interrupted"'), encoding="utf-8")
    monkeypatch.setattr(proofs, "_train", lambda *_: 143)
    with pytest.raises(UserError, match="was not trained to its end"):
        proofs._train_to_end(str(QUICKSTART), (), tmp_path / "runs/killed")
