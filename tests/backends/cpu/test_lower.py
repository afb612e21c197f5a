"""Lowered programs mean what their graphs mean: each rule against torch, run by the numpy interpreter."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from enginewright.backends.cpu import _native
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.backends.cpu.formats import WEIGHT_FORMATS, activations_for
from enginewright.backends.cpu.lower import capabilities, lower
from enginewright.passes import legality
from enginewright.passes.dialect import OPS
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.program import Program, Stage
from enginewright.passes.quant_formats import QuantisedWeight, quantise_rtn
from enginewright.passes.select_rows import SelectRows
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.formats import default_activation
from enginewright.recipes.recipe import load_recipe
from tests.backends.cpu.interpreter import Interpreter
from tests.backends.cpu.small_programs import Pages, step_input
from tests.passes.graphs import TOKENS, Build

aten = torch.ops.aten
RECIPE = load_recipe("fp32")


def finished(program: Program) -> Program:
    SelectRows().run(program)
    remove_dead_code(program)
    program.stage = Stage.FINAL
    program.recompile()
    return program


def lowered(program: Program, directory: Path) -> dict[str, Any]:
    program.facts.vocab_size = program.graph.output_node().args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    assert lower(program, RECIPE, directory) == ["program.json", "weights.bin"]
    document: dict[str, Any] = json.loads((directory / "program.json").read_text())
    return document


def agree(program: Program, directory: Path, tolerance: float = 2e-5) -> dict[str, Any]:
    """Lower the program, run it, and compare with torch; returns program.json."""
    rows = list(range(len(TOKENS)))
    want = program.run(TOKENS, logit_rows=torch.tensor(rows, dtype=torch.int32)).numpy()
    document = lowered(program, directory)
    got = Interpreter(directory).run(TOKENS, rows)
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * np.abs(want[np.isfinite(want)]).max()
    )
    return document


def ops(document: dict[str, Any]) -> list[str]:
    return [instruction["op"] for instruction in document["instructions"]]


Case = Callable[[Build, fx.Node], Any]


def _call(op: Any, *args: Any, **kwargs: Any) -> Case:
    return lambda b, x: b.call(op, x, *args, **kwargs)


def _item(case: Case, index: int) -> Case:
    return lambda b, x: b.program.call(operator.getitem, (case(b, x), index))


def _with(op: Any, *shape: int, **kwargs: Any) -> Case:
    """The op of x and a constant."""
    return lambda b, x: b.call(op, x, b.weight("other", *shape), **kwargs)


def _row(op: Any, **kwargs: Any) -> Case:
    """The op of x and one number a head of x."""
    return lambda b, x: b.call(op, x, b.call(aten.slice.Tensor, x, 2, 0, 1), **kwargs)


def _bool(b: Build, x: fx.Node) -> fx.Node:
    return b.call(aten.gt.Scalar, x, 0.1)


def _index(b: Build, x: fx.Node) -> fx.Node:
    """Integers 0 … 2 of shape [T, 3, 2]."""
    return (
        b.call(aten.select.int, b.call(aten.topk.default, x, 3, 2), 1, 0)
        if False
        else _item(_call(aten.topk.default, 2, 2), 1)(b, x)
    )


def _padded(b: Build, x: fx.Node) -> fx.Node:
    """Made by hand: the op's shape function fixes the number of tokens."""
    with b.program.graph.inserting_before(b.program.graph.output_node()):
        node = b.program.graph.call_function(aten.constant_pad_nd.default, (x, [1, 2, 0, 1], 0.5))
    node.meta = {"val": b.program.fake([b.program.tokens, 4, 11]), "module": "layers.0"}
    return node


UNARY = [
    "abs",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "hardsigmoid",
    "hardswish",
    "mish",
    "neg",
    "reciprocal",
    "relu",
    "relu6",
    "round",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "square",
    "tanh",
    "trunc",
    "gelu",
    "softplus",
    "elu",
    "leaky_relu",
    "tan",
]
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt"]

