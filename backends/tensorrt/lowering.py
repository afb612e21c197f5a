"""What every lowering rule works with: the table of rules, and the state of one lowering.

A rule is a function of one graph node, registered under the op's name. It adds layers to the network and returns what stands
for the node's result: a tensor of the network, a tuple of them, or one of the forms below that wait for their user.

Tensors have the token axis first, which is dynamic; features have fixed sizes. **Types**: networks are strongly typed. What goes
into a product is f16 or bf16, and so is what comes out; all else (sums of the residual, norms, activations, rope) is computed in
float32, and TensorRT fuses the casts into the kernels beside them. So a float tensor may be of any type, and whoever reads it
asks for the type it needs (`wide`, `cast`). Integers are int32, truth values bool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from enginewright.backends.tensorrt.api import last_word
from enginewright.backends.tensorrt.layers import Layers, Refused
from enginewright.passes.program import Program, executed
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.errors import LoweringError

__all__ = [
    "RULES",
    "Constant",
    "Lowering",
    "Options",
    "PositionTable",
    "Refused",
    "arguments",
    "lowers",
    "op_name",
]

Rule = Callable[["Lowering", fx.Node, dict[str, Any]], Any]

RULES: dict[str, Rule] = {}
"""Op name -> rule. Its keys are what the backend says it can lower."""


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under op names."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register


@dataclass(frozen=True)
class Options:
    """How a network is defined. compute: `f16` or `bf16`, the type of products. page_size: tokens of a page of the cache."""

    compute: str = "f16"
    page_size: int = 16


@dataclass(frozen=True)
class Constant:
    """A value without a token axis."""

    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


@dataclass
class PositionTable:
    """Rows of a table chosen by position. Rope takes the table; for any other reader it is looked up."""

    table: Weight
    tensor: Any = None


def op_name(node: fx.Node) -> str:
    """`ew::linear`, `aten::mul` (overloads share a name)."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))


