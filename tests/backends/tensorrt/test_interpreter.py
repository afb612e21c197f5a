"""Every rule of the network interpreter, on a network of that layer, against a formula of its own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from enginewright.backends.tensorrt.interpreter import Interpreter, InterpreterError
from enginewright.backends.tensorrt.interpreter.rules import RULES
from enginewright.backends.tensorrt.interpreter.values import rounded

trt = pytest.importorskip("tensorrt_rtx")
D = trt.DataType
RNG = np.random.default_rng(7)
TYPES = {
    "float32": D.FLOAT,
    "float16": D.HALF,
    "int32": D.INT32,
    "int64": D.INT64,
    "bool": D.BOOL,
    "int8": D.INT8,
}


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


class Net:
    """A network under construction: its inputs with their values, and the memory of its constants."""

    def __init__(self, builder: Any) -> None:
        self.network = builder.create_network(0)
        self.values: dict[str, np.ndarray] = {}
        self.raw: dict[str, np.ndarray] = {}

    def input(self, value: np.ndarray, kind: Any = None, shape: Sequence[int] | None = None) -> Any:
        """An input that holds `value`; every axis is dynamic unless `shape` says otherwise."""
        name = f"in{len(self.values)}"
        kind = TYPES[str(value.dtype)] if kind is None else kind
        self.values[name] = rounded(value, kind.name)
        return self.network.add_input(name, kind, tuple(shape) if shape else (-1,) * value.ndim)

    def constant(self, value: np.ndarray, kind: Any = None, shape: Sequence[int] = ()) -> Any:
        """A constant; with `kind`, of the bytes of `value`."""
        value = np.ascontiguousarray(value) if value.ndim else value
        if kind is None:
            layer = self.network.add_constant(value.shape, trt.Weights(value))
        else:
            weights = trt.Weights(kind, value.ctypes.data, int(np.prod(shape)))
            layer = self.network.add_constant(tuple(shape), weights)
        layer.name = f"constant {len(self.raw)}"
        self.raw[layer.name] = value
        return layer.get_output(0)

    def run(self, *outputs: Any) -> list[np.ndarray]:
        for tensor in outputs:
            self.network.mark_output(tensor)
        found = Interpreter(self.network, self.raw).run(self.values)
        return [found[tensor.name] for tensor in outputs]

    def one(self, layer: Any) -> np.ndarray:
        return self.run(layer.get_output(0))[0]


@pytest.fixture
def net(builder: Any) -> Net:
    return Net(builder)


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_constants_come_back_as_the_library_was_given_them(net):
    whole = RNG.integers(-100, 100, (3, 4)).astype(np.int8)
    codes = RNG.integers(-8, 8, (3, 4)).astype(np.int8)
    packed = np.array(
        [(codes.flat[i] & 15) | (codes.flat[i + 1] & 15) << 4 for i in range(0, 12, 2)], np.uint8
    )
    brain = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    results = net.run(
        net.network.add_identity(net.constant(floats(2, 3).astype(np.float16))).get_output(0),
        net.network.add_cast(net.constant(whole), D.FLOAT).get_output(0),
        net.network.add_dequantize(
            net.constant(packed, D.INT4, (3, 4)), net.constant(np.ones((1, 4), np.float32)), D.FLOAT
        ).get_output(0),
        net.network.add_cast(net.constant(brain, D.BF16, (3,)), D.FLOAT).get_output(0),
    )
    close(results[0], net.raw["constant 0"].astype(np.float32))
    close(results[1], whole.astype(np.float32))
    close(results[2], codes.astype(np.float32))
    assert results[3].tolist() == [1.0, -2.0, math.inf]


def test_a_constant_whose_bytes_are_not_given_is_an_error(net):
    brain = np.array([0x3F80], np.uint16)
    net.network.mark_output(net.network.add_cast(net.constant(brain, D.BF16, (1,)), D.FLOAT).get_output(0))
    with pytest.raises(InterpreterError, match="bytes of this BF16 constant"):
        Interpreter(net.network)


def test_every_tensor_is_rounded_to_its_type(net):
    x = floats(5, 6)
    inputs = [net.input(x, kind) for kind in (D.FLOAT, D.HALF, D.BF16)]
    double = [net.network.add_elementwise(t, t, trt.ElementWiseOperation.PROD).get_output(0) for t in inputs]
    plain, halves, brains = net.run(*double)
    close(plain, x * x)
    assert np.array_equal(halves, half(half(x) * half(x)))
    import torch

    brain = torch.from_numpy(x).bfloat16()
    assert np.array_equal(brains, (brain * brain).float().numpy())


ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": lambda a, b: a + b,
    "PROD": lambda a, b: a * b,
    "MAX": lambda a, b: np.where(a > b, a, b),
    "MIN": lambda a, b: np.where(a > b, b, a),
    "SUB": lambda a, b: a - b,
    "DIV": lambda a, b: a * (1 / b),
    "POW": lambda a, b: np.exp(b * np.log(a)),
    "FLOOR_DIV": lambda a, b: np.floor(a / b),
    "EQUAL": lambda a, b: ~((a > b) | (a < b)),
    "GREATER": lambda a, b: ~(a <= b),
    "LESS": lambda a, b: ~(a >= b),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_with_broadcast(net, op):
    left, right = np.abs(floats(3, 1, 5)) + 0.1, np.abs(floats(1, 4, 5)) + 0.1
    if op == "EQUAL":
        left, right = np.round(left), np.round(right)
    layer = net.network.add_elementwise(
        net.input(left), net.input(right), getattr(trt.ElementWiseOperation, op)
    )
    close(net.one(layer).astype(np.float32), np.asarray(ELEMENTWISE[op](left, right), np.float32), 1e-5)


@pytest.mark.parametrize("op", ["AND", "OR", "XOR"])
def test_elementwise_of_truth_values(net, op):
    left, right = RNG.random((2, 8)) > 0.5
    layer = net.network.add_elementwise(
        net.input(left), net.input(right), getattr(trt.ElementWiseOperation, op)
    )
    table = {"AND": left & right, "OR": left | right, "XOR": left != right}
    assert np.array_equal(net.one(layer), table[op])


def test_integers_divide_downwards_and_negative_ones_are_refused(net):
    left, right = np.array([7, 8, 9], np.int32), np.array([4, 4, 4], np.int32)
    layer = net.network.add_elementwise(net.input(left), net.input(right), trt.ElementWiseOperation.DIV)
    assert net.one(layer).tolist() == [1, 2, 2]
    net.values["in0"] = -left
    with pytest.raises(InterpreterError, match="integers that are not positive"):
        Interpreter(net.network).run(net.values)


UNARY: dict[str, Callable[[float], float]] = {
    "EXP": math.exp,
    "LOG": math.log,
    "SQRT": math.sqrt,
    "RECIP": lambda x: 1 / x,
    "ABS": abs,
    "NEG": lambda x: -x,
    "SIN": math.sin,
    "COS": math.cos,
    "TAN": math.tan,
    "CEIL": math.ceil,
    "FLOOR": math.floor,
    "ERF": math.erf,
    "SIGN": lambda x: (x > 0) - (x < 0),
    "ROUND": round,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(net, op):
    x = floats(4, 5, scale=3)
    x[0, :3] = 0.5, 1.5, 2.5
    if op in ("LOG", "SQRT"):
        x = np.abs(x) + 0.1
    layer = net.network.add_unary(net.input(x), getattr(trt.UnaryOperation, op))
    expected = np.array([UNARY[op](float(v)) for v in x.flat], np.float32).reshape(x.shape)
    close(net.one(layer), expected, 1e-5)


def test_unary_of_truth_and_of_what_is_no_number(net):
    truth = np.array([True, False])
    odd = np.array([np.nan, np.inf, 1.0], np.float32)
    op = trt.UnaryOperation
    results = net.run(
        net.network.add_unary(net.input(truth), op.NOT).get_output(0),
        net.network.add_unary(net.input(odd), op.ISNAN).get_output(0),
        net.network.add_unary(net.input(odd), op.ISINF).get_output(0),
    )
    assert [r.tolist() for r in results] == [[False, True], [True, False, False], [False, True, False]]


def _gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_tanh(x: float) -> float:
    return x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "RELU": lambda x: x if x > 0 else 0,
    "SIGMOID": lambda x: math.exp(x) / (1 + math.exp(x)),
    "TANH": math.tanh,
    "LEAKY_RELU": lambda x: x if x >= 0 else 0.3 * x,
    "ELU": lambda x: x if x >= 0 else 0.3 * (math.exp(x) - 1),
    "SELU": lambda x: 1.7 * (x if x > 0 else 0.3 * math.exp(x) - 0.3),
    "SOFTSIGN": lambda x: x / (1 + abs(x)),
    "SOFTPLUS": lambda x: 0.3 * math.log(math.exp(1.7 * x) + 1),
    "CLIP": lambda x: max(0.3, min(1.7, x)),
    "HARD_SIGMOID": lambda x: max(0, min(1, 0.3 * x + 1.7)),
    "SCALED_TANH": lambda x: 0.3 * math.tanh(1.7 * x),
    "THRESHOLDED_RELU": lambda x: x if x > 0.3 else 0,
    "GELU_ERF": _gelu,
    "GELU_TANH": _gelu_tanh,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(net, kind):
    x = floats(6, 7, scale=3)
    layer = net.network.add_activation(net.input(x), getattr(trt.ActivationType, kind))
    layer.alpha, layer.beta = 0.3, 1.7
    close(
        net.one(layer),
        np.array([ACTIVATIONS[kind](float(v)) for v in x.flat], np.float32).reshape(x.shape),
        2e-5,
    )


def test_cast_between_types(net):
    x = np.array([-2.7, 0.0, 2.7, 1e6], np.float32)
    t = net.input(x)
    results = net.run(*(net.network.add_cast(t, kind).get_output(0) for kind in (D.INT32, D.BOOL, D.HALF)))
    assert results[0].tolist() == [-2, 0, 2, 1000000]
    assert results[1].tolist() == [True, False, True, True]
    assert results[2].tolist() == [half(x)[0], 0, half(x)[2], math.inf]


def test_select(net):
    condition = RNG.random((3, 1, 4)) > 0.5
    yes, no = floats(3, 5, 4), np.full((1, 1, 1), np.nan, np.float32)
    found = net.one(net.network.add_select(net.input(condition), net.input(yes), net.input(no)))
    for i, j, k in np.ndindex(3, 5, 4):
        assert found[i, j, k] == yes[i, j, k] if condition[i, 0, k] else np.isnan(found[i, j, k])


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "AVG"])
@pytest.mark.parametrize("keep", [True, False])
def test_reduce(net, op, keep):
    x = floats(2, 3, 4)
    layer = net.network.add_reduce(net.input(x), getattr(trt.ReduceOperation, op), 0b101, keep)
    lines = [[x[i, j, k] for i in range(2) for k in range(4)] for j in range(3)]
    functions = {
        "SUM": math.fsum,
        "PROD": math.prod,
        "MAX": max,
        "MIN": min,
        "AVG": lambda v: math.fsum(v) / 8,
    }
    expected = np.array([functions[op](line) for line in lines], np.float32)
    close(net.one(layer), expected.reshape(1, 3, 1) if keep else expected, 1e-5)


@pytest.mark.parametrize(
    ("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_cumulative(net, exclusive, reverse):
    x = RNG.integers(0, 9, (2, 5)).astype(np.int32)
    axis = net.constant(np.array(1, np.int32))
    layer = net.network.add_cumulative(net.input(x), axis, trt.CumulativeOperation.SUM, exclusive, reverse)
    expected = np.zeros_like(x)
    for j in range(5):
        span = range(j + exclusive, 5) if reverse else range(j + 1 - exclusive)
        expected[:, j] = sum((x[:, i] for i in span), np.zeros(2, np.int32))
    assert np.array_equal(net.one(layer), expected)


def test_softmax(net):
    x = floats(3, 4, 5, scale=30)
    layer = net.network.add_softmax(net.input(x))
    layer.axes = 0b010
    expected = np.array(
        [[[math.exp(x[i, j, k] - x[i, :, k].max()) for k in range(5)] for j in range(4)] for i in range(3)]
    )
    close(net.one(layer), (expected / expected.sum(1, keepdims=True)).astype(np.float32), 1e-5)


@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_topk_in_order_with_indices(net, op):
    x = floats(4, 9)
    layer = net.network.add_topk(net.input(x), getattr(trt.TopKOperation, op), 3, 0b10)
    values, indices = net.run(layer.get_output(0), layer.get_output(1))
    for row in range(4):
        ranked = sorted(range(9), key=lambda i: x[row, i], reverse=op == "MAX")[:3]
        assert indices[row].tolist() == ranked and values[row].tolist() == x[row, ranked].tolist()


def test_normalization(net):
    x, scale, bias = floats(3, 8), floats(1, 8), floats(1, 8)
    layer = net.network.add_normalization_v2(net.input(x), net.constant(scale), net.constant(bias), 0b10)
    layer.epsilon = 1e-3
    expected = np.stack([(r - np.mean(r)) / math.sqrt(np.var(r) + 1e-3) for r in x]) * scale + bias
    close(net.one(layer), expected.astype(np.float32), 1e-5)


def test_fill_counts_from_attributes_and_from_inputs(net):
    still = net.network.add_fill((3,), trt.FillOperation.LINSPACE, D.FLOAT)
    still.alpha, still.beta = 2.0, 0.5
    moving = net.network.add_fill((1, 1), trt.FillOperation.LINSPACE, D.INT32)
    for index, value in enumerate(([2, 3], 5, [10, 1])):
        moving.set_input(index, net.constant(np.array(value, np.int32)))
    a, b = net.run(still.get_output(0), moving.get_output(0))
    assert a.tolist() == [2.0, 2.5, 3.0] and b.tolist() == [[5, 6, 7], [15, 16, 17]]


def test_shape_one_hot_and_non_zero(net):
    x = floats(2, 3)
    picks = np.array([[2, 0], [1, 2]], np.int32)
    values, depth = net.constant(np.array([-1.0, 5.0], np.float32)), net.constant(np.array(3, np.int32))
    hot = net.network.add_one_hot(net.input(picks), values, depth, -1)
    sparse = net.network.add_non_zero(net.input(np.array([[0, 3], [4, 0]], np.int32)))
    sizes, hots, where = net.run(
        net.network.add_shape(net.input(x)).get_output(0), hot.get_output(0), sparse.get_output(0)
    )
    assert sizes.tolist() == [2, 3] and sizes.dtype == np.int64
    for i, j, k in np.ndindex(2, 2, 3):
        assert hots[i, j, k] == (5.0 if picks[i, j] == k else -1.0)
    assert where.tolist() == [[0, 1], [1, 0]]


def test_shuffle_transposes_reshapes_and_transposes(net):
    x = floats(2, 3, 4)
    layer = net.network.add_shuffle(net.input(x))
    layer.first_transpose = trt.Permutation([2, 0, 1])
    layer.reshape_dims = (0, -1, 2)
    layer.second_transpose = trt.Permutation([1, 2, 0])
    found = net.one(layer)
    assert found.shape == (3, 2, 4)
    for i, j, k in np.ndindex(2, 3, 4):  # in the first transpose's result (k, i, j), rows of two
        flat = i * 3 + j
        assert found[flat // 2, flat % 2, k] == x[i, j, k]


def test_shuffle_takes_its_shape_from_an_input(net):
    x = floats(4, 6)
    layer = net.network.add_shuffle(net.input(x, shape=(4, 6)))
    layer.set_input(1, net.constant(np.array([3, 8], np.int32)))
    assert net.one(layer).ravel().tolist() == x.ravel().tolist()


def test_squeeze_unsqueeze_and_concatenation(net):
    x, y = floats(2, 1, 3), floats(2, 4, 3)
    a, b = net.input(x, shape=(2, 1, 3)), net.input(y, shape=(2, 4, 3))
    joined = net.network.add_concatenation([a, b])
    joined.axis = 1
    flat = net.network.add_squeeze(a, net.constant(np.array([1], np.int64)))
    tall = net.network.add_unsqueeze(b, net.constant(np.array([0, 4], np.int64)))
    c, f, t = net.run(joined.get_output(0), flat.get_output(0), tall.get_output(0))
    assert c[:, :1].tolist() == x.tolist() and c[:, 1:].tolist() == y.tolist()
    assert f.tolist() == [row[0] for row in x.tolist()] and t.shape == (1, 2, 4, 3, 1)


def test_slice_with_strides_and_with_axes(net):
    x = floats(5, 6)
    t = net.input(x, shape=(5, 6))
    plain = net.network.add_slice(t, (1, 4), (2, 3), (2, -2))
    some = net.network.add_slice(t, (2,), (3,), (1,))
    some.set_input(5, net.constant(np.array([1], np.int32)))
    moving = net.network.add_slice(t, (0, 0), (1, 1), (1, 1))
    moving.set_input(1, net.constant(np.array([3, 0], np.int32)))
    moving.set_input(2, net.constant(np.array([2, 6], np.int32)))
    a, b, c = net.run(plain.get_output(0), some.get_output(0), moving.get_output(0))
    assert a.tolist() == [[x[r, k] for k in (4, 2, 0)] for r in (1, 3)]
    assert b.tolist() == [row[2:5] for row in x.tolist()] and c.tolist() == x[3:].tolist()


@pytest.mark.parametrize("mode", ["FILL", "CLAMP", "WRAP"])
def test_slice_beyond_the_ends(net, mode):
    x = floats(4)
    layer = net.network.add_slice(net.input(x, shape=(4,)), (-2,), (8,), (1,))
    layer.mode = getattr(trt.SampleMode, mode)
    if mode == "FILL":
        layer.set_input(4, net.constant(np.array(9.0, np.float32)))
    a, b, c, d = x.tolist()
    table = {
        "FILL": [9, 9, a, b, c, d, 9, 9],
        "CLAMP": [a, a, a, b, c, d, d, d],
        "WRAP": [c, d, a, b, c, d, a, b],
    }
    assert net.one(layer).tolist() == table[mode]


def test_gather(net):
    x = floats(3, 4, 5)
    t = net.input(x)
    rows = np.array([[2, 0], [1, 1]], np.int32)
    whole = net.network.add_gather(t, net.input(rows), 1)
    batched = net.network.add_gather(t, net.input(np.array([[3], [0], [2]], np.int32)), 1)
    batched.num_elementwise_dims = 1
    picks = RNG.integers(0, 5, (3, 4, 2)).astype(np.int32)
    single = net.network.add_gather_v2(t, net.input(picks), trt.GatherMode.ELEMENT)
    single.axis = 2
    points = np.array([[0, 3], [2, 1]], np.int32)
    nd = net.network.add_gather_v2(t, net.input(points, shape=(-1, 2)), trt.GatherMode.ND)
    a, b, c, d = net.run(*(layer.get_output(0) for layer in (whole, batched, single, nd)))
    for i, p, q in np.ndindex(3, 2, 2):
        assert a[i, p, q].tolist() == x[i, rows[p, q]].tolist()
    assert b.tolist() == [[x[0, 3].tolist()], [x[1, 0].tolist()], [x[2, 2].tolist()]]
    for i, j, k in np.ndindex(3, 4, 2):
        assert c[i, j, k] == x[i, j, picks[i, j, k]]
    assert d.tolist() == [x[0, 3].tolist(), x[2, 1].tolist()]


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_is_an_error(net, index):
    layer = net.network.add_gather(net.input(floats(3, 2)), net.input(np.array([0, index], np.int32)), 0)
    with pytest.raises(InterpreterError, match=r"GATHER\): indices .* of an axis of 3"):
        net.one(layer)


def test_scatter(net):
    x, rows, updates = floats(5, 3), np.array([[4], [1]], np.int32), floats(2, 3)
    nd = net.network.add_scatter(net.input(x), net.input(rows), net.input(updates), trt.ScatterMode.ND)
    where = np.array([[2, 0, 1]], np.int32)
    single = net.network.add_scatter(
        net.input(x), net.input(where), net.input(floats(1, 3)), trt.ScatterMode.ELEMENT
    )
    single.axis = 0
    a, b = net.run(nd.get_output(0), single.get_output(0))
    assert a[[4, 1]].tolist() == updates.tolist() and a[[0, 2, 3]].tolist() == x[[0, 2, 3]].tolist()
    for j in range(3):
        assert b[where[0, j], j] == net.values["in5"][0, j]
    assert (b != x).sum() == 3


def test_matrix_multiply_accumulates_in_float32(net):
    left, right = floats(2, 3, 64), floats(1, 64, 5)
    layer = net.network.add_matrix_multiply(
        net.input(left, D.HALF), trt.MatrixOperation.NONE, net.input(right, D.HALF), trt.MatrixOperation.NONE
    )
    exact = np.einsum("bik,kj->bij", half(left).astype(np.float64), half(right)[0].astype(np.float64))
    found = net.one(layer)
    assert np.array_equal(found, half(found))
    np.testing.assert_allclose(found, exact, rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [("TRANSPOSE", "TRANSPOSE"), ("NONE", "VECTOR"), ("VECTOR", "NONE"), ("VECTOR", "VECTOR")],
)
def test_matrix_multiply_of_transposed_and_of_vectors(net, first, second):
    shapes = {"NONE": ((2, 3, 4), (2, 4, 5)), "TRANSPOSE": ((2, 4, 3), (2, 5, 4)), "VECTOR": ((2, 4), (2, 4))}
    left, right = floats(*shapes[first][0]), floats(*shapes[second][1])
    layer = net.network.add_matrix_multiply(
        net.input(left, shape=left.shape),
        getattr(trt.MatrixOperation, first),
        net.input(right, shape=right.shape),
        getattr(trt.MatrixOperation, second),
    )
    letters = {"NONE": ("bik", "bkj"), "TRANSPOSE": ("bki", "bjk"), "VECTOR": ("bk", "bk")}
    a, b = letters[first][0], letters[second][1]
    out = "b" + ("i" if "i" in a else "") + ("j" if "j" in b else "")
    close(net.one(layer), np.einsum(f"{a},{b}->{out}", left, right), 1e-5)


def test_einsum(net):
    left, right = floats(2, 3, 4), floats(5, 4)
    layer = net.network.add_einsum(
        inputs=[net.input(left, shape=(2, 3, 4)), net.input(right, shape=(5, 4))], equation="abc,dc->abd"
    )
    close(net.one(layer), left @ right.T, 1e-5)


@pytest.mark.parametrize("layout", ["tensor", "axis", "block"])
def test_dequantize_by_tensor_axis_and_block(net, layout):
    codes = RNG.integers(-127, 128, (8, 6)).astype(np.int8)
    shape = {"tensor": (), "axis": (6,), "block": (2, 6)}[layout]
    scale = np.asarray(RNG.random(shape) + 0.5, np.float16)
    layer = net.network.add_dequantize(net.constant(codes), net.constant(scale), D.HALF)
    if layout == "axis":
        layer.axis = 1
    found = net.one(layer)
    for i, j in np.ndindex(8, 6):
        one = {"tensor": scale, "axis": scale[j] if layout == "axis" else 0, "block": 0}[layout]
        one = scale[i // 4, j] if layout == "block" else one
        assert found[i, j] == np.float32(np.float16(np.float32(codes[i, j]) * np.float32(one)))


def test_quantize_rounds_halves_to_even_and_clamps(net):
    x = np.array([-300.0, -0.75, -0.25, 0.25, 0.75, 1.25, 63.4, 64.0], np.float32)
    quantised = net.network.add_quantize(net.input(x), net.constant(np.array(0.5, np.float32)), D.INT8)
    back = net.network.add_dequantize(
        quantised.get_output(0), net.constant(np.array(0.5, np.float32)), D.FLOAT
    )
    assert (net.one(back) * 2).tolist() == [-128, -2, 0, 0, 2, 2, 127, 127]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [0, 4])
def test_rotary_embedding_by_position(net, interleaved, width):
    x, positions = floats(2, 3, 4, 8), RNG.integers(0, 10, (2, 4)).astype(np.int32)
    turned = width or 8
    angles = RNG.random((10, turned // 2)) * 6
    tables = [net.constant(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    layer = net.network.add_rotary_embedding(net.input(x, shape=(-1, 3, -1, 8)), *tables, interleaved, width)
    layer.set_input(3, net.input(positions))
    found = net.one(layer)
    for b, n, s, i in np.ndindex(2, 3, 4, turned // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2)
        point = complex(x[b, n, s, first], x[b, n, s, second])
        point *= complex(math.cos(angles[positions[b, s], i]), math.sin(angles[positions[b, s], i]))
        assert abs(complex(found[b, n, s, first], found[b, n, s, second]) - point) < 1e-5
    assert np.array_equal(found[..., turned:], x[..., turned:])


def cache_network(net: Net, packed: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """A cache [4, 2, 6, 3] with an update of the batch's elements; the cache's array and each element's update [N, s, H]."""
    cache = np.full((4, 2, 6, 3), np.nan, np.float32)
    c = net.input(cache, D.HALF, (-1, 2, 6, 3))
    net.values["in0"] = cache
    if packed:
        rows = [2, 0, 6, 1]
        update = half(floats(9, 2, 3))
        cuts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        parts = [update[cuts[i] : cuts[i + 1]].transpose(1, 0, 2) for i in range(4)]
    else:
        update = half(floats(4, 2, 2, 3))
        parts = list(update)
    u = net.input(update, D.HALF, (-1, 2, 3) if packed else (-1, 2, -1, 3))
    starts = np.array([3, 0, 0, 2], np.int32)
    layer = net.network.add_kv_cache_update(c, u, net.input(starts), trt.KVCacheMode.LINEAR)
    if packed:
        layer.update_form = trt.AttentionIOForm.PACKED_NHD
        layer.update_lengths = net.input(cuts)
    net.network.mark_output(layer.get_output(0))
    return cache, parts


