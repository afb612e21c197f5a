"""Rules of layers that compute element by element, along an axis, or make values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .rules import Call, InterpreterError, axes_of, rule
from .values import FLOATS, Array, decoded

__all__: list[str] = []


@rule("CONSTANT", "IConstantLayer")
def constant(call: Call) -> list[Array]:
    """op:Constant. Its weights, row by row. Python reads back neither INT4 nor BF16: then the bytes that were handed over."""
    shape = tuple(call.layer.shape)
    weights = call.layer.weights
    if isinstance(weights, np.ndarray):
        return [weights.reshape(shape)]
    raw = call.raw.get(call.layer.name)
    if raw is None:
        raise InterpreterError(f"the bytes of this {call.outputs[0]} constant were not given")
    return [decoded(raw, call.outputs[0], int(np.prod(shape, dtype=np.int64))).reshape(shape)]


_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}


@rule("ELEMENTWISE", "IElementWiseLayer")
def elementwise(call: Call) -> list[Array]:
    """op:ElementWise. Inputs of one rank and type; sizes match or are 1. How integers are divided below zero is not said."""
    left, right, op = call[0], call[1], call.layer.op.name
    if left.ndim != right.ndim or left.dtype != right.dtype:
        raise InterpreterError(
            f"inputs {left.dtype} {left.shape} and {right.dtype} {right.shape} differ in rank or type"
        )
    if op in ("AND", "OR", "XOR") and left.dtype != np.bool_:
        raise InterpreterError(f"{op} of {left.dtype}")
    if op == "DIV":
        if left.dtype.kind == "f":
            return [left / right]
        if (left < 0).any() or (right <= 0).any():
            raise InterpreterError("it divides integers that are not positive")
        return [left // right]
    return [_TWO[op](left, right)]


_erf = np.vectorize(math.erf, otypes=[np.float32])

_ONE: dict[str, Callable[[Array], Array]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": np.reciprocal,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "TAN": np.tan,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ERF": _erf,
    "NOT": np.logical_not,
    "SIGN": np.sign,
    "ROUND": np.rint,
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}


@rule("UNARY", "IUnaryLayer")
def unary(call: Call) -> list[Array]:
    """op:Unary; api:UnaryOperation: ROUND is to the nearest even, ERF the Gauss error function."""
    op = call.layer.op.name
    if op not in _ONE:
        raise InterpreterError(f"there is no rule for the operation {op}")
    return [_ONE[op](call[0])]


@rule("ACTIVATION", "IActivationLayer")
def activation(call: Call) -> list[Array]:
    """op:Activation; api:ActivationType has each formula, `a` and `b` are its alpha and beta."""
    x, a, b = call[0], np.float32(call.layer.alpha), np.float32(call.layer.beta)
    kind = call.layer.type.name
    if kind == "RELU":
        return [np.maximum(x, 0)]
    if kind == "SIGMOID":
        return [1 / (1 + np.exp(-x))]
    if kind == "TANH":
        return [np.tanh(x)]
    if kind == "LEAKY_RELU":
        return [np.where(x >= 0, x, a * x)]
    if kind == "ELU":
        return [np.where(x >= 0, x, a * (np.exp(np.minimum(x, 0)) - 1))]
    if kind == "SELU":
        return [b * np.where(x > 0, x, a * np.exp(np.minimum(x, 0)) - a)]
    if kind == "SOFTSIGN":
        return [x / (1 + np.abs(x))]
    if kind == "SOFTPLUS":
        return [a * np.logaddexp(0, b * x)]
    if kind == "CLIP":
        return [np.maximum(a, np.minimum(b, x))]
    if kind == "HARD_SIGMOID":
        return [np.clip(a * x + b, 0, 1)]
    if kind == "SCALED_TANH":
        return [a * np.tanh(b * x)]
    if kind == "THRESHOLDED_RELU":
        return [np.where(x > a, x, np.float32(0))]
    if kind == "GELU_ERF":
        return [np.float32(0.5) * x * (1 + _erf(x * np.float32(math.sqrt(0.5))))]
    if kind == "GELU_TANH":
        inner = np.float32(math.sqrt(2 / math.pi)) * (np.float32(0.044715) * x * x * x + x)
        return [np.float32(0.5) * x * (1 + np.tanh(inner))]
    raise InterpreterError(f"there is no rule for the activation {kind}")


@rule("CAST", "ICastLayer")
def cast(call: Call) -> list[Array]:
    """op:Cast. Floats round to the nearest value of the type; what is not 0 is true; integers drop the fraction."""
    return [_converted(call[0], call.layer.to_type.name)]


@rule("IDENTITY", "IIdentityLayer")
def identity(call: Call) -> list[Array]:
    """op:Identity. The input, converted where the output's type says so."""
    return [_converted(call[0], call.outputs[0])]


def _converted(x: Array, kind: str) -> Array:
    if kind == "BOOL":
        return x != 0
    if kind in FLOATS:
        return x.astype(np.float32)
    return np.trunc(x) if x.dtype.kind == "f" else x


@rule("SELECT", "ISelectLayer")
def select(call: Call) -> list[Array]:
    """op:Select. The first input where the condition is true, the second elsewhere; ranks are equal, sizes match or are 1."""
    condition, yes, no = call[0], call[1], call[2]
    if condition.dtype != np.bool_ or not condition.ndim == yes.ndim == no.ndim:
        raise InterpreterError(
            f"condition {condition.dtype} {condition.shape}, inputs {yes.shape}, {no.shape}"
        )
    return [np.where(condition, yes, no)]


