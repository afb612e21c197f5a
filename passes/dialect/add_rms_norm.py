"""ew::add_rms_norm — a residual addition and the RMS norm of its sum, in one pass over the row.

x [T, D], residual [T, D], weight [D]?  ->  (normed [T, D], sum [T, D]):  sum = x + residual, normed = rms_norm(sum)
"""

from torch import Tensor

from . import rms_norm
from .registry import define


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm.reference(total, weight, eps, weight_offset), total


def shape(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


add_rms_norm = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0) "
    "-> (Tensor, Tensor)",
    reference,
    shape,
)
