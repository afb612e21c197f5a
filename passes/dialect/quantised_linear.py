"""ew::quantised_linear — `ew::linear` with stored (quantised) weights and, if asked, rounded activations.

    x [T, ..., K] f32, codes [N, K] uint8 | int8 | bf16, scales [N, G] f32?, offsets [N, G] f32?, bias [N] f32?
    ->  [T, ..., N] f32:  round(x) · dequantise(codes)ᵀ + bias

G = ceil(K / group) of `weight_format`, or 1 for a scale an output channel; `bf16` has neither scales nor offsets.
`activation_format` says how x is rounded first: `f32` (not at all), `bf16`, `int8_g{32,64,128}` (numerics.py).
"""

import torch
from torch import Tensor

from .numerics import dequantise, simulate_activation
from .registry import define


def reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    bias: Tensor | None,
    weight_format: str,
    activation_format: str,
) -> Tensor:
    weight = dequantise(codes, scales, offsets, weight_format)
    return torch.nn.functional.linear(simulate_activation(x, activation_format), weight, bias)


def shape(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    bias: Tensor | None,
    weight_format: str,
    activation_format: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


quantised_linear = define(
    "quantised_linear(Tensor x, Tensor codes, Tensor? scales, Tensor? offsets, Tensor? bias, "
    "str weight_format, str activation_format) -> Tensor",
    reference,
    shape,
)
