"""Rules for ATen ops that work inside a token's row. Movement along axes is in lower_movement.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from enginewright.backends.onnx.graph import BOOL, FLOAT, INT64, Value
from enginewright.backends.onnx.lowering import Lowering, lowers, op_name

__all__: list[str] = []

Args = dict[str, Any]


# Elementwise.

_UNARY = {
    "abs": "Abs", "acos": "Acos", "asin": "Asin", "atan": "Atan", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh",
    "erf": "Erf", "exp": "Exp", "floor": "Floor", "isinf": "IsInf", "isnan": "IsNaN", "log": "Log", "mish": "Mish",
    "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round", "sigmoid": "Sigmoid", "sign": "Sign",
    "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh", "logical_not": "Not",
    "hardswish": "HardSwish", "bitwise_not": "BitwiseNot",
}  # fmt: skip
_WHOLE = ("ceil", "floor", "round", "trunc")


@lowers(*(f"aten::{name}" for name in _UNARY))
def unary(low: Lowering, node: fx.Node, a: Args) -> Value:
    name = op_name(node).removeprefix("aten::")
    if a.get("decimals"):
        raise low.fail(f"rounding to {a['decimals']} decimals", "rounding to integers")
    if name in _WHOLE and low.dtype(node) != FLOAT:
        return low.value(a["self"])  # integers are whole already
    if name == "logical_not":
        return low.graph.op("Not", [low.operand(a["self"], BOOL)])
    if name == "bitwise_not" and low.dtype(node) == BOOL:
        return low.graph.op("Not", [low.value(a["self"])])
    if name in ("isinf", "isnan"):
        return low.graph.op(_UNARY[name], [low.operand(a["self"], FLOAT)], dtype=BOOL)
    return low.graph.op(_UNARY[name], [low.operand(a["self"], low.dtype(node))])


def _computed(low: Lowering, name: str, x: Value) -> Value:
    """Unary kinds that are a few operators."""
    g = low.graph
    one = g.scalar(1.0)
    if name == "silu":
        return g.mul(x, g.op("Sigmoid", [x]))
    if name == "rsqrt":
        return g.op("Reciprocal", [g.op("Sqrt", [x])])
    if name == "square":
        return g.mul(x, x)
    if name == "trunc":
        return g.mul(g.op("Sign", [x]), g.op("Floor", [g.op("Abs", [x])]))
    if name == "expm1":
        return g.op("Sub", [g.op("Exp", [x]), one])
    if name == "log1p":
        return g.op("Log", [g.add(x, one)])
    if name == "exp2":
        return g.op("Exp", [g.mul(x, g.scalar(math.log(2)))])
    if name in ("log2", "log10"):
        return g.mul(g.op("Log", [x]), g.scalar(1 / math.log(2 if name == "log2" else 10)))
    if name == "hardsigmoid":
        return g.op("HardSigmoid", [x], alpha=1 / 6, beta=0.5)
    assert name == "log_sigmoid"
    return g.op("Neg", [g.op("Softplus", [g.op("Neg", [x])])])


_COMPUTED = "silu rsqrt square trunc expm1 log1p exp2 log2 log10 hardsigmoid".split()


@lowers(*(f"aten::{name}" for name in _COMPUTED))
def computed(low: Lowering, node: fx.Node, a: Args) -> Value:
    name = op_name(node).removeprefix("aten::")
    if low.dtype(node) != FLOAT:
        x = low.operand(a["self"], low.dtype(node))
        return x if name == "trunc" else low.graph.mul(x, x)
    return _computed(low, name, low.operand(a["self"], FLOAT))


@lowers("aten::log_sigmoid_forward")
def log_sigmoid(low: Lowering, node: fx.Node, a: Args) -> tuple[Value, None]:
    return _computed(low, "log_sigmoid", low.value(a["self"])), None


@lowers("aten::gelu")
def gelu(low: Lowering, node: fx.Node, a: Args) -> Value:
    return low.graph.op("Gelu", [low.value(a["self"])], approximate=a["approximate"])


@lowers("aten::softplus")
def softplus(low: Lowering, node: fx.Node, a: Args) -> Value:
    if a["threshold"] != 20:
        raise low.fail(f"threshold {a['threshold']}", "threshold 20")
    g, x, beta = low.graph, low.value(a["self"]), float(a["beta"])
    inner = g.op("Softplus", [g.mul(x, g.scalar(beta))])
    return g.mul(inner, g.scalar(1 / beta))


@lowers("aten::elu")
def elu(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x = low.graph, low.value(a["self"])
    alpha, scale, inner = float(a["alpha"]), float(a["scale"]), float(a["input_scale"])
    bent = g.mul(_computed(low, "expm1", g.mul(x, g.scalar(inner))), g.scalar(alpha * scale))
    above = g.op("Greater", [x, g.scalar(0.0)], dtype=BOOL)
    return g.op("Where", [above, g.mul(x, g.scalar(scale)), bent], x.shape, FLOAT)


@lowers("aten::leaky_relu")
def leaky_relu(low: Lowering, node: fx.Node, a: Args) -> Value:
    return low.graph.op("LeakyRelu", [low.value(a["self"])], alpha=float(a["negative_slope"]))


@lowers("aten::relu6", "aten::hardtanh", "aten::clamp", "aten::clamp_min", "aten::clamp_max")
def clamp(low: Lowering, node: fx.Node, a: Args) -> Value:
    low_end, high_end = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if op_name(node) == "aten::relu6":
        low_end, high_end = 0.0, 6.0
    dtype = low.dtype(node)
    x = low.operand(a["self"], dtype)
    for kind, end in (("Max", low_end), ("Min", high_end)):
        if end is not None:
            x = low.graph.op(kind, [x, low.operand(end, dtype)], low.shape(node))
    return x


def _common(low: Lowering, values: Sequence[Any]) -> int:
    """The type that elementwise operands meet in, as torch chooses it."""
    found = [low.result(value) for value in values]
    tensors = [
        low.value(v).dtype
        for v, f in zip(values, found, strict=True)
        if not isinstance(f, (bool, int, float))
    ]
    if FLOAT in tensors or any(isinstance(f, float) for f in found):
        return FLOAT
    numbers = any(isinstance(f, int) and not isinstance(f, bool) for f in found)
    if not tensors or (numbers and set(tensors) == {BOOL}):
        return INT64
    return tensors[0] if len(set(tensors)) == 1 else INT64


_BINARY = {"mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
_COMPARE = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}


@lowers(*(f"aten::{name}" for name in _BINARY))
def binary(low: Lowering, node: fx.Node, a: Args) -> Value:
    name = op_name(node).removeprefix("aten::")
    dtype, other = low.dtype(node), a["exponent"] if name == "pow" else a["other"]
    if name == "pow" and other == 2:
        x = low.operand(a["self"], dtype)
        return low.graph.mul(x, x)
    return low.graph.op(
        _BINARY[name], [low.operand(a["self"], dtype), low.operand(other, dtype)], low.shape(node), dtype
    )


@lowers(*(f"aten::{name}" for name in _COMPARE), "aten::ne")
def compare(low: Lowering, node: fx.Node, a: Args) -> Value:
    name = op_name(node).removeprefix("aten::")
    dtype = _common(low, [a["self"], a["other"]])
    sides = [low.operand(a["self"], dtype), low.operand(a["other"], dtype)]
    same = low.graph.op(_COMPARE.get(name, "Equal"), sides, low.shape(node), BOOL)
    return low.graph.op("Not", [same]) if name == "ne" else same


_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_BITS = {"bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor"}


@lowers(*(f"aten::{name}" for name in (*_LOGICAL, *_BITS)))
def logical(low: Lowering, node: fx.Node, a: Args) -> Value:
    name = op_name(node).removeprefix("aten::")
    dtype = low.dtype(node)
    kind = _BITS[name] if name in _BITS and dtype != BOOL else _LOGICAL[name.replace("bitwise", "logical")]
    return low.graph.op(kind, [low.operand(a[n], dtype) for n in ("self", "other")], low.shape(node))


@lowers("aten::add", "aten::sub", "aten::rsub")
def add(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, dtype, alpha = low.graph, low.dtype(node), a.get("alpha", 1)
    left, right = low.operand(a["self"], dtype), low.operand(a["other"], dtype)
    if op_name(node) == "aten::rsub":
        left, right = right, left if alpha == 1 else g.mul(left, g.scalar(alpha, dtype))
    elif alpha != 1:
        right = g.mul(right, g.scalar(alpha, dtype))
    return g.op("Add" if op_name(node) == "aten::add" else "Sub", [left, right], low.shape(node))


@lowers("aten::div", "aten::floor_divide")
def div(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, dtype = low.graph, low.dtype(node)
    mode = "floor" if op_name(node) == "aten::floor_divide" else a.get("rounding_mode")
    sides = [low.operand(a[name], FLOAT) for name in ("self", "other")]
    quotient = g.op("Div", sides, low.shape(node))
    if mode == "floor":
        quotient = g.op("Floor", [quotient])
    elif mode == "trunc":
        quotient = _computed(low, "trunc", quotient)
    return g.cast(quotient, dtype)


@lowers("aten::remainder", "aten::fmod")
def remainder(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, dtype, shape = low.graph, low.dtype(node), low.shape(node)
    x, y = (low.operand(a[name], dtype) for name in ("self", "other"))
    if op_name(node) == "aten::fmod" or dtype != FLOAT:
        return g.op("Mod", [x, y], shape, fmod=int(op_name(node) == "aten::fmod"))
    return g.op("Sub", [x, g.mul(y, g.op("Floor", [g.op("Div", [x, y], shape)]), shape)], shape)


@lowers("aten::addcmul", "aten::addcdiv")
def add_product(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, shape = low.graph, low.shape(node)
    base, one, two = (low.operand(a[n], FLOAT) for n in ("self", "tensor1", "tensor2"))
    product = g.op("Mul" if op_name(node) == "aten::addcmul" else "Div", [one, two], shape)
    return g.add(base, g.mul(product, g.scalar(a["value"])), shape)


@lowers("aten::lerp")
def lerp(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, shape = low.graph, low.shape(node)
    start, end, weight = (low.operand(a[n], FLOAT) for n in ("self", "end", "weight"))
    return g.add(start, g.mul(weight, g.op("Sub", [end, start], shape), shape), shape)


@lowers("aten::where", "aten::masked_fill")
def where(low: Lowering, node: fx.Node, a: Args) -> Value:
    names = ("condition", "self", "other") if op_name(node) == "aten::where" else ("mask", "value", "self")
    dtype = low.dtype(node)
    condition = low.operand(a[names[0]], BOOL)
    return low.graph.op(
        "Where", [condition, *(low.operand(a[n], dtype) for n in names[1:])], low.shape(node), dtype
    )


# Products inside a row.


@lowers("aten::bmm", "aten::matmul")
def matmul(low: Lowering, node: fx.Node, a: Args) -> Value:
    sides = [low.operand(value, FLOAT) for value in (a["self"], a.get("mat2", a.get("other")))]
    return low.graph.op("MatMul", sides, low.shape(node))


# Constants over the tokens' rows.


@lowers(
    "aten::fill", "aten::full_like", "aten::new_full", "aten::new_ones", "aten::new_zeros", "aten::ones_like",
    "aten::zeros_like", "aten::empty_like",
)  # fmt: skip
def fill(low: Lowering, node: fx.Node, a: Args) -> Value:
    return _filled(low, node, a, low.value(a["self"]))


@lowers("aten::full", "aten::ones", "aten::zeros", "aten::scalar_tensor")
def full(low: Lowering, node: fx.Node, a: Args) -> Value:
    return _filled(low, node, a, low.inputs["tokens"])


def _filled(low: Lowering, node: fx.Node, a: Args, rows: Value) -> Value:
    """One number for every row of `rows`."""
    g, name, dtype = low.graph, op_name(node), low.dtype(node)
    value = a.get("fill_value", a.get("value", a.get("s", 1 if "ones" in name else 0)))
    shape = low.shape(node)
    number = low.operand(value, dtype)
    if all(isinstance(size, int) for size in shape):
        return g.op("Expand", [number, g.ints(*(int(size) for size in shape))], shape)
    count = g.op("Shape", [rows], (1,), INT64, start=0, end=1)
    sizes = g.op("Concat", [count, g.ints(*(int(size) for size in shape[1:]))], (len(shape),), axis=0)
    return g.op("Expand", [number, sizes], shape)
