"""Which sums of matrix products torch's compiler leaves to the products, and that each stays what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from finlm.train.model.products import SumsWithinProducts

Tensors = tuple[torch.Tensor, ...]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In the shape of a batch: torch itself joins a product and what is added to it only where no view is between."""
    return (a @ b).view(-1, len(a) // 2, 16)


def three(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A sum of three products."""
    return ((product(a, b) + product(a + 1, b) + product(a + 2, b)).relu(),)


def others(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A product that is needed beside the sum, one added to itself, a factor, a broadcast, two types, two shapes."""
    needed, twice, row = product(a, b), product(a - 1, b), product(a[:2], b)
    scaled = torch.add(product(a, b + 1), product(a, b + 2), alpha=2)
    mixed = product(a + 3, b) + product(a.double() + 3, b.double())
    wide = product(a, b + 4) + (a[:4] @ b.repeat(1, 2)).view(2, 4, 16)
    return needed, needed + product(a + 1, b), twice + twice, scaled, row + product(a, b + 3), mixed, wide


@pytest.mark.parametrize(("function", "joined"), [(three, 2), (others, 0)])
def test_products_add_to_a_sum_that_nothing_else_sees(
    function: Callable[[torch.Tensor, torch.Tensor], Tensors], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = []
    plain = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *given: added.append(1) or plain(*given))
    torch.manual_seed(0)
    a, b = torch.randn(8, 16), torch.randn(16, 16)
    with torch._inductor.config.patch(post_grad_custom_post_pass=SumsWithinProducts()):
        found = torch.compile(function)(a, b)
    for one, wanted in zip(found, function(a, b), strict=True):
        torch.testing.assert_close(one, wanted)
    assert len(added) == joined
