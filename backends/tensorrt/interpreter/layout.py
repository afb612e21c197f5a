"""Rules of layers that move values without changing them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rules import Call, InterpreterError, rule
from .values import Array

__all__: list[str] = []


@rule("SHUFFLE", "IShuffleLayer")
def shuffle(call: Call) -> list[Array]:
    """op:Shuffle. Transpose, reshape, transpose. A 0 copies the size of the first transpose's result, -1 takes what is left."""
    layer = call.layer
    x = call[0]
    x = x.transpose(tuple(layer.first_transpose)[: x.ndim])
    given = call.given(1)
    dims = layer.reshape_dims if given is None else tuple(int(size) for size in given)
    if dims is not None:
        sizes = [
            x.shape[i] if size == 0 and layer.zero_is_placeholder else size for i, size in enumerate(dims)
        ]
        x = x.reshape(sizes)
    return [x.transpose(tuple(layer.second_transpose)[: x.ndim])]


@rule("SQUEEZE", "ISqueezeLayer")
def squeeze(call: Call) -> list[Array]:
    """op:Squeeze. Without the axes of input 1, which have the size 1."""
    return [np.squeeze(call[0], tuple(int(axis) for axis in np.atleast_1d(call[1])))]


@rule("UNSQUEEZE", "IUnsqueezeLayer")
def unsqueeze(call: Call) -> list[Array]:
    """op:Unsqueeze. With an axis of 1 at each place of input 1, as counted in the result."""
    return [np.expand_dims(call[0], tuple(int(axis) for axis in np.atleast_1d(call[1])))]


@rule("CONCATENATION", "IConcatenationLayer")
def concatenation(call: Call) -> list[Array]:
    """op:Concatenation. Inputs one after the other along an axis; their other sizes are equal."""
    return [np.concatenate([call[i] for i in range(len(call.inputs))], axis=call.layer.axis)]


@rule("SLICE", "ISliceLayer")
def slices(call: Call) -> list[Array]:
    """op:Slice. Along each axis of `axes` (all, if not given) the places start + i · stride, i < size.

    Inputs 1, 2, 3, 5 stand for start, size, stride and axes. Places outside are an error, or wrap, are clamped, or become input 4
    (0 without one: the API's "fill value" then has nothing else to be).
    """
    layer, x = call.layer, call[0]

    def numbers(index: int, attribute: Sequence[int] | None) -> list[int] | None:
        value = call.given(index)
        if value is not None:
            return [int(v) for v in np.atleast_1d(value)]
        return None if attribute is None else list(attribute)

    # An attribute whose input is set reads as nothing, so it is asked for only without.
    parts = [
        numbers(index, None if call.given(index) is not None else getattr(layer, name))
        for index, name in ((1, "start"), (2, "shape"), (3, "stride"), (5, "axes"))
    ]
    start, size, stride, axes = parts
    if start is None or size is None or stride is None:
        raise InterpreterError(f"start {start}, size {size}, stride {stride}")
    axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    if not len(start) == len(size) == len(stride) == len(axes):
        raise InterpreterError(f"start {start}, size {size}, stride {stride} for the axes {axes}")
    mode = layer.mode.name
    fill = call.given(4)
    for first, count, step, axis in zip(start, size, stride, axes, strict=True):
        length = x.shape[axis]
        places = first + np.arange(count) * step
        outside = (places < 0) | (places >= length)
        if mode == "STRICT_BOUNDS":
            if outside.any():
                raise InterpreterError(f"place {int(places[outside][0])} of axis {axis}, which has {length}")
        elif mode == "WRAP":
            places = places % length
        elif mode in ("CLAMP", "FILL"):
            places = np.clip(places, 0, length - 1)
        else:
            raise InterpreterError(f"there is no rule for the mode {mode}")
        x = np.take(x, places, axis=axis)
        if mode == "FILL" and outside.any():
            hidden = outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            x = np.where(hidden, x.dtype.type(0) if fill is None else fill, x)
    return [x]


def _within(indices: Array, size: int) -> Array:
    """op:Gather: every index must obey 0 <= index < size."""
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise InterpreterError(f"indices {int(indices.min())} to {int(indices.max())} of an axis of {size}")
    return indices


@rule("GATHER", "IGatherLayer")
def gather(call: Call) -> list[Array]:
    """op:Gather. As ONNX's Gather (with num_elementwise_dims 1 the first axis goes in step), GatherElements and GatherND."""
    layer, x, indices = call.layer, call[0], call[1]
    mode, batch = layer.mode.name, layer.num_elementwise_dims
    if mode == "ELEMENT":
        return [np.take_along_axis(x, _within(indices, x.shape[layer.axis]), layer.axis)]
    if mode == "DEFAULT":
        _within(indices, x.shape[layer.axis])
        if not batch:
            return [np.take(x, indices, axis=layer.axis)]
        rows = [np.take(part, index, axis=layer.axis - 1) for part, index in zip(x, indices, strict=True)]
        return [np.stack(rows)]
    if batch:
        raise InterpreterError("ND with elementwise dimensions")
    where = np.moveaxis(indices, -1, 0)
    for axis, index in enumerate(where):
        _within(index, x.shape[axis])
    return [x[tuple(where)]]


@rule("SCATTER", "IScatterLayer")
def scatter(call: Call) -> list[Array]:
    """op:Scatter. A copy of the input with `updates` at `indices`: elements along the axis, or ND slices as ONNX ScatterND."""
    x, indices, updates = call[0].copy(), call[1], call[2]
    if call.layer.mode.name == "ELEMENT":
        np.put_along_axis(x, _within(indices, x.shape[call.layer.axis]), updates, call.layer.axis)
        return [x]
    where = np.moveaxis(indices, -1, 0)
    for axis, index in enumerate(where):
        _within(index, x.shape[axis])
    x[tuple(where)] = updates
    return [x]
