"""A Program with its rounding taken out: what all its passes together make of the model, but for the formats.

1. ew::quantised_linear, ew::quantised_embedding, ew::quantised_moe  →  their dense op over the weights that the codes stand for:
   those that the pass `quantise` rounded, rearranged as later passes have rearranged the codes.
2. Columns that a linear keeps apart are in that dense matrix again.
3. ew::paged_attention keeps its keys and values in f32.

In logits the result equals the captured model within the order of fp32 sums, whatever the recipe: so a pass that changes the
model shows, however much rounding the recipe allows. And each stored matrix can be held against what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import dialect
from enginewright.passes.calibrated import Zeroed
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import dequantise
from enginewright.passes.kept import KeptWeight, input_order
from enginewright.passes.matching import argument
from enginewright.passes.program import Program
from enginewright.passes.quant_formats import QuantisedPart
from enginewright.passes.weights import Concatenated, Permuted, Reshaped, Sliced, Stacked, Weight

__all__ = ["StoredMatrix", "stored_matrices", "unrounded"]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as a quantised node reads it: the weights of its parts, its format, and what it stands for (`source`).

    `rounded` is what was rounded: the source, or the source without the columns that the linear keeps apart.
    """

    node: fx.Node
    name: str
    weight_format: str
    codes: Weight
    scales: Weight | None
    offsets: Weight | None
    source: Weight
    rounded: Weight

    def dense(self) -> Tensor:
        """The float32 matrix [..., N, K] that the codes stand for."""
        scales, offsets = (None if part is None else part.load() for part in (self.scales, self.offsets))
        return dequantise(self.codes.load(), scales, offsets, self.weight_format)

    @property
    def is_kept(self) -> bool:
        """Whether its integers are a checkpoint's own."""
        return any(isinstance(part.owner, KeptWeight) for part in _parts(self.codes))


class _Stored(Weight):
    """A matrix that stands for nothing else: its codes, dequantised."""

    def __init__(self, codes: Weight, scales: Weight | None, offsets: Weight | None, form: str) -> None:
        self.codes, self.scales, self.offsets, self.form = codes, scales, offsets, form
        self.name, self.shape, self.dtype = codes.name, codes.shape, torch.float32

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.codes,)

    def load(self) -> Tensor:
        scales, offsets = (None if part is None else part.load() for part in (self.scales, self.offsets))
        return dequantise(self.codes.load(), scales, offsets, self.form)


class _Reordered(Weight):
    """A matrix with its inputs (the last axis) in another order."""

    def __init__(self, source: Weight, order: Tensor) -> None:
        self.source, self.order = source, order.long()
        self.name, self.shape, self.dtype = source.name, source.shape, source.dtype

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.source,)

    def load(self) -> Tensor:
        return self.source.load().index_select(-1, self.order)


def stored_matrices(program: Program) -> Iterator[StoredMatrix]:
    """The matrices of every quantised node, in graph order; a node of experts has two. Tied ones come once a use."""
    for node in program.graph.nodes:
        for prefix in _prefixes(node):
            yield _matrix(program, node, prefix)


def unrounded(program: Program) -> Program:
    """A copy of `program` (at any stage) that computes in fp32 with the weights before rounding."""
    program = program.clone()
    known: dict[str, Weight] = {}
    for node in list(program.graph.nodes):
        name = dialect.name_of(node.target) if node.op == "call_function" else None
        if name == "paged_attention":
            _set(node, "kv_format", "f32")
        dense = {}
        for prefix in _prefixes(node):
            matrix = _matrix(program, node, prefix)
            target = f"{argument(node, f'{prefix}codes').target}.unrounded"
            dense[prefix] = program.add_weight(target, known.setdefault(target, matrix.source))
        if dense:
            _replace(program, node, str(name), dense)
    program.recompile()
    return program


def _prefixes(node: fx.Node) -> tuple[str, ...]:
    name = dialect.name_of(node.target) if node.op == "call_function" else None
    if name == "quantised_moe":
        return ("gate_up_", "down_")
    return ("",) if name in ("quantised_linear", "quantised_embedding") else ()


def _matrix(program: Program, node: fx.Node, prefix: str) -> StoredMatrix:
    parts = [argument(node, f"{prefix}{part}") for part in ("codes", "scales", "offsets")]
    codes, scales, offsets = (None if part is None else program.weight_of(part) for part in parts)
    assert codes is not None
    form = argument(node, "weight_format")
    source = _source(codes) or _Stored(codes, scales, offsets, form)
    name = f"{node.meta.get('module') or parts[0].target}{'.' + prefix.rstrip('_') if prefix else ''}"
    rounded = _source(codes, whole=False) or source
    return StoredMatrix(node, name, form, codes, scales, offsets, source, rounded)


def _source(codes: Weight, whole: bool = True) -> Weight | None:
    """What codes stand for, rearranged as they are; None where nothing was rounded. `whole`: with the columns kept apart."""
    if isinstance(codes, QuantisedPart):
        owner = codes.owner
        source = owner.source
        if whole and isinstance(source, Zeroed):
            source = source.source
        order = input_order(source) if isinstance(owner, KeptWeight) else None
        return source if order is None else _Reordered(source, order)
    parts = [_source(part, whole) for part in codes.sources]
    found = [part for part in parts if part is not None]
    if not found or len(found) != len(parts):
        return None
    if isinstance(codes, Concatenated):
        return Concatenated(found, codes.dim, codes.name)
    if isinstance(codes, Stacked):
        return Stacked(found, codes.name)
    if isinstance(codes, Sliced):
        return Sliced(found[0], codes.dim, codes.start, codes.stop, codes.step, codes.name)
    if isinstance(codes, Permuted):
        return Permuted(found[0], codes.axes, codes.name)
    return Reshaped(found[0], codes.shape, codes.name) if isinstance(codes, Reshaped) else None


def _parts(codes: Weight) -> Iterator[QuantisedPart]:
    if isinstance(codes, QuantisedPart):
        yield codes
    else:
        for source in codes.sources:
            yield from _parts(source)


def _replace(program: Program, node: fx.Node, name: str, dense: dict[str, fx.Node]) -> None:
    """The dense op in the place of a quantised one, whose name and op stay in `meta`."""
    given = {"": ("weight",), "gate_up_": ("gate_up",), "down_": ("down",)}
    values: dict[str, Any] = {given[prefix][0]: weight for prefix, weight in dense.items()}
    op = OPS[name.removeprefix("quantised_")]
    args = []
    for item in op._schema.arguments:
        args.append(values[item.name] if item.name in values else argument(node, item.name))
    new = program.call(op, args, before=node, module=node.meta.get("module", ""))
    new.meta |= {"name": node.name, "op": f"ew::{name}"}
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Give an argument of a dialect op another value."""
    names = [item.name for item in node.target._schema.arguments]  # type: ignore[union-attr]
    args = [argument(node, item) for item in names]
    args[names.index(name)] = value
    node.args, node.kwargs = tuple(args), {}
