"""Random packed weights for kernel tests: the layout of formats.h, written again byte by byte, for clarity only."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from enginewright.recipes.formats import parse_weight


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """f32 to bf16, nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_fp8(codes: np.ndarray) -> np.ndarray:
    """float8 e4m3fn to float64: 4 bits of exponent with bias 7, 3 of mantissa, no infinity, NaN where all are set."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.float64), (codes & 7).astype(np.float64)
    value = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa / 8), mantissa * 2.0**-9)
    return np.where(codes & 127 == 127, np.nan, value) * np.where(codes & 128, -1.0, 1.0)


@dataclass
class PackedWeight:
    """`data` is the packed bytes; `values` the float64 matrix [n, k] that they stand for.

    `bounds` [n, k] are magnitudes of what the kernel adds for each value, of which offsets may cancel much. `columns` are
    kept apart in bf16; their values stand in `values` too.
    """

    format: str
    n: int
    k: int
    data: np.ndarray
    values: np.ndarray
    bounds: np.ndarray
    columns: list[int]


def _padded(matrix: np.ndarray, columns: int, fill: int = 0) -> np.ndarray:
    """[n, c] to [16 * tiles, columns]."""
    padded = np.full((round_up(matrix.shape[0], 16), columns), fill, matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _interleaved(matrix: np.ndarray, step: int) -> np.ndarray:
    """[16 * tiles, k] to [tiles, k / step, 16, step] as bytes a tile."""
    tiles = matrix.reshape(-1, 16, matrix.shape[1] // step, step).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiles).reshape(tiles.shape[0], -1).view(np.uint8)


def _to_64(part: np.ndarray) -> np.ndarray:
    return np.pad(part, ((0, 0), (0, -part.shape[1] % 64)))


def _bit(format: str, row: np.ndarray, k: np.ndarray, bit: int) -> np.ndarray:
    """Where a bit of the codes at (row, k) lies in its tile's body, counted in bits."""
    bits = parse_weight(format).bits
    if format == "fp8":
        return 8 * (k // 4 * 64 + row // 4 * 16 + k % 4 // 2 * 8 + row % 4 * 2 + k % 2) + bit
    step = 4 if bits == 8 else 8 if bits == 4 else 16
    quad, i = k % step // 4, 4 * row + k % 4
    if bits != 3:
        return 8 * (k // step * 64 + i) + bits * quad + bit
    block = k // 16 * 96
    if bit < 2:
        return 8 * (block + i) + 2 * quad + bit
    return 8 * (block + 64 + i % 32) + (2 * quad + 2 + i // 32) % 8


@functools.cache
def _bits(format: str, k_padded: int) -> np.ndarray:
    """[16, k_padded, bits] of `_bit`."""
    row, k = np.indices((16, k_padded))
    return np.stack([_bit(format, row, k, bit) for bit in range(parse_weight(format).bits)], axis=2)


def _body(format: str, codes: np.ndarray) -> np.ndarray:
    """The bodies of codes [16 * tiles, k_padded], uint8."""
    rows, k_padded = codes.shape
    size = round_up(k_padded * 16 * parse_weight(format).bits // 8, 64)
    body, where = np.zeros((rows // 16, 8 * size), np.uint8), _bits(format, k_padded)
    for bit in range(where.shape[2]):
        body[:, where[..., bit]] = codes.reshape(-1, 16, k_padded) >> bit & 1
    return np.packbits(body, axis=1, bitorder="little")


def pack_float(format: str, weight: np.ndarray) -> PackedWeight:
    n, k = weight.shape
    if format == "f32":
        stored, step, values = weight.astype(np.float32), 1, weight.astype(np.float32)
    else:
        stored, step = to_bf16_bits(weight), 2
        values = from_bf16_bits(stored)
    data = _interleaved(_padded(stored, round_up(k, step)), step).reshape(-1)
    return PackedWeight(format, n, k, data, values.astype(np.float64), np.abs(values), [])


def pack_codes(
    format: str,
    codes: np.ndarray,
    scales: np.ndarray,
    seconds: np.ndarray | None = None,
    columns: list[int] | None = None,
    outliers: np.ndarray | None = None,
) -> PackedWeight:
    """codes [n, k] int8 or uint8 (fp8: bits); scales, and offsets or zero points, [n, groups]; outliers [n, C]."""
    form, (n, k) = parse_weight(format), codes.shape
    step = 4 if format == "fp8" else form.group or 32
    stored, fill = (codes.astype(np.int16) + 128, 128) if form.symmetric else (codes, 0)
    body = _body(format, _padded(stored.astype(np.uint8), round_up(k, step), fill))
    dtype = np.float32 if format in ("int8", "fp8") else np.float16
    tables = [scales.astype(dtype)] + ([] if seconds is None else [seconds.astype(dtype)])
    header = np.concatenate([_interleaved(_padded(table, table.shape[1]), 1) for table in tables], axis=1)
    parts = [_to_64(header), body]

    def spread(table: np.ndarray) -> np.ndarray:
        return np.repeat(table.astype(np.float64), form.group or k, axis=1)[:, :k]

    real = from_fp8(codes) if format == "fp8" else codes.astype(np.float64)
    scale, second = spread(tables[0]), spread(tables[1]) if seconds is not None else 0.0
    if form.kind == "zero":
        values, bounds = (real - second) * scale, (real + np.abs(second)) * scale
    else:
        values, bounds = real * scale + second, np.abs(real) * scale + np.abs(second)
    columns = columns or []
    if columns:
        assert outliers is not None and (codes[:, columns] == 0).all()
        bits = to_bf16_bits(outliers)
        parts.append(_interleaved(_padded(bits, round_up(len(columns), 2)), 2))
        values[:, columns] = from_bf16_bits(bits)
        bounds[:, columns] = np.abs(values[:, columns])
    data = np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(-1)
    return PackedWeight(format, n, k, data, values, bounds, columns)


def random_weight(rng: np.random.Generator, format: str, n: int, k: int, outliers: int = 0) -> PackedWeight:
    """Every code of the format may occur (of fp8: but NaN); `outliers` columns are kept apart."""
    form = parse_weight(format)
    if format in ("f32", "bf16"):
        return pack_float(format, rng.normal(size=(n, k)))
    groups = form.groups(k)
    scales = rng.uniform(0.001, 0.02, (n, groups))
    if format == "fp8":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        return pack_codes(format, np.where(codes & 127 == 127, 1, codes).astype(np.uint8), scales)
    if form.symmetric:
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
        columns = sorted(rng.choice(k, min(outliers, k), replace=False).tolist())
        codes[:, columns] = 0
        return pack_codes(format, codes, scales, None, columns, rng.normal(size=(n, len(columns))))
    codes = rng.integers(0, 2**form.bits, (n, k)).astype(np.uint8)
    if form.kind == "zero":
        zeros = rng.integers(0, 2**form.bits + 1, (n, groups))
        return pack_codes(format, codes, scales, zeros)
    return pack_codes(format, codes, scales, rng.uniform(-0.1, 0.05, (n, groups)))
