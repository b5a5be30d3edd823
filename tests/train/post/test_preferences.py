"""DPO, the reward model and GRPO on CPU ranks: they learn, resume, and agree with trl's own arithmetic."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, OlmoeConfig, OlmoeForCausalLM
from trl.trainer.utils import add_fused_lm_head

from finlm.base.rundir import RunDir
from finlm.inference import export
from finlm.inference.open import load_trained
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.rows.dialogues import read_pairs
from finlm.rows.shards import Order, Shards
from finlm.train.post import preferences, start

import dialogues
from helpers import ROOT
from ranks import Ranks

pytestmark = pytest.mark.slow
ROWS = [
    {"prompt": f"第{n}家公司经营得怎样？", "chosen": "增长", "rejected": "公司" + "。" * (n % 3), "answer": "A"}
    for n in range(200)
]


@pytest.fixture(scope="module")
def model(finished: tuple[RunDir, str]) -> Path:
    return Path(finished[0].export)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dialogues.write(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def made(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run directory of one of the quickstart's preference recipes, tiny: made(stage, *overrides, ranks=2)."""

    def make(stage: str, *overrides: str, ranks: int = 2) -> RunDir:
        path = tmp_path_factory.mktemp(stage)
        wanted = (
            f"model.init_from={model}",
            f"data.sources={source}",
            f"data.cache_dir={source.parent / 'cache'}",
            "data.held_out_fraction=0.2",
            "batch.sequence_length=64",
            "batch.tokens_per_step=1024",
            "train.steps=8",
            "optim={lr: 2.0e-3, schedule: linear, warmup_steps: 2}",
            "checkpoint.every_steps=4",
            "eval={every_steps: 4, max_tokens_per_source: 2000}",
        )
        return dialogues.run(
            path, recipe.load(ROOT / f"recipes/quickstart/{stage}.yaml", (*wanted, *overrides)).recipe, ranks
        )

    return make


@pytest.fixture(scope="module")
def whole(made: Any, ranks: Ranks) -> RunDir:
    """DPO on two ranks at ZeRO-1."""
    run: RunDir = made("dpo")
    ranks.train(run)
    return run


@pytest.fixture(scope="module")
def judge(made: Any, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Path]:
    """A reward model and its export."""
    run = made("reward", "train.steps=16")
    ranks.train(run)
    return run, export.export(run.path, tmp_path_factory.mktemp("judge") / "export")


def values(run: RunDir, key: str, kind: str = "step") -> list[float]:
    return [row[key] for row in run.read_events(kind)]


def test_dpo_starts_at_its_reference_and_learns_which_answer_is_better(whole: RunDir) -> None:
    first, *_, last = whole.read_events("step")
    assert first["tokens_read"] == first["tokens"] < 1024
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6), "policy and reference are the same model"
    assert last["loss"] < 0.6 and last["accuracy"] == 1.0 and last["margin"] > 0.2
    evals = list(whole.read_events("eval"))
    assert [row["step"] for row in evals] == [0, 4, 8] and evals[0]["margin"] == 0.0
    assert evals[-1]["accuracy"] == 1.0 and evals[-1]["sources"]["rows"]["pairs"] == 31
    assert evals[-1]["reward_min"] < 0 < evals[-1]["reward_max"]


def test_a_resumed_dpo_run_gives_the_same_bits(whole: RunDir, ranks: Ranks, tmp_path: Path) -> None:
    again = RunDir(tmp_path / "again")
    shutil.copytree(whole.path, again.path)
    shutil.rmtree(again.checkpoint(8))
    rows = ranks.train(again)[8:]
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    for key in ("loss", "rows_crc"):
        assert [row[key] for row in rows] == values(whole, key)[4:]


