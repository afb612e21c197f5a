"""ew::select_rows — keep the rows whose logits are wanted.

x [T, ...], rows [R] int32  ->  [R, ...] of x's dtype:  x[rows]
"""

import torch
from torch import Tensor

from .registry import define


def reference(x: Tensor, rows: Tensor) -> Tensor:
    return torch.index_select(x, 0, rows)


def shape(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


select_rows = define("select_rows(Tensor x, Tensor rows) -> Tensor", reference, shape)
