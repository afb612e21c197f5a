"""Values of tensors in numpy, and the rounding of each of TensorRT's types.

Floating-point tensors are float32 arrays that hold values of their type alone: a HALF tensor's are rounded to f16 when a layer
has computed them in float32. Integers are arrays of their own type; INT4 is int8 with values -8 to 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLOATS", "Array", "decoded", "fits", "rounded", "unpacked_int4"]

Array = npt.NDArray[Any]

FLOATS = ("FLOAT", "HALF", "BF16")
_INTEGERS = {"INT4": np.int8, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_}


def _bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to nearest even: the upper half of a float32's bits."""
    bits = x.view(np.uint32)
    kept = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, kept.view(np.float32))


def rounded(x: Array, kind: str) -> Array:
    """x as a tensor of DataType `kind` holds it. Floats round to nearest even; too large ones become infinite."""
    if kind in _INTEGERS:
        return x.astype(_INTEGERS[kind], copy=False)
    if kind not in FLOATS:
        raise ValueError(f"the interpreter holds no tensor of type {kind}")
    x = x.astype(np.float32, copy=False)
    if kind == "HALF":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return _bfloat16(np.ascontiguousarray(x)) if kind == "BF16" else x


def fits(x: Array, kind: str) -> bool:
    """Whether x is what a tensor of that type may hold."""
    if kind in _INTEGERS:
        return x.dtype == _INTEGERS[kind]
    return x.dtype == np.float32 and np.array_equal(rounded(x, kind), x, equal_nan=True)


def unpacked_int4(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int8]:
    """`count` codes, two a byte, the first in the lower four bits, in two's complement.

    Source: "Working with Quantized Types" (TensorRT documentation), the order of ONNX's int4.
    """
    pairs = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[:count].astype(np.int8)
    return np.where(pairs > 7, pairs - 16, pairs).astype(np.int8)


def decoded(raw: Array, kind: str, count: int) -> Array:
    """`count` values of a constant from the bytes that the library was given."""
    data = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    if kind == "INT4":
        return unpacked_int4(data, count)
    if kind == "BF16":
        return (data.view(np.uint16)[:count].astype(np.uint32) << np.uint32(16)).view(np.float32)
    plain = {"FLOAT": np.float32, "HALF": np.float16, **_INTEGERS}
    if kind not in plain:
        raise ValueError(f"the interpreter reads no constant of type {kind}")
    values: Array = data.view(plain[kind])[:count]
    return values.astype(np.float32) if kind == "HALF" else values
