"""Rules for the dialect's ops, one small function each. Products with stored weights are in products.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.onnx.graph import FLOAT, Value
from enginewright.backends.onnx.lowering import Lowering, PositionTable, lowers
from enginewright.backends.onnx.matrices import matrix_of
from enginewright.backends.onnx.products import product
from enginewright.backends.onnx.rows import rows_of_table

__all__ = ["activated"]


# Looking up.


@lowers("ew::embedding", "ew::quantised_embedding")
def embedding(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    ids = low.operand(a["ids"], low.inputs["tokens"].dtype)
    if a["offset"]:
        ids = low.graph.add(ids, low.graph.scalar(a["offset"], ids.dtype))
    rows = rows_of_table(low, matrix_of(low, a), ids)
    return rows if a["scale"] == 1.0 else low.graph.mul(rows, low.graph.scalar(a["scale"]))


@lowers("ew::position_table")
def position_table(low: Lowering, node: fx.Node, a: dict[str, Any]) -> PositionTable:
    return PositionTable(low.weight(a["table"], "table"))


@lowers("ew::select_rows")
def select_rows(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    wanted = low.inputs.get("logit_rows")
    return low.value(a["x"]) if wanted is None else low.graph.gather(low.value(a["x"]), wanted)


# Products and activations.


@lowers("ew::linear", "ew::quantised_linear")
def linear(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    bias = None if a["bias"] is None else low.tensor(low.weight(a["bias"], "bias"))
    return product(low, low.value(a["x"]), matrix_of(low, a), bias)


def activated(low: Lowering, x: Value, kind: str) -> Value:
    """One of ew::activation's kinds."""
    g = low.graph
    if kind == "silu":
        return g.mul(x, g.op("Sigmoid", [x]))
    if kind in ("gelu", "gelu_tanh"):
        return g.op("Gelu", [x], approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind == "relu2":
        positive = g.op("Relu", [x])
        return g.mul(positive, positive)
    simple = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}
    if kind not in simple:
        raise low.fail(f"activation {kind}", "silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh")
    return g.op(simple[kind], [x])


