"""Values that depend on positions alone, found in a captured graph and evaluated.

A node is positional when neither a token id nor a checkpoint's weight can reach it: rotary cosines,
sinusoids, masks, biases, index arithmetic. Whatever the model's code looks like, such a node is a function of
the position, so it is not pattern-matched but computed: for a text of n tokens, position t of the result is
what position t of every text gets. That the result does not depend on n is checked, not assumed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from enginewright.passes.program import Program
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import CaptureError

__all__ = ["Positional", "token_axes"]

aten = torch.ops.aten

#: Ops whose result depends on their input's shape only -> the value they fill with (None: an argument says).
_FILLS: dict[Any, float | None] = {
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.empty_like.default: 0, aten.new_zeros.default:
    0, aten.new_ones.default: 1, aten.new_empty.default: 0, aten.full_like.default: None,
    aten.new_full.default: None,
}  # fmt: skip


def token_axes(value: torch.Tensor, tokens: torch.SymInt) -> list[int]:
    """The axes of a fake tensor whose size is the number of tokens T; CaptureError for a size like 2·T."""
    axes: list[int] = []
    for axis, size in enumerate(value.shape):
        if not isinstance(size, torch.SymInt):
            continue
        if size.node.expr == tokens.node.expr:
            axes.append(axis)
        elif size.node.expr.free_symbols:
            raise CaptureError("a tensor mixes tokens with features", found=f"shape {list(value.shape)}")
    return axes


class Positional:
    """The positional part of one captured Program."""

    def __init__(self, program: Program):
        self.program = program
        # Held apart from the program: a table may be evaluated after its graph has been replaced.
        self.order: list[fx.Node] = list(program.graph.nodes)
        self.weights = {node: program.weight_of(node) for node in self.order if node.op == "get_attr"}
        self.nodes: set[fx.Node] = set()
        for node in self.order:
            if self._is_positional(node):
                self.nodes.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self.nodes

    def _is_positional(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node.target == "positions"
        if node.op == "get_attr":
            return isinstance(self.weights[node], ConstantTensor)
        if node.op != "call_function":
            return False
        if (
            isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))
            or node.target in _FILLS
        ):
            return True
        return all(source in self.nodes for source in node.all_input_nodes)

    def evaluate(self, node: fx.Node, tokens: int) -> torch.Tensor:
        """The node's value for one text of that many tokens, in the captured layout."""
        return self.evaluate_all([node], tokens)[0]

    def evaluate_all(
        self, nodes: list[fx.Node], tokens: int, given: dict[fx.Node, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Several nodes' values; `given` states values of nodes that are not positional themselves."""
        env: dict[fx.Node, Any] = dict(given or {})
        needed: set[fx.Node] = set()
        stack = [node for node in nodes if node not in env]
        while stack:
            node = stack.pop()
            if node in needed or node in env:
                continue
            needed.add(node)
            if not self._from_shape(node):
                stack += node.all_input_nodes
        last: dict[fx.Node, fx.Node] = {}
        order = [node for node in self.order if node in needed]
        for node in order:
            for source in node.all_input_nodes:
                last[source] = node
        with torch.no_grad():
            for node in order:
                env[node] = self._compute(node, env, tokens)
                for source in node.all_input_nodes:
                    if last.get(source) is node and source not in nodes and source in needed:
                        env.pop(source, None)
        return [env[node] for node in nodes]

    def _from_shape(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)) or node.target in _FILLS

    def _compute(self, node: fx.Node, env: dict[fx.Node, Any], tokens: int) -> Any:
        value = node.meta.get("val")
        if node.op == "placeholder":
            return torch.arange(tokens, dtype=torch.int64)[None]
        if node.op == "get_attr":
            weight = self.weights[node].load()
            return weight.float() if weight.dtype.is_floating_point else weight
        if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return self._number(value, tokens)
        if node.target in _FILLS:
            fill = _FILLS[node.target]
            if fill is None:
                fill = node.args[-1]  # type: ignore[assignment]
            shape = [self._number(size, tokens) for size in value.shape]  # type: ignore[union-attr]
            return torch.full(shape, fill, dtype=value.dtype)  # type: ignore[union-attr,arg-type]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _number(self, value: Any, tokens: int) -> Any:
        if not isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return value
        expression = value.node.expr
        number = expression.subs(dict.fromkeys(expression.free_symbols, tokens))
        if isinstance(value, torch.SymBool):
            return bool(number)
        return int(number) if isinstance(value, torch.SymInt) else float(number)

    def table(self, node: fx.Node, tokens: int, axis: int | None) -> torch.Tensor:
        """The value with its token axis first, for `tokens` positions; the value itself where `axis` is None.

        Raises CaptureError when a shorter text would get other rows.
        """
        whole = self._leading(self.evaluate(node, tokens), axis)
        for shorter in (1, 7):
            if shorter >= tokens:
                continue
            part = self._leading(self.evaluate(node, shorter), axis)
            expected = whole if axis is None else whole[:shorter]
            if not _same(part, expected):
                module = node.meta.get("module") or "the model"
                raise CaptureError(
                    f"a value in {module} depends on the length of the text, not only on the position, "
                    "so cached keys could not follow it",
                    found=f"{node.name}: its first rows differ between {shorter} and {tokens} tokens",
                )
        return whole

    @staticmethod
    def _leading(value: torch.Tensor, axis: int | None) -> torch.Tensor:
        return value if axis is None else value.movedim(axis, 0)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the rounding that another length of the vectorised loops may cause."""
    if a.shape != b.shape:
        return False
    return (
        torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
    )
