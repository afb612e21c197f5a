"""fuse_gated — the product in the middle of a gated MLP becomes one `ew::gated_activation` node.

Rules (g and u are the two halves of the last axis of one tensor)
1. ew::activation(g, kind) · u with halves [g | u]  →  ew::gated_activation([g | u], kind)
2. The same with halves [u | g] of a linear that nothing else reads: its output rows change places first, then rule 1.

Gate and up projections that are two linears are joined by fuse_siblings, which runs before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.linears import is_linear, rewrite_rows
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import Op, Var, feature_range, find
from enginewright.passes.program import Program
from enginewright.passes.weights import Weight, concatenated, sliced

aten = torch.ops.aten
_PRODUCT = Op(aten.mul.Tensor, Op(OPS["activation"], Var("gate"), Var("kind")), Var("up"))


class FuseGated:
    name = "fuse_gated"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            found = find(node, _PRODUCT)
            whole = None if found is None else _gate_up(program, found["gate"], found["up"])
            if found is not None and whole is not None:
                new = program.call(OPS["gated_activation"], (whole, found["kind"]), before=node)
                node.replace_all_uses_with(new)
                matches += 1
        return PassResult(matches)


def _gate_up(program: Program, gate: Any, up: Any) -> fx.Node | None:
    """The tensor [gate | up] that the two are halves of, or None."""
    first, second = feature_range(gate), feature_range(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    whole = first[0]
    width = whole.meta["val"].shape[-1]
    half = width // 2
    if (first[1:], second[1:]) == ((0, half), (half, width)):
        return whole
    if (second[1:], first[1:]) == ((0, half), (half, width)) and is_linear(whole):
        if not set(whole.users) <= {gate, up} | _sources(gate, whole) | _sources(up, whole):
            return None

        def swap(weight: Weight) -> Weight:
            return concatenated([sliced(weight, 0, half, width), sliced(weight, 0, 0, half)])

        return rewrite_rows(program, whole, swap, "swapped")
    return None


def _sources(node: fx.Node, whole: fx.Node) -> set[fx.Node]:
    """The node between a half and the whole, where there is one (a `split` or `chunk`)."""
    return {n for n in node.all_input_nodes if n is not whole}
