"""Packed tiles: each format's bytes where the layout says they are, and back again without a change."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.backends.cpu.formats import WEIGHT_FORMATS
from enginewright.backends.cpu.pack import (
    Array,
    Layout,
    Rows,
    interleave_tiles,
    pack_tiles,
    to_bf16,
    unpack_tiles,
)
from enginewright.recipes.formats import parse_weight

from .packed_weights import from_bf16_bits, pack_codes, pack_float

SHAPES = [(16, 64), (1, 1), (17, 100), (40, 576), (3, 129)]


def random_rows(format: str, n: int, k: int, outliers: int = 0) -> Rows:
    rng = np.random.default_rng()
    form, groups = parse_weight(format), Layout(format, n, k).groups
    values = rng.standard_normal((n, k)).astype(np.float32)
    if format == "f32":
        return Rows(values)
    if format == "bf16":
        return Rows(to_bf16(values))
    scales = rng.uniform(0.01, 1, (n, groups)).astype(np.float32)
    if form.half_scales:
        scales = scales.astype(np.float16).astype(np.float32)
    if format == "fp8":
        return Rows(rng.integers(0, 256, (n, k)).astype(np.uint8), scales)
    if form.symmetric:
        kept = to_bf16(rng.standard_normal((n, outliers))) if outliers else None
        return Rows(rng.integers(-128, 128, (n, k)).astype(np.int8), scales, None, kept)
    offsets = rng.standard_normal((n, groups)).astype(np.float16).astype(np.float32)
    return Rows(rng.integers(0, 2**form.bits, (n, k)).astype(np.uint8), scales, offsets)


def same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize(
    ("format", "outliers"), [*((name, 0) for name in WEIGHT_FORMATS), ("int8", 1), ("int8", 6)]
)
def test_unpacking_gives_back_what_was_packed(format: str, outliers: int) -> None:
    for n, k in SHAPES:
        rows, layout = random_rows(format, n, k, outliers), Layout(format, n, k, outliers)
        tiles = pack_tiles(format, rows)
        assert tiles.shape == (layout.tiles, layout.tile_bytes) and layout.tile_bytes % 64 == 0
        back = unpack_tiles(layout, tiles.reshape(-1))
        assert same(back.values, rows.values) and same(back.outliers, rows.outliers)
        assert same(back.scales, rows.scales) and same(back.offsets, rows.offsets)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_every_bit_lies_where_the_layout_says(format: str) -> None:
    """Against the layout as the kernels' tests have it, padding included."""
    for n, k in SHAPES:
        rows = random_rows(format, n, k)
        if format in ("f32", "bf16"):
            want = pack_float(format, rows.values if format == "f32" else from_bf16_bits(rows.values))
        else:
            assert rows.scales is not None
            want = pack_codes(format, rows.values, rows.scales, rows.offsets)
        assert np.array_equal(pack_tiles(format, rows).reshape(-1), want.data)


def test_columns_kept_apart_stand_behind_the_codes() -> None:
    rows = random_rows("int8", 21, 70, 3)
    assert rows.scales is not None and rows.outliers is not None
    rows.values[:, [4, 5, 69]] = 0
    want = pack_codes("int8", rows.values, rows.scales, None, [4, 5, 69], from_bf16_bits(rows.outliers))
    tiles = pack_tiles("int8", rows)
    assert np.array_equal(tiles.reshape(-1), want.data)
    plain = pack_tiles("int8", Rows(rows.values, rows.scales))
    assert np.array_equal(tiles[:, : plain.shape[1]], plain) and tiles.shape[1] == plain.shape[1] + 2 * 64


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
    gate, up = (pack_tiles("f32", random_rows("f32", 40, 8)) for _ in range(2))
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
        ("fp8", Rows(np.zeros((16, 32), np.float32), np.ones((16, 1))), "bit patterns"),
        ("fp8", Rows(np.zeros((16, 32), np.uint8)), "needs scales"),
        ("int2_zp", Rows(np.full((16, 32), 4, np.uint8), np.ones((16, 1)), np.ones((16, 1))), "0 to 3"),
        ("int3", Rows(np.full((16, 32), 8, np.uint8), np.ones((16, 1)), np.ones((16, 1))), "0 to 7"),
        (
            "int8_g32",
            Rows(np.zeros((16, 32), np.int8), np.ones((16, 1)), None, np.zeros((16, 1), np.uint16)),
            "apart",
        ),
        ("int8", Rows(np.zeros((16, 32), np.int8), np.ones((16, 1)), None, np.zeros((16, 1))), "apart"),
    ],
)
def test_what_does_not_fit_is_refused(format: str, rows: Rows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_tiles(format, rows)