def test_zero_3_on_one_rank_gives_the_same_dpo(whole: RunDir, made: Any, ranks: Ranks) -> None:
    rows = ranks.train(made("dpo", "zero.stage=3", "batch.micro_batch=4", ranks=1))
    assert [row["rows_crc"] for row in rows] == values(whole, "rows_crc") and len(set(values(whole, "rows_crc"))) == 8
    assert [row["loss"] for row in rows] == pytest.approx(values(whole, "loss"), abs=1e-4)
    assert [row["margin"] for row in rows] == pytest.approx(values(whole, "margin"), abs=1e-3)


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
def test_a_mixture_of_experts_keeps_its_config_and_the_routers_loss_is_not_added(
    stage: str, made: Any, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """trl adds router_aux_loss_coef times that loss, and switched output_router_logits on in the config it exports."""
    config = OlmoeConfig(
        **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 100.0},
    )
    shutil.copytree(model, tmp_path / "start")
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "start")
    few = (f"model.init_from={tmp_path / 'start'}", "train.steps=3", "checkpoint.every_steps=3")
    if stage == "sft":
        rows = dialogues.write(tmp_path / "rows.jsonl", dialogues.sample(40))
        run = dialogues.run(tmp_path, dialogues.sft(tmp_path, tmp_path / "start", rows, *few[1:]), ranks=1)
    else:
        run = made(stage, *few, ranks=1)
    assert all(abs(row["loss"]) < 20 for row in ranks.train(run)), "the router's loss would count 100 times"
    trained = load_trained(run.complete_checkpoints()[-1][1]).model.config
    assert (trained.output_router_logits, trained.router_aux_loss_coef) == (False, 100.0)


def test_dpo_of_adapters_has_the_start_as_its_reference(made: Any, ranks: Ranks) -> None:
    run = made("dpo", "lora={rank: 4, alpha: 16}", "optim.lr=2.0e-2", ranks=1)
    rows = ranks.train(run)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[-1]["margin"] > 0.2
    assert isinstance(load_trained(run.complete_checkpoints()[-1][1]).model, torch.nn.Module)


def orpo_of_the_paper(model: Any, pair: Any, weight: float) -> float:
    """Equations 3, 4, 6 and 7 of arXiv 2403.07691 in plain torch, from the logits of transformers' own model."""
    likelihoods = []
    for answer in (pair["chosen_ids"], pair["rejected_ids"]):
        ids = torch.tensor([*pair["prompt_ids"], *answer])
        logits = model(ids[None]).logits[0, -len(answer) - 1 : -1].double()
        likelihoods.append(logits.log_softmax(dim=1).gather(1, ids[-len(answer) :, None]).mean().exp())
    (chosen, odds), (_, other) = ((p, p / (1 - p)) for p in likelihoods)
    return float(-torch.log(chosen) - weight * torch.log(torch.sigmoid(torch.log(odds / other))))


def test_orpo_has_the_loss_of_its_paper_learns_and_resumes(model: Path, made: Any, ranks: Ranks) -> None:
    run = made("dpo", "dpo={loss: orpo, beta: 0.5}", "batch.micro_batch=4")
    rows = ranks.train(run)
    pairs = list(read_pairs(Shards(run.shards).split("train")))
    plain = AutoModelForCausalLM.from_pretrained(model)
    order = Order(len(pairs), 7)[torch.arange(16).numpy()].tolist()
    with torch.no_grad():
        wanted = [orpo_of_the_paper(plain, pairs[number], 0.5) for number in order]
    assert rows[0]["loss"] == pytest.approx(sum(wanted) / 16, abs=1e-4)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5 and rows[-1]["accuracy"] == 1.0
    evals = list(run.read_events("eval"))
    assert evals[-1]["loss"] < evals[0]["loss"] and evals[-1]["margin"] > evals[0]["margin"]
    shutil.rmtree(run.checkpoint(8))
    again = ranks.train(run)[8:]
    for key in ("loss", "margin", "rows_crc"):
        assert [row[key] for row in again] == [row[key] for row in rows[4:]]


def test_orpo_of_adapters_and_at_zero_3_learns_the_same_way(made: Any, ranks: Ranks) -> None:
    settings = ("dpo={loss: orpo, beta: 0.5}", "lora={rank: 4, alpha: 16}", "optim.lr=2.0e-2", "train.steps=4")
    whole = ranks.train(made("dpo", *settings, "batch.micro_batch=2"))
    apart = ranks.train(made("dpo", *settings, "batch.micro_batch=8", "zero.stage=3"))
    assert whole[-1]["loss"] < whole[0]["loss"]
    for key in ("loss", "margin", "reward_chosen"):
        assert [row[key] for row in apart] == pytest.approx([row[key] for row in whole], abs=1e-3)


def test_the_odds_of_an_answer_that_is_certain_have_a_finite_gradient() -> None:
    means = torch.tensor([[0.0, -30.0], [-1e-8, -1.0]], requires_grad=True)
    odds = preferences.log_odds(means)
    torch.nn.functional.logsigmoid(odds[:, 0] - odds[:, 1]).sum().backward()
    assert means.grad is not None and torch.isfinite(odds).all() and torch.isfinite(means.grad).all()
    assert odds[1, 1].item() == pytest.approx(math.log(math.exp(-1) / (1 - math.exp(-1))), abs=1e-6)


