"""Golden outputs: what an engine must answer, small enough to travel with it, for any backend.

A file golden.json holds sequences of tokens (teacher forcing) and, for chosen rows, the ids and values of the best logits and
the log-sum-exp of the whole row, as the final Program computes them; and the source model's perplexity on all rows. An engine
that could not run where it was built is held to them the first time it is loaded on a device that can.

golden_check.py holds an engine to them. Neither torch nor a backend's library is imported here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.recipes.errors import ArtifactError

__all__ = [
    "GOLDEN",
    "Golden",
    "GoldenRow",
    "GoldenSample",
    "Identity",
    "Rounding",
    "divergence",
    "golden_sample",
    "logsumexp",
    "read_golden",
    "write_golden",
]

GOLDEN = "golden.json"
_FORMAT = 1
_BEST = 6  # logits of a row that are kept
_ROWS = 9  # rows of a sample that are kept: the first, the last, and some between
_DIGITS = 6  # significant digits of a kept value: far below any tolerance
_OF_ROUNDING = 2.0  # two runs that round apart diverge by the sum of what each rounding costs

Identity = dict[str, str]
"""What decides an engine's bits beside its own files: `isa` and `version` (of enginewright)."""


@dataclass(frozen=True)
class GoldenRow:
    """What must come out after token `row`: the best logits (`ids`, `values`, best first) and the row's log-sum-exp."""

    row: int
    ids: tuple[int, ...]
    values: tuple[float, ...]
    logsumexp: float


@dataclass(frozen=True)
class GoldenSample:
    tokens: tuple[int, ...]
    rows: tuple[GoldenRow, ...]


@dataclass(frozen=True)
class Rounding:
    """What rounding costs: the divergence of a source's answers from its Program's, nats, the mean of rows and the worst row.

    Two runs of one model with integer activations that round in different orders stand about as far from each other as either
    from the source: no tolerance on a logit can hold them.
    """

    mean: float
    worst: float

    @classmethod
    def of(cls, divergences: Sequence[float]) -> Rounding:
        return cls(float(np.mean(divergences)), float(np.max(divergences)))

    def explains(self, divergences: Sequence[float]) -> bool:
        """Whether rows diverge by no more than twice that, in the mean and each."""
        found = Rounding.of(divergences)
        return found.mean <= _OF_ROUNDING * self.mean and found.worst <= _OF_ROUNDING * self.worst


@dataclass(frozen=True)
class Golden:
    """All samples, and what a deviation may be.

    `largest`: the largest magnitude among the Program's logits. `tolerance`: how far a kept logit or log-sum-exp may be off,
    as a share of it; one row in twenty may be off by three times that. `source_perplexity`: the source model's, on every row of
    every sample. `max_perplexity_ratio`: the engine's over it, by the recipe; None where the recipe has no such limit.
    `bits`: what computed the goldens (`Identity`) and the sha256 over the float32 logits of all samples, one after the other;
    where the same computes again, they must be equal.
    None for a backend whose bits depend on how it is asked. `rounding`: where activations are integers, how far the source's
    answers stand from the Program's at the kept rows; an engine beyond `tolerance` is good where that explains it. None:
    `tolerance` decides.
    """

    samples: tuple[GoldenSample, ...]
    largest: float
    tolerance: float
    source_perplexity: float
    max_perplexity_ratio: float | None = None
    bits: dict[str, str] | None = None
    rounding: Rounding | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many samples, tokens and kept rows there are."""
        return {
            "samples": len(self.samples),
            "tokens": sum(len(sample.tokens) for sample in self.samples),
            "rows": sum(len(sample.rows) for sample in self.samples),
        }


def golden_sample(
    tokens: Sequence[int], logits: npt.NDArray[np.float32], every: bool = False
) -> GoldenSample:
    """Keep what is needed of a sample's logits [T, vocab]: of some rows, or of `every` one."""
    count = len(tokens)
    kept = sorted(
        {round(place) for place in np.linspace(0, count - 1, count if every else min(_ROWS, count))}
    )
    rows = []
    for row in kept:
        values = logits[row].astype(np.float64)
        best = np.argsort(-values, kind="stable")[:_BEST]
        rows.append(
            GoldenRow(
                int(row),
                tuple(int(i) for i in best),
                tuple(_short(values[i]) for i in best),
                _short(logsumexp(values[None])[0]),
            )
        )
    return GoldenSample(tuple(int(token) for token in tokens), tuple(rows))


def divergence(row: GoldenRow, logits: npt.NDArray[np.floating[Any]]) -> float:
    """The Kullback-Leibler divergence, in nats, of `logits` [vocab] from a kept row: over its best tokens, the rest as one."""
    wide = logits.astype(np.float64)
    log_p = np.asarray(row.values) - row.logsumexp
    log_q = wide[list(row.ids)] - logsumexp(wide[None])[0]
    others_p, others_q = (max(1.0 - float(np.exp(best).sum()), 1e-12) for best in (log_p, log_q))
    found = float((np.exp(log_p) * (log_p - log_q)).sum()) + others_p * math.log(others_p / others_q)
    return max(found, 0.0)


def write_golden(golden: Golden, directory: Path) -> str:
    """Write golden.json into `directory`, without blanks, the same bytes for the same values; returns its name."""
    value = {"format": _FORMAT, **asdict(golden)}
    value["samples"] = [
        {
            "tokens": list(sample.tokens),
            "rows": [[row.row, list(row.ids), list(row.values), row.logsumexp] for row in sample.rows],
        }
        for sample in golden.samples
    ]
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    (directory / GOLDEN).write_text(text + "\n", encoding="utf-8")
    return GOLDEN


def read_golden(path: Path) -> Golden:
    """Read a golden.json. Raises ArtifactError where it is damaged."""
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        samples = tuple(_read_sample(entry) for entry in value["samples"])
        limit = value["max_perplexity_ratio"]
        golden = Golden(
            samples,
            _positive(value["largest"]),
            _positive(value["tolerance"]),
            _positive(value["source_perplexity"]),
            None if limit is None else _positive(limit),
            _read_bits(value["bits"]),
            _read_rounding(value.get("rounding")),
        )
        if not samples:
            raise ValueError("no samples")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ArtifactError(
            f"the engine's golden outputs cannot be read: {error}",
            found=str(path),
            action="copy the engine again, or build it again with `optimize`",
        ) from error
    return golden


def _read_rounding(value: Any) -> Rounding | None:
    return None if value is None else Rounding(_positive(value["mean"]), _positive(value["worst"]))


def _read_bits(value: Any) -> dict[str, str] | None:
    known = isinstance(value, dict) and "sha256" in value and all(isinstance(v, str) for v in value.values())
    if value is not None and not known:
        raise ValueError(f"bits {value!r}")
    return value


def _read_sample(entry: dict[str, Any]) -> GoldenSample:
    tokens = tuple(int(token) for token in entry["tokens"])
    rows = []
    for row, ids, values, logsumexp in entry["rows"]:
        if not 0 <= row < len(tokens) or not ids or len(ids) != len(values):
            raise ValueError(f"row {row} of a sample of {len(tokens)} tokens")
        rows.append(GoldenRow(int(row), tuple(map(int, ids)), tuple(map(float, values)), float(logsumexp)))
    if not rows:
        raise ValueError("a sample without rows")
    return GoldenSample(tokens, tuple(rows))


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is no positive number")
    return number


def logsumexp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Over the last axis."""
    most = x.max(-1)
    total: npt.NDArray[np.float64] = most + np.log(np.exp(x - most[..., None]).sum(-1))
    return total


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
