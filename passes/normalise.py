"""Normalise: no batch axis, tokens first, every activation [T, *features] with sizes that are numbers.

Rules:
1. The token axis of a captured value is the axis whose size is T; it moves to the front. The batch axis of
size 1 goes. 2. Views, transposes, expansions, slices and joins become reshape, permute, expand, slice and cat
inside a token's row.
   One that would mix tokens is refused, as is any other op that looks along the token axis.
3. A product with a weight (linear, matmul, addmm: also the transposed weights of GPT-2) becomes `ew.linear`.
   Layout operations on weights fold into lazy weight expressions; arithmetic on weights stays in the graph.
4. A value that depends on positions alone is evaluated for every position up to the maximum context:
`ew.position_table`;
   a constant where all positions agree, a number where it is a single one.
5. A lookup by token id, or by position plus a constant, becomes `ew.embedding`; a lookup by a constant, that
   row.
6. A product of complex numbers (DeepSeek-V2's rotation) is spelt out in real ones.
7. `layer_norm` over the last axis becomes `ew.layer_norm`. Casts between floating types, dropout and copies
vanish.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from enginewright.passes.manager import PassResult
from enginewright.passes.positional import Positional, token_axes
from enginewright.passes.program import Program, Stage
from enginewright.passes.weights import (
    Computed,
    ConstantTensor,
    Weight,
    concatenated,
    permuted,
    reshaped,
    sliced,
    stacked,
    transposed,
)  # fmt: skip
from enginewright.recipes.errors import CaptureError

__all__ = ["Normalise"]

aten, ew = torch.ops.aten, torch.ops.ew


@dataclasses.dataclass(frozen=True)
class Value:
    """A captured tensor in the new graph.

    `node` has the captured features in their order behind the token axis. `rank`, `token` and `batch` say how
    the captured tensor's axes map: `token` is where T stood (None: no tokens, as in a weight), `batch` which
    axis of size 1 was dropped.
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
class _Patches:
    """Slices (start, stop, value) along `dim` written so far into a tensor that began empty."""

    dim: int
    patches: list[tuple[int, int, Value]]


@dataclasses.dataclass(frozen=True)
class _Complex:
    """A complex tensor as two real ones of one layout."""

    real: Value
    imag: Value


class Normalise:
    """The pass. It replaces the program's graph; `matches` counts the captured nodes."""

    name = "normalise"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        return PassResult(_Normaliser(program).run())


