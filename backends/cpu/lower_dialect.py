"""Rules for the dialect's ops, one small function each."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.cpu.formats import activations_for
from enginewright.backends.cpu.lowering import (
    Constant,
    Lowering,
    PositionTable,
    Roped,
    arguments,
    lowers,
    op_name,
)
from enginewright.backends.cpu.pack import TILE_ROWS, Array
from enginewright.backends.cpu.views import View, sliced
from enginewright.backends.cpu.weights_file import Matrix
from enginewright.passes.weights import Weight

__all__: list[str] = []

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "identity")
"""Activations that have a kernel."""


# Looking up.


@lowers("ew::embedding", "ew::quantised_embedding")
def embedding(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    scale, result = float(a["scale"]), node
    user = low.only_user(node)
    if user is not None and op_name(user) == "aten::mul" and (factor := _number(low, user, node)) is not None:
        scale, result = scale * factor, user
    ids = low.view(a["ids"])
    index = str(ids.source[1]) if ids.source[0] == "input" else "value"
    out = low.out(node)
    low.builder.emit(
        "embedding",
        [low.builder.dense(ids)] if index == "value" else [],
        [out],
        [low.builder.weights.add_linear(_matrix(low, a))],
        index=index,
        scale=scale,
        offset=a["offset"],
    )
    if result is not node:
        low.results[result] = out
    return out


def _number(low: Lowering, user: fx.Node, node: fx.Node) -> float | None:
    """The number that `user` multiplies `node` by, if it is one."""
    other = next((value for value in user.args if value is not node), None)
    if isinstance(other, (int, float)):
        return float(other)
    found = low.results.get(other) if isinstance(other, fx.Node) else None
    if isinstance(found, Constant) and found.weight.numel == 1 and len(found.weight.shape) <= 1:
        return float(found.weight.load().float())
    return None


@lowers("ew::position_table")
def position_table(low: Lowering, node: fx.Node, a: dict[str, Any]) -> PositionTable:
    return PositionTable(low.weight(a["table"], "table"))


@lowers("ew::select_rows")
def select_rows(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    x = low.dense(a["x"])
    out = low.out(node, rows="logits")
    low.builder.emit("select_rows", [x], [out])
    return out


# Matrix products.


def _matrix(low: Lowering, a: dict[str, Any], prefix: str = "") -> Matrix:
    """The weight of a linear-like op's arguments, dense or quantised."""
    if f"{prefix}codes" not in a:
        return Matrix("f32", low.weight(a[prefix.rstrip("_") or "weight"], "weight"), activation="f32")
    parts = [a.get(f"{prefix}{part}") for part in ("codes", "scales", "offsets")]
    codes, scales, offsets = (None if part is None else low.weight(part, "weight") for part in parts)
    assert codes is not None
    format, activation, scale = a["weight_format"], a.get("activation_format"), a.get("activation_scale", 0.0)
    if activation is not None and activation not in activations_for(format):
        known = " or ".join(activations_for(format))
        raise low.fail(f"{format} weights with {activation} activations", f"{known} activations")
    if activation == "int8_static" and (prefix or not scale > 0):
        found = "of experts" if prefix else f"with the scale {scale}"
        raise low.fail(f"int8_static activations {found}", "a scale above 0, and no experts")
    columns: tuple[int, ...] = ()
    outliers = None
    if a.get("outlier_columns") is not None:
        columns = tuple(int(i) for i in low.weight(a["outlier_columns"], "columns").load())
        if format != "int8":
            raise low.fail(f"{format} weights that keep columns apart", "int8 weights")
        outliers = low.weight(a["outlier_weight"], "weight") if columns else None
    return Matrix(format, codes, scales, offsets, activation, float(scale), columns, outliers)


def _fused(low: Lowering, node: fx.Node) -> bool:
    """Whether a gated activation, its only user, takes this linear in (one K-vector a row)."""
    user = low.only_user(node)
    return user is not None and op_name(user) == "ew::gated_activation" and len(low.shape(node)) == 1