def arguments(node: fx.Node) -> dict[str, Any]:
    """Argument name -> value, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values |= {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    return values | node.kwargs


class Lowering(Layers):
    """One Program on its way into a network.

    results: what each node became. inputs: the network's, by name. problems: what could not be lowered, a line each. notes: what
    the user should know.
    """

    def __init__(self, program: Program, network: Any, options: Options) -> None:
        super().__init__(network)
        self.program, self.options = program, options
        self.results: dict[fx.Node, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    # What nodes stand for.

    def shape(self, node: fx.Node, index: int | None = None) -> tuple[int, ...]:
        """The node's features: its shape without the token axis."""
        value = node.meta["val"] if index is None else node.meta["val"][index]
        if not value.dim() or any(not isinstance(size, int) for size in value.shape[1:]):
            raise Refused(f"its result is {list(value.shape)}", "tokens first, then features of fixed sizes")
        return tuple(value.shape[1:])

    def kind(self, node: fx.Node, index: int | None = None) -> str:
        """f32 (which may be any float), int32 or bool."""
        value = node.meta["val"] if index is None else node.meta["val"][index]
        if value.dtype == torch.bool:
            return "bool"
        return "f32" if value.dtype.is_floating_point else "int32"

    def result(self, argument: Any) -> Any:
        return self.results[argument] if isinstance(argument, fx.Node) else argument

    def tensor(self, argument: Any) -> Any:
        """An argument as a tensor: constants are added, waiting forms are computed."""
        found = self.result(argument)
        if isinstance(found, Constant):
            return self.values(found.weight)
        if isinstance(found, PositionTable):
            if found.tensor is None:
                found.tensor = self.gather(self.values(found.table), self.inputs["positions"])
            return found.tensor
        if isinstance(found, (bool, int, float)):
            raise Refused(f"argument {found} is a number", "a tensor")
        return found

    def wide(self, argument: Any) -> Any:
        """An argument as a float32 tensor."""
        return self.cast(self.tensor(argument), "f32")

    def operand(self, argument: Any, kind: str, rank: int) -> Any:
        """An argument of an elementwise op, in that type and of that many axes; numbers become constants."""
        found = self.result(argument)
        if isinstance(found, (bool, int, float)):
            if kind == "bool":
                return self.constant(np.full((1,) * rank, bool(found)), "truth")
            return self.number(found, rank, kind)
        tensor = self.tensor(argument)
        shape = tuple(tensor.shape)
        if len(shape) < rank and any(size < 0 for size in shape):
            raise Refused("it broadcasts tokens along another axis", "operands of equal rank")
        return self.ranked(self.cast(tensor, kind), rank)

    def weight(self, argument: Any, what: str) -> Weight:
        """The constant that an argument must be."""
        found = self.result(argument)
        if not isinstance(found, Constant):
            raise Refused(
                f"its {what} is computed from the tokens", f"a {what} that is a weight of the model"
            )
        return found.weight

    def values(self, weight: Weight, shape: Sequence[int] | None = None) -> Any:
        """A weight as it is, floats as float32, under another shape if asked; added once."""
        key = ("values", id(weight), None if shape is None else tuple(shape))
        if key not in self.shared:
            value = executed(weight)
            if value.dtype == torch.int64:
                value = value.to(torch.int32)
            array = value.reshape(tuple(shape)).numpy() if shape is not None else value.numpy()
            self.shared[key] = (self.constant(array, weight.name), weight)
        return self.shared[key][0]

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    # Walking the graph.

    def run(self) -> Any:
        """Lower every node in order; returns the logits. Raises LoweringError with all that cannot be lowered."""
        logits = None
        for node in self.program.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self.results[node] = self.inputs.get(str(node.target))
            elif node.op == "get_attr":
                self.results[node] = Constant(self.program.weight_of(node))
            elif node.op == "output":
                logits = None if self.problems else self.wide(node.args[0])
            elif node not in self.results:
                self.results[node] = self._call(node)
        self.node = None
        if self.problems:
            count = len(self.problems)
            raise LoweringError(
                f"the tensorrt backend cannot lower {count} node{'s' if count > 1 else ''} of this model",
                found="".join(f"\n    {line}" for line in self.problems),
                action="choose other formats, or build with --backend cpu (docs/backends.md has the table of ops)",
            )
        return logits

    def _call(self, node: fx.Node) -> Any:
        name = op_name(node)
        try:
            if name == "getitem":
                return self.results[node.args[0]][node.args[1]]  # type: ignore[index]
            if all(
                isinstance(self.results.get(s), Constant) for s in node.all_input_nodes
            ) and not _has_tokens(node):
                return self._folded(node)
            rule = RULES.get(name)
            if rule is None:
                raise Refused("there is no rule for this op")
            result = rule(self, node, arguments(node))
            self._check(node, result)
            return result
        except Refused as refused:
            wanted = "" if refused.expected is None else f"; expected {refused.expected}"
            reason = refused.reason + wanted
        except RuntimeError as error:  # the library's word on a shape
            reason = f"TensorRT says: {last_word()} ({error})"
        module = node.meta.get("module") or "(model)"
        self.problems.append(f"{name} of module '{module}': {reason}")
        return self._stand_in(node)

    def _check(self, node: fx.Node, result: Any) -> None:
        """Hold the library's idea of a result's shape against the graph's."""
        several = isinstance(result, tuple)
        for index, tensor in enumerate(result if several else [result]):
            if tensor is None or isinstance(tensor, (Constant, PositionTable)):
                continue
            wanted = self.shape(node, index if several else None)
            if tuple(tensor.shape)[1:] != wanted:
                raise Refused(f"TensorRT makes {tuple(tensor.shape)} of it", f"tokens first, then {wanted}")

    def _stand_in(self, node: fx.Node) -> Any:
        """An input in place of a result that could not be lowered, so that what follows is looked at too."""
        value = node.meta["val"]
        several = isinstance(value, (tuple, list))
        made = []
        for index in range(len(value) if several else 1):
            at = index if several else None
            item = value[index] if several else value
            sizes = [size if isinstance(size, int) else -1 for size in item.shape]
            name = self.unique(f"missing {node.name}")
            made.append(self.network.add_input(name, self.types[self.kind(node, at)], self.trt.Dims(sizes)))
        return tuple(made) if several else made[0]

    def _folded(self, node: fx.Node) -> Any:
        """Evaluate a node that depends on weights and numbers alone."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: executed(self.results[n].weight))
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(value, torch.Tensor):
            return Constant(ConstantTensor(node.name, value))
        return tuple(Constant(ConstantTensor(node.name, item)) for item in value)


def _has_tokens(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        isinstance(size, torch.SymInt) for v in values if isinstance(v, torch.Tensor) for size in v.shape
    )
