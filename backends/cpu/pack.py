"""How matrices lie in weights.bin: tiles of 16 output rows, each one sequential stream for the kernels.

A matrix [N, K] is padded with zero rows to N16 = 16 * tiles, and along K with zero columns to Kp. Tiles follow one
another; within a tile the 16 rows are interleaved so that one 64-byte block holds all of them for a few consecutive k:

    f32        Kp = K                   [Kp][16] f32
    bf16       Kp multiple of 2         [Kp/2][16][2] bf16
    int8       Kp multiple of 32        16 f32 scales (one a row), then [Kp/4][16][4] u8 = code + 128
    int8_g32   Kp multiple of 32        [Kp/32][16] f16 scales, zeros to a multiple of 64 bytes, then as int8
    int4_gG    Kp multiple of G         [Kp/G][16] f16 scales, [Kp/G][16] f16 offsets, then [Kp/8][16][4] u8, where
                                        byte j of a row in block o is code(8o + j) | code(8o + 4 + j) << 4

A weight's value is scale * code (int8: code -127..127) or scale * code + offset (int4: code 0..15). Padding holds code
zero (the stored byte 128 for int8) and scale zero. Every tile's size is a multiple of 64 bytes. All is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "FORMATS",
    "TILE_ROWS",
    "Layout",
    "Rows",
    "interleave_tiles",
    "pack_tiles",
    "to_bf16",
    "unpack_tiles",
]

TILE_ROWS = 16
FORMATS = ("f32", "bf16", "int8", "int8_g32", "int4_g32", "int4_g64", "int4_g128")

Array = npt.NDArray[np.generic]
_PAD_TO = {"f32": 1, "bf16": 2, "int8": 32, "int8_g32": 32, "int4_g32": 32, "int4_g64": 64, "int4_g128": 128}


@dataclass(frozen=True)
class Layout:
    """Sizes of a packed matrix of `n` rows and `k` columns in `format`."""

    format: str
    n: int
    k: int

    @property
    def k_padded(self) -> int:
        step = _PAD_TO[self.format]
        return -(-self.k // step) * step

    @property
    def groups(self) -> int:
        """Scales a row; 0 for formats without scales."""
        return {"f32": 0, "bf16": 0, "int8": 1}.get(self.format, self.k_padded // _PAD_TO[self.format])

    @property
    def header_bytes(self) -> int:
        if self.format == "int8":
            return 4 * TILE_ROWS
        parts = 2 if self.format.startswith("int4") else 1
        return -(-self.groups * parts * 2 * TILE_ROWS // 64) * 64

    @property
    def body_bytes(self) -> int:
        bits = {"f32": 32, "bf16": 16, "int8": 8, "int8_g32": 8}.get(self.format, 4)
        return TILE_ROWS * self.k_padded * bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.header_bytes + self.body_bytes

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE_ROWS)

    @property
    def bytes(self) -> int:
        return self.tiles * self.tile_bytes


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix: `values` [n, k] is float32, uint16 bits (bf16), int8 or uint8 (int4).

    `scales` and `offsets` are float32 [n, groups], already rounded to f16 where the format stores f16; None where the
    format has none.
    """

    values: Array
    scales: Array | None = None
    offsets: Array | None = None


