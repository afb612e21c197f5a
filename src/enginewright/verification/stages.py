"""A build judged stage by stage, each with limits as tight as it can bear.

The recipe's limits hold the engine against its source model. They allow for rounding, and a fault may hide under it: int4 may
cost a nat. So what lies between the two is looked at by itself, and what rounds is looked at alone.

| stage | what is compared | figure | limit |
|---|---|---|---|
| structure | the final Program with its rounding taken out, and the captured model | largest difference of a logit | 3e-5 |
| rounding | each stored matrix, and the weights it stands for | largest error of a group, steps | 0.55; 8 |
| rounding | the same | furthest that a group's grid reaches beyond its weights, steps | 0.1 |
| rounding | the scale of each static activation, and what the samples ask for | how many times too large or small | 8 |
| backend | each unit on the backend, and in the Program, from the same inputs (pieces.py) | median of rows | 1e-5; by pieces.py |
| backend | the same | largest | 0.05 |
| engine | the engine through the runtime, and the final Program | median of rows, by band | 1e-4, or twice what rounding costs |

Where a backend computes in f16 or bf16 between products, `backend` has some steps of that format and `engine` the tolerance of
goldens.py, instead of 1e-5 and 1e-4.

Differences are shares of the largest logit, or value. passes/unrounded.py takes the rounding out, matrices.py measures matrices,
pieces.py runs units. Experts that are chosen by a hair's breadth may be chosen otherwise after a sum in another order: the rows
of a sample from there on are excused in `structure`, and counted.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from enginewright.backends.artifact import Artifact
from enginewright.passes.cut_out import Unit, named, op_of
from enginewright.passes.dialect import OPS
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program
from enginewright.passes.unrounded import StoredMatrix, stored_matrices, unrounded
from enginewright.runtime.engine import load

from .figures import Array, band_edges
from .goldens import tolerance
from .matrices import BEYOND, limit_of, rounding_error
from .pieces import FEW, LARGEST, Compared, Pieces, instances, one_of_each_kind
from .running import run_watched

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.recipes.recipe import Recipe

__all__ = ["STRUCTURE", "StageCheck", "Stages", "Ties", "static_scale_error", "tied_rows"]

Report = Callable[[str], None]

STRUCTURE = 3e-5
STATIC = 8.0
_ENGINE = 1e-4
_OF_ROUNDING = 2.0  # runs that round anew after a tie differ by √2 of what rounding costs where they have nothing in common
_TIE = 1e-5  # of the largest score: a gap between the last that is chosen and the next that decides nothing
_MOST_EXCUSED = 0.5  # of the rows
_KEPT_BYTES = 96 << 20  # of each kind of logits that are kept


@dataclass(frozen=True)
class StageCheck:
    """One figure of one stage. `found`: where it was measured, or what was excused."""

    stage: str
    figure: str
    value: float
    limit: float
    found: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        value, limit = (float(f"{figure:.3g}") for figure in (self.value, self.limit))
        return {**asdict(self), "value": value, "limit": limit, "passed": self.passed}

    def failure(self) -> str:
        where = f" ({self.found})" if self.found else ""
        return f"stage {self.stage}: {self.figure} is {self.value:.3g}, the limit is {self.limit:g}{where}"


@dataclass
class Stages:
    """The checks of one build. `final` is the Program that was lowered; `manifest` the engine's, as far as it is known.

    `relative_errors`: ‖Ŵ - W‖ / ‖W‖ of each stored matrix, once `checks` has run."""

    final: Program
    target: Backend
    recipe: Recipe
    manifest: Mapping[str, Any]
    samples: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    judged: list[Array] = field(default_factory=list)
    served: list[Array] = field(default_factory=list)
    worst_sample: int | None = None
    relative_errors: dict[str, float] = field(default_factory=dict)

    def begin(self, samples: Sequence[Sequence[int]]) -> None:
        """Say on which samples the logits will be; of long ones over a large vocabulary, some rows are kept."""
        self.samples = [list(tokens) for tokens in samples]
        most = max(len(samples), _KEPT_BYTES // (4 * self.final.facts.vocab_size))
        share = min(1.0, most / sum(map(len, samples)))
        for tokens in samples:
            count = max(1, int(len(tokens) * share))
            self.rows.append(sorted({round(i) for i in np.linspace(0, len(tokens) - 1, count)}))

    def add(self, judged: Array, served: Array) -> None:
        """Logits [T, vocab] of the next sample, by the captured model and by the engine."""
        rows = self.rows[len(self.judged)]
        self.judged.append(judged[rows])
        self.served.append(served[rows])

    def checks(self, report: Report = lambda text: None) -> list[StageCheck]:
        """Every stage's figures."""
        report("structure")
        found = [self._structure()]
        report("rounding and the final program")
        kinds = one_of_each_kind(self.final) if self.target.serves else []
        alike = instances(self.final, kinds) if self.target.exact else []
        seen = _Seen(self, kinds, [unit for some in alike for unit in some])
        logits = run_watched(self.final, self.samples, self.rows, before=seen.before, after=seen.after)
        found += seen.rounding()
        if kinds:
            report("backend")
            pieces = Pieces(self.final, self.target, self.recipe, self.manifest)
            compared = [pieces.compare(unit, seen.values, self.samples[-1]) for unit in kinds]
            for some in alike:
                compared += pieces.compare_alike(some, seen.values)
            found += backend_checks(compared)
        return [*found, self._engine([part.numpy() for part in logits])]

    def telling_sample(self) -> list[int]:
        """The tokens on which to look for a fault: where `structure` is furthest off, or where that is good, the last sample."""
        return self.samples[self.worst_sample if self.worst_sample is not None else -1]

    def engine_logits(self, folder: Path) -> Callable[[Sequence[int]], Array] | None:
        """What gives the logits [T, vocab] of the engine in `folder`; None where it cannot run here."""
        if not self.target.serves or self.target.runs_here(self.manifest) is not None:
            return None
        names: dict[str, dict[str, Any]] = {
            path.relative_to(folder).as_posix(): {} for path in folder.rglob("*") if path.is_file()
        }

        def logits(tokens: Sequence[int]) -> Array:
            manifest = {key: value for key, value in self.manifest.items() if key != "verification"}
            made = Artifact(folder, {**manifest, "files": names})
            with load(made, cache_tokens=len(tokens) + 64, max_sequences=1) as engine:
                return engine.logits([list(tokens)])[0]

        return logits

    def _structure(self) -> StageCheck:
        ties = Ties(self.samples, self.rows)
        found = run_watched(unrounded(self.final), self.samples, self.rows, before=ties.before)
        excused = ties.excused()
        value, where = 0.0, ""
        top = max(float(np.abs(judged).max()) for judged in self.judged)
        for index, (logits, judged) in enumerate(zip(found, self.judged, strict=True)):
            with np.errstate(invalid="ignore"):
                error = np.abs(logits.numpy() - judged).max(-1) / top
            error = np.where(np.isfinite(error), error, np.inf)
            error[excused[index] :] = 0.0
            if error.max() > value:
                value = float(error.max())
                if not value <= STRUCTURE:
                    self.worst_sample = index
                where = f"sample {index}, position {self.rows[index][int(error.argmax())]}"
        lost = sum(len(rows) - first for rows, first in zip(self.rows, excused, strict=True))
        count = sum(map(len, self.rows))
        if lost:
            where += f"; {lost} of {count} rows excused by a tie between experts"
        if lost > _MOST_EXCUSED * count:  # chance ties a few experts; a router that says nothing ties all
            value = math.inf
        return StageCheck("structure", "largest logit error, rounding taken out", value, STRUCTURE, where)

    def _engine(self, logits: Sequence[Array]) -> StageCheck:
        """By band: medians over rows, of the engine's difference from the Program and of the Program's from the model."""
        top = max(float(np.abs(judged).max()) for judged in self.judged)
        places = np.concatenate(self.rows)
        with np.errstate(invalid="ignore"):  # what is not finite fails below
            pairs = [
                np.stack([np.abs(served - own).max(-1), np.abs(own - judged).max(-1)])
                for served, own, judged in zip(self.served, logits, self.judged, strict=True)
            ]
        error, cost = np.concatenate(pairs, 1) / top
        error = np.where(np.isfinite(error), error, np.inf)
        edges = band_edges(int(places.max()) + 1, [group.window for group in self.final.facts.kv_groups])
        least = _ENGINE if self.recipe.compute in ("auto", "f32") else tolerance(self.recipe)
        worst = (0.0, 0.0, least, "")
        for first, last in itertools.pairwise(edges):
            inside = (places >= first) & (places < last)
            if inside.any():
                value, rounding = float(np.median(error[inside])), float(np.median(cost[inside]))
                limit = max(least, _OF_ROUNDING * rounding)
                band = f"positions {first} to {last - 1}; the rounding's is {rounding:.2g}"
                worst = max(worst, (value / limit, value, limit, band))
        _, value, limit, band = worst
        return StageCheck("engine", "median error from the final program", value, limit, band)


