"""Rules for ATen ops that work inside a token's row: views where strides can say it, else instructions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import fx

from enginewright.backends.cpu.builder import Operand
from enginewright.backends.cpu.lowering import Constant, Lowering, PositionTable, lowers, op_name
from enginewright.backends.cpu.views import (
    View,
    expanded,
    permuted,
    reshaped,
    selected,
    sliced,
)

__all__: list[str] = []

Args = dict[str, Any]


def _axis(low: Lowering, dim: int, rank: int) -> int:
    """A feature axis from an axis of the whole tensor with `rank` features."""
    axis = dim % (rank + 1) - 1
    if axis < 0:
        raise low.fail("it works along the token axis", "feature axes only")
    return axis


def _axes(low: Lowering, dims: Any, rank: int) -> list[int]:
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        raise low.fail("it works along the token axis", "feature axes only")
    return sorted(_axis(low, dim, rank) for dim in dims)


@overload
def _aligned(low: Lowering, operand: View, rank: int) -> View: ...
@overload
def _aligned(low: Lowering, operand: Operand, rank: int) -> Operand: ...
def _aligned(low: Lowering, operand: Operand, rank: int) -> Operand:
    """Features of an operand of an op over `rank` features; a constant loses its axis for tokens."""
    if not isinstance(operand, View):
        return operand
    if operand.rows == "" and len(operand.shape) == rank + 1 and operand.shape[0] == 1:
        return selected(operand, 0, 0)
    if operand.rows and len(operand.shape) < rank and operand.size > 1:
        raise low.fail("it broadcasts tokens along another axis", "operands of equal rank")
    return operand


# Elementwise.


def _pointwise(low: Lowering, node: fx.Node, kind: str, values: Sequence[Any]) -> View:
    shape = low.shape(node)
    operands = [_aligned(low, low.operand(value), len(shape)) for value in values]
    return low.elementwise(kind, operands, shape, low.dtype(node))


_UNARY = """abs acos asin atan bitwise_not ceil cos cosh erf exp exp2 expm1 floor hardsigmoid hardswish isinf
    isnan log log10 log1p log2 logical_not mish neg reciprocal relu round rsqrt sigmoid sign silu sin sinh
    sqrt square
    tan tanh trunc"""


@lowers(*(f"aten::{name}" for name in _UNARY.split()))
def unary(low: Lowering, node: fx.Node, a: Args) -> View:
    kind = op_name(node).removeprefix("aten::")
    if a.get("decimals"):
        raise low.fail(f"rounding to {a['decimals']} decimals", "rounding to integers")
    if low.dtype(node) == "i32" and kind in ("floor", "ceil", "round", "trunc"):
        return low.view(a["self"])  # integers are whole already
    if kind == "bitwise_not" and node.meta["val"].dtype == torch.bool:
        kind = "logical_not"
    return _pointwise(low, node, kind, [a["self"]])


@lowers("aten::log_sigmoid_forward")
def log_sigmoid(low: Lowering, node: fx.Node, a: Args) -> tuple[View, None]:
    return low.elementwise("log_sigmoid", [low.view(a["self"])]), None


@lowers("aten::gelu")
def gelu(low: Lowering, node: fx.Node, a: Args) -> View:
    return _pointwise(low, node, "gelu_tanh" if a["approximate"] == "tanh" else "gelu", [a["self"]])


@lowers("aten::softplus")
def softplus(low: Lowering, node: fx.Node, a: Args) -> View:
    x, beta = low.view(a["self"]), float(a["beta"])
    if a["threshold"] != 20:
        raise low.fail(f"threshold {a['threshold']}", "threshold 20")
    if beta == 1.0:
        return low.elementwise("softplus", [x])
    return low.elementwise(
        "mul", [low.elementwise("softplus", [low.elementwise("mul", [x, beta])]), 1 / beta]
    )


@lowers("aten::elu")
def elu(low: Lowering, node: fx.Node, a: Args) -> View:
    x, alpha, scale, inner = (
        low.view(a["self"]),
        float(a["alpha"]),
        float(a["scale"]),
        float(a["input_scale"]),
    )
    if (alpha, scale, inner) == (1.0, 1.0, 1.0):
        return low.elementwise("elu", [x])
    bent = low.elementwise(
        "mul", [low.elementwise("expm1", [low.elementwise("mul", [x, inner])]), alpha * scale]
    )
    straight = low.elementwise("mul", [x, scale])
    return low.elementwise("where", [low.elementwise("gt", [x, 0.0]), straight, bent])


@lowers("aten::leaky_relu")
def leaky_relu(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    below = low.elementwise("mul", [x, float(a["negative_slope"])])
    return low.elementwise("where", [low.elementwise("gt", [x, 0.0]), x, below])


@lowers("aten::relu6", "aten::hardtanh", "aten::clamp", "aten::clamp_min", "aten::clamp_max")
def clamp(low: Lowering, node: fx.Node, a: Args) -> View:
    low_end, high_end = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if op_name(node) == "aten::relu6":
        low_end, high_end = 0.0, 6.0
    shape, dtype = low.shape(node), low.dtype(node)
    x: Operand = low.view(a["self"])
    for kind, end in (("maximum", low_end), ("minimum", high_end)):
        if end is not None:
            x = low.elementwise(kind, [x, _aligned(low, low.operand(end), len(shape))], shape, dtype)
    assert isinstance(x, View)
    return x


_BINARY = """atan2 bitwise_and bitwise_or bitwise_xor eq floor_divide fmod ge gt le logical_and logical_or
    logical_xor lt maximum minimum mul ne pow remainder"""


@lowers(*(f"aten::{name}" for name in _BINARY.split()))
def binary(low: Lowering, node: fx.Node, a: Args) -> View:
    kind = op_name(node).removeprefix("aten::")
    values = [a["self"], a["exponent"] if kind == "pow" else a["other"]]
    if kind == "pow" and values[1] == 2 and low.dtype(node) == "f32":
        return _pointwise(low, node, "square", values[:1])
    if kind.startswith("bitwise") and node.meta["val"].dtype == torch.bool:
        kind = kind.replace("bitwise", "logical")
    return _pointwise(low, node, kind, values)


@lowers("aten::add", "aten::sub", "aten::rsub")
def add(low: Lowering, node: fx.Node, a: Args) -> View:
    left, right, alpha = a["self"], a["other"], a.get("alpha", 1)
    kind = "add" if op_name(node) == "aten::add" else "sub"
    shape, dtype = low.shape(node), low.dtype(node)
    operands = [_aligned(low, low.operand(value), len(shape)) for value in (left, right)]
    if op_name(node) == "aten::rsub":
        operands.reverse()
        if alpha != 1:
            operands[1] = _scaled(low, operands[1], alpha)
    elif alpha != 1:
        operands[1] = _scaled(low, operands[1], alpha)
    return low.elementwise(kind, operands, shape, dtype)


def _scaled(low: Lowering, operand: Operand, factor: int | float) -> Operand:
    return (
        operand * factor if isinstance(operand, (int, float)) else low.elementwise("mul", [operand, factor])
    )


@lowers("aten::div")
def div(low: Lowering, node: fx.Node, a: Args) -> View:
    mode = a.get("rounding_mode")
    if mode == "floor":
        return _pointwise(low, node, "floor_divide", [a["self"], a["other"]])
    shape = low.shape(node)
    operands = [_aligned(low, low.operand(a[name]), len(shape)) for name in ("self", "other")]
    quotient = low.elementwise("div", operands, shape)
    if mode == "trunc":
        quotient = low.elementwise("trunc", [quotient])
    return quotient if low.dtype(node) == "f32" else low.builder.copied(quotient, "i32")


@lowers("aten::addcmul", "aten::addcdiv")
def add_product(low: Lowering, node: fx.Node, a: Args) -> View:
    shape = low.shape(node)
    base, one, two = (_aligned(low, low.operand(a[n]), len(shape)) for n in ("self", "tensor1", "tensor2"))
    product = low.elementwise("mul" if op_name(node) == "aten::addcmul" else "div", [one, two])
    if a["value"] != 1:
        product = low.elementwise("mul", [product, a["value"]])
    return low.elementwise("add", [base, product], shape)


@lowers("aten::lerp")
def lerp(low: Lowering, node: fx.Node, a: Args) -> View:
    return _pointwise(low, node, "lerp", [a["self"], a["end"], a["weight"]])


@lowers("aten::where")
def where(low: Lowering, node: fx.Node, a: Args) -> View:
    return _pointwise(low, node, "where", [a["condition"], a["self"], a["other"]])


@lowers("aten::masked_fill")
def masked_fill(low: Lowering, node: fx.Node, a: Args) -> View:
    return _pointwise(low, node, "where", [a["mask"], a["value"], a["self"]])


# Along feature axes.


def _reduced(low: Lowering, kind: str, x: View, axes: Sequence[int], dtype: str) -> View:
    """Reduce to a value of x's shape with extent 1 along `axes`."""
    shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))
    out = low.builder.value(shape, dtype, x.rows)
    broadcast = expanded(out, x.shape)
    low.builder.generic("reduce", [x], [broadcast], kind=kind, shape=list(x.shape), axes=list(axes))
    return out


