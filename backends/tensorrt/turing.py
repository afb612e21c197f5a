"""What GPUs before compute capability 8.0 (sm75) lack, refused before the builder finds out: bf16, integers of fewer than 8
bits, and products in float32, of which int8 activations and decomposed attention are made. TensorRT-RTX 1.7's own words are
"Cannot compile for target(s) sm75, because the model contains HW-specific datatypes: int4, b16" and "FP32 GEMM is not supported".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from enginewright.backends.tensorrt.api import library
from enginewright.backends.tensorrt.lower import Lowered
from enginewright.backends.tensorrt.targets import turing
from enginewright.recipes.errors import InputError, LoweringError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import Recipe
from enginewright.recipes.values import KEEP

__all__ = ["refuse_formats", "refuse_network"]

_ACTIVATIONS = ("auto", "f16")
_SHOWN = 6  # layers that an error names


def refuse_formats(recipe: Recipe, targets: Sequence[str]) -> None:
    """Raise InputError where the recipe asks for what one of the targets has not."""
    old = turing(targets)
    asked = list(_asked(recipe)) if old else []
    if asked:
        raise InputError(
            f"{', '.join(old)} has no bf16, no weights of fewer than 8 bits and no products in float32",
            found=", ".join(asked),
            expected="weights f16, int8 or uint8 with activations f16, and a cache of f16",
            action="set them to f16 or int8, choose --recipe fp16, or leave this target out",
        )


def _asked(recipe: Recipe) -> Iterator[str]:
    for key, value in (("compute", recipe.compute), ("kv_cache.format", recipe.kv_cache.format)):
        if value not in ("auto", "f16"):
            yield f"{key} {value}"
    if _lacks(recipe.embedding.weight):
        yield f"embedding.weight {recipe.embedding.weight}"
    if recipe.router.weight == "bf16":  # what else a router may be, only a model that has one is asked
        yield "router.weight bf16"
    matrices = {
        name: (m.weight, m.activation) for name, m in (("linear", recipe.linear), ("head", recipe.head))
    }
    matrices |= {f"overrides.{i}": (item.weight, item.activation) for i, item in enumerate(recipe.overrides)}
    for key, (weight, wanted) in matrices.items():
        if weight == KEEP:
            continue  # what a folder holds is seen in the network
        if _lacks(weight) or weight == "f32":
            yield f"{key}.weight {weight}"
        elif (activation := recipe.activation_of(weight, wanted)) not in _ACTIVATIONS:
            yield f"{key}.activation {activation}"
    if recipe.outliers.threshold is not None:
        yield "outliers.threshold (columns in bf16)"


def _lacks(weight: str) -> bool:
    return weight != KEEP and (weight == "bf16" or parse_weight(weight).bits < 8)


def refuse_network(lowered: Lowered, targets: Sequence[str]) -> None:
    """Raise LoweringError where the defined network holds what one of the targets has not, with the layers' names."""
    old = turing(targets)
    found = list(_lines(lowered.network)) if old else []
    if found:
        more = len(found) - _SHOWN
        raise LoweringError(
            f"{', '.join(old)} cannot compute {len(found)} layer{'s' if len(found) > 1 else ''} of this model",
            found="".join(f"\n    {line}" for line in found[:_SHOWN])
            + (f"\n    and {more} more" if more > 0 else ""),
            expected="no bf16, no integers of fewer than 8 bits, no products in float32",
            action="leave this target out, or build with --backend cpu",
        )


def _lines(network: Any) -> Iterator[str]:
    trt = library().trt
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kinds = {layer.get_output(i).dtype for i in range(layer.num_outputs)}
        for kind, word in ((trt.DataType.BF16, "bf16"), (trt.DataType.INT4, "4-bit integers")):
            if kind in kinds:
                yield f"{layer.name}: {word}"
        if layer.type == trt.LayerType.MATRIX_MULTIPLY and trt.DataType.FLOAT in kinds:
            yield f"{layer.name}: a product in float32"
