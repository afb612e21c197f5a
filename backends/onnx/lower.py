"""From a final Program to the files that ONNX Runtime serves: model.onnx and its weights, model.onnx.data.

The graph is lowered node by node by rules that are looked up by the op's name: lower_dialect.py has the dialect's,
lower_generic.py and its neighbours those of ATen, products.py the weights' formats, slots.py the cache. Nothing is loaded until
the graph is complete; then the weights stream into their file, and onnx's checker and strict shape inference look at the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from enginewright.backends.base import LowerProgress
from enginewright.backends.onnx.graph import OPSET, Graph
from enginewright.backends.onnx.lowering import RULES, Lowering
from enginewright.backends.onnx.matrices import activation_formats
from enginewright.backends.onnx.slots import CACHE_TYPES, SlotCaches, groups_with_sinks
from enginewright.backends.onnx.weights import offsets_of, write_weights
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.recipe import Recipe

__all__ = ["MODEL_FILE", "capabilities", "check_model", "load_rules", "lower", "write_model"]

MODEL_FILE = "model.onnx"
DATA_SUFFIX = ".data"


def capabilities() -> dict[str, Any]:
    """What this backend can lower, as data."""
    load_rules()
    formats = activation_formats()
    return {
        "ops": sorted(RULES),
        "weight_formats": list(formats),
        "activation_formats": formats,
        "kv_formats": list(CACHE_TYPES),
        "compute": ["f32"],
        "page_sizes": [16, 32, 0],
    }


def load_rules() -> None:
    """Fill the table of rules."""
    import enginewright.backends.onnx.lower_dialect
    import enginewright.backends.onnx.lower_generic
    import enginewright.backends.onnx.lower_movement
    import enginewright.backends.onnx.lower_reductions  # noqa: F401


def lower(
    program: Program, recipe: Recipe, directory: Path, progress: LowerProgress | None = None
) -> list[str]:
    """Write the model of `program` into `directory`; returns the names of the files.

    `recipe` gives the cache's page size and usual format; each layer's own comes with the program. Raises LoweringError
    with every op that cannot be lowered, its module and what is supported.
    """
    if program.stage != Stage.FINAL:
        raise LoweringError(
            "only a final program can be lowered", found=program.stage.name, expected=Stage.FINAL.name
        )
    load_rules()
    lowering = Lowering(program, SlotCaches())
    graph = lowering.run()
    sinks = groups_with_sinks(lowering)
    facts = {
        "version": 1,
        "flavour": "plain",
        "opset": OPSET,
        "vocab_size": program.facts.vocab_size,
        "max_context": program.facts.max_context,
        "kv_groups": [
            {
                "window": group.window,
                "format": recipe.kv_cache.format,
                "page_size": recipe.kv_cache.tokens_a_page(program.facts.max_context),
                "sinks": index in sinks,
                "layers": [
                    {
                        "kv_heads": layer.kv_heads,
                        "key_dim": layer.key_dim,
                        "value_dim": layer.value_dim,
                        "format": layer.format,
                    }
                    for layer in group.layers
                ],
            }
            for index, group in enumerate(program.facts.kv_groups)
        ],
    }
    return write_model(graph, program.facts.model_type, facts, directory / MODEL_FILE, progress)


def write_model(
    graph: Graph, name: str, facts: dict[str, Any], path: Path, progress: LowerProgress | None = None
) -> list[str]:
    """Write a complete graph as `path` and one file of external data beside it, and check them; returns their names."""
    data = path.name + DATA_SUFFIX
    weights = list(graph.weights.values())
    model = graph.model(name, facts, data, offsets_of(weights))
    path.write_bytes(model.SerializeToString())
    write_weights(path.with_name(data), weights, progress)
    check_model(path)
    return [path.name, data]


def check_model(path: Path) -> None:
    """Hold the written model against the standard: onnx's checker, and shape inference that must agree with every shape.

    Raises LoweringError with the checker's own words.
    """
    try:
        onnx.checker.check_model(str(path))
        graph = onnx.load(str(path), load_external_data=False)
        onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise LoweringError(
            "onnx refuses the model that was written",
            found=_first_lines(str(error)),
            action=f"report it with the versions of onnx ({onnx.__version__}) and of this package",
        ) from error


def _first_lines(text: str, count: int = 8) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[:count]) + (f"\n({len(lines) - count} more lines)" if len(lines) > count else "")
