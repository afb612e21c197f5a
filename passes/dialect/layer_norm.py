"""ew::layer_norm — layer normalisation of the last dimension, computed in f32.

    x [T, ..., D], weight [D]?, bias [D]?  ->  [T, ..., D] of x's dtype:
    (x - mean(x)) / √(var(x) + eps) · weight + bias,  var without Bessel's correction

Source: Ba, Kiros & Hinton 2016, "Layer Normalization", eq. 4.
"""

import torch
from torch import Tensor

from .registry import define


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.float()

    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], wide(weight), wide(bias), eps).to(x.dtype)


def shape(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


layer_norm = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", reference, shape
)
