"""The arithmetic that quantised dialect ops share: dequantising stored weights, simulating rounded activations.

Formats are strings everywhere. Weights: `f32`, `bf16`, `int8` (symmetric, one scale an output channel),
`int8_g32` (symmetric, one scale per 32 inputs), `int4_g{32,64,128}` (codes 0..15, a float scale and a float
offset per group: w = scale·code + offset). Activations: `f32`, `bf16`, `int8_g{32,64,128}` (symmetric, one
scale per token and group of inputs, found at run time).
"""

import torch
from torch import Tensor


def group_size(name: str) -> int | None:
    """Inputs that share one scale: 64 for `int4_g64`; None for formats without groups (`int8`, `bf16`, `f32`)."""
    _, _, group = name.partition("_g")
    return int(group) if group else None


def dequantise(codes: Tensor, scales: Tensor | None, offsets: Tensor | None, weight_format: str) -> Tensor:
    """f32 weights [..., K] of codes [..., K] with scales and offsets [..., ceil(K / group)] (or [..., 1]).

    The last group may be short.
    """
    weight = codes.float()
    if scales is None:
        return weight
    k = codes.shape[-1]
    group = group_size(weight_format) or k
    weight = weight * _spread(scales, group, k)
    return weight if offsets is None else weight + _spread(offsets, group, k)


def _spread(values: Tensor, group: int, k: int) -> Tensor:
    return values.float().repeat_interleave(group, dim=-1)[..., :k]


def simulate_activation(x: Tensor, activation_format: str) -> Tensor:
    """x [..., K] as the format would carry it, in f32: rounded to the grid and back.

    int8: scale = max|x| / 127 over each group of each row, codes rounded half to even; the last group may be short.
    """
    if activation_format == "f32":
        return x.float()
    if activation_format == "bf16":
        return x.to(torch.bfloat16).float()
    group = group_size(activation_format)
    if group is None or not activation_format.startswith("int8"):
        raise ValueError(f"unknown activation format {activation_format!r}")
    k = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -k % group)).unflatten(-1, (-1, group))
    scale = padded.abs().amax(dim=-1, keepdim=True) / 127
    codes = torch.round(padded / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127)
    return (codes * scale).flatten(-2)[..., :k]
