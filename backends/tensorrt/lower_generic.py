"""Rules for ATen ops that work inside a token's row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.tensorrt.lowering import (
    Constant,
    Lowering,
    Refused,
    lowers,
    op_name,
)

__all__ = ["axis_of", "rank_of"]

Args = dict[str, Any]


def axis_of(dim: int, rank: int) -> int:
    """An axis of the whole tensor, which must not be that of the tokens."""
    axis = dim % rank
    if axis == 0:
        raise Refused("it works along the token axis", "feature axes only")
    return axis


def _axes(dims: Any, rank: int) -> list[int]:
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        raise Refused("it works along the token axis", "feature axes only")
    return sorted(axis_of(dim, rank) for dim in dims)


def rank_of(node: fx.Node, index: int | None = None) -> int:
    value = node.meta["val"] if index is None else node.meta["val"][index]
    return int(value.dim())


def _operands(low: Lowering, node: fx.Node, values: list[Any], kind: str) -> list[Any]:
    return [low.operand(value, kind, rank_of(node)) for value in values]


def _common(low: Lowering, node: fx.Node, values: list[Any]) -> str:
    """The type in which operands meet: f32 if any of them, or the result, is real."""
    kinds = [low.kind(v) for v in values if isinstance(v, fx.Node)]
    if low.kind(node) == "f32" or "f32" in kinds or any(isinstance(v, float) for v in values):
        return "f32"
    return "int32" if "int32" in kinds else kinds[0]


# Elementwise.

_UNARY = """abs acos asin atan ceil cos cosh erf exp floor log neg reciprocal round sign sin sinh sqrt tan"""
_NAMES = {"reciprocal": "RECIP"}


@lowers(*(f"aten::{name}" for name in _UNARY.split()))
def unary(low: Lowering, node: fx.Node, a: Args) -> Any:
    kind = op_name(node).removeprefix("aten::")
    if a.get("decimals"):
        raise Refused(f"rounding to {a['decimals']} decimals", "rounding to integers")
    x = low.tensor(a["self"])
    if low.kind(node) == "int32":
        if kind in ("floor", "ceil", "round"):
            return x
        if kind not in ("abs", "neg", "sign"):
            raise Refused("it works on integers", "real numbers")
        return low.unary(kind.upper(), x)
    return low.unary(_NAMES.get(kind, kind.upper()), low.cast(x, "f32"))


@lowers("aten::rsqrt", "aten::square", "aten::relu", "aten::sigmoid", "aten::tanh", "aten::silu")
def simple(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, kind = low.wide(a["self"]), op_name(node).removeprefix("aten::")
    if kind == "rsqrt":
        return low.unary("RECIP", low.unary("SQRT", x))
    if kind == "square":
        return low.elementwise("PROD", x, x)
    if kind == "silu":
        return low.elementwise("PROD", x, low.activation("SIGMOID", x))
    return low.activation(kind.upper(), x)


@lowers("aten::gelu")
def gelu(low: Lowering, node: fx.Node, a: Args) -> Any:
    return low.activation("GELU_TANH" if a["approximate"] == "tanh" else "GELU_ERF", low.wide(a["self"]))


@lowers("aten::softplus")
def softplus(low: Lowering, node: fx.Node, a: Args) -> Any:
    """log(1 + exp(x)) as max(x, 0) + log(1 + exp(-|x|)): nothing overflows."""
    if (a["beta"], a["threshold"]) != (1, 20):
        raise Refused(f"beta {a['beta']}, threshold {a['threshold']}", "beta 1, threshold 20")
    x = low.wide(a["self"])
    tail = low.unary("EXP", low.unary("NEG", low.unary("ABS", x)))
    tail = low.unary("LOG", low.elementwise("SUM", tail, low.number(1, len(x.shape))))
    return low.elementwise("SUM", low.activation("RELU", x), tail)


@lowers("aten::clamp", "aten::clamp_min", "aten::clamp_max", "aten::hardtanh", "aten::relu6")
def clamp(low: Lowering, node: fx.Node, a: Args) -> Any:
    least, most = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if op_name(node) == "aten::relu6":
        least, most = 0.0, 6.0
    kind = _common(low, node, [a["self"], least, most])
    x = low.operand(a["self"], kind, rank_of(node))
    for op, end in (("MAX", least), ("MIN", most)):
        if end is not None:
            x = low.elementwise(op, x, low.operand(end, kind, rank_of(node)))
    return x


_BINARY = {
    "add": "SUM", "sub": "SUB", "rsub": "SUB", "mul": "PROD", "div": "DIV", "maximum": "MAX", "minimum": "MIN",
    "pow": "POW", "floor_divide": "FLOOR_DIV",
}  # fmt: skip


@lowers(*(f"aten::{name}" for name in _BINARY))
def binary(low: Lowering, node: fx.Node, a: Args) -> Any:
    name = op_name(node).removeprefix("aten::")
    left, right = a["self"], a["exponent"] if name == "pow" else a["other"]
    kind = _common(low, node, [left, right])
    if kind == "bool":
        raise Refused("it works on truth values", "numbers")
    operation = _BINARY[name]
    if name == "div" and a.get("rounding_mode") is not None:
        if a["rounding_mode"] != "floor":
            raise Refused(f"rounding_mode {a['rounding_mode']}", "none, or floor")
        operation = "FLOOR_DIV"
    one, two = _operands(low, node, [left, right], kind)
    if a.get("alpha", 1) != 1:
        scaled = low.operand(a["alpha"], kind, rank_of(node))
        if name == "rsub":
            one = low.elementwise("PROD", one, scaled)
        else:
            two = low.elementwise("PROD", two, scaled)
    if name == "rsub":
        one, two = two, one
    return low.elementwise(operation, one, two)


_COMPARED = {"eq": ("EQUAL", False), "ne": ("EQUAL", True), "lt": ("LESS", False), "ge": ("LESS", True)}
_COMPARED |= {"gt": ("GREATER", False), "le": ("GREATER", True)}


@lowers(*(f"aten::{name}" for name in _COMPARED))
def compare(low: Lowering, node: fx.Node, a: Args) -> Any:
    operation, turned = _COMPARED[op_name(node).removeprefix("aten::")]
    values = [a["self"], a["other"]]
    kinds = [low.kind(v) for v in values if isinstance(v, fx.Node)]
    kind = "f32" if "f32" in kinds or any(isinstance(v, float) for v in values) else "int32"
    found = low.elementwise(operation, *_operands(low, node, values, kind))
    return low.unary("NOT", found) if turned else found


@lowers(
    "aten::logical_and", "aten::logical_or", "aten::logical_xor", "aten::logical_not", "aten::bitwise_and",
    "aten::bitwise_or", "aten::bitwise_xor", "aten::bitwise_not",
)  # fmt: skip
def logical(low: Lowering, node: fx.Node, a: Args) -> Any:
    values = [a["self"], *([a["other"]] if "other" in a else [])]
    if low.kind(node) != "bool" or any(low.kind(v) != "bool" for v in values if isinstance(v, fx.Node)):
        raise Refused("it works on integers", "truth values")
    operation = op_name(node).rpartition("_")[2].upper()
    tensors = _operands(low, node, values, "bool")
    return low.unary("NOT", tensors[0]) if operation == "NOT" else low.elementwise(operation, *tensors)


@lowers("aten::where", "aten::masked_fill")
def where(low: Lowering, node: fx.Node, a: Args) -> Any:
    if op_name(node) == "aten::where":
        condition, yes, no = a["condition"], a["self"], a["other"]
    else:
        condition, yes, no = a["mask"], a["value"], a["self"]
    kind = low.kind(node)
    if kind == "bool":
        raise Refused("it chooses among truth values", "numbers")
    if isinstance(yes, (int, float)) and not math.isfinite(yes):
        yes = math.copysign(1e30, yes)  # a choice among infinities is NaN in some kernels
    return low.select(low.operand(condition, "bool", rank_of(node)), *_operands(low, node, [yes, no], kind))


# Along feature axes.

_REDUCE = {"sum": "SUM", "mean": "AVG", "prod": "PROD", "amax": "MAX", "amin": "MIN"}


@lowers(*(f"aten::{name}" for name in _REDUCE))
def reduce(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, kind = low.cast(low.tensor(a["self"]), low.kind(node)), op_name(node).removeprefix("aten::")
    axes = _axes(a.get("dim"), len(x.shape))
    return low.reduce(_REDUCE[kind], x, axes, keep=rank_of(node) == len(x.shape))


@lowers("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax")
def softmax(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.wide(a["self"])
    layer = low.named(low.network.add_softmax(x), "softmax")
    layer.axes = 1 << axis_of(a["dim"], len(x.shape))
    y = layer.get_output(0)
    return low.unary("LOG", y) if "log" in op_name(node) else y


@lowers("aten::cumsum")
def cumsum(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.cast(low.tensor(a["self"]), low.kind(node))
    axis = low.constant(np.array(axis_of(a["dim"], len(x.shape)), np.int32), "axis")
    return low.out(
        low.network.add_cumulative(x, axis, low.trt.CumulativeOperation.SUM, False, False), "cumsum"
    )


@lowers("aten::topk", "aten::sort", "aten::argsort", "aten::max", "aten::min", "aten::argmax", "aten::argmin")
def topk(low: Lowering, node: fx.Node, a: Args) -> Any:
    name = op_name(node).removeprefix("aten::")
    if a.get("dim") is None:
        raise Refused("it looks at all tokens", "an axis")
    x = low.tensor(a["self"])
    x = low.cast(x, "f32") if low.kind(a["self"]) == "f32" else x
    axis = axis_of(a["dim"], len(x.shape))
    one = name in ("max", "min", "argmax", "argmin")
    count = 1 if one else a.get("k", x.shape[axis])
    largest = name.endswith("max") if one else a.get("largest", a.get("descending"))
    operation = low.trt.TopKOperation.MAX if largest else low.trt.TopKOperation.MIN
    layer = low.named(low.network.add_topk(x, operation, count, 1 << axis), "topk")
    found = [layer.get_output(0), layer.get_output(1)]
    alone = name.startswith("arg")
    if one:
        rank = rank_of(node, None if alone else 0)
        if rank < len(x.shape):
            found = [low.shuffle(t, [s for i, s in enumerate(t.shape) if i != axis]) for t in found]
    return found[1] if alone else tuple(found)


@lowers("aten::bmm", "aten::matmul")
def matmul(low: Lowering, node: fx.Node, a: Args) -> Any:
    left, right = low.tensor(a["self"]), low.tensor(a.get("mat2", a.get("other")))
    kind, rank = low.options.compute, len(left.shape)
    if len(right.shape) != rank and any(size < 0 for size in right.shape):
        raise Refused("it multiplies across tokens", "products inside a token's row")
    if rank < 3 and isinstance(low.result(a["self"]), Constant):
        raise Refused("it multiplies across tokens", "products inside a token's row")
    return low.matmul(low.cast(left, kind), low.ranked(low.cast(right, kind), rank))
