"""GPTQ: rounding column by column, each column's error made good by the columns that are still to come.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1 and eqs. 2 and 3: H = 2 X Xᵀ (here Xᵀ X with tokens as rows; the factor cancels), the update of the remaining
weights -(w_q - quant(w_q)) / [H⁻¹]_qq · (H⁻¹)_q,: through the Cholesky factor of H⁻¹, in blocks of columns ("lazy batch").
Two rules of its implementations: columns in the order of falling H_kk ("activation order"), and groups' scales fixed
beforehand from the weights as they were ("static groups"), so that groups stay contiguous whatever the order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginewright.passes.quant_formats import Grid, QuantTensor, from_grid, grouped
from enginewright.passes.ranges import choose_grid
from enginewright.recipes.formats import WeightFormat
from enginewright.recipes.recipe import Quantise

__all__ = ["GptqOptions", "Inverse", "NotPositiveError", "invert", "round_gptq"]

_INNER = 32  # columns whose errors are applied one by one; beyond them a product applies many at once


class NotPositiveError(ValueError):
    """The inputs' Gram matrix has no Cholesky factor, however damped."""


@dataclass(frozen=True)
class GptqOptions:
    """See `recipes.recipe.Quantise`."""

    damping: float = 0.01
    block: int = 128
    order: str = "activation"
    static_groups: bool = True
    range: str = "mse"
    symmetric: bool = False

    @classmethod
    def of(cls, section: Quantise) -> GptqOptions:
        """The options that a recipe's section `quantise` gives."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(section, name) for name in names})


@dataclass(frozen=True)
class Inverse:
    """The upper Cholesky factor of H⁻¹ [K, K], its rows and columns in the order of rounding, and that order [K]."""

    factor: Tensor
    order: Tensor


def round_gptq(
    weight: Tensor, gram: Tensor, inverse: Inverse, form: WeightFormat, options: GptqOptions
) -> QuantTensor:
    """Round `weight` [N, K] f32 so that the output X Wᵀ changes least; `gram` [K, K] is XᵀX of its inputs.

    An input that was never anything but zero is rounded to nearest and corrects nothing. Raises ValueError for values
    that do not fit the format, or for groups found on the way in another order than theirs.
    """
    if not options.static_groups and options.order != "natural":
        raise ValueError("groups whose grids are found on the way are rounded in their natural order")
    n, k = weight.shape
    order = inverse.order.tolist()
    factor = inverse.factor.numpy()
    work = np.ascontiguousarray(
        weight.float().numpy().T[order]
    )  # [K, N]: a column to round is one row of memory
    codes = np.empty((k, n), np.float32)
    columns = _Columns(weight, gram, form, options)
    stop = 0
    while (start := stop) < k:
        stop = min(start + options.block, k, columns.fresh(start))
        errors = np.empty((stop - start, n), np.float32)
        for inner in range(start, stop, _INNER):
            end = min(inner + _INNER, stop)
            for column in range(inner, end):
                columns.reach(order[column], work)
                code, value = columns.round(order[column], work[column])
                codes[order[column]] = code
                error = (work[column] - value) / factor[column, column]
                errors[column - start] = error
                work[column + 1 : end] -= factor[column, column + 1 : end, None] * error
            _correct(work[end:stop], factor[inner:end, end:stop], errors[inner - start : end - start])
        _correct(work[stop:], factor[start:stop, stop:], errors)
    padded, _ = grouped(torch.from_numpy(np.ascontiguousarray(codes.T)), form)
    return from_grid(columns.grid(), padded, k)


def _correct(rest: Any, factor: Any, errors: Any) -> None:
    """rest [R, N] -= factorᵀ · errors, of factor [C, R] and errors [C, N]."""
    if len(rest):
        torch.from_numpy(rest).addmm_(torch.from_numpy(factor).T, torch.from_numpy(errors), alpha=-1)


class _Columns:
    """Scales and offsets of every group, laid out so that a column's are one row; found beforehand or on the way."""

    def __init__(self, weight: Tensor, gram: Tensor, form: WeightFormat, options: GptqOptions) -> None:
        self.form, self.options, self.gram = form, options, gram
        self.n, self.k = weight.shape
        self.size = form.group or self.k
        self.top = np.float32(2**form.bits - 1)
        groups = form.groups(self.k)
        self.scales = np.zeros((groups, self.n), np.float32)
        self.shifts = np.zeros((groups, self.n), np.float32)
        if options.static_groups:
            self._set(
                slice(None), choose_grid(weight, form, options.range, symmetric=options.symmetric, gram=gram)
            )

    def _set(self, groups: slice, grid: Grid) -> None:
        self.scales[groups] = grid.scales.numpy().T
        if grid.offsets is not None:
            self.shifts[groups] = grid.offsets.numpy().T

    def fresh(self, start: int) -> int:
        """Where the block that starts there must end: a grid found on the way needs all errors before it."""
        return self.k if self.options.static_groups else (start // self.size + 1) * self.size

    def reach(self, column: int, work: Any) -> None:
        """Called before a column is rounded: without static groups its group's grid is fitted to what errors have made of it.

        Columns are in their natural order then.
        """
        if self.options.static_groups or column % self.size:
            return
        group, part = column // self.size, slice(column, min(column + self.size, self.k))
        values = torch.from_numpy(np.ascontiguousarray(work[part].T))
        whole = dataclasses.replace(self.form, group=0)
        options = self.options
        grid = choose_grid(
            values, whole, options.range, symmetric=options.symmetric, gram=self.gram[part, part]
        )
        self._set(slice(group, group + 1), grid)

    def round(self, column: int, values: Any) -> tuple[Any, Any]:
        """The codes of a column's weights [N], and the values that they stand for."""
        scale, shift = self.scales[column // self.size], self.shifts[column // self.size]
        divisor = np.where(scale > 0, scale, np.float32(1))
        if self.form.kind == "symmetric":
            code = np.clip(np.rint(values / divisor), -127, 127)
            return code, code * scale
        if self.form.kind == "zero":
            code = np.clip(np.rint(values / divisor + shift), 0, self.top)
            return code, (code - shift) * scale
        code = np.where(scale > 0, np.clip(np.rint((values - shift) / divisor), 0, self.top), np.float32(0))
        return code, code * scale + shift

    def grid(self) -> Grid:
        shifts = torch.from_numpy(np.ascontiguousarray(self.shifts.T)) if self.form.has_offsets else None
        return Grid(self.form, torch.from_numpy(np.ascontiguousarray(self.scales.T)), shifts)


def invert(gram: Tensor, tokens: int, options: GptqOptions) -> Inverse:
    """The inverse of XᵀX [K, K] of `tokens` inputs, damped. Raises NotPositiveError where no damping gives it a factor.

    Damping adds a share of the mean diagonal. It grows where there are fewer tokens than inputs (H says nothing about most
    directions then), and tenfold, to 1, where there is no factor.
    """
    k, live = len(gram), torch.diagonal(gram) > 0
    hessian = gram.double() if k <= 256 else gram.float().clone()
    diagonal = torch.diagonal(hessian)
    if not bool(torch.isfinite(diagonal).all()) or not bool(live.any()):
        raise NotPositiveError("the calibration's inputs are all zero, or not finite")
    mean = diagonal[live].mean()
    hessian[~live, ~live] = mean
    order = torch.arange(k)
    if options.order == "activation":
        order = torch.argsort(
            torch.where(live, diagonal, torch.zeros_like(diagonal)), descending=True, stable=True
        )
        hessian = hessian[order][:, order]
    damping = max(options.damping, 1e-4) * max(1.0, k / max(tokens, 1))
    while True:
        damped = hessian.clone()
        torch.diagonal(damped).add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return Inverse(upper.float().contiguous(), order)
        if damping >= 1:
            raise NotPositiveError("the calibration's inputs have no positive definite Gram matrix")
        damping = min(damping * 10, 1.0)
