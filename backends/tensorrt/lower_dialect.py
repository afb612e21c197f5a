"""Rules for the dialect's ops, one small function each. Attention and experts have files of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from enginewright.backends.tensorrt import weights
from enginewright.backends.tensorrt.lowering import Lowering, PositionTable, Refused, lowers, op_name
from enginewright.passes.weights import Weight
from enginewright.recipes.formats import parse_weight

__all__ = ["activate", "gated", "quantised"]

Args = dict[str, Any]


# Looking up.


@lowers("ew::embedding")
def embedding(low: Lowering, node: fx.Node, a: Args) -> Any:
    table = low.weight(a["weight"], "table")
    return _looked_up(low, low.gather(low.values(table), _ids(low, a)), a)


@lowers("ew::quantised_embedding")
def quantised_embedding(low: Lowering, node: fx.Node, a: Args) -> Any:
    codes = low.weight(a["codes"], "codes")
    if parse_weight(a["weight_format"]).kind == "float":
        table = weights.dense(low, codes, _float_kind(a["weight_format"]))
        picked = low.shuffle(low.gather(table, _ids(low, a), 1), first=(1, 0))
    else:
        picked = weights.rows(low, quantised(low, a), _ids(low, a), low.shape(node))
    return _looked_up(low, picked, a)


def _ids(low: Lowering, a: Args) -> Any:
    ids = low.tensor(a["ids"])
    return low.elementwise("SUM", ids, low.number(a["offset"], 1, "int32")) if a["offset"] else ids


def _looked_up(low: Lowering, rows: Any, a: Args) -> Any:
    rows = low.cast(rows, "f32")
    scale = float(a["scale"])
    return rows if scale == 1.0 else low.elementwise("PROD", rows, low.number(scale, 2))


@lowers("ew::position_table")
def position_table(low: Lowering, node: fx.Node, a: Args) -> PositionTable:
    return PositionTable(low.weight(a["table"], "table"))


@lowers("ew::select_rows")
def select_rows(low: Lowering, node: fx.Node, a: Args) -> Any:
    return low.gather(low.tensor(a["x"]), low.inputs["logit_rows"])


# Matrix products.


def _float_kind(weight_format: str) -> str:
    if weight_format not in ("f32", "f16", "bf16"):
        raise Refused(f"{weight_format} weights", "one of " + ", ".join(weights.WEIGHT_FORMATS))
    return weight_format


def quantised(low: Lowering, a: Args, prefix: str = "") -> weights.Stored:
    """The quantised matrix that an op's arguments name."""
    parts = [a.get(f"{prefix}{part}") for part in ("codes", "scales", "offsets")]
    codes, scales, offsets = (None if part is None else low.weight(part, "matrix") for part in parts)
    assert codes is not None
    if scales is None or a["weight_format"] not in weights.WEIGHT_FORMATS:
        raise Refused(f"{a['weight_format']} weights", "one of " + ", ".join(weights.WEIGHT_FORMATS))
    return weights.stored(low, codes, scales, offsets, a["weight_format"])


