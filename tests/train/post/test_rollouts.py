"""What is recorded of answers: some to read, means of terms, incidents of a gamed reward, the user's own function."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.dialogues import lint
from finlm.recipe import recipe, weights
from finlm.recipe.schema_train import Rollouts, Term
from finlm.train.post import rollouts
from finlm.train.post.grpo import names_of

from helpers import ROOT

GRPO = ROOT / "recipes/quickstart/grpo.yaml"
CALM = {
    "answer_tokens": 20.0,
    "entropy": 2.0,
    "repetition": 0.05,
    "unanswered": 0.1,
    "reward": 0.3,
    "equal_groups": 0.4,
}


def told(*rows: dict[str, float]) -> list[str]:
    """The incidents of five calm steps and these."""
    watch = rollouts.Watch(Rollouts())
    return [incident.what for row in (*(CALM,) * 5, *rows) for incident in watch.judge(row)]


@pytest.mark.parametrize(
    ("gamed", "what"),
    [
        ({"answer_tokens": 60.0}, "answers grow longer"),
        ({"entropy": 0.1}, "entropy collapses"),
        ({"repetition": 0.6}, "answers repeat themselves"),
        ({"unanswered": 0.5}, "answers name no answer"),
        ({"equal_groups": 1.0}, "answers earn the same"),
    ],
)
def test_a_gamed_reward_is_told_once_and_again_when_it_comes_back(gamed: dict[str, float], what: str) -> None:
    bad = CALM | gamed | {"reward": 0.9}
    assert told(*(CALM,) * 20) == []
    assert told(*(bad,) * 2) == [], "two steps are no trend"
    assert told(*(bad,) * 9) == [what]
    assert told(*(bad,) * 9, *(CALM,) * 9, *(bad,) * 9) == [what, what]


def test_a_watch_goes_on_from_its_state() -> None:
    rows = [CALM] * 5 + [CALM | {"unanswered": 0.5}] * 6
    whole, first = rollouts.Watch(Rollouts()), rollouts.Watch(Rollouts())
    wanted = [[each.detail for each in whole.judge(row)] for row in rows]
    found = [[each.detail for each in first.judge(row)] for row in rows[:7]]
    again = rollouts.Watch(Rollouts(), json.loads(json.dumps(first.state())))
    found += [[each.detail for each in again.judge(row)] for row in rows[7:]]
    assert found == wanted and sum(map(len, wanted)) == 1
    assert "0.5 of the answers in the last 5 steps, 0.1 in the first" in "".join(map("".join, wanted))


def test_what_answers_show_is_measured() -> None:
    said = ["答案：B", "公司的公司的" * 20, "不知道", "答案：C。"]
    found = rollouts.text_statistics(said, ("option",))
    assert found["unanswered"] == 0.5 and 0.2 < found["repetition"] < 0.25
    assert "unanswered" not in rollouts.text_statistics(said, ())


def test_a_rise_has_the_interval_of_its_mean() -> None:
    assert rollouts.mean_rise([0.25]) == {"rise": 0.25}
    found = rollouts.mean_rise([0.0, 0.5, 0.5, 0.0])
    apart = 3.182 * (1 / 12) ** 0.5 / 2  # Student's t of three; the deviation of these four is the root of a twelfth
    assert found == {"rise": 0.25, "rise_interval": pytest.approx([0.25 - apart, 0.25 + apart], rel=0.02)}
    # From Student's tables.
    for freedom, errors in ((2, 4.303), (5, 2.571), (10, 2.228), (100, 1.984)):
        assert rollouts.critical_t(freedom) == pytest.approx(errors, rel=0.04 if freedom == 2 else 0.003)


def test_ten_answers_of_a_step_can_be_read_and_a_resumed_run_writes_them_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    answers = [rollouts.Answer(f"第{n}问", "A", "答案：B", {"option": 0.0}, 0.0, -0.5) for n in range(40)]
    for step in (1, 2, 3):
        rollouts.write_answers(run, step, answers)
    rows = list(files.read_json_lines(run.rollouts))
    assert len(rows) == 30 and len({row["prompt"] for row in rows}) == 10
    assert rows[0].keys() == {"step", "prompt", "right", "said", "rewards", "reward", "advantage"}
    rollouts.drop_rows_after(run, 2)
    assert list(files.read_json_lines(run.rollouts)) == rows[:20]


MINE = """
def short(prompts, completions, answers):
    return [None if right == "-" else -len(said) for said, right in zip(completions, answers)]

