"""Where channels go: which readers see a channel of a producer, and as which feature.

A producer is a norm or a linear; its channels are the features of its last axis. Multiply one channel by c > 0: through
the ops below exactly the features that are made of it are multiplied by c, and nothing else changes.

- movements (views, slices, selections, permutations, repetitions) and splits
- products and quotients by anything that is not made of the same producer's channels
- relu, since relu(c·x) = c·relu(x) for c > 0
- attention, in its values: a head of the result is a weighted sum of a head of values, repeated for grouped queries

The channels are followed by running those ops on a tensor of channel numbers. Linears and experts are where a walk
ends well: their columns can undo the factor. Every other reader stops the channels that reach it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import dialect
from enginewright.passes.dialect import OPS
from enginewright.passes.matching import MOVEMENTS, argument, is_call, picked

__all__ = ["CONSUMERS", "NORMS", "Flow", "follow", "origins", "said", "viewed"]

aten = torch.ops.aten

#: The nodes that multiply an activation, their argument `x`, by matrices.
CONSUMERS = (OPS["linear"], OPS["moe"])
_ADD_NORMS = (OPS["add_rms_norm"], OPS["add_layer_norm"])
NORMS = (OPS["rms_norm"], OPS["layer_norm"], *_ADD_NORMS)

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)

#: Channel numbers, int64 [1, *features]: those of the feature at each place (of a split: one tensor a part).
Channels = Any


@dataclasses.dataclass
class Flow:
    """Where a producer's channels arrive.

    `consumers`: linears and experts -> channel of each of their input features, int64 [K]. `stopped`: channels
    (int64 [n]) that also reach another reader, and that reader.
    """

    consumers: dict[fx.Node, Tensor] = dataclasses.field(default_factory=dict)
    stopped: list[tuple[Tensor, fx.Node]] = dataclasses.field(default_factory=list)


def follow(producer: fx.Node, order: Mapping[fx.Node, int]) -> Flow:
    """Follow every channel of a norm's or a linear's output to all its readers; `order` is the graph's."""
    flow = Flow()
    held: dict[fx.Node, Channels] = {}
    pending: set[fx.Node] = set()
    for value in _values(producer):
        sizes = value.meta["val"].shape[1:]
        held[value] = torch.arange(sizes[-1]).expand(1, *sizes)
        pending.update(value.users)
    while pending:
        user = min(pending, key=order.__getitem__)
        pending.remove(user)
        channels = _through(user, held, flow)
        if channels is not None:
            held[user] = channels
            pending.update(user.users)
    return flow


def origins(x: fx.Node) -> Iterator[fx.Node]:
    """The nodes at which walks back from `x` end, through the ops that channels pass; the best producer comes first.

    Of a product's factors the activation comes last: activation(gate) · up is linear in up.
    """
    part = picked(x)
    if part is not None:
        source, index = part
        if is_call(source, *_SPLITS):
            yield from origins(argument(source, "self"))
        else:
            yield source if is_call(source, *_ADD_NORMS) and index == 0 else x
    elif is_call(x, *MOVEMENTS):
        yield from origins(x.args[0])  # type: ignore[arg-type]
    elif is_call(x, OPS["attention"]):
        yield from origins(argument(x, "v"))
    elif _is_relu(x):
        yield from origins(argument(x, "x"))
    elif is_call(x, *_PRODUCTS, *_QUOTIENTS):
        factors = x.all_input_nodes if is_call(x, *_PRODUCTS) else [x.args[0]]
        walks = [factor for factor in factors if isinstance(factor, fx.Node) and factor.op != "get_attr"]
        for factor in sorted(walks, key=lambda node: is_call(node, OPS["activation"])):
            yield from origins(factor)
        if not walks:
            yield x
    else:
        yield x


def viewed(x: fx.Node) -> fx.Node:
    """The value that `x` is a view of."""
    while is_call(x, *MOVEMENTS):
        x = x.args[0]  # type: ignore[assignment]
    return x


def said(node: fx.Node) -> str:
    """A node's op and module, for messages."""
    if node.op != "call_function":
        return "the logits" if node.op == "output" else f"{node.op} {node.target}"
    part = picked(node)
    target = node.target if part is None else part[0].target
    name = dialect.name_of(target)
    text = f"ew::{name}" if name else str(getattr(target, "_schema", target)).partition("(")[0]
    if name == "activation":
        text += f" {argument(node, 'kind')}"
    return f"{text} of {node.meta['module']}" if node.meta.get("module") else text


def _values(producer: fx.Node) -> list[fx.Node]:
    """The nodes that are a producer's output."""
    if is_call(producer, *_ADD_NORMS):
        return [user for user in producer.users if picked(user) == (producer, 0)]
    return [producer]


def _through(user: fx.Node, held: Mapping[fx.Node, Channels], flow: Flow) -> Channels | None:
    """The channels of a reader's output, None where they end; what stops at the reader, `flow` is told."""
    given = [node for node in user.all_input_nodes if node in held]
    if is_call(user, operator.getitem):
        return held[given[0]][user.args[1]]
    if is_call(user, *MOVEMENTS, *_SPLITS):
        args, kwargs = fx.map_arg((user.args, user.kwargs), held.get)
        channels = user.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(channels) if isinstance(channels, list) else channels
    passing = _passing(user, given)
    channels = None
    if passing is not None:
        channels = held[passing]
        rows = channels.reshape(-1, channels.shape[-1])
        if is_call(user, OPS["attention"]):
            heads = argument(user, "q").meta["val"].shape[1]
            channels = channels.repeat_interleave(heads // channels.shape[1], dim=1)
        elif not is_call(user, *CONSUMERS):
            channels = channels.expand(1, *user.meta["val"].shape[1:])
        elif bool((rows == rows[0]).all()):
            flow.consumers[user], channels = rows[0], None
        else:
            passing, channels = None, None
    flow.stopped += [(held[node].unique(), user) for node in given if node is not passing]
    return channels


def _passing(user: fx.Node, given: Sequence[fx.Node]) -> fx.Node | None:
    """The one of the followed inputs whose channels pass a reader, or None. It must be read once."""
    inputs = [value for value in (*user.args, *user.kwargs.values()) if isinstance(value, fx.Node)]
    if is_call(user, *CONSUMERS) or _is_relu(user):
        able = [argument(user, "x")]
    elif is_call(user, OPS["attention"]):
        able = [argument(user, "v")]
    elif is_call(user, *_QUOTIENTS):
        able = [user.args[0]]
    elif is_call(user, *_PRODUCTS):
        plain = [node for node in given if not is_call(node, OPS["activation"])]
        able = list(given) if len(given) == 1 else plain
    else:
        return None
    if len(able) != 1 or able[0] not in given or inputs.count(able[0]) != 1:
        return None
    if is_call(user, *_PRODUCTS, *_QUOTIENTS) and able[0].meta["val"].dim() != user.meta["val"].dim():
        return None
    return able[0]


def _is_relu(node: fx.Node) -> bool:
    return is_call(node, OPS["activation"]) and argument(node, "kind") == "relu"
