"""Smoothing: per-channel scales move from an activation into the matrices that multiply it.

x · Wᵀ = (x / s) · (W · diag(s))ᵀ, for any s > 0 a channel. A point is an activation, with everyone who must agree:

1. a norm's output           1/s goes into the norm's weight and bias (a weight w that stands for 1 + w becomes (1 + w) / s,
                             and the norm's `weight_offset` 0; a norm without a weight gets 1/s)
2. a linear's output, where  1/s goes into the rows of the linear's weight and its bias: values that go through attention,
   channels.py follows it    up in activation(gate) · up, the inside of a relu
3. on request, any other     x · (1/s) stands in the graph, before the linears alone

s goes into the input columns of every linear and of every expert's gate_up that reads the activation. The rule holds only
where they all do: a reader of another kind, a reader of some of the channels, or a weight with another use (a tied
head) makes the point impossible, and a note says so. The result equals the original up to the rounding of float32;
`require_equal` is to be called after every use.

Sources: Xiao et al. 2023, "SmoothQuant", eq. 3; Lin et al. 2024, "AWQ", §3.2. Which folds they allow was a table of
module names there; here it follows from the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.channels import CONSUMERS, NORMS, Flow, follow, origins, said, viewed
from enginewright.passes.dialect import OPS
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program
from enginewright.passes.weights import ConstantTensor, scaled_along
from enginewright.recipes.errors import LoweringError

__all__ = ["SmoothingPoint", "apply", "check_equal", "find_points", "require_equal"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class SmoothingPoint:
    """One activation whose channels may be scaled, and everyone whom that concerns.

    `activation` is x [T, ..., K] as its first consumer reads it; the others read the same features, perhaps
    through other views. Input feature k of each consumer is divided by scale[index[k]]; `index` None means k itself.
    """

    name: str  # "model.layers.0.input_layernorm → q_proj, k_proj, v_proj"; unique in a program
    kind: str  # "norm", "linear" or "explicit": what takes 1/s
    activation: fx.Node
    consumers: tuple[fx.Node, ...]  # ew::linear, and ew::moe as to its gate_up, in graph order
    channels: int  # free scales
    index: Tensor | None  # int64 [K]
    producer: fx.Node | None = None  # the norm or linear, None where the multiply is explicit
    rows: Tensor | None = None  # int64 [channels]: the producer's channel that each scale divides

    def spread(self, scales: Tensor) -> Tensor:
        """The scale of each input feature, [K], of scales [channels]."""
        return scales if self.index is None else scales[self.index]


def find_points(program: Program, *, explicit: bool = False) -> tuple[list[SmoothingPoint], list[str]]:
    """Return every point in graph order, and a note for each activation of a matrix that has none, with the reason.

    With `explicit`, an activation that has no fold becomes a point with a multiply of its own, where the weights allow it.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    flows: dict[fx.Node, Flow] = {}
    points: list[SmoothingPoint] = []
    notes: list[str] = []
    covered: set[fx.Node] = set()
    for x, readers in _activations(order).items():
        if covered.issuperset(readers):
            continue
        point, reason = _folded(readers[0], order, flows)
        shared = _shared(readers)
        if point is None and explicit and shared is None:
            point = _point("explicit", readers, torch.arange(x.meta["val"].shape[-1]), None)
        if point is None:
            known = dict.fromkeys((reason, shared or "an explicit multiply is possible"))
            notes.append(f"{_names(readers, whole=True)}: no scale is folded: {'; '.join(known)}")
        else:
            covered.update(point.consumers)
            points.append(point)
    return _uniquely_named(points), notes


def apply(program: Program, point: SmoothingPoint, scales: Tensor) -> None:
    """Divide the point's channels by `scales` [channels] (finite, > 0) and multiply every consumer's columns, in place.

    Applying twice multiplies the scales; points that touch one weight may be applied in any order.
    """
    if point.activation.graph is not program.graph:
        raise ValueError(f"{point.name} is a point of another program")
    if tuple(scales.shape) != (point.channels,) or not bool((scales.isfinite() & (scales > 0)).all()):
        raise ValueError(f"{point.name} takes {point.channels} finite scales > 0, not {scales}")
    inverse = scales.double().reciprocal().float()
    if point.producer is None:
        _multiply(program, point, point.spread(inverse))
    else:
        width = point.producer.meta["val"]
        width = (width[0] if isinstance(width, (tuple, list)) else width).shape[-1]
        factors = torch.ones(width)
        factors[point.rows] = inverse
        _divide(program, point.producer, factors)
    columns = point.spread(scales.float())
    for matrix in dict.fromkeys(map(_matrix, point.consumers)):
        _scale(program, matrix, -1, columns)


