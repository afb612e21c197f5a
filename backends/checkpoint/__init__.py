"""The checkpoint backend: a Hugging Face folder in compressed-tensors' form, for transformers and what else reads it.

It has no executor: its engine is the folder, and transformers gives its answers for verification. It takes a Program at stage
QUANTISED, before matrices are joined, and reads every tensor from there: smoothing may have changed any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from enginewright.recipes.errors import ArtifactError

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Backend, LowerProgress
    from enginewright.backends.checkpoint.answers import FolderAnswers
    from enginewright.passes.manager import Pass
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKEND", "CheckpointBackend"]


class CheckpointBackend:
    """See `enginewright.backends.base.Backend`."""

    name = "checkpoint"
    target = "transformers"
    exact = False
    stage = "QUANTISED"
    serves = False
    drafts = False

    @property
    def capabilities(self) -> Mapping[str, Any]:
        from enginewright.backends.checkpoint.schemes import writable_formats

        return {"weight_formats": list(writable_formats()), "compute": ["auto"]}

    def gate(self, recipe: Recipe, source: ModelSource) -> Pass:
        from enginewright.backends.checkpoint.requirements import Writable

        return Writable(recipe, source)

    def lower(
        self,
        program: Program,
        recipe: Recipe,
        directory: Path,
        progress: LowerProgress | None = None,
        source: ModelSource | None = None,
        draft: Program | None = None,
    ) -> list[str]:
        from enginewright.backends.checkpoint.lower import lower

        assert source is not None, "a folder needs the model's configuration"
        assert draft is None, "a folder holds one model"
        return lower(program, directory, progress, source)

    def answers(self, engine: Artifact) -> FolderAnswers:
        from enginewright.backends.checkpoint.answers import FolderAnswers

        return FolderAnswers(engine)

    def runs_here(self, manifest: Mapping[str, Any]) -> None:
        return None

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> None:
        return None

    def sections(self) -> Mapping[str, Any]:
        return {}

    def load(self, engine: Artifact, **options: Any) -> NoReturn:
        engine.require(self.name, [self.target])
        raise ArtifactError(
            f"{engine.path} is a Hugging Face folder, not an engine that runs here",
            action=f"load it with transformers (and compressed-tensors), or build an engine: optimize {engine.path} "
            "--recipe keep",
        )


BACKEND: Backend = CheckpointBackend()
