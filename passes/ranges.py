"""Where a group's grid begins and ends: chosen by its values, by squared error, or by the error of its output.

`output` weighs a group's errors by the calibration's inputs: for inputs X of the group, the error of its part of the output is
δᵀ (XᵀX) δ, with δ what rounding adds to the weights. This is the clip search of Lin et al. 2024, "AWQ", section 3.2, as a
quadratic form: exact over all calibration tokens, and independent of their number. Each group stands alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enginewright.passes.quant_formats import SHRINKS, Grid, fit_grid, grouped
from enginewright.recipes.formats import WeightFormat

__all__ = ["choose_grid", "group_blocks"]

OUTPUT_SHRINKS = tuple(1 - step / 40 for step in range(21))
"""Factors that `output` tries on each group's span: 1 to 0.5."""

_CHUNK_ELEMENTS = 8 << 20


def choose_grid(
    weight: Tensor, form: WeightFormat, search: str, *, symmetric: bool = False, gram: Tensor | None = None
) -> Grid:
    """The grid of a matrix [N, K]; `gram` [K, K] is XᵀX of its inputs, needed for the search `output`."""
    x, valid = grouped(weight, form)
    grid = fit_grid(x, valid, form, symmetric=symmetric)
    if search == "minmax":
        return grid
    blocks = None
    if search == "output":
        if gram is None:
            raise ValueError("the range `output` needs the inputs' Gram matrix")
        blocks = group_blocks(gram, form)
    step = max(1, _CHUNK_ELEMENTS // max(1, x[0].numel()))
    parts = [_search(x[row : row + step], valid, form, symmetric, blocks) for row in range(0, len(x), step)]
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Grid(form, torch.cat([part.scales for part in parts]), torch.cat(offsets) if offsets else None)


def group_blocks(gram: Tensor, form: WeightFormat) -> Tensor:
    """The diagonal blocks [G, members, members] of XᵀX [K, K]; zero where the last group is short."""
    k = gram.shape[0]
    size = form.group or k
    count = -(-k // size)
    blocks = gram.new_zeros(count, size, size)
    for g in range(count):
        block = gram[g * size : (g + 1) * size, g * size : (g + 1) * size]
        blocks[g, : len(block), : len(block)] = block
    return blocks


def _search(x: Tensor, valid: Tensor, form: WeightFormat, symmetric: bool, blocks: Tensor | None) -> Grid:
    def error(grid: Grid) -> Tensor:
        delta = torch.where(valid, grid.values(grid.codes(x)) - x, 0.0)
        if blocks is None:
            return delta.square().sum(-1)
        groups_first = delta.transpose(0, 1)  # [G, N, members]
        return (torch.bmm(groups_first, blocks) * groups_first).sum(-1).transpose(0, 1)

    best_grid = fit_grid(x, valid, form, symmetric=symmetric)
    best = error(best_grid)
    for shrink in (SHRINKS if blocks is None else OUTPUT_SHRINKS)[1:]:
        grid = fit_grid(x, valid, form, shrink=shrink, symmetric=symmetric)
        tried = error(grid)
        better = tried < best
        best = torch.where(better, tried, best)
        best_grid = grid.where(better, best_grid)
    return best_grid
