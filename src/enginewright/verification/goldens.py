"""Golden outputs (backends/golden.py) as a build makes them, of the samples that it verifies on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from enginewright.backends.golden import (
    Golden,
    GoldenSample,
    Identity,
    Rounding,
    divergence,
    golden_sample,
    logsumexp,
)

if TYPE_CHECKING:
    from enginewright.recipes.recipe import Recipe

__all__ = ["Beginning", "Kept", "tolerance"]

_MOST_TOKENS = 1200  # of a golden sample: a window up to that is crossed, and the file stays small
_INTERPRETED = 24  # tokens of a sample that are interpreted
_COMPUTE = {"auto": 0.03, "f32": 0.002, "f16": 0.02, "bf16": 0.06}
"""`auto` is the cpu engine on another instruction set: up to 0.02 was seen, of activations at the edge between two codes."""
_INTEGERS = 0.02

Floats = npt.NDArray[np.float32]


def tolerance(recipe: Recipe) -> float:
    """How far a device may be from the Program, as a share of the largest logit.

    The Program computes in f32 between its roundings; a device rounds to `compute` there, in an order of its own: some ten
    times the format's step, over a model's layers. Integer activations go the other way where a value lies on the edge
    between two codes, which costs more. A wrong page, mask, scale or layout is off by a tenth and more.
    """
    return _COMPUTE[recipe.compute] + (_INTEGERS if integer_activations(recipe) else 0.0)


def integer_activations(recipe: Recipe) -> bool:
    """Whether some product rounds its activations to integers."""
    chosen = [(m.weight, m.activation) for m in (recipe.linear, recipe.head)]
    chosen += [(override.weight, override.activation) for override in recipe.overrides]
    return any(recipe.activation_of(*formats).startswith("int") for formats in chosen)


class Beginning(NamedTuple):
    """The first tokens of a sample, and the logits [T, vocab] of the judge and of the engine."""

    tokens: list[int]
    judged: Floats
    logits: Floats


class Kept:
    """What is kept of an engine's answers (or its Program's) while they are verified: a witness of `verify`."""

    def __init__(self) -> None:
        self.samples: list[GoldenSample] = []
        self.beginnings: list[Beginning] = []
        self.largest = 0.0
        self._loss, self._scored = 0.0, 0
        self._divergences: list[float] = []
        self._bits = hashlib.sha256()

    def add(self, tokens: list[int], reference: Floats, logits: Floats) -> None:
        """Take a sample's tokens, and the logits [T, vocab] of the judge and of the Program."""
        tokens = tokens[:_MOST_TOKENS]
        logits = logits[: len(tokens)]
        self._bits.update(np.ascontiguousarray(logits, np.float32).data)
        self.samples.append(golden_sample(tokens, logits))
        self._divergences += [divergence(row, reference[row.row]) for row in self.samples[-1].rows]
        begin = slice(_INTERPRETED)
        self.beginnings.append(Beginning(tokens[begin], reference[begin].copy(), logits[begin].copy()))
        self.largest = float(np.maximum(self.largest, np.abs(logits).max()))
        for row, target in zip(reference, tokens[1:], strict=False):
            wide = row.astype(np.float64)
            self._loss += float(logsumexp(wide[None])[0] - wide[target])
            self._scored += 1

    @property
    def source_perplexity(self) -> float:
        return math.exp(min(self._loss / max(self._scored, 1), 700.0))

    @property
    def rounding(self) -> Rounding | None:
        """How far the judge is from what answered, at the kept rows; None where it is nowhere else."""
        found = Rounding.of(self._divergences)
        return found if found.mean > 0 and math.isfinite(found.worst) else None

    def golden(
        self,
        allowed: float,
        limits: Mapping[str, float],
        identity: Identity | None = None,
        rounding: Rounding | None = None,
    ) -> Golden:
        """The goldens, with what a deviation may be. `identity`: of what computed them, where it always gives the same bits;
        `rounding`: as Golden has it."""
        return Golden(
            tuple(self.samples),
            self.largest,
            allowed,
            self.source_perplexity,
            limits.get("max_perplexity_ratio"),
            None if identity is None else {**identity, "sha256": self._bits.hexdigest()},
            rounding,
        )
