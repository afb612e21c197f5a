"""Holding an engine to its golden outputs (golden.py).

It is asked in three ways, each of which takes other kernels or other page arithmetic: all samples together in chunks (prefill at
offsets, ragged batches), all together one token a step (decode in batches of shrinking size), and each alone whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.golden import Golden, GoldenSample, Identity, divergence, logsumexp
from enginewright.recipes.errors import ArtifactError

__all__ = ["GoldenReport", "beyond_tolerance", "check_golden"]

_FAR = 3.0  # tolerances that the rare row may be off
_RARE = 1 / 20  # of the rows
_CHUNK = 13  # tokens of a sample in a step of the first way: never a whole number of pages

Logits = Callable[[Sequence[Sequence[int]], "int | None"], "list[npt.NDArray[np.float32]]"]
"""As `Engine.logits`: (sequences, chunk size) -> float32 [T, vocab] of each."""


@dataclass
class GoldenReport:
    """What an engine's answers were beside its goldens.

    `logit_error`: the largest difference of a kept logit or log-sum-exp, as a share of the largest golden logit. `divergence`:
    the mean divergence from the kept rows, in nats, in the way of asking where it is largest. `top1`: share of rows whose best
    token agrees; a row whose best two golden logits are closer than twice the tolerance is a tie, and agrees.
    `perplexity_ratio`: over the source model's. `same_bits`: whether every logit was the golden one, where that is demanded.
    `failures`: what left its limit, in words; none means that the engine may serve.
    """

    logit_error: float = 0.0
    divergence: float = 0.0
    top1: float = 1.0
    perplexity_ratio: float = 0.0
    rows: int = 0
    same_bits: bool | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None for a figure that is not finite."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }

    def __str__(self) -> str:
        return (
            f"logits off by {self.logit_error:.3g} of the largest, top-1 {self.top1:.1%} of {self.rows} rows, "
            f"perplexity ratio {self.perplexity_ratio:.4f}"
        )


def check_golden(
    golden: Golden, logits: Logits, vocab_size: int, identity: Identity | None = None
) -> GoldenReport:
    """Run the samples in the three ways and hold every answer to the goldens: bit for bit where `identity`, of what computes
    now, is that of the goldens.

    Raises ArtifactError where the goldens name tokens that the engine does not have.
    """
    ids = {token for s in golden.samples for token in (*s.tokens, *(i for row in s.rows for i in row.ids))}
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ArtifactError(
            "the golden outputs are another model's",
            found=f"token ids {min(ids)} to {max(ids)}",
            expected=f"0 to {vocab_size - 1}",
            action="build the engine again with `optimize`",
        )
    tokens = [list(sample.tokens) for sample in golden.samples]
    report = GoldenReport()
    ways: list[tuple[str, Callable[[], list[npt.NDArray[np.float32]]]]] = [
        ("together in chunks", lambda: logits(tokens, _CHUNK)),
        ("together token by token", lambda: logits(tokens, 1)),
        ("each alone", lambda: [logits([sample], None)[0] for sample in tokens]),
    ]
    demanded = None
    if golden.bits is not None and identity is not None and {**golden.bits, **identity} == golden.bits:
        demanded = golden.bits["sha256"]
    differing = 0
    for way, run in ways:
        held = _Way(golden)
        bits = hashlib.sha256()
        for sample, found in zip(golden.samples, run(), strict=True):
            held.add(sample, found)
            bits.update(np.ascontiguousarray(found, np.float32).data)
        if demanded is not None:
            same = bits.hexdigest() == demanded
            report.same_bits = same and report.same_bits is not False
            report.failures += [] if same else [f"{way}: logits are not the golden ones, bit for bit"]
        report.logit_error = float(np.maximum(report.logit_error, held.error))
        report.divergence = float(np.maximum(report.divergence, held.divergence))
        report.perplexity_ratio = float(np.maximum(report.perplexity_ratio, held.ratio))
        report.rows += held.rows
        differing += held.differing
        report.failures += [f"{way}: {failure}" for failure in held.failures()]
    report.top1 = 1.0 - differing / max(report.rows, 1)
    return report


class _Way:
    """What one way of asking gave."""

    def __init__(self, golden: Golden) -> None:
        self._golden = golden
        self._errors: list[float] = []  # of each kept row
        self._differ: list[float] = []  # of those with another best token
        self._divergences: list[float] = []
        self._finite = True
        self._loss = 0.0
        self._scored = 0

    def add(self, sample: GoldenSample, found: npt.NDArray[np.float32]) -> None:
        """Hold one sample's logits [T, vocab] to what is kept of it."""
        golden = self._golden
        self._finite = self._finite and bool(np.isfinite(found).all())
        with np.errstate(invalid="ignore", over="ignore"):
            for row in sample.rows:
                values = found[row.row].astype(np.float64)
                off = np.abs(values[list(row.ids)] - row.values).max()
                off = np.maximum(off, abs(logsumexp(values[None])[0] - row.logsumexp))
                self._errors.append(float(off / golden.largest))
                self._divergences.append(divergence(row, values))
                tie = len(row.values) > 1 and (
                    row.values[0] - row.values[1] < 2 * golden.tolerance * golden.largest
                )
                if not tie and int(values.argmax()) != row.ids[0]:
                    self._differ.append(self._errors[-1])
            targets = np.asarray(sample.tokens[1:], np.int64)
            for place, target in enumerate(targets):
                values = found[place].astype(np.float64)
                self._loss += float(logsumexp(values[None])[0] - values[target])
        self._scored += len(targets)

    @property
    def differing(self) -> int:
        return len(self._differ)

    @property
    def rows(self) -> int:
        return len(self._errors)

    @property
    def error(self) -> float:
        return float(np.max(self._errors, initial=0.0))

    @property
    def divergence(self) -> float:
        return float(np.mean(self._divergences)) if self._divergences else 0.0

    @property
    def ratio(self) -> float:
        """The engine's perplexity over the source model's; 1 where nothing could be scored."""
        if not self._scored:
            return 1.0
        loss = self._loss / self._scored
        return math.exp(min(loss, 700.0)) / self._golden.source_perplexity if loss == loss else math.nan

    @property
    def _rounds_otherwise(self) -> bool:
        """Whether what differs is no more than rounding in another order makes of it."""
        rounding = self._golden.rounding
        return rounding is not None and rounding.explains(self._divergences)

    def failures(self) -> list[str]:
        golden, found = self._golden, []
        if not self._finite:
            found.append("logits are not finite")
        if not self._rounds_otherwise:
            if beyond := beyond_tolerance(self._errors, golden.tolerance):
                found.append(beyond)
            few = self.differing <= _RARE * self.rows
            if not few or not all(error <= _FAR * golden.tolerance for error in self._differ):
                found.append(f"the best token differs in {self.differing} of {self.rows} rows")
        limit = golden.max_perplexity_ratio
        if limit is not None and not self.ratio <= limit:
            found.append(f"the perplexity ratio is {self.ratio:.4g}, the limit is {limit:g}")
        return found


def beyond_tolerance(errors: Sequence[float], tolerance: float) -> str:
    """What of rows' errors rounding cannot explain, in words; empty where it can.

    Rounding has a tail: where scores are nearly equal, a row moves several times as far as others do.
    """
    worst = float(np.max(errors, initial=0.0))
    count = sum(not error <= tolerance for error in errors)
    told = f"logits are off by {worst:.3g} of the largest, the limit is {tolerance:g}"
    if not worst <= _FAR * tolerance:
        return told
    if count > _RARE * len(errors):
        return f"{told} ({count} of {len(errors)} rows are beyond it)"
    return ""
