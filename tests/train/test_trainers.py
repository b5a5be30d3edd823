"""What the stages after pretraining do about steps that DeepSpeed left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from finlm.train import trainers


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