def check_equal(before: Program, after: Program, tokens: Sequence[int] | Tensor) -> float:
    """The largest difference of the two programs' logits on `tokens`, as a share of the largest logit before."""
    want = before.run(tokens)
    difference = float((after.run(tokens) - want).abs().max() / want.abs().max())
    return difference if difference == difference else float("inf")


def require_equal(
    pass_name: str,
    before: Program,
    after: Program,
    scales: Mapping[str, Tensor],
    tokens: Sequence[int] | Tensor,
    *,
    limit: float = 1e-4,
) -> float:
    """Return `check_equal`, or raise LoweringError above `limit`, naming the point that changes the logits most.

    `scales` holds what was applied to `before` to make `after`, by the points' names.
    """
    difference = check_equal(before, after, tokens)
    if difference <= limit:
        return difference
    alone = {name: _alone(before, name, values, tokens) for name, values in scales.items()}
    worst = max(alone, key=alone.__getitem__, default="no point")
    raise LoweringError(
        f"pass `{pass_name}` changed the model: smoothing must leave the logits as they are",
        found=f"logits differ by {difference:.1e} of the largest; alone, `{worst}` by {alone.get(worst, 0):.1e}",
        expected=f"at most {limit:.0e}",
        action="build without smoothing, and report the model: a channel has a reader that was not compensated",
    )


def _alone(before: Program, name: str, scales: Tensor, tokens: Sequence[int] | Tensor) -> float:
    """What the scales of one point do to the logits."""
    trial = before.clone()
    for point in find_points(trial, explicit=True)[0]:
        if point.name == name:
            apply(trial, point, scales)
    return check_equal(before, trial, tokens)


# Finding.


