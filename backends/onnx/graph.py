"""The ONNX graph that a lowering appends to: values, nodes, constants, and weights whose bytes come later.

Nothing here knows the dialect. A `Weight` of the Program becomes an initialiser in external data: its size is known at once, its
values are loaded when the file is written (`weights.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["IR_VERSION", "MICROSOFT", "OPSET", "Graph", "Size", "StoredWeight", "Value", "element_bits"]

OPSET = 24
IR_VERSION = 11
MICROSOFT = "com.microsoft"

Size = int | str
"""Extent of an axis: a number, or the name of what is known only when a step runs."""

Array = npt.NDArray[Any]

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. `dtype` is one of onnx.TensorProto's."""

    name: str
    shape: tuple[Size, ...]
    dtype: int = FLOAT


@dataclass(frozen=True)
class StoredWeight:
    """An initialiser in external data: `load` gives its bytes (of exactly this size)."""

    name: str
    shape: tuple[int, ...]
    dtype: int
    size: int
    load: Callable[[], Array] = field(compare=False)


def element_bits(dtype: int) -> int:
    """Bits of one element of a tensor type whose elements are whole bytes."""
    return int(helper.tensor_dtype_to_np_dtype(dtype).itemsize) * 8


class Graph:
    """Nodes in order, under construction. `module` is the path that new nodes are named after."""

    def __init__(self) -> None:
        self.module = ""
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.weights: dict[str, StoredWeight] = {}
        self._known: dict[Any, Value] = {}
        self._kept: list[Any] = []  # what `_known` is keyed by the identity of
        self._names: dict[str, int] = {}

    # Names.

    def fresh(self, stem: str) -> str:
        """A name that nothing else has."""
        count = self._names.get(stem, 0)
        self._names[stem] = count + 1
        return stem if not count else self.fresh(f"{stem}.{count}")

    # What goes in and out.

    def input(self, name: str, shape: Sequence[Size], dtype: int = INT64) -> Value:
        self._names[name] = self._names.get(name, 0) + 1
        self.inputs.append(Value(name, tuple(shape), dtype))
        return self.inputs[-1]

    def output(self, value: Value, name: str | None = None) -> Value:
        """Make a value an output, under another name if one is given."""
        if name is not None and name != value.name:
            self._names[name] = self._names.get(name, 0) + 1
            for node in reversed(self.nodes):
                places = [i for i, made in enumerate(node.output) if made == value.name]
                if places:
                    node.output[places[0]] = name
                    break
            else:
                self.nodes.append(helper.make_node("Identity", [value.name], [name], name=self.fresh(name)))
            for node in self.nodes:
                for i, read in enumerate(node.input):
                    if read == value.name:
                        node.input[i] = name
            value = Value(name, value.shape, value.dtype)
        self.outputs.append(value)
        return value

    # Nodes.

    def op(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        shape: Sequence[Size] | None = None,
        dtype: int | None = None,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Value:
        """Append a node with one result. Shape and type are the first input's unless given."""
        first = next(value for value in inputs if value is not None)
        wanted = (first.shape if shape is None else tuple(shape), first.dtype if dtype is None else dtype)
        return self.ops(kind, inputs, [wanted], domain=domain, **attributes)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        results: Sequence[tuple[Sequence[Size], int]],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[Value]:
        """Append a node with several results, each (shape, dtype)."""
        stem = f"{self.module or 'model'}/{kind}"
        made = [Value(self.fresh(stem), tuple(shape), dtype) for shape, dtype in results]
        names = ["" if value is None else value.name for value in inputs]
        while names and not names[-1]:
            names.pop()
        node = helper.make_node(
            kind, names, [v.name for v in made], name=made[0].name, domain=domain, **attributes
        )
        self.nodes.append(node)
        return made

    # Constants.

    def constant(self, array: Array, name: str = "constant") -> Value:
        """A small tensor inside the model's file; equal ones are one."""
        array = np.asarray(array, order="C")  # ascontiguousarray makes a number a vector
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            made = numpy_helper.from_array(array, self.fresh(name))
            self.constants.append(made)
            self._known[key] = Value(made.name, tuple(array.shape), made.data_type)
        return self._known[key]

    def ints(self, *values: int) -> Value:
        """Int64 [n]: shapes, axes, starts and ends."""
        return self.constant(np.array(values, np.int64), "ints")

    def scalar(self, value: float | int | bool, dtype: int = FLOAT) -> Value:
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)), "number")

    def weight(
        self, source: Any, form: Any, name: str, shape: Sequence[int], dtype: int, load: Callable[[], Array]
    ) -> Value:
        """A tensor in external data. What is made of the same `source` in the same `form` is stored once."""
        key = ("weight", id(source), form)
        if key not in self._known:
            self._kept.append(source)
            size = int(np.prod(shape, dtype=np.int64)) * element_bits(dtype) // 8
            stored = StoredWeight(self.fresh(name), tuple(shape), dtype, size, load)
            self.weights[stored.name] = stored
            self._known[key] = Value(stored.name, tuple(shape), dtype)
        return self._known[key]

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """A value that several rules want: made where it is first asked for."""
        if ("once", key) not in self._known:
            self._known["once", key] = make()
        return self._known["once", key]

    # Small forms that every rule uses.

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """Row-major reshape; the one named axis becomes whatever is left."""
        if tuple(shape) == x.shape:
            return x
        wanted = [-1 if isinstance(size, str) else size for size in shape]
        if wanted.count(-1) > 1:
            raise ValueError(f"a reshape to {list(shape)} has two open axes")
        return self.op("Reshape", [x, self.ints(*wanted)], shape)

    def cast(self, x: Value, dtype: int) -> Value:
        return x if x.dtype == dtype else self.op("Cast", [x], x.shape, dtype, to=dtype)

    def gather(self, x: Value, index: Value, axis: int = 0) -> Value:
        shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
        return self.op("Gather", [x, index], shape, axis=axis)

    def add(self, x: Value, y: Value, shape: Sequence[Size] | None = None) -> Value:
        return self.op("Add", [x, y], shape)

    def mul(self, x: Value, y: Value, shape: Sequence[Size] | None = None) -> Value:
        return self.op("Mul", [x, y], shape)

    # The whole.

    def model(
        self, name: str, facts: Mapping[str, Any], data: str, offsets: Mapping[str, int]
    ) -> onnx.ModelProto:
        """The model, with `facts` in its metadata as JSON and weights at their `offsets` in the file `data`."""
        initialisers = [
            *self.constants,
            *(self._external(w, data, offsets[w.name]) for w in self.weights.values()),
        ]
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(v.name, v.dtype, v.shape) for v in self.inputs],
            [helper.make_tensor_value_info(v.name, v.dtype, v.shape) for v in self.outputs],
            initialisers,
        )
        domains = sorted({node.domain for node in self.nodes} - {""})
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="enginewright"
        )
        helper.set_model_props(model, {"enginewright": json.dumps(facts, sort_keys=True)})
        return model

    def _external(self, weight: StoredWeight, data: str, offset: int) -> onnx.TensorProto:
        tensor = TensorProto(name=weight.name, data_type=weight.dtype, dims=weight.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", data), ("offset", offset), ("length", weight.size)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor
