"""Linear, activation quantisation and embedding kernels, every format on every ISA variant."""

import itertools

import numpy as np
import pytest

from enginewright.backends.cpu.formats import WEIGHT_FORMATS, activations_for
from enginewright.recipes.formats import (
    activation_group,
    default_activation,
    parse_weight,
)

from .packed_weights import (
    PackedWeight,
    from_bf16_bits,
    from_fp8,
    pack_codes,
    random_weight,
    to_bf16_bits,
)

kernels = pytest.importorskip("enginewright.backends.cpu._native").kernels

ISAS = kernels.isas()
PAIRS = [(weight, activation) for weight in WEIGHT_FORMATS for activation in activations_for(weight)]
INTEGER_PAIRS = [pair for pair in PAIRS if pair[1].startswith("int8")]
# One pair at least of each block kernel, each way to round, and each ratio of the weight's group to the activation's.
KERNEL_PAIRS = [
    *(("f32", "f32"), ("bf16", "bf16"), ("fp8", "bf16"), ("int8", "int8_g32"), ("int8", "int8")),
    *(("int8_g16", "int8_static"), ("int8_g256", "int8_g128"), ("uint8", "int8_g32"), ("uint8_g64_zp", "int8_g64")),
    *(("int4_g64", "int8_g64"), ("int4_g32_zp", "int8"), ("int3_g16", "int8_g16"), ("int3_zp", "int8_static")),
    *(("int2_g128", "int8_g128"), ("int2_zp", "int8")),
]  # fmt: skip
# Ragged in both directions, single columns, and more than one block and tile of each.
SHAPES = [(1, 1), (16, 64), (40, 200), (33, 129), (7, 576)]
STATIC_SCALE = np.float32(0.03)

each_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def native(weight: PackedWeight, activation: str | None = None):
    activation = activation or default_activation(weight.format)
    scale = float(STATIC_SCALE) if activation == "int8_static" else 0.0
    return kernels.Weight(weight.format, weight.n, weight.k, weight.data, activation, scale, weight.columns)