def _finished(low: Lowering, node: fx.Node, reduced: View, index: int | None = None) -> View:
    """Drop the reduced axes where the node does."""
    result = reshaped(reduced, low.shape(node, index))
    assert result is not None
    return result


_REDUCE = {
    "sum": "sum",
    "mean": "mean",
    "prod": "prod",
    "amax": "max",
    "amin": "min",
    "any": "any",
    "all": "all",
}
_REDUCE |= {"argmax": "argmax", "argmin": "argmin"}


@lowers(*(f"aten::{name}" for name in _REDUCE))
def reduce(low: Lowering, node: fx.Node, a: Args) -> View:
    x, kind = low.view(a["self"]), _REDUCE[op_name(node).removeprefix("aten::")]
    dtype = low.dtype(node)
    if x.dtype != dtype and kind in ("sum", "mean", "prod"):
        x = low.builder.copied(x, dtype)
    return _finished(low, node, _reduced(low, kind, x, _axes(low, a.get("dim"), len(x.shape)), dtype))


@lowers("aten::max", "aten::min")
def best(low: Lowering, node: fx.Node, a: Args) -> tuple[View, View | None]:
    if "dim" not in a:
        raise low.fail("it reduces over all tokens", "an axis")
    x, kind = low.view(a["self"]), op_name(node).removeprefix("aten::")
    axes = _axes(low, a["dim"], len(x.shape))
    values = _finished(low, node, _reduced(low, kind, x, axes, x.dtype), 0)
    if not _item_used(node, 1):
        return values, None
    return values, _finished(low, node, _reduced(low, "arg" + kind, x, axes, "i32"), 1)


