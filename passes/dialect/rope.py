"""ew::rope — rotary position embedding of the first `rotary_dim` features of every head; the rest passes through.

    x [T, H, D], cos [T, R/2] f32, sin [T, R/2] f32, rotary_dim = R, interleaved  ->  [T, H, D] of x's dtype

Feature pairs (a, b) become (a·cos - b·sin, b·cos + a·sin). Pair i is (x[i], x[i + R/2]), or with
`interleaved` (x[2i], x[2i + 1]). Any attention factor of a scaled type is already inside cos and sin.
Source: Su et al. 2021, "RoFormer", eq. 34.
"""

import torch
from torch import Tensor

from .registry import define


def reference(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool = False) -> Tensor:
    rotated, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    y = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((y.to(x.dtype), passed), dim=-1)


def shape(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool = False) -> Tensor:
    return x.new_empty(x.shape)


rope = define(
    "rope(Tensor x, Tensor cos, Tensor sin, int rotary_dim, bool interleaved=False) -> Tensor",
    reference,
    shape,
)
