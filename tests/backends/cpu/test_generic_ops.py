"""Every generic op on random shapes, strides and types against numpy and torch's conventions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.recipes.errors import ArtifactError
from tests.backends.cpu.interpreter import KINDS, REDUCE, Interpreter
from tests.backends.cpu.small_programs import Operand, Pages, SmallProgram, step_input

TOKENS = [3, 0, 7, 7, 1, 5]
UNARY = """neg abs sign square exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos
    atan sinh cosh tanh sigmoid erf relu relu2 silu gelu gelu_tanh softplus elu mish hardswish hardsigmoid
    log_sigmoid floor ceil round trunc""".split()
COMPARE = "eq ne lt le gt ge logical_and logical_or logical_xor".split()
BINARY = "add sub mul minimum maximum floor_divide remainder fmod div pow atan2".split()


def source(p: SmallProgram, width: int, dtype: str = "f32", values: np.ndarray | None = None) -> Operand:
    """A value whose rows come from a random table, one row a token id."""
    if values is None:
        values = p.rng.normal(size=(8, width)) * 3
    x = p.value(width)
    p.emit("embedding", [], [x], [p.table(values)], index="tokens")
    if dtype == "f32":
        return x
    y = p.value(width, "i32")
    p.emit("copy", [x], [y], shape=[width], strides=[[1], [1]])
    return y


def run(p: SmallProgram, folder: Path, y: Operand, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What the executor gives for y, and what numpy gives."""
    dtype = p.document["values"][y["value"]]["dtype"]
    real, out = p.value(y["width"]), p.value(y["width"], rows="logits")
    p.emit("copy", [y], [real], shape=[y["width"]], strides=[[1], [1]]) if dtype == "i32" else None
    p.emit("select_rows", [real if dtype == "i32" else y], [out])
    p.finish(out)
    p.document["vocab_size"] = y["width"]
    p.write(folder)
    tokens = [t % min(8, y["width"]) for t in TOKENS]
    executor = CpuExecutor(folder / "program.json", folder / "weights.bin", threads=threads)
    rows = list(range(len(tokens)))
    return executor.step(step_input(Pages([], 0), [(0, 0, tokens)], rows)), Interpreter(folder).run(
        tokens, rows
    )


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", UNARY)
def test_unary_kinds(tmp_path: Path, kind: str) -> None:
    p = SmallProgram(8)
    x, y = source(p, 10), p.value(10)
    p.emit("elementwise", [x], [y], kind=kind, shape=[10], strides=[[1], [1]])
    close(*run(p, tmp_path, y), tolerance=2e-5)


@pytest.mark.parametrize("dtypes", ["ff", "fi", "if", "ii", "fs", "is"])
@pytest.mark.parametrize("kind", BINARY + COMPARE)
def test_binary_kinds_and_types(tmp_path: Path, kind: str, dtypes: str) -> None:
    p = SmallProgram(12)
    operands: list[Any] = []
    for letter in dtypes:
        if letter == "s":
            operands.append({"scalar": 2})
        else:
            values = p.rng.integers(1, 6, (8, 12)) * p.rng.choice([-1, 1], (8, 12))
            values = values if letter == "i" else values * p.rng.choice([1.0, 0.7], (8, 12))
            operands.append(source(p, 12, "i32" if letter == "i" else "f32", values))
    if kind == "pow":
        for operand in operands[: 2 - dtypes.count("s")]:
            p.emit("elementwise", [operand], [operand], kind="abs", shape=[12], strides=[[1], [1]])
    integer = "f" not in dtypes and kind not in ("div", "pow", "atan2")
    y = p.value(12, "i32" if kind in COMPARE or integer else "f32")
    strides = [[] if letter == "s" else [1] for letter in dtypes] + [[1]]
    p.emit("elementwise", operands, [y], kind=kind, shape=[12], strides=strides)
    close(*run(p, tmp_path, y), tolerance=1e-5)


