"""fuse_rope — each rotary position embedding becomes one `ew::rope` node over tables of half width.

Rules
1. A region from x [T, H, D] to y [T, H, D] made of slices, joins, negations, sums and products with values of
   `ew::position_table` is read as a matrix over the features of a head. If that matrix is the identity but for R/2
   rotations of the first R features, then y → ew::rope(x, cos, sin, R, interleaved). Pairs lie half a rotation apart or
   side by side (`interleaved`), which covers full, partial, interleaved and scaled types in any spelling.
2. The same where pairs are read side by side and written half a rotation apart  →  ew::rope(x, …, interleaved), then
   its even features before its odd ones, as slices and a join.
3. The cosine of a pair is used twice, and so is its sine. Where they come from two columns of a table, the rewrite is
   made only if the columns are equal at every position; the tables are then cut to the R/2 columns that are read. Cut
   tables are shared by all layers that share the original.

How a region is read: it is linear in x by construction, so basis vectors go through it with tables of
distinct random numbers; a coefficient that equals a number of a table names its column. The rewrite is then
compared with the region on random x and random tables: a polynomial that vanishes at random points is zero
(Schwartz, Zippel). Not matched: rotations of other features than the first (they match on the slice that
holds them), and tables that are not constants.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS, rope
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import is_call
from enginewright.passes.program import Program
from enginewright.passes.weights import Computed, Weight, reshaped, sliced

aten = torch.ops.aten

#: Ops that a region may consist of, besides `getitem`: each is linear in x once the tables are fixed.
_LINEAR = frozenset(
    """_to_copy _unsafe_view add alias cat chunk clone contiguous expand flatten mul narrow neg permute
    reshape select slice split split_with_sizes squeeze stack sub to transpose unbind unflatten unsqueeze
    view""".split()
)
#: What y may be.
_MOVES = frozenset("_unsafe_view add cat flatten reshape stack sub view".split())
_LARGEST_REGION = 48
_SEED = 20210420


@dataclasses.dataclass(frozen=True)
class _Region:
    """Nodes between x and y in graph order, the position tables they read, and the ops over those tables."""

    x: fx.Node
    y: fx.Node
    nodes: tuple[fx.Node, ...]
    tables: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Equally long lists of columns of one table each: what plays cos (or sin) in first and in second place."""

    table: fx.Node
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Rotation:
    rotary_dim: int
    layout: str
    cos: _Columns
    sin: _Columns

    @property
    def interleaved(self) -> bool:
        return self.layout != "halves"


class FuseRope:
    name = "fuse_rope"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        constant = _position_only(program.graph)
        inside: set[fx.Node] = set()
        matches = 0
        tables = _Tables(program)
        for y in reversed(list(program.graph.nodes)):
            if y in inside or y in constant or not _may_end(y):
                continue
            for region in _regions(y, order, constant):
                rotation = _read(region)
                if rotation is None or not tables.repeat(rotation) or not _same_values(region, rotation):
                    continue
                cos, sin = tables.half(rotation.cos), tables.half(rotation.sin)
                args = (region.x, cos, sin, rotation.rotary_dim, rotation.interleaved)
                y.replace_all_uses_with(
                    _parted(program, program.call(OPS["rope"], args, before=y), rotation, y)
                )
                inside.update(region.nodes)
                matches += 1
                break
        return PassResult(matches)


def _parted(program: Program, turned: fx.Node, rotation: _Rotation, before: fx.Node) -> fx.Node:
    """The rope's result, in the layout in which the rotation writes it."""
    if rotation.layout != "parted":
        return turned
    rotary, width = rotation.rotary_dim, turned.meta["val"].shape[-1]
    ranges = [(0, rotary, 2), (1, rotary, 2)] + ([(rotary, width, 1)] if width > rotary else [])
    parts = [program.call(aten.slice.Tensor, (turned, 2, *part), before=before) for part in ranges]
    return program.call(aten.cat.default, (parts, 2), before=before)


def _name(node: fx.Node) -> str:
    """'mul' of aten.mul.Tensor, 'getitem' of operator.getitem, '' of anything else."""
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return node.target._schema.name.removeprefix("aten::")
    return ""


