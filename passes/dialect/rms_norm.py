"""ew::rms_norm — root-mean-square normalisation of the last dimension, computed in f32.

    x [T, ..., D], weight [D]?  ->  [T, ..., D] of x's dtype:  x / √(mean(x²) + eps) · (weight_offset + weight)

`weight_offset` is 0, or 1 for models that store w and multiply by 1 + w (Gemma). Without a weight nothing is
multiplied. A per-head norm is the same op on [T, heads, D]. Source: Zhang & Sennrich 2019, "Root Mean Square Layer
Normalization", eq. 4.
"""

import torch
from torch import Tensor

from .registry import define


def reference(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + weight_offset if weight_offset else weight.float())
    return y.to(x.dtype)


def shape(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> Tensor:
    return x.new_empty(x.shape)


rms_norm = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0) -> Tensor", reference, shape
)
