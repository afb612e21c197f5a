"""ew::add_layer_norm — a residual addition and the layer norm of its sum, in one pass over the row.

x [T, D], residual [T, D], weight [D]?, bias [D]?  ->  (normed [T, D], sum [T, D]):
sum = x + residual, normed = layer_norm(sum)
"""

from torch import Tensor

from . import layer_norm
from .registry import define


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm.reference(total, weight, bias, eps), total


def shape(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


add_layer_norm = define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    reference,
    shape,
)
