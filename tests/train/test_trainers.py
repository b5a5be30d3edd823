"""What the stages after pretraining do about steps that DeepSpeed left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from finlm.train import grpo, preferences, trainers


@pytest.mark.parametrize(("precision", "ends"), [("bf16", True), ("fp16", False)])
def test_a_run_ends_when_no_step_changes_its_weights_any_more(precision: str, ends: bool) -> None:
    rows = list[dict[str, Any]]()
    r = SimpleNamespace(
        plan=SimpleNamespace(precision=precision),
        recipe=SimpleNamespace(incidents=SimpleNamespace(stop_after=3)),
        events=SimpleNamespace(record=lambda kind, **row: rows.append(row)),
    )
    trainer = SimpleNamespace(rank=r, exit_code=0)
    record = trainers._Record(trainer)
    for step in (1, 150, 151, 152):  # the first is too long ago
        record._note_skipped(step)
    assert trainer.exit_code == 0
    record._note_skipped(153)
    assert (trainer.exit_code == 1) is ends
    assert ("4 of the last 100 steps, more than incidents.stop_after (3)" in rows[-1]["detail"]) is ends


@pytest.mark.parametrize("pad", [0, 1], ids=["a token of its own", "<s>"])
def test_a_judge_reads_the_beginning_whatever_fills_rows_up(pad: int, tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=pad))
    judge.save_pretrained(tmp_path)
    r: Any = SimpleNamespace(plan=SimpleNamespace(device="cpu", vocab_size=50), device=torch.device("cpu"))
    prompts, said = [[1, 30, 31], [1, 40]], [[20, 21, 2], [22, 2]]
    found = grpo.judged_by(str(tmp_path), r)(prompt_ids=prompts, completion_ids=said)
    pairs = [{"prompt_ids": asked, "chosen_ids": s, "rejected_ids": s} for asked, s in zip(prompts, said, strict=True)]
    batch = preferences.collated(pairs, pad)  # as it was trained
    del batch["completion_mask"]
    with torch.no_grad():
        expected = judge.eval()(**batch).logits[:2, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-6)
