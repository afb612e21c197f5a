"""What the rules of normalisation share: how a captured tensor stands in the new graph, and how to make nodes there."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from enginewright.passes.positional import Positional, token_axes
from enginewright.passes.program import Program, Stage
from enginewright.passes.weights import Computed, ConstantTensor, Weight
from enginewright.recipes.errors import CaptureError

__all__ = [
    "LIKE",
    "RULES",
    "UNKNOWN",
    "Complex",
    "Patches",
    "Rewriter",
    "Value",
    "call_arguments",
    "default",
    "op_name",
    "rule",
]

aten, ew = torch.ops.aten, torch.ops.ew

#: A table of more elements than this is evaluated at each load instead of being held.
_HELD = 1 << 16

#: Ops that fill a tensor of another's shape -> with what (None: their second argument).
LIKE: dict[Any, float | None] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.new_zeros.default: 0,
    aten.full_like.default: None,
}

#: Name of an op -> the function that rewrites a call of it: rule(rewriter, node, arguments by name) -> Value | Weight | …
RULES: dict[str, Callable[..., Any]] = {}


def rule(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of these ops."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update((name, function) for name in names.split())
        return function

    return register


#: What stands for a node that could not be rewritten, where all such nodes are looked for.
UNKNOWN = object()


@dataclasses.dataclass(frozen=True)
class Value:
    """A captured tensor in the new graph.

    `node` has the captured features in their order behind the token axis. `rank`, `token` and `batch` say how the
    captured tensor's axes map: `token` is where T stood (None: no tokens, as in a weight), `batch` which axis of size 1
    was dropped.
    """

    node: fx.Node
    rank: int
    token: int | None = None
    batch: int | None = None

    def axis(self, captured: int) -> int:
        """The axis of `node` that is this axis of the captured tensor."""
        captured %= self.rank
        if captured == self.token:
            return 0
        if captured == self.batch:
            raise CaptureError("an operation works along the batch axis")
        features = [a for a in range(self.rank) if a not in (self.token, self.batch)]
        return features.index(captured) + (self.token is not None)

    @property
    def features(self) -> list[int]:
        """The sizes of the feature axes."""
        sizes = list(self.node.meta["val"].shape)
        return sizes[1:] if self.token is not None else sizes


@dataclasses.dataclass(frozen=True)
class Patches:
    """Slices (start, stop, value) along `dim` written so far into a tensor that began empty."""

    dim: int
    patches: list[tuple[int, int, Value]]


@dataclasses.dataclass(frozen=True)
class Complex:
    """A complex tensor as two real ones of one layout."""

    real: Value
    imag: Value


class Rewriter:
    """One rewrite of a captured Program: the new graph, and the value there of every captured node so far.

    `values` holds, by captured node: a Value; a Weight (a checkpoint's tensor, or a layout of some); a Complex;
    Patches; a list of Values for an op of several results; or a number (a positional value that is one).
    """

    def __init__(self, program: Program):
        self.old = program
        self.positional = Positional(program)
        graph = fx.Graph()
        self.new = Program(graph, Stage.NORMALISED, {}, program.facts, program.notes)
        self.inputs: dict[str, fx.Node] = {}
        for name in ("tokens", "positions"):
            node = graph.placeholder(name)
            node.meta = {"val": self.new.fake([self.new.tokens], torch.int32), "module": ""}
            self.inputs[name] = node
        graph.output(None)
        self.values: dict[fx.Node, Any] = {}
        self.names = {id(weight): name for name, weight in program.weights.items()}
        self.weight_nodes: dict[Any, fx.Node] = {}
        self.tables: dict[bytes, Weight] = {}
        #: The captured node being rewritten, and its module.
        self.where: fx.Node | None = None
        self.module = ""

    def fail(self, reason: str, **details: Any) -> NoReturn:
        if "found" not in details and self.where is not None:
            details["found"] = f"node {self.where.format_node() or self.where.name}"
        raise CaptureError(f"{reason}, in {self.module or 'the model'}", **details)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.new.call(target, args, kwargs, module=self.module)

    def reshape(self, node: fx.Node, has_tokens: bool, features: Sequence[int]) -> fx.Node:
        """`node` with other feature sizes (the same values in the same order)."""
        shape = list(node.meta["val"].shape)
        if (shape[1:] if has_tokens else shape) == list(features):
            return node
        return self.emit(aten.reshape.default, node, [-1, *features] if has_tokens else list(features))

    def weight_node(self, weight: Weight) -> fx.Node:
        """The `get_attr` node of a weight: under its model name, or a name made from it for an expression."""
        key = _identity(weight)
        if key not in self.weight_nodes:
            name = base = self.names.get(id(weight), weight.name)
            number = 1
            while name in self.new.weights:
                number += 1
                name = f"{base}#{number}"
            self.weight_nodes[key] = self.new.add_weight(name, weight)
        return self.weight_nodes[key]

    def value(self, argument: Any) -> Value:
        """An argument as a Value: a weight gets its node, a positional value its table."""
        if isinstance(argument, fx.Node):
            if argument in self.positional:
                found = self.positional_value(argument)
                if not isinstance(found, Value):
                    constant = ConstantTensor(f"constants.{argument.name}", torch.tensor(found))
                    found = Value(self.weight_node(constant), 0)
                return found
            known = self.values[argument]
            if isinstance(known, Weight):
                return Value(self.weight_node(known), len(known.shape))
            if isinstance(known, Value):
                return known
        return self.fail(f"cannot use {argument!r} as a tensor")

    def unchanged(self, argument: fx.Node) -> Any:
        """What stands for an argument, for an op that does nothing to it."""
        return self.value(argument) if argument in self.positional else self.values[argument]

    def weight(self, argument: Any) -> Weight | None:
        """An argument as a weight expression, or None where it is none. Arithmetic on weights is evaluated at each load."""
        known = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if isinstance(known, Weight):
            return known
        if isinstance(known, Value) and known.token is None and argument not in self.positional:
            fake, positional = self.fake(argument), self.positional
            name = f"{self.module}.{argument.name}" if self.module else argument.name
            self.values[argument] = weight = Computed(
                name, [int(s) for s in fake.shape], fake.dtype, lambda: positional.evaluate(argument, 2)
            )
            return weight
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            return self.old.weight_of(argument)
        return None

    def fake(self, argument: fx.Node) -> torch.Tensor:
        return argument.meta["val"]

    def token_axis(self, value: torch.Tensor) -> int | None:
        axes = token_axes(value, self.old.tokens)
        if len(axes) > 1:
            self.fail("tokens meet tokens outside attention", found=f"a tensor of shape {list(value.shape)}")
        return axes[0] if axes else None

    def positional_value(self, node: fx.Node, fold: bool = True) -> Any:
        """Rule 4: a positional node as a number, a constant, or a table's rows. Without `fold`, always the rows."""
        if node in self.values and fold:
            return self.values[node]
        fake = self.fake(node)
        if not isinstance(fake, torch.Tensor):
            self.fail("the number of tokens enters the arithmetic")
        axis = self.token_axis(fake)
        context = self.old.facts.max_context
        if fake.is_complex():
            self.values[node] = self.complex_table(node, axis)
            return self.values[node]
        table = self.positional.table(node, context, axis)
        rows = table if axis is None else table.reshape(context, *_without_batch(table.shape[1:], axis))
        if fold and axis is not None and rows[0].numel() and bool((rows == rows[:1]).all()):
            rows = table[0].unsqueeze(axis) if axis < table.dim() else table[:1]
            axis = None
        if axis is None and rows.numel() == 1:
            found: Any = rows.reshape(()).item()
        elif axis is None:
            found = Value(self.weight_node(self.constant(f"constants.{node.name}", rows, None)), rows.dim())
        else:
            weight = self.constant(f"position_tables.{node.name}", rows, node)
            arguments = (self.inputs["positions"], self.weight_node(weight))
            made = self.new.call(ew.position_table.default, arguments, module="")
            dropped = 0 if axis >= 1 and fake.shape[0] == 1 else None
            found = Value(made, fake.dim(), axis, dropped)
        if fold:
            self.values[node] = found
        return found

    def complex_table(self, node: fx.Node, axis: int | None) -> Complex:
        """A positional complex value as two tables."""
        if axis is None:
            self.fail("a complex constant")
        context, fake = self.old.facts.max_context, self.fake(node)
        table = self.positional.table(node, context, axis)
        parts = []
        for name, part in (("real", table.real), ("imag", table.imag)):
            rows = part.reshape(context, *_without_batch(part.shape[1:], axis)).contiguous()
            weight = self.constant(f"position_tables.{node.name}.{name}", rows, None)
            arguments = (self.inputs["positions"], self.weight_node(weight))
            made = self.new.call(ew.position_table.default, arguments, module="")
            parts.append(Value(made, fake.dim(), axis, 0 if axis >= 1 and fake.shape[0] == 1 else None))
        return Complex(*parts)

    def constant(self, name: str, value: torch.Tensor, node: fx.Node | None) -> Weight:
        """A constant or a table, one object for equal values. A large table is evaluated at each load."""
        value = value.float() if value.is_floating_point() else value
        content = value.contiguous()
        if content.dtype == torch.bool:
            content = content.to(torch.uint8)
        digest = hashlib.sha256(content.numpy())  # type: ignore[arg-type]
        digest.update(repr((tuple(value.shape), value.dtype)).encode())
        key = digest.digest()
        if key in self.tables:
            return self.tables[key]
        if node is not None and value.numel() > _HELD:
            positional, context, shape = self.positional, self.old.facts.max_context, value.shape
            axis = self.token_axis(self.fake(node))
            assert axis is not None  # a table has a row for every position

            def compute() -> torch.Tensor:
                found = positional.evaluate(node, context).movedim(axis, 0)
                return found.reshape(shape).float() if found.is_floating_point() else found.reshape(shape)

            weight: Weight = Computed(name, value.shape, value.dtype, compute)
        else:
            weight = ConstantTensor(name, value.clone())
        self.tables[key] = weight
        return weight

    def result_layout(
        self, node: fx.Node, operands: Sequence[Value], fake: torch.Tensor | None = None
    ) -> tuple[int, Any, Any]:
        """(rank, token axis, batch axis) of a result that its operands broadcast to."""
        fake = self.fake(node) if fake is None else fake
        rank = fake.dim()
        token = self.token_axis(fake) if any(v.token is not None for v in operands) else None
        batch = None
        for v in operands:
            if v.batch is not None and token is not None:
                axis = v.batch + rank - v.rank
                if fake.shape[axis] == 1 and axis != token:
                    batch = axis
                    break
        return rank, token, batch

    def aligned(self, v: Value, rank: int, token: int | None, batch: int | None) -> fx.Node:
        """The operand's node, reshaped by axes of size 1 so that it broadcasts against a result of this layout."""
        shape = self.captured_shape(v)
        shift = rank - v.rank
        if v.token is not None and v.token + shift != token:
            self.fail("tokens meet features", found=f"token axes {v.token + shift} and {token}")
        features = []
        for axis in range(rank):
            size = shape[axis - shift] if axis >= shift else 1
            if axis in (token, batch):
                if axis == token and v.token is not None:
                    continue
                if size != 1:
                    self.fail(
                        "an operand has another value for every token or sequence", found=f"shape {shape}"
                    )
                continue
            features.append(size)
        if v.token is None:
            keep = min(
                len(features), max(0, v.rank - sum(a >= shift for a in (token, batch) if a is not None))
            )
            features = features[len(features) - keep :] if keep < len(features) else features
        return self.reshape(v.node, v.token is not None, features)

    def captured_shape(self, v: Value) -> list[Any]:
        """The captured tensor's sizes; T is None."""
        features = iter(v.features)
        return [None if a == v.token else 1 if a == v.batch else next(features) for a in range(v.rank)]

    def stand_in(self, node: fx.Node) -> Any:
        """A made-up input in the place of a node that cannot be rewritten, so that what follows it can be looked at."""
        fake = self.fake(node)
        try:
            axis = self.token_axis(fake) if isinstance(fake, torch.Tensor) else None
        except CaptureError:
            axis = None
        if axis is None:
            return UNKNOWN
        batch = 0 if axis >= 1 and fake.shape[0] == 1 else None
        features = [int(size) for a, size in enumerate(fake.shape) if a not in (axis, batch)]
        with self.new.graph.inserting_before(self.new.graph.output_node()):
            made = self.new.graph.placeholder(f"unknown_{node.name}")
        made.meta = {
            "val": self.new.fake([self.new.tokens, *features], executed_dtype(fake.dtype)),
            "module": "",
        }
        return Value(made, fake.dim(), axis, batch)

    def wrap(self, node: fx.Node, layout: tuple[int, Any, Any]) -> Value:
        return Value(node, *layout)

    def cut(self, x: Value, dim: int, start: int, stop: int, step: int = 1) -> fx.Node:
        if dim == x.batch:
            return x.node
        axis = x.axis(dim)
        if (start, stop, step) == (0, int(x.node.meta["val"].shape[axis]), 1):
            return x.node
        return self.emit(aten.slice.Tensor, x.node, axis, start, stop, *([step] if step != 1 else []))

    def picked(self, x: Value, dim: int, index: int) -> Value:
        if dim == x.token:
            self.fail("one token is taken out of the text")

        def moved(axis: int | None) -> int | None:
            return None if axis is None or axis == dim else axis - (axis > dim)

        if dim == x.batch:
            return Value(x.node, x.rank - 1, moved(x.token), None)
        made = self.emit(aten.select.int, x.node, x.axis(dim), index)
        return Value(made, x.rank - 1, moved(x.token), moved(x.batch))

    def joined(self, values: list[Value], dim: int, fake: torch.Tensor) -> Value:
        rank, token, batch = self.result_layout(self.where, values, fake)  # type: ignore[arg-type]
        if dim == token:
            self.fail("something is appended to the tokens")
        if dim == batch:
            batch = None
        nodes = []
        for v in values:
            if v.token is None:
                self.fail("a constant is joined to every token")
            nodes.append(self.aligned(v, rank, token, batch))
        axis = Value(nodes[0], rank, token, batch).axis(dim)
        return Value(self.emit(aten.cat.default, nodes, axis), rank, token, batch)

    def raised(self, v: Value, dim: int) -> Value:
        """The value with a new feature axis of size 1 at the captured axis `dim`."""

        def moved(axis: int | None) -> int | None:
            return None if axis is None else axis + (axis >= dim)

        wide = Value(v.node, v.rank + 1, moved(v.token), moved(v.batch))
        sizes = iter(v.features)
        axes = [a for a in range(wide.rank) if a not in (wide.token, wide.batch)]
        shape = [1 if a == dim else next(sizes) for a in axes]
        return dataclasses.replace(wide, node=self.reshape(v.node, v.token is not None, shape))

    def filled(self, argument: fx.Node) -> Value:
        """An argument with a row for every token: a positional one that is the same in each row is not folded."""
        if argument not in self.positional:
            return self.value(argument)
        source = argument.args[0] if argument.args else None
        if argument.target in LIKE and source not in self.positional and isinstance(source, fx.Node):
            x = self.value(source)
            if list(self.fake(source).shape) == list(self.fake(argument).shape):
                number = LIKE[argument.target]
                fill = argument.args[1] if number is None else number
                dtype = executed_dtype(self.fake(argument).dtype)
                return dataclasses.replace(
                    x, node=self.emit(aten.full_like.default, x.node, fill, dtype=dtype)
                )
        return self.positional_value(argument, fold=False)

    def part(self, x: Value, dim: int, start: int, stop: int) -> Value:
        return dataclasses.replace(x, node=self.cut(x, dim, start, stop)) if start < stop else x

    def expanded(self, node: fx.Node, has_tokens: bool, features: list[int]) -> fx.Node:
        shape = list(node.meta["val"].shape)
        if (shape[1:] if has_tokens else shape) == features:
            return node
        return self.emit(aten.expand.default, node, [-1, *features] if has_tokens else features)


def op_name(target: Any) -> str:
    """`mul` of `aten.mul.Tensor`, `ew.moe` of a dialect op; the binary forms of max and min are maximum and minimum."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        if name in ("max", "min") and target._overloadname == "other":
            return {"max": "maximum", "min": "minimum"}[name]
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by name, defaults left out; the first argument comes first."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    bound.update(node.kwargs)
    return bound


def default(target: Any, name: str) -> Any:
    """The default of an op's argument; None where it has none."""
    found = (a for a in target._schema.arguments if a.name == name and a.has_default_value())
    return next((a.default_value for a in found), None)


def call_arguments(target: Any, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name back to positional and keyword-only ones."""
    args, kwargs = [], {}
    gap = False
    for a in target._schema.arguments:
        if a.name not in values:
            gap = True
        elif a.kwarg_only or gap:
            kwargs[a.name] = values[a.name]
        else:
            args.append(values[a.name])
    return args, kwargs


def _identity(weight: Weight) -> Any:
    """Equal for two expressions that read the same leaves in the same way."""
    if not weight.sources:
        return id(weight)
    own = tuple((k, v) for k, v in sorted(vars(weight).items()) if k not in ("source", "parts", "name"))
    return type(weight), own, tuple(_identity(source) for source in weight.sources)


def _without_batch(sizes: Sequence[int], axis: int) -> list[int]:
    """Feature sizes of a table whose token axis stood at `axis`: a leading batch of 1 goes."""
    return list(sizes[1:]) if axis >= 1 and sizes and sizes[0] == 1 else list(sizes)


def executed_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype
