"""ew::linear — a dense projection of the last dimension.

x [T, ..., K] f32, weight [N, K], bias [N]?  ->  [T, ..., N]:  x · weightᵀ + bias
"""

import torch
from torch import Tensor

from .registry import define


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear = define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", reference, shape)
