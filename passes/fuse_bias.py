"""fuse_bias — a bias that is added after a linear joins it.

Rules
1. ew::linear(x, W, None) + b, b [N] a weight, the linear having no other use  →  ew::linear(x, W, b)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from enginewright.passes.dialect import OPS
from enginewright.passes.linears import width_of
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import Op, Var, find, is_weight_vector, only_user
from enginewright.passes.program import Program

_SUM = Op(torch.ops.aten.add.Tensor, Op(OPS["linear"], Var("x"), Var("weight"), None), Var("bias"))


class FuseBias:
    name = "fuse_bias"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            found = find(node, _SUM)
            if found is None or not is_weight_vector(found["bias"], width_of(node)):
                continue
            linear = next(n for n in node.all_input_nodes if n is not found["bias"])
            if only_user(linear) is None:
                continue
            args, module = (found["x"], found["weight"], found["bias"]), linear.meta.get("module")
            node.replace_all_uses_with(program.call(OPS["linear"], args, before=node, module=module))
            matches += 1
        return PassResult(matches)
