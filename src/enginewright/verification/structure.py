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
from enginewright.backends.golden import write_golden
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.runtime.engine import Engine

from .compare import Report, verify
from .figures import Verification
from .goldens import Kept, tolerance

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
    kept = Kept()
    page_size = recipe.kv_cache.tokens_a_page(program.facts.max_context)
    reference = ReferenceExecutor(program, page_size=page_size)
    with _engine(artifact, reference) as engine:
        verification = verify(
            engine, judge, limits, demand_invariance=False, report=report, witness=kept.add, stages=stages
        )
    golden = kept.golden(allowed, limits)
    write_golden(golden, artifact.path)
    report("what was lowered, interpreted")
    interpreted, failures = None, []
    executor = target.rehearse(program, recipe, artifact)
    if executor is not None:
        with _engine(artifact, executor) as engine:
            interpreted = _interpret(engine, kept.beginnings, kept.largest)
        if not interpreted["relative_logit_error"] <= allowed:
            failures.append(
                f"what was lowered is off by {interpreted['relative_logit_error']:.3g} of the largest logit when it is "
                f"interpreted, the limit is {allowed:g}"
            )
    return verification.as_structure_only({**golden.counts, "tolerance": allowed}, interpreted, failures)


def _engine(artifact: Artifact, executor: Executor) -> Engine:
    window = max((group.window for group in executor.kv_groups), default=0)
    return Engine(artifact, executor, cache_tokens=window + 4096, max_sequences=8)


def _interpret(
    engine: Engine, beginnings: Sequence[tuple[list[int], Floats]], largest: float
) -> dict[str, Any]:
    """Figures of `engine` beside the Program's logits: the texts together in chunks, and their first tokens one by one."""
    error, rows = 0.0, 0
    texts = [tokens for tokens, _ in beginnings]
    few = [tokens[:5] for tokens in texts]
    for found in (engine.logits(texts, chunk_size=7), engine.logits(few, chunk_size=1)):
        for logits, (_, wanted) in zip(found, beginnings, strict=True):
            off = np.abs(logits.astype(np.float64) - wanted[: len(logits)]).max()
            error = float(np.maximum(error, off / largest))
            rows += len(logits)
    return {"rows": rows, "relative_logit_error": error if math.isfinite(error) else math.inf}
