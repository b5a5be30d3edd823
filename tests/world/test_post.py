"""Questions about figures: chains are right, four of ten answers show theirs, and held-out companies share no name."""

from __future__ import annotations

import re
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal

import pytest

from finlm.base.errors import UserError
from finlm.dialogues import scoring
from finlm.recipe import recipe
from finlm.recipe.schema_train import Term
from finlm.world import post

from helpers import ROOT

GRPO = ROOT / "recipes/quickstart/grpo.yaml"
STEP = re.compile(r"(-?[\d.]+)%?([-+÷])([\d.]+)%?(?:\+([\d.]+)%)?=(-?[\d.]+)(%?)")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(post.rows("figures", 1_000_000, 7, "train"))


def check_division(text: str) -> str:
    """Check a long division digit by digit; return its share in percent."""
    head, _, rest = text.partition("：")
    part, whole = map(int, head.split("÷"))
    *products, share = rest.split("，")
    rest_of, digits = part, ""
    for number, product in enumerate(products):
        digit, divisor, result, left = map(int, re.fullmatch(r"(\d)×(\d+)=(\d+)余(\d+)", product).groups())  # type: ignore[union-attr]
        rest_of *= 10 if number or part < whole else 1
        assert divisor == whole and digit * whole == result and rest_of - result == left < whole, text
        rest_of, digits = left, digits + str(digit)
    digits = digits.zfill(5)
    ratio, percent = (each.lstrip("-") for each in share.split("="))
    assert len(digits) == 5 and ratio == f"{digits[0]}.{digits[1:]}"
    exact = (Decimal(part) / whole * 100).quantize(Decimal("0.1"), ROUND_HALF_UP)
    assert percent == f"{exact}%", text
    return share.partition("=")[2].removesuffix("%")


def test_chains_are_right_and_quote_their_figures_and_other_answers_are_bare(rows: list[dict[str, str]]) -> None:
    kinds = Counter[int]()
    worked = [row for row in rows if not row["completion"].startswith("答案：")]
    assert len(worked) / len(rows) == pytest.approx(post.WORKED_PERCENT / 100, abs=0.03)
    assert all(row["completion"] == f"答案：{row['answer']}" for row in rows if row not in worked)
    for row in worked:
        chain, _, answer = row["completion"].rpartition("。答案：")
        assert answer == row["answer"]
        steps = chain.split("；")
        known = set(re.findall(r"[\d.]+", row["prompt"])) | {"2", "2.00", "0.30", "0.50", "0.70", "1.00"}
        if steps[0].startswith("评级"):
            known |= set(re.findall(r"[\d.]+", steps.pop(0)))
        result = ""
        for step in steps:
            if "：" in step:
                result = check_division(step)
                used = re.findall(r"\d+", step.partition("：")[0])
            else:
                left, sign, right, third, result, _ = STEP.fullmatch(step).groups()  # type: ignore[union-attr]
                a, b = Decimal(left), Decimal(right)
                values = {"-": a - b, "+": a + b + Decimal(third or 0), "÷": a / b}
                assert values[sign] == Decimal(result), row
                used = [left, right]
            assert {each.lstrip("-") for each in used} <= known, row
            known.add(result.lstrip("-"))
        assert answer.removesuffix("百万元").removesuffix("个百分点").removesuffix("%") == result
        kinds[len(steps)] += 1
    assert len(worked) > 1000 and set(kinds) == {1, 2, 3}


def test_a_chain_earns_the_reward_and_a_slip_does_not(rows: list[dict[str, str]]) -> None:
    number = Term(rule="number")
    assert all(scoring.score(number, "", row["completion"], row["answer"], 9, 64) == 1 for row in rows)
    wrong = [scoring.score(number, "", "答案：" + rows[n + 1]["answer"], rows[n]["answer"], 9, 64) for n in range(500)]
    assert sum(value or 0 for value in wrong) < 25


def test_held_out_companies_are_others_and_rows_depend_on_the_seed() -> None:
    train, held_out, other = (
        {row["prompt"] for row in post.rows("figures", 200_000, seed, split)}
        for seed, split in ((7, "train"), (7, "held_out"), (8, "train"))
    )
    names = [{prompt[:2] for prompt in prompts} for prompts in (train, held_out)]
    assert not names[0] & names[1] and len(train & other) < 5
    with pytest.raises(UserError, match="too few"):
        next(post.rows("figures", 1000, 7, "train"))


def test_figures_are_refused_where_nothing_is_asked() -> None:
    about = "data.sources=[{synthetic: {size: 1MB, about: figures}}]"
    assert recipe.load(GRPO, (about, "grpo.reward=number")).recipe.grpo is not None
    with pytest.raises(UserError) as raised:
        recipe.load(ROOT / "recipes/quickstart/dpo.yaml", (about, "eval.suites=[]"))
    assert "synthetic.about: figures are for sft" in str(raised.value.evidence)


def test_questions_about_laws_need_no_sum_and_ask_both_halves_the_same() -> None:
    train, held_out = (list(post.rows("laws", 200_000, 7, split)) for split in ("train", "held_out"))
    words = Term(rule="words")
    for row in (*train, *held_out):
        options = row["prompt"].split("\n")[1:]
        assert len(options) == 4 and not any("元" in option or "." in option[2:] for option in options)
        assert scoring.score(words, row["prompt"], row["completion"], row["answer"], 9, 64) == 1
    said = [{row["completion"].partition("。")[0] for row in rows} for rows in (train, held_out)]
    assert len(said[0] & said[1]) > 10 and not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
