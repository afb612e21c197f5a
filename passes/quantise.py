"""Give every matrix its recipe's format.

1. ew::linear(x, W, b)        -> ew::quantised_linear(x, codes, scales, offsets, b)
2. ew::moe(x, …, W1, …, W2, …) -> ew::quantised_moe(…): both matrices in one format
3. ew::embedding(tokens, W)   -> ew::quantised_embedding(tokens, codes, scales, offsets)
4. A matrix whose format is f32 stays as it is, and so does a table looked up by position.
5. A matrix used twice (a tied head) stays one stored tensor where both uses ask for one format; else it is stored once
   in each, and a note says so.
6. `keep` takes the integers that the checkpoint holds, where rows only moved, with the checkpoint's rounding of activations.
   What no kernel reads (K-quants and their kin) is rounded again to the nearest format, and a note says so.
7. Kept integers whose groups lie across the inputs (GPTQ's desc_act): x is reordered before the product, once for all
   linears that read it in one order.
8. Without calibration, rounding to nearest happens when a backend loads the parts: each row by itself. With it (GPTQ, ranges
   by output, outliers, static activations), a walk over the samples rounds one matrix after the other (calibrated.py).

All formats are chosen and checked (assignment.py) before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import dialect
from enginewright.passes.assignment import Matrix, assign, kind_of, notes_on
from enginewright.passes.calibrated import CalibratedRounding
from enginewright.passes.calibration import Samples, needed
from enginewright.passes.cost import Ledger, Stored, bits_a_weight
from enginewright.passes.kept import KeptWeight, input_order
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument
from enginewright.passes.mixed import choose_formats
from enginewright.passes.program import Program
from enginewright.passes.quant_formats import QuantisedWeight
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import Recipe

__all__ = ["Outliers", "Quantise", "Rewriting"]


class Quantise:
    """The pass `quantise`; its options are the resolved recipe.

    `samples` are needed where `recipe.passes_calibrate` names something. `ledger` receives what every matrix is stored as.
    """

    name = "quantise"

    def __init__(
        self,
        recipe: Recipe,
        samples: Samples | None = None,
        report: Callable[[str], None] = lambda text: None,
        ledger: Ledger | None = None,
    ) -> None:
        self.recipe, self.samples, self.report, self.ledger = recipe, samples, report, ledger
        self.options: Mapping[str, Any] = recipe.resolved()

    def run(self, program: Program) -> PassResult:
        """Rewrite every matrix in place. Raises InputError for patterns or formats that this model cannot have."""
        if self.samples is None and self.recipe.passes_calibrate:
            needed(self.samples, ", ".join(self.recipe.passes_calibrate))
        if self.ledger is not None:
            self.ledger.begin(program)
        assigned, notes = assign(program, self.recipe)
        record: dict[str, Any] = {}
        if self.samples is not None and self.recipe.mixed.wanted:
            assigned, choices = choose_formats(program, assigned, self.recipe, self.samples, self.report)
            record["mixed"] = [choice.to_dict() for choice in choices]
        notes = [*notes_on(program, assigned), *notes]
        rewriting = Rewriting(program, self.recipe.quantise.range, self.recipe.quantise.symmetric)
        if self.samples is not None:
            rounding = CalibratedRounding(
                program, self.recipe, self.samples, assigned, rewriting, self.report
            )
            notes += rounding.run()
            record |= rounding.record
        for node, matrix in assigned.items():
            if node.graph is program.graph and node not in rewriting.done:
                rewriting.replace(matrix)
        if self.ledger is not None:
            self.ledger.end(assigned, rewriting.stored)
        linears = [matrix.node for matrix in assigned.values() if matrix.role == "linear"]
        stored = [item for node in linears for item in rewriting.stored.get(node, {}).values()]
        record["bits_a_weight"] = round(bits_a_weight(stored), 4)  # of the linears that are not f32
        return PassResult(sum(matrix.weight != "f32" for matrix in assigned.values()), tuple(notes), record)


@dataclass(frozen=True)
class Outliers:
    """Input features that stay out of a linear's integers: `columns` [C] int32 ascending, `weight` [N, C] bf16."""

    columns: fx.Node
    weight: fx.Node


