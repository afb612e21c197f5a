"""slice_before_rope — heads that nobody reads are dropped before they are rotated.

Rules
1. ew::rope(x, …)[:, a:b:s]  →  ew::rope(x[:, a:b:s], …), where nothing else reads the rope's result. Every head is rotated
   alike. So keys that a model repeats for several query heads, and of which capture takes one each, are rotated once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from enginewright.passes.dialect import OPS
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call, only_user
from enginewright.passes.program import Program

aten = torch.ops.aten


class SliceBeforeRope:
    name = "slice_before_rope"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        matches = 0
        for node in list(program.graph.nodes):
            if not is_call(node, aten.slice.Tensor) or argument(node, "dim") != 1:
                continue
            rope = argument(node, "self")
            if not is_call(rope, OPS["rope"]) or only_user(rope) is None:
                continue
            part = program.call(
                aten.slice.Tensor, (argument(rope, "x"), *node.args[1:]), node.kwargs, before=node
            )
            new = program.call(OPS["rope"], (part, *rope.args[1:]), rope.kwargs, before=node)
            node.replace_all_uses_with(new)
            matches += 1
        return PassResult(matches)
