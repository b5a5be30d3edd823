"""Which held-out rows are read when a source has more than eval.max_tokens_per_source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finlm.train import batches


class Numbered:
    """Ten rows of four tokens; every token of a row is its number."""

    def __len__(self) -> int:
        return 10

    def read(self, rows: Any) -> tuple[Any, Any]:
        tokens = np.repeat(np.asarray(rows)[:, None], 4, axis=1)
        return tokens, tokens.copy()


@pytest.mark.parametrize("is_stream", [True, False], ids=["documents", "dialogues"])
def test_rows_are_taken_from_everywhere(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def loss_sum(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted = (labels != batches.IGNORED).any(1)
        seen.extend(inputs[counted, 0].tolist())
        return torch.tensor(1.0)

    part: Any = SimpleNamespace(source="chat", text_bytes=40, tokens=10)
    shards: Any = SimpleNamespace(by_source=lambda name: {"chat": [part]})
    if is_stream:
        monkeypatch.setattr(batches, "Rows", lambda *_: Numbered())
    rows_of: Any = batches.Rows if is_stream else lambda *_: Numbered()
    wanted: Any = SimpleNamespace(
        batch=SimpleNamespace(sequence_length=4),
        data=SimpleNamespace(document_masks=False),
        eval=SimpleNamespace(max_tokens_per_source=12),
    )
    found = batches.evaluate(loss_sum, shards, wanted, [2], torch.device("cpu"), rows_of)
    assert seen == [0, 4, 9]
    assert found["sources"]["chat"]["tokens"] == 12
    is_given = "bits_per_byte" in found["sources"]["chat"]
    assert is_given == is_stream, "the bytes of what is learnt of a dialogue are not known"
