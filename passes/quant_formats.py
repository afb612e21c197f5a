"""Weight formats, and rounding to nearest into them.

| format        | codes      | a scale for      | value of a code             |
|---------------|------------|------------------|-----------------------------|
| bf16          | bfloat16   | –                | the code                    |
| int8          | int8 ±127  | an output (f32)  | scale · code                |
| int8_g32      | int8 ±127  | 32 inputs (f16)  | scale · code  (GGUF's Q8_0) |
| int4_g32      | 0 … 15     | 32 inputs (f16)  | scale · code + offset (f16) |
| int4_g64/128  | 0 … 15     | 64, 128 inputs   | scale · code + offset (f16) |

A float offset carries GGUF's Q4_1 (offset = minimum) and Q4_0 (offset = -8 · scale) exactly, which an
integer zero point cannot. The last group of a row may be short. Rounding to nearest treats every row alone,
so quantising a concatenation along the outputs equals concatenating quantised matrices.
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

__all__ = [
    "FORMATS",
    "QuantTensor",
    "QuantisedPart",
    "QuantisedWeight",
    "WeightFormat",
    "dequantise",
    "quantise_rtn",
    "quantise_weight",
]

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Factors that the `mse` range tries on each group's end points."""

_CHUNK_BYTES = 32 << 20  # of float32 weights in flight while a matrix is rounded
_SMALLEST_NORMAL_F16 = 2.0**-14


