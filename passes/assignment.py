"""Which matrices a Program has, what each is for, and the formats that a recipe gives it. Nothing is read or changed here.

The linear that produces the logits is the head; a linear whose result chooses experts is a router: the recipe speaks of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from enginewright.passes import dialect
from enginewright.passes.kept import HoldsIntegers, held, plain, widest
from enginewright.passes.matching import argument
from enginewright.passes.program import Program
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import ModuleFormat, Recipe

__all__ = ["Assigned", "Matrix", "assign", "kind_of", "matrices_of", "notes_on", "roles"]

_PLURAL = {"linear": "linears", "embedding": "embedding", "head": "head", "router": "routers"}


@dataclass(frozen=True)
class Matrix:
    """A node that uses a matrix (or two: experts), its role and what it gets. `kept`: the checkpoint's own integers."""

    node: fx.Node
    name: str  # of the checkpoint's module, unique in the program
    role: str  # 'linear', 'embedding', 'head' or 'router'
    weight: str
    activation: str
    kept: bool = False
    activation_scale: float = 0.0

    @property
    def is_integer(self) -> bool:
        """Whether rounding chooses codes for it."""
        return not self.kept and parse_weight(self.weight).kind != "float"


Assigned = dict[fx.Node, Matrix]


def assign(program: Program, recipe: Recipe) -> tuple[Assigned, list[str]]:
    """Every matrix of the program with its formats, in graph order, and notes.

    Raises InputError for patterns or formats that this model cannot have.
    """
    found = roles(program)
    names = _module_names(program, found)
    wanted = recipe.assign({names[node]: role for node, role in found.items()})
    notes: list[str] = []
    assigned = {
        node: _resolve(program, recipe, Matrix(node, names[node], role, *_pair(wanted[names[node]])), notes)
        for node, role in found.items()
    }
    return assigned, _summarised(notes)


def _pair(form: ModuleFormat) -> tuple[str, str]:
    return form.weight, form.activation


def notes_on(program: Program, assigned: Assigned) -> list[str]:
    """How many matrices of each role got which format, and which are stored more than once."""
    return [*_count(assigned), *_two_copies(assigned)]


def roles(program: Program) -> dict[fx.Node, str]:
    """Return the nodes that use a matrix -> 'linear', 'embedding', 'head' or 'router', in graph order."""
    nodes = list(program.graph.nodes)
    output = program.graph.output_node()
    heads = set(_producing_linears(output.all_input_nodes))
    routers: set[fx.Node] = set()
    for node in nodes:
        if kind_of(node) == "moe":
            routers.update(_producing_linears([argument(node, "topk_index"), argument(node, "topk_weight")]))
    found: dict[fx.Node, str] = {}
    for node in nodes:
        kind = kind_of(node)
        if kind == "embedding":
            if _reads_tokens(argument(node, "ids")):
                found[node] = "embedding"
        elif kind in ("linear", "moe"):
            found[node] = "head" if node in heads else "router" if node in routers else "linear"
    return found


def kind_of(node: fx.Node) -> str | None:
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
        if kind_of(node) == "linear":
            found.append(node)
        elif dialect.name_of(node.target) is None or dialect.name_of(node.target) == "activation":
            stack.extend(node.all_input_nodes)
    return found


def _reads_tokens(ids: fx.Node) -> bool:
    """Whether ids are the tokens, perhaps cast or clamped, and not positions."""
    while ids.op == "call_function" and len(ids.all_input_nodes) == 1:
        ids = ids.all_input_nodes[0]
    return ids.op == "placeholder" and ids.target == "tokens"


def matrices_of(node: fx.Node) -> list[fx.Node]:
    """The get_attr nodes of the matrices that a node uses."""
    names = ("gate_up", "down") if kind_of(node) == "moe" else ("weight",)
    return [argument(node, name) for name in names]


