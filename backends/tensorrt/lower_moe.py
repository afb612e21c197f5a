"""ew::moe and ew::quantised_moe: every expert on every token, weighed by what the router gave it (0 for most).

Dense over the experts: the products of all of them are one batched product, [1, T, H] · [E, H, 2F]. It costs E / k times the
arithmetic of the chosen experts, and no gathered copy of their matrices; one token alone reads E / k times as much memory, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.tensorrt import weights
from enginewright.backends.tensorrt.lower_dialect import gated, quantised
from enginewright.backends.tensorrt.lowering import Lowering, Refused, lowers
from enginewright.recipes.formats import parse_weight

__all__: list[str] = []

Args = dict[str, Any]


@lowers("ew::moe", "ew::quantised_moe")
def moe(low: Lowering, node: fx.Node, a: Args) -> Any:
    low.note(
        "experts are computed on every token and weighed: their number over the top k times the arithmetic"
    )
    x = low.shuffle(low.tensor(a["x"]), [1, -1, *low.shape(node)])
    hidden = gated(low, _project(low, x, a, "gate_up"), a["activation"], a["alpha"], a["limit"])
    y = _project(low, hidden, a, "down")  # [E, T, H]
    shares = low.shuffle(_shares(low, a, y.shape[0]), first=(1, 0))  # [E, T]
    shares = low.shuffle(shares, [0, 0, 1])
    weighed = low.elementwise("PROD", y, shares)
    # What an expert makes of a token that is not its own may be no number at all, and 0 * inf is none.
    zero = low.number(0, 3)
    weighed = low.select(low.elementwise("EQUAL", shares, zero), zero, weighed)
    return low.reduce("SUM", weighed, [0], keep=False)


def _project(low: Lowering, x: Any, a: Args, name: str) -> Any:
    """x [1 or E, T, K] · every expert's matrix  ->  [E, T, N] float32, biased."""
    bias = a[f"{name}_bias"]
    if "weight_format" not in a:
        table = weights.dense(low, low.weight(a[name], "matrices"), "f32")
        y = low.matmul(low.cast(x, "f32"), table)
    elif parse_weight(a["weight_format"]).kind == "float":
        kind = a["weight_format"]
        if kind not in weights.WEIGHT_FORMATS:
            raise Refused(f"{kind} experts", "one of " + ", ".join(weights.WEIGHT_FORMATS))
        table = weights.dense(low, low.weight(a[f"{name}_codes"], "matrices"), kind)
        y = low.cast(low.matmul(low.cast(x, kind), table), "f32")
    else:
        activation = a["activation_format"]
        if activation not in weights.ACTIVATION_FORMATS:
            known = " or ".join(weights.ACTIVATION_FORMATS)
            raise Refused(f"experts with {activation} activations", f"{known} activations")
        y = weights.product(low, x, quantised(low, a, f"{name}_"), activation)
    if bias is None:
        return y
    table = low.weight(bias, "bias")
    return low.elementwise("SUM", y, low.values(table, (table.shape[0], 1, table.shape[1])))


def _shares(low: Lowering, a: Args, experts: int) -> Any:
    """topk_index, topk_weight [T, k]  ->  each expert's share of each token, [T, E] float32."""
    index, weight = low.cast(low.tensor(a["topk_index"]), "int32"), low.wide(a["topk_weight"])
    width = index.shape[-1]
    names = low.constant(np.arange(experts, dtype=np.int32).reshape(1, 1, experts), "experts")
    chosen = low.elementwise("EQUAL", low.shuffle(index, [0, width, 1]), names)  # [T, k, E]
    share = low.elementwise("PROD", low.cast(chosen, "f32"), low.shuffle(weight, [0, width, 1]))
    return low.reduce("SUM", share, [1], keep=False)
