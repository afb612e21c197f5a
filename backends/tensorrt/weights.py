"""Matrices as constants of a network, in the layouts that TensorRT fuses, and the products with them.

A matrix [N, K] of the Program stands as [K, N]: a table of rows that is also a head is gathered along its second axis, so that
both read one constant. What was measured on TensorRT-RTX 1.7 (plans for sm80):

- **int4**: a dequantise layer of [K, N] with scales [K/g, N] and no block shape (the scales' shape says it) becomes part of the
  product's kernel, and the payload stays 4 bits. One scale a whole column does not fuse, so it is repeated in blocks.
- **int8**: one scale a column fuses; blocks do not: the matrix is then dequantised in a kernel of its own at every step.
- Codes are symmetric. What is stored with offsets or zero points has its codes moved by half their range, and what that adds is
  a correction: y = x · DQ(q) + blocksum(x) · C, C [K/g, N].
- Quantised constants are read by dequantise layers alone, and a layer that two readers share is computed whole, into memory. So
  a tied table has two, in different types, over one constant: then each fuses with its own reader.

Blocks must divide K. Where a format's groups do not, they are cut to the largest power of two that divides both, and if that is
below 16, K is filled up with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginewright.backends.tensorrt.lowering import Lowering, Refused
from enginewright.passes.dialect.numerics import spread
from enginewright.passes.weights import Weight
from enginewright.recipes import formats
from enginewright.recipes.formats import parse_weight

__all__ = ["ACTIVATION_FORMATS", "WEIGHT_FORMATS", "Matrix", "activations_for", "dense", "pack_int4", "split"]

WEIGHT_FORMATS = tuple(name for name in formats.WEIGHT_FORMATS if name != "fp8")
"""All but fp8. int2 and int3 are held as int4."""

ACTIVATION_FORMATS = ("f16", "bf16", "f32")

_SMALLEST_BLOCK = 16
_COLUMN_BLOCK = 128  # inputs to which an int4 column's only scale is repeated
_SMALLEST_NORMAL_F16 = 2.0**-14


def activations_for(weight: str) -> tuple[str, ...]:
    """Activation formats that are multiplied with these weights, the usual one first."""
    form = parse_weight(weight)
    if form.kind == "float":
        return formats.activations_for(weight)
    return (*ACTIVATION_FORMATS, "int8", "int8_static") if weight == "int8" else ACTIVATION_FORMATS


def pack_int4(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Codes -8 … 7, an even number of them, as bytes in row-major order: the first of a pair in the low nibble."""
    nibbles = (codes.reshape(-1) & 0xF).astype(np.uint8)
    return np.ascontiguousarray(nibbles[0::2] | (nibbles[1::2] << 4))


@dataclass
class Matrix:
    """A quantised matrix, or a stack of them, in TensorRT's terms: codes [..., K', N] int8, of `bits` 4 or 8.

    scales [..., B, N] f32, one a block of K'/B inputs. shift [..., B, N] f32: what the correction multiplies the
    blocks' sums by; None where it is zero. K' is K, filled up with zeros where `fill` > 0.
    """

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    shift: npt.NDArray[np.float32] | None
    bits: int
    fill: int = 0

    @property
    def block(self) -> int:
        return self.codes.shape[-2] // self.scales.shape[-2]


def split(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, weight_format: str
) -> Matrix:
    """A stored matrix: codes [..., N, K], scales and offsets [..., N, groups]  ->  the same values as a Matrix."""
    form = parse_weight(weight_format)
    k = codes.shape[-1]
    bits = 4 if form.bits <= 4 else 8
    middle = 0 if form.symmetric else 1 << form.bits - 1
    block = _block(k, form.group, bits)
    fill = -k % block
    scale = _in_blocks(scales, form.group, k, block)
    shift = None
    if offsets is not None:
        stored = _in_blocks(offsets, form.group, k, block)
        # scale·(q + middle) + offset, or scale·(q + middle - zero)
        added = scale * (middle - stored) if form.kind == "zero" else scale * middle + stored
        shift = added if bool((added != 0).any()) else None
    moved = (codes.to(torch.int16) - middle).to(torch.int8)
    turned = torch.nn.functional.pad(moved, (0, fill)).transpose(-1, -2).contiguous()
    return Matrix(turned.numpy(), _turned(scale), None if shift is None else _turned(shift), bits, fill)


