"""Names of weight, activation and cache formats, and what a name means. Plain data: no torch, no numpy.

Weights. G inputs share a scale (16, 32, 64, 128 or 256; without `_gG` a whole output channel does). The last group may be short.

| name                        | codes                     | value of a code            | scales |
|-----------------------------|---------------------------|----------------------------|--------|
| f32, f16, bf16              | the values                |                            | –      |
| fp8                         | float8 e4m3               | scale · code               | f32    |
| int8                        | -127 … 127                | scale · code               | f32    |
| int8_gG                     | -127 … 127                | scale · code               | f16    |
| uint8, int4, int3, int2 [_gG] | 0 … 2^bits - 1          | scale · code + offset      | f16    |
| the same with _zp           | 0 … 2^bits - 1            | scale · (code - zero)      | f16    |

A float offset carries GGUF's Q4_1 (offset = minimum) and Q4_0 (offset = -8 · scale) exactly, which a zero point cannot;
GPTQ and AWQ checkpoints have zero points, which a float offset in f16 cannot carry exactly.

Activations. `int8_gG`: one scale a token and group of G inputs. `int8`: one scale a token. `int8_static`: one
scale for all tokens, found by calibration. All are symmetric, codes -127 … 127. `f32`, `f16` and `bf16` round to that
type: with integer weights, the products are then those of dequantised weights ("weight-only").

Compute. What values are between products: `f32`, `f16` or `bf16`; `auto` is the backend's own choice. Which formats a
backend takes, it says in its capabilities.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ACTIVATION_FORMATS",
    "COMPUTE_FORMATS",
    "GROUPS",
    "KV_FORMATS",
    "WEIGHT_FORMATS",
    "WeightFormat",
    "activation_group",
    "activations_for",
    "default_activation",
    "kv_token_bytes",
    "parse_weight",
]

GROUPS = (16, 32, 64, 128, 256)
"""Inputs that may share a scale."""

_FLOATS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8}
_CODES = {"int8": 8, "uint8": 8, "int4": 4, "int3": 3, "int2": 2}


@dataclass(frozen=True)
class WeightFormat:
    """How a stored matrix represents real weights; see the table above. `group` 0: one scale a whole output channel."""

    name: str
    kind: Literal["float", "symmetric", "offset", "zero"]
    bits: int
    group: int = 0

    @property
    def symmetric(self) -> bool:
        """Codes are signed and nothing is added to them."""
        return self.kind == "symmetric"

    @property
    def has_scales(self) -> bool:
        return self.kind != "float" or self.name == "fp8"

    @property
    def has_offsets(self) -> bool:
        """Whether there is a second table: float offsets or zero points."""
        return self.kind in ("offset", "zero")

    @property
    def half_scales(self) -> bool:
        """Whether scales (and offsets) are stored as float16."""
        return self.kind != "float" and self.name != "int8"

    @property
    def levels(self) -> int:
        """Codes that rounding uses: 255 of a symmetric byte, else 2^bits."""
        return 2**self.bits - (1 if self.symmetric else 0)

    def groups(self, k: int) -> int:
        """Scales a row of `k` inputs has (0 where the format has none)."""
        if not self.has_scales:
            return 0
        return -(-k // self.group) if self.group else 1

    def bits_per_weight(self, k: int) -> float:
        """Stored bits a weight of a row of `k` inputs, scales and offsets counted."""
        tables = (16 if self.half_scales else 32) * (2 if self.has_offsets else 1)
        return self.bits + self.groups(k) * tables / k


_PATTERN = re.compile(r"(u?int\d+)(?:_g(\d+))?(_zp)?")


@functools.cache
def parse_weight(name: str) -> WeightFormat:
    """The format of that name. Raises ValueError for a name that is none."""
    if name in _FLOATS:
        return WeightFormat(name, "float", _FLOATS[name])
    found = _PATTERN.fullmatch(name)
    if found is None or found[1] not in _CODES or (found[2] and int(found[2]) not in GROUPS):
        raise ValueError(f"there is no weight format {name!r}")
    if found[1] == "int8":
        if found[3]:
            raise ValueError("int8 is symmetric and has no zero point: that is uint8_zp")
        return WeightFormat(name, "symmetric", 8, int(found[2] or 0))
    return WeightFormat(name, "zero" if found[3] else "offset", _CODES[found[1]], int(found[2] or 0))


WEIGHT_FORMATS = (
    *_FLOATS,
    *(
        f"{codes}{group}{zero}"
        for codes in _CODES
        for group in ("", *(f"_g{size}" for size in GROUPS))
        for zero in (("",) if codes == "int8" else ("", "_zp"))
    ),
)
"""Every weight format that a graph may hold."""

ACTIVATION_FORMATS = (
    "f32",
    "f16",
    "bf16",
    "int8",
    "int8_g16",
    "int8_g32",
    "int8_g64",
    "int8_g128",
    "int8_static",
)
KV_FORMATS = ("f32", "f16", "bf16", "int8")
COMPUTE_FORMATS = ("auto", "f32", "f16", "bf16")


def default_activation(weight: str, compute: str = "auto") -> str:
    """The activation format that goes with a weight format unless a recipe says otherwise.

    Integer weights take what `compute` names. Where that is `auto`, they meet int8 activations, one scale a token and group; the
    group equals the weight's, at most 128. Weights with one scale a channel take groups of 32: on SmolLM2 groups of 64 cost a
    third more KL divergence (0.0085 against 0.0065 nats).
    """
    form = parse_weight(weight)
    if form.kind == "float":
        return "bf16" if weight == "fp8" else weight
    if compute != "auto":
        return compute
    return f"int8_g{min(form.group, 128)}" if form.group else "int8_g32"


def activations_for(weight: str) -> tuple[str, ...]:
    """Activation formats that a product with this weight format may take."""
    default = default_activation(weight)
    if parse_weight(weight).kind == "float":
        return (default,)
    return (default, "int8", "int8_static", *COMPUTE_FORMATS[1:])


def activation_group(name: str) -> int | None:
    """Inputs that share an activation's scale: 64 for `int8_g64`; None for one scale a token, or for no scale."""
    _, _, group = name.partition("_g")
    return int(group) if group else None


def kv_token_bytes(name: str, heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes of one token's keys and values in one layer; an int8 cache has two f32 scales a head besides."""
    width, scales = {"f32": (4, 0), "f16": (2, 0), "bf16": (2, 0), "int8": (1, 8)}[name]
    return heads * (width * (key_dim + value_dim) + scales)
