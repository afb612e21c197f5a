"""ew::activation — one elementwise activation.

x [T, ...] f32  ->  the same shape;  `kind` is a key of ACTIVATIONS

silu x·σ(x) · gelu x·Φ(x), by erf · gelu_tanh its tanh form · relu · relu2 relu(x)²
· sigmoid σ(x) · tanh.   Sources: Hendrycks & Gimpel 2016 (GELU); So et al. 2021 (squared ReLU).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .registry import define

#: kind -> the plain torch form.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def reference(x: Tensor, kind: str) -> Tensor:
    return ACTIVATIONS[kind](x)


def shape(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


activation = define("activation(Tensor x, str kind) -> Tensor", reference, shape)
