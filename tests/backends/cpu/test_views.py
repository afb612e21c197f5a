"""Views follow numpy: the same elements in the same order, and None exactly where only a copy can do it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from enginewright.backends.cpu import views
from enginewright.backends.cpu.views import View, contiguous_strides


def elements(view: View, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    strides = [8 * stride for stride in view.strides]
    return np.lib.stride_tricks.as_strided(row[view.column :], view.shape, strides)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[View, tuple[int, ...]]:
    """A view made by random slices, permutations and broadcasts, and another shape of its size."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    view = View(("value", 0), shape, contiguous_strides(shape))
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, len(view.shape) - 1))
        action = draw(st.sampled_from(["slice", "permute", "expand"]))
        if action == "slice":
            view = views.sliced(
                view, axis, draw(st.integers(0, view.shape[axis] - 1)), 99, draw(st.integers(1, 2))
            )
        elif action == "permute":
            view = views.permuted(view, draw(st.permutations(range(len(view.shape)))))
        else:
            view = views.expanded(view, (draw(st.integers(1, 2)), *view.shape))
    left, target = view.size, []
    while left > 1 and len(target) < 3:
        target.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= target[-1]
    return view, (*target, left)


@given(reshapes())
def test_reshaping(case: tuple[View, tuple[int, ...]]) -> None:
    view, shape = case
    row = np.arange(2000)
    result = views.reshaped(view, shape)
    base = elements(view, row)
    try:
        attempt = base.view()
        attempt.shape = shape
        possible = True
    except AttributeError:
        possible = False
    assert (result is not None) == possible
    if result is not None:
        assert np.array_equal(elements(result, row), base.reshape(shape))
        assert result.reach == elements(result, row).max() + 1
    assert view.contiguous == (view.size == math.prod(shape) and bool(base.flags.c_contiguous))


@given(reshapes())
def test_merging_axes_keeps_the_elements(case: tuple[View, tuple[int, ...]]) -> None:
    view = case[0]
    dense = contiguous_strides(view.shape)
    shape, (left, right) = views.merged_axes(view.shape, [view.strides, dense])
    row = np.arange(2000)
    merged = View(view.source, tuple(shape), tuple(left), view.column)
    assert np.array_equal(elements(merged, row).ravel(), elements(view, row).ravel())
    assert tuple(right) == contiguous_strides(shape)