@rule("REDUCE", "IReduceLayer")
def reduce(call: Call) -> list[Array]:
    """op:Reduce. Over the axes of the bit mask, which keep a size of 1 or go."""
    layer = call.layer
    functions: dict[str, Callable[..., Any]] = {
        "SUM": np.sum,
        "PROD": np.prod,
        "MAX": np.max,
        "MIN": np.min,
        "AVG": np.mean,
    }
    if layer.op.name not in functions:
        raise InterpreterError(f"there is no rule for the reduction {layer.op.name}")
    dtype = {} if layer.op.name in ("MAX", "MIN") else {"dtype": call[0].dtype}
    return [functions[layer.op.name](call[0], axis=axes_of(layer.axes), keepdims=layer.keep_dims, **dtype)]


@rule("CUMULATIVE", "ICumulativeLayer")
def cumulative(call: Call) -> list[Array]:
    """op:Cumulative; api:ICumulativeLayer. Sums of what stands before, itself among it unless `exclusive`."""
    x, axis = call[0], int(call[1])
    turned = np.flip(x, axis) if call.layer.reverse else x
    found = np.cumsum(turned, axis=axis, dtype=x.dtype)
    if call.layer.exclusive:
        found = found - turned
    return [np.flip(found, axis) if call.layer.reverse else found]


@rule("SOFTMAX", "ISoftMaxLayer")
def softmax(call: Call) -> list[Array]:
    """op:SoftMax. exp(x) over the sum of exp along the one axis of the bit mask; the largest is taken off first."""
    (axis,) = axes_of(call.layer.axes)
    x = call[0]
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(axis=axis, keepdims=True))
        return [powers / powers.sum(axis=axis, keepdims=True)]


@rule("TOPK", "ITopKLayer")
def topk(call: Call) -> list[Array]:
    """op:TopK. The k largest or smallest along an axis, in order, then their indices. The order of equal ones is not said."""
    layer, x = call.layer, call[0]
    (axis,) = axes_of(layer.axes)
    given = call.given(1)
    k = layer.k if given is None else int(given)
    order = np.argsort(-x if layer.op.name == "MAX" else x, axis=axis, kind="stable")
    indices = np.take(order, np.arange(k), axis=axis)
    return [np.take_along_axis(x, indices, axis), indices]


@rule("NORMALIZATION", "INormalizationLayer")
def normalization(call: Call) -> list[Array]:
    """op:Normalization; api:INormalizationLayer. (x - mean) / sqrt(variance + epsilon) * scale + bias over the mask's axes."""
    layer, x = call.layer, call[0]
    if layer.num_groups != 1:
        raise InterpreterError(f"{layer.num_groups} groups of channels")
    axes = axes_of(layer.axes)
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = np.mean(centred * centred, axis=axes, keepdims=True)
    return [centred / np.sqrt(variance + np.float32(layer.epsilon)) * call[1] + call[2]]


@rule("FILL", "IFillLayer")
def fill(call: Call) -> list[Array]:
    """op:Fill. LINSPACE: alpha + beta · index, summed over the axes; inputs 0 to 2 stand for the attributes they replace."""
    layer = call.layer
    if layer.operation.name != "LINSPACE":
        raise InterpreterError(f"{layer.operation.name} is random")
    sizes, alpha, beta = (call.given(i) for i in range(3))
    shape = tuple(layer.shape) if sizes is None else tuple(int(size) for size in sizes)
    dtype = np.float32 if call.outputs[0] in FLOATS else np.int64
    first = np.array(layer.alpha if alpha is None else alpha, dtype)
    steps = np.atleast_1d(np.array(layer.beta if beta is None else beta, dtype))
    if len(steps) != len(shape):
        raise InterpreterError(f"{len(steps)} values of beta for {len(shape)} axes")
    found = np.full(shape, first, dtype)
    for axis, (size, step) in enumerate(zip(shape, steps, strict=True)):
        line = np.arange(size, dtype=dtype) * step
        found = found + line.reshape((size,) + (1,) * (len(shape) - axis - 1))
    return [found]


@rule("SHAPE", "IShapeLayer")
def shape(call: Call) -> list[Array]:
    """op:Shape. The sizes of the input, int64."""
    return [np.array(call[0].shape, np.int64)]


@rule("ONE_HOT", "IOneHotLayer")
def one_hot(call: Call) -> list[Array]:
    """op:OneHot; api:IOneHotLayer. values[1] at the index along a new axis of `depth` places, values[0] elsewhere."""
    indices, values, depth = call[0], call[1], int(call[2])
    hot = indices[..., None] == np.arange(depth)
    found = np.where(hot, values[1], values[0])
    axis = call.layer.axis
    return [np.moveaxis(found, -1, axis if axis >= 0 else found.ndim + axis)]


@rule("NON_ZERO", "INonZeroLayer")
def non_zero(call: Call) -> list[Array]:
    """op:NonZero; api:INonZeroLayer. Indices of what is not 0, one column each, in row-major order."""
    return [np.stack(np.nonzero(call[0]))]