def _position_only(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on the positions and on nothing else of the step."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function":
            sources = [n for n in node.all_input_nodes if n.op != "get_attr"]
            if is_call(node, OPS["position_table"]) or (sources and all(n in found for n in sources)):
                found.add(node)
    return found


def _may_end(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and _name(node) in _MOVES
        and isinstance(value, Tensor)
        and value.dim() == 3
        and value.is_floating_point()
    )


def _regions(y: fx.Node, order: Mapping[fx.Node, int], constant: set[fx.Node]) -> Iterator[_Region]:
    """Regions that end in y and have a single input x of y's shape, the smallest first."""
    unread: set[fx.Node] = {y}
    nodes: list[fx.Node] = []
    over_tables: set[fx.Node] = set()
    while len(nodes) < _LARGEST_REGION:
        node = max(unread, key=order.__getitem__)
        if len(unread) == 1 and over_tables and _shape(node) == _shape(y):
            tables = tuple(sorted((n for n in over_tables if _is_table(n)), key=order.__getitem__))
            body = tuple(sorted({*nodes, *over_tables} - set(tables), key=order.__getitem__))
            yield _Region(node, y, body, tables)
        if node.op != "call_function" or _name(node) not in (*_LINEAR, "getitem"):
            return
        sources = set(node.all_input_nodes)
        fixed = sources & constant
        if fixed and (_name(node) != "mul" or len(fixed) == len(sources)):
            return
        if _name(node) == "mul" and len(sources) - len(fixed) != 1:
            return
        for table in fixed:
            if not _collect(table, over_tables):
                return
        unread.remove(node)
        unread |= sources - fixed
        nodes.append(node)


def _collect(node: fx.Node, into: set[fx.Node]) -> bool:
    """Add a position-only node and what it reads, down to position tables; False if it reads anything else."""
    into.add(node)
    if _is_table(node):
        return True
    if _name(node) not in (*_LINEAR, "getitem"):
        return False
    return all(_collect(source, into) for source in node.all_input_nodes)


def _is_table(node: fx.Node) -> bool:
    return is_call(node, OPS["position_table"])


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape[1:]) if isinstance(value, Tensor) and value.dim() else None


def _evaluate(region: _Region, x: Tensor, tables: Mapping[fx.Node, Tensor]) -> Tensor:
    env: dict[fx.Node, Any] = {region.x: x, **tables}

    def value(argument: Any) -> Any:
        return x.shape[0] if isinstance(argument, torch.SymInt) else argument

    for node in region.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args = tuple([value(i) for i in a] if isinstance(a, (list, tuple)) else value(a) for a in args)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[region.y]


def _random_tables(region: _Region, rows: int, generator: torch.Generator) -> dict[fx.Node, Tensor]:
    """`rows` rows of each table, filled with numbers in random order of which no two are equal."""
    shapes = {table: (rows, *table.meta["val"].shape[1:]) for table in region.tables}
    total = sum(math.prod(shape) for shape in shapes.values())
    numbers = 0.5 + torch.randperm(total, generator=generator) / total
    parts = numbers.split([math.prod(shape) for shape in shapes.values()])
    return {table: part.reshape(shape) for (table, shape), part in zip(shapes.items(), parts, strict=True)}


def _read(region: _Region) -> _Rotation | None:
    """The rotation that the region's matrix is, with its coefficients found in the tables; None if it is none."""
    heads, width = _shape(region.x)  # type: ignore[misc]
    generator = torch.Generator().manual_seed(_SEED)
    tables = _random_tables(region, 1, generator)
    basis = torch.eye(width)[:, None, :].expand(width, heads, width)
    repeated = {node: value.expand(width, *value.shape[1:]) for node, value in tables.items()}
    try:
        matrix = _evaluate(region, basis, repeated)[:, 0].T  # [output feature, input feature]
    except RuntimeError:  # a shape that holds only for other numbers of tokens
        return None
    moved = [i for i in range(width) if not torch.equal(matrix[i], basis[i, 0])]
    rotary = len(moved)
    if not rotary or rotary % 2 or moved != list(range(rotary)):
        return None
    for layout, (written, read) in _layouts(rotary).items():
        rotation = _coefficients(matrix, tables, layout, written, read)
        if rotation is not None:
            return rotation
    return None


