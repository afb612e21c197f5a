"""Norms and activations against float64, on every ISA variant of this machine."""

import math

import numpy as np
import pytest

kernels = pytest.importorskip("enginewright.backends.cpu._native").kernels

each_isa = pytest.mark.parametrize("isa", kernels.isas())
each_dim = pytest.mark.parametrize("dim", [1, 15, 16, 64, 77, 576, 1531])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def row(rng: np.random.Generator, dim: int, scale: float = 1.0) -> np.ndarray:
    return (rng.normal(size=dim) * scale).astype(np.float32)


def guarded(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A view of `dim` values in a NaN-filled array, and that array, whose rest must stay NaN."""
    whole = np.full(dim + 32, np.nan, np.float32)
    return whole[16 : 16 + dim], whole


def assert_untouched_around(whole: np.ndarray) -> None:
    assert np.isnan(whole[:16]).all() and np.isnan(whole[-16:]).all()


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def rms_norm(s: np.ndarray, weight: np.ndarray | None, offset: float, eps: float) -> np.ndarray:
    normed = s / np.sqrt((s * s).mean() + eps)
    return normed if weight is None else normed * (wide(weight) + offset)


def layer_norm(s, weight, bias, eps: float) -> np.ndarray:
    y = (s - s.mean()) / np.sqrt(s.var() + eps)
    y = y if weight is None else y * wide(weight)
    return y if bias is None else y + wide(bias)


@each_isa
@each_dim
def test_rms_norm(isa, dim, rng):
    x, residual, weight = row(rng, dim), row(rng, dim, 3), row(rng, dim)
    for w, offset in ((None, 0.0), (weight, 0.0), (weight, 1.0)):
        y, whole = guarded(dim)
        kernels.rms_norm(isa, x, None, None, w, offset, 1e-6, y)
        np.testing.assert_allclose(y, rms_norm(wide(x), w, offset, 1e-6), rtol=2e-6, atol=1e-6)
        assert_untouched_around(whole)
    total, whole_total = guarded(dim)
    y, whole = guarded(dim)
    kernels.rms_norm(isa, x, residual, total, weight, 1.0, 1e-5, y)
    assert np.array_equal(total, x + residual)
    np.testing.assert_allclose(y, rms_norm(wide(x + residual), weight, 1.0, 1e-5), rtol=2e-6, atol=1e-6)
    assert_untouched_around(whole)
    assert_untouched_around(whole_total)


@each_isa
@each_dim
def test_layer_norm(isa, dim, rng):
    x, residual, weight, bias = row(rng, dim) + 5, row(rng, dim), row(rng, dim), row(rng, dim)
    for w, b in ((None, None), (weight, None), (weight, bias)):
        y, whole = guarded(dim)
        kernels.layer_norm(isa, x, None, None, w, b, 1e-5, y)
        np.testing.assert_allclose(y, layer_norm(wide(x), w, b, 1e-5), rtol=1e-5, atol=1e-5)
        assert_untouched_around(whole)
    total, _ = guarded(dim)
    y, _ = guarded(dim)
    kernels.layer_norm(isa, x, residual, total, weight, bias, 1e-5, y)
    assert np.array_equal(total, x + residual)
    np.testing.assert_allclose(y, layer_norm(wide(x + residual), weight, bias, 1e-5), rtol=1e-5, atol=1e-5)


@each_isa
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_norms_work_in_place(isa, norm, rng):
    """sum_out may be the input or the residual, and y the input: the usual calls of a transformer block."""
    dim = 93
    x, residual, weight = row(rng, dim), row(rng, dim), row(rng, dim)
    more = (0.0,) if norm == "rms_norm" else (row(rng, dim),)
    call = getattr(kernels, norm)
    total, y = np.empty_like(x), np.empty_like(x)
    call(isa, x, residual, total, weight, *more, 1e-5, y)
    in_place = residual.copy()
    y2 = np.empty_like(x)
    call(isa, x, in_place, in_place, weight, *more, 1e-5, y2)
    assert np.array_equal(in_place, total) and np.array_equal(y2, y)
    x2 = x.copy()
    call(isa, x2, residual, x2, weight, *more, 1e-5, y2)
    assert np.array_equal(x2, total) and np.array_equal(y2, y)
    x3 = x.copy()
    call(isa, x3, residual, None, weight, *more, 1e-5, x3)
    assert np.array_equal(x3, y)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "identity": lambda x: x,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "exp": np.exp,
    "softplus": lambda x: np.logaddexp(0, x),
}
# 1 + erf and 1 + tanh cancel in f32 for negative inputs, and 1.702 x is rounded before its exponential: an
# absolute error of a unit of 1 times |x| is inherent.
ABSOLUTE = {"gelu": 2e-7, "gelu_tanh": 2e-7, "quick_gelu": 1e-7}


def inputs(rng: np.random.Generator) -> np.ndarray:
    """Dense around zero, where polynomials meet, and out to where the functions saturate."""
    parts = [
        np.linspace(-12, 12, 4001),
        np.linspace(-85, 85, 701),
        rng.normal(size=500) * 0.5,
        rng.normal(size=200) * 1e-4,
        [0.0, -0.0, 0.625, -0.625, 0.927734375, 1e-30, -1e-30],
    ]
    return np.concatenate(parts).astype(np.float32)


def test_every_activation_is_tested():
    assert [member.name for member in kernels.Activation] == list(ACTIVATIONS)


@each_isa
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_accurate(isa, kind, rng):
    x = inputs(rng)
    y, whole = guarded(len(x))
    number = int(getattr(kernels.Activation, kind))
    kernels.activation(isa, number, x, y)
    expected = ACTIVATIONS[kind](wide(x))
    allowed = 1e-6 * np.abs(expected) + ABSOLUTE.get(kind, 0) * np.abs(wide(x)) + 1e-37
    error = np.abs(y - expected) / allowed
    assert error.max() <= 1, (x[error.argmax()], y[error.argmax()], expected[error.argmax()])
    assert_untouched_around(whole)

    up = rng.normal(size=len(x)).astype(np.float32)
    gated, whole = guarded(len(x))
    kernels.gated(isa, number, x, up, gated)
    assert np.array_equal(gated, y * up)
    assert_untouched_around(whole)


@each_isa
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_at_the_ends(isa, kind):
    """Saturation is clean, and NaN stays NaN."""
    x = np.array([np.nan, 200.0, 1e4, -200.0, -1e4], np.float32)
    y = np.empty_like(x)
    kernels.activation(isa, int(getattr(kernels.Activation, kind)), x, y)
    assert np.isnan(y[0])
    with np.errstate(over="ignore"):
        expected = ACTIVATIONS[kind](wide(x[1:])).astype(np.float32)
    np.testing.assert_allclose(y[1:], expected, rtol=1e-6, atol=1e-37)


@each_isa
@pytest.mark.parametrize("n", [0, 1, 16, 17, 50])
def test_row_position_does_not_matter(isa, n, rng):
    """A value's bits do not depend on whether it falls into a whole vector or a ragged end."""
    x = row(rng, 64, 4)
    for kind in range(len(ACTIVATIONS)):
        whole, part = np.empty_like(x), np.empty(n, np.float32)
        kernels.activation(isa, kind, x, whole)
        kernels.activation(isa, kind, x[:n].copy(), part)
        assert np.array_equal(part, whole[:n])
