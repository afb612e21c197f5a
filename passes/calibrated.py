"""Rounding with calibration: one walk over the samples rounds each matrix when its exact inputs are there.

1. Upstream is quantised already, roundings of activations included: each matrix sees what it will see in the engine.
2. `gptq`: gptq.py, from the Gram matrix of the inputs; the linears of one input share it. A matrix whose Gram matrix has no
   factor falls back to rounding to nearest, and is named.
3. `range: output`: ranges.py, from the same Gram matrix.
4. Outliers: features whose largest magnitude is a multiple of the median feature's keep their columns in bf16. Source:
   Dettmers et al. 2022, "LLM.int8()", §3.2. There a feature is one from magnitude 6 on, and found in each batch of inputs. Here
   calibration finds them once, so that a token's result does not depend on the tokens beside it; and what counts is
   how far a feature stands above the others, for that is what one scale a token costs them, whatever the model's magnitudes.
5. `int8_static`: the scale is the calibration's largest magnitude / 127.
6. Experts (`ew::moe`): each with the tokens that were routed to it, its second matrix with what its rounded first one makes
   of them. One with fewer than 32 tokens is rounded to nearest, and counted.

Results are kept in files until the engine is written: memory holds one matrix at a time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from enginewright.passes.assignment import Assigned, Matrix, kind_of
from enginewright.passes.calibration import Samples
from enginewright.passes.dialect.moe import gate_and_up
from enginewright.passes.dialect.numerics import simulate_activation
from enginewright.passes.gptq import GptqOptions, Inverse, NotPositiveError, invert, round_gptq
from enginewright.passes.gram import add, mirrored
from enginewright.passes.matching import argument
from enginewright.passes.program import Program, executed
from enginewright.passes.quant_formats import (
    QuantisedWeight,
    QuantTensor,
    dequantise,
    from_grid,
    grouped,
    quantise_rtn,
)
from enginewright.passes.ranges import choose_grid
from enginewright.passes.walk import Walk, save_aside
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import WeightFormat, parse_weight
from enginewright.recipes.recipe import Recipe

if TYPE_CHECKING:
    from enginewright.passes.quantise import Rewriting

__all__ = ["CalibratedRounding", "Inputs"]

LEAST_EXPERT_TOKENS = 32


@dataclass
class Inputs:
    """What calibration knows of a matrix's inputs X [tokens, K]: XᵀX [K, K], and each feature's largest magnitude [K]."""

    gram: Tensor | None
    largest: Tensor
    tokens: int
    inverse: Inverse | None = None
    failure: str = ""

    @classmethod
    def of(cls, batches: Iterator[Tensor], with_gram: bool) -> Inputs:
        gram: Tensor | None = None
        largest: Tensor | None = None
        tokens = 0
        for x in batches:
            rows = x.reshape(-1, x.shape[-1]).float()
            top = rows.abs().amax(0) if len(rows) else torch.zeros(rows.shape[-1])
            largest = top if largest is None else torch.maximum(largest, top)
            tokens += len(rows)
            if with_gram:
                gram = add(gram, rows)
        assert largest is not None
        return cls(None if gram is None else mirrored(gram), largest, tokens)

    def without(self, columns: Tensor) -> Inputs:
        """The inputs with some features set to zero."""
        gone = columns.long()
        gram = self.gram
        if gram is not None:
            gram = gram.index_fill(0, gone, 0.0).index_fill_(1, gone, 0.0)
        return Inputs(gram, self.largest.index_fill(0, gone, 0.0), self.tokens)

    def invert(self, options: GptqOptions) -> Inverse | None:
        """The factor that GPTQ needs, computed once; None, with `failure`, where there is none."""
        if self.inverse is None and not self.failure and self.gram is not None:
            try:
                self.inverse = invert(self.gram, self.tokens, options)
            except NotPositiveError as error:
                self.failure = str(error)
        return self.inverse


@dataclass
class CalibratedRounding:
    """The walk that rounds a program's matrices. `record`, after `run`, is for the manifest."""

    program: Program
    recipe: Recipe
    samples: Samples
    assigned: Assigned
    rewriting: Rewriting
    report: Callable[[str], None] = lambda text: None
    record: dict[str, Any] = field(default_factory=dict)

    def run(self) -> list[str]:
        """Rewrite every linear and every moe that a recipe rounds with calibration; returns notes."""
        self._options = GptqOptions.of(self.recipe.quantise)
        self._spool = Spool()
        self._shared: tuple[fx.Node, Inputs] | None = None
        self._columns: dict[fx.Node, fx.Node] = {}
        self._errors: dict[str, float] = {}
        self._fallbacks: dict[str, str] = {}
        self._few: dict[str, int] = {}
        self._apart = 0
        targets = {node: matrix for node, matrix in self.assigned.items() if self._wanted(matrix)}
        walk = Walk(
            self.program,
            self.samples.sequences,
            memory_bytes=int(self.recipe.calibration.memory * 2**30),
            quick=True,
            report=self.report,
        )
        walk.run({node: self._visit(walk, matrix) for node, matrix in targets.items()}, own_inputs=True)
        self.record = {
            "rounded": len(targets),
            "fallbacks": self._fallbacks,
            "experts_with_few_tokens": self._few,
            "relative_errors": {name: float(f"{error:.6g}") for name, error in self._errors.items()},
        }
        if self._apart:
            self.record["outlier_columns"] = self._apart
        notes = []
        if walk.spilled_bytes:
            notes.append(
                f"{walk.spilled_bytes / 1e6:,.0f} MB of activations waited on disk (calibration.memory)"
            )
        notes += [f"{name} is rounded to nearest: {why}" for name, why in self._fallbacks.items()]
        experts = sum(
            kind_of(matrix.node) == "moe" and matrix.is_integer for matrix in self.assigned.values()
        )
        if experts and self.recipe.outliers.threshold is not None:
            notes.append(f"outliers.threshold: the experts of {experts} layers keep no columns apart")
        if self._few:
            notes.append(
                f"{len(self._few)} experts saw fewer than {LEAST_EXPERT_TOKENS} calibration tokens and are rounded to nearest"
            )
        return notes

    def _wanted(self, matrix: Matrix) -> bool:
        """Whether calibration decides something about a matrix: linears and experts; embeddings, heads and routers are not."""
        alone = matrix.activation == "int8_static" or self._may_have_outliers(matrix)
        return matrix.role == "linear" and matrix.is_integer and (self._needs_gram or alone)

    def _may_have_outliers(self, matrix: Matrix) -> bool:
        """Whether columns of a matrix may stay apart: of linears in the format that the kernel adds them to."""
        wanted = self.recipe.outliers.threshold is not None and matrix.weight == "int8"
        return wanted and kind_of(matrix.node) == "linear"

    def _visit(self, walk: Walk, matrix: Matrix) -> Callable[[fx.Node], fx.Node]:
        def visit(node: fx.Node) -> fx.Node:
            try:
                return self._moe(walk, matrix) if kind_of(node) == "moe" else self._linear(walk, matrix)
            except ValueError as error:
                raise InputError(
                    f"the matrix of {matrix.name} {error}", action="keep it in f32 or bf16 with an override"
                ) from error

        return visit

    def _linear(self, walk: Walk, matrix: Matrix) -> fx.Node:
        x, weight_node = argument(matrix.node, "x"), argument(matrix.node, "weight")
        if self._shared is None or self._shared[0] is not x:
            self._shared = (x, Inputs.of(walk.inputs(x), self._needs_gram))
        inputs = self._shared[1]
        source = self.program.weight_of(weight_node)
        columns, apart = self._outliers(matrix, inputs), None
        if columns is not None:
            apart = self._apart_nodes(x, columns, weight_node, Selected(source, columns))
            source, inputs = Zeroed(source, columns), inputs.without(columns)
        scale = self._static_scale(inputs) if matrix.activation == "int8_static" else None
        stored: dict[fx.Node, QuantisedWeight] = {}
        if self._needs_gram:
            weight = executed(source)
            result = self._round(weight, inputs, parse_weight(matrix.weight), matrix.name)
            self._note_error(matrix.name, weight, result, inputs)
            stored[weight_node] = Rounded(source, matrix.weight, self._spool.put(result))
        elif columns is not None:
            quantise = self.recipe.quantise
            stored[weight_node] = QuantisedWeight(source, matrix.weight, quantise.range, quantise.symmetric)
        return self.rewriting.replace(matrix, stored, apart, scale)

    def _static_scale(self, inputs: Inputs) -> float:
        largest = float(inputs.largest.max())
        if not 0 < largest < float("inf"):
            found = "zero" if largest == 0 else "not finite"
            raise ValueError(
                f"cannot have a static activation scale: its inputs in the calibration samples are {found}"
            )
        return largest / 127

    @property
    def _needs_gram(self) -> bool:
        return self.recipe.quantise.method == "gptq" or self.recipe.quantise.range == "output"

    def _round(self, weight: Tensor, inputs: Inputs, form: WeightFormat, name: str) -> QuantTensor:
        """One matrix [N, K] by the recipe's method."""
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("holds values that are not finite")
        symmetric, search = self.recipe.quantise.symmetric, self.recipe.quantise.range
        if inputs.gram is not None and bool(torch.isfinite(inputs.gram).all()):
            inverse = inputs.invert(self._options) if self.recipe.quantise.method == "gptq" else None
            if inverse is not None:
                return round_gptq(weight, inputs.gram, inverse, form, self._options)
            if self.recipe.quantise.method == "rtn":
                grid = choose_grid(weight, form, search, symmetric=symmetric, gram=inputs.gram)
                x, valid = grouped(weight, form)
                return from_grid(grid, torch.where(valid, grid.codes(x), 0.0), weight.shape[-1])
        self._fallbacks[name] = inputs.failure or "its calibration inputs are not finite"
        return quantise_rtn(weight, form.name, "minmax" if search == "minmax" else "mse", symmetric)

    def _note_error(self, name: str, weight: Tensor, result: QuantTensor, inputs: Inputs) -> None:
        """The rounded matrix's output error on the calibration's inputs, as a share of its output."""
        if inputs.gram is None:
            return
        delta = dequantise(result) - weight
        wrong = float(((delta @ inputs.gram) * delta).sum())
        right = float(((weight @ inputs.gram) * weight).sum())
        if math.isfinite(wrong) and math.isfinite(right):
            self._errors[name] = (max(wrong, 0.0) / right) ** 0.5 if right > 0 else 0.0

    # Outliers.

    def _outliers(self, matrix: Matrix, inputs: Inputs) -> Tensor | None:
        """Ascending columns [C] that stay apart, or None."""
        threshold = self.recipe.outliers.threshold
        if threshold is None or not self._may_have_outliers(matrix):
            return None
        most = int(len(inputs.largest) * self.recipe.outliers.most)
        found = torch.argsort(inputs.largest, descending=True, stable=True)[:most]
        least = threshold * float(inputs.largest.median())
        found = found[(inputs.largest[found] >= least) & (inputs.largest[found] > 0)]
        return found.sort().values.to(torch.int32) if len(found) else None

    def _apart_nodes(self, x: fx.Node, columns: Tensor, weight_node: fx.Node, kept: Weight) -> Any:
        from enginewright.passes.quantise import Outliers

        if x not in self._columns:
            name = f"outlier_columns_{len(self._columns)}"
            self._columns[x] = self.program.add_weight(name, ConstantTensor(name, columns))
            self._apart += len(columns)
        return Outliers(self._columns[x], self.program.add_weight(f"{weight_node.target}.outliers", kept))

    # Experts.

    def _moe(self, walk: Walk, matrix: Matrix) -> fx.Node:
        node = matrix.node
        gate_node, down_node = argument(node, "gate_up"), argument(node, "down")
        gates, downs = self.program.weight_of(gate_node), self.program.weight_of(down_node)
        gate_bias = argument(node, "gate_up_bias")
        bias = None if gate_bias is None else executed(self.program.weight_of(gate_bias))
        form = parse_weight(matrix.weight)
        first, second = [], []
        for expert in range(gates.shape[0]):
            name = f"{matrix.name}.experts.{expert}"
            rows = list(self._routed(walk, node, expert))
            inputs = Inputs.of(iter(rows), self._needs_gram)
            few = inputs.tokens < LEAST_EXPERT_TOKENS
            if few:
                self._few[name] = inputs.tokens
            weight = gates.load_rows(expert, expert + 1)[0].float()
            result = (
                self._nearest(weight, form) if few else self._round(weight, inputs, form, f"{name}.gate_up")
            )
            first.append(self._spool.put(result))
            dense = dequantise(result)
            hidden = [
                gate_and_up(
                    torch.nn.functional.linear(
                        simulate_activation(x, matrix.activation),
                        dense,
                        None if bias is None else bias[expert],
                    ),
                    argument(node, "activation"),
                    argument(node, "alpha"),
                    argument(node, "limit"),
                )
                for x in rows
            ]
            weight = downs.load_rows(expert, expert + 1)[0].float()
            if few:
                result = self._nearest(weight, form)
            else:
                result = self._round(weight, Inputs.of(iter(hidden), self._needs_gram), form, f"{name}.down")
            second.append(self._spool.put(result))
        rounded: dict[fx.Node, QuantisedWeight] = {
            gate_node: Rounded(gates, matrix.weight, *first, stacked=True),
            down_node: Rounded(downs, matrix.weight, *second, stacked=True),
        }
        return self.rewriting.replace(matrix, rounded)

    def _nearest(self, weight: Tensor, form: WeightFormat) -> QuantTensor:
        search = "minmax" if self.recipe.quantise.range == "minmax" else "mse"
        return quantise_rtn(weight, form.name, search, self.recipe.quantise.symmetric)

    def _routed(self, walk: Walk, node: fx.Node, expert: int) -> Iterator[Tensor]:
        """The inputs of one expert, batch by batch."""
        for batch in range(len(walk.batches)):
            x = walk.value(argument(node, "x"), batch)
            chosen = walk.value(argument(node, "topk_index"), batch)
            yield x[(chosen == expert).any(-1)]


