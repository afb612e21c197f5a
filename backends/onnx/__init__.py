"""The onnx backend: one ONNX model of standard operators, served by ONNX Runtime.

`lower` (which needs torch and onnx) and the executor (which needs numpy and onnxruntime) are imported only when used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Backend, LowerProgress
    from enginewright.backends.onnx.executor import OnnxExecutor
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKEND", "OnnxBackend"]


class OnnxBackend:
    """See `enginewright.backends.base.Backend`."""

    name = "onnx"
    target = "onnxruntime"
    exact = False
    stage = "FINAL"
    serves = True
    drafts = False
    providers = ("cpu", "cuda", "tensorrt-rtx")

    @property
    def capabilities(self) -> Mapping[str, Any]:
        from enginewright.backends.onnx.installed import require_onnx

        require_onnx()
        from enginewright.backends.onnx.lower import capabilities

        return capabilities()

    def gate(self, recipe: Recipe, source: ModelSource) -> None:
        """Nothing to refuse of the model; but a build ends in verification, which runs what it wrote."""
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
        from enginewright.backends.onnx.lower import lower

        return lower(program, recipe, directory, progress)

    def runs_here(self, manifest: Mapping[str, Any]) -> None:
        return None

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> None:
        return None

    def sections(self) -> Mapping[str, Any]:
        import onnx

        from enginewright.backends.onnx.graph import IR_VERSION, OPSET

        return {
            "onnx": {"flavour": "plain", "opset": OPSET, "ir_version": IR_VERSION, "onnx": onnx.__version__}
        }

    def flavoured(self, flavour: str) -> Backend:
        """The backend that writes models of this flavour."""
        from enginewright.backends.onnx.flavours import TARGETS, OnnxFlavour

        return self if flavour == "plain" else OnnxFlavour(flavour, TARGETS[flavour])

    def load(self, engine: Artifact, **options: Any) -> OnnxExecutor:
        """Options: threads (None: one a core), weights ("mmap"), max_tokens, max_rows, provider (cpu, cuda, tensorrt-rtx)."""
        from enginewright.backends.onnx.flavours import TARGETS, refuse_to_serve

        if engine.manifest["target"] in TARGETS.values():
            raise refuse_to_serve(engine)
        engine.require(self.name, [self.target])
        from enginewright.backends.onnx.installed import require_onnxruntime

        require_onnxruntime()
        from enginewright.backends.onnx.executor import OnnxExecutor

        return OnnxExecutor(engine.file("model.onnx"), **options)

    def answers(self, engine: Artifact) -> NoReturn:
        raise NotImplementedError("the onnx backend answers through its executor")


BACKEND: Backend = OnnxBackend()
