"""Each stored matrix against the weights it stands for, group by group, in the steps that its format can take.

A group's step is what its own values ask for: their span over the format's levels; of a float format, twice the largest error of
rounding to nearest. Two figures of each group:

- its root mean square error. Rounding to nearest leaves half a step at most, so does the search for the least squared error,
  whatever the weights are. GPTQ and ranges by output trade a group's own error for the output's, and leave some steps;
- how far its grid (what the codes can say) reaches beyond its own values. Every method chooses grids within them, GPTQ too.

A scale of another group, a shifted offset, a permuted group are several steps, however little the logits say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enginewright.passes.quant_formats import grouped, streams_rows
from enginewright.passes.unrounded import StoredMatrix
from enginewright.recipes.formats import WeightFormat, parse_weight
from enginewright.recipes.schema import Quantise

__all__ = ["BEYOND", "MatrixError", "limit_of", "rounding_error"]

BEYOND = 0.1  # nothing but the rounding of numbers; under 1e-4 in any group of a good engine
_NEAREST = 0.55  # half a step, and what scales and offsets in fp16 add to it
_TRADED = 8.0  # GPTQ and ranges by output; at most 2.4 in any group of a good engine

_UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}
"""The largest relative error of rounding to a float format."""

_TINY = 1e-30  # where a group is zero
_CHUNK = 8 << 20  # weights looked at together


@dataclass(frozen=True)
class MatrixError:
    """The groups of a matrix that are furthest from what they stand for, in steps: by root mean square error, and by how far
    the grid reaches beyond the group's values (0 for float formats and for a checkpoint's own integers, whose grids are free).

    `relative`: ‖Ŵ - W‖ / ‖W‖ of the whole matrix."""

    name: str
    steps: float
    row: int
    group: int
    beyond: float = 0.0
    beyond_row: int = 0
    beyond_group: int = 0
    relative: float = 0.0

    def faults(self, limit: float) -> list[str]:
        """What leaves its limit, in words."""
        found = []
        if not self.steps <= limit:
            found.append(f"row {self.row}, group {self.group}: {self.steps:.3g} steps from its weights")
        if not self.beyond <= BEYOND:
            place = f"row {self.beyond_row}, group {self.beyond_group}"
            found.append(f"{place}: its grid reaches {self.beyond:.3g} steps beyond its weights")
        return found


def limit_of(quantise: Quantise) -> float:
    """The largest error of a group, in steps, that a recipe's method may leave."""
    return _TRADED if quantise.method == "gptq" or quantise.range == "output" else _NEAREST


def rounding_error(matrix: StoredMatrix, symmetric: bool = False) -> MatrixError:
    """The worst group of a stored matrix. `symmetric`: ranges are so, where offsets would allow others."""
    form = parse_weight(matrix.weight_format)
    whole = matrix.dense()
    dense = whole.reshape(-1, whole.shape[-1])
    source = matrix.rounded
    flat = len(source.shape) == 2 and streams_rows(source)
    every = None if flat else source.load().reshape(dense.shape)
    tables = None
    if form.kind != "float" and not matrix.is_kept and matrix.scales is not None:
        parts = (matrix.scales, matrix.offsets)
        tables = [None if part is None else part.load().reshape(len(dense), -1, 1) for part in parts]
    # A whole zero point, or a symmetric range of an even number of codes, lies half a step off.
    uneven = 0.5 if form.kind == "zero" or (symmetric and not form.symmetric) else 0.0
    step = max(1, _CHUNK // dense.shape[1])
    worst, widest = (-1.0, 0, 0), (0.0, 0, 0)
    lost = norm = 0.0
    for start in range(0, len(dense), step):
        here = slice(start, start + step)
        rows = source.load_rows(here.start, here.stop) if every is None else every[here]
        x, valid = grouped(rows.float(), form)
        steps, low, high = _spans(x, valid, form, symmetric)
        found, _ = grouped(dense[here], form)
        off = torch.where(valid, found - x, 0.0)
        lost += float(off.square().sum(dtype=torch.float64))
        norm += float(torch.where(valid, x, 0.0).square().sum(dtype=torch.float64))
        error = (off / steps).square().sum(-1) / valid.sum(-1).clamp(min=1)
        worst = max(worst, _largest(error.sqrt(), start))
        if tables is not None:
            scale, offset = (None if table is None else table[here] for table in tables)
            assert scale is not None
            first, last = _ends(scale, offset, form)
            beyond = torch.maximum(low - first, last - high) - _coarseness(scale, offset, form)
            widest = max(widest, _largest(beyond.div(steps)[..., 0] - uneven, start))
    return MatrixError(matrix.name, *worst, *widest, relative=(lost / max(norm, _TINY)) ** 0.5)


def _largest(values: Tensor, first_row: int) -> tuple[float, int, int]:
    """The largest of [rows, groups], with its row and group; what is no number is infinite."""
    values = torch.nan_to_num(values, nan=torch.inf)
    place = int(values.argmax())
    row, group = divmod(place, values.shape[1])
    return float(values.flatten()[place]), first_row + row, group


def _ends(scale: Tensor, offset: Tensor | None, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """The least and the largest value that codes of each group can say."""
    if offset is None:
        return -127 * scale, 127 * scale
    top = 2**form.bits - 1
    if form.kind == "zero":
        return -offset * scale, (top - offset) * scale
    return offset, offset + top * scale


def _coarseness(scale: Tensor, offset: Tensor | None, form: WeightFormat) -> Tensor | float:
    """How far scales and offsets that are stored in fp16 may move a grid's ends: half a unit of their last place, or a whole one
    where scales are below fp16's normal range, and rounded upwards."""
    if not form.half_scales:
        return 0.0
    moved = form.levels * torch.maximum(scale * 2.0**-11, torch.full_like(scale, 2.0**-24))
    if form.kind == "offset" and offset is not None:
        moved = moved + torch.maximum(offset.abs() * 2.0**-11, torch.full_like(scale, 2.0**-24))
    return moved


def _spans(x: Tensor, valid: Tensor, form: WeightFormat, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group [rows, groups, …]: a step (of a float format one for each weight), and where its values begin and end."""
    largest = x.abs().amax(-1, keepdim=True)
    if form.kind == "float":
        floor = largest * 2.0**-8 if form.name == "fp8" else torch.full_like(largest, 2.0**-24)
        return torch.maximum(x.abs() * 2 * _UNIT[form.name], floor).clamp(min=_TINY), -largest, largest
    low, high = -largest, largest
    if not (form.symmetric or symmetric):
        low = torch.where(valid, x, torch.inf).amin(-1, keepdim=True)
        high = torch.where(valid, x, -torch.inf).amax(-1, keepdim=True)
        if form.kind == "zero":
            low, high = low.clamp(max=0), high.clamp(min=0)
    steps = ((high - low) / (254 if form.symmetric else 2**form.bits - 1)).clamp(
        min=2.0**-24 if form.half_scales else _TINY
    )
    return torch.maximum(steps, largest * 2.0**-10) if form.half_scales else steps, low, high
