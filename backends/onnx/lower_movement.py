"""Rules for ATen ops that move, join, split and pick features of a row; the token axis stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from enginewright.backends.onnx.graph import BOOL, INT64, Size, Value
from enginewright.backends.onnx.lowering import (
    Constant,
    Lowering,
    PositionTable,
    lowers,
    op_name,
    tensor_type,
)

__all__: list[str] = []

Args = dict[str, Any]


def _axis(low: Lowering, dim: int, rank: int) -> int:
    """An axis that is not the tokens'."""
    if dim % rank == 0:
        raise low.fail("it works along the token axis", "feature axes only")
    return dim % rank


@lowers(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten",
    "aten::unsqueeze", "aten::squeeze",
)  # fmt: skip
def reshape(low: Lowering, node: fx.Node, a: Args) -> Value:
    return low.graph.reshape(low.value(a["self"]), low.shape(node))


@lowers("aten::alias", "aten::clone", "aten::contiguous")
def same(low: Lowering, node: fx.Node, a: Args) -> Any:
    return low.result(a["self"])


@lowers("aten::_to_copy", "aten::to")
def convert(low: Lowering, node: fx.Node, a: Args) -> Any:
    found = low.result(a["self"])
    if isinstance(found, (Constant, PositionTable)) and low.dtype(node) == tensor_type(
        a["self"].meta["val"].dtype
    ):
        return found
    return low.graph.cast(low.value(a["self"]), low.dtype(node))


@lowers("aten::expand", "aten::expand_as")
def expand(low: Lowering, node: fx.Node, a: Args) -> Value:
    shape = low.shape(node)
    x = low.value(a["self"])
    if x.shape and isinstance(x.shape[0], str) and len(x.shape) == len(shape):
        wanted = [1, *shape[1:]]  # Expand broadcasts both ways: the tokens are x's own
    elif all(isinstance(size, int) for size in shape):
        wanted = list(shape)
    else:
        return _over_tokens(low, x, shape)
    return low.graph.op("Expand", [x, low.graph.ints(*(int(size) for size in wanted))], shape)


def _over_tokens(low: Lowering, x: Value, shape: tuple[Size, ...]) -> Value:
    """A constant repeated for every token."""
    g = low.graph
    count = g.op("Shape", [low.inputs["tokens"]], (1,), INT64)
    sizes = g.op("Concat", [count, g.ints(*(int(size) for size in shape[1:]))], (len(shape),), axis=0)
    return g.op("Expand", [x, sizes], shape)


