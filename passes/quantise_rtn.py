"""Give every matrix its recipe's format, by rounding to nearest.

1. ew::linear(x, W, b)        -> ew::quantised_linear(x, codes, scales, offsets, b)
2. ew::moe(x, …, W1, …, W2, …) -> ew::quantised_moe(…): both matrices in one format
3. ew::embedding(tokens, W)   -> ew::quantised_embedding(tokens, codes, scales, offsets)
4. A matrix whose format is f32 stays as it is, and so does a table looked up by position.
5. A matrix used twice (a tied head) stays one stored tensor where both uses ask for one format; else it is stored once
   in each, and a note says so.
6. The linear that produces the logits is the head; a linear whose result chooses experts is a router; the
   recipe speaks of each apart.
7. `keep` takes the integers that the checkpoint holds, where rows only moved, with the checkpoint's rounding of activations.
   What no kernel reads (K-quants and their kin) is rounded again to the nearest format, and a note says so.
8. Kept integers whose groups lie across the inputs (GPTQ's desc_act): x is reordered before the product, once for all
   linears that read it in one order.

All formats are chosen and checked before any weight is read; the rounding itself happens when a backend
loads the parts. What is done to each row depends on that row alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import dialect
from enginewright.passes.kept import HoldsIntegers, KeptWeight, held, input_order, plain, widest
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument
from enginewright.passes.program import Program
from enginewright.passes.quant_formats import QuantisedWeight
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import default_activation, parse_weight
from enginewright.recipes.recipe import Recipe

__all__ = ["Quantise", "roles"]

_PLURAL = {"linear": "linears", "embedding": "embedding", "head": "head", "router": "routers"}


class Quantise:
    """The pass `quantise`; its options are the resolved recipe."""

    name = "quantise"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.options: Mapping[str, Any] = recipe.resolved()

    def run(self, program: Program) -> PassResult:
        """Rewrite every matrix in place. Raises InputError for patterns or formats that this model cannot have."""
        found = roles(program)
        names = _module_names(program, found)
        assigned = self.recipe.assign({names[node]: role for node, role in found.items()})
        notes: list[str] = []
        formats = {
            node: _resolve(program, node, assigned[names[node]].weight, names[node], notes) for node in found
        }
        notes = [*_count(found, formats), *_two_copies(program, formats), *_summarised(notes)]
        stored = _Stored(program, self.recipe.quantise.range)
        for node, (weight_format, kept) in formats.items():
            if weight_format != "f32":
                _REWRITES[str(_kind(node))](program, node, weight_format, stored, kept)
        return PassResult(sum(form != "f32" for form, _ in formats.values()), tuple(notes))


def roles(program: Program) -> dict[fx.Node, str]:
    """Return the nodes that use a matrix -> 'linear', 'embedding', 'head' or 'router', in graph order."""
    nodes = list(program.graph.nodes)
    output = program.graph.output_node()
    heads = set(_producing_linears(output.all_input_nodes))
    routers: set[fx.Node] = set()
    for node in nodes:
        if _kind(node) == "moe":
            routers.update(_producing_linears([argument(node, "topk_index"), argument(node, "topk_weight")]))
    found: dict[fx.Node, str] = {}
    for node in nodes:
        kind = _kind(node)
        if kind == "embedding":
            if _reads_tokens(argument(node, "ids")):
                found[node] = "embedding"
        elif kind in ("linear", "moe"):
            found[node] = "head" if node in heads else "router" if node in routers else "linear"
    return found


def _kind(node: fx.Node) -> str | None:
    name = dialect.name_of(node.target) if node.op == "call_function" else None
    return name if name in ("linear", "moe", "embedding") else None


def _producing_linears(ends: Iterable[fx.Node]) -> list[fx.Node]:
    """The linears from which values flow to `ends` through ops that multiply by no matrix."""
    found, seen, stack = [], set(), list(ends)
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if _kind(node) == "linear":
            found.append(node)
        elif dialect.name_of(node.target) is None or dialect.name_of(node.target) == "activation":
            stack.extend(node.all_input_nodes)
    return found


def _reads_tokens(ids: fx.Node) -> bool:
    """Whether ids are the tokens, perhaps cast or clamped, and not positions."""
    while ids.op == "call_function" and len(ids.all_input_nodes) == 1:
        ids = ids.all_input_nodes[0]
    return ids.op == "placeholder" and ids.target == "tokens"


def _matrices(node: fx.Node) -> list[fx.Node]:
    """The get_attr nodes of the matrices that a node uses."""
    names = ("gate_up", "down") if _kind(node) == "moe" else ("weight",)
    return [argument(node, name) for name in names]


def _module_names(program: Program, nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Checkpoint module names, made unique where one module holds several matrices."""
    names: dict[fx.Node, str] = {}
    used: set[str] = set()
    for node in nodes:
        stem = node.meta.get("module") or str(_matrices(node)[0].target).rpartition(".")[0]
        name, count = stem, 1
        while name in used:
            count += 1
            name = f"{stem}.{count}"
        used.add(name)
        names[node] = name
    return names


