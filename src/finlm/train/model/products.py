"""Make matrix products add to a sum themselves (cuBLAS's beta), in a layer's backward pass and over micro-batches.

torch's compiler makes every product a tensor and adds these up in the next kernel, twice in a decoder layer; added up
within the products, each is read once. Autograd reads and writes the sum of weight gradients once more than the product
needs, 1.7 % of a step of XuanYuan-6B: here the product adds to it in all micro-batches of a step but the first, which
begins the sum, and the last, whose gradients DeepSpeed waits for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn.functional import linear

from finlm.plan.plan import Plan

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left [m, k] @ right [k, n] to `total` [m, n] in place."""
    total.addmm_(left, right)


# torch.library.custom_op would say the same in fewer words, at 19 microseconds of the host a call instead of 5.
_OPERATORS = torch.library.Library("finlm", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define("add_product(Tensor(a!) total, Tensor left, Tensor right) -> ()")  # type: ignore[no-untyped-call]
_OPERATORS.impl("add_product", _add_product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("finlm::add_product", lambda *_: None, lib=_OPERATORS)

# (total [m, n], left [m, k], right [k, n]): total += left @ right. As an operator, compiled code leaves it in place.
add_product = torch.ops.finlm.add_product


class SumsWithinProducts(CustomGraphPass):
    """A pass of torch's compiler that makes sums of matrix products additions within the products."""

    def __call__(self, graph: Graph) -> None:
        """Replace each sum of two products, or of a replaced sum and a product, by an addition within the product.

        Edits the graph in place. The terms must have the same shape and dtype, and no other user; other sums stay.
        """
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            roots = [root for term in node.args if (root := _root(term)) is not None]
            if len(set(roots)) < 2 or node.kwargs or len(set(map(_kind, (node, *node.args)))) > 1:
                continue
            total, product = sorted(roots, key=_is_product)
            if _is_product(product) and _kind(total) == _kind(product):
                _join(graph, node, total, product)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return a hash of this file, by which torch's cache of compiled code tells versions of the pass apart."""
        return get_hash_for_files((__file__,))


def _root(term: Any) -> Node | None:
    """Return the node of the product, or of the replaced sum, that `term` is or is a view of, else None."""
    while isinstance(term, Node) and len(term.users) == 1:  # another user would read the sum in its place
        if _is_product(term) or _is_joined(term):
            return term
        if term.target not in VIEWS:
            return None
        term = term.args[0]
    return None


def _is_product(node: Any) -> bool:
    """Return whether the node multiplies two matrices (aten.mm)."""
    return node.target is aten.mm.default


def _is_joined(node: Node) -> bool:
    """Return whether the node is the result of an add_product that _join() put into the graph."""
    return node.target is operator.getitem and add_product.default in node.args[0].args  # type: ignore[union-attr]


def _kind(node: Any) -> tuple[torch.Size, torch.dtype]:
    """Return (shape, dtype) of the node's result."""
    return node.meta["val"].shape, node.meta["val"].dtype


def _join(graph: Graph, node: Node, total: Node, product: Node) -> None:
    """Replace the sum `node` in the graph by an operator that adds `product` to `total`; leaves `product`, unused."""
    # Written without mutation, as passes at this point must be; a later one runs it in place.
    left, right = product.args
    with graph.inserting_before(node):
        both = _call(graph, auto_functionalized, add_product.default, total=total, left=left, right=right)
        joined = _call(graph, operator.getitem, both, 1)
        shown = _call(graph, aten.reshape.default, joined, list(node.meta["val"].shape))
    node.replace_all_uses_with(shown)
    graph.erase_node(node)


def _call(graph: Graph, function: Any, *arguments: Any, **named: Any) -> Node:
    """Add a call of `function` to the graph and return its node, with the fake tensor of its result as "val"."""
    node = graph.call_function(function, arguments, named)
    given = map_arg((arguments, named), lambda argument: argument.meta["val"])
    with V.fake_mode:
        node.meta["val"] = function(*given[0], **given[1])
    return node


class _Linear(torch.autograd.Function):
    """x [..., n] times weight [m, n] transposed; its backward pass adds the weight's gradient to `total` in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return x [..., n] times weight [m, n] transposed; `total` is [m, n]."""
        ctx.save_for_backward(x, weight, total)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Return the gradient of x; add the weight's to `total` in place and return None for it."""
        x, weight, total = ctx.saved_tensors
        add_product(total, upstream[0].flatten(0, -2).t(), x.flatten(0, -2))
        return upstream[0] @ weight, None, None


class SummingLinear(torch.nn.Linear):
    """A linear layer without bias that adds its weight's gradient to `total` in place; plain while `total` is None."""

    total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., inputs] times the weight transposed: [..., outputs]."""
        if self.total is None:
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.total)  # type: ignore[no-any-return,no-untyped-call]


def swap_summing(model: torch.nn.Module, layers: torch.nn.Module, plan: Plan, is_last: Callable[[], bool]) -> None:
    """Make the linear layers in `layers` add their weight gradients to weight.grad within the matrix product.

    Changes the class of layers without bias in place, and registers a forward pre-hook on `model`. Does nothing unless
    the plan is compiled, with ZeRO-1 and at least 3 micro-steps. Call it once the engine exists. is_last() returns
    whether the micro-step that begins is the step's last.
    """
    if not plan.compiled or plan.zero_stage != 1 or plan.gradient_accumulation_steps < 3:
        return
    linears: list[Any] = [layer for layer in layers.modules() if type(layer) is torch.nn.Linear and layer.bias is None]
    for module in linears:
        module.__class__ = SummingLinear

    def choose(*_: Any) -> None:
        """Set each layer's `total` to its weight's gradient, or None when the micro-step does not sum."""
        sums = torch.is_grad_enabled() and not is_last()  # DeepSpeed waits for the gradients of the last one
        for module in linears:
            module.total = module.weight.grad if sums else None  # none yet in the first micro-step

    model.register_forward_pre_hook(choose)