def _activations(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Activation -> the linears and experts that read it, in graph order."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in nodes:
        if is_call(node, *CONSUMERS):
            x = argument(node, "x")
            found[x] = (*found.get(x, ()), node)
    return found


def _folded(
    reader: fx.Node, order: Mapping[fx.Node, int], flows: dict[fx.Node, Flow]
) -> tuple[SmoothingPoint | None, str]:
    """The point by which the reader's input can be scaled where it is made, or None and the reason."""
    reasons = []
    for producer in origins(argument(reader, "x")):
        if not is_call(producer, *NORMS, OPS["linear"]):
            reasons.append(f"it comes from {said(producer)}")
            continue
        if producer not in flows:
            flows[producer] = follow(producer, order)
        reason = _objection(reader, producer, flows[producer])
        if reason is None:
            channels = flows[producer].consumers[reader]
            consumers = _sharing(channels, flows[producer])
            kind = "linear" if is_call(producer, OPS["linear"]) else "norm"
            return _point(kind, consumers, channels, producer), ""
        reasons.append(reason)
    return None, reasons[0]


def _objection(reader: fx.Node, producer: fx.Node, flow: Flow) -> str | None:
    """Why the channels that the reader reads cannot be scaled at their producer, or None."""
    wanted = flow.consumers.get(reader)
    stopped = [node for some, node in flow.stopped if wanted is None or _overlap(some, wanted)]
    if wanted is None and reader in stopped:
        return f"a feature is made of several channels of {_name(producer)}"
    if stopped:
        return f"the channels of {_name(producer)} also reach {said(stopped[0])}"
    assert wanted is not None, "the way back is a way forth, unless the channels stop"
    for consumer in _sharing(wanted, flow):
        if not torch.equal(flow.consumers[consumer], wanted):
            return f"{_names([consumer])} reads the channels of {_name(producer)} in another arrangement"
        if viewed(argument(consumer, "x")) is not viewed(argument(reader, "x")):
            return f"the channels of {_name(producer)} also reach {_names([consumer])} in another activation"
    return _shared(_sharing(wanted, flow), producer)


def _sharing(channels: Tensor, flow: Flow) -> tuple[fx.Node, ...]:
    """The consumers that read any of the channels."""
    return tuple(node for node, own in flow.consumers.items() if _overlap(own, channels))


def _overlap(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isin(a, b).any())


def _shared(consumers: Sequence[fx.Node], producer: fx.Node | None = None) -> str | None:
    """What forbids to scale the weights concerned: one that someone else reads as well or that is computed; or None."""
    changed = [(_matrix(node), consumers) for node in consumers]
    changed += [(weight, [producer]) for weight in _made_with(producer)] if producer is not None else []
    for weight, users in changed:
        if weight.op != "get_attr":
            return f"the weight comes from {said(weight)}"
        if not set(weight.users) <= set(users):
            return f"{weight.target} has another use"
    return None


def _made_with(producer: fx.Node) -> list[fx.Node]:
    """The weights of a norm or a linear."""
    return [weight for name in ("weight", "bias") if (weight := _part(producer, name)) is not None]


def _part(node: fx.Node, name: str) -> fx.Node | None:
    has = any(a.name == name for a in node.target._schema.arguments)  # type: ignore[union-attr]
    return argument(node, name) if has else None


def _matrix(consumer: fx.Node) -> fx.Node:
    """The matrix whose columns belong to the features of a consumer's input."""
    return argument(consumer, "weight" if is_call(consumer, OPS["linear"]) else "gate_up")


def _point(
    kind: str, consumers: tuple[fx.Node, ...], channels: Tensor, producer: fx.Node | None
) -> SmoothingPoint:
    rows, index = channels.unique(return_inverse=True)
    identity = torch.equal(index, torch.arange(len(rows)))
    activation = argument(consumers[0], "x")
    made = _name(producer) if producer is not None else said(activation)
    return SmoothingPoint(
        f"{made} → {_names(consumers)}", kind, activation, consumers, len(rows), None if identity else index,
        producer, rows,
    )  # fmt: skip


def _name(node: fx.Node) -> str:
    """The module of a norm, linear or experts: that of its weight, which no rewrite has moved elsewhere."""
    weight = _matrix(node) if is_call(node, *CONSUMERS) else argument(node, "weight")
    named = weight is not None and weight.op == "get_attr" and not is_call(node, *CONSUMERS)
    module = str(weight.target).rpartition(".")[0] if named else node.meta.get("module")
    return module or node.name


def _names(consumers: Sequence[fx.Node], whole: bool = False) -> str:
    """Module names, without what they have in common but for the last part; with it, once, if `whole`."""
    split = [_name(node).split(".") for node in consumers]
    common = min(map(len, split)) - 1
    while any(parts[:common] != split[0][:common] for parts in split):
        common -= 1
    names = ", ".join(dict.fromkeys(".".join(parts[common:]) for parts in split))
    return ".".join([*split[0][:common], names]) if whole else names


def _uniquely_named(points: Iterable[SmoothingPoint]) -> list[SmoothingPoint]:
    named: dict[str, SmoothingPoint] = {}
    for point in points:
        name = next(name for name in _numbered(point.name) if name not in named)
        named[name] = dataclasses.replace(point, name=name)
    return list(named.values())


def _numbered(name: str) -> Iterator[str]:
    yield name
    count = 2
    while True:
        yield f"{name} ({count})"
        count += 1


# Applying.


def _scale(program: Program, node: fx.Node, dim: int, factors: Tensor, offset: float = 0.0) -> None:
    """Scale a weight along an axis, under the name that it has."""
    program.weights[str(node.target)] = scaled_along(program.weight_of(node), dim, factors, offset)


def _divide(program: Program, producer: fx.Node, factors: Tensor) -> None:
    """Multiply the channels of a norm's or a linear's output by `factors`."""
    offset = 0.0
    if any(a.name == "weight_offset" for a in producer.target._schema.arguments):  # type: ignore[union-attr]
        offset = argument(producer, "weight_offset")
        _set(producer, "weight_offset", 0.0)
    weight, bias = argument(producer, "weight"), _part(producer, "bias")
    if weight is None:
        _set(producer, "weight", _new_weight(program, producer, factors))
    else:
        _scale(program, weight, 0, factors, offset)
    if bias is not None:
        _scale(program, bias, 0, factors)


def _multiply(program: Program, point: SmoothingPoint, factors: Tensor) -> None:
    """Put x · factors before the point's consumers, or change the factors that stand there."""
    current = argument(point.consumers[0], "x")
    if current is not point.activation:
        _scale(program, current.args[1], 0, factors)
        return
    weight = _new_weight(program, point.consumers[0], factors)
    module = point.consumers[0].meta.get("module", "")
    product = program.call(aten.mul.Tensor, (current, weight), after=current, module=module)
    for consumer in point.consumers:
        _set(consumer, "x", product)


def _new_weight(program: Program, node: fx.Node, value: Tensor) -> fx.Node:
    stem = f"{_name(node)}.smoothing"
    name = next(name for name in _numbered(stem) if name not in program.weights).replace(" ", "")
    return program.add_weight(name, ConstantTensor(name, value))


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Give a call's argument another value, wherever it stands."""
    position = [a.name for a in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)
