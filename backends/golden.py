"""Golden outputs: what an engine must answer, small enough to travel with it, for any backend.

A file golden.json holds sequences of tokens (teacher forcing) and, for chosen rows, the ids and values of the best logits and
the log-sum-exp of the whole row, as the final Program computes them; and the source model's perplexity on all rows. An engine
that could not run where it was built is held to them the first time it is loaded on a device that can.

An engine is asked in three ways, each of which takes other kernels or other page arithmetic: all samples together in chunks
(prefill at offsets, ragged batches), all together one token a step (decode in batches of shrinking size), and each alone whole.
Neither torch nor a backend's library is imported here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.recipes.errors import ArtifactError

__all__ = [
    "GOLDEN",
    "Golden",
    "GoldenReport",
    "GoldenRow",
    "GoldenSample",
    "Identity",
    "Rounding",
    "beyond_tolerance",
    "check_golden",
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
_FAR = 3.0  # tolerances that the rare row may be off
_RARE = 1 / 20  # of the rows
_OF_ROUNDING = 2.0  # two runs that round apart diverge by the sum of what each rounding costs
_CHUNK = 13  # tokens of a sample in a step of the first way: never a whole number of pages

Identity = dict[str, str]
"""What decides an engine's bits beside its own files: `isa` and `version` (of enginewright)."""

Logits = Callable[[Sequence[Sequence[int]], "int | None"], "list[npt.NDArray[np.float32]]"]
"""As `Engine.logits`: (sequences, chunk size) -> float32 [T, vocab] of each."""


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


# ------------------------------------------------------------------------------------------------ checking


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


def logsumexp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Over the last axis."""
    most = x.max(-1)
    total: npt.NDArray[np.float64] = most + np.log(np.exp(x - most[..., None]).sum(-1))
    return total


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
