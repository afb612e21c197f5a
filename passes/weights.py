"""Weights that are not there yet: a shape, a dtype, and a way to stream the values when someone asks.

A `Weight` is an immutable expression. Its leaves read one tensor of a checkpoint or hold a small constant;
its inner nodes (transpose, concatenate, stack, slice …) describe how the model's layout follows from the
checkpoint's. `load()` evaluates the expression and keeps nothing, so that a model larger than the spare
memory can be processed tensor by tensor.

Rewrites should use the functions at the end (`transposed`, `sliced`, …): they fold trivial cases, so that two routes to
the same tensor give short expressions and a reader that streams (`load_rows`) touches only the bytes it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

__all__ = [
    "CheckpointTensor", "Computed", "Concatenated", "ConstantTensor", "Permuted", "Reshaped", "Scaled",
    "ScaledAlong", "Sliced", "Stacked", "TensorReader", "Transposed", "Weight", "concatenated", "permuted",
    "reshaped", "scaled_along", "sliced", "stacked", "transposed",
]  # fmt: skip


class TensorReader(Protocol):
    """Reads named tensors of one file."""

    def read(self, key: str) -> torch.Tensor: ...

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor: ...


class Weight:
    """A tensor by name, shape and dtype whose values are produced on request.

    `name` is the tensor's name in the checkpoint (for a derived weight, of what it is made of): for messages and patterns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> torch.Tensor:
        """The values, on the CPU, with this shape and dtype. Treat the result as read only: it may be a view of a mapped file."""
        raise NotImplementedError

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` along the first axis."""
        return self.load()[start:stop]

    @property
    def sources(self) -> tuple[Weight, ...]:
        """The weights that this expression reads; empty for a leaf."""
        return ()

    def leaves(self) -> Iterator[Weight]:
        """Every leaf of the expression, left to right."""
        if not self.sources:
            yield self
        for source in self.sources:
            yield from source.leaves()

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def meta(self) -> torch.Tensor:
        """A meta tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.name}, {list(self.shape)}, {dtype})"


class CheckpointTensor(Weight):
    """One tensor of one checkpoint file."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        reader: TensorReader,
        key: str | None = None,
    ):
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.reader = reader
        self.key = name if key is None else key

    def load(self) -> torch.Tensor:
        return self.reader.read(self.key)

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.reader.read_rows(self.key, start, stop)


class ConstantTensor(Weight):
    """A value held in memory: a buffer computed from the configuration, or a number folded by a pass."""

    def __init__(self, name: str, value: torch.Tensor):
        self.name = name
        self.value = value.detach()
        self.shape = tuple(value.shape)
        self.dtype = value.dtype

    def load(self) -> torch.Tensor:
        return self.value


class Computed(Weight):
    """Values given by a function of no arguments, evaluated at each load (a table too large to keep)."""

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, compute: Callable[[], torch.Tensor]
    ):
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.compute = compute

    def load(self) -> torch.Tensor:
        return self.compute()


class _Derived(Weight):
    """An expression over one source."""

    def __init__(self, source: Weight, shape: Sequence[int], name: str | None = None):
        self.source = source
        self.shape = tuple(shape)
        self.dtype = source.dtype
        self.name = source.name if name is None else name

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.source,)


class Permuted(_Derived):
    """The source with its axes in another order: result axis i is the source's axis `axes[i]`."""

    def __init__(self, source: Weight, axes: Sequence[int], name: str | None = None):
        super().__init__(source, [source.shape[a] for a in axes], name)
        self.axes = tuple(axes)

    def load(self) -> torch.Tensor:
        return self.source.load().permute(self.axes)


class Transposed(Permuted):
    """A matrix with its two axes exchanged."""

    def __init__(self, source: Weight, name: str | None = None):
        super().__init__(source, (1, 0), name)


class Reshaped(_Derived):
    """The source's values in row-major order under another shape."""

    def __init__(self, source: Weight, shape: Sequence[int], name: str | None = None):
        super().__init__(source, shape, name)
        if self.numel != source.numel:
            raise ValueError(f"cannot reshape {source} to {list(shape)}")

    def load(self) -> torch.Tensor:
        return self.source.load().reshape(self.shape)


class Sliced(_Derived):
    """`start:stop:step` along one axis of the source."""

    def __init__(
        self, source: Weight, dim: int, start: int, stop: int, step: int = 1, name: str | None = None
    ):
        shape = list(source.shape)
        shape[dim] = len(range(start, stop, step))
        super().__init__(source, shape, name)
        self.dim, self.start, self.stop, self.step = dim, start, stop, step

    def load(self) -> torch.Tensor:
        if self.dim == 0 and self.step == 1:
            return self.source.load_rows(self.start, self.stop)
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.start, self.stop, self.step)
        return self.source.load()[tuple(index)]

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        if self.dim == 0 and self.step == 1:
            return self.source.load_rows(self.start + start, self.start + stop)
        return self.load()[start:stop]


class Scaled(_Derived):
    """The source times a number, computed in float32 and rounded back to the source's dtype."""

    def __init__(self, source: Weight, factor: float, name: str | None = None):
        super().__init__(source, source.shape, name)
        self.factor = factor

    def load(self) -> torch.Tensor:
        return (self.source.load().float() * self.factor).to(self.dtype)

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        return (self.source.load_rows(start, stop).float() * self.factor).to(self.dtype)


class ScaledAlong(_Derived):
    """(source + offset) · factors, one factor a position of axis `dim`; computed in float32, and float32 it stays."""

    def __init__(
        self,
        source: Weight,
        dim: int,
        factors: torch.Tensor,
        offset: float = 0.0,
        name: str | None = None,
    ):
        super().__init__(source, source.shape, name)
        self.dtype = torch.float32
        self.dim = dim % len(source.shape)
        self.factors = factors.detach().float()
        self.offset = offset

    def load(self) -> torch.Tensor:
        return self._scaled(self.source.load(), self.factors)

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        factors = self.factors[start:stop] if self.dim == 0 else self.factors
        return self._scaled(self.source.load_rows(start, stop), factors)

    def _scaled(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        wide = values.float() + self.offset if self.offset else values.float()
        return wide * factors.reshape(-1, *[1] * (len(self.shape) - 1 - self.dim))


class _Joined(Weight):
    """An expression over several sources of one dtype."""

    def __init__(self, parts: Sequence[Weight], shape: Sequence[int], name: str | None):
        if not parts:
            raise ValueError("nothing to join")
        self.parts = tuple(parts)
        self.shape = tuple(shape)
        self.dtype = parts[0].dtype
        for part in parts[1:]:
            self.dtype = torch.promote_types(self.dtype, part.dtype)
        self.name = parts[0].name if name is None else name

    @property
    def sources(self) -> tuple[Weight, ...]:
        return self.parts

    def _load_parts(self) -> list[torch.Tensor]:
        return [part.load().to(self.dtype) for part in self.parts]


class Concatenated(_Joined):
    """The parts one after another along an existing axis."""

    def __init__(self, parts: Sequence[Weight], dim: int = 0, name: str | None = None):
        shape = list(parts[0].shape)
        for part in parts[1:]:
            if len(part.shape) != len(shape) or any(
                part.shape[i] != parts[0].shape[i] for i in range(len(shape)) if i != dim
            ):
                raise ValueError(f"cannot concatenate {parts[0]} and {part} along axis {dim}")
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(parts, shape, name)
        self.dim = dim

    def load(self) -> torch.Tensor:
        return torch.cat(self._load_parts(), self.dim)

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        if self.dim != 0:
            return torch.cat([p.load_rows(start, stop).to(self.dtype) for p in self.parts], self.dim)
        pieces, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.shape[0])
            if low < high:
                pieces.append(part.load_rows(low, high).to(self.dtype))
            first += part.shape[0]
        return torch.cat(pieces) if pieces else torch.empty((0, *self.shape[1:]), dtype=self.dtype)


class Stacked(_Joined):
    """The parts along a new first axis, as experts are: `load_rows(e, e + 1)` reads one expert alone."""

    def __init__(self, parts: Sequence[Weight], name: str | None = None):
        for part in parts[1:]:
            if part.shape != parts[0].shape:
                raise ValueError(f"cannot stack {parts[0]} and {part}")
        super().__init__(parts, (len(parts), *parts[0].shape), name)

    def load(self) -> torch.Tensor:
        return torch.stack(self._load_parts())

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.stack([part.load().to(self.dtype) for part in self.parts[start:stop]])


def transposed(weight: Weight, name: str | None = None) -> Weight:
    """The transposed matrix; a transposition of a transposition is its source."""
    if isinstance(weight, Transposed):
        return weight.source
    return Transposed(weight, name)


def permuted(weight: Weight, axes: Sequence[int], name: str | None = None) -> Weight:
    """Axes in another order; the identity is the weight itself."""
    if tuple(axes) == tuple(range(len(weight.shape))):
        return weight
    return transposed(weight, name) if tuple(axes) == (1, 0) else Permuted(weight, axes, name)


def reshaped(weight: Weight, shape: Sequence[int], name: str | None = None) -> Weight:
    """Another shape over the same values; the same shape is the weight itself."""
    return weight if tuple(shape) == weight.shape else Reshaped(weight, shape, name)


def sliced(weight: Weight, dim: int, start: int, stop: int, step: int = 1, name: str | None = None) -> Weight:
    """A range along one axis. The whole range is the weight; a part of a concatenation is the part."""
    stop = min(stop, weight.shape[dim])
    if (start, stop, step) == (0, weight.shape[dim], 1):
        return weight
    if isinstance(weight, Concatenated) and weight.dim == dim and step == 1:
        first = 0
        for part in weight.parts:
            if first <= start and stop <= first + part.shape[dim] and part.dtype == weight.dtype:
                return sliced(part, dim, start - first, stop - first)
            first += part.shape[dim]
    return Sliced(weight, dim, start, stop, step, name)


def concatenated(parts: Sequence[Weight], dim: int = 0, name: str | None = None) -> Weight:
    """The parts along an axis; one part alone is itself."""
    return parts[0] if len(parts) == 1 else Concatenated(parts, dim, name)


def stacked(parts: Sequence[Weight], name: str | None = None) -> Weight:
    """The parts along a new first axis."""
    return Stacked(parts, name)


def scaled_along(weight: Weight, dim: int, factors: torch.Tensor, offset: float = 0.0) -> Weight:
    """(weight + offset) times a vector along one axis. However often it is scaled, an axis keeps one vector."""
    dim %= len(weight.shape)
    if tuple(factors.shape) != (weight.shape[dim],):
        raise ValueError(f"cannot scale axis {dim} of {weight} by {list(factors.shape)} factors")
    if isinstance(weight, ScaledAlong) and not offset:
        if weight.dim == dim:
            return ScaledAlong(weight.source, dim, weight.factors * factors, weight.offset, weight.name)
        if not weight.offset:
            inner = scaled_along(weight.source, dim, factors)
            return ScaledAlong(inner, weight.dim, weight.factors, name=weight.name)
    return ScaledAlong(weight, dim, factors, offset)
