"""Stored weights: what the Program holds, and the initialisers that they become.

Products (products.py) and look-ups (rows.py) read the same initialisers, so that a head tied to the table is stored once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from enginewright.backends.onnx.graph import FLOAT, Value
from enginewright.backends.onnx.lowering import Lowering, arguments, op_name
from enginewright.backends.onnx.packing import packed, plane_of
from enginewright.passes.weights import Weight
from enginewright.recipes.formats import GROUPS, WEIGHT_FORMATS, WeightFormat, parse_weight

__all__ = [
    "STORED_FLOATS", "Matrix", "activation_formats", "block_size", "blocks", "each_block", "float_table", "matrix_of",
    "planes", "scale_table", "turned_codes", "whole_zeros", "zero_points",
]  # fmt: skip

STORED_FLOATS = {
    "f32": FLOAT,
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "fp8": TensorProto.FLOAT8E4M3FN,
}
"""Float weight format -> the type of its initialiser."""

UINT8, INT8 = TensorProto.UINT8, TensorProto.INT8


def activation_formats() -> dict[str, list[str]]:
    """Weight format -> the activation formats that its product takes here."""
    return {name: _activations(name) for name in WEIGHT_FORMATS}


def _activations(name: str) -> list[str]:
    if parse_weight(name).kind == "float":
        return ["bf16" if name == "fp8" else name]
    return ["f32", "f16", "bf16", *(["int8", "int8_static"] if name == "int8" else [])]


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K] (or one expert's share of [E, N, K]) as the Program holds it."""

    format: WeightFormat
    codes: Weight
    scales: Weight | None = None
    offsets: Weight | None = None
    activation: str = "f32"
    activation_scale: float = 0.0
    columns: tuple[int, ...] = ()
    outliers: Weight | None = None
    expert: int | None = None
    integer_product: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape[-2:]
        return n, k

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    def load(self, weight: Weight) -> torch.Tensor:
        """The values that belong to this matrix."""
        return weight.load() if self.expert is None else weight.load_rows(self.expert, self.expert + 1)[0]

    def table(self, weight: Weight) -> np.ndarray:
        """Scales or offsets as f32 [N, groups]."""
        values: np.ndarray = self.load(weight).float().contiguous().numpy()
        return values


def matrix_of(low: Lowering, a: dict[str, Any], prefix: str = "", expert: int | None = None) -> Matrix:
    """The weight of a linear-like op's arguments, dense or quantised."""
    if f"{prefix}codes" not in a:
        weight = low.weight(a[prefix.rstrip("_") or "weight"], "weight")
        return Matrix(parse_weight("f32"), weight, expert=expert)
    parts = [a.get(f"{prefix}{part}") for part in ("codes", "scales", "offsets")]
    codes, scales, offsets = (None if part is None else low.weight(part, "weight") for part in parts)
    assert codes is not None
    format, activation, scale = (
        a["weight_format"],
        a.get("activation_format"),
        float(a.get("activation_scale", 0.0)),
    )
    if activation is not None and activation not in _activations(format):
        raise low.fail(f"{format} weights with {activation} activations", " or ".join(_activations(format)))
    if activation == "int8_static" and (prefix or not scale > 0):
        raise low.fail("int8_static activations " + ("of experts" if prefix else f"with the scale {scale}"))
    columns: tuple[int, ...] = ()
    outliers = None
    if a.get("outlier_columns") is not None:
        columns = tuple(int(i) for i in low.weight(a["outlier_columns"], "columns").load())
        outliers = low.weight(a["outlier_weight"], "weight") if columns else None
    users = a[f"{prefix}codes"].users
    return Matrix(
        parse_weight(format), codes, scales, offsets, activation or "f32", scale, columns, outliers, expert,
        any(op_name(user) == "ew::quantised_linear" and "int8" in arguments(user)["activation_format"] for user in users),
    )  # fmt: skip


