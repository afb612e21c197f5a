"""cut_out — a part of a final Program as a final Program of its own, fed with values that were computed before.

A step's inputs are token ids. So a value [T, …] is fed as a table of T rows that is looked up by the ids 0 … T - 1: any backend
that lowers the model lowers its parts, and what one of them gives can be compared alone, from exact inputs.

Rules
1. A *unit* is what a backend may compute in one go: an op with the ops before it that only move features, a rope with the
   attention that reads it, a linear with the gated activation that reads it. What follows from positions and weights alone is
   part of every unit that reads it.
2. `cut_out` takes the nodes between fed values and a wanted one. Its result is flattened, and repeated until it is as wide as the
   table is long: the vocabulary of the new Program, so that its ids are legal.
3. ew::select_rows stands at the end, and nowhere else: what it gave is fed like any value, or has a row a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS
from enginewright.passes.matching import MOVEMENTS, argument, is_call, only_user, picked
from enginewright.passes.program import Program, Stage
from enginewright.passes.weights import ConstantTensor

__all__ = ["Unit", "cut_out", "fed", "named", "op_of", "signature", "units"]

aten = torch.ops.aten
_SPLITS = ("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")


@dataclass(frozen=True)
class Unit:
    """Nodes that are compared as one: `inputs`, values that depend on the tokens, and `outputs`, what others read of it."""

    node: fx.Node
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def op(self) -> str:
        return op_of(self.node)

    @property
    def module(self) -> str:
        return str(self.node.meta.get("module", ""))


def op_of(node: fx.Node) -> str:
    """`ew::linear`, `aten::mul`; of a node whose rounding was taken out, what it was."""
    if "op" in node.meta:
        return str(node.meta["op"])
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))


def named(node: fx.Node) -> str:
    """A node for a reader: its name, op and module."""
    return f"{node.meta.get('name', node.name)} ({op_of(node)}, {node.meta.get('module') or 'no module'})"


def fed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on what the tokens are, not on positions and weights alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and node.target == "tokens") or any(
            source in found for source in node.all_input_nodes
        ):
            found.add(node)
    return found


def units(program: Program) -> list[Unit]:
    """The units of a final Program, in graph order; between them they have every op that computes something of the tokens."""
    tokens = fed(program.graph)
    made = []
    for node in program.graph.nodes:
        if node not in tokens or node.op != "call_function" or is_call(node, OPS["select_rows"]):
            continue
        if _passes_on(node) or picked(node) is not None or _joins_its_user(node):
            continue
        results = [user for user in node.users if picked(user) is not None]
        outputs = tuple(sorted(results, key=lambda user: user.args[1])) if results else (node,)
        made.append(Unit(node, _sources(node, tokens), outputs))
    return made


def _passes_on(node: fx.Node) -> bool:
    """Whether a node only moves what it reads."""
    if is_call(node, *MOVEMENTS) or op_of(node) in _SPLITS:
        return True
    return picked(node) is not None and _passes_on(node.args[0])  # type: ignore[arg-type]


def _joins_its_user(node: fx.Node) -> bool:
    user = only_user(node)
    if user is None:
        return False
    if is_call(node, OPS["rope"]):
        return is_call(user, OPS["paged_attention"])
    return is_call(node, OPS["linear"], OPS["quantised_linear"]) and is_call(user, OPS["gated_activation"])


def _sources(node: fx.Node, tokens: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The values of other units, or inputs, that a unit reads."""
    found: dict[fx.Node, None] = {}
    todo = [source for source in reversed(node.all_input_nodes) if source in tokens]
    while todo:
        source = todo.pop()
        if source.op == "call_function" and (_passes_on(source) or _joins_its_user(source)):
            todo += [n for n in reversed(source.all_input_nodes) if n in tokens]
        else:
            found[source] = None
    return tuple(found)


