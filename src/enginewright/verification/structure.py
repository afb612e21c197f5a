"""The verdict `structure-only`: what can be verified of an engine whose target cannot run on the building machine.

Three things take the place of the engine's own answers:

1. The final Program, what the plan should compute, is run through the runtime on the reference backend and held to the judge
   by the recipe's limits. The manifest's figures are those.
2. Where the backend can say what it wrote means (`Backend.rehearse`), a short text goes through that, in chunks and token by
   token, and is held to the Program: the manifest's `interpreted`.
3. golden.json takes the Program's answers along, and the first device that loads the engine is held to them
   (runtime/first_load.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Executor
from enginewright.backends.golden import (
    Rounding,
    divergence,
    golden_sample,
    write_golden,
)
from enginewright.backends.golden_check import beyond_tolerance
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.runtime.engine import Engine

from .compare import Report, verify
from .figures import Verification
from .goldens import Beginning, Kept, integer_activations, tolerance

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.passes.program import Program
    from enginewright.recipes.recipe import Recipe

    from .stages import Stages

__all__ = ["verify_structure"]

Floats = npt.NDArray[np.float32]


def verify_structure(
    artifact: Artifact,
    program: Program,
    judge: Program,
    recipe: Recipe,
    target: Backend,
    limits: dict[str, float],
    report: Report,
    stages: Stages | None = None,
) -> Verification:
    """Hold the final `program` to `judge`, and what `target` wrote to the program; write golden.json beside it."""
    allowed = tolerance(recipe)
    integers = integer_activations(recipe)
    kept = Kept()
    page_size = recipe.kv_cache.tokens_a_page(program.facts.max_context)
    reference = ReferenceExecutor(program, page_size=page_size)
    with _engine(artifact, reference) as engine:
        verification = verify(
            engine,
            judge,
            limits,
            demand_invariance=False,
            greedy_answers=False,  # the Program's, on the reference executor: slow, and not the engine's
            report=report,
            witness=kept.add,
            stages=stages,
        )
    golden = kept.golden(allowed, limits, rounding=kept.rounding if integers else None)
    write_golden(golden, artifact.path)
    report("what was lowered, interpreted")
    interpreted, failures = None, []
    executor = target.rehearse(program, recipe, artifact)
    if executor is not None:
        with _engine(artifact, executor) as engine:
            rows = _interpret(engine, kept.beginnings, kept.largest)
        interpreted = rows.figures()
        beyond = beyond_tolerance(rows.errors, allowed)
        if integers and beyond:
            off, cost = Rounding.of(rows.divergences), Rounding.of(rows.rounding)
            beyond += f"; they diverge by {off.mean:.3g} nats, {off.worst:.3g} in the worst row, where rounding alone costs "
            beyond += f"{cost.mean:.3g} and {cost.worst:.3g}; the limits are twice that"
        if beyond and not (integers and Rounding.of(rows.rounding).explains(rows.divergences)):
            failures.append(f"what was lowered, interpreted: {beyond}")
    return verification.as_structure_only({**golden.counts, "tolerance": allowed}, interpreted, failures)


def _engine(artifact: Artifact, executor: Executor) -> Engine:
    window = max((group.window for group in executor.kv_groups), default=0)
    return Engine(artifact, executor, cache_tokens=window + 4096, max_sequences=8)


@dataclass
class _Rows:
    """Of each interpreted row: its largest difference from the Program, as a share of the largest logit, its divergence from the
    Program, and the judge's, both in nats."""

    errors: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    rounding: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        error = max(self.errors)
        return {
            "rows": len(self.errors),
            "relative_logit_error": error if math.isfinite(error) else math.inf,
            "divergence": float(np.mean(self.divergences)),
            "rounding": float(np.mean(self.rounding)),
        }


def _interpret(engine: Engine, beginnings: Sequence[Beginning], largest: float) -> _Rows:
    """`engine` beside the Program: the texts together in chunks, and their first tokens one by one."""
    found = _Rows()
    texts = [begin.tokens for begin in beginnings]
    few = [tokens[:5] for tokens in texts]
    for answers in (engine.logits(texts, chunk_size=7), engine.logits(few, chunk_size=1)):
        for logits, begin in zip(answers, beginnings, strict=True):
            wanted = begin.logits[: len(logits)]
            found.errors += (np.abs(logits.astype(np.float64) - wanted).max(-1) / largest).tolist()
            for row in golden_sample(begin.tokens[: len(logits)], wanted, every=True).rows:
                found.divergences.append(divergence(row, logits[row.row]))
                found.rounding.append(divergence(row, begin.judged[row.row]))
    return found
