"""What rounding costs, unit by unit: bits, bytes, relative output error and nats of the weights that go into the engine.

The pass `quantise` fills a `Ledger`: the Program as it stood just before (in logits the source model, smoothed or not), and for
every matrix what it is stored as. Each unit is then rounded alone in that Program, by `mixed.divergences`. Nothing is
rounded anew: GPTQ's codes, clipped ranges, a checkpoint's own integers and columns kept apart are measured as they are.

Activations are not rounded here: the figures are the weights' alone. Units' divergences need not add up to the engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.assignment import Assigned, matrices_of
from enginewright.passes.kept import KeptWeight, input_order
from enginewright.passes.mixed import Unit, divergences, units_of
from enginewright.passes.program import Program
from enginewright.passes.quant_formats import QuantisedWeight, dequantise
from enginewright.passes.weights import Weight

__all__ = ["Cost", "Ledger", "Stored", "bits_a_weight"]


@dataclass(frozen=True)
class Stored:
    """What one matrix became: its integers, and the columns [C] that are kept apart as `apart` [N, C]."""

    quantised: QuantisedWeight
    columns: Weight | None = None
    apart: Weight | None = None

    @property
    def weights(self) -> int:
        return self.quantised.source.numel

    @property
    def bits(self) -> float:
        """Stored bits, scales, offsets and columns kept apart counted."""
        codes = self.quantised.format.bits_per_weight(self.quantised.source.shape[-1]) * self.weights
        return codes + (16 * self.apart.numel if self.apart is not None else 0)

    def dense(self) -> Tensor:
        """The float32 matrix that the engine multiplies by, its inputs in the model's order."""
        weight = dequantise(self.quantised.quantise())
        order = input_order(self.quantised.source) if isinstance(self.quantised, KeptWeight) else None
        if order is not None:
            weight = torch.empty_like(weight).index_copy_(-1, order.long(), weight)
        if self.columns is not None and self.apart is not None:
            weight = weight.index_copy(-1, self.columns.load().long(), self.apart.load().float())
        return weight


def bits_a_weight(items: Iterable[Stored]) -> float:
    """Stored bits a weight of some matrices; 0 where there is none."""
    items = list(items)
    return sum(item.bits for item in items) / max(sum(item.weights for item in items), 1)


@dataclass(frozen=True)
class Cost:
    """One unit's cost. bits: stored bits a weight; bytes and weights are 0 where another unit stores the matrix (a tied head).

    relative_error: ‖(Ŵ - W) x‖ / ‖W x‖ over the tokens; of experts and tables, of what they give. kl: mean Kullback-Leibler
    divergence of the next-token distributions, nats, when the unit alone is rounded; both over `tokens` tokens.
    """

    unit: str
    format: str
    activation: str
    weights: int
    bits: float
    bytes: float
    relative_error: float
    kl: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Ledger:
    """What the pass `quantise` did, for those who ask afterwards. The pass calls `begin` and `end`.

    `program` is the Program as it stood just before, `matrices` its nodes that use a matrix, with their formats.
    """

    def __init__(self) -> None:
        self._program: Program | None = None
        self._twins: dict[fx.Node, fx.Node] = {}
        self.matrices: Assigned = {}
        self.stored: dict[tuple[fx.Node, fx.Node], Stored] = {}  # by matrix node and get_attr node

    def begin(self, program: Program) -> None:
        self._program = program.clone()
        self._twins = dict(zip(program.graph.nodes, self.program.graph.nodes, strict=True))

    def end(self, assigned: Assigned, stored: Mapping[fx.Node, Mapping[fx.Node, Stored]]) -> None:
        """`assigned` and `stored` have nodes of the program that was given to `begin`."""
        twins = self._twins
        self.matrices = {
            twins[node]: dataclasses.replace(matrix, node=twins[node]) for node, matrix in assigned.items()
        }
        self.stored = {
            (twins[node], twins[part]): item for node, parts in stored.items() for part, item in parts.items()
        }

    @property
    def program(self) -> Program:
        if self._program is None:
            raise ValueError("the pass `quantise` has not run with this ledger")
        return self._program

    def rounded_program(self, roles: Sequence[str] = ("linear",)) -> Program:
        """The Program with the matrices of these roles as they are stored: weights rounded, activations exact."""
        program = self.program.clone()
        for (node, part), item in self.stored.items():
            if self.matrices[node].role in roles:
                program.weights[str(part.target)] = _Dense(item)
        return program

    def measure(
        self, tokens: Sequence[Sequence[int]], report: Callable[[str], None] = lambda text: None
    ) -> list[Cost]:
        """The cost of every unit that is not stored in f32, in the model's order; one partial forward each."""
        units = units_of(self.program, self.matrices, lambda matrix: matrix.weight != "f32")
        formats = {unit.name: self.matrices[unit.nodes[0]].weight for unit in units}
        measured = divergences(
            self.program,
            [(unit, (formats[unit.name],), formats[unit.name]) for unit in units],
            tokens,
            report=report,
            rounding=lambda node, part, _weight, _format: self.stored[node, part].dense(),
        )
        counted: set[QuantisedWeight] = set()
        count = sum(map(len, tokens))
        return [self._cost(unit, *measured[unit.name][formats[unit.name]], count, counted) for unit in units]

    def _cost(self, unit: Unit, error: float, kl: float, tokens: int, counted: set[QuantisedWeight]) -> Cost:
        items = [self.stored[node, part] for node in unit.nodes for part in matrices_of(node)]
        new = [item for item in items if item.quantised not in counted]
        counted.update(item.quantised for item in items)
        matrix = self.matrices[unit.nodes[0]]
        return Cost(
            unit=unit.name,
            format=matrix.weight,
            activation="" if matrix.role == "embedding" else matrix.activation,
            weights=sum(item.weights for item in new),
            bits=bits_a_weight(items),
            bytes=sum(item.bits for item in new) / 8,
            relative_error=error**0.5,
            kl=kl,
            tokens=tokens,
        )


class _Dense(Weight):
    """A stored matrix, dequantised when it is loaded."""

    def __init__(self, stored: Stored) -> None:
        self.stored, source = stored, stored.quantised.source
        self.name, self.shape, self.dtype = source.name, source.shape, torch.float32

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.stored.quantised.source,)

    def load(self) -> Tensor:
        return self.stored.dense()
