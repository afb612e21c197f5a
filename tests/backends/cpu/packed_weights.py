"""Random packed weights for kernel tests: the layout of formats.h, written again for clarity only."""

from dataclasses import dataclass

import numpy as np

FORMATS = ("f32", "bf16", "int8", "int8_g32", "int4_g32", "int4_g64", "int4_g128")
GROUPS = {"int8": 32, "int8_g32": 32, "int4_g32": 32, "int4_g64": 64, "int4_g128": 128}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """f32 to bf16, nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class PackedWeight:
    """`data` is the packed bytes; `values` the float64 matrix [n, k] that they stand for."""

    format: str
    n: int
    k: int
    data: np.ndarray
    values: np.ndarray


def _tiles(matrix: np.ndarray, columns: int, fill: float = 0) -> np.ndarray:
    """[n, c] to [tiles, 16, columns], padded with `fill`."""
    rows = round_up(matrix.shape[0], 16)
    padded = np.full((rows, columns), fill, matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(rows // 16, 16, columns)


def _body(tiles: np.ndarray, step: int) -> np.ndarray:
    """[tiles, 16, k] to [tiles, k / step, 16, step] as bytes per tile."""
    count, _, k = tiles.shape
    ordered = tiles.reshape(count, 16, k // step, step).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(ordered).reshape(count, -1).view(np.uint8)


def _header(per_row: np.ndarray, dtype: type) -> np.ndarray:
    """[n, groups] to the header's [tiles, groups, 16] as bytes per tile."""
    tiles = _tiles(per_row.astype(dtype), per_row.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).reshape(tiles.shape[0], -1).view(np.uint8)


def _join(*parts: np.ndarray) -> np.ndarray:
    tile = np.concatenate(parts, axis=1)
    return np.ascontiguousarray(tile).reshape(-1)


def _pad_to_64(header: np.ndarray) -> np.ndarray:
    return np.pad(header, ((0, 0), (0, -header.shape[1] % 64)))


def pack_float(format: str, weight: np.ndarray) -> PackedWeight:
    n, k = weight.shape
    if format == "f32":
        weight = weight.astype(np.float32)
        return PackedWeight(format, n, k, _join(_body(_tiles(weight, k), 1)), weight.astype(np.float64))
    bits = to_bf16_bits(weight)
    data = _join(_body(_tiles(bits, round_up(k, 2)), 2))
    return PackedWeight(format, n, k, data, from_bf16_bits(bits).astype(np.float64))


def pack_int8(format: str, codes: np.ndarray, scales: np.ndarray) -> PackedWeight:
    """codes int8 [n, k]; scales [n, 1], or [n, groups] for int8_g32."""
    n, k = codes.shape
    stored = (codes.astype(np.int16) + 128).astype(np.uint8)
    body = _body(_tiles(stored, round_up(k, GROUPS[format]), 128), 4)
    if format == "int8":
        header = _header(scales, np.float32)
        per_column = scales.astype(np.float32).astype(np.float64)
    else:
        header = _pad_to_64(_header(scales, np.float16))
        per_column = np.repeat(scales.astype(np.float16).astype(np.float64), 32, axis=1)[:, :k]
    return PackedWeight(format, n, k, _join(header, body), codes * per_column)


def pack_int4(format: str, codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> PackedWeight:
    """codes uint8 0..15 [n, k]; scales and offsets [n, groups]."""
    n, k = codes.shape
    group = GROUPS[format]
    tiles = _tiles(codes.astype(np.uint8), round_up(k, group))
    eights = tiles.reshape(tiles.shape[0], 16, -1, 2, 4)
    pairs = (eights[:, :, :, 0] | eights[:, :, :, 1] << 4).reshape(tiles.shape[0], 16, -1)
    data = _join(_header(scales, np.float16), _header(offsets, np.float16), _body(pairs, 4))

    def per_column(part: np.ndarray) -> np.ndarray:
        return np.repeat(part.astype(np.float16).astype(np.float64), group, axis=1)[:, :k]

    return PackedWeight(format, n, k, data, codes * per_column(scales) + per_column(offsets))


def random_weight(rng: np.random.Generator, format: str, n: int, k: int) -> PackedWeight:
    if format in ("f32", "bf16"):
        return pack_float(format, rng.normal(size=(n, k)))
    groups = round_up(k, GROUPS[format]) // GROUPS[format]
    scales = rng.uniform(0.001, 0.02, (n, 1 if format == "int8" else groups))
    if format.startswith("int8"):
        return pack_int8(format, rng.integers(-128, 128, (n, k)).astype(np.int8), scales)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    return pack_int4(format, codes, scales, rng.uniform(-0.1, 0.05, (n, groups)))
