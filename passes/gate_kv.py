"""gate_kv — layers whose attention an int8 cache would change too much keep a bf16 cache.

1. For every ew::attention, on calibration tokens, with everything upstream as the engine will have it: the error of its output
   with keys and values rounded as the int8 cache rounds them (one scale a token and head), as a share of the output.
2. A layer above `kv_cache.max_error` goes into `formats` (layer -> bf16), which insert_paged_kv reads.

The graph is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from enginewright.passes.calibration import Samples, needed
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.paged_attention import round_kv
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program
from enginewright.passes.walk import Walk
from enginewright.recipes.recipe import Recipe

__all__ = ["GateKv"]

TOKENS = 4096


class GateKv:
    name = "gate_kv"

    def __init__(
        self,
        recipe: Recipe,
        samples: Samples | None,
        formats: dict[int, str],
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.samples, self.formats, self.report = recipe, samples, formats, report
        self.options: Mapping[str, Any] = {"max_error": recipe.kv_cache.max_error}

    def run(self, program: Program) -> PassResult:
        """Fill `formats`; matches are the layers that keep bf16."""
        limit = self.recipe.kv_cache.max_error
        assert limit is not None
        samples = needed(self.samples, f"kv_cache.max_error {limit:g}")
        layers = [node for node in program.graph.nodes if is_call(node, OPS["attention"])]
        walk = Walk(
            program,
            samples.first(TOKENS),
            memory_bytes=int(self.recipe.calibration.memory * 2**30),
            report=self.report,
        )
        errors: dict[int, float] = {}

        def measure(node: fx.Node) -> None:
            wrong = right = 0.0
            for batch in range(len(walk.batches)):
                k, v = (walk.value(argument(node, name), batch) for name in ("k", "v"))
                given = {argument(node, "k"): round_kv(k, "int8"), argument(node, "v"): round_kv(v, "int8")}
                want = walk.evaluate_with([node], batch, {})[node]
                found = walk.evaluate_with([node], batch, given)[node]
                wrong += float((found - want).square().sum())
                right += float(want.square().sum())
            errors[argument(node, "layer")] = (wrong / right) ** 0.5 if right else 0.0

        walk.run(dict.fromkeys(layers, measure))
        self.formats.clear()
        self.formats.update({layer: "bf16" for layer, error in errors.items() if not error <= limit})
        worst = max(errors, key=errors.__getitem__)
        notes = [
            f"{len(self.formats)} of {len(layers)} layers keep a bf16 cache; the largest error of an int8 cache is"
            f" {errors[worst]:.2%}, in layer {worst}"
        ]
        record = {
            "kv_errors": {str(layer): float(f"{error:.6g}") for layer, error in errors.items()},
            "kv_kept_bf16": sorted(self.formats),
        }
        return PassResult(len(self.formats), tuple(notes), record)
