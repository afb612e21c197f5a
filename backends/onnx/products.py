"""Products with stored weights, and rows of stored tables: how each weight format becomes ONNX operators.

| weights | stored as | the product |
|---|---|---|
| f32, f16, bf16, fp8 | as they are, [N, K] | Gemm with the other factor transposed; ONNX Runtime widens them once, at load |
| int2, int3, int4 (grouped or not) | 4-bit blocks | MatMulNBits, exact (accuracy level 0) |
| uint8, int8 | two planes of 4-bit blocks | code = 16 · high + low: two MatMulNBits and their sum |
| int8 a channel, int8 activations | int8 [K, N] | MatMulInteger of uint8 activations (zero point 128), exact int32 sums |

MatMulNBits takes integer zero points as quickly as none. With float ones, and with 2 or 8 bits, ONNX Runtime's CPU widens the
whole matrix at each call, which takes over twenty times as long for one row. So blocks are stored around the middle code,
w = s · (c - 8) + d, and what is left of a float offset, d, one number a group, meets the sums of the activations' groups in one
Gemm: x · w = x · (s · (c - 8)) + groupsums(x) · D.
"""

from __future__ import annotations

import numpy as np
import torch
from onnx import TensorProto

from enginewright.backends.onnx.graph import FLOAT, MICROSOFT, Size, Value
from enginewright.backends.onnx.lowering import Lowering
from enginewright.backends.onnx.matrices import (
    STORED_FLOATS,
    Matrix,
    block_size,
    blocks,
    each_block,
    float_table,
    planes,
    scale_table,
    turned_codes,
    whole_zeros,
    zero_points,
)

__all__ = ["product", "rounded"]

UINT8, INT32 = TensorProto.UINT8, TensorProto.INT32


def product(low: Lowering, x: Value, matrix: Matrix, bias: Value | None) -> Value:
    """x [..., K] · wᵀ + bias  ->  [..., N]."""
    g = low.graph
    n, k = matrix.shape
    flat = x if len(x.shape) == 2 else g.reshape(x, (f"rows of {x.name}", k))
    out: tuple[Size, ...] = (flat.shape[0], n)
    aside: Value | None = None
    if matrix.columns:
        aside = _columns_apart(low, flat, matrix)
        kept = np.ones(k, np.float32)
        kept[list(matrix.columns)] = 0
        flat = g.mul(flat, g.constant(kept))
    if matrix.activation in ("int8", "int8_static"):
        y = _integer_product(low, flat, matrix, out)
    else:
        flat = rounded(low, flat, matrix.activation)
        if matrix.format.kind == "float":
            y = _float_product(low, flat, matrix, out, bias)
            bias = bias if matrix.format.name == "fp8" else None
        else:
            y = _block_product(low, flat, matrix, out)
    for term in (aside, bias):
        y = y if term is None else g.add(y, term, out)
    return g.reshape(y, (*x.shape[:-1], n))


def rounded(low: Lowering, x: Value, activation: str) -> Value:
    """x as f16 or bf16 carries it, in f32."""
    if activation == "f32":
        return x
    return low.graph.once(
        (x.name, activation), lambda: low.graph.cast(low.graph.cast(x, STORED_FLOATS[activation]), FLOAT)
    )


def _float_product(
    low: Lowering, x: Value, matrix: Matrix, out: tuple[Size, ...], bias: Value | None
) -> Value:
    g = low.graph
    weight = g.cast(float_table(low, matrix), FLOAT)
    if matrix.format.name != "fp8":
        return g.op("Gemm", [x, weight, bias], out, transB=1)
    assert matrix.scales is not None
    scales = scale_table(
        low, matrix, matrix.scales, "channel scales", lambda s: s.reshape(-1), (matrix.shape[0],)
    )
    return g.mul(g.op("Gemm", [x, weight], out, transB=1), scales)


