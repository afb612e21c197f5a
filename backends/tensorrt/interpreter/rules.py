"""The table of rules: what a layer of each LayerType computes.

A rule is a function of the layer, as its concrete class, and its inputs. It returns the outputs' values; the interpreter rounds
them to the outputs' types. Each cites what it was read from: `op:NAME` is docs.nvidia.com/deeplearning/tensorrt/latest/_static/
operators/NAME.html, `api:NAME` the class's documentation in the Python API. Rules compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .values import Array

__all__ = ["RULES", "Call", "InterpreterError", "Rule", "axes_of", "rule"]


class InterpreterError(ValueError):
    """A layer that has no rule, that breaks what its documentation demands, or whose meaning is not documented."""


@dataclass(frozen=True)
class Call:
    """What a rule is given.

    layer: the layer. inputs: a value an input, None where it is absent. outputs: the types of its outputs (DataType's names).
    by_name: every value at hand by its tensor's name. raw: the bytes of constants that Python cannot read back, by layer name.
    rounding: whether 16-bit floats are rounded to.
    """

    layer: Any
    inputs: Sequence[Array | None]
    outputs: Sequence[str]
    by_name: Mapping[str, Array]
    raw: Mapping[str, Array]
    rounding: bool = True

    def __getitem__(self, index: int) -> Array:
        value = self.inputs[index]
        if value is None:
            raise InterpreterError(f"input {index} is missing")
        return value

    def given(self, index: int) -> Array | None:
        """The input, or None."""
        return self.inputs[index] if index < len(self.inputs) else None


@dataclass(frozen=True)
class Rule:
    """`layer_class`: the Python class that has the layer's attributes."""

    layer_class: str
    compute: Callable[[Call], list[Array]]


RULES: dict[str, Rule] = {}
"""LayerType's name -> rule."""


def rule(
    kind: str, layer_class: str
) -> Callable[[Callable[[Call], list[Array]]], Callable[[Call], list[Array]]]:
    """Register the rule of a LayerType."""

    def register(compute: Callable[[Call], list[Array]]) -> Callable[[Call], list[Array]]:
        RULES[kind] = Rule(layer_class, compute)
        return compute

    return register


def axes_of(mask: int) -> tuple[int, ...]:
    """The axes of a bit mask."""
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)
