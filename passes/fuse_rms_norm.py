"""fuse_rms_norm — root-mean-square normalisation becomes one `ew::rms_norm` node.

Rules (r is 1 / √(mean(x²) + eps) over the last axis, in any of its spellings)
1. x · r · (1 + w), w [D] a weight  →  ew::rms_norm(x, w, eps, weight_offset=1)
2. x · r · w, w [D] a weight        →  ew::rms_norm(x, w, eps)
3. x · r                            →  ew::rms_norm(x, None, eps)
4. aten.rms_norm, aten._fused_rms_norm over the last axis  →  ew::rms_norm

Runs after fuse_layer_norm: a layer norm's second half is an RMS norm. A weight of another shape (one a head,
say) stays a multiplication after rule 3. Norms of single heads are the same rules over [T, heads, D].
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

_X = Var("x")
_SQUARES = (
    Op(aten.pow.Tensor_Scalar, _X, 2),
    Op(aten.square.default, _X),
    Op(aten.mul.Tensor, _X, _X),
)
_MEANS = [Op(aten.mean.dim, square, Var("axes"), True) for square in _SQUARES]
_SUMS = [Op((aten.add.Tensor, aten.add.Scalar), mean, Num("eps")) for mean in _MEANS]
_INVERSES = [
    inverse
    for total in _SUMS
    for inverse in (
        Op(aten.rsqrt.default, total),
        Op(aten.pow.Tensor_Scalar, total, -0.5),
        Op(aten.reciprocal.default, Op(aten.sqrt.default, total)),
    )
]
_NORMED = [Op(aten.mul.Tensor, _X, inverse) for inverse in _INVERSES] + [
    Op(aten.div.Tensor, _X, Op(aten.sqrt.default, total)) for total in _SUMS
]


class FuseRmsNorm:
    name = "fuse_rms_norm"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            for y, args in _fused(node) if node.op == "call_function" else ():
                y.replace_all_uses_with(program.call(OPS["rms_norm"], args, before=y))
                matches += 1
        return PassResult(matches)


def _fused(node: fx.Node) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
    """The node that ends a norm beginning at `node`, and the arguments of the norm that replaces it."""
    if is_call(node, aten.rms_norm.default, aten._fused_rms_norm.default):
        args = (argument(node, "input"), argument(node, "weight"), argument(node, "eps"))
        if len(argument(node, "normalized_shape")) == 1 and args[2] is not None:
            ends = [node]
            if is_call(node, aten._fused_rms_norm.default):
                ends = [n for n in node.users if is_call(n, operator.getitem) and n.args[1] == 0]
            yield from ((end, args) for end in ends)
        return
    if not is_call(node, aten.mul.Tensor, aten.div.Tensor):
        return
    for pattern in _NORMED:
        found = find(node, pattern)
        if found is not None and is_last_axis(found["axes"], found["x"]):
            break
    else:
        return
    x, eps = found["x"], found["eps"]
    weighted = _weighted(node, x.meta["val"].shape[-1])
    if weighted is None:
        yield node, (x, None, eps)
    else:
        y, weight, offset = weighted
        yield y, (x, weight, eps, offset)


def _weighted(normed: fx.Node, width: int) -> tuple[fx.Node, fx.Node, float] | None:
    """(product, weight, offset) where `normed`'s only use is the product with a weight [D], or with 1 + weight."""
    product = only_user(normed)
    for offset, factor in ((0.0, Var("w")), (1.0, Op((aten.add.Tensor, aten.add.Scalar), Var("w"), 1))):
        found = find(product, Op(aten.mul.Tensor, normed, factor))
        if product is not None and found is not None and is_weight_vector(found["w"], width):
            return product, found["w"], offset
    return None
