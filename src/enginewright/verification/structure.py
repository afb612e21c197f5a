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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Executor
from enginewright.backends.golden import (
    OF_ROUNDING,
    beyond_tolerance,
    divergence,
    golden_sample,
    write_golden,
)
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
    own = kept.divergence if integers and kept.divergence > 0 else None
    golden = kept.golden(allowed, limits, rounding=own)
    write_golden(golden, artifact.path)
    report("what was lowered, interpreted")
    interpreted, failures = None, []
    executor = target.rehearse(program, recipe, artifact)
    if executor is not None:
        with _engine(artifact, executor) as engine:
            interpreted, errors = _interpret(engine, kept.beginnings, kept.largest)
        beyond = beyond_tolerance(errors, allowed)
        off, cost = interpreted["divergence"], interpreted["rounding"]
        if integers and beyond:
            beyond += (
                f"; they diverge by {off:.3g} nats, rounding alone by {cost:.3g}, the limit is twice that"
            )
        if beyond and not (integers and off <= OF_ROUNDING * cost):
            failures.append(f"what was lowered, interpreted: {beyond}")
    return verification.as_structure_only({**golden.counts, "tolerance": allowed}, interpreted, failures)


def _engine(artifact: Artifact, executor: Executor) -> Engine:
    window = max((group.window for group in executor.kv_groups), default=0)
    return Engine(artifact, executor, cache_tokens=window + 4096, max_sequences=8)


def _interpret(
    engine: Engine, beginnings: Sequence[Beginning], largest: float
) -> tuple[dict[str, Any], list[float]]:
    """Figures of `engine` beside the Program's logits: the texts together in chunks, and their first tokens one by one; and each
    row's largest difference, as a share of the largest logit.

    `divergence`: of its answers from the Program's, in nats; `rounding`: of the judge's at the same rows.
    """
    errors: list[float] = []
    off = cost = 0.0
    texts = [begin.tokens for begin in beginnings]
    few = [tokens[:5] for tokens in texts]
    for found in (engine.logits(texts, chunk_size=7), engine.logits(few, chunk_size=1)):
        for logits, begin in zip(found, beginnings, strict=True):
            wanted = begin.logits[: len(logits)]
            errors += (np.abs(logits.astype(np.float64) - wanted).max(-1) / largest).tolist()
            for row in golden_sample(begin.tokens[: len(logits)], wanted, every=True).rows:
                off += divergence(row, logits[row.row])
                cost += divergence(row, begin.judged[row.row])
    rows = len(errors)
    figures = {"relative_logit_error": max(errors), "divergence": off / rows, "rounding": cost / rows}
    return {
        "rows": rows,
        **{key: value if math.isfinite(value) else math.inf for key, value in figures.items()},
    }, errors
