"""Which of our formats compressed-tensors can say, and how its configuration says them.

| weight format                | activation    | format of the folder                                              |
|------------------------------|---------------|-------------------------------------------------------------------|
| int4, int2, uint8 [_gG] _zp  | any           | pack-quantized; symmetric where all zero points are the middle    |
| int8_gG                      | any           | pack-quantized, symmetric                                         |
| int8                         | any but below | pack-quantized, symmetric, a scale a channel                      |
| int8                         | int8          | int-quantized: a scale a channel, dynamic scales a token          |
| int8                         | int8_static   | int-quantized: a scale a channel, `input_scale`                   |
| fp8                          | any           | naive-quantized, a scale a channel                                |
| bf16, f32                    | any           | a plain tensor                                                    |

"any": the folder does not round these activations; whoever runs it does as it likes. A float offset has no place (only zero
points have), and 3-bit codes are packed differently by different versions of the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from enginewright.recipes.formats import WEIGHT_FORMATS, WeightFormat, parse_weight

__all__ = ["MIXED_ZERO_POINTS", "Scheme", "objection", "scheme_of", "settings", "writable_formats"]

MIXED_ZERO_POINTS = (
    "zero points beside modules in another format: transformers reads a folder with zero points dequantised, and "
    "then by its first format alone"
)

_FORMAT_OF = {"packed": "pack-quantized", "bytes": "int-quantized", "fp8": "naive-quantized"}


@dataclasses.dataclass(frozen=True, order=True)
class Scheme:
    """One config group: `layout` is packed, bytes or fp8; `inputs` is int8, int8_static or empty."""

    layout: str
    bits: int
    symmetric: bool
    group: int
    inputs: str = ""

    def to_dict(self, targets: list[str]) -> dict[str, Any]:
        kind = "float" if self.layout == "fp8" else "int"
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": self.symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
        }
        inputs: dict[str, Any] | None = None
        if self.inputs:
            inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": self.inputs == "int8"}
            inputs["strategy"] = "token" if self.inputs == "int8" else "tensor"
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": _FORMAT_OF[self.layout],
        }


def objection(form: WeightFormat, k: int | None = None) -> str | None:
    """Why the folder cannot hold a matrix in a format (with `k` inputs), or None."""
    if form.kind == "offset":
        return f"{form.name} has float offsets, where compressed-tensors has zero points: {form.name}_zp can be written"
    if form.bits == 3:
        return f"{form.name}: versions of compressed-tensors pack 3-bit codes differently"
    if k is not None and form.group and k % form.group:
        return f"{form.name} leaves a short last group of {k % form.group} of {k} inputs, which compressed-tensors has not"
    return None


def scheme_of(form: WeightFormat, activation: str | None, centred: bool = False) -> Scheme | None:
    """How a matrix is written; None for a plain tensor. `centred`: its zero points are all the middle code."""
    if not form.has_scales:
        return None
    if form.name == "fp8":
        return Scheme("fp8", 8, True, 0)
    if form.name == "int8" and activation in ("int8", "int8_static"):
        return Scheme("bytes", 8, True, 0, activation)
    return Scheme("packed", form.bits, form.symmetric or centred, form.group)


def settings(modules: Mapping[str, Scheme], linears: Iterable[str]) -> dict[str, Any]:
    """quantization_config of a folder: `modules` with their schemes, among all the model's `linears`.

    One scheme for linears alone is said as most folders say it, class and exceptions; else modules are named one by one.
    """
    every = list(linears)
    schemes = sorted(set(modules.values()))
    plain = [name for name in every if name not in modules]
    by_class = len(schemes) == 1 and set(modules) <= set(every)
    groups = {
        f"group_{i}": scheme.to_dict(
            ["Linear"] if by_class else [name for name, own in modules.items() if own == scheme]
        )
        for i, scheme in enumerate(schemes)
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain if by_class else [],
        "kv_cache_scheme": None,
    }


def writable_formats() -> list[str]:
    return [name for name in WEIGHT_FORMATS if objection(parse_weight(name)) is None]
