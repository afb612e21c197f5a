"""Each stored matrix against the weights it stands for, group by group, in the steps that its format can take.

A group's step is what its own values ask for: their span over the format's levels; of a float format, twice the largest error of
rounding to nearest. Rounding to nearest leaves half a step at most, so does the search for the least squared error, whatever the
weights are. GPTQ and ranges by output trade a group's own error for the output's. A scale of another group, a shifted offset, a
permuted group are several steps, however little the logits say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enginewright.passes.quant_formats import grouped, streams_rows
from enginewright.passes.unrounded import StoredMatrix
from enginewright.recipes.formats import WeightFormat, parse_weight
from enginewright.recipes.schema import Quantise

__all__ = ["MatrixError", "limit_of", "rounding_error"]

_NEAREST = 0.55  # half a step, and what scales and offsets in fp16 add to it
_TRADED = 2.5  # GPTQ and ranges by output; at most 1.6 in any group of a good engine

_UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}
"""The largest relative error of rounding to a float format."""

_TINY = 1e-30  # where a group is zero
_CHUNK = 8 << 20  # weights looked at together


@dataclass(frozen=True)
class MatrixError:
    """The group of a matrix that is furthest from what it stands for: root mean square error, in steps."""

    name: str
    steps: float
    row: int
    group: int


def limit_of(quantise: Quantise) -> float:
    """The largest error of a group, in steps, that a recipe's method may leave."""
    return _TRADED if quantise.method == "gptq" or quantise.range == "output" else _NEAREST


def rounding_error(matrix: StoredMatrix, symmetric: bool = False) -> MatrixError:
    """The worst group of a stored matrix. `symmetric`: ranges are so, where offsets would allow others."""
    form = parse_weight(matrix.weight_format)
    whole = matrix.dense()
    dense = whole.reshape(-1, whole.shape[-1])
    source = matrix.source
    flat = len(source.shape) == 2 and streams_rows(source)
    every = None if flat else source.load().reshape(dense.shape)
    step, worst = max(1, _CHUNK // dense.shape[1]), (-1.0, 0, 0)
    for start in range(0, len(dense), step):
        rows = source.load_rows(start, start + step) if every is None else every[start : start + step]
        error = _errors(dense[start : start + step], rows.float(), form, symmetric)
        place = int(error.argmax())
        row, group = divmod(place, error.shape[1])
        worst = max(worst, (float(error.flatten()[place]), start + row, group))
    return MatrixError(matrix.name, *worst)


def _errors(stored: Tensor, wanted: Tensor, form: WeightFormat, symmetric: bool) -> Tensor:
    """[rows, groups]: root mean square error of each group, in steps."""
    x, valid = grouped(wanted, form)
    found, _ = grouped(stored, form)
    largest = x.abs().amax(-1, keepdim=True)
    if form.kind == "float":
        unit = 2 * _UNIT[form.name]
        floor = largest * 2.0**-8 if form.name == "fp8" else torch.full_like(largest, 2.0**-24)
        steps = torch.maximum(x.abs() * unit, floor).clamp(min=_TINY)
    else:
        if form.symmetric or symmetric:
            span = 2 * largest
        else:
            low = torch.where(valid, x, torch.inf).amin(-1, keepdim=True)
            high = torch.where(valid, x, -torch.inf).amax(-1, keepdim=True)
            if form.kind == "zero":
                low, high = low.clamp(max=0), high.clamp(min=0)
            span = high - low
        levels = 254 if form.symmetric else 2**form.bits - 1
        steps = (span / levels).clamp(min=2.0**-24 if form.half_scales else _TINY)
        if form.half_scales:
            steps = torch.maximum(steps, largest * 2.0**-10)
    error = torch.where(valid, (found - x) / steps, 0.0).square().sum(-1) / valid.sum(-1).clamp(min=1)
    return torch.nan_to_num(error.sqrt(), nan=torch.inf)
