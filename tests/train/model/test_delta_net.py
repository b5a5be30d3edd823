"""Layers of linear attention: the state begins anew at each document, here on a CPU."""

from __future__ import annotations

import functools
import importlib.util
import itertools

import numpy as np
import pytest
import torch

from admit.test_gate import case
from finlm.admit import cells
from finlm.base.errors import UserError
from finlm.recipe import shape
from finlm.recipe.models import config_json
from finlm.recipe.models.traits import DELTA_CHUNK
from finlm.train import batches
from finlm.train.model import causal_lm, delta_net

LENGTHS = ((20, 28), (48,))


def bounds_of(*lengths: tuple[int, ...]) -> torch.Tensor:
    numbers = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in lengths])
    return torch.from_numpy(batches.document_bounds(numbers))


def test_compiled_layers_keep_documents_apart_without_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    at = case("qwen3_5_text")
    at.small.layer_types, at.small.num_hidden_layers = ["linear_attention"], 1
    packed = at.swapped(compiled=True)
    inputs, labels = (each[:2] for each in cells.batch())
    expected = cells.sum_documents(at.plain, inputs, labels, LENGTHS)
    found = packed(inputs, labels, bounds_of(*LENGTHS))
    for loss in (expected, found):
        (loss / 100).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in at.plain.named_parameters():
        torch.testing.assert_close(packed.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-6)
    with torch.compiler.set_stance("fail_on_recompile"):
        other = packed(inputs, labels, bounds_of((1, 2, 45), (7,) * 6 + (6,)))
    assert other.item() != pytest.approx(found.item(), rel=1e-5)


def test_chunks_are_told_without_a_look_at_the_bounds() -> None:
    full = bounds_of((*range(1, 63), 32))[:64]  # of 63 documents: nothing is filled up
    for bounds, tokens in ((bounds_of((70, 1, 129)), 200), (full, int(full[-1]))):
        found = delta_net._chunks(bounds, tokens)
        starts, indices = found["cu_seqlens"].tolist(), found["chunk_indices"].tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        wanted = [[n, chunk] for n, length in enumerate(lengths) for chunk in range(-(-length // DELTA_CHUNK))]
        assert indices[: len(wanted)] == wanted and len(indices) > len(wanted)
        assert lengths[-1] == 0 and all(row == [len(lengths) - 1, 0] for row in indices[len(wanted) :])


def test_gradients_of_queries_and_keys_are_those_of_the_rules_chunks() -> None:
    torch.manual_seed(0)
    heads, times, size, values, lengths = 2, 2, 8, 16, (5, DELTA_CHUNK + 9)
    tokens, given = sum(lengths), delta_net._chunks(torch.tensor([0, *np.cumsum(lengths)]), sum(lengths))
    pieces = len(given["chunk_indices"])
    q, k = (torch.randn(1, tokens, heads, size, requires_grad=True) for _ in "qk")
    v, do, dv = (torch.randn(1, tokens, heads * times, values) for _ in "abc")
    w = torch.randn(1, tokens, heads * times, size, requires_grad=True)
    h, dh = (torch.randn(1, pieces, heads * times, size, values) for _ in "ab")
    summed = (-torch.rand(1, tokens, heads * times)).requires_grad_()  # within a chunk, as natural logarithms
    total = torch.zeros(())
    for number, (start, stop) in enumerate(((0, 5), (5, 5 + DELTA_CHUNK), (5 + DELTA_CHUNK, tokens))):
        part = slice(start, stop)
        qs, ks = (each[0, part].repeat_interleave(times, dim=1).transpose(0, 1) for each in (q, k))
        vs, dos, dvs, ws = (each[0, part].transpose(0, 1) for each in (v, do, dv, w))
        decay = summed[0, part].T
        scores = (qs @ ks.transpose(1, 2) * (decay[:, :, None] - decay[:, None]).exp()).tril()
        out = size**-0.5 * (qs * decay.exp()[..., None] @ h[0, number] + scores @ vs)
        left = (ks * (decay[:, -1:] - decay).exp()[..., None]).transpose(1, 2) @ vs
        state = h[0, number] * decay[:, -1:].exp()[..., None] + left
        total = total + (out * dos).sum() + (state * dh[0, number]).sum() - (ws @ h[0, number] * dvs).sum()
    wanted = torch.autograd.grad(total, (q, k, w, summed))
    logarithm = summed.detach() / np.log(2)
    found = delta_net.query_key_gradients(
        q.detach(), k.detach(), v, do, h, dh, g=logarithm, dv=dv, scale=size**-0.5, **given
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_new_weights_have_the_decay_of_their_class_and_depend_on_the_seed_alone() -> None:
    made = []
    for _ in range(2):
        model = cells.build(case("qwen3_5_text").small, "eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("dt_bias"):
                    parameter.fill_(1.0)
                elif parameter.ndim == 1 and not name.endswith("A_log"):
                    parameter.zero_()
        torch.rand(3)  # of another stream
        causal_lm.initialize(model, seed=5, std=0.02, vocab_size=cells.VOCABULARY)
        made.append(next(delta_net.mixers(model.model)))
    assert (made[0].A_log == made[1].A_log).all() and len(set(made[0].A_log.tolist())) > 1
    assert ((made[0].A_log.exp() > 0.01) & (made[0].A_log.exp() < 16)).all() and (made[0].dt_bias == 1).all()


def test_a_gpu_without_its_kernels_is_refused_and_grpo_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case("qwen3_5_text")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    config_json.check_kernels(at.config, "cpu")
    with pytest.raises(UserError, match="need flash-linear-attention on a GPU") as error:
        config_json.check_kernels(at.config, "cuda")
    assert "requirements-linear.lock" in error.value.fix
    model = at.recipe.model.model_copy(update={"config": at.small.to_dict()})
    asked = at.recipe.model_copy(update={"model": model, "stage": "grpo"})
    assert "stage" not in dict(shape.problems(asked))
