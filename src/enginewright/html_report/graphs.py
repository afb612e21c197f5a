"""One layer of a Program's graph as plain data, for build.json, and that data as a picture.

A model's layers are alike, so the first says what the passes did. A node belongs to it where its module path has the number 0
where layers are numbered; what it reads from outside stands as an input.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

    from enginewright.passes.program import Program

__all__ = ["draw_layer", "first_layer"]

_NUMBERED = re.compile(r"^(.*?\.)?(\d+)(\.|$)")
_QUIET = ("get_attr",)

Layer = list[dict[str, Any]]
"""Nodes in graph order: name, op, module (from the layer on) and inputs (names). What lies outside has `outside` true."""


def first_layer(program: Program) -> Layer:
    """The nodes of the program's first numbered layer; empty where its modules are not numbered."""
    modules = {node: str(node.meta.get("module") or "") for node in program.graph.nodes}
    prefixes = Counter(
        found[1] or ""
        for found in map(_NUMBERED.match, modules.values())
        if found is not None and found[2] == "0"
    )
    if not prefixes:
        return []
    stem = f"{prefixes.most_common(1)[0][0]}0"
    inside = {
        node
        for node, module in modules.items()
        if (module == stem or module.startswith(f"{stem}.")) and node.op not in _QUIET
    }
    layer: Layer = []
    outside: set[str] = set()
    for node in program.graph.nodes:
        if node not in inside:
            continue
        sources = [source for source in node.all_input_nodes if source.op not in _QUIET]
        for source in sources:
            if source not in inside and source.name not in outside:
                outside.add(source.name)
                layer.append(
                    {"name": source.name, "op": _op(source), "module": "", "inputs": [], "outside": True}
                )
        layer.append(
            {
                "name": node.name,
                "op": _op(node),
                "module": modules[node][len(stem) + 1 :],
                "inputs": [source.name for source in sources],
            }
        )
    return layer


def _op(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))


_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 150, 34, 14, 22


def draw_layer(layer: Sequence[Mapping[str, Any]], title: str) -> str:
    """The layer as an SVG: a node below everything that it reads, the ops of the dialect in colour."""
    ranks = _ranks(layer)
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for node in layer:
        rows.setdefault(ranks[node["name"]], []).append(node)
    places: dict[str, tuple[float, float]] = {}
    widest = max((len(row) for row in rows.values()), default=1) * (_WIDTH + _GAP_X)
    for rank in sorted(rows):
        row = sorted(rows[rank], key=lambda node: _middle(node, places, widest))
        left = (widest - len(row) * (_WIDTH + _GAP_X)) / 2
        for index, node in enumerate(row):
            places[node["name"]] = (
                left + index * (_WIDTH + _GAP_X) + _GAP_X / 2,
                rank * (_HEIGHT + _GAP_Y) + _GAP_Y / 2,
            )
    height = (max(rows, default=0) + 1) * (_HEIGHT + _GAP_Y)
    parts = [
        f'<svg viewBox="0 0 {widest:.0f} {height:.0f}" width="{widest:.0f}" role="img" aria-label="{html.escape(title)}">'
    ]
    for node in layer:
        x, y = places[node["name"]]
        for source in node["inputs"]:
            from_x, from_y = places[source]
            parts.append(_edge(from_x + _WIDTH / 2, from_y + _HEIGHT, x + _WIDTH / 2, y))
    for node in layer:
        parts.append(_box(node, *places[node["name"]]))
    return "".join([*parts, "</svg>"])


def _ranks(layer: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many steps a node lies below the layer's inputs; an input stands just above its first reader."""
    ranks: dict[str, int] = {}
    for node in layer:
        inner = [ranks[name] + 1 for name in node["inputs"] if name in ranks]
        ranks[node["name"]] = max(inner, default=0)
    for node in layer:
        if node.get("outside"):
            readers = [ranks[other["name"]] for other in layer if node["name"] in other["inputs"]]
            ranks[node["name"]] = max(min(readers, default=1) - 1, 0)
    return ranks


def _middle(node: Mapping[str, Any], places: Mapping[str, tuple[float, float]], widest: float) -> float:
    above = [places[name][0] for name in node["inputs"] if name in places]
    return sum(above) / len(above) if above else widest / 2


def _edge(x: float, y: float, to_x: float, to_y: float) -> str:
    bend = (to_y - y) / 2
    return f'<path class="edge" d="M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f} {to_x:.0f},{to_y:.0f}"/>'


def _box(node: Mapping[str, Any], x: float, y: float) -> str:
    kind = "outside" if node.get("outside") else "dialect" if node["op"].startswith("ew::") else "aten"
    op = node["op"].removeprefix("ew::").removeprefix("aten::")
    middle = x + _WIDTH / 2
    lines = [f'<text x="{middle:.0f}" y="{y + 14:.0f}">{html.escape(op[:24])}</text>']
    if node["module"]:
        lines.append(
            f'<text class="module" x="{middle:.0f}" y="{y + 27:.0f}">{html.escape(node["module"][-26:])}</text>'
        )
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
    told = html.escape(f"{node['name']}: {node['op']} {node['module']}")
    return f'<g class="node {kind}"><title>{told}</title>{box}{"".join(lines)}</g>'
