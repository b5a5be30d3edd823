"""What attention is asked for in every stage, and which of torch's kernels takes it on GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from finlm.train.model import kernels
from finlm.train.post import grpo, preferences, sft, start
from train.model.test_causal_lm import planned

ROWS, PROMPT, ANSWER, PAD, END = 3, 6, 8, 0, 2
LISTS = sorted(kernels.ATTENTION)
# sdp_utils.cpp of torch 2.13: flash and cuDNN know grouped heads, only cuDNN and the memory-efficient one take a mask.
TAKES: dict[SDPBackend, Callable[[dict[str, Any]], bool]] = {
    SDPBackend.CUDNN_ATTENTION: lambda call: True,
    SDPBackend.FLASH_ATTENTION: lambda call: not call["masked"],
    SDPBackend.EFFICIENT_ATTENTION: lambda call: not call["grouped"] and call["heads"] == call["kv_heads"],
    SDPBackend.MATH: lambda call: True,
}


def model() -> LlamaForCausalLM:
    """Two layers, four heads that share one key head."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=1, pad_token_id=None, **shape))
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of rows padded on their right, and with left also before their prompts of PROMPT tokens."""
    ids = torch.randint(3, 50, (ROWS, PROMPT + ANSWER), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -3:] = mask[2, -ANSWER + 1 :] = 0
    if left:
        mask[0, :2] = mask[2, :5] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def answers(trainer: Any, of: LlamaForCausalLM, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the answers as trl's trainer, or ours, takes them."""
    stub = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext), extra_outputs=(), learnt_from=None)
    ids, mask = padded(left=True)
    method = trainer._get_per_token_logps_and_entropies
    found: tuple[torch.Tensor, torch.Tensor, None] = getattr(method, "__wrapped__", method)(
        stub, of, ids, mask, ANSWER, size, compute_entropy=True
    )
    return found[0], found[1]


def fused(of: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with trl's head, as for GRPO."""
    add_fused_lm_head(of, temperature=0.7, outputs=("log_probs", "entropy"))
    return of


def forward_of(stage: str) -> None:
    """A forward pass over padded rows as the stage makes it."""
    (ids, mask), of = padded(left=False), model()
    if stage == "dpo":
        start.swap_head(of, 50)
        of(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)
    elif stage == "reward":
        preferences.make_reward_model(of, PAD)(input_ids=ids, attention_mask=mask)
    elif stage == "grpo":
        answers(grpo.GroupTrainer, fused(of))
    else:
        kernels.swap_loss(of, 50)
        if stage == "hide_eos":
            sft.hide_end_tokens(of, END)
        ids[:, 4] = END
        of(input_ids=ids, labels=ids)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every call of scaled_dot_product_attention."""
    found: list[dict[str, Any]] = []
    plain = functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **named: Any) -> torch.Tensor:
        sizes = {"heads": q.shape[1], "kv_heads": k.shape[1]}
        found.append(sizes | {"masked": attn_mask is not None, "grouped": named.get("enable_gqa", False)})
        return plain(q, k, v, attn_mask=attn_mask, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    mask = functools.partial(kernels._make_mask, modeling_llama.create_causal_mask)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    return found


@pytest.mark.parametrize("attention", LISTS)
@pytest.mark.parametrize("stage", ["pretrain", "dpo", "reward", "grpo", "hide_eos"])
def test_no_stage_falls_back_to_the_definition(stage: str, attention: str, calls: list[dict[str, Any]]) -> None:
    plan = dataclasses.replace(planned()[1], attention=attention)
    with kernels.attention_backends(plan):
        forward_of(stage)
    assert calls
    order = [*kernels.ATTENTION[attention], SDPBackend.MATH]
    for call in calls:
        assert next(backend for backend in order if TAKES[backend](call)) != SDPBackend.MATH, call
        assert call["masked"] == (stage == "hide_eos"), "right-padded rows need no mask"


def test_the_patch_of_transformers_ends_with_the_context() -> None:
    plain = sdpa_attention.use_gqa_in_sdpa
    with kernels.attention_backends(dataclasses.replace(planned()[1], attention="efficient")):
        assert not sdpa_attention.use_gqa_in_sdpa(None, torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
    assert sdpa_attention.use_gqa_in_sdpa is plain


def test_the_kernel_is_told_as_torch_would_choose_it() -> None:
    """As far as a CPU has kernels: the definition, and one that it calls flash."""
    plan, config = planned()[1], model().config
    assert kernels.attention_kernel(plan, config, torch.float32, masked=False) == "flash"
    only = dataclasses.replace(plan, attention="efficient")
    with kernels.attention_backends(only):
        assert kernels.attention_kernel(only, config, torch.float32, masked=True) == "math"


def test_preferences_without_a_mask_are_those_with_it() -> None:
    ours, theirs = model(), model()
    start.swap_head(ours, 50)
    ids, mask = padded(left=False)
    labels = ids.masked_fill((mask == 0) | (torch.arange(ids.shape[1]) < PROMPT), -100)
    add_fused_lm_head(theirs)
    check(
        [
            (one, one(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs)
            for one in (ours, theirs)
        ]
    )


def test_rewards_without_a_mask_are_those_with_it() -> None:
    ours = preferences.make_reward_model(model(), PAD)
    theirs = LlamaForSequenceClassification(ours.config)
    theirs.load_state_dict(ours.state_dict())
    ids, mask = padded(left=False)
    check([(one, one(input_ids=ids, attention_mask=mask).logits) for one in (ours, theirs)])


@pytest.mark.parametrize("size", [None, 2])
def test_grpos_answers_are_scored_as_trl_scores_them(size: int | None) -> None:
    ours, theirs = fused(model()), fused(model())
    found = [(of, *answers(trainer, of, size)) for trainer, of in ((grpo.GroupTrainer, ours), (GRPOTrainer, theirs))]
    counted = padded(left=True)[1][:, -ANSWER:]
    torch.testing.assert_close(found[0][2] * counted, found[1][2] * counted)
    check([(of, logps * counted) for of, logps, _ in found])


def check(found: list[tuple[torch.nn.Module, torch.Tensor]]) -> None:
    """The same numbers, and the same gradients of every parameter."""
    weights = torch.rand(found[0][1].shape, generator=torch.Generator().manual_seed(2))
    for _, values in found:
        (values * weights).sum().backward()
    (ours, mine), (theirs, other) = found
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, atol=1e-4, rtol=1e-4)