class _Normaliser:
    def __init__(self, program: Program):
        self.old = program
        self.positional = Positional(program)
        graph = fx.Graph()
        self.new = Program(graph, Stage.NORMALISED, {}, program.facts, program.notes)
        self.inputs = {}
        for name in ("tokens", "positions"):
            node = graph.placeholder(name)
            node.meta = {"val": self.new.fake([self.new.tokens], torch.int32), "module": ""}
            self.inputs[name] = node
        graph.output(None)
        self.values: dict[fx.Node, Any] = {}
        self.names = {id(weight): name for name, weight in program.weights.items()}
        self.weight_nodes: dict[Any, fx.Node] = {}
        self.tables: dict[bytes, Weight] = {}
        self.module = ""
        self.where: fx.Node | None = None

    # Walking the captured graph.

    def run(self) -> int:
        count = 0
        for node in self.old.graph.nodes:
            if node.op == "placeholder":
                if node.target == "tokens":
                    self.values[node] = Value(self.inputs["tokens"], 2, 1, 0)
            elif node.op == "get_attr":
                if node not in self.positional:
                    self.values[node] = self.old.weight_of(node)
            elif node.op == "output":
                logits = self.value(node.args[0])
                self.new.graph.output_node().args = (logits.node,)
            elif node not in self.positional:
                count += 1
                self.where, self.module = node, node.meta.get("module", "")
                self.values[node] = self.rewrite(node)
        self.new.recompile()
        self.old.graph_module = self.new.graph_module
        self.old.weights = self.new.weights
        self.old.stage = Stage.NORMALISED
        self.old._fake_mode, self.old._tokens = self.new._fake_mode, self.new._tokens
        return count

    def rewrite(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source = node.args[0]
            return self.values[source][node.args[1]]  # type: ignore[index]
        target = node.target
        name = _name(target)
        rule = _RULES.get(name)
        if name in ("max", "min") and target._overloadname == "other":  # type: ignore[union-attr]
            rule = _Normaliser.elementwise
        if rule is None:
            self.fail(f"{name} is an operation that is not known to stay within one token")
        return rule(self, node, *_bound(node))

    def fail(self, reason: str, **details: Any) -> NoReturn:
        if "found" not in details and self.where is not None:
            details["found"] = f"node {self.where.format_node() or self.where.name}"
        raise CaptureError(f"{reason}, in {self.module or 'the model'}", **details)

    # Making nodes.

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

    # Reading captured arguments.

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

    def weight(self, argument: Any) -> Weight | None:
        """An argument as a weight expression, or None where it is none."""
        known = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if isinstance(known, Weight):
            return known
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
        """Rule 4: a positional node as a number, a constant, or a table's rows. Without `fold`, always the
        rows.
        """
        if node in self.values and fold:
            return self.values[node]
        fake = self.fake(node)
        axis = self.token_axis(fake)
        context = self.old.facts.max_context
        if fake.is_complex():
            self.values[node] = self.complex_table(node, axis)
            return self.values[node]
        table = self.positional.table(node, context, axis)
        rows = table if axis is None else table.reshape(context, *_without_batch(table.shape[1:], axis))
        if fold and axis is not None and rows[0].numel() and bool((rows == rows[:1]).all()):
            axis, rows = None, table[0].unsqueeze(axis) if axis < table.dim() else table[:1]
        if axis is None and rows.numel() == 1:
            found: Any = rows.reshape(()).item()
        elif axis is None:
            found = Value(self.weight_node(self._constant(f"constants.{node.name}", rows, None)), rows.dim())
        else:
            weight = self._constant(f"position_tables.{node.name}", rows, node)
            arguments = (self.inputs["positions"], self.weight_node(weight))
            made = self.new.call(ew.position_table.default, arguments, module="")
            dropped = 0 if axis >= 1 and fake.shape[0] == 1 else None
            found = Value(made, fake.dim(), axis, dropped)
        if fold:
            self.values[node] = found
        return found

    def complex_table(self, node: fx.Node, axis: int | None) -> _Complex:
        """A positional complex value as two tables."""
        if axis is None:
            self.fail("a complex constant")
        context, fake = self.old.facts.max_context, self.fake(node)
        table = self.positional.table(node, context, axis)
        parts = []
        for name, part in (("real", table.real), ("imag", table.imag)):
            rows = part.reshape(context, *_without_batch(part.shape[1:], axis)).contiguous()
            weight = self._constant(f"position_tables.{node.name}.{name}", rows, None)
            arguments = (self.inputs["positions"], self.weight_node(weight))
            made = self.new.call(ew.position_table.default, arguments, module="")
            parts.append(Value(made, fake.dim(), axis, 0 if axis >= 1 and fake.shape[0] == 1 else None))
        return _Complex(*parts)

    def _constant(self, name: str, value: torch.Tensor, node: fx.Node | None) -> Weight:
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
        if node is not None and value.numel() > 1 << 16:
            positional, context, shape = self.positional, self.old.facts.max_context, value.shape
            axis = self.token_axis(self.fake(node))

            def compute() -> torch.Tensor:
                found = positional.evaluate(node, context).movedim(axis, 0)
                return found.reshape(shape).float() if found.is_floating_point() else found.reshape(shape)

            weight: Weight = Computed(name, value.shape, value.dtype, compute)
        else:
            weight = ConstantTensor(name, value.clone())
        self.tables[key] = weight
        return weight

    # Aligning operands.

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
        """The operand's node, reshaped by axes of size 1 so that it broadcasts against a result of this
        layout.
        """
        if v.token is None and v.node.op == "get_attr":
            shape = list(v.node.meta["val"].shape)
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

    def wrap(self, node: fx.Node, layout: tuple[int, Any, Any]) -> Value:
        return Value(node, *layout)

    # Rules for kinds of operations.

    def same(self, node: fx.Node, args: dict[str, Any]) -> Any:
        """Copies, dropout, casts that do not matter."""
        source = next(iter(args.values()))
        return self.values[source] if source not in self.positional else self.value(source)

    def cast(self, node: fx.Node, args: dict[str, Any]) -> Any:
        source = next(iter(args.values()))
        before, after = self.fake(source).dtype, self.fake(node).dtype
        if before == after or (before.is_floating_point and after.is_floating_point):
            return self.same(node, args)
        v = self.value(source)
        dtype = torch.float32 if after.is_floating_point else after
        return dataclasses.replace(v, node=self.emit(aten.to.dtype, v.node, dtype))

    def as_complex(self, node: fx.Node, args: dict[str, Any]) -> _Complex:
        x = self.value(args["self"])
        return _Complex(self.picked(x, x.rank - 1, 0), self.picked(x, x.rank - 1, 1))

    def as_real(self, node: fx.Node, args: dict[str, Any]) -> Value:
        z = self.values[args["self"]]
        fake = self.fake(node)
        return self.joined(
            [self.raised(part, fake.dim() - 1) for part in (z.real, z.imag)], fake.dim() - 1, fake
        )

    def complex_product(self, node: fx.Node, a: Any, b: Any) -> _Complex:
        """Rule 6: (a + bi)(c + di)."""
        a, b = (v if isinstance(v, _Complex) else self.fail("a product of complex and real") for v in (a, b))
        layout = self.result_layout(node, [a.real, b.real])

        def times(x: Value, y: Value) -> fx.Node:
            return self.emit(aten.mul.Tensor, self.aligned(x, *layout), self.aligned(y, *layout))

        real = self.emit(aten.sub.Tensor, times(a.real, b.real), times(a.imag, b.imag))
        imag = self.emit(aten.add.Tensor, times(a.real, b.imag), times(a.imag, b.real))
        return _Complex(self.wrap(real, layout), self.wrap(imag, layout))

    def elementwise(self, node: fx.Node, args: dict[str, Any]) -> Any:
        """Rule 1 for operations that broadcast: operands are aligned, numbers stay numbers."""
        if self.fake(node).is_complex():
            if _name(node.target) != "mul":
                self.fail("complex arithmetic other than a product")
            operands = [
                self.positional_value(a) if a in self.positional else self.values[a] for a in args.values()
            ]
            return self.complex_product(node, *operands)
        values: dict[str, Any] = {}
        for key, argument in args.items():
            if isinstance(argument, fx.Node):
                found = (
                    self.positional_value(argument) if argument in self.positional else self.value(argument)
                )
                values[key] = found
            else:
                values[key] = argument
        operands = [v for v in values.values() if isinstance(v, Value)]
        layout = self.result_layout(node, operands)
        made = {k: self.aligned(v, *layout) if isinstance(v, Value) else v for k, v in values.items()}
        numbers = [k for k, v in args.items() if isinstance(v, fx.Node) and not isinstance(values[k], Value)]
        target = node.target
        if target in (aten.max.other, aten.min.other):
            target = aten.maximum.default if target is aten.max.other else aten.minimum.default
        if numbers:
            found = _with_numbers(target, made, numbers)
            for key in numbers if found is None else ():
                constant = ConstantTensor(f"constants.{args[key].name}", torch.tensor(made[key]))
                made[key] = self.weight_node(constant)
            target, made = found or (target, made)
        positional_args, keywords = _call(target, made)
        return self.wrap(self.emit(target, *positional_args, **keywords), layout)

    def linear(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x = self.value(args["input"])
        weight = self.weight(args["weight"])
        if weight is None:
            self.fail("a product of two activations")
        return self.product(x, weight, args.get("bias"))

    def product(self, x: Value, weight: Weight, bias: Any) -> Value:
        """Rule 3: x [..., K] times weight [N, K] transposed, plus bias [N]."""
        if x.token is None or x.token == x.rank - 1:
            self.fail("a product whose input has no features")
        bias_node = self.value(bias).node if isinstance(bias, fx.Node) else None
        made = self.emit(ew.linear.default, x.node, self.weight_node(weight), bias_node)
        return dataclasses.replace(x, node=made)

    def matmul(self, node: fx.Node, args: dict[str, Any]) -> Value:
        left, right = list(args.values())[:2]
        weight = self.weight(right)
        if weight is not None and len(weight.shape) == 2 and self.weight(left) is None:
            return self.product(self.value(left), transposed(weight), None)
        return self.inner_product(node, self.value(left), self.value(right))

    def inner_product(self, node: fx.Node, a: Value, b: Value) -> Value:
        """A matrix product inside each token's row (the token axis is a batch axis of it)."""
        rank, token, batch = self.result_layout(node, [a, b])
        if token is None or token >= rank - 2:
            self.fail("a product along or across tokens outside attention")
        left, right = self.aligned(a, rank, token, batch), self.aligned(b, rank, token, batch)
        return Value(self.emit(aten.matmul.default, left, right), rank, token, batch)

    def addmm(self, node: fx.Node, args: dict[str, Any]) -> Value:
        weight = self.weight(args["mat2"])
        if weight is None or args.get("alpha", 1) != 1 or args.get("beta", 1) != 1:
            self.fail("a product of two activations")
        return self.product(self.value(args["mat1"]), transposed(weight), args["self"])

    def embedding(self, node: fx.Node, args: dict[str, Any]) -> Value:
        """Rule 5."""
        weight, ids = self.weight(args["weight"]), args["indices"]
        if weight is None:
            self.fail("a lookup in a table that is not a weight")
        table = self.weight_node(weight)
        if ids in self.positional:
            axis = self.token_axis(self.fake(ids))
            context = self.old.facts.max_context
            rows = self.positional.table(ids, context, axis).reshape(-1)
            offset = int(rows[0]) if rows.numel() else 0
            if rows.numel() and bool((rows == offset).all()):
                row = reshaped(sliced(weight, 0, offset, offset + 1), weight.shape[1:])
                return Value(self.weight_node(row), 1)
            if (
                axis is None
                or rows.numel() != context
                or not torch.equal(rows, torch.arange(context) + offset)
            ):
                self.fail("a lookup by something other than a token or its position plus a constant")
            learned = weight.shape[0]
            if offset + context > learned:
                self.fail(
                    "the maximum context needs more positions than the model has learned",
                    found=f"{learned} rows, of which {learned - offset} are for text",
                    expected=f"{offset + context} rows for {context} tokens",
                    action=f"set max_context to {learned - offset} or less",
                )
            made = self.emit(ew.embedding.default, self.inputs["positions"], table, offset)
            rank = self.fake(node).dim()
            return Value(made, rank, axis, 0 if axis == 1 and self.fake(node).shape[0] == 1 else None)
        v = self.value(ids)
        if v.token is None or v.features:
            self.fail("a lookup by something other than one id a token")
        return Value(self.emit(ew.embedding.default, v.node, table), v.rank + 1, v.token, v.batch)

    def layer_norm(self, node: fx.Node, args: dict[str, Any]) -> Value:
        """Rule 7."""
        x = self.value(args["input"])
        if len(args["normalized_shape"]) != 1 or x.token == x.rank - 1:
            self.fail("a layer norm over several axes")
        weight, bias = (
            self.value(args[k]).node if args.get(k) is not None else None for k in ("weight", "bias")
        )
        return dataclasses.replace(
            x, node=self.emit(ew.layer_norm.default, x.node, weight, bias, args["eps"])
        )

    def rms_norm(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x = self.value(args["input"])
        if len(args["normalized_shape"]) != 1 or x.token == x.rank - 1:
            self.fail("a norm over several axes")
        weight = self.value(args["weight"]).node if args.get("weight") is not None else None
        eps = args.get("eps")
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        return dataclasses.replace(x, node=self.emit(ew.rms_norm.default, x.node, weight, eps))

    def along(self, node: fx.Node, args: dict[str, Any]) -> Any:
        """Reductions, softmax, top-k and the like along feature axes."""
        x = self.value(next(iter(args.values())))
        made = dict(args)
        first = next(iter(args))
        made[first] = x.node
        kept = bool(args.get("keepdim", False))
        dims = args.get("dim", args.get("dims", _default(node.target, "dim")))
        axes = dims if isinstance(dims, (list, tuple)) else [dims]
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            self.fail("a reduction over all axes")
        captured = [a % x.rank for a in axes]
        if x.token is not None and x.token in captured:
            self.fail(f"{_name(node.target)} works along the tokens")
        key = "dims" if "dims" in args else "dim"
        mapped = [x.axis(a) for a in captured]
        made[key] = mapped if isinstance(dims, (list, tuple)) else mapped[0]
        if made.get("dtype") is not None and made["dtype"].is_floating_point:
            made["dtype"] = torch.float32
        positional_args, keywords = _call(node.target, made)
        result = self.emit(node.target, *positional_args, **keywords)
        outputs = node.meta["val"]
        several = isinstance(outputs, (tuple, list))

        def place(out: fx.Node, fake: torch.Tensor) -> Value:
            if fake.dim() == x.rank or kept:
                return dataclasses.replace(x, node=out)
            left = [a for a in range(x.rank) if a not in captured]
            return Value(
                out, len(left),
                left.index(x.token) if x.token is not None else None,
                left.index(x.batch) if x.batch is not None else None,
            )  # fmt: skip

        if not several:
            return place(result, outputs)
        return [place(self.emit(operator.getitem, result, i), fake) for i, fake in enumerate(outputs)]

    def indexed(self, node: fx.Node, args: dict[str, Any]) -> Value:
        """gather and scatter along a feature axis: all tensors share one layout."""
        tensors = {k: self.filled(a) for k, a in args.items() if isinstance(a, fx.Node)}
        x = next(iter(tensors.values()))
        token = next((v.token for v in tensors.values() if v.token is not None), None)
        batch = next((v.batch for v in tensors.values() if v.batch is not None), None)
        if token is None or args["dim"] % x.rank == token:
            self.fail(f"{_name(node.target)} works along the tokens")
        made = dict(args)
        for key, v in tensors.items():
            if v.token is None:
                self.fail(f"{_name(node.target)} on a value without tokens")
            made[key] = self.aligned(v, x.rank, token, batch)
        made["dim"] = Value(x.node, x.rank, token, batch).axis(args["dim"])
        positional_args, keywords = _call(node.target, made)
        return Value(self.emit(node.target, *positional_args, **keywords), x.rank, token, batch)

    def filled(self, argument: fx.Node) -> Value:
        """An argument with a row for every token: a positional one that is the same in each row is not
        folded.
        """
        if argument not in self.positional:
            return self.value(argument)
        source = argument.args[0] if argument.args else None
        if argument.target in _LIKE and source not in self.positional and isinstance(source, fx.Node):
            x = self.value(source)
            if list(self.fake(source).shape) == list(self.fake(argument).shape):
                number = _LIKE[argument.target]
                fill = argument.args[1] if number is None else number
                dtype = _executed(self.fake(argument).dtype)
                return dataclasses.replace(
                    x, node=self.emit(aten.full_like.default, x.node, fill, dtype=dtype)
                )
        return self.positional_value(argument, fold=False)

    def scattered(self, node: fx.Node, args: dict[str, Any]) -> Any:
        """Slices written side by side into an empty tensor: a join once they cover it."""
        dim = args.get("dim", 0) % self.fake(node).dim()
        size = int(self.fake(node).shape[dim])
        start, stop, step = slice(args.get("start"), args.get("end"), args.get("step", 1)).indices(size)
        if step != 1:
            self.fail("every second feature is written")
        target = args["self"]
        known = self.values.get(target)
        if isinstance(known, _Patches):
            patches = known.patches if known.dim == dim else self.fail("slices of several axes are written")
        elif target in self.positional and target.target in _LIKE:
            patches = []
        else:
            x = self.value(target)
            patches = [(0, start, self.part(x, dim, 0, start)), (stop, size, self.part(x, dim, stop, size))]
        patches = [p for p in patches if p[0] < p[1] and (p[1] <= start or p[0] >= stop)]
        patches = sorted([*patches, (start, stop, self.value(args["src"]))], key=lambda p: p[0])
        ends = [0, *(p[1] for p in patches)]
        if [p[0] for p in patches] == ends[:-1] and ends[-1] == size:
            return self.joined([p[2] for p in patches], dim, self.fake(node))
        return _Patches(dim, patches)

    def part(self, x: Value, dim: int, start: int, stop: int) -> Value:
        return dataclasses.replace(x, node=self.cut(x, dim, start, stop)) if start < stop else x

    # Layout.

    def view(self, node: fx.Node, args: dict[str, Any]) -> Any:
        """Rule 2 for every op that keeps the values' order: sizes before and after the token axis regroup
        apart.
        """
        source = next(iter(args.values()))
        weight = self.weight(source)
        fake = self.fake(node)
        if weight is not None:
            return reshaped(weight, [int(size) for size in fake.shape])
        x = self.value(source)
        if x.token is None:
            return Value(self.reshape(x.node, False, [int(s) for s in fake.shape]), fake.dim())
        token = self.token_axis(fake)
        if token is None:
            self.fail("a view merges tokens with features", found=f"shape {list(fake.shape)}")
        before = self.captured_shape(x)
        head = math.prod(s for s in before[: x.token])
        if head != math.prod(fake.shape[:token]):
            self.fail("a view merges tokens with features", found=f"from {before} to {list(fake.shape)}")
        batch = 0 if token >= 1 and fake.shape[0] == 1 and (x.batch is not None or token == 1) else None
        features = [int(s) for a, s in enumerate(fake.shape) if a not in (token, batch)]
        return Value(self.reshape(x.node, True, features), fake.dim(), token, batch)

    def permute(self, node: fx.Node, args: dict[str, Any]) -> Any:
        source = next(iter(args.values()))
        rank = self.fake(source).dim()
        order = _order(_name(node.target), rank, args)
        weight = self.weight(source)
        if weight is not None:
            return permuted(weight, order)
        x = self.value(source)
        token = order.index(x.token) if x.token is not None else None
        batch = order.index(x.batch) if x.batch is not None else None
        features = [x.axis(a) for a in order if a not in (x.token, x.batch)]
        new = ([0] if x.token is not None else []) + features
        made = x.node if new == sorted(new) else self.emit(aten.permute.default, x.node, new)
        return Value(made, rank, token, batch)

    def slice(self, node: fx.Node, args: dict[str, Any]) -> Any:
        source = args["self"]
        fake = self.fake(source)
        dim = args.get("dim", 0) % fake.dim()
        if list(fake.shape) == list(self.fake(node).shape):
            return self.same(node, args)
        size = fake.shape[dim]
        weight = self.weight(source)
        if weight is None:
            x = self.value(source)
            if dim == x.token:
                self.fail("a slice of the tokens")
        size = int(size)
        start, stop, step = args.get("start"), args.get("end"), args.get("step", 1)
        start, stop, step = slice(start, stop, step).indices(size)
        if weight is not None:
            return sliced(weight, dim, start, stop, step)
        return dataclasses.replace(x, node=self.cut(x, dim, start, stop, step))

    def cut(self, x: Value, dim: int, start: int, stop: int, step: int = 1) -> fx.Node:
        if dim == x.batch:
            return x.node
        axis = x.axis(dim)
        if (start, stop, step) == (0, int(x.node.meta["val"].shape[axis]), 1):
            return x.node
        return self.emit(aten.slice.Tensor, x.node, axis, start, stop, *([step] if step != 1 else []))

    def select(self, node: fx.Node, args: dict[str, Any]) -> Any:
        source, dim, index = args["self"], args["dim"], args["index"]
        rank = self.fake(source).dim()
        dim %= rank
        weight = self.weight(source)
        if weight is not None:
            index %= weight.shape[dim]
            cut = sliced(weight, dim, index, index + 1)
            return reshaped(cut, [s for a, s in enumerate(cut.shape) if a != dim])
        return self.picked(self.value(source), dim, index)

    def picked(self, x: Value, dim: int, index: int) -> Value:
        if dim == x.token:
            self.fail("one token is taken out of the text")

        def moved(axis: int | None) -> int | None:
            return None if axis is None or axis == dim else axis - (axis > dim)

        if dim == x.batch:
            return Value(x.node, x.rank - 1, moved(x.token), None)
        made = self.emit(aten.select.int, x.node, x.axis(dim), index)
        return Value(made, x.rank - 1, moved(x.token), moved(x.batch))

    def split(self, node: fx.Node, args: dict[str, Any]) -> list[Any]:
        """chunk, split and unbind: one slice a part."""
        source = args["self"]
        fakes = node.meta["val"]
        dim = args.get("dim", 0) % self.fake(source).dim()
        weight = self.weight(source)
        if weight is None:
            x = self.value(source)
            if dim == x.token:
                self.fail("the tokens are split")
        parts: list[Any] = []
        start = 0
        for index, fake in enumerate(fakes):
            if _name(node.target) == "unbind":
                if weight is not None:
                    cut = sliced(weight, dim, index, index + 1)
                    parts.append(reshaped(cut, list(fake.shape)))
                else:
                    parts.append(self.picked(x, dim, index))
                continue
            stop = start + int(fake.shape[dim])
            if weight is not None:
                parts.append(sliced(weight, dim, start, stop))
            else:
                parts.append(dataclasses.replace(x, node=self.cut(x, dim, start, stop)))
            start = stop
        return parts

    def cat(self, node: fx.Node, args: dict[str, Any]) -> Any:
        tensors = next(iter(args.values()))
        dim = args.get("dim", 0)
        fake = self.fake(node)
        weights = [self.weight(t) for t in tensors]
        if all(w is not None for w in weights):
            return concatenated(weights, dim % fake.dim())
        values = [self.value(t) for t in tensors if self.fake(t).numel() != 0]
        return self.joined(values, dim % fake.dim(), fake)

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

    def stack(self, node: fx.Node, args: dict[str, Any]) -> Any:
        tensors = next(iter(args.values()))
        fake = self.fake(node)
        dim = args.get("dim", 0) % fake.dim()
        weights = [self.weight(t) for t in tensors]
        if all(w is not None for w in weights):
            made = stacked(weights)
            order = list(range(1, fake.dim()))
            order.insert(dim, 0)
            return permuted(made, order)
        return self.joined([self.raised(self.value(t), dim) for t in tensors], dim, fake)

    def raised(self, v: Value, dim: int) -> Value:
        """The value with a new feature axis of size 1 at the captured axis `dim`."""

        def moved(axis: int | None) -> int | None:
            return None if axis is None else axis + (axis >= dim)

        wide = Value(v.node, v.rank + 1, moved(v.token), moved(v.batch))
        sizes = iter(v.features)
        axes = [a for a in range(wide.rank) if a not in (wide.token, wide.batch)]
        shape = [1 if a == dim else next(sizes) for a in axes]
        return dataclasses.replace(wide, node=self.reshape(v.node, v.token is not None, shape))

    def expand(self, node: fx.Node, args: dict[str, Any]) -> Any:
        source = next(iter(args.values()))
        fake = self.fake(node)
        if list(self.fake(source).shape) == list(fake.shape):
            return self.same(node, args)
        x = self.value(source)
        rank, token, batch = fake.dim(), self.token_axis(fake), None
        if x.batch is not None:
            batch = x.batch + rank - x.rank
        if x.token is None:  # a constant repeated for every token: it broadcasts as it is
            features = [1 if isinstance(s, torch.SymInt) else int(s) for s in fake.shape]
            made = self.reshape(x.node, False, [1] * (rank - x.rank) + x.features)
            return Value(self._expanded(made, False, features), rank)
        made = self.aligned(x, rank, token, batch)
        features = [int(s) for a, s in enumerate(fake.shape) if a not in (token, batch)]
        return Value(self._expanded(made, True, features), rank, token, batch)

    def _expanded(self, node: fx.Node, has_tokens: bool, features: list[int]) -> fx.Node:
        shape = list(node.meta["val"].shape)
        if (shape[1:] if has_tokens else shape) == features:
            return node
        return self.emit(aten.expand.default, node, [-1, *features] if has_tokens else features)

    def repeat_interleave(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x, count, dim = self.value(args["self"]), args["repeats"], args.get("dim")
        if not isinstance(count, int) or dim is None or dim % x.rank == x.token:
            self.fail("tokens are repeated")
        sizes = list(x.features)
        at = x.axis(dim) - (x.token is not None)
        has = x.token is not None
        made = self.reshape(x.node, has, [*sizes[: at + 1], 1, *sizes[at + 1 :]])
        made = self._expanded(made, has, [*sizes[: at + 1], count, *sizes[at + 1 :]])
        sizes[at] *= count
        return dataclasses.replace(x, node=self.reshape(made, has, sizes))

    def repeat(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x, fake = self.value(args["self"]), self.fake(node)
        rank = fake.dim()
        token = x.token + rank - x.rank if x.token is not None else None
        batch = x.batch + rank - x.rank if x.batch is not None else None
        times = args["repeats"]
        if any(a in (token, batch) and times[a] != 1 for a in range(rank)):
            self.fail("tokens are repeated")
        made = self.aligned(x, rank, token, batch)
        counts = [times[a] for a in range(rank) if a not in (token, batch)]
        if any(c != 1 for c in counts):
            made = self.emit(aten.repeat.default, made, [1, *counts] if token is not None else counts)
        return Value(made, rank, token, batch)

    def index(self, node: fx.Node, args: dict[str, Any]) -> Value:
        """Constant indices along one feature axis: a slice for each run of neighbours, joined."""
        x = self.value(args["self"])
        used = [(axis, i) for axis, i in enumerate(args["indices"]) if i is not None]
        if len(used) != 1 or used[0][1] not in self.positional or used[0][0] in (x.token, x.batch):
            self.fail("an index that depends on values, or looks along the tokens")
        axis, index = used[0]
        chosen = self.positional.table(index, 2, None)
        if chosen.dim() != 1 or chosen.dtype == torch.bool:
            self.fail("an index of several axes")
        size = int(x.node.meta["val"].shape[x.axis(axis)])
        runs: list[list[int]] = []
        for i in (int(c) % size for c in chosen):
            if runs and i == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([i, i + 1])
        parts = [self.cut(x, axis, a, b) for a, b in runs]
        made = parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, x.axis(axis))
        return dataclasses.replace(x, node=made)

    def pad(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x, amounts = self.value(args["self"]), args["pad"]
        padded = [x.rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
        if any(a in (x.token, x.batch) or (x.token is not None and a < x.token) for a in padded):
            self.fail("the tokens are padded")
        keep = 2 * (x.rank - 1 - min(padded, default=x.rank - 1) + 1)
        made = self.emit(aten.constant_pad_nd.default, x.node, list(amounts[:keep]), args.get("value", 0))
        return dataclasses.replace(x, node=made)

    def one_hot(self, node: fx.Node, args: dict[str, Any]) -> Value:
        x = self.value(args["self"])
        made = self.emit(aten.one_hot.default, x.node, args["num_classes"])
        return dataclasses.replace(x, node=made, rank=x.rank + 1)

    # The dialect's own ops, as the hooks emit them.

    def packed(self, node: fx.Node, args: dict[str, Any]) -> Value:
        """ew.attention and ew.moe already speak [T, ...]; only their arguments need their new nodes."""
        made = {}
        for key, argument in args.items():
            if not isinstance(argument, fx.Node):
                made[key] = argument
                continue
            v = self.value(argument)
            made[key] = v.node if v.token is None else self.aligned(v, v.rank, v.token, None)
        positional_args, keywords = _call(node.target, made)
        return Value(self.emit(node.target, *positional_args, **keywords), self.fake(node).dim(), 0)


# Helpers on ops.


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def _bound(node: fx.Node) -> tuple[dict[str, Any]]:
    """The node's arguments by name, defaults left out; the first argument comes first."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    bound.update(node.kwargs)
    return (bound,)


def _default(target: Any, name: str) -> Any:
    """The default of an op's argument; None where it has none."""
    found = (a for a in target._schema.arguments if a.name == name and a.has_default_value())
    return next((a.default_value for a in found), None)


def _call(target: Any, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
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


def _with_numbers(target: Any, values: dict[str, Any], numbers: list[str]) -> Any:
    """(overload, arguments) of an elementwise op that takes Python numbers for these arguments, or None."""
    name, overload = _name(target), target._overloadname
    if overload == "Tensor" and name in ("add", "mul", "sub", "div") and numbers == ["other"]:
        return target, values  # fx lets a number stand for the tensor `other`
    if overload == "Tensor" and numbers == ["self"] and name in ("add", "mul"):
        return target, {**values, "self": values["other"], "other": values["self"]}
    if overload == "Tensor" and numbers == ["self"] and name == "sub" and values.get("alpha", 1) == 1:
        return aten.rsub.Scalar, {"self": values["other"], "other": values["self"]}
    if name in ("maximum", "minimum") and numbers in (["other"], ["self"]):
        number = values[numbers[0]]
        tensor = values["self" if numbers == ["other"] else "other"]
        target = aten.clamp_min.default if name == "maximum" else aten.clamp_max.default
        return target, {"self": tensor, "min" if name == "maximum" else "max": number}
    scalar = {"Tensor": "Scalar", "Tensor_Tensor": "Tensor_Scalar", "self": "ScalarOther"}.get(overload)
    packet = getattr(aten, name)
    if scalar and scalar in packet.overloads() and numbers == ["other"]:
        return getattr(packet, scalar), values
    if name == "pow" and numbers == ["exponent"]:
        return aten.pow.Tensor_Scalar, values
    if name == "masked_fill" and numbers == ["value"]:
        return aten.masked_fill.Scalar, values
    if name == "where" and numbers == ["other"]:
        return aten.where.ScalarOther, values
    if name == "where" and numbers == ["self"]:
        return aten.where.ScalarSelf, values
    return None


def _order(name: str, rank: int, args: dict[str, Any]) -> list[int]:
    """The permutation of a permute, transpose, t or movedim."""
    order = list(range(rank))
    if name == "permute":
        return [d % rank for d in args["dims"]]
    if name == "movedim":
        source, target = args["source"], args["destination"]
        pairs = (
            list(zip(source, target, strict=True))
            if isinstance(source, (list, tuple))
            else [(source, target)]
        )
        left = [a for a in order if a not in [s % rank for s, _ in pairs]]
        for s, t in sorted(pairs, key=lambda p: p[1] % rank):
            left.insert(t % rank, s % rank)
        return left
    if name in ("t", "numpy_T"):
        return order[::-1]
    a, b = (-1, -2) if name == "mT" else (args["dim0"], args["dim1"])
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


def _identity(weight: Weight) -> Any:
    """Equal for two expressions that read the same leaves in the same way."""
    if not weight.sources:
        return id(weight)
    own = tuple((k, v) for k, v in sorted(vars(weight).items()) if k not in ("source", "parts", "name"))
    return type(weight), own, tuple(_identity(source) for source in weight.sources)


def _without_batch(sizes: Sequence[int], axis: int) -> list[int]:
    """Feature sizes of a table whose token axis stood at `axis`: a leading batch of 1 goes."""
    return list(sizes[1:]) if axis >= 1 and sizes and sizes[0] == 1 else list(sizes)


def _executed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


#: Ops that fill a tensor of another's shape -> with what (None: their second argument).
_LIKE: dict[Any, float | None] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.new_zeros.default: 0,
    aten.full_like.default: None,
}

_RULES: dict[str, Callable[..., Any]] = {}


def _register(names: str, rule: Callable[..., Any]) -> None:
    for name in names.split():
        _RULES[name] = rule


_register(
    "clone contiguous detach alias dropout lift_fresh_copy lift_fresh feature_dropout",
    _Normaliser.same,
)
_register("to _to_copy type_as float", _Normaliser.cast)
_register(
    """abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min cos cosh div elu eq erf exp exp2 expm1 floor floor_divide fmod ge
    gelu gt hardsigmoid hardswish hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul ne neg pow
    reciprocal relu relu6 remainder round rsqrt rsub sigmoid sign silu sin sinh softplus sqrt
    square sub tan tanh trunc where log_sigmoid""",
    _Normaliser.elementwise,
)
_register("view_as_complex", _Normaliser.as_complex)
_register("view_as_real", _Normaliser.as_real)
_register("linear", _Normaliser.linear)
_register("matmul mm bmm", _Normaliser.matmul)
_register("addmm", _Normaliser.addmm)
_register("embedding", _Normaliser.embedding)
_register("layer_norm", _Normaliser.layer_norm)
_register("rms_norm", _Normaliser.rms_norm)
_register(
    """softmax _softmax log_softmax _log_softmax sum mean amax amin max min prod var all any argmax argmin
    argsort sort topk cumsum cumprod logsumexp flip""",
    _Normaliser.along,
)
_register("gather scatter scatter_add", _Normaliser.indexed)
_register(
    "view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as", _Normaliser.view
)
_register("permute transpose t numpy_T mT movedim", _Normaliser.permute)
_register("slice narrow", _Normaliser.slice)
_register("select", _Normaliser.select)
_register("chunk split split_with_sizes unbind", _Normaliser.split)
_register("cat concat", _Normaliser.cat)
_register("stack", _Normaliser.stack)
_register("expand expand_as broadcast_to", _Normaliser.expand)
_register("repeat", _Normaliser.repeat)
_register("repeat_interleave", _Normaliser.repeat_interleave)
_register("index", _Normaliser.index)
_register("pad constant_pad_nd", _Normaliser.pad)
_register("slice_scatter", _Normaliser.scattered)
_register("one_hot", _Normaliser.one_hot)
_register("ew.attention ew.moe", _Normaliser.packed)
