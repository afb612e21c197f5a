"""The arithmetic that quantised dialect ops share: dequantising stored weights, simulating rounded activations.

Formats are strings everywhere; `recipes/formats.py` says what the names mean.
"""

import torch
from torch import Tensor

from enginewright.recipes.formats import activation_group, parse_weight


def dequantise(codes: Tensor, scales: Tensor | None, offsets: Tensor | None, weight_format: str) -> Tensor:
    """f32 weights [..., K] of codes [..., K] with scales and offsets [..., ceil(K / group)] (or [..., 1]).

    `offsets` are zero points where the format says so. The last group may be short.
    """
    weight = codes.float()
    if scales is None:
        return weight
    form = parse_weight(weight_format)
    k = codes.shape[-1]
    group = form.group or k
    if k % group:
        scale, shift = spread(scales, group, k), None if offsets is None else spread(offsets, group, k)
        groups = weight
    else:  # in place, by groups: nothing as large as the matrix is made beside it
        scale, shift = scales.float()[..., None], None if offsets is None else offsets.float()[..., None]
        groups = weight.unflatten(-1, (-1, group))
    if shift is None:
        groups.mul_(scale)
    elif form.kind == "zero":
        groups.sub_(shift).mul_(scale)
    else:
        groups.mul_(scale).add_(shift)
    return weight


def spread(values: Tensor, group: int, k: int) -> Tensor:
    """[..., G] -> [..., K] f32: each group's value for each of its inputs."""
    return values.float().repeat_interleave(group, dim=-1)[..., :k]


def simulate_activation(x: Tensor, activation_format: str, activation_scale: float = 0.0) -> Tensor:
    """x [..., K] as the format would carry it, in f32: rounded to the grid and back.

    int8: scale = max|x| / 127 over each group of each row (or the row), codes rounded half to even; the last group may
    be short. int8_static: `activation_scale` for all, codes beyond ±127 clamped.
    """
    if activation_format == "f32":
        return x.float()
    if activation_format == "f16":
        return x.to(torch.float16).float()
    if activation_format == "bf16":
        return x.to(torch.bfloat16).float()
    if activation_format == "int8_static":
        return torch.round(x.float() / activation_scale).clamp_(-127, 127).mul_(activation_scale)
    k = x.shape[-1]
    group = activation_group(activation_format)
    if group is None:
        if activation_format != "int8":
            raise ValueError(f"unknown activation format {activation_format!r}")
        group = k
    values = x.float()
    if k % group:
        values = torch.nn.functional.pad(values, (0, -k % group))
    values = values.unflatten(-1, (-1, group))
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    codes = (values / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-127, 127)
    return codes.mul_(scale).flatten(-2)[..., :k]
