"""Reads an INetworkDefinition and evaluates it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import layout, pointwise, products, transformers
from .rules import RULES, Call, InterpreterError, Rule
from .values import FLOATS, Array, fits, rounded

__all__ = ["Interpreter", "InterpreterError"]

_MODULES = (layout, pointwise, products, transformers)  # importing them fills the table


@dataclass(frozen=True)
class _Tensor:
    """An output of a layer or an input of the network: its name, DataType's name, and shape (-1: any size)."""

    name: str
    kind: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class _Layer:
    """A layer as its concrete class, the names of the tensors it reads (None: absent), and what it makes."""

    layer: Any
    kind: str
    rule: Rule
    inputs: tuple[str | None, ...]
    outputs: tuple[_Tensor, ...]


class Interpreter:
    """Evaluates a network's layers in numpy.

    network: an INetworkDefinition; it and the arrays of its constants must live as long. raw: the bytes of constants that Python
    cannot read back (INT4 and BF16), by layer name. Layers of constants alone are computed once. Without `rounding`, what layers
    compute in 16-bit floats stays float32: what is then left of a difference is no type's doing.
    Raises InterpreterError, when it is made, where a layer has no rule.
    """

    def __init__(
        self, network: Any, raw: Mapping[str, Array] | None = None, *, rounding: bool = True
    ) -> None:
        self._raw = {} if raw is None else raw
        self._rounding = rounding
        self._network = network
        self._library = sys.modules[type(network).__module__]
        self.inputs = {t.name: t for t in (_tensor(network.get_input(i)) for i in range(network.num_inputs))}
        self.outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        layers = [self._read(network.get_layer(i)) for i in range(network.num_layers)]
        self._order = self._sorted(layers)
        self.aliases = self._aliases()
        self._constants: dict[str, Array] = {}
        self._fold()
        self._dropped = self._last_uses()

    @property
    def constant_bytes(self) -> int:
        """Bytes of what was computed of constants alone and is read."""
        return sum(value.nbytes for value in self._constants.values())

    # Reading.

    def _read(self, layer: Any) -> _Layer:
        kind = layer.type.name
        name = layer.name
        if kind not in RULES:
            raise InterpreterError(f"layer '{name}': there is no rule for a {kind} layer")
        inputs = tuple(None if t is None else t.name for t in map(layer.get_input, range(layer.num_inputs)))
        boundary = kind == "ATTENTION_INPUT"  # what lies between the ends of an attention is nobody's tensor
        try:
            outputs = tuple(_tensor(layer.get_output(i), boundary) for i in range(layer.num_outputs))
        except RuntimeError as error:  # the library infers shapes when it is asked, and says no then
            raise InterpreterError(f"layer '{name}' ({kind}): the library refuses it: {error}") from error
        # The bindings hand out every layer as ILayer; its attributes belong to the class of its type.
        layer.__class__ = getattr(self._library, RULES[kind].layer_class)
        return _Layer(layer, kind, RULES[kind], inputs, outputs)

    def _sorted(self, layers: list[_Layer]) -> list[_Layer]:
        """Layers in an order in which every input is made before it is read (constants may be set as inputs afterwards)."""
        makers: dict[str, _Layer] = {}
        for layer in layers:
            for tensor in layer.outputs:
                if tensor.name in makers or tensor.name in self.inputs:
                    raise InterpreterError(f"two tensors are named '{tensor.name}'")
                makers[tensor.name] = layer
        order: list[_Layer] = []
        done: set[int] = set()
        for layer in layers:
            stack = [layer]
            while stack:
                at = stack[-1]
                waiting = [
                    makers[name]
                    for name in at.inputs
                    if name is not None and name in makers and id(makers[name]) not in done
                ]
                if waiting:
                    if len(stack) > len(layers):
                        raise InterpreterError(f"layer '{at.layer.name}' depends on itself")
                    stack.append(waiting[0])
                    continue
                stack.pop()
                if id(at) not in done:
                    done.add(id(at))
                    order.append(at)
        return order

    def _aliases(self) -> dict[str, str]:
        """Output -> input of every cache update (op:KVCacheUpdate): an input that nobody else reads, and an output."""
        readers: dict[str, int] = {}
        for layer in self._order:
            for name in layer.inputs:
                if name is not None:
                    readers[name] = readers.get(name, 0) + 1
        aliases = {}
        for layer in self._order:
            if layer.kind != "KV_CACHE_UPDATE":
                continue
            cache, result = layer.inputs[0], layer.outputs[0].name
            if cache not in self.inputs or result not in self.outputs:
                raise InterpreterError(
                    f"layer '{layer.layer.name}': the cache must be an input of the network and its update an output"
                )
            if readers[cache] > 1:
                raise InterpreterError(f"layer '{layer.layer.name}': '{cache}' is read beside its update")
            aliases[result] = cache
        return aliases

    def _fold(self) -> None:
        """Compute the layers that depend on constants alone; keep what others read."""
        folded: dict[str, Array] = {}
        left = []
        for layer in self._order:
            if layer.kind == "CONSTANT" or (
                layer.inputs and all(name is None or name in folded for name in layer.inputs)
            ):
                self._evaluate(layer, folded)
            else:
                left.append(layer)
        read = {name for layer in left for name in layer.inputs if name is not None} | set(self.outputs)
        self._order = left
        self._constants = {name: value for name, value in folded.items() if name in read}

    def _last_uses(self) -> list[list[str]]:
        """After each layer, the tensors that nobody reads any more."""
        last = {}
        for at, layer in enumerate(self._order):
            for name in (*layer.inputs, *(tensor.name for tensor in layer.outputs)):
                if name is not None:
                    last[name] = at
        dropped: list[list[str]] = [[] for _ in self._order]
        for name, at in last.items():
            if name not in self.outputs and name not in self._constants:
                dropped[at].append(name)
        return dropped

    # Evaluating.

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Floating-point inputs are float32 arrays with values of their type; a cache is updated in place."""
        values = dict(self._constants)
        for name, tensor in self.inputs.items():
            value = inputs[name]
            _check_shape(f"input '{name}'", value, tensor)
            cache = name in self.aliases.values()
            if value.dtype.kind == "f" and not cache and not fits(value, tensor.kind):
                raise InterpreterError(f"input '{name}' has values that {tensor.kind} does not have")
            if value.dtype.kind != "f":
                value = (
                    rounded(value, tensor.kind)
                    if fits(value, tensor.kind)
                    else _mistyped(name, value, tensor)
                )
            values[name] = value
        for layer, dropped in zip(self._order, self._dropped, strict=True):
            self._evaluate(layer, values)
            for name in dropped:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def _evaluate(self, layer: _Layer, values: dict[str, Array]) -> None:
        call = Call(
            layer.layer,
            [None if name is None else values[name] for name in layer.inputs],
            [tensor.kind for tensor in layer.outputs],
            values,
            self._raw,
            self._rounding,
        )
        where = f"layer '{layer.layer.name}' ({layer.kind})"
        try:
            with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
                results = layer.rule.compute(call)
        except InterpreterError as error:
            raise InterpreterError(f"{where}: {error}") from error
        for tensor, result in zip(layer.outputs, results, strict=True):
            value = result
            if layer.kind != "KV_CACHE_UPDATE":
                kind = tensor.kind if self._rounding or tensor.kind not in FLOATS else "FLOAT"
                value = rounded(np.asarray(result), kind)
            _check_shape(where, value, tensor)
            values[tensor.name] = value


def _tensor(tensor: Any, boundary: bool = False) -> _Tensor:
    return _Tensor(
        tensor.name, "FLOAT" if boundary else tensor.dtype.name, None if boundary else tuple(tensor.shape)
    )


def _check_shape(where: str, value: Array, tensor: _Tensor) -> None:
    """Hold a value against the shape that the library inferred."""
    if tensor.shape is None:
        return
    good = value.ndim == len(tensor.shape) and all(
        expected in (-1, size) for size, expected in zip(value.shape, tensor.shape, strict=True)
    )
    if not good:
        raise InterpreterError(f"{where}: '{tensor.name}' is {value.shape}, the network says {tensor.shape}")


def _mistyped(name: str, value: Array, tensor: _Tensor) -> Array:
    raise InterpreterError(f"input '{name}' is {value.dtype}, the network says {tensor.kind}")
