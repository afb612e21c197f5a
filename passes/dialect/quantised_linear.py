"""ew::quantised_linear — `ew::linear` with stored (quantised) weights and, if asked, rounded activations.

    x [T, ..., K] f32, codes [N, K] uint8 | int8 | f16 | bf16 | float8_e4m3fn, scales, offsets [N, G] f32?, bias [N] f32?
    ->  [T, ..., N] f32:  round(x) · dequantise(codes)ᵀ + bias

G is the number of groups of `weight_format`; `offsets` are zero points where it says so; `f16` and `bf16` have neither scales nor
offsets (recipes/formats.py). `activation_format` says how x is rounded first; `activation_scale` is the scale of `int8_static`.

With `outlier_columns` [C] int32, ascending, and `outlier_weight` [N, C] bf16: those features of x are left out of the product
above (they are zero before the rounding, and their codes are zero) and bf16(x[columns]) · outlier_weightᵀ is added: the
decomposition of Dettmers et al. 2022, "LLM.int8()", eq. 8, with columns that are the same for every token.
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
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
    activation_scale: float = 0.0,
) -> Tensor:
    weight = dequantise(codes, scales, offsets, weight_format)
    if outlier_columns is None or outlier_weight is None:
        rounded = simulate_activation(x, activation_format, activation_scale)
        return torch.nn.functional.linear(rounded, weight, bias)
    columns = outlier_columns.long()
    rest = x.index_fill(-1, columns, 0.0)
    y = torch.nn.functional.linear(
        simulate_activation(rest, activation_format, activation_scale), weight, bias
    )
    return y + torch.nn.functional.linear(x[..., columns].bfloat16().float(), outlier_weight.float())


def shape(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    bias: Tensor | None,
    weight_format: str,
    activation_format: str,
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
    activation_scale: float = 0.0,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


quantised_linear = define(
    "quantised_linear(Tensor x, Tensor codes, Tensor? scales, Tensor? offsets, Tensor? bias, "
    "str weight_format, str activation_format, Tensor? outlier_columns=None, Tensor? outlier_weight=None, "
    "float activation_scale=0.0) -> Tensor",
    reference,
    shape,
)
