"""The TensorRT backend: a Program as plans for NVIDIA GPUs, built without one by TensorRT-RTX, and the executor that runs them.

Nothing of the library, of cuda-python or of torch is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from enginewright.recipes.errors import InputError

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.backends.base import Backend, Executor, LowerProgress
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKEND", "TensorRTBackend"]


@dataclass
class TensorRTBackend:
    """See `enginewright.backends.base.Backend`. `target`: the architectures that `lower` builds for, as `sm80,sm89`."""

    name: str = "tensorrt"
    target: str = ""
    exact: bool = False
    stage: str = "FINAL"
    serves: bool = True
    drafts: bool = False
    _section: dict[str, Any] = field(default_factory=dict)

    def aimed(self, target: str | Iterable[str] | None) -> TensorRTBackend:
        """This backend, building for `target`. Raises InputError where the library is missing or does not take it."""
        from enginewright.backends.tensorrt.api import library
        from enginewright.backends.tensorrt.targets import parse_targets, supported

        library()
        if target is None:
            raise InputError(
                "the tensorrt backend must know for which GPUs it builds",
                found="no target",
                expected="one or several of " + ", ".join(supported()),
                action="give --target, as in --target sm80,sm89",
            )
        return TensorRTBackend(target=",".join(parse_targets(target)))

    @property
    def capabilities(self) -> Mapping[str, Any]:
        from enginewright.backends.tensorrt.lower import capabilities

        return capabilities()

    def gate(self, recipe: Recipe, source: ModelSource) -> None:
        """Nothing to refuse of the model; of the recipe, what the oldest targets have not, and steps that no plan takes."""
        from enginewright.backends.tensorrt.engine import require_step
        from enginewright.backends.tensorrt.turing import refuse_formats

        require_step(recipe)
        refuse_formats(recipe, [target for target in self.target.split(",") if target])

    def lower(
        self,
        program: Program,
        recipe: Recipe,
        directory: Path,
        progress: LowerProgress | None = None,
        source: ModelSource | None = None,
        draft: Program | None = None,
    ) -> list[str]:
        from enginewright.backends.tensorrt.engine import lower

        files, self._section = lower(program, recipe, directory, self.target.split(","), progress)
        return files

    def sections(self) -> Mapping[str, Any]:
        """What the manifest says of the plans that `lower` has built."""
        return {"tensorrt": self._section}

    def runs_here(self, manifest: Mapping[str, Any]) -> str | None:
        """Why this machine cannot run the engine of a manifest; None where it can."""
        from enginewright.backends.tensorrt.device import why_not

        return why_not(manifest["tensorrt"])

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> Executor:
        """The network that `lower` builds, interpreted layer by layer."""
        from enginewright.backends.tensorrt.api import new_network
        from enginewright.backends.tensorrt.engine import options_of
        from enginewright.backends.tensorrt.interpreter.executor import InterpretedExecutor
        from enginewright.backends.tensorrt.lower import define

        network, _ = new_network()
        lowered = define(program, network, options_of(recipe))
        facts = program.facts
        return InterpretedExecutor(
            network,
            lowered.arrays,
            groups=facts.kv_groups,
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            page_size=recipe.kv_cache.page_size,
        )

    def load(self, engine: Artifact, **options: Any) -> Executor:
        """Load the plan for this machine's GPU. Options: max_tokens, max_rows, graphs; threads and weights mean nothing here."""
        engine.require(self.name, [engine.manifest["target"]])
        from enginewright.backends.tensorrt import device
        from enginewright.backends.tensorrt.executor import TensorRTExecutor
        from enginewright.backends.tensorrt.pools import Description

        section = engine.manifest["tensorrt"]
        found = device.require(section, f"optimize {engine.manifest['model']['source']}")
        return TensorRTExecutor(
            engine.file(section["plans"][found.device.architecture]),
            Description.of(engine.manifest),
            found.library,
            found.cuda,
            str(found),
            **{key: value for key, value in options.items() if key in ("max_tokens", "max_rows", "graphs")},
        )

    def answers(self, engine: Artifact) -> NoReturn:
        raise NotImplementedError("the tensorrt backend answers through its executor")


BACKEND: Backend = TensorRTBackend()
