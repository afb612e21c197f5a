"""Normalisation of layout: views, transposes, slices, joins, repeats; inside a token's row or of weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from enginewright.passes.normalising.rewriter import Rewriter, Value, op_name, rule
from enginewright.passes.weights import concatenated, permuted, reshaped, sliced, stacked

aten = torch.ops.aten


@rule("view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as")
def view(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    """Rule 2 for every op that keeps the values' order: sizes before and after the token axis regroup apart."""
    source = next(iter(args.values()))
    weight = r.weight(source)
    fake = r.fake(node)
    if weight is not None:
        return reshaped(weight, [int(size) for size in fake.shape])
    x = r.value(source)
    if x.token is None:
        return Value(r.reshape(x.node, False, [int(s) for s in fake.shape]), fake.dim())
    token = r.token_axis(fake)
    if token is None:
        r.fail("a view merges tokens with features", found=f"shape {list(fake.shape)}")
    before = r.captured_shape(x)
    head = math.prod(s for s in before[: x.token])
    if head != math.prod(fake.shape[:token]):
        r.fail("a view merges tokens with features", found=f"from {before} to {list(fake.shape)}")
    batch = 0 if token >= 1 and fake.shape[0] == 1 and (x.batch is not None or token == 1) else None
    features = [int(s) for a, s in enumerate(fake.shape) if a not in (token, batch)]
    return Value(r.reshape(x.node, True, features), fake.dim(), token, batch)