@dataclass(frozen=True)
class WeightFormat:
    """How a stored matrix represents real weights. `group` counts inputs that share a scale; 0 is a whole row."""

    name: str
    bits: int
    group: int = 0
    symmetric: bool = True
    half_scales: bool = False

    @property
    def code_dtype(self) -> torch.dtype:
        if self.bits == 16:
            return torch.bfloat16
        return torch.int8 if self.symmetric else torch.uint8

    def groups(self, k: int) -> int:
        """Scales a row of `k` inputs has (0 where the format has no scales)."""
        if self.bits == 16:
            return 0
        return -(-k // self.group) if self.group else 1


FORMATS = {
    item.name: item
    for item in (
        WeightFormat("bf16", 16),
        WeightFormat("int8", 8),
        WeightFormat("int8_g32", 8, 32, half_scales=True),
        WeightFormat("int4_g32", 4, 32, symmetric=False, half_scales=True),
        WeightFormat("int4_g64", 4, 64, symmetric=False, half_scales=True),
        WeightFormat("int4_g128", 4, 128, symmetric=False, half_scales=True),
    )
}


@dataclass
class QuantTensor:
    """A quantised matrix, or a stack of them.

    codes [..., N, K] int8 | uint8 | bfloat16; scales, offsets [..., N, groups(K)] float32 (holding float16
    values where the format says so), or None where the format has none.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        shape = (*self.codes.shape[:-1], self.format.groups(self.codes.shape[-1]))
        wanted = {
            "scales": self.format.bits < 16,
            "offsets": self.format.bits < 16 and not self.format.symmetric,
        }
        for part, needed in wanted.items():
            table = getattr(self, part)
            if (table is not None) != needed or (table is not None and tuple(table.shape) != shape):
                found = None if table is None else list(table.shape)
                raise ValueError(
                    f"{self.format.name}: {part} {found}, wanted {list(shape) if needed else None}"
                )
        if self.codes.dtype != self.format.code_dtype:
            raise ValueError(
                f"{self.format.name}: codes of {self.codes.dtype}, wanted {self.format.code_dtype}"
            )

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets) if part is not None)


def dequantise(tensor: QuantTensor) -> Tensor:
    """Return the float32 weights [..., N, K] that the codes stand for."""
    return _dequantise(tensor.codes, tensor.scales, tensor.offsets, tensor.format.name)


def quantise_rtn(weight: Tensor, weight_format: str, search: str = "minmax") -> QuantTensor:
    """Round `weight` [..., N, K] to the nearest codes of a format.

    `search`: 'minmax' spans each group's own values; 'mse' tries SHRINKS of that span and keeps, group by group, the
    one with the least squared error. Scales and offsets are rounded to their stored precision first, and the codes are
    chosen against the rounded ones. Raises ValueError on values that are not finite, or too large for the format.
    """
    form = FORMATS[weight_format]
    if form.bits == 16:
        return QuantTensor(form, weight.to(torch.bfloat16))
    k = weight.shape[-1]
    group = form.group or k
    grouped = torch.nn.functional.pad(weight.float(), (0, -k % group)).unflatten(-1, (-1, group))
    valid = (torch.arange(grouped.shape[-2] * group) < k).view(-1, group)
    if not bool(torch.isfinite(grouped).all()):
        raise ValueError("holds values that are not finite")
    span = _symmetric if form.symmetric else _asymmetric
    codes, scales, offsets = span(grouped, valid, form, 1.0)
    if search == "mse":
        best = _squared_error(grouped, valid, codes, scales, offsets)
        for shrink in SHRINKS[1:]:
            tried = span(grouped, valid, form, shrink)
            error = _squared_error(grouped, valid, *tried)
            better = error < best
            best = torch.where(better, error, best)
            codes = torch.where(better[..., None], tried[0], codes)
            scales = torch.where(better, tried[1], scales)
            if offsets is not None and tried[2] is not None:
                offsets = torch.where(better, tried[2], offsets)
    if not bool(torch.isfinite(scales).all()) or (
        offsets is not None and not bool(torch.isfinite(offsets).all())
    ):
        raise ValueError(f"holds values too large for the float16 scales of {weight_format}")
    return QuantTensor(form, codes.flatten(-2)[..., :k].to(form.code_dtype).contiguous(), scales, offsets)


def _symmetric(x: Tensor, valid: Tensor, form: WeightFormat, shrink: float) -> tuple[Tensor, Tensor, None]:
    """codes in ±127 of x [..., G, group]; padding is zero and cannot widen the span."""
    scales = x.abs().amax(-1) * (shrink / 127)
    if form.half_scales:
        scales = _half(scales)
    codes = torch.round(x / _divisor(scales)[..., None]).clamp_(-127, 127)
    return codes, scales, None


def _asymmetric(x: Tensor, valid: Tensor, form: WeightFormat, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
    """codes in 0 … 15 with w = scale · code + offset; the scale reaches from the rounded offset up."""
    low = torch.where(valid, x, torch.inf).amin(-1)
    high = torch.where(valid, x, -torch.inf).amax(-1)
    middle, reach = (high + low) / 2, (high - low) * (shrink / 2)
    offsets = (low if shrink == 1.0 else middle - reach).half().float()
    top = high if shrink == 1.0 else middle + reach
    scales = _half(((top - offsets) / 15).clamp(min=0))
    codes = torch.round((x - offsets[..., None]) / _divisor(scales)[..., None]).clamp_(0, 15)
    return torch.where(valid & (scales > 0)[..., None], codes, 0.0), scales, offsets


def _half(scales: Tensor) -> Tensor:
    """Round to float16; below its normal range, where it is coarse, upwards, so that no code saturates."""
    nearest = scales.half().float()
    raised = torch.where(nearest < scales, nearest + 2.0**-24, nearest)
    return torch.where(scales < _SMALLEST_NORMAL_F16, raised, nearest)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _squared_error(x: Tensor, valid: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    value = codes * scales[..., None]
    if offsets is not None:
        value = value + offsets[..., None]
    return torch.where(valid, value - x, 0.0).square().sum(-1)


def quantise_weight(weight: Weight, weight_format: str, search: str = "minmax") -> QuantTensor:
    """`quantise_rtn` of a streamed weight, a few rows at a time. Raises InputError with the tensor's name."""
    rows, row_bytes = weight.shape[0], 4 * max(1, weight.numel // max(1, weight.shape[0]))
    step = max(1, _CHUNK_BYTES // row_bytes)
    parts: list[QuantTensor] = []
    try:
        whole = None if streams_rows(weight) or step >= rows else weight.load()
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = weight.load_rows(start, stop) if whole is None else whole[start:stop]
            parts.append(quantise_rtn(values, weight_format, search))
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

    def __init__(self, source: Weight, weight_format: str, search: str = "minmax") -> None:
        self.source = source
        self.format = FORMATS[weight_format]
        self.search = search
        self.name = source.name
        self.codes = QuantisedPart(self, "codes")
        scaled = self.format.bits < 16
        self.scales = QuantisedPart(self, "scales") if scaled else None
        self.offsets = QuantisedPart(self, "offsets") if scaled and not self.format.symmetric else None

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
        return quantise_weight(self.source, self.format.name, self.search)

    def __repr__(self) -> str:
        return f"QuantisedWeight({self.name}, {list(self.source.shape)}, {self.format.name})"


class QuantisedPart(Weight):
    """One part of a quantised weight: 'codes' [..., N, K], 'scales' or 'offsets' [..., N, groups(K)]."""

    def __init__(self, owner: QuantisedWeight, part: str) -> None:
        self.owner, self.part = owner, part
        *outer, k = owner.source.shape
        self.shape = (*outer, k if part == "codes" else owner.format.groups(k))
        self.dtype = owner.format.code_dtype if part == "codes" else torch.float32
        self.name = f"{owner.source.name}.{part}"

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.owner.source,)

    def load(self) -> Tensor:
        table: Tensor = getattr(self.owner.quantise(), self.part)
        return table
