"""Several answers to a prompt: pass@k and maj@k by their definitions, and the best one as data, each prompt counted."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.evals import attempts
from finlm.evals.attempts import Attempt, Graded, Prompt
from finlm.recipe import recipe

import dialogues
from helpers import ROOT

RIGHT, WRONG, SILENT = Graded(True, 1.0, "A"), Graded(False, 0.0, "B"), Graded(False, 0.0, None)


@pytest.mark.parametrize(("count", "right"), [(8, 0), (8, 3), (8, 8), (5, 1)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_attempt(count: int, right: int) -> None:
    for k in range(1, count + 1):
        draws = list(itertools.combinations([True] * right + [False] * (count - right), k))
        assert attempts.pass_at(k, count, right) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("graded", "is_right"),
    [
        ([RIGHT, WRONG, RIGHT], True),
        ([WRONG, RIGHT, WRONG], False),
        ([WRONG, RIGHT], False),
        ([RIGHT, WRONG], True),
        ([SILENT, SILENT, RIGHT], True),
        ([SILENT], False),
    ],
)
def test_the_majority_is_of_those_that_name_an_answer(graded: list[Graded], is_right: bool) -> None:
    assert attempts.is_majority_right(graded) is is_right


def test_a_score_has_intervals_that_hold_the_value() -> None:
    graded = [[RIGHT, WRONG, RIGHT, SILENT]] * 30 + [[WRONG] * 4] * 70
    passed, majority = attempts.score(graded)
    assert list(passed) == [1, 2, 4] and passed[4].value == pytest.approx(0.3)
    assert passed[1].value == pytest.approx(0.15) and majority[4].value == pytest.approx(0.3)
    low, high = passed[4].interval
    assert 0.2 < low < 0.3 < high < 0.4


def test_the_best_right_attempt_is_written_and_every_other_prompt_is_counted(tmp_path: Path) -> None:
    asked = [Prompt([{"role": "user", "content": f"第{n}题"}], [1], "A") for n in range(3)]
    said = [
        [Attempt("甲", 1), Attempt("乙 ", 1)],
        [Attempt("丙", 1), Attempt("丁", 1)],
        [Attempt("戊", 9, "cut off"), Attempt("己", 1)],
    ]
    graded = [[RIGHT, Graded(True, 1.2, "A")], [WRONG, SILENT], [Graded(True, 1.5, "A"), RIGHT]]
    counts = attempts.write_best(tmp_path / "best.jsonl", asked, said, graded)
    rows = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == ["乙", "己"]
    assert rows[0]["messages"][0] == {"role": "user", "content": "第0题"}
    wanted = {"written": 2, "no right attempt": 1, "written, every attempt right": 1, "attempts cut off": 1}
    assert counts == Counter(wanted)


@pytest.mark.slow
def test_a_recipe_is_attempted_from_its_rows_to_data_and_nothing_is_drawn_twice(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"第{n}题？\nA. 甲\nB. 乙", "answer": "A" if n % 2 else "没有字母"} for n in range(12)]
    source = dialogues.write(tmp_path / "rows.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    grpo = "grpo={reward: [words, {rule: format, pattern: '.*', weight: 0.5}], max_new_tokens: 6}"
    overrides = (f"model.init_from={run.export}", f"data.sources={source}", f"data.cache_dir={tmp_path}", grpo)
    all_of_them = ("data.held_out_fraction=0", "data.max_broken_fraction=1")
    wanted = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", (*overrides, *all_of_them)).recipe
    options = attempts.Options(Path(run.export), count=3, split="train", best=tmp_path / "best.jsonl")
    found = attempts.run(wanted, options)
    assert found.prompts == 6 and found.counts["no right letter"] == 6 and list(found.passed) == [1, 2, 3]
    written = found.counts["written"]
    assert written + found.counts["no right attempt"] == 6
    assert set(found.to_json()["majority"][3]) == {"value", "interval"} and found.to_json()["best"].endswith("l")
    assert len((tmp_path / "best.jsonl").read_text().splitlines()) == written
    ledger = next((tmp_path / "runs/evals").glob("attempts-*.jsonl"))
    before = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert len({row["text"] for row in before}) > 6, "attempts differ"
    monkeypatch.setattr(attempts, "_generate", lambda *_: pytest.fail("drawn again"))
    again = attempts.run(wanted, replace(options, best=None))
    assert again.passed == found.passed and again.majority == found.majority
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    ledger.unlink()
    monkeypatch.setattr(attempts, "_CPU_ROWS", 2)
    attempts.run(wanted, replace(options, best=None))
    after = {row["key"]: row["text"] for row in map(json.loads, ledger.read_text().splitlines())}
    assert after == {row["key"]: row["text"] for row in before}, "whatever is drawn together"
    attempts.show(found)
    assert "pass@3" in capsys.readouterr().out


def test_a_model_behind_an_endpoint_is_asked_and_every_attempt_is_counted(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n}加1等于几？", "answer": f"{n + 1}"} for n in range(10, 16)]
    source = dialogues.write(tmp_path / "rows.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    where = (f"model.init_from={run.export}", f"data.sources={source}", f"data.cache_dir={tmp_path}")
    held_out = ("grpo.reward=number", "data.held_out_fraction=0", "chat.system=算。")
    endpoint = ("self_qa.endpoint=http://127.0.0.1:9/v1", "self_qa.model=teller")
    wanted = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", (*where, *held_out, *endpoint)).recipe
    options = attempts.Options(None, count=2, split="train", best=tmp_path / "best.jsonl", start=Path(run.export))

    def answer(settings: Any, prompts: dict[str, Any], limits: Any, ledger: Path, former: Any) -> dict[str, Any]:
        assert settings.model == "teller" and not former and len(prompts) == 12
        found = {}
        for n, (key, messages) in enumerate(prompts.items()):
            assert [row["role"] for row in messages] == ["system", "user"]
            right = int(messages[1]["content"][:2]) + 1
            said = f"<think>\n{right - 1}+1={right}\n</think>\n\n答案：{right if n // 2 else 0}"
            found[key] = {"text": said, "tokens": 9, "fault": "cut off" if n in (2, 3, 4) else ""}
        return dict(list(found.items())[:-1])  # max_cost is spent before the last

    monkeypatch.setattr(attempts, "answer_prompts", answer)
    found = attempts.run(wanted, options)
    assert found.model == "teller" and found.prompts == 5 and found.passed[2].value == pytest.approx(0.8)
    kept = {name: count for name, count in found.counts.items() if count}
    assert kept == {
        **{"asked": 6, "not asked, as self_qa.max_cost is reached": 1, "written": 3, "no right attempt": 2},
        **{"written, every attempt right": 2, "attempts cut off": 3},
    }
    lines = [json.loads(line)["messages"] for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(row[1]["content"].startswith("<think>\n") for row in lines)
    assert [row["role"] for row in lines[0]] == ["user", "assistant"]
    plain = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", where).recipe
    with pytest.raises(UserError, match="no model is named that could answer"):
        attempts.run(plain, replace(options, best=None))


@pytest.mark.parametrize("mask", ["[]", "[phone]"])
def test_a_split_has_the_prompts_that_the_recipe_holds_out_or_trains_on(run: RunDir, tmp_path: Path, mask: str) -> None:
    rows = [{"prompt": f"第{n % 40}题：电话13812345{n % 40:03}？", "answer": str(n % 40)} for n in range(48)]
    source = dialogues.write(tmp_path / "rows.jsonl", rows)
    where = (f"model.init_from={run.export}", f"data.sources={source}", f"data.cache_dir={tmp_path}")
    held_out = ("grpo.reward=number", "data.held_out_fraction=0.3", f"data.clean.mask={mask}")
    wanted = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", (*where, *held_out)).recipe
    options = attempts.Options(Path(run.export), split="train")
    train = {prompt.right for prompt in attempts.read_prompts(wanted, options, Counter())}
    counts: Counter[str] = Counter()
    asked = [prompt.right for prompt in attempts.read_prompts(wanted, replace(options, split="held_out"), counts)]
    assert len(asked) == len(set(asked)) > 3 and not train & set(asked), "each prompt is in one split, once"
    assert 36 <= len(train | set(asked)) <= 40 and counts.total() == 48, "a few are reserved"


def test_a_right_answer_that_the_tokenizer_cannot_spell_is_counted_and_not_asked(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"第{n}题？", "answer": str(n)} for n in (7, 8)]
    source = dialogues.write(tmp_path / "rows.jsonl", rows)
    where = (f"model.init_from={run.export}", f"data.sources={source}", f"data.cache_dir={tmp_path}")
    wanted = recipe.load(ROOT / "recipes/quickstart/grpo.yaml", (*where, "grpo.reward=number")).recipe
    plain = attempts.encode.Encoder

    def lossy(*given: object) -> attempts.encode.Encoder:
        encoder = plain(*given)  # type: ignore[arg-type]
        decode = encoder.tokenizer.decode
        monkeypatch.setattr(encoder.tokenizer, "decode", lambda ids: decode(ids).replace("7", "\ufffd"))
        return encoder

    monkeypatch.setattr(attempts.encode, "Encoder", lossy)
    counts: Counter[str] = Counter()
    asked = list(attempts.read_prompts(wanted, attempts.Options(Path(run.export), split="train"), counts))
    asked += list(attempts.read_prompts(wanted, attempts.Options(Path(run.export), split="held_out"), counts))
    assert {prompt.right for prompt in asked} == {"8"}
    assert counts["a right answer that the tokenizer cannot spell"] >= 1


@pytest.mark.parametrize(
    ("stage", "reward", "problem"),
    [
        ("sft", "", "of stage sft"),
        ("grpo", "models/judge", "checks no right answer"),
        ("grpo", "[option, m/j]", "model"),
    ],
)
def test_a_recipe_whose_answers_cannot_be_checked_is_refused(stage: str, reward: str, problem: str) -> None:
    overrides = (f"grpo.reward={reward}",) if reward else ()
    wanted = recipe.load(ROOT / f"recipes/quickstart/{stage}.yaml", overrides).recipe
    with pytest.raises(UserError, match=problem):
        attempts.run(wanted, attempts.Options(Path("gone")))
