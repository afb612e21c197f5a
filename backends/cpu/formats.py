"""Which of the formats the kernels hold."""

from __future__ import annotations

from enginewright.recipes import formats

__all__ = ["KV_FORMATS", "WEIGHT_FORMATS", "activations_for"]

WEIGHT_FORMATS = tuple(name for name in formats.WEIGHT_FORMATS if name != "f16")
KV_FORMATS = ("f32", "bf16", "int8")


def activations_for(weight: str) -> tuple[str, ...]:
    """Activation formats that a kernel multiplies with these weights, the usual one first: integers meet integers."""
    if formats.parse_weight(weight).kind == "float":
        return formats.activations_for(weight)
    return tuple(name for name in formats.activations_for(weight) if name.startswith("int8"))
