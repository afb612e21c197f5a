"""Normalisation of lookups: embeddings, gather and scatter along features, constant indices."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from enginewright.passes.normalising.rewriter import (
    LIKE,
    Patches,
    Rewriter,
    Value,
    call_arguments,
    op_name,
    rule,
)
from enginewright.passes.weights import reshaped, sliced

aten, ew = torch.ops.aten, torch.ops.ew


@rule("embedding")
def embedding(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    """Rule 5."""
    weight, ids = r.weight(args["weight"]), args["indices"]
    if weight is None:
        r.fail("a lookup in a table that is not a weight")
    table = r.weight_node(weight)
    if ids in r.positional:
        axis = r.token_axis(r.fake(ids))
        context = r.old.facts.max_context
        rows = r.positional.table(ids, context, axis).reshape(-1)
        offset = int(rows[0]) if rows.numel() else 0
        if rows.numel() and bool((rows == offset).all()):
            row = reshaped(sliced(weight, 0, offset, offset + 1), weight.shape[1:])
            return Value(r.weight_node(row), 1)
        if axis is None or rows.numel() != context or not torch.equal(rows, torch.arange(context) + offset):
            r.fail("a lookup by something other than a token or its position plus a constant")
        learned = weight.shape[0]
        if offset + context > learned:
            r.fail(
                "the maximum context needs more positions than the model has learned",
                found=f"{learned} rows, of which {learned - offset} are for text",
                expected=f"{offset + context} rows for {context} tokens",
                action=f"set max_context to {learned - offset} or less",
            )
        made = r.emit(ew.embedding.default, r.inputs["positions"], table, offset)
        rank = r.fake(node).dim()
        return Value(made, rank, axis, 0 if axis == 1 and r.fake(node).shape[0] == 1 else None)
    v = r.value(ids)
    if v.token is None or v.features:
        r.fail("a lookup by something other than one id a token")
    return Value(r.emit(ew.embedding.default, v.node, table), v.rank + 1, v.token, v.batch)


@rule("gather scatter scatter_add")
def indexed(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    """gather and scatter along a feature axis: all tensors share one layout."""
    tensors = {k: r.filled(a) for k, a in args.items() if isinstance(a, fx.Node)}
    x = next(iter(tensors.values()))
    token = next((v.token for v in tensors.values() if v.token is not None), None)
    batch = next((v.batch for v in tensors.values() if v.batch is not None), None)
    if token is None or args["dim"] % x.rank == token:
        r.fail(f"{op_name(node.target)} works along the tokens")
    made = dict(args)
    for key, v in tensors.items():
        if v.token is None:
            r.fail(f"{op_name(node.target)} on a value without tokens")
        made[key] = r.aligned(v, x.rank, token, batch)
    made["dim"] = Value(x.node, x.rank, token, batch).axis(args["dim"])
    positional_args, keywords = call_arguments(node.target, made)
    return Value(r.emit(node.target, *positional_args, **keywords), x.rank, token, batch)


@rule("slice_scatter")
def scattered(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    """Slices written side by side into an empty tensor: a join once they cover it."""
    dim = args.get("dim", 0) % r.fake(node).dim()
    size = int(r.fake(node).shape[dim])
    start, stop, step = slice(args.get("start"), args.get("end"), args.get("step", 1)).indices(size)
    if step != 1:
        r.fail("every second feature is written")
    target = args["self"]
    known = r.values.get(target)
    if isinstance(known, Patches):
        patches = known.patches if known.dim == dim else r.fail("slices of several axes are written")
    elif target in r.positional and target.target in LIKE:
        patches = []
    else:
        x = r.value(target)
        patches = [(0, start, r.part(x, dim, 0, start)), (stop, size, r.part(x, dim, stop, size))]
    patches = [p for p in patches if p[0] < p[1] and (p[1] <= start or p[0] >= stop)]
    patches = sorted([*patches, (start, stop, r.value(args["src"]))], key=lambda p: p[0])
    ends = [0, *(p[1] for p in patches)]
    if [p[0] for p in patches] == ends[:-1] and ends[-1] == size:
        return r.joined([p[2] for p in patches], dim, r.fake(node))
    return Patches(dim, patches)


@rule("index")
def index(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    """Constant indices along one feature axis: a slice for each run of neighbours, joined."""
    x = r.value(args["self"])
    used = [(axis, i) for axis, i in enumerate(args["indices"]) if i is not None]
    if len(used) != 1 or used[0][1] not in r.positional or used[0][0] in (x.token, x.batch):
        r.fail("an index that depends on values, or looks along the tokens")
    axis, index = used[0]
    chosen = r.positional.table(index, 2, None)
    if chosen.dim() != 1 or chosen.dtype == torch.bool:
        r.fail("an index of several axes")
    size = int(x.node.meta["val"].shape[x.axis(axis)])
    runs: list[list[int]] = []
    for i in (int(c) % size for c in chosen):
        if runs and i == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([i, i + 1])
    parts = [r.cut(x, axis, a, b) for a, b in runs]
    made = parts[0] if len(parts) == 1 else r.emit(aten.cat.default, parts, x.axis(axis))
    return dataclasses.replace(x, node=made)


@rule("one_hot")
def one_hot(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x = r.value(args["self"])
    made = r.emit(aten.one_hot.default, x.node, args["num_classes"])
    return dataclasses.replace(x, node=made, rank=x.rank + 1)
