"""What passes need to know about linears, dense or quantised: their parts, and how to rewrite their output rows.

The matrix parts of a linear are the weights whose first axis is the output: the matrix itself, or codes, scales and
offsets, and the bias (and the columns of outliers that are kept apart).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program
from enginewright.passes.weights import ConstantTensor, Weight, concatenated

__all__ = ["formats_of", "input_of", "is_linear", "join_rows", "parts_of", "rewrite_rows", "width_of"]

_DENSE = ("weight", "bias")
_SHARED = ("weight_format", "activation_format", "outlier_columns", "activation_scale")
_QUANTISED = ("codes", "scales", "offsets", "bias", "outlier_weight")


def is_linear(node: Any) -> bool:
    return is_call(node, OPS["linear"], OPS["quantised_linear"])


def input_of(linear: fx.Node) -> fx.Node:
    return argument(linear, "x")


def width_of(linear: fx.Node) -> int:
    """Output features."""
    return linear.meta["val"].shape[-1]


def parts_of(linear: fx.Node) -> dict[str, fx.Node | None]:
    """Part -> its `get_attr` node, or None where the linear has no such part."""
    names = _DENSE if is_call(linear, OPS["linear"]) else _QUANTISED
    return {name: argument(linear, name) for name in names}


def formats_of(linear: fx.Node) -> tuple[Any, ...]:
    """What must agree for two linears to become one: op, formats, and which parts but the bias there are."""
    dense = is_call(linear, OPS["linear"])
    formats = () if dense else tuple(argument(linear, name) for name in _SHARED)
    present = tuple(name for name, part in parts_of(linear).items() if part is not None and name != "bias")
    dtypes = tuple(
        p.meta["val"].dtype for name, p in parts_of(linear).items() if p is not None and name != "bias"
    )
    return (linear.target, *formats, present, dtypes)


def rewrite_rows(
    program: Program, linear: fx.Node, change: Callable[[Weight], Weight], label: str
) -> fx.Node:
    """A new linear in the place of `linear` whose parts are `change(part)` along the output axis; users are moved."""
    parts: dict[str, fx.Node | None] = {}
    for name, node in parts_of(linear).items():
        parts[name] = None
        if node is not None:
            weight = change(program.weight_of(node))
            parts[name] = program.add_weight(f"{node.target}.{label}", weight)
    new = _call(program, linear, parts, linear, linear.meta.get("module", ""))
    linear.replace_all_uses_with(new)
    return new


def join_rows(program: Program, linears: Sequence[fx.Node], before: fx.Node) -> fx.Node:
    """One linear whose output is those of `linears` (same input, same `formats_of`) side by side."""
    parts: dict[str, fx.Node | None] = {}
    for name in parts_of(linears[0]):
        nodes = [parts_of(linear)[name] for linear in linears]
        parts[name] = None
        if any(node is not None for node in nodes):
            weights = [
                program.weight_of(node) if node is not None else _no_bias(width_of(linear))
                for linear, node in zip(linears, nodes, strict=True)
            ]
            joined = _joined_part(linears, name)
            parts[name] = program.add_weight(joined, concatenated(weights, 0, joined))
    module = joined_name([linear.meta.get("module", "") for linear in linears])
    return _call(program, linears[0], parts, before, module)


def _joined_part(linears: Sequence[fx.Node], name: str) -> str:
    """The target of a joined part; a bias is named after the matrices, since some linears may have none."""
    of = "weight" if is_call(linears[0], OPS["linear"]) else "codes"
    targets = [str(parts_of(linear)[of if name == "bias" else name].target) for linear in linears]  # type: ignore[union-attr]
    joined = joined_name(targets)
    return f"{joined.rpartition('.')[0]}.bias".lstrip(".") if name == "bias" else joined


def _no_bias(width: int) -> Weight:
    return ConstantTensor("zeros", torch.zeros(width))


def _call(
    program: Program, like: fx.Node, parts: dict[str, fx.Node | None], before: fx.Node, module: str
) -> fx.Node:
    assert callable(like.target)
    named = {"x": input_of(like), **parts}
    if not is_call(like, OPS["linear"]):
        named |= {name: argument(like, name) for name in _SHARED}
    args = [named[item.name] for item in like.target._schema.arguments]  # type: ignore[attr-defined]
    return program.call(like.target, args, before=before, module=module)


def joined_name(names: Sequence[str]) -> str:
    """`a.(q+k).weight` of `a.q.weight` and `a.k.weight`: common parts once, the others joined."""
    split = [name.split(".") for name in dict.fromkeys(names)]
    if len(split) == 1:
        return names[0]
    shortest = min(map(len, split))
    head = next((i for i in range(shortest) if len({tuple(s[: i + 1]) for s in split}) > 1), shortest)
    tail = next(
        (i for i in range(shortest - head) if len({tuple(s[len(s) - i - 1 :]) for s in split}) > 1),
        shortest - head,
    )
    middles = ["_".join(s[head : len(s) - tail]) for s in split]
    return ".".join(
        [*split[0][:head], "+".join(middles), *(split[0][len(split[0]) - tail :] if tail else [])]
    )