@lowers("aten::permute", "aten::transpose")
def permute(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.value(a["self"])
    rank = len(x.shape)
    if op_name(node) == "aten::permute":
        order = [dim % rank for dim in a["dims"]]
    else:
        order = list(range(rank))
        left, right = a["dim0"] % rank, a["dim1"] % rank
        order[left], order[right] = order[right], order[left]
    return low.graph.op("Transpose", [x], [x.shape[dim] for dim in order], perm=order)


@lowers("aten::slice", "aten::narrow")
def slice_(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x, start = low.graph, low.value(a["self"]), a["start"] or 0
    stop = start + a["length"] if "length" in a else a["end"]
    step, dim = a.get("step", 1), a["dim"] % len(x.shape)
    if start == 0 and step == 1 and (stop is None or not isinstance(stop, int) or stop >= 2**31):
        return x
    _axis(low, dim, len(x.shape))
    end = 2**62 if stop is None else stop
    return g.op("Slice", [x, g.ints(start), g.ints(end), g.ints(dim), g.ints(step)], low.shape(node))


@lowers("aten::select")
def select(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.value(a["self"])
    axis = _axis(low, a["dim"], len(x.shape))
    return low.graph.op("Gather", [x, low.graph.scalar(a["index"], INT64)], low.shape(node), axis=axis)


@lowers("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
def split(low: Lowering, node: fx.Node, a: Args) -> tuple[Value, ...]:
    g, x = low.graph, low.value(a["self"])
    axis = _axis(low, a["dim"], len(x.shape))
    count = len(node.meta["val"])
    alone = op_name(node) == "aten::unbind"
    sizes = [1] * count if alone else [int(low.shape(node, i)[axis]) for i in range(count)]
    parts = [((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for size in sizes]
    if count == 1:
        made = [x]
    else:
        made = g.ops("Split", [x, g.ints(*sizes)], parts, axis=axis)
    return tuple(g.reshape(part, low.shape(node, i)) for i, part in enumerate(made)) if alone else tuple(made)


@lowers("aten::cat", "aten::stack")
def cat(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, shape, dtype = low.graph, low.shape(node), low.dtype(node)
    axis = _axis(low, a["dim"], len(shape))
    values = [low.operand(item, dtype) for item in a["tensors"]]
    if op_name(node) == "aten::stack":
        values = [g.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in values]
    values = [v if isinstance(v.shape[0], str) else _rows_of(low, v, shape, axis) for v in values]
    return g.op("Concat", values, shape, axis=axis)


def _rows_of(low: Lowering, value: Value, shape: tuple[Size, ...], axis: int) -> Value:
    """A constant with one row, for every row of what it is joined with."""
    if len(value.shape) == len(shape) and value.shape[0] == 1:
        return _over_tokens(low, value, (shape[0], *value.shape[1:]))
    raise low.fail("it joins a constant with another number of rows", "one row")


@lowers("aten::repeat")
def repeat(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x, shape = low.graph, low.value(a["self"]), low.shape(node)
    repeats = a["repeats"]
    if len(repeats) != len(x.shape) or repeats[0] != 1:
        raise low.fail("it repeats tokens", "repeats of features")
    return g.op("Tile", [x, g.ints(*repeats)], shape)


@lowers("aten::repeat_interleave")
def repeat_interleave(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x, shape = low.graph, low.value(a["self"]), low.shape(node)
    axis = _axis(low, a["dim"], len(x.shape))
    if not isinstance(a["repeats"], int):
        raise low.fail("its counts are a tensor", "one count")
    one = g.reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    wide = (*x.shape[: axis + 1], a["repeats"], *x.shape[axis + 1 :])
    sizes = [1 if isinstance(size, str) else size for size in wide]
    return g.reshape(g.op("Expand", [one, g.ints(*sizes)], wide), shape)


@lowers("aten::flip", "aten::roll")
def rearrange(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.value(a["self"])
    axes = [_axis(low, dim, len(x.shape)) for dim in a["dims"]]
    shifts = a.get("shifts", [None] * len(axes))
    for axis, shift in zip(axes, shifts, strict=True):
        order = np.arange(int(x.shape[axis]))
        order = order[::-1] if shift is None else np.roll(order, shift)
        x = low.graph.gather(x, low.graph.constant(np.ascontiguousarray(order, np.int64)), axis)
    return x


@lowers("aten::gather")
def gather(low: Lowering, node: fx.Node, a: Args) -> Value:
    x, index = low.value(a["self"]), low.operand(a["index"], INT64)
    axis = _axis(low, a["dim"], len(x.shape))
    return low.graph.op("GatherElements", [x, index], low.shape(node), axis=axis)


@lowers("aten::index_select")
def index_select(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.value(a["self"])
    index = low.operand(a["index"], INT64)
    return low.graph.op("Gather", [x, index], low.shape(node), axis=_axis(low, a["dim"], len(x.shape)))


@lowers("aten::scatter", "aten::scatter_add")
def scatter(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, dtype = low.graph, low.dtype(node)
    x, index = low.operand(a["self"], dtype), low.operand(a["index"], INT64)
    if a.get("reduce"):
        raise low.fail(f"reduction {a['reduce']}", "scatter, scatter_add")
    source = low.operand(a["src"] if "src" in a else a["value"], dtype)
    if not source.shape:
        source = g.op("Expand", [source, g.op("Shape", [index], (len(index.shape),), INT64)], index.shape)
    add = "add" if op_name(node) == "aten::scatter_add" else "none"
    return g.op(
        "ScatterElements", [x, index, source], x.shape, axis=_axis(low, a["dim"], len(x.shape)), reduction=add
    )


@lowers("aten::one_hot")
def one_hot(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, shape = low.graph, low.shape(node)
    index = low.value(a["self"])
    classes = low.literal(torch.arange(int(shape[-1])))
    one = g.op("Equal", [g.reshape(index, (*index.shape, 1)), classes], shape, BOOL)
    return g.cast(one, low.dtype(node))


@lowers("aten::constant_pad_nd", "aten::pad")
def pad(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x, pads = low.graph, low.value(a["self"]), list(a["pad"])
    rank = len(x.shape)
    if a.get("mode", "constant") != "constant" or any(p < 0 for p in pads) or len(pads) > 2 * (rank - 1):
        raise low.fail("only constant padding outwards, of feature axes, has a rule")
    before, after = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    return g.op("Pad", [x, g.ints(*before, *after), g.scalar(a.get("value") or 0, x.dtype)], low.shape(node))
