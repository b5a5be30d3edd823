"""The losses of GRPO's forms and of PPO against trl's own, and against their definitions, on the same rollouts."""

from __future__ import annotations

import math
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from finlm.recipe.schema_train import Ppo
from finlm.train.post import grpo, ppo, rollouts, start

ROWS, PROMPT, ANSWER, VOCAB = 6, 5, 7, 40


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), pad_token="<pad>", eos_token="</s>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("tiny")
    words = {"<pad>": 0, "</s>": 1} | {f"w{n}": n for n in range(2, VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="<pad>")).save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, eos_token_id=1)).save_pretrained(path)
    return path


def trainer(form: str, model: Path, tokenizer: Any, out: Path) -> GRPOTrainer:
    """trl's own trainer with the settings that a form stands for."""
    args = GRPOConfig(
        str(out),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=ROWS,
        num_generations=3,
        max_completion_length=ANSWER,
        beta=0.04,
        **grpo.FORMS[form],
    )
    rows = Dataset.from_list([{"prompt": "w3 w4"}] * ROWS)
    made = GRPOTrainer(str(model), lambda completions, **_: [0.0], args, rows, processing_class=tokenizer)
    made.model.double().train()  # so that what differs is no rounding
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    """Answers of several lengths to prompts that are padded on their left."""
    torch.manual_seed(1)
    lengths, asked = torch.tensor([7, 3, 5, 1, 6, 2]), torch.tensor([5, 2, 3, 5, 1, 4])
    return {
        "prompt_ids": torch.randint(2, VOCAB, (ROWS, PROMPT)),
        "prompt_mask": (torch.arange(PROMPT) >= PROMPT - asked[:, None]).long(),
        "completion_ids": torch.randint(2, VOCAB, (ROWS, ANSWER)),
        "completion_mask": (torch.arange(ANSWER) < lengths[:, None]).long(),
        "advantages": torch.randn(ROWS),
        "num_items_in_batch": lengths.sum(),
        "old_per_token_logps": -3.7 + 0.3 * torch.randn(ROWS, ANSWER),
        "ref_per_token_logps": -3.7 + 0.3 * torch.randn(ROWS, ANSWER),
    }


def gradients(made: Any, loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(made.model.parameters()))
    return torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("form", ["dapo", "grpo", "dr-grpo", "gspo"])
def test_a_forms_loss_and_gradient_are_trls_own(
    form: str, model: Path, tokenizer: Any, rows: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    made: Any = trainer(form, model, tokenizer, tmp_path)
    theirs = made._compute_loss(made.model, dict(rows))
    expected = gradients(made, theirs)
    made.learnt_from, made.extra_outputs, made.mismatch = None, (), rollouts.Mismatch(2.0, torch.device("cpu"))
    name = "_get_per_token_logps_and_entropies"
    setattr(made, name, MethodType(getattr(grpo.GroupTrainer, name), made))
    sampled = rows | {"sampling_per_token_logps": rows["old_per_token_logps"] + 1e-4}
    ours = made._compute_loss(made.model, sampled)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients(made, ours), expected, atol=1e-6, rtol=1e-5)


def test_the_head_scores_the_tokens_of_answers_alone(
    model: Path, tokenizer: Any, rows: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = trainer("dapo", model, tokenizer, tmp_path)
    kernel, scored = trl_utils._ChunkedLogProbFunction, list[int]()

    class Counting:
        @staticmethod
        def apply(hidden: torch.Tensor, *more: Any) -> Any:
            scored.append(len(hidden))
            return kernel.apply(hidden, *more)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Counting)
    monkeypatch.setattr(trl_utils, "_use_triton", trl_utils._use_triton)  # restored after the test
    everything = made._compute_loss(made.model, dict(rows))
    start.score_answers_alone()
    alone = made._compute_loss(made.model, dict(rows))
    assert scored == [ROWS * (PROMPT + ANSWER - 1), int(rows["completion_mask"].sum())]
    torch.testing.assert_close(alone, everything)
    torch.testing.assert_close(gradients(made, alone), gradients(made, everything))


def test_tokens_are_weighed_for_what_the_rollout_made_of_them(rows: dict[str, torch.Tensor]) -> None:
    mismatch = rollouts.Mismatch(2.0, torch.device("cpu"))
    log_probs, given = rows["old_per_token_logps"], dict(rows)
    apart = torch.zeros(ROWS, ANSWER)
    apart[0, 0], apart[0, 1], apart[1, 0], apart[3, 5] = 0.5, 3.0, 0.0005, 9.0  # the last is no token of the answer
    given["sampling_per_token_logps"] = log_probs - apart
    mismatch.correct(given, log_probs)
    weights = given["advantages"] / rows["advantages"][:, None]
    assert weights[0, 0] == pytest.approx(math.exp(0.5)) and weights[0, 1] == 2.0
    assert weights[1, 0] == 1.0 and weights[3, 5] == 1.0, "rounding, and padding, weigh nothing"
    found = mismatch.take()
    assert found["mismatch_largest"] == pytest.approx(3.0)
    assert found["mismatch"] == pytest.approx(3.5005 / 24, rel=1e-4)
    assert mismatch.take() == {"mismatch": 0.0, "mismatch_largest": 0.0}


def test_advantages_are_the_generalized_estimate(rows: dict[str, torch.Tensor]) -> None:
    mask, settings = rows["completion_mask"], Ppo(gamma=0.9, gae_lambda=0.7)
    torch.manual_seed(2)
    values, earned = torch.randn(ROWS, ANSWER), ppo.place_rewards(torch.randn(ROWS), mask)
    advantages, returns = ppo.estimate(earned, values, mask, settings)
    for row, length in enumerate(mask.sum(1).tolist()):
        assert earned[row].nonzero().flatten().tolist() == [length - 1]
        following = [*values[row, 1:length].tolist(), 0.0]
        surprises = [float(earned[row, t]) + 0.9 * following[t] - float(values[row, t]) for t in range(length)]
        for t in range(length):
            expected = sum((0.9 * 0.7) ** (k - t) * surprises[k] for k in range(t, length))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-5)
            assert float(returns[row, t]) == pytest.approx(expected + float(values[row, t]), abs=1e-5)
        assert not advantages[row, length:].any() and not returns[row, length:].any()


def test_a_value_far_from_the_former_one_is_clipped() -> None:
    values, before, returns = torch.tensor([0.5, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([0.6, 1.0])
    found = ppo.value_losses(values, before, returns, 0.2)
    assert found.tolist() == pytest.approx([0.5 * 0.4**2, 0.5 * 0.9**2])
