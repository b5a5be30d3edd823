"""Attention within documents: a row's loss is the sum of its documents' losses, each alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss

from finlm.admit import cells
from finlm.train import batches
from train.model.test_causal_lm import built
from train.model.test_kernels import VOCABULARY, batch, pair

LENGTHS = ((32,), (5, 20, 7), (1, 30, 1))  # of the documents of each row


def numbered() -> np.ndarray:
    return np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in LENGTHS])


def test_bounds_begin_every_row_anew_and_are_filled_up() -> None:
    found = batches.document_bounds(numbered())
    assert found.dtype == np.int32 and len(found) == batches.FEWEST
    assert found[:8].tolist() == [0, 32, 37, 57, 64, 65, 95, 96] and set(found[8:]) == {96}
    every = batches.document_bounds(np.arange(batches.FEWEST, dtype=np.int32)[None])  # the end needs a place as well
    assert len(every) == 2 * batches.FEWEST


@pytest.mark.parametrize("changes", [{}, {"compiled": True, "recompute": "full"}], ids=["plain", "compiled"])
def test_a_row_of_documents_has_their_losses_and_gradients(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    alone, packed = pair(**changes)
    inputs, labels = batch()
    expected = cells.sum_documents(alone, inputs, labels, LENGTHS)
    found = packed(inputs, labels, torch.from_numpy(batches.document_bounds(numbered())))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert packed(inputs, labels).item() != pytest.approx(expected.item(), rel=1e-4)  # they see each other without
    (expected / 100).backward()
    (found / 100).backward()
    for name, parameter in packed.named_parameters():
        wanted = alone.get_parameter(name).grad
        assert parameter.grad is not None and wanted is not None
        torch.testing.assert_close(parameter.grad[: len(wanted)], wanted, rtol=1e-4, atol=1e-6)
    assert len(alone.get_input_embeddings().weight) == VOCABULARY


def varlen_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *_: object, **named: Any
) -> torch.Tensor:
    """torch's varlen_attn, which needs a GPU, by its definition. q, k, v: [tokens, heads, head]."""
    places, (left, _right) = torch.arange(len(q)), named["window_size"]
    documents = torch.searchsorted(starts, places.to(starts.dtype), right=True)
    back = places[:, None] - places[None]
    seen = (documents[:, None] == documents[None]) & (back >= 0) & ((back <= left) | torch.tensor(left < 0))
    scores = torch.einsum("qhd,khd->hqk", q, k) * named["scale"]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).contiguous()


def attend_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models attend as on a GPU, with the kernel's definition in its place."""
    monkeypatch.setattr(batches, "varlen_attn", varlen_by_definition)


@pytest.mark.parametrize("left", [-1, 7, 40])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_with_sinks_and_its_gradients_are_transformers_own(left: int, device: str) -> None:
    bounds = torch.from_numpy(batches.document_bounds(numbered()))
    tokens, heads, size, scale = numbered().size, 4, 64, 0.2
    drawn = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, size)] * 3 + [(heads,), (tokens, heads, size)]
    *exact, wanted = (torch.randn(sides, generator=drawn).bfloat16().double() for sides in shapes)
    places = torch.arange(tokens)
    documents, back = torch.searchsorted(bounds, places.int(), right=True), places[:, None] - places
    seen = (documents[:, None] == documents) & (back >= 0) & ((back <= left) | torch.tensor(left < 0))
    module = SimpleNamespace(sinks=exact[3].requires_grad_(), num_key_value_groups=1, training=True)
    q, k, v = (each.requires_grad_().transpose(0, 1)[None] for each in exact[:3])
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    expected, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, mask, scaling=scale)
    gradients = torch.autograd.grad(expected, exact, wanted[None])

    dtype, most = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 0.02)
    given = [each.detach().to(device, dtype).requires_grad_() for each in exact]
    out, _ = batches.attend_with_sinks(*given, bounds.to(device), 32, scale, left)
    found = torch.autograd.grad(out, given, wanted.to(device, dtype))
    for ours, theirs in zip((out, *found), (expected[0], *gradients), strict=True):
        assert float((ours.detach().cpu() - theirs.detach()).norm() / theirs.norm()) < most


@pytest.mark.parametrize("window", [8, None])
def test_bounds_and_windows_reach_the_kernel_through_transformers(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_by_definition(monkeypatch)
    shown = "null" if window is None else window
    mistral = f"model.config={{model_type: mistral, sliding_window: {shown}}}"
    model = built(mistral, "model.kv_heads=1", f"tokenizer.vocab_size={VOCABULARY}")
    inputs, labels = batch()
    bounds = torch.from_numpy(batches.document_bounds(numbered()))
    masked = model(inputs, labels, bounds).item()
    model.config._attn_implementation = batches.NAME
    assert model(inputs, labels, bounds).item() == pytest.approx(masked, rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_read_the_bounds_of_each_step_without_compiling_again(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    attend_by_definition(monkeypatch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (_, masked), (_, compiled) = pair(), pair(compiled=True, recompute=recompute)
    compiled.config._attn_implementation = batches.NAME
    graphs = []
    for documents in (numbered(), numbered()[::-1].copy()):
        arguments = *batch(), torch.from_numpy(batches.document_bounds(documents))
        losses = [model(*arguments) for model in (masked, compiled)]
        for model, loss in zip((masked, compiled), losses, strict=True):
            model.zero_grad()
            (loss / 100).backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for one, other in zip(compiled.parameters(), masked.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
