"""What a build would make of a model, counted on a few of its layers.

One layer of each kind is captured and goes through the real passes and the real lowering. Whatever is counted of that (bytes,
matrices, matches of passes, KV layers) is a table of whole numbers. For each kind that has more layers the same is done with
a second one of it: the difference is what one such layer adds. So the whole model's table is

    reduced + Σ over kinds (layers of the kind − 1) · (with a second one − reduced)

which is exact as long as a layer adds the same wherever it stands. Tests hold it against whole builds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from enginewright.backends.base import Backend
from enginewright.backends.planning import plan_for
from enginewright.passes import dialect
from enginewright.passes.assignment import assign, kind_of, matrices_of
from enginewright.passes.capture import capture_model, facts_of
from enginewright.passes.cut_draft import CanDraft
from enginewright.passes.kept import held
from enginewright.passes.layer_kinds import Layers, find_layers, keep_only
from enginewright.passes.manager import Pass, PassResult, Step, run_steps
from enginewright.passes.matching import argument
from enginewright.passes.meta_model import build_on_meta, fill_buffers
from enginewright.passes.mixed import choosable
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.planned import plan_weights
from enginewright.passes.program import ModelFacts, Program, Stage
from enginewright.passes.rope_lengths import fix_rope_lengths
from enginewright.passes.source import ModelSource
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import EnginewrightError
from enginewright.recipes.recipe import Draft, Mixed, Outliers, Quantise, Recipe, Smooth

_COUNTING = (
    "fuse_siblings:",
    *(f"quantise: {role}" for role in ("linears:", "embedding:", "head:", "routers:")),
)
"""How notes begin that count what is in the reduced model."""

__all__ = ["Attention", "Refusal", "Structure", "survey", "uncalibrated"]


@dataclass(frozen=True)
class Attention:
    """Attention layers that are alike: what they see (0: everything), heads, and the sizes of a key and a value."""

    window: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    layers: int = 0


@dataclass(frozen=True)
class Refusal:
    """Why the model cannot be built: an error's words, the module that it stands in (empty: the whole), and of how many
    layers it is true."""

    message: str
    found: str = ""
    expected: str = ""
    action: str = ""
    module: str = ""
    layers: int = 1

    @classmethod
    def of(cls, error: EnginewrightError, module: str = "", layers: int = 1) -> Refusal:
        found, expected, action = (
            "" if value is None else str(value) for value in (error.found, error.expected, error.action)
        )
        return cls(error.message, found, expected, action, module, layers)


@dataclass
class Structure:
    """The whole model's figures.

    stored: (kind, role, format) -> bytes. weights: (role, format) -> numbers in matrices. matrices: (role, format) -> matrices.
    products: (role, what activations are rounded to) -> numbers that a token is multiplied by. passes: name -> matches, in
    order. routing: (experts, chosen) -> layers. squares: Σ outputs · inputs² of rounded linears. largest: numbers in the largest
    matrix. exact: see backends/planning.py.
    """

    facts: ModelFacts
    layers: Layers
    captured: int = 0  # layers that went through the passes
    stored: dict[tuple[str, str, str], int] = field(default_factory=dict)
    weights: dict[tuple[str, str], int] = field(default_factory=dict)
    matrices: dict[tuple[str, str], int] = field(default_factory=dict)
    products: dict[tuple[str, str], int] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)
    routing: dict[tuple[int, int], int] = field(default_factory=dict)
    squares: int = 0
    largest: int = 0
    notes: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    exact: bool = True

    @property
    def engine_bytes(self) -> int:
        return sum(self.stored.values())


def uncalibrated(recipe: Recipe) -> Recipe:
    """The recipe without what needs text: rounding to nearest, of the same formats."""

    def simple(activation: str) -> str:
        return "int8" if activation == "int8_static" else activation

    return replace(
        recipe,
        smooth=Smooth(),
        quantise=Quantise(),
        outliers=Outliers(),
        mixed=Mixed(),
        draft=Draft(),
        linear=replace(recipe.linear, activation=simple(recipe.linear.activation)),
        overrides=tuple(replace(item, activation=simple(item.activation)) for item in recipe.overrides),
        kv_cache=replace(recipe.kv_cache, max_error=None),
    )


def survey(
    source: ModelSource,
    recipe: Recipe,
    backend: Backend | None,
    context: int,
    report: Callable[[str], None] = lambda text: None,
) -> Structure:
    """The figures of `recipe` (adapted to `backend`, where there is one) on a model, for an engine of `context` tokens.

    Refusals are collected, and what could not be counted is left out then. Raises what `build_on_meta` does.
    """
    model = build_on_meta(source.config)
    bound = source.bind(model) if _keeps(recipe) else None
    held_as = _told({} if bound is None else bound[0])
    layers = find_layers(model, [item.match for item in recipe.overrides], held_as)
    structure = Structure(facts_of(model, context), layers)
    run = _Run(source, recipe, backend, structure, None if bound is None else bound[0])
    firsts = [kind[0] for kind in layers.kinds]
    report(f"{max(len(firsts), 1)} of {layers.count or structure.facts.num_layers} layers")
    try:
        reduced = run.count(model, firsts)
    except EnginewrightError as error:
        structure.refused += _each_alone(run, firsts, error)
        return structure
    total = Counter(reduced)
    structure.captured = len(firsts)
    for kind in layers.kinds:
        if len(kind) > 1 and not structure.refused:
            report(f"what layer {kind[1]} adds")
            more = run.count(build_on_meta(source.config), sorted([*firsts, kind[1]]))
            structure.captured += 1
            for key in more.keys() | reduced.keys():
                total[key] += (len(kind) - 1) * (more[key] - reduced[key])
    if bound is not None:
        structure.notes[:0] = bound[1]
    _fill(structure, total)
    return structure


def _told(bound: Mapping[str, Weight]) -> Callable[[str], Hashable]:
    """How a checkpoint holds the tensor of a name, where its integers are kept."""

    def told(name: str) -> Hashable:
        return held(bound[name]) if name in bound else None

    return told


def _keeps(recipe: Recipe) -> bool:
    return "keep" in (
        recipe.linear.weight,
        recipe.embedding.weight,
        recipe.head.weight,
        recipe.router.weight,
    ) or any(item.weight == "keep" for item in recipe.overrides)


def _each_alone(run: _Run, firsts: list[int], error: EnginewrightError) -> list[Refusal]:
    """Why a capture failed, layer by layer: tracing ends at the first reason, so each kind is traced beside the first layer."""
    found: dict[str, Refusal] = {}
    for first in firsts[1:] or [None]:  # type: ignore[list-item]
        kept = [firsts[0]] if first is None else [firsts[0], first]
        try:
            run.count(build_on_meta(run.source.config), kept if run.structure.layers.path else [])
        except EnginewrightError as reason:
            found.setdefault(str(reason), Refusal.of(reason))
    return list(found.values()) or [Refusal.of(error)]


class _Run:
    """Counts reduced models, one after another."""

    def __init__(
        self,
        source: ModelSource,
        recipe: Recipe,
        backend: Backend | None,
        structure: Structure,
        bound: dict[str, Weight] | None,
    ) -> None:
        self.source, self.recipe, self.backend, self.structure, self.bound = (
            source,
            recipe,
            backend,
            structure,
            bound,
        )
        self.names: list[str] = []  # passes in order

    def count(self, model: Any, kept: list[int]) -> Counter[Hashable]:
        """The table of one reduced model. Notes and refusals of the first one go into the structure."""
        structure, first = self.structure, not self.names
        if structure.layers.path:
            keep_only(model, structure.layers, kept)
        fill_buffers(model)
        notes = fix_rope_lengths(model, structure.facts.max_context)
        weights = (
            plan_weights(model)
            if self.bound is None
            else {k: v for k, v in self.bound.items() if k in model.state_dict()}
        )
        program = capture_model(model, weights, replace(structure.facts, kv_groups=[]))
        refused: list[tuple[str, EnginewrightError]] = []
        done = Normalise(refused).run(program)  # type: ignore[arg-type]
        table: Counter[Hashable] = Counter()
        if not refused:
            table, more = self._passes(program, done, refused)
            if first:
                structure.notes += [*notes, *more]
        if first or not structure.refused:
            structure.refused += self._told(refused)
        return table

    def _told(self, refused: list[tuple[str, EnginewrightError]]) -> list[Refusal]:
        """Refusals without repetition: equal ones of one module are one."""
        layers = self.structure.layers
        made = {
            (module, error.message): Refusal.of(error, module, layers.stands_for(module))
            for module, error in refused
        }
        return list(made.values())

    def _passes(
        self, program: Program, normalised: PassResult, refused: list[tuple[str, EnginewrightError]]
    ) -> tuple[Counter[Hashable], list[str]]:
        recipe, backend = self.recipe, self.backend
        program.stage = Stage.NORMALISED
        stage = Stage.FINAL if backend is None else Stage[backend.stage]
        gate = None if backend is None else backend.gate(recipe, self.source)
        look = _Survey(recipe, gate)
        table: Counter[Hashable] = Counter()
        with _noting(refused):
            order = steps(uncalibrated(recipe), until=stage, gate=look)
            records = run_steps(program, [Step(_Done("normalise", normalised), Stage.NORMALISED), *order])
            self.names = [record.name for record in records if record.name != look.name]
            table = look.table
            table.update({("pass", r.name): r.matches for r in records if r.name != look.name})
            planned = plan_for(backend, program)
            refused += planned.refused
            self.structure.exact = planned.exact
            self.structure.largest = max(self.structure.largest, look.largest)
            for item in planned.stored:
                role = _role_of(item.leaves, look.roles, item.kind)
                table["stored", item.kind, role, item.format] += item.bytes
            for attention in _attentions(program):
                table["attention", attention] += 1
        notes = [re.sub(r"^(\w+: )\d+ × ", r"\1", note) for note in program.notes]
        return table, [note for note in notes if not note.startswith(_COUNTING)]


@contextmanager
def _noting(refused: list[tuple[str, EnginewrightError]]) -> Iterator[None]:
    try:
        yield
    except EnginewrightError as error:
        refused.append(("", error))


class _Done:
    """A pass that has run already, in its place in the list."""

    def __init__(self, name: str, result: PassResult) -> None:
        self.name, self.result = name, result
        self.options: Mapping[str, Any] = {}

    def run(self, program: Program) -> PassResult:
        return self.result


class _Survey:
    """Changes nothing. Counts the matrices and their formats where the graph is fused and nothing is rounded; runs the
    backend's gate."""

    name = "survey"

    def __init__(self, recipe: Recipe, gate: Pass | None) -> None:
        self.options: Mapping[str, Any] = {}
        self.recipe, self.gate = recipe, gate
        self.table: Counter[Hashable] = Counter()
        self.roles: dict[str, set[str]] = {}
        self.largest = 0

    def run(self, program: Program) -> PassResult:
        if self.gate is not None:
            self.gate.run(program)
        assigned, _ = assign(program, self.recipe)
        if self.recipe.mixed.wanted:
            choosable(program, assigned, self.recipe)
        if self.recipe.draft.layers is not None and _attention_count(program) > 1:
            CanDraft(1).run(program)
        seen: set[str] = set()
        for node, matrix in assigned.items():
            role = "experts" if kind_of(node) == "moe" else matrix.role
            self.table["matrices", role, matrix.weight] += 1
            if role == "experts":
                chosen = int(argument(node, "topk_index").meta["val"].shape[-1])
                self.table["routing", int(program.weight_of(matrices_of(node)[0]).shape[0]), chosen] += 1
            for part in matrices_of(node):
                weight = program.weight_of(part)
                if role != "embedding":
                    self.table["products", role, matrix.activation] += weight.numel
                for leaf in weight.leaves():
                    self.roles.setdefault(leaf.name, set()).add(role)
                if str(part.target) not in seen:
                    self.table["weights", role, matrix.weight] += weight.numel
                    self.largest = max(self.largest, weight.numel)
                if role in ("linear", "experts") and matrix.is_integer:
                    self.table["squares",] += weight.numel * weight.shape[-1]
                seen.add(str(part.target))
        return PassResult(0)


