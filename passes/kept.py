"""Integers that a checkpoint already holds, carried through the graph's rearrangements without being touched.

A leaf weight that holds integers says so with `held` and gives them with `parts()`. Where the model's
layout follows from the checkpoint's by moving rows (slicing, concatenating, stacking, permuting,
transposing back), codes, scales and offsets move alike, and the integers arrive unchanged. Anything else
(arithmetic, a cut through a group) loses them: the values are then rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from enginewright.passes.quant_formats import QuantisedWeight, QuantTensor
from enginewright.passes.weights import Concatenated, Permuted, Reshaped, Sliced, Stacked, Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import parse_weight

__all__ = [
    "Held",
    "HoldsIntegers",
    "KeptWeight",
    "Parts",
    "held",
    "input_order",
    "movable",
    "plain",
    "widest",
]

_WIDTH_AT = 4096  # inputs of the row whose bits say which of two formats is wider

Parts = tuple[Tensor, "Tensor | None", "Tensor | None"]
"""codes, scales, offsets, each with the axis of the inputs where the stored matrix has it."""


@dataclass(frozen=True)
class Held:
    """What a checkpoint's tensor is stored as (`found`) and the format nearest to it.

    `kept`: the stored codes serve as they are. `exact`: so do the scales (else they are rounded to float16).
    `activation`: how the checkpoint rounds the inputs of products with it (None: it does not say), with the scale of
    `int8_static`.
    """

    found: str
    format: str
    kept: bool
    exact: bool = True
    activation: str | None = None
    activation_scale: float = 0.0


_PLAIN = {
    torch.float32: Held("F32", "f32", kept=True),
    torch.float64: Held("F64", "f32", kept=False),
    torch.bfloat16: Held("BF16", "bf16", kept=True),
    torch.float16: Held("F16", "bf16", kept=False),
}


@runtime_checkable
class HoldsIntegers(Protocol):
    """A leaf weight of a quantised checkpoint.

    A leaf may have `input_order` [K]: its parts then have the inputs in that order (GPTQ's groups by activation).
    """

    @property
    def held(self) -> Held: ...

    def parts(self) -> Parts: ...

    def part_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """Shapes of the parts, or None when the integers cannot be taken as they are."""


def held(weight: Weight) -> Held | None:
    """What the leaves of a weight are stored as; None where one is not from a quantised checkpoint."""
    leaves = list(weight.leaves())
    kinds = [leaf.held for leaf in leaves if isinstance(leaf, HoldsIntegers)]
    if len(kinds) != len(leaves):
        return None
    kind = widest(kinds)
    has_codes = parse_weight(kind.format).has_scales
    return replace(kind, kept=kind.kept and (not has_codes or movable(weight, kind.format)))


def plain(weight: Weight) -> Held:
    """What a tensor of real numbers is stored as. float16 goes to bf16: as small, and its range covers float16's."""
    return _PLAIN.get(weight.dtype, _PLAIN[torch.float32])


def widest(kinds: Sequence[Held]) -> Held:
    """One answer for matrices that must share a format: kept if all agree, else the widest, rounded again."""
    if len(set(kinds)) == 1:
        return kinds[0]
    found = " and ".join(sorted({kind.found for kind in kinds}))
    wide = max(
        (kind.format for kind in kinds), key=lambda name: parse_weight(name).bits_per_weight(_WIDTH_AT)
    )
    return Held(found, wide, False)


def input_order(weight: Weight) -> Tensor | None:
    """The order [K] in which the parts of a weight have its inputs; None for the natural one.

    Raises ValueError where its leaves disagree.
    """
    orders = [
        getattr(leaf, "input_order", None) for leaf in weight.leaves() if isinstance(leaf, HoldsIntegers)
    ]
    first = orders[0] if orders else None
    for order in orders[1:]:
        same = order is first if order is None or first is None else torch.equal(order, first)
        if not same:
            raise ValueError(f"the matrices of {weight.name} have their inputs in different orders")
    return first


def movable(weight: Weight, weight_format: str) -> bool:
    """Whether the integers of the leaves can be brought into the weight's layout by moving rows."""
    try:
        input_order(weight)
        codes, scales, _ = _move(weight, _meta_leaf)
    except (_LosesIntegersError, ValueError):
        return False
    groups = parse_weight(weight_format).groups(weight.shape[-1])
    return tuple(codes.shape) == weight.shape and (
        scales is None or scales.shape == (*weight.shape[:-1], groups)
    )


class KeptWeight(QuantisedWeight):
    """A weight whose integers are the checkpoint's own; `movable(source)` must hold."""

    def compute(self) -> QuantTensor:
        """The parts as they are. Raises InputError for scales or offsets that are no numbers."""
        codes, scales, offsets = _move(self.source, lambda leaf: leaf.parts())
        for table in (scales, offsets):
            strange = 0 if table is None else int((~table.isfinite()).sum())
            if table is not None and strange:
                raise InputError(
                    f"the packed matrix {self.name} has scales that are not finite",
                    found=f"{strange} of {table.numel()}",
                    action="copy or download the checkpoint again",
                )
        return QuantTensor(
            self.format,
            codes.contiguous(),
            None if scales is None else scales.contiguous(),
            None if offsets is None else offsets.contiguous(),
        )


class _LosesIntegersError(Exception):
    pass


def _meta_leaf(leaf: HoldsIntegers) -> Parts:
    shapes = leaf.part_shapes()
    if shapes is None:
        raise _LosesIntegersError
    codes, *tables = (torch.empty(shape, device="meta") for shape in shapes)
    return codes, tables[0] if tables else None, tables[1] if len(tables) > 1 else None


def _move(weight: Weight, of_leaf: Callable[[HoldsIntegers], Parts]) -> Parts:
    """Parts of an expression, by doing to each part what the expression does to the matrix."""
    if isinstance(weight, HoldsIntegers):
        return of_leaf(weight)
    if isinstance(weight, Permuted):
        return _each(_move(weight.source, of_leaf), lambda part: part.permute(weight.axes))
    if isinstance(weight, Sliced):
        index: list[slice] = [slice(None)] * len(weight.shape)
        index[weight.dim] = slice(weight.start, weight.stop, weight.step)
        inner = _move(weight.source, of_leaf)
        if weight.dim == len(weight.shape) - 1 and inner[0].shape[-1] != 1:
            raise _LosesIntegersError
        return _each(inner, lambda part: part[tuple(index)])
    if isinstance(weight, Reshaped) and weight.shape[-1] == weight.source.shape[-1]:
        return _each(
            _move(weight.source, of_leaf), lambda part: part.reshape(*weight.shape[:-1], part.shape[-1])
        )
    if isinstance(weight, (Concatenated, Stacked)):
        several = [_move(part, of_leaf) for part in weight.parts]
        if isinstance(weight, Stacked):
            return _join(several, torch.stack)
        return _join(several, lambda parts: torch.cat(parts, weight.dim))
    raise _LosesIntegersError


def _each(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    codes, scales, offsets = parts
    return (
        change(codes),
        None if scales is None else change(scales),
        None if offsets is None else change(offsets),
    )


def _join(several: list[Parts], join: Callable[[list[Tensor]], Tensor]) -> Parts:
    codes, scales, offsets = zip(*several, strict=True)

    def table(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        if present and len(present) != len(parts):
            raise _LosesIntegersError
        return join(present) if present else None

    return join(list(codes)), table(scales), table(offsets)
