"""fuse_activation — an elementwise activation, however it is spelled, becomes one `ew::activation` node.

Rules
1. A region of elementwise ops with numbers, from one tensor x to y, that computes one of the dialect's activations
   (silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh)  →  ew::activation(x, kind). The largest region wins: x ·
   sigmoid(x) is silu, not a product with a sigmoid.

A region is recognised by evaluating it on a grid of x and comparing with the activation: equal within 2e-6, relative to
max(1, |y|), which is float32's own spread between spellings (erf and tanh forms of gelu differ by 5e-4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.activation import ACTIVATIONS
from enginewright.passes.manager import PassResult
from enginewright.passes.program import Program

#: Elementwise ATen ops that activations are spelled with.
_ELEMENTWISE = frozenset(
    """add addcmul clamp clamp_min div erf exp gelu mul neg pow reciprocal relu rsub sigmoid silu square sub
    tanh threshold""".split()
)
_LARGEST_REGION = 16
_TOLERANCE = 2e-6


class FuseActivation:
    name = "fuse_activation"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        grid = torch.cat([torch.linspace(-12, 12, 2401), torch.tensor([-100.0, -30.0, 30.0, 100.0])])
        known = {kind: function(grid) for kind, function in ACTIVATIONS.items()}
        inside: set[fx.Node] = set()
        matches = 0
        for y in reversed(list(program.graph.nodes)):
            if y in inside or not _is_elementwise(y):
                continue
            for x, nodes in _regions(y, order):
                kind = _kind(_evaluate(nodes, x, grid), known)
                if kind is not None:
                    y.replace_all_uses_with(program.call(OPS["activation"], (x, kind), before=y))
                    inside.update(nodes)
                    matches += 1
                    break
        return PassResult(matches)


def _is_elementwise(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    return (
        node.target.namespace == "aten"
        and node.target._schema.name.removeprefix("aten::") in _ELEMENTWISE
        and isinstance(value, Tensor)
        and value.is_floating_point()
    )


def _regions(y: fx.Node, order: Mapping[fx.Node, int]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """(x, nodes from x to y in graph order) for every x that all of y's inputs pass through, the nearest first."""
    unread: set[fx.Node] = {y}
    nodes: list[fx.Node] = []
    while len(nodes) < _LARGEST_REGION:
        node = max(unread, key=order.__getitem__)
        if nodes and len(unread) == 1:
            if node.op == "get_attr" or node.meta["val"].shape != y.meta["val"].shape:
                return
            yield node, sorted(nodes, key=order.__getitem__)
        if not _is_elementwise(node):
            return
        unread.remove(node)
        unread.update(node.all_input_nodes)
        nodes.append(node)


def _evaluate(nodes: list[fx.Node], x: fx.Node, values: Tensor) -> Tensor:
    env = {x: values}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[nodes[-1]]


def _kind(values: Tensor, known: Mapping[str, Tensor]) -> str | None:
    for kind, wanted in known.items():
        error = (values - wanted).abs() / wanted.abs().clamp(min=1)
        if bool((error <= _TOLERANCE).all()):
            return kind
    return None