def _integer_product(low: Lowering, x: Value, matrix: Matrix, out: tuple[Size, ...]) -> Value:
    g = low.graph
    assert matrix.scales is not None
    middle = g.scalar(128, UINT8)
    if matrix.activation == "int8_static":
        given = g.scalar(matrix.activation_scale)
        codes = g.op("QuantizeLinear", [x, given, middle], x.shape, UINT8)
        codes = g.op("Max", [codes, g.scalar(1, UINT8)])  # -128 is no code
        scale = given
    else:
        row = (x.shape[0], 1)
        largest = g.op("ReduceMax", [g.op("Abs", [x]), g.ints(-1)], row, keepdims=1)
        scale = g.op("Div", [largest, g.scalar(127.0)])
        unit = g.op(
            "Where",
            [g.op("Greater", [scale, g.scalar(0.0)], dtype=TensorProto.BOOL), scale, g.scalar(1.0)],
            row,
            FLOAT,
        )
        whole = g.op("Round", [g.op("Div", [x, unit])])
        whole = g.op("Clip", [whole, g.scalar(-127.0), g.scalar(127.0)])
        codes = g.cast(g.add(whole, g.scalar(128.0)), UINT8)
    sums = g.op("MatMulInteger", [codes, turned_codes(low, matrix), middle], out, INT32)
    channels = scale_table(
        low, matrix, matrix.scales, "channel scales", lambda s: s.reshape(-1), (matrix.shape[0],)
    )
    return g.mul(g.mul(g.cast(sums, FLOAT), channels), scale)


def _block_product(low: Lowering, x: Value, matrix: Matrix, out: tuple[Size, ...]) -> Value:
    """Weights as 4-bit blocks around their middle code, one plane or two, and what groups are shifted by."""
    g = low.graph
    n, k = matrix.shape
    block = block_size(matrix)
    assert matrix.scales is not None
    y: Value | None = None
    for plane in planes(matrix):
        factor = 16 if plane == "high" else 1
        scales = scale_table(
            low, matrix, matrix.scales, ("blocks", block, factor),
            lambda s, f=factor: each_block(s, matrix, block) * np.float32(f), (n, -(-k // block)),
        )  # fmt: skip
        part = g.op(
            "MatMulNBits", [x, blocks(low, matrix, plane), scales, zero_points(low, matrix, plane)], out,
            domain=MICROSOFT, K=k, N=n, bits=4, block_size=block, accuracy_level=0,
        )  # fmt: skip
        y = part if y is None else g.add(y, part, out)
    assert y is not None
    return y if matrix.format.symmetric or whole_zeros(matrix) is not None else _shifted(low, x, y, matrix)


def _shifted(low: Lowering, x: Value, y: Value, matrix: Matrix) -> Value:
    """y + groupsums(x) · D, with D [groups, N] what each group's weights are shifted by."""
    g = low.graph
    n, k = matrix.shape
    groups, size = matrix.format.groups(k), matrix.format.group or k
    middle = 136 if matrix.format.bits == 8 else 8
    scales, offsets = matrix.scales, matrix.offsets
    assert scales is not None and offsets is not None

    def shifts() -> np.ndarray:
        s, o = matrix.table(scales), matrix.table(offsets)
        shift = s * (middle - o) if matrix.format.kind == "zero" else o + middle * s
        return np.ascontiguousarray(shift.T)

    table = g.weight(offsets, ("shifts", matrix.expert), offsets.name or "shifts", (groups, n), FLOAT, shifts)
    return g.op("Gemm", [_group_sums(low, x, groups, size), table, y], y.shape)


def _group_sums(low: Lowering, x: Value, groups: int, size: int) -> Value:
    """x [T, K] -> [T, groups]: the sum of each group of columns; the last may be short."""
    g = low.graph
    rows, k = x.shape
    assert isinstance(k, int)

    def make() -> Value:
        whole = x
        if groups * size != k:
            whole = g.op("Pad", [x, g.ints(0, 0, 0, groups * size - k)], (rows, groups * size))
        parts = g.reshape(whole, (rows, groups, size))
        return g.op("ReduceSum", [parts, g.ints(2)], (rows, groups), keepdims=0)

    return g.once(("sums", x.name, size), make)


def _columns_apart(low: Lowering, x: Value, matrix: Matrix) -> Value:
    """bf16(x[columns]) · outliersᵀ."""
    g = low.graph
    outliers = matrix.outliers
    assert outliers is not None
    picked = g.gather(x, g.constant(np.array(matrix.columns, np.int64)), 1)
    weight = g.weight(
        outliers, "float", outliers.name or "outliers", outliers.shape, TensorProto.BFLOAT16,
        lambda: outliers.load().to(torch.bfloat16).contiguous().view(torch.uint8).numpy(),
    )  # fmt: skip
    return g.op(
        "Gemm", [rounded(low, picked, "bf16"), g.cast(weight, FLOAT)], (x.shape[0], matrix.shape[0]), transB=1
    )
