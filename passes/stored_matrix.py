"""Leaf weights of a checkpoint that another tool has quantised: a packed matrix, and a plain tensor beside it.

Both hold what they hold (kept.py): the recipe `keep` takes codes, scales and zero points as they are. Loading one gives
float32 values, which is what the model computes with before any format of ours; verification judges by them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from enginewright.passes.dialect.numerics import dequantise
from enginewright.passes.kept import Held, Parts, plain
from enginewright.passes.weights import CheckpointTensor, Weight
from enginewright.recipes.formats import parse_weight

__all__ = ["PlainTensor", "StoredMatrix", "group_name", "group_order"]


class StoredMatrix(Weight):
    """A matrix [N, K] of stored codes in one of our formats; `load` gives float32.

    read: codes [N, K] as the format holds them, scales [N, G] and zero points [N, G] or None, in the checkpoint's order
    of inputs. scales: the checkpoint's own table, to see whether float16 holds it. input_order [K]: `parts` has
    the inputs in this order, which makes groups contiguous; None leaves them. activation: how the checkpoint's
    products round their inputs, where it says so (`activation_scale` with `int8_static`).
    """

    dtype = torch.float32

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        weight_format: str,
        found: str,
        read: Callable[[], Parts],
        scales: Weight,
        *,
        input_order: Tensor | None = None,
        activation: str | None = None,
        activation_scale: float = 0.0,
    ) -> None:
        self.name, self.shape, self.found = name, tuple(shape), found
        self.form = parse_weight(weight_format)
        self.input_order = input_order
        self._read, self._scales = read, scales
        self._activation, self._activation_scale = activation, activation_scale

    @cached_property
    def held(self) -> Held:
        kept = exact = True
        if self.form.half_scales and self._scales.dtype != torch.float16:
            wanted = self._scales.load().float()
            rounded = wanted.half().float()
            exact = torch.equal(rounded, wanted)
            kept = bool(((rounded - wanted).abs() <= wanted.abs() * 2.0**-11).all())
        return Held(self.found, self.form.name, kept, exact, self._activation, self._activation_scale)

    def load(self) -> Tensor:
        codes, scales, zeros = self._ordered()
        values = dequantise(codes, scales, zeros, self.form.name)
        if self.input_order is None:
            return values
        stored = torch.empty_like(values)
        stored[:, self.input_order] = values
        return stored

    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        table = (self.shape[0], self.form.groups(self.shape[1]))
        return (self.shape, table, table) if self.form.has_offsets else (self.shape, table)

    def parts(self) -> Parts:
        codes, scales, zeros = self._ordered()
        assert scales is not None
        return codes, scales.half().float() if self.form.half_scales else scales, zeros

    def _ordered(self) -> Parts:
        codes, scales, zeros = self._read()
        return (codes if self.input_order is None else codes[:, self.input_order]), scales, zeros


class PlainTensor(CheckpointTensor):
    """A tensor that the tool left as it was."""

    @classmethod
    def of(cls, tensor: Weight) -> Weight:
        """The tensor, saying what it holds; anything but a floating checkpoint tensor is itself."""
        if not isinstance(tensor, CheckpointTensor) or not tensor.dtype.is_floating_point:
            return tensor
        return cls(tensor.name, tensor.shape, tensor.dtype, tensor.reader, tensor.key)

    @property
    def held(self) -> Held:
        return plain(self)

    def part_shapes(self) -> None:
        return None

    def parts(self) -> Parts:
        return self.load(), None, None


def group_name(codes: str, group: int, zero_points: bool) -> str:
    """A format's name: group 0 is one scale a channel. Raises ValueError for a group that no format has."""
    name = f"{codes}{f'_g{group}' if group else ''}{'_zp' if zero_points else ''}"
    return parse_weight(name).name


def group_order(group_of: Tensor, group: int) -> Tensor | None:
    """The order of inputs that makes groups contiguous, from each input's group [K]; None where they are so already.

    Raises ValueError where the groups are not of `group` inputs each (the last may be short).
    """
    k = len(group_of)
    natural = torch.arange(k) // group
    group_of = group_of.long()
    if torch.equal(group_of, natural):
        return None
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order], natural):
        _, counts = group_of.unique(return_counts=True)
        raise ValueError(f"groups of {int(counts.min())} to {int(counts.max())} inputs")
    return order
