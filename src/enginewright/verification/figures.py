"""What is measured of an engine against its source, over all positions of all samples, and the verdict.

- `logit_error`: the largest absolute difference of a logit, and the same as a share of the largest reference logit;
- `mean_kl`, `p999_kl`: Kullback-Leibler divergence of the engine's next-token distribution from the source's, nats;
- `top1_agreement`: share of positions whose most likely token agrees. Where the recipe bounds the logit error, a position
  whose two best reference logits lie closer than twice that bound is a tie: it is excused, and counted in `ties`. (Twice
  the *measured* error would excuse every difference, since a flip needs no more; so a recipe without a bound excuses none);
- `top5_agreement`: how many of a position's five most likely tokens are among the other's five, as a share;
- `greedy_agreement`: of the tokens that the engine chooses by itself, greedily, the share that the source would choose after the
  same ones; ties as for `top1_agreement`, and where the recipe bounds the logit error nothing else may differ;
- `perplexity_ratio`: the engine's perplexity on the sample text over the source's;
- `bands`: divergence and agreement by position in the sequence. A fault of the second page, of a window's edge or of a chunk
  begins at a position and spares what is before it: a band that stands out from the whole is a failure of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from enginewright.recipes.errors import VerificationError
from enginewright.runtime.first_load import STRUCTURE_ONLY

if TYPE_CHECKING:
    from .bisection import Bisection
    from .greedy import GreedyFigures
    from .stages import StageCheck

__all__ = ["Band", "Figures", "Verification", "band_edges"]

Array = npt.NDArray[Any]

_BLOCK = 64  # positions compared at a time: bounds the float64 temporaries of a large vocabulary
_BEST = 5
_LEAST_IN_BAND = 16  # positions from which a band's mean says something
_BAND_RATIO = 8.0  # a band's median divergence over that of the best before it


@dataclass(frozen=True)
class Band:
    """Positions first … last - 1 of the samples: how many were compared, and how they agree."""

    first: int
    last: int
    positions: int
    mean_kl: float
    median_kl: float
    top1_agreement: float
    max_logit_error: float


@dataclass(frozen=True)
class Verification:
    """Figures of one verification; see the module's docstring for their meaning and units.

    `invariant`: whether the answers were the same however they were scheduled (None: not asked for); `schedules` says it of each
    way. `crosses_window`: whether a sample was longer than the widest window (None: no layer has one). A very wide window over a
    large vocabulary is not crossed, to bound the memory that the logits take. `limits` and `failures` make the verdict.

    `matrices`: ‖Ŵ - W‖ / ‖W‖ of each stored matrix, where the stages were run.

    Where the engine could not run, the figures are the final Program's (structure.py): `golden` counts what is checked at the
    engine's first load, and `interpreted` has the figures of what was lowered, if it could be interpreted.
    """

    samples: int
    tokens: int
    max_logit_error: float
    relative_logit_error: float
    mean_kl: float
    p999_kl: float
    top1_agreement: float
    top5_agreement: float
    ties: int
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    invariant: bool | None
    crosses_window: bool | None
    limits: dict[str, float]
    failures: list[str]
    bands: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    golden: dict[str, Any] | None = None
    interpreted: dict[str, Any] | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)
    matrices: dict[str, float] = field(default_factory=dict)
    greedy_tokens: int = 0
    greedy_agreement: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every figure lies within its limit."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, with the verdict, for the manifest; None for one that is not finite."""
        figures = _finite(asdict(self))
        if self.golden is None:
            del figures["golden"], figures["interpreted"]
        passed = "passed" if self.golden is None else STRUCTURE_ONLY
        return {"verdict": passed if self.passed else "failed", **figures}

    def as_structure_only(
        self, golden: dict[str, Any], interpreted: dict[str, Any] | None, failures: Sequence[str] = ()
    ) -> Verification:
        """The same figures, as those of the Program alone."""
        return replace(self, golden=golden, interpreted=interpreted, failures=[*self.failures, *failures])

    def _action(self) -> str:
        """What a reader can do: a stage that failed is no matter of bits."""
        if all(check["passed"] for check in self.stages):
            return (
                "use a recipe with more bits, loosen a limit with --set verify.…, look at the engine with --allow-unverified, or "
                "run again with --bisect"
            )
        return "run again with --bisect, which names the pass or op, and report the model: rounding alone cannot explain it"

    def raise_if_failed(self, culprit: Bisection | None = None) -> None:
        """Raise VerificationError naming each figure that left its limit, and the culprit where one was looked for."""
        if self.failures:
            told = "" if culprit is None else f"\n{culprit.verdict()}"
            error = VerificationError(
                "verification failed: " + "; ".join(self.failures) + told,
                found=f"KL {self.mean_kl:.4g}, top-1 {self.top1_agreement:.2%}, perplexity ratio {self.perplexity_ratio:.4f}",
                expected=", ".join(f"{name} {value:g}" for name, value in self.limits.items()),
                action=self._action() if culprit is None else None,
            )
            error.bisection = culprit
            raise error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def band_edges(longest: int, windows: Sequence[int]) -> list[int]:
    """Where bands of positions begin, and the end of the last: 0, 16, 32, 64, … and every window's edge below `longest`."""
    edges = {0, longest, *(window for window in windows if 0 < window < longest)}
    edge = 16
    while edge < longest:
        edges.add(edge)
        edge *= 2
    return sorted(edges)


