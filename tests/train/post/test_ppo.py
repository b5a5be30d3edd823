"""PPO and a function of the user's as reward, on CPU ranks: they earn more, resume bit for bit, and export plainly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.inference.open import load_trained
from finlm.recipe import recipe

import dialogues
from helpers import ROOT
from ranks import Ranks

pytestmark = pytest.mark.slow
ROWS = [{"prompt": f"第{n}家公司经营得怎样？", "answer": "A"} for n in range(200)]
SHORT = "def short(prompts, completions, answers):\n    return [-len(said) / 10 for said in completions]\n"


@pytest.fixture(scope="module")
def made(finished: tuple[RunDir, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GRPO run of the tiny model that is rewarded for short answers: made(form, *overrides)."""
    source = tmp_path_factory.mktemp("rows")
    (source / "mine.py").write_text(SHORT)
    path = dialogues.write(source / "rows.jsonl", ROWS)
    reward = f"reward: [{{rule: function, path: '{source / 'mine.py'}:short'}}, {{rule: option, weight: 0.1}}]"

    def make(form: str, *overrides: str) -> RunDir:
        grpo = f"grpo={{{reward}, form: {form}, generations: 4, max_new_tokens: 8, beta: 0.01, iterations: 2}}"
        wanted = (
            f"model.init_from={finished[0].export}",
            f"data.sources={path}",
            f"data.cache_dir={source / 'cache'}",
            "data.held_out_fraction=0.2",
            "batch.sequence_length=64",
            "batch.tokens_per_step=1024",
            "optim={lr: 2.0e-3, schedule: constant, warmup_steps: 0}",
            "eval={every_steps: 12, max_tokens_per_source: 1000}",
            "checkpoint.every_steps=6",
            "train.steps=12",
        )
        loaded = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", (*wanted, grpo, *overrides)).recipe
        return dialogues.run(tmp_path_factory.mktemp(form), loaded)

    return make


@pytest.mark.parametrize("form", ["ppo", "gspo"])
def test_it_earns_more_and_resumes_bit_for_bit_in_the_midst(form: str, made: Any, ranks: Ranks) -> None:
    run = made(form)
    rows = ranks.train(run)
    earned = [row["reward"] for row in rows if "reward" in row]  # every second step learns from former answers
    assert len(earned) == 6 and sum(earned[-2:]) > sum(earned[:2])
    assert all(row["mismatch_largest"] < 1e-3 for row in rows)
    assert all(set(row["rewards"]) == {"short", "option"} for row in rows if "reward" in row)
    assert all(("value_loss" in row) is (form == "ppo") for row in rows)
    evals = list(run.read_events("eval"))
    assert [row["step"] for row in evals] == [0, 12] and evals[0]["rise"] == 0
    assert evals[1]["rise"] == pytest.approx(evals[1]["sampled"] - evals[0]["sampled"], abs=1e-6)
    low, high = evals[1]["rise_interval"]
    assert low < evals[1]["rise"] < high and evals[1]["rise"] > 0, "answers drawn to held-out prompts earn more"
    assert [row["rise"] for row in evals[1]["sources"].values()] == [evals[1]["rise"]]
    generated = list(run.read_events("generated"))
    assert [row["step"] for row in generated] == [1, 3, 5, 7, 9, 11] and all(row["tokens"] for row in generated)
    shown = list(files.read_json_lines(run.rollouts))
    assert {row["step"] for row in shown} == {1, 3, 5, 7, 9, 11} and len(shown) == 60
    for row in shown:
        assert row["reward"] == pytest.approx(row["rewards"]["short"] + 0.1 * row["rewards"]["option"])
        assert row["rewards"]["short"] == pytest.approx(-len(row["said"]) / 10) and row["right"] == "A"
    shutil.rmtree(run.checkpoint(12))
    again = ranks.train(run)[12:]
    for row in (*rows, *again):
        for key in ("time", "seconds", "tokens_per_second", "memory_bytes"):
            del row[key]
    assert again == rows[6:] and len(again) == 6
    assert list(run.read_events("eval"))[2] | {"time": 0} == evals[1] | {"time": 0}, "the first evaluation is known"
    assert list(files.read_json_lines(run.rollouts)) == shown
    assert all("value_head" not in name for name, _ in load_trained(Path(run.path)).model.named_parameters())
