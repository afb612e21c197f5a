"""fuse_siblings — linears that read the same input become one linear and slices of its output.

Rules
1. ew::activation(gate(x)) · up(x), gate and up linears  →  slices of one linear with rows [gate | up]
2. The linears that an attention's q, k and v come from (through ropes, norms, views: anything but another linear),
   where they read the same x  →  slices of one linear with rows [q | k | v]

Both hold for dense and for quantised linears, if the formats agree. Rounding works row by row, so joining
before or after quantisation gives the same codes. A linear without a bias takes zeros where another has one.
Not joined: a weight that has another use (a tied head would be stored twice).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.linears import formats_of, input_of, is_linear, join_rows, parts_of, width_of
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import Op, Var, find, is_call
from enginewright.passes.program import Program

aten = torch.ops.aten
_PRODUCT = Op(aten.mul.Tensor, Op(OPS["activation"], Var("gate"), Var("kind")), Var("up"))
_FURTHEST = 64  # nodes between a projection and its attention


class FuseSiblings:
    name = "fuse_siblings"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        joined: set[fx.Node] = set()
        matches, apart = 0, 0
        for linears in list(_families(program.graph)):
            if not joined.isdisjoint(linears) or len({input_of(linear) for linear in linears}) > 1:
                continue
            if not all(_is_free(linear) for linear in linears):
                continue
            if len({formats_of(linear) for linear in linears}) > 1:
                apart += 1
                continue
            _join(program, linears)
            joined.update(linears)
            matches += 1
        notes = (f"{apart} groups of linears stay apart because their formats differ",) if apart else ()
        return PassResult(matches, notes)


def _families(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Groups of at least two linears, in the order in which their rows will lie."""
    for node in graph.nodes:
        found = find(node, _PRODUCT)
        if found is not None and is_linear(found["gate"]) and is_linear(found["up"]):
            yield [found["gate"], found["up"]]
        elif is_call(node, OPS["attention"], OPS["paged_attention"]):
            sources = [_projection(argument) for argument in node.args[:3]]
            unique = list(dict.fromkeys(source for source in sources if source is not None))
            if None not in sources and len(unique) > 1:
                yield unique


def _projection(node: Any) -> fx.Node | None:
    """The one linear that a value is computed from token by token; None if there are several or others."""
    found: set[fx.Node] = set()
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current in seen or current.op == "get_attr" or is_call(current, OPS["position_table"]):
            continue
        seen.add(current)
        if is_linear(current):
            found.add(current)
        elif current.op != "call_function" or len(seen) > _FURTHEST or is_call(current, *_ENDS):
            return None
        else:
            todo.extend(current.all_input_nodes)
    return found.pop() if len(found) == 1 else None


_ENDS = tuple(OPS[name] for name in ("attention", "paged_attention", "moe", "quantised_moe", "embedding"))


def _is_free(linear: fx.Node) -> bool:
    """Whether the linear's weights are read by it alone."""
    return all(len(part.users) == 1 for part in parts_of(linear).values() if part is not None)


def _join(program: Program, linears: Sequence[fx.Node]) -> None:
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    first = min(linears, key=order.__getitem__)
    whole = join_rows(program, linears, first)
    start = 0
    for linear in linears:
        stop = start + width_of(linear)
        part = program.call(
            aten.slice.Tensor, (whole, -1, start, stop), before=first, module=linear.meta.get("module", "")
        )
        linear.replace_all_uses_with(part)
        start = stop
    for linear in linears:
        program.graph.erase_node(linear)
