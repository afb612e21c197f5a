"""Flavours: the Program as an ONNX model with the inputs, outputs and files that another runtime loads and generates from.

`genai` is for onnxruntime-genai, `optimum` for Optimum's ORTModelForCausalLM. Neither serves under our runtime: verification runs
the written model with onnxruntime, fed as that runtime feeds it (answers.py). Nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from enginewright.recipes.errors import ArtifactError

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Answers, LowerProgress
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = ["TARGETS", "OnnxFlavour", "refuse_to_serve"]

TARGETS = {"genai": "onnxruntime-genai", "optimum": "optimum"}
"""Flavour -> what its folder is for: the manifest's target."""

_LOADED_BY = {
    "onnxruntime-genai": "onnxruntime_genai.Model(folder)",
    "optimum": "optimum.onnxruntime.ORTModelForCausalLM.from_pretrained(folder)",
}


@dataclass
class OnnxFlavour:
    """The onnx backend as it writes for another runtime. See `enginewright.backends.base.Backend`."""

    flavour: str
    target: str
    name: str = "onnx"
    exact: bool = False
    stage: str = "FINAL"
    serves: bool = False
    drafts: bool = False

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """The plain flavour's, with caches of f32: the type that attention computes in."""
        from enginewright.backends.onnx.installed import require_onnx

        require_onnx()
        from enginewright.backends.onnx.lower import capabilities

        able = {key: value for key, value in capabilities().items() if key != "page_sizes"}
        return {**able, "kv_formats": ["f32"], "wider_kv_formats": {"f16": "f32", "bf16": "f32"}}

    def gate(self, recipe: Recipe, source: ModelSource) -> None:
        """As the plain flavour's."""
        from enginewright.backends.onnx.installed import require_onnxruntime

        require_onnxruntime()

    def lower(
        self,
        program: Program,
        recipe: Recipe,
        directory: Path,
        progress: LowerProgress | None = None,
        source: ModelSource | None = None,
        draft: Program | None = None,
    ) -> list[str]:
        from enginewright.backends.onnx.flavours.lower import lower

        assert source is not None, "a folder needs the model's configuration"
        return lower(program, self.flavour, directory, source, progress)

    def runs_here(self, manifest: Mapping[str, Any]) -> None:
        return None

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> None:
        return None

    def sections(self) -> Mapping[str, Any]:
        import onnx

        from enginewright.backends.onnx.graph import IR_VERSION, OPSET

        return {
            "onnx": {
                "flavour": self.flavour,
                "opset": OPSET,
                "ir_version": IR_VERSION,
                "onnx": onnx.__version__,
            }
        }

    def load(self, engine: Artifact, **options: Any) -> NoReturn:
        raise refuse_to_serve(engine)

    def answers(self, engine: Artifact) -> Answers:
        from enginewright.backends.onnx.installed import require_onnxruntime

        require_onnxruntime()
        from enginewright.backends.onnx.flavours.answers import FlavourAnswers

        return FlavourAnswers(engine, self.flavour)


def refuse_to_serve(engine: Artifact) -> ArtifactError:
    """The error for a folder of another runtime that is to be served by ours."""
    target = engine.manifest["target"]
    return ArtifactError(
        f"{engine.path} is a folder for another runtime, not an engine that runs here",
        found=f"target {target}: {_LOADED_BY.get(target, 'unknown')} loads it",
        expected="target onnxruntime",
        action="build it for this runtime with --set onnx.flavour=plain, or with --backend cpu",
    )
