"""Inside a pass: which of its new nodes gives another value than what stood there before.

Two Programs of one model, before and after a pass, run on one sample. Most nodes keep their names across a pass: they are
compared in graph order. A node *deviates* if its value does, and the deviation *heals* if every way from it to the logits leads
through a node that agrees again: a pass may scale or reorder what lies between two ops that undo it. The first node whose
deviation never heals points at what the pass put between it and its last agreeing inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.cut_out import fed, named, op_of
from enginewright.passes.program import Program, Stage

from .running import run_watched

__all__ = ["Changed", "NodeFound", "first_changed"]

_AGREES = 1e-4  # of the largest value: fp32 in another order leaves less
_PAIRED = ("linear", "embedding", "attention", "moe", "rms_norm", "layer_norm")
_OWN_MODULE = (
    "ew::linear",
    "ew::quantised_linear",
    "ew::attention",
    "ew::paged_attention",
)  # a new one keeps the old one's
_FEATURES = 256  # of a value that are compared
_ROWS = 64

Values = dict[str, list[Tensor]]


@dataclass(frozen=True)
class NodeFound:
    """A node to look at: its op and module, and what was seen of it (empty: see what stands beside it)."""

    name: str
    op: str
    module: str
    says: str = ""

    @classmethod
    def of(cls, node: fx.Node, says: str = "", module: str = "", name: str = "") -> NodeFound:
        own = name or str(node.meta.get("name", node.name))
        return cls(own, op_of(node), module or str(node.meta.get("module", "")), says)

    def text(self) -> str:
        says = f": {self.says}" if self.says else ""
        return f"{self.op} `{self.name}` of module `{self.module or '(none)'}`{says}"


@dataclass(frozen=True)
class Changed:
    """What a pass changed where the model's values first become others.

    `nodes`: its new nodes there, those that depend on the tokens first; `replaced`: what stood in their place, as "name (op)";
    `leads_to`: the first value that is another, and by how much.
    """

    nodes: tuple[NodeFound, ...]
    replaced: tuple[str, ...]
    leads_to: str


def first_changed(before: Program, after: Program, sample: Sequence[int]) -> Changed:
    """Where `after` leaves `before`; both have their rounding taken out."""
    old, new = _labelled(before, after)
    labels = {node: label for program in (old, new) for label, node in program.items()}
    errors = _errors(_values(before, sample, labels), _values(after, sample, labels))
    agrees = {node for node, label in labels.items() if errors.get(label, math.inf) <= _AGREES}
    output = after.graph.output_node()
    unhealed = _reach(output, agrees)
    suspects = [
        node
        for node in after.graph.nodes
        if node in unhealed and errors.get(labels.get(node, ""), 0.0) > _AGREES and not _spared(node, agrees)
    ]
    end = suspects[0] if suspects else output
    twin = old[labels[end]] if suspects else before.graph.output_node()
    names, kept = ({_name(node) for node in program.graph.nodes} for program in (before, after))
    kept &= names
    gone = [n for n in _between(twin, agrees) if n.op == "call_function" and _name(n) not in kept]
    between = [node for node in _between(end, agrees) if node.op == "call_function"]
    fresh = [
        node
        for node in between
        if _name(node) not in kept
        or node not in labels
        or _differs(node, old[labels[node]], before, after, kept)
    ]
    tokens = fed(after.graph)
    looked = sorted(fresh or between[-1:], key=lambda node: node not in tokens)
    # A new node has the module of what it reads; those of what it replaced say more.
    module = next((str(n.meta["module"]) for n in reversed(gone) if n.meta.get("module")), "")
    leads_to = "the logits"
    if suspects:
        leads_to = f"{named(end)}, which differs by {errors[labels[end]]:.2g} of its largest value"
    return Changed(
        tuple(
            NodeFound.of(node, module="" if _name(node) in kept or op_of(node) in _OWN_MODULE else module)
            for node in looked
        ),
        tuple(f"{_name(node)} ({op_of(node)})" for node in gone),
        leads_to,
    )


def _name(node: fx.Node) -> str:
    return str(node.meta.get("name", node.name))


def _kind(node: fx.Node) -> str:
    """The op without its namespace and form: `linear` for ew::quantised_linear and for aten::linear."""
    return op_of(node).rpartition("::")[2].removeprefix("quantised_").removeprefix("paged_")


def _labelled(before: Program, after: Program) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
    """Which nodes are one and the same, in either Program, by label: those of one name and kind; of the other linears, norms,
    attentions … those of one module, where it has equally many."""
    graphs = [[n for n in program.graph.nodes if n.op == "call_function"] for program in (before, after)]
    named_ = [{_name(node): node for node in nodes} for nodes in graphs]
    found: tuple[dict[str, fx.Node], dict[str, fx.Node]] = ({}, {})
    renames = before.stage == Stage.CAPTURED  # the first pass names nodes anew: one name may mean two things
    for name, node in named_[0].items():
        if not renames and name in named_[1] and _kind(node) == _kind(named_[1][name]):
            found[0][name], found[1][name] = node, named_[1][name]
    apart: list[dict[str, list[fx.Node]]] = [{}, {}]
    for nodes, known, groups in zip(graphs, found, apart, strict=True):
        for node in nodes:
            if _name(node) not in known and _kind(node) in _PAIRED:
                groups.setdefault(f"{_kind(node)} of {node.meta.get('module')}", []).append(node)
    for label, nodes in apart[0].items():
        others = apart[1].get(label, [])
        if len(nodes) == len(others):
            for index, pair in enumerate(zip(nodes, others, strict=True)):
                for known, node in zip(found, pair, strict=True):
                    known[f"{label} {index}"] = node
    return found


def _values(program: Program, sample: Sequence[int], labels: Mapping[fx.Node, str]) -> Values:
    """Some numbers of each labelled node's value: rows [T, …] without a batch axis, in fp32."""
    found: Values = {}

    def after(node: fx.Node, value: Any) -> None:
        if node in labels:
            parts = value if isinstance(value, (list, tuple)) else [value]
            found[labels[node]] = [_some(part, len(sample)) for part in parts if isinstance(part, Tensor)]

    run_watched(program, [sample], after=after)
    return found