def to_bf16(values: Array) -> Array:
    """Round float32 to bfloat16 (ties to even, NaN stays NaN) and return the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _pad(values: Array, rows: int, columns: int, fill: int = 0) -> Array:
    """Grow [n, k] to [rows, columns]; the array itself when nothing is missing."""
    n, k = values.shape
    if (n, k) == (rows, columns):
        return np.ascontiguousarray(values)
    padded = np.full((rows, columns), fill, values.dtype)
    padded[:n, :k] = values
    return padded


def _header(part: Array, rows: int, groups: int) -> Array:
    """Scales or offsets [n, groups] as f16 [tiles, groups, 16], flattened to bytes a tile."""
    tiles = _pad(part, rows, groups).reshape(-1, TILE_ROWS, groups).transpose(0, 2, 1)
    with np.errstate(over="ignore"):
        packed = np.ascontiguousarray(tiles.astype(np.float16))
    if not np.isfinite(packed).all():
        raise ValueError("a scale or offset does not fit in f16")
    return packed.reshape(len(packed), -1).view(np.uint8)


def _words(words: Array) -> Array:
    """[n, blocks] uint32, one word a row and block, to bytes [tiles, blocks * 64]."""
    tiled = words.reshape(-1, TILE_ROWS, words.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiled).reshape(len(tiled), -1).view(np.uint8)


def pack_tiles(format: str, rows: Rows) -> Array:
    """Pack rows [n, k] into uint8 [tiles, tile_bytes]; row 0 is the first of a tile, the last tile is padded.

    Raises ValueError where shapes or codes do not fit the format.
    """
    n, k = rows.values.shape
    layout = Layout(format, n, k)
    padded = layout.tiles * TILE_ROWS
    if layout.groups and (rows.scales is None or rows.scales.shape != (n, layout.groups)):
        raise ValueError(f"{format} needs scales [{n}, {layout.groups}]")
    tiles = np.zeros((layout.tiles, layout.tile_bytes), np.uint8)
    body = tiles[:, layout.header_bytes :]
    if format == "f32":
        body[:] = _words(_pad(rows.values.astype(np.float32, copy=False), padded, k).view(np.uint32))
    elif format == "bf16":
        if rows.values.dtype != np.uint16:
            raise ValueError("bf16 rows are given as uint16 bit patterns")
        body[:] = _words(_pad(rows.values, padded, layout.k_padded).view(np.uint32))
    elif format.startswith("int8"):
        if rows.values.dtype != np.int8:
            raise ValueError(f"{format} codes are int8")
        biased = _pad(rows.values, padded, layout.k_padded).view(np.uint8) ^ np.uint8(128)
        body[:] = _words(biased.view(np.uint32))
        assert rows.scales is not None
        if format == "int8":
            scales = _pad(rows.scales.astype(np.float32, copy=False), padded, 1).reshape(-1, TILE_ROWS)
            tiles[:, : layout.header_bytes] = scales.view(np.uint8)
        else:
            header = _header(rows.scales, padded, layout.groups)
            tiles[:, : header.shape[1]] = header
    else:
        if rows.values.dtype != np.uint8 or (rows.values.size and rows.values.max() > 15):
            raise ValueError(f"{format} codes are uint8, 0 to 15")
        if rows.offsets is None or rows.offsets.shape != (n, layout.groups):
            raise ValueError(f"{format} needs offsets [{n}, {layout.groups}]")
        words = _pad(rows.values, padded, layout.k_padded).view(np.uint32)
        body[:] = _words(words[:, 0::2] | (words[:, 1::2] << np.uint32(4)))
        assert rows.scales is not None
        half = 2 * TILE_ROWS * layout.groups
        tiles[:, :half] = _header(rows.scales, padded, layout.groups)
        tiles[:, half : layout.header_bytes] = _header(rows.offsets, padded, layout.groups)
    return tiles


def interleave_tiles(gate: Array, up: Array) -> Array:
    """Alternate the tiles of two matrices: tile 2i holds gate rows 16i .. 16i+15, tile 2i+1 those of up."""
    return np.stack([gate, up], axis=1).reshape(2 * len(gate), -1)


def unpack_tiles(layout: Layout, data: Array) -> Rows:
    """The inverse of `pack_tiles`: uint8 data of `layout.bytes` bytes to rows [n, k] and what scales them."""
    n, k, format = layout.n, layout.k, layout.format
    tiles = data.reshape(layout.tiles, layout.tile_bytes)
    header = np.ascontiguousarray(tiles[:, : layout.header_bytes])
    words = np.ascontiguousarray(tiles[:, layout.header_bytes :]).view(np.uint32)
    rows = np.ascontiguousarray(words.reshape(layout.tiles, -1, TILE_ROWS).transpose(0, 2, 1))
    rows = rows.reshape(layout.tiles * TILE_ROWS, -1)
    if format == "f32":
        return Rows(rows.view(np.float32)[:n, :k])
    if format == "bf16":
        return Rows(rows.view(np.uint16)[:n, :k])

    def part(index: int) -> Array:
        size = layout.groups * TILE_ROWS
        halves = header.view(np.float16)[:, index * size : (index + 1) * size].reshape(
            layout.tiles, -1, TILE_ROWS
        )
        return halves.transpose(0, 2, 1).reshape(-1, layout.groups)[:n].astype(np.float32)

    if format == "int8":
        codes = (rows.view(np.uint8) ^ np.uint8(128)).view(np.int8)[:n, :k]
        return Rows(codes, header.view(np.float32).reshape(-1, 1)[:n])
    if format == "int8_g32":
        return Rows((rows.view(np.uint8) ^ np.uint8(128)).view(np.int8)[:n, :k], part(0))
    low, high = rows & np.uint32(0x0F0F0F0F), (rows >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
    codes = np.stack([low, high], axis=2).reshape(len(rows), -1).view(np.uint8)
    return Rows(codes[:n, :k], part(0), part(1))
