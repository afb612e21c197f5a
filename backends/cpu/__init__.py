"""The cpu backend: a flat list of instructions over planned buffers, run by native code.

`lower` (which needs torch) and the executor (which needs numpy and the native module) are imported only when used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Backend, LowerProgress
    from enginewright.backends.cpu.executor import CpuExecutor
    from enginewright.backends.planning import Planned
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend:
    """See `enginewright.backends.base.Backend`."""

    name = "cpu"
    target = "cpu"
    exact = True
    stage = "FINAL"
    serves = True
    drafts = True

    @property
    def capabilities(self) -> Mapping[str, Any]:
        from enginewright.backends.cpu.lower import capabilities

        return capabilities()

    def gate(self, recipe: Recipe, source: ModelSource) -> None:
        return None

    def lower(
        self,
        program: Program,
        recipe: Recipe,
        directory: Path,
        progress: LowerProgress | None = None,
        source: ModelSource | None = None,
        draft: Program | None = None,
    ) -> list[str]:
        from enginewright.backends.cpu.lower import lower

        return lower(program, recipe, directory, progress, draft)

    def runs_here(self, manifest: Mapping[str, Any]) -> None:
        return None

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> None:
        return None

    def sections(self) -> Mapping[str, Any]:
        return {}

    def planned(self, program: Program) -> Planned:
        from enginewright.backends.cpu.planning import planned

        return planned(program)

    def load(self, engine: Artifact, **options: Any) -> CpuExecutor:
        """Options: threads (None: one a core), weights ("mmap" or "copy"), max_tokens, max_rows, isa."""
        engine.require(self.name, [self.target])
        from enginewright.backends.cpu.executor import CpuExecutor

        draft = engine.file("draft.json") if "draft.json" in engine else None
        return CpuExecutor(engine.file("program.json"), engine.file("weights.bin"), draft=draft, **options)

    def answers(self, engine: Artifact) -> NoReturn:
        raise NotImplementedError("the cpu backend answers through its executor")


BACKEND: Backend = CpuBackend()