class Figures:
    """Accumulates figures over samples; positions are compared in blocks, in float64."""

    def __init__(self) -> None:
        self.error = 0.0
        self.largest = 0.0
        self.gaps: list[Array] = []  # of the two best reference logits, where the best token differs
        self.scored = 0
        self.loss = 0.0
        self.reference_loss = 0.0
        self.finite = {"source model": True, "engine": True}
        self.places: list[Array] = []  # of each position compared: where it stands in its sample …
        self.kl: list[Array] = []  # … nats
        self.errors: list[Array] = []  # … largest difference of a logit
        self.differs: list[Array] = []  # … whether the best token differs
        self.shared = 0  # of the best five, over all positions

    def add(self, tokens: Sequence[int], reference: Array, logits: Array) -> None:
        """Compare [T, vocab] logits of one sample."""
        targets = np.asarray(tokens[1:], dtype=np.int64)
        for start, p, q in _blocks(reference, logits):
            for name, values in (("source model", p), ("engine", q)):
                self.finite[name] = self.finite[name] and bool(np.isfinite(values).all())
            errors = np.abs(p - q).max(-1)
            # np.maximum keeps a NaN, max does not.
            self.error = float(np.maximum(self.error, errors.max()))
            self.largest = float(np.maximum(self.largest, np.abs(p).max()))
            differs = p.argmax(-1) != q.argmax(-1)
            if differs.any():
                best = np.partition(p[differs], -2, axis=-1)[:, -2:]
                self.gaps.append(best[:, 1] - best[:, 0])
            log_p, log_q = _log_softmax(p), _log_softmax(q)
            self.kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
            self.places.append(np.arange(start, start + len(p)))
            self.errors.append(errors)
            self.differs.append(differs)
            self.shared += _shared_best(p, q)
            wanted = targets[start : start + len(p)]
            rows = np.arange(len(wanted))
            self.reference_loss -= float(log_p[rows, wanted].sum())
            self.loss -= float(log_q[rows, wanted].sum())
            self.scored += len(wanted)

    def bands(self, windows: Sequence[int]) -> list[Band]:
        """The figures by position."""
        places, kl, errors, differs = (
            np.concatenate(part) for part in (self.places, self.kl, self.errors, self.differs)
        )
        edges = band_edges(int(places.max()) + 1, windows)
        found = []
        for first, last in itertools.pairwise(edges):
            inside = (places >= first) & (places < last)
            if inside.any():
                nats = np.maximum(kl[inside], 0.0)
                middle = (float(nats.mean()), float(np.median(nats)))
                top1 = 1.0 - float(differs[inside].mean())
                found.append(Band(first, last, int(inside.sum()), *middle, top1, float(errors[inside].max())))
        return found

    @property
    def reference_perplexity(self) -> float:
        """The reference's own, on all tokens that were scored."""
        return math.exp(min(self.reference_loss / max(self.scored, 1), 700.0))

    def verdict(
        self,
        samples: int,
        limits: dict[str, float],
        *,
        invariant: bool | None = None,
        greedy: GreedyFigures | None = None,
        schedules: Sequence[dict[str, Any]] = (),
        windows: Sequence[int] = (),
        crosses_window: bool | None = None,
        stages: Sequence[StageCheck] = (),
        matrices: Mapping[str, float] | None = None,
    ) -> Verification:
        """Close the account and hold it against the limits."""
        kl = np.maximum(np.concatenate(self.kl), 0.0)
        gaps = np.concatenate(self.gaps) if self.gaps else np.zeros(0)
        ties = int((gaps < 2 * limits.get("max_logit_error", 0.0) * self.largest).sum())
        scored = max(self.scored, 1)
        figures = {
            "max_logit_error": self.error / max(self.largest, 1e-30),
            "max_kl": float(kl.mean()),
            "min_top1": 1.0 - (len(gaps) - ties) / len(kl),
            "max_perplexity_ratio": math.exp(min((self.loss - self.reference_loss) / scored, 700.0)),
        }
        failures = [
            f"the {name} returned logits that are not finite"
            for name, all_are in self.finite.items()
            if not all_are
        ]
        for name, limit in limits.items():
            value = figures[name]
            if not (value >= limit if name.startswith("min_") else value <= limit):
                failures.append(f"{name.split('_', 1)[1]} is {value:.4g}, the limit is {limit:g}")
        bands = self.bands(windows)
        failures += _odd_bands(bands, limits.get("max_kl"))
        if greedy is not None and "max_logit_error" in limits and greedy.agreement < 1:
            missed = greedy.tokens - greedy.agreed - greedy.tied
            failures.append(f"{missed} of {greedy.tokens} greedy tokens are not the source's")
        if invariant is False:
            failures.append("logits depend on how the requests were scheduled")
        failures += [
            f"answers change with {way['name']}: {way['found']}" for way in schedules if not way["same"]
        ]
        failures += [check.failure() for check in stages if not check.passed]
        return Verification(
            samples=samples,
            tokens=len(kl),
            max_logit_error=self.error,
            relative_logit_error=figures["max_logit_error"],
            mean_kl=figures["max_kl"],
            p999_kl=float(np.quantile(kl, 0.999)),
            top1_agreement=figures["min_top1"],
            top5_agreement=self.shared / (_BEST * len(kl)),
            ties=ties,
            reference_perplexity=self.reference_perplexity,
            perplexity=math.exp(min(self.loss / scored, 700.0)),
            perplexity_ratio=figures["max_perplexity_ratio"],
            invariant=invariant,
            crosses_window=crosses_window,
            limits=dict(limits),
            failures=failures,
            bands=[asdict(band) for band in bands],
            schedules=list(schedules),
            stages=[check.to_dict() for check in stages],
            matrices=dict(matrices or {}),
            greedy_tokens=0 if greedy is None else greedy.tokens,
            greedy_agreement=None if greedy is None else greedy.agreement,
        )