def _resolve(program: Program, node: fx.Node, wanted: str, name: str, notes: list[str]) -> tuple[str, bool]:
    """The format a node gets, and whether its integers are carried unchanged."""
    kinds = [held(program.weight_of(matrix)) for matrix in _matrices(node)]
    found = [kind for kind in kinds if kind is not None]
    if wanted != "keep":
        notes += [
            f"{kind.found} rounded again to {wanted}"
            for kind in found
            if wanted != "f32" and parse_weight(kind.format).has_scales
        ]
        return wanted, False
    if len(found) != len(kinds) and _is_quantised(program):
        found = [kind or plain(program.weight_of(m)) for kind, m in zip(kinds, _matrices(node), strict=True)]
    if len(found) != len(kinds):
        raise InputError(
            "the recipe keeps a checkpoint's integers, but this checkpoint holds none",
            found=f"{name} is stored as real numbers",
            expected="a quantised .gguf file or Hugging Face folder",
            action="choose a recipe that quantises, such as int4 or int8",
        )
    kind = widest(found)
    if _kind(node) != "linear" and any(_is_reordered(program.weight_of(m)) for m in _matrices(node)):
        kind = replace(kind, kept=False)
    if not kind.kept:
        notes.append(f"{kind.found} rounded again to {kind.format}")
    elif not kind.exact:
        notes.append(f"{kind.found} carried as {kind.format}, its scales rounded to float16")
    return kind.format, kind.kept


def _is_quantised(program: Program) -> bool:
    """Whether any weight comes from a quantised checkpoint."""
    return any(isinstance(leaf, HoldsIntegers) for w in program.weights.values() for leaf in w.leaves())


def _is_reordered(weight: Weight) -> bool:
    """Whether the integers want their inputs in another order, which only a linear gives them."""
    return any(getattr(leaf, "input_order", None) is not None for leaf in weight.leaves())


def _count(found: Mapping[fx.Node, str], formats: Mapping[fx.Node, tuple[str, bool]]) -> list[str]:
    """How many matrices of each role got which format, of how many."""
    totals = Counter(found.values())
    counts = Counter((found[node], *formats[node]) for node in found)
    notes = []
    for role, noun in _PLURAL.items():
        shares = [
            f"{count} of {totals[role]} {_said(form, kept)}"
            for (which, form, kept), count in counts.items()
            if which == role
        ]
        if shares:
            notes.append(f"{noun}: {', '.join(shares)}")
    return notes


def _said(weight_format: str, kept: bool) -> str:
    return (
        f"{weight_format} (integers kept)"
        if kept and parse_weight(weight_format).has_scales
        else weight_format
    )


def _two_copies(program: Program, formats: Mapping[fx.Node, tuple[str, bool]]) -> list[str]:
    """One note a matrix that has to be stored in more than one format."""
    stored: dict[str, set[str]] = {}
    for node, (weight_format, kept) in formats.items():
        for matrix in _matrices(node):
            stored.setdefault(str(matrix.target), set()).add(_said(weight_format, kept))
    return [
        f"{name} is stored {len(kinds)} times ({', '.join(sorted(kinds))}): its uses ask for unlike formats"
        for name, kinds in stored.items()
        if len(kinds) > 1
    ]