def _attention_count(program: Program) -> int:
    return sum(
        dialect.name_of(node.target) == "attention"
        for node in program.graph.nodes
        if node.op == "call_function"
    )


def _role_of(leaves: frozenset[str], roles: Mapping[str, set[str]], kind: str) -> str:
    """The role of a stored weight; one that is embedding and head at once is the head, which reads all of it."""
    found = set().union(*(roles.get(leaf, set()) for leaf in leaves)) if kind == "matrix" else set()
    for role in ("experts", "linear", "router", "head", "embedding"):
        if role in found:
            return role
    return {"table": "position tables"}.get(kind, "norms, biases, constants")


def _attentions(program: Program) -> Iterator[Attention]:
    for node in program.graph.nodes:
        if node.op == "call_function" and dialect.name_of(node.target) in ("attention", "paged_attention"):
            q, k, v = (argument(node, name).meta["val"].shape for name in ("q", "k", "v"))
            yield Attention(int(argument(node, "window")), int(q[1]), int(k[1]), int(k[2]), int(v[2]))


def _fill(structure: Structure, total: Mapping[Any, int]) -> None:
    """Sort the table into the structure's fields."""
    for key, count in total.items():
        if key[0] == "stored":
            structure.stored[key[1:]] = count
        elif key[0] in ("weights", "matrices", "products"):
            getattr(structure, key[0])[key[1:]] = count
        elif key[0] == "routing":
            structure.routing[key[1:]] = count
        elif key[0] == "squares":
            structure.squares = count
        elif key[0] == "attention":
            structure.attentions.append(replace(key[1], layers=count))
        elif key[0] == "pass":
            structure.passes[key[1]] = count