@rule("permute transpose t numpy_T mT movedim")
def permute(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    source = next(iter(args.values()))
    rank = r.fake(source).dim()
    order = _order(op_name(node.target), rank, args)
    weight = r.weight(source)
    if weight is not None:
        return permuted(weight, order)
    x = r.value(source)
    token = order.index(x.token) if x.token is not None else None
    batch = order.index(x.batch) if x.batch is not None else None
    features = [x.axis(a) for a in order if a not in (x.token, x.batch)]
    new = ([0] if x.token is not None else []) + features
    made = x.node if new == sorted(new) else r.emit(aten.permute.default, x.node, new)
    return Value(made, rank, token, batch)


@rule("slice narrow")
def narrow(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    source = args["self"]
    fake = r.fake(source)
    dim = args.get("dim", 0) % fake.dim()
    if list(fake.shape) == list(r.fake(node).shape):
        return r.unchanged(source)
    size = fake.shape[dim]
    weight = r.weight(source)
    if weight is None:
        x = r.value(source)
        if dim == x.token:
            r.fail("a slice of the tokens")
    size = int(size)
    start, stop, step = args.get("start"), args.get("end"), args.get("step", 1)
    if op_name(node.target) == "narrow":
        stop = start + args["length"]
    start, stop, step = slice(start, stop, step).indices(size)
    if weight is not None:
        return sliced(weight, dim, start, stop, step)
    return dataclasses.replace(x, node=r.cut(x, dim, start, stop, step))


@rule("select")
def select(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    source, dim, index = args["self"], args["dim"], args["index"]
    rank = r.fake(source).dim()
    dim %= rank
    weight = r.weight(source)
    if weight is not None:
        index %= weight.shape[dim]
        cut = sliced(weight, dim, index, index + 1)
        return reshaped(cut, [s for a, s in enumerate(cut.shape) if a != dim])
    return r.picked(r.value(source), dim, index)


@rule("chunk split split_with_sizes unbind")
def split(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> list[Any]:
    """chunk, split and unbind: one slice a part."""
    source = args["self"]
    fakes = node.meta["val"]
    dim = args.get("dim", 0) % r.fake(source).dim()
    weight = r.weight(source)
    if weight is None:
        x = r.value(source)
        if dim == x.token:
            r.fail("the tokens are split")
    parts: list[Any] = []
    start = 0
    for index, fake in enumerate(fakes):
        if op_name(node.target) == "unbind":
            if weight is not None:
                cut = sliced(weight, dim, index, index + 1)
                parts.append(reshaped(cut, list(fake.shape)))
            else:
                parts.append(r.picked(x, dim, index))
            continue
        stop = start + int(fake.shape[dim])
        if weight is not None:
            parts.append(sliced(weight, dim, start, stop))
        else:
            parts.append(dataclasses.replace(x, node=r.cut(x, dim, start, stop)))
        start = stop
    return parts


@rule("cat concat")
def cat(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    tensors = next(iter(args.values()))
    dim = args.get("dim", 0)
    fake = r.fake(node)
    weights = [w for w in map(r.weight, tensors) if w is not None]
    if len(weights) == len(tensors):
        return concatenated(weights, dim % fake.dim())
    values = [r.value(t) for t in tensors if r.fake(t).numel() != 0]
    return r.joined(values, dim % fake.dim(), fake)


@rule("stack")
def stack(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    tensors = next(iter(args.values()))
    fake = r.fake(node)
    dim = args.get("dim", 0) % fake.dim()
    weights = [w for w in map(r.weight, tensors) if w is not None]
    if len(weights) == len(tensors):
        made = stacked(weights)
        order = list(range(1, fake.dim()))
        order.insert(dim, 0)
        return permuted(made, order)
    return r.joined([r.raised(r.value(t), dim) for t in tensors], dim, fake)


@rule("expand expand_as broadcast_to")
def expand(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    source = next(iter(args.values()))
    fake = r.fake(node)
    if list(r.fake(source).shape) == list(fake.shape):
        return r.unchanged(source)
    x = r.value(source)
    rank, token, batch = fake.dim(), r.token_axis(fake), None
    if x.batch is not None:
        batch = x.batch + rank - x.rank
    if x.token is None:  # a constant repeated for every token: it broadcasts as it is
        features = [1 if isinstance(s, torch.SymInt) else int(s) for s in fake.shape]
        made = r.reshape(x.node, False, [1] * (rank - x.rank) + x.features)
        return Value(r.expanded(made, False, features), rank)
    made = r.aligned(x, rank, token, batch)
    features = [int(s) for a, s in enumerate(fake.shape) if a not in (token, batch)]
    return Value(r.expanded(made, True, features), rank, token, batch)


@rule("repeat_interleave")
def repeat_interleave(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x, count, dim = r.value(args["self"]), args["repeats"], args.get("dim")
    if not isinstance(count, int) or dim is None or dim % x.rank == x.token:
        r.fail("tokens are repeated")
    sizes = list(x.features)
    at = x.axis(dim) - (x.token is not None)
    has = x.token is not None
    made = r.reshape(x.node, has, [*sizes[: at + 1], 1, *sizes[at + 1 :]])
    made = r.expanded(made, has, [*sizes[: at + 1], count, *sizes[at + 1 :]])
    sizes[at] *= count
    return dataclasses.replace(x, node=r.reshape(made, has, sizes))


@rule("repeat")
def repeat(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x, fake = r.value(args["self"]), r.fake(node)
    rank = fake.dim()
    token = x.token + rank - x.rank if x.token is not None else None
    batch = x.batch + rank - x.rank if x.batch is not None else None
    times = args["repeats"]
    if any(a in (token, batch) and times[a] != 1 for a in range(rank)):
        r.fail("tokens are repeated")
    made = r.aligned(x, rank, token, batch)
    counts = [times[a] for a in range(rank) if a not in (token, batch)]
    if any(c != 1 for c in counts):
        made = r.emit(aten.repeat.default, made, [1, *counts] if token is not None else counts)
    return Value(made, rank, token, batch)


@rule("pad constant_pad_nd")
def pad(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x, amounts = r.value(args["self"]), args["pad"]
    padded = [x.rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    if any(a in (x.token, x.batch) or (x.token is not None and a < x.token) for a in padded):
        r.fail("the tokens are padded")
    keep = 2 * (x.rank - 1 - min(padded, default=x.rank - 1) + 1)
    with r.new.graph.inserting_before(r.new.graph.output_node()):
        arguments = (x.node, list(amounts[:keep]), args.get("value", 0))
        made = r.new.graph.call_function(aten.constant_pad_nd.default, arguments)
    # Its shape function compares sizes, which would fix T.
    sizes = [int(s) for a, s in enumerate(r.fake(node).shape) if a not in (x.token, x.batch)]
    shape = [r.new.tokens, *sizes] if x.token is not None else sizes
    made.meta = {"val": r.new.fake(shape, x.node.meta["val"].dtype), "module": r.module}
    return dataclasses.replace(x, node=made)


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
