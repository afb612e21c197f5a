"""The reference backend: a Program as it is, run in torch. Slow, exact, the judge of the others.

It writes no engine: `ReferenceExecutor` takes a paged Program from memory, so that verification can run
source and engine through the same contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from enginewright.recipes.errors import InputError, LoweringError

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Backend, LowerProgress
    from enginewright.passes.program import Program
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKEND", "ReferenceBackend"]


class ReferenceBackend:
    """See `enginewright.backends.base.Backend`; it has nothing to write and nothing to load."""

    name = "reference"
    target = "torch"
    exact = False

    @property
    def capabilities(self) -> Mapping[str, Any]:
        from enginewright.passes import dialect, legality

        ops = {f"ew::{name}" for name in dialect.OPS} | {f"aten::{name}" for name in legality.PER_TOKEN}
        return {"ops": sorted(ops), "kv_formats": ["f32", "bf16"], "page_sizes": [16, 32]}

    def lower(
        self, program: Program, recipe: Recipe, directory: Path, progress: LowerProgress | None = None
    ) -> NoReturn:
        raise LoweringError(
            "the reference backend writes no engine",
            action="choose the cpu backend, or run the Program with enginewright.backends.reference.executor",
        )

    def load(self, engine: Artifact, **options: Any) -> NoReturn:
        raise InputError(
            f"the engine at {engine.path} cannot run on the reference backend", action="use its own backend"
        )


BACKEND: Backend = ReferenceBackend()
