"""ew::quantised_moe — `ew::moe` with stored (quantised) weights and, if asked, rounded activations.

    x [T, H] f32, topk_index [T, k] int, topk_weight [T, k] f32
    gate_up_codes [E, 2F, H], gate_up_scales, gate_up_offsets [E, 2F, G]?, gate_up_bias [E, 2F]?
    down_codes [E, H, F], down_scales, down_offsets [E, H, G]?, down_bias [E, H]?
    ->  [T, H] f32

Formats as in `ew::quantised_linear`: both matrices share them, and both of their inputs are rounded.
"""

import torch
from torch import Tensor

from .moe import gate_and_up, route
from .numerics import dequantise, simulate_activation
from .registry import define


def reference(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_offsets: Tensor | None,
    gate_up_bias: Tensor | None,
    down_codes: Tensor,
    down_scales: Tensor | None,
    down_offsets: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    weight_format: str,
    activation_format: str,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    def of(table: Tensor | None, e: int) -> Tensor | None:
        return None if table is None else table[e]

    def project(
        rows: Tensor,
        e: int,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        weight = dequantise(codes[e], of(scales, e), of(offsets, e), weight_format)
        return torch.nn.functional.linear(simulate_activation(rows, activation_format), weight, of(bias, e))

    def expert(e: int, rows: Tensor) -> Tensor:
        hidden = project(rows, e, gate_up_codes, gate_up_scales, gate_up_offsets, gate_up_bias)
        hidden = gate_and_up(hidden, activation, alpha, limit)
        return project(hidden, e, down_codes, down_scales, down_offsets, down_bias)

    return route(x, topk_index, topk_weight, gate_up_codes.shape[0], expert)


def shape(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_offsets: Tensor | None,
    gate_up_bias: Tensor | None,
    down_codes: Tensor,
    down_scales: Tensor | None,
    down_offsets: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    weight_format: str,
    activation_format: str,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    return x.new_empty(x.shape)


quantised_moe = define(
    "quantised_moe(Tensor x, Tensor topk_index, Tensor topk_weight, Tensor gate_up_codes, "
    "Tensor? gate_up_scales, Tensor? gate_up_offsets, Tensor? gate_up_bias, Tensor down_codes, "
    "Tensor? down_scales, Tensor? down_offsets, Tensor? down_bias, str activation, str weight_format, "
    "str activation_format, float alpha=1.0, float limit=0.0) -> Tensor",
    reference,
    shape,
)
