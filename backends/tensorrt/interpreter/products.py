"""Rules of products and of quantisation."""

from __future__ import annotations

import numpy as np

from .rules import Call, InterpreterError, rule
from .values import Array

__all__: list[str] = []


@rule("MATRIX_MULTIPLY", "IMatrixMultiplyLayer")
def matrix_multiply(call: Call) -> list[Array]:
    """op:MatrixMultiply. Products of the last two axes, or of vectors; the axes before them match or are 1. Sums are float32."""
    layer, left, right = call.layer, call[0], call[1]
    if left.dtype != np.float32 or right.dtype != np.float32:
        raise InterpreterError(f"a product of {left.dtype} and {right.dtype}")
    ops = (layer.op0.name, layer.op1.name)
    if ops[0] == "VECTOR":
        left = left[..., None, :]
    elif ops[0] == "TRANSPOSE":
        left = left.swapaxes(-1, -2)
    if ops[1] == "VECTOR":
        right = right[..., None]
    elif ops[1] == "TRANSPOSE":
        right = right.swapaxes(-1, -2)
    if left.ndim != right.ndim:
        raise InterpreterError(f"matrices of ranks {left.ndim} and {right.ndim}")
    found = left @ right
    if ops[1] == "VECTOR":
        found = found[..., 0]
    if ops[0] == "VECTOR":
        found = found[..., 0] if ops[1] == "VECTOR" else found[..., 0, :]
    return [found]


@rule("EINSUM", "IEinsumLayer")
def einsum(call: Call) -> list[Array]:
    """op:Einsum. Einstein's summation over the axes that the equation names."""
    return [np.einsum(call.layer.equation, *(call[i] for i in range(len(call.inputs))), dtype=np.float32)]


def _spread(scale: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A scale over a tensor of that shape: one for all, one a place of the axis, or one a block (its shape says the blocks')."""
    if scale.size == 1:
        return scale.reshape((1,) * len(shape))
    if scale.ndim == 1:
        if not 0 <= axis < len(shape) or len(scale) != shape[axis]:
            raise InterpreterError(f"{len(scale)} scales for axis {axis} of {shape}")
        return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    if scale.ndim != len(shape) or any(
        size % blocks for size, blocks in zip(shape, scale.shape, strict=True)
    ):
        raise InterpreterError(f"scales {scale.shape} do not divide {shape} into blocks")
    for i, (size, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // blocks, axis=i)
    return scale


def _unshifted(call: Call) -> None:
    """api:IDequantizeLayer: a zero point "must only contain zero-valued coefficients"."""
    zero = call.given(2)
    if zero is not None and zero.any():
        raise InterpreterError("a zero point that is not zero")


@rule("DEQUANTIZE", "IDequantizeLayer")
def dequantize(call: Call) -> list[Array]:
    """op:Dequantize. input · scale, in the type of the output."""
    _unshifted(call)
    x = call[0]
    if x.dtype != np.int8:
        raise InterpreterError(f"it dequantises {x.dtype}")
    return [x.astype(np.float32) * _spread(call[1], x.shape, call.layer.axis)]


@rule("QUANTIZE", "IQuantizeLayer")
def quantize(call: Call) -> list[Array]:
    """op:Quantize; api:IQuantizeLayer. clamp(round(input / scale)), halves to even: -128 to 127, INT4 -8 to 7."""
    _unshifted(call)
    low, high = {"INT8": (-128, 127), "INT4": (-8, 7)}[call.outputs[0]]
    x = call[0]
    return [np.clip(np.rint(x / _spread(call[1], x.shape, call.layer.axis)), low, high)]
