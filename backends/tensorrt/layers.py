"""Adding layers to a network: one short method a kind of layer, with names, shared constants and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from enginewright.backends.tensorrt.api import last_word, library

__all__ = ["Layers", "Refused"]


class Refused(Exception):
    """What a rule cannot lower: the reason, and what would do."""

    def __init__(self, reason: str, expected: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.expected = reason, expected


def _type_names() -> dict[str, Any]:
    types = library().trt.DataType
    return {
        "f32": types.FLOAT,
        "f16": types.HALF,
        "bf16": types.BF16,
        "int32": types.INT32,
        "bool": types.BOOL,
        "int8": types.INT8,
        "int4": types.INT4,
    }


class Layers:
    """A network, and what has been added to it.

    arrays: the memory of every constant by its layer's name, which must live as long as the network. shared: tensors that
    several nodes read (casts, constants, masks). node: whose layers are being added, for their names.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.trt = library().trt
        self.types = _type_names()
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.shared: dict[Any, Any] = {}
        self.node: fx.Node | None = None
        self._names: dict[str, int] = {}

    def named(self, layer: Any, what: str = "") -> Any:
        """Name a new layer after the node and module at hand. Raises Refused where the library has made none."""
        if layer is None:
            raise Refused(f"TensorRT refuses a layer: {last_word()}")
        node = self.node
        where = "" if node is None else f"{node.meta.get('module') or '(model)'}/{node.name}"
        layer.name = self.unique(where + (f".{what}" if what else ""))
        return layer

    def unique(self, name: str) -> str:
        """The name, or the name with a number where it is taken."""
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}#{count}" if count else name

    def out(self, layer: Any, what: str = "") -> Any:
        """The only output of a new layer."""
        return self.named(layer, what).get_output(0)

    def constant(
        self, array: npt.NDArray[Any], name: str, kind: str | None = None, shape: Sequence[int] | None = None
    ) -> Any:
        """A constant tensor. `kind` is its type, `shape` its shape, where the array only carries its bytes (bf16, int4)."""
        array = np.asarray(array, order="C")
        shape = array.shape if shape is None else tuple(shape)
        if kind is None:
            weights = self.trt.Weights(array)
        else:
            weights = self.trt.Weights(
                self.types[kind], array.ctypes.data, int(np.prod(shape, dtype=np.int64))
            )
        layer = self.network.add_constant(self.trt.Dims(list(shape)), weights)
        self.named(layer)
        layer.name = self.unique(name)
        self.arrays[layer.name] = array
        return layer.get_output(0)

    def number(self, value: float, rank: int, kind: str = "f32") -> Any:
        """A number as a tensor of `rank` axes of one."""
        key = ("number", float(value), rank, kind)
        if key not in self.shared:
            dtype = {"f32": np.float32, "int32": np.int32}[kind]
            self.shared[key] = self.constant(np.full((1,) * rank, value, dtype), f"number {value:g}")
        return self.shared[key]

    def cast(self, tensor: Any, kind: str) -> Any:
        """The tensor in another type; made once however many ask."""
        if tensor.dtype == self.types[kind]:
            return tensor
        key = ("cast", id(tensor), kind)
        if key not in self.shared:
            made = self.out(self.network.add_cast(tensor, self.types[kind]), kind)
            self.shared[key] = (made, tensor)  # holds the tensor: its id must stay its own
        return self.shared[key][0]

    def elementwise(self, op: str, left: Any, right: Any) -> Any:
        """A layer of trt.ElementWiseOperation over tensors of one type; the shorter shape is filled with ones on the left."""
        rank = max(len(left.shape), len(right.shape))
        pair = [self.ranked(side, rank) for side in (left, right)]
        operation = getattr(self.trt.ElementWiseOperation, op)
        return self.out(self.network.add_elementwise(*pair, operation), op.lower())

    def unary(self, op: str, x: Any) -> Any:
        return self.out(self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)), op.lower())

    def activation(self, op: str, x: Any) -> Any:
        return self.out(self.network.add_activation(x, getattr(self.trt.ActivationType, op)), op.lower())

    def reduce(self, op: str, x: Any, axes: Sequence[int], keep: bool = True) -> Any:
        bits = sum(1 << axis for axis in axes)
        return self.out(
            self.network.add_reduce(x, getattr(self.trt.ReduceOperation, op), bits, keep), op.lower()
        )

    def matmul(self, left: Any, right: Any, transposed: bool = False) -> Any:
        """left · right, or left · rightᵀ, of the last two axes."""
        how = self.trt.MatrixOperation
        second = how.TRANSPOSE if transposed else how.NONE
        return self.out(self.network.add_matrix_multiply(left, how.NONE, right, second), "product")

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        rank = max(len(t.shape) for t in (condition, yes, no))
        three = [self.ranked(t, rank) for t in (condition, yes, no)]
        return self.out(self.network.add_select(*three), "select")

    def gather(self, table: Any, indices: Any, axis: int = 0) -> Any:
        return self.out(self.network.add_gather(table, indices, axis), "gather")

    def shuffle(
        self,
        x: Any,
        shape: Sequence[int] | None = None,
        first: Sequence[int] | None = None,
        second: Sequence[int] | None = None,
    ) -> Any:
        """Transpose by `first`, reshape to `shape` (0 keeps a size, -1 takes what is left), transpose by `second`."""
        layer = self.named(self.network.add_shuffle(x), "shuffle")
        if first is not None:
            layer.first_transpose = self.trt.Permutation(list(first))
        if shape is not None:
            layer.reshape_dims = self.trt.Dims(list(shape))
        if second is not None:
            layer.second_transpose = self.trt.Permutation(list(second))
        return layer.get_output(0)

    def ranked(self, x: Any, rank: int) -> Any:
        """x with axes of one before its own."""
        shape = tuple(x.shape)
        if len(shape) == rank:
            return x
        if sum(size < 0 for size in shape) > 1:
            raise Refused("it broadcasts a tensor of several dynamic sizes", "operands of equal rank")
        return self.shuffle(x, [1] * (rank - len(shape)) + list(shape))

    def sliced(self, x: Any, axis: int, start: int, size: int, step: int = 1, fill: bool = False) -> Any:
        """`size` places along one axis. `fill`: places beyond the end are zeros."""
        layer = self.network.add_slice(x, *(self.trt.Dims([value]) for value in (start, size, step)))
        self.named(layer, "slice")
        axes = self.shared.get(("axis", axis))
        if axes is None:
            axes = self.shared["axis", axis] = self.constant(np.array([axis], np.int32), f"axis {axis}")
        layer.set_input(5, axes)
        if fill:
            layer.mode = self.trt.SampleMode.FILL
        return layer.get_output(0)

    def length(self, x: Any, axis: int) -> Any:
        """The size of an axis, int32 [1]: a shape tensor."""
        sizes = self.cast(self.out(self.network.add_shape(x), "shape"), "int32")
        return self.sliced(sizes, 0, axis, 1)

    def count(self, size: Any) -> Any:
        """0, 1, 2 … of `size`, an int32 [1] shape tensor  ->  int32 [size]."""
        layer = self.network.add_fill(
            self.trt.Dims([1]), self.trt.FillOperation.LINSPACE, self.types["int32"]
        )
        self.named(layer, "count")
        layer.set_input(0, size)
        layer.set_input(1, self.number(0, 0, "int32"))
        layer.set_input(2, self.number(1, 1, "int32"))
        return layer.get_output(0)
