"""What every rule works with: the table of rules, and the state of one lowering.

A rule is a function of one graph node, registered under the op's name (`ew::rms_norm`, `aten::mul`). It appends nodes to
the graph and returns what stands for the node's result: a Value, a tuple of them, or a PositionTable that waits for its user.
Rules know nothing of caches and of how a step's tokens arrive: that is the `CacheForm`, which a flavour replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from onnx import TensorProto, helper
from torch import fx

from enginewright.backends.onnx.graph import BOOL, FLOAT, INT64, Graph, Size, Value
from enginewright.passes.program import Program, executed
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.errors import LoweringError

__all__ = [
    "RULES", "TOKENS", "CacheForm", "Constant", "Lowering", "PositionTable", "Rule", "arguments", "lowers",
    "op_name", "tensor_type",
]  # fmt: skip

Rule = Callable[["Lowering", fx.Node, dict[str, Any]], Any]

TOKENS = "tokens"
"""The name of the axis of a step's tokens, T."""

RULES: dict[str, Rule] = {}
"""Op name -> rule. Its keys are what the backend says it can lower."""

_TYPES = {
    torch.bool: BOOL, torch.int64: INT64, torch.int32: TensorProto.INT32, torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8, torch.uint8: TensorProto.UINT8,
}  # fmt: skip


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under op names."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


