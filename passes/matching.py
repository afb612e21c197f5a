"""A small pattern matcher over fx nodes.

A pattern is a tree: `Op` matches a call of one of several targets, `Var` binds whatever stands there (the same name
binds the same thing), `Num` binds a number, anything else must be equal. Multiplication and addition match both ways
round. `find(node, pattern)` returns the bindings or None; it never looks at names of modules or weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

__all__ = [
    "MOVEMENTS",
    "Num",
    "Op",
    "Var",
    "argument",
    "find",
    "is_call",
    "is_last_axis",
    "is_weight_vector",
    "only_user",
    "picked",
]

aten = torch.ops.aten
_COMMUTATIVE = frozenset((aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default))
Bindings = Mapping[str, Any]

#: Ops of one tensor that move or repeat features and compute nothing.
MOVEMENTS = (
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)


class Var:
    """Binds a node (or, inside argument lists, a constant) to a name."""

    def __init__(self, name: str):
        self.name = name


class Num(Var):
    """Binds a Python number."""


class Op:
    """A call of one of `targets` whose leading arguments match `args` and whose named ones match `kwargs`.

    Arguments the pattern leaves out may have any value only if they have their schema's default.
    """

    def __init__(self, targets: Any, *args: Any, **kwargs: Any):
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = args
        self.kwargs = kwargs


def find(node: Any, pattern: Any, bound: Bindings | None = None) -> dict[str, Any] | None:
    """The bindings that make `pattern` fit the tree rooted at `node`, or None."""
    found = next(_match(node, pattern, bound or {}), None)
    return None if found is None else dict(found)


def _match(value: Any, pattern: Any, bound: Bindings) -> Iterator[Bindings]:
    if isinstance(pattern, Var):
        if isinstance(pattern, Num) and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}
        elif _same(bound[pattern.name], value):
            yield bound
    elif isinstance(pattern, Op):
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in pattern.targets:
            yield from _match_call(value, pattern, bound)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from _match_all(list(value), list(pattern), bound)
    elif _same(value, pattern):
        yield bound


def _match_call(node: fx.Node, pattern: Op, bound: Bindings) -> Iterator[Bindings]:
    given = _filled(node)
    if len(pattern.args) > len(given) or not pattern.kwargs.keys() <= given.keys():
        return
    names = list(given)
    leading = [given[name] for name in names[: len(pattern.args)]]
    rest = [name for name in names[len(pattern.args) :] if name not in pattern.kwargs]
    if any(name in rest and not _is_default(node, name, given[name]) for name in rest):
        return
    named = [given[name] for name in pattern.kwargs]
    wanted = list(pattern.kwargs.values())
    orders = [leading]
    if node.target in _COMMUTATIVE and len(leading) == 2:
        orders.append(leading[::-1])
    for order in orders:
        yield from _match_all(order + named, [*pattern.args, *wanted], bound)


def _match_all(values: list[Any], patterns: list[Any], bound: Bindings) -> Iterator[Bindings]:
    if not values:
        yield bound
        return
    for once in _match(values[0], patterns[0], bound):
        yield from _match_all(values[1:], patterns[1:], once)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    return bool(a == b)


def _filled(node: fx.Node) -> dict[str, Any]:
    """Argument name -> value in schema order, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): value for i, value in enumerate(node.args)}
    values = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            values[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value if argument.has_default_value() else None
    return values


def _is_default(node: fx.Node, name: str, value: Any) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    for argument in node.target._schema.arguments:
        if argument.name == name:
            return _same(value, argument.default_value if argument.has_default_value() else None)
    return False


def argument(node: fx.Node, name: str) -> Any:
    """The argument of that name in the op's schema, its default where the call leaves it out."""
    return _filled(node)[name]


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads `node`, or None where there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def picked(node: Any) -> tuple[fx.Node, int] | None:
    """(source, index) of a `getitem` node, else None."""
    return (node.args[0], node.args[1]) if is_call(node, operator.getitem) else None


def is_last_axis(axes: Any, of: Any) -> bool:
    """Whether a list of axes names exactly the last axis of a node's value."""
    rank = of.meta["val"].dim()
    return isinstance(axes, (list, tuple)) and len(axes) == 1 and axes[0] % rank == rank - 1


def is_weight_vector(value: Any, width: int) -> bool:
    """Whether a node is a weight of shape [width]."""
    return (
        isinstance(value, fx.Node) and value.op == "get_attr" and tuple(value.meta["val"].shape) == (width,)
    )


def feature_range(node: Any) -> tuple[fx.Node, int, int] | None:
    """(source, start, stop) where the node is a contiguous range of the last axis of source: a slice, or a
    part of a split or chunk; None for anything else.
    """
    if is_call(node, torch.ops.aten.slice.Tensor):
        source, rank = argument(node, "self"), node.meta["val"].dim()
        if argument(node, "dim") % rank != rank - 1 or argument(node, "step") != 1:
            return None
        width = source.meta["val"].shape[-1]
        start, stop = argument(node, "start") or 0, argument(node, "end")
        start, stop, _ = slice(start, stop).indices(width)
        return source, start, stop
    part = picked(node)
    if part is None or not isinstance(part[0].target, torch._ops.OpOverload):
        return None
    split, index = part
    if split.target._schema.name not in ("aten::split", "aten::split_with_sizes", "aten::chunk"):  # type: ignore[union-attr]
        return None
    source = argument(split, "self")
    rank = source.meta["val"].dim()
    if argument(split, "dim") % rank != rank - 1:
        return None
    sizes = [value.shape[-1] for value in split.meta["val"]]
    return source, sum(sizes[:index]), sum(sizes[: index + 1])