class Spool:
    """Rounded matrices in files of a temporary folder, which lives as long as anything refers to it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="enginewright-rounded-", ignore_cleanup_errors=True)
        self._count = 0

    def put(self, result: QuantTensor) -> Callable[[], QuantTensor]:
        """Write a result; returns what reads it back."""
        path = Path(self._folder.name) / f"{self._count}.pt"
        self._count += 1
        save_aside((result.codes, result.scales, result.offsets), path)
        folder = self._folder

        def read() -> QuantTensor:
            assert folder is not None  # keeps the files
            codes, scales, offsets = torch.load(path, weights_only=True, mmap=True)
            return QuantTensor(result_format, codes, scales, offsets)

        result_format = result.format
        return read


class Rounded(QuantisedWeight):
    """A weight whose rounding has been done; with `stacked`, one result an expert."""

    def __init__(
        self, source: Weight, weight_format: str, *results: Callable[[], QuantTensor], stacked: bool = False
    ) -> None:
        super().__init__(source, weight_format)
        self._results, self._stacked = results, stacked

    def compute(self) -> QuantTensor:
        parts = [result() for result in self._results]
        if not self._stacked:
            return parts[0]

        def stack(tables: list[Tensor | None]) -> Tensor | None:
            held = [table for table in tables if table is not None]
            return torch.stack(held) if held else None

        codes = torch.stack([part.codes for part in parts])
        scales, offsets = stack([part.scales for part in parts]), stack([part.offsets for part in parts])
        return QuantTensor(self.format, codes, scales, offsets)


class _OfColumns(Weight):
    """An expression over some columns [C] of a matrix [N, K]."""

    def __init__(self, source: Weight, columns: Tensor, width: int, dtype: torch.dtype) -> None:
        self.source, self.columns = source, columns.long()
        self.name, self.shape, self.dtype = source.name, (source.shape[0], width), dtype

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.source,)

    def load(self) -> Tensor:
        return self.changed(self.source.load())

    def load_rows(self, start: int, stop: int) -> Tensor:
        return self.changed(self.source.load_rows(start, stop))

    def changed(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class Zeroed(_OfColumns):
    """A matrix with some columns set to zero, float32."""

    def __init__(self, source: Weight, columns: Tensor) -> None:
        super().__init__(source, columns, source.shape[1], torch.float32)

    def changed(self, rows: Tensor) -> Tensor:
        return rows.float().index_fill(1, self.columns, 0.0)


class Selected(_OfColumns):
    """Some columns of a matrix, bfloat16."""

    def __init__(self, source: Weight, columns: Tensor) -> None:
        super().__init__(source, columns, len(columns), torch.bfloat16)

    def changed(self, rows: Tensor) -> Tensor:
        return rows[:, self.columns].bfloat16()
