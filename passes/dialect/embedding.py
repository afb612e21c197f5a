"""ew::embedding — rows of a table, chosen by token id (or by position, for learned positions).

    ids [T] int32 | int64, weight [V, F]  ->  [T, F] of weight's dtype:  scale · weight[ids + offset]

`offset` is added to the ids (OPT's learned positions start at 2); `scale` multiplies the rows (Gemma's √hidden).
"""

import torch
from torch import Tensor

from .registry import define


def reference(ids: Tensor, weight: Tensor, offset: int = 0, scale: float = 1.0) -> Tensor:
    rows = torch.index_select(weight, 0, ids + offset if offset else ids)
    return rows if scale == 1.0 else rows * scale


def shape(ids: Tensor, weight: Tensor, offset: int = 0, scale: float = 1.0) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


embedding = define(
    "embedding(Tensor ids, Tensor weight, int offset=0, float scale=1.0) -> Tensor", reference, shape
)