@lowers("ew::linear")
def linear(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, weight = low.wide(a["x"]), low.weight(a["weight"], "matrix")
    table = low.ranked(weights.dense(low, weight, "f32"), len(x.shape))
    return _biased(low, low.matmul(x, table), a["bias"])


@lowers("ew::quantised_linear")
def quantised_linear(low: Lowering, node: fx.Node, a: Args) -> Any:
    x, form, activation = low.tensor(a["x"]), a["weight_format"], a["activation_format"]
    if parse_weight(form).kind == "float":
        kind = _float_kind(form)
        table = weights.dense(low, low.weight(a["codes"], "codes"), kind)
        y = low.matmul(low.cast(x, kind), low.ranked(table, len(x.shape)))
        return _biased(low, y, a["bias"])
    if activation not in weights.activations_for(form):
        known = " or ".join(weights.activations_for(form))
        raise Refused(f"{form} weights with {activation} activations", f"{known} activations")
    apart = None
    if a["outlier_columns"] is not None:
        x, apart = _outliers(low, x, a)
    held = quantised(low, a)
    if activation in ("int8", "int8_static"):
        scale = None
        if activation == "int8_static":
            scale = float(a["activation_scale"])
            if not scale > 0:
                raise Refused(f"int8_static activations with the scale {scale}", "a scale above 0")
        y = weights.integer_product(low, x, held, scale)
    else:
        y = weights.product(low, x, held, activation)
    if apart is not None:
        y = low.elementwise("SUM", y, apart)
    return _biased(low, y, a["bias"])


def _outliers(low: Lowering, x: Any, a: Args) -> tuple[Any, Any]:
    """x without the columns that are kept apart, float32, and their product in bf16 (None without columns)."""
    columns = low.weight(a["outlier_columns"], "columns")
    if not columns.numel:
        return x, None
    index = columns.load().long()
    x, rank = low.cast(x, "f32"), len(x.shape)
    picked = low.gather(x, low.values(columns), rank - 1)
    table = weights.dense(low, low.weight(a["outlier_weight"], "columns"), "bf16")
    apart = low.cast(low.matmul(low.cast(picked, "bf16"), low.ranked(table, rank)), "f32")
    kept = torch.ones(x.shape[-1]).index_fill_(0, index, 0.0).numpy()
    return low.elementwise("PROD", x, low.constant(kept, "columns that stay")), apart


def _biased(low: Lowering, y: Any, bias: Any) -> Any:
    return y if bias is None else low.elementwise("SUM", low.cast(y, "f32"), low.wide(bias))


# Activations.


def activate(low: Lowering, x: Any, kind: str) -> Any:
    """x float32, by a key of passes/dialect/activation.py's ACTIVATIONS."""
    known = {
        "gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH", "relu": "RELU", "sigmoid": "SIGMOID", "tanh": "TANH",
    }  # fmt: skip
    if kind == "identity":
        return x
    if kind == "silu":
        return low.elementwise("PROD", x, low.activation("SIGMOID", x))
    if kind == "relu2":
        positive = low.activation("RELU", x)
        return low.elementwise("PROD", positive, positive)
    if kind not in known:
        raise Refused(f"activation {kind}", "one of silu, relu2, " + ", ".join(known))
    return low.activation(known[kind], x)


def gated(low: Lowering, both: Any, kind: str, alpha: float = 1.0, limit: float = 0.0) -> Any:
    """[..., gate | up] float32 -> [..., activation(gate) · up]; see passes/dialect/moe.py's `gate_and_up`."""
    axis, half = len(both.shape) - 1, both.shape[-1] // 2
    gate, up = (low.sliced(both, axis, start, half) for start in (0, half))
    if kind != "swiglu_oai":
        return low.elementwise("PROD", activate(low, gate, kind), up)
    rank = axis + 1
    if limit:
        most, least = low.number(limit, rank), low.number(-limit, rank)
        gate = low.elementwise("MIN", gate, most)
        up = low.elementwise("MAX", low.elementwise("MIN", up, most), least)
    swish = low.activation("SIGMOID", low.elementwise("PROD", gate, low.number(alpha, rank)))
    return low.elementwise(
        "PROD",
        low.elementwise("PROD", gate, swish),
        low.elementwise("SUM", up, low.number(1, rank)),
    )


@lowers("ew::activation")
def activation(low: Lowering, node: fx.Node, a: Args) -> Any:
    return activate(low, low.wide(a["x"]), a["kind"])


@lowers("ew::gated_activation")
def gated_activation(low: Lowering, node: fx.Node, a: Args) -> Any:
    return gated(low, low.wide(a["gate_up"]), a["activation"])


# Norms, in float32.


def _over_root(low: Lowering, x: Any, squares: Any, eps: float) -> Any:
    """x / √(squares + eps)."""
    root = low.unary("SQRT", low.elementwise("SUM", squares, low.number(eps, len(x.shape))))
    return low.elementwise("PROD", x, low.unary("RECIP", root))


def _rms_norm(low: Lowering, x: Any, a: Args) -> Any:
    last = len(x.shape) - 1
    y = _over_root(low, x, low.reduce("AVG", low.elementwise("PROD", x, x), [last]), a["eps"])
    if a["weight"] is None:
        return y
    weight, offset = low.weight(a["weight"], "weight"), a["weight_offset"]
    if not offset:
        return low.elementwise("PROD", y, low.values(weight))
    key = ("norm", id(weight), offset)
    if key not in low.shared:
        low.shared[key] = (_moved(low, weight, offset), weight)
    return low.elementwise("PROD", y, low.shared[key][0])


def _moved(low: Lowering, weight: Weight, offset: float) -> Any:
    return low.constant((weight.load().float() + offset).numpy(), f"{weight.name} + {offset:g}")


def _layer_norm(low: Lowering, x: Any, a: Args) -> Any:
    last = len(x.shape) - 1
    away = low.elementwise("SUB", x, low.reduce("AVG", x, [last]))
    y = _over_root(low, away, low.reduce("AVG", low.elementwise("PROD", away, away), [last]), a["eps"])
    for op, name in (("PROD", "weight"), ("SUM", "bias")):
        if a[name] is not None:
            y = low.elementwise(op, y, low.wide(a[name]))
    return y


@lowers("ew::rms_norm", "ew::layer_norm")
def norm(low: Lowering, node: fx.Node, a: Args) -> Any:
    kind = _rms_norm if op_name(node) == "ew::rms_norm" else _layer_norm
    return kind(low, low.wide(a["x"]), a)


@lowers("ew::add_rms_norm", "ew::add_layer_norm")
def add_norm(low: Lowering, node: fx.Node, a: Args) -> tuple[Any, Any]:
    kind = _rms_norm if op_name(node) == "ew::add_rms_norm" else _layer_norm
    total = low.elementwise("SUM", low.wide(a["x"]), low.wide(a["residual"]))
    return kind(low, total, a), total


# Positions.


@lowers("ew::rope")
def rope(low: Lowering, node: fx.Node, a: Args) -> Any:
    """Every token is a batch of its own, of one place, so that packed rows need no transposition."""
    heads, width = low.shape(node)
    tables = [low.result(a[name]) for name in ("cos", "sin")]
    if not all(isinstance(table, PositionTable) for table in tables):
        raise Refused("its cosines are computed from the tokens", "tables of positions")
    if a["rotary_dim"] % 2 or a["rotary_dim"] > width:
        raise Refused(f"it rotates {a['rotary_dim']} of {width} features", "an even number of them")
    x = low.shuffle(low.wide(a["x"]), [-1, heads, 1, width])
    cos, sin = (low.values(table.table) for table in tables)
    partial = 0 if a["rotary_dim"] == width else a["rotary_dim"]
    layer = low.network.add_rotary_embedding(x, cos, sin, bool(a["interleaved"]), partial)
    low.named(layer, "rope")
    key = ("positions", "column")
    if key not in low.shared:
        low.shared[key] = low.shuffle(low.inputs["positions"], [-1, 1])
    layer.set_input(3, low.shared[key])
    return low.shuffle(layer.get_output(0), [-1, heads, width])
