"""Small Programs built by hand, for tests of single passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import legality
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import Pass, PassResult, remove_dead_code
from enginewright.passes.program import ModelFacts, Program, Stage
from enginewright.passes.weights import ConstantTensor

__all__ = ["Build", "after", "count"]

aten = torch.ops.aten
TOKENS = [5, 3, 11, 0, 7, 7, 2]


class Build:
    """A graph in the making: `tokens` and `positions` are its inputs, `call` appends a node.

    Numbers that weights are made of come from a generator with a fixed seed.
    """

    def __init__(self, stage: Stage = Stage.NORMALISED, vocabulary: int = 13, context: int = 32):
        self.generator = torch.Generator().manual_seed(1)
        facts = ModelFacts("test", vocabulary, context, num_layers=1, hidden_size=0)
        graph = fx.Graph()
        inputs = [graph.placeholder(name) for name in ("tokens", "positions")]
        graph.output(inputs[0])
        self.program = Program(graph, stage, {}, facts)
        for node in inputs:
            node.meta["val"] = self.program.fake([self.program.tokens], torch.int32)
        self.tokens, self.positions = inputs

    def weight(self, name: str, *shape: int, value: Tensor | None = None) -> fx.Node:
        """A constant weight: the given value, or normal noise of the given shape."""
        if value is None:
            value = torch.randn(shape, generator=self.generator)
        return self.program.add_weight(name, ConstantTensor(name, value))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of an ATen op, or of a dialect op by its short name."""
        return self.program.call(OPS[op] if isinstance(op, str) else op, args, kwargs, module="layers.0")

    def hidden(self, width: int, name: str = "embed.weight") -> fx.Node:
        """Activations [T, width]: an embedding of the tokens."""
        rows = self.weight(name, self.program.facts.vocab_size, width)
        return self.call("embedding", self.tokens, rows)

    def linear(self, x: fx.Node, width: int, name: str, bias: bool = False) -> fx.Node:
        weight = self.weight(f"{name}.weight", width, x.meta["val"].shape[-1])
        return self.call("linear", x, weight, self.weight(f"{name}.bias", width) if bias else None)

    def view(self, x: fx.Node, *sizes: int) -> fx.Node:
        return self.call(aten.reshape.default, x, [-1, *sizes])

    def table(self, name: str, value: Tensor) -> fx.Node:
        return self.call("position_table", self.positions, self.weight(name, value=value))

    def finish(self, *results: fx.Node) -> Program:
        """The Program that returns the results, flattened and side by side."""
        flat = [self.view(r, r.meta["val"].shape[1:].numel()) for r in results]
        whole = flat[0] if len(flat) == 1 else self.call(aten.cat.default, flat, -1)
        output = self.program.graph.output_node()
        output.args = (whole,)
        self.program.recompile()
        legality.check(self.program)
        return self.program


def after(
    rewrite: Pass, program: Program, stage: Stage = Stage.FUSED, tolerance: float = 1e-5
) -> tuple[Program, PassResult]:
    """A copy that the pass has rewritten, checked to be legal and to give the same numbers."""
    changed = program.clone()
    result = rewrite.run(changed)
    changed.stage = stage
    remove_dead_code(changed)
    changed.recompile()
    legality.check(changed, [rewrite.name])
    want, got = program.run(TOKENS), changed.run(TOKENS)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    return changed, result


def count(program: Program, op: Any) -> int:
    """How many nodes call an op (of the dialect, if a short name)."""
    target = OPS[op] if isinstance(op, str) else op
    return sum(node.target is target for node in program.graph.nodes)