def _layouts(rotary: int) -> dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Layout -> the features that hold each pair in y, and in x."""
    apart = [(i, i + rotary // 2) for i in range(rotary // 2)]
    beside = [(2 * i, 2 * i + 1) for i in range(rotary // 2)]
    return {"halves": (apart, apart), "interleaved": (beside, beside), "parted": (apart, beside)}


def _coefficients(
    matrix: Tensor,
    tables: Mapping[fx.Node, Tensor],
    layout: str,
    written: list[tuple[int, int]],
    read: list[tuple[int, int]],
) -> _Rotation | None:
    """The rotation of the pairs, if `matrix` is that and nothing else."""
    wanted = torch.eye(len(matrix))
    wanted[: 2 * len(written)] = 0
    where: dict[str, list[tuple[fx.Node, int]]] = {"cos1": [], "cos2": [], "sin1": [], "sin2": []}
    for (to_a, to_b), (a, b) in zip(written, read, strict=True):
        numbers = (matrix[to_a, a], matrix[to_b, b], -matrix[to_a, b], matrix[to_b, a])
        for key, number in zip(where, numbers, strict=True):
            column = _column(tables, number)
            if column is None:
                return None
            where[key].append(column)
        wanted[to_a, a], wanted[to_b, b], wanted[to_a, b], wanted[to_b, a] = (
            *numbers[:2],
            -numbers[2],
            numbers[3],
        )
    if not torch.equal(wanted, matrix):
        return None
    cos, sin = _columns(where["cos1"], where["cos2"]), _columns(where["sin1"], where["sin2"])
    if cos is None or sin is None:
        return None
    return _Rotation(2 * len(written), layout, cos, sin)


def _column(tables: Mapping[fx.Node, Tensor], number: Tensor) -> tuple[fx.Node, int] | None:
    """The first table and flat column that hold exactly this number."""
    for node, value in tables.items():
        found = torch.nonzero(value.flatten() == number)
        if len(found) == 1:
            return node, int(found[0])
    return None


def _columns(first: list[tuple[fx.Node, int]], second: list[tuple[fx.Node, int]]) -> _Columns | None:
    sources = {node for node, _ in first + second}
    if len(sources) != 1:
        return None
    return _Columns(sources.pop(), tuple(c for _, c in first), tuple(c for _, c in second))


def _same_values(region: _Region, rotation: _Rotation) -> bool:
    """Whether region and rotation agree on random input, with tables in which repeated columns are equal."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    rows, (heads, width) = 3, _shape(region.x)  # type: ignore[misc]
    tables = _random_tables(region, rows, generator)
    for columns in (rotation.cos, rotation.sin):
        flat = tables[columns.table].view(rows, -1)
        flat[:, columns.second] = flat[:, columns.first]
    x = torch.rand((rows, heads, width), generator=generator) + 0.5
    cos, sin = (tables[c.table].view(rows, -1)[:, c.first] for c in (rotation.cos, rotation.sin))
    expected = rope.reference(x, cos, sin, rotation.rotary_dim, rotation.interleaved)
    if rotation.layout == "parted":
        turned = expected[..., : rotation.rotary_dim]
        expected = torch.cat([turned[..., ::2], turned[..., 1::2], expected[..., rotation.rotary_dim :]], -1)
    return torch.allclose(_evaluate(region, x, tables), expected, rtol=1e-5, atol=1e-5)


class _Tables:
    """Position tables cut to the columns that a rotation reads, each made once."""

    def __init__(self, program: Program):
        self.program = program
        self._first = next(node for node in program.graph.nodes if node.op == "call_function")
        self._nodes: dict[tuple[str, tuple[int, ...]], fx.Node] = {}
        self._equal: dict[tuple[str, tuple[int, ...], tuple[int, ...]], bool] = {}

    def repeat(self, rotation: _Rotation) -> bool:
        """Whether first and second columns are equal at every position, for cos and for sin."""
        return all(self._repeats(columns) for columns in (rotation.cos, rotation.sin))

    def _repeats(self, columns: _Columns) -> bool:
        if columns.first == columns.second:
            return True
        target = str(columns.table.args[1].target)  # type: ignore[union-attr]
        key = (target, columns.first, columns.second)
        if key not in self._equal:
            table = self.program.weights[target].load()
            flat = table.reshape(table.shape[0], -1)
            self._equal[key] = torch.equal(flat[:, columns.first], flat[:, columns.second])
        return self._equal[key]

    def half(self, columns: _Columns) -> fx.Node:
        """The node of positions' rows of the cut table, [T, R/2]."""
        key = (str(columns.table.args[1].target), columns.first)  # type: ignore[union-attr]
        if key not in self._nodes:
            self._nodes[key] = self._cut(columns.table, columns.first)
        return self._nodes[key]

    def _cut(self, node: fx.Node, columns: tuple[int, ...]) -> fx.Node:
        positions, table = node.args
        assert isinstance(table, fx.Node)
        whole = self.program.weight_of(table)
        flat = reshaped(whole, (whole.shape[0], whole.numel // whole.shape[0]))
        step = columns[1] - columns[0] if len(columns) > 1 else 1
        stop = columns[0] + step * (len(columns) - 1) + 1
        if step > 0 and columns == tuple(range(columns[0], stop, step)):
            cut = sliced(flat, 1, columns[0], stop, step)
            name = f"{table.target}.columns_{columns[0]}_{stop}_{step}"
        else:
            cut = _picked(flat, columns)
            name = f"{table.target}.columns_{'_'.join(map(str, columns))}"
        if cut is whole:
            name = str(table.target)
        known = self.program.weights.get(name)
        weight = self.program.add_weight(name, cut) if known is None else self.program.weight_node(name)
        return self.program.call(OPS["position_table"], (positions, weight), before=self._first, module="")


def _picked(weight: Weight, columns: tuple[int, ...]) -> Weight:
    shape = (weight.shape[0], len(columns))
    return Computed(weight.name, shape, weight.dtype, lambda: weight.load()[:, list(columns)])
