"""The paged cache's kernels against float64 NumPy: every variant that this machine runs, every feature.

Pools are poisoned with NaN (or 1e30) before each test and freed page-table entries point far outside the
pool, so a kernel that reads what it must not see fails. Bitwise tests compare bytes, not values.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("enginewright.backends.cpu._native")
kernels = native.attention

ISAS = kernels.isas()
FREED = 2**30
FORMATS = ["f32", "bf16", "int8"]
# Relative to the largest value. f32: sums of some hundred terms. bf16: q, k, v and the weights are rounded to 2^-9.
# int8: q and the weights are, as bf16; the oracle computes with the keys and values as the cache rounds them.
TOLERANCE = {"f32": 2e-6, "bf16": 2e-2, "int8": 1e-2}


def codes_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes of x [..., D] and their scales [..., 1], both as f32: what an int8 cache keeps."""
    limit = np.abs(x).max(axis=-1, keepdims=True)
    kept = limit >= np.float32(2**-100)
    inverse = np.divide(np.float32(127), limit, out=np.zeros_like(limit), where=kept)
    return np.round(x * inverse), np.where(kept, limit / np.float32(127), np.float32(0))


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer's attention; defaults are the plain case."""

    q_heads: int = 3
    kv_heads: int = 1
    key_dim: int = 64
    value_dim: int = 0  # 0: as the keys
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    alibi: bool = False
    kv_format: str = "f32"
    page_size: int = 16
    length: int = 100
    scale: float = 0.0  # 0: 1 / sqrt(key_dim)


