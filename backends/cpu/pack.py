"""How matrices lie in weights.bin: tiles of 16 output rows, each one sequential stream for the kernels.

A matrix [N, K] is padded with zero rows to N16 = 16 * tiles, and along K with zero columns to Kp. Tiles follow one
another; within a tile the 16 rows are interleaved so that one 64-byte block holds all of them for a few consecutive k.
G is the group of the format, or 32 for an integer format with one scale a channel (whose header counts one group):

    f32        Kp = K                   [Kp][16] f32
    bf16       Kp multiple of 2         [Kp/2][16][2] bf16
    fp8        Kp multiple of 4         16 f32 scales, then [Kp/4][4][2][4][2] u8: four rows, a pair of k, row, k of the pair
    int8       Kp multiple of 32        16 f32 scales (one a row), then [Kp/4][16][4] u8 = code + 128
    int8_gG    Kp multiple of G         [Kp/G][16] f16 scales, zeros to a multiple of 64 bytes, then as int8
    the others Kp multiple of G         [Kp/G][16] f16 scales, [Kp/G][16] f16 offsets (or zero points), then
      uint8                             [Kp/4][16][4] u8
      int4                              [Kp/8][16][4] u8, where byte j of a row in block o is
                                        code(8o + j) | code(8o + 4 + j) << 4
      int2                              [Kp/16][16][4] u8: the sum over q of code(16o + 4q + j) << 2q
      int3                              [Kp/16] blocks: the low two bits as int2, then [32] u8 of third bits: that of
                                        code(16o + 4q + j) of row r is bit (2q + 2 + i // 32) % 8 of byte i % 32, i = 4r + j

What a code stands for says recipes/formats.py. Padding holds code zero (the stored byte 128 for int8) and scale zero. An
int8 matrix may keep C columns apart: [ceil(C/2)][16][2] bf16 of them, zeros beyond, stand behind the body. Every tile's
size is a multiple of 64 bytes. All is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from enginewright.recipes.formats import WeightFormat, parse_weight

__all__ = [
    "TILE_ROWS",
    "Layout",
    "Rows",
    "interleave_tiles",
    "pack_tiles",
    "to_bf16",
    "unpack_tiles",
]

TILE_ROWS = 16
_F32_SCALES = ("int8", "fp8")
_CHANNEL_STEP = 32  # K is padded to this where an integer format has no groups

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Layout:
    """Sizes of a packed matrix of `n` rows and `k` columns in `format`, `outliers` of the columns kept apart."""

    format: str
    n: int
    k: int
    outliers: int = 0

    @property
    def form(self) -> WeightFormat:
        return parse_weight(self.format)

    @property
    def k_padded(self) -> int:
        step = {"f32": 1, "bf16": 2, "fp8": 4}.get(self.format) or self.form.group or _CHANNEL_STEP
        return -(-self.k // step) * step

    @property
    def groups(self) -> int:
        """Scales a row; 0 for formats without scales."""
        return self.form.groups(self.k)

    @property
    def header_bytes(self) -> int:
        parts = 2 if self.form.has_offsets else 1
        size = 4 if self.format in _F32_SCALES else 2
        return -(-self.groups * parts * size * TILE_ROWS // 64) * 64

    @property
    def body_bytes(self) -> int:
        return -(-TILE_ROWS * self.k_padded * self.form.bits // 8 // 64) * 64

    @property
    def outlier_bytes(self) -> int:
        return -(-self.outliers // 2) * 4 * TILE_ROWS

    @property
    def tile_bytes(self) -> int:
        return self.header_bytes + self.body_bytes + self.outlier_bytes

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE_ROWS)

    @property
    def bytes(self) -> int:
        return self.tiles * self.tile_bytes


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix: `values` [n, k] is float32, uint16 bits (bf16), uint8 bits (fp8), int8 or uint8 codes.

    `scales` and `offsets` (or zero points) are float32 [n, groups], already rounded to f16 where the format stores f16; None
    where the format has none. `outliers` [n, C] is uint16 bits (bf16): the columns kept apart, whose codes are 0.
    """

    values: Array
    scales: Array | None = None
    offsets: Array | None = None
    outliers: Array | None = None


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


