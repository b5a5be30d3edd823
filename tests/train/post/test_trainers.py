"""What the stages after pretraining do about steps that DeepSpeed left out."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.integrations import sdpa_attention

from finlm.rows.shards import Order
from finlm.train import batches, incidents
from finlm.train.post import grpo, preferences, rollouts, trainers
from train.model.test_causal_lm import planned


@pytest.mark.parametrize(("precision", "scale", "ends"), [("bf16", 0, True), ("fp16", 0, False), ("fp16", 128, True)])
def test_a_run_ends_when_no_step_changes_its_weights_any_more(precision: str, scale: int, ends: bool) -> None:
    rows = list[dict[str, Any]]()
    r = SimpleNamespace(
        plan=SimpleNamespace(precision=precision),
        recipe=SimpleNamespace(
            incidents=SimpleNamespace(stop_after=3), train=SimpleNamespace(fp16=SimpleNamespace(loss_scale=scale))
        ),
        events=SimpleNamespace(record=lambda kind, **row: rows.append(row)),
    )
    trainer = SimpleNamespace(rank=r, exit_code=0, skipped=incidents.Skipped())
    record = trainers._Record(trainer)
    for step in (1, 150, 151, 152):  # the first is too long ago
        record._note_skipped(step)
    assert trainer.exit_code == 0
    trainer.skipped = incidents.Skipped(list(trainer.skipped.steps))  # as a checkpoint brings them back
    record._note_skipped(153)
    assert (trainer.exit_code == 1) is ends
    assert ("4 of the last 100 steps, more than incidents.stop_after (3)" in rows[-1]["detail"]) is ends


def test_prompts_of_one_text_keep_their_own_ids() -> None:
    plan = SimpleNamespace(gradient_accumulation_steps=1, micro_batch=4, world_size=1)
    settings = SimpleNamespace(train=SimpleNamespace(seed=7))
    prompts = [{"prompt": "<unk>", "prompt_ids": ids} for ids in ([1, 30, 31], [1])]
    trainer: Any = SimpleNamespace(
        rank=SimpleNamespace(plan=plan, recipe=settings, rank=0),
        grpo=SimpleNamespace(generations=2, iterations=1),
        prompts=prompts,
        order=Order(2, 7),
        checksum=batches.Checksum(),
    )
    (rows,) = grpo.GroupTrainer._read(trainer, 0)
    asked, *_ = grpo.GroupTrainer._tokenize_prompts(trainer, [row["prompt"] for row in rows])
    assert sorted(asked) == [[1], [1], [1, 30, 31], [1, 30, 31]] and trainer.longest == 3


def test_what_is_measured_a_token_is_averaged_over_the_tokens_of_a_step() -> None:
    measured = {"entropy": [2.0, 4.0], "kl": [0.1], "frac_reward_zero_std": [0.5]}  # of micro-steps; of the generation
    trainer: Any = SimpleNamespace(
        names=grpo.GroupTrainer.names,
        _metrics={"train": defaultdict(list, measured)},
        reward_func_names=(),
        tokens_learnt=[torch.tensor(30), torch.tensor(10)],
        accelerator=SimpleNamespace(reduce=lambda tensor: tensor),
        mismatch=SimpleNamespace(take=dict),
        is_generated=False,
        gaming=SimpleNamespace(judge=lambda _: ()),
    )
    assert grpo.GroupTrainer.metrics_of_step(trainer) == {"entropy": 2.5, "kl": 0.1, "equal_groups": 0.5}
    assert trainer.tokens_learnt == []


@pytest.mark.parametrize("pad", [0, 1], ids=["a token of its own", "<s>"])
def test_a_judge_reads_the_beginning_whatever_fills_rows_up(pad: int, tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=pad))
    judge.save_pretrained(tmp_path)
    r: Any = SimpleNamespace(
        plan=SimpleNamespace(device="cpu", vocab_size=50, micro_batch=1), device=torch.device("cpu")
    )
    prompts, said = [[1, 30, 31], [1, 40]], [[20, 21, 2], [22, 2]]
    found = rollouts.load_reward_model(str(tmp_path), r)(prompt_ids=prompts, completion_ids=said)
    pairs = [{"prompt_ids": asked, "chosen_ids": s, "rejected_ids": s} for asked, s in zip(prompts, said, strict=True)]
    batch = preferences.collate_pairs(pairs, pad)  # as it was trained
    del batch["completion_mask"]
    with torch.no_grad():
        expected = judge.eval()(**batch).logits[:2, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_trainer_is_made_under_the_plans_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DPO scores all pairs with the model that it starts from while its trainer is made."""
    plan = dataclasses.replace(planned()[1], attention="efficient")
    monkeypatch.setattr(trainers, "open_rank", lambda *_: SimpleNamespace(plan=plan))
    plain, seen = sdpa_attention.use_gqa_in_sdpa, list[bool]()

    def make(_: Any) -> Any:
        seen.append(sdpa_attention.use_gqa_in_sdpa is plain)
        return SimpleNamespace(run=lambda: 0)

    assert trainers.train(tmp_path, planned()[0], make) == 0
    assert seen == [False] and sdpa_attention.use_gqa_in_sdpa is plain