def _item_used(node: fx.Node, index: int) -> bool:
    return any(user.args[1] == index and user.users for user in node.users)


@lowers("aten::var")
def variance(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    axes = _axes(low, a.get("dim"), len(x.shape))
    correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
    count = math.prod(x.shape[axis] for axis in axes) - (1 if correction is None else correction)
    away = low.elementwise("sub", [x, expanded(_reduced(low, "mean", x, axes, "f32"), x.shape)])
    total = _reduced(low, "sum", low.elementwise("square", [away]), axes, "f32")
    return _finished(low, node, low.elementwise("div", [total, float(count)]))


@lowers("aten::logsumexp")
def logsumexp(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    axes = _axes(low, a["dim"], len(x.shape))
    top = _reduced(low, "max", x, axes, "f32")
    powers = low.elementwise("exp", [low.elementwise("sub", [x, top])])
    total = low.elementwise("log", [_reduced(low, "sum", powers, axes, "f32")])
    return _finished(low, node, low.elementwise("add", [total, top]))


@lowers("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax")
def softmax(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    x = x if x.dtype == "f32" else low.builder.copied(x, "f32")
    out = low.out(node, rows=x.rows)
    axis = _axis(low, a["dim"], len(x.shape))
    attrs = {"shape": list(x.shape), "axis": axis, "log": "log" in op_name(node)}
    low.builder.generic("softmax", [x], [out], **attrs)
    return out


@lowers("aten::cumsum", "aten::cumprod")
def cumulate(low: Lowering, node: fx.Node, a: Args) -> View:
    x, kind = low.view(a["self"]), "sum" if op_name(node) == "aten::cumsum" else "prod"
    x = x if x.dtype == low.dtype(node) else low.builder.copied(x, low.dtype(node))
    out = low.out(node, rows=x.rows)
    axis = _axis(low, a["dim"], len(x.shape))
    low.builder.generic("cumulate", [x], [out], kind=kind, shape=list(x.shape), axis=axis)
    return out


@lowers("aten::topk", "aten::sort", "aten::argsort")
def topk(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.view(a["self"])
    axis = _axis(low, a["dim"], len(x.shape))
    k = a.get("k", x.shape[axis])
    largest = a["largest"] if "largest" in a else a["descending"]
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    alone = op_name(node) == "aten::argsort"
    values = low.builder.value(shape, x.dtype, x.rows) if not alone and _item_used(node, 0) else None
    indices = low.builder.value(shape, "i32", x.rows) if alone or _item_used(node, 1) else None
    low.builder.generic(
        "topk", [x], [values, indices], shape=list(x.shape), axis=axis, k=k, largest=bool(largest)
    )
    return indices if alone else (values, indices)


# Products inside a row.


@lowers("aten::bmm", "aten::matmul")
def matmul(low: Lowering, node: fx.Node, a: Args) -> View:
    left, right = low.view(a["self"]), low.view(a.get("mat2", a.get("other")))
    if left.rows == "" or len(left.shape) < (1 if right.rows == "" else 2):
        raise low.fail("it multiplies across tokens", "products inside a token's row")
    if right.rows == "" and len(right.shape) > 2:
        raise low.fail("its constant has more than two axes", "a matrix")
    m, n, k = left.shape[:-1], right.shape[-1], left.shape[-1]
    batch = m if right.rows == "" else m[:-1]
    rows = m[len(batch) :]
    turned = permuted(right, [*range(len(right.shape) - 2), len(right.shape) - 1, len(right.shape) - 2])
    space = (*batch, *rows, n, k)
    one = expanded(_with_axis(left, len(left.shape) - 1), space)
    two = turned
    for _ in rows:
        two = _with_axis(two, len(two.shape) - 2)
    two = expanded(two, space)
    out = low.builder.value(low.shape(node), "f32", left.rows)
    walk = expanded(_with_axis(out, len(out.shape)), space)
    low.builder.generic("reduce", [one, two], [walk], kind="dot", shape=list(space), axes=[len(space) - 1])
    return out


def _with_axis(view: View, axis: int) -> View:
    """Insert an axis of extent 1."""
    result = reshaped(view, (*view.shape[:axis], 1, *view.shape[axis:]))
    assert result is not None
    return result


# Movement: views.


@lowers(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten",
    "aten::unsqueeze", "aten::squeeze",
)  # fmt: skip
def reshape(low: Lowering, node: fx.Node, a: Args) -> View:
    x, shape = low.view(a["self"]), low.shape(node)
    if math.prod(shape) != x.size:
        raise low.fail("it moves elements between tokens", f"{x.size} features a token")
    return reshaped(x, shape) or _dense_reshaped(low, x, shape)


def _dense_reshaped(low: Lowering, x: View, shape: Sequence[int]) -> View:
    result = reshaped(low.builder.copied(x), shape)
    assert result is not None
    return result


@lowers("aten::alias", "aten::clone", "aten::contiguous")
def same(low: Lowering, node: fx.Node, a: Args) -> Any:
    return low.result(a["self"])


@lowers("aten::_to_copy", "aten::to")
def convert(low: Lowering, node: fx.Node, a: Args) -> Any:
    found = low.result(a["self"])
    source = a["self"].meta["val"].dtype
    if node.meta["val"].dtype == torch.bool and source != torch.bool:
        return low.elementwise("ne", [low.view(a["self"]), 0])
    if isinstance(found, (Constant, PositionTable)) or found.dtype == low.dtype(node):
        return found
    return low.builder.copied(found, low.dtype(node))


@lowers("aten::expand", "aten::expand_as")
def expand(low: Lowering, node: fx.Node, a: Args) -> View:
    x, shape = low.view(a["self"]), low.shape(node)
    x = _aligned(low, x, len(shape))
    return expanded(x, shape)


@lowers("aten::permute", "aten::transpose")
def permute(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    rank = len(x.shape)
    if op_name(node) == "aten::permute":
        order = [dim % (rank + 1) for dim in a["dims"]]
    else:
        order = list(range(rank + 1))
        left, right = a["dim0"] % (rank + 1), a["dim1"] % (rank + 1)
        order[left], order[right] = order[right], order[left]
    if order[0] != 0:
        raise low.fail("it moves the token axis", "tokens first")
    return permuted(x, [dim - 1 for dim in order[1:]])


@lowers("aten::slice", "aten::narrow")
def slice_(low: Lowering, node: fx.Node, a: Args) -> View:
    x, dim, start = low.view(a["self"]), a["dim"], a["start"] or 0
    stop = start + a["length"] if "length" in a else a["end"]
    whole = start == 0 and (not isinstance(stop, int) or stop >= 2**31) and a.get("step", 1) == 1
    if dim % (len(x.shape) + 1) == 0 and whole:
        return x
    axis = _axis(low, dim, len(x.shape))
    return sliced(x, axis, start, x.shape[axis] if stop is None else stop, a.get("step", 1))


@lowers("aten::select")
def select(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    return selected(x, _axis(low, a["dim"], len(x.shape)), a["index"])


@lowers("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
def split(low: Lowering, node: fx.Node, a: Args) -> tuple[View, ...]:
    x = low.view(a["self"])
    axis = _axis(low, a["dim"], len(x.shape))
    pieces, start = [], 0
    for index in range(len(node.meta["val"])):
        shape = low.shape(node, index)
        if op_name(node) == "aten::unbind":
            pieces.append(selected(x, axis, index))
            continue
        pieces.append(sliced(x, axis, start, start + shape[axis]))
        start += shape[axis]
    return tuple(pieces)


# Movement: copies.


def _joined(low: Lowering, views: Sequence[View], axis: int, out: View) -> View:
    start = 0
    for view in views:
        place = sliced(out, axis, start, start + view.shape[axis])
        start += view.shape[axis]
        if view.size:
            low.builder.pointwise("copy", [view], place)
    return out


def _rows(views: Sequence[View]) -> str:
    return next((view.rows for view in views if view.rows), "tokens")


@lowers("aten::cat", "aten::stack")
def cat(low: Lowering, node: fx.Node, a: Args) -> View:
    shape = low.shape(node)
    axis = _axis(low, a["dim"], len(shape))
    views = [low.view(item) for item in a["tensors"]]
    if op_name(node) == "aten::stack":
        views = [_with_axis(view, axis) for view in views]
    views = [view if view.rows else _constant_features(low, view, len(shape)) for view in views]
    return _joined(low, views, axis, low.out(node, rows=_rows(views)))


def _constant_features(low: Lowering, view: View, rank: int) -> View:
    if len(view.shape) == rank + 1 and view.shape[0] == 1:
        return selected(view, 0, 0)
    raise low.fail("it joins a constant with another number of rows", "one row")


@lowers("aten::repeat", "aten::repeat_interleave")
def repeat(low: Lowering, node: fx.Node, a: Args) -> View:
    x, shape = low.view(a["self"]), low.shape(node)
    if op_name(node) == "aten::repeat":
        if a["repeats"][0] != 1 and len(a["repeats"]) == len(x.shape) + 1:
            raise low.fail("it repeats tokens", "repeats of features")
        x = expanded(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
        spread = [
            part for extent, want in zip(x.shape, shape, strict=True) for part in (want // extent, extent)
        ]
        first = reshaped(x, [part for extent in x.shape for part in (1, extent)])
    else:
        axis = _axis(low, a["dim"], len(x.shape))
        if not isinstance(a["repeats"], int):
            raise low.fail("its counts are a tensor", "one count")
        spread = [*x.shape[: axis + 1], a["repeats"], *x.shape[axis + 1 :]]
        first = _with_axis(x, axis + 1)
    assert first is not None
    return _dense_reshaped(low, expanded(first, spread), shape)


@lowers("aten::flip", "aten::roll")
def rearrange(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    axes = [_axis(low, dim, len(x.shape)) for dim in a["dims"]]
    if op_name(node) == "aten::flip":
        for axis in axes:
            x = _picked(low, x, axis, torch.arange(x.shape[axis] - 1, -1, -1))
        return x
    for axis, shift in zip(axes, a["shifts"], strict=True):
        cut = -shift % x.shape[axis]
        parts = [sliced(x, axis, cut, x.shape[axis]), sliced(x, axis, 0, cut)]
        x = _joined(low, parts, axis, low.builder.value(x.shape, x.dtype, x.rows))
    return x


def _picked(low: Lowering, x: View, axis: int, indices: torch.Tensor | View) -> View:
    """x's slices along `axis` in the order of a one-dimensional index."""
    index = low.literal(indices.to(torch.int32)) if isinstance(indices, torch.Tensor) else indices
    shape = (*x.shape[:axis], index.size, *x.shape[axis + 1 :])
    strides = [0] * len(shape)
    strides[axis] = index.strides[0]
    return _gathered(low, x, axis, replace(index, shape=shape, strides=tuple(strides)))


def _gathered(low: Lowering, x: View, axis: int, index: View) -> View:
    out = low.builder.value(index.shape, x.dtype, x.rows or index.rows)
    strides = [list(x.strides), list(index.strides), list(out.strides)]
    low.builder.emit(
        "gather", [x, index], [out], shape=list(index.shape), axis=axis, extent=x.shape[axis], strides=strides
    )
    return out


@lowers("aten::gather")
def gather(low: Lowering, node: fx.Node, a: Args) -> View:
    x, index = low.view(a["self"]), low.view(a["index"])
    return _gathered(low, x, _axis(low, a["dim"], len(x.shape)), index)


@lowers("aten::index_select")
def index_select(low: Lowering, node: fx.Node, a: Args) -> View:
    x = low.view(a["self"])
    return _picked(low, x, _axis(low, a["dim"], len(x.shape)), low.view(a["index"]))


@lowers("aten::scatter", "aten::scatter_add")
def scatter(low: Lowering, node: fx.Node, a: Args) -> View:
    x, index = low.view(a["self"]), low.view(a["index"])
    if a.get("reduce"):
        raise low.fail(f"reduction {a['reduce']}", "scatter, scatter_add")
    axis = _axis(low, a["dim"], len(x.shape))
    out = low.builder.copied(x, name=node.name)
    source = low.operand(a["src"] if "src" in a else a["value"])
    strides = [
        list(index.strides),
        list(source.strides) if isinstance(source, View) else [],
        list(out.strides),
    ]
    low.builder.emit(
        "scatter",
        [index, source],
        [out],
        shape=list(index.shape),
        axis=axis,
        extent=x.shape[axis],
        kind="add" if op_name(node) == "aten::scatter_add" else "set",
        strides=strides,
    )
    return out


@lowers("aten::one_hot")
def one_hot(low: Lowering, node: fx.Node, a: Args) -> View:
    index, shape = low.view(a["self"]), low.shape(node)
    classes = low.literal(torch.arange(shape[-1], dtype=torch.int32))
    return low.elementwise("eq", [_with_axis(index, len(index.shape)), classes], shape)


@lowers("aten::constant_pad_nd", "aten::pad")
def pad(low: Lowering, node: fx.Node, a: Args) -> View:
    x, shape, pads = low.view(a["self"]), low.shape(node), a["pad"]
    if a.get("mode", "constant") != "constant" or any(p < 0 for p in pads):
        raise low.fail("only constant padding outwards has a rule")
    if len(pads) > 2 * len(shape):
        raise low.fail("it pads the token axis", "feature axes only")
    out = _filled(low, node, a.get("value") or 0, x.rows)
    place = out
    for i in range(len(pads) // 2):
        axis = len(shape) - 1 - i
        place = sliced(place, axis, pads[2 * i], pads[2 * i] + x.shape[axis])
    low.builder.pointwise("copy", [x], place)
    return out


# Constants over the tokens' rows.


def _filled(low: Lowering, node: fx.Node, value: Any, rows: str) -> View:
    out = low.out(node, rows=rows)
    operand = low.operand(float(value) if out.dtype == "f32" else int(value))
    if isinstance(operand, View):
        operand = expanded(operand, out.shape)
    return low.builder.pointwise("copy", [operand], out)


@lowers(
    "aten::fill", "aten::full", "aten::full_like", "aten::new_full", "aten::new_ones", "aten::new_zeros",
    "aten::ones", "aten::ones_like", "aten::zeros", "aten::zeros_like", "aten::empty_like",
    "aten::scalar_tensor",
)  # fmt: skip
def fill(low: Lowering, node: fx.Node, a: Args) -> View:
    name = op_name(node)
    value = a.get("fill_value", a.get("value", 1 if "ones" in name else 0))
    source = low.result(a["self"]) if "self" in a else None
    return _filled(low, node, value, source.rows if isinstance(source, View) else "tokens")
