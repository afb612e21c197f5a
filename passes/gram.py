"""XᵀX of a matrix's inputs, summed over batches: what GPTQ and the ranges `output` know of them.

Half of a symmetric matrix is enough, so only the blocks on and above the diagonal are multiplied. Factors may be rounded to
bfloat16 (products.py); a rounded X has a positive semidefinite XᵀX as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from enginewright.passes.products import bfloat16_factors

__all__ = ["gram_of"]

_BLOCK = 256


def gram_of(batches: Iterable[Tensor]) -> Tensor | None:
    """XᵀX [K, K] f32 of all rows of `batches` [tokens, K] f32; None where there is no batch."""
    total: Tensor | None = None
    for rows in batches:
        total = add(total, rows)
    return None if total is None else mirrored(total)


def add(total: Tensor | None, rows: Tensor) -> Tensor:
    """`total` [K, K] (None: zero) and rowsᵀ·rows, in place; right on and above the diagonal alone, until `mirrored`."""
    k = rows.shape[1]
    total = rows.new_zeros(k, k) if total is None else total
    with bfloat16_factors():
        for start in range(0, k, _BLOCK):
            stop = min(start + _BLOCK, k)
            total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
    return total


def mirrored(total: Tensor) -> Tensor:
    """The whole of a matrix that `add` has summed."""
    upper = torch.triu(total)
    return upper + torch.triu(total, 1).T
