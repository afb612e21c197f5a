"""ew::moe — routed experts, each a gated MLP.

    x [T, H] f32, topk_index [T, k] int, topk_weight [T, k] f32
    gate_up [E, 2F, H], gate_up_bias [E, 2F]?, halves [gate | up];  down [E, H, F], down_bias [E, H]?
    ->  [T, H]:  Σ_j topk_weight[t, j] · expert_{topk_index[t, j]}(x[t])

    expert(x) = down · (activation(gate) · up) + down_bias, gate | up = gate_up · x + gate_up_bias

`activation` is a key of activation.ACTIVATIONS, or `swiglu_oai` (gpt-oss): gate = min(gate, limit), up clamped to
± limit, then gate·σ(alpha·gate) · (up + 1). `limit` 0 means no clamp. The contributions of a row add in the order
j = 0 … k-1. Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks", eq. 1; gpt-oss model card 2025.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .activation import ACTIVATIONS
from .registry import define


def gate_and_up(gate_up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """[..., 2F] -> [..., F]: the middle of one expert."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation != "swiglu_oai":
        return ACTIVATIONS[activation](gate) * up
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def route(
    x: Tensor, topk_index: Tensor, topk_weight: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Run `expert(e, rows [n, H])` on the rows that chose it; returns the sum of each row's choices, weighted, [T, H]."""
    width = topk_index.shape[1]
    parts = x.new_zeros((x.shape[0], width, x.shape[1]))
    for e in range(experts):
        rows, slots = torch.nonzero(topk_index == e, as_tuple=True)
        if rows.numel():
            parts[rows, slots] = expert(e, x[rows]) * topk_weight[rows, slots, None].to(x.dtype)
    total = parts[:, 0]
    for j in range(1, width):
        total = total + parts[:, j]
    return total


def reference(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    def expert(e: int, rows: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(
            rows, gate_up[e], None if gate_up_bias is None else gate_up_bias[e]
        )
        hidden = gate_and_up(hidden, activation, alpha, limit)
        return torch.nn.functional.linear(hidden, down[e], None if down_bias is None else down_bias[e])

    return route(x, topk_index, topk_weight, gate_up.shape[0], expert)


def shape(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    return x.new_empty(x.shape)


moe = define(
    "moe(Tensor x, Tensor topk_index, Tensor topk_weight, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, str activation, float alpha=1.0, float limit=0.0) -> Tensor",
    reference,
    shape,
)