def broken(prompts, completions, answers):
    return [float("nan")] * len(completions)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_function_of_the_users_is_called_from_its_copy_and_held_to_its_hash(mine: Path, tmp_path: Path) -> None:
    terms = f"grpo.reward=[option, {{rule: function, path: '{mine}:short', weight: 0.01}}]"
    loaded = recipe.load(GRPO, (terms,)).recipe
    assert loaded.grpo is not None and loaded.grpo.checked == ("option",)
    term = loaded.grpo.reward[1]
    assert term.sha256 == files.sha256_file(mine) and names_of(loaded.grpo.reward) == ["option", "short"]
    r: Any = SimpleNamespace(run=RunDir(tmp_path), recipe=loaded)
    with pytest.raises(UserError, match="as it was"):
        rollouts.make_rewards(r)
    copied = r.run.reward_file(term.sha256)
    copied.parent.mkdir()
    copied.write_text(MINE)
    mine.unlink()
    given = {
        "prompts": ["a", "b"],
        "asked": ["a", "b"],
        "completions": ["好好", "答案：B"],
        "answer": ["-", "B"],
        "prompt_ids": [[1], [1]],
    }
    option, short = rollouts.make_rewards(r)
    assert short(**given, completion_ids=[[1], [2]]) == [None, -4.0]
    assert option(**given, completion_ids=[[1], [2]]) == [None, 1.0]
    copied.write_text(MINE + "\n")
    with pytest.raises(UserError, match="another hash"):
        rollouts.make_rewards(r)


def test_a_function_that_returns_no_number_is_named(mine: Path, tmp_path: Path) -> None:
    run, term = RunDir(tmp_path), Term(rule="function", path=f"{mine}:broken", sha256=files.sha256_file(mine))
    run.reward_file(str(term.sha256)).parent.mkdir()
    run.reward_file(str(term.sha256)).write_text(MINE)
    function = rollouts.read_function(run, term)
    with pytest.raises(UserError, match="the function broken cannot score answers") as raised:
        rollouts.score_by_function(function, term.name, ["a"], ["b"], ["c"])
    assert raised.value.evidence == "it returned nan for an answer"


@pytest.mark.parametrize(
    ("body", "evidence"),
    [
        ("return [1 / len(said) for said in completions]", "ZeroDivisionError: division by zero (line 2 of mine.py: "),
        ("return [1.0]", "it returned 1 values for 2 answers"),
        ("return 0.5", "it returned 0.5"),
        ("return None", "it returned None"),
        ("return ['good'] * len(completions)", "it returned 'good' for an answer"),
        ("return [float('nan')] * 2", "it returned nan for an answer"),
        ("raise ConnectionError('the judge is down')", "ConnectionError: the judge is down"),
        ("import sys; sys.exit('no key')", "no key"),
        ("print('a word'); return [0.5, None]", ""),
    ],
)
def test_a_function_is_tried_on_a_right_and_an_empty_answer_before_launch(
    body: str, evidence: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"def score(prompts, completions, answers):\n    {body}\n")
    term = Term(rule="function", path=f"{mine}:score", sha256=files.sha256_file(mine))
    if not evidence:
        return lint.try_function(term, "问？", "答案：A")
    with pytest.raises(UserError, match="the function score cannot score answers") as raised:
        lint.try_function(term, "问？", "答案：A")
    assert evidence in raised.value.evidence


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ("[{rule: number, most: 3}]", "reward[0].most: has no effect with rule number; it belongs to length"),
        ("[{rule: format}]", "reward[0].pattern: is required with rule format"),
        ("[{rule: format, pattern: '('}]", "reward[0].pattern: is no regular expression"),
        ("[option, {rule: length, most: 24}]", "reward[1].most: 24 is not below grpo.max_new_tokens (24)"),
        ("[{rule: option, weight: 0}]", "reward[0].weight: 0 gives the term no effect"),
        ("[{rule: function, path: 'gone.py:f'}]", "reward[0].path: 'gone.py:f' should be FILE.py:NAME"),
        ("[{rule: function, path: '%s:other'}]", "defines no function 'other'; it has short, broken"),
        ("[{rule: function, path: '%s:short', sha256: '00'}]", "reward[0].sha256: "),
        ("[{rule: numbers}]", "did you mean 'number'?"),
        ("[]", "grpo.reward"),
    ],
)
def test_a_mistaken_term_is_refused_at_its_place(terms: str, sentence: str, mine: Path) -> None:
    with pytest.raises(UserError) as raised:
        recipe.load(GRPO, (f"grpo.reward={terms.replace('%s', str(mine))}",))
    assert sentence in str(raised.value.evidence)


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_done() -> None:
    with pytest.raises(UserError, match=r"grpo.engine: vllm needs vLLM, which is not installed here"):
        weights.check_model(recipe.load(GRPO, ("grpo.engine=vllm",)).recipe)
    for override, said in (
        ("grpo.engine=vllm-server", "is required"),
        ("grpo.server='http://a:8000'", "has no effect"),
    ):
        with pytest.raises(UserError) as raised:
            recipe.load(GRPO, (override,))
        assert f"grpo.server: {said} with engine" in str(raised.value.evidence)
