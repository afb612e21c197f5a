"""Quantised matrices, and rounding to nearest into any format of `recipes/formats.py`.

Rounding to nearest treats every row alone, so quantising a concatenation along the outputs equals concatenating
quantised matrices. The last group of a row may be short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from enginewright.passes.dialect.numerics import dequantise as _dequantise
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import WeightFormat, parse_weight

__all__ = [
    "Grid",
    "QuantTensor",
    "QuantisedPart",
    "QuantisedWeight",
    "code_dtype",
    "dequantise",
    "fit_grid",
    "grouped",
    "quantise_rtn",
    "quantise_weight",
]

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Factors that the `mse` range tries on each group's end points."""

_CHUNK_BYTES = 32 << 20  # of float32 weights in flight while a matrix is rounded
_SMALLEST_NORMAL_F16 = 2.0**-14
_LARGEST_E4M3 = 448.0


def code_dtype(form: WeightFormat) -> torch.dtype:
    """What the codes of a format are held in."""
    if form.kind == "float":
        return {
            "f32": torch.float32,
            "f16": torch.float16,
            "bf16": torch.bfloat16,
            "fp8": torch.float8_e4m3fn,
        }[form.name]
    return torch.int8 if form.symmetric else torch.uint8


@dataclass
class QuantTensor:
    """A quantised matrix, or a stack of them.

    codes [..., N, K] int8 | uint8 | float16 | bfloat16 | float8_e4m3fn; scales, offsets [..., N, groups(K)] float32 (holding
    float16 values where the format says so), or None where the format has none. `offsets` are zero points in `_zp` formats.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        shape = (*self.codes.shape[:-1], self.format.groups(self.codes.shape[-1]))
        wanted = {
            "scales": self.format.has_scales,
            "offsets": self.format.has_offsets,
        }
        for part, needed in wanted.items():
            table = getattr(self, part)
            if (table is not None) != needed or (table is not None and tuple(table.shape) != shape):
                found = None if table is None else list(table.shape)
                raise ValueError(
                    f"{self.format.name}: {part} {found}, wanted {list(shape) if needed else None}"
                )
        if self.codes.dtype != code_dtype(self.format):
            raise ValueError(
                f"{self.format.name}: codes of {self.codes.dtype}, wanted {code_dtype(self.format)}"
            )

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets) if part is not None)


def dequantise(tensor: QuantTensor) -> Tensor:
    """Return the float32 weights [..., N, K] that the codes stand for."""
    return _dequantise(tensor.codes, tensor.scales, tensor.offsets, tensor.format.name)


@dataclass
class Grid:
    """The values that groups of weights can take: scale · code + offset, or scale · (code - zero), or scale · code.

    scales, offsets (or zero points) [..., groups] float32 as they will be stored; offsets None for symmetric formats.
    """

    format: WeightFormat
    scales: Tensor
    offsets: Tensor | None

    def codes(self, x: Tensor) -> Tensor:
        """The nearest codes (float32) of x [..., groups, members]."""
        scale = _divisor(self.scales)[..., None]
        if self.offsets is None:
            return torch.round(x / scale).clamp_(-127, 127)
        shift = self.offsets[..., None]
        top = 2**self.format.bits - 1
        if self.format.kind == "zero":
            codes = torch.round(x / scale + shift).clamp_(0, top)
            return torch.where((self.scales > 0)[..., None], codes, torch.round(shift).clamp(0, top))
        codes = torch.round((x - shift) / scale).clamp_(0, top)
        return torch.where((self.scales > 0)[..., None], codes, 0.0)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [..., groups, members] stand for, float32."""
        scale = self.scales[..., None]
        if self.offsets is None:
            return codes * scale
        shift = self.offsets[..., None]
        return (codes - shift) * scale if self.format.kind == "zero" else codes * scale + shift

    def where(self, mask: Tensor, other: Grid) -> Grid:
        """This grid where mask [..., groups] holds, else the other."""
        offsets = None
        if self.offsets is not None and other.offsets is not None:
            offsets = torch.where(mask, self.offsets, other.offsets)
        return Grid(self.format, torch.where(mask, self.scales, other.scales), offsets)

    def select(self, index: Tensor) -> Grid:
        """The grids of some groups (the last axis)."""
        offsets = None if self.offsets is None else self.offsets.index_select(-1, index)
        return Grid(self.format, self.scales.index_select(-1, index), offsets)