@lowers("ew::linear", "ew::quantised_linear")
def linear(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View | None:
    if _fused(low, node):
        return None
    x = low.dense(a["x"])
    out = low.out(node, rows=x.rows)
    matrix = _matrix(low, a)
    weights = [low.builder.weights.add_linear(matrix), low.vector(a["bias"], "bias")]
    inner = x.size // matrix.layout.k
    attrs: dict[str, Any] = {"inner": inner} if inner != 1 else {}
    low.builder.emit("linear", [x], [out], weights, **attrs)
    return out


def packed_bias(values: Array) -> Array:
    """Biases [..., gate | up] in the order of interleaved tiles: [..., 2 * 16 * ceil(F / 16)]."""
    half = values.shape[-1] // 2
    tiles = -(-half // TILE_ROWS)
    padded = np.zeros((*values.shape[:-1], 2, tiles * TILE_ROWS), np.float32)
    padded[..., :half] = values.reshape(*values.shape[:-1], 2, half)
    return np.stack([padded[..., i, :].reshape(-1, tiles, TILE_ROWS) for i in (0, 1)], axis=2).reshape(-1)


def _gated_bias(low: Lowering, bias: Any) -> int:
    if bias is None:
        return -1
    weight = low.weight(bias, "bias")
    size = weight.numel // weight.shape[-1] * 2 * TILE_ROWS * -(-weight.shape[-1] // 2 // TILE_ROWS)
    return low.builder.weights.add_vector(weight, packed_bias, size)


def _kind(low: Lowering, kind: str, known: tuple[str, ...] = ACTIVATIONS) -> str:
    if kind not in known:
        raise low.fail(f"activation {kind}", "one of " + ", ".join(known))
    return kind


@lowers("ew::gated_activation")
def gated_activation(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    source, kind = a["gate_up"], _kind(low, a["activation"])
    if low.results[source] is None:  # a linear that waits for its only user
        inner = arguments(source)
        x = low.dense(inner["x"])
        out = low.out(node, rows=x.rows)
        gated = low.builder.weights.add_linear(_matrix(low, inner), gated=True)
        low.builder.emit(
            "linear_gated", [x], [out], [gated, _gated_bias(low, inner["bias"])], activation=kind
        )
        return out
    both = low.view(source)
    half = both.shape[-1] // 2
    last = len(both.shape) - 1
    gate, up = (low.builder.dense(sliced(both, last, i * half, (i + 1) * half)) for i in (0, 1))
    out = low.out(node, rows=both.rows)
    low.builder.emit("gated_activation", [gate, up], [out], activation=kind)
    return out


@lowers("ew::activation")
def activation(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    x = low.dense(a["x"])
    out = low.out(node, rows=x.rows)
    made = low.builder.emit("activation", [x], [out], activation=_kind(low, a["kind"]))
    made.in_place = [(0, 0)] if low.builder.whole(x) else []
    return out


@lowers("ew::moe", "ew::quantised_moe")
def moe(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    x, index, weight = (low.dense(a[name]) for name in ("x", "topk_index", "topk_weight"))
    gate_up, down = (_matrix(low, a, prefix) for prefix in ("gate_up_", "down_"))
    out = low.out(node, rows=x.rows)
    weights = [
        low.builder.weights.add_linear(gate_up, gated=True),
        _gated_bias(low, a["gate_up_bias"]),
        low.builder.weights.add_linear(down),
        low.vector(a["down_bias"], "bias"),
    ]
    low.builder.emit(
        "moe",
        [x, index, weight],
        [out],
        weights,
        activation=_kind(low, a["activation"], (*ACTIVATIONS, "swiglu_oai")),
        alpha=a["alpha"],
        limit=a["limit"],
        experts=gate_up.experts,
        top_k=index.size,
    )
    return out


# Norms.


def _norm(
    low: Lowering, node: fx.Node, op: str, a: dict[str, Any], residual: Any = None
) -> View | tuple[View, View]:
    x = low.dense(a["x"])
    inputs, outputs = [x], [low.out(node, x.shape, "f32", x.rows)]
    if residual is not None:
        inputs.append(low.dense(residual))
        outputs.append(low.out(node, x.shape, "f32", x.rows))
    weights = [low.vector(a["weight"], "weight")]
    attrs = {"eps": a["eps"], "dim": x.shape[-1]}
    if op == "layer_norm":
        weights.append(low.vector(a["bias"], "bias"))
    else:
        attrs["weight_offset"] = a["weight_offset"]
    made = low.builder.emit(op, inputs, outputs, weights, **attrs)
    pairs = [(1, 1), (1, 0), (0, 0)] if residual is not None else [(0, 0)]
    made.in_place = [(out, into) for out, into in pairs if low.builder.whole(inputs[into])]
    return (outputs[0], outputs[1]) if residual is not None else outputs[0]


@lowers("ew::rms_norm", "ew::layer_norm")
def norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Any:
    return _norm(low, node, op_name(node).removeprefix("ew::"), a)


@lowers("ew::add_rms_norm", "ew::add_layer_norm")
def add_norm(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Any:
    return _norm(low, node, op_name(node).removeprefix("ew::add_"), a, a["residual"])


# Attention.


@lowers("ew::rope")
def rope(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View | Roped:
    x = low.view(a["x"])
    tables = tuple(low.builder.weights.add_table(_table(low, a[name])) for name in ("cos", "sin"))
    roped = Roped(x, (tables[0], tables[1]), a["rotary_dim"], a["interleaved"])
    user = low.only_user(node)
    if user is not None and op_name(user) == "ew::paged_attention":
        return roped
    return _rotated(low, roped)


def _table(low: Lowering, argument: Any) -> Weight:
    found = low.result(argument)
    if not isinstance(found, PositionTable):
        raise low.fail("its cosines are computed from the tokens", "tables of positions")
    return found.table


def _rotated(low: Lowering, roped: Roped) -> View:
    """Rotate a copy at once."""
    copy = low.builder.copied(roped.x)
    heads, head_dim = roped.x.shape
    low.builder.emit(
        "rope",
        [copy],
        [copy],
        list(roped.tables),
        heads=heads,
        head_dim=head_dim,
        rotary_dim=roped.rotary_dim,
        interleaved=roped.interleaved,
    )
    return copy


@lowers("ew::paged_attention")
def paged_attention(low: Lowering, node: fx.Node, a: dict[str, Any]) -> View:
    q, k = low.result(a["q"]), low.result(a["k"])
    turn = k if isinstance(k, Roped) else None  # the rotation that the cache write does
    if isinstance(q, Roped) and (turn is None or _turn(q) != _turn(turn)):
        q = _rotated(low, q)
    turned = isinstance(q, Roped)
    query = low.builder.dense(q.x) if isinstance(q, Roped) else low.dense(q)
    key = low.dense(k) if turn is None else low.builder.dense(turn.x)
    value = low.dense(a["v"])
    shape = {
        "group": a["group"],
        "layer": a["layer"],
        "q_heads": query.shape[0],
        "kv_heads": key.shape[0],
        "key_dim": key.shape[1],
        "value_dim": value.shape[1],
    }
    how = {} if turn is None else {"rotary_dim": turn.rotary_dim, "interleaved": turn.interleaved}
    write = low.builder.emit(
        "rope_write",
        [query if turned else None, key, value],
        [],
        [-1, -1] if turn is None else list(turn.tables),
        changes=[position for position, changed in enumerate((turned, turn is not None)) if changed],
        **shape,
        **how,
    )
    out = low.out(node, (query.shape[0], value.shape[1]), "f32")
    weights = [low.vector(a["sinks"], "sinks"), low.vector(a["alibi"], "slopes")]
    attrs = {"scale": a["scale"], "softcap": a["softcap"], "window": a["window"], "after": write}
    low.builder.emit("attention", [query], [out], weights, **shape, **attrs)
    return out


def _turn(roped: Roped) -> tuple[tuple[int, int], int, bool]:
    return roped.tables, roped.rotary_dim, roped.interleaved