def signature(unit: Unit) -> tuple[Any, ...]:
    """Equal for units that a backend treats alike: ops, attributes, shapes of inputs and weights."""
    inside, todo = set(unit.inputs), [unit.node]
    described: list[tuple[Any, ...]] = []
    while todo:
        node = todo.pop(0)
        value = node.meta.get("val")
        shape = tuple(str(s) if isinstance(s, torch.SymInt) else s for s in getattr(value, "shape", ()))
        if node in inside or node.op != "call_function":
            name = str(node.target).partition("_pool_")[0] if node.op == "placeholder" else node.op
            described.append(
                (name, shape[1:]) if node.op == "placeholder" or node in inside else (name, shape)
            )
            continue
        plain = [repr(a) for a in node.args if not isinstance(a, (fx.Node, list, tuple))]
        if is_call(node, OPS["paged_attention"]):
            window, form = argument(node, "window"), argument(node, "kv_format")
            plain = [repr((argument(node, "scale"), window, argument(node, "softcap"), form))]
        elif is_call(node, OPS["quantised_linear"]):  # whatever a static scale is
            plain = [argument(node, "weight_format"), argument(node, "activation_format")]
        described.append((op_of(node), *plain))
        todo += node.all_input_nodes
    return tuple(described)


def cut_out(
    program: Program, outputs: Sequence[fx.Node], values: Mapping[fx.Node, Tensor], least_width: int
) -> Program:
    """A final Program that computes `outputs` (side by side, flattened) of the `values` [rows, …] of nodes before them.

    Its tokens are the rows' numbers; where `values` is empty it starts from the tokens, as `program` does. Its vocabulary is as
    wide as its result, at least `least_width`: ids lie below it. KV groups and pools stay those of `program`.
    """
    cut = Program(fx.Graph(), Stage.FINAL, {}, program.facts, fake_mode=program.fake_mode)
    cut._tokens = program.tokens
    needed = _needed(outputs, values)
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            known[node] = cut.graph.placeholder(str(node.target))
            known[node].meta = dict(node.meta)
    ids, rows = (
        next(new for new in known.values() if new.target == name) for name in ("tokens", "logit_rows")
    )
    cut.graph.output(ids)
    for node in program.graph.nodes:
        if node.op == "get_attr" and node in needed:
            known[node] = cut.add_weight(str(node.target), program.weight_of(node))
    for node in program.graph.nodes:
        if node in values:
            known[node] = _feed(cut, node, values[node], ids)
        elif node in needed and is_call(node, OPS["select_rows"]):
            known[node] = known[node.all_input_nodes[0]]
        elif node in needed and node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = cut.call(node.target, args, kwargs, module=node.meta.get("module", ""))
    result = _flattened(cut, [known[node] for node in outputs], least_width)
    chosen = cut.call(OPS["select_rows"], (result, rows))
    cut.graph.output_node().args = (chosen,)
    cut.facts = dataclasses.replace(program.facts, vocab_size=int(chosen.meta["val"].shape[-1]))
    cut.recompile()
    return cut


def _needed(outputs: Iterable[fx.Node], values: Mapping[fx.Node, Tensor]) -> set[fx.Node]:
    """Everything that the outputs depend on, up to the values that are fed."""
    found: set[fx.Node] = set()
    todo = [node for node in outputs if node not in values]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [source for source in node.all_input_nodes if source not in values]
    return found


def _feed(cut: Program, node: fx.Node, value: Tensor, ids: fx.Node) -> fx.Node:
    """The node's value, looked up row by row."""
    name = f"fed.{node.name}"
    table = cut.add_weight(name, ConstantTensor(name, value.float().flatten(1).contiguous()))
    fed_ = cut.call(OPS["embedding"], (ids, table), module=node.meta.get("module", ""))
    if value.dim() != 2:
        fed_ = cut.call(aten.view.default, (fed_, [-1, *value.shape[1:]]))
    if not value.is_floating_point():
        fed_ = cut.call(aten._to_copy.default, (fed_,), {"dtype": node.meta["val"].dtype})
    return fed_


def _flattened(cut: Program, values: Sequence[fx.Node], least_width: int) -> fx.Node:
    """Values [T, …] side by side as [T, features] f32, repeated until they are wide enough."""
    flat = []
    for value in values:
        found = value.meta["val"]
        if not found.dtype.is_floating_point:
            value = cut.call(aten._to_copy.default, (value,), {"dtype": torch.float32})
        if found.dim() != 2:
            width = int(torch.tensor(found.shape[1:]).prod()) if found.dim() > 1 else 1
            value = cut.call(aten.reshape.default, (value, [-1, width]))
        flat.append(value)
    width = sum(int(value.meta["val"].shape[-1]) for value in flat)
    flat *= -(-least_width // width)
    return cut.call(aten.cat.default, (flat, -1)) if len(flat) > 1 else flat[0]
