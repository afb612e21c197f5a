"""merge_duplicates — what is computed twice is computed once.

Rules
1. Two nodes with the same target, arguments and named arguments  →  the first. Every op of a Program is a function of
   its arguments (attention writes pages only from stage PAGED on, which is later), so any op may be merged.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx

from enginewright.passes.manager import PassResult
from enginewright.passes.program import Program


class MergeDuplicates:
    name = "merge_duplicates"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        known: dict[Hashable, fx.Node] = {}
        matches = 0
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            key = (node.target, _key(node.args), _key(node.kwargs))
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                program.graph.erase_node(node)
                matches += 1
        return PassResult(matches)


def _key(value: Any) -> Hashable:
    """Equal for equal arguments; numbers of unlike types differ, since 1 and 1.0 may give unlike dtypes."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    if isinstance(value, fx.Node):
        return value
    return type(value), repr(value)
