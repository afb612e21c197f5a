"""Linear, activation quantisation and embedding kernels, every format on every ISA variant."""

import numpy as np
import pytest

from .packed_weights import (
    FORMATS,
    GROUPS,
    PackedWeight,
    from_bf16_bits,
    pack_int4,
    pack_int8,
    random_weight,
    round_up,
    to_bf16_bits,
)

kernels = pytest.importorskip("enginewright.backends.cpu._native").kernels

ISAS = kernels.isas()
INTEGER_FORMATS = tuple(GROUPS)
# Ragged in both directions, single columns, and more than one block and tile of each.
SHAPES = [(1, 1), (16, 64), (40, 200), (33, 129), (7, 576)]

each_isa = pytest.mark.parametrize("isa", ISAS)
each_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def native(weight: PackedWeight):
    return kernels.Weight(weight.format, weight.n, weight.k, weight.data)


def activations(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """[rows, k + 5] with outliers and a zero group; the columns beyond k are NaN and must not be read."""
    x = np.full((rows, k + 5), np.nan, np.float32)
    x[:, :k] = rng.normal(size=(rows, k)) * np.where(rng.random((rows, k)) < 0.02, 20, 1)
    x[0, : min(k, 128)] = 0
    return x


def run_linear(isa, weight, x, bias=None, splits=((None, None),), tiles=((None, None),)) -> np.ndarray:
    """The first n columns of y, computed in pieces; whatever lies outside them must stay NaN."""
    packed = native(weight)
    prepared = kernels.prepare(isa, packed, x)
    y = np.full((len(x), weight.n + 9), np.nan, np.float32)
    for row0, row1 in splits:
        for tile0, tile1 in tiles:
            kernels.linear(
                isa, packed, prepared, y, bias, row0 or 0, row1 or len(x), tile0 or 0, tile1 or packed.tiles
            )
    assert np.isnan(y[:, weight.n :]).all()
    return y[:, : weight.n]


def decoded_activations(isa, weight: PackedWeight, x: np.ndarray) -> np.ndarray:
    """float64 [rows, k]: exactly the values that the linear multiplies, read back from the prepared rows."""
    rows = kernels.prepare(isa, native(weight), x).rows()
    k = weight.k
    if weight.format == "f32":
        return rows[:, : 4 * k].copy().view(np.float32).astype(np.float64)
    if weight.format == "bf16":
        return from_bf16_bits(rows[:, : 2 * k].copy().view(np.uint16)).astype(np.float64)
    codes, scales, _ = quantised_parts(weight, rows)
    return (codes * np.repeat(scales.astype(np.float64), GROUPS[weight.format], axis=1))[:, :k]


def quantised_parts(weight: PackedWeight, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes int8 [rows, k_padded], scales f32 [rows, groups], words as uint32."""
    group = GROUPS[weight.format]
    k_padded = round_up(weight.k, group)
    end = k_padded + k_padded // group * 4
    codes = rows[:, :k_padded].copy().view(np.int8)
    scales = rows[:, k_padded:end].copy().view(np.float32)
    return codes, scales, rows[:, end : 2 * end - k_padded].copy().view(np.uint32)


@each_isa
@each_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_linear_matches_float64(isa, format, shape, rows, rng):
    weight = random_weight(rng, format, *shape)
    x = activations(rng, rows, weight.k)
    bias = rng.normal(size=weight.n).astype(np.float32)
    decoded = decoded_activations(isa, weight, x)
    expected = decoded @ weight.values.T
    # The offsets of int4 and the scales lie between values of either sign: bound by the sum of magnitudes.
    magnitude = np.abs(decoded) @ np.abs(weight.values).T + np.abs(decoded).sum(1, keepdims=True)
    for b in (None, bias):
        y = run_linear(isa, weight, x, b)
        target = expected if b is None else expected + b.astype(np.float64)
        assert (np.abs(y - target) <= 2e-6 * (magnitude + 1)).all()


@each_isa
@each_format
def test_rows_and_tiles_are_bitwise_independent(isa, format, rng):
    """A row's bits are the same alone, in any batch, and for any split of the tiles."""
    weight = random_weight(rng, format, 16 * 5 + 3, 320)
    rows = 75  # more than one chunk of rows
    x = activations(rng, rows, weight.k)
    bias = rng.normal(size=weight.n).astype(np.float32)
    whole = run_linear(isa, weight, x, bias)
    assert np.isfinite(whole).all()
    alone = run_linear(isa, weight, x, bias, splits=[(m, m + 1) for m in range(rows)])
    assert np.array_equal(whole.view(np.uint32), alone.view(np.uint32))
    for size in range(2, 34):
        splits = [(m, min(m + size, rows)) for m in range(0, rows, size)]
        tiles = [(0, 1), (1, 4), (4, 6)] if size % 2 else [(0, 3), (3, 6)]
        pieces = run_linear(isa, weight, x, bias, splits, tiles)
        assert np.array_equal(whole.view(np.uint32), pieces.view(np.uint32)), size


@each_isa
@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_prepare_quantises_to_nearest_even(isa, format, rng):
    weight = random_weight(rng, format, 16, 300)
    x = activations(rng, 6, weight.k)
    x[1, :4] = [127.0, 0.5, 1.5, -2.5]  # ties, where 127 is the group's largest
    x[1, 4 : GROUPS[format]] = 0
    x[2, : GROUPS[format]] = np.float32(1e-35)  # so small that the group counts as zero
    codes, scales, words = quantised_parts(weight, kernels.prepare(isa, native(weight), x).rows())

    group = GROUPS[format]
    padded = np.zeros((len(x), codes.shape[1]), np.float32)
    padded[:, : weight.k] = x[:, : weight.k]
    groups = padded.reshape(len(x), -1, group)
    largest = np.abs(groups).max(axis=2)
    largest[largest < 2.0**-100] = 0
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    expected = np.rint(groups * inverse[..., None]).astype(np.int8)
    assert np.array_equal(codes.reshape(expected.shape), expected)
    assert np.array_equal(scales, largest / np.float32(127))
    assert codes[1, :4].tolist() == [127, 0, 2, -2]
    sums = expected.astype(np.int32).sum(axis=2)
    if format.startswith("int4"):
        assert np.array_equal(words.view(np.float32), scales * sums.astype(np.float32))
    else:
        assert np.array_equal(words.view(np.int32), -128 * sums)


@each_isa
def test_bf16_activations_round_to_nearest_even(isa, rng):
    weight = random_weight(rng, "bf16", 16, 37)
    x = activations(rng, 3, weight.k)
    x[1, :3] = np.array([0x3F808000, 0x3F818000, 0x00008001], np.uint32).view(np.float32)  # ties, a subnormal
    rows = kernels.prepare(isa, native(weight), x).rows()
    bits = rows[:, : 2 * 38].copy().view(np.uint16)
    assert np.array_equal(bits[:, :37], to_bf16_bits(x[:, :37]))
    assert (bits[:, 37] == 0).all()


@each_isa
@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize("activation", [127, -127])
def test_extreme_codes_are_exact(isa, format, activation, rng):
    """The largest products of every sign: sums of int32 must neither saturate nor wrap."""
    n, k = 17, 256
    groups = k // GROUPS[format]
    x = np.full((9, k), activation, np.float32)  # scale 1, code +-127
    for extreme in (0, 1):
        if format.startswith("int8"):
            codes = np.full((n, k), (-128, 127)[extreme], np.int8)
            weight = pack_int8(format, codes, np.ones((n, 1 if format == "int8" else groups)))
        else:
            codes = np.full((n, k), (0, 15)[extreme], np.uint8)
            weight = pack_int4(format, codes, np.ones((n, groups)), np.full((n, groups), -8.0))
        y = run_linear(isa, weight, x)
        assert np.array_equal(y, np.full_like(y, activation * weight.values.sum(axis=1)[0]))


@each_isa
@each_format
def test_nan_stays_in_its_row(isa, format, rng):
    weight = random_weight(rng, format, 20, 70)
    x = activations(rng, 12, weight.k)
    clean = run_linear(isa, weight, x)
    x[3, 17], x[9, 69] = np.nan, np.inf
    y = run_linear(isa, weight, x)
    assert np.isnan(y[3]).all()
    assert not np.isfinite(y[9]).any()
    others = np.delete(np.arange(12), [3, 9])
    assert np.array_equal(y[others], clean[others])


@each_isa
@each_format
@pytest.mark.parametrize("shape", SHAPES)
def test_embedding_reads_the_packed_rows(isa, format, shape, rng):
    weight = random_weight(rng, format, *shape)
    ids = rng.integers(0, weight.n, 11).astype(np.int32)
    ids[0], ids[1] = weight.n - 1, 0
    for scale in (1.0, 7.5):
        out = np.full((len(ids), weight.k + 3), np.nan, np.float32)
        kernels.embedding(isa, native(weight), ids, scale, out)
        assert np.isnan(out[:, weight.k :]).all()
        rounded = weight.values.astype(np.float32)[ids] * np.float32(scale)
        assert np.array_equal(out[:, : weight.k], rounded)


def test_weight_bytes_match_the_packer(rng):
    for format in FORMATS:
        for n, k in SHAPES:
            assert kernels.weight_bytes(format, n, k) == random_weight(rng, format, n, k).data.size