def test_ternary_bitwise_and_predicates(tmp_path: Path) -> None:
    p = SmallProgram(6)
    a, b, c, out = source(p, 6), source(p, 6), source(p, 6), p.value(30)
    mask, small, whole = p.value(6, "i32"), p.value(6, "i32"), source(p, 6, "i32")
    one = [[1]] * 3
    p.emit("elementwise", [a, {"scalar": 0}], [mask], kind="gt", shape=[6], strides=[[1], [], [1]])
    p.emit("elementwise", [mask], [small], kind="logical_not", shape=[6], strides=[[1]] * 2)

    def part(i: int) -> Operand:
        return {**out, "column": 6 * i, "width": 6}

    p.emit(
        "elementwise",
        [mask, b, {"scalar": -2.5}],
        [part(0)],
        kind="where",
        shape=[6],
        strides=[[1], [1], [], [1]],
    )
    p.emit("elementwise", [a, b, c], [part(1)], kind="lerp", shape=[6], strides=[[1]] * 4)
    bits = [p.value(6, "i32") for _ in range(5)]
    for kind, y in zip(("bitwise_and", "bitwise_or", "bitwise_xor"), bits, strict=False):
        p.emit("elementwise", [whole, small], [y], kind=kind, shape=[6], strides=one)
    p.emit("elementwise", [whole], [bits[3]], kind="bitwise_not", shape=[6], strides=[[1]] * 2)
    p.emit("elementwise", [mask, bits[0], bits[3]], [bits[4]], kind="where", shape=[6], strides=[[1]] * 4)
    for i, y in ((2, bits[4]), (3, bits[2]), (4, bits[1])):
        p.emit("copy", [y], [part(i)], shape=[6], strides=[[1], [1]])
    close(*run(p, tmp_path, out))


def test_clamp_fma_shifts_and_the_edges_of_numbers(tmp_path: Path) -> None:
    """What numpy's interpreter does not have, or says otherwise than torch."""
    nan, inf = float("nan"), float("inf")
    p = SmallProgram(8)
    x = p.value(8)
    p.emit(
        "copy",
        [{"weight": p.vector(np.array([nan, -inf, inf, -0.5, 2.5, 3.5, 1e20, -7.0]))}],
        [x],
        shape=[8],
        strides=[[1], [1]],
    )
    results = []

    def result(kind: str, *inputs: Any, dtype: str = "f32") -> None:
        y = p.value(8, dtype)
        strides = [[] if "scalar" in i else [1] for i in inputs] + [[1]]
        p.emit(
            "elementwise" if kind != "copy" else "copy",
            list(inputs),
            [y],
            shape=[8],
            strides=strides,
            **({"kind": kind} if kind != "copy" else {}),
        )
        results.append((kind, y))

    result("clamp", x, {"scalar": -1}, {"scalar": 3})
    result("fma", x, {"scalar": 2.0}, {"scalar": 1.0})
    result("maximum", x, {"scalar": 0.0})
    result("round", x)
    result("isnan", x, dtype="i32")
    result("isinf", x, dtype="i32")
    result("copy", x, dtype="i32")
    whole = results[-1][1]
    result("shift_right", whole, {"scalar": 30}, dtype="i32")
    result("floor_divide", whole, {"scalar": 0}, dtype="i32")
    result("add", whole, whole, dtype="i32")
    result("remainder", x, {"scalar": 4.0})
    low = -(2**31)
    want = {
        "clamp": [nan, -1, 3, -0.5, 2.5, 3, 3, -1],
        "fma": [nan, -inf, inf, 0, 6, 8, 2e20, -13],
        "maximum": [nan, 0, inf, 0, 2.5, 3.5, 1e20, 0],
        "round": [nan, -inf, inf, -0.0, 2, 4, 1e20, -7],
        "isnan": [1, 0, 0, 0, 0, 0, 0, 0],
        "isinf": [0, 1, 1, 0, 0, 0, 0, 0],
        "copy": [low, low, low, 0, 2, 3, low, -7],
        "shift_right": [-2, -2, -2, 0, 0, 0, -2, -1],
        "floor_divide": [0] * 8,
        "add": [0, 0, 0, 0, 4, 6, 0, -14],
        "remainder": [nan, nan, nan, 3.5, 2.5, 3.5, np.fmod(np.float32(1e20), 4), 1],
    }
    for kind, y in results:
        q = SmallProgram(8)
        q.document, q.data, q._next = (
            {**p.document, "instructions": list(p.document["instructions"])},
            bytearray(p.data),
            dict(p._next),
        )
        q.document["values"] = list(p.document["values"])
        real, out = q.value(8), q.value(8, rows="logits")
        q.emit("copy", [y], [real], shape=[8], strides=[[1], [1]])
        q.emit("select_rows", [real], [out])
        q.finish(out)
        got = q.load(tmp_path, threads=1).step(step_input(Pages([], 0), [(0, 0, [0, 1])]))
        np.testing.assert_array_equal(got[0], np.array(want[kind], np.float32), err_msg=kind)
        np.testing.assert_array_equal(got[0], got[1])