def _summarised(notes: list[str]) -> list[str]:
    return [f"{count} × {note}" if count > 1 else note for note, count in Counter(notes).items()]


class _Stored:
    """The quantised matrices of a program: one a (weight, format), however many nodes use it."""

    def __init__(self, program: Program, search: str) -> None:
        self.program, self.search = program, search
        self.known: dict[str, QuantisedWeight] = {}
        self.reordered: list[tuple[fx.Node, Tensor, fx.Node]] = []

    def reorder(self, x: fx.Node, order: Tensor, before: fx.Node) -> fx.Node:
        """x with its features in another order; one node an order."""
        for source, known, node in self.reordered:
            if source is x and torch.equal(known, order):
                return node
        name = f"input_order_{len(self.reordered)}"
        index = self.program.add_weight(name, ConstantTensor(name, order))
        node = self.program.call(torch.ops.aten.index_select.default, (x, -1, index), before=before)
        self.reordered.append((x, order, node))
        return node

    def parts(self, matrix: fx.Node, weight_format: str, kept: bool) -> list[fx.Node | None]:
        """get_attr nodes of codes, scales and offsets (None where the format has none)."""
        integers = kept and parse_weight(weight_format).has_scales
        name = f"{matrix.target}.{weight_format}{'.kept' if integers else ''}"
        if name not in self.known:
            source = self.program.weight_of(matrix)
            self.known[name] = (
                KeptWeight(source, weight_format)
                if integers
                else QuantisedWeight(source, weight_format, self.search)
            )
        quantised = self.known[name]
        return [
            None if part is None else self.program.add_weight(f"{name}.{part.part}", part)
            for part in (quantised.codes, quantised.scales, quantised.offsets)
        ]


def _replace(program: Program, node: fx.Node, op: str, args: list[Any], **options: Any) -> None:
    module = node.meta.get("module", "")
    new = program.call(dialect.OPS[op], args, options, before=node, module=module)
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)


def _linear(program: Program, node: fx.Node, weight_format: str, stored: _Stored, kept: bool) -> None:
    matrix, x = argument(node, "weight"), argument(node, "x")
    parts = stored.parts(matrix, weight_format, kept)
    activation, scale = default_activation(weight_format), 0.0
    weight = program.weight_of(matrix)
    if kept and (kind := held(weight)) is not None:
        activation, scale = kind.activation or activation, kind.activation_scale
        order = input_order(weight)
        x = x if order is None else stored.reorder(x, order, node)
    args = [x, *parts, argument(node, "bias"), weight_format, activation, None, None, scale]
    _replace(program, node, "quantised_linear", args)


def _embedding(program: Program, node: fx.Node, weight_format: str, stored: _Stored, kept: bool) -> None:
    parts = stored.parts(argument(node, "weight"), weight_format, kept)
    args = [argument(node, "ids"), *parts, weight_format, argument(node, "offset"), argument(node, "scale")]
    _replace(program, node, "quantised_embedding", args)


def _moe(program: Program, node: fx.Node, weight_format: str, stored: _Stored, kept: bool) -> None:
    gate_up = stored.parts(argument(node, "gate_up"), weight_format, kept)
    down = stored.parts(argument(node, "down"), weight_format, kept)
    activation, kind = default_activation(weight_format), held(program.weight_of(argument(node, "gate_up")))
    if kept and kind is not None and kind.activation not in (None, "int8_static"):
        activation = kind.activation
    args = [
        argument(node, "x"),
        argument(node, "topk_index"),
        argument(node, "topk_weight"),
        *gate_up,
        argument(node, "gate_up_bias"),
        *down,
        argument(node, "down_bias"),
        argument(node, "activation"),
        weight_format,
        activation,
        argument(node, "alpha"),
        argument(node, "limit"),
    ]
    _replace(program, node, "quantised_moe", args)


_REWRITES = {"linear": _linear, "embedding": _embedding, "moe": _moe}
