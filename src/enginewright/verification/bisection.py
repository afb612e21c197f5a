"""Naming the culprit: the first pass, and the first op, that leaves the model.

In this order, since each step takes the ones before it as good:

1. *Passes.* The Program after each pass, its rounding taken out, against the captured model on one sample. Inside the first
   that leaves the limit of the stage `structure`: node by node (changed_nodes.py).
2. *Rounding.* Each stored matrix against the weights it stands for, and each static scale; the first pass after which one leaves
   its limit.
3. *Ops.* Each unit on the backend from the Program's own values, in graph order: first one of each kind, then all of them.
4. *Prefixes.* The final Program from the tokens to the sums that its layers hand on, on the backend, by halving: what no op shows
   alone lies between the last sum that agrees and the first that does not.
5. *The engine.* Where all of this agrees, and the engine does not: its files, or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, fx

from enginewright.passes.cut_draft import cuts
from enginewright.passes.cut_out import Unit, cut_out, named, units
from enginewright.passes.dialect import OPS
from enginewright.passes.matching import is_call
from enginewright.passes.program import Program, Stage
from enginewright.passes.unrounded import StoredMatrix, stored_matrices, unrounded

from .changed_nodes import NodeFound, first_changed
from .compare import judge_logits
from .goldens import tolerance
from .matrices import BEYOND, limit_of, rounding_error
from .pieces import Pieces, one_of_each_kind
from .running import run_watched
from .stages import STATIC, STRUCTURE, Ties, static_scale_error

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.recipes.recipe import Recipe

__all__ = ["Bisection", "Finding", "bisect"]

Report = Callable[[str], None]
_SHOWN = 8  # nodes that a report names
_ROWS = 32  # of a value, where the program is run from its tokens on

History = Sequence[tuple[str, Program]]
"""(name of a pass, the Program after it), from ("capture", the captured model) on."""


@dataclass(frozen=True)
class Finding:
    """One thing that was compared: `error` against `limit`, in the unit of its step."""

    step: str
    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass
class Bisection:
    """What was compared, in order, and the culprit.

    `kind`: "pass", "rounding", "op", "prefix", "engine"; "" where nothing left its limit. `where`: the pass, for the first two;
    the op, for the others. `nodes`: what to look at, the likeliest first. Of a pass, `replaced` says what stood in the place of
    its new nodes, and `leads_to` where the first other value was seen.
    """

    findings: list[Finding] = field(default_factory=list)
    kind: str = ""
    where: str = ""
    nodes: list[NodeFound] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    leads_to: str = ""
    sample: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def text(self) -> str:
        """The report for a terminal: a line a comparison, and the verdict."""
        lines, step = [], ""
        for finding in self.findings:
            if finding.step != step:
                lines.append(finding.step)
                step = finding.step
            mark = "ok " if finding.passed else "BAD"
            lines.append(f"  {mark} {finding.error:8.2e}  (limit {finding.limit:.2g})  {finding.name}")
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """The culprit in words."""
        says = {
            "pass": f"The first pass that changes the model is `{self.where}`.",
            "rounding": f"The pass `{self.where}` leaves a matrix that is not what its format can give.",
            "op": f"The backend computes {self.where} otherwise than the program says, from the same inputs.",
            "prefix": f"No op is wrong alone; together they leave the program at {self.where}.",
            "engine": "Passes and backend agree with the model; the engine's own files or the runtime do not.",
            "": "Nothing left its limit: what the engine loses is what its formats cost. `optimize --report DIR` says where.",
        }[self.kind]
        lines = [says, *(f"  {node.text()}" for node in self.nodes[:_SHOWN])]
        if len(self.nodes) > _SHOWN:
            lines.append(f"  and {len(self.nodes) - _SHOWN} more")
        if self.replaced:
            more = f" and {len(self.replaced) - _SHOWN} more" if len(self.replaced) > _SHOWN else ""
            lines.append(f"  in the place of {', '.join(self.replaced[:_SHOWN])}{more}")
        if self.leads_to:
            lines.append(f"  the first other value: {self.leads_to}")
        return "\n".join(lines)


def bisect(
    history: History,
    target: Backend,
    recipe: Recipe,
    manifest: Mapping[str, Any],
    sample: Sequence[int],
    *,
    engine: Callable[[Sequence[int]], np.ndarray] | None = None,
    report: Report = lambda text: None,
) -> Bisection:
    """Find what makes an engine differ from its model.

    `history` holds the captured model and the Program after each pass; `manifest` is the engine's, as far as it is known;
    `sample` a sequence of tokens on which the fault shows; `engine(tokens)` gives the engine's logits [T, vocab].
    """
    run = _Bisecting(history, target, recipe, manifest, list(sample), engine, report)
    for step in (run.passes, run.rounding, run.ops, run.prefixes, run.whole_engine):
        step()
        if run.result.kind:
            break
    return run.result


class _Bisecting:
    def __init__(
        self,
        history: History,
        target: Backend,
        recipe: Recipe,
        manifest: Mapping[str, Any],
        sample: list[int],
        engine: Callable[[Sequence[int]], np.ndarray] | None,
        report: Report,
    ) -> None:
        self.history, self.target, self.recipe, self.manifest = history, target, recipe, manifest
        self.sample, self.engine, self.report = sample, engine, report
        self.final = history[-1][1]
        self._least = 1e-4 if recipe.compute in ("auto", "f32") else tolerance(recipe)
        self.result = Bisection(sample=len(sample))
        self.judged = judge_logits(history[0][1], sample)
        self.top = max(float(np.abs(self.judged).max()), 1e-30)
        self.few = sorted({round(i) for i in np.linspace(0, len(sample) - 1, min(_ROWS, len(sample)))})

    def note(self, step: str, name: str, error: float, limit: float) -> bool:
        """Keep a comparison; returns whether it is within its limit."""
        self.result.findings.append(Finding(step, name, error, limit))
        return error <= limit

    def blame(self, kind: str, where: str, nodes: Sequence[NodeFound] = ()) -> None:
        self.result.kind, self.result.where, self.result.nodes = kind, where, list(nodes)

    # 1. Passes.

    def passes(self) -> None:
        before = self.history[0][1]
        for name, program in self.history[1:]:
            self.report(f"after pass {name}")
            exact = unrounded(program)
            if not self.note("passes, rounding taken out", name, self._error(exact), STRUCTURE):
                self.report(f"inside pass {name}")
                changed = first_changed(unrounded(before), exact, self.sample)
                self.blame("pass", name, changed.nodes)
                self.result.replaced, self.result.leads_to = list(changed.replaced), changed.leads_to
                return
            before = program

    def _error(self, program: Program) -> float:
        ties = Ties([self.sample], [list(range(len(self.sample)))])
        logits = run_watched(program, [self.sample], before=ties.before)[0].numpy()
        compared = ties.excused()[0]
        error = np.abs(logits[:compared] - self.judged[:compared])
        return float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0.0)) / self.top

    # 2. Rounding.

    def rounding(self) -> None:
        limit = limit_of(self.recipe.quantise)
        known: set[int] = set()
        for name, program in self.history:
            if program.stage < Stage.QUANTISED:
                continue
            self.report(f"matrices after pass {name}")
            bad: list[NodeFound] = []
            worst, widest, count = (0.0, ""), (0.0, ""), 0
            for matrix in stored_matrices(program):
                if id(matrix.codes) in known and name != self.history[-1][0]:
                    continue
                known.add(id(matrix.codes))
                count += 1
                error = rounding_error(matrix, self.recipe.quantise.symmetric)
                worst = max(worst, (error.steps, error.name))
                widest = max(widest, (error.beyond, error.name))
                bad += [NodeFound.of(matrix.node, fault, name=error.name) for fault in error.faults(limit)]
            if not count:
                continue
            told = f"{name}: {count} matrices"
            good = self.note("rounding, steps from the weights", f"{told}, {worst[1]}", worst[0], limit)
            good &= self.note("rounding, steps beyond the weights", f"{told}, {widest[1]}", widest[0], BEYOND)
            if not good:
                self.blame("rounding", name, bad)
                return
        self._static_scales()

    def _static_scales(self) -> None:
        bad: list[NodeFound] = []
        ratios: list[tuple[float, str]] = []
        matrices: dict[fx.Node, list[StoredMatrix]] = {}
        for matrix in stored_matrices(self.final):
            matrices.setdefault(matrix.node, []).append(matrix)

        def before(node: fx.Node, env: dict[fx.Node, Any]) -> None:
            ratio = static_scale_error(node, env, matrices.get(node, ()))
            if ratio is not None:
                ratios.append((ratio, named(node)))
                if not ratio <= STATIC:
                    bad.append(
                        NodeFound.of(node, f"its static scale is {ratio:.3g} times too large or small")
                    )

        run_watched(self.final, [self.sample], before=before)
        if ratios:
            ratio, name = max(ratios)
            if not self.note("static scales", name, ratio, STATIC):
                self.blame("rounding", "quantise", bad)

    # 3. Ops on the backend.

    @property
    def _serves(self) -> bool:
        return self.target.serves and self.final.stage == Stage.FINAL

    def ops(self) -> None:
        if not self._serves:
            return
        self.report("the final program's values")
        kinds = one_of_each_kind(self.final)
        everything = units(self.final)
        rest = [unit for unit in everything if unit not in set(kinds)]
        self.pieces = Pieces(self.final, self.target, self.recipe, self.manifest)
        if not self._rows_are_right(kinds):
            return
        for some in (kinds, rest):
            for batch in _batches(some, len(self.sample)):
                values = self._values({node for unit in batch for node in unit.inputs})
                for unit in batch:
                    self.report(named(unit.node))
                    found = self.pieces.compare(unit, values, self.sample)
                    self.note(
                        "ops on the backend, from the program's values",
                        named(unit.node),
                        found.median,
                        found.limit,
                    )
                    if not found.passed:
                        says = f"differs by {found.median:.2g} of its largest value (median of positions {found.first} to "
                        says += f"{found.last - 1}; the worst row by {found.largest:.2g})"
                        self.blame("op", named(unit.node), [NodeFound.of(unit.node, says)])
                        return

    def _rows_are_right(self, kinds: Sequence[Unit]) -> bool:
        """Whether what surrounds an op (looking up tokens, choosing rows) gives a table back as it is."""
        node = next((n for unit in kinds for n in unit.inputs if n.op != "placeholder"), None)
        if node is None:
            return True
        value = self._values({node})[node]
        count = len(value)
        found, wanted, _ = self.pieces.run(cut_out(self.final, [node], {node: value}, count), range(count))
        top = max(float(np.abs(wanted).max()), 1e-30)
        error = float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max()) / top
        if self.note(
            "ops on the backend, from the program's values",
            "rows looked up and chosen",
            error,
            self.pieces.limit,
        ):
            return True
        chosen = next(n for n in self.final.graph.nodes if is_call(n, OPS["select_rows"]))
        self.blame(
            "op",
            named(chosen),
            [NodeFound.of(chosen, "the wanted rows, of a table that was looked up, are others")],
        )
        return False

    def _values(self, wanted: set[fx.Node]) -> dict[fx.Node, Tensor]:
        values: dict[fx.Node, Tensor] = {}

        def after(node: fx.Node, value: Any) -> None:
            if node in wanted:
                values[node] = value.clone()

        run_watched(self.final, [self.sample], after=after)
        return values

    # 4. Prefixes.

    def prefixes(self) -> None:
        if not self._serves:
            return
        everything = {unit.node: unit for unit in units(self.final)}
        sums = [node for node in cuts(self.final.graph) if node in everything]
        if not sums:
            return
        self._exact = self._twin_values([node for unit in everything.values() for node in unit.outputs])
        if self._prefix_agrees(everything[sums[-1]]):
            return
        low, high = -1, len(sums) - 1  # what agrees, and what does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._prefix_agrees(everything[sums[middle]]):
                low = middle
            else:
                high = middle
        inside = list(everything)[list(everything).index(sums[low]) + 1 if low >= 0 else 0 :]
        first = next(
            node for node in inside if node is sums[high] or not self._prefix_agrees(everything[node])
        )
        agreed = f"after {named(sums[low])}, which agrees" if low >= 0 else "before any that agrees"
        self.blame("prefix", named(first), [NodeFound.of(first, f"the first op that differs {agreed}")])

    def _twin_values(self, nodes: Sequence[fx.Node]) -> dict[str, Tensor]:
        """Values of the Program with its rounding taken out, by name, at a few rows."""
        wanted, values = {node.name for node in nodes}, {}

        def after(node: fx.Node, value: Any) -> None:
            if (name := node.meta.get("name", node.name)) in wanted and isinstance(value, Tensor):
                values[name] = value.float().flatten(1)[self.few].clone()

        run_watched(unrounded(self.final), [self.sample], after=after)
        return values

    def _prefix_agrees(self, unit: Unit) -> bool:
        self.report(f"to {named(unit.node)}")
        cut = cut_out(self.final, unit.outputs, {}, max(self.sample) + 1)
        found, wanted, _ = self.pieces.run(cut, self.sample, self.few)
        top = max(float(np.abs(wanted).max()), 1e-30)
        error = np.nan_to_num(np.abs(found - wanted), nan=np.inf).max(-1) / top
        exact = np.concatenate([self._exact[node.name].numpy() for node in unit.outputs], -1)
        cost = np.abs(wanted[:, : exact.shape[1]] - exact).max(-1) / top
        limit = max(self._least, 2 * float(np.median(cost)))
        step = "the program from its tokens on, on the backend"
        return self.note(step, named(unit.node), float(np.median(error)), limit)

    # 5. The engine.

    def whole_engine(self) -> None:
        if self.engine is None:
            return
        self.report("the engine")
        served = self.engine(self.sample)
        step = "the engine through the runtime"
        if self.target.exact and self._serves:  # what is lowered again must give the same bits
            output = self.final.graph.output_node().all_input_nodes[0]
            found, _, rows = self.pieces.run(
                cut_out(self.final, [output], {}, max(self.sample) + 1), self.sample
            )
            error = np.nan_to_num(np.abs(served[rows] - found), nan=np.inf)
            good = self.note(
                step, "logits, and those of the program lowered again", float(error.max()) / self.top, 0.0
            )
        else:
            own = run_watched(self.final, [self.sample])[0].numpy()
            error = np.nan_to_num(np.abs(served - own), nan=np.inf).max(-1) / self.top
            cost = np.abs(own - self.judged).max(-1) / self.top
            limit = max(self._least, 2 * float(np.median(cost)))
            good = self.note(step, "logits, and those of the program", float(np.median(error)), limit)
        if not good:
            self.blame("engine", "the engine")


def _batches(some: Sequence[Unit], rows: int) -> list[list[Unit]]:
    """Units whose inputs are held together: about 256 MB."""
    batches: list[list[Unit]] = [[]]
    held = 0
    for unit in some:
        size = (
            4
            * rows
            * sum(int(np.prod(n.meta["val"].shape[1:])) for n in unit.inputs if n.op != "placeholder")
        )
        if held + size > 256 << 20 and batches[-1]:
            batches.append([])
            held = 0
        batches[-1].append(unit)
        held += size
    return [batch for batch in batches if batch]
