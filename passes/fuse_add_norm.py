"""fuse_add_norm — a residual addition and the norm that reads its sum become one node.

Rules (x and residual [T, D]; other readers of the sum keep reading it)
1. s = x + residual, ew::rms_norm(s, …)    →  (normed, s) = ew::add_rms_norm(x, residual, …)
2. s = x + residual, ew::layer_norm(s, …)  →  (normed, s) = ew::add_layer_norm(x, residual, …)

Where a sum feeds several norms, the first takes it and the others read s.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import Op, Var, find, is_call
from enginewright.passes.program import Program

aten = torch.ops.aten
_SUM = Op(aten.add.Tensor, Var("x"), Var("residual"))
_FUSED = {OPS["rms_norm"]: OPS["add_rms_norm"], OPS["layer_norm"]: OPS["add_layer_norm"]}


class FuseAddNorm:
    name = "fuse_add_norm"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            found = find(node, _SUM)
            norm = next(
                (user for user in node.users if is_call(user, *_FUSED) and user.args[0] is node), None
            )
            if found is None or norm is None or not _is_residual(node, found["x"], found["residual"]):
                continue
            args = (found["x"], found["residual"], *norm.args[1:])
            both = program.call(
                _FUSED[norm.target], args, norm.kwargs, before=node, module=norm.meta.get("module")
            )
            normed, total = (program.call(operator.getitem, (both, i), before=node) for i in (0, 1))
            norm.replace_all_uses_with(normed)
            node.replace_all_uses_with(total)
            program.graph.erase_node(norm)
            program.graph.erase_node(node)
            matches += 1
        return PassResult(matches)


def _is_residual(total: fx.Node, x: Any, residual: Any) -> bool:
    """Whether both terms are activations of the sum's own shape [T, D]."""
    shape = total.meta["val"].shape
    return len(shape) == 2 and all(
        isinstance(term, fx.Node) and term.op != "get_attr" and term.meta["val"].shape == shape
        for term in (x, residual)
    )
