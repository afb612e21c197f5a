"""Packed tiles: each format's bytes where the layout says they are, and back again without a change."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.backends.cpu.pack import (
    FORMATS,
    Array,
    Layout,
    Rows,
    interleave_tiles,
    pack_tiles,
    to_bf16,
    unpack_tiles,
)

SHAPES = [(16, 64), (1, 1), (17, 100), (40, 576), (3, 129)]


def random_rows(format: str, n: int, k: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, k)).astype(np.float32)
    if format == "f32":
        return Rows(values)
    if format == "bf16":
        return Rows(to_bf16(values))
    groups = Layout(format, n, k).groups
    scales = rng.uniform(0.01, 1, (n, groups)).astype(np.float32)
    if format == "int8":
        return Rows(rng.integers(-127, 128, (n, k)).astype(np.int8), scales)
    scales = scales.astype(np.float16).astype(np.float32)
    if format == "int8_g32":
        return Rows(rng.integers(-127, 128, (n, k)).astype(np.int8), scales)
    offsets = rng.standard_normal((n, groups)).astype(np.float16).astype(np.float32)
    return Rows(rng.integers(0, 16, (n, k)).astype(np.uint8), scales, offsets)


def same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_back_what_was_packed(format: str, shape: tuple[int, int]) -> None:
    rows, layout = random_rows(format, *shape), Layout(format, *shape)
    tiles = pack_tiles(format, rows)
    assert tiles.shape == (layout.tiles, layout.tile_bytes) and layout.tile_bytes % 64 == 0
    back = unpack_tiles(layout, tiles.reshape(-1))
    assert same(back.values, rows.values)
    assert same(back.scales, rows.scales) and same(back.offsets, rows.offsets)


def element(format: str, tile: Array, layout: Layout, row: int, column: int) -> float:
    """Read one weight of one tile, byte by byte as the layout's description says."""
    body = tile[layout.header_bytes :].tobytes()
    if format == "f32":
        return float(np.frombuffer(body, np.float32, 1, 4 * (16 * column + row))[0])
    if format == "bf16":
        at = 4 * (16 * (column // 2) + row) + 2 * (column % 2)
        return float((np.frombuffer(body, np.uint16, 1, at).astype(np.uint32) << 16).view(np.float32)[0])
    header = tile[: layout.header_bytes].tobytes()
    if format == "int8":
        return (body[64 * (column // 4) + 4 * row + column % 4] - 128) * float(
            np.frombuffer(header, np.float32)[row]
        )
    group = int(format.split("_g")[1])
    scale = float(np.frombuffer(header, np.float16)[16 * (column // group) + row])
    if format == "int8_g32":
        return (body[64 * (column // 4) + 4 * row + column % 4] - 128) * scale
    offset = float(np.frombuffer(header, np.float16)[16 * (layout.groups + column // group) + row])
    byte = body[64 * (column // 8) + 4 * row + column % 4]
    return (byte >> 4 if column % 8 >= 4 else byte & 15) * scale + offset


@pytest.mark.parametrize("format", FORMATS)
def test_every_weight_lies_where_the_layout_says(format: str) -> None:
    n, k = 21, 150
    rows, layout = random_rows(format, n, k), Layout(format, n, k)
    tiles = pack_tiles(format, rows)
    group = {"int8": k, "f32": k, "bf16": k}.get(format) or int(format.split("_g")[1])
    rng = np.random.default_rng(1)
    for row, column in zip(rng.integers(0, n, 60), rng.integers(0, k, 60), strict=True):
        value = rows.values[row, column]
        if format == "bf16":
            expected = float((np.uint32(value) << np.uint32(16)).view(np.float32))
        else:
            expected = float(value)
        if rows.scales is not None:
            expected *= float(rows.scales[row, column // group])
        if rows.offsets is not None:
            expected += float(rows.offsets[row, column // group])
        assert element(format, tiles[row // 16], layout, row % 16, column) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_code_zero(format: str) -> None:
    n, k = 3, 33
    layout = Layout(format, n, k)
    tile = pack_tiles(format, random_rows(format, n, k))[0]
    for row, column in [(3, 0), (15, 5), (15, layout.k_padded - 1)]:
        assert element(format, tile, layout, row, column) == 0.0
    if layout.k_padded > k and format.startswith("int"):
        body = tile[layout.header_bytes :]
        assert set(body[-64:].tolist()) == {128 if format.startswith("int8") else 0}


def test_bf16_rounds_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45, 1.00390625, 1.01171875], np.float32
    )
    values = np.concatenate([bits.view(np.float32), special])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    found, nan = to_bf16(values), np.isnan(values)
    assert np.array_equal(found[~nan], expected[~nan])
    assert np.isnan((found[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_gate_and_up_tiles_alternate() -> None:
    gate, up = (pack_tiles("f32", random_rows("f32", 40, 8, seed)) for seed in (1, 2))
    both = interleave_tiles(gate, up)
    assert np.array_equal(both[0::2], gate) and np.array_equal(both[1::2], up)


@pytest.mark.parametrize(
    ("format", "rows", "message"),
    [
        ("int4_g32", Rows(np.full((16, 32), 16, np.uint8), np.ones((16, 1)), np.ones((16, 1))), "0 to 15"),
        ("int4_g32", Rows(np.zeros((16, 64), np.uint8), np.ones((16, 1)), np.ones((16, 2))), "needs scales"),
        ("int4_g32", Rows(np.zeros((16, 32), np.uint8), np.ones((16, 1))), "needs offsets"),
        ("int8_g32", Rows(np.zeros((16, 32), np.int8), np.full((16, 1), 1e6)), "does not fit in f16"),
        ("int8", Rows(np.zeros((16, 32), np.uint8), np.ones((16, 1))), "codes are int8"),
        ("bf16", Rows(np.zeros((16, 32), np.float32)), "bit patterns"),
    ],
)
def test_what_does_not_fit_is_refused(format: str, rows: Rows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_tiles(format, rows)