def _block(k: int, group: int, bits: int) -> int:
    """Inputs that share a scale in the constant."""
    if not group and bits == 8:
        return k
    block = math.gcd(k, group or _COLUMN_BLOCK)
    return block if block >= _SMALLEST_BLOCK else min(group or _SMALLEST_BLOCK, _SMALLEST_BLOCK)


def _in_blocks(table: torch.Tensor, group: int, k: int, block: int) -> torch.Tensor:
    """[..., N, groups] -> [..., N, blocks] f32: the value of each block's group."""
    if not group:
        return table.float().expand(*table.shape[:-1], -(-k // block))
    return spread(table, group, k)[..., ::block]


def _turned(table: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(table.transpose(-1, -2).numpy())


# Constants.


def dense(low: Lowering, weight: Weight, kind: str) -> Any:
    """A dense matrix [..., N, K] as a constant [..., K, N] of type f32, f16 or bf16; added once."""
    key = ("dense", id(weight), kind)
    if key not in low.shared:
        values = weight.load()
        torch_type = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        turned = values.to(torch_type).transpose(-1, -2).contiguous()
        low.shared[key] = (_float_constant(low, turned, weight.name, kind), weight)
    return low.shared[key][0]


def _float_constant(low: Lowering, values: torch.Tensor, name: str, kind: str) -> Any:
    if kind == "bf16":
        return low.constant(values.view(torch.uint16).numpy(), name, "bf16", values.shape)
    return low.constant(values.numpy(), name)


def floats(low: Lowering, values: npt.NDArray[np.float32], name: str, kind: str) -> Any:
    """Values as a constant of a float type."""
    torch_type = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    return _float_constant(low, torch.from_numpy(np.ascontiguousarray(values)).to(torch_type), name, kind)


@dataclass
class Stored:
    """A Matrix in the network: the constant of its codes, and the figures that go with it."""

    codes: Any
    matrix: Matrix
    name: str


def stored(
    low: Lowering, codes: Weight, scales: Weight, offsets: Weight | None, weight_format: str
) -> Stored:
    """The constant of a quantised matrix's codes; added once however many nodes name it."""
    key = ("stored", id(codes))
    if key not in low.shared:
        offset = None if offsets is None else offsets.load()
        matrix = split(codes.load(), scales.load(), offset, weight_format)
        if parse_weight(weight_format).bits < 4:
            low.note(f"{weight_format} matrices are held in 4 bits a code: TensorRT has no smaller integers")
        shape = matrix.codes.shape
        if matrix.bits == 4 and matrix.codes.size % 2:
            raise Refused(f"{list(shape)} codes of 4 bits", "an even number of them")
        name = codes.name
        if matrix.bits == 4:
            tensor = low.constant(pack_int4(matrix.codes), name, "int4", shape)
        else:
            tensor = low.constant(matrix.codes, name)
        low.shared[key] = (Stored(tensor, matrix, name.removesuffix(".codes")), codes)
    found: Stored = low.shared[key][0]
    return found


def dequantised(low: Lowering, held: Stored, kind: str) -> tuple[Any, float]:
    """The codes times their scales as a tensor [..., K', N] of a float type, and a factor that is still to be multiplied.

    The factor is a power of two, and not 1 where scales would lie below the normal range of f16.
    """
    key = ("dequantised", id(held), kind)
    if key not in low.shared:
        scales, factor = held.matrix.scales, 1.0
        positive = scales[scales > 0]
        if kind == "f16" and positive.size and float(positive.min()) < _SMALLEST_NORMAL_F16:
            factor = 2.0 ** math.floor(math.log2(float(positive.max())))
            scales = scales / np.float32(factor)
        rank, whole = len(scales.shape), scales.shape[-2] == 1 and held.matrix.bits == 8
        figures = scales.reshape(-1) if whole and rank == 2 else scales
        table = floats(low, figures, f"{held.name}.scales", kind)
        layer = low.named(low.network.add_dequantize(held.codes, table, low.types[kind]), "dequantise")
        if whole and rank == 2:
            layer.axis = 1
        low.shared[key] = (layer.get_output(0), factor)
    found: tuple[Any, float] = low.shared[key]
    return found


# Products.


def filled(low: Lowering, x: Any, fill: int) -> Any:
    """x with so many zeros after its last axis."""
    if not fill:
        return x
    rank = len(x.shape)
    return low.sliced(x, rank - 1, 0, x.shape[-1] + fill, fill=True)


def product(low: Lowering, x: Any, held: Stored, kind: str) -> Any:
    """x [..., K] · a quantised matrix  ->  [..., N] float32. Both factors are of type `kind`."""
    matrix = held.matrix
    if matrix.bits == 8 and matrix.scales.shape[-2] > 1:
        low.note("int8 matrices with several scales a column are dequantised before each product (not fused)")
    x = filled(low, low.cast(x, kind), matrix.fill)
    table, factor = dequantised(low, held, kind)
    y = low.cast(low.matmul(x, _beside(low, table, x)), "f32")
    if factor != 1.0:
        y = low.elementwise("PROD", y, low.number(factor, len(y.shape)))
    if matrix.shift is None:
        return y
    correction = floats(low, matrix.shift, f"{held.name}.shift", kind)
    sums = low.cast(block_sums(low, x, matrix.block), kind)
    return low.elementwise("SUM", y, low.cast(low.matmul(sums, _beside(low, correction, sums)), "f32"))


def _beside(low: Lowering, table: Any, x: Any) -> Any:
    """A table of as many axes as x: products broadcast axes of one."""
    return low.ranked(table, len(x.shape))


def block_sums(low: Lowering, x: Any, block: int) -> Any:
    """x [..., K] -> the sums of blocks of its last axis, [..., K / block] float32."""
    rank = len(x.shape)
    parts = low.shuffle(x, [0] * (rank - 1) + [x.shape[-1] // block, block])
    return low.reduce("SUM", low.cast(parts, "f32"), [rank], keep=False)


def integer_product(low: Lowering, x: Any, held: Stored, scale: float | None) -> Any:
    """x [..., K] rounded to int8 · an int8 matrix of one scale a column  ->  [..., N] float32.

    scale: of all activations; None: max|x| / 127 of each row. A quantise layer takes constants alone, no row's
    scale: x is divided by it before, rounded with the scale 1, and the product is multiplied by it after.
    """
    x, rank = low.cast(x, "f32"), len(x.shape)
    row = None
    if scale is None:
        most = low.reduce("MAX", low.unary("ABS", x), [rank - 1])
        row = low.elementwise("PROD", most, low.number(1 / 127, rank))
        row = low.elementwise("MAX", row, low.number(2.0**-100, rank))  # a row of zeros stays one
        x = low.elementwise("DIV", x, row)
    else:
        x = low.elementwise("MIN", x, low.number(127 * scale, rank))
        x = low.elementwise("MAX", x, low.number(-127 * scale, rank))
    step = low.constant(np.float32(1.0 if scale is None else scale).reshape(()), f"{held.name}.step")
    codes = low.out(low.network.add_quantize(x, step, low.types["int8"]), "quantise")
    rounded = low.out(low.network.add_dequantize(codes, step, low.types["f32"]), "dequantise")
    table, _ = dequantised(low, held, "f32")
    y = low.matmul(rounded, _beside(low, table, rounded))
    return y if row is None else low.elementwise("PROD", y, row)


def rows(low: Lowering, held: Stored, ids: Any, features: Sequence[int]) -> Any:
    """Rows of a table of which `held` is the transposed matrix: [T] ids  ->  [T, F] float32."""
    matrix = held.matrix
    table, _ = dequantised(low, held, "f32")  # in a type of its own: see above
    picked = low.shuffle(low.gather(table, ids, 1), first=(1, 0))
    if matrix.shift is not None:
        shift = floats(low, matrix.shift, f"{held.name}.shift", "f32")
        of_row = low.shuffle(low.gather(shift, ids, 1), first=(1, 0))  # [T, B]
        blocks = low.shuffle(picked, [0, matrix.scales.shape[-2], matrix.block])
        blocks = low.elementwise("SUM", blocks, low.shuffle(of_row, [0, 0, 1]))
        picked = low.shuffle(blocks, [0, matrix.codes.shape[-2]])
    return low.sliced(picked, 1, 0, features[-1]) if matrix.fill else picked
