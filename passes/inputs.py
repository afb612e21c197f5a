"""New inputs of a Program's graph, and symbols for the sizes that only a step knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from enginewright.passes.program import Program

__all__ = ["add_input", "symbol"]


def symbol(program: Program, hint: int) -> torch.SymInt:
    """A new unknown size; shape inference imagines it as `hint`, which should be used for nothing else."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size: Any = program.fake_mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]
    return size  # torch annotates sizes as int; here it is a symbol


def add_input(program: Program, name: str, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
    """A placeholder after the last one."""
    last = [node for node in program.graph.nodes if node.op == "placeholder"][-1]
    with program.graph.inserting_after(last):
        node = program.graph.placeholder(name)
    node.meta = {"val": program.fake(shape, dtype), "module": ""}
    return node
