"""Rules for ATen ops that work inside a token's row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

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


def _axis(dim: int, rank: int) -> int:
    """An axis of the whole tensor, which must not be that of the tokens."""
    axis = dim % rank
    if axis == 0:
        raise Refused("it works along the token axis", "feature axes only")
    return axis


def _axes(dims: Any, rank: int) -> list[int]:
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        raise Refused("it works along the token axis", "feature axes only")
    return sorted(_axis(dim, rank) for dim in dims)


def _rank(node: fx.Node, index: int | None = None) -> int:
    value = node.meta["val"] if index is None else node.meta["val"][index]
    return int(value.dim())


def _operands(low: Lowering, node: fx.Node, values: list[Any], kind: str) -> list[Any]:
    return [low.operand(value, kind, _rank(node)) for value in values]


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
    x = low.operand(a["self"], kind, _rank(node))
    for op, end in (("MAX", least), ("MIN", most)):
        if end is not None:
            x = low.elementwise(op, x, low.operand(end, kind, _rank(node)))
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
        scaled = low.operand(a["alpha"], kind, _rank(node))
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
    return low.select(low.operand(condition, "bool", _rank(node)), *_operands(low, node, [yes, no], kind))


# Along feature axes.

_REDUCE = {"sum": "SUM", "mean": "AVG", "prod": "PROD", "amax": "MAX", "amin": "MIN"}


@lowers(*(f"aten::{name}" for name in _REDUCE))
def reduce(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, kind = low.cast(low.tensor(a["self"]), low.kind(node)), op_name(node).removeprefix("aten::")
    axes = _axes(a.get("dim"), len(x.shape))
    return low.reduce(_REDUCE[kind], x, axes, keep=_rank(node) == len(x.shape))


@lowers("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax")
def softmax(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.wide(a["self"])
    layer = low.named(low.network.add_softmax(x), "softmax")
    layer.axes = 1 << _axis(a["dim"], len(x.shape))
    y = layer.get_output(0)
    return low.unary("LOG", y) if "log" in op_name(node) else y


@lowers("aten::cumsum")
def cumsum(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.cast(low.tensor(a["self"]), low.kind(node))
    axis = low.constant(np.array(_axis(a["dim"], len(x.shape)), np.int32), "axis")
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
    axis = _axis(a["dim"], len(x.shape))
    one = name in ("max", "min", "argmax", "argmin")
    count = 1 if one else a.get("k", x.shape[axis])
    largest = name.endswith("max") if one else a.get("largest", a.get("descending"))
    operation = low.trt.TopKOperation.MAX if largest else low.trt.TopKOperation.MIN
    layer = low.named(low.network.add_topk(x, operation, count, 1 << axis), "topk")
    found = [layer.get_output(0), layer.get_output(1)]
    alone = name.startswith("arg")
    if one:
        rank = _rank(node, None if alone else 0)
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


# Movement.


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
    x = low.operand(a["self"], kind, _rank(node))
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
    axis = _axis(a["dim"], len(x.shape))
    places = range(*slice(start, stop, step).indices(x.shape[axis]))
    return low.sliced(x, axis, places.start, len(places), step)


@lowers("aten::select")
def select(low: Lowering, node: fx.Node, a: Args) -> Any:
    x = low.tensor(a["self"])
    axis = _axis(a["dim"], len(x.shape))
    index = a["index"] % x.shape[axis]
    return low.shuffle(low.sliced(x, axis, index, 1), [-1, *low.shape(node)])


@lowers("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
def split(low: Lowering, node: fx.Node, a: Args) -> tuple[Any, ...]:
    x = low.tensor(a["self"])
    axis = _axis(a["dim"], len(x.shape))
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
    kind, axis = low.kind(node), _axis(a["dim"], _rank(node))
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
    low.named(layer, "gather").axis = _axis(a["dim"], len(x.shape))
    return layer.get_output(0)


@lowers("aten::index_select")
def index_select(low: Lowering, node: fx.Node, a: Args) -> Any:
    if not isinstance(low.result(a["index"]), Constant):
        raise Refused("its indices are computed from the tokens", "indices that are constants")
    x = low.tensor(a["self"])
    return low.gather(x, low.cast(low.tensor(a["index"]), "int32"), _axis(a["dim"], len(x.shape)))


@lowers("aten::scatter")
def scatter(low: Lowering, node: fx.Node, a: Args) -> Any:
    """A number (or values) put where the index points along an axis: compared with every place, as places are few."""
    if a.get("reduce") or "src" in a:
        raise Refused("it scatters tensors", "one number for all places")
    x, index = low.tensor(a["self"]), low.cast(low.tensor(a["index"]), "int32")
    rank = len(x.shape)
    if rank != 2 or _axis(a["dim"], rank) != 1:
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
    name, kind, rank = op_name(node), low.kind(node), _rank(node)
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
