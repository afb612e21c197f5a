"""Formats by measured sensitivity: bits go where they buy the most.

1. A unit is what must share a format: the linears that read one input (query, key and value; gate and up), or one `moe`.
2. Each unit is rounded alone, to the candidate of fewest bits, and the divergence of the whole model's next-token
   distribution is measured on calibration tokens.
3. For the other candidates the divergence is that, times the ratio of the squared errors of the unit's outputs (measured on
   the same tokens): near the model's own weights divergence is quadratic in what is changed.
4. Units' divergences add (Dong et al. 2020, "HAWQ-V2", eq. 6, makes the same assumption of its second-order terms). From the
   smallest formats on, the unit whose next candidate saves most divergence a bit takes it, until the budget is spent or
   the sum lies below max_kl. Candidates that are not on the lower convex hull are passed over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.assignment import Assigned, Matrix, kind_of, matrices_of
from enginewright.passes.calibration import Samples
from enginewright.passes.matching import argument
from enginewright.passes.program import Program, executed
from enginewright.passes.quant_formats import dequantise, quantise_rtn
from enginewright.passes.walk import Walk
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import activations_for, parse_weight
from enginewright.recipes.recipe import Recipe

__all__ = ["Choice", "Unit", "allocate", "choosable", "choose_formats", "divergences", "units_of"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Matrices that share a format: a name, their nodes in graph order, and the shapes [..., N, K] of their matrices.

    Experts have two matrices of unlike inputs.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))

    def bits(self, weight_format: str) -> float:
        """Stored bits a weight, scales and offsets counted."""
        form = parse_weight(weight_format)
        return sum(form.bits_per_weight(shape[-1]) * math.prod(shape) for shape in self.shapes) / self.weights


@dataclasses.dataclass
class Choice:
    """What a unit's candidates cost: format -> (bits a weight, divergence in nats), and the one that was chosen."""

    unit: Unit
    costs: dict[str, tuple[float, float]]
    chosen: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest: the unit, its weights, bits and nats of each candidate, and the choice."""
        costs = {name: [round(bits, 4), float(f"{nats:.5g}")] for name, (bits, nats) in self.costs.items()}
        return {
            "unit": self.unit.name,
            "weights": self.unit.weights,
            "chosen": self.chosen,
            "candidates": costs,
        }


def _is_chosen(matrix: Matrix) -> bool:
    return matrix.role == "linear" and matrix.is_integer


def units_of(
    program: Program, assigned: Assigned, wanted: Callable[[Matrix], bool] = _is_chosen
) -> list[Unit]:
    """The units of the matrices that are `wanted`: of all linears and experts that rounding chooses codes for."""
    groups: dict[Any, list[Matrix]] = {}
    for node, matrix in assigned.items():
        if wanted(matrix):
            alone = kind_of(node) != "linear"
            key = node if alone else (argument(node, "x"), matrix.weight, matrix.role)
            groups.setdefault(key, []).append(matrix)
    units = []
    for group in groups.values():
        nodes = tuple(matrix.node for matrix in group)
        shapes = tuple(program.weight_of(part).shape for node in nodes for part in matrices_of(node))
        units.append(Unit(_joined([matrix.name for matrix in group]), nodes, shapes))
    return units


def _joined(names: Sequence[str]) -> str:
    """`model.layers.0.mlp.gate_proj+up_proj`."""
    stem = names[0].rpartition(".")[0]
    if len(names) > 1 and all(name.rpartition(".")[0] == stem for name in names):
        return f"{stem}.{'+'.join(name.rpartition('.')[2] for name in names)}"
    return "+".join(names)


Rounding = Callable[[fx.Node, fx.Node, Tensor, str], Tensor]
"""(node that uses a matrix, the matrix's get_attr node, its values, a format) -> what it is stored as, dequantised."""


def divergences(
    program: Program,
    wanted: Sequence[tuple[Unit, Sequence[str], str]],
    tokens: Sequence[Sequence[int]],
    search: str = "mse",
    report: Callable[[str], None] = lambda text: None,
    *,
    rounding: Rounding | None = None,
) -> dict[str, dict[str, tuple[float, float]]]:
    """For each (unit, formats, measured), by the unit's name: format -> (squared error of its outputs as a share, nats).

    The unit alone is rounded in the format `measured`, and the mean Kullback-Leibler divergence of the next-token
    distributions over `tokens` is measured; the divergence in the unit's other formats follows from their errors. `rounding`
    says how; by default to nearest, with ranges by `search`. `program` is at stage FUSED and is not changed.
    """
    order = list(program.graph.nodes)
    output = program.graph.output_node()
    place = {node: index for index, node in enumerate(order)}
    results: dict[str, dict[str, tuple[float, float]]] = {}
    logits = output.all_input_nodes[0]
    walk = Walk(program, tokens, memory_bytes=1 << 40, batch_tokens=sum(map(len, tokens)))
    reference: Tensor | None = None

    def nearest(_node: fx.Node, _part: fx.Node, weight: Tensor, name: str) -> Tensor:
        return dequantise(quantise_rtn(weight, name, search))

    rounded_to = rounding or nearest

    def logits_with(nodes: Sequence[fx.Node], rounded: Mapping[fx.Node, Tensor], start: int) -> Tensor:
        rest = [node for node in order[start:] if node.op == "call_function"]
        found = walk.evaluate_with(rest, 0, {}, wanted=[logits], within=dict.fromkeys(nodes, rounded))
        return torch.as_tensor(found[logits]).log_softmax(-1)

    def visit(unit: Unit, formats: Sequence[str], measured: str) -> Callable[[fx.Node], None]:
        def measure(_node: fx.Node) -> None:
            nonlocal reference
            start = place[unit.nodes[0]]
            if reference is None:
                reference = logits_with((), {}, start)
            users = {part: node for node in unit.nodes for part in matrices_of(node)}
            weights = {part: executed(program.weight_of(part)) for part in users}
            errors: dict[str, float] = {}
            for name in (*(name for name in formats if name != measured), measured):
                rounded = {
                    part: rounded_to(users[part], part, weight, name) for part, weight in weights.items()
                }
                errors[name] = _output_error(walk, unit, weights, rounded)
            found = logits_with(unit.nodes, rounded, start)
            kl = float((reference.exp() * (reference - found)).sum(-1).mean().clamp(min=0))
            base = max(errors[measured], 1e-30)
            results[unit.name] = {name: (errors[name], kl * errors[name] / base) for name in formats}
            report(f"{unit.name}: {kl:.2g} nats in {measured}, {len(results)} of {len(wanted)}")

        return measure

    walk.run(
        {unit.nodes[0]: visit(unit, formats, measured) for unit, formats, measured in wanted}, whole=True
    )
    return results


def _output_error(
    walk: Walk, unit: Unit, weights: Mapping[fx.Node, Tensor], rounded: Mapping[fx.Node, Tensor]
) -> float:
    """Σ‖(Ŵ - W) x‖² / Σ‖W x‖² over the unit's linears; of experts and tables, the same of what the node makes of its inputs."""
    wrong = right = 0.0
    for node in unit.nodes:
        if kind_of(node) == "linear":
            part = argument(node, "weight")
            x = walk.value(argument(node, "x"), 0)
            x = x.reshape(-1, x.shape[-1])
            error, value = x @ (rounded[part] - weights[part]).T, x @ weights[part].T
        else:
            value = walk.evaluate_with([node], 0, weights)[node]
            error = walk.evaluate_with([node], 0, rounded)[node] - value
        wrong, right = wrong + float(error.square().sum()), right + float(value.square().sum())
    return wrong / max(right, 1e-30)


def allocate(choices: Sequence[Choice], budget: float | None, max_kl: float | None) -> None:
    """Choose a format for every unit, in place: bits a weight at most `budget`, or the fewest that keep the sum below `max_kl`.

    Raises InputError where even the smallest (or the largest) candidates cannot do it.
    """
    weights = [choice.unit.weights for choice in choices]
    total = sum(weights)
    hulls = [_hull(choice.costs) for choice in choices]
    level = [0] * len(choices)
    bits = sum(hull[0][0] * count for hull, count in zip(hulls, weights, strict=True))
    nats = sum(hull[0][1] for hull in hulls)
    _require_budget(budget, bits, total)
    blocked: set[int] = set()
    while max_kl is None or nats > max_kl:
        gains = [
            ((hull[at][1] - hull[at + 1][1]) / ((hull[at + 1][0] - hull[at][0]) * count), index)
            for index, (hull, at, count) in enumerate(zip(hulls, level, weights, strict=True))
            if at + 1 < len(hull) and index not in blocked
        ]
        if not gains:
            break
        _, index = max(gains, key=lambda item: (item[0], -item[1]))
        here, there = hulls[index][level[index]], hulls[index][level[index] + 1]
        step = (there[0] - here[0]) * weights[index]
        if budget is not None and bits + step > budget * total * (1 + 1e-9):
            blocked.add(index)
            continue
        bits, nats, level[index] = bits + step, nats - here[1] + there[1], level[index] + 1
    if max_kl is not None and nats > max_kl:
        raise InputError(
            "the largest candidates do not keep mixed.max_kl",
            found=f"their divergences add up to {nats:.3g} nats",
            expected=f"at most {max_kl:g}",
            action="raise mixed.max_kl, or add larger formats to mixed.candidates",
        )
    for choice, hull, at in zip(choices, hulls, level, strict=True):
        choice.chosen = hull[at][2]


def _require_budget(budget: float | None, bits: float, weights: int) -> None:
    """Refuse a budget that is smaller than the `bits` which the smallest formats of so many weights take."""
    if budget is not None and bits > budget * weights * (1 + 1e-9):
        raise InputError(
            "the budget is smaller than the smallest candidates",
            found=f"mixed.budget {budget:g} bits; the smallest formats take {bits / weights:.3g}",
            action="raise mixed.budget, or add smaller formats to mixed.candidates",
        )


def _hull(costs: Mapping[str, tuple[float, float]]) -> list[tuple[float, float, str]]:
    """(bits, nats, format) of the candidates on the lower convex hull, bits ascending."""
    hull: list[tuple[float, float, str]] = []
    for bits, nats, name in sorted((bits, nats, name) for name, (bits, nats) in costs.items()):
        if hull and nats >= hull[-1][1]:
            continue
        while len(hull) >= 2:
            (b0, n0, _), (b1, n1, _) = hull[-2], hull[-1]
            if (n0 - n1) * (bits - b1) > (n1 - nats) * (b1 - b0):
                break
            hull.pop()
        hull.append((bits, nats, name))
    return hull


def choosable(program: Program, assigned: Assigned, recipe: Recipe) -> list[Unit]:
    """The units whose formats are chosen: those that no override gives one.

    Raises InputError where there is none, or where even the smallest candidates exceed the budget.
    """
    units = units_of(program, assigned, lambda m: _is_chosen(m) and not recipe.overrides_on(m.name))
    if not units:
        raise InputError(
            "mixed precision finds no linear to choose a format for", action="set mixed.budget=null"
        )
    least = sum(min(map(unit.bits, recipe.mixed.candidates)) * unit.weights for unit in units)
    _require_budget(recipe.mixed.budget, least, sum(unit.weights for unit in units))
    return units


def choose_formats(
    program: Program,
    assigned: Assigned,
    recipe: Recipe,
    samples: Samples,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Assigned, list[Choice]]:
    """The assignment with every unit's format chosen, and the table that it was chosen from.

    A recipe's activation format stays where the chosen format may have it.
    """
    options = recipe.mixed
    units = choosable(program, assigned, recipe)
    smallest = min(options.candidates, key=lambda name: parse_weight(name).bits_per_weight(4096))
    measured = divergences(
        program,
        [(unit, options.candidates, smallest) for unit in units],
        samples.cut(options.tokens),
        report=report,
    )
    choices = [
        Choice(unit, {name: (unit.bits(name), nats) for name, (_, nats) in measured[unit.name].items()})
        for unit in units
    ]
    allocate(choices, options.budget, options.max_kl)
    changed = dict(assigned)
    for choice in choices:
        for node in choice.unit.nodes:
            changed[node] = _given(assigned[node], choice.chosen, recipe)
    return changed, choices


def _given(matrix: Matrix, weight: str, recipe: Recipe) -> Matrix:
    """The matrix in another format; an activation that was asked for stays, a default becomes the new format's."""
    activation = recipe.activation_of(weight)
    asked = matrix.activation != recipe.activation_of(matrix.weight)
    if asked and matrix.activation in activations_for(weight):
        activation = matrix.activation
    return dataclasses.replace(matrix, weight=weight, activation=activation)
