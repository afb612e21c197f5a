"""Move scales from activations into weights before anything is rounded: AWQ and SmoothQuant.

1. Every point of `smoothing.find_points` gets a scale a channel; the pass writes x / s and W · diag(s), and the Program's
   logits stay as they were: that is checked on calibration tokens, every time.
2. `awq`: s = x̄^α / w̄^(1-α), with x̄ the channel's mean |x| over some 16,000 calibration tokens and w̄ the mean share of its group's
   largest weight that a weight of the channel has; and s = x̄^α. Of α in a grid, and both forms, the one whose rounded
   weights change the block's own output least. Source: Lin et al. 2024, "AWQ", eqs. 4 and 5, and its implementation for w̄.
3. `smoothquant`: s = max|x|^α / max|w|^(1-α); α is given, or searched in the same way with weights and activations
   rounded. Source: Xiao et al. 2023, "SmoothQuant", eq. 4.
4. A candidate is kept only if it beats s = 1, which leaves the point as it is. The search rounds to nearest, which is quick.
   Where the recipe rounds otherwise (GPTQ, searched ranges), the winner, its square root and 1 compete once more, rounded
   so, with the inputs of the tokens that the comparison does not use.

A point's block is what its consumers' outputs go through until they meet values that do not come from them: for query, key
and value up to the attention's output projection, for gate and up the whole MLP, for a lone projection itself. The search
sees exact inputs (nothing upstream is rounded yet) and a few thousand of the calibration's tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.assignment import Assigned, assign
from enginewright.passes.calibration import Samples, needed
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import simulate_activation
from enginewright.passes.gptq import GptqOptions, NotPositiveError, invert, round_gptq
from enginewright.passes.gram import gram_of
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program, executed
from enginewright.passes.quant_formats import dequantise, fit_grid, grouped, quantise_rtn
from enginewright.passes.ranges import choose_grid
from enginewright.passes.smoothing import SmoothingPoint, apply, find_points, require_equal
from enginewright.passes.walk import Walk
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import Recipe

__all__ = ["Smooth", "block_of"]

STATISTICS_TOKENS = 16384  # of the calibration's, over which magnitudes are taken
_CHECKED_TOKENS = 64  # of the first sample, on which equality is checked
_LEAST = 1e-4  # magnitudes below it count as this: a channel that is never used asks for no scale
_LEAST_ALPHA = 0.1  # of SmoothQuant's search


class Smooth:
    """The pass `smooth`; its options are the recipe's section of that name."""

    name = "smooth"

    def __init__(
        self,
        recipe: Recipe,
        samples: Samples | None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.samples, self.report = recipe, samples, report
        self.options: Mapping[str, Any] = dataclasses.asdict(recipe.smooth)

    def run(self, program: Program) -> PassResult:
        """Scale every point, in place. Raises LoweringError if the logits change."""
        samples = needed(self.samples, f"smooth.method {self.recipe.smooth.method}")
        points, notes = find_points(program)
        assigned, _ = assign(program, self.recipe)
        points = [p for p in points if any(_is_rounded(assigned, node) for node in p.consumers)]
        options = self.recipe.smooth
        blocks = {point: block_of(point) for point in points}
        keep = [
            (source, nodes[-1])
            for point, nodes in blocks.items()
            for source in [point.activation, *_outside(nodes)]
        ]
        walk = Walk(
            program,
            samples.first(max(STATISTICS_TOKENS, options.tokens)),
            memory_bytes=int(self.recipe.calibration.memory * 2**30),
            keep=keep,
            batch_tokens=options.tokens,
            report=self.report,
        )
        scales: dict[str, Tensor] = {}
        kept: list[str] = []

        def visit(point: SmoothingPoint) -> Callable[[fx.Node], None]:
            def search(_node: fx.Node) -> None:
                found = _Search(walk, point, blocks[point], assigned, self.recipe).run()
                if found is None:
                    kept.append(point.name)
                else:
                    scales[point.name] = found

            return search

        visits: dict[fx.Node, list[Callable[[fx.Node], None]]] = {}
        for point in points:
            visits.setdefault(blocks[point][-1], []).append(visit(point))

        def all_of(calls: Sequence[Callable[[fx.Node], None]]) -> Callable[[fx.Node], None]:
            def call(node: fx.Node) -> None:
                for one in calls:
                    one(node)

            return call

        walk.run({node: all_of(calls) for node, calls in visits.items()})
        before = program.clone()
        for point in points:
            if point.name in scales:
                apply(program, point, scales[point.name])
        tokens = samples.sequences[0][:_CHECKED_TOKENS]
        program.recompile()
        difference = require_equal(self.name, before, program, scales, tokens)
        record = {"scaled": len(scales), "left_at_default": kept, "not_scaled": notes}
        if kept:
            notes = [*notes, f"{len(kept)} of {len(points)} points keep scale 1: no candidate was better"]
        notes = [*notes, f"logits differ by {difference:.1e} of the largest"]
        return PassResult(len(scales), tuple(notes), record)


def block_of(point: SmoothingPoint) -> list[fx.Node]:
    """The nodes that the point's consumers' outputs go through, in graph order, until they meet other values.

    A node belongs to the block if all of its inputs that depend on tokens' values come from the consumers. The head is left out.
    """
    graph = point.activation.graph
    output = graph.output_node()
    inside: dict[fx.Node, None] = dict.fromkeys(point.consumers)
    first = min(inside)
    data: set[fx.Node] = set()  # whose values depend on what the tokens are, not on their positions alone
    for node in graph.nodes:
        sources = [n for n in node.all_input_nodes if n in data]
        if sources or (node.op == "placeholder" and node.target != "positions"):
            data.add(node)
        if node < first or node in inside or node.op != "call_function":
            continue
        if not sources or not all(n in inside for n in sources):
            continue
        if output in node.users or (is_call(node, OPS["linear"]) and _reaches_output_only(node)):
            continue
        inside[node] = None
    return sorted(inside)


def _reaches_output_only(node: fx.Node) -> bool:
    """Whether a linear makes the logits: what follows it, one user after the other, is the output."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.op == "output":
            return True
        if is_call(node, OPS["linear"], OPS["moe"], OPS["attention"]):
            return False
    return False


def _outside(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What a block reads besides itself and weights."""
    inside = set(nodes)
    found = {
        n: None for node in nodes for n in node.all_input_nodes if n not in inside and n.op != "get_attr"
    }
    return list(found)


def _ends(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The block's outputs: nodes that something outside reads."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _is_rounded(assigned: Assigned, node: fx.Node) -> bool:
    return node in assigned and assigned[node].is_integer


Rounding = Callable[[Tensor, fx.Node, Tensor], Tensor]
"""(weights already scaled, their node, the scale of each input) -> what rounding makes of them."""


class _Search:
    """The search of one point's scales, when the walk has reached the last node of its block."""

    def __init__(
        self,
        walk: Walk,
        point: SmoothingPoint,
        block: Sequence[fx.Node],
        assigned: Assigned,
        recipe: Recipe,
    ) -> None:
        self.walk, self.point, self.block = walk, point, block
        self.assigned, self.recipe, self.options = assigned, recipe, recipe.smooth
        self.rounded = [node for node in point.consumers if _is_rounded(assigned, node)]
        self.matrices = {_matrix(node): node for node in self.rounded}
        self.weights = {matrix: executed(walk.program.weight_of(matrix)) for matrix in self.matrices}

    def run(self) -> Tensor | None:
        """The best scales [channels], or None where nothing beats 1."""
        unrounded = self.walk.evaluate_with(self.block, 0, {})
        self.wanted = [unrounded[node] for node in _ends(self.block)]
        self.x = self.walk.value(self.point.activation, 0)
        best = self._best(self._candidates(), self._nearest)
        plain = self.recipe.quantise.method == "rtn" and self.recipe.quantise.range == "minmax"
        if best is not None and not plain and not any(is_call(node, OPS["moe"]) for node in self.rounded):
            best = self._best([best, best.sqrt()], self._as_recipe)
        return best

    def _best(self, candidates: Iterable[Tensor], rounding: Rounding) -> Tensor | None:
        best, least = None, self._error(torch.ones(self.point.channels), rounding)
        for scales in candidates:
            error = self._error(scales, rounding)
            if error < least:
                best, least = scales, error
        return best

    def _nearest(self, weight: Tensor, node: fx.Node, spread: Tensor) -> Tensor:
        return _rounded(weight, self.assigned[node].weight)

    def _as_recipe(self, weight: Tensor, node: fx.Node, spread: Tensor) -> Tensor:
        """Rounded by the recipe's method, for inputs divided by `spread`."""
        form, quantise = parse_weight(self.assigned[node].weight), self.recipe.quantise
        gram, tokens = self._gram
        gram = gram / torch.outer(spread, spread)
        if quantise.method == "gptq":
            options = GptqOptions.of(quantise)
            try:
                inverse = invert(gram, tokens, options)
            except NotPositiveError:
                return self._nearest(weight, node, spread)
            return dequantise(round_gptq(weight, gram, inverse, form, options))
        x, _ = grouped(weight, form)
        grid = choose_grid(weight, form, quantise.range, symmetric=quantise.symmetric, gram=gram)
        return grid.values(grid.codes(x)).flatten(-2)[..., : weight.shape[-1]]

    @functools.cached_property
    def _gram(self) -> tuple[Tensor, int]:
        """XᵀX of all batches but the one that errors are measured on (of that one, where it is alone), and the tokens."""
        batches = list(self.walk.inputs(self.point.activation))
        rows = [x.reshape(-1, x.shape[-1]) for x in batches[1:] or batches]
        gram = gram_of(rows)
        assert gram is not None
        return gram, sum(map(len, rows))

    def _candidates(self) -> Iterator[Tensor]:
        mean, largest = self._activation_statistics()
        if self.options.method == "awq":
            share = self._channels(self._shares(), "mean")
            for step in range(1, self.options.grid):
                alpha = step / self.options.grid
                yield _centred(mean**alpha / (share ** (1 - alpha) + _LEAST))
                yield _centred(mean**alpha)
            return
        weight = self._channels(
            torch.stack([_flat(w).abs().amax(0) for w in self.weights.values()]).amax(0), "max"
        )
        steps = [step / self.options.grid for step in range(1, self.options.grid)]
        alphas = [step for step in steps if step >= _LEAST_ALPHA]
        if self.options.alpha != "search":
            alphas = [float(self.options.alpha)]
        for alpha in alphas:
            yield _centred(largest**alpha / weight.clamp(min=_LEAST) ** (1 - alpha))

    def _activation_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and largest |x| of each channel over all calibration tokens."""
        width = self.point.activation.meta["val"].shape[-1]
        total, largest, count = torch.zeros(width, dtype=torch.float64), torch.zeros(width), 0
        for x in self.walk.inputs(self.point.activation):
            rows = x.reshape(-1, x.shape[-1]).abs()
            total += rows.sum(0, dtype=torch.float64)
            largest = torch.maximum(largest, rows.amax(0))
            count += len(rows)
        mean = (total / count).float()
        return self._channels(mean, "mean").clamp(min=_LEAST), self._channels(largest, "max").clamp(
            min=_LEAST
        )

    def _shares(self) -> Tensor:
        """The mean over outputs of |w| as a share of its group's largest, [K]."""
        shares = []
        for matrix, weight in self.weights.items():
            form = parse_weight(self.assigned[self.matrices[matrix]].weight)
            groups, _ = grouped(_flat(weight).abs(), form)
            share = groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)
            shares.append(share.flatten(-2)[:, : weight.shape[-1]])
        return torch.cat(shares).mean(0)

    def _channels(self, values: Tensor, how: str) -> Tensor:
        """[K] -> [channels]: features that share a scale by their mean or their largest."""
        if self.point.index is None:
            return values
        start = torch.zeros(self.point.channels)
        reduce = "mean" if how == "mean" else "amax"
        return start.scatter_reduce(0, self.point.index, values, reduce, include_self=False)

    def _error(self, scales: Tensor, rounding: Rounding) -> float:
        """The squared error of the block's outputs with consumers rounded under these scales."""
        spread = self.point.spread(scales)
        given: dict[fx.Node, Any] = {}
        rounds_input = self.options.method == "smoothquant"
        for matrix, node in self.matrices.items():
            rounded = rounding(self.weights[matrix] * spread, node, spread)
            given[matrix] = rounded / spread
        if rounds_input:
            # Several consumers read one rounded activation; those of one point share its format.
            activation = self.assigned[self.rounded[0]].activation
            x = self.x.reshape(*self.x.shape[:1], -1) if self.x.shape[-1] != len(spread) else self.x
            static = float((x / spread).abs().max()) / 127 if activation == "int8_static" else 0.0
            given[self.point.activation] = (
                simulate_activation(x / spread, activation, static) * spread
            ).reshape(self.x.shape)
        found = self.walk.evaluate_with(self.block, 0, given)
        ends = _ends(self.block)
        return sum(
            float((found[node] - wanted).square().sum())
            for node, wanted in zip(ends, self.wanted, strict=True)
        )


def _rounded(weight: Tensor, weight_format: str) -> Tensor:
    form = parse_weight(weight_format)
    if not form.has_offsets:
        return dequantise(quantise_rtn(weight, weight_format))
    x, valid = grouped(weight, form)
    grid = fit_grid(x, valid, form)
    return grid.values(grid.codes(x)).flatten(-2)[..., : weight.shape[-1]]


def _matrix(node: fx.Node) -> fx.Node:
    matrix: fx.Node = argument(node, "gate_up" if is_call(node, OPS["moe"]) else "weight")
    return matrix


def _flat(weight: Tensor) -> Tensor:
    return weight.reshape(-1, weight.shape[-1])


def _centred(scales: Tensor) -> Tensor:
    """Scales around 1: what all channels share changes nothing, and keeps numbers small."""
    scales = scales.clamp(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()