class Rewriting:
    """Replaces nodes that use a matrix by quantised ones; one stored tensor a (weight, format), however many use it."""

    def __init__(self, program: Program, search: str = "minmax", symmetric: bool = False) -> None:
        self.program, self.search, self.symmetric = program, search, symmetric
        self.known: dict[str, QuantisedWeight] = {}
        self.stored: dict[fx.Node, dict[fx.Node, Stored]] = {}  # matrix node -> its get_attr nodes
        self.done: set[fx.Node] = set()
        self.reordered: list[tuple[fx.Node, Tensor, fx.Node]] = []

    def replace(
        self,
        matrix: Matrix,
        rounded: Mapping[fx.Node, QuantisedWeight] | None = None,
        outliers: Outliers | None = None,
        activation_scale: float | None = None,
    ) -> fx.Node:
        """Replace a node, in place, and return the one that stands there now.

        `rounded` gives the result for the weight nodes that something else has rounded already; the others are to be
        rounded to nearest when they are loaded.
        """
        self.done.add(matrix.node)
        if matrix.weight == "f32":
            return matrix.node
        scale = matrix.activation_scale if activation_scale is None else activation_scale
        rewrite = {"linear": self._linear, "embedding": self._embedding, "moe": self._moe}[
            str(kind_of(matrix.node))
        ]
        return rewrite(matrix, rounded or {}, outliers, scale)

    def _parts(
        self, matrix: Matrix, node: fx.Node, rounded: Mapping[fx.Node, QuantisedWeight]
    ) -> list[fx.Node | None]:
        """get_attr nodes of codes, scales and offsets (None where the format has none)."""
        integers = matrix.kept and parse_weight(matrix.weight).has_scales
        name = f"{node.target}.{matrix.weight}{'.kept' if integers else ''}"
        if node in rounded:
            self.known.setdefault(name, rounded[node])
        if name not in self.known:
            source = self.program.weight_of(node)
            self.known[name] = (
                KeptWeight(source, matrix.weight)
                if integers
                else QuantisedWeight(
                    source, matrix.weight, "mse" if self.search == "output" else self.search, self.symmetric
                )
            )
        quantised = self.known[name]
        self.stored.setdefault(matrix.node, {})[node] = Stored(quantised)
        return [
            None if part is None else self.program.add_weight(f"{name}.{part.part}", part)
            for part in (quantised.codes, quantised.scales, quantised.offsets)
        ]

    def _swap(self, node: fx.Node, op: str, args: list[Any]) -> fx.Node:
        new = self.program.call(dialect.OPS[op], args, before=node, module=node.meta.get("module", ""))
        node.replace_all_uses_with(new)
        self.program.graph.erase_node(node)
        return new

    def _linear(
        self,
        matrix: Matrix,
        rounded: Mapping[fx.Node, QuantisedWeight],
        outliers: Outliers | None,
        scale: float,
    ) -> fx.Node:
        node = matrix.node
        weight, x = argument(node, "weight"), argument(node, "x")
        parts = self._parts(matrix, weight, rounded)
        order = input_order(self.program.weight_of(weight)) if matrix.kept else None
        x = x if order is None else self._reorder(x, order, node)
        apart: list[fx.Node | None] = [None, None]
        if outliers is not None:
            apart = [outliers.columns, outliers.weight]
            columns, values = (self.program.weight_of(n) for n in (outliers.columns, outliers.weight))
            stored = self.stored[node]
            stored[weight] = replace(stored[weight], columns=columns, apart=values)
        args = [x, *parts, argument(node, "bias"), matrix.weight, matrix.activation, *apart, scale]
        return self._swap(node, "quantised_linear", args)

    def _reorder(self, x: fx.Node, order: Tensor, before: fx.Node) -> fx.Node:
        """x with its features in another order; one node an order."""
        for source, known, node in self.reordered:
            if source is x and torch.equal(known, order):
                return node
        name = f"input_order_{len(self.reordered)}"
        index = self.program.add_weight(name, ConstantTensor(name, order))
        node = self.program.call(torch.ops.aten.index_select.default, (x, -1, index), before=before)
        self.reordered.append((x, order, node))
        return node

    def _embedding(
        self,
        matrix: Matrix,
        rounded: Mapping[fx.Node, QuantisedWeight],
        outliers: Outliers | None,
        scale: float,
    ) -> fx.Node:
        node = matrix.node
        parts = self._parts(matrix, argument(node, "weight"), rounded)
        args = [
            argument(node, "ids"),
            *parts,
            matrix.weight,
            argument(node, "offset"),
            argument(node, "scale"),
        ]
        return self._swap(node, "quantised_embedding", args)

    def _moe(
        self,
        matrix: Matrix,
        rounded: Mapping[fx.Node, QuantisedWeight],
        outliers: Outliers | None,
        scale: float,
    ) -> fx.Node:
        node = matrix.node
        args = [
            *(argument(node, name) for name in ("x", "topk_index", "topk_weight")),
            *self._parts(matrix, argument(node, "gate_up"), rounded),
            argument(node, "gate_up_bias"),
            *self._parts(matrix, argument(node, "down"), rounded),
            argument(node, "down_bias"),
            argument(node, "activation"),
            matrix.weight,
            matrix.activation,
            argument(node, "alpha"),
            argument(node, "limit"),
        ]
        return self._swap(node, "quantised_moe", args)
