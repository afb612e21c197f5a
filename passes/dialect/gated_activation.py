"""ew::gated_activation — the middle of a gated MLP, over gate and up laid side by side.

    gate_up [T, ..., 2F] f32, halves [gate | up]  ->  [T, ..., F]:  activation(gate) · up

`activation` is a key of activation.ACTIVATIONS. Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 5.
"""

from torch import Tensor

from .activation import ACTIVATIONS
from .registry import define


def reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def shape(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


gated_activation = define("gated_activation(Tensor gate_up, str activation) -> Tensor", reference, shape)
