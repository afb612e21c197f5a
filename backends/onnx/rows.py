"""Rows of stored tables: embeddings and learned positions. A head tied to the table reads the same initialisers."""

from __future__ import annotations

from onnx import TensorProto

from enginewright.backends.onnx.graph import FLOAT, Value
from enginewright.backends.onnx.lowering import Lowering
from enginewright.backends.onnx.matrices import Matrix, blocks, float_table, planes, scale_table, turned_codes
from enginewright.passes.weights import Weight

__all__ = ["rows_of_table"]

UINT8 = TensorProto.UINT8


def rows_of_table(low: Lowering, matrix: Matrix, ids: Value) -> Value:
    """w[ids] [T, K] f32. A head tied to the table reads the same initialisers."""
    g = low.graph
    if matrix.format.kind == "float":
        rows = g.cast(g.gather(float_table(low, matrix), ids), FLOAT)
        if matrix.scales is None:
            return rows
        return g.mul(rows, g.gather(_plain_table(low, matrix, matrix.scales), ids), rows.shape)
    assert matrix.scales is not None
    codes = _code_rows(low, matrix, ids)
    scales = _spread(low, g.gather(_plain_table(low, matrix, matrix.scales), ids), matrix)
    if matrix.offsets is None:
        return g.mul(codes, scales, codes.shape)
    offsets = _spread(low, g.gather(_plain_table(low, matrix, matrix.offsets), ids), matrix)
    if matrix.format.kind == "zero":
        return g.mul(g.op("Sub", [codes, offsets], codes.shape), scales, codes.shape)
    return g.add(g.mul(codes, scales, codes.shape), offsets, codes.shape)


def _plain_table(low: Lowering, matrix: Matrix, weight: Weight) -> Value:
    return scale_table(low, matrix, weight, "plain", lambda s: s, weight.shape)


def _spread(low: Lowering, values: Value, matrix: Matrix) -> Value:
    """[T, groups] -> [T, K]: each group's value for each of its columns."""
    g = low.graph
    rows, groups = values.shape
    k, size = matrix.shape[1], matrix.format.group
    if not size:
        return values
    assert isinstance(groups, int)
    wide = g.op("Expand", [g.reshape(values, (rows, groups, 1)), g.ints(1, 1, size)], (rows, groups, size))
    return _first_columns(low, g.reshape(wide, (rows, groups * size)), k)


def _first_columns(low: Lowering, x: Value, count: int) -> Value:
    if x.shape[1] == count:
        return x
    return low.graph.op(
        "Slice", [x, low.graph.ints(0), low.graph.ints(count), low.graph.ints(1)], (x.shape[0], count)
    )


def _code_rows(low: Lowering, matrix: Matrix, ids: Value) -> Value:
    """Codes [T, K] of chosen rows as f32, from however the product with this table stores them."""
    g = low.graph
    k = matrix.shape[1]
    rows = ids.shape[0]
    if matrix.integer_product:
        turned = g.gather(turned_codes(low, matrix), ids, 1)
        return g.cast(g.op("Transpose", [turned], (rows, k), perm=[1, 0]), FLOAT)
    value: Value | None = None
    for plane in planes(matrix):
        held = g.gather(blocks(low, matrix, plane), ids)
        count, half = held.shape[1:]
        assert isinstance(count, int) and isinstance(half, int)
        first = g.op("BitwiseAnd", [held, g.scalar(15, UINT8)])
        second = g.op("BitShift", [held, g.scalar(4, UINT8)], direction="RIGHT")
        pairs = [g.reshape(part, (rows, count * half, 1)) for part in (first, second)]
        both = g.op("Concat", pairs, (rows, count * half, 2), axis=-1)
        whole = g.cast(_first_columns(low, g.reshape(both, (rows, count * half * 2)), k), FLOAT)
        if plane == "high":
            whole = g.mul(whole, g.scalar(16.0))
        value = whole if value is None else g.add(value, whole)
    assert value is not None
    return g.op("Sub", [value, g.scalar(128.0)]) if matrix.format.symmetric else value