def layout(rng: np.random.Generator, shape: list[int], broadcast: bool) -> tuple[list[int], int]:
    """Random strides for `shape` (permuted, with gaps, some dimensions broadcast) and the width they need."""
    strides, step = [0] * len(shape), int(rng.integers(1, 3))
    for d in rng.permutation(len(shape)):
        if broadcast and rng.random() < 0.25:
            continue
        strides[d] = step
        step *= shape[d] + int(rng.integers(0, 2))
    return strides, 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def placed(
    p: SmallProgram, shape: list[int], dtype: str = "f32", broadcast: bool = True
) -> tuple[Operand, list[int]]:
    """A random input of that shape somewhere inside a wider value, or a weight."""
    strides, width = layout(p.rng, shape, broadcast)
    before = int(p.rng.integers(0, 4))
    if p.rng.random() < 0.2:
        values = p.rng.normal(size=before + width) * 3
        return {
            "weight": p.vector(values if dtype == "f32" else values.astype(int)),
            "column": before,
            "width": width,
        }, strides
    return {**source(p, before + width, dtype), "column": before, "width": width}, strides


def target(p: SmallProgram, shape: list[int], dtype: str = "f32") -> tuple[Operand, list[int]]:
    """A dense output of a permuted shape."""
    strides, step = [0] * len(shape), 1
    for d in p.rng.permutation(len(shape)):
        strides[d] = step
        step *= shape[d]
    return p.value(step, dtype), strides


@pytest.mark.parametrize("seed", range(25))
def test_random_shapes_and_strides(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = SmallProgram(8, seed)
    shape = [int(n) for n in rng.integers(1, 6, rng.integers(1, 6))]
    x, sx = placed(p, shape)
    z, sz = placed(p, shape)
    y, sy = target(p, shape)
    p.emit(
        "elementwise",
        [x, z],
        [y],
        kind=str(rng.choice(["add", "mul", "maximum"])),
        shape=shape,
        strides=[sx, sz, sy],
    )
    close(*run(p, tmp_path, y, threads=1 + seed % 2))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [*REDUCE, "dot"])