def test_a_reward_model_orders_the_pairs_and_reports_its_range(judge: tuple[RunDir, Path]) -> None:
    run, directory = judge
    last = list(run.read_events("eval"))[-1]
    assert last["accuracy"] == 1.0 and last["margin"] > 0.5
    assert last["reward_min"] < last["reward_mean"] < last["reward_max"]
    plain = AutoModelForSequenceClassification.from_pretrained(directory)
    assert plain.config.num_labels == 1 and plain.config.pad_token_id != plain.config.eos_token_id


def test_grpo_earns_more_of_the_reward_models_reward_and_resumes(
    judge: tuple[RunDir, Path], made: Any, ranks: Ranks
) -> None:
    settings = f"grpo={{reward: {judge[1]}, generations: 4, max_new_tokens: 4, generation_rows: 3}}"
    run = made("grpo", settings, "train.steps=12", "checkpoint.every_steps=6", "eval.every_steps=12")
    rows = ranks.train(run)
    assert sum(row["reward"] for row in rows[-3:]) > sum(row["reward"] for row in rows[:3])
    room = Plan.read(run.plan).tokens_per_step
    assert all(row["reward_std"] > 0 and 0 < row["tokens"] < row["tokens_read"] < room for row in rows)
    before, after = values(run, "reward", "eval")
    assert after > before
    shutil.rmtree(run.checkpoint(12))
    again = ranks.train(run)[12:]
    for key in ("loss", "reward", "tokens", "rows_crc"):
        assert [row[key] for row in again] == [row[key] for row in rows[6:]], "the same answers are sampled"


def test_grpo_is_the_same_however_many_answers_are_generated_at_once(
    judge: tuple[RunDir, Path], made: Any, ranks: Ranks
) -> None:
    few = ("train.steps=3", "checkpoint.every_steps=null", "eval={every_steps: 3, max_tokens_per_source: 400}")
    optim = "optim={lr: 2.0e-3, schedule: constant, warmup_steps: 0}"

    def train(rows: object, world_size: int, stage: int) -> list[list[float]]:
        settings = f"grpo={{reward: {judge[1]}, generations: 4, max_new_tokens: 6, generation_rows: {rows}}}"
        run = made("grpo", settings, optim, f"zero.stage={stage}", *few, ranks=world_size)
        ranks.train(run)
        keys = ("rows_crc", "tokens", "reward", "reward_std", "loss", "grad_norm")
        return [*(values(run, key) for key in keys), values(run, "reward", "eval")]

    assert train(2, 1, 1) == train("auto", 1, 1)
    whole = train("auto", 2, 1)
    assert train(1, 2, 1) == whole
    apart = train(2, 2, 3)
    assert apart[:3] == whole[:3]
    for mine, other in zip(apart[3:], whole[3:], strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6)


def test_bf16_learns_as_fp32_does_and_its_rewards_are_not_rounded(
    whole: RunDir, judge: tuple[RunDir, Path], made: Any, ranks: Ranks
) -> None:
    losses = [row["loss"] for row in ranks.train(made("dpo", "train.precision=bf16"))]
    assert losses == pytest.approx(values(whole, "loss"), abs=0.02) and losses[-1] < 0.6
    rows = ranks.train(made("reward", "train.steps=16", "train.precision=bf16"))
    # Later steps amplify what rounding began: margins of 6 differ by a fifth.
    assert [row["margin"] for row in rows[:10]] == pytest.approx(values(judge[0], "margin")[:10], abs=0.1, rel=0.06)
    rounded = [torch.tensor(row["margin"]).bfloat16().item() == row["margin"] for row in rows]
    assert sum(rounded) < 4
    settings = f"grpo={{reward: {judge[1]}, generations: 4, max_new_tokens: 4, beta: 0.05}}"
    few = ("train.steps=4", "checkpoint.every_steps=4", "eval.every_steps=4")
    rows = ranks.train(made("grpo", settings, *few, "train.precision=bf16"))
    assert all(row["reward_std"] > 0 for row in rows)


def test_our_head_gives_trls_log_probabilities_and_gradients(model: Path) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    add_fused_lm_head(theirs)
    start.swap_head(ours, ours.config.vocab_size)
    ids = torch.randint(3, ours.config.vocab_size, (4, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(20) < 12, -100)
    weights = torch.rand(4, 19)
    found = []
    for one in (ours, theirs):
        out = one(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        (out.log_probs * weights).sum().backward()
        found.append((out.log_probs, *(p.grad for p in one.parameters())))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