def backend_checks(compared: Sequence[Compared]) -> list[StageCheck]:
    """The two figures of units that were compared, each of the worst."""
    median = max(compared, key=lambda one: one.median / one.limit)
    largest = max(compared, key=lambda one: one.largest)
    band = f"{named(median.unit.node)}, positions {median.first} to {median.last - 1}"
    return [
        StageCheck(
            "backend",
            f"median error of {len(compared)} ops, of every kind",
            median.median,
            median.limit,
            band,
        ),
        StageCheck("backend", "largest error of an op", largest.largest, LARGEST, named(largest.unit.node)),
    ]


class _Seen:
    """What the run of the final Program shows: matrices, static scales, and the inputs of some units in the last sample."""

    def __init__(self, stages: Stages, kinds: Sequence[Unit], others: Sequence[Unit]) -> None:
        self.stages = stages
        self.values: dict[fx.Node, Tensor] = {}
        self.wanted = {node for unit in kinds for node in unit.inputs}
        self.few = {node for unit in others for node in unit.inputs} - self.wanted
        self.matrices: dict[fx.Node, list[StoredMatrix]] = {}
        for matrix in stored_matrices(stages.final):
            self.matrices.setdefault(matrix.node, []).append(matrix)
        self.worst: tuple[float, str] = (0.0, "")
        self.widest: tuple[float, str] = (0.0, "")
        self.static: tuple[float, str] = (0.0, "")
        self.known: set[int] = set()
        self.lengths = [len(tokens) for tokens in stages.samples]
        self.row_lengths = [len(rows) for rows in stages.rows]

    def before(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        for matrix in self.matrices.get(node, ()):
            if id(matrix.codes) not in self.known:
                self.known.add(id(matrix.codes))
                error = rounding_error(matrix, self.stages.recipe.quantise.symmetric)
                where = f"{error.name}, row {error.row}, group {error.group}"
                self.stages.relative_errors[error.name] = float(f"{error.relative:.3g}")
                self.worst = max(self.worst, (error.steps, where))
                where = f"{error.name}, row {error.beyond_row}, group {error.beyond_group}"
                self.widest = max(self.widest, (error.beyond, where))
        ratio = static_scale_error(node, env, self.matrices.get(node, ()))
        if ratio is not None:
            self.static = max(self.static, (ratio, str(node.meta.get("module", ""))))

    def after(self, node: fx.Node, value: Any) -> None:
        if node in self.wanted or node in self.few:
            # Rows of the last sample: every token's, or the chosen ones.
            count = self.lengths[-1] if len(value) == sum(self.lengths) else self.row_lengths[-1]
            self.values[node] = value[-(count if node in self.wanted else min(count, FEW)) :].clone()

    def rounding(self) -> list[StageCheck]:
        recipe = self.stages.recipe
        found = []
        if self.matrices:
            figure = f"largest error of a group, steps, of {len(self.known)} matrices"
            found.append(
                StageCheck("rounding", figure, self.worst[0], limit_of(recipe.quantise), self.worst[1])
            )
            figure = "furthest that a group's grid reaches beyond its weights, steps"
            found.append(StageCheck("rounding", figure, self.widest[0], BEYOND, self.widest[1]))
        if self.static[1]:
            figure = "static activation scale, times too large or small"
            found.append(StageCheck("rounding", figure, self.static[0], STATIC, self.static[1]))
        return found


def static_scale_error(
    node: fx.Node, env: Mapping[fx.Node, Any], matrices: Sequence[StoredMatrix]
) -> float | None:
    """How many times a calibrated static scale is larger or smaller than the node's inputs ask for; None where there is none."""
    if not is_call(node, OPS["quantised_linear"]) or argument(node, "activation_format") != "int8_static":
        return None
    if argument(node, "outlier_columns") is not None or any(matrix.is_kept for matrix in matrices):
        return None
    scale, wanted = argument(node, "activation_scale"), float(env[argument(node, "x")].abs().max()) / 127
    return max(scale / wanted, wanted / scale) if wanted > 0 and scale > 0 else math.inf


def tied_rows(node: fx.Node, env: Mapping[fx.Node, Any]) -> Tensor | None:
    """Rows [T] in which a choice of the best k (of experts) hangs on less than the order of a sum changes; None for other ops."""
    if op_of(node) != "aten::topk":
        return None
    scores, k = env[argument(node, "self")], argument(node, "k")
    if not scores.is_floating_point() or k >= scores.shape[-1]:
        return None
    best = scores.flatten(0, -2).topk(k + 1, dim=-1).values
    gap = best[:, k - 1] - best[:, k]
    top = torch.nan_to_num(scores.flatten(0, -2), neginf=0.0).abs().amax(-1)
    return (
        (gap <= _TIE * top).reshape(scores.shape[:-1]).flatten(1).any(-1)
        if scores.dim() > 2
        else gap <= _TIE * top
    )


class Ties:
    """Gathers rows in which experts were chosen by a hair's breadth."""

    def __init__(self, samples: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.places = [(index, at) for index, tokens in enumerate(samples) for at in range(len(tokens))]
        self.chosen = [(index, at) for index, some in enumerate(rows) for at in some]
        self.tied: set[tuple[int, int]] = set()

    def before(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        tied = tied_rows(node, env)
        if tied is not None:
            places = self.places if len(tied) == len(self.places) else self.chosen
            self.tied |= {places[int(row)] for row in torch.nonzero(tied)}

    def excused(self) -> list[int]:
        """Of each sample, the place in its wanted rows from which on nothing is compared."""
        result = []
        for index, wanted in enumerate(self.rows):
            hits = [at for sample, at in self.tied if sample == index]
            result.append(bisect.bisect_left(list(wanted), min(hits)) if hits else len(wanted))
        return result