def test_reductions(tmp_path: Path, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = SmallProgram(8, seed)
    dtype = "i32" if seed % 3 == 2 and kind != "dot" else "f32"
    shape = [int(n) for n in rng.integers(1, 5, rng.integers(1, 5))]
    count = 1 if kind.startswith("arg") else int(rng.integers(1, len(shape) + 1))
    axes = sorted(int(a) for a in rng.permutation(len(shape))[:count])
    inputs, strides = zip(*[placed(p, shape, dtype) for _ in range(2 if kind == "dot" else 1)], strict=True)
    kept = [1 if d in axes else n for d, n in enumerate(shape)]
    out_type = (
        "i32" if kind in ("any", "all", "argmax", "argmin") else "f32" if kind in ("mean", "dot") else dtype
    )
    y, sy = target(p, kept, out_type)
    sy = [0 if d in axes else s for d, s in enumerate(sy)]
    p.emit("reduce", list(inputs), [y], kind=kind, axes=axes, shape=shape, strides=[*strides, sy])
    close(*run(p, tmp_path, y), tolerance=1e-5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "op",
    ["softmax", "log_softmax", "cumsum", "cumprod", "topk", "smallest", "gather", "scatter", "scatter_add"],
)
def test_ops_along_an_axis(tmp_path: Path, op: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = SmallProgram(8, seed)
    shape = [int(n) for n in rng.integers(1, 6, rng.integers(1, 4))]
    axis = int(rng.integers(0, len(shape)))
    if op in ("gather", "scatter", "scatter_add"):
        extent = int(rng.integers(2, 6))
        long = [*shape[:axis], extent, *shape[axis + 1 :]]
        strides, width = layout(rng, shape, True)
        index = source(p, width, "i32", rng.integers(0, extent, (8, width)))
        if op == "gather":
            x, sx = placed(p, long, broadcast=False)
            y, sy = target(p, shape)
            p.emit(
                "gather", [x, index], [y], axis=axis, extent=extent, shape=shape, strides=[sx, strides, sy]
            )
        else:
            y, sy = target(p, long)
            base = source(p, y["width"])
            p.emit("copy", [base], [y], shape=[y["width"]], strides=[[1], [1]])
            x, sx = placed(p, shape)
            kind = "add" if op == "scatter_add" else "set"
            p.emit(
                "scatter",
                [index, x],
                [y],
                kind=kind,
                axis=axis,
                extent=extent,
                shape=shape,
                strides=[strides, sx, sy],
            )
    elif op in ("topk", "smallest"):
        shape[axis] += 2
        x, sx = placed(p, shape, "i32" if seed % 3 == 0 else "f32")  # small integers tie
        k = int(rng.integers(1, shape[axis] + 1))
        chosen = [*shape[:axis], k, *shape[axis + 1 :]]
        values, sv = target(p, chosen, "i32" if seed % 3 == 0 else "f32")
        y, sy = target(p, chosen, "i32")
        outputs, strides_out = ([None, y], [[], sy]) if seed % 2 else ([values, y], [sv, sy])
        p.emit(
            "topk",
            [x],
            outputs,
            axis=axis,
            k=k,
            largest=op == "topk",
            shape=shape,
            strides=[sx, *strides_out],
        )
        y = y if seed % 4 else values
    else:
        x, sx = placed(p, shape)
        y, sy = target(p, shape)
        more = {"log": op == "log_softmax"} if "softmax" in op else {"kind": op[3:]}
        name = "softmax" if "softmax" in op else "cumulate"
        p.emit(name, [x], [y], axis=axis, shape=shape, strides=[sx, sy], **more)
    close(*run(p, tmp_path, y), tolerance=1e-5)


def test_ties_and_nan_in_topk(tmp_path: Path) -> None:
    p = SmallProgram(6)
    x, y = p.value(6), p.value(6, "i32")
    p.emit(
        "copy",
        [{"weight": p.vector(np.array([1.0, 5.0, np.nan, 5.0, 1.0, np.nan]))}],
        [x],
        shape=[6],
        strides=[[1], [1]],
    )
    p.emit("topk", [x], [None, y], axis=0, k=6, largest=True, shape=[6], strides=[[1], [], [1]])
    got, _ = run(p, tmp_path, y)
    assert got[0].tolist() == [2, 5, 1, 3, 0, 4]


def test_in_place_and_an_index_outside(tmp_path: Path) -> None:
    p = SmallProgram(8)
    x, index, y = source(p, 8), source(p, 4, "i32", np.full((8, 4), 8)), p.value(4)
    p.emit("elementwise", [x, {"scalar": 2.0}], [x], kind="mul", shape=[2, 4], strides=[[4, 1], [], [4, 1]])
    p.emit("cumulate", [x], [x], kind="sum", axis=0, shape=[8], strides=[[1], [1]])
    close(*run(p, tmp_path, x))
    p.emit("gather", [x, index], [y], axis=0, extent=8, shape=[4], strides=[[1]] * 3)
    executor = p.load(tmp_path)
    with pytest.raises(RuntimeError, match=r"gather of test\.gather: an index lies outside"):
        executor.step(step_input(Pages([], 0), [(0, 0, [1, 2])]))


ONE = {"kind": "add", "shape": [4], "strides": [[1], [1], [1]]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stride too long": ({**ONE, "strides": [[3], [1], [1]]}, "operand 0 reaches element 9"),
    "negative stride": ({**ONE, "strides": [[-1], [1], [1]]}, "strides"),
    "extent of zero": ({**ONE, "shape": [0]}, "shape"),
    "too many dimensions": ({**ONE, "shape": [1] * 7, "strides": [[1] * 7] * 3}, "dimensions"),
    "an operand's strides missing": ({**ONE, "strides": [[1], [1]]}, "strides of 3"),
    "output written twice": ({**ONE, "strides": [[1], [1], [0]]}, "more than once"),
    "unknown kind": ({**ONE, "kind": "plus"}, "unknown kind 'plus'"),
    "a kind of one input": ({**ONE, "kind": "exp"}, "expected 1 inputs"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_wrong_walks_are_refused(tmp_path: Path, fault: str) -> None:
    attrs, message = REFUSED[fault]
    p = SmallProgram(4)
    x, z, y, out = p.value(4), p.value(4), p.value(4), p.value(4, rows="logits")
    p.emit("elementwise", [x, z], [y], **attrs)
    p.emit("select_rows", [y], [out])
    p.finish(out)
    with pytest.raises(ArtifactError, match=message):
        p.load(tmp_path)


def test_overlaps_and_mixed_types_are_refused(tmp_path: Path) -> None:
    def refused(inputs: list[Any], outputs: list[Any], message: str, **attrs: Any) -> None:
        p = SmallProgram(4)
        for dtype in ("f32", "i32"):
            p.value(8, dtype)
        p.emit(attrs.pop("op", "elementwise"), inputs, outputs, **attrs)
        p.finish(p.value(4, rows="logits"))
        with pytest.raises(ArtifactError, match=message):
            p.load(tmp_path)

    x, whole = {"value": 0, "column": 0, "width": 4}, {"value": 1, "column": 0, "width": 4}
    shifted = {**x, "column": 2}
    refused([x, x], [shifted], "overlaps", **ONE)
    refused([x], [x], "walked differently", op="copy", shape=[2, 2], strides=[[1, 2], [2, 1]])
    refused([x, x], [whole], "must be f32", **ONE)
    refused([whole, whole], [x], "must be i32", **ONE)
    refused([x], [whole], "works on i32", kind="bitwise_not", shape=[4], strides=[[1], [1]])
    refused([{"value": 7}], [x], "whole number", op="copy", shape=[4], strides=[[1], [1]])
    refused([{"scalar": "1"}], [x], "scalar", op="copy", shape=[4], strides=[[], [1]])
    refused([None], [x], "missing", op="copy", shape=[4], strides=[[], [1]])


def test_every_kind_of_the_interpreter_is_tested() -> None:
    tested = {*UNARY, *COMPARE, *BINARY}
    others = {
        "identity",
        "logical_not",
        "isnan",
        "isinf",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "where",
        "lerp",
    }
    assert set(KINDS) - tested == others