def grouped(x: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """x [..., K] as groups [..., G, members], padded with zeros, and which members are real: bool [G, members]."""
    k = x.shape[-1]
    group = form.group or k
    padded = torch.nn.functional.pad(x.float(), (0, -k % group)).unflatten(-1, (-1, group))
    valid = (torch.arange(padded.shape[-2] * group) < k).view(-1, group)
    return padded, valid


def fit_grid(
    x: Tensor, valid: Tensor, form: WeightFormat, *, shrink: float = 1.0, symmetric: bool = False
) -> Grid:
    """The grid that spans groups x [..., G, members] (those that are `valid`), its span shrunk by a factor.

    symmetric: the span is ± the largest magnitude, also where the format could do better.
    """
    if form.symmetric:
        scales = x.abs().amax(-1) * (shrink / 127)  # padding is zero and widens nothing
        return Grid(form, _half(scales) if form.half_scales else scales, None)
    top = 2**form.bits - 1
    if symmetric:
        middle = 2.0 ** (form.bits - 1)
        # The grid reaches one step further down than up: a span of ±(top / 2) steps uses all codes.
        scales = _half(x.abs().amax(-1) * (shrink * 2 / top))
        zeros = torch.full_like(scales, middle)
        return Grid(form, scales, zeros if form.kind == "zero" else -middle * scales)
    low = torch.where(valid, x, torch.inf).amin(-1)
    high = torch.where(valid, x, -torch.inf).amax(-1)
    if form.kind == "zero":
        low, high = low.clamp(max=0), high.clamp(min=0)  # zero must lie on the grid
        scales = _half((high - low) * (shrink / top))
        zeros = torch.round(-low * shrink / _divisor(scales)).clamp_(0, top)
        return Grid(form, scales, zeros)
    centre, reach = (high + low) / 2, (high - low) * (shrink / 2)
    offsets = (low if shrink == 1.0 else centre - reach).half().float()
    end = high if shrink == 1.0 else centre + reach
    return Grid(form, _half(((end - offsets) / top).clamp(min=0)), offsets)


def quantise_rtn(
    weight: Tensor, weight_format: str, search: str = "minmax", symmetric: bool = False
) -> QuantTensor:
    """Round `weight` [..., N, K] to the nearest codes of a format.

    `search`: 'minmax' spans each group's own values; 'mse' tries SHRINKS of that span and keeps, group by group, the
    one with the least squared error. Scales and offsets are rounded to their stored precision first, and the codes are
    chosen against the rounded ones. Raises ValueError on values that are not finite, or too large for the format.
    """
    form = parse_weight(weight_format)
    if form.name in ("f32", "bf16"):
        return QuantTensor(form, weight.to(code_dtype(form)))
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("holds values that are not finite")
    if form.name == "f16":
        codes = weight.to(torch.float16)
        if not bool(torch.isfinite(codes).all()):
            raise ValueError(f"holds values beyond float16's {torch.finfo(torch.float16).max:,.0f}")
        return QuantTensor(form, codes)
    if form.name == "fp8":
        scales = weight.float().abs().amax(-1, keepdim=True) / _LARGEST_E4M3
        codes = (weight.float() / _divisor(scales)).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3)
        return QuantTensor(form, codes.to(torch.float8_e4m3fn), scales)
    x, valid = grouped(weight, form)
    grid = fit_grid(x, valid, form, symmetric=symmetric)
    if search == "mse":
        best = _squared_error(x, valid, grid)
        for shrink in SHRINKS[1:]:
            tried = fit_grid(x, valid, form, shrink=shrink, symmetric=symmetric)
            error = _squared_error(x, valid, tried)
            better = error < best
            best = torch.where(better, error, best)
            grid = tried.where(better, grid)
    return from_grid(grid, torch.where(valid, grid.codes(x), 0.0), weight.shape[-1])


def from_grid(grid: Grid, codes: Tensor, k: int) -> QuantTensor:
    """A matrix of codes [..., G, members] on a grid. Raises ValueError where scales are too large for their format."""
    tables = [grid.scales] if grid.offsets is None else [grid.scales, grid.offsets]
    if not all(bool(torch.isfinite(table).all()) for table in tables):
        raise ValueError(f"holds values too large for the float16 scales of {grid.format.name}")
    flat = codes.flatten(-2)[..., :k].to(code_dtype(grid.format)).contiguous()
    return QuantTensor(
        grid.format,
        flat,
        grid.scales.contiguous(),
        None if grid.offsets is None else grid.offsets.contiguous(),
    )


