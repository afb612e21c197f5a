"""fold_scalars — multiplications by a number disappear into their neighbour, where the result is the same to the bit.

Rules (c is a number, or a weight with a single element)
1. x · 1, x / 1, x + 0, x - 0                                     →  x
2. ew::embedding(ids, w) · c, the embedding having no other use   →  ew::embedding(ids, w, scale=c)
3. ew::attention(q · c, …), c a power of two, likewise for k      →  ew::attention(q, …, scale · c); views may stand between

Other factors stay: folding them would round elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call, only_user
from enginewright.passes.program import Program

aten = torch.ops.aten
_MULTIPLY = (aten.mul.Tensor, aten.mul.Scalar)
_DIVIDE = (aten.div.Tensor, aten.div.Scalar)
_VIEWS = (aten.reshape.default, aten.view.default, aten.permute.default)
_SHIFT = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)


class FoldScalars:
    name = "fold_scalars"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            if is_call(node, *_MULTIPLY, *_DIVIDE, *_SHIFT):
                matches += _drop_identity(program, node) or _scale_embedding(program, node)
            elif is_call(node, OPS["attention"]):
                matches += sum(_scale_attention(program, node, index) for index in (0, 1))
        return PassResult(matches)


def _number(program: Program, value: Any) -> float | None:
    """The value of a number, or of a weight with a single element."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "get_attr":
        weight = program.weight_of(value)
        if weight.numel == 1 and weight.dtype.is_floating_point:
            return float(weight.load().float())
    return None


def _scaled(program: Program, node: Any) -> tuple[fx.Node, float] | None:
    """(x, c) where the node is x · c or x / (1 / c), c a number."""
    if not is_call(node, *_MULTIPLY, *_DIVIDE):
        return None
    for x, other in (node.args[:2], node.args[1::-1]):
        number = _number(program, other)
        if number is not None and isinstance(x, fx.Node) and x.op != "get_attr":
            if is_call(node, *_MULTIPLY):
                return x, number
            if other is node.args[1] and number and math.frexp(number)[0] in (0.5, -0.5):
                return x, 1 / number
    return None


def _drop_identity(program: Program, node: fx.Node) -> bool:
    x, other = node.args[0], node.args[1]
    number = _number(program, other)
    neutral = 0.0 if is_call(node, *_SHIFT) else 1.0
    if number != neutral or not isinstance(x, fx.Node) or x.op == "get_attr":
        return False
    if x.meta["val"].dtype != node.meta["val"].dtype or x.meta["val"].shape != node.meta["val"].shape:
        return False
    node.replace_all_uses_with(x)
    return True


def _scale_embedding(program: Program, node: fx.Node) -> bool:
    scaled = _scaled(program, node)
    if scaled is None or not is_call(scaled[0], OPS["embedding"]) or only_user(scaled[0]) is None:
        return False
    embedding, number = scaled
    if argument(embedding, "scale") != 1.0 or not is_call(node, *_MULTIPLY):
        return False
    args = (argument(embedding, "ids"), argument(embedding, "weight"), argument(embedding, "offset"), number)
    node.replace_all_uses_with(program.call(OPS["embedding"], args, before=node))
    return True


def _scale_attention(program: Program, node: fx.Node, index: int) -> bool:
    product: Any = node.args[index]
    while is_call(product, *_VIEWS) and only_user(product) is not None:
        product = product.args[0]
    scaled = _scaled(program, product)
    if scaled is None or only_user(product) is None or scaled[1] <= 0 or math.frexp(scaled[1])[0] != 0.5:
        return False
    product.replace_all_uses_with(scaled[0])
    scale = argument(node, "scale") * scaled[1]
    if len(node.args) > 5:
        node.update_arg(5, scale)
    else:
        node.update_kwarg("scale", scale)
    return True