def _some(value: Tensor, rows: int) -> Tensor:
    """A few rows and features of a value; of another shape than [rows, …], all is one row."""
    value = value.detach().float()
    if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] == rows:
        value = value[0]
    flat = value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1)
    flat = flat[:: max(1, -(-len(flat) // _ROWS))]
    return flat[:, :: max(1, flat.shape[1] // _FEATURES)].clone()


def _errors(before: Values, after: Values) -> dict[str, float]:
    """By name: the largest difference as a share of the largest value. What has another shape cannot be compared."""
    found = {}
    for name, old in before.items():
        new = after.get(name)
        if new is None or [part.shape for part in old] != [part.shape for part in new]:
            continue
        shares = [0.0]
        for a, b in zip(old, new, strict=True):
            finite = a[torch.isfinite(a)]
            top = float(finite.abs().max()) if finite.numel() else 0.0
            difference = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
            shares.append(float(difference.max()) / max(top, 1e-30) if difference.numel() else 0.0)
        found[name] = max(shares)
    return found


def _reach(output: fx.Node, agrees: set[fx.Node]) -> set[fx.Node]:
    """Nodes from which a way leads to the output that meets no node that agrees."""
    found: set[fx.Node] = set()
    todo = list(output.all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in found and node not in agrees:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _spared(node: fx.Node, agrees: set[fx.Node]) -> bool:
    """Whether someone who reads the node makes up for it: then it was changed on purpose, and another reader does not."""
    return any(user in agrees for user in node.users)


def _between(end: fx.Node, agrees: set[fx.Node]) -> list[fx.Node]:
    """What `end` is computed from, and itself, back to nodes that agree; in graph order."""
    found: set[fx.Node] = set()
    todo = [end]
    while todo:
        node = todo.pop()
        if node in found or (node is not end and node in agrees) or node.op in ("placeholder", "get_attr"):
            continue
        found.add(node)
        todo += node.all_input_nodes
    order = {node: place for place, node in enumerate(end.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _differs(node: fx.Node, old: fx.Node, before: Program, after: Program, kept: set[str]) -> bool:
    """Whether a node that kept its name has another op, other arguments, or other weights; new inputs are not its own doing."""
    if node.target != old.target:
        return True

    def said(program: Program) -> Callable[[fx.Node], str]:
        def say(source: fx.Node) -> str:
            if source.op == "get_attr":
                return f"{source.target}#{id(program.weights[str(source.target)])}"
            return _name(source) if _name(source) in kept or source.op == "placeholder" else "*"

        return say

    mine, its = (fx.map_arg((n.args, n.kwargs), said(p)) for n, p in ((node, after), (old, before)))
    return any(a != b and "*" not in (a, b) for a, b in zip(_flat(mine), _flat(its), strict=False)) or len(
        _flat(mine)
    ) != len(_flat(its))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [item for key in sorted(value) for item in _flat(value[key])]
    return [item for part in value for item in _flat(part)] if isinstance(value, (list, tuple)) else [value]