@lowers("ew::activation")
def activation(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    return activated(low, low.value(a["x"]), a["kind"])


def halves(low: Lowering, x: Value) -> list[Value]:
    """The last axis [gate | up] in two."""
    width = x.shape[-1]
    assert isinstance(width, int)
    part = ((*x.shape[:-1], width // 2), x.dtype)
    return low.graph.ops("Split", [x], [part, part], axis=-1, num_outputs=2)


@lowers("ew::gated_activation")
def gated_activation(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    gate, up = halves(low, low.value(a["gate_up"]))
    return low.graph.mul(activated(low, gate, a["activation"]), up)


# Norms.


def _rms(low: Lowering, x: Value, a: dict[str, Any]) -> Value:
    width = x.shape[-1]
    assert isinstance(width, int)
    if a["weight"] is None:
        scale = low.graph.constant(np.ones(width, np.float32))
    else:
        offset = a["weight_offset"]
        scale = low.tensor(
            low.weight(a["weight"], "weight"),
            ("plus", offset),
            lambda w: (w.float() + offset).numpy(),
            dtype=FLOAT,
        )
    return low.graph.op("RMSNormalization", [x, scale], axis=-1, epsilon=float(a["eps"]))


def _layer(low: Lowering, x: Value, a: dict[str, Any]) -> Value:
    width = x.shape[-1]
    assert isinstance(width, int)
    if a["weight"] is None:
        scale = low.graph.constant(np.ones(width, np.float32))
    else:
        scale = low.tensor(low.weight(a["weight"], "weight"))
    bias = None if a["bias"] is None else low.tensor(low.weight(a["bias"], "bias"))
    return low.graph.op("LayerNormalization", [x, scale, bias], axis=-1, epsilon=float(a["eps"]))


@lowers("ew::rms_norm")
def rms_norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    return _rms(low, low.value(a["x"]), a)


@lowers("ew::layer_norm")
def layer_norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    return _layer(low, low.value(a["x"]), a)


@lowers("ew::add_rms_norm")
def add_rms_norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> tuple[Value, Value]:
    total = low.graph.add(low.value(a["x"]), low.value(a["residual"]))
    return _rms(low, total, a), total


@lowers("ew::add_layer_norm")
def add_layer_norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> tuple[Value, Value]:
    total = low.graph.add(low.value(a["x"]), low.value(a["residual"]))
    return _layer(low, total, a), total


# Attention.


@lowers("ew::rope")
def rope(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    x = low.value(a["x"])
    rows, heads, width = x.shape
    assert isinstance(heads, int) and isinstance(width, int)
    tables = []
    for name in ("cos", "sin"):
        found = low.result(a[name])
        if not isinstance(found, PositionTable):
            raise low.fail("its cosines are computed from the tokens", "tables of positions")
        tables.append(low.tensor(found.table))
    where = low.inputs["positions"]
    g = low.graph
    # Each token is a sequence of its own: ONNX Runtime takes no sequence that is longer than the tables.
    positions = g.once("positions, one a row", lambda: g.reshape(where, (where.shape[0], 1)))
    turned = g.op(
        "RotaryEmbedding",
        [g.reshape(x, (rows, 1, heads * width)), *tables, positions],
        num_heads=heads,
        rotary_embedding_dim=0 if a["rotary_dim"] == width else a["rotary_dim"],
        interleaved=int(a["interleaved"]),
    )
    return g.reshape(turned, x.shape)


@lowers("ew::paged_attention")
def paged_attention(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    return low.form.attention(low, node, a)


# Experts.


@lowers("ew::moe", "ew::quantised_moe")
def moe(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
    """Each expert takes the rows that chose it, and adds its share to the rows of the sum."""
    g, x = low.graph, low.value(a["x"])
    rows, width = x.shape
    chosen, share = low.operand(a["topk_index"], low.inputs["tokens"].dtype), low.value(a["topk_weight"])
    experts = len(range(matrix_of(low, a, "gate_up_").experts))
    total = g.op("ConstantOfShape", [g.op("Shape", [x], (2,), low.inputs["tokens"].dtype)], x.shape, FLOAT)
    for expert in range(experts):
        mine = g.op("Equal", [chosen, g.scalar(expert, chosen.dtype)], dtype=9)
        place = g.op("NonZero", [mine], (2, f"rows of expert {expert}"), chosen.dtype)
        pairs = g.op("Transpose", [place], (place.shape[1], 2), perm=[1, 0])
        index = g.op("Gather", [place, g.scalar(0, chosen.dtype)], (place.shape[1],), axis=0)
        inner = product(
            low,
            g.gather(x, index),
            matrix_of(low, a, "gate_up_", expert),
            _bias(low, a["gate_up_bias"], expert),
        )
        hidden = _middle(low, inner, a)
        out = product(low, hidden, matrix_of(low, a, "down_", expert), _bias(low, a["down_bias"], expert))
        weight = g.op("GatherND", [share, pairs], (place.shape[1],))
        out = g.mul(out, g.op("Unsqueeze", [weight, g.ints(1)], (place.shape[1], 1)), out.shape)
        total = g.op(
            "ScatterND",
            [total, g.op("Unsqueeze", [index, g.ints(1)], (place.shape[1], 1)), out],
            (rows, width),
            reduction="add",
        )
    return total


def _bias(low: Lowering, argument: Any, expert: int) -> Value | None:
    if argument is None:
        return None
    bias = low.weight(argument, "bias")
    return low.tensor(bias, ("expert", expert), lambda b: b[expert].float().numpy(), bias.shape[1:], FLOAT)


def _middle(low: Lowering, gate_up: Value, a: dict[str, Any]) -> Value:
    """[n, 2F] -> [n, F]: the middle of one expert."""
    g = low.graph
    gate, up = halves(low, gate_up)
    if a["activation"] != "swiglu_oai":
        return g.mul(activated(low, gate, a["activation"]), up)
    if a["limit"]:
        gate = g.op("Min", [gate, g.scalar(a["limit"])])
        up = g.op("Clip", [up, g.scalar(-a["limit"]), g.scalar(a["limit"])])
    swish = g.mul(gate, g.op("Sigmoid", [g.mul(gate, g.scalar(a["alpha"]))]))
    return g.mul(swish, g.add(up, g.scalar(1.0)))
