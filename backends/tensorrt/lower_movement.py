"""Rules for ATen ops that move values within a token's row, or make rows of one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.tensorrt.lower_generic import axis_of, rank_of
from enginewright.backends.tensorrt.lowering import (
    Constant,
    Lowering,
    PositionTable,
    Refused,
    lowers,
    op_name,
)

__all__: list[str] = []

Args = dict[str, Any]


@lowers(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten",
    "aten::unsqueeze", "aten::squeeze",
)  # fmt: skip
def reshape(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, shape = low.tensor(a["self"]), low.shape(node)
    if math.prod(shape) != math.prod(x.shape[1:]):
        raise Refused("it moves elements between tokens", f"{math.prod(x.shape[1:])} features a token")
    return low.shuffle(x, [-1, *shape])


@lowers("aten::alias", "aten::clone", "aten::contiguous")
def same(low: Lowering, node: fx.Node, a: Args) -> Any:
    return low.result(a["self"])


@lowers("aten::_to_copy", "aten::to")
def convert(low: Lowering, node: fx.Node, a: Args) -> Any:
    found, kind = low.result(a["self"]), low.kind(node)
    if isinstance(found, (Constant, PositionTable)):
        return found
    if low.kind(a["self"]) == kind:
        return found
    return low.cast(found, kind)


@lowers("aten::expand", "aten::expand_as")
def expand(low: Lowering, node: fx.Node, a: Args) -> Any:
    """Axes of one become wider: the values times ones (or, of truth values, with truths)."""
    shape, kind = low.shape(node), low.kind(node)
    x = low.operand(a["self"], kind, rank_of(node))
    if tuple(x.shape)[1:] == shape:
        return x
    if kind == "bool":
        return low.elementwise("AND", x, low.constant(np.ones((1, *shape), bool), "truths"))
    dtype = np.float32 if kind == "f32" else np.int32
    return low.elementwise("PROD", x, low.constant(np.ones((1, *shape), dtype), "ones"))


@lowers("aten::permute", "aten::transpose")
def permute(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.tensor(a["self"])
    rank = len(x.shape)
    if op_name(node) == "aten::permute":
        order = [dim % rank for dim in a["dims"]]
    else:
        order = list(range(rank))
        left, right = a["dim0"] % rank, a["dim1"] % rank
        order[left], order[right] = order[right], order[left]
    if order[0] != 0:
        raise Refused("it moves the token axis", "tokens first")
    return low.shuffle(x, first=order)


@lowers("aten::slice", "aten::narrow")
def slice_(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, start, step = low.tensor(a["self"]), a["start"] or 0, a.get("step", 1)
    stop = start + a["length"] if "length" in a else a["end"]
    whole = start == 0 and (not isinstance(stop, int) or stop >= 2**31) and step == 1
    if a["dim"] % len(x.shape) == 0 and whole:
        return x
    axis = axis_of(a["dim"], len(x.shape))
    places = range(*slice(start, stop, step).indices(x.shape[axis]))
    return low.sliced(x, axis, places.start, len(places), step)


@lowers("aten::select")
def select(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.tensor(a["self"])
    axis = axis_of(a["dim"], len(x.shape))
    index = a["index"] % x.shape[axis]
    return low.shuffle(low.sliced(x, axis, index, 1), [-1, *low.shape(node)])


@lowers("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
def split(low: Lowering, node: fx.Node, a: Args) -> tuple[Any, ...]:
    x = low.tensor(a["self"])
    axis = axis_of(a["dim"], len(x.shape))
    pieces, start = [], 0
    for index in range(len(node.meta["val"])):
        shape = low.shape(node, index)
        size = 1 if op_name(node) == "aten::unbind" else shape[axis - 1]
        piece = low.sliced(x, axis, start, size)
        pieces.append(low.shuffle(piece, [-1, *shape]) if op_name(node) == "aten::unbind" else piece)
        start += size
    return tuple(pieces)


@lowers("aten::cat", "aten::stack")
def cat(low: Lowering, node: fx.Node, a: Args) -> Any:
    kind, axis = low.kind(node), axis_of(a["dim"], rank_of(node))
    parts = [low.tensor(item) for item in a["tensors"]]
    if any(part.shape[0] >= 0 for part in parts):
        raise Refused("it joins a constant to every token", "values of the tokens")
    parts = [low.cast(part, kind) for part in parts]
    if op_name(node) == "aten::stack":
        parts = [low.shuffle(part, [-1, *part.shape[1:axis], 1, *part.shape[axis:]]) for part in parts]
    layer = low.named(low.network.add_concatenation(parts), "cat")
    layer.axis = axis
    return layer.get_output(0)


@lowers("aten::gather")
def gather(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, index = low.tensor(a["self"]), low.tensor(a["index"])
    layer = low.network.add_gather_v2(x, low.cast(index, "int32"), low.trt.GatherMode.ELEMENT)
    low.named(layer, "gather").axis = axis_of(a["dim"], len(x.shape))
    return layer.get_output(0)


@lowers("aten::index_select")
def index_select(low: Lowering, node: fx.Node, a: Args) -> Any:
    if not isinstance(low.result(a["index"]), Constant):
        raise Refused("its indices are computed from the tokens", "indices that are constants")
    x = low.tensor(a["self"])
    return low.gather(x, low.cast(low.tensor(a["index"]), "int32"), axis_of(a["dim"], len(x.shape)))


@lowers("aten::scatter")
def scatter(low: Lowering, node: fx.Node, a: Args) -> Any:
    """A number (or values) put where the index points along an axis: compared with every place, as places are few."""
    if a.get("reduce") or "src" in a:
        raise Refused("it scatters tensors", "one number for all places")
    x, index = low.tensor(a["self"]), low.cast(low.tensor(a["index"]), "int32")
    rank = len(x.shape)
    if rank != 2 or axis_of(a["dim"], rank) != 1:
        raise Refused(f"it scatters in {rank} axes", "one feature axis")
    places = low.constant(np.arange(x.shape[1], dtype=np.int32).reshape(1, 1, -1), "places")
    hits = low.elementwise("EQUAL", low.shuffle(index, [-1, index.shape[1], 1]), places)
    hit = low.reduce("MAX", low.cast(hits, "int32"), [1], keep=False)  # [T, places]
    hit = low.elementwise("GREATER", hit, low.number(0, 2, "int32"))
    if low.kind(node) == "bool":
        return (
            low.elementwise("OR", x, hit) if a["value"] else low.elementwise("AND", x, low.unary("NOT", hit))
        )
    return low.select(hit, low.operand(a["value"], low.kind(node), 2), x)


@lowers("aten::full_like", "aten::zeros_like", "aten::ones_like")
def fill(low: Lowering, node: fx.Node, a: Args) -> Any:
    """A number for every place: chosen on both sides of a comparison of the tensor that gives the shape."""
    name, kind, rank = op_name(node), low.kind(node), rank_of(node)
    value = a.get("fill_value", 1 if "ones" in name else 0)
    x = low.tensor(a["self"])
    never = (
        low.elementwise(
            "AND", *(low.operand(a["self"], "bool", rank), low.constant(np.zeros((1,) * rank, bool), "no"))
        )
        if low.kind(a["self"]) == "bool"
        else low.elementwise("LESS", x, x)
    )
    if kind == "bool":
        return low.unary("NOT", never) if value else never
    chosen = low.operand(value, kind, rank)
    return low.select(never, chosen, chosen)