def float_table(low: Lowering, matrix: Matrix) -> Value:
    """Float codes [N, K] in the type that they are stored as."""
    dtype = STORED_FLOATS[matrix.format.name]

    def load() -> np.ndarray:
        codes = matrix.load(matrix.codes).contiguous()
        if dtype == FLOAT:
            values: np.ndarray = codes.float().numpy()
            return values
        return codes.view(torch.uint8).numpy()

    return low.graph.weight(
        matrix.codes, ("float", matrix.expert), matrix.codes.name or "weight", matrix.shape, dtype, load
    )


def turned_codes(low: Lowering, matrix: Matrix) -> Value:
    n, k = matrix.shape
    return low.graph.weight(
        matrix.codes, ("turned", matrix.expert), matrix.codes.name, (k, n), INT8,
        lambda: matrix.load(matrix.codes).to(torch.int8).t().contiguous().numpy(),
    )  # fmt: skip


def planes(matrix: Matrix) -> tuple[str, ...]:
    return ("high", "low") if matrix.format.bits == 8 else ("whole",)


def block_size(matrix: Matrix) -> int:
    """Columns of one block: the format's group, or for a whole channel the largest that fits."""
    k = matrix.shape[1]
    return matrix.format.group or next((size for size in reversed(GROUPS) if k % size == 0), 32)


def blocks(low: Lowering, matrix: Matrix, plane: str) -> Value:
    """One plane of the codes as MatMulNBits reads them: uint8 [N, blocks, block / 2]."""
    n, k = matrix.shape
    block = block_size(matrix)

    def load() -> np.ndarray:
        codes = matrix.load(matrix.codes).numpy()
        if matrix.format.symmetric:
            codes = (codes.astype(np.int16) + 128).astype(np.uint8)
        return packed(plane_of(codes, plane), block)

    return low.graph.weight(
        matrix.codes,
        (plane, block, matrix.expert),
        matrix.codes.name,
        (n, -(-k // block), block // 2),
        UINT8,
        load,
    )


def each_block(tables: np.ndarray, matrix: Matrix, block: int) -> np.ndarray:
    """Scales [N, groups] -> [N, blocks]."""
    return tables if matrix.format.group else np.repeat(tables, -(-matrix.shape[1] // block), axis=1)


def whole_zeros(matrix: Matrix) -> np.ndarray | None:
    """Zero points [N, groups] that 4-bit blocks can carry as they are; None where there are none such."""
    if matrix.format.kind != "zero" or matrix.format.bits > 4 or matrix.offsets is None:
        return None
    zeros = matrix.table(matrix.offsets)
    return zeros if (zeros == zeros.round()).all() and zeros.min() >= 0 and zeros.max() <= 15 else None


def zero_points(low: Lowering, matrix: Matrix, plane: str) -> Value | None:
    """Zero points of a plane, two a byte; None for the middle code, 8. The low half of a signed byte has none."""
    n, k = matrix.shape
    count = -(-k // block_size(matrix))
    if plane == "low" and matrix.format.symmetric:
        return low.graph.constant(np.zeros((n, -(-count // 2)), np.uint8), "no_zero_points")
    zeros = whole_zeros(matrix)
    if zeros is None:
        return None
    assert matrix.offsets is not None
    each = each_block(zeros, matrix, block_size(matrix)).astype(np.uint8)

    def load() -> np.ndarray:
        return packed(each, -(-count // 2) * 2).reshape(n, -1)

    return low.graph.weight(
        matrix.offsets, ("zeros", matrix.expert), matrix.offsets.name, (n, -(-count // 2)), UINT8, load
    )


def scale_table(
    low: Lowering, matrix: Matrix, weight: Weight, form: Any, change: Any, shape: tuple[int, ...]
) -> Value:
    """Scales, changed, as an f32 initialiser."""
    return low.graph.weight(
        weight, (form, matrix.expert), weight.name or "scales", shape, FLOAT,
        lambda: np.ascontiguousarray(change(matrix.table(weight)), np.float32),
    )  # fmt: skip
