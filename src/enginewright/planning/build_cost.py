"""What a build would take: a simple model of the few builds that docs/performance.md has measured, on two cores.

    seconds = 13.4 + 0.22 · layers + 11.3 · parameters / 10^9                 capture, passes, lowering, verification
            + 1.85e-7 · vocabulary · (329 + the longest window)               logits that verification compares
            + 1.2e-11 · tokens · numbers in linears                           the walk over calibration's tokens
            + 2.3e-10 · Σ outputs · inputs²                                   GPTQ's rounding
            + 2.2e-6 · numbers in linears · grid / 20 · tokens / 2,048        AWQ's or SmoothQuant's search
    peak    = 1.3 GB + the engine's bytes + 4 bytes · numbers in the largest matrix
            + 8 bytes · vocabulary · (329 + the longest window)               logits that verification compares
            + 14 bytes · width · calibration's tokens                         at most 1.5 · calibration.memory

Each line has one or two free numbers, from as many builds; what calibration takes was measured with an earlier verification.
For a model of another size, or another machine, expect a factor of two. More cores shorten calibration and verification, which
this does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.planning.structure import Structure
from enginewright.recipes.recipe import Recipe

__all__ = ["BuildCost", "cost_of_build"]

_VERIFIED = 329  # tokens of all of verification's samples, where no window makes the last one longer


@dataclass(frozen=True)
class BuildCost:
    """Expected seconds by part, the peak of memory in bytes, and what was left out."""

    seconds: dict[str, float]
    peak: float
    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def cost_of_build(structure: Structure, recipe: Recipe) -> BuildCost:
    """The expected cost of building an engine by a recipe."""
    facts = structure.facts
    linears = sum(count for (role, _), count in structure.weights.items() if role in ("linear", "experts"))
    window = max((attention.window for attention in structure.attentions), default=0)
    logits = facts.vocab_size * min(_VERIFIED + window, facts.max_context)
    usual = 13.4 + 0.22 * facts.num_layers + 11.3 * facts.parameters / 1e9 + 1.85e-7 * logits
    seconds = {"capture, passes, lowering, verification": usual}
    peak = 1.3e9 + structure.engine_bytes + 4.0 * structure.largest + 8.0 * logits
    notes = []
    if recipe.calibrates:
        tokens = recipe.calibration.samples * min(recipe.calibration.length, facts.max_context)
        seconds[f"calibration's walk over {tokens:,} tokens"] = 1.2e-11 * tokens * linears
        peak += min(14.0 * facts.hidden_size * tokens, 1.5 * recipe.calibration.memory * 2**30)
        if recipe.quantise.method == "gptq":
            seconds["GPTQ's rounding"] = 2.3e-10 * structure.squares
        if recipe.smooth.method != "none":
            search = 2.2e-6 * linears * recipe.smooth.grid / 20 * min(tokens, recipe.smooth.tokens) / 2048
            seconds[f"{recipe.smooth.method}'s search"] = search
        unknown = {
            "mixed": recipe.mixed.wanted,
            "kv_cache.max_error": recipe.kv_cache.max_error is not None,
            "draft.head": recipe.draft.head == "distilled",
        }
        notes += [
            f"what {key} takes was never measured and is not counted"
            for key, wanted in unknown.items()
            if wanted
        ]
        if recipe.calibration.source == "self":
            notes.append("the calibration's text, which the model writes itself, comes on top")
    return BuildCost(seconds, peak, tuple(notes))
