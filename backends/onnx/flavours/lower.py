"""From a final Program to a flavour's folder: model.onnx, model.onnx.data and the configuration that its runtime reads.

The tokenizer's files are added by the build, as for every engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginewright.backends.base import LowerProgress
from enginewright.backends.onnx.flavours.batched import BatchedForm
from enginewright.backends.onnx.flavours.configs import genai_config, model_config
from enginewright.backends.onnx.flavours.genai import SharedBuffers
from enginewright.backends.onnx.flavours.optimum import GrowingCaches
from enginewright.backends.onnx.graph import OPSET
from enginewright.backends.onnx.lower import MODEL_FILE, load_rules, write_model
from enginewright.backends.onnx.lowering import Lowering
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import ModelSource
from enginewright.recipes.errors import LoweringError

__all__ = ["lower"]

_FORMS: dict[str, type[BatchedForm]] = {"genai": SharedBuffers, "optimum": GrowingCaches}


def lower(
    program: Program,
    flavour: str,
    directory: Path,
    source: ModelSource,
    progress: LowerProgress | None = None,
) -> list[str]:
    """Write the folder of `program` for `flavour`; returns the names of the files.

    Raises LoweringError with every op that cannot be lowered, its module and what is supported.
    """
    if program.stage != Stage.FINAL:
        raise LoweringError(
            "only a final program can be lowered", found=program.stage.name, expected=Stage.FINAL.name
        )
    load_rules()
    lowering = Lowering(program, _FORMS[flavour]())
    graph = lowering.run()
    configs = genai_config(program, source, MODEL_FILE) if flavour == "genai" else model_config(source)
    facts: dict[str, Any] = {
        "version": 1,
        "flavour": flavour,
        "opset": OPSET,
        "vocab_size": program.facts.vocab_size,
        "max_context": program.facts.max_context,
    }
    names = write_model(graph, program.facts.model_type, facts, directory / MODEL_FILE, progress)
    for name, content in configs.items():
        (directory / name).write_bytes(content)
    return [*names, *configs]
