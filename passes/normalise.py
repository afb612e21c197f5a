"""Normalise: no batch axis, tokens first, every activation [T, *features] with sizes that are numbers.

Rules:
1. The token axis of a captured value is the axis whose size is T; it moves to the front. The batch axis of size 1 goes.
2. Views, transposes, expansions, slices and joins become reshape, permute, expand, slice and cat inside a token's row.
   One that would mix tokens is refused, as is any other op that looks along the token axis.
3. A product with a weight (linear, matmul, addmm: also the transposed weights of GPT-2) becomes `ew.linear`.
   Layout operations on weights fold into lazy weight expressions; arithmetic on weights stays in the graph.
4. A value that depends on positions alone is evaluated for every position up to the maximum context:
   `ew.position_table`; a constant where all positions agree, a number where it is a single one.
5. A lookup by token id, or by position plus a constant, becomes `ew.embedding`; a lookup by a constant, that row.
6. A product of complex numbers (DeepSeek-V2's rotation) is spelt out in real ones.
7. `layer_norm` over the last axis becomes `ew.layer_norm`. Casts between floating types, dropout and copies vanish.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from enginewright.passes.manager import PassResult

# These register their rules:
from enginewright.passes.normalising import arithmetic, indexing, layout  # noqa: F401
from enginewright.passes.normalising.rewriter import RULES, UNKNOWN, Rewriter, Value, arguments, op_name
from enginewright.passes.program import Program
from enginewright.recipes.errors import CaptureError

__all__ = ["Normalise"]


class Normalise:
    """The pass. It replaces the program's graph; `matches` counts the captured nodes it rewrote.

    With a list `refused`, every node that cannot be rewritten is put there, with its module, and the others are still looked
    at; if there is any, the program stays as it was.
    """

    name = "normalise"

    def __init__(self, refused: list[tuple[str, CaptureError]] | None = None) -> None:
        self.options: Mapping[str, Any] = {}
        self.refused = refused

    def run(self, program: Program) -> PassResult:
        """Raises CaptureError, naming the module, at the first node that does not stay within a token."""
        rewriter = Rewriter(program)
        count = 0
        for node in program.graph.nodes:
            if node.op == "placeholder":
                if node.target == "tokens":
                    rewriter.values[node] = Value(rewriter.inputs["tokens"], 2, 1, 0)
            elif node.op == "get_attr":
                if node not in rewriter.positional:
                    rewriter.values[node] = program.weight_of(node)
            elif node.op == "output":
                if not self.refused:
                    rewriter.new.graph.output_node().args = (rewriter.value(node.args[0]).node,)
            elif node not in rewriter.positional:
                rewriter.where, rewriter.module = node, node.meta.get("module", "")
                rewriter.values[node] = self._rewritten_or_noted(rewriter, node)
                count += 1
        if self.refused:
            return PassResult(0)
        rewriter.new.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        rewriter.new.recompile()
        program.replace(rewriter.new)
        return PassResult(count)

    def _rewritten_or_noted(self, rewriter: Rewriter, node: fx.Node) -> Any:
        if self.refused is None:
            return _rewritten(rewriter, node)
        if any(rewriter.values.get(source) is UNKNOWN for source in node.all_input_nodes):
            return UNKNOWN
        try:
            return _rewritten(rewriter, node)
        except CaptureError as error:
            self.refused.append((rewriter.module, error))
            return rewriter.stand_in(node)


def _rewritten(rewriter: Rewriter, node: fx.Node) -> Any:
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return rewriter.values[source][index]
    rule = RULES.get(op_name(node.target))
    if rule is None:
        rewriter.fail(f"{op_name(node.target)} is an operation that is not known to stay within one token")
    return rule(rewriter, node, arguments(node))