class Layer:
    """A filled pool, with the arguments and the answers of one case."""

    def __init__(
        self, case: Case, isa: str, seed: int = 0, poison: float = np.nan, pages_order_seed: int = 1
    ):
        rng = np.random.default_rng(seed)
        self.case, self.isa = case, isa
        self.value_dim = case.value_dim or case.key_dim
        self.scale = case.scale or case.key_dim**-0.5

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.q = normal(case.length, case.q_heads, case.key_dim) * 2
        self.k = normal(case.length, case.kv_heads, case.key_dim)
        self.v = normal(case.length, case.kv_heads, self.value_dim)
        self.sinks = normal(case.q_heads) if case.sinks else None
        self.alibi = (2.0 ** -np.arange(1, case.q_heads + 1, dtype=np.float32)) if case.alibi else None
        self.positions = np.arange(case.length, dtype=np.int32)
        pages = -(-case.length // case.page_size)
        self.table = np.random.default_rng(pages_order_seed).permutation(pages + 3)[:pages].astype(np.int32)
        self.pool = kernels.Pool(
            case.kv_format, case.kv_heads, case.key_dim, self.value_dim, case.page_size, pages + 3
        )
        self.pool.fill(poison)

    def write(self, begin: int, end: int) -> None:
        """Stores the keys and values of tokens begin .. end - 1."""
        rows = slice(begin, end)
        self.pool.write(self.isa, self.table, self.positions[rows], self.k[rows], self.v[rows])

    def attend(self, begin: int, end: int, split: bool = False) -> np.ndarray:
        """Attention of rows begin .. end - 1, with the pages that none of them sees freed."""
        case = self.case
        table = self.table.copy()
        if case.window:
            table[: max(0, begin - case.window + 1) // case.page_size] = FREED
        rows = slice(begin, end)
        return kernels.attention(
            self.isa,
            self.pool,
            table,
            self.q[rows],
            self.positions[rows],
            self.scale,
            softcap=case.softcap,
            window=case.window,
            sinks=self.sinks,
            alibi=self.alibi,
            split=split,
        )

    def run(self, chunk: int, split: bool = False) -> np.ndarray:
        """The whole sequence in chunks: each is written just before its rows attend."""
        outputs = []
        for begin in range(0, self.case.length, chunk):
            end = min(begin + chunk, self.case.length)
            self.write(begin, end)
            outputs.append(self.attend(begin, end, split))
        return np.concatenate(outputs)

    def oracle(self) -> np.ndarray:
        """The same in float64, one head at a time over the whole score matrix."""
        case = self.case
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        if case.kv_format == "int8":
            k, v = (np.multiply(*codes_of(x), dtype=np.float64) for x in (self.k, self.v))
        distance = self.positions[None, :] - self.positions[:, None]
        seen = (distance <= 0) & ((distance > -case.window) if case.window else True)
        out = np.empty((case.length, case.q_heads, self.value_dim))
        for head in range(case.q_heads):
            kv_head = head // (case.q_heads // case.kv_heads)
            scores = np.float32(self.scale).astype(np.float64) * (q[:, head] @ k[:, kv_head].T)
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if self.alibi is not None:
                scores = scores + self.alibi[head].astype(np.float64) * distance
            scores = np.where(seen, scores, -np.inf)
            largest = scores.max(axis=1, keepdims=True)
            if self.sinks is not None:
                largest = np.maximum(largest, self.sinks[head].astype(np.float64))
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            if self.sinks is not None:
                total = total + np.exp(self.sinks[head].astype(np.float64) - largest)
            out[:, head] = weights @ v[:, kv_head] / total
        return out


def assert_close(actual: np.ndarray, expected: np.ndarray, kv_format: str) -> None:
    assert np.isfinite(actual).all()
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[kv_format], error


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    different = np.flatnonzero(actual.view(np.uint32) != expected.view(np.uint32))
    assert different.size == 0, f"{different.size} of {actual.size} values differ, first at {different[0]}"


HEADS = {
    "multi-head": Case(q_heads=2, kv_heads=2),
    "multi-query": Case(q_heads=8, kv_heads=1, length=40),
    "group of 3": Case(q_heads=6, kv_heads=2),
    "group of 16": Case(q_heads=32, kv_heads=2, length=40),
    "group of 5": Case(q_heads=5, kv_heads=1),
}
DIMS = {
    f"head {dim}": Case(q_heads=2, key_dim=dim, length=70)
    for dim in (8, 16, 72, 80, 96, 112, 128, 192, 256, 576)
} | {
    "odd head": Case(q_heads=2, key_dim=33, length=70),
    "wide values": Case(q_heads=2, key_dim=24, value_dim=80, length=70),
    "narrow values": Case(q_heads=4, key_dim=192, value_dim=128, length=70),
    "one value": Case(q_heads=2, key_dim=8, value_dim=1, length=70),
}
FEATURES = {
    "page of 32": Case(page_size=32),
    "window 1": Case(window=1),
    "window 16": Case(window=16),
    "window 37": Case(window=37, length=150),
    "window = length": Case(window=100),
    "soft cap": Case(softcap=5.0),
    "sinks": Case(sinks=True),
    "alibi, 6 heads": Case(q_heads=6, kv_heads=6, alibi=True),
    "alibi, 12 heads": Case(q_heads=12, kv_heads=4, alibi=True),
    "scale": Case(scale=0.25),
    "negative scale": Case(scale=-0.3),
    "everything": Case(window=33, softcap=7.0, sinks=True, alibi=True, page_size=32, length=140),
    "one token": Case(length=1),
    "two spans": Case(length=600),
    "window over a span's end": Case(window=100, length=640, sinks=True),
}
ALL_CASES = HEADS | DIMS | FEATURES


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_matches_float64(name: str, kv_format: str, isa: str) -> None:
    layer = Layer(dataclasses.replace(ALL_CASES[name], kv_format=kv_format), isa)
    assert_close(layer.run(layer.case.length), layer.oracle(), kv_format)


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_rounds_once(isa: str) -> None:
    """With inputs that bf16 holds exactly, only the softmax weights are rounded: error below 2^-9."""
    case = Case(q_heads=4, kv_format="bf16", length=300)
    layer = Layer(case, isa)
    for name in ("q", "k", "v"):
        exact = (getattr(layer, name).view(np.uint32) & 0xFFFF0000).view(np.float32)
        setattr(layer, name, exact)
    expected = layer.oracle()
    error = layer.run(case.length) - expected
    assert np.sqrt(np.mean(error**2)) < 2**-9 * np.sqrt(np.mean(expected**2))
    only_key = layer.attend(0, 1)
    assert_same_bits(only_key, np.repeat(layer.v[:1], 4, axis=1))


@pytest.mark.parametrize("isa", ISAS)
def test_int8_keeps_the_nearest_codes(isa: str) -> None:
    """A first token's answer is its values: code times the scale, which its weight of 1 carries rounded to bf16."""
    case = Case(q_heads=2, kv_heads=2, key_dim=33, value_dim=75, kv_format="int8", length=64)
    layer = Layer(case, isa)
    layer.v *= 10.0 ** np.arange(-32, 32, dtype=np.float32)[:, None, None]
    layer.v[7] = 0
    layer.v[9] = 2.0**-101
    layer.v[11, :, 1:] = 0.0
    layer.v[13] = np.arange(-37, 38, dtype=np.float32) + 0.5  # ties: the largest is 37.5
    layer.v[13, :, 0] = 127.0
    codes, scales = codes_of(layer.v)
    bf16 = ((scales.view(np.uint32) + 0x7FFF + (scales.view(np.uint32) >> 16 & 1)) & 0xFFFF0000).view(
        np.float32
    )
    for token in range(case.length):
        alone = Layer(case, isa)
        alone.v[0] = layer.v[token]
        alone.write(0, 1)
        assert_same_bits(alone.attend(0, 1)[0] + 0, (codes * bf16)[token] + 0)


@pytest.mark.parametrize("isa", ISAS)
def test_int8_scales_are_each_token_s_and_head_s_own(isa: str) -> None:
    """Keys and values of unlike lengths."""
    case = Case(q_heads=4, kv_heads=2, key_dim=48, kv_format="int8", length=90)
    layer = Layer(case, isa)
    layer.k *= 2.0 ** np.random.default_rng(4).integers(-6, 3, (90, 2, 1)).astype(np.float32)
    layer.v *= 2.0 ** np.random.default_rng(5).integers(-9, 9, (90, 2, 1)).astype(np.float32)
    assert_close(layer.run(90), layer.oracle(), "int8")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    "features", [Case(), Case(scale=-0.25), Case(alibi=True), Case(sinks=True, window=20)]
)
def test_huge_scores_choose_one_key(features: Case, kv_format: str, isa: str) -> None:
    """Scores about 1e10, far apart: the best key takes everything, over two spans of keys as well."""
    case = dataclasses.replace(features, key_dim=16, kv_format=kv_format, length=600)
    layer = Layer(case, isa)
    sign = -1.0 if case.scale < 0 else 1.0
    order = np.random.default_rng(2).permutation(case.length).astype(np.float32)
    layer.q[:] = 1e5
    layer.k[:] = (sign * 1e5 * (1 + order / case.length))[:, None, None]
    if kv_format != "f32":  # further apart: keys of one power of two are equal and share the weight
        layer.k[:] = (sign * np.float32(2.0) ** (order // 10 - 30))[:, None, None] * 1e5
    actual = layer.run(case.length)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, layer.oracle(), atol=TOLERANCE[kv_format] * 4)
    assert_same_bits(Layer.run(layer, 64), actual)


BITWISE = [
    Case(length=200),
    Case(q_heads=8, kv_heads=2, key_dim=40, value_dim=72, window=50, sinks=True, length=200),
    Case(q_heads=5, kv_heads=1, key_dim=16, alibi=True, softcap=9.0, length=700),
    Case(q_heads=2, kv_heads=1, key_dim=16, window=300, length=900, page_size=32),
    Case(q_heads=1, kv_heads=1, key_dim=128, length=200),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("case", BITWISE, ids=str)
def test_one_answer(case: Case, kv_format: str, isa: str) -> None:
    """Any chunking, any division into spans, any pages, any stale content: the same bits."""
    case = dataclasses.replace(case, kv_format=kv_format)
    whole = Layer(case, isa).run(case.length)
    for chunk in (1, 7, 64):
        assert_same_bits(Layer(case, isa, poison=1e30).run(chunk), whole)
    assert_same_bits(Layer(case, isa).run(case.length, split=True), whole)
    assert_same_bits(Layer(case, isa, poison=-np.inf).run(37, split=True), whole)
    other_pages = dataclasses.replace(case, page_size=48 - case.page_size)
    assert_same_bits(Layer(other_pages, isa, pages_order_seed=5).run(64), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_later_tokens_reach_no_earlier_row(kv_format: str, isa: str) -> None:
    """A NaN or an infinity in a token's keys and values shows from its own row on, also within one chunk."""
    case = Case(q_heads=3, key_dim=16, kv_format=kv_format, length=90, window=20)
    expected = Layer(case, isa).run(case.length)
    layer = Layer(case, isa)
    layer.v[41] = np.inf
    layer.k[41] = np.nan
    actual = layer.run(case.length)
    assert_same_bits(actual[:41], expected[:41])
    assert_same_bits(actual[61:], expected[61:])
    assert not np.isfinite(actual[41:61]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_rows_in_any_order(kv_format: str, isa: str) -> None:
    """Rows need not be neighbours, nor ascend: a row's bits are its own."""
    layer = Layer(Case(q_heads=3, key_dim=16, kv_format=kv_format, length=700, window=120), isa)
    whole = layer.run(700)
    rows = np.array([650, 3, 649, 10, 511, 512, 513, 3, 130], dtype=np.int32)
    actual = kernels.attention(isa, layer.pool, layer.table, layer.q[rows], rows, layer.scale, 0.0, 120)
    assert_same_bits(actual, whole[rows])


@settings(max_examples=25, deadline=None)
@given(
    group=st.integers(1, 17),
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(1, 48),
    value_dim=st.integers(1, 48),
    window=st.sampled_from([0, 0, 1, 5, 16, 33, 64]),
    softcap=st.sampled_from([0.0, 3.0]),
    sinks=st.booleans(),
    alibi=st.booleans(),
    kv_format=st.sampled_from(FORMATS),
    page_size=st.sampled_from([16, 32]),
    length=st.integers(1, 130),
    chunk=st.integers(1, 130),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    group: int, kv_heads: int, key_dim: int, value_dim: int, window: int, softcap: float, sinks: bool,
    alibi: bool, kv_format: str, page_size: int, length: int, chunk: int, isa: str, seed: int,
) -> None:  # fmt: skip
    heads = (group * kv_heads, kv_heads, key_dim, value_dim)
    case = Case(*heads, softcap, window, sinks, alibi, kv_format, page_size, length)
    whole = Layer(case, isa, seed).run(length)
    layer = Layer(case, isa, seed, poison=1e30, pages_order_seed=seed)
    assert_same_bits(layer.run(chunk), whole)
    assert_close(whole, layer.oracle(), kv_format)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(64, 64), (80, 32), (96, 24), (20, 20), (8, 2), (256, 256), (16, 0)]
)
def test_rope(dim: int, rotary_dim: int, interleaved: bool, isa: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 3, dim), dtype=np.float32)
    angles = rng.uniform(-3, 3, (5, rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = rotary_dim // 2
    first = np.arange(0, rotary_dim, 2) if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    expected = x.astype(np.float64)
    expected[..., first] = a * cos[:, None] - b * sin[:, None]
    expected[..., second] = b * cos[:, None] + a * sin[:, None]
    actual = kernels.rope(isa, x, cos, sin, rotary_dim, interleaved)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert_same_bits(actual[..., rotary_dim:].copy(), x[..., rotary_dim:].copy())


WIDTHS = [1, 5, 16, 17, 63, 64, 65, 1000, 49152]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax(width: int, isa: str) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((7, width), dtype=np.float32)
    x[1] = np.round(x[1])  # ties
    x[2] = -np.inf
    x[3, width // 2] = np.inf
    x[4] = 0.0
    x[5, width - 1] = np.nan
    expected = x.argmax(axis=1)
    expected[5] = -1
    assert kernels.argmax(isa, x).tolist() == expected.tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_logsumexp_and_softmax(width: int, isa: str) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((6, width), dtype=np.float32) * 8
    x[1, width // 2 :] = -np.inf
    x[2] += 1e4
    x[3] = -np.inf
    x[4, 0] = np.nan
    x[5] = 3.0
    actual = kernels.logsumexp(isa, x)
    for row in (0, 2, 5, *([1] if width > 1 else [])):
        wide = x[row].astype(np.float64)
        expected = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        assert abs(actual[row] - expected) <= 1e-6 * max(1.0, abs(expected))
        np.testing.assert_allclose(
            kernels.softmax(isa, x[row : row + 1])[0], np.exp(wide - expected), rtol=2e-5, atol=1e-30
        )
    assert actual[3] == -np.inf
    assert np.isnan(actual[4])
    for begin, end in itertools.pairwise(range(7)):  # a row alone or among others
        assert_same_bits(kernels.logsumexp(isa, x[begin:end]), actual[begin:end])