CASES: dict[str, Case] = {name: _call(getattr(aten, name).default) for name in UNARY}
CASES |= {
    name: lambda b, x, n=name: b.call(getattr(aten, n).default, b.call(aten.abs.default, x))
    for name in POSITIVE
}
CASES |= {
    "gelu_tanh": _call(aten.gelu.default, approximate="tanh"),
    "softplus-beta": _call(aten.softplus.default, 2.0),
    "elu-alpha": _call(aten.elu.default, 0.7),
    "clamp": _call(aten.clamp.default, -0.3, 0.4),
    "clamp-one-end": _call(aten.clamp.default, None, 0.4),
    "clamp_min": _call(aten.clamp_min.default, 0.2),
    "log_sigmoid": _item(_call(aten.log_sigmoid_forward.default), 0),
    "add-number": _call(aten.add.Tensor, 2),
    "add-alpha": _with(aten.add.Tensor, 8, alpha=0.5),
    "sub-broadcast-constant": _with(aten.sub.Tensor, 3, 1),
    "constant-with-token-axis": _with(aten.mul.Tensor, 1, 3, 8),
    "rsub": _call(aten.rsub.Scalar, 1.5),
    "mul-row": _row(aten.mul.Tensor),
    "div": _row(aten.div.Tensor),
    "div-floor": _call(aten.div.Tensor_mode, 0.3, rounding_mode="floor"),
    "div-trunc": _call(aten.div.Tensor_mode, 0.3, rounding_mode="trunc"),
    "pow-2": _call(aten.pow.Tensor_Scalar, 2),
    "pow-3": _call(aten.pow.Tensor_Scalar, 3),
    "pow-base": lambda b, x: b.call(aten.pow.Scalar, 2.0, x),
    "remainder": _call(aten.remainder.Scalar, 0.3),
    "fmod": _call(aten.fmod.Scalar, 0.3),
    "atan2": _with(aten.atan2.default, 8),
    "maximum": _with(aten.maximum.default, 3, 8),
    "addcmul": lambda b, x: b.call(aten.addcmul.default, x, x, x, value=0.3),
    "addcdiv": lambda b, x: b.call(aten.addcdiv.default, x, x, b.call(aten.exp.default, x)),
    "lerp": lambda b, x: b.call(aten.lerp.Scalar, x, b.call(aten.exp.default, x), 0.25),
    "where": lambda b, x: b.call(aten.where.self, _bool(b, x), x, b.weight("w", 8)),
    "where-numbers": lambda b, x: b.call(aten.where.Scalar, _bool(b, x), 1.0, 0.0),
    "masked_fill": lambda b, x: b.call(aten.masked_fill.Scalar, x, _bool(b, x), -7.0),
    "masked_fill-infinity": lambda b, x: b.call(
        aten._softmax.default,
        b.call(aten.masked_fill.Scalar, x, b.call(aten.gt.Scalar, x, 0.9), float("-inf")),
        -1,
        False,
    ),
    "logical": lambda b, x: b.call(
        aten._to_copy.default, b.call(aten.logical_not.default, _bool(b, x)), dtype=torch.float32
    ),
    "bitwise-or-of-truths": lambda b, x: b.call(
        aten.mul.Tensor, x, b.call(aten.bitwise_or.Tensor, _bool(b, x), b.call(aten.lt.Scalar, x, -0.5))
    ),
    "compare-rows": lambda b, x: b.call(aten.mul.Tensor, x, _row(aten.ge.Tensor)(b, x)),
    "sum": _call(aten.sum.dim_IntList, [-1]),
    "sum-keepdim-two-axes": _call(aten.sum.dim_IntList, [1, 2], True),
    "mean": _call(aten.mean.dim, [1]),
    "amax": _call(aten.amax.default, [2], True),
    "max-values": _item(_call(aten.max.dim, 2), 0),
    "max-indices": _item(_call(aten.max.dim, 1), 1),
    "argmin": _call(aten.argmin.default, -1),
    "any": lambda b, x: b.call(
        aten._to_copy.default, b.call(aten.any.dim, _bool(b, x), 2), dtype=torch.float32
    ),
    "sum-of-truths": lambda b, x: b.call(aten.sum.dim_IntList, _bool(b, x), [2], True),
    "prod": _call(aten.prod.dim_int, 2),
    "var": _call(aten.var.correction, [-1], correction=1, keepdim=True),
    "logsumexp": _call(aten.logsumexp.default, [-1]),
    "softmax": _call(aten._softmax.default, 1, False),
    "log_softmax": _call(aten._log_softmax.default, -1, False),
    "cumsum": _call(aten.cumsum.default, 1),
    "cumprod": _call(aten.cumprod.default, -1),
    "topk-values": _item(_call(aten.topk.default, 3, 2), 0),
    "topk-indices": _item(_call(aten.topk.default, 2, 1, False), 1),
    "sort": _item(_call(aten.sort.default, -1, True), 0),
    "argsort": _call(aten.argsort.default, -1),
    "view": _call(aten.view.default, [-1, 2, 12]),
    "transpose-then-view": lambda b, x: b.call(
        aten.reshape.default, b.call(aten.transpose.int, x, 1, 2), [-1, 24]
    ),
    "permute": lambda b, x: b.call(aten.permute.default, b.view(x, 3, 2, 4), [0, 2, 3, 1]),
    "slice": _call(aten.slice.Tensor, 2, 1, -1, 2),
    "select": _call(aten.select.int, 1, -1),
    "unsqueeze-expand": lambda b, x: b.call(
        aten.expand.default, b.call(aten.unsqueeze.default, x, 2), [-1, 3, 5, 8]
    ),
    "squeeze": lambda b, x: b.call(aten.squeeze.dim, b.call(aten.slice.Tensor, x, 1, 1, 2), 1),
    "split": _item(_call(aten.split.Tensor, 3, 2), 2),
    "split_with_sizes": _item(_call(aten.split_with_sizes.default, [1, 2], 1), 1),
    "unbind": _item(_call(aten.unbind.int, 1), 1),
    "cat": lambda b, x: b.call(aten.cat.default, [b.call(aten.slice.Tensor, x, 2, 4, 8), x], -1),
    "stack": lambda b, x: b.call(aten.stack.default, [x, b.call(aten.neg.default, x)], 2),
    "rotate-half": lambda b, x: b.call(
        aten.cat.default,
        [
            b.call(aten.neg.default, b.call(aten.slice.Tensor, x, 2, 4, 8)),
            b.call(aten.slice.Tensor, x, 2, 0, 4),
        ],
        2,
    ),
    "repeat": _call(aten.repeat.default, [1, 2, 3]),
    "repeat_interleave": _call(aten.repeat_interleave.self_int, 2, 1),
    "flip": _call(aten.flip.default, [1, 2]),
    "roll": _call(aten.roll.default, [3], [2]),
    "pad": _padded,
    "gather": lambda b, x: b.call(aten.gather.default, x, 2, _index(b, x)),
    "index_select": lambda b, x: b.call(
        aten.index_select.default, x, 2, b.weight("i", value=torch.tensor([5, 0, 5]))
    ),
    "scatter": lambda b, x: b.call(aten.scatter.value, x, 2, _index(b, x), 9.0),
    "scatter_add": lambda b, x: b.call(aten.scatter_add.default, x, 2, _index(b, x), x),
    "one_hot": lambda b, x: b.call(aten.one_hot.default, _index(b, x), 8),
    "full_like": lambda b, x: b.call(aten.add.Tensor, b.call(aten.full_like.default, x, 0.25), x),
    "bmm": lambda b, x: b.call(aten.bmm.default, x, b.call(aten.transpose.int, x, 1, 2)),
    "matmul-heads": lambda b, x: b.call(
        aten.matmul.default, b.view(x, 3, 2, 4), b.view(b.call(aten.exp.default, x), 3, 4, 2)
    ),
    "matmul-constant": _with(aten.matmul.default, 8, 5),
    "fold-constants": lambda b, x: b.call(aten.mul.Tensor, x, b.call(aten.exp.default, b.weight("w", 8))),
    "integers": lambda b, x: b.call(aten.div.Tensor, b.call(aten.add.Tensor, _index(b, x), 3), 2),
    "tokens": lambda b, x: b.call(
        aten.add.Tensor, b.call(aten.unsqueeze.default, b.tokens, 1), b.view(x, 24)
    ),
    "activation": _call("activation", "gelu"),
    "rms_norm": lambda b, x: b.call("rms_norm", x, b.weight("n", 8), 1e-6, 1.0),
    "rms_norm-bare": _call("rms_norm", None, 1e-6),
    "layer_norm": lambda b, x: b.call("layer_norm", x, b.weight("n", 8), None, 1e-5),
    "norm-of-a-transposed": lambda b, x: b.call("rms_norm", b.call(aten.transpose.int, x, 1, 2), None, 1e-6),
    "linear-per-head": lambda b, x: b.linear(x, 5, "l", bias=True),
    "gated-activation": _call("gated_activation", "silu"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_agrees_with_torch(name: str, tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    x = b.view(b.hidden(24), 3, 8)
    result = CASES[name](b, x)
    if not result.meta["val"].dtype.is_floating_point:
        result = b.call(aten._to_copy.default, result, dtype=torch.float32)
    result = b.call(aten.clone.default, result, memory_format=torch.contiguous_format)
    agree(finished(b.finish(result, b.call(aten.neg.default, x))), tmp_path)


def test_reshapes_and_slices_cost_no_instruction(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    qkv = b.linear(b.hidden(16), 24, "qkv")
    q, k, v = (b.call(aten.slice.Tensor, qkv, 1, 8 * i, 8 * i + 8) for i in range(3))
    heads = [b.call("rms_norm", b.view(part, 2, 4), None, 1e-6) for part in (q, k)]
    document = agree(finished(b.finish(b.linear(b.view(heads[0], 8), 5, "o"), heads[1], v)), tmp_path)
    assert ops(document).count("copy") == 3  # the three results side by side
    norms = [i["in"][0] for i in document["instructions"] if i["op"] == "rms_norm"]
    assert [(o["column"], o["width"]) for o in norms] == [(0, 8), (8, 8)]


def attention_graph(b: Build, turned: str = "qk", shared: bool = False, same_tables: bool = True) -> fx.Node:
    """One layer's attention over fused q, k, v: 4 query and 2 key heads of 8, 6 of which rotate."""
    qkv = b.linear(b.hidden(16), 64, "qkv")
    q, k, v = (b.call(aten.slice.Tensor, qkv, 1, *ends) for ends in ((0, 32), (32, 48), (48, 64)))
    q, k, v = b.view(q, 4, 8), b.view(k, 2, 8), b.view(v, 2, 8)
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    cos, sin = b.table("cos", angles.cos()), b.table("sin", angles.sin())
    other = cos if same_tables else b.table("cos2", (2 * angles).cos())
    before = [q, k]
    if "q" in turned:
        q = b.call("rope", q, cos, sin, 6, False)
    if "k" in turned:
        k = b.call("rope", k, other, sin, 6, False)
    a = b.call("attention", q, k, v, None, b.weight("alibi", 4), 0.4, 3, 5.0, 0)
    out = b.view(a, 32)
    return b.call(aten.add.Tensor, out, b.view(before[0], 32)) if shared else out


def paged(program: Program) -> Program:
    InsertPagedKv(16).run(program)
    remove_dead_code(program)
    return finished(program)


def attention_agrees(b: Build, out: fx.Node, directory: Path) -> dict[str, Any]:
    program = b.finish(out)
    want = program.run(TOKENS).numpy()
    document = lowered(paged(program), directory)
    got = Interpreter(directory).run(TOKENS)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return document


def test_rope_and_cache_write_become_one_instruction_in_place(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    document = attention_agrees(b, attention_graph(b), tmp_path)
    assert ops(document) == ["embedding", "linear", "rope_write", "attention", "select_rows"]
    write, attention = document["instructions"][2:4]
    assert [o["column"] for o in write["in"]] == [0, 32, 48] and attention["in"][0] == write["in"][0]
    assert write["attrs"]["rotary_dim"] == 6 and document["kv_groups"][0]["window"] == 3


def test_a_query_that_others_read_is_rotated_in_a_copy(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    document = attention_agrees(b, attention_graph(b, shared=True), tmp_path)
    assert ops(document)[2:5] == ["copy", "rope_write", "attention"]
    write, attention = document["instructions"][3:5]
    assert write["in"][0] == attention["in"][0] != document["instructions"][2]["in"][0]


@pytest.mark.parametrize(("turned", "same"), [("", True), ("k", True), ("q", True), ("qk", False)])
def test_query_and_key_may_turn_differently(turned: str, same: bool, tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    document = attention_agrees(b, attention_graph(b, turned, same_tables=same), tmp_path)
    assert ops(document).count("rope") == (1 if "q" in turned and (turned == "q" or not same) else 0)


def mlp(b: Build, x: fx.Node, width: int, kind: str = "silu", bias: bool = True) -> fx.Node:
    hidden = b.call("gated_activation", b.linear(x, 2 * width, "gate_up", bias), kind)
    return b.linear(hidden, 16, "down")


@pytest.mark.parametrize("width", [32, 21])
@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_up_become_one_instruction(width: int, bias: bool, tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    document = agree(finished(b.finish(mlp(b, b.hidden(16), width, bias=bias))), tmp_path)
    assert ops(document) == ["embedding", "linear_gated", "linear", "select_rows"]
    gated = document["weights"][document["instructions"][1]["weights"][0]]
    assert gated["gated"] and gated["n"] == 2 * width


def test_residual_sums_reuse_the_residual_s_buffer(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    x = b.hidden(16)
    for layer in range(4):
        pair = b.call("add_rms_norm", b.linear(x, 16, f"l{layer}"), x, b.weight(f"n{layer}", 16), 1e-6)
        normed, x = (b.program.call(operator.getitem, (pair, index)) for index in (0, 1))
        x = b.call(aten.add.Tensor, x, b.linear(normed, 16, f"m{layer}"))
    document = agree(finished(b.finish(x)), tmp_path)
    total = max(v["offset"] + v["row_bytes"] for v in document["values"] if v["rows"] == "tokens")
    assert total == 3 * 64


def test_an_embedding_takes_its_multiplier_in(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    scaled = b.call(aten.mul.Tensor, b.hidden(16), 4.0)
    document = agree(finished(b.finish(scaled)), tmp_path)
    assert ops(document) == ["embedding", "select_rows"]
    assert document["instructions"][0]["attrs"]["scale"] == 4.0


def tied(b: Build, **formats: str | None) -> Program:
    """An embedding and a head over one table, each in its own format (None: dense)."""
    table = ConstantTensor("embed.weight", torch.randn(13, 64, generator=b.generator))
    kept = {form: QuantisedWeight(table, form) for form in formats.values() if form}

    def parts(use: str) -> list[Any]:
        form = formats[use]
        if form is None:
            return [b.program.add_weight("embed.weight", table)]
        weights = [kept[form].codes, kept[form].scales, kept[form].offsets]
        return [w if w is None else b.program.add_weight(f"{form}.{w.name}", w) for w in weights]

    embedding, head = parts("embedding"), parts("head")
    if formats["embedding"] is None:
        x = b.call("embedding", b.tokens, *embedding)
    else:
        x = b.call("quantised_embedding", b.tokens, *embedding, formats["embedding"])
    x = b.call("rms_norm", x, None, 1e-6)
    if formats["head"] is None:
        return b.finish(b.call("linear", x, *head))
    return b.finish(
        b.call("quantised_linear", x, *head, None, formats["head"], default_activation(formats["head"]))
    )


@pytest.mark.parametrize("embedding", [None, "bf16", "int8", "int4_g32"])
@pytest.mark.parametrize("head", [None, "bf16", "int8", "int4_g32"])
def test_tied_weights_are_stored_once_unless_their_formats_differ(
    embedding: str | None, head: str | None, tmp_path: Path
) -> None:
    b = Build(Stage.QUANTISED)
    program = finished(tied(b, embedding=embedding, head=head))
    document = agree(program, tmp_path, 3e-2 if head else 2e-5)
    matrices = [w["format"] for w in document["weights"] if w["kind"] == "linear"]
    assert matrices == list(dict.fromkeys([embedding or "f32", head or "f32"]))
    notes = [note for note in program.notes if "stored 2 times" in note]
    assert len(notes) == (embedding != head)
    if notes:
        assert embedding or ("f32" in notes[0] and head) or "f32" in notes[0]


def quantised(
    b: Build,
    x: fx.Node,
    parts: QuantisedWeight,
    activation: str,
    bias: fx.Node | None = None,
    columns: list[int] | None = None,
    scale: float = 0.0,
) -> fx.Node:
    """A quantised linear of x; `columns` are kept apart (their codes become zero)."""
    tables = [
        p if p is None else b.program.add_weight(p.name, p)
        for p in (parts.codes, parts.scales, parts.offsets)
    ]
    if not columns:
        return b.call(
            "quantised_linear", x, *tables, bias, parts.format.name, activation, activation_scale=scale
        )
    weight = parts.source.load()
    rest = quantise_rtn(weight.index_fill(1, torch.tensor(columns), 0.0), "int8")
    assert rest.scales is not None
    nodes = (b.weight("codes", value=rest.codes), b.weight("scales", value=rest.scales), None, bias)
    at = b.weight("columns", value=torch.tensor(columns, dtype=torch.int32))
    kept = b.weight("outliers", value=weight[:, columns].bfloat16())
    return b.call("quantised_linear", x, *nodes, "int8", activation, at, kept, scale)


def native(directory: Path, isa: str = "") -> Any:
    """Logits of TOKENS by the executor."""
    options = {"isa": isa} if isa else {}
    executor = CpuExecutor(directory / "program.json", directory / "weights.bin", threads=1, **options)
    executor.create_pool([])
    return executor.step(step_input(Pages([], 0), [(0, 0, TOKENS)]))


def agree_natively(program: Program, directory: Path) -> dict[str, Any]:
    """Torch, the interpreter and the executor agree, but for codes at a tie."""
    document = agree(program, directory, 1e-2)
    rows = torch.arange(len(TOKENS), dtype=torch.int32)
    want = program.run(TOKENS, logit_rows=rows).numpy()
    for isa in _native.available_isas():
        distance = np.abs(native(directory, isa) - want)
        assert (
            np.median(distance) < 1e-4 * np.abs(want).max() and distance.max() < 1e-2 * np.abs(want).max()
        ), isa
    return document


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_every_weight_format(form: str, tmp_path: Path) -> None:
    for gated in (True, False):
        b = Build(Stage.QUANTISED)
        weight = ConstantTensor("w", torch.randn(40, 100, generator=b.generator) * 0.3)
        activation = activations_for(form)[-1] if gated else default_activation(form)
        scale = 0.025 if activation == "int8_static" else 0.0
        parts, bias = QuantisedWeight(weight, form), b.weight("bias", 40)
        linear = quantised(b, b.hidden(100), parts, activation, bias, scale=scale)
        y = b.call("gated_activation", linear, "silu") if gated else linear
        document = agree_natively(finished(b.finish(y)), tmp_path)
        entry = next(w for w in document["weights"] if w["name"] == "w.codes")
        assert entry.get("activation", default_activation(form)) == activation
        assert entry.get("activation_scale", 0.0) == scale


@pytest.mark.parametrize("form", ["fp8", "int3_g64_zp", "uint8", "int8_g16"])
def test_every_kind_of_table(form: str, tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    document = agree_natively(finished(tied(b, embedding=form, head=form)), tmp_path)
    assert [w["format"] for w in document["weights"] if w["kind"] == "linear"] == [form]


@pytest.mark.parametrize("activation", activations_for("int8"))
@pytest.mark.parametrize("kind", ["plain", "gated", "heads"])
def test_columns_kept_apart(activation: str, kind: str, tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    x, k = b.hidden(90), 30 if kind == "heads" else 90
    if kind == "heads":
        x = b.view(x, 3, 30)
    weight = QuantisedWeight(ConstantTensor("w", torch.randn(40, k, generator=b.generator) * 0.3), "int8")
    scale = 0.025 if activation == "int8_static" else 0.0
    linear = quantised(b, x, weight, activation, b.weight("bias", 40), [3, 17, 29], scale)
    y = b.call("gated_activation", linear, "silu") if kind == "gated" else linear
    document = agree_natively(finished(b.finish(y)), tmp_path)
    entry = next(w for w in document["weights"] if w["name"] == "codes")
    assert entry["columns"] == [3, 17, 29]
    assert ("linear_gated" in ops(document)) == (kind == "gated")


def test_a_table_takes_its_heads_activation_and_two_roundings_are_two_entries(tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    parts = QuantisedWeight(ConstantTensor("embed", torch.randn(13, 64, generator=b.generator)), "int8")
    nodes = [b.program.add_weight(p.name, p) for p in (parts.codes, parts.scales) if p is not None]
    x = b.call("quantised_embedding", b.tokens, *nodes, None, "int8")
    x = b.call("rms_norm", x, None, 1e-6)
    y = [
        b.call("quantised_linear", x, *nodes, None, None, "int8", activation, activation_scale=scale)
        for activation, scale in (
            ("int8_static", 0.03),
            ("int8", 0.0),
            ("int8_static", 0.03),
            ("int8_static", 0.02),
        )
    ]
    program = finished(b.finish(*y))
    document = agree_natively(program, tmp_path)
    entries = [w for w in document["weights"] if w["kind"] == "linear"]
    assert [(w.get("activation"), w.get("activation_scale")) for w in entries] == [
        ("int8_static", 0.03),
        ("int8", None),
        ("int8_static", 0.02),
    ]
    assert any("stored 3 times: as int8 for int8_static, int8 for int8" in note for note in program.notes)


@pytest.mark.parametrize("bias", [True, False])
def test_experts(bias: bool, tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    x = b.hidden(16)
    scores = b.call(aten._softmax.default, b.linear(x, 5, "router"), -1, False)
    top = b.call(aten.topk.default, scores, 2)
    weight, index = (b.program.call(operator.getitem, (top, i)) for i in (0, 1))
    biases = [b.weight("gb", 5, 42), b.weight("db", 5, 16)] if bias else [None, None]
    y = b.call(
        "moe",
        x,
        index,
        weight,
        b.weight("gu", 5, 42, 16),
        biases[0],
        b.weight("d", 5, 16, 21),
        biases[1],
        "swiglu_oai",
        1.7,
        2.0,
    )
    document = agree(finished(b.finish(y)), tmp_path)
    entry = next(w for w in document["weights"] if w.get("gated"))
    assert entry["experts"] == 5 and entry["bytes"] == 5 * 4 * 16 * 16 * 4


def test_learned_positions(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    x = b.call("embedding", b.positions, b.weight("wpe", 34, 16), 2)
    document = agree(finished(b.finish(b.call(aten.add.Tensor, x, b.hidden(16)))), tmp_path)
    assert document["instructions"][0]["attrs"] == {"index": "positions", "offset": 2, "scale": 1.0}


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        b = Build(Stage.FUSED)
        program = finished(b.finish(mlp(b, b.hidden(16), 21)))
        (tmp_path / name).mkdir()
        lower(program, RECIPE, tmp_path / name)
        found.append([(tmp_path / name / file).read_bytes() for file in ("program.json", "weights.bin")])
    assert found[0] == found[1]


def test_progress_names_each_weight(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    program = finished(b.finish(mlp(b, b.hidden(16), 21)))
    seen: list[tuple[str, int, int]] = []
    lower(program, RECIPE, tmp_path, lambda *step: seen.append(step))
    assert [name for name, _, _ in seen] == [
        "embed.weight",
        "gate_up.weight",
        "gate_up.bias",
        "down.weight",
        "",
    ]
    assert seen[-1][1] == seen[-1][2] > 0


def test_what_has_no_rule_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legality, "PER_TOKEN", legality.PER_TOKEN | {"erfinv"})
    b = Build(Stage.FUSED)
    program = finished(b.finish(b.call(aten.erfinv.default, b.hidden(16))))
    with pytest.raises(
        LoweringError, match=r"cannot lower aten::erfinv of module 'layers.0'[\s\S]*expected: one of aten::"
    ):
        lower(program, RECIPE, tmp_path)


def test_activations_that_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    parts = QuantisedWeight(ConstantTensor("w", torch.randn(16, 64)), "int4_g64")
    nodes = [b.program.add_weight(p.name, p) for p in (parts.codes, parts.scales, parts.offsets) if p]
    program = finished(b.finish(b.call("quantised_linear", b.hidden(64), *nodes, None, "int4_g64", "bf16")))
    with pytest.raises(
        LoweringError, match=r"int4_g64 weights with bf16 activations[\s\S]*int8_g64 or int8 or"
    ):
        lower(program, RECIPE, tmp_path)


def test_experts_take_no_static_scale(tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    x = b.hidden(32)
    top = b.call(aten.topk.default, b.linear(x, 3, "router"), 1)
    weight, index = (b.program.call(operator.getitem, (top, i)) for i in (0, 1))
    stacks = [
        [b.program.add_weight(p.name, p) for p in (parts.codes, parts.scales, parts.offsets) if p is not None]
        for parts in (
            QuantisedWeight(ConstantTensor(n, torch.randn(3, *s)), "int8")
            for n, s in (("u", (64, 32)), ("d", (32, 32)))
        )
    ]
    experts = [item for stack in stacks for item in (*stack, None, None)]
    program = finished(
        b.finish(b.call("quantised_moe", x, index, weight, *experts, "silu", "int8", "int8_static"))
    )
    with pytest.raises(LoweringError, match=r"int8_static activations of experts"):
        lowered(program, tmp_path)


def test_a_static_scale_must_be_given(tmp_path: Path) -> None:
    b = Build(Stage.QUANTISED)
    parts = QuantisedWeight(ConstantTensor("w", torch.randn(16, 64)), "int8")
    program = finished(b.finish(quantised(b, b.hidden(64), parts, "int8_static")))
    with pytest.raises(LoweringError, match=r"int8_static activations with the scale 0.0"):
        lowered(program, tmp_path)


def test_only_final_programs_are_lowered(tmp_path: Path) -> None:
    b = Build(Stage.FUSED)
    with pytest.raises(LoweringError, match=r"only a final program"):
        lower(b.finish(b.hidden(16)), RECIPE, tmp_path)


def test_capabilities_cover_the_dialect() -> None:
    assert {f"ew::{name}" for name in OPS} - set(capabilities()["ops"]) == {"ew::attention"}
    assert {f"aten::{name}" for name in legality.PER_TOKEN} - set(capabilities()["ops"]) <= {
        "aten::_fused_rms_norm", "aten::layer_norm", "aten::rms_norm", "aten::native_layer_norm",
        "aten::native_group_norm", "aten::arange",
    }  # fmt: skip
