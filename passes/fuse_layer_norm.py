"""fuse_layer_norm — layer normalisation becomes one `ew::layer_norm` node.

Rules
1. aten.layer_norm, aten.native_layer_norm over the last axis  →  ew::layer_norm
2. c / √(mean(c²) + eps) with c = x - mean(x), in any spelling  →  ew::layer_norm(x, None, None, eps)
3. ew::layer_norm(x, None, None) · w, w [D] a weight            →  ew::layer_norm(x, w, None)

Weights of another shape (one a head, say) stay a multiplication.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import (
    Num,
    Op,
    Var,
    argument,
    find,
    is_call,
    is_last_axis,
    is_weight_vector,
    only_user,
)
from enginewright.passes.program import Program

aten = torch.ops.aten

_CENTRED = Op(aten.sub.Tensor, Var("x"), Op(aten.mean.dim, Var("x"), Var("axes"), True))
_SQUARES = (
    Op(aten.pow.Tensor_Scalar, Var("c"), 2),
    Op(aten.square.default, Var("c")),
    Op(aten.mul.Tensor, Var("c"), Var("c")),
)
_SUMS = [
    Op((aten.add.Tensor, aten.add.Scalar), Op(aten.mean.dim, square, Var("axes"), True), Num("eps"))
    for square in _SQUARES
]
_CORES = [Op(aten.mul.Tensor, Var("c"), Op(aten.rsqrt.default, total)) for total in _SUMS] + [
    Op(aten.div.Tensor, Var("c"), Op(aten.sqrt.default, total)) for total in _SUMS
]


class FuseLayerNorm:
    name = "fuse_layer_norm"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            for y, args in _fused(node) if node.op == "call_function" else ():
                y.replace_all_uses_with(program.call(OPS["layer_norm"], args, before=y))
                matches += 1
        return PassResult(matches)


def _fused(node: fx.Node) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
    """The node that ends a norm beginning at `node`, and the arguments of the norm that replaces it."""
    if is_call(node, aten.layer_norm.default, aten.native_layer_norm.default):
        if len(argument(node, "normalized_shape")) == 1:
            args = tuple(argument(node, name) for name in ("input", "weight", "bias", "eps"))
            ends = [node]
            if is_call(node, aten.native_layer_norm.default):
                ends = [n for n in node.users if is_call(n, operator.getitem) and n.args[1] == 0]
            yield from ((end, args) for end in ends)
        return
    if not is_call(node, aten.mul.Tensor, aten.div.Tensor):
        return
    for pattern in _CORES:
        found = find(node, pattern)
        centred = None if found is None else _centred(found["c"])
        if found is not None and centred is not None and is_last_axis(found["axes"], centred):
            break
    else:
        return
    product = only_user(node)
    weighted = find(product, Op(aten.mul.Tensor, node, Var("w")))
    if (
        product is not None
        and weighted is not None
        and is_weight_vector(weighted["w"], centred.meta["val"].shape[-1])
    ):
        yield product, (centred, weighted["w"], None, found["eps"])
    else:
        yield node, (centred, None, None, found["eps"])


def _centred(node: Any) -> fx.Node | None:
    """x where the node is x - mean(x) over the last axis."""
    found = find(node, _CENTRED)
    return found["x"] if found is not None and is_last_axis(found["axes"], found["x"]) else None