def _half(scales: Tensor) -> Tensor:
    """Round to float16; below its normal range, where it is coarse, upwards, so that no code saturates."""
    nearest = scales.half().float()
    raised = torch.where(nearest < scales, nearest + 2.0**-24, nearest)
    return torch.where(scales < _SMALLEST_NORMAL_F16, raised, nearest)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _squared_error(x: Tensor, valid: Tensor, grid: Grid) -> Tensor:
    return torch.where(valid, grid.values(grid.codes(x)) - x, 0.0).square().sum(-1)


def quantise_weight(
    weight: Weight, weight_format: str, search: str = "minmax", symmetric: bool = False
) -> QuantTensor:
    """`quantise_rtn` of a streamed weight, a few rows at a time. Raises InputError with the tensor's name."""
    rows, row_bytes = weight.shape[0], 4 * max(1, weight.numel // max(1, weight.shape[0]))
    step = max(1, _CHUNK_BYTES // row_bytes)
    parts: list[QuantTensor] = []
    try:
        whole = None if streams_rows(weight) or step >= rows else weight.load()
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = weight.load_rows(start, stop) if whole is None else whole[start:stop]
            parts.append(quantise_rtn(values, weight_format, search, symmetric))
    except ValueError as error:
        raise InputError(
            f"tensor '{weight.name}' {error}", action="keep it in f32 or bf16 with an override"
        ) from error
    return concatenate(parts)


def streams_rows(weight: Weight) -> bool:
    """Whether `load_rows` reads only those rows (a transposed matrix is loaded whole each time)."""
    return type(weight).load_rows is not Weight.load_rows and all(map(streams_rows, weight.sources))


def concatenate(tensors: Sequence[QuantTensor], dim: int = 0) -> QuantTensor:
    """Join matrices of one format along an axis that is not the inputs (K)."""
    if len(tensors) == 1:
        return tensors[0]

    def join(parts: list[Tensor | None]) -> Tensor | None:
        held = [part for part in parts if part is not None]
        return torch.cat(held, dim) if held else None

    codes = torch.cat([item.codes for item in tensors], dim)
    scales = join([item.scales for item in tensors])
    return QuantTensor(tensors[0].format, codes, scales, join([item.offsets for item in tensors]))


class QuantisedWeight:
    """A weight [..., N, K] and the format it will be stored in; nothing is computed before a part is loaded.

    `codes`, `scales` and `offsets` are the parts as Weights (None where the format has none). The last few
    results are remembered, so that loading one matrix's parts one after another rounds it once.
    """

    _recent: ClassVar[OrderedDict[int, tuple[QuantisedWeight, QuantTensor]]] = OrderedDict()
    _RECENT_BYTES = 256 << 20

    def __init__(
        self, source: Weight, weight_format: str, search: str = "minmax", symmetric: bool = False
    ) -> None:
        self.source = source
        self.format = parse_weight(weight_format)
        self.search, self.symmetric = search, symmetric
        self.name = source.name
        self.codes = QuantisedPart(self, "codes")
        self.scales = QuantisedPart(self, "scales") if self.format.has_scales else None
        self.offsets = QuantisedPart(self, "offsets") if self.format.has_offsets else None

    def quantise(self) -> QuantTensor:
        """Stream the source and round it (or return the result that is still remembered)."""
        recent = QuantisedWeight._recent
        if id(self) in recent:
            return recent[id(self)][1]
        result = self.compute()
        recent[id(self)] = (self, result)
        while len(recent) > 1 and sum(item.nbytes for _, item in recent.values()) > self._RECENT_BYTES:
            recent.popitem(last=False)
        return result

    def compute(self) -> QuantTensor:
        return quantise_weight(self.source, self.format.name, self.search, self.symmetric)

    def __repr__(self) -> str:
        return f"QuantisedWeight({self.name}, {list(self.source.shape)}, {self.format.name})"


class QuantisedPart(Weight):
    """One part of a quantised weight: 'codes' [..., N, K], 'scales' or 'offsets' [..., N, groups(K)]."""

    def __init__(self, owner: QuantisedWeight, part: str) -> None:
        self.owner, self.part = owner, part
        *outer, k = owner.source.shape
        self.shape = (*outer, k if part == "codes" else owner.format.groups(k))
        self.dtype = code_dtype(owner.format) if part == "codes" else torch.float32
        self.name = f"{owner.source.name}.{part}"

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.owner.source,)

    def load(self) -> Tensor:
        table: Tensor = getattr(self.owner.quantise(), self.part)
        return table
