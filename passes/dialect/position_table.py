"""ew::position_table — rows of a constant table, chosen by position.

    positions [T] int32 | int64, table [P, ...]  ->  [T, ...] of table's dtype:  table[positions]

Whatever depends on positions alone (cosines and sines of every RoPE type, sinusoids) is evaluated once at
build time for 0 … P-1, P being the engine's maximum context.
"""

import torch
from torch import Tensor

from .registry import define


def reference(positions: Tensor, table: Tensor) -> Tensor:
    return torch.index_select(table, 0, positions)


def shape(positions: Tensor, table: Tensor) -> Tensor:
    return table.new_empty((positions.shape[0], *table.shape[1:]))


position_table = define("position_table(Tensor positions, Tensor table) -> Tensor", reference, shape)