def _odd_bands(bands: Sequence[Band], limit: float | None) -> list[str]:
    """Bands that differ from the source far more than one before them, by a tenth of the recipe's limit at least.

    Medians, since a fault that begins at a position is in every one after it, and one unlucky position makes a mean. Only with
    what stands before: text that repeats itself is easy, and gives late positions little to differ in.
    """
    found: list[str] = []
    best: Band | None = None
    for band in bands:
        if limit is None or band.positions < _LEAST_IN_BAND:
            continue
        if best is not None and band.median_kl > max(_BAND_RATIO * best.median_kl, limit / 10):
            found.append(
                f"positions {band.first} to {band.last - 1} have a median KL of {band.median_kl:.4g}, "
                f"those from {best.first} to {best.last - 1} one of {best.median_kl:.4g}"
            )
        if best is None or band.median_kl < best.median_kl:
            best = band
    return found


def _shared_best(p: Array, q: Array) -> int:
    """How many of each row's five best are among the other's, over all rows."""
    best = min(_BEST, p.shape[-1])
    tops = [np.argpartition(values, -best, axis=-1)[:, -best:] for values in (p, q)]
    shared = (tops[0][:, :, None] == tops[1][:, None, :]).any(-1).sum()
    return int(shared) + len(p) * (_BEST - best)


def _blocks(reference: Array, logits: Array) -> Iterator[tuple[int, Array, Array]]:
    if reference.shape != logits.shape:
        raise VerificationError(
            "the engine and the source model disagree on the shape of the logits",
            found=logits.shape,
            expected=reference.shape,
        )
    for start in range(0, len(reference), _BLOCK):
        stop = start + _BLOCK
        yield start, reference[start:stop].astype(np.float64), logits[start:stop].astype(np.float64)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    exact: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return exact
