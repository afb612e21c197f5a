"""What every lowering rule works with: the table of rules, and the state of one lowering.

A rule is a function of one graph node, registered under the op's name (`ew::rms_norm`, `aten::mul`). It appends
instructions and returns what stands for the node's result: a View, a tuple of them, or one of the forms below that wait
for their user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from enginewright.backends.cpu.builder import Builder, Operand
from enginewright.backends.cpu.views import View, contiguous_strides, expanded
from enginewright.backends.cpu.weights_file import WeightsFile
from enginewright.passes.program import Program, executed
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import LoweringError

__all__ = [
    "RULES",
    "Constant",
    "Lowering",
    "PositionTable",
    "Roped",
    "Rule",
    "arguments",
    "lowers",
    "op_name",
]

Rule = Callable[["Lowering", fx.Node, dict[str, Any]], Any]

_TRUTH_KINDS = "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf"
TRUTH = frozenset(_TRUTH_KINDS.split())
"""Elementwise kinds whose result is 0 or 1, i32."""

_REAL_KINDS = """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh
    cosh tanh     sigmoid erf relu relu2 silu gelu gelu_tanh softplus elu mish hardswish hardsigmoid
    log_sigmoid floor ceil round trunc
    div pow atan2"""
REAL = frozenset(_REAL_KINDS.split())
"""Elementwise kinds whose result is f32 whatever the inputs are."""

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
    view: View | None = None


@dataclass(frozen=True)
class Roped:
    """A query or key whose rotation the cache write will do."""

    x: View
    tables: tuple[int, int]
    rotary_dim: int
    interleaved: bool


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


class Lowering:
    """One Program on its way: `results` says what each node became, `builder` has the instructions.

    `weights`: where its weights go, with those of another program that was lowered before.
    """

    def __init__(self, program: Program, weights: WeightsFile | None = None) -> None:
        self.program = program
        self.builder = Builder(weights)
        self.results: dict[fx.Node, Any] = {}
        self.node: fx.Node | None = None

    # Faults.

    def fail(self, reason: str, expected: str | None = None) -> LoweringError:
        """The error for the node at hand, with its op and module."""
        node = self.node
        assert node is not None
        module = node.meta.get("module") or "(model)"
        return LoweringError(
            f"the cpu backend cannot lower {op_name(node)} of module '{module}': {reason}",
            found=node.format_node() or node.name,
            expected=expected,
        )

    # What nodes stand for.

    def shape(self, node: fx.Node, index: int | None = None) -> tuple[int, ...]:
        """The node's features: its shape without the token axis."""
        value = node.meta["val"] if index is None else node.meta["val"][index]
        if not value.dim() or any(not isinstance(size, int) for size in value.shape[1:]):
            raise self.fail(
                f"its result is {list(value.shape)}", "tokens first, then features of fixed sizes"
            )
        return tuple(value.shape[1:])

    def dtype(self, node: fx.Node, index: int | None = None) -> str:
        value = node.meta["val"] if index is None else node.meta["val"][index]
        return "f32" if value.dtype.is_floating_point else "i32"

    def result(self, argument: Any) -> Any:
        """What an argument became: anything a rule may return, or a number."""
        return self.results[argument] if isinstance(argument, fx.Node) else argument

    def view(self, argument: Any) -> View:
        """An argument as a view: constants become weights, waiting forms are computed."""
        found = self.result(argument)
        if isinstance(found, View):
            return found
        if isinstance(found, Constant):
            return self.constant_view(found.weight)
        if isinstance(found, PositionTable):
            if found.view is None:
                shape = found.table.shape[1:]
                found.view = self.builder.value(shape)
                self.builder.emit(
                    "embedding",
                    [],
                    [found.view],
                    [self.builder.weights.add_table(found.table)],
                    index="positions",
                )
            return found.view
        raise self.fail(f"argument {argument} is no tensor of this step")

    def constant_view(self, weight: Weight) -> View:
        index = self.builder.weights.add_vector(weight)
        dtype = "f32" if weight.dtype.is_floating_point else "i32"
        return View(("weight", index), weight.shape, contiguous_strides(weight.shape), dtype=dtype, rows="")

    def literal(self, values: torch.Tensor, name: str = "constant") -> View:
        """A small constant tensor."""
        return self.constant_view(self.builder.weights.constant(name, values))

    def operand(self, argument: Any) -> Operand:
        """An argument of a generic op: a number stays one if JSON can hold it."""
        found = self.result(argument)
        if isinstance(found, bool):
            return int(found)
        if isinstance(found, float) and (found != found or found in (float("inf"), float("-inf"))):
            return self.literal(torch.tensor(found))
        if isinstance(found, (int, float)):
            return found
        return self.view(argument)

    def dense(self, argument: Any) -> View:
        """An argument as consecutive columns of a value, copied there if need be."""
        return self.builder.dense(self.view(argument))

    def weight(self, argument: Any, what: str) -> Weight:
        """The constant that an argument must be."""
        found = self.result(argument)
        if not isinstance(found, Constant):
            raise self.fail(
                f"its {what} is computed from the tokens", f"a {what} that is a weight of the model"
            )
        return found.weight

    def vector(self, argument: Any, what: str) -> int:
        """The index of a constant as a vector weight; -1 for None."""
        return -1 if argument is None else self.builder.weights.add_vector(self.weight(argument, what))

    def out(
        self,
        node: fx.Node,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        rows: str = "tokens",
    ) -> View:
        """A new value for the node's result."""
        shape = self.shape(node) if shape is None else shape
        return self.builder.value(shape, dtype or self.dtype(node), rows, node.name)

    def only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def elementwise(
        self,
        kind: str,
        operands: Sequence[Operand],
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> View:
        """One elementwise instruction over broadcast operands; returns its new value.

        `shape` defaults to the broadcast of the operands, `dtype` to f32 if any operand is, except for kinds that give
        truth values.
        """
        views = [o for o in operands if isinstance(o, View)]
        real = any(v.dtype == "f32" for v in views) or any(isinstance(o, float) for o in operands)
        if dtype is None:
            dtype = "i32" if kind in TRUTH or not (real or kind in REAL) else "f32"
        if shape is None:
            shape = torch.broadcast_shapes(*(v.shape for v in views))
        rows = next((v.rows for v in views if v.rows), "tokens")
        compute = "f32" if real or kind in REAL or (dtype == "f32" and kind not in TRUTH) else "i32"
        first_value = 1 if kind == "where" else 0
        inputs: list[Operand] = []
        for position, operand in enumerate(operands):
            if isinstance(operand, View):
                operand = expanded(operand, shape)
                if position >= first_value and operand.dtype != compute:
                    operand = self.builder.copied(operand, compute)
            elif kind == "where" and position >= first_value and compute == "f32" and operand is not None:
                operand = float(operand)
            inputs.append(operand)
        if not any(isinstance(o, View) and o.dtype == compute for o in inputs[first_value:]):
            # The companions of a number give it its type: here there are none.
            number = torch.tensor(inputs[-1], dtype=torch.float32 if compute == "f32" else torch.int32)
            inputs[-1] = expanded(self.literal(number), shape)
        made = self.builder.value(shape, "i32" if kind in TRUTH else compute, rows)
        self.builder.pointwise("elementwise", inputs, made, kind=kind)
        return made if made.dtype == dtype else self.builder.copied(made, dtype)

    # Walking the graph.

    def run(self) -> View:
        """Lower every node in order; returns the program's output."""
        import enginewright.backends.cpu.lower_dialect
        import enginewright.backends.cpu.lower_generic  # noqa: F401

        for node in self.program.graph.nodes:
            if node in self.results:
                continue  # an earlier node took it in
            self.node = node
            self.builder.module = node.meta.get("module", "")
            if node.op == "placeholder":
                self.results[node] = self._input(node)
            elif node.op == "get_attr":
                self.results[node] = Constant(self.program.weight_of(node))
            elif node.op == "output":
                logits = self.dense(node.args[0])
                if logits.rows != "logits":
                    raise self.fail("its result has a row a token", "rows chosen by ew::select_rows")
                return logits if self.builder.whole(logits) else self.builder.copied(logits)
            else:
                self.results[node] = self._call(node)
        raise LoweringError("the program has no output")

    def _input(self, node: fx.Node) -> View | None:
        name = str(node.target)
        if name in ("tokens", "positions"):
            return View(("input", name), (), (), dtype="i32")
        return None  # the step's metadata and pools belong to the executor

    def _call(self, node: fx.Node) -> Any:
        name = op_name(node)
        if name == "getitem":
            return self.results[node.args[0]][node.args[1]]  # type: ignore[index]
        if all(
            isinstance(self.results.get(source), Constant) for source in node.all_input_nodes
        ) and not _has_tokens(node):
            return self._folded(node)
        rule = RULES.get(name)
        if rule is None:
            known = sorted(RULES)
            raise self.fail("there is no rule for this op", "one of " + ", ".join(known))
        return rule(self, node, arguments(node))

    def _folded(self, node: fx.Node) -> Any:
        """Evaluate a node that depends on weights and numbers alone."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: executed(self.results[n].weight))
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        constant = self.builder.weights.constant
        if isinstance(value, torch.Tensor):
            return Constant(constant(node.name, value))
        return tuple(Constant(constant(node.name, item)) for item in value)


def _has_tokens(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        isinstance(size, torch.SymInt) for v in values if isinstance(v, torch.Tensor) for size in v.shape
    )