@pytest.mark.parametrize("packed", [False, True])
def test_kv_cache_update_writes_in_place_and_nothing_else(net, packed):
    cache, parts = cache_network(net, packed)
    interpreter = Interpreter(net.network)
    (found,) = interpreter.run(net.values).values()
    assert found is cache and list(interpreter.aliases.values()) == ["in0"]
    for i, (start, part) in enumerate(zip((3, 0, 0, 2), parts, strict=True)):
        for s in range(6):
            if start <= s < start + part.shape[1]:
                assert np.array_equal(found[i, :, s], part[:, s - start])
            else:
                assert np.isnan(found[i, :, s]).all()


def test_kv_cache_update_refuses_to_write_past_the_end(net):
    cache_network(net, True)
    net.values["in2"] = np.array([5, 0, 0, 2], np.int32)
    with pytest.raises(InterpreterError, match="2 tokens at 5 of a cache of 6"):
        Interpreter(net.network).run(net.values)


def test_a_cache_must_be_an_input_read_by_its_update_alone_and_its_update_an_output(net):
    cache = net.input(half(floats(1, 2, 4, 3)), D.HALF, (-1, 2, 4, 3))
    update = net.input(half(floats(1, 2, 1, 3)), D.HALF, (-1, 2, -1, 3))
    layer = net.network.add_kv_cache_update(
        cache, update, net.input(np.zeros(1, np.int32)), trt.KVCacheMode.LINEAR
    )
    with pytest.raises(InterpreterError, match="must be an input of the network and its update an output"):
        Interpreter(net.network)
    net.network.mark_output(layer.get_output(0))
    Interpreter(net.network)
    net.network.mark_output(net.network.add_identity(cache).get_output(0))
    with pytest.raises(InterpreterError, match="'in0' is read beside its update"):
        Interpreter(net.network)