def _module_names(program: Program, nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Checkpoint module names, made unique where one module holds several matrices."""
    names: dict[fx.Node, str] = {}
    used: set[str] = set()
    for node in nodes:
        stem = node.meta.get("module") or str(matrices_of(node)[0].target).rpartition(".")[0]
        name, count = stem, 1
        while name in used:
            count += 1
            name = f"{stem}.{count}"
        used.add(name)
        names[node] = name
    return names


def _resolve(program: Program, recipe: Recipe, matrix: Matrix, notes: list[str]) -> Matrix:
    """The matrix with `keep` replaced by what its checkpoint holds."""
    node = matrix.node
    kinds = [held(program.weight_of(part)) for part in matrices_of(node)]
    found = [kind for kind in kinds if kind is not None]
    if kind_of(node) == "moe" and matrix.activation == "int8_static":
        usual = recipe.activation_of(matrix.weight)
        notes.append(f"experts take no static activation scale: {usual} instead")
        matrix = replace(matrix, activation=usual)
    if matrix.activation == "int8_static" and matrix.role != "linear":
        raise InputError(
            f"{matrix.name} takes no static activation scale",
            found=f"activation int8_static for the {matrix.role}",
            expected="static activation scales for linears only: calibration finds no others",
            action=f"leave {matrix.name} out of the override's pattern, or set its activation to auto",
        )
    if matrix.weight != "keep":
        notes += [
            f"{kind.found} rounded again to {matrix.weight}"
            for kind in found
            if matrix.weight != "f32" and parse_weight(kind.format).has_scales
        ]
        return matrix
    if len(found) != len(kinds) and _is_quantised(program):
        found = [
            kind or plain(program.weight_of(m)) for kind, m in zip(kinds, matrices_of(node), strict=True)
        ]
    if len(found) != len(kinds):
        raise InputError(
            "the recipe keeps a checkpoint's integers, but this checkpoint holds none",
            found=f"{matrix.name} is stored as real numbers",
            expected="a quantised .gguf file or Hugging Face folder",
            action="choose a recipe that quantises, such as int4 or int8",
        )
    kind = widest(found)
    if kind_of(node) != "linear" and any(_is_reordered(program.weight_of(m)) for m in matrices_of(node)):
        kind = replace(kind, kept=False)
    if not kind.kept:
        notes.append(f"{kind.found} rounded again to {kind.format}")
    elif not kind.exact:
        notes.append(f"{kind.found} carried as {kind.format}, its scales rounded to float16")
    activation, scale = recipe.activation_of(kind.format), 0.0
    if kind.kept and kind.activation is not None:
        activation, scale = kind.activation, kind.activation_scale
        if kind_of(node) == "moe" and activation == "int8_static":
            activation, scale = recipe.activation_of(kind.format), 0.0
    return replace(matrix, weight=kind.format, activation=activation, kept=kind.kept, activation_scale=scale)


def _is_quantised(program: Program) -> bool:
    """Whether any weight comes from a quantised checkpoint."""
    return any(isinstance(leaf, HoldsIntegers) for w in program.weights.values() for leaf in w.leaves())


def _is_reordered(weight: Weight) -> bool:
    """Whether the integers want their inputs in another order, which only a linear gives them."""
    return any(getattr(leaf, "input_order", None) is not None for leaf in weight.leaves())


def _count(assigned: Assigned) -> list[str]:
    """How many matrices of each role got which format, of how many."""
    totals = Counter(matrix.role for matrix in assigned.values())
    counts = Counter((matrix.role, _said(matrix)) for matrix in assigned.values())
    notes = []
    for role, noun in _PLURAL.items():
        shares = [
            f"{count} of {totals[role]} {said}" for (which, said), count in counts.items() if which == role
        ]
        if shares:
            notes.append(f"{noun}: {', '.join(shares)}")
    return notes


def _said(matrix: Matrix) -> str:
    keeps = matrix.kept and parse_weight(matrix.weight).has_scales
    return f"{matrix.weight} (integers kept)" if keeps else matrix.weight


def _two_copies(assigned: Mapping[fx.Node, Matrix]) -> list[str]:
    """One note a matrix that has to be stored in more than one format."""
    stored: dict[str, set[str]] = {}
    for node, matrix in assigned.items():
        for part in matrices_of(node):
            stored.setdefault(str(part.target), set()).add(_said(matrix))
    return [
        f"{name} is stored {len(kinds)} times ({', '.join(sorted(kinds))}): its uses ask for unlike formats"
        for name, kinds in stored.items()
        if len(kinds) > 1
    ]


def _summarised(notes: list[str]) -> list[str]:
    return [f"{count} × {note}" if count > 1 else note for note, count in Counter(notes).items()]
