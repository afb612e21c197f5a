"""Rules for ATen ops that reduce, sort or scan feature axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from enginewright.backends.onnx.graph import BOOL, FLOAT, INT64, Size, Value
from enginewright.backends.onnx.lowering import Lowering, lowers, op_name

__all__: list[str] = []

Args = dict[str, Any]

_REDUCE = {
    "sum": "ReduceSum",
    "mean": "ReduceMean",
    "prod": "ReduceProd",
    "amax": "ReduceMax",
    "amin": "ReduceMin",
}


def _axes(dims: Any, rank: int) -> list[int]:
    return sorted(dim % rank for dim in ([dims] if isinstance(dims, int) else dims))


def _kept(shape: Sequence[Size], axes: Sequence[int]) -> tuple[Size, ...]:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


@lowers(*(f"aten::{name}" for name in _REDUCE))
def reduce(low: Lowering, node: fx.Node, a: Args) -> Value:
    dtype = low.dtype(node)
    x = low.operand(a["self"], dtype)
    axes = _axes(a["dim"], len(x.shape))
    keep = int(bool(a.get("keepdim")))
    kind = _REDUCE[op_name(node).removeprefix("aten::")]
    return low.graph.op(kind, [x, low.graph.ints(*axes)], low.shape(node), dtype, keepdims=keep)


@lowers("aten::any", "aten::all")
def truth(low: Lowering, node: fx.Node, a: Args) -> Value:
    g = low.graph
    x = g.cast(low.operand(a["self"], BOOL), INT64)
    kind = "ReduceMax" if op_name(node) == "aten::any" else "ReduceMin"
    axes = g.ints(*_axes(a["dim"], len(x.shape)))
    return g.cast(g.op(kind, [x, axes], low.shape(node), keepdims=int(bool(a.get("keepdim")))), BOOL)


@lowers("aten::argmax", "aten::argmin")
def best_index(low: Lowering, node: fx.Node, a: Args) -> Value:
    kind = "ArgMax" if op_name(node) == "aten::argmax" else "ArgMin"
    if a.get("dim") is None:
        raise low.fail("it reduces over all tokens", "an axis")
    return low.graph.op(
        kind,
        [low.value(a["self"])],
        low.shape(node),
        INT64,
        axis=a["dim"],
        keepdims=int(bool(a.get("keepdim"))),
    )


@lowers("aten::max", "aten::min")
def best(low: Lowering, node: fx.Node, a: Args) -> tuple[Value, Value]:
    if "dim" not in a:
        raise low.fail("it reduces over all tokens", "an axis")
    g, x, name = low.graph, low.value(a["self"]), op_name(node).removeprefix("aten::").capitalize()
    keep = int(bool(a.get("keepdim")))
    values = g.op(f"Reduce{name}", [x, g.ints(a["dim"])], low.shape(node, 0), keepdims=keep)
    return values, g.op(f"Arg{name}", [x], low.shape(node, 1), INT64, axis=a["dim"], keepdims=keep)


@lowers("aten::var")
def variance(low: Lowering, node: fx.Node, a: Args) -> Value:
    g, x = low.graph, low.value(a["self"])
    axes = _axes(a["dim"], len(x.shape))
    correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
    count = math.prod(int(x.shape[axis]) for axis in axes) - (1 if correction is None else correction)
    mean = g.op("ReduceMean", [x, g.ints(*axes)], _kept(x.shape, axes), keepdims=1)
    away = g.op("Sub", [x, mean], x.shape)
    total = g.op(
        "ReduceSum", [g.mul(away, away), g.ints(*axes)], low.shape(node), keepdims=int(bool(a.get("keepdim")))
    )
    return g.mul(total, g.scalar(1 / count))


@lowers("aten::logsumexp")
def logsumexp(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.value(a["self"])
    axes = low.graph.ints(*_axes(a["dim"], len(x.shape)))
    return low.graph.op("ReduceLogSumExp", [x, axes], low.shape(node), keepdims=int(bool(a.get("keepdim"))))


@lowers("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax")
def softmax(low: Lowering, node: fx.Node, a: Args) -> Value:
    kind = "LogSoftmax" if "log" in op_name(node) else "Softmax"
    return low.graph.op(kind, [low.operand(a["self"], FLOAT)], axis=a["dim"])


@lowers("aten::cumsum")
def cumsum(low: Lowering, node: fx.Node, a: Args) -> Value:
    x = low.operand(a["self"], low.dtype(node))
    return low.graph.op("CumSum", [x, low.graph.scalar(a["dim"] % len(x.shape), INT64)])


@lowers("aten::topk", "aten::sort", "aten::argsort")
def topk(low: Lowering, node: fx.Node, a: Args) -> Any:
    g, x = low.graph, low.value(a["self"])
    dim = a["dim"] % len(x.shape)
    k = a.get("k", x.shape[dim])
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    largest = a["largest"] if "largest" in a else a["descending"]
    values, indices = g.ops(
        "TopK", [x, g.ints(k)], [(shape, x.dtype), (shape, INT64)], axis=dim, largest=int(bool(largest))
    )
    return indices if op_name(node) == "aten::argsort" else (values, indices)