def attend(
    net: Net, kind: str = "NONE", rows: int = 3, keys: int = 5, **inputs: np.ndarray
) -> tuple[Any, ...]:
    """An attention of 4 query heads over 2 key heads, and a loop's answer where `seen(batch, row, key)`."""
    q, k, v = half(floats(2, 4, rows, 8)), half(floats(2, 2, keys, 8)), half(floats(2, 2, keys, 8))
    tensors = [net.input(x, D.HALF, (-1, x.shape[1], -1, 8)) for x in (q, k, v)]
    layer = net.network.add_attention_v2(
        *tensors, trt.AttentionNormalizationOp.SOFTMAX, getattr(trt.CausalMaskKind, kind)
    )
    for name, value in inputs.items():
        setattr(layer, name, net.input(value, D.HALF if value.dtype == np.float32 else None))

    def expected(
        seen: Callable[[int, int, int], bool], added: Callable[[int, int, int], float]
    ) -> np.ndarray:
        out = np.zeros((2, 4, rows, 8))
        for b, h, i in np.ndindex(2, 4, rows):
            visible = [j for j in range(keys) if seen(b, i, j)]
            powers = [math.exp(float(q[b, h, i] @ k[b, h // 2, j]) + added(b, i, j)) for j in visible]
            out[b, h, i] = sum(p * v[b, h // 2, j] for p, j in zip(powers, visible, strict=True)) / sum(
                powers
            )
        return out

    return layer, lambda seen, added=lambda b, i, j: 0.0: expected(seen, added)


@pytest.mark.parametrize("kind", ["NONE", "UPPER_LEFT", "LOWER_RIGHT"])
def test_attention_with_causal_kinds(net, kind):
    layer, expected = attend(net, kind)
    last = {"NONE": lambda i: 9, "UPPER_LEFT": lambda i: i, "LOWER_RIGHT": lambda i: i + 2}[kind]
    close(net.one(layer), expected(lambda b, i, j: j <= last(i)), 2e-3)


def test_attention_with_masks(builder):
    allowed = RNG.random((2, 1, 3, 5)) > 0.4
    allowed[..., 1] = True
    net = Net(builder)
    layer, expected = attend(net, mask=allowed)
    close(net.one(layer), expected(lambda b, i, j: allowed[b, 0, i, j]), 2e-3)
    added = half(floats(2, 1, 3, 5))
    net = Net(builder)
    layer, expected = attend(net, mask=added)
    close(net.one(layer), expected(lambda b, i, j: True, lambda b, i, j: float(added[b, 0, i, j])), 2e-3)


def test_attention_with_lengths(builder):
    lengths = np.array([4, 2], np.int32)
    for kind, rows in (("NONE", 3), ("LOWER_RIGHT", 1)):
        net = Net(builder)
        layer, expected = attend(net, kind, rows, key_value_lengths=lengths)
        close(net.one(layer), expected(lambda b, i, j: j < lengths[b]), 2e-3)


def test_attention_refuses_lower_right_beside_lengths_where_its_readings_differ(net):
    layer, _ = attend(net, "LOWER_RIGHT", key_value_lengths=np.array([5, 4], np.int32))
    with pytest.raises(InterpreterError, match="LOWER_RIGHT beside key_value_lengths is not documented"):
        net.one(layer)
    net.values["in3"] = np.array([5, 5], np.int32)
    Interpreter(net.network).run(net.values)


def test_attention_lets_a_hidden_value_that_is_no_number_through(net):
    # 0 · NaN: what hides a key does not make it harmless.
    layer, _ = attend(net, mask=np.array([True, True, True, True, False]).reshape(1, 1, 1, 5))
    net.values["in2"][:, :, 4] = np.nan
    assert np.isnan(net.one(layer)).all()


def test_a_layer_without_a_rule_is_named(net):
    layer = net.network.add_lrn(net.input(floats(1, 2, 3, 3), shape=(1, 2, 3, 3)), 3, 1.0, 1.0, 1.0)
    layer.name = "the odd one"
    with pytest.raises(InterpreterError, match="'the odd one': there is no rule for a LRN layer"):
        net.one(layer)


def test_layers_are_evaluated_in_order_of_what_they_read(net):
    x = net.input(floats(4, 6), shape=(4, 6))
    layer = net.network.add_slice(x, (0,), (2,), (1,))
    layer.set_input(5, net.constant(np.array([1], np.int32)))  # made after the layer that reads it
    assert net.one(layer).shape == (4, 2)


def test_inputs_must_be_of_their_type_and_shape(net):
    x = net.input(floats(2, 3), D.HALF, (-1, 3))
    net.network.mark_output(net.network.add_identity(x).get_output(0))
    interpreter = Interpreter(net.network)
    with pytest.raises(InterpreterError, match="values that HALF does not have"):
        interpreter.run({"in0": np.full((2, 3), 1 / 3, np.float32)})
    with pytest.raises(InterpreterError, match=r"is \(2, 4\), the network says \(-1, 3\)"):
        interpreter.run({"in0": np.zeros((2, 4), np.float32)})
    with pytest.raises(InterpreterError, match="is int32, the network says HALF"):
        interpreter.run({"in0": np.zeros((2, 3), np.int32)})


def test_every_rule_cites_what_it_was_read_from():
    for kind, rule in RULES.items():
        text = rule.compute.__doc__ or ""
        assert any(mark in text for mark in ("op:", "api:", "guide:")), kind
        assert hasattr(trt, rule.layer_class) and hasattr(trt.LayerType, kind)
