"""Each swap against transformers' own model: the same loss and the same gradients of every parameter."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from finlm.rows.shards import IGNORED
from finlm.train.model import causal_lm, kernels
from train.model.test_causal_lm import planned

VOCABULARY = 4000  # not a multiple of 128


def plain_loss(plain: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers' logits under torch's cross-entropy."""
    logits = plain(input_ids=inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def pair(draws: bool = False, **changes: object) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """(plain model, the same weights with the swaps of a changed plan)."""
    recipe, plan = planned(f"model.vocab_size={VOCABULARY}", f"tokenizer.vocab_size={VOCABULARY}")
    torch.manual_seed(0)
    config = causal_lm.model_config(recipe, plan, 1, 2)
    plain = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    plan = dataclasses.replace(plan, **changes)
    padded = type(config)(**config.to_dict() | {"vocab_size": plan.padded_vocab_size})
    swapped = LlamaForCausalLM._from_config(padded, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in swapped.named_parameters():
            parameter[: len(plain.get_parameter(name))] = plain.get_parameter(name)
    kernels.swap(swapped, plan, draws)
    return plain, swapped


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, labels) with ignored labels."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randint(0, VOCABULARY, (2, 3, 32), generator=generator).unbind(0)
    labels[:, ::5] = IGNORED
    return inputs, labels


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"padded_vocab_size": 4096},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"compiled": True},
        {"compiled": True, "recompute": "selective", "padded_vocab_size": 4096},
        {"compiled": True, "recompute": "full"},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "loss",
)
def test_loss_and_gradients_equal_those_of_transformers(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The C++ compiler is not what is under test, and takes half a minute a graph.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    plain, swapped = pair(**changes)
    inputs, labels = batch()
    expected, found = plain_loss(plain, inputs, labels), swapped(inputs, labels)
    (expected / 100).backward()
    (found / 100).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in swapped.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert parameter.grad is not None and wanted is not None
        torch.testing.assert_close(parameter.grad[: len(wanted)], wanted, rtol=1e-4, atol=1e-6)
        assert not parameter.grad[len(wanted) :].any()  # padding learns nothing


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_layers_share_one_compiled_function(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(1)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting, fullgraph=True))
    torch._dynamo.reset()
    _, swapped = pair(compiled=True, recompute=recompute)
    swapped(*batch())
    assert len(graphs) == 2  # a layer, the last norm


def test_the_loss_is_the_same_in_one_slice_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(2, 25, 16), torch.randn(300, 16)
    labels = torch.randint(0, 290, (2, 25))
    labels[0, 3] = IGNORED
    found = []
    for slice_bytes in (2**30, 7 * 300 * 4):
        monkeypatch.setitem(kernels.LOGITS_SLICE_BYTES, "cpu", slice_bytes)
        one, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value, rows = kernels.linear_cross_entropy(one, head, labels, 290)
        value.backward()
        found.append((value, rows, one.grad, head.grad))
        assert not rows.requires_grad and rows.sum().item() == pytest.approx(value.item(), rel=1e-6)
        alone = [kernels.linear_cross_entropy(one[[row]], head, labels[[row]], 290)[0] for row in range(2)]
        torch.testing.assert_close(rows, torch.stack(alone))
    for whole, sliced in zip(*found, strict=True):
        torch.testing.assert_close(whole, sliced, rtol=1e-5, atol=1e-5)
    assert kernels.slices(50, 300 * 4, "cpu")[-1] == (49, 50)


def head_gradients(dtype: torch.dtype, tokens: int, size: float) -> torch.Tensor:
    """The head's gradient where a tenth of the tokens is one token; the loss scale divides by the labels."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, tokens, 32, generator=generator) + size * torch.randn(32, generator=generator).sign()
    labels = torch.randint(0, 100, (1, tokens), generator=generator)
    labels[:, ::10] = 7
    weight = (0.02 * torch.randn(100, 32, generator=generator)).to(dtype).requires_grad_()
    value, _ = kernels.linear_cross_entropy(hidden.to(dtype).requires_grad_(), weight, labels, 100)
    (value * (128.0 / tokens)).backward()
    assert weight.grad is not None and weight.grad.dtype == dtype
    return weight.grad.float()


def test_the_heads_gradient_does_not_overflow_in_fp16_before_the_loss_scale_is_known() -> None:
    found, exact = (head_gradients(dtype, 131072, 8.0) for dtype in (torch.float16, torch.float32))
    assert exact.abs().max() > 100 and found.isfinite().all()
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.05)


def test_what_fits_fp16_is_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that fit keep their bits, as those of bf16 and fp32 do at any size."""
    assert (kernels._shrinkage(torch.full((4096, 8), 8.0)) == 1).all()
    mixed = kernels._shrinkage(torch.tensor([8.0, 1e-3, 0.0]).expand(131072, 3).half())
    assert mixed.tolist() == [2**-5, 1, 1], "each column by itself"
    cases = [(torch.float16, 256, 1e-3), (torch.float16, 256, 2.0)]
    cases += [(dtype, 131072, 8.0) for dtype in (torch.bfloat16, torch.float32)]
    found = [head_gradients(*case) for case in cases]
    monkeypatch.setattr(kernels, "_shrinkage", lambda hidden: None)
    for case, gradient in zip(cases, found, strict=True):
        assert gradient.any() and torch.equal(gradient, head_gradients(*case))


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", None)  # the product that only gradients need
    _, swapped = pair()
    with torch.no_grad():
        assert swapped(*batch()).item() > 0


@pytest.mark.parametrize("changes", [{"recompute": "selective"}, {"recompute": "full"}], ids=str)
def test_recomputation_draws_an_adapters_dropout_again(changes: dict[str, object]) -> None:
    """Else the gradient would belong to another mask than the loss, without a word."""
    found = []
    for each in ({}, changes):
        _, swapped = pair(draws=True, **each)
        torch.manual_seed(5)
        settings = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = get_peft_model(swapped, settings)
        torch.manual_seed(6)
        adapted(*batch()).backward()
        found.append({name: one.grad for name, one in adapted.named_parameters() if one.grad is not None})
    assert found[0] and found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])
