"""Pieces of a final Program on its backend, each from exact inputs: what it computes, with no rounding before to hide in.

Two runs of one quantised model drift apart: where the order of a sum tips a value to another code, everything after it rounds
anew, and after a few layers they differ by about what the rounding itself costs. A piece that starts from the Program's own
values (passes/cut_out.py) has no such past. One unit of each kind is enough to see a fault of a kernel, of its packing, of the
cache, on an `exact` backend the others of its kind follow side by side; `bisection.py` looks at all of them one by one.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import StepInput
from enginewright.passes.cut_out import Unit, cut_out, signature, units
from enginewright.passes.matching import argument
from enginewright.passes.program import Program

from .figures import band_edges
from .running import run_watched

if TYPE_CHECKING:
    from enginewright.backends.base import Backend, Executor
    from enginewright.recipes.recipe import Recipe

__all__ = ["FEW", "LARGEST", "Compared", "Pieces", "in_chunks", "instances", "one_of_each_kind"]

MEDIAN = 1e-5  # of the rows of a unit; at most 2e-6 in any unit of a good engine that computes in f32
LARGEST = 0.05  # of a row that a tie has tipped
_STEPS = {"f16": 2.0**-11, "bf16": 2.0**-8}  # half a step of a format, relative
_OF_A_STEP = 4.0  # of a good engine at most 1.4
_INFINITE = 1e30  # what some kernels take for an infinity

Floats = npt.NDArray[np.float32]

_CHUNKS = (37, 1, 24, 1)  # tokens of the steps, in turn
FEW = 40  # rows from which instances of a kind are compared
_ROWS = 96  # whose results are compared where they are wide
_LONG = 600  # rows that attention is run on at least: more than one of its spans, and pages beyond a sample's
_OF_AN_EXPERT = 3  # rows from which an expert is judged: one may be tipped
_WEIGHTS = 1 << 28  # numbers in the matrices of one program
_WIDE = 1 << 23  # numbers of a result that are compared at most


@dataclass(frozen=True)
class Compared:
    """How a piece's result differs, as a share of its largest value.

    `median`: of the rows' largest differences, in the band of positions [first, last) where that is largest; `largest`: of all;
    `limit`: of `median`.
    """

    unit: Unit
    median: float
    largest: float
    first: int
    last: int
    limit: float = MEDIAN

    @property
    def passed(self) -> bool:
        return self.median <= self.limit and self.largest <= LARGEST


def one_of_each_kind(program: Program) -> list[Unit]:
    """The first unit of each kind that a backend may treat differently."""
    found: dict[Any, Unit] = {}
    for unit in units(program):
        found.setdefault(signature(unit), unit)
    return list(found.values())


def instances(program: Program, kinds: Sequence[Unit]) -> list[list[Unit]]:
    """The units that are not among `kinds`, those of one kind together."""
    found: dict[Any, list[Unit]] = {}
    for unit in units(program):
        if unit not in kinds:
            found.setdefault(signature(unit), []).append(unit)
    return list(found.values())


class Pieces:
    """Compares pieces of `program` as a backend computes them with the Program itself: run, or where the backend can say what
    its lowered form means (`Backend.rehearse`), interpreted.

    `manifest` is the engine's, without its files. `windows` are those of the KV groups. `limit` is that of a unit's median: half
    a step of the format in which the backend keeps what lies between products, four times.
    """

    def __init__(
        self, program: Program, target: Backend, recipe: Recipe, manifest: Mapping[str, Any]
    ) -> None:
        self.program, self.target, self.recipe, self.manifest = program, target, recipe, manifest
        self.windows = [group.window for group in program.facts.kv_groups]
        self.limit = max(MEDIAN, _OF_A_STEP * _STEPS.get(recipe.compute, 0.0))
        cache = 0.0 if target.exact else _STEPS.get(recipe.kv_cache.format, 0.0)
        self._attention = max(
            self.limit, _OF_A_STEP * cache
        )  # attention's inputs are rounded to what the cache holds

    def limit_of(self, unit: Unit) -> float:
        return self._attention if unit.op == "ew::paged_attention" else self.limit

    def compare(self, unit: Unit, values: Mapping[fx.Node, Tensor], tokens: Sequence[int]) -> Compared:
        """One unit, from the values [rows, …] of its inputs; `tokens` are those of the rows."""
        given = _given(unit, values)
        if given:
            given, ids = self._long(unit, given)
        else:  # all of the vocabulary, from end to end
            last = self.program.facts.vocab_size - 1
            ids = [round(place) for place in np.linspace(0, last, len(tokens))]
        chosen = _even_routing(unit, given, self.program)
        cut = cut_out(self.program, unit.outputs, given, max(ids) + 1)
        found, wanted, rows = self.run(cut, ids)
        return self._compared(unit, found, wanted, rows, chosen)

    def compare_alike(self, some: Sequence[Unit], values: Mapping[fx.Node, Tensor]) -> list[Compared]:
        """Units of one kind, side by side in one program: an instance may be wrong where its kind is right, as in what is packed
        for it. A few rows are enough to see that."""
        result: list[Compared] = []
        for batch in self._batches(some, values):
            given: dict[fx.Node, Tensor] = {}
            chosen: dict[Unit, Tensor | None] = {}
            for unit in batch:
                own = _given(unit, values)
                chosen[unit] = _even_routing(unit, own, self.program)
                given |= own
            count = min(len(value) for value in given.values())
            given = {node: value[-count:] for node, value in given.items()}
            outputs = [node for unit in batch for node in unit.outputs]
            found, wanted, rows = self.run(cut_out(self.program, outputs, given, count), range(count))
            start = 0
            for unit in batch:
                stop = start + sum(int(np.prod(node.meta["val"].shape[1:])) for node in unit.outputs)
                index = chosen[unit]
                part = (
                    found[:, start:stop],
                    wanted[:, start:stop],
                    rows,
                    None if index is None else index[-count:],
                )
                result.append(self._compared(unit, *part))
                start = stop
        return result

    def _batches(self, some: Sequence[Unit], values: Mapping[fx.Node, Tensor]) -> list[list[Unit]]:
        """Units that can stand side by side: none reads what another computes, or is fed where it computes. Few weights."""
        batches: list[tuple[list[Unit], set[fx.Node], set[fx.Node], int]] = []
        for unit in some:
            inputs, outputs = set(_given(unit, values)), set(unit.outputs)
            if not inputs:
                continue
            numbers = self._weights(unit)
            for index, (batch, read, made, held) in enumerate(batches):
                if not (inputs & made or outputs & read) and held + numbers <= _WEIGHTS:
                    batches[index] = ([*batch, unit], read | inputs, made | outputs, held + numbers)
                    break
            else:
                batches.append(([unit], inputs, outputs, numbers))
        return [batch for batch, *_ in batches]

    def _weights(self, unit: Unit) -> int:
        """Numbers in the matrices that a unit reads itself."""
        found, todo = 0, [unit.node]
        while todo:
            node = todo.pop()
            if node.op == "get_attr":
                found += self.program.weight_of(node).numel
            elif node not in unit.inputs:
                todo += node.all_input_nodes
        return found

    def _long(self, unit: Unit, given: Mapping[fx.Node, Tensor]) -> tuple[dict[fx.Node, Tensor], list[int]]:
        """What is fed, and as which rows. Attention reads its rows again and again, over more pages than a sample fills."""
        count = len(next(iter(given.values())))
        wanted = min(_LONG, self.program.facts.max_context)
        if unit.op == "ew::paged_attention" and self.target.exact and count < wanted:
            again = torch.arange(wanted) % count
            return {node: value[again] for node, value in given.items()}, list(range(wanted))
        return dict(given), list(range(count))

    def _compared(
        self, unit: Unit, found: Floats, wanted: Floats, rows: Sequence[int], chosen: Tensor | None
    ) -> Compared:
        if unit.op == "aten::topk":  # which come first among equals, or unsorted, is nobody's promise
            found, wanted = np.sort(found, -1), np.sort(wanted, -1)
        experts = None if chosen is None else chosen[list(rows)].long().numpy()
        return Compared(unit, *self._difference(found, wanted, rows, experts), self.limit_of(unit))

    def run(
        self, cut: Program, ids: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[Floats, Floats, Sequence[int]]:
        """A final Program's result [rows, features] of one sequence, by the backend and by itself, and which rows those are."""
        most = max(1, min(len(ids), _WIDE // cut.facts.vocab_size))
        rows = rows or sorted({round(i) for i in np.linspace(0, len(ids) - 1, most)})
        wanted = run_watched(cut, [ids], [rows])[0].numpy()
        with tempfile.TemporaryDirectory(prefix="enginewright-") as folder:
            executor = self._executor(cut, Path(folder))
            try:
                found = in_chunks(executor, ids, rows)
            finally:
                executor.close()
        return found, wanted, rows

    def _executor(self, cut: Program, folder: Path) -> Executor:
        """What computes `cut`: the backend's interpreter where it has one, else what it lowers into `folder`."""
        model = {**self.manifest["model"], "vocab_size": cut.facts.vocab_size}
        manifest = {**self.manifest, "model": model}
        if not self.target.exact:
            interpreter = self.target.rehearse(cut, self.recipe, Artifact(folder, {**manifest, "files": {}}))
            if interpreter is not None:
                return interpreter
        self.target.lower(cut, self.recipe, folder)
        files: dict[str, dict[str, Any]] = {
            path.relative_to(folder).as_posix(): {} for path in folder.rglob("*") if path.is_file()
        }
        return self.target.load(Artifact(folder, {**manifest, "files": files}), max_tokens=64)

    def _difference(
        self, found: Floats, wanted: Floats, rows: Sequence[int], experts: npt.NDArray[Any] | None = None
    ) -> tuple[float, float, int, int]:
        """`experts` [rows, k]: which experts a row went to. Of each that several rows went to, the best of these rows counts,
        too: one expert's fault is in every row of it, and in few of all."""
        found, wanted = (np.clip(values, -_INFINITE, _INFINITE) for values in (found, wanted))
        finite = wanted[np.abs(wanted) < _INFINITE]
        top = max(float(np.abs(finite).max()) if finite.size else 0.0, 1e-30)
        with np.errstate(invalid="ignore"):
            error = np.where(found == wanted, 0.0, np.abs(found.astype(np.float64) - wanted)).max(-1) / top
        error = np.where(np.isfinite(error), error, np.inf)
        places, worst = np.asarray(rows), (-1.0, 0, 0)
        edges = band_edges(int(places.max()) + 1, self.windows)
        for first, last in itertools.pairwise(edges):
            inside = error[(places >= first) & (places < last)]
            if len(inside):
                worst = max(worst, (float(np.median(inside)), first, last))
        for expert in np.unique(experts) if experts is not None else ():
            inside = error[(experts == expert).any(-1)]
            if len(inside) >= _OF_AN_EXPERT:
                worst = max(worst, (float(inside.min()), int(places.min()), int(places.max()) + 1))
        return worst[0], float(error.max()), worst[1], worst[2]


def _given(unit: Unit, values: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """The values [rows, …] that a unit is fed."""
    return {node: values[node] for node in unit.inputs if node.op != "placeholder" and node in values}


def _even_routing(unit: Unit, given: dict[fx.Node, Tensor], program: Program) -> Tensor | None:
    """Send a unit's rows to all experts in turn, in place; returns the choice [rows, k]. None for other ops."""
    if unit.op not in ("ew::moe", "ew::quantised_moe"):
        return None
    index = argument(unit.node, "topk_index")
    while index not in given and len(index.all_input_nodes) == 1:  # only moved
        index = index.all_input_nodes[0]
    matrix = next(
        n for n in unit.node.all_input_nodes if n.op == "get_attr" and len(n.meta["val"].shape) == 3
    )
    if index not in given or given[index].dim() != 2:
        return None
    rows, count = given[index].shape
    even = torch.arange(rows)[:, None] * count + torch.arange(count)
    given[index] = (even % int(program.weight_of(matrix).shape[0])).to(given[index].dtype)
    return given[index]


def in_chunks(executor: Executor, ids: Sequence[int], rows: Iterable[int]) -> Floats:
    """Results [rows, features] of one sequence, a few tokens a step, its pages in no order."""
    groups = list(executor.kv_groups)
    counts = [-(-len(ids) // group.page_size) for group in groups]
    executor.create_pool([count + 1 for count in counts])
    table = np.full((len(groups), 1, max(counts, default=1)), -1, np.int32)
    for index, count in enumerate(counts):
        table[index, 0, :count] = np.random.default_rng(index).permutation(count + 1)[:count]
    wanted, found, start, turn = set(rows), [], 0, 0
    while start < len(ids):
        stop = min(start + _CHUNKS[turn % len(_CHUNKS)], len(ids))
        here = [row - start for row in range(start, stop) if row in wanted]
        arrays = (ids[start:stop], range(start, stop), (0, stop - start), (stop,))
        tokens, positions, starts, lens = (np.array(list(values), np.int32) for values in arrays)
        step = StepInput(tokens, positions, starts, lens, table, np.array(here, np.int32))
        found.append(executor.step(step))
        start, turn = stop, turn + 1
    return np.concatenate(found)