def _narrow(codes: Array, bits: int) -> Array:
    """Codes [rows, Kp] below 2^bits, for bits 2 and 4, to words [rows, blocks]: 8 / bits codes a byte."""
    words, parts = codes.view(np.uint32), 8 // bits
    packed = words[:, 0::parts].copy()
    for part in range(1, parts):
        packed |= words[:, part::parts] << np.uint32(bits * part)
    return packed


def _third_bits(codes: Array) -> Array:
    """Bits 2 of codes [rows, Kp], to bytes [tiles, Kp / 16, 32]."""
    high = (codes >> np.uint8(2)).reshape(-1, TILE_ROWS, codes.shape[1] // 16, 4, 4)
    bits = high.transpose(0, 2, 3, 1, 4).reshape(
        len(high), -1, 4, 2, 32
    )  # [tiles, block, q, i // 32, i % 32]
    plane = np.zeros((len(high), bits.shape[1], 32), np.uint8)
    for q in range(4):
        for half in range(2):
            plane |= bits[:, :, q, half] << np.uint8((2 * q + 2 + half) % 8)
    return plane


def _body(form: WeightFormat, values: Array) -> Array:
    """The tiles' bodies [tiles, bytes] of padded values [rows, Kp]."""
    if form.bits in (2, 4):
        return _words(_narrow(values, form.bits))
    if form.bits == 3:
        low = _words(_narrow(values & np.uint8(3), 2)).reshape(len(values) // TILE_ROWS, -1, 64)
        return np.concatenate([low, _third_bits(values)], axis=2).reshape(len(low), -1)
    if form.name == "fp8":
        quads = values.reshape(-1, 4, 4, values.shape[1] // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
        return np.ascontiguousarray(quads).reshape(len(quads), -1)
    if form.symmetric:
        values = values.view(np.uint8) ^ np.uint8(128)
    return _words(values.view(np.uint32))


def _checked(format: str, values: Array) -> Array:
    """`values`, if they are what rows of a format hold."""
    form = parse_weight(format)
    if format == "f32":
        return values.astype(np.float32, copy=False)
    if format == "bf16" and values.dtype != np.uint16:
        raise ValueError("bf16 rows are given as uint16 bit patterns")
    if format == "fp8" and values.dtype != np.uint8:
        raise ValueError("fp8 rows are given as uint8 bit patterns")
    if form.symmetric and values.dtype != np.int8:
        raise ValueError(f"{format} codes are int8")
    if form.has_offsets:
        most = 2**form.bits - 1
        if values.dtype != np.uint8 or (values.size and values.max() > most):
            raise ValueError(f"{format} codes are uint8, 0 to {most}")
    return values


def pack_tiles(format: str, rows: Rows) -> Array:
    """Pack rows [n, k] into uint8 [tiles, tile_bytes]; row 0 is the first of a tile, the last tile is padded.

    Raises ValueError where shapes or codes do not fit the format.
    """
    n, k = rows.values.shape
    layout = Layout(format, n, k, 0 if rows.outliers is None else rows.outliers.shape[1])
    form, padded = layout.form, layout.tiles * TILE_ROWS
    for name, part, needed in (
        ("scales", rows.scales, form.has_scales),
        ("offsets", rows.offsets, form.has_offsets),
    ):
        if needed and (part is None or part.shape != (n, layout.groups)):
            raise ValueError(f"{format} needs {name} [{n}, {layout.groups}]")
    tiles = np.zeros((layout.tiles, layout.tile_bytes), np.uint8)
    body = _body(form, _pad(_checked(format, rows.values), padded, layout.k_padded))
    tiles[:, layout.header_bytes : layout.header_bytes + body.shape[1]] = body
    if rows.scales is not None and format in _F32_SCALES:
        scales = _pad(rows.scales.astype(np.float32, copy=False), padded, 1).reshape(-1, TILE_ROWS)
        tiles[:, : layout.header_bytes] = scales.view(np.uint8)
    elif rows.scales is not None:
        half = 2 * TILE_ROWS * layout.groups
        tiles[:, :half] = _header(rows.scales, padded, layout.groups)
        if rows.offsets is not None:
            tiles[:, half : 2 * half] = _header(rows.offsets, padded, layout.groups)
    if rows.outliers is not None and layout.outliers:
        if format != "int8" or rows.outliers.dtype != np.uint16 or len(rows.outliers) != n:
            raise ValueError(f"columns kept apart are uint16 bit patterns [{n}, C] of an int8 matrix")
        pairs = _pad(rows.outliers, padded, layout.outliers + layout.outliers % 2)
        tiles[:, layout.header_bytes + layout.body_bytes :] = _words(pairs.view(np.uint32))
    return tiles


def interleave_tiles(gate: Array, up: Array) -> Array:
    """Alternate the tiles of two matrices: tile 2i holds gate rows 16i .. 16i+15, tile 2i+1 those of up."""
    return np.stack([gate, up], axis=1).reshape(2 * len(gate), -1)


def _widen(words: Array, bits: int) -> Array:
    """The inverse of `_narrow`."""
    parts, mask = 8 // bits, np.uint32(0x01010101 * (2**bits - 1))
    split = [(words >> np.uint32(bits * part)) & mask for part in range(parts)]
    return np.stack(split, axis=2).reshape(len(words), -1).view(np.uint8)


def _rows_of(body: Array) -> Array:
    """Bodies [tiles, blocks * 64] to words [rows, blocks]: the inverse of `_words`."""
    words = np.ascontiguousarray(body).view(np.uint32).reshape(len(body), -1, TILE_ROWS)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(len(body) * TILE_ROWS, -1)


def _values(layout: Layout, body: Array) -> Array:
    """The padded values [rows, Kp] of bodies [tiles, bytes]: the inverse of `_body`."""
    form, tiles = layout.form, len(body)
    if form.bits in (2, 4):
        return _widen(_rows_of(body), form.bits)
    if form.bits == 3:
        blocks = body.reshape(tiles, -1, 96)
        low = _widen(_rows_of(blocks[:, :, :64].reshape(tiles, -1)), 2)
        plane = blocks[:, :, 64:]
        bits = np.stack(
            [plane >> np.uint8((2 * q + 2 + half) % 8) & np.uint8(1) for q in range(4) for half in range(2)],
            axis=2,
        )  # [tiles, block, 2q + half, 32]
        high = bits.reshape(tiles, -1, 4, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
        return low | high.reshape(tiles * TILE_ROWS, -1) << np.uint8(2)
    if form.name == "fp8":
        quads = body.reshape(tiles, -1, 4, 2, 4, 2).transpose(0, 2, 4, 1, 3, 5)
        return np.ascontiguousarray(quads).reshape(tiles * TILE_ROWS, -1)
    rows = _rows_of(body)
    if form.symmetric:
        return (rows.view(np.uint8) ^ np.uint8(128)).view(np.int8)
    return rows.view({"f32": np.float32, "bf16": np.uint16}.get(form.name, np.uint8))


def unpack_tiles(layout: Layout, data: Array) -> Rows:
    """The inverse of `pack_tiles`: uint8 data of `layout.bytes` bytes to rows [n, k] and what scales them."""
    n, k, form = layout.n, layout.k, layout.form
    tiles = data.reshape(layout.tiles, layout.tile_bytes)
    header = np.ascontiguousarray(tiles[:, : layout.header_bytes])
    end = layout.header_bytes + TILE_ROWS * layout.k_padded * form.bits // 8
    values = _values(layout, tiles[:, layout.header_bytes : end])[:n, :k]

    def part(index: int) -> Array:
        size = layout.groups * TILE_ROWS
        halves = header.view(np.float16)[:, index * size : (index + 1) * size].reshape(
            layout.tiles, -1, TILE_ROWS
        )
        return halves.transpose(0, 2, 1).reshape(-1, layout.groups)[:n].astype(np.float32)

    outliers = None
    if layout.outliers:
        words = _rows_of(tiles[:, layout.header_bytes + layout.body_bytes :])
        outliers = words.view(np.uint16)[:n, : layout.outliers]
    if layout.format in _F32_SCALES:
        return Rows(values, header.view(np.float32).reshape(-1, 1)[:n], None, outliers)
    return Rows(values, part(0) if form.has_scales else None, part(1) if form.has_offsets else None)