class CacheForm(Protocol):
    """How a step's tokens, cache and wanted rows reach the model, and how attention reads and writes the cache."""

    def inputs(self, low: Lowering) -> Mapping[str, Value]:
        """Declare the inputs; returns `tokens`, `positions` [T] and `logit_rows` [R] as int64 values. Without
        `logit_rows`, the logits are those of all rows."""

    def attention(self, low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
        """Lower one ew::paged_attention with its arguments `a`; returns [T, H, Dv]."""

    def outputs(self, low: Lowering, logits: Value) -> None:
        """Declare the outputs; logits is [R, vocab]."""


@dataclass(frozen=True)
class Constant:
    """A value without a token axis."""

    weight: Weight


@dataclass(frozen=True)
class PositionTable:
    """Rows of a table chosen by position. Rope takes the table; for any other reader it is looked up."""

    table: Weight


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


def tensor_type(dtype: torch.dtype) -> int:
    """The ONNX type that stands for a dtype of the Program: every floating one is f32."""
    return FLOAT if dtype.is_floating_point else _TYPES[dtype]


class Lowering:
    """One Program on its way into a Graph: `results` says what each node became."""

    def __init__(self, program: Program, form: CacheForm, rules: Mapping[str, Rule] | None = None) -> None:
        self.program = program
        self.form = form
        self.rules = RULES if rules is None else rules
        self.graph = Graph()
        self.results: dict[fx.Node, Any] = {}
        self.node: fx.Node | None = None
        self.inputs: Mapping[str, Value] = {}
        self._refused: dict[str, list[str]] = {}

    # Faults.

    def fail(self, reason: str, expected: str | None = None) -> LoweringError:
        """The error for the node at hand. `run` collects them all."""
        assert self.node is not None
        return LoweringError(f"{op_name(self.node)}: {reason}", expected=expected)

    # What nodes stand for.

    def result(self, argument: Any) -> Any:
        """What an argument became: anything a rule may return, or a number."""
        return self.results[argument] if isinstance(argument, fx.Node) else argument

    def shape(self, node: fx.Node, index: int | None = None) -> tuple[Size, ...]:
        """The shape of the node's result, with the name of the token axis."""
        value = node.meta["val"] if index is None else node.meta["val"][index]
        rows = self._rows(node)
        return tuple(size if isinstance(size, int) else rows for size in value.shape)

    def _rows(self, node: fx.Node) -> str:
        """Which rows a node has: those of its first input that is a value of the step."""
        for source in node.all_input_nodes:
            found = self.results.get(source)
            parts = found if isinstance(found, tuple) else (found,)
            for part in parts:
                if isinstance(part, Value) and part.shape and isinstance(part.shape[0], str):
                    return part.shape[0]
        return TOKENS

    def dtype(self, node: fx.Node, index: int | None = None) -> int:
        return tensor_type((node.meta["val"] if index is None else node.meta["val"][index]).dtype)

    def value(self, argument: Any) -> Value:
        """An argument as a value of the graph: constants become weights, position tables are looked up."""
        found = self.result(argument)
        if isinstance(found, Value):
            return found
        if isinstance(found, Constant):
            return self.tensor(found.weight)
        if isinstance(found, PositionTable):
            table = self.tensor(found.table)
            return self.graph.once(
                ("looked up", table.name), lambda: self.graph.gather(table, self.inputs["positions"])
            )
        raise self.fail(f"argument {argument} is no tensor of this step")

    def operand(self, argument: Any, dtype: int) -> Value:
        """An argument of an elementwise op, a number or a tensor, as this type."""
        found = self.result(argument)
        if isinstance(found, (bool, int, float)):
            return self.graph.scalar(found, dtype)
        return self.graph.cast(self.value(argument), dtype)

    def weight(self, argument: Any, what: str) -> Weight:
        """The constant that an argument must be."""
        found = self.result(argument)
        if not isinstance(found, Constant):
            raise self.fail(
                f"its {what} is computed from the tokens", f"a {what} that is a weight of the model"
            )
        return found.weight

    def tensor(
        self,
        weight: Weight,
        form: Any = "executed",
        change: Callable[[torch.Tensor], np.ndarray] | None = None,
        shape: Sequence[int] | None = None,
        dtype: int | None = None,
    ) -> Value:
        """A weight as an initialiser: its values as the Program computes with them, or what `change` makes of its stored ones.

        `form` names the change; `shape` and `dtype` are the result's where it differs.
        """

        def load() -> np.ndarray:
            if change is not None:
                return change(weight.load())
            array: np.ndarray = executed(weight).contiguous().numpy()
            return array

        kind = tensor_type(weight.dtype) if dtype is None else dtype
        return self.graph.weight(
            weight, form, weight.name or "weight", weight.shape if shape is None else shape, kind, load
        )

    def literal(self, values: torch.Tensor) -> Value:
        """A small constant tensor."""
        return self.graph.constant(values.numpy())

    def only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    # Walking the graph.

    def run(self) -> Graph:
        """Lower every node in order. Raises LoweringError with all that has no rule or breaks one, by op and module."""
        self.inputs = self.form.inputs(self)
        logits: Value | None = None
        for node in self.program.graph.nodes:
            if node in self.results:
                continue  # an earlier node took it in
            self.node = node
            self.graph.module = node.meta.get("module", "")
            if node.op == "placeholder":
                self.results[node] = self.inputs.get(str(node.target))
            elif node.op == "get_attr":
                self.results[node] = Constant(self.program.weight_of(node))
            elif node.op == "output":
                logits = None if self._refused else self.value(node.args[0])
            else:
                try:
                    self.results[node] = self._call(node)
                except LoweringError as error:
                    self._refuse(node, error)
        if self._refused:
            raise self._all_refused()
        if logits is None:
            raise LoweringError("the program has no output")
        self.graph.module = ""
        self.form.outputs(self, logits)
        return self.graph

    def _call(self, node: fx.Node) -> Any:
        name = op_name(node)
        if name == "getitem":
            return self.results[node.args[0]][node.args[1]]  # type: ignore[index]
        constants = all(isinstance(self.results.get(source), Constant) for source in node.all_input_nodes)
        if constants and not _has_tokens(node):
            return self._folded(node)
        rule = self.rules.get(name)
        if rule is None:
            raise LoweringError(f"{name}: there is no rule for this op")
        return rule(self, node, arguments(node))

    def _folded(self, node: fx.Node) -> Any:
        """Evaluate a node that depends on weights and numbers alone."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: executed(self.results[n].weight))
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(value, torch.Tensor):
            return Constant(ConstantTensor(node.name, value))
        return tuple(Constant(ConstantTensor(node.name, item)) for item in value)

    # What cannot be lowered.

    def _refuse(self, node: fx.Node, error: LoweringError) -> None:
        """Note the error and go on with something of the right shape, so that all errors are found at once."""
        told = self._refused.setdefault(error.message, [])
        told.append(node.meta.get("module") or "(model)")
        made = node.meta["val"]

        def stand_in(index: int | None) -> Value:
            return Value("(refused)", self.shape(node, index), self.dtype(node, index))

        if isinstance(made, (tuple, list)):
            self.results[node] = tuple(stand_in(i) for i in range(len(made)))
        else:
            self.results[node] = stand_in(None)

    def _all_refused(self) -> LoweringError:
        lines = []
        for reason, modules in self._refused.items():
            named = ", ".join(dict.fromkeys(modules[:3])) + (
                f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            )
            lines.append(f"{reason} [{named}]")
        return LoweringError(
            f"the onnx backend cannot lower {sum(map(len, self._refused.values()))} nodes of this model",
            found="; ".join(lines),
            expected="the ops and options of docs/backends.md",
            action="build with --backend cpu, or with a recipe whose formats this backend holds",
        )


def _has_tokens(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        isinstance(size, torch.SymInt) for v in values if isinstance(v, torch.Tensor) for size in v.shape
    )


def numpy_type(dtype: int) -> np.dtype[Any]:
    return helper.tensor_dtype_to_np_dtype(dtype)
