"""order_rows — a linear whose output is only cut up and rearranged computes it in the order in which it is read.

Rules
1. The output of ew::linear goes through views, slices, selections and permutations alone to the values that others
   read, every feature reaches at most one of them, and one of them is not a contiguous range of the output  → the
   weight's rows change places so that each value is a contiguous slice, then a view. So query, key and value that a
   checkpoint stores head by head (GPT-NeoX, BLOOM, Falcon) become [q | k | v].

Rows are moved, never changed: the same numbers come out, and the linear of a weight with another use stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS
from enginewright.passes.linears import parts_of, rewrite_rows
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import MOVEMENTS, is_call
from enginewright.passes.program import Program
from enginewright.passes.weights import Weight, concatenated, sliced

aten = torch.ops.aten


class OrderRows:
    name = "order_rows"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for linear in list(program.graph.nodes):
            if is_call(linear, OPS["linear"]) and _is_free(linear):
                matches += _order(program, linear)
        return PassResult(matches)


def _is_free(linear: fx.Node) -> bool:
    return all(len(part.users) == 1 for part in parts_of(linear).values() if part is not None)


def _order(program: Program, linear: fx.Node) -> bool:
    """Rewrite one linear; False if the rule does not hold."""
    read = _values(linear)
    rows = (
        torch.cat([index.flatten() for index in read.values()]) if read else torch.empty(0, dtype=torch.int64)
    )
    if linear in read or rows.unique().numel() != rows.numel() or all(map(_is_range, read.values())):
        return False

    def move(weight: Weight) -> Weight:
        return concatenated([sliced(weight, 0, start, stop) for start, stop in _runs(rows.tolist())])

    new = rewrite_rows(program, linear, move, "ordered")
    start = 0
    for value, index in read.items():
        stop = start + index.numel()
        module = value.meta.get("module")
        part = program.call(aten.slice.Tensor, (new, -1, start, stop), before=value, module=module)
        shaped = program.call(aten.reshape.default, (part, [-1, *index.shape]), before=value, module=module)
        value.replace_all_uses_with(shaped)
        start = stop
    return True


def _values(linear: fx.Node) -> dict[fx.Node, Tensor]:
    """The values that others read, in graph order, each with the output rows that it is made of, [*features]."""
    sizes = linear.meta["val"].shape[1:]
    if sizes.numel() != sizes[-1]:  # one matrix applied to several vectors of a token
        return {}
    held = {linear: torch.arange(sizes[-1]).reshape(1, *sizes)}
    read: dict[fx.Node, Tensor] = {}
    todo = [linear]
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if is_call(user, *MOVEMENTS) and user not in held:
                args, kwargs = fx.map_arg((user.args, user.kwargs), held.get)
                held[user] = user.target(*args, **kwargs)  # type: ignore[operator]
                todo.append(user)
            elif not is_call(user, *MOVEMENTS):
                read[node] = held[node][0]
    order = {node: i for i, node in enumerate(linear.graph.nodes)}
    return {node: read[node] for node in sorted(read, key=order.__getitem__)}


def _is_range(index: Tensor) -> bool:
    flat = index.flatten()
    return torch.equal(flat, torch.arange(len(flat)) + flat[0])


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Contiguous stretches (start, stop) of a list of rows, in its order."""
    groups = itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])
    stretches = [[row for _, row in group] for _, group in groups]
    return [(stretch[0], stretch[-1] + 1) for stretch in stretches]
