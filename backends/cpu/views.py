"""Feature tensors as strided views into rows: what reshapes, slices and transposes become instead of copies.

A view describes one token's part of a graph value: `shape` and `strides` (in elements) leave the token axis
out. The functions below return another view of the same memory, or None where only a copy can do it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = [
    "View",
    "contiguous_strides",
    "expanded",
    "merged_axes",
    "permuted",
    "reshaped",
    "selected",
    "sliced",
]


@dataclass(frozen=True)
class View:
    """`source`: ("value", index), ("weight", index) or ("input", name). `rows` is "" for a weight."""

    source: tuple[str, int | str]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    column: int = 0
    dtype: str = "f32"
    rows: str = "tokens"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are consecutive columns in row-major order."""
        expected = contiguous_strides(self.shape)
        return all(
            extent == 1 or stride == want
            for extent, stride, want in zip(self.shape, self.strides, expected, strict=True)
        )

    @property
    def reach(self) -> int:
        """One past the last column that the view touches."""
        return self.column + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def permuted(view: View, order: Sequence[int]) -> View:
    return replace(
        view, shape=tuple(view.shape[a] for a in order), strides=tuple(view.strides[a] for a in order)
    )


def selected(view: View, axis: int, index: int) -> View:
    """Drop an axis by taking one index of it."""
    shape, strides = list(view.shape), list(view.strides)
    extent, stride = shape.pop(axis), strides.pop(axis)
    return replace(
        view, shape=tuple(shape), strides=tuple(strides), column=view.column + index % extent * stride
    )


def sliced(view: View, axis: int, start: int, stop: int, step: int = 1) -> View:
    """`start:stop:step` of one axis, with Python's meaning of negative and large ends; step > 0."""
    indices = range(view.shape[axis])[start:stop:step]
    shape, strides = list(view.shape), list(view.strides)
    column = view.column + (indices.start if len(indices) else 0) * strides[axis]
    shape[axis], strides[axis] = len(indices), strides[axis] * step
    return replace(view, shape=tuple(shape), strides=tuple(strides), column=column)


def expanded(view: View, shape: Sequence[int]) -> View:
    """Broadcast to `shape`, aligned at the right."""
    missing = len(shape) - len(view.shape)
    if missing < 0:
        raise ValueError(f"cannot broadcast {list(view.shape)} to {list(shape)}")
    strides = [0] * missing
    for have, stride, want in zip(view.shape, view.strides, shape[missing:], strict=True):
        if have not in (want, 1):
            raise ValueError(f"cannot broadcast {list(view.shape)} to {list(shape)}")
        strides.append(stride if have == want and have != 1 else 0)
    return replace(view, shape=tuple(shape), strides=tuple(strides))


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """The same elements in row-major order under another shape; None where the strides do not allow it."""
    shape = tuple(shape)
    runs, (steps,) = merged_axes(view.shape, [view.strides])  # each run is walked with one stride
    strides: list[int] = []
    axis = 0
    for run, step in zip(runs, steps, strict=True):
        first, product = axis, 1
        while axis < len(shape) and (product < run or shape[axis] == 1):
            product *= shape[axis]
            axis += 1
        if product != run:
            return None
        strides += [step * inner for inner in contiguous_strides(shape[first:axis])]
    strides += [0] * (len(shape) - axis)  # only extents of 1 are left
    return replace(view, shape=shape, strides=tuple(strides))


def merged_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop axes of extent 1 and join neighbours that every operand walks as one axis."""
    kept = [axis for axis, extent in enumerate(shape) if extent != 1]
    new_shape = [shape[axis] for axis in kept]
    new_strides = [[one[axis] for axis in kept] for one in strides]
    axis = 0
    while axis + 1 < len(new_shape):
        if all(one[axis] == one[axis + 1] * new_shape[axis + 1] for one in new_strides):
            new_shape[axis : axis + 2] = [new_shape[axis] * new_shape[axis + 1]]
            for one in new_strides:
                del one[axis]
        else:
            axis += 1
    return new_shape, new_strides