def activations(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """[rows, k + 5] with outliers and a zero group; the columns beyond k are NaN and must not be read."""
    x = np.full((rows, k + 5), np.nan, np.float32)
    x[:, :k] = rng.normal(size=(rows, k)) * np.where(rng.random((rows, k)) < 0.02, 20, 1)
    x[0, : min(k, 128)] = 0
    return x


def run_linear(
    isa, packed, x, bias=None, splits=((None, None),), tiles=((None, None),), n=None
) -> np.ndarray:
    """The first n columns of y, computed in pieces; whatever lies outside them must stay NaN."""
    prepared = kernels.prepare(isa, packed, x)
    y = np.full((len(x), n + 9), np.nan, np.float32)
    for row0, row1 in splits:
        for tile0, tile1 in tiles:
            kernels.linear(
                isa, packed, prepared, y, bias, row0 or 0, row1 or len(x), tile0 or 0, tile1 or packed.tiles
            )
    assert np.isnan(y[:, n:]).all()
    return y[:, :n]


def decoded_activations(isa, weight: PackedWeight, packed, x: np.ndarray) -> np.ndarray:
    """float64 [rows, k]: exactly the values that the linear multiplies, read back from the prepared rows."""
    rows = kernels.prepare(isa, packed, x).rows()
    k = weight.k
    if weight.format == "f32":
        return rows[:, : 4 * k].copy().view(np.float32).astype(np.float64)
    if weight.format in ("bf16", "fp8"):
        return from_bf16_bits(rows[:, : 2 * k].copy().view(np.uint16)).astype(np.float64)
    codes, scales, _, outliers = quantised_parts(weight, packed, rows)
    decoded = (codes * np.repeat(scales.astype(np.float64), packed.group, axis=1))[:, :k]
    decoded[:, weight.columns] = from_bf16_bits(outliers)
    return decoded


def quantised_parts(weight: PackedWeight, packed, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """codes int8 [rows, k_padded], scales f32 [rows, groups], words as uint32, outliers as bf16 bits [rows, C]."""
    k_padded = packed.k_padded
    size = k_padded // packed.group * 4
    ends = np.cumsum([0, k_padded, size, size, 2 * len(weight.columns)])
    parts = [rows[:, a:b].copy() for a, b in itertools.pairwise(ends)]
    types = (np.int8, np.float32, np.uint32, np.uint16)
    return tuple(part.view(dtype) for part, dtype in zip(parts, types, strict=True))


def check_linear(weight: PackedWeight, activation: str, rows: int, rng: np.random.Generator) -> None:
    x = activations(rng, rows, weight.k)
    bias = rng.normal(size=weight.n).astype(np.float32)
    packed = native(weight, activation)
    for isa in ISAS:
        decoded = decoded_activations(isa, weight, packed, x)
        expected = decoded @ weight.values.T
        # Offsets and scales lie between values of either sign: bound by the sum of magnitudes.
        magnitude = np.abs(decoded) @ weight.bounds.T
        for b in (None, bias):
            y = run_linear(isa, packed, x, b, n=weight.n)
            target = expected if b is None else expected + b.astype(np.float64)
            assert (np.abs(y - target) <= 2e-6 * (magnitude + 1)).all(), isa


@pytest.mark.parametrize(("format", "activation"), PAIRS)
def test_linear_matches_float64(format, activation, rng):
    for (n, k), rows in zip(SHAPES, (21, 1, 3, 12, 2), strict=True):
        check_linear(random_weight(rng, format, n, k), activation, rows, rng)


@pytest.mark.parametrize("activation", activations_for("int8"))
@pytest.mark.parametrize("outliers", [1, 2, 7, 20])
def test_columns_kept_apart(activation, outliers, rng):
    for (n, k), rows in zip(SHAPES, (2, 21, 1, 12, 3), strict=True):
        weight = random_weight(rng, "int8", n, k, outliers)
        check_linear(weight, activation, rows, rng)
        # They enter no scale, whatever they hold.
        x = activations(rng, 3, k)
        y = x.copy()
        y[:, weight.columns] = 1e30
        for isa in ISAS:
            packed = native(weight, activation)
            parts = [quantised_parts(weight, packed, kernels.prepare(isa, packed, v).rows()) for v in (x, y)]
            for before, after in zip(parts[0][:3], parts[1][:3], strict=True):
                assert np.array_equal(before, after)
            assert (parts[0][0][:, weight.columns] == 0).all()
            assert np.array_equal(parts[0][3], to_bf16_bits(x[:, weight.columns]))


@each_isa
@pytest.mark.parametrize(
    ("format", "activation", "outliers"), [*((*p, 0) for p in KERNEL_PAIRS), ("int8", "int8", 5)]
)
def test_rows_and_tiles_are_bitwise_independent(isa, format, activation, outliers, rng):
    """A row's bits are the same alone, in any batch, and for any split of the tiles."""
    weight = random_weight(rng, format, 16 * 5 + 3, 320, outliers)
    packed = native(weight, activation)
    rows = 75  # more than one chunk of rows
    x = activations(rng, rows, weight.k)
    bias = rng.normal(size=weight.n).astype(np.float32)
    whole = run_linear(isa, packed, x, bias, n=weight.n)
    assert np.isfinite(whole).all()
    alone = run_linear(isa, packed, x, bias, splits=[(m, m + 1) for m in range(rows)], n=weight.n)
    assert np.array_equal(whole.view(np.uint32), alone.view(np.uint32))
    for size in range(2, 34):
        splits = [(m, min(m + size, rows)) for m in range(0, rows, size)]
        tiles = [(0, 1), (1, 4), (4, 6)] if size % 2 else [(0, 3), (3, 6)]
        pieces = run_linear(isa, packed, x, bias, splits, tiles, n=weight.n)
        assert np.array_equal(whole.view(np.uint32), pieces.view(np.uint32)), size


@each_isa
@pytest.mark.parametrize(("format", "activation"), INTEGER_PAIRS)
def test_prepare_quantises_to_nearest_even(isa, format, activation, rng):
    weight = random_weight(rng, format, 16, 300)
    packed = native(weight, activation)
    x = activations(rng, 6, weight.k)
    size = activation_group(activation) or packed.k_padded  # values that share a scale
    x[1] = 0
    x[1, :4] = [127.0, 0.5, 1.5, -2.5]  # ties, where 127 is the largest
    x[2, :size] = np.float32(1e-35)  # so small that they count as zero
    x[3, 5] = 1e4  # far beyond the fixed scale
    codes, scales, words, _ = quantised_parts(weight, packed, kernels.prepare(isa, packed, x).rows())

    padded = np.zeros(codes.shape, np.float32)
    padded[:, : weight.k] = x[:, : weight.k]
    if activation == "int8_static":
        expected = np.clip(np.rint(padded / STATIC_SCALE), -127, 127)
        scale = np.full((len(x), 1), STATIC_SCALE)
        assert codes[3, 5] == 127
    else:
        groups = padded.reshape(len(x), -1, size)
        largest = np.abs(groups).max(axis=2)
        largest[largest < 2.0**-100] = 0
        with np.errstate(divide="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
        expected = np.rint(groups * inverse[..., None]).reshape(len(x), -1)
        scale = largest / np.float32(127)
        assert codes[1, :4].tolist() == [127, 0, 2, -2]
    expected = expected.astype(np.int8)
    assert np.array_equal(codes, expected)
    assert np.array_equal(scales, np.broadcast_to(scale, scales.shape))
    sums = expected.astype(np.int32).reshape(len(x), scales.shape[1], -1).sum(axis=2)
    if parse_weight(format).symmetric:
        assert np.array_equal(words.view(np.int32), -128 * sums)
    else:
        assert np.array_equal(words.view(np.float32), scales * sums.astype(np.float32))


@each_isa
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_bf16_activations_round_to_nearest_even(isa, format, rng):
    weight = random_weight(rng, format, 16, 37)
    x = activations(rng, 3, weight.k)
    x[1, :3] = np.array([0x3F808000, 0x3F818000, 0x00008001], np.uint32).view(np.float32)  # ties, a subnormal
    packed = native(weight)
    rows = kernels.prepare(isa, packed, x).rows()
    bits = rows[:, : 2 * packed.k_padded].copy().view(np.uint16)
    assert np.array_equal(bits[:, :37], to_bf16_bits(x[:, :37]))
    assert (bits[:, 37:] == 0).all()


@each_isa
def test_every_fp8_code_is_exact(isa):
    """One output a code, scale 1: products with one and with powers of two give the code's value; NaN stays NaN."""
    codes = np.zeros((256, 8), np.uint8)
    at = np.arange(256)
    codes[at, at % 8] = at
    weight = pack_codes("fp8", codes, np.ones((256, 1)))
    x = np.ldexp(np.float32(1), np.array([0, 9, -3]))[:, None] * np.ones((3, 8), np.float32)
    want = from_fp8(at.astype(np.uint8)) * np.ldexp(1.0, np.array([0, 9, -3]))[:, None]
    y = run_linear(isa, native(weight), x, n=256)
    assert np.array_equal(y, want.astype(np.float32), equal_nan=True)
    out = np.zeros((256, 8), np.float32)
    kernels.embedding(isa, native(weight), at.astype(np.int32), 1.0, out)
    assert np.array_equal(out[at, at % 8], want[0].astype(np.float32), equal_nan=True)


@each_isa
@pytest.mark.parametrize(("format", "activation"), [p for p in INTEGER_PAIRS if p[1] != "int8_static"])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_codes_are_exact(isa, format, activation, sign, rng):
    """The largest products of every sign: sums of int32 must neither saturate nor wrap."""
    form, n, k = parse_weight(format), 17, 512
    groups = form.groups(k)
    x = np.full((9, k), 127 * sign, np.float32)  # scale 1, code +-127
    for code in (-128, 127) if form.symmetric else (0, 2**form.bits - 1):
        codes = np.full((n, k), code, np.int8 if form.symmetric else np.uint8)
        seconds = {"symmetric": None, "offset": np.full((n, groups), -8.0), "zero": np.full((n, groups), 3)}
        weight = pack_codes(format, codes, np.ones((n, groups)), seconds[form.kind])
        y = run_linear(isa, native(weight, activation), x, n=n)
        assert np.array_equal(y, np.full_like(y, 127 * sign * weight.values.sum(axis=1)[0]))


@each_isa
def test_long_rows_of_one_scale_do_not_wrap(isa):
    """One group of 65536, and one column more, which falls back to groups."""
    for k in (65536, 65537):
        for format, code in (("int8", -128), ("uint8", 255)):
            second = np.zeros((1, 1)) if format == "uint8" else None
            codes = np.full((1, k), code, np.int8 if format == "int8" else np.uint8)
            weight = pack_codes(format, codes, np.ones((1, 1)), second)
            packed = native(weight, "int8")
            assert packed.group == (65536 if k == 65536 else 32)
            for sign in (1, -1):
                y = run_linear(isa, packed, np.full((3, k), 127 * sign, np.float32), n=1)
                assert np.allclose(y, 127.0 * sign * code * k, rtol=2e-7 if k == 65536 else 2e-4)


@each_isa
@pytest.mark.parametrize(
    ("format", "activation", "outliers"), [*((*p, 0) for p in KERNEL_PAIRS), ("int8", "int8", 5)]
)
def test_nan_stays_in_its_row(isa, format, activation, outliers, rng):
    weight = random_weight(rng, format, 20, 70, outliers)
    packed = native(weight, activation)
    x = activations(rng, 12, weight.k)
    clean = run_linear(isa, packed, x, n=20)
    x[3, 17], x[9, 69] = np.nan, np.inf
    if outliers:
        x[5, weight.columns[2]] = np.nan
    y = run_linear(isa, packed, x, n=20)
    assert np.isnan(y[3]).all()
    assert not np.isnan(y[9]).any() if activation == "int8_static" else not np.isfinite(y[9]).any()
    assert not outliers or np.isnan(y[5]).all()
    others = np.delete(np.arange(12), [3, 5, 9] if outliers else [3, 9])
    assert np.array_equal(y[others], clean[others])


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_embedding_reads_the_packed_rows(format, rng):
    for shape in SHAPES:
        weight = random_weight(rng, format, *shape)
        ids = rng.integers(0, weight.n, 11).astype(np.int32)
        ids[0], ids[1] = weight.n - 1, 0
        for isa in ISAS:
            for scale in (1.0, 7.5):
                out = np.full((len(ids), weight.k + 3), np.nan, np.float32)
                kernels.embedding(isa, native(weight), ids, scale, out)
                assert np.isnan(out[:, weight.k :]).all()
                rounded = weight.values.astype(np.float32)[ids] * np.float32(scale)
                assert np.array_equal(out[:, : weight.k], rounded), isa


def test_weight_bytes_match_the_packer(rng):
    for format in WEIGHT_FORMATS:
        for n, k in SHAPES:
            assert kernels.weight_bytes(format, n, k) == random_weight(rng, format, n, k).data.size


@pytest.mark.parametrize(
    ("format", "activation"),
    [("int8_zp", ""), ("int4_g48", ""), ("int4_g1", ""), ("int5", ""), ("fp8_g32", ""), ("bf16_zp", ""), ("int4_zp_g32", ""),
     ("int4_g64", "int8_g32"), ("int4_g256", "int8_g256"), ("int8", "int8_g64"), ("bf16", "f32"), ("fp8", "int8"),
     ("int8", "int8_g32x"), ("int8", "")],
)  # fmt: skip
def test_names_that_mean_nothing_are_refused(format, activation):
    columns = [2, 2] if format == "int8" and not activation else []
    with pytest.raises(ValueError):
        kernels.Weight(format, 16, 256, np.zeros(1, np.uint8), activation, 0.0, columns)
