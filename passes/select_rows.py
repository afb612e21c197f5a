"""select_rows — after the last attention only the rows whose logits are wanted are computed.

Rules
1. The nodes that depend on the last attention's output need no other token's row. Each value with a row a token that
   enters them from outside (the attention's output, the residual stream …) is cut once by ew::select_rows(value,
   logit_rows); they themselves run on R rows, as the last MLP, the final norm and the head do.
2. In a graph without attention, the output alone is cut.

`logit_rows` [R] is a new input. The logits become [R, vocab].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS
from enginewright.passes.inputs import add_input, symbol
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import is_call
from enginewright.passes.program import Program


class SelectRows:
    name = "select_rows"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        rows = add_input(program, "logit_rows", [symbol(program, 503)], torch.int32)
        tail = _tail(program.graph)
        cut: dict[fx.Node, fx.Node] = {}
        for node in tail:
            for source in node.all_input_nodes:
                if source not in tail and source not in cut and _has_rows(source, program):
                    cut[source] = _selected(program, source, rows, next(iter(tail)))
            for source, chosen in cut.items():
                node.replace_input_with(source, chosen)
        for node in tail:
            if node.op == "call_function":
                program.infer(node)
        return PassResult(len(cut))


def _selected(program: Program, source: fx.Node, rows: fx.Node, first: fx.Node) -> fx.Node:
    """The chosen rows of a value; those of an input are chosen just before `first`, to keep the inputs together."""
    before, after = (first, None) if source.op == "placeholder" else (None, source)
    module = source.meta.get("module")
    return program.call(OPS["select_rows"], (source, rows), before=before, after=after, module=module)


def _tail(graph: fx.Graph) -> dict[fx.Node, None]:
    """Every node that depends on the last attention, in graph order; only the output where there is none."""
    attentions = [node for node in graph.nodes if is_call(node, OPS["attention"], OPS["paged_attention"])]
    if not attentions:
        return {graph.output_node(): None}
    tail: dict[fx.Node, None] = {}
    after = False
    for node in graph.nodes:
        if after and any(source is attentions[-1] or source in tail for source in node.all_input_nodes):
            tail[node] = None
        after = after or node is attentions[-1]
    return tail


def _has_rows(node: fx.Node, program: Program) -> bool:
    """Whether the node's value has a row a token."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dim():
        return False
    size = value.shape[0]
    return isinstance(size, torch.SymInt) and size.node.expr == program.tokens.node.expr
