"""In-place operations of a trace, made functional.

Rules, for an operation that writes into its first argument X:
1. X owns its memory: the functional form takes its place, and whatever reads X later reads the result.
2. X is a slice of B, which owns its memory: the result is scattered into B, and whatever reads B later reads that.
3. Anything else, or another view of the same memory that is read later, is refused: the result would depend on aliasing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from enginewright.recipes.errors import CaptureError

__all__ = ["make_functional"]

aten = torch.ops.aten


def make_functional(graph: fx.Graph) -> int:
    """Rewrite the in-place calls of an exported graph; returns how many there were."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and _writes(node.target):
            _rewrite(graph, node, order)
            count += 1
    return count


def _writes(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.arguments:
        return False
    alias = target._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


#: Ops whose result may share memory although their schema does not say so.
_MAY_SHARE = frozenset(
    f"aten::{name}" for name in "reshape contiguous to chunk split split_with_sizes unbind".split()
)


def _is_view(node: fx.Node) -> bool:
    """Whether a call's result shares its first argument's memory, or may."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    shared = bool(schema.returns and schema.returns[0].alias_info is not None)
    return (shared and not _writes(node.target)) or schema.name in _MAY_SHARE


def _memory(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _rewrite(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    written: fx.Node = node.args[0]  # type: ignore[assignment]
    owner = _memory(written)
    through = written is not owner
    plain = not through or (written.target is aten.slice.Tensor and written.args[0] is owner)
    stale = [
        view
        for view in order
        if view not in (written, owner) and _is_view(view) and _memory(view) is owner
        and order[view] < order[node] and any(order.get(user, 0) > order[node] for user in view.users)
    ]  # fmt: skip
    if not plain or stale or owner.op != "call_function":
        raise CaptureError(
            "a tensor is written in place while other views of it are in use",
            found=f"{node.target} on {written.name}",
        )
    with graph.inserting_before(node):
        if node.target is aten.copy_.default:
            result = _copied(graph, node)
        else:
            overload: Any = node.target
            packet = getattr(aten, overload._schema.name.removeprefix("aten::").removesuffix("_"))
            target = getattr(packet, overload._overloadname)
            result = graph.call_function(target, node.args, node.kwargs)
            result.meta = dict(node.meta)
        order[result] = order[node]
        if through:
            scattered = graph.call_function(aten.slice_scatter.default, (owner, result, *written.args[1:]))
            scattered.meta = {**node.meta, "val": owner.meta["val"]}
            order[scattered] = order[node]
            owner.replace_all_uses_with(scattered, lambda user: order[user] > order[node])
    written.replace_all_uses_with(result, lambda user: order[user] > order[node])
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    del order[node]


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What `copy_` leaves behind: its source, in the shape of its target."""
    target, source = node.args[0], node.args[1]
    shape, own = target.meta["val"].shape, source.meta["val"].shape  # type: ignore[union-attr]
    if list(shape) == list(own):
        return source  # type: ignore[return-value]
    result = graph.call_function(aten.expand_as.default, (source, target))
    result.meta = dict(node.meta)
    return result
